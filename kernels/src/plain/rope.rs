//! Rotary position embeddings: rotates each head's halves by the angles of the row's position.

use super::tensors::{rows_at, store_columns, widen_columns};
use crate::columns::Columns;
use crate::rope::{Direction, Positions, Table};
use candle_core::{Result, Tensor, bail};

/// See [`Kernels::rotate`](crate::Kernels::rotate).
pub(super) fn rotate(x: Columns<'_>, table: &Table, positions: Positions<'_>, direction: Direction) -> Result<()> {
    let half = table.cos.dim(1)?;
    if half == 0 || !x.count().is_multiple_of(2 * half) || positions.seq_len == 0 {
        bail!("rotation of {} × {} by heads of {}", x.rows(), x.count(), 2 * half);
    }
    if positions.documents.is_some_and(|starts| starts.len() != x.rows()) {
        bail!("rotation of {} rows got another number of documents' starts", x.rows());
    }
    let rows: Vec<u32> = (0..x.rows()).map(|row| positions.of(row) as u32).collect();
    let angles = |table: &Tensor| rows_at(table, &rows)?.reshape((x.rows(), 1, half));
    let (cos, sin) = (angles(&table.cos)?, angles(&table.sin)?);
    let sin = if direction == Direction::Forward { sin } else { sin.neg()? };
    let heads = widen_columns(x)?.reshape((x.rows(), (), 2 * half))?;
    let part = |first: usize| heads.narrow(2, first, half)?.contiguous();
    let (low, high) = (part(0)?, part(half)?);
    let turned = [
        (low.broadcast_mul(&cos)? - high.broadcast_mul(&sin)?)?,
        (high.broadcast_mul(&cos)? + low.broadcast_mul(&sin)?)?,
    ];
    store_columns(&Tensor::cat(&turned, 2)?.contiguous()?.reshape((x.rows(), ()))?, x)
}
