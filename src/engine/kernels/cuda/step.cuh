// What a training step moves in device memory besides tensors, and what it reports.
#pragma once

#include "stats.cuh"

// Counters, the scaler's state, and the numbers of the update at hand. The host writes it once and reads it for checkpoints.
struct StepState {
    u64 step, updates;
    float scale;
    unsigned growth_tracker, hysteresis_left, floor_streak;
    // For AdamW.
    unsigned apply;
    float lr, grad_factor, bias_corrections[2];
    // Not zero from a step with an overflow until the host has seen it: steps launched in the meantime change nothing.
    unsigned halted;
};

// Where a step's time went, in nanoseconds of the device's clock.
struct StepTimes {
    u64 last;      // when the clock was read last
    u64 parts[4];  // forward, backward, survey, optimizer
};

// A step's figures for the log.
struct StepRecord {
    double loss, grad_norm, clip, lr;
    TensorStats total;
    float scale;
    unsigned change;  // 0 held, 1 grew, 2 backed off, 3 at floor
    unsigned applied, unused;
    StepState after;
};
