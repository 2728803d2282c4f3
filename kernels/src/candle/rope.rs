//! Rotary position embeddings: rotates each head's halves by the angles of the row's position.

use super::tensors::{rows_at, store_columns, upcast_columns};
use crate::op;
use crate::rope::Direction;
use candle_core::{Result, Tensor};

pub(super) fn apply_rope(op: &op::Rotate<'_>) -> Result<()> {
    let &op::Rotate { x, table, positions, direction } = op;
    let half = table.cos.dim(1)?;
    let rows: Vec<u32> = (0..x.rows()).map(|row| positions.of(row) as u32).collect();
    let angles = |table: &Tensor| rows_at(table, &rows)?.reshape((x.rows(), 1, half));
    let (cos, sin) = (angles(&table.cos)?, angles(&table.sin)?);
    let sin = if direction == Direction::Forward { sin } else { sin.neg()? };
    let heads = upcast_columns(x)?.reshape((x.rows(), (), 2 * half))?;
    let part = |first: usize| heads.narrow(2, first, half)?.contiguous();
    let low = part(0)?;
    let high = part(half)?;
    let turned = [
        (low.broadcast_mul(&cos)? - high.broadcast_mul(&sin)?)?,
        (high.broadcast_mul(&cos)? + low.broadcast_mul(&sin)?)?,
    ];
    store_columns(&Tensor::cat(&turned, 2)?.contiguous()?.reshape((x.rows(), ()))?, x)
}
