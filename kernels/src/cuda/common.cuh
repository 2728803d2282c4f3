// Shared parts of the engine's CUDA kernels: entry points, memory accesses, reductions.
//
// A kernel takes one struct of arguments, mirrored by a `#[repr(C)]` struct in Rust. Every access to global memory goes
// through `load` and `store`, so that the emulator, which runs the same files on a CPU, can check it. Values
// are FP32 from a load to a store, and a store rounds once, to nearest even.
#pragma once

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define CHECK_READ(pointer, bytes)
#define CHECK_WRITE(pointer, bytes)
// The block's shared memory; the host passes its size with the launch.
#define SHARED(type, name)                                          \
    extern __shared__ __align__(1024) unsigned char shared_bytes[]; \
    type* const name = reinterpret_cast<type*>(shared_bytes)
// The kernel `symbol` with blocks of `threads`; each thread calls `function`. A multiprocessor has registers for
// `blocks`. Without that number the compiler uses fewer registers than with 1.
#define KERNEL(symbol, bounds, Args, ...)                                                              \
    extern "C" __global__ void __launch_bounds__ bounds symbol(const __grid_constant__ Args arguments) { \
        __VA_ARGS__(arguments);                                                                         \
    }
// The threads of an entry that also takes smaller blocks.
#define UP_TO(threads) threads
#define ENTRY(symbol, threads, Args, ...) KERNEL(symbol, (threads), Args, __VA_ARGS__)
#define ENTRY_OF_BLOCKS(symbol, threads, blocks, Args, ...) KERNEL(symbol, (threads, blocks), Args, __VA_ARGS__)
// Approximations by one instruction, to about two units of FP32's last place. Subnormal arguments and results are zero.
__device__ inline float fast_exp2(float x) {
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}
__device__ inline float fast_reciprocal(float x) {
    asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}
#else
#include "emulator.h"
#endif

typedef unsigned long long u64;
typedef __nv_bfloat16 bf16;
typedef __half f16;

