//! Gates of attention's heads, with heads as a dimension.

use super::logistic;
use super::tensors::{store, store_columns, upcast, upcast_columns};
use crate::head_gate::{CopyQueries, GateHeads, GateHeadsBackward, GatedHeads};
use crate::rope::Direction;
use candle_core::{Result, Tensor};

/// Queries and gates, `[N, H, head_dim]` each.
fn parts(pairs: GatedHeads<'_>) -> Result<[Tensor; 2]> {
    let rows = pairs.columns.rows();
    let pairs = upcast_columns(pairs.columns)?.reshape((rows, (), 2, pairs.head_dim))?;
    let part = |i: usize| pairs.narrow(2, i, 1)?.squeeze(2)?.contiguous();
    Ok([part(0)?, part(1)?])
}

fn store_parts(parts: &[Tensor; 2], pairs: GatedHeads<'_>) -> Result<()> {
    let joined = Tensor::stack(parts, 2)?.contiguous()?;
    store_columns(&joined.reshape((pairs.columns.rows(), ()))?, pairs.columns)
}

pub(super) fn copy_queries(op: &CopyQueries<'_>) -> Result<()> {
    let [queries, gates] = parts(op.pairs)?;
    match op.direction {
        Direction::Forward => store(&queries.reshape(op.queries.shape())?, op.queries),
        Direction::Backward => store_parts(&[upcast(op.queries)?.reshape(queries.shape())?, gates], op.pairs),
    }
}

pub(super) fn forward(op: &GateHeads<'_>) -> Result<()> {
    let [_, gates] = parts(op.pairs)?;
    store(&(upcast(op.x)? * logistic(&gates)?.reshape(op.x.shape())?)?, op.out)
}

pub(super) fn backward(op: &GateHeadsBackward<'_>) -> Result<()> {
    let [queries, _] = parts(op.dpairs)?;
    let [_, gates] = parts(op.pairs)?;
    let open = logistic(&gates)?;
    let [x, dy] = [op.x, op.dx].map(|x| upcast(x)?.reshape(gates.shape()));
    let dx = (dy? * &open)?;
    store_parts(&[queries, (&dx * x? * open.affine(-1.0, 1.0)?)?], op.dpairs)?;
    store(&dx.reshape(op.dx.shape())?, op.dx)
}
