//! Operands for each operation, in the sizes and types worth testing, with exact results and bounds.
//!
//! A [`Case`] is computed by any set of kernels and on any device. Its exact results come from candle's operations in
//! FP64 on a CPU, on the same operands. `tests/engine/layers.rs` compares them with autograd on plain operations.

use super::{Embedding, Op};
use crate::attention::AttentionShape;
use crate::columns::{ColumnSlice, MatmulOperand, WriteMode};
use crate::cross_entropy::IGNORE;
use crate::dropout::Dropout;
use crate::gated_delta::DeltaHeads;
use crate::precision::ExponentHistogram;
use crate::random::{Domain, Stream};
use crate::rope::{CosSinCache, Direction, PositionIds};
use crate::route::{RouterSettings, Routes};
use crate::summary::{self, TensorSummary};
use crate::{Activation, CandleKernels, Kernels, LoraTerm, NormKind, NormSettings, WeightLayout, op, view};
use candle_core::{DType, Device, Result, Tensor, bail};
use std::cell::RefCell;
use std::collections::BTreeMap;

mod adamw;
mod attention;
mod gated_delta;
mod head_gate;
mod short_conv;
pub(crate) mod table;

pub use table::cases;

/// An operation, or one with its backward pass, on operands of one size and type.
#[derive(Clone, Debug)]
pub struct Case {
    /// The CUDA kernels that are tested together, by their name in checkpoints, or [`Case::CPU`].
    pub family: &'static str,
    /// The operation.
    pub operation: Operation,
}

/// The operation of a case, with its sizes, types and options.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "fields are the sizes, types and options of an operation's operands")]
pub enum Operation {
    /// [`op::AdamW`]; types of the gradient and of the working copy, and whether it counts the updates that the copy
    /// shows. Moments may be in 8 bits.
    AdamW { len: usize, types: [DType; 2], counts: bool, quantized: bool },
    /// [`op::Attention`] and [`op::AttentionBackward`], of one tensor or with the values in a separate one, with sinks
    /// or without. Without documents, each sequence is one.
    Attention { shape: AttentionShape, documents: Documents, dtype: DType, drops: bool, packed: bool, sinks: bool },
    /// [`op::DecodeAttention`] of all tokens of a sequence, a few at a time; the exact result is [`op::Attention`]'s.
    Decode { shape: AttentionShape, dtype: DType, sinks: bool },
    /// [`op::CrossEntropy`] of rows, vocabulary and stride: without the gradient, with it, and with weights. With a cap
    /// also [`op::SoftCap`].
    CrossEntropy { sizes: [usize; 3], softcap: Option<f32>, dtype: DType },
    /// [`op::Activate`] and [`op::ActivateBackward`] of rows and width of the output.
    Activate { activation: Activation, sizes: [usize; 2], dtype: DType },
    /// [`op::AddBranch`], [`op::Copy`] and [`op::Accumulate`]; types of the stream and of the branch.
    Sums { len: usize, types: [DType; 2], drops: bool },
    /// [`op::Embed`], or [`op::EmbedBackward`]; types of the stream and of the tables. With dropout, sequences have
    /// documents.
    Embed { backward: bool, positions: bool, types: [DType; 2], drops: bool },
    /// [`op::Norm`] and [`op::NormBackward`] of rows and columns, from column `first` of rows of `stride`, in groups of
    /// `width`; types of the stream and of the products.
    Norm { norm: NormKind, sizes: [usize; 2], place: [usize; 3], types: [DType; 2], mode: WriteMode },
    /// [`op::Linear`] of rows, inputs and outputs, with a low-rank product, unless `rank` is 0, and its backward pass.
    Linear { layout: WeightLayout, sizes: [usize; 3], biased: bool, rank: usize, dtype: DType },
    /// [`op::Matmul`] of the sizes M, K and N, with these factors transposed, and [`op::SumRows`]; types of operands
    /// and results.
    Product { sizes: [usize; 3], transposed: [bool; 2], types: [DType; 2] },
    /// [`op::Rotate`] of sequences' rows of heads of twice `half`.
    Rotate {
        seq_len: usize,
        heads: usize,
        half: usize,
        past: usize,
        documents: bool,
        dtype: DType,
        direction: Direction,
    },
    /// [`op::Summarize`] of numbers of many magnitudes, or times a factor.
    Summarize { len: usize, factor: Option<f32>, broken: bool, dtype: DType, exponents: bool },
    /// [`op::Route`], [`op::RouteBackward`] and [`op::ScaleRows`] of tokens, experts and width of a row.
    Route { sizes: [usize; 3], settings: RouterSettings, dtype: DType },
    /// [`op::ShortConv`], its gradients, and its rows by [`op::DecodeShortConv`]: tokens of each of two sequences,
    /// channels and taps.
    ShortConv { sizes: [usize; 3], documents: Documents, dtype: DType },
    /// [`op::GatedDelta`], its gradients, and its rows by [`op::DecodeGatedDelta`]: tokens of each of two sequences,
    /// and taps.
    GatedDelta { heads: DeltaHeads, sizes: [usize; 2], documents: Documents, dtype: DType },
    /// [`op::CopyQueries`] in both directions, [`op::GateHeads`] and its gradients: rows, heads and their width.
    GateHeads { sizes: [usize; 3], dtype: DType },
    /// [`op::Sum`] of numbers times a factor.
    Sum { len: usize, factor: f32, dtype: DType },
}

