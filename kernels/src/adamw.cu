// AdamW on one tensor: the counterpart of adamw.rs. G is the gradient's type, W the working copy's.
#include "cuda/common.cuh"

struct AdamW {
    const void* grad;  // G
    float *master, *exp_avg, *exp_avg_sq;
    void* weight;  // W; null if the master is the working copy
    u64 len;
    float lr;
    float betas[2];
    float shares[2];  // 1 - beta, rounded once
    float eps, weight_decay;
    float bias_corrections[2];
    float grad_factor;
};

constexpr unsigned THREADS = 256;
constexpr int N = 4;

template <class G, class W> __device__ void adamw(const AdamW& a) {
    const float decay = 1.0f - a.lr * a.weight_decay;
    const float step_size = a.lr / a.bias_corrections[0];
    const float inverse_root = 1.0f / sqrtf(a.bias_corrections[1]);
    for_each_pack<N>(a.len, [&](size_t at, bool whole, unsigned count) {
        float g[N], p[N], m[N], v[N];
        load_pack<G>(a.grad, at, whole, count, g);
        load_pack<float>(a.master, at, whole, count, p);
        load_pack<float>(a.exp_avg, at, whole, count, m);
        load_pack<float>(a.exp_avg_sq, at, whole, count, v);
#pragma unroll
        for (int k = 0; k < N; ++k) {
            g[k] *= a.grad_factor;
            m[k] += (g[k] - m[k]) * a.shares[0];
            v[k] = v[k] * a.betas[1] + g[k] * g[k] * a.shares[1];
            p[k] = p[k] * decay - step_size * m[k] / (sqrtf(v[k]) * inverse_root + a.eps);
        }
        store_pack<float>(a.master, at, whole, count, p);
        store_pack<float>(a.exp_avg, at, whole, count, m);
        store_pack<float>(a.exp_avg_sq, at, whole, count, v);
        if (a.weight != nullptr) store_pack<W>(a.weight, at, whole, count, p);
    });
}

ENTRIES_WIDE_FIRST(adamw, THREADS, AdamW)
