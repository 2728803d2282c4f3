//! The gated activation of an MLP, `act(gate) * up` (Shazeer, 2020), computed in FP32 for any storage type.

use crate::columns::{ColumnSlice, write_columns};
use crate::math;
use crate::op;
use crate::rows::{Rows, for_each_part};
use crate::view::{BLOCK, ViewMut, read, write};
use candle_core::{Result, Tensor};

/// Approximate number of elements of a task.
const ELEMENTS_PER_TASK: usize = 8 * BLOCK;

/// The gates and ups of `x [N, 2·F]`: the halves of its columns.
fn halves(x: &Tensor) -> Result<[ColumnSlice<'_>; 2]> {
    ColumnSlice::split(x, [x.dims2()?.1 / 2; 2])
}

/// Computes [`op::Activate`] with this function of a gate.
pub fn forward(op: &op::Activate<'_>, function: impl Fn(f32) -> f32 + Sync) -> Result<()> {
    let (rows, width) = op.y.dims2()?;
    let [gate, up] = halves(op.x)?;
    let opened = read(op.x)?;
    let (gate, up) = (gate.source(&opened), up.source(&opened));
    write(op.y, |view| {
        for_each_part(
            Rows { view, width },
            rows,
            ELEMENTS_PER_TASK / width + 1,
            #[inline(always)]
            |first, rows, mut y| {
                let (mut gates, mut ups) = ([0.0; BLOCK], [0.0; BLOCK]);
                for (i, start) in (0..rows).flat_map(|i| (0..width).step_by(BLOCK).map(move |start| (i, start))) {
                    let count = BLOCK.min(width - start);
                    let gates = &mut gates[..count];
                    gate.load(first + i, start, gates);
                    let ups = up.as_f32(first + i, start, &mut ups[..count]);
                    for (gate, up) in gates.iter_mut().zip(ups) {
                        *gate = function(*gate) * up;
                    }
                    y.view.store(i * width + start, gates);
                }
            },
        );
    })
}

/// Computes [`op::ActivateBackward`] with this function of a gate, which returns its derivative too.
pub fn backward(op: &op::ActivateBackward<'_>, function: impl Fn(f32) -> (f32, f32) + Sync) -> Result<()> {
    let (rows, width) = op.y.dims2()?;
    let [gate, up] = halves(op.x)?;
    let [dgate, dup] = halves(op.dx)?;
    let (opened, dy) = (read(op.x)?, read(op.dy)?);
    let gate = gate.source(&opened);
    let up = up.source(&opened);
    let dy = dy.view();
    write_columns([dgate, dup, ColumnSlice::all(op.y)?], |[dgate, dup, y]| {
        for_each_part(
            (),
            rows,
            ELEMENTS_PER_TASK / width + 1,
            #[inline(always)]
            |first, rows, ()| {
                let (mut gates, mut ups) = ([0.0; BLOCK], [0.0; BLOCK]);
                let (mut grads, mut outputs) = ([0.0; BLOCK], [0.0; BLOCK]);
                let rows = first..first + rows;
                for (row, start) in rows.flat_map(|row| (0..width).step_by(BLOCK).map(move |start| (row, start))) {
                    let count = BLOCK.min(width - start);
                    let (gates, ups) = (&mut gates[..count], &mut ups[..count]);
                    gate.load(row, start, gates);
                    up.load(row, start, ups);
                    let grads = dy.as_f32(row * width + start, &mut grads[..count]);
                    let outputs = &mut outputs[..count];
                    for (((gate, up), dy), y) in gates.iter_mut().zip(ups.iter_mut()).zip(grads).zip(outputs.iter_mut())
                    {
                        let (value, derivative) = function(*gate);
                        *y = value * *up;
                        *gate = dy * *up * derivative;
                        *up = dy * value;
                    }
                    // SAFETY: a row is written by this task alone, and gate and up are different columns.
                    unsafe {
                        dgate.store(row, start, gates);
                        dup.store(row, start, ups);
                        y.store(row, start, outputs);
                    }
                }
            },
        );
    })
}