/// The places of each sequence at which documents start, except 0; empty if each sequence is one document.
pub type Documents = &'static [&'static [u32]];

type Name = &'static str;

/// How far results may be from exact ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bounds {
    /// Kernels for a CPU.
    Cpu,
    /// Kernels for a GPU, and operands that are always the same.
    Gpu,
    /// Kernels for a GPU, and operands that no earlier check has seen. Leaves room for rare errors: roundings differ by
    /// more than the bound of [`Bounds::Gpu`] in one tensor of some hundred.
    Preflight,
}

impl Bounds {
    /// The bounds of results of a type: of each error, relative to its element or to the root mean square of the
    /// results, and of the root mean square of the errors.
    pub(crate) fn of(self, dtype: DType) -> [f64; 2] {
        let [each, all] = match dtype {
            DType::F32 => [1e-5, 1e-6],
            DType::F16 => [2e-3, 6e-4],
            _ => [2e-2, 5e-3],
        };
        match self {
            Self::Cpu => [each, all],
            Self::Gpu => [each, each / 2.0],
            Self::Preflight => [4.0 * each, each / 2.0],
        }
    }
}

/// A result with its bounds.
struct Output {
    name: Name,
    tensor: Tensor,
    bounds: [f64; 2],
}

/// The operands of a case before the operation, and its exact results, by name.
pub type Exact = [BTreeMap<Name, Tensor>; 2];

/// The kernels, device and random numbers of one computation.
pub struct Trial<'a> {
    /// `None` for exact results.
    kernels: Option<&'a dyn Kernels>,
    device: &'a Device,
    seed: u64,
    bounds: Bounds,
    /// The operands, as they were before the operation if results are exact.
    operands: RefCell<Vec<(Name, Tensor)>>,
}

impl<'a> Trial<'a> {
    fn new(kernels: Option<&'a dyn Kernels>, device: &'a Device, seed: u64, bounds: Bounds) -> Self {
        Self { kernels, device, seed, bounds, operands: RefCell::default() }
    }

    /// Computes with `kernels` on the CPU.
    pub fn on_cpu(kernels: &'a dyn Kernels) -> Self {
        Self::new(Some(kernels), &Device::Cpu, 0, Bounds::Cpu)
    }

    /// Computes exact results.
    pub fn exact() -> Self {
        Self::new(None, &Device::Cpu, 0, Bounds::Cpu)
    }

    /// Random numbers between -1 and 1 that `dtype` can hold.
    fn numbers(&self, name: Name, shape: &[usize], dtype: DType) -> Result<Tensor> {
        self.mapped(name, shape, dtype, |_, x| x)
    }

    /// [`Self::numbers`] after `f` of their index and value.
    fn mapped(&self, name: Name, shape: &[usize], dtype: DType, f: impl Fn(usize, f32) -> f32) -> Result<Tensor> {
        let mut values = vec![0.0f32; shape.iter().product()];
        let mut operands = self.operands.borrow_mut();
        let stream = Stream::new(self.seed, Domain::Bench);
        let salt = operands.len() as u64;
        for (block, values) in values.chunks_mut(4).enumerate() {
            let random = stream.block(1, salt, block as u32);
            for (i, (value, word)) in values.iter_mut().zip(random).enumerate() {
                *value = f(4 * block + i, word as f32 / 2_147_483_648.0 - 1.0);
            }
        }
        let tensor = self.stored(&Tensor::from_vec(values, shape, &Device::Cpu)?, dtype)?;
        operands.push((name, if self.kernels.is_none() { tensor.copy()? } else { tensor.clone() }));
        Ok(tensor)
    }

