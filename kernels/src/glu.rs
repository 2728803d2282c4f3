//! The gated activation of an MLP, `act(gate) * up` (Shazeer, 2020), computed in FP32 for any storage type.

use crate::columns::{ColumnSlice, write_columns};
use crate::math;
use crate::rows::{Rows, for_each_part};
use crate::view::{read, write};
use candle_core::{Result, Tensor, bail};

/// Elements converted at a time: rows of this length stay in the L1 cache.
const WIDTH: usize = 1024;
/// Approximate number of elements of a task.
const MIN_ELEMENTS_PER_TASK: usize = 8 * WIDTH;

/// The function applied to the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateActivation {
    /// x / (1 + exp(-x)).
    Silu,
    /// GELU in its tanh form.
    Gelu,
}

/// Expands `$body` once for each gate, with `$function` bound to its first or second function, so that each gets its own loop.
macro_rules! with_gate {
    ($gate:expr, $silu:path, $gelu:path, |$function:ident| $body:expr) => {
        match $gate {
            GateActivation::Silu => {
                let $function = $silu;
                $body
            }
            GateActivation::Gelu => {
                let $function = $gelu;
                $body
            }
        }
    };
}

fn check(gate: ColumnSlice<'_>, up: ColumnSlice<'_>, y: &Tensor) -> Result<[usize; 2]> {
    let (rows, width) = y.dims2()?;
    if [gate, up].iter().any(|part| [part.rows(), part.count()] != [rows, width]) {
        bail!("a gate of {} × {} for an output of {rows} × {width}", gate.rows(), gate.count());
    }
    Ok([rows, width])
}

/// `y [N, F] = act(gate) * up`, elementwise; gate and up may be the halves of one buffer.
pub fn forward(kind: GateActivation, gate: ColumnSlice<'_>, up: ColumnSlice<'_>, y: &Tensor) -> Result<()> {
    let [rows, width] = check(gate, up, y)?;
    let (gate_opened, up_opened) = (read(gate.tensor())?, read(up.tensor())?);
    let (gate, up) = (gate.source(&gate_opened), up.source(&up_opened));
    write(y, |view| {
        for_each_part(
            Rows { view, width },
            rows,
            MIN_ELEMENTS_PER_TASK / width + 1,
            #[inline(always)]
            |first, rows, mut y| {
                let (mut gates, mut ups) = ([0.0; WIDTH], [0.0; WIDTH]);
                for (i, start) in (0..rows).flat_map(|i| (0..width).step_by(WIDTH).map(move |start| (i, start))) {
                    let count = WIDTH.min(width - start);
                    let gates = &mut gates[..count];
                    gate.load(first + i, start, gates);
                    let ups = up.as_f32(first + i, start, &mut ups[..count]);
                    with_gate!(kind, math::silu, math::gelu, |function| {
                        for (gate, up) in gates.iter_mut().zip(ups) {
                            *gate = function(*gate) * up;
                        }
                    });
                    y.view.store(i * width + start, gates);
                }
            },
        );
    })
}

