//! Rotary position embeddings (Su et al., 2021) in the half-split layout of Hugging Face: element `i` of a head is
//! rotated with element `i + head_size / 2`.
//!
//! `engine::model::rope` computes the frequencies from a model's configuration.

use crate::op;
use crate::rows::{Rows, WORK, for_each_part_with_scratch};
use crate::view::{read, write};
use candle_core::{Device, Result, Tensor};
use std::ops::Range;

/// Cosines and sines of every position's angles, FP32.
#[derive(Clone, Debug)]
pub struct CosSinCache {
    /// `[positions, head_size / 2]`.
    pub cos: Tensor,
    /// `[positions, head_size / 2]`.
    pub sin: Tensor,
}

impl CosSinCache {
    /// Angles of `positions` at the given frequencies; `factor` multiplies cosines and sines.
    ///
    /// An angle is the FP32 product of position and frequency, as in transformers, so that results agree at large
    /// positions too. Its cosine and sine are rounded once.
    pub fn new(frequencies: &[f32], factor: f64, positions: Range<usize>, device: &Device) -> Result<Self> {
        let (half, count) = (frequencies.len(), positions.len());
        let mut tables = [Vec::with_capacity(count * half), Vec::with_capacity(count * half)];
        for position in positions {
            for frequency in frequencies {
                let (sin, cos) = f64::from(position as f32 * frequency).sin_cos();
                // PyTorch rounds the cosine before it multiplies.
                for (table, value) in tables.iter_mut().zip([cos, sin]) {
                    table.push((f64::from(value as f32) * factor) as f32);
                }
            }
        }
        let [cos, sin] = tables.map(|table| Tensor::from_vec(table, (count, half), device));
        Ok(Self { cos: cos?, sin: sin? })
    }

    /// Number of positions in the table.
    pub fn positions(&self) -> usize {
        self.cos.dims()[0]
    }
}

/// The position of each row of a batch.
#[derive(Clone, Copy, Debug)]
pub struct PositionIds<'a> {
    /// Rows in a sequence; sequences follow each other.
    pub seq_len: usize,
    /// Tokens before the first row of each sequence, as in decoding.
    pub past: usize,
    /// For each row, the row of its sequence that its document starts in, where positions begin at 0 again.
    pub documents: Option<&'a [u32]>,
}

impl PositionIds<'_> {
    /// The position of a row.
    #[inline(always)]
    pub fn of(self, row: usize) -> usize {
        let document = self.documents.map_or(0, |starts| starts[row] as usize);
        self.past + (row % self.seq_len).saturating_sub(document)
    }
}

/// The direction of rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// By the positions' angles: the forward pass.
    Forward,
    /// By their negatives: the backward pass.
    Backward,
}

/// Computes [`op::Rotate`], in FP32 with one rounding.
pub fn apply_rope(op: &op::Rotate<'_>) -> Result<()> {
    let &op::Rotate { x, table, positions, direction } = op;
    let rows = x.rows();
    let half = table.cos.dim(1)?;
    let head_size = 2 * half;
    let (cos, sin) = (read(&table.cos)?, read(&table.sin)?);
    let (cos, sin) = (cos.typed::<f32>()?, sin.typed::<f32>()?);
    let sign = if direction == Direction::Forward { 1.0 } else { -1.0 };
    write(x.tensor(), |view| {
        for_each_part_with_scratch(
            Rows { view, width: x.stride() },
            rows,
            [WORK / x.count() + 1, head_size],
            #[inline(always)]
            |first, rows, mut out, [head, turned]| {
                for i in 0..rows {
                    let position = positions.of(first + i);
                    let (cos, sin) = (&cos[position * half..][..half], &sin[position * half..][..half]);
                    for start in (0..x.count()).step_by(head_size) {
                        let at = i * x.stride() + x.first() + start;
                        out.view.as_view().load(at, head);
                        let (low, high) = head.split_at(half);
                        let (out_low, out_high) = turned.split_at_mut(half);
                        for j in 0..half {
                            let sin = sign * sin[j];
                            out_low[j] = low[j] * cos[j] - high[j] * sin;
                            out_high[j] = high[j] * cos[j] + low[j] * sin;
                        }
                        out.view.store(at, turned);
                    }
                }
            },
        );
    })
}
