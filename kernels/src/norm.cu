// Layer and RMS normalisation: the counterparts of layer_norm.rs and rms_norm.rs; and the sum of rows. X is the residual stream's type, Y
// the matmuls' type. An RMS norm has neither mean nor bias; its pointers to them are null. A row is one of `heads`
// adjacent heads of a longer row; one head is the whole row.
#include "cuda/common.cuh"

struct NormForward {
    const void* x;              // X
    const void *weight, *bias;  // Y
    void* y;                    // Y
    float *mean, *rstd;
    unsigned rows, width;
    float eps;
    float gain_offset;  // added to the weight
    unsigned heads, x_stride, y_stride, unused;
};

struct NormBackward {
    const void *dy, *x, *weight;  // dy, weight: Y; x: X
    const float *mean, *rstd;
    void* dx;        // X, added to, or overwritten if `fresh`
    float* partial;  // [blocks, 2, width]: this block's part of the gradients of weight and bias
    unsigned rows, width, rows_per_block;
    unsigned fresh;
    float gain_offset;
    unsigned heads, dy_stride, x_stride, dx_stride, unused;
};

struct SumParts {
    const float* partial;  // [parts, stride]
    void* out[2];          // [columns] each, T; the second may be null
    unsigned parts, columns, stride, unused;
};

struct SumRows {
    const void* x;   // [rows, width], T
    float* partial;  // [parts, width]
    unsigned rows, width, rows_per_part, unused;
};

constexpr unsigned THREADS = 256;
constexpr unsigned WARPS = THREADS / WARP;
// In the backward pass a thread that keeps rows has 168 registers; the others are limited by shared memory.
constexpr unsigned BACKWARD_KEPT_THREADS = 384;
constexpr unsigned BACKWARD_WIDE_THREADS = 128;

// Packs of a row that a lane keeps in registers, so that the row is read once. With 0 each pass reads it again.
template <class X, class Y, int ELEMENTS> constexpr int KEPT_PACKS = ELEMENTS / NEIGHBOURS<X, Y>;

// Calls `f(k, column)` for each pack of a lane; k is the pack's index in the registers, 0 if rows are not kept.
template <int PACKS, int N, class F> __device__ inline void for_row(unsigned width, F f) {
    const unsigned first = threadIdx.x % WARP * N;
    if constexpr (PACKS > 0) {
#pragma unroll
        for (int k = 0; k < PACKS; ++k) {
            const unsigned c = first + k * WARP * N;
            if (c < width) f(k, c);
        }
    } else {
        for (unsigned c = first; c < width; c += WARP * N) f(0, c);
    }
}

// The offset of a row; every `stride` elements hold `heads` rows.
__device__ inline size_t start_of(unsigned row, unsigned heads, unsigned stride, unsigned width) {
    return static_cast<size_t>(row / heads) * stride + row % heads * width;
}

// One warp per row.
template <class X, class Y, int ELEMENTS> __device__ void norm_forward(const NormForward& a) {
    constexpr int N = NEIGHBOURS<X, Y>, PACKS = KEPT_PACKS<X, Y, ELEMENTS>, PLACES = PACKS > 0 ? PACKS : 1;
    const unsigned row = blockIdx.x * WARPS + threadIdx.x / WARP;
    if (row >= a.rows) return;
    const size_t start = start_of(row, a.heads, a.x_stride, a.width), start_y = start_of(row, a.heads, a.y_stride, a.width);
    const bool whole = a.width % N == 0;
    float x[PLACES][N];
    float sum = 0.0f;
    for_row<PACKS, N>(a.width, [&](int k, unsigned c) {
        load_pack<X>(a.x, start + c, whole, a.width - c, x[k]);
#pragma unroll
        for (int i = 0; i < N; ++i) sum += x[k][i];
    });
    const float mean = a.mean == nullptr ? 0.0f : warp_sum(sum) / a.width;
    float squares = 0.0f;
    for_row<PACKS, N>(a.width, [&](int k, unsigned c) {
        if constexpr (PACKS == 0) load_pack<X>(a.x, start + c, whole, a.width - c, x[k]);
#pragma unroll
        for (unsigned i = 0; i < N; ++i) {
            const float distance = whole || c + i < a.width ? x[k][i] - mean : 0.0f;
            squares += distance * distance;
        }
    });
    const float rstd = 1.0f / sqrtf(warp_sum(squares) / a.width + a.eps);
    for_row<PACKS, N>(a.width, [&](int k, unsigned c) {
        float weight[N], bias[N] = {};
        if constexpr (PACKS == 0) load_pack<X>(a.x, start + c, whole, a.width - c, x[k]);
        load_pack<Y>(a.weight, c, whole, a.width - c, weight);
        if (a.bias != nullptr) load_pack<Y>(a.bias, c, whole, a.width - c, bias);
#pragma unroll
        for (int i = 0; i < N; ++i) x[k][i] = (x[k][i] - mean) * rstd * (weight[i] + a.gain_offset) + bias[i];
        store_pack<Y>(a.y, start_y + c, whole, a.width - c, x[k]);
    });
    if (threadIdx.x % WARP == 0) {
        if (a.mean != nullptr) store(a.mean, row, mean);
        store(a.rstd, row, rstd);
    }
}

