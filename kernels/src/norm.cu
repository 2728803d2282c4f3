// Layer and RMS normalization: the counterparts of norm.rs; and the sum of rows. X is the residual stream's type, Y
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
// A warp has a narrow row, of at most 768 elements, and a block a wide one. In the backward pass a thread with narrow
// rows has 168 registers, and one with a wide row 80, so that small blocks share a multiprocessor.
constexpr unsigned NARROW_THREADS = 384;
constexpr unsigned WIDE_THREADS = 768;
constexpr unsigned WIDE_WARPS = WIDE_THREADS / WARP;

// A thread keeps its elements of a row in registers, so that the row is read once: PACKS packs of SIZE neighbors.
template <class X, class Y, bool WIDE> constexpr int SIZE = WIDE ? NEIGHBORS<X, X> : NEIGHBORS<X, Y>;
template <class X, class Y, bool WIDE> constexpr int PACKS = WIDE ? 1 : 24 / NEIGHBORS<X, Y>;

// The first element of pack k in the row.
template <bool WIDE, int N> __device__ inline unsigned column_of(int k) {
    return (WIDE ? threadIdx.x : threadIdx.x % WARP + k * WARP) * N;
}

// Calls `f(k, column)` for each pack of a thread.
template <bool WIDE, int COUNT, int N, class F> __device__ inline void for_row(unsigned width, F f) {
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        const unsigned c = column_of<WIDE, N>(k);
        if (c < width) f(k, c);
    }
}

// The offset of a row; every `stride` elements hold `heads` rows.
__device__ inline size_t start_of(unsigned row, unsigned heads, unsigned stride, unsigned width) {
    return static_cast<size_t>(row / heads) * stride + row % heads * width;
}

// Replaces numbers by their sums over a row, in each of its threads. Of a wide row the warps' sums are in `scratch`,
// [COUNT, WIDE_WARPS], until all threads have passed the next barrier.
template <bool WIDE, int COUNT> __device__ inline void sum_over_row(float (&values)[COUNT], float* scratch) {
    const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll
    for (float& value : values) value = warp_reduce(value, Add());
    if constexpr (WIDE) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (lane == 0) scratch[i * WIDE_WARPS + warp] = values[i];
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            values[i] = warp_reduce(lane < blockDim.x / WARP ? scratch[i * WIDE_WARPS + lane] : 0.0f, Add());
        }
    }
}

template <class X, class Y, bool WIDE> __device__ void norm_forward(const NormForward& a) {
    constexpr int N = SIZE<X, Y, WIDE>, COUNT = PACKS<X, Y, WIDE>;
    SHARED(float, scratch);  // of wide rows [2, WIDE_WARPS]
    const unsigned row = WIDE ? blockIdx.x : blockIdx.x * WARPS + threadIdx.x / WARP;
    if (row >= a.rows) return;
    const size_t start = start_of(row, a.heads, a.x_stride, a.width), start_y = start_of(row, a.heads, a.y_stride, a.width);
    const bool whole = !WIDE || a.width % N == 0;
    float x[COUNT][N];
    float sum[1] = {}, squares[1] = {};
    for_row<WIDE, COUNT, N>(a.width, [&](int k, unsigned c) {
        load_pack<X>(a.x, start + c, whole, a.width - c, x[k]);
#pragma unroll
        for (int i = 0; i < N; ++i) sum[0] += x[k][i];
    });
    if (a.mean != nullptr) sum_over_row<WIDE>(sum, scratch);
    const float mean = a.mean == nullptr ? 0.0f : sum[0] / a.width;
    for_row<WIDE, COUNT, N>(a.width, [&](int k, unsigned c) {
#pragma unroll
        for (unsigned i = 0; i < N; ++i) {
            const float distance = whole || c + i < a.width ? x[k][i] - mean : 0.0f;
            squares[0] += distance * distance;
        }
    });
    sum_over_row<WIDE>(squares, scratch + WIDE_WARPS);
    const float rstd = 1.0f / sqrtf(squares[0] / a.width + a.eps);
    for_row<WIDE, COUNT, N>(a.width, [&](int k, unsigned c) {
        float weight[N], bias[N] = {};
        load_pack<Y>(a.weight, c, whole, a.width - c, weight);
        if (a.bias != nullptr) load_pack<Y>(a.bias, c, whole, a.width - c, bias);
#pragma unroll
        for (int i = 0; i < N; ++i) x[k][i] = (x[k][i] - mean) * rstd * (weight[i] + a.gain_offset) + bias[i];
        store_pack<Y>(a.y, start_y + c, whole, a.width - c, x[k]);
    });
    if (column_of<WIDE, N>(0) == 0) {
        if (a.mean != nullptr) store(a.mean, row, mean);
        store(a.rstd, row, rstd);
    }
}

