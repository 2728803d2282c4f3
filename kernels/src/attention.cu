// Causal self-attention in FP32: the counterpart of attention.rs. attention_mma.cu serves FP16 and BF16.
//
// Scores exist for one tile of queries and one of keys at a time, in shared memory (Dao, "FlashAttention-2", 2023). The
// backward pass is two kernels: one keeps a tile of keys, the other a tile of queries. Each result has one writer and
// the sums have a fixed order, but the scores are computed twice. A block of keys takes the heads of queries that share
// them in turn.
#include "cuda/attention.cuh"

constexpr unsigned THREADS = 256;
// Threads form a square with this side; each computes a square of a tile of scores.
constexpr int SIDE = 16;
constexpr int N = 4;

// The work of a block: a tile of queries or keys of one head of one sequence, for heads of up to SIZE elements.
template <int SIZE> struct Head {
    static constexpr int ROWS = SIZE <= 64 ? 64 : SIZE <= 128 ? 32 : 16;  // of a tile
    static constexpr int LD = SIZE + 1;    // of a tile in shared memory: odd, so that a column's banks differ
    static constexpr int LP = ROWS + 1;    // of a tile of scores
    static constexpr int R = ROWS / SIDE;  // a thread's rows and columns of scores
    static constexpr int C = SIZE / SIDE;  // a thread's columns of a result

    const ShapeArgs& shape;
    const unsigned y, x;

    __device__ explicit Head(const ShapeArgs& shape) : shape(shape), y(threadIdx.x / SIDE), x(threadIdx.x % SIDE) {}

    // Loads a head's rows starting at `first`, times `factor`, into `tile` [ROWS, LD]; zeros outside the sequence and
    // the head.
    __device__ void load_tile(const Rows& rows, unsigned head, unsigned first, float factor, float* tile) const {
        for (unsigned i = threadIdx.x; i < ROWS * SIZE / N; i += THREADS) {
            const unsigned r = i / (SIZE / N), d = i % (SIZE / N) * N;
            float values[N] = {};
            if (first + r < shape.seq_len && d < shape.head_size) {
                load_pack<float>(rows.first, shape.at(rows, head, first + r) + d, shape.whole, shape.head_size - d, values);
            }
#pragma unroll
            for (int k = 0; k < N; ++k) tile[r * LD + d + k] = values[k] * factor;
        }
    }

    // out [R, R] = this thread's square of a · bᵀ.
    __device__ void scores(const float* a, const float* b, float (&out)[R][R]) const {
#pragma unroll
        for (int i = 0; i < R; ++i)
#pragma unroll
            for (int j = 0; j < R; ++j) out[i][j] = 0.0f;
#pragma unroll 4
        for (int d = 0; d < SIZE; ++d) {
            float left[R], right[R];
#pragma unroll
            for (int i = 0; i < R; ++i) left[i] = a[(y * R + i) * LD + d];
#pragma unroll
            for (int j = 0; j < R; ++j) right[j] = b[(x * R + j) * LD + d];
#pragma unroll
            for (int i = 0; i < R; ++i)
#pragma unroll
                for (int j = 0; j < R; ++j) out[i][j] += left[i] * right[j];
        }
    }

    // Adds this thread's part of p · v, or of pᵀ · v, for p [ROWS, LP] and v [ROWS, LD].
    template <bool TRANSPOSED> __device__ void fold(const float* p, const float* v, float (&out)[R][C]) const {
#pragma unroll 4
        for (int j = 0; j < ROWS; ++j) {
            float left[R];
#pragma unroll
            for (int i = 0; i < R; ++i) left[i] = TRANSPOSED ? p[j * LP + y * R + i] : p[(y * R + i) * LP + j];
#pragma unroll
            for (int k = 0; k < C; ++k) {
                const float right = v[j * LD + x + SIDE * k];
#pragma unroll
                for (int i = 0; i < R; ++i) out[i][k] += left[i] * right;
            }
        }
    }

    __device__ void keep(const float (&values)[R][R], float* p) const {
#pragma unroll
        for (int i = 0; i < R; ++i)
#pragma unroll
            for (int j = 0; j < R; ++j) p[(y * R + i) * LP + x * R + j] = values[i][j];
    }

    // Stores this thread's part of a result's rows, each times a factor.
    __device__ void store_rows(const Rows& rows, unsigned head, unsigned first, const float (&values)[R][C], const float (&factors)[R]) const {
#pragma unroll
        for (int i = 0; i < R; ++i) {
            const unsigned t = first + y * R + i;
            if (t >= shape.seq_len) continue;
#pragma unroll
            for (int k = 0; k < C; ++k) {
                const unsigned d = x + SIDE * k;
                if (d < shape.head_size) store_rounded<float>(rows.first, shape.at(rows, head, t) + d, values[i][k] * factors[i]);
            }
        }
    }
};

