//! Gates of attention's output (Qwen 3.5): each query head of a product is followed by the gate of its output,
//! `x · sigmoid(gate)`.

use crate::columns::{ColumnSlice, write_columns};
use crate::math;
use crate::rope::Direction;
use crate::rows::{Rows, WORK, for_each_part_with_scratch, write_rows};
use crate::view::{read, write};
use candle_core::{Result, Tensor};

/// Query heads with their gates.
#[derive(Clone, Copy, Debug)]
pub struct GatedHeads<'a> {
    /// `[N, H·2·head_dim]`.
    pub columns: ColumnSlice<'a>,
    /// The width of a head, and of a gate.
    pub head_dim: usize,
}

/// Copies the queries: `Forward` out of the pairs, `Backward` into them.
#[derive(Debug)]
pub struct CopyQueries<'a> {
    /// Queries and gates.
    pub pairs: GatedHeads<'a>,
    /// `[N, H·head_dim]`.
    pub queries: &'a Tensor,
    /// The side that is read.
    pub direction: Direction,
}

/// `out = x · sigmoid(gates)`.
#[derive(Debug)]
pub struct GateHeads<'a> {
    /// Queries and gates.
    pub pairs: GatedHeads<'a>,
    /// `[N, H·head_dim]`.
    pub x: &'a Tensor,
    /// `[N, H·head_dim]`.
    pub out: &'a Tensor,
}

/// The gradients of [`GateHeads`].
#[derive(Debug)]
pub struct GateHeadsBackward<'a> {
    /// Queries and gates.
    pub pairs: GatedHeads<'a>,
    /// The input of the forward pass.
    pub x: &'a Tensor,
    /// `[N, H·head_dim]`: the gradient of the output, which the gradient of `x` overwrites.
    pub dx: &'a Tensor,
    /// The pairs' gradients; those of the gates are overwritten.
    pub dpairs: GatedHeads<'a>,
}

impl GatedHeads<'_> {
    /// Whether these are pairs for matrices like `x`.
    pub(crate) fn fits(&self, x: &Tensor) -> Result<bool> {
        let (rows, width) = x.dims2()?;
        Ok(self.columns.dims() == [rows, 2 * width] && self.head_dim > 0 && width.is_multiple_of(self.head_dim))
    }

    /// For each head, its first column among heads, and those of its query and its gate among the pairs.
    fn places(self) -> impl Iterator<Item = [usize; 3]> {
        let width = self.head_dim;
        (0..self.columns.count() / (2 * width))
            .map(move |head| [head * width, 2 * head * width, (2 * head + 1) * width])
    }

    /// The rows of a task.
    fn grain(&self) -> usize {
        WORK / self.columns.count() + 1
    }
}

/// Computes [`CopyQueries`].
pub fn copy_queries(op: &CopyQueries<'_>) -> Result<()> {
    let &CopyQueries { pairs, queries, direction } = op;
    let forward = direction == Direction::Forward;
    let all = ColumnSlice::all(queries)?;
    let [from, to] = if forward { [pairs.columns, all] } else { [all, pairs.columns] };
    let opened = read(from.tensor())?;
    let source = from.source(&opened);
    write_columns([to], |[out]| {
        for_each_part_with_scratch(
            (),
            all.rows(),
            [pairs.grain(), pairs.head_dim],
            #[inline(always)]
            |first, rows, (), [head]| {
                for (row, [at, query, _]) in
                    (first..first + rows).flat_map(|row| pairs.places().map(move |it| (row, it)))
                {
                    let [from, to] = if forward { [query, at] } else { [at, query] };
                    source.load(row, from, head);
                    // SAFETY: this task alone has the row.
                    unsafe { out.store(row, to, head) };
                }
            },
        );
    })
}

/// Computes [`GateHeads`].
pub fn forward(op: &GateHeads<'_>) -> Result<()> {
    let &GateHeads { pairs, x, out } = op;
    let (opened, x) = (read(pairs.columns.tensor())?, read(x)?);
    let (gates, x) = (pairs.columns.source(&opened), x.view());
    let width = out.dim(1)?;
    write_rows(
        out,
        #[inline(always)]
        |first, out, gate| {
            x.load(first, out);
            for [at, _, place] in pairs.places() {
                let gate = &mut gate[..pairs.head_dim];
                gates.load(first / width, place, gate);
                for (out, gate) in out[at..].iter_mut().zip(&*gate) {
                    *out *= math::logistic(*gate).0;
                }
            }
        },
    )
}

/// Computes [`GateHeadsBackward`].
pub fn backward(op: &GateHeadsBackward<'_>) -> Result<()> {
    let &GateHeadsBackward { pairs, x, dx, dpairs } = op;
    let (opened, x) = (read(pairs.columns.tensor())?, read(x)?);
    let (gates, x) = (pairs.columns.source(&opened), x.view());
    let (rows, width) = dx.dims2()?;
    write_columns([dpairs.columns], |[dgates]| {
        write(dx, |view| {
            for_each_part_with_scratch(
                Rows { view, width },
                rows,
                [pairs.grain(), pairs.head_dim],
                #[inline(always)]
                |first, rows, mut dx, [gradient, value, gate]| {
                    for (i, [at, _, place]) in (0..rows).flat_map(|i| pairs.places().map(move |it| (i, it))) {
                        let row = first + i;
                        dx.view.as_view().load(i * width + at, gradient);
                        x.load(row * width + at, value);
                        gates.load(row, place, gate);
                        for ((gradient, value), gate) in gradient.iter_mut().zip(value.iter_mut()).zip(gate.iter()) {
                            let (open, closed) = math::logistic(*gate);
                            *value *= *gradient * open * closed;
                            *gradient *= open;
                        }
                        dx.view.store(i * width + at, gradient);
                        // SAFETY: this task alone has the row.
                        unsafe { dgates.store(row, place, value) };
                    }
                },
            );
        })
    })?
}
