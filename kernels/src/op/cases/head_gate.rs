//! Queries among their gates, and the gates.

use super::{Outputs, Trial};
use crate::columns::ColumnSlice;
use crate::head_gate::{CopyQueries, GateHeads, GateHeadsBackward, GatedHeads};
use crate::rope::Direction;
use candle_core::DType;

pub(super) fn head_gate(t: &Trial<'_>, [rows, heads, head_dim]: [usize; 3], dtype: DType) -> Outputs {
    let width = heads * head_dim;
    let product = &t.mapped("product", &[rows, 2 * width + 3], dtype, |_, x| 8.0 * x)?;
    let x = &t.numbers("x", &[rows, width], dtype)?;
    let dx = &t.numbers("dy", &[rows, width], dtype)?.copy()?;
    let dqueries = &t.numbers("dqueries", &[rows, width], dtype)?;
    let [queries, out] = &t.two_poisoned(&[rows, width], dtype)?;
    let dproduct = &t.poisoned(&[rows, 2 * width + 3], dtype)?;
    let pairs_of = |x| ColumnSlice::new(x, 1..2 * width + 1).map(|columns| GatedHeads { columns, head_dim });
    let (pairs, dpairs) = (pairs_of(product)?, pairs_of(dproduct)?);
    t.run(CopyQueries { pairs, queries, direction: Direction::Forward })?;
    t.run(GateHeads { pairs, x, out })?;
    t.run(GateHeadsBackward { pairs, x, dx, dpairs })?;
    t.run(CopyQueries { pairs: dpairs, queries: dqueries, direction: Direction::Backward })?;
    let dpairs = &dproduct.narrow(1, 1, 2 * width)?.contiguous()?;
    Ok(t.outputs([("queries", queries), ("out", out), ("dx", dx), ("dpairs", dpairs)], dtype))
}
