// AdamW on one tensor: the counterpart of adamw.rs, and of blockwise.rs for moments in 8 bits. G is the gradient's type, W
// the working copy's.
#include "cuda/common.cuh"

// As UpdateCounts in Rust, without the number of elements.
struct UpdateCounts {
    u64 moved, lost, distance;
};

struct AdamW {
    const void* grad;  // G
    float* master;
    void *exp_avg, *exp_avg_sq;  // float, or codes
    float* absmax[2];            // the scales of blocks of codes
    const float* maps[2];        // [256]: the values of codes
    void* weight;  // W; null if the master is the working copy
    UpdateCounts* counts;  // zeros at the start; null if updates are not counted
    u64 len;
    unsigned least_field, ulp_offset;  // UpdateCounts::ulp_fields
    float lr;
    float betas[2];
    float shares[2];  // 1 - beta, rounded once
    float eps, weight_decay;
    float bias_corrections[2];
    float grad_factor;
};

constexpr unsigned THREADS = 256;
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

// A thread's updates, with their counts.
template <class G, class W> struct Update {
    const AdamW& a;
    const float decay, step_size, inverse_root;
    UpdateCounts counts = {0, 0, 0};

    __device__ explicit Update(const AdamW& a)
        : a(a),
          decay(1.0f - a.lr * a.weight_decay),
          step_size(a.lr / a.bias_corrections[0]),
          inverse_root(1.0f / sqrtf(a.bias_corrections[1])) {}

    // Updates N elements and their moments.
    __device__ void apply(size_t at, bool whole, unsigned count, float (&m)[N], float (&v)[N]) {
        float g[N], p[N];
        load_pack<G>(a.grad, at, whole, count, g);
        load_pack<float>(a.master, at, whole, count, p);
        float old[N] = {}, copy[N] = {};
        if (a.counts != nullptr) {
            load_pack<W>(a.weight, at, whole, count, copy);
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
        store_pack<float>(a.master, at, whole, count, p);
        if (a.weight != nullptr) store_pack<W>(a.weight, at, whole, count, p);
        if (a.counts != nullptr) {
#pragma unroll
            for (unsigned k = 0; k < N; ++k) {
                if (k < count) add_element(counts, a, old[k], p[k], copy[k], to_float(from_float<W>(p[k])));
            }
        }
    }

    // Adds up the counts of all threads.
    __device__ void add_counts() const {
        if (a.counts == nullptr) return;
        const u64 sums[] = {warp_sum(counts.moved), warp_sum(counts.lost), warp_sum(counts.distance)};
        u64* const totals = &a.counts->moved;
        CHECK_WRITE(totals, sizeof(UpdateCounts));
        for (unsigned i = 0; i < 3; ++i) {
            if (threadIdx.x % WARP == 0 && sums[i] > 0) atomicAdd(totals + i, sums[i]);
        }
    }
};

template <class G, class W> __device__ void adamw(const AdamW& a) {
    Update<G, W> update(a);
    for_each_pack<N>(a.len, [&](size_t at, bool whole, unsigned count) {
        float m[N], v[N];
        load_pack<float>(a.exp_avg, at, whole, count, m);
        load_pack<float>(a.exp_avg_sq, at, whole, count, v);
        update.apply(at, whole, count, m, v);
        store_pack<float>(a.exp_avg, at, whole, count, m);
        store_pack<float>(a.exp_avg_sq, at, whole, count, v);
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
    constexpr unsigned CODES = 256, BLOCK = 256, PACKS = BLOCK / (WARP * N);
    SHARED(float, maps);  // [2, CODES]
    for (unsigned i = threadIdx.x; i < 2 * CODES; i += THREADS) maps[i] = load(a.maps[i / CODES], i % CODES);
    __syncthreads();
    Update<G, W> update(a);
    void* const codes[2] = {a.exp_avg, a.exp_avg_sq};
    constexpr unsigned WARPS = THREADS / WARP;
    for (u64 block = static_cast<u64>(blockIdx.x) * WARPS + threadIdx.x / WARP; block * BLOCK < a.len; block += gridDim.x * WARPS) {
        float moments[2][PACKS][N], most[2] = {};
        const float scales[2] = {load(a.absmax[0], block), load(a.absmax[1], block)};
        const auto for_each = [&](auto f) {
#pragma unroll
            for (unsigned pack = 0; pack < PACKS; ++pack) {
                const u64 at = block * BLOCK + (pack * WARP + threadIdx.x % WARP) * N;
                f(pack, at, at + N <= a.len, static_cast<unsigned>(at < a.len ? min(a.len - at, static_cast<u64>(N)) : 0));
            }
        };
        for_each([&](unsigned pack, u64 at, bool whole, unsigned count) {
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
            most[which] = warp_max(most[which]);
            if (threadIdx.x % WARP == 0) store(a.absmax[which], block, most[which]);
            const float inverse = most[which] > 0.0f ? 1.0f / most[which] : 0.0f;
            for_each([&](unsigned pack, u64 at, bool whole, unsigned count) {
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