// One entry for each type of `name<T>`.
#define ENTRIES(name, threads, Args)             \
    ENTRY(name##_f32, threads, Args, name<float>) \
    ENTRY(name##_f16, threads, Args, name<f16>)   \
    ENTRY(name##_bf16, threads, Args, name<bf16>)
// One for each pair that a precision policy allows where the first type is the second or FP32: the residual stream and
// the matrix products' type, or the gradients' and the working copy's.
#define ENTRIES_WIDE_FIRST(name, threads, Args)              \
    ENTRY(name##_f32_f32, threads, Args, name<float, float>) \
    ENTRY(name##_f32_f16, threads, Args, name<float, f16>)   \
    ENTRY(name##_f16_f16, threads, Args, name<f16, f16>)     \
    ENTRY(name##_f32_bf16, threads, Args, name<float, bf16>) \
    ENTRY(name##_bf16_bf16, threads, Args, name<bf16, bf16>)
constexpr unsigned WARP = 32;
constexpr unsigned EVERY_LANE = 0xffffffffu;

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(f16 x) { return __half2float(x); }
__device__ inline float to_float(bf16 x) { return __bfloat162float(x); }
__device__ inline float to_float(unsigned char code) { return code; }

template <class T> __device__ T from_float(float x);
template <> __device__ inline float from_float<float>(float x) { return x; }
template <> __device__ inline f16 from_float<f16>(float x) { return __float2half_rn(x); }
template <> __device__ inline bf16 from_float<bf16>(float x) { return __float2bfloat16_rn(x); }
template <> __device__ inline unsigned char from_float<unsigned char>(float code) { return static_cast<unsigned char>(code); }

// Exponentials and reciprocals for results of type T: approximations if it has 16 bits, whose rounding is far larger.
// `power` is of the base with the logarithm 1 / LOG_E, which is 2 or e.
template <class T> constexpr float LOG_E = sizeof(T) < sizeof(float) ? 1.4426950408889634f : 1.0f;
template <class T> __device__ inline float power(float x) {
    if constexpr (sizeof(T) < sizeof(float)) return fast_exp2(x);
    return expf(x);
}
template <class T> __device__ inline float reciprocal(float x) {
    if constexpr (sizeof(T) < sizeof(float)) return fast_reciprocal(x);
    return 1.0f / x;
}

// `N` neighbors that one thread moves at once, in accesses of at most 16 bytes.
template <class T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
    T lanes[N];
};

// Neighbors that make an access of 16 bytes in the narrower of two types.
template <class A, class B> constexpr int NEIGHBORS = 16 / (sizeof(A) < sizeof(B) ? sizeof(A) : sizeof(B));

// The element at `index` of an array of plain numbers.
template <class T> __device__ inline T load(const T* base, size_t index) {
    CHECK_READ(base + index, sizeof(T));
    return base[index];
}

template <class T> __device__ inline void store(T* base, size_t index, T value) {
    CHECK_WRITE(base + index, sizeof(T));
    base[index] = value;
}

// The element at `index` of an array of T, widened.
template <class T> __device__ inline float load_as_float(const void* base, size_t index) {
    return to_float(load(static_cast<const T*>(base), index));
}

template <class T> __device__ inline void store_rounded(void* base, size_t index, float value) {
    store(static_cast<T*>(base), index, from_float<T>(value));
}

// The `N` elements starting at `index`: by one access if `whole`, which requires `index` to be aligned to a pack; or
// else the first `count`, one by one, and zeros for the others.
template <class T, int N> __device__ inline Pack<T, N> load_raw(const void* base, size_t index, bool whole, unsigned count) {
    if (whole) {
        const auto* source = reinterpret_cast<const Pack<T, N>*>(static_cast<const T*>(base) + index);
        CHECK_READ(source, sizeof(Pack<T, N>));
        return *source;
    }
    Pack<T, N> pack;
#pragma unroll
    for (unsigned i = 0; i < N; ++i) pack.lanes[i] = i < count ? load(static_cast<const T*>(base), index + i) : from_float<T>(0.0f);
    return pack;
}

template <class T, int N> __device__ inline void widen(const Pack<T, N>& pack, float (&out)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = to_float(pack.lanes[i]);
}

template <class T, int N>
__device__ inline void load_pack(const void* base, size_t index, bool whole, unsigned count, float (&out)[N]) {
    widen(load_raw<T, N>(base, index, whole, count), out);
}

// A pack as words. Beyond a branch or a round of a loop 16-bit numbers have a register each, and a branch waits for
// them.
template <class T, int N> using PackedWords = Pack<unsigned, N * sizeof(T) / sizeof(unsigned)>;
template <class To, class From> __device__ inline To bits_of(const From& from) {
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
}
template <class T, int N> __device__ inline PackedWords<T, N> load_packed(const void* base, size_t index, bool whole, unsigned count) {
    if (!whole) return bits_of<PackedWords<T, N>>(load_raw<T, N>(base, index, false, count));
    return load_raw<unsigned, sizeof(PackedWords<T, N>) / sizeof(unsigned)>(base, index * sizeof(T) / sizeof(unsigned), true, 0);
}

template <class T, int N>
__device__ inline void store_pack(void* base, size_t index, bool whole, unsigned count, const float (&values)[N]) {
    if (whole) {
        Pack<T, N> pack;
#pragma unroll
        for (int i = 0; i < N; ++i) pack.lanes[i] = from_float<T>(values[i]);
        auto* target = reinterpret_cast<Pack<T, N>*>(static_cast<T*>(base) + index);
        CHECK_WRITE(target, sizeof(Pack<T, N>));
        *target = pack;
    } else {
#pragma unroll
        for (unsigned i = 0; i < N; ++i) {
            if (i < count) store_rounded<T>(base, index + i, values[i]);
        }
    }
}

// Elementwise kernels: `f(index, whole, count)` for each pack of `N` elements of `len`. Tensors begin at aligned
// addresses, so all packs but the last are whole. They have separate code: branches between its loads would wait for
// each.
template <int N, class F> __device__ inline void for_each_pack(size_t first, size_t stride, size_t end, F f) {
    for (size_t i = first; i < end; i += stride) {
        if (i + N <= end) {
            f(i, true, static_cast<unsigned>(N));
        } else {
            f(i, false, static_cast<unsigned>(end - i));
        }
    }
}
template <int N, class F> __device__ inline void for_each_pack(size_t len, F f) {
    const size_t first = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
    for_each_pack<N>(first, static_cast<size_t>(gridDim.x) * blockDim.x * N, len, f);
}

// The tensor that has this chunk of CHUNK elements, from a table in the chunks' order; `place` is shared. Ends with a
// barrier.
template <unsigned CHUNK, class Entry> __device__ inline Entry tensor_of(const Entry* table, unsigned count, u64 chunk, unsigned* place) {
    for (unsigned i = threadIdx.x; i < count; i += blockDim.x) {
        const u64 first = load(&table[i].first, 0), len = load(&table[i].len, 0);
        if (first <= chunk && chunk - first < (len + CHUNK - 1) / CHUNK) *place = i;
    }
    __syncthreads();
    const Entry found = load(table, *place);
    __syncthreads();
    return found;
}

struct Add {
    template <class T> __device__ T operator()(T a, T b) const { return a + b; }
};
struct Min {
    __device__ unsigned operator()(unsigned a, unsigned b) const { return min(a, b); }
};
struct Max {
    __device__ unsigned operator()(unsigned a, unsigned b) const { return max(a, b); }
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// The reduction over a warp, or over each group of LANES neighbors in it, in every lane by a fixed tree.
template <unsigned LANES = WARP, class T, class F> __device__ inline T warp_reduce(T value, F combine) {
#pragma unroll
    for (unsigned distance = LANES / 2; distance > 0; distance /= 2) {
        value = combine(value, __shfl_xor_sync(EVERY_LANE, value, distance));
    }
    return value;
}

// The reduction over a block of WARPS warps, in every thread by a fixed tree; `scratch` has WARPS places for T. Ends
// with a barrier, so that the scratch may be used again.
template <unsigned WARPS, class T, class F> __device__ inline T block_reduce(T value, F combine, void* scratch) {
    T* const places = static_cast<T*>(scratch);
    value = warp_reduce(value, combine);
    if (threadIdx.x % WARP == 0) places[threadIdx.x / WARP] = value;
    __syncthreads();
    value = places[0];
#pragma unroll
    for (unsigned i = 1; i < WARPS; ++i) value = combine(value, places[i]);
    __syncthreads();
    return value;
}