template <int SIZE> __device__ void attention_forward(const AttentionForward& a) {
    using H = Head<SIZE>;
    constexpr int ROWS = H::ROWS, R = H::R, C = H::C;
    const H head(a.shape);
    SHARED(float, memory);
    float *q = memory, *kv = q + ROWS * H::LD, *p = kv + ROWS * H::LD;
    // Start with the tiles that have the most keys.
    const unsigned first = (gridDim.x - 1 - blockIdx.x) * ROWS, query_head = blockIdx.y, key_head = query_head / a.shape.group;
    head.load_tile(a.q, query_head, first, a.shape.softmax_scale, q);
    float out[R][C] = {}, top[R], total[R];
#pragma unroll
    for (int i = 0; i < R; ++i) top[i] = -INFINITY, total[i] = 0.0f;
    for (unsigned key = a.shape.first_key(first) / ROWS * ROWS; key <= first; key += ROWS) {
        head.load_tile(a.k, key_head, key, 1.0f, kv);
        __syncthreads();
        float s[R][R];
        head.scores(q, kv, s);
#pragma unroll
        for (int i = 0; i < R; ++i) {
            const unsigned row = first + head.y * R + i, column = key + head.x * R, bound = a.shape.first_key(row);
            float highest = -INFINITY;
#pragma unroll
            for (int j = 0; j < R; ++j) {
                if (a.shape.softcap != 0.0f) s[i][j] = a.shape.softcap * tanhf(s[i][j] / a.shape.softcap);
                s[i][j] = column + j <= row && column + j >= bound ? s[i][j] : -INFINITY;
                highest = fmaxf(highest, s[i][j]);
            }
            // Half a warp shares the rows. Before a row's first visible key its maximum is -∞, and -∞ - (-∞) would be
            // NaN.
            const float now = fmaxf(top[i], warp_reduce<SIDE>(highest, Max())), base = now == -INFINITY ? 0.0f : now;
            const float shrink = expf(top[i] - base);
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < R; ++j) {
                s[i][j] = expf(s[i][j] - base);
                sum += s[i][j];
            }
            top[i] = now;
            total[i] = total[i] * shrink + warp_reduce<SIDE>(sum, Add());
#pragma unroll
            for (int k = 0; k < C; ++k) out[i][k] *= shrink;
            apply_dropout(a.dropout, a.shape.row(query_head, row) * a.shape.seq_len + column, s[i]);
        }
        head.keep(s, p);
        __syncthreads();
        head.load_tile(a.v, key_head, key, 1.0f, kv);
        __syncthreads();
        head.template fold<false>(p, kv, out);
        __syncthreads();
    }
    float factors[R];
#pragma unroll
    for (int i = 0; i < R; ++i) {
        const unsigned row = first + head.y * R + i;
        factors[i] = 1.0f / total[i];
        if (head.x == 0 && row < a.shape.seq_len) store(a.lse, a.shape.row(query_head, row), top[i] + logf(total[i]));
    }
    head.store_rows(a.out, query_head, first, out, factors);
}

__device__ inline void attention_delta_of_rows(const AttentionDelta& a) {
    // One warp for each row of each head.
    const size_t task = static_cast<size_t>(blockIdx.x) * (THREADS / WARP) + threadIdx.x / WARP;
    const size_t rows = static_cast<size_t>(a.shape.batch) * a.shape.heads * a.shape.seq_len;
    if (task >= rows) return;
    const unsigned t = task % a.shape.seq_len, head = task / a.shape.seq_len % a.shape.heads;
    const size_t b = task / a.shape.seq_len / a.shape.heads;
    const size_t start = ((b * a.shape.seq_len + t) * a.shape.heads + head) * a.shape.head_size;
    float sum = 0.0f;
    for (unsigned d = threadIdx.x % WARP * N; d < a.shape.head_size; d += WARP * N) {
        float dout[N], out[N];
        load_pack<float>(a.dout, start + d, a.shape.whole, a.shape.head_size - d, dout);
        load_pack<float>(a.out, start + d, a.shape.whole, a.shape.head_size - d, out);
#pragma unroll
        for (int i = 0; i < N; ++i) sum += dout[i] * out[i];
    }
    sum = warp_reduce(sum, Add());
    if (threadIdx.x % WARP == 0) store(a.delta, task, sum);
}