    /// `x` rounded to `dtype`, on the device.
    pub fn stored(&self, x: &Tensor, dtype: DType) -> Result<Tensor> {
        let x = x.to_dtype(dtype)?;
        if self.kernels.is_none() { x.to_dtype(DType::F64) } else { x.to_device(self.device) }
    }

    /// A result's tensor, full of NaN.
    pub fn poisoned(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        self.stored(&Tensor::full(f32::NAN, shape, &Device::Cpu)?, dtype)?.contiguous()
    }

    /// Two of [`Self::numbers`].
    fn two_of_numbers(&self, names: [Name; 2], shape: &[usize], dtype: DType) -> Result<[Tensor; 2]> {
        Ok([self.numbers(names[0], shape, dtype)?, self.numbers(names[1], shape, dtype)?])
    }

    /// Two of [`Self::poisoned`].
    fn two_poisoned(&self, shape: &[usize], dtype: DType) -> Result<[Tensor; 2]> {
        Ok([self.poisoned(shape, dtype)?, self.poisoned(shape, dtype)?])
    }

    /// Sinks of attention: below, between and above scores.
    fn sinks(&self, heads: usize, dtype: DType) -> Result<Tensor> {
        self.mapped("sinks", &[heads], dtype, |head, x| x + [-3.0, 0.0, 6.0][head % 3])
    }

    fn dropout(&self, drops: bool) -> Option<Dropout> {
        // A draw with something in both words.
        Dropout::new(0.2, self.seed, 4, 77 << 32 | 5).filter(|_| drops)
    }

    /// Computes an operation on operands of this trial.
    pub fn run<'b>(&self, op: impl Into<Op<'b>>) -> Result<()> {
        match self.kernels {
            Some(kernels) => op.into().run(kernels),
            // FP64 is no type that kernels store, so operands are not checked.
            None => CandleKernels.run(&mut op.into()).map(drop),
        }
    }

    fn output(&self, name: Name, tensor: &Tensor, dtype: DType) -> Output {
        Output { name, tensor: tensor.clone(), bounds: self.bounds.of(dtype) }
    }

    fn outputs<const N: usize>(&self, tensors: [(Name, &Tensor); N], dtype: DType) -> Vec<Output> {
        tensors.map(|(name, tensor)| self.output(name, tensor, dtype)).into()
    }
}

type Outputs = Result<Vec<Output>>;

/// A result that has no error.
fn equal(name: Name, tensor: &Tensor) -> Output {
    Output { name, tensor: tensor.clone(), bounds: [0.0; 2] }
}

impl Case {
    /// The family of cases without a CUDA kernel.
    pub const CPU: &'static str = "cpu";

    /// The exact results for operands that depend on `seed`.
    pub fn exact(&self, seed: u64) -> Result<Exact> {
        let trial = Trial::new(None, &Device::Cpu, seed, Bounds::Cpu);
        let results = self.operation.compute(&trial)?.into_iter().map(|output| (output.name, output.tensor)).collect();
        Ok([trial.operands.into_inner().into_iter().collect(), results])
    }

    /// The results of `kernels` on `device`.
    pub fn compute(&self, kernels: &dyn Kernels, device: &Device, seed: u64) -> Result<Vec<Tensor>> {
        let results = self.operation.compute(&Trial::new(Some(kernels), device, seed, Bounds::Cpu))?;
        Ok(results.into_iter().map(|output| output.tensor).collect())
    }

    /// Computes the case with `kernels` on `device`, and fails unless its results are within their bounds.
    pub fn check(&self, kernels: &dyn Kernels, device: &Device, seed: u64, bounds: Bounds) -> Result<Vec<Tensor>> {
        let found = self.operation.compute(&Trial::new(Some(kernels), device, seed, bounds))?;
        let exact = self.operation.compute(&Trial::new(None, &Device::Cpu, seed, bounds))?;
        let values = |x: &Tensor| view::to_host(x)?.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>();
        for (Output { name, tensor, bounds: [each, all] }, exact) in found.iter().zip(&exact) {
            let what = format!("{name} of {:?} (seed {seed})", self.operation);
            let found = values(tensor)?;
            let exact = values(&exact.tensor)?;
            let rms = |squares: f64| (squares / exact.len().max(1) as f64).sqrt();
            let known = exact.iter().filter(|x| x.is_finite());
            let typical = rms(known.map(|x| x.powi(2)).sum()).max(f64::MIN_POSITIVE);
            let mut squares = 0.0;
            let different = |(_, (found, exact)): &(usize, (&f64, &f64))| found != exact;
            for (i, (found, exact)) in found.iter().zip(&exact).enumerate().filter(different) {
                let error = (found - exact).abs() / exact.abs().max(typical);
                if error.is_nan() || error > *each {
                    bail!("differs from the FP64 result: element {i} of {what} is {found}, not {exact}");
                }
                squares += (found - exact).powi(2);
            }
            let error = rms(squares) / typical;
            if error > *all {
                bail!("differs from the FP64 result: {what} by {error:.1e} of its root mean square");
            }
        }
        Ok(found.into_iter().map(|output| output.tensor).collect())
    }
}

