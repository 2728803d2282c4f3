// Embeddings, and their gradient: each token's rows are summed and added to its row of the table. The counterpart of
// embedding.rs.
//
// The host sorts the rows by token, so that every sum has a fixed order and no atomics are needed.
#include "cuda/random.cuh"

struct EmbeddingForward {
    const void* table;       // [V, width], T
    const void* positions;   // [C, width], T; null without
    const unsigned* ids;     // [rows]
    const unsigned* starts;  // [rows]: the row of its sequence at which a row's document starts; null if all are 0
    void* out;               // [rows, width], S
    u64 len;                 // elements of `out`
    unsigned width;          // a multiple of N
    unsigned seq_len;
    float scale;
    unsigned unused;
    Dropout dropout;
};

struct EmbeddingBackward {
    const void* dx;          // [rows, width], S
    void* dtable;            // [V, width], T
    const unsigned* order;   // [rows]: rows by group
    const unsigned* groups;  // [groups, 2]: the row of the table, and the end in `order`; a group begins where the last one ends
    unsigned width;          // a multiple of N
    unsigned count;          // groups
    float scale;
    unsigned unused;
    Dropout dropout;
};

constexpr unsigned THREADS = 128;
constexpr int N = 8;

template <class S, class T> __device__ void embedding_forward(const EmbeddingForward& a) {
    for_each_pack<N>(a.len, [&](size_t at, bool, unsigned) {
        const unsigned row = at / a.width, column = at % a.width;
        float x[N], position[N] = {};
        load_pack<T>(a.table, static_cast<size_t>(load(a.ids, row)) * a.width + column, true, N, x);
        if (a.positions != nullptr) {
            const unsigned place = row % a.seq_len, start = a.starts == nullptr ? 0 : load(a.starts, row);
            const size_t from = place > start ? place - start : 0;
            load_pack<T>(a.positions, from * a.width + column, true, N, position);
        }
#pragma unroll
        for (int k = 0; k < N; ++k) x[k] = x[k] * a.scale + position[k];
        apply_dropout(a.dropout, at, x);
        store_pack<S>(a.out, at, true, N, x);
    });
}

// One block per group, which may be empty.
template <class S, class T> __device__ void embedding_backward(const EmbeddingBackward& a) {
    const unsigned group = blockIdx.x;
    const unsigned begin = group == 0 ? 0 : load(a.groups, 2 * group - 1), end = load(a.groups, 2 * group + 1);
    if (begin == end) return;
    const size_t out = static_cast<size_t>(load(a.groups, 2 * group)) * a.width;
    for (unsigned column = threadIdx.x * N; column < a.width; column += THREADS * N) {
        float sum[N] = {}, x[N];
        for (unsigned i = begin; i < end; ++i) {
            const size_t at = static_cast<size_t>(load(a.order, i)) * a.width + column;
            load_pack<S>(a.dx, at, true, N, x);
            apply_dropout(a.dropout, at, x);
#pragma unroll
            for (int k = 0; k < N; ++k) sum[k] += x[k];
        }
        load_pack<T>(a.dtable, out + column, true, N, x);
#pragma unroll
        for (int k = 0; k < N; ++k) x[k] += sum[k] * a.scale;
        store_pack<T>(a.dtable, out + column, true, N, x);
    }
}

ENTRIES_WIDE_FIRST(embedding_forward, THREADS, EmbeddingForward)
ENTRY(embedding_forward_f16_f32, THREADS, EmbeddingForward, embedding_forward<f16, float>)
ENTRY(embedding_forward_bf16_f32, THREADS, EmbeddingForward, embedding_forward<bf16, float>)
ENTRIES_WIDE_FIRST(embedding_backward, THREADS, EmbeddingBackward)
ENTRY(embedding_backward_f16_f32, THREADS, EmbeddingBackward, embedding_backward<f16, float>)
ENTRY(embedding_backward_bf16_f32, THREADS, EmbeddingBackward, embedding_backward<bf16, float>)
