// Copies and sums between types: the twin of `copy` and `accumulate` in view.rs.
#include "cuda/common.cuh"

struct Streamed {
    const void* x;  // X
    void* out;      // Y
    u64 len;
};

constexpr unsigned THREADS = 256;
constexpr int N = 8;

template <class X, class Y> __device__ void copy(const Streamed& a) {
    for_each_pack<N>(a.len, [&](size_t at, bool whole, unsigned count) {
        float x[N];
        load_pack<X>(a.x, at, whole, count, x);
        store_pack<Y>(a.out, at, whole, count, x);
    });
}

template <class X, class Y> __device__ void accumulate(const Streamed& a) {
    for_each_pack<N>(a.len, [&](size_t at, bool whole, unsigned count) {
        float x[N], out[N];
        load_pack<X>(a.x, at, whole, count, x);
        load_pack<Y>(a.out, at, whole, count, out);
#pragma unroll
        for (int i = 0; i < N; ++i) out[i] += x[i];
        store_pack<Y>(a.out, at, whole, count, out);
    });
}

ENTRIES_ANY_PAIR(copy, THREADS, Streamed)
ENTRIES_ANY_PAIR(accumulate, THREADS, Streamed)