/// Fails unless `kernels` compute the cases of a family within [`Bounds::Preflight`], on the numbers of `seed` or on
/// others: numbers that almost cancel lose more digits than the bounds allow, in about one of 1,500 checks of AdamW.
pub fn check_family(family: &str, kernels: &dyn Kernels, device: &Device, seed: u64) -> Result<()> {
    let cases: Vec<Case> = cases().into_iter().filter(|case| case.family == family).collect();
    let check = |seed| cases.iter().try_for_each(|case| case.check(kernels, device, seed, Bounds::Preflight).map(drop));
    check(seed).or_else(|_| check(seed + 1))
}

impl From<Operation> for Case {
    /// The case of no CUDA kernels.
    fn from(operation: Operation) -> Self {
        Self { family: Self::CPU, operation }
    }
}

impl Operation {
    fn compute(self, t: &Trial<'_>) -> Outputs {
        match self {
            Self::AdamW { len, types, counts, quantized } => adamw::adamw(t, len, types, [counts, quantized]),
            Self::Attention { shape, documents, dtype, drops, packed, sinks } => {
                attention::attention(t, shape, documents, dtype, [drops, packed, sinks])
            }
            Self::Decode { shape, dtype, sinks } => attention::decode(t, shape, dtype, sinks),
            Self::CrossEntropy { sizes, softcap, dtype } => cross_entropy(t, sizes, softcap, dtype),
            Self::Activate { activation, sizes, dtype } => activate(t, activation, sizes, dtype),
            Self::Sums { len, types, drops } => sums(t, len, types, drops),
            Self::Embed { backward, positions, types, drops } => embed(t, [backward, positions, drops], types),
            Self::Norm { norm, sizes, place, types, mode } => self::norm(t, norm, sizes, place, types, mode),
            Self::Linear { layout, sizes, biased, rank, dtype } => linear(t, layout, sizes, biased, rank, dtype),
            Self::Product { sizes, transposed, types } => product(t, sizes, transposed, types),
            Self::Rotate { .. } => apply_rope(t, self),
            Self::Summarize { len, factor, broken, dtype, exponents } => {
                let x = t.gradient(len, factor, broken, dtype)?;
                statistics(t, &x, dtype, exponents)
            }
            Self::Route { sizes, settings, dtype } => route(t, sizes, settings, dtype),
            Self::ShortConv { sizes, documents, dtype } => short_conv::short_conv(t, sizes, documents, dtype),
            Self::GatedDelta { heads, sizes, documents, dtype } => {
                gated_delta::gated_delta(t, heads, sizes, documents, dtype)
            }
            Self::GateHeads { sizes, dtype } => head_gate::head_gate(t, sizes, dtype),
            Self::Sum { len, factor, dtype } => sum(t, &t.gradient(len, Some(factor), false, dtype)?),
        }
    }
}

/// Cuts a sequence into pieces of one to four tokens: for each, the tokens before it and its own.
fn pieces(seq_len: usize) -> impl Iterator<Item = (usize, usize)> {
    let piece = move |past: usize| (past < seq_len).then(|| (past, (past % 4 + 1).min(seq_len - past)));
    std::iter::successors(piece(0), move |(past, new)| piece(past + new))
}

/// For each row of sequences of `seq_len`, the start of its document.
pub fn starts(seq_len: usize, documents: Documents) -> Vec<u32> {
    let start = |places: &[u32], row| places.iter().copied().filter(|place| *place <= row).max().unwrap_or(0);
    documents.iter().flat_map(|places| (0..seq_len as u32).map(move |row| start(places, row))).collect()
}

