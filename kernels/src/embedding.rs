//! Embeddings of tokens and of learned positions, and their gradient by rows.

use crate::machine::spin::join;
use crate::op::{self, Embedding};
use crate::rows::{self, Rows, SplitRows, axpy, for_each_part_with_scratch, with_scratch, write_rows};
use crate::view::{ReadGuard, ViewMut, read, write};
use candle_core::{DType, Result};
use half::{bf16, f16};

/// Positions whose rows a task sums. Of tokens it sums four times as many rows.
const ROWS_PER_TASK: usize = 16;

/// √width, rounded to the type that the embedding is stored in, as Gemma was trained with it.
pub fn scale_of_width(width: usize, dtype: DType) -> f32 {
    let scale = (width as f64).sqrt() as f32;
    match dtype {
        DType::F16 => f16::from_f32(scale).to_f32(),
        DType::BF16 => bf16::from_f32(scale).to_f32(),
        _ => scale,
    }
}

/// Computes [`op::Embed`].
pub fn forward(op: &op::Embed<'_>) -> Result<()> {
    let Embedding { table, positions, ids, scale, dropout, .. } = op.input;
    let places = op.input.places();
    let (_, width) = table.dims2()?;
    let tokens = read(table)?;
    let positions = positions.map(read).transpose()?;
    let tokens = tokens.view();
    let positions = positions.as_ref().map(ReadGuard::view);
    write_rows(
        op.out,
        #[inline(always)]
        |at, total, position| {
            let n = at / width;
            tokens.load(ids[n] as usize * width, total);
            if scale != 1.0 {
                rows::scale(total, scale);
            }
            if let Some(positions) = positions {
                positions.load(places.of(n) * width, position);
                axpy(1.0, position, total);
            }
            if let Some(dropout) = dropout {
                dropout.apply(at, total);
            }
        },
    )
}

/// Computes [`op::EmbedBackward`]. Rows are grouped by token, and a token's rows are summed in FP32 in batch order by
/// one thread, so that the sum does not depend on the threads. Positions are summed in the same way.
pub fn backward(op: &mut op::EmbedBackward<'_>) -> Result<()> {
    let op::EmbedBackward { input, dx, order, dtable, dpositions } = op;
    let Embedding { ids, scale, dropout, .. } = *input;
    let places = input.places();
    let (_, width) = dx.dims2()?;
    let dx = read(dx)?;
    let dx = dx.view();
    let add_row = |n: usize, row: &mut [f32], total: &mut [f32]| {
        dx.load(n * width, row);
        if let Some(dropout) = dropout {
            dropout.apply(n * width, row);
        }
        axpy(1.0, row, total);
    };
    for (n, slot) in order.iter_mut().enumerate() {
        *slot = n as u32;
    }
    order.sort_unstable_by_key(|&n| (ids[n as usize], n));
    if let Some(dwte) = dtable {
        write(dwte, |view| by_token(Rows { view, width }, 0, ids, order, scale, &add_row))?;
    }
    let Some(dwpe) = dpositions else { return Ok(()) };
    let positions = dwpe.dim(0)?;
    order.sort_unstable_by_key(|&n| (places.of(n as usize), n));
    let order = &*order;
    write(dwpe, |dwpe| {
        for_each_part_with_scratch(
            Rows { view: dwpe, width },
            positions,
            [ROWS_PER_TASK, width],
            #[inline(always)]
            |first, rows, mut dwpe, [total, row]| {
                for i in 0..rows {
                    total.fill(0.0);
                    let from = order.partition_point(|&n| places.of(n as usize) < first + i);
                    for &n in order[from..].iter().take_while(|&&n| places.of(n as usize) == first + i) {
                        add_row(n as usize, row, total);
                    }
                    dwpe.view.store(i * width, total);
                }
            },
        );
    })
}

/// Adds the gradients of the tokens in `order`, which is sorted by token, to the table's rows, whose first is
/// `first_token`. Other threads take a part of them, cut between two tokens.
fn by_token(
    dwte: Rows<ViewMut<'_>>,
    first_token: usize,
    ids: &[u32],
    order: &[u32],
    scale: f32,
    add_row: &(impl Fn(usize, &mut [f32], &mut [f32]) + Sync),
) {
    let token = |n: u32| ids[n as usize] as usize;
    if order.len() > 4 * ROWS_PER_TASK {
        let boundary = token(order[order.len() / 2]);
        let (below, above) = order.split_at(order.partition_point(|&n| token(n) < boundary));
        if !below.is_empty() {
            let (low, high) = dwte.split_rows(boundary - first_token);
            join(
                || by_token(low, first_token, ids, below, scale, add_row),
                || by_token(high, boundary, ids, above, scale, add_row),
            );
            return;
        }
    }
    let Rows { mut view, width } = dwte;
    with_scratch(
        3 * width,
        #[inline(always)]
        |scratch| {
            let (total, rest) = scratch.split_at_mut(width);
            let (row, before) = rest.split_at_mut(width);
            for group in order.chunk_by(|&a, &b| token(a) == token(b)) {
                total.fill(0.0);
                for &n in group {
                    add_row(n as usize, row, total);
                }
                let at = (token(group[0]) - first_token) * width;
                view.as_view().load(at, before);
                axpy(scale, total, before);
                view.store(at, before);
            }
        },
    );
}