/// The gradients with respect to gate and up, given the output's gradient `dy [N, F]`, and the output `y` again. `dgate` and
/// `dup` may be halves of one buffer, but must not alias the other operands.
pub fn backward(
    kind: GateActivation,
    gate: ColumnSlice<'_>,
    up: ColumnSlice<'_>,
    dy: &Tensor,
    [dgate, dup]: [ColumnSlice<'_>; 2],
    y: &Tensor,
) -> Result<()> {
    let [rows, width] = check(gate, up, dy)?;
    check(dgate, dup, y)?;
    let (gate_opened, up_opened, dy) = (read(gate.tensor())?, read(up.tensor())?, read(dy)?);
    let (gate, up, dy) = (gate.source(&gate_opened), up.source(&up_opened), dy.view());
    write_columns([dgate, dup, ColumnSlice::all(y)?], |[dgate, dup, y]| {
        for_each_part(
            (),
            rows,
            MIN_ELEMENTS_PER_TASK / width + 1,
            #[inline(always)]
            |first, rows, ()| {
                let (mut gates, mut ups) = ([0.0; WIDTH], [0.0; WIDTH]);
                let (mut grads, mut outputs) = ([0.0; WIDTH], [0.0; WIDTH]);
                let rows = first..first + rows;
                for (row, start) in rows.flat_map(|row| (0..width).step_by(WIDTH).map(move |start| (row, start))) {
                    let count = WIDTH.min(width - start);
                    let (gates, ups) = (&mut gates[..count], &mut ups[..count]);
                    gate.load(row, start, gates);
                    up.load(row, start, ups);
                    let (grads, outputs) = (dy.as_f32(row * width + start, &mut grads[..count]), &mut outputs[..count]);
                    with_gate!(kind, math::silu_with_derivative, math::gelu_with_derivative, |functions| {
                        for (((gate, up), dy), y) in
                            gates.iter_mut().zip(ups.iter_mut()).zip(grads).zip(outputs.iter_mut())
                        {
                            let (value, derivative) = functions(*gate);
                            let (dgate, dup) = (dy * *up * derivative, dy * value);
                            *y = value * *up;
                            (*gate, *up) = (dgate, dup);
                        }
                    });
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

/// [`Activation::ClampedSwiGlu`](crate::Activation): `y [N, F]` of pairs of gate and up, `x [N, 2·F]`.
pub fn clamped(x: &Tensor, y: &Tensor) -> Result<()> {
    let (x, len) = (read(x)?, y.elem_count());
    let x = x.view();
    write(y, |view| {
        for_each_part(
            Rows { view, width: 1 },
            len,
            MIN_ELEMENTS_PER_TASK,
            #[inline(always)]
            |first, count, mut y| {
                let (mut pairs, mut outputs) = ([0.0; 2 * WIDTH], [0.0; WIDTH]);
                for start in (0..count).step_by(WIDTH) {
                    let outputs = &mut outputs[..WIDTH.min(count - start)];
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

/// The gradient `dx [N, 2·F]` of [`clamped`], given the output's gradient `dy [N, F]`, and the output `y` again.
pub fn clamped_backward(x: &Tensor, dy: &Tensor, dx: &Tensor, y: &Tensor) -> Result<()> {
    let (rows, width) = y.dims2()?;
    let (x, dy) = (read(x)?, read(dy)?);
    let (x, dy) = (x.view(), dy.view());
    write_columns([ColumnSlice::all(dx)?, ColumnSlice::all(y)?], |[dx, y]| {
        for_each_part(
            (),
            rows,
            MIN_ELEMENTS_PER_TASK / width + 1,
            #[inline(always)]
            |first, rows, ()| {
                let (mut pairs, mut grads, mut outputs) = ([0.0; 2 * WIDTH], [0.0; WIDTH], [0.0; WIDTH]);
                let rows = first..first + rows;
                for (row, start) in rows.flat_map(|row| (0..width).step_by(WIDTH).map(move |start| (row, start))) {
                    let outputs = &mut outputs[..WIDTH.min(width - start)];
                    let pairs = &mut pairs[..2 * outputs.len()];
                    x.load(2 * (row * width + start), pairs);
                    let grads = dy.as_f32(row * width + start, &mut grads[..outputs.len()]);
                    for ((pair, dy), y) in pairs.as_chunks_mut::<2>().0.iter_mut().zip(grads).zip(outputs.iter_mut()) {
                        let [gate, up] = bounded(*pair);
                        let (value, slope) = math::silu_with_derivative(CLAMPED_SLOPE * gate);
                        let (value, plus_one) = (value / CLAMPED_SLOPE, up + 1.0);
                        *y = value * plus_one;
                        // A bound's derivative is 0 outside.
                        let (dgate, dup) = (dy * plus_one * slope, dy * value);
                        let inside = pair[1] >= -CLAMPED_LIMIT && pair[1] <= CLAMPED_LIMIT;
                        *pair = [if pair[0] > CLAMPED_LIMIT { 0.0 } else { dgate }, if inside { dup } else { 0.0 }];
                    }
                    // SAFETY: a row is written by this task alone.
                    unsafe {
                        dx.store(row, 2 * start, pairs);
                        y.store(row, start, outputs);
                    }
                }
            },
        );
    })
}
