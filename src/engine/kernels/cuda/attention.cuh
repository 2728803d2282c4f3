// What the attention kernels take, in FP32 and on tensor cores.
#pragma once

#include "random.cuh"

struct AttentionShape {
    unsigned batch, seq_len, heads, head_size;
    float softmax_scale;
    unsigned unused;
};

struct AttentionForward {
    const void* qkv;  // [B·T, 3·D]
    void* out;        // [B·T, D]
    float* lse;       // [B·H·T]
    AttentionShape shape;
    Dropout dropout;
};

struct AttentionDelta {
    const void *dout, *out;  // [B·T, D]
    float* delta;            // [B·H·T]: each row's product of the two
    AttentionShape shape;
};

struct AttentionBackward {
    const void *qkv, *dout;
    const float *lse, *delta;
    void* dqkv;
    AttentionShape shape;
    Dropout dropout;
};
