// The verdict on a step, without the host: are the gradients finite, what are they multiplied with, how does the loss scale
// move? The twin of src/train/step.rs around its kernels, of precision/grad_scaler.rs and of optim/schedule.rs.
#include "cuda/step.cuh"

struct ScalerRules {
    double growth_factor, backoff_factor;
    float min_scale;
    unsigned growth_interval, hysteresis, enabled, refill_when_clean;
    unsigned unused;
};

struct Schedule {
    double peak_lr, min_lr_ratio;
    u64 warmup_updates, total_updates;
    u64 kind;  // 0 constant, 1 linear, 2 cosine
};

struct StepVerdict {
    const TensorStats* stats;  // [tensors]
    const double* loss;        // the sum over all targets
    const unsigned* targets;
    StepState* state;
    StepRecord* record;
    double max_grad_norm;  // 0 for no clipping
    double betas[2];
    ScalerRules scaler;
    Schedule schedule;
    u64 tensors;
};

struct StepClock {
    StepTimes* times;
    double* loss;  // set to zero at the beginning
    u64 part;      // that has ended, or BEGINNING
};

constexpr u64 BEGINNING = 4;
constexpr unsigned THREADS = 256;
constexpr unsigned WARPS = THREADS / WARP;

enum Change : unsigned { HELD, GREW, BACKED_OFF, AT_FLOOR };

// A scale times a factor, rounded once.
__device__ inline float times(float scale, double factor) { return static_cast<float>(scale * factor); }

__device__ inline unsigned one_more(unsigned count) { return count == EVERY_LANE ? count : count + 1; }

__device__ inline Change after_clean_step(const ScalerRules& rules, StepState& state) {
    state.floor_streak = 0;
    if (!rules.enabled) return HELD;
    if (rules.refill_when_clean) state.hysteresis_left = rules.hysteresis;
    state.growth_tracker = one_more(state.growth_tracker);
    if (state.growth_tracker < rules.growth_interval) return HELD;
    state.growth_tracker = 0;
    state.hysteresis_left = rules.hysteresis;
    const float to = times(state.scale, rules.growth_factor);
    if (!isfinite(to)) return HELD;
    state.scale = to;
    return GREW;
}

__device__ inline Change after_overflow(const ScalerRules& rules, StepState& state) {
    if (rules.enabled) {
        state.growth_tracker = 0;
        if (state.hysteresis_left > 1) {
            state.hysteresis_left -= 1;
            return HELD;
        }
        if (state.scale > rules.min_scale) {
            const float to = times(state.scale, rules.backoff_factor);
            state.scale = to > rules.min_scale ? to : rules.min_scale;
            return BACKED_OFF;
        }
    }
    state.floor_streak = one_more(state.floor_streak);
    return AT_FLOOR;
}

// The rate of the update after `updates` applied ones.
__device__ inline double learning_rate(const Schedule& schedule, u64 updates) {
    if (updates < schedule.warmup_updates) {
        return schedule.peak_lr * static_cast<double>(updates + 1) / static_cast<double>(schedule.warmup_updates);
    }
    const u64 length = schedule.total_updates > schedule.warmup_updates ? schedule.total_updates - schedule.warmup_updates : 1;
    const double ratio = static_cast<double>(updates - schedule.warmup_updates) / static_cast<double>(length);
    const double progress = ratio < 1.0 ? ratio : 1.0;
    if (schedule.kind == 0) return schedule.peak_lr;
    const double height = schedule.kind == 1 ? 1.0 - progress : 0.5 * (1.0 + cospi(progress));
    return schedule.peak_lr * (schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * height);
}

// One block: all of it adds up the tensors, one thread decides.
__device__ void judge(const StepVerdict& a) {
    SHARED(double, scratch);  // [WARPS]
    TensorStats total = nothing();
    for (u64 i = threadIdx.x; i < a.tensors; i += THREADS) merge(total, load(a.stats, i));
    total = block_merge<WARPS>(total, scratch);
    if (threadIdx.x > 0) return;
    StepState state = load(a.state, 0);
    StepRecord record = {};
    if (state.halted) {
        state.apply = 0;
        record.after = state;
        store(a.state, 0, state);
        store(a.record, 0, record);
        return;
    }
    const unsigned targets = load(a.targets, 0);
    record.loss = load(a.loss, 0) / static_cast<double>(targets > 0 ? targets : 1);
    record.total = total;
    record.scale = state.scale;
    const float unscale = static_cast<float>(1.0 / static_cast<double>(state.scale));
    const bool finite = total.inf == 0 && total.nan == 0 && isfinite(__uint_as_float(total.most) * unscale);
    record.lr = learning_rate(a.schedule, state.updates);
    record.clip = 1.0;
    record.grad_norm = sqrt(total.squares) * static_cast<double>(unscale);
    if (finite && a.max_grad_norm > 0.0) {
        const double clip = a.max_grad_norm / (record.grad_norm + 1e-6);
        record.clip = clip < 1.0 ? clip : 1.0;
    }
    state.apply = finite;
    state.lr = static_cast<float>(record.lr);
    state.grad_factor = static_cast<float>(static_cast<double>(unscale) * record.clip);
    for (int i = 0; i < 2; ++i) {
        state.bias_corrections[i] = static_cast<float>(1.0 - pow(a.betas[i], static_cast<double>(state.updates + 1)));
    }
    record.applied = finite;
    record.change = finite ? after_clean_step(a.scaler, state) : after_overflow(a.scaler, state);
    state.step += 1;
    state.updates += finite;
    state.halted = !finite;
    record.after = state;
    store(a.state, 0, state);
    store(a.record, 0, record);
}

// One thread between two parts of a step.
__device__ void read_clock(const StepClock& a) {
    if (threadIdx.x > 0) return;
    const u64 now = nanoseconds();
    if (a.part == BEGINNING) {
        store(a.times, 0, StepTimes{});
        store(a.loss, 0, 0.0);
    } else {
        u64* const parts = a.times->parts;
        store(parts, a.part, load(parts, a.part) + now - load(&a.times->last, 0));
    }
    store(&a.times->last, 0, now);
}

ENTRY(step_verdict, THREADS, StepVerdict, judge)
ENTRY(step_clock, WARP, StepClock, read_clock)
