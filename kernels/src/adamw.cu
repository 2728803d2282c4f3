// AdamW: the counterpart of adamw.rs, and of blockwise.rs for moments in 8 bits. G is the gradients' type, W the
// working copies'. All tensors of two types in one launch: single tensors are too small to keep a GPU busy.
#include "cuda/common.cuh"

// As UpdateCounts in Rust, without the number of elements.
struct UpdateCounts {
    u64 moved, lost, distance;
};

struct AdamWEntry {
    u64 len;
    u64 first;         // its first chunk; tensors are in their chunks' order
    const void* grad;  // G
    float* master;
    void *exp_avg, *exp_avg_sq;  // float, or codes
    void* weight;                // W; null if the master is the working copy
    float* absmax[2];            // the scales of blocks of codes
    const float* maps[2];        // [256]: the values of codes
    float weight_decay;
    unsigned place;  // of its counts
};

struct AdamW {
    const AdamWEntry* tensors;  // [count]
    UpdateCounts* counts;       // zeros at the start; null if updates are not counted
    unsigned count;
    unsigned least_field, ulp_offset;  // UpdateCounts::ulp_fields
    float lr;
    float betas[2];
    float shares[2];  // 1 - beta, rounded once
    float eps;
    float bias_corrections[2];
    float grad_factor;
};

constexpr unsigned THREADS = 256;
// Elements that share a scale.
constexpr unsigned BLOCK = 256;
// Elements of a chunk, and so of a block of threads: whole blocks of codes.
constexpr unsigned CHUNK = 1 << 13;
constexpr int N = 4;

// UpdateCounts::count in Rust, for one element.
__device__ inline void add_element(UpdateCounts& counts, const AdamW& a, float old, float now, float before, float after) {
    const bool moved = __float_as_uint(old) != __float_as_uint(now);
    counts.moved += moved;
    counts.lost += moved && __float_as_uint(before) == __float_as_uint(after);
    const unsigned field = max(__float_as_uint(after) >> 23 & 0xffu, a.least_field);
    const float inverse_ulp = __uint_as_float((a.ulp_offset - field) << 23);
    const float scaled = fminf(fabsf(now - after) * inverse_ulp * 65536.0f, 65536.0f);
    counts.distance += __float_as_uint(scaled + 8388608.0f) & 0x7fffffu;
}

// The part of a tensor that this block updates; `place` is shared.
template <class G, class W, class M> __device__ inline AdamWEntry part_of(const AdamW& a, unsigned* place) {
    AdamWEntry part = tensor_of<CHUNK>(a.tensors, a.count, blockIdx.x, place);
    const u64 first = (blockIdx.x - part.first) * CHUNK;
    part.len = min(part.len - first, static_cast<u64>(CHUNK));
    part.grad = static_cast<const G*>(part.grad) + first;
    part.master += first;
    part.exp_avg = static_cast<M*>(part.exp_avg) + first;
    part.exp_avg_sq = static_cast<M*>(part.exp_avg_sq) + first;
    if (part.weight != nullptr) part.weight = static_cast<W*>(part.weight) + first;
    if constexpr (sizeof(M) < sizeof(float)) {
        for (float*& absmax : part.absmax) absmax += first / BLOCK;
    }
    return part;
}

// A thread's updates, with their counts. M is the type of the moments.
template <class G, class W, class M> struct Update {
    const AdamW& a;
    const AdamWEntry tensor;  // the chunk's part
    const unsigned len;
    UpdateCounts* const totals;
    const float decay, step_size, inverse_root;
    UpdateCounts counts = {0, 0, 0};

    // `place` is shared.
    __device__ Update(const AdamW& a, unsigned* place)
        : a(a),
          tensor(part_of<G, W, M>(a, place)),
          len(static_cast<unsigned>(tensor.len)),
          totals(a.counts != nullptr && tensor.weight != nullptr ? a.counts + tensor.place : nullptr),
          decay(1.0f - a.lr * tensor.weight_decay),
          step_size(a.lr / a.bias_corrections[0]),
          inverse_root(1.0f / sqrtf(a.bias_corrections[1])) {}

    // Updates N elements and their moments.
    __device__ void apply(size_t at, bool whole, unsigned count, float (&m)[N], float (&v)[N]) {
        float g[N], p[N];
        load_pack<G>(tensor.grad, at, whole, count, g);
        load_pack<float>(tensor.master, at, whole, count, p);
        float old[N] = {}, copy[N] = {};
        if (totals != nullptr) {
            load_pack<W>(tensor.weight, at, whole, count, copy);
#pragma unroll
            for (int k = 0; k < N; ++k) old[k] = p[k];
        }
#pragma unroll
        for (int k = 0; k < N; ++k) {
            g[k] *= a.grad_factor;
            m[k] += (g[k] - m[k]) * a.shares[0];
            v[k] = v[k] * a.betas[1] + g[k] * g[k] * a.shares[1];
            p[k] = p[k] * decay - step_size * m[k] / (sqrtf(v[k]) * inverse_root + a.eps);
        }
        store_pack<float>(tensor.master, at, whole, count, p);
        if (tensor.weight != nullptr) store_pack<W>(tensor.weight, at, whole, count, p);
        if (totals != nullptr) {
#pragma unroll
            for (unsigned k = 0; k < N; ++k) {
                if (k < count) add_element(counts, a, old[k], p[k], copy[k], to_float(from_float<W>(p[k])));
            }
        }
    }

    // Adds up the counts of all threads.
    __device__ void add_counts() const {
        if (totals == nullptr) return;
        const u64 sums[] = {warp_reduce(counts.moved, Add()), warp_reduce(counts.lost, Add()),
                            warp_reduce(counts.distance, Add())};
        CHECK_WRITE(totals, sizeof(UpdateCounts));
        for (unsigned i = 0; i < 3; ++i) {
            if (threadIdx.x % WARP == 0 && sums[i] > 0) atomicAdd(&totals->moved + i, sums[i]);
        }
    }
};

