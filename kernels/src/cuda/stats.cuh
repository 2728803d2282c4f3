// Statistics of gradients, and how statistics of parts are merged: the counterpart of TensorStats.
#pragma once

#include "common.cuh"

// `least` and `most` are FP32 patterns of finite magnitudes, `least` of the smallest that is not zero, minus one: all
// ones if there is none.
struct ChunkStats {
    unsigned zero, subnormal, inf, nan, least, most;
    double squares;
};

struct TensorStats {
    u64 count, zero, subnormal, inf, nan;
    unsigned least, most;
    double squares;
};

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
