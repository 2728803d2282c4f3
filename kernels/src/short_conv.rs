//! Gated short convolutions, which some layers of LFM2 (Liquid AI, 2025) have instead of attention.
//!
//! The input has three parts of D columns: `b`, `c` and `x`. With K taps,
//! `y_t = c_t · Σ_j weight_j · b_{t-j} · x_{t-j}` for each channel and `j < K`, where tokens before the document count
//! as zeros. Files store the weight of the token itself last.

use crate::attention::upcast;
use crate::columns::{ColumnReader, ColumnSlice};
use crate::decode_attention::CachedSequence;
use crate::rope::PositionIds;
use crate::rows::{Rows, STRIPE, WORK, column_sums, for_each_part_with_scratch, par_columns, with_scratch};
use crate::view::{ReadGuard, View, read, write, write_f32};
use crate::{isa, view};
use candle_core::{DType, Device, Result, Tensor};

/// The forward pass.
#[derive(Debug)]
pub struct ShortConv<'a> {
    /// `[N, 3·D]`: `b`, `c` and `x`.
    pub input: &'a Tensor,
    /// `[D, 1, K]`.
    pub weight: &'a Tensor,
    /// The rows' positions in their documents.
    pub positions: PositionIds<'a>,
    /// `[N, D]`.
    pub out: &'a Tensor,
}

/// The gradients of a [`ShortConv`].
#[derive(Debug)]
pub struct ShortConvBackward<'a> {
    /// The input of the forward pass.
    pub input: &'a Tensor,
    /// The weight of the forward pass.
    pub weight: &'a Tensor,
    /// The positions of the forward pass.
    pub positions: PositionIds<'a>,
    /// `[N, D]`, the gradient of the output.
    pub dy: &'a Tensor,
    /// `[N, 3·D]`, overwritten.
    pub dinput: &'a Tensor,
    /// `[D, 1, K]`, overwritten; `None` if the weight is frozen.
    pub dweight: Option<&'a Tensor>,
}

/// A [`ShortConv`] of new tokens, for generating text.
#[derive(Debug)]
pub struct DecodeShortConv<'a> {
    /// `[n, 3·D]`.
    pub input: &'a Tensor,
    /// `[D, 1, K]`.
    pub weight: &'a Tensor,
    /// The sequences, in the order of their rows.
    pub sequences: &'a [ConvSequence<'a>],
    /// `[n, D]`.
    pub out: &'a Tensor,
}

/// New tokens of a sequence, and the tokens before them.
pub type ConvSequence<'a> = CachedSequence<'a, ConvCache>;

/// The products `b · x` of a sequence's last K tokens.
#[derive(Debug)]
pub struct ConvCache {
    /// `[K, D]`, FP32; the token at position `p` has the row `p % K`.
    pub(crate) products: Tensor,
}

impl ConvCache {
    /// A cache for convolutions of `taps` taps.
    pub fn new(taps: usize, width: usize, device: &Device) -> Result<Self> {
        Ok(Self { products: view::zeros(&[taps, width], DType::F32, device)? })
    }
}

/// The numbers of channels and taps of a weight.
pub(crate) fn sizes(weight: &Tensor) -> Result<[usize; 2]> {
    let (width, _, taps) = weight.dims3()?;
    Ok([width, taps])
}

/// Whether these are the input and output of a convolution.
fn fits(input: &Tensor, weight: &Tensor, out: &Tensor) -> Result<bool> {
    let [width, taps] = sizes(weight)?;
    let rows = out.dim(0)?;
    let matrices = input.dims() == [rows, 3 * width] && out.dims() == [rows, width];
    Ok(matrices && weight.dims() == [width, 1, taps] && width > 0 && taps > 0)
}

/// Whether each of `rows` rows has a position, and sequences begin in them.
pub(crate) fn have_positions(positions: PositionIds<'_>, rows: usize) -> bool {
    positions.seq_len > 0 && positions.past == 0 && positions.documents.is_none_or(|starts| starts.len() == rows)
}

impl ShortConv<'_> {
    pub(crate) fn fits(&self) -> Result<bool> {
        Ok(fits(self.input, self.weight, self.out)? && have_positions(self.positions, self.out.dim(0)?))
    }
}

