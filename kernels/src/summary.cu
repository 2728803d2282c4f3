// Statistics of a gradient before anything rescales it: the counterpart of summary.rs and TensorStats.
//
// All tensors in one launch, first by chunks, then merged: single tensors are too small to keep a GPU busy. Counts are
// integers, so their atomic sums are deterministic; squares are added in f64 along fixed trees.
#include "cuda/stats.cuh"

struct TensorEntry {
    const void* data;  // T
    u64 len;
    u64 first;             // its first chunk; tensors are in their chunks' order
    unsigned min_normal;   // FP32 pattern of the storage type's smallest normal number
    unsigned place;        // of its figures
};

// The statistics of a tensor.
struct Figures {
    TensorStats stats;
    unsigned exponents[256];  // by FP32's exponent field
};

struct StatsLaunch {
    const TensorEntry* tensors;  // [count]
    ChunkStats* partial;            // [chunks]
    Figures* figures;               // zeros at the start
    u64 first;                      // the first chunk of these tensors
    unsigned count;
    unsigned has_exponents;
};

// Elements of a chunk, and so of a block.
constexpr unsigned CHUNK = 1 << 14;
constexpr unsigned THREADS = 256;
constexpr unsigned WARPS = THREADS / WARP;
constexpr unsigned BINS = sizeof(Figures::exponents) / sizeof(unsigned);
constexpr int N = 8;
constexpr unsigned INF = 0x7f800000u;

// The tensor that has this chunk; `place` is shared.
__device__ inline TensorEntry tensor_of(const StatsLaunch& a, u64 chunk, unsigned* place) {
    for (unsigned i = threadIdx.x; i < a.count; i += THREADS) {
        const TensorEntry tensor = load(a.tensors, i);
        if (tensor.first <= chunk && chunk - tensor.first < (tensor.len + CHUNK - 1) / CHUNK) *place = i;
    }
    __syncthreads();
    const TensorEntry found = load(a.tensors, *place);
    __syncthreads();
    return found;
}

template <class T> __device__ void summarize_chunks(const StatsLaunch& a) {
    // A histogram for each warp, because neighbours often have the same exponent and would contend for one counter.
    SHARED(unsigned, counters);  // [WARPS, BINS], then scratch [WARPS] for f64
    double* const scratch = reinterpret_cast<double*>(counters + WARPS * BINS);
    unsigned* const own = counters + threadIdx.x / WARP * BINS;
    const u64 chunk = a.first + blockIdx.x;
    const TensorEntry tensor = tensor_of(a, chunk, counters);
    const u64 first = (chunk - tensor.first) * CHUNK;
    const unsigned here = static_cast<unsigned>(tensor.len - first < CHUNK ? tensor.len - first : CHUNK);
    if (a.has_exponents) {
        for (unsigned i = threadIdx.x; i < WARPS * BINS; i += THREADS) counters[i] = 0;
        __syncthreads();
    }
    unsigned zero = 0, subnormal = 0, inf = 0, nan = 0, least = EVERY_LANE, most = 0;
    double squares = 0.0;
    for (unsigned i = threadIdx.x * N; i < here; i += THREADS * N) {
        const unsigned count = min(here - i, static_cast<unsigned>(N));
        float x[N];
        load_pack<T>(tensor.data, first + i, count == N, count, x);
#pragma unroll
        for (unsigned k = 0; k < N; ++k) {
            if (k >= count) continue;
            const unsigned bits = __float_as_uint(x[k]) & 0x7fffffffu;
            const bool finite = bits < INF;
            zero += bits == 0;
            subnormal += bits != 0 && bits < tensor.min_normal;
            inf += bits == INF;
            nan += bits > INF;
            // The smallest pattern minus one, so that zero wraps around to the largest.
            least = min(least, finite ? bits - 1 : EVERY_LANE);
            most = max(most, finite ? bits : 0u);
            const double value = finite ? x[k] : 0.0f;
            squares += value * value;
            if (a.has_exponents && finite && bits != 0) atomicAdd(&own[bits >> 23], 1u);
        }
    }
    const ChunkStats stats = {
        block_reduce<WARPS>(zero, Add(), scratch),  block_reduce<WARPS>(subnormal, Add(), scratch),
        block_reduce<WARPS>(inf, Add(), scratch),   block_reduce<WARPS>(nan, Add(), scratch),
        block_reduce<WARPS>(least, Min(), scratch), block_reduce<WARPS>(most, Max(), scratch),
        block_reduce<WARPS>(squares, Add(), scratch)};
    if (threadIdx.x == 0) store(a.partial, chunk, stats);
    // The reductions' barriers separate the counting from this.
    if (a.has_exponents) {
        unsigned sum = 0;
        for (unsigned warp = 0; warp < WARPS; ++warp) sum += counters[warp * BINS + threadIdx.x];
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