// A block processes `rows_per_block` rows, each warp every WARPS-th of them. Each lane sums the gradients of weight and
// bias for its columns; at the end the warps' sums are added in their order.
template <class X, class Y, int ELEMENTS> __device__ void norm_backward(const NormBackward& a) {
    constexpr int N = NEIGHBOURS<X, Y>, PACKS = KEPT_PACKS<X, Y, ELEMENTS>, PLACES = PACKS > 0 ? PACKS : 1;
    constexpr unsigned BLOCK = PACKS > 0 ? BACKWARD_KEPT_THREADS : BACKWARD_WIDE_THREADS, WARPS = BLOCK / WARP;
    SHARED(float, sums);  // [WARPS, 2, width]
    const unsigned warp = threadIdx.x / WARP;
    const bool whole = PACKS > 0 || a.width % N == 0;
    float* const own = sums + static_cast<size_t>(warp) * 2 * a.width;
    float dweight[PLACES][N] = {}, dbias[PLACES][N] = {};
    const auto add_to = [&](float* to, unsigned c, const float(&values)[N]) {
#pragma unroll
        for (unsigned i = 0; i < N; ++i) {
            if (c + i < a.width) to[c + i] += values[i];
        }
    };
    if constexpr (PACKS == 0) {
        for_row<PACKS, N>(a.width, [&](int, unsigned c) {
            for (unsigned i = c; i < min(c + N, a.width); ++i) own[i] = own[a.width + i] = 0.0f;
        });
    }
    const unsigned begin = blockIdx.x * a.rows_per_block, end = min(begin + a.rows_per_block, a.rows);
    for (unsigned row = begin + warp; row < end; row += WARPS) {
        const size_t start_dy = start_of(row, a.heads, a.dy_stride, a.width), start = start_of(row, a.heads, a.x_stride, a.width);
        const size_t start_dx = start_of(row, a.heads, a.dx_stride, a.width);
        const float mean = a.mean == nullptr ? 0.0f : load(a.mean, row), rstd = load(a.rstd, row);
        // The gradient times the weight, and the normalised row.
        float g[PLACES][N], x[PLACES][N];
        Pack<Y, N> raw[PLACES];
        float dx[PLACES][N] = {};
        const auto fetch = [&](int k, unsigned c) {
            raw[k] = load_raw<Y, N>(a.dy, start_dy + c, whole, a.width - c);
            load_pack<X>(a.x, start + c, whole, a.width - c, x[k]);
        };
        const auto fetch_dx = [&](int k, unsigned c) { load_pack<X>(a.dx, start_dx + c, whole, a.width - c, dx[k]); };
        if constexpr (PACKS > 0) {
            // All loads of a row at once, which take longer than everything else. A branch, or a use of a value, between them
            // would wait for those before it, so packs after the row's end load its last one.
            const auto place = [&](int k) { return min((threadIdx.x % WARP + k * WARP) * N, a.width - N); };
            if (!a.fresh) {
#pragma unroll
                for (int k = 0; k < PACKS; ++k) fetch_dx(k, place(k));
            }
#pragma unroll
            for (int k = 0; k < PACKS; ++k) fetch(k, place(k));
        }
        const auto read = [&](int k, unsigned c, float (&dy)[N]) {
            float weight[N];
            if constexpr (PACKS == 0) fetch(k, c);
            widen(raw[k], dy);
            load_pack<Y>(a.weight, c, whole, a.width - c, weight);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                // Rounded, so that the mean of a row of one element cancels it.
                g[k][i] = __fmul_rn(dy[i], weight[i] + a.gain_offset);
                x[k][i] = (x[k][i] - mean) * rstd;
            }
        };
        float sum_g = 0.0f, sum_gx = 0.0f;
        for_row<PACKS, N>(a.width, [&](int k, unsigned c) {
            float dy[N];
            read(k, c, dy);
            float weighted[N];
#pragma unroll
            for (int i = 0; i < N; ++i) {
                sum_g += g[k][i];
                sum_gx += g[k][i] * x[k][i];
                weighted[i] = dy[i] * x[k][i];
                if constexpr (PACKS > 0) {
                    dweight[k][i] += weighted[i];
                    dbias[k][i] += dy[i];
                }
            }
            if constexpr (PACKS == 0) {
                add_to(own, c, weighted);
                add_to(own + a.width, c, dy);
            }
        });
        const float mean_g = a.mean == nullptr ? 0.0f : warp_sum(sum_g) / a.width, mean_gx = warp_sum(sum_gx) / a.width;
        for_row<PACKS, N>(a.width, [&](int k, unsigned c) {
            if constexpr (PACKS == 0) {
                float dy[N];
                read(k, c, dy);
                if (!a.fresh) fetch_dx(k, c);
            }
            float sum[N];
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const float change = rstd * (g[k][i] - mean_g - x[k][i] * mean_gx);
                sum[i] = a.fresh ? change : dx[k][i] + change;
            }
            store_pack<X>(a.dx, start_dx + c, whole, a.width - c, sum);
        });
    }
    if constexpr (PACKS > 0) {
        for_row<PACKS, N>(a.width, [&](int k, unsigned c) {
#pragma unroll
            for (unsigned i = 0; i < N; ++i) {
                if (c + i < a.width) {
                    own[c + i] = dweight[k][i];
                    own[a.width + c + i] = dbias[k][i];
                }
            }
        });
    }
    __syncthreads();
    const size_t out = static_cast<size_t>(blockIdx.x) * 2 * a.width;
    for (unsigned c = threadIdx.x; c < 2 * a.width; c += BLOCK) {
        float sum = sums[c];
        for (unsigned other = 1; other < WARPS; ++other) sum += sums[static_cast<size_t>(other) * 2 * a.width + c];
        store(a.partial, out + c, sum);
    }
}