/// The slope of the clamped activation's gate before its logistic function, and the bound of its operands.
pub(crate) const CLAMPED_SLOPE: f32 = 1.702;
pub(crate) const CLAMPED_LIMIT: f32 = 7.0;

/// The bounded gate and up of a pair. A NaN stays one.
#[inline(always)]
fn bounded([gate, up]: [f32; 2]) -> [f32; 2] {
    let below = |x: f32| if x > CLAMPED_LIMIT { CLAMPED_LIMIT } else { x };
    let up = below(up);
    [below(gate), if up < -CLAMPED_LIMIT { -CLAMPED_LIMIT } else { up }]
}

/// Computes [`Activation::ClampedSwiGlu`](crate::Activation): `y [N, F]` of pairs of gate and up, `x [N, 2·F]`.
pub fn clamped(op: &op::Activate<'_>) -> Result<()> {
    let x = read(op.x)?;
    let len = op.y.elem_count();
    let x = x.view();
    write(op.y, |view| {
        for_each_part(
            Rows { view, width: 1 },
            len,
            ELEMENTS_PER_TASK,
            #[inline(always)]
            |first, count, mut y| {
                let mut pairs = [0.0; 2 * BLOCK];
                let mut outputs = [0.0; BLOCK];
                for start in (0..count).step_by(BLOCK) {
                    let outputs = &mut outputs[..BLOCK.min(count - start)];
                    let pairs = x.as_f32(2 * (first + start), &mut pairs[..2 * outputs.len()]);
                    for (y, pair) in outputs.iter_mut().zip(pairs.as_chunks::<2>().0) {
                        let [gate, up] = bounded(*pair);
                        *y = math::silu(CLAMPED_SLOPE * gate) / CLAMPED_SLOPE * (up + 1.0);
                    }
                    y.view.store(start, outputs);
                }
            },
        );
    })
}

/// The value of [`clamped`] for a pair, and the pair's gradient given the value's.
#[inline(always)]
fn clamped_gradient(pair: [f32; 2], dy: f32) -> (f32, [f32; 2]) {
    let [gate, up] = bounded(pair);
    let (value, slope) = math::silu_with_derivative(CLAMPED_SLOPE * gate);
    let value = value / CLAMPED_SLOPE;
    let plus_one = up + 1.0;
    // A bound's derivative is 0 outside.
    let dgate = if pair[0] > CLAMPED_LIMIT { 0.0 } else { dy * plus_one * slope };
    let dup = if pair[1] >= -CLAMPED_LIMIT && pair[1] <= CLAMPED_LIMIT { dy * value } else { 0.0 };
    (value * plus_one, [dgate, dup])
}

/// Computes the gradient `dx [N, 2·F]` of [`clamped`], and `y` again.
pub fn clamped_backward(op: &op::ActivateBackward<'_>) -> Result<()> {
    let x = read(op.x)?;
    let dy = read(op.dy)?;
    let len = op.y.elem_count();
    let (x, dy) = (x.view(), dy.view());
    let differentiate = |dx: ViewMut<'_>, y: ViewMut<'_>| {
        for_each_part(
            (Rows { view: dx, width: 2 }, Rows { view: y, width: 1 }),
            len,
            ELEMENTS_PER_TASK,
            #[inline(always)]
            |first, count, (mut dx, mut y)| {
                let mut pairs = [0.0; 2 * BLOCK];
                let mut grads = [0.0; BLOCK];
                let mut outputs = [0.0; BLOCK];
                for start in (0..count).step_by(BLOCK) {
                    let outputs = &mut outputs[..BLOCK.min(count - start)];
                    let pairs = &mut pairs[..2 * outputs.len()];
                    x.load(2 * (first + start), pairs);
                    let grads = dy.as_f32(first + start, &mut grads[..outputs.len()]);
                    for ((pair, dy), y) in pairs.as_chunks_mut::<2>().0.iter_mut().zip(grads).zip(outputs.iter_mut()) {
                        (*y, *pair) = clamped_gradient(*pair, *dy);
                    }
                    dx.view.store(2 * start, pairs);
                    y.view.store(start, outputs);
                }
            },
        );
    };
    write(op.dx, |dx| write(op.y, |y| differentiate(dx, y)))?
}
