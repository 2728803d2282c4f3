// The gradient of an embedding: each token's rows are summed and added to its row of the table. The counterpart of
// embedding.rs.
//
// The host sorts the rows by token, so that every sum has a fixed order and no atomics are needed.
#include "cuda/random.cuh"

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

// One block per group.
template <class S, class T> __device__ void embedding_backward(const EmbeddingBackward& a) {
    const unsigned group = blockIdx.x;
    const unsigned begin = group == 0 ? 0 : load(a.groups, 2 * group - 1), end = load(a.groups, 2 * group + 1);
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

ENTRIES_WIDE_FIRST(embedding_backward, THREADS, EmbeddingBackward)
ENTRY(embedding_backward_f16_f32, THREADS, EmbeddingBackward, embedding_backward<f16, float>)
ENTRY(embedding_backward_bf16_f32, THREADS, EmbeddingBackward, embedding_backward<bf16, float>)
