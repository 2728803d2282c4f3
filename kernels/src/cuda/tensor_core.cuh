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

template <class T> constexpr bool IS_F16 = false;
template <> constexpr bool IS_F16<f16> = true;

// Two neighbors in one register, the first in its lower half.
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

// Four matrices [8, 8] from shared memory; lane 8m + i gives the address of row i of matrix m, aligned to 16 bytes, and
// each lane gets columns 2t, 2t + 1 of row g of each.
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

// Products by four warps together, 16 rows of the result each, whose right operand, and optionally the left one, are in
// shared memory: rows of 128 bytes, with chunk c of 16 bytes at place c ^ (row mod 8), from addresses that are
// multiples of 1024.

// Describes a matrix of 64 columns, or of more if the next 64 are `leading` bytes further.
typedef u64 Described;
__device__ inline Described describe_matrix(const void* first, unsigned leading) {
    constexpr u64 EIGHT_ROWS = 1024 >> 4, BY_128_BYTES = 1ull << 62;
    return shared_address(first) >> 4 | static_cast<u64>(leading >> 4) << 16 | EIGHT_ROWS << 32 | BY_128_BYTES;
}
// The part of the matrix that begins `bytes` further.
__device__ inline Described advance(Described matrix, unsigned bytes) { return matrix + (bytes >> 4); }

#define RESULTS_16(i) \
    "+f"(result[i][0]), "+f"(result[i][1]), "+f"(result[i][2]), "+f"(result[i][3]), "+f"(result[i + 1][0]), "+f"(result[i + 1][1]), \
        "+f"(result[i + 1][2]), "+f"(result[i + 1][3]), "+f"(result[i + 2][0]), "+f"(result[i + 2][1]), "+f"(result[i + 2][2]),     \
        "+f"(result[i + 2][3]), "+f"(result[i + 3][0]), "+f"(result[i + 3][1]), "+f"(result[i + 3][2]), "+f"(result[i + 3][3])
#define NAMES_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_64 NAMES_32 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_128                                                                                                           \
    NAMES_64 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, "  \
             "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
// The instruction for results of n columns; `left`, `right`, `adds` and `flags` name its other operands.
#define PRODUCT(n, type, left, right, adds, flags)                                                                              \
    "{\n.reg .pred adds;\nsetp.ne.b32 adds, " adds ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" NAMES_##n \
    "}, " left ", " right ", adds, 1, 1, " flags ";\n}\n"
