// The arguments of the attention kernels, in FP32 and on tensor cores.
#pragma once

#include "random.cuh"

struct ShapeArgs {
    // The first key that each query attends to, then the end of the queries that attend to each key; both rise along a sequence.
    const unsigned* bounds;  // [2, B·T]; null if every query attends to all keys up to its own
    unsigned batch, seq_len, heads, head_size;
    float softmax_scale;
    unsigned unused;

    // Of this block's sequence.
    __device__ unsigned first_key(unsigned query) const { return bounds == nullptr ? 0 : load(bounds, place(0, query)); }
    __device__ unsigned end_of_queries(unsigned key) const { return bounds == nullptr ? seq_len : load(bounds, place(batch, key)); }
    __device__ size_t place(unsigned first, unsigned token) const {
        return (static_cast<size_t>(first) + blockIdx.y / heads) * seq_len + min(token, seq_len - 1);
    }
};

struct AttentionForward {
    const void* qkv;  // [B·T, 3·D]
    void* out;        // [B·T, D]
    float* lse;       // [B·H·T]
    ShapeArgs shape;
    Dropout dropout;
};

struct AttentionDelta {
    const void *dout, *out;  // [B·T, D]
    float* delta;            // [B·H·T]: each row's product of the two
    ShapeArgs shape;
};

struct AttentionBackward {
    const void *qkv, *dout;
    const float *lse, *delta;
    void* dqkv;
    ShapeArgs shape;
    Dropout dropout;
};
