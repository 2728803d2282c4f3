// Token and position embeddings: the twin of embedding.rs. W is the weights' type, S the stream's, G the gradients'.
#include "cuda/random.cuh"

struct EmbeddingForward {
    const void *wte, *wpe;  // W
    const unsigned* ids;
    void* out;  // S
    unsigned rows, width, seq_len;
    unsigned unused;
    Dropout dropout;
};

// The rows of the stream's gradient, grouped by token: `order` holds the rows' numbers by token and in batch order within
// it, group g those from `starts[g]` to `starts[g + 1]`. Behind the last group all starts are `rows`. The host, which knows
// the ids, sorts them before the batch is sent.
struct TokenGradient {
    const void* dx;  // S
    const unsigned *ids, *order, *starts;
    void* dwte;  // G, added to
    unsigned rows, width;
    Dropout dropout;
};

struct PositionGradient {
    const void* dx;  // S
    void* dwpe;      // G, overwritten
    unsigned rows, width, seq_len;
    unsigned unused;
    Dropout dropout;
};

constexpr unsigned THREADS = 256;
constexpr unsigned WARPS = THREADS / WARP;
// In the gradients, a block takes 256 columns: LANES of its threads share four of them and take turns at the rows.
constexpr int N = 4;
constexpr unsigned PACKS = 64;
constexpr unsigned LANES = THREADS / PACKS;

template <class S, class W> __device__ void embedding_forward(const EmbeddingForward& a) {
    constexpr int N = NEIGHBOURS<S, W>;
    const unsigned row = blockIdx.x * WARPS + threadIdx.x / WARP;
    if (row >= a.rows) return;
    const bool whole = a.width % N == 0;
    const size_t start = static_cast<size_t>(row) * a.width;
    const size_t token = static_cast<size_t>(load(a.ids, row)) * a.width;
    const size_t position = static_cast<size_t>(row % a.seq_len) * a.width;
    for (unsigned c = threadIdx.x % WARP * N; c < a.width; c += WARP * N) {
        float sum[N], second[N];
        load_pack<W>(a.wte, token + c, whole, a.width - c, sum);
        load_pack<W>(a.wpe, position + c, whole, a.width - c, second);
#pragma unroll
        for (int i = 0; i < N; ++i) sum[i] += second[i];
        apply_dropout(a.dropout, start + c, sum);
        store_pack<S>(a.out, start + c, whole, a.width - c, sum);
    }
}

// Calls `finish(column, whole, sums)` with the sum of `count` rows of dx, the i-th of which is `row_of(i)`, in one thread for
// each pack of columns. Each lane adds its rows in order, and the lanes are added in order.
template <class S, class Rows, class Finish>
__device__ inline void sum_rows(const void* dx, unsigned width, const Dropout& dropout, unsigned count, Rows row_of, Finish finish) {
    SHARED(float, lanes);  // [LANES, PACKS, N]
    const unsigned lane = threadIdx.x / PACKS, pack = threadIdx.x % PACKS;
    const unsigned c = (blockIdx.y * PACKS + pack) * N;
    const bool whole = width % N == 0;
    float sums[N] = {};
    if (c < width) {
#pragma unroll 4
        for (unsigned i = lane; i < count; i += LANES) {
            const size_t at = static_cast<size_t>(row_of(i)) * width + c;
            float x[N];
            load_pack<S>(dx, at, whole, width - c, x);
            apply_dropout(dropout, at, x);
#pragma unroll
            for (int k = 0; k < N; ++k) sums[k] += x[k];
        }
    }
#pragma unroll
    for (int k = 0; k < N; ++k) lanes[threadIdx.x * N + k] = sums[k];
    __syncthreads();
    if (lane > 0 || c >= width) return;
#pragma unroll
    for (unsigned other = 1; other < LANES; ++other) {
#pragma unroll
        for (int k = 0; k < N; ++k) sums[k] += lanes[(other * PACKS + pack) * N + k];
    }
    finish(c, whole, sums);
}

template <class S, class G> __device__ void token_gradient(const TokenGradient& a) {
    const unsigned first = load(a.starts, blockIdx.x), end = load(a.starts, blockIdx.x + 1);
    if (first == end) return;
    const size_t row = static_cast<size_t>(load(a.ids, load(a.order, first))) * a.width;
    sum_rows<S>(a.dx, a.width, a.dropout, end - first, [&](unsigned i) { return load(a.order, first + i); },
                [&](unsigned c, bool whole, float (&sums)[N]) {
                    float before[N];
                    load_pack<G>(a.dwte, row + c, whole, a.width - c, before);
#pragma unroll
                    for (int i = 0; i < N; ++i) sums[i] += before[i];
                    store_pack<G>(a.dwte, row + c, whole, a.width - c, sums);
                });
}

template <class S, class G> __device__ void position_gradient(const PositionGradient& a) {
    const unsigned position = blockIdx.x, count = position < a.seq_len ? a.rows / a.seq_len : 0;
    const size_t row = static_cast<size_t>(position) * a.width;
    sum_rows<S>(a.dx, a.width, a.dropout, count, [&](unsigned i) { return position + i * a.seq_len; },
                [&](unsigned c, bool whole, float (&sums)[N]) { store_pack<G>(a.dwpe, row + c, whole, a.width - c, sums); });
}

ENTRIES_WIDE_FIRST(embedding_forward, THREADS, EmbeddingForward)
ENTRIES_ANY_PAIR(token_gradient, THREADS, TokenGradient)
ENTRIES_ANY_PAIR(position_gradient, THREADS, PositionGradient)
