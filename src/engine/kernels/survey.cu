// Statistics of a gradient before anything rescales it: the twin of survey.rs and of TensorStats.
//
// First by chunks, then merged. Counts are integers, so their atomic sums are deterministic; squares are added in f64 along
// fixed trees.
#include "cuda/stats.cuh"

struct SurveyChunks {
    const void* data;     // T
    ChunkStats* partial;  // [chunks]
    unsigned* exponents;  // [256] by FP32's exponent field, zeros at the start; null for no histogram
    u64 len;
    unsigned min_normal;  // FP32 pattern of the storage type's smallest normal number
    unsigned unused;
};

struct SurveyTensor {
    const ChunkStats* partial;
    TensorStats* stats;
    u64 len;
};

// Elements of a chunk, and so of a block.
constexpr unsigned CHUNK = 1 << 14;
constexpr unsigned THREADS = 256;
constexpr unsigned WARPS = THREADS / WARP;
constexpr unsigned BINS = 256;
constexpr int N = 8;
constexpr unsigned INF = 0x7f800000u;

template <class T> __device__ void survey_chunks(const SurveyChunks& a) {
    // A histogram for each warp, because neighbours often have the same exponent and would contend for one counter.
    SHARED(unsigned, counters);  // [WARPS, BINS], then scratch [WARPS] for f64
    double* const scratch = reinterpret_cast<double*>(counters + WARPS * BINS);
    unsigned* const own = counters + threadIdx.x / WARP * BINS;
    const size_t first = static_cast<size_t>(blockIdx.x) * CHUNK;
    const unsigned here = static_cast<unsigned>(a.len - first < CHUNK ? a.len - first : CHUNK);
    if (a.exponents != nullptr) {
        for (unsigned i = threadIdx.x; i < WARPS * BINS; i += THREADS) counters[i] = 0;
        __syncthreads();
    }
    unsigned zero = 0, subnormal = 0, inf = 0, nan = 0, least = EVERY_LANE, most = 0;
    double squares = 0.0;
    for (unsigned i = threadIdx.x * N; i < here; i += THREADS * N) {
        const unsigned count = min(here - i, static_cast<unsigned>(N));
        float x[N];
        load_pack<T>(a.data, first + i, count == N, count, x);
#pragma unroll
        for (unsigned k = 0; k < N; ++k) {
            if (k >= count) continue;
            const unsigned bits = __float_as_uint(x[k]) & 0x7fffffffu;
            const bool finite = bits < INF;
            zero += bits == 0;
            subnormal += bits != 0 && bits < a.min_normal;
            inf += bits == INF;
            nan += bits > INF;
            // The smallest pattern minus one, so that zero wraps around to the largest.
            least = min(least, finite ? bits - 1 : EVERY_LANE);
            most = max(most, finite ? bits : 0u);
            const double value = finite ? x[k] : 0.0f;
            squares += value * value;
            if (a.exponents != nullptr && finite && bits != 0) atomicAdd(&own[bits >> 23], 1u);
        }
    }
    const ChunkStats stats = {
        block_reduce<WARPS>(zero, Add(), scratch),  block_reduce<WARPS>(subnormal, Add(), scratch),
        block_reduce<WARPS>(inf, Add(), scratch),   block_reduce<WARPS>(nan, Add(), scratch),
        block_reduce<WARPS>(least, Min(), scratch), block_reduce<WARPS>(most, Max(), scratch),
        block_reduce<WARPS>(squares, Add(), scratch)};
    if (threadIdx.x == 0) store(a.partial, blockIdx.x, stats);
    // The reductions' barriers separate the counting from this.
    if (a.exponents != nullptr) {
        unsigned sum = 0;
        for (unsigned warp = 0; warp < WARPS; ++warp) sum += counters[warp * BINS + threadIdx.x];
        unsigned* const total = a.exponents + threadIdx.x;
        CHECK_WRITE(total, sizeof(*total));
        if (sum > 0) atomicAdd(total, sum);
    }
}

// One block.
__device__ void merge_chunks(const SurveyTensor& a) {
    SHARED(double, scratch);  // [WARPS]
    const size_t chunks = (a.len + CHUNK - 1) / CHUNK;
    TensorStats sum = nothing();
    for (size_t i = threadIdx.x; i < chunks; i += THREADS) {
        const ChunkStats part = load(a.partial, i);
        merge(sum, {0, part.zero, part.subnormal, part.inf, part.nan, part.least, part.most, part.squares});
    }
    sum = block_merge<WARPS>(sum, scratch);
    sum.count = a.len;
    if (threadIdx.x == 0) store(a.stats, 0, sum);
}

ENTRIES(survey_chunks, THREADS, SurveyChunks)
ENTRY(survey_tensor, THREADS, SurveyTensor, merge_chunks)
