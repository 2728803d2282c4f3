//! Embeddings of tokens and of learned positions, and their gradient by rows.

use crate::op::{self, Embedding};
use crate::rows::{Rows, SplitRows, axpy, for_each_part_with_scratch, with_scratch, write_rows};
use crate::view::{ReadGuard, View, ViewMut, read, write};
use candle_core::{DType, Result};
use half::{bf16, f16};

const MIN_ROWS_PER_TASK: usize = 16;

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
    let (places, (_, width)) = (op.input.places(), table.dims2()?);
    let (tokens, positions) = (read(table)?, positions.map(read).transpose()?);
    let (tokens, positions) = (tokens.view(), positions.as_ref().map(ReadGuard::view));
    write_rows(
        op.out,
        #[inline(always)]
        |at, total, position| {
            let n = at / width;
            tokens.load(ids[n] as usize * width, total);
            if scale != 1.0 {
                for total in total.iter_mut() {
                    *total *= scale;
                }
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

/// Computes [`op::EmbedBackward`]. Rows are grouped by token, and a token's rows are summed in FP32 in batch order by one thread,
/// so that the sum does not depend on the threads. Positions are summed in the same way.
pub fn backward(op: &mut op::EmbedBackward<'_>) -> Result<()> {
    let op::EmbedBackward { input, dx, order, dtable, dpositions } = op;
    let (Embedding { ids, scale, dropout, .. }, places) = (*input, input.places());
    let (_, width) = dx.dims2()?;
    let dx = read(dx)?;
    let dx = dx.view();
    let add_row = |n: usize, row: &mut [f32], total: &mut [f32]| {
        dx.load(n * width, row);
        if let Some(dropout) = dropout {
            dropout.apply(n * width, row);
        }
        for (total, row) in total.iter_mut().zip(row.iter()) {
            *total += row;
        }
    };
    for (n, slot) in order.iter_mut().enumerate() {
        *slot = n as u32;
    }
    order.sort_unstable_by_key(|&n| (ids[n as usize], n));
    if let Some(dwte) = dtable {
        write(dwte, |dwte| by_token(dwte, width, ids, order, scale, &add_row))?;
    }
    let Some(dwpe) = dpositions else { return Ok(()) };
    let positions = dwpe.dim(0)?;
    order.sort_unstable_by_key(|&n| (places.of(n as usize), n));
    let order = &*order;
    write(dwpe, |dwpe| {
        for_each_part_with_scratch(
            Rows { view: dwpe, width },
            positions,
            [MIN_ROWS_PER_TASK, width],
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

/// Rows of the token embedding's gradient, cut between two tokens of the sorted order.
fn by_token(
    dwte: ViewMut<'_>,
    width: usize,
    ids: &[u32],
    order: &[u32],
    scale: f32,
    add_row: &(impl Fn(usize, &mut [f32], &mut [f32]) + Sync),
) {
    fn descend(
        dwte: Rows<ViewMut<'_>>,
        first_token: usize,
        ids: &[u32],
        order: &[u32],
        scale: f32,
        add_row: &(impl Fn(usize, &mut [f32], &mut [f32]) + Sync),
    ) {
        let token = |n: u32| ids[n as usize];
        let mid = order.len() / 2;
        let cut = order[..mid].partition_point(|&n| token(n) < order.get(mid).map_or(0, |&n| token(n)));
        if order.len() > 4 * MIN_ROWS_PER_TASK && cut > 0 {
            let boundary = token(order[cut]) as usize;
            let (low, high) = dwte.split_rows(boundary - first_token);
            rayon::join(
                || descend(low, first_token, ids, &order[..cut], scale, add_row),
                || descend(high, boundary, ids, &order[cut..], scale, add_row),
            );
            return;
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
                    let at = (token(group[0]) as usize - first_token) * width;
                    View::load(&view.as_view(), at, before);
                    axpy(scale, total, before);
                    view.store(at, before);
                }
            },
        );
    }
    descend(Rows { view: dwte, width }, 0, ids, order, scale, add_row);
}
