//! Token and position embeddings, and their gradient by rows.

use crate::engine::kernels::dropout::Dropout;
use crate::engine::kernels::rows::{Rows, SplitRows, for_each_part, with_scratch};
use crate::engine::kernels::view::{View, ViewMut, read, write};
use candle_core::{Result, Tensor, bail};

const GRAIN: usize = 16;

/// `out[n] = dropout(wte[ids[n]] + wpe[n % seq_len])` for `out [N, D]` of the residual type. An id outside the
/// vocabulary is an error.
pub fn forward(
    wte: &Tensor,
    wpe: &Tensor,
    ids: &[u32],
    seq_len: usize,
    dropout: Option<Dropout>,
    out: &Tensor,
) -> Result<()> {
    let (vocab, width) = wte.dims2()?;
    if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab) {
        bail!("token id {id} is outside the model's vocabulary of {vocab}");
    }
    let (wte, wpe) = (read(wte)?, read(wpe)?);
    let (wte, wpe) = (wte.view(), wpe.view());
    write(out, |out| {
        for_each_part(
            Rows { view: out, width },
            ids.len(),
            GRAIN,
            #[inline(always)]
            |first, rows, mut out| {
                with_scratch(
                    2 * width,
                    #[inline(always)]
                    |scratch| {
                        let (total, position) = scratch.split_at_mut(width);
                        for i in 0..rows {
                            let n = first + i;
                            wte.load(ids[n] as usize * width, total);
                            wpe.load(n % seq_len * width, position);
                            for (total, position) in total.iter_mut().zip(position.iter()) {
                                *total += position;
                            }
                            if let Some(dropout) = dropout {
                                dropout.apply(n * width, total);
                            }
                            out.view.store(i * width, total);
                        }
                    },
                );
            },
        );
    })
}

/// Adds the gradient of the token embedding to `dwte [V, D]` and writes that of the position embedding, `dwpe [C, D]`.
///
/// `dx [N, D]` is the residual stream's gradient. `order` is scratch of `N` numbers: rows are grouped by token, and a
/// token's rows are summed in FP32 in batch order by one thread, so that the sum does not depend on the threads.
pub fn backward(
    dx: &Tensor,
    ids: &[u32],
    seq_len: usize,
    dropout: Option<Dropout>,
    order: &mut [u32],
    dwte: &Tensor,
    dwpe: &Tensor,
) -> Result<()> {
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
    write(dwte, |dwte| by_token(dwte, width, ids, order, &add_row))?;
    let positions = dwpe.dim(0)?;
    write(dwpe, |dwpe| {
        for_each_part(
            Rows { view: dwpe, width },
            positions,
            GRAIN,
            #[inline(always)]
            |first, rows, mut dwpe| {
                with_scratch(
                    2 * width,
                    #[inline(always)]
                    |scratch| {
                        let (total, row) = scratch.split_at_mut(width);
                        for i in 0..rows {
                            total.fill(0.0);
                            if first + i < seq_len {
                                for n in (first + i..ids.len()).step_by(seq_len) {
                                    add_row(n, row, total);
                                }
                            }
                            dwpe.view.store(i * width, total);
                        }
                    },
                );
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
    add_row: &(impl Fn(usize, &mut [f32], &mut [f32]) + Sync),
) {
    fn descend(
        dwte: Rows<ViewMut<'_>>,
        first_token: usize,
        ids: &[u32],
        order: &[u32],
        add_row: &(impl Fn(usize, &mut [f32], &mut [f32]) + Sync),
    ) {
        let token = |n: u32| ids[n as usize];
        let mid = order.len() / 2;
        let cut = order[..mid].partition_point(|&n| token(n) < order.get(mid).map_or(0, |&n| token(n)));
        if order.len() > 4 * GRAIN && cut > 0 {
            let boundary = token(order[cut]) as usize;
            let (low, high) = dwte.split_rows(boundary - first_token);
            rayon::join(
                || descend(low, first_token, ids, &order[..cut], add_row),
                || descend(high, boundary, ids, &order[cut..], add_row),
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
                    for (total, before) in total.iter_mut().zip(before.iter()) {
                        *total += before;
                    }
                    view.store(at, total);
                }
            },
        );
    }
    descend(Rows { view: dwte, width }, 0, ids, order, add_row);
}
