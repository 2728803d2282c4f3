// Tensor cores: products of small matrices by a warp, and the copies that feed them (compute capability 8.0 and later).
//
// The registers of a warp's 32 threads hold a matrix, one fragment each. The PTX ISA defines the layout for each
// instruction; tests compare the emulator's layout with separate tables. All lanes must call these functions together.
// With g = lane / 4 and t = lane mod 4, a lane holds of
//   left operands [16, 16]   columns 2t, 2t + 1 of row g, of row g + 8, then columns 2t + 8, 2t + 9 of the same rows,
//   right operands [16, 8]   rows 2t, 2t + 1, then 2t + 8, 2t + 9, of column g,
//   results [16, 8]          columns 2t, 2t + 1 of row g, then of row g + 8.
// So two adjacent results, rounded, are a left operand.
#pragma once

#include "common.cuh"

// Two neighbours in one register, the first in its lower half.
template <class T> __device__ unsigned pack_pair(float first, float second);

#ifdef __CUDACC__

template <> __device__ inline unsigned pack_pair<f16>(float first, float second) {
    const __half2 pair = __floats2half2_rn(first, second);
    return *reinterpret_cast<const unsigned*>(&pair);
}
template <> __device__ inline unsigned pack_pair<bf16>(float first, float second) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const unsigned*>(&pair);
}

__device__ inline unsigned shared_address(const void* pointer) { return static_cast<unsigned>(__cvta_generic_to_shared(pointer)); }

// result += left · right, with exact products and FP32 sums.
template <class T> __device__ void multiply_add(float (&result)[4], const unsigned (&left)[4], unsigned right0, unsigned right1);
#define MULTIPLY_ADD(T, type)                                                                                              \
    template <>                                                                                                            \
    __device__ inline void multiply_add<T>(float(&result)[4], const unsigned(&left)[4], unsigned right0, unsigned right1) { \
        asm volatile(                                                                                                      \
            "mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                                         \
            ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                         \
            : "+f"(result[0]), "+f"(result[1]), "+f"(result[2]), "+f"(result[3])                                           \
            : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));                           \
    }
MULTIPLY_ADD(f16, "f16")
MULTIPLY_ADD(bf16, "bf16")

// Four matrices [8, 8] from shared memory; lane 8m + i gives the address of row i of matrix m, aligned to 16 bytes, and each
// lane gets columns 2t, 2t + 1 of row g of each.
__device__ inline void load_matrices(unsigned (&fragments)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
                 : "r"(shared_address(row))
                 : "memory");
}
// Like `load_matrices`, but loads the transposes.
__device__ inline void load_transposed(unsigned (&fragments)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Starts copying BYTES from global to shared memory, both aligned to BYTES; if not `inside`, writes zeros without
// reading `source`.
template <unsigned BYTES> __device__ inline void copy_async(void* target, const void* source, bool inside) {
    static_assert(BYTES == 4 || BYTES == 16, "the sizes in use");
    if constexpr (BYTES == 16) {
        // Bypass the L1 cache.
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(target)), "l"(source), "r"(inside ? 16 : 0)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(target)), "l"(source), "r"(inside ? 4 : 0)
                     : "memory");
    }
}
// Commits the copies that this thread has started as a group.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most LEFT groups of this thread are pending. Copies of other threads are visible after a barrier.
template <unsigned LEFT> __device__ inline void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

#else

#include <type_traits>

template <class T> unsigned pack_pair(float first, float second) {
    return from_float<T>(first).bits | static_cast<unsigned>(from_float<T>(second).bits) << 16;
}

template <class T>
void multiply_add(float (&result)[4], const unsigned (&left)[4], unsigned right0, unsigned right1, int line = __builtin_LINE()) {
    const unsigned right[2] = {right0, right1};
    const emulator::Multiplicands operands = {left, right, result};
    emulator::exchange(std::is_same<T, f16>::value ? emulator::Exchange::MultiplyF16 : emulator::Exchange::MultiplyBf16, EVERY_LANE,
                       reinterpret_cast<uint64_t>(&operands), 0, line);
}
inline void load_matrices(unsigned (&fragments)[4], const void* row, int line = __builtin_LINE()) {
    emulator::load_matrices(emulator::Exchange::Matrices, row, fragments, line);
}
inline void load_transposed(unsigned (&fragments)[4], const void* row, int line = __builtin_LINE()) {
    emulator::load_matrices(emulator::Exchange::MatricesTransposed, row, fragments, line);
}

template <unsigned BYTES> void copy_async(void* target, const void* source, bool inside, int line = __builtin_LINE()) {
    emulator::copy_async(target, source, BYTES, inside, line);
}
inline void commit_copies() { emulator::commit_copies(); }
template <unsigned LEFT> void wait_for_copies() { emulator::wait_for_copies(LEFT); }

#endif
