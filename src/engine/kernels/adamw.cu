// AdamW on all tensors in one launch: the twin of adamw.rs. G is the gradients' type, W the working copy's.
#include "cuda/chunks.cuh"
#include "cuda/common.cuh"

struct AdamWTensor {
    const void* grad;  // G
    float *master, *exp_avg, *exp_avg_sq;
    void* weight;  // W; null where the master is the working copy
    u64 len;
    float weight_decay;
    unsigned unused;
};

struct AdamW {
    const AdamWTensor* tensors;
    const Chunk* chunks;
    float lr;
    float betas[2];
    float shares[2];  // 1 - beta, rounded once
    float eps;
    float bias_corrections[2];
    float grad_factor;
    unsigned unused;
};

constexpr unsigned THREADS = 256;
constexpr int N = 4;

template <class G, class W> __device__ void adamw(const AdamW& a) {
    const Chunk chunk = load(a.chunks, blockIdx.x);
    const AdamWTensor tensor = load(a.tensors, chunk.tensor);
    const Span span = span_of(chunk, tensor.len);
    const float decay = 1.0f - a.lr * tensor.weight_decay;
    const float step_size = a.lr / a.bias_corrections[0];
    const float inverse_root = 1.0f / sqrtf(a.bias_corrections[1]);
    for (unsigned i = threadIdx.x * N; i < span.count; i += THREADS * N) {
        const unsigned count = min(span.count - i, static_cast<unsigned>(N));
        const bool whole = count == N;
        const size_t at = span.first + i;
        float g[N], p[N], m[N], v[N];
        load_pack<G>(tensor.grad, at, whole, count, g);
        load_pack<float>(tensor.master, at, whole, count, p);
        load_pack<float>(tensor.exp_avg, at, whole, count, m);
        load_pack<float>(tensor.exp_avg_sq, at, whole, count, v);
#pragma unroll
        for (int k = 0; k < N; ++k) {
            g[k] *= a.grad_factor;
            m[k] += (g[k] - m[k]) * a.shares[0];
            v[k] = v[k] * a.betas[1] + g[k] * g[k] * a.shares[1];
            p[k] = p[k] * decay - step_size * m[k] / (sqrtf(v[k]) * inverse_root + a.eps);
        }
        store_pack<float>(tensor.master, at, whole, count, p);
        store_pack<float>(tensor.exp_avg, at, whole, count, m);
        store_pack<float>(tensor.exp_avg_sq, at, whole, count, v);
        if (tensor.weight != nullptr) store_pack<W>(tensor.weight, at, whole, count, p);
    }
}

ENTRIES_WIDE_FIRST(adamw, THREADS, AdamW)
