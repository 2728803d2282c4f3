//! Embeddings, and their gradient as a tree of sums over each token's rows: candle's `index_add` is serial over all
//! tokens, and atomics would make the bits depend on timing.

use super::tensors::{column_sums, drop, require_contiguous, rows_at, store, upcast};
use crate::op::{self, Embedding};
use candle_core::{Result, Tensor};

pub(super) fn forward(op: &op::Embed<'_>) -> Result<()> {
    let Embedding { table, positions, ids, scale, dropout, .. } = op.input;
    let mut x = (upcast(&rows_at(table, ids)?)? * f64::from(scale))?;
    if let Some(positions) = positions {
        let places: Vec<u32> = (0..ids.len()).map(|n| op.input.places().of(n) as u32).collect();
        x = (x + upcast(&rows_at(positions, &places)?)?)?;
    }
    store(&drop(dropout, 0, x)?, op.out)
}

pub(super) fn backward(op: &mut op::EmbedBackward<'_>) -> Result<()> {
    let op::EmbedBackward { input, dx, order, dtable, dpositions } = op;
    let Embedding { ids, seq_len, scale, dropout, .. } = *input;
    let (_, width) = dx.dims2()?;
    let dx = drop(dropout, 0, upcast(dx)?)?;
    if let Some(dpositions) = dpositions {
        require_contiguous(dpositions)?;
        if input.documents.is_some() {
            let places = input.places();
            store(&sums_by(&dx, order, |n| places.of(n), dpositions.dim(0)?)?, dpositions)?;
        } else {
            let sums = column_sums(&dx.reshape(((), seq_len * width))?)?.reshape((seq_len, width))?;
            dpositions.zero_set()?;
            store(&sums, &dpositions.narrow(0, 0, seq_len)?)?;
        }
    }
    let Some(dtable) = dtable else { return Ok(()) };
    let sums = sums_by(&dx, order, |n| ids[n] as usize, dtable.dim(0)?)?;
    store(&(upcast(dtable)? + (sums * f64::from(scale))?)?, dtable)
}

/// The sums of the rows of each key, for the keys `0..keys`; `order` is scratch with one number per row.
fn sums_by(rows: &Tensor, order: &mut [u32], key: impl Fn(usize) -> usize, keys: usize) -> Result<Tensor> {
    for (n, slot) in order.iter_mut().enumerate() {
        *slot = n as u32;
    }
    order.sort_unstable_by_key(|&n| (key(n as usize), n));
    let mut groups: Vec<(usize, usize)> = Vec::new();
    for group in order.chunk_by(|&a, &b| key(a as usize) == key(b as usize)) {
        groups.push((key(group[0] as usize), group.len()));
    }
    let sums = sum_groups(&rows_at(rows, order)?, groups.iter().map(|(_, count)| *count).collect())?;
    // Each key takes its sum, or the row of zeros after the sums.
    let mut source = vec![groups.len() as u32; keys];
    for (index, (key, _)) in groups.iter().enumerate() {
        source[*key] = index as u32;
    }
    rows_at(&with_zeros(&sums)?, &source)
}

fn with_zeros(rows: &Tensor) -> Result<Tensor> {
    Tensor::cat(&[rows, &Tensor::zeros((1, rows.dim(1)?), rows.dtype(), rows.device())?], 0)
}

/// The sum of each group of neighboring rows, by pairs, pairs of pairs and so on.
fn sum_groups(rows: &Tensor, mut counts: Vec<usize>) -> Result<Tensor> {
    let mut rows = rows.clone();
    while counts.iter().any(|&count| count > 1) {
        let zeros = rows.dim(0)? as u32;
        let mut left = Vec::new();
        let mut right = Vec::new();
        let mut first = 0;
        for count in &mut counts {
            for i in (0..*count).step_by(2) {
                left.push((first + i) as u32);
                right.push(if i + 1 < *count { (first + i + 1) as u32 } else { zeros });
            }
            first += *count;
            *count = count.div_ceil(2);
        }
        rows = (rows_at(&rows, &left)? + rows_at(&with_zeros(&rows)?, &right)?)?;
    }
    Ok(rows)
}