// A block finishes 32 columns: warp k adds the parts k, k + 8, ….
template <class T> __device__ void sum_parts(const SumParts& a) {
    SHARED(float, lanes);  // [WARPS, WARP]
    const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const unsigned column = blockIdx.x * WARP + lane, wanted = a.out[1] == nullptr ? a.columns : 2 * a.columns;
    float sum = 0.0f;
    if (column < wanted) {
#pragma unroll 8
        for (unsigned part = warp; part < a.parts; part += WARPS) sum += load(a.partial, static_cast<size_t>(part) * a.stride + column);
    }
    lanes[threadIdx.x] = sum;
    __syncthreads();
    if (warp == 0 && column < wanted) {
#pragma unroll
        for (unsigned i = 1; i < WARPS; ++i) sum += lanes[i * WARP + lane];
        store_rounded<T>(a.out[column / a.columns], column % a.columns, sum);
    }
}

// Columns that a lane adds up.
constexpr int SUMMED = THREADS / WARP;

// Adds `count` rows of columns `c` on, WARPS rows apart; many at once, so that their loads are in flight together.
template <class T, bool WHOLE>
__device__ inline void add_rows(const SumRows& a, unsigned first, unsigned count, unsigned c, float (&sum)[SUMMED]) {
#pragma unroll(WHOLE ? 8 : 1)
    for (unsigned i = 0; i < count; ++i) {
        float x[SUMMED];
        load_pack<T>(a.x, static_cast<size_t>(first + i * WARPS) * a.width + c, WHOLE, a.width - c, x);
#pragma unroll
        for (int k = 0; k < SUMMED; ++k) sum[k] += x[k];
    }
}

// Block (tile, part) adds up the rows of the part in a tile of THREADS columns, each warp every WARPS-th of them.
template <class T> __device__ void sum_rows(const SumRows& a) {
    SHARED(float, sums);  // [WARPS, THREADS]
    const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, first = blockIdx.x * THREADS;
    const unsigned row = blockIdx.y * a.rows_per_part + warp, end = min((blockIdx.y + 1) * a.rows_per_part, a.rows);
    const unsigned count = row < end ? (end - row + WARPS - 1) / WARPS : 0, c = first + lane * SUMMED;
    float sum[SUMMED] = {};
    if (c < a.width && a.width % SUMMED == 0) {
        add_rows<T, true>(a, row, count, c, sum);
    } else if (c < a.width) {
        add_rows<T, false>(a, row, count, c, sum);
    }
#pragma unroll
    for (int i = 0; i < SUMMED; ++i) sums[warp * THREADS + lane * SUMMED + i] = sum[i];
    __syncthreads();
    float total = sums[threadIdx.x];
#pragma unroll
    for (unsigned i = 1; i < WARPS; ++i) total += sums[i * THREADS + threadIdx.x];
    const unsigned column = first + threadIdx.x;
    if (column < a.width) store(a.partial, static_cast<size_t>(blockIdx.y) * a.width + column, total);
}

// Elements of a lane that are kept: rows of 768.
constexpr int KEPT = 24;

template <class X, class Y> __device__ void norm_forward_kept(const NormForward& a) {
    norm_forward<X, Y, KEPT>(a);
}
template <class X, class Y> __device__ void norm_backward_kept(const NormBackward& a) {
    norm_backward<X, Y, KEPT>(a);
}
template <class X, class Y> __device__ void norm_forward_wide(const NormForward& a) {
    norm_forward<X, Y, 0>(a);
}
template <class X, class Y> __device__ void norm_backward_wide(const NormBackward& a) {
    norm_backward<X, Y, 0>(a);
}

ENTRIES_WIDE_FIRST(norm_forward_kept, THREADS, NormForward)
ENTRIES_WIDE_FIRST(norm_forward_wide, THREADS, NormForward)
ENTRIES_WIDE_FIRST(norm_backward_kept, BACKWARD_KEPT_THREADS, NormBackward)
ENTRIES_WIDE_FIRST(norm_backward_wide, BACKWARD_WIDE_THREADS, NormBackward)
ENTRIES(sum_parts, THREADS, SumParts)
ENTRIES(sum_rows, THREADS, SumRows)
