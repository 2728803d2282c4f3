// Rotary positions of adjacent heads in rows: the counterpart of rope.rs.
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

ENTRIES(apply_rope, THREADS, Rotate)