// A block processes `rows_per_block` narrow rows, each warp every WARPS-th of them. Each lane sums the gradients of
// weight and bias for its columns; at the end the warps' sums are added in their order.
template <class X, class Y> __device__ void norm_backward_narrow(const NormBackward& a) {
    constexpr int N = SIZE<X, Y, false>, COUNT = PACKS<X, Y, false>;
    constexpr unsigned WARPS = NARROW_THREADS / WARP;
    SHARED(float, sums);  // [WARPS, 2, width]
    const unsigned warp = threadIdx.x / WARP;
    float dweight[COUNT][N] = {}, dbias[COUNT][N] = {};
    const unsigned begin = blockIdx.x * a.rows_per_block, end = min(begin + a.rows_per_block, a.rows);
    for (unsigned row = begin + warp; row < end; row += WARPS) {
        const size_t start_dy = start_of(row, a.heads, a.dy_stride, a.width), start = start_of(row, a.heads, a.x_stride, a.width);
        const size_t start_dx = start_of(row, a.heads, a.dx_stride, a.width);
        const float mean = a.mean == nullptr ? 0.0f : load(a.mean, row), rstd = load(a.rstd, row);
        // The gradient times the weight, and the normalized row.
        float g[COUNT][N], x[COUNT][N];
        Pack<Y, N> raw[COUNT];
        float dx[COUNT][N] = {};
        // All loads of a row at once, which take longer than everything else. A branch, or a use of a value, between
        // them would wait for those before it, so packs after the row's end load its last one.
        const auto place = [&](int k) { return min(column_of<false, N>(k), a.width - N); };
        if (!a.fresh) {
#pragma unroll
            for (int k = 0; k < COUNT; ++k) load_pack<X>(a.dx, start_dx + place(k), true, N, dx[k]);
        }
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            raw[k] = load_raw<Y, N>(a.dy, start_dy + place(k), true, N);
            load_pack<X>(a.x, start + place(k), true, N, x[k]);
        }
        float totals[2] = {};
        for_row<false, COUNT, N>(a.width, [&](int k, unsigned c) {
            float dy[N], weight[N];
            widen(raw[k], dy);
            load_pack<Y>(a.weight, c, true, N, weight);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                // Rounded, so that the mean of a row of one element cancels it.
                g[k][i] = __fmul_rn(dy[i], weight[i] + a.gain_offset);
                x[k][i] = (x[k][i] - mean) * rstd;
                totals[0] += g[k][i];
                totals[1] += g[k][i] * x[k][i];
                dweight[k][i] += dy[i] * x[k][i];
                dbias[k][i] += dy[i];
            }
        });
        sum_over_row<false>(totals, nullptr);
        const float mean_g = a.mean == nullptr ? 0.0f : totals[0] / a.width, mean_gx = totals[1] / a.width;
        for_row<false, COUNT, N>(a.width, [&](int k, unsigned c) {
            float sum[N];
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const float change = rstd * (g[k][i] - mean_g - x[k][i] * mean_gx);
                sum[i] = a.fresh ? change : dx[k][i] + change;
            }
            store_pack<X>(a.dx, start_dx + c, true, N, sum);
        });
    }
    float* const own = sums + static_cast<size_t>(warp) * 2 * a.width;
    for_row<false, COUNT, N>(a.width, [&](int k, unsigned c) {
#pragma unroll
        for (unsigned i = 0; i < N; ++i) {
            own[c + i] = dweight[k][i];
            own[a.width + c + i] = dbias[k][i];
        }
    });
    __syncthreads();
    const size_t out = static_cast<size_t>(blockIdx.x) * 2 * a.width;
    for (unsigned c = threadIdx.x; c < 2 * a.width; c += NARROW_THREADS) {
        float sum = sums[c];
        for (unsigned other = 1; other < WARPS; ++other) sum += sums[static_cast<size_t>(other) * 2 * a.width + c];
        store(a.partial, out + c, sum);
    }
}

