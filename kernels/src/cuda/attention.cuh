// The arguments of the attention kernels, in FP32 and on tensor cores.
#pragma once

#include "random.cuh"

// Rows of T, one per token, `stride` elements apart, with the elements of all heads.
struct Rows {
    void* first;
    unsigned stride;
    unsigned unused;
};

// Blocks: tiles of tokens, heads, sequences.
struct ShapeArgs {
    // The first key that each query attends to, then the end of the queries that attend to each key; both rise along a
    // sequence.
    const unsigned* bounds;  // [2, B·T]; null if every query attends to all keys up to its own
    unsigned batch, seq_len, heads, group, head_size;  // `group` heads of queries share a head of keys and values
    unsigned whole;                                    // whether heads begin at multiples of 16 bytes
    float softmax_scale, softcap;                      // a soft cap of 0 is none

    // The index of token t of this block's sequence.
    __device__ size_t token(unsigned t) const { return static_cast<size_t>(blockIdx.z) * seq_len + t; }
    // The offset of a head's elements of a token.
    __device__ size_t at(const Rows& rows, unsigned head, unsigned t) const { return token(t) * rows.stride + head * head_size; }
    // The index of the log-sum-exp and delta of query i; times T, the offset of its dropout mask.
    __device__ size_t row(unsigned head, unsigned i) const {
        return (static_cast<size_t>(blockIdx.z) * heads + head) * seq_len + i;
    }
    __device__ unsigned first_key(unsigned query) const { return bounds == nullptr ? 0 : load(bounds, place(0, query)); }
    __device__ unsigned end_of_queries(unsigned key) const { return bounds == nullptr ? seq_len : load(bounds, place(batch, key)); }
    __device__ size_t place(unsigned first, unsigned token) const {
        return (static_cast<size_t>(first) + blockIdx.z) * seq_len + min(token, seq_len - 1);
    }
};

struct AttentionForward {
    Rows q, k, v, out;
    float* lse;  // [B·H·T]
    ShapeArgs shape;
    Dropout dropout;
};

struct AttentionDelta {
    const void *dout, *out;  // [B·T, D], FP32
    float* delta;            // [B·H·T]: each row's product of the two
    ShapeArgs shape;
};

// The kernel of queries computes `delta` on tensor cores; in FP32, and before the kernel of keys, it is complete.
struct AttentionBackward {
    Rows q, k, v, dout, out;
    const float* lse;
    float* delta;
    Rows dq, dk, dv;
    ShapeArgs shape;
    Dropout dropout;
};