template <class G, class W> __device__ void adamw(const AdamW& a) {
    SHARED(unsigned, place);
    Update<G, W, float> update(a, place);
    const AdamWEntry& tensor = update.tensor;
    for_each_pack<N>(threadIdx.x * N, THREADS * N, update.len, [&](size_t at, bool whole, unsigned count) {
        float m[N], v[N];
        load_pack<float>(tensor.exp_avg, at, whole, count, m);
        load_pack<float>(tensor.exp_avg_sq, at, whole, count, v);
        update.apply(at, whole, count, m, v);
        store_pack<float>(tensor.exp_avg, at, whole, count, m);
        store_pack<float>(tensor.exp_avg_sq, at, whole, count, v);
    });
    update.add_counts();
}

// The code of `value`, as BlockwiseQuantized::store in Rust chooses it.
__device__ inline unsigned code_of(const float* map, bool is_signed, float value, float inverse) {
    const float x = fminf(fmaxf(value * inverse, -1.0f), 1.0f);
    unsigned code = 0;  // the number of codes below x, then the nearest code
#pragma unroll
    for (unsigned step = 128; step > 0; step /= 2) {
        if (map[code + step - 1] < x) code += step;
    }
    if (code > 0 && x - map[code - 1] <= map[code] - x) --code;
    if (!is_signed) return value > 0.0f ? max(code, 1u) : code;
    if (__float_as_uint(map[code]) >> 31 == __float_as_uint(value) >> 31) return code;
    return value > 0.0f ? min(code + 1, 255u) : max(code, 1u) - 1;
}

// The update with moments in 8 bits: a warp for each block, which has BLOCK elements.
template <class G, class W> __device__ void adamw_8bit(const AdamW& a) {
    constexpr unsigned CODES = 256, PACKS = BLOCK / (WARP * N);
    SHARED(float, maps);  // [2, CODES]
    Update<G, W, unsigned char> update(a, reinterpret_cast<unsigned*>(maps));
    const AdamWEntry& tensor = update.tensor;
    for (unsigned i = threadIdx.x; i < 2 * CODES; i += THREADS) maps[i] = load(i < CODES ? tensor.maps[0] : tensor.maps[1], i % CODES);
    __syncthreads();
    void* const codes[2] = {tensor.exp_avg, tensor.exp_avg_sq};
    for (unsigned block = threadIdx.x / WARP; block * BLOCK < update.len; block += THREADS / WARP) {
        float moments[2][PACKS][N], most[2] = {};
        const float scales[2] = {load(tensor.absmax[0], block), load(tensor.absmax[1], block)};
        const auto for_each = [&](auto f) {
#pragma unroll
            for (unsigned pack = 0; pack < PACKS; ++pack) {
                const unsigned at = block * BLOCK + (pack * WARP + threadIdx.x % WARP) * N;
                f(pack, at, at + N <= update.len, at < update.len ? min(update.len - at, static_cast<unsigned>(N)) : 0u);
            }
        };
        for_each([&](unsigned pack, unsigned at, bool whole, unsigned count) {
#pragma unroll
            for (unsigned which = 0; which < 2; ++which) {
                float(&values)[N] = moments[which][pack];
                load_pack<unsigned char>(codes[which], at, whole, count, values);
                // As stored: without a fused sum.
#pragma unroll
                for (unsigned k = 0; k < N; ++k) {
                    values[k] = k < count ? __fmul_rn(maps[which * CODES + static_cast<unsigned>(values[k])], scales[which]) : 0.0f;
                }
            }
            update.apply(at, whole, count, moments[0][pack], moments[1][pack]);
#pragma unroll
            for (unsigned k = 0; k < N; ++k) {
                for (unsigned which = 0; which < 2; ++which) most[which] = fmaxf(most[which], fabsf(moments[which][pack][k]));
            }
        });
#pragma unroll
        for (unsigned which = 0; which < 2; ++which) {
            most[which] = warp_reduce(most[which], Max());
            if (threadIdx.x % WARP == 0) store(tensor.absmax[which], block, most[which]);
            const float inverse = most[which] > 0.0f ? 1.0f / most[which] : 0.0f;
            for_each([&](unsigned pack, unsigned at, bool whole, unsigned count) {
                float(&values)[N] = moments[which][pack];
#pragma unroll
                for (unsigned k = 0; k < N; ++k) values[k] = code_of(maps + which * CODES, which == 0, values[k], inverse);
                store_pack<unsigned char>(codes[which], at, whole, count, values);
            });
        }
    }
    update.add_counts();
}

ENTRIES_WIDE_FIRST(adamw, THREADS, AdamW)
ENTRIES_WIDE_FIRST(adamw_8bit, THREADS, AdamW)