// Replaces a thread's scores by the probabilities after dropout, and its dP by dS.
template <class H, int R>
__device__ inline void differentiate(const H& head, const AttentionBackward& a, unsigned query_head, unsigned query, unsigned key,
                                     float (&p)[R][R], float (&ds)[R][R]) {
#pragma unroll
    for (int i = 0; i < R; ++i) {
        const unsigned row = query + head.y * R + i, column = key + head.x * R;
        const bool inside = row < a.shape.seq_len;
        // A row outside the sequence attends to no key. (Testing `inside` again below would cost a register.)
        const unsigned bound = inside ? a.shape.first_key(row) : ~0u;
        const size_t at = a.shape.row(query_head, row);
        const float lse = inside ? load(a.lse, at) : 0.0f, delta = inside ? load(a.delta, at) : 0.0f;
        float mask[R];
#pragma unroll
        for (int j = 0; j < R; ++j) mask[j] = 1.0f;
        apply_dropout(a.dropout, at * a.shape.seq_len + column, mask);
#pragma unroll
        for (int j = 0; j < R; ++j) {
            float slope = 1.0f;
            if (a.shape.softcap != 0.0f) {
                const float capped = tanhf(p[i][j] / a.shape.softcap);
                p[i][j] = a.shape.softcap * capped;
                slope -= capped * capped;
            }
            const float probability = column + j <= row && column + j >= bound ? expf(p[i][j] - lse) : 0.0f;
            ds[i][j] = probability * (ds[i][j] * mask[j] - delta) * slope;
            p[i][j] = probability * mask[j];
        }
    }
}

// The gradients of a tile of keys and values, from all queries of all heads that see them.
template <int SIZE> __device__ void attention_backward_kv(const AttentionBackward& a) {
    using H = Head<SIZE>;
    constexpr int ROWS = H::ROWS, R = H::R, C = H::C, TILE = ROWS * H::LD;
    const H head(a.shape);
    SHARED(float, memory);
    float *k = memory, *v = k + TILE, *q = v + TILE, *dout = q + TILE, *p = dout + TILE, *ds = p + ROWS * H::LP;
    const unsigned first = blockIdx.x * ROWS, key_head = blockIdx.y, end = a.shape.end_of_queries(first + ROWS - 1);
    head.load_tile(a.k, key_head, first, 1.0f, k);
    head.load_tile(a.v, key_head, first, 1.0f, v);
    float dk[R][C] = {}, dv[R][C] = {}, ones[R];
    for (unsigned query_head = key_head * a.shape.group; query_head < (key_head + 1) * a.shape.group; ++query_head) {
        for (unsigned query = first; query < end; query += ROWS) {
            head.load_tile(a.q, query_head, query, a.shape.softmax_scale, q);
            head.load_tile(a.dout, query_head, query, 1.0f, dout);
            __syncthreads();
            float s[R][R], dp[R][R];
            head.scores(q, k, s);
            head.scores(dout, v, dp);
            differentiate(head, a, query_head, query, first, s, dp);
            head.keep(s, p);
            head.keep(dp, ds);
            __syncthreads();
            head.template fold<true>(p, dout, dv);
            head.template fold<true>(ds, q, dk);
            __syncthreads();
        }
    }
#pragma unroll
    for (int i = 0; i < R; ++i) ones[i] = 1.0f;
    head.store_rows(a.dk, key_head, first, dk, ones);
    head.store_rows(a.dv, key_head, first, dv, ones);
}

// The gradient of a tile of queries, from all keys that they see.
template <int SIZE> __device__ void attention_backward_q(const AttentionBackward& a) {
    using H = Head<SIZE>;
    constexpr int ROWS = H::ROWS, R = H::R, C = H::C, TILE = ROWS * H::LD;
    const H head(a.shape);
    SHARED(float, memory);
    float *k = memory, *v = k + TILE, *q = v + TILE, *dout = q + TILE, *ds = dout + TILE;
    const unsigned first = (gridDim.x - 1 - blockIdx.x) * ROWS, query_head = blockIdx.y, key_head = query_head / a.shape.group;
    head.load_tile(a.q, query_head, first, a.shape.softmax_scale, q);
    head.load_tile(a.dout, query_head, first, 1.0f, dout);
    float dq[R][C] = {}, scales[R];
    for (unsigned key = a.shape.first_key(first) / ROWS * ROWS; key <= first; key += ROWS) {
        head.load_tile(a.k, key_head, key, 1.0f, k);
        head.load_tile(a.v, key_head, key, 1.0f, v);
        __syncthreads();
        float s[R][R], dp[R][R];
        head.scores(q, k, s);
        head.scores(dout, v, dp);
        differentiate(head, a, query_head, first, key, s, dp);
        head.keep(dp, ds);
        __syncthreads();
        head.template fold<false>(ds, k, dq);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < R; ++i) scales[i] = a.shape.softmax_scale;
    head.store_rows(a.dq, query_head, first, dq, scales);
}

// One entry for each of these head sizes; other heads run in the next larger one.
#define ENTRIES_SIZE(size)                                                                        \
    ENTRY(attention_forward_f32_##size, THREADS, AttentionForward, attention_forward<size>)       \
    ENTRY(attention_backward_kv_f32_##size, THREADS, AttentionBackward, attention_backward_kv<size>) \
    ENTRY(attention_backward_q_f32_##size, THREADS, AttentionBackward, attention_backward_q<size>)

ENTRY(attention_delta, THREADS, AttentionDelta, attention_delta_of_rows)
ENTRIES_SIZE(32)
ENTRIES_SIZE(64)
ENTRIES_SIZE(96)
ENTRIES_SIZE(128)
ENTRIES_SIZE(256)