fn cross_entropy(t: &Trial<'_>, [rows, vocab, stride]: [usize; 3], softcap: Option<f32>, dtype: DType) -> Outputs {
    let mut targets: Vec<u32> = (0..rows).map(|row| (row * 31 % vocab) as u32).collect();
    targets[1] = IGNORE;
    // Some threads of a GPU meet only -∞ at first.
    let nothing = vocab / 2..vocab / 2 + vocab / 4;
    let possible = |i: usize| !nothing.contains(&(i % vocab)) || targets[i / vocab] as usize == i % vocab;
    let logit = |i, x| match i {
        // The first row's target is improbable: errors are relative to gradients, which would be tiny if all rows were
        // learned.
        _ if i == targets[0] as usize => -8.0,
        _ if possible(i) => 8.0 * x,
        _ => f32::NEG_INFINITY,
    };
    let values = t.mapped("logits", &[rows, vocab], dtype, logit)?;
    // Elements after a row's end are not read.
    let padded = t.poisoned(&[rows, stride], dtype)?;
    padded.slice_set(&values, 1, 0)?;
    let logits = ColumnSlice::new(&padded, 0..vocab)?;
    let targets = &targets[..];
    let [losses, trained] = &t.two_poisoned(&[rows], DType::F32)?;
    t.run(op::CrossEntropy { logits, softcap, targets, losses, seed: None, weights: None })?;
    let same = equal("the logits after an evaluation", &padded.narrow(1, 0, vocab)?.force_contiguous()?);
    t.run(op::CrossEntropy { logits, softcap, targets, losses: trained, seed: Some(256.0), weights: None })?;
    let gradient = padded.narrow(1, 0, vocab)?.force_contiguous()?;
    let mut outputs = vec![same, equal("the losses minus those of an evaluation", &(trained - losses)?)];
    // -1, -0.5, 0, 0.5 and 1.
    let weights: Vec<f32> = (0..rows).map(|row| (row * 3 % 5) as f32 / 2.0 - 1.0).collect();
    padded.slice_set(&values, 1, 0)?;
    t.run(op::CrossEntropy { logits, softcap, targets, losses: trained, seed: Some(256.0), weights: Some(&weights) })?;
    let weighted = padded.narrow(1, 0, vocab)?.force_contiguous()?;
    outputs.push(equal("the losses of weighted rows minus those of an evaluation", &(trained - losses)?));
    for row in (0..rows).filter(|&row| weights[row] == 0.0) {
        outputs.push(equal("the gradient of a row of weight 0", &weighted.narrow(0, row, 1)?.force_contiguous()?));
    }
    if let Some(cap) = softcap {
        let capped = &t.poisoned(&[rows, vocab], DType::F32)?;
        t.run(op::SoftCap { x: &values, cap, out: capped })?;
        outputs.push(t.output("the capped logits", capped, DType::F32));
    }
    outputs.push(t.output("the losses", losses, DType::F32));
    outputs.extend(t.outputs([("the gradient", &gradient), ("the weighted gradient", &weighted)], dtype));
    Ok(outputs)
}

fn activate(t: &Trial<'_>, activation: Activation, shape: [usize; 2], dtype: DType) -> Outputs {
    let shape_of_x = [shape[0], if activation.is_gated() { 2 * shape[1] } else { shape[1] }];
    let x = &t.mapped("x", &shape_of_x, dtype, |_, x| 12.0 * x)?;
    let dy = t.numbers("dy", &shape, dtype)?;
    let (y, again) = (t.poisoned(&shape, dtype)?, t.poisoned(&shape, dtype)?);
    let dx = if activation.is_gated() { t.poisoned(&shape_of_x, dtype)? } else { dy.clone() };
    t.run(op::Activate { activation, x, y: &y })?;
    t.run(op::ActivateBackward { activation, x, dy: &dy, dx: &dx, y: &again })?;
    let mut outputs = t.outputs([("y", &y), ("dx", &dx)], dtype);
    outputs.push(equal("the second output minus the first", &(again - y)?));
    Ok(outputs)
}

fn sums(t: &Trial<'_>, len: usize, [wide, narrow]: [DType; 2], drops: bool) -> Outputs {
    let shape = [1, len];
    let dropout = t.dropout(drops);
    let (stream, branch) = (&t.numbers("stream", &shape, wide)?, &t.numbers("branch", &shape, narrow)?);
    let (sum, widened, copy) = (&t.poisoned(&shape, wide)?, &t.poisoned(&shape, wide)?, &t.poisoned(&shape, narrow)?);
    let (total, root) = (&t.numbers("total", &shape, wide)?, &t.numbers("root", &shape, wide)?);
    // Large enough that the sum of a single element does not cancel.
    let inner = |name| t.mapped(name, &shape, DType::F32, |_, x| x + 3.0);
    let inner = [&inner("inner")?, &inner("outer")?];
    t.run(op::AddBranch { stream, branch, dropout, out: sum })?;
    t.run(op::Copy { x: stream, dropout, out: copy })?;
    t.run(op::Copy { x: branch, dropout: None, out: widened })?;
    t.run(op::Accumulate { x: branch, inner: &[], out: total })?;
    t.run(op::Accumulate { x: branch, inner: &inner, out: root })?;
    let mut outputs = t.outputs([("the stream with its branch", sum), ("total", total), ("root", root)], wide);
    outputs.push(equal("the widened branch", widened));
    outputs.push(t.output("the branch's gradient", copy, narrow));
    Ok(outputs)
}

