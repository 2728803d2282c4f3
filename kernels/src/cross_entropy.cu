// Softmax, loss and gradient of rows of logits: the counterpart of `loss_rows` in cross_entropy.rs.
#include "cuda/common.cuh"

struct CrossEntropy {
    void* logits;             // [rows, stride], T, the first `vocab` of each row; the gradient overwrites the row
    const unsigned* targets;  // [rows]
    float* losses;            // [rows]
    const float* factors;     // [rows], the gradient of each row's loss; null for the loss alone
    unsigned rows, vocab, stride, unused;
};

constexpr unsigned THREADS = 512;
constexpr unsigned WARPS = THREADS / WARP;
constexpr int N = 8;
constexpr unsigned IGNORE = 0xffffffffu;

// One block per row: maximum and sum in one pass over the logits, the gradient in a second.
template <class T> __device__ void cross_entropy(const CrossEntropy& a) {
    SHARED(float, scratch);  // [WARPS]
    const unsigned row = blockIdx.x, target = load(a.targets, row);
    const size_t start = static_cast<size_t>(row) * a.stride;
    const bool whole = a.stride % N == 0;
    float x[N];
    if (target == IGNORE) {
        if (a.factors != nullptr) {
#pragma unroll
            for (int i = 0; i < N; ++i) x[i] = 0.0f;
            for (unsigned c = threadIdx.x * N; c < a.vocab; c += THREADS * N) store_pack<T>(a.logits, start + c, whole, a.vocab - c, x);
        }
        if (threadIdx.x == 0) store(a.losses, row, 0.0f);
        return;
    }
    float top = -INFINITY, sum = 0.0f;
    for (unsigned c = threadIdx.x * N; c < a.vocab; c += THREADS * N) {
        load_pack<T>(a.logits, start + c, whole, a.vocab - c, x);
        float highest = top;
#pragma unroll
        for (unsigned i = 0; i < N; ++i) {
            x[i] = c + i < a.vocab ? x[i] : -INFINITY;
            highest = fmaxf(highest, x[i]);
        }
        // A thread's maximum starts at -∞, and -∞ - (-∞) would be NaN.
        const float center = highest == -INFINITY ? 0.0f : highest;
        sum *= expf(top - center);
#pragma unroll
        for (int i = 0; i < N; ++i) sum += expf(x[i] - center);
        top = highest;
    }
    const float highest = block_max<WARPS>(top, scratch);
    const float total = block_sum<WARPS>(top == -INFINITY ? sum : sum * expf(top - highest), scratch);
    if (threadIdx.x == 0) {
        const float picked = load_as_float<T>(a.logits, start + target);
        store(a.losses, row, logf(total) + (highest - picked));
    }
    if (a.factors == nullptr) return;
    __syncthreads();  // the target's logit is read
    const float seed = load(a.factors, row), factor = seed / total;
    for (unsigned c = threadIdx.x * N; c < a.vocab; c += THREADS * N) {
        load_pack<T>(a.logits, start + c, whole, a.vocab - c, x);
#pragma unroll
        for (unsigned i = 0; i < N; ++i) {
            x[i] = c + i < a.vocab ? expf(x[i] - highest) * factor : 0.0f;
            if (c + i == target) x[i] -= seed;
        }
        store_pack<T>(a.logits, start + c, whole, a.vocab - c, x);
    }
}

ENTRIES(cross_entropy, THREADS, CrossEntropy)