#define PRODUCT_OF_REGISTERS(n, type, a0, a1, a2, a3, b, adds, flags, ...)                                                        \
    asm volatile(PRODUCT(n, type, "{" a0 ", " a1 ", " a2 ", " a3 "}", b, adds, flags)                                             \
                 : __VA_ARGS__                                                                                                    \
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"(static_cast<int>(accumulates)), "n"(TRANSPOSED))
#define PRODUCT_OF_MEMORY(n, type, a, b, add, ...) \
    asm volatile(PRODUCT(n, type, a, b, add, "0, 0") : __VA_ARGS__ : "l"(left), "l"(right), "r"(static_cast<int>(accumulates)))
#define PRODUCTS(type)                                                                                                          \
    if constexpr (N == 4) {                                                                                                     \
        PRODUCT_OF_REGISTERS(32, type, "%16", "%17", "%18", "%19", "%20", "%21", "%22", RESULTS_16(0));                          \
    } else if constexpr (N == 8) {                                                                                              \
        PRODUCT_OF_REGISTERS(64, type, "%32", "%33", "%34", "%35", "%36", "%37", "%38", RESULTS_16(0), RESULTS_16(4));           \
    } else {                                                                                                                    \
        PRODUCT_OF_REGISTERS(128, type, "%64", "%65", "%66", "%67", "%68", "%69", "%70", RESULTS_16(0), RESULTS_16(4),           \
                             RESULTS_16(8), RESULTS_16(12));                                                                    \
    }

// Starts computing result = left · right, or adding it, for 16 rows of the depth: rows of `right`, which are rows of
// the matrix (`TRANSPOSED` in the instruction's terms), or 16 of its columns.
template <class T, bool TRANSPOSED, int N>
__device__ inline void warpgroup_multiply(float (&result)[N][4], const unsigned (&left)[4], Described right, bool accumulates) {
    static_assert(N == 4 || N == 8 || N == 16, "the widths in use");
    if constexpr (IS_F16<T>) {
        PRODUCTS("f16")
    } else {
        PRODUCTS("bf16")
    }
}

// Like this with 64 rows and 16 columns of a left operand in shared memory, and 16 columns of the right one.
template <class T, int N> __device__ inline void warpgroup_multiply(float (&result)[N][4], Described left, Described right, bool accumulates) {
    static_assert(N == 4, "the width in use");
    if constexpr (IS_F16<T>) {
        PRODUCT_OF_MEMORY(32, "f16", "%16", "%17", "%18", RESULTS_16(0));
    } else {
        PRODUCT_OF_MEMORY(32, "bf16", "%16", "%17", "%18", RESULTS_16(0));
    }
}

// Keeps the compiler from moving uses of the results over the instructions around this.
template <int N> __device__ inline void pin(float (&result)[N][4]) {
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(result[j][i])::"memory");
}
// Before the first product that uses these results, after other instructions have.
template <int N> __device__ inline void begin_products(float (&result)[N][4]) {
    pin(result);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most LEFT committed groups are pending, the one with these results not among them.
template <unsigned LEFT, int N> __device__ inline void wait_for_products(float (&result)[N][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
    pin(result);
}
// Makes this thread's copies visible to products, after a barrier.
__device__ inline void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

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

struct Described {
    size_t first;
    unsigned leading;
};
inline Described describe_matrix(const void* first, unsigned leading) { return {reinterpret_cast<size_t>(first), leading}; }
inline Described advance(Described matrix, size_t bytes) { return {matrix.first + bytes, matrix.leading}; }

// Two elements at these offsets in bytes, as the instruction addresses them.
inline unsigned shared_pair(Described matrix, size_t first, size_t second) {
    const auto read = [&](size_t offset) {
        const size_t address = matrix.first + offset;
        return *reinterpret_cast<const unsigned short*>(address ^ (address >> 7 & 7) << 4);
    };
    return read(first) | static_cast<unsigned>(read(second)) << 16;
}

template <class T, bool TRANSPOSED, int N>
void warpgroup_multiply(float (&result)[N][4], const unsigned (&left)[4], Described right, bool adds, int line = __builtin_LINE()) {
    const unsigned lane = threadIdx.x % WARP, k = lane % 4 * 2;
    for (int j = 0; j < N; ++j) {
        const unsigned column = 8 * j + lane / 4;
        const auto offset = [&](unsigned row) {
            return TRANSPOSED ? column / 64 * right.leading + row * 128 + column % 64 * 2 : column * 128 + row * 2;
        };
        for (int i = 0; i < 4 && !adds; ++i) result[j][i] = 0.0f;
        multiply_add<T>(result[j], left, shared_pair(right, offset(k), offset(k + 1)), shared_pair(right, offset(k + 8), offset(k + 9)),
                        line);
    }
}
template <class T, int N>
void warpgroup_multiply(float (&result)[N][4], Described left, Described right, bool adds, int line = __builtin_LINE()) {
    const unsigned lane = threadIdx.x % WARP, row = threadIdx.x / WARP * 16 + lane / 4;
    unsigned fragments[4];
    for (unsigned i = 0; i < 4; ++i) {
        const size_t first = (row + i % 2 * 8) * 128 + (i / 2 * 8 + lane % 4 * 2) * 2;
        fragments[i] = shared_pair(left, first, first + 2);
    }
    warpgroup_multiply<T, false>(result, fragments, right, adds, line);
}
template <int N> void begin_products(float (&)[N][4]) {}
inline void commit_products() {}
template <unsigned LEFT, int N> void wait_for_products(float (&)[N][4]) {}
inline void show_to_products() {}

#endif