/// Tokens of the embeddings' cases, in sequences of 33: some come up several times, some never.
pub fn tokens() -> Vec<u32> {
    (0..132).map(|n| n * n % 17).collect()
}

fn embed(t: &Trial<'_>, [backward, learned, drops]: [bool; 3], [stream, dtype]: [DType; 2]) -> Outputs {
    // A block of the CUDA kernel adds 1,024 columns at a time.
    let ids = tokens();
    let width = if drops { 1096 } else { 136 };
    let vocab = 19;
    let seq_len = 33;
    let table = &t.numbers("table", &[vocab, width], dtype)?;
    let shape = [ids.len(), width];
    let positions = &t.numbers("positions", &[seq_len + 3, width], dtype)?;
    let (positions, dropout) = (learned.then_some(positions), t.dropout(drops));
    let starts = starts(seq_len, &[&[21], &[4, 5], &[], &[32]]);
    let documents = drops.then_some(&starts[..]);
    let input = Embedding { table, positions, ids: &ids, seq_len, documents, scale: 1.5, dropout };
    if !backward {
        let out = &t.poisoned(&shape, stream)?;
        t.run(op::Embed { input, out })?;
        return Ok(vec![t.output("out", out, stream)]);
    }
    let dx = &t.numbers("dx", &shape, stream)?;
    let dtable = &t.numbers("dtable", &[vocab, width], dtype)?;
    let dpositions = t.poisoned(&[seq_len + 3, width], dtype)?;
    let order = &mut vec![0; ids.len()];
    let dpositions = learned.then_some(&dpositions);
    t.run(op::EmbedBackward { input, dx, order, dtable: Some(dtable), dpositions })?;
    let mut outputs = vec![t.output("dtable", dtable, dtype)];
    if let Some(gradient) = dpositions {
        outputs.push(t.output("dpositions", gradient, dtype));
        let alone = &t.poisoned(&[seq_len + 3, width], dtype)?;
        t.run(op::EmbedBackward { input, dx, order, dtable: None, dpositions: Some(alone) })?;
        outputs.push(t.output("dpositions with a frozen table", alone, dtype));
    }
    Ok(outputs)
}

fn norm(
    t: &Trial<'_>,
    norm: NormKind,
    sizes: [usize; 2],
    place: [usize; 3],
    types: [DType; 2],
    mode: WriteMode,
) -> Outputs {
    let [rows, columns] = sizes;
    let [first, width, stride] = place;
    let [stream, compute] = types;
    let settings = NormSettings { norm, eps: 1e-5 };
    let shape = [rows, stride];
    let groups = rows * columns / width;
    // Away from zero, so that a variance by differences of squares would show.
    let x = t.mapped("x", &shape, stream, |_, x| x + 3.0)?;
    let [weight, bias] = &t.two_of_numbers(["weight", "bias"], &[width], compute)?;
    let dy = t.numbers("dy", &shape, compute)?;
    // Elements next to the columns stay.
    let (y, dx) = (t.numbers("y", &shape, compute)?, t.numbers("dx", &shape, stream)?);
    let mean = t.poisoned(&[groups], DType::F32)?;
    let rstd = &t.poisoned(&[groups], DType::F32)?;
    let [dweight, dbias] = &t.two_poisoned(&[width], compute)?;
    let frozen = dx.copy()?;
    let of_layer = |x| settings.centers().then_some(x);
    let of = |x| ColumnSlice::new(x, first..first + columns);
    let mean = of_layer(&mean);
    t.run(op::Norm { settings, x: of(&x)?, weight, bias: of_layer(bias), y: of(&y)?, mean, rstd })?;
    // A frozen norm has the same gradient.
    for (dx, dweight, dbias) in [(&dx, Some(dweight), of_layer(dbias)), (&frozen, None, None)] {
        let dy = of(&dy)?;
        let x = of(&x)?;
        let dx = of(dx)?;
        t.run(op::NormBackward { settings, dy, x, weight, mean, rstd, dx, mode, dweight, dbias })?;
    }
    let mut outputs = t.outputs([("y", &y), ("dweight", dweight)], compute);
    outputs.extend(of_layer(dbias).map(|dbias| t.output("dbias", dbias, compute)));
    outputs.extend([t.output("the deviation", rstd, DType::F32), t.output("dx", &dx, stream)]);
    outputs.push(equal("dx minus that of a frozen norm", &(&dx - frozen)?));
    outputs.extend(mean.map(|mean| t.output("the mean", mean, DType::F32)));
    Ok(outputs)
}

