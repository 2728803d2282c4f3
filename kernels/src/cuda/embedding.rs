//! The launch of `embedding.cu`.

use super::dispatch::{Attempt, CudaKernels, is_pair, require};
use super::elementwise::serves;
use super::launch::{DropoutArgs, KernelLaunch, Queue, arguments, kernel_symbol, to_u32};
use crate::op;
use candle_core::{DType, Result, Tensor};

const THREADS: u32 = 128;

arguments! {
    struct EmbeddingBackward {
        dx: u64,
        dtable: u64,
        order: u64,
        groups: u64,
        width: u32,
        count: u32,
        scale: f32,
        unused: u32,
        dropout: DropoutArgs,
    }
}

/// Groups the rows `0..count` by the row of a table that they add to. Returns the rows, group by group in their order,
/// and for each group its row of the table and where it ends.
fn grouped(count: usize, table_row: impl Fn(usize) -> usize) -> Result<[Vec<u32>; 2]> {
    let mut order: Vec<u32> = (0..to_u32(count)?).collect();
    order.sort_by_key(|&row| table_row(row as usize));
    let (mut ends, mut end) = (Vec::new(), 0);
    for group in order.chunk_by(|&a, &b| table_row(a as usize) == table_row(b as usize)) {
        end += group.len();
        ends.extend([to_u32(table_row(group[0] as usize))?, to_u32(end)?]);
    }
    Ok([order, ends])
}

impl<Q: Queue> CudaKernels<Q> {
    pub(super) fn embed_backward(&self, op: &op::EmbedBackward<'_>) -> Attempt {
        let input = &op.input;
        if let Some(positions) = op.dpositions {
            positions.zero_set()?;
            let places = input.places();
            self.add_rows(op, positions, 1.0, |row| places.of(row))?;
        }
        op.dtable.map_or(Ok(()), |table| self.add_rows(op, table, input.scale, |row| input.ids[row] as usize))
    }

    /// Adds `scale` times each row of `dropout(dx) [N, D]` to a row of `dtable [V, D]`, in FP32 with one rounding.
    fn add_rows(
        &self,
        op: &op::EmbedBackward<'_>,
        dtable: &Tensor,
        scale: f32,
        table_row: impl Fn(usize) -> usize,
    ) -> Attempt {
        let ((rows, width), types) = (op.dx.dims2()?, [op.dx.dtype(), dtable.dtype()]);
        require(serves(width) && (is_pair(types) || types[1] == DType::F32))?;
        let [order, ends] = grouped(rows, table_row)?;
        let groups = ends.len() / 2;
        let [order, ends] = [Tensor::new(order, op.dx.device())?, Tensor::new(ends, op.dx.device())?];
        let arguments = EmbeddingBackward {
            dx: self.address(op.dx, types[0], rows * width)?,
            dtable: self.address(dtable, types[1], dtable.elem_count())?,
            order: self.address(&order, DType::U32, rows)?,
            groups: self.address(&ends, DType::U32, 2 * groups)?,
            width: to_u32(width)?,
            count: to_u32(groups)?,
            scale,
            unused: 0,
            dropout: DropoutArgs::new(op.input.dropout),
        };
        let launch = KernelLaunch {
            module: "embedding",
            kernel: kernel_symbol("embedding_backward", &types)?,
            grid: [to_u32(groups)?, 1, 1],
            threads: THREADS,
            shared_bytes: 0,
        };
        // SAFETY: every buffer was found large enough, and `Op::check` has checked the rows of the table.
        Ok(unsafe { self.queue.launch(&launch, &arguments) }?)
    }
}
