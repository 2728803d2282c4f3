// GELU in its tanh form: the twin of gelu.rs, with the formulas of math.rs.
#include "cuda/common.cuh"

struct Gelu {
    const void* x;  // T
    void* y;        // T: the result; in the backward pass the gradient, in place
    u64 len;
};

constexpr unsigned THREADS = 256;
constexpr int N = 8;

constexpr float SQRT_2_OVER_PI = 0.7978846f;
constexpr float CUBIC = 0.044715f;
// Beyond this magnitude GELU is the identity or below the smallest float, and its derivative 1 or 0.
constexpr float LIMIT = 16.0f;

// (1 + tanh(u)) / 2 as a logistic function of 2u: small gates keep their relative accuracy, and nothing overflows.
__device__ inline float gate(float x) {
    const float u = SQRT_2_OVER_PI * (x + CUBIC * (x * x * x));
    const float small = expf(-2.0f * fabsf(u));
    return (x < 0.0f ? small : 1.0f) / (1.0f + small);
}

// Comparisons and not fminf, so that NaN stays NaN.
__device__ inline float limited(float x) {
    x = x > LIMIT ? LIMIT : x;
    return x < -LIMIT ? -LIMIT : x;
}

template <class T> __device__ void gelu_forward(const Gelu& a) {
    for_each_pack<N>(a.len, [&](size_t at, bool whole, unsigned count) {
        float x[N];
        load_pack<T>(a.x, at, whole, count, x);
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] *= gate(limited(x[i]));
        store_pack<T>(a.y, at, whole, count, x);
    });
}

template <class T> __device__ void gelu_backward(const Gelu& a) {
    for_each_pack<N>(a.len, [&](size_t at, bool whole, unsigned count) {
        float x[N], grad[N];
        load_pack<T>(a.x, at, whole, count, x);
        load_pack<T>(a.y, at, whole, count, grad);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float value = limited(x[i]), g = gate(value);
            const float slope = 2.0f * SQRT_2_OVER_PI * (1.0f + 3.0f * CUBIC * (value * value));
            grad[i] *= g + g * (1.0f - g) * (value * slope);
        }
        store_pack<T>(a.y, at, whole, count, grad);
    });
}

ENTRIES(gelu_forward, THREADS, Gelu)
ENTRIES(gelu_backward, THREADS, Gelu)
