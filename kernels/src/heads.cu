// Adjacent heads in rows: rotary positions, the counterpart of rope.rs; and keys and values for each head of queries,
// because the attention kernels do not support grouped queries.
#include "cuda/common.cuh"

struct Rotate {
    void* x;                  // T, rows `stride` apart
    const float *cos, *sin;   // [positions, half]
    const unsigned* starts;   // [rows]: the place in its sequence that a row's document starts at; may be null
    unsigned rows, stride;
    unsigned heads, half;     // half of a head's width, a multiple of N
    unsigned seq_len, past;
    float sign;
    unsigned unused;
};

struct GqaArgs {
    void* parts[3];  // T: queries, and keys and values of kv_heads, in rows `strides` apart
    void* wide;      // [rows, 3 · heads · head_size], T
    unsigned strides[3];
    unsigned rows, heads, kv_heads;
    unsigned head_size;  // this and the strides: multiples of N
    unsigned unused;
};

constexpr unsigned THREADS = 256;
constexpr int N = 8;

template <class T> __device__ void apply_rope(const Rotate& a) {
    const unsigned packs = a.half / N;
    for_each_pack<1>(static_cast<size_t>(a.rows) * a.heads * packs, [&](size_t at_pack, bool, unsigned) {
        const unsigned i = static_cast<unsigned>(at_pack);  // a division of 64 bits would take longer than all else
        const unsigned column = i % packs * N, head = i / packs % a.heads, row = i / packs / a.heads;
        const unsigned place = row % a.seq_len, start = a.starts == nullptr ? 0 : load(a.starts, row);
        const size_t angle = static_cast<size_t>(a.past + (place > start ? place - start : 0)) * a.half + column;
        const size_t at = static_cast<size_t>(row) * a.stride + 2 * head * a.half + column;
        float low[N], high[N], cos[N], sin[N];
        load_pack<T>(a.x, at, true, N, low);
        load_pack<T>(a.x, at + a.half, true, N, high);
        load_pack<float>(a.cos, angle, true, N, cos);
        load_pack<float>(a.sin, angle, true, N, sin);
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const float turned = low[k] * cos[k] - high[k] * sin[k] * a.sign;
            high[k] = high[k] * cos[k] + low[k] * sin[k] * a.sign;
            low[k] = turned;
        }
        store_pack<T>(a.x, at, true, N, low);
        store_pack<T>(a.x, at + a.half, true, N, high);
    });
}

// Packs queries, keys and values into rows of 3 · D, and repeats keys and values for the heads that share them.
template <class T> __device__ void spread_heads(const GqaArgs& a) {
    const unsigned queries = a.heads * a.head_size, group = a.heads / a.kv_heads;
    const size_t len = static_cast<size_t>(a.rows) * 3 * queries;
    for_each_pack<N>(len, [&](size_t at, bool, unsigned) {
        const size_t row = at / (3 * queries);
        const unsigned column = at % (3 * queries), part = column / queries, within = column % queries;
        const unsigned shared = within / a.head_size / group * a.head_size + within % a.head_size;
        float x[N];
        load_pack<T>(a.parts[part], row * a.strides[part] + (part == 0 ? within : shared), true, N, x);
        store_pack<T>(a.wide, at, true, N, x);
    });
}

// The inverse for gradients: adds the gradients of heads that share keys and values.
template <class T> __device__ void gather_heads(const GqaArgs& a) {
    const unsigned queries = a.heads * a.head_size, keys = a.kv_heads * a.head_size, group = a.heads / a.kv_heads;
    const unsigned width = queries + 2 * keys;
    for_each_pack<N>(static_cast<size_t>(a.rows) * width, [&](size_t at, bool, unsigned) {
        const size_t row = at / width;
        const unsigned column = at % width, part = column < queries ? 0 : 1 + (column - queries) / keys;
        const unsigned within = part == 0 ? column : (column - queries) % keys;
        float x[N];
        if (part == 0) {
            load_pack<T>(a.wide, row * 3 * queries + column, true, N, x);
        } else {
            const size_t first = row * 3 * queries + part * queries + within / a.head_size * group * a.head_size + within % a.head_size;
            load_pack<T>(a.wide, first, true, N, x);
            for (unsigned other = 1; other < group; ++other) {
                float y[N];
                load_pack<T>(a.wide, first + other * a.head_size, true, N, y);
#pragma unroll
                for (int k = 0; k < N; ++k) x[k] += y[k];
            }
        }
        store_pack<T>(a.parts[part], row * a.strides[part] + within, true, N, x);
    });
}

ENTRIES(apply_rope, THREADS, Rotate)
ENTRIES(spread_heads, THREADS, GqaArgs)
ENTRIES(gather_heads, THREADS, GqaArgs)