impl ShortConvBackward<'_> {
    pub(crate) fn fits(&self) -> Result<bool> {
        let gradients = self.dinput.dims() == self.input.dims()
            && self.dweight.is_none_or(|dweight| dweight.dims() == self.weight.dims());
        Ok(gradients && fits(self.input, self.weight, self.dy)? && have_positions(self.positions, self.dy.dim(0)?))
    }
}

impl DecodeShortConv<'_> {
    pub(crate) fn fits(&self) -> Result<bool> {
        let [width, taps] = sizes(self.weight)?;
        let caches = self.sequences.iter().all(|sequence| sequence.cache.products.dims() == [taps, width]);
        let new: usize = self.sequences.iter().map(|sequence| sequence.new).sum();
        Ok(caches && new == self.out.dim(0)? && fits(self.input, self.weight, self.out)?)
    }
}

/// The parts of the input.
#[derive(Clone, Copy)]
struct Gates<'a> {
    b: ColumnReader<'a>,
    c: ColumnReader<'a>,
    x: ColumnReader<'a>,
}

impl<'a> Gates<'a> {
    fn open(input: &Tensor, opened: &'a ReadGuard<'_>) -> Result<Self> {
        let [b, c, x] = ColumnSlice::split(input, [input.dim(1)? / 3; 3])?.map(|part| part.source(opened));
        Ok(Self { b, c, x })
    }

    /// Writes `b · x` of a row's channels, starting at `first`.
    #[inline(always)]
    fn product(&self, row: usize, first: usize, out: &mut [f32], scratch: &mut [f32]) {
        self.b.load(row, first, out);
        self.x.load(row, first, scratch);
        multiply_elements(out, scratch);
    }
}

/// `a *= b`.
#[inline(always)]
pub(crate) fn multiply_elements(a: &mut [f32], b: &[f32]) {
    for (a, b) in a.iter_mut().zip(b) {
        *a *= b;
    }
}

/// `sum += a · b`.
#[inline(always)]
pub(crate) fn add_product(sum: &mut [f32], a: &[f32], b: &[f32]) {
    for ((sum, a), b) in sum.iter_mut().zip(a).zip(b) {
        *sum += a * b;
    }
}

/// The weights of each number of tokens before, `[K, D]`.
pub(crate) struct Taps {
    width: usize,
    values: Vec<f32>,
}

impl Taps {
    pub(crate) fn read(weight: &Tensor) -> Result<Self> {
        let [width, taps] = sizes(weight)?;
        let stored = upcast(weight)?;
        let values = (0..taps * width).map(|i| stored[i % width * taps + taps - 1 - i / width]).collect();
        Ok(Self { width, values })
    }

    pub(crate) fn count(&self) -> usize {
        self.values.len() / self.width
    }

    /// The weights of the token `before` places earlier.
    #[inline(always)]
    pub(crate) fn of(&self, before: usize) -> &[f32] {
        &self.values[before * self.width..][..self.width]
    }

    /// The number of rows of a task.
    fn grain(&self) -> usize {
        WORK / self.values.len() + 1
    }
}

/// Writes the convolution of a row.
#[inline(always)]
fn convolve(gates: Gates<'_>, taps: &Taps, row: usize, position: usize, [sum, product, x]: [&mut [f32]; 3]) {
    sum.fill(0.0);
    for before in 0..taps.count().min(position + 1) {
        gates.product(row - before, 0, product, x);
        add_product(sum, taps.of(before), product);
    }
}

/// Computes [`ShortConv`].
pub fn forward(op: &ShortConv<'_>) -> Result<()> {
    let opened = read(op.input)?;
    let gates = Gates::open(op.input, &opened)?;
    let taps = &Taps::read(op.weight)?;
    let (rows, width) = op.out.dims2()?;
    write(op.out, |view| {
        for_each_part_with_scratch(
            Rows { view, width },
            rows,
            [taps.grain(), width],
            #[inline(always)]
            |first, rows, mut out, [y, product, scratch]| {
                for i in 0..rows {
                    let row = first + i;
                    convolve(gates, taps, row, op.positions.of(row), [y, product, scratch]);
                    gates.c.load(row, 0, scratch);
                    multiply_elements(y, scratch);
                    out.view.store(i * width, y);
                }
            },
        );
    })
}

