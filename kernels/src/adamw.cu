// AdamW on one tensor: the counterpart of adamw.rs. G is the gradient's type, W the working copy's.
#include "cuda/common.cuh"

// As UpdateCounts in Rust, without the number of elements.
struct UpdateCounts {
    u64 moved, lost, distance;
};

struct AdamW {
    const void* grad;  // G
    float *master, *exp_avg, *exp_avg_sq;
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

template <class G, class W> __device__ void adamw(const AdamW& a) {
    const float decay = 1.0f - a.lr * a.weight_decay;
    const float step_size = a.lr / a.bias_corrections[0];
    const float inverse_root = 1.0f / sqrtf(a.bias_corrections[1]);
    UpdateCounts counts = {0, 0, 0};
    for_each_pack<N>(a.len, [&](size_t at, bool whole, unsigned count) {
        float g[N], p[N], m[N], v[N];
        load_pack<G>(a.grad, at, whole, count, g);
        load_pack<float>(a.master, at, whole, count, p);
        load_pack<float>(a.exp_avg, at, whole, count, m);
        load_pack<float>(a.exp_avg_sq, at, whole, count, v);
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
        store_pack<float>(a.exp_avg, at, whole, count, m);
        store_pack<float>(a.exp_avg_sq, at, whole, count, v);
        if (a.weight != nullptr) store_pack<W>(a.weight, at, whole, count, p);
        if (a.counts != nullptr) {
#pragma unroll
            for (unsigned k = 0; k < N; ++k) {
                if (k < count) add_element(counts, a, old[k], p[k], copy[k], to_float(from_float<W>(p[k])));
            }
        }
    });
    if (a.counts == nullptr) return;
    const u64 sums[] = {warp_sum(counts.moved), warp_sum(counts.lost), warp_sum(counts.distance)};
    u64* const totals = &a.counts->moved;
    CHECK_WRITE(totals, sizeof(UpdateCounts));
    for (unsigned i = 0; i < 3; ++i) {
        if (threadIdx.x % WARP == 0 && sums[i] > 0) atomicAdd(totals + i, sums[i]);
    }
}

ENTRIES_WIDE_FIRST(adamw, THREADS, AdamW)
