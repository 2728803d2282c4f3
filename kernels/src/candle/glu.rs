//! The gated activation whose operands are bounded, of pairs of a gate and an up.

use super::tensors::{require_contiguous, select, store, upcast};
use super::{bounded, gate_of, slope_of};
use crate::glu::{CLAMPED_LIMIT, CLAMPED_SLOPE};
use crate::{Activation, op};
use candle_core::{Result, Tensor};

const SLOPE: f64 = CLAMPED_SLOPE as f64;

/// Gates and ups, in FP32.
fn pairs(x: &Tensor) -> Result<[Tensor; 2]> {
    require_contiguous(x)?;
    let pairs = x.reshape((x.dim(0)?, (), 2))?;
    let part = |i: usize| upcast(&pairs.narrow(2, i, 1)?.squeeze(2)?.contiguous()?);
    Ok([part(0)?, part(1)?])
}

/// Gates times 1.702, bounded, and their activation; and ups plus 1, bounded.
fn factors([gate, up]: &[Tensor; 2]) -> Result<[Tensor; 3]> {
    let gate = (bounded(gate, CLAMPED_LIMIT)? * SLOPE)?;
    let value = ((&gate * gate_of(Activation::ClampedSwiGlu, &gate)?)? / SLOPE)?;
    Ok([gate, value, (bounded(&bounded(up, CLAMPED_LIMIT)?, -CLAMPED_LIMIT)? + 1.0)?])
}

pub(super) fn clamped(op: &op::Activate<'_>) -> Result<()> {
    let [_, value, plus_one] = factors(&pairs(op.x)?)?;
    store(&(value * plus_one)?, op.y)
}

pub(super) fn clamped_backward(op: &op::ActivateBackward<'_>) -> Result<()> {
    let (inputs, dy) = (pairs(op.x)?, upcast(op.dy)?);
    let [gate, value, plus_one] = factors(&inputs)?;
    store(&(&value * &plus_one)?, op.y)?;
    let dgate = ((&dy * plus_one)? * slope_of(Activation::ClampedSwiGlu, &gate)?)?;
    let [gate_inside, up_inside] = [inputs[0].le(CLAMPED_LIMIT)?, inputs[1].abs()?.le(CLAMPED_LIMIT)?];
    let gradients = [select(&gate_inside, &dgate, 0.0)?, select(&up_inside, &(dy * value)?, 0.0)?];
    store(&Tensor::stack(&gradients, 2)?.contiguous()?.reshape(op.dx.shape())?, op.dx)
}
