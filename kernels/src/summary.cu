// Statistics of a gradient before anything rescales it: the counterpart of summary.rs and TensorStats.
//
// All tensors in one launch, first by chunks, then merged: single tensors are too small to keep a GPU busy. Counts are
// integers, so their atomic sums are deterministic; squares are added in f64 along fixed trees.
#include "cuda/stats.cuh"

struct TensorEntry {
    const void* data;  // T
    u64 len;
    u64 first;            // its first chunk; tensors are in their chunks' order
    unsigned min_normal;  // FP32 pattern of the storage type's smallest normal number
    unsigned place;       // of its figures
};

// The statistics of a tensor.
struct Figures {
    TensorStats stats;
    unsigned exponents[256];  // by FP32's exponent field
};

struct StatsLaunch {
    const TensorEntry* tensors;  // [count]
    ChunkStats* partial;         // [chunks]
    Figures* figures;            // zeros at the start
    u64 first;                   // the first chunk of these tensors
    unsigned count;
    unsigned has_exponents;
};

// Copies of the histogram: lanes take turns, because neighbors often have the same exponent and would contend for one
// counter.
constexpr unsigned COPIES = 16;
// Elements of a chunk, and so of a block.
constexpr unsigned CHUNK = 1 << 14;
constexpr unsigned THREADS = 256;
constexpr unsigned WARPS = THREADS / WARP;
constexpr unsigned BINS = sizeof(Figures::exponents) / sizeof(unsigned);
constexpr int N = 8;
constexpr unsigned INF = 0x7f800000u;

// The FP32 pattern of |x|.
__device__ inline unsigned magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

template <class T> __device__ void summarize_chunks(const StatsLaunch& a) {
    SHARED(unsigned, counters);  // [BINS, COPIES], then scratch [WARPS] for f64
    double* const scratch = reinterpret_cast<double*>(counters + BINS * COPIES);
    unsigned* const own = counters + threadIdx.x % COPIES;
    const u64 chunk = a.first + blockIdx.x;
    const TensorEntry tensor = tensor_of<CHUNK>(a.tensors, a.count, chunk, counters);
    const u64 first = (chunk - tensor.first) * CHUNK;
    const unsigned here = static_cast<unsigned>(tensor.len - first < CHUNK ? tensor.len - first : CHUNK);
    if (a.has_exponents) {
        for (unsigned i = threadIdx.x; i < BINS * COPIES; i += THREADS) counters[i] = 0;
        __syncthreads();
    }
    // 16 bits for each class, which hold a chunk's count: zero, subnormal, infinite, NaN.
    u64 classes = 0;
    unsigned least = EVERY_LANE, most = 0;
    double squares = 0.0;
    for (unsigned i = threadIdx.x * N; i < here; i += THREADS * N) {
        const unsigned count = min(here - i, static_cast<unsigned>(N));
        float x[N];
        load_pack<T>(tensor.data, first + i, count == N, count, x);
        unsigned lowest = EVERY_LANE, highest = 0;
#pragma unroll
        for (int k = 0; k < N; ++k) {
            lowest = min(lowest, magnitude(x[k]));
            highest = max(highest, magnitude(x[k]));
        }
        if (lowest >= tensor.min_normal && highest < INF) {
            // Nearly all packs: normal numbers only.
            least = min(least, lowest - 1);
            most = max(most, highest);
        } else {
#pragma unroll
            for (unsigned k = 0; k < N; ++k) {
                if (k >= count) continue;
                const unsigned bits = magnitude(x[k]);
                const bool finite = bits < INF;
                if (bits < tensor.min_normal) classes += bits == 0 ? 1 : 1 << 16;
                if (!finite) classes += bits == INF ? 1ull << 32 : 1ull << 48;
                // The smallest pattern minus one, so that zero wraps around to the largest.
                least = min(least, finite ? bits - 1 : EVERY_LANE);
                most = max(most, finite ? bits : 0u);
                if (!finite) x[k] = 0.0f;
            }
        }
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const double value = x[k];
            squares += value * value;
            if (a.has_exponents && x[k] != 0.0f) atomicAdd(&own[(magnitude(x[k]) >> 23) * COPIES], 1u);
        }
    }
    classes = block_reduce<WARPS>(classes, Add(), scratch);
    const auto of_class = [&](unsigned k) { return static_cast<unsigned>(classes >> 16 * k & 0xffff); };
    const ChunkStats stats = {of_class(0), of_class(1), of_class(2), of_class(3), block_reduce<WARPS>(least, Min(), scratch),
                              block_reduce<WARPS>(most, Max(), scratch), block_reduce<WARPS>(squares, Add(), scratch)};
    if (threadIdx.x == 0) store(a.partial, chunk, stats);
    // The reductions' barriers separate the counting from this.
    if (a.has_exponents) {
        unsigned sum = 0;
        // Threads begin with different copies, which are in different banks.
#pragma unroll
        for (unsigned i = 0; i < COPIES; ++i) sum += counters[threadIdx.x * COPIES + (i + threadIdx.x / 2) % COPIES];
        unsigned* const total = a.figures[tensor.place].exponents + threadIdx.x;
        CHECK_WRITE(total, sizeof(*total));
        if (sum > 0) atomicAdd(total, sum);
    }
}

// One block per tensor.
__device__ void merge_chunks(const StatsLaunch& a) {
    SHARED(double, scratch);  // [WARPS]
    const TensorEntry tensor = load(a.tensors, blockIdx.x);
    const u64 chunks = (tensor.len + CHUNK - 1) / CHUNK;
    TensorStats sum = nothing();
    for (u64 i = threadIdx.x; i < chunks; i += THREADS) {
        const ChunkStats part = load(a.partial, tensor.first + i);
        merge(sum, {0, part.zero, part.subnormal, part.inf, part.nan, part.least, part.most, part.squares});
    }
    sum = block_merge<WARPS>(sum, scratch);
    sum.count = tensor.len;
    if (threadIdx.x == 0) store(&a.figures[tensor.place].stats, 0, sum);
}

ENTRIES(summarize_chunks, THREADS, StatsLaunch)
ENTRY(summarize_tensors, THREADS, StatsLaunch, merge_chunks)