fn linear(t: &Trial<'_>, layout: WeightLayout, sizes: [usize; 3], biased: bool, rank: usize, dtype: DType) -> Outputs {
    let [rows, inner, width] = sizes;
    let shape = if layout == WeightLayout::InOut { [inner, width] } else { [width, inner] };
    let x = &t.numbers("x", &[rows, inner], dtype)?;
    let weight = &t.numbers("weight", &shape, dtype)?;
    let row = t.numbers("bias", &[width], dtype)?;
    let dy = &t.numbers("dy", &[rows, width], dtype)?;
    let (low, factor) = (t.numbers("low", &[rows, rank], dtype)?, t.numbers("factor", &[width, rank], dtype)?);
    let factor = MatmulOperand::transpose_of(&factor)?;
    let low_rank = (rank > 0).then_some(LoraTerm { low: &low, factor, alpha: 1.5, shares: &[] });
    let (y, dx) = (&t.poisoned(&[rows, width], dtype)?, &t.poisoned(&[rows, inner], dtype)?);
    let dweight = &t.poisoned(&shape, dtype)?;
    let dbias = &t.poisoned(&[width], dtype)?;
    t.run(op::Linear { layout, x, weight, bias: biased.then_some(&row), low_rank, y })?;
    t.run(op::Linear { layout: layout.transposed(), x: dy, weight, bias: None, low_rank: None, y: dx })?;
    t.run(op::Matmul::weight_gradient(layout, [x, dy], dweight)?)?;
    t.run(op::SumRows { x: dy, out: dbias })?;
    Ok(t.outputs([("y", y), ("dx", dx), ("dweight", dweight), ("dbias", dbias)], dtype))
}

/// Products of some columns of wider matrices, added to a sum of either type.
fn product(t: &Trial<'_>, [m, k, n]: [usize; 3], transposed: [bool; 2], [dtype, out]: [DType; 2]) -> Outputs {
    let turned = |[rows, columns]: [usize; 2], turn| if turn { [columns, rows] } else { [rows, columns] };
    let [rows, columns] = turned([m, k], transposed[0]);
    let [depth, width] = turned([k, n], transposed[1]);
    let x = &t.numbers("a", &[rows, columns], dtype)?;
    let y = &t.numbers("b", &[depth, width + 5], dtype)?;
    let a = MatmulOperand { columns: ColumnSlice::all(x)?, transposed: transposed[0] };
    let b = MatmulOperand { columns: ColumnSlice::new(y, 2..width + 2)?, transposed: transposed[1] };
    let [sum, product] = &t.two_of_numbers(["sum", "product"], &[m, n + 3], out)?;
    let rows = &t.poisoned(&[columns], out)?;
    for (c, mode) in [(sum, WriteMode::Accumulate), (product, WriteMode::Overwrite)] {
        t.run(op::Matmul { a, b, alpha: 0.5, c: ColumnSlice::new(c, 1..n + 1)?, mode })?;
    }
    t.run(op::SumRows { x, out: rows })?;
    Ok(t.outputs([("sum", sum), ("the product", product), ("the sum of rows", rows)], out))
}

fn route(t: &Trial<'_>, [tokens, experts, width]: [usize; 3], settings: RouterSettings, dtype: DType) -> Outputs {
    let rows = tokens * settings.top_k;
    let routes = &mut Routes::default();
    // Some logits are equal.
    let logits = &t.mapped("logits", &[tokens, experts], DType::F32, |_, x| (24.0 * x).round() / 8.0)?;
    let [x, dx] = &t.two_of_numbers(["x", "dx"], &[rows, width], dtype)?;
    let weights = &t.poisoned(&[rows], DType::F32)?;
    let dlogits = &t.poisoned(&[tokens, experts], dtype)?;
    t.run(op::Route { settings, logits, weights, routes: &mut *routes })?;
    t.run(op::RouteBackward { settings, logits, weights, routes, x, dx, dlogits })?;
    t.run(op::ScaleRows { x, weights })?;
    let mut outputs = t.outputs([("the gradient", dlogits), ("the scaled rows", x)], dtype);
    outputs.push(t.output("the weights", weights, DType::F32));
    outputs.push(equal("the tokens of rows", &Tensor::new(&routes.tokens[..], &Device::Cpu)?));
    Ok(outputs)
}

