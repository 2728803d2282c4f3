// Softmax, loss and gradient of rows of logits: the counterpart of `rows` in cross_entropy.rs.
#include "cuda/tensor_core.cuh"

struct CrossEntropy {
    void* logits;             // [rows, stride], T, the first `vocab` of each row; the gradient overwrites the row
    const unsigned* targets;  // [rows]
    float* losses;            // [rows]
    const float* factors;     // [rows], the gradient of each row's loss; null for the loss alone
    unsigned rows, vocab, stride;
    unsigned is_kept;  // whether a row is read once, into shared memory; requires packs to be whole
};

constexpr unsigned THREADS = 512;
constexpr unsigned WARPS = THREADS / WARP;
constexpr int N = 8;
constexpr unsigned IGNORE = 0xffffffffu;

// One block per row: maximum and sum in one pass over the logits, the gradient in a second.
template <class T> __device__ void cross_entropy(const CrossEntropy& a) {
    SHARED(unsigned char, shared);  // scratch [WARPS] for float, then the row's packs if they are kept
    float* const scratch = reinterpret_cast<float*>(shared);
    Pack<T, N>* const packs = reinterpret_cast<Pack<T, N>*>(scratch + WARPS);
    const unsigned row = blockIdx.x, target = load(a.targets, row);
    const size_t start = static_cast<size_t>(row) * a.stride;
    const bool whole = a.stride % N == 0;
    // `f(c)` for each pack of the thread.
    const auto for_each = [&](auto f) {
        for (unsigned c = threadIdx.x * N; c < a.vocab; c += THREADS * N) f(c);
    };
    float x[N];
    if (target == IGNORE) {
        if (a.factors != nullptr) {
#pragma unroll
            for (int i = 0; i < N; ++i) x[i] = 0.0f;
            for_each([&](unsigned c) { store_pack<T>(a.logits, start + c, whole, a.vocab - c, x); });
        }
        if (threadIdx.x == 0) store(a.losses, row, 0.0f);
        return;
    }
    if (a.is_kept) {
        for_each([&](unsigned c) {
            const auto* source = reinterpret_cast<const Pack<T, N>*>(static_cast<const T*>(a.logits) + start + c);
#pragma unroll
            for (unsigned i = 0; i < sizeof(*source); i += 16) {
                copy_async<16>(reinterpret_cast<char*>(packs + c / N) + i, reinterpret_cast<const char*>(source) + i, true);
            }
        });
        // A thread reads only its own copies, so there is no barrier.
        commit_copies();
        wait_for_copies<0>();
    }
    // Reads the logits from column `c` on; those after the vocabulary are -∞.
    const auto read = [&](unsigned c) {
        if (a.is_kept) {
            widen(packs[c / N], x);
        } else {
            load_pack<T>(a.logits, start + c, whole, a.vocab - c, x);
        }
        if (a.vocab - c >= N) return;
#pragma unroll
        for (unsigned i = 0; i < N; ++i) x[i] = c + i < a.vocab ? x[i] : -INFINITY;
    };
    // The largest power in the sum is 1. A thread's maximum starts at -∞, and -∞ - (-∞) would be NaN.
    float top = -INFINITY, base = -INFINITY, sum = 0.0f;
    for_each([&](unsigned c) {
        read(c);
#pragma unroll
        for (int i = 0; i < N; ++i) top = fmaxf(top, x[i]);
        const float next = top == -INFINITY ? 0.0f : top * LOG_E<T>;
        sum *= power<T>(base - next);
#pragma unroll
        for (int i = 0; i < N; ++i) sum += power<T>(x[i] * LOG_E<T> - next);
        base = top * LOG_E<T>;
    });
    const float highest = block_reduce<WARPS>(top, Max(), scratch), shift = highest * LOG_E<T>;
    const float total = block_reduce<WARPS>(top == -INFINITY ? sum : sum * power<T>(base - shift), Add(), scratch);
    if (threadIdx.x == 0) {
        const float picked = load_as_float<T>(a.logits, start + target);
        store(a.losses, row, logf(total) + (highest - picked));
    }
    if (a.factors == nullptr) return;
    __syncthreads();  // the target's logit is read
    const float seed = load(a.factors, row), factor = seed / total;
    for_each([&](unsigned c) {
        read(c);
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] = power<T>(x[i] * LOG_E<T> - shift) * factor;
        if (c <= target && target < c + N) {
#pragma unroll
            for (unsigned i = 0; i < N; ++i) x[i] -= c + i == target ? seed : 0.0f;
        }
        store_pack<T>(a.logits, start + c, whole, a.vocab - c, x);
    });
}

ENTRIES(cross_entropy, THREADS, CrossEntropy)
