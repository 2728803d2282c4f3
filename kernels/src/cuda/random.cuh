// Dropout masks: the counterpart of random.rs and dropout.rs, which explain them. The bits are the same.
#pragma once

#include "common.cuh"

// One layer's mask for one micro-batch; a threshold of 0 drops nothing.
struct Dropout {
    const unsigned* draw;  // two words in device memory, the low one first
    unsigned key[2];
    unsigned site;
    unsigned threshold;
    float keep_scale;
    unsigned unused;
};

struct Words {
    unsigned at[4];
};

__device__ inline Words philox(Words counter, unsigned key0, unsigned key1) {
    constexpr unsigned MULTIPLIERS[2] = {0xD2511F53u, 0xCD9E8D57u}, WEYL[2] = {0x9E3779B9u, 0xBB67AE85u};
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const unsigned a = counter.at[0], b = counter.at[1], c = counter.at[2], d = counter.at[3];
        counter = {{__umulhi(MULTIPLIERS[1], c) ^ b ^ key0, MULTIPLIERS[1] * c, __umulhi(MULTIPLIERS[0], a) ^ d ^ key1,
                    MULTIPLIERS[0] * a}};
        key0 += WEYL[0];
        key1 += WEYL[1];
    }
    return counter;
}

__device__ inline Words draw_block(const Dropout& dropout, size_t block) {
#ifdef __CUDACC__
    unsigned low, high;
    // Volatile, because a draw that is loaded before a loop, or its first round, makes attention spill registers.
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(low), "=r"(high) : "l"(__cvta_generic_to_global(dropout.draw)));
#else
    const unsigned low = load(dropout.draw, 0), high = load(dropout.draw, 1);
#endif
    return philox({{static_cast<unsigned>(block), dropout.site, low, high}}, dropout.key[0], dropout.key[1]);
}

// Multiplies `N` neighbors, the first of them at `index`, by the mask. Four elements share a draw.
template <int N> __device__ inline void apply_dropout(const Dropout& dropout, size_t index, float (&values)[N]) {
    if (dropout.threshold == 0) return;
    const int offset = index % 4;
#pragma unroll
    for (int k = 0; k < (N + 6) / 4; ++k) {
        if (4 * k >= offset + N) break;
        const Words words = draw_block(dropout, index / 4 + k);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const int at = offset + i - 4 * k;
            const unsigned word = at == 0 ? words.at[0] : at == 1 ? words.at[1] : at == 2 ? words.at[2] : words.at[3];
            if (0 <= at && at < 4) values[i] *= word < dropout.threshold ? 0.0f : dropout.keep_scale;
        }
    }
}
