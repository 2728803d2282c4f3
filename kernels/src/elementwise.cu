// Activations and the residual stream: the counterparts of gelu.rs, glu.rs and residual.rs.
#include "cuda/random.cuh"

// The factor that the activation multiplies x with.
enum : unsigned { GELU = 0, GATED_SILU = 1, GATED_GELU = 2 };

struct Activate {
    const void* x;   // [rows, width], T; if gated [rows, 2 · width]: gates, then the values that they multiply
    const void* dy;  // [rows, width], T; null in the forward pass
    void* y;         // [rows, width], T
    void* dx;        // as x; null in the forward pass
    u64 len;         // rows · width
    unsigned width;  // if gated a multiple of N
    unsigned activation;
};

struct Residual {
    const void* stream;  // S; may be null
    const void* branch;  // T; `residual_backward` writes it
    void* out;           // S; null for the branch's gradient
    u64 len;
    const float* inner[8];  // sums that are added to the branch; null after the last
    Dropout dropout;
};

constexpr unsigned THREADS = 256;
constexpr int N = 8;

// sqrt(2 / π) and the cubic coefficient of the tanh form of GELU.
constexpr float SQRT_2_OVER_PI = 0.7978845608028654f;
constexpr float GELU_CUBIC = 0.044715f;
// Beyond this magnitude the activations are the identity or zero in FP32, and their derivatives 1 or 0.
constexpr float LIMIT = 100.0f;

// GELU's (1 + tanh(u)) / 2 is the logistic function of 2u.
template <class T> __device__ inline float gate_of(unsigned activation, float x) {
    const float u = activation == GATED_SILU ? x : x * (2.0f * SQRT_2_OVER_PI + 2.0f * SQRT_2_OVER_PI * GELU_CUBIC * x * x);
    return reciprocal<T>(1.0f + power<T>(-LOG_E<T> * u));
}

// The derivative of x · gate(x), finite for every number.
__device__ inline float slope_of(unsigned activation, float x, float gate) {
    x = x > LIMIT ? LIMIT : x < -LIMIT ? -LIMIT : x;  // keeps NaN
    const float inner = activation == GATED_SILU ? 1.0f : 2.0f * SQRT_2_OVER_PI + 6.0f * SQRT_2_OVER_PI * GELU_CUBIC * x * x;
    return gate + gate * (1.0f - gate) * x * inner;
}

// The offset in x of the gates for the pack of y at `at`; the values that they multiply follow `width` elements later.
__device__ inline size_t gates_at(const Activate& a, size_t at) {
    return a.activation == GELU ? at : at / a.width * a.width + at;
}

template <class T> __device__ void activate(const Activate& a) {
    for_each_pack<N>(a.len, [&](size_t at, bool whole, unsigned count) {
        float gate[N], up[N];
        const size_t gates = gates_at(a, at);
        load_pack<T>(a.x, gates, whole, count, gate);
        if (a.activation != GELU) load_pack<T>(a.x, gates + a.width, whole, count, up);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            gate[i] *= gate_of<T>(a.activation, gate[i]);
            if (a.activation != GELU) gate[i] *= up[i];
        }
        store_pack<T>(a.y, at, whole, count, gate);
    });
}

template <class T> __device__ void activate_backward(const Activate& a) {
    for_each_pack<N>(a.len, [&](size_t at, bool whole, unsigned count) {
        float gate[N], up[N], dy[N], y[N];
        const size_t gates = gates_at(a, at);
        // Before the branch, so that both loads are in flight.
        load_pack<T>(a.dy, at, whole, count, dy);
        load_pack<T>(a.x, gates, whole, count, gate);
        if (a.activation != GELU) load_pack<T>(a.x, gates + a.width, whole, count, up);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float factor = gate_of<T>(a.activation, gate[i]), slope = slope_of(a.activation, gate[i], factor);
            const float value = gate[i] * factor;
            if (a.activation == GELU) {
                y[i] = value;
                gate[i] = dy[i] * slope;
            } else {
                y[i] = value * up[i];
                gate[i] = dy[i] * up[i] * slope;
                up[i] = dy[i] * value;
            }
        }
        store_pack<T>(a.y, at, whole, count, y);
        store_pack<T>(a.dx, gates, whole, count, gate);
        if (a.activation != GELU) store_pack<T>(a.dx, gates + a.width, whole, count, up);
    });
}

template <class S, class T> __device__ void residual_add(const Residual& a) {
    for_each_pack<N>(a.len, [&](size_t at, bool whole, unsigned count) {
        float stream[N], branch[N];
        // Widened after the next load, so that both are in flight.
        PackedWords<S, N> words = {};
        if (a.stream != nullptr) words = load_packed<S, N>(a.stream, at, whole, count);
        load_pack<T>(a.branch, at, whole, count, branch);
        widen(bits_of<Pack<S, N>>(words), stream);
        apply_dropout(a.dropout, at, branch);
#pragma unroll 1
        for (int k = 0; k < 8 && a.inner[k] != nullptr; ++k) {
            float inner[N];
            load_pack<float>(a.inner[k], at, whole, count, inner);
#pragma unroll
            for (int i = 0; i < N; ++i) branch[i] += inner[i];
        }
#pragma unroll
        for (int i = 0; i < N; ++i) stream[i] = a.stream == nullptr ? branch[i] : stream[i] + branch[i];
        store_pack<S>(a.out, at, whole, count, stream);
    });
}

template <class S, class T> __device__ void residual_backward(const Residual& a) {
    for_each_pack<N>(a.len, [&](size_t at, bool whole, unsigned count) {
        float x[N];
        load_pack<S>(a.stream, at, whole, count, x);
        apply_dropout(a.dropout, at, x);
        store_pack<T>(const_cast<void*>(a.branch), at, whole, count, x);
    });
}

ENTRIES(activate, THREADS, Activate)
ENTRIES(activate_backward, THREADS, Activate)
ENTRIES_WIDE_FIRST(residual_add, THREADS, Residual)
ENTRIES_WIDE_FIRST(residual_backward, THREADS, Residual)
