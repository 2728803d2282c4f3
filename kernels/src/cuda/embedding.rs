//! The launches of `embedding.cu`.

use super::dispatch::{Attempt, CudaKernels, is_pair, require};
use super::elementwise::serves;
use super::inputs::InputPart;
use super::launch::{DropoutArgs, KernelLaunch, PACK, Queue, arguments, kernel_symbol, to_u32};
use crate::op;
use candle_core::{DType, Result, Tensor};

const THREADS: usize = 128;
/// Bits of a digit by which rows are sorted.
const DIGIT_BITS: usize = 8;

arguments! {
    struct EmbeddingForward {
        table: u64,
        positions: u64,
        ids: u64,
        starts: u64,
        out: u64,
        len: u64,
        width: u32,
        seq_len: u32,
        scale: f32,
        unused: u32,
        dropout: DropoutArgs,
    }

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
pub(super) fn grouped(count: usize, table_row: impl Fn(usize) -> usize) -> Result<[Vec<u32>; 2]> {
    let key = |row: u32| Ok(u64::from(to_u32(table_row(row as usize))?) << 32 | u64::from(row));
    let mut keys = (0..to_u32(count)?).map(key).collect::<Result<Vec<u64>>>()?;
    let mut sorted = vec![0; count];
    let most = keys.iter().max().map_or(0, |key| key >> 32);
    // By a digit of the table's row at a time, the lowest first: keys of equal digits keep their order.
    for shift in (0..u32::BITS).step_by(DIGIT_BITS).take_while(|shift| most >> shift > 0) {
        let digit = |key: u64| (key >> (32 + shift)) as usize % (1 << DIGIT_BITS);
        let mut places = [0; 1 << DIGIT_BITS];
        let mut first = 0;
        for &key in &keys {
            places[digit(key)] += 1;
        }
        for place in &mut places {
            first += std::mem::replace(place, first);
        }
        for &key in &keys {
            let place = &mut places[digit(key)];
            sorted[*place] = key;
            *place += 1;
        }
        std::mem::swap(&mut keys, &mut sorted);
    }
    let mut ends = Vec::new();
    let mut end = 0;
    for group in keys.chunk_by(|a, b| a >> 32 == b >> 32) {
        end += group.len();
        ends.extend([(group[0] >> 32) as u32, to_u32(end)?]);
    }
    Ok([keys.into_iter().map(|key| key as u32).collect(), ends])
}

/// Whether the first type is the second or FP32, or the second is FP32.
fn is_pair_or_wide(types: [DType; 2]) -> bool {
    is_pair(types) || is_pair([types[1], types[0]])
}

impl<Q: Queue> CudaKernels<Q> {
    pub(super) fn embed(&self, op: &op::Embed<'_>) -> Attempt {
        let input = &op.input;
        let device = op.out.device();
        let (rows, width) = op.out.dims2()?;
        let types = [op.out.dtype(), input.table.dtype()];
        require(serves(width) && is_pair_or_wide(types))?;
        let (ids, _ids) = self.words(InputPart::Ids, 0, input.ids, device)?;
        let starts = input.documents.map(|starts| self.words(InputPart::Documents, 0, starts, device)).transpose()?;
        let (dropout, _draw) = self.dropout(input.dropout, device)?;
        let arguments = EmbeddingForward {
            table: self.address(input.table, types[1], input.table.elem_count())?,
            positions: self.optional(input.positions, types[1], input.seq_len * width)?,
            ids,
            starts: starts.as_ref().map_or(0, |(address, _owner)| *address),
            out: self.address(op.out, types[0], rows * width)?,
            len: (rows * width) as u64,
            width: to_u32(width)?,
            seq_len: to_u32(input.seq_len)?,
            scale: input.scale,
            unused: 0,
            dropout,
        };
        let packs = to_u32(rows * width / PACK)? as usize;
        let kernel = kernel_symbol("embedding_forward", &types)?;
        let launch = KernelLaunch::new("embedding", kernel, [packs.div_ceil(THREADS), 1, 1], [THREADS, 0])?;
        // SAFETY: every buffer was found large enough, and `Op::check` has checked ids and sizes of the tables.
        Ok(unsafe { self.queue.launch(&launch, &arguments) }?)
    }

    pub(super) fn embed_backward(&self, op: &op::EmbedBackward<'_>) -> Attempt {
        let input = &op.input;
        if let Some(positions) = op.dpositions {
            require(self.queue.zero(positions)?)?;
            let places = input.places();
            let parts = [InputPart::PositionOrder, InputPart::PositionGroups];
            self.add_rows(op, positions, 1.0, parts, |row| places.of(row))?;
        }
        let parts = [InputPart::TokenOrder, InputPart::TokenGroups];
        let add = |table| self.add_rows(op, table, input.scale, parts, |row| input.ids[row] as usize);
        op.dtable.map_or(Ok(()), add)
    }

    /// Adds `scale` times each row of `dropout(dx) [N, D]` to a row of `dtable [V, D]`, in FP32 with one rounding.
    fn add_rows(
        &self,
        op: &op::EmbedBackward<'_>,
        dtable: &Tensor,
        scale: f32,
        parts: [InputPart; 2],
        table_row: impl Fn(usize) -> usize,
    ) -> Attempt {
        let (rows, width) = op.dx.dims2()?;
        let types = [op.dx.dtype(), dtable.dtype()];
        require(serves(width) && is_pair_or_wide(types))?;
        let (dropout, _draw) = self.dropout(op.input.dropout, op.dx.device())?;
        let ([order, groups], count, _owners) = self.groups(&op.input, parts, table_row, op.dx.device())?;
        let arguments = EmbeddingBackward {
            dx: self.address(op.dx, types[0], rows * width)?,
            dtable: self.address(dtable, types[1], dtable.elem_count())?,
            order,
            groups,
            width: to_u32(width)?,
            count: to_u32(count)?,
            scale,
            unused: 0,
            dropout,
        };
        let kernel = kernel_symbol("embedding_backward", &types)?;
        let launch = KernelLaunch::new("embedding", kernel, [count, 1, 1], [THREADS, 0])?;
        // SAFETY: every buffer was found large enough, and `Op::check` has checked the rows of the table.
        Ok(unsafe { self.queue.launch(&launch, &arguments) }?)
    }
}
