// The residual stream: the twin of residual.rs. S is the stream's type, T that of the products.
#include "cuda/random.cuh"

struct ResidualAdd {
    const void *stream, *branch;  // S, T
    void* out;                    // S
    u64 len;
    Dropout dropout;
};

struct BranchGradient {
    const void* stream;  // S
    void* branch;        // T
    u64 len;
    Dropout dropout;
};

constexpr unsigned THREADS = 256;
constexpr int N = 8;

template <class S, class T> __device__ void residual_add(const ResidualAdd& a) {
    for_each_pack<N>(a.len, [&](size_t at, bool whole, unsigned count) {
        float stream[N], branch[N];
        load_pack<S>(a.stream, at, whole, count, stream);
        load_pack<T>(a.branch, at, whole, count, branch);
        apply_dropout(a.dropout, at, branch);
#pragma unroll
        for (int i = 0; i < N; ++i) stream[i] += branch[i];
        store_pack<S>(a.out, at, whole, count, stream);
    });
}

template <class S, class T> __device__ void branch_gradient(const BranchGradient& a) {
    for_each_pack<N>(a.len, [&](size_t at, bool whole, unsigned count) {
        float gradient[N];
        load_pack<S>(a.stream, at, whole, count, gradient);
        apply_dropout(a.dropout, at, gradient);
        store_pack<T>(a.branch, at, whole, count, gradient);
    });
}

ENTRIES_WIDE_FIRST(residual_add, THREADS, ResidualAdd)
ENTRIES_WIDE_FIRST(branch_gradient, THREADS, BranchGradient)