/// Computes [`ShortConvBackward`].
pub fn backward(op: &ShortConvBackward<'_>) -> Result<()> {
    let opened = read(op.input)?;
    let gates = Gates::open(op.input, &opened)?;
    let dy = read(op.dy)?;
    let dy = dy.view();
    let positions = op.positions;
    let taps = &Taps::read(op.weight)?;
    let (rows, width) = op.dy.dims2()?;
    write(op.dinput, |view| {
        for_each_part_with_scratch(
            Rows { view, width: 3 * width },
            rows,
            [taps.grain(), width],
            #[inline(always)]
            |first, part, mut out, [sum, product, scratch]| {
                for i in 0..part {
                    let row = first + i;
                    let mut store = |part: usize, values: &[f32]| out.view.store((3 * i + part) * width, values);
                    convolve(gates, taps, row, positions.of(row), [sum, product, scratch]);
                    dy.load(row * width, scratch);
                    multiply_elements(sum, scratch);
                    store(1, sum);
                    // The gradient of `b · x`, from the later tokens of the document that read it.
                    sum.fill(0.0);
                    for after in (0..taps.count().min(rows - row)).filter(|after| positions.of(row + after) >= *after) {
                        dy.load((row + after) * width, product);
                        gates.c.load(row + after, 0, scratch);
                        multiply_elements(product, scratch);
                        add_product(sum, taps.of(after), product);
                    }
                    gates.x.load(row, 0, product);
                    multiply_elements(product, sum);
                    store(0, product);
                    gates.b.load(row, 0, product);
                    multiply_elements(product, sum);
                    store(2, product);
                }
            },
        );
    })?;
    op.dweight.map_or(Ok(()), |dweight| weight_gradient(gates, dy, positions, dweight, rows))
}

fn weight_gradient(
    gates: Gates<'_>,
    dy: View<'_>,
    positions: PositionIds<'_>,
    dweight: &Tensor,
    rows: usize,
) -> Result<()> {
    let [width, taps] = sizes(dweight)?;
    write(dweight, |view| {
        par_columns(
            Rows { view, width: taps },
            width,
            rows * taps,
            #[inline(always)]
            |first, columns, mut out| {
                for before in 0..taps {
                    let [sums] = column_sums(
                        rows,
                        first,
                        columns,
                        #[inline(always)]
                        |row, first, [sums]| {
                            if positions.of(row) < before {
                                return;
                            }
                            let [mut gradient, mut product, mut scratch] = [[0.0; STRIPE]; 3];
                            let (gradient, scratch) = (&mut gradient[..columns], &mut scratch[..columns]);
                            dy.load(row * width + first, gradient);
                            gates.c.load(row, first, scratch);
                            multiply_elements(gradient, scratch);
                            gates.product(row - before, first, &mut product[..columns], scratch);
                            add_product(sums, gradient, &product);
                        },
                    );
                    for (channel, sum) in sums[..columns].iter().enumerate() {
                        out.view.store((channel + 1) * taps - 1 - before, &[*sum]);
                    }
                }
            },
        );
    })
}

/// Computes [`DecodeShortConv`], each row with the bits of [`forward`].
pub fn decode(op: &DecodeShortConv<'_>) -> Result<()> {
    let opened = read(op.input)?;
    let gates = Gates::open(op.input, &opened)?;
    let taps = &Taps::read(op.weight)?;
    let width = taps.width;
    let mut row = 0;
    for &ConvSequence { cache, past, new } in op.sequences {
        write(op.out, |mut out| {
            write_f32(&cache.products, |products| {
                isa::vectorize!(with_scratch(
                    2 * width,
                    #[inline(always)]
                    |scratch| {
                        let (y, scratch) = scratch.split_at_mut(width);
                        for position in past..past + new {
                            let place = |position: usize| position % taps.count() * width;
                            gates.product(row, 0, &mut products[place(position)..][..width], scratch);
                            y.fill(0.0);
                            for before in 0..taps.count().min(position + 1) {
                                add_product(y, taps.of(before), &products[place(position - before)..][..width]);
                            }
                            gates.c.load(row, 0, scratch);
                            multiply_elements(y, scratch);
                            out.store(row * width, y);
                            row += 1;
                        }
                    },
                ));
            })
        })??;
    }
    Ok(())
}
