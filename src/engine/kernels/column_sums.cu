// Sums over rows in two stages and a fixed order: parts of the rows first, then the parts. Biases' and layer norms'
// gradients come this way; see rows.rs.
#include "cuda/common.cuh"

struct ColumnSums {
    const void* x;   // [rows, columns], T
    float* partial;  // [parts, columns]
    unsigned rows, columns, rows_per_part;
    unsigned unused;
};

struct SumParts {
    const float* partial;  // [parts, outputs, columns]
    void* out[2];          // [columns] each, T
    unsigned parts, columns, outputs;
    unsigned unused;
};

constexpr unsigned THREADS = 256;
constexpr unsigned LANES = THREADS / WARP;
constexpr int N = 4;

// A block sums 128 columns of one part: warp k takes its rows k, k + 8, ….
template <class T> __device__ void column_sums(const ColumnSums& a) {
    SHARED(float, lanes);  // [LANES, WARP * N]
    const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const unsigned column = (blockIdx.x * WARP + lane) * N;
    const unsigned begin = blockIdx.y * a.rows_per_part, end = min(begin + a.rows_per_part, a.rows);
    const bool whole = a.columns % N == 0;
    float sums[N] = {};
    if (column < a.columns) {
#pragma unroll 4
        for (unsigned row = begin + warp; row < end; row += LANES) {
            float x[N];
            load_pack<T>(a.x, static_cast<size_t>(row) * a.columns + column, whole, a.columns - column, x);
#pragma unroll
            for (int i = 0; i < N; ++i) sums[i] += x[i];
        }
    }
#pragma unroll
    for (int i = 0; i < N; ++i) lanes[(warp * WARP + lane) * N + i] = sums[i];
    __syncthreads();
    // 128 threads finish a column each.
    const unsigned c = blockIdx.x * WARP * N + threadIdx.x;
    if (threadIdx.x < WARP * N && c < a.columns) {
        float sum = 0.0f;
#pragma unroll
        for (unsigned i = 0; i < LANES; ++i) sum += lanes[i * WARP * N + threadIdx.x];
        store(a.partial, static_cast<size_t>(blockIdx.y) * a.columns + c, sum);
    }
}

// A block finishes 32 columns: warp k adds the parts k, k + 8, ….
template <class T> __device__ void sum_parts(const SumParts& a) {
    SHARED(float, lanes);  // [LANES, WARP]
    const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const unsigned column = blockIdx.x * WARP + lane, row = a.outputs * a.columns;
    float sum = 0.0f;
    if (column < row) {
#pragma unroll 4
        for (unsigned part = warp; part < a.parts; part += LANES) sum += load(a.partial, static_cast<size_t>(part) * row + column);
    }
    lanes[threadIdx.x] = sum;
    __syncthreads();
    if (warp == 0 && column < row) {
#pragma unroll
        for (unsigned i = 1; i < LANES; ++i) sum += lanes[i * WARP + lane];
        store_rounded<T>(a.out[column / a.columns], column % a.columns, sum);
    }
}

ENTRIES(column_sums, THREADS, ColumnSums)
ENTRIES(sum_parts, THREADS, SumParts)
