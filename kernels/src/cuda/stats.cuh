// Statistics of gradients, and how statistics of parts are merged: the counterpart of TensorStats.
#pragma once

#include "common.cuh"

// `least` and `most` are FP32 patterns of finite magnitudes, `least` of the smallest that is not zero, minus one: all ones
// if there is none.
struct ChunkStats {
    unsigned zero, subnormal, inf, nan, least, most;
    double squares;
};

struct TensorStats {
    u64 count, zero, subnormal, inf, nan;
    unsigned least, most;
    double squares;
};

struct Add {
    template <class T> __device__ T operator()(T a, T b) const { return a + b; }
};
struct Min {
    __device__ unsigned operator()(unsigned a, unsigned b) const { return min(a, b); }
};
struct Max {
    __device__ unsigned operator()(unsigned a, unsigned b) const { return max(a, b); }
};

// A block's reduction in every thread, by a fixed tree; `scratch` has WARPS places. Ends with a barrier.
template <unsigned WARPS, class T, class F> __device__ inline T block_reduce(T value, F combine, double* scratch) {
    static_assert(sizeof(T) <= sizeof(double), "the scratch holds doubles");
    T* const places = reinterpret_cast<T*>(scratch);
#pragma unroll
    for (unsigned distance = WARP / 2; distance > 0; distance /= 2) {
        value = combine(value, __shfl_xor_sync(EVERY_LANE, value, distance));
    }
    if (threadIdx.x % WARP == 0) places[threadIdx.x / WARP] = value;
    __syncthreads();
    value = places[0];
#pragma unroll
    for (unsigned i = 1; i < WARPS; ++i) value = combine(value, places[i]);
    __syncthreads();
    return value;
}

__device__ inline TensorStats nothing() { return {0, 0, 0, 0, 0, EVERY_LANE, 0, 0.0}; }

__device__ inline void merge(TensorStats& sum, const TensorStats& part) {
    sum.count += part.count;
    sum.zero += part.zero;
    sum.subnormal += part.subnormal;
    sum.inf += part.inf;
    sum.nan += part.nan;
    sum.least = min(sum.least, part.least);
    sum.most = max(sum.most, part.most);
    sum.squares += part.squares;
}

template <unsigned WARPS> __device__ inline TensorStats block_merge(const TensorStats& own, double* scratch) {
    return {block_reduce<WARPS>(own.count, Add(), scratch), block_reduce<WARPS>(own.zero, Add(), scratch),
            block_reduce<WARPS>(own.subnormal, Add(), scratch), block_reduce<WARPS>(own.inf, Add(), scratch),
            block_reduce<WARPS>(own.nan, Add(), scratch), block_reduce<WARPS>(own.least, Min(), scratch),
            block_reduce<WARPS>(own.most, Max(), scratch), block_reduce<WARPS>(own.squares, Add(), scratch)};
}