/// Angles of `positions` positions, and their frequencies.
pub fn angles(half: usize, positions: usize) -> Result<CosSinCache> {
    let frequencies: Vec<f32> = (0..half).map(|i| 0.8f32.powi(i as i32)).collect();
    CosSinCache::new(&frequencies, 1.25, 0..positions, &Device::Cpu)
}

fn apply_rope(t: &Trial<'_>, operation: Operation) -> Outputs {
    let Operation::Rotate { seq_len, heads, half, past, documents, dtype, direction } = operation else {
        bail!("not a rotation: {operation:?}")
    };
    let rows = 2 * seq_len;
    let columns = 2 * half * heads;
    let table = angles(half, seq_len + past)?;
    let table = &CosSinCache { cos: t.stored(&table.cos, DType::F32)?, sin: t.stored(&table.sin, DType::F32)? };
    let starts = starts(seq_len, ROTATED);
    let positions = PositionIds { seq_len, past, documents: documents.then_some(&starts[..]) };
    let x = t.numbers("x", &[rows, columns + 32], dtype)?;
    t.run(op::Rotate { x: ColumnSlice::new(&x, 16..16 + columns)?, table, positions, direction })?;
    Ok(vec![t.output("the heads", &x, dtype)])
}

/// The documents of the rotations' cases.
pub const ROTATED: Documents = &[&[21], &[4, 5]];

impl Trial<'_> {
    /// A gradient, some of it not finite if `broken`, on a CPU.
    fn gradient(&self, len: usize, factor: Option<f32>, broken: bool, dtype: DType) -> Result<Tensor> {
        let numbers = self.numbers("x", &[len], DType::F32)?.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
        let mut values: Vec<f32> = numbers.to_vec1()?;
        for (i, value) in values.iter_mut().enumerate() {
            let of_many_magnitudes = if i % 9 == 0 { 0.0 } else { 2f32.powi(-((i % 40) as i32)) };
            *value *= factor.unwrap_or(of_many_magnitudes);
        }
        if broken {
            let infinite = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
            let others = [0.0, -0.0, 1e-40, -1e-7, 6e-5, 65504.0, 1e20, -3e38];
            let others = others.iter().filter(|_| factor.is_some());
            infinite.iter().chain(others).enumerate().for_each(|(i, value)| values[i * 997 % len] = *value);
        }
        Tensor::new(values, &Device::Cpu)?.to_dtype(dtype)
    }
}

/// The figures of a tensor's statistics. Exact figures come from a CPU, whose counts and sums are exact or in FP64.
fn statistics(t: &Trial<'_>, x: &Tensor, dtype: DType, exponents: bool) -> Outputs {
    let format = view::float_format(dtype);
    let TensorSummary { stats, exponents } = match t.kernels {
        Some(kernels) => kernels.summarize(&x.to_device(t.device)?, format, exponents)?,
        None => summary::summarize(x, format, exponents)?,
    };
    let counts = [stats.count, stats.zero, stats.subnormal, stats.inf, stats.nan];
    let counts = counts.into_iter().chain([exponents.zero, exponents.inf, exponents.nan]);
    let counts = counts.chain((ExponentHistogram::LOWEST..=ExponentHistogram::HIGHEST).map(|e| exponents.count(e)));
    let extremes = [stats.min_nonzero.unwrap_or(-1.0), stats.max_abs].map(f64::from);
    let exact: Vec<f64> = counts.map(|count| count as f64).chain(extremes).collect();
    let squares = Tensor::new(&[stats.sum_squares], &Device::Cpu)?;
    let bounds = [if t.bounds == Bounds::Cpu { 2e-6 } else { 2e-5 }; 2];
    let squares = Output { name: "the sum of squares", tensor: squares, bounds };
    Ok(vec![equal("counts and extremes", &Tensor::new(exact, &Device::Cpu)?), squares])
}

/// A tensor's sum, next to the size of its terms.
fn sum(t: &Trial<'_>, x: &Tensor) -> Outputs {
    let size = summary::summarize(x, view::float_format(x.dtype()), false)?.stats.norm() * x.elem_count() as f64;
    let sum = match t.kernels {
        Some(kernels) => kernels.sum(&x.to_device(t.device)?)?,
        None => x.to_dtype(DType::F64)?.sum_all()?.to_scalar()?,
    };
    Ok(vec![Output { name: "the sum", tensor: Tensor::new(&[sum, size], &Device::Cpu)?, bounds: [1e-12; 2] }])
}
