// The parts of CUDA's device side that kernels use, on a CPU: tests run this crate's and candle's .cu files with it.
//
// The threads of a block are fibers on one thread of the host. A fiber runs until it meets a barrier or an exchange
// within its warp; meeting a different one than its neighbors, or none, is an error that names both lines. Blocks run
// one after the other. The order of fibers and blocks, and how far a warp runs before the next, can be varied to expose
// results that depend on it. Every access to global memory is checked against the buffers that the launch names.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define __device__
#define __forceinline__ inline
#define CHECK_READ(pointer, bytes) emulator::check(pointer, bytes, false)
#define CHECK_WRITE(pointer, bytes) emulator::check(pointer, bytes, true)
#define SHARED(type, name) type* const name = reinterpret_cast<type*>(emulator::shared())
#define REGISTER(symbol, threads, Args, ...)                                                            \
    static const emulator::Entry entry_##symbol(#symbol, threads, sizeof(Args), [](const void* arguments) { \
        __VA_ARGS__(*static_cast<const Args*>(arguments));                                           \
    });
// The symbol may be a macro.
#define ENTRY(...) REGISTER(__VA_ARGS__)
#define ENTRY_OF_BLOCKS(symbol, threads, blocks, ...) REGISTER(symbol, threads, __VA_ARGS__)
#define UP_TO(threads) emulator::Threads(threads, true)

namespace emulator {

struct Index {
    unsigned x, y, z;
};

// The threads of a block in a row, or the most; 0 for blocks of any shape.
struct Threads {
    unsigned count;
    bool or_fewer;
    Threads(unsigned count, bool or_fewer = false) : count(count), or_fewer(or_fewer) {}
};

// A kernel that can be launched by name.
struct Entry {
    const char* name;
    Threads threads;
    size_t argument_bytes;
    void (*function)(const void*);
    const Entry* next;
    Entry(const char* name, Threads threads, size_t argument_bytes, void (*function)(const void*));
};

enum class Exchange { Xor, Down, Index, Ballot, Sync, Matrices, MatricesTransposed, MultiplyF16, MultiplyBf16 };

void check(const void* pointer, size_t bytes, bool write);
unsigned char* shared();
// Ends the launch with this message.
[[noreturn]] void refuse(const char* what, int line);
void block_barrier(int line);
// Returns the lane's `value` after the exchange; `argument` selects the source lane.
uint64_t exchange(Exchange kind, unsigned mask, uint64_t value, unsigned argument, int line);

template <class T> T exchange_value(Exchange kind, unsigned mask, T value, unsigned argument, int line) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "exchanges move at most 8 bytes");
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    bits = exchange(kind, mask, bits, argument, line);
    std::memcpy(&value, &bits, sizeof(T));
    return value;
}

// A lane's input of the load of four matrices, the row whose address it gives, and its output.
struct MatrixRow {
    uint16_t row[8];
    unsigned* fragments;
};
// A lane's operands of a matmul, and its accumulators, which receive the result.
struct Multiplicands {
    const unsigned *a, *b;
    float* accumulators;
};

// Loads for the whole warp: each lane gives the address of one row of 16 bytes in shared memory, which is read at once,
// and gets its fragments of the four matrices.
void load_matrices(Exchange kind, const void* row, unsigned (&fragments)[4], int line);

// Copies one thread's bytes to shared memory. The target is poison until the thread has waited for its group.
void copy_async(void* target, const void* source, size_t bytes, bool inside, int line);
void commit_copies();
void wait_for_copies(size_t groups_left);

}  // namespace emulator

extern emulator::Index threadIdx, blockIdx, blockDim, gridDim;

inline void __syncthreads(int line = __builtin_LINE()) { emulator::block_barrier(line); }
inline void __syncwarp(unsigned mask = 0xffffffffu, int line = __builtin_LINE()) {
    emulator::exchange(emulator::Exchange::Sync, mask, 0, 0, line);
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, unsigned lanes, int line = __builtin_LINE()) {
    return emulator::exchange_value(emulator::Exchange::Xor, mask, value, lanes, line);
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int line = __builtin_LINE()) {
    return emulator::exchange_value(emulator::Exchange::Down, mask, value, lanes, line);
}
template <class T> T __shfl_sync(unsigned mask, T value, unsigned lane, int line = __builtin_LINE()) {
    return emulator::exchange_value(emulator::Exchange::Index, mask, value, lane, line);
}
inline unsigned __ballot_sync(unsigned mask, bool predicate, int line = __builtin_LINE()) {
    return static_cast<unsigned>(emulator::exchange(emulator::Exchange::Ballot, mask, predicate, 0, line));
}

// Fibers do not run at the same time, so an atomic operation is a plain one.
template <class T> T atomicAdd(T* address, T value) {
    const T old = *address;
    *address += value;
    return old;
}

inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}
inline float __fmul_rn(float a, float b) { return a * b; }
// Without subnormal numbers, as common.cuh's instructions.
inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
inline float fast_exp2(float x) { return flushed(std::exp2(flushed(x))); }
inline float fast_reciprocal(float x) { return flushed(1.0f / flushed(x)); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
using std::isfinite;
template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }

namespace emulator {
struct Half {
    uint16_t bits;
};
struct Bfloat16 {
    uint16_t bits;
};
}  // namespace emulator
#ifndef EMULATOR_TYPES_WITH_OPERATORS
typedef emulator::Half __half;
typedef emulator::Bfloat16 __nv_bfloat16;
#endif

inline float __half2float(emulator::Half x) {
    const unsigned sign = (x.bits & 0x8000u) << 16, exponent = x.bits >> 10 & 0x1f, mantissa = x.bits & 0x3ff;
    if (exponent == 0x1f) return __uint_as_float(sign | 0x7f800000u | mantissa << 13);
    if (exponent == 0) return std::copysign(static_cast<float>(mantissa) * 0x1p-24f, __uint_as_float(sign));
    return __uint_as_float(sign | (exponent + 112) << 23 | mantissa << 13);
}
// To nearest even, as the hardware's conversion: subnormal results are exact to the last bit, NaN stays NaN.
inline emulator::Half __float2half_rn(float value) {
    const unsigned bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
    const uint16_t sign = bits >> 16 & 0x8000u;
    if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7fff)};
    if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00)};
    // Below 2^-14 the last place is 2^-24, above it moves with the exponent.
    const unsigned rounded = magnitude < 0x38800000u ? static_cast<unsigned>(std::nearbyint(__uint_as_float(magnitude) * 0x1p24f))
                                                     : ((magnitude + 0xfffu + (magnitude >> 13 & 1)) >> 13) - (112 << 10);
    return {static_cast<uint16_t>(sign | rounded)};
}
inline float __bfloat162float(emulator::Bfloat16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
inline emulator::Bfloat16 __float2bfloat16_rn(float value) {
    const unsigned bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
    return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};
}
