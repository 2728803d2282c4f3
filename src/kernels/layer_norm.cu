// Layer normalisation: the twin of layer_norm.rs. X is the residual stream's type, Y that of the products.
#include "cuda/common.cuh"

struct LayerNormForward {
    const void *x, *weight, *bias;  // x: X; weight, bias: Y
    void* y;
    float *mean, *rstd;
    unsigned rows, width;
    float eps;
    unsigned unused;
};

struct LayerNormBackward {
    const void *dy, *x, *weight;  // dy, weight: Y; x: X
    const float *mean, *rstd;
    void* dx;        // X, added to
    float* partial;  // [blocks, 2, width]: this block's part of the gradients of weight and bias
    unsigned rows, width, rows_per_block;
    unsigned unused;
};

constexpr unsigned THREADS = 256;
constexpr unsigned WARPS = THREADS / WARP;
constexpr int N = 4;

// One warp a row. The row is read three times, for mean, variance and result; all but the first time it comes from the
// first-level cache, which leaves the registers to more rows in flight.
template <class X, class Y> __device__ void layer_norm_forward(const LayerNormForward& a) {
    const unsigned row = blockIdx.x * WARPS + threadIdx.x / WARP, first = threadIdx.x % WARP * N;
    if (row >= a.rows) return;
    const size_t start = static_cast<size_t>(row) * a.width;
    const bool whole = a.width % N == 0;
    float x[N];
    float sum = 0.0f;
    for (unsigned c = first; c < a.width; c += WARP * N) {
        load_pack<X>(a.x, start + c, whole, a.width - c, x);
        sum += (x[0] + x[1]) + (x[2] + x[3]);
    }
    const float mean = warp_sum(sum) / a.width;
    float squares = 0.0f;
    for (unsigned c = first; c < a.width; c += WARP * N) {
        load_pack<X>(a.x, start + c, whole, a.width - c, x);
#pragma unroll
        for (unsigned i = 0; i < N; ++i) {
            const float distance = c + i < a.width ? x[i] - mean : 0.0f;
            squares += distance * distance;
        }
    }
    const float rstd = 1.0f / sqrtf(warp_sum(squares) / a.width + a.eps);
    for (unsigned c = first; c < a.width; c += WARP * N) {
        float weight[N], bias[N];
        load_pack<X>(a.x, start + c, whole, a.width - c, x);
        load_pack<Y>(a.weight, c, whole, a.width - c, weight);
        load_pack<Y>(a.bias, c, whole, a.width - c, bias);
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] = (x[i] - mean) * rstd * weight[i] + bias[i];
        store_pack<Y>(a.y, start + c, whole, a.width - c, x);
    }
    if (first == 0) {
        store(a.mean, row, mean);
        store(a.rstd, row, rstd);
    }
}

// A block takes `rows_per_block` rows, WARPS of them at a time: first each warp adds one row's gradient to dx, then each
// thread adds these rows to the sums of the columns that are its own. No thread needs what another has computed, so there
// is no barrier; the second look at the rows is served by the caches.
template <class X, class Y> __device__ void layer_norm_backward(const LayerNormBackward& a) {
    SHARED(float, sums);  // [2, width], each place used by one thread
    const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const bool whole = a.width % N == 0;
    for (unsigned c = threadIdx.x * N; c < a.width; c += THREADS * N) {
        for (unsigned i = c; i < min(c + N, a.width); ++i) sums[i] = sums[a.width + i] = 0.0f;
    }
    const unsigned begin = blockIdx.x * a.rows_per_block, end = min(begin + a.rows_per_block, a.rows);
    for (unsigned tile = begin; tile < end; tile += WARPS) {
        const unsigned row = tile + warp;
        if (row < end) {
            const size_t start = static_cast<size_t>(row) * a.width;
            const float mean = load(a.mean, row), rstd = load(a.rstd, row);
            float g[N], x[N], weight[N], dx[N];
            float sum_g = 0.0f, sum_gx = 0.0f;
            for (unsigned c = lane * N; c < a.width; c += WARP * N) {
                load_pack<Y>(a.dy, start + c, whole, a.width - c, g);
                load_pack<X>(a.x, start + c, whole, a.width - c, x);
                load_pack<Y>(a.weight, c, whole, a.width - c, weight);
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    sum_g += g[i] * weight[i];
                    sum_gx += g[i] * weight[i] * ((x[i] - mean) * rstd);
                }
            }
            const float mean_g = warp_sum(sum_g) / a.width, mean_gx = warp_sum(sum_gx) / a.width;
            for (unsigned c = lane * N; c < a.width; c += WARP * N) {
                load_pack<Y>(a.dy, start + c, whole, a.width - c, g);
                load_pack<X>(a.x, start + c, whole, a.width - c, x);
                load_pack<Y>(a.weight, c, whole, a.width - c, weight);
                load_pack<X>(a.dx, start + c, whole, a.width - c, dx);
#pragma unroll
                for (int i = 0; i < N; ++i) dx[i] += rstd * (g[i] * weight[i] - mean_g - (x[i] - mean) * rstd * mean_gx);
                store_pack<X>(a.dx, start + c, whole, a.width - c, dx);
            }
        }
        for (unsigned c = threadIdx.x * N; c < a.width; c += THREADS * N) {
            float dweight[N] = {}, dbias[N] = {};
            for (unsigned r = tile; r < min(tile + WARPS, end); ++r) {
                float dy[N], x[N];
                load_pack<Y>(a.dy, static_cast<size_t>(r) * a.width + c, whole, a.width - c, dy);
                load_pack<X>(a.x, static_cast<size_t>(r) * a.width + c, whole, a.width - c, x);
                const float mean = load(a.mean, r), rstd = load(a.rstd, r);
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    dweight[i] += dy[i] * ((x[i] - mean) * rstd);
                    dbias[i] += dy[i];
                }
            }
#pragma unroll
            for (unsigned i = 0; i < N; ++i) {
                if (c + i < a.width) {
                    sums[c + i] += dweight[i];
                    sums[a.width + c + i] += dbias[i];
                }
            }
        }
    }
    const size_t out = static_cast<size_t>(blockIdx.x) * 2 * a.width;
    for (unsigned c = threadIdx.x * N; c < a.width; c += THREADS * N) {
        for (unsigned i = c; i < min(c + N, a.width); ++i) {
            store(a.partial, out + i, sums[i]);
            store(a.partial, out + a.width + i, sums[a.width + i]);
        }
    }
}

ENTRIES_WIDE_FIRST(layer_norm_forward, THREADS, LayerNormForward)
ENTRIES_WIDE_FIRST(layer_norm_backward, THREADS, LayerNormBackward)