// A block processes `rows_per_block` wide rows, one at a time, and loads the next meanwhile.
template <class X, class Y> __device__ void norm_backward_wide(const NormBackward& a) {
    constexpr int N = SIZE<X, Y, true>;
    SHARED(float, scratch);  // [2, 2, WIDE_WARPS]
    const unsigned c = threadIdx.x * N, count = a.width - min(c, a.width);
    const bool whole = a.width % N == 0;
    // Threads after a whole row's end load its last pack, because loads in a branch would wait for those before it.
    const unsigned place = whole ? min(c, a.width - N) : a.width - count;
    float weight[N], dweight[N] = {}, dbias[N] = {}, mean = 0.0f, rstd;
    PackedWords<Y, N> dy;
    PackedWords<X, N> x;
    const auto fetch = [&](unsigned row, bool whole) {
        if (a.mean != nullptr) mean = load(a.mean, row);
        rstd = load(a.rstd, row);
        dy = load_packed<Y, N>(a.dy, start_of(row, a.heads, a.dy_stride, a.width) + place, whole, count);
        x = load_packed<X, N>(a.x, start_of(row, a.heads, a.x_stride, a.width) + place, whole, count);
    };
    const auto fetch_row = [&](unsigned row) { whole ? fetch(row, true) : fetch(row, false); };
    const unsigned begin = blockIdx.x * a.rows_per_block, end = min(begin + a.rows_per_block, a.rows);
    if (begin < end) fetch_row(begin);
    for (unsigned row = begin; row < end; ++row) {
        float g[N], normal[N], sums[2] = {};
        const size_t start_dx = start_of(row, a.heads, a.dx_stride, a.width);
        const float scale = rstd;
        PackedWords<X, N> dx;
        if (!a.fresh) dx = load_packed<X, N>(a.dx, start_dx + place, whole, count);
        if (c < a.width) {
            widen(bits_of<Pack<Y, N>>(dy), g);
            widen(bits_of<Pack<X, N>>(x), normal);
            load_pack<Y>(a.weight, c, whole, count, weight);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                normal[i] = (normal[i] - mean) * scale;
                dweight[i] += g[i] * normal[i];
                dbias[i] += g[i];
                g[i] = __fmul_rn(g[i], weight[i] + a.gain_offset);
                sums[0] += g[i];
                sums[1] += g[i] * normal[i];
            }
        }
        if (row + 1 < end) fetch_row(row + 1);
        // In turn, so that one barrier is enough.
        sum_over_row<true>(sums, scratch + row % 2 * 2 * WIDE_WARPS);
        if (c >= a.width) continue;
        const float mean_g = a.mean == nullptr ? 0.0f : sums[0] / a.width, mean_gx = sums[1] / a.width;
        float sum[N] = {};
        if (!a.fresh) widen(bits_of<Pack<X, N>>(dx), sum);
#pragma unroll
        for (int i = 0; i < N; ++i) sum[i] += scale * (g[i] - mean_g - normal[i] * mean_gx);
        store_pack<X>(a.dx, start_dx + c, whole, count, sum);
    }
    if (c >= a.width) return;
    const size_t out = static_cast<size_t>(blockIdx.x) * 2 * a.width + c;
    store_pack<float>(a.partial, out, whole, count, dweight);
    store_pack<float>(a.partial, out + a.width, whole, count, dbias);
}

// A block finishes 32 columns: warp k adds the parts k, k + 8, ….
template <class T> __device__ void sum_parts(const SumParts& a) {
    SHARED(float, lanes);  // [WARPS, WARP]
    const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const unsigned column = blockIdx.x * WARP + lane, wanted = a.out[1] == nullptr ? a.columns : 2 * a.columns;
    float sum = 0.0f;
    // Many at once, so that their loads are in flight together.
    for (unsigned first = warp; first < a.parts && column < wanted; first += 16 * WARPS) {
        float parts[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const unsigned part = first + i * WARPS;
            parts[i] = part < a.parts ? load(a.partial, static_cast<size_t>(part) * a.stride + column) : 0.0f;
        }
#pragma unroll
        for (const float part : parts) sum += part;
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

template <class X, class Y> __device__ void norm_forward_narrow(const NormForward& a) {
    norm_forward<X, Y, false>(a);
}
template <class X, class Y> __device__ void norm_forward_wide(const NormForward& a) {
    norm_forward<X, Y, true>(a);
}

ENTRIES_WIDE_FIRST(norm_forward_narrow, THREADS, NormForward)
ENTRIES_WIDE_FIRST(norm_forward_wide, UP_TO(WIDE_THREADS), NormForward)
ENTRIES_WIDE_FIRST(norm_backward_narrow, NARROW_THREADS, NormBackward)
ENTRIES_WIDE_FIRST(norm_backward_wide, UP_TO(WIDE_THREADS), NormBackward)
ENTRIES(sum_parts, THREADS, SumParts)
ENTRIES(sum_rows, THREADS, SumRows)
