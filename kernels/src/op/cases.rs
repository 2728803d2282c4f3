//! Operands for each operation, in the sizes and types worth testing, with exact results and bounds.
//!
//! A [`Case`] is computed by any set of kernels and on any device. Its exact results come from candle's operations in
//! FP64 on a CPU, on the same operands.

use super::{Embedding, Op};
use crate::adamw::AdamWStep;
use crate::attention::{Operands, Shape};
use crate::columns::{Columns, Factor, WriteMode};
use crate::cross_entropy::IGNORE;
use crate::dropout::Dropout;
use crate::precision::ExponentHistogram;
use crate::random::{Domain, Stream};
use crate::rope::{Direction, Positions, Table};
use crate::survey::{self, TensorSurvey};
use crate::{Activation, CandleKernels, Kernels, Norm, NormSettings, WeightLayout, op, view};
use candle_core::{DType, Device, Result, Tensor, bail};

const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
/// Types of the residual stream and of the products, or of gradients and working copies.
const PAIRS: [[DType; 2]; 5] = [
    [DType::F32, DType::F32],
    [DType::F32, DType::F16],
    [DType::F16, DType::F16],
    [DType::F32, DType::BF16],
    [DType::BF16, DType::BF16],
];

/// The relative distance that roundings of nearly the same number to `dtype` may have.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 1e-5,
        DType::F16 => 2e-3,
        _ => 2e-2,
    }
}

/// An operation, or one with its backward pass, on operands of one size and type.
pub struct Case {
    /// The kernels that are tested together, by their name in checkpoints.
    pub family: &'static str,
    /// Operation, sizes and types.
    pub name: String,
    compute: Box<Compute>,
}

type Compute = dyn Fn(&Trial<'_>) -> Result<Vec<Output>>;

/// A result.
struct Output {
    name: &'static str,
    tensor: Tensor,
    /// The allowed relative error.
    allowed: f64,
}

/// The kernels, device and random numbers of one computation.
pub struct Trial<'a> {
    /// `None` for exact results.
    kernels: Option<&'a dyn Kernels>,
    device: &'a Device,
    seed: u64,
}

impl<'a> Trial<'a> {
    /// Computes with `kernels` on the CPU.
    pub fn on_cpu(kernels: &'a dyn Kernels) -> Self {
        Self { kernels: Some(kernels), device: &Device::Cpu, seed: 0 }
    }

    /// Computes exact results.
    pub fn exact() -> Self {
        Self { kernels: None, device: &Device::Cpu, seed: 0 }
    }

    /// Random numbers between -1 and 1 that `dtype` can hold.
    fn numbers(&self, salt: u64, shape: &[usize], dtype: DType) -> Result<Tensor> {
        self.mapped(salt, shape, dtype, |x| x)
    }

    /// [`Self::numbers`] after `f`.
    fn mapped(&self, salt: u64, shape: &[usize], dtype: DType, f: impl Fn(f32) -> f32) -> Result<Tensor> {
        let mut values = vec![0.0f32; shape.iter().product()];
        let stream = Stream::new(self.seed, Domain::Bench);
        for (block, values) in values.chunks_mut(4).enumerate() {
            let random = stream.block(1, salt, block as u32);
            values.iter_mut().zip(random).for_each(|(value, word)| *value = f(word as f32 / 2_147_483_648.0 - 1.0));
        }
        self.stored(&Tensor::from_vec(values, shape, &Device::Cpu)?, dtype)
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

    fn dropout(&self) -> Option<Dropout> {
        Dropout::new(0.2, self.seed, 4, 5)
    }

    /// Computes an operation on operands of this trial.
    pub fn run<'b>(&self, op: impl Into<Op<'b>>) -> Result<()> {
        match self.kernels {
            Some(kernels) => op.into().run(kernels),
            // FP64 is no type that kernels store, so operands are not checked.
            None => CandleKernels.run(&mut op.into()).map(drop),
        }
    }
}

impl Case {
    /// Computes the case with `kernels` on `device`, and fails unless its results are within their bounds. Operands depend on `seed`.
    ///
    /// The root mean square of the errors must be within half of the bound, relative to the result's. Each error must
    /// be within `slack` times the bound, relative to its element or to the root mean square. For seeds that are new at
    /// each start, a slack of 4 leaves room for rare errors: roundings differ by up to the bound in one tensor of some
    /// hundred.
    pub fn check(&self, kernels: &dyn Kernels, device: &Device, seed: u64, slack: f64) -> Result<Vec<Tensor>> {
        let found = (self.compute)(&Trial { kernels: Some(kernels), device, seed })?;
        let exact = (self.compute)(&Trial { kernels: None, device: &Device::Cpu, seed })?;
        let host = |x: &Tensor| view::host(x)?.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>();
        for (Output { name, tensor, allowed }, exact) in found.iter().zip(exact) {
            let what = format!("{name} of {} (seed {seed})", self.name);
            let (found, exact) = (host(tensor)?, host(&exact.tensor)?);
            let rms = |squares: f64| (squares / exact.len().max(1) as f64).sqrt();
            let typical = rms(exact.iter().map(|x| x.powi(2)).sum()).max(f64::MIN_POSITIVE);
            let mut squares = 0.0;
            for (i, (found, exact)) in found.iter().zip(&exact).enumerate() {
                let error = (found - exact).abs() / exact.abs().max(typical);
                if error.is_nan() || error > slack * allowed {
                    bail!("computes otherwise than candle: element {i} of {what} is {found}, not {exact}");
                }
                squares += (found - exact).powi(2);
            }
            if rms(squares) / typical > allowed / 2.0 {
                let error = rms(squares) / typical;
                bail!("computes otherwise than candle: {what} differs by {error:.1e} of its root mean square");
            }
        }
        Ok(found.into_iter().map(|output| output.tensor).collect())
    }
}

/// All cases.
pub fn cases() -> Vec<Case> {
    let mut cases = Cases::default();
    cases.adamw();
    cases.attention();
    cases.cross_entropy();
    cases.elementwise();
    cases.embedding();
    cases.linear();
    cases.norm();
    cases.product();
    cases.rope();
    cases.survey();
    cases.0
}

#[derive(Default)]
struct Cases(Vec<Case>);

impl Cases {
    fn add(
        &mut self,
        family: &'static str,
        name: String,
        compute: impl Fn(&Trial<'_>) -> Result<Vec<Output>> + 'static,
    ) {
        self.0.push(Case { family, name, compute: Box::new(compute) });
    }

    fn adamw(&mut self) {
        let step = AdamWStep {
            lr: 0.01,
            betas: [0.9, 0.999],
            eps: 1e-8,
            weight_decay: 0.1,
            bias_corrections: [0.1, 0.001],
            grad_factor: 0.125,
        };
        for ([grads, copies], len) in PAIRS.into_iter().zip([5003, 70_001, 8, 1, 130]) {
            self.add("adamw", format!("an update of {len} from {grads:?} to {copies:?}"), move |t| {
                let (grad, copy) = (t.numbers(1, &[len], grads)?, t.poisoned(&[len], copies)?);
                let [master, exp_avg] = [2, 3].map(|salt| t.numbers(salt, &[len], DType::F32));
                let exp_avg_sq = &t.mapped(4, &[len], DType::F32, |x| x * x)?;
                let (grad, master, exp_avg) = (&grad, &master?, &exp_avg?);
                let weight = (copies != DType::F32).then_some(&copy);
                t.run(op::AdamW { step, grad, master, exp_avg, exp_avg_sq, weight })?;
                let state = [("the master", master), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)];
                let mut outputs = outputs(state, DType::F32);
                outputs.extend(weight.map(|weight| output("the working copy", weight, copies)));
                Ok(outputs)
            });
        }
    }

    fn attention(&mut self) {
        // Within a tile, over its end, and with heads of every size that there are CUDA kernels for.
        let shapes = [(2, 33, 3, 32, 3), (1, 130, 4, 64, 2), (2, 40, 2, 80, 2), (1, 70, 3, 128, 1), (1, 65, 2, 20, 2)];
        for (i, (batch, seq_len, heads, head_size, kv_heads)) in shapes.into_iter().enumerate() {
            let shape = Shape { kv_heads, ..Shape::new(batch, seq_len, heads, head_size) };
            // A window over which tiles are skipped.
            let windowed = Shape { window: Some(seq_len / 3), ..shape };
            for (dtype, (shape, documents)) in TYPES
                .into_iter()
                .flat_map(|dtype| [(shape, false), (windowed, false), (shape, true)].map(|of| (dtype, of)))
            {
                let documents_in_words = if documents { "two documents" } else { "one document" };
                let name = format!("attention of {shape:?} in {dtype:?}, {documents_in_words}");
                self.add("attention", name, move |t| attention(t, shape, documents, dtype, i % 2 == 0));
            }
        }
    }

    fn cross_entropy(&mut self) {
        for (rows, vocab, stride) in [(5, 5003, 5003), (3, 97, 104), (4, 64, 64)] {
            for (dtype, seed) in TYPES.into_iter().flat_map(|dtype| [None, Some(256.0)].map(|seed| (dtype, seed))) {
                let name = format!("the loss of {rows} × {vocab} logits in {dtype:?}, gradient {seed:?}");
                self.add("cross_entropy", name, move |t| {
                    let mut targets: Vec<u32> = (0..rows).map(|row| (row * 31 % vocab) as u32).collect();
                    targets[1] = IGNORE;
                    // Elements after a row's end are not read.
                    let values = t.mapped(1, &[rows, vocab], dtype, |x| 8.0 * x)?;
                    let (padded, losses) = (t.poisoned(&[rows, stride], dtype)?, t.poisoned(&[rows], DType::F32)?);
                    padded.slice_set(&values, 1, 0)?;
                    let logits = Columns::new(&padded, 0..vocab)?;
                    t.run(op::CrossEntropy { logits, targets: &targets, losses: &losses, seed })?;
                    let logits = padded.narrow(1, 0, vocab)?.contiguous()?;
                    Ok(vec![output("the losses", &losses, DType::F32), output("the logits", &logits, dtype)])
                });
            }
        }
    }

    fn elementwise(&mut self) {
        for dtype in TYPES {
            for activation in [Activation::Gelu, Activation::GatedSilu, Activation::GatedGelu] {
                self.add("elementwise", format!("{activation:?} in {dtype:?}"), move |t| {
                    let shape = [37, 72];
                    let shape_of_x = [37, if activation.is_gated() { 144 } else { 72 }];
                    let x = &t.mapped(1, &shape_of_x, dtype, |x| 12.0 * x)?;
                    let (y, again, dy) =
                        (t.poisoned(&shape, dtype)?, t.poisoned(&shape, dtype)?, t.numbers(2, &shape, dtype)?);
                    let dx = if activation.is_gated() { t.poisoned(&shape_of_x, dtype)? } else { dy.clone() };
                    t.run(op::Activate { activation, x, y: &y })?;
                    t.run(op::ActivateBackward { activation, x, dy: &dy, dx: &dx, y: &again })?;
                    Ok(outputs([("the output", &y), ("dx", &dx), ("the output again", &again)], dtype))
                });
            }
        }
        let dropouts = PAIRS.into_iter().zip([5003, 70_001, 8, 1, 130]).flat_map(|x| [(x, false), (x, true)]);
        for (([wide, narrow], len), drops) in dropouts {
            self.add("elementwise", format!("sums of {len} in {wide:?} and {narrow:?}, dropout {drops}"), move |t| {
                let shape = [1, len];
                let (stream, branch) = (&t.numbers(3, &shape, wide)?, &t.numbers(4, &shape, narrow)?);
                let (sum, copy, total) =
                    (&t.poisoned(&shape, wide)?, &t.poisoned(&shape, narrow)?, &t.numbers(5, &shape, wide)?);
                let dropout = t.dropout().filter(|_| drops);
                t.run(op::AddBranch { stream, branch, dropout, out: sum })?;
                t.run(op::Copy { x: stream, dropout, out: copy })?;
                t.run(op::Accumulate { x: branch, inner: &[], out: total })?;
                let mut outputs = outputs([("the stream with its branch", sum), ("the sum", total)], wide);
                outputs.push(output("the branch's gradient", copy, narrow));
                Ok(outputs)
            });
        }
    }

    fn embedding(&mut self) {
        let (seq_len, vocab, shape) = (33, 19, [132, 136]);
        let wider = [[DType::F16, DType::F32], [DType::BF16, DType::F32]];
        let pairs = PAIRS.into_iter().chain(wider);
        for ([stream, dtype], drops) in pairs.flat_map(|pair| [(pair, false), (pair, true)]) {
            let input = move |t: &Trial<'_>| -> Result<_> {
                let ids: Vec<u32> = (0..shape[0] as u32).map(|n| n * n % 17).collect();
                Ok((ids, t.numbers(1, &[vocab, shape[1]], dtype)?, t.dropout().filter(|_| drops)))
            };
            let name = format!("the embedding of {stream:?} from {dtype:?}, dropout {drops}");
            self.add("embed", name.clone(), move |t| {
                let (ids, table, dropout) = input(t)?;
                let positions = Some(&t.numbers(2, &[seq_len + 3, shape[1]], dtype)?).cloned();
                let (table, positions, out) = (&table, positions.as_ref(), &t.poisoned(&shape, stream)?);
                let input = Embedding { table, positions, ids: &ids, seq_len, documents: None, scale: 1.5, dropout };
                t.run(op::Embed { input, out })?;
                Ok(vec![output("the output", out, stream)])
            });
            self.add("embedding", name, move |t| {
                let (ids, table, dropout) = input(t)?;
                let (dx, table) = (&t.numbers(2, &shape, stream)?, &table);
                let dtable = &t.numbers(3, &[vocab, shape[1]], dtype)?;
                let dpositions = &t.poisoned(&[seq_len + 3, shape[1]], dtype)?;
                let (positions, order) = (Some(dpositions), &mut vec![0; ids.len()]);
                let input = Embedding { table, positions, ids: &ids, seq_len, documents: None, scale: 1.5, dropout };
                t.run(op::EmbedBackward { input, dx, order, dtable, dpositions: positions })?;
                Ok(outputs([("the tokens' gradient", dtable), ("the positions' gradient", dpositions)], dtype))
            });
        }
    }

    fn norm(&mut self) {
        let formulas = [Norm::Layer, Norm::Rms { unit_offset: false }, Norm::Rms { unit_offset: true }];
        let (add, overwrite) = (WriteMode::Accumulate, WriteMode::Overwrite);
        for (types, norm) in PAIRS.into_iter().flat_map(|types| formulas.map(|norm| (types, norm))) {
            let shapes = [([70, 768], add), ([9, 1000], overwrite), ([33, 65], add), ([3, 1], add), ([1, 8], add)];
            let more = [([7, 24], overwrite), ([3, 771], add), ([300, 12], add), ([1100, 8], overwrite)];
            for (shape, mode) in shapes.into_iter().chain(more) {
                let name = format!("{norm:?} of {shape:?} in {types:?}");
                self.add("norm", name, move |t| norms(t, norm, types, shape, (0, shape[1], shape[1]), mode));
            }
        }
        // Heads in some columns of wider rows.
        for (dtype, [rows, heads, width]) in
            TYPES.into_iter().flat_map(|dtype| [[70, 3, 64], [5, 3, 8], [9, 4, 128]].map(|sizes| (dtype, sizes)))
        {
            self.add("norm", format!("norms of {rows} × {heads} heads of {width} in {dtype:?}"), move |t| {
                let (norm, columns) = (Norm::Rms { unit_offset: true }, heads * width);
                norms(t, norm, [dtype; 2], [rows, columns], (16, width, columns + 40), overwrite)
            });
        }
    }

    fn linear(&mut self) {
        // The long sides are cut for cuBLAS if they are no multiple of 8.
        for [rows, inner, width] in [[33, 72, 40], [5, 300, 96], [64, 64, 8], [5, 4099, 24], [9, 24, 4101]] {
            for (dtype, layout) in TYPES
                .into_iter()
                .flat_map(|dtype| [WeightLayout::InOut, WeightLayout::OutIn].map(|layout| (dtype, layout)))
            {
                let name = format!("a layer of {inner} × {width} for {rows} rows in {dtype:?}, {layout:?}");
                self.add("product", name, move |t| {
                    let shape = if layout == WeightLayout::InOut { [inner, width] } else { [width, inner] };
                    let (x, weight) = (&t.numbers(1, &[rows, inner], dtype)?, &t.numbers(2, &shape, dtype)?);
                    let (row, y) = (t.numbers(3, &[width], dtype)?, &t.poisoned(&[rows, width], dtype)?);
                    // There is no CUDA kernel for a bias with a different width.
                    let bias = Some(&row).filter(|_| width % 8 == 0);
                    t.run(op::Linear { layout, x, weight, bias: None, low_rank: None, y })?;
                    let mut outputs = vec![output("the output without a bias", &y.copy()?, dtype)];
                    t.run(op::Linear { layout, x, weight, bias, low_rank: None, y })?;
                    outputs.push(output("the output", y, dtype));
                    Ok(outputs)
                });
            }
        }
    }

    fn product(&mut self) {
        // Some columns of wider matrices, added to a sum of either type.
        for [rows, inner, width] in [[33, 72, 40], [5, 300, 96], [64, 64, 8], [5, 4099, 24], [9, 24, 4101]] {
            for (dtype, out) in TYPES.into_iter().flat_map(|dtype| [(dtype, dtype), (dtype, DType::F32)]) {
                let name = format!("a product of {inner} × {rows} × {width} of {dtype:?} in {out:?}");
                self.add("product", name, move |t| {
                    let (x, dy) = (&t.numbers(1, &[rows, inner], dtype)?, &t.numbers(4, &[rows, width + 5], dtype)?);
                    let a = Factor::transposed(Columns::all(x)?);
                    let b = Factor::plain(Columns::new(dy, 2..width + 2)?);
                    let [sum, product] = [(); 2].map(|()| t.numbers(5, &[inner, width + 3], out));
                    let (sum, product, rows) = (&sum?, &product?, &t.poisoned(&[inner], out)?);
                    for (c, mode) in [(sum, WriteMode::Accumulate), (product, WriteMode::Overwrite)] {
                        t.run(op::Product { a, b, alpha: 0.5, c: Columns::new(c, 1..width + 1)?, mode })?;
                    }
                    t.run(op::SumRows { x, out: rows })?;
                    Ok(outputs([("the sum", sum), ("the product", product), ("the sum of rows", rows)], out))
                });
            }
        }
    }

    fn rope(&mut self) {
        let (rows, seq_len, stride, columns) = (66, 33, 160, 16..144);
        for (dtype, in_documents) in TYPES.into_iter().flat_map(|dtype| [(dtype, false), (dtype, true)]) {
            for direction in [Direction::Forward, Direction::Backward] {
                let columns = columns.clone();
                let name = format!("heads rotated {direction:?} in {dtype:?}, documents {in_documents}");
                self.add("rope", name, move |t| {
                    let frequencies: Vec<f32> = (0..32).map(|i| 0.8f32.powi(i)).collect();
                    let Table { cos, sin } = Table::new(&frequencies, 1.0, 0..seq_len + 2, &Device::Cpu)?;
                    let table = &Table { cos: t.stored(&cos, DType::F32)?, sin: t.stored(&sin, DType::F32)? };
                    let starts: Vec<u32> = (0..rows as u32).map(|row| if row % 33 > 20 { 21 } else { 0 }).collect();
                    let positions = Positions { seq_len, past: 2, documents: in_documents.then_some(&starts[..]) };
                    let x = t.numbers(1, &[rows, stride], dtype)?;
                    t.run(op::Rotate { x: Columns::new(&x, columns.clone())?, table, positions, direction })?;
                    Ok(vec![output("the heads", &x, dtype)])
                });
            }
        }
    }

    fn survey(&mut self) {
        for (len, broken) in [(70_001, false), (3001, true), (8, false)] {
            for (dtype, exponents) in TYPES.into_iter().flat_map(|dtype| [(dtype, false), (dtype, true)]) {
                let name = format!("statistics of {len} in {dtype:?}, exponents {exponents}");
                self.add("survey", name, move |t| statistics(t, len, broken, dtype, exponents));
            }
        }
    }
}

fn output(name: &'static str, tensor: &Tensor, dtype: DType) -> Output {
    Output { name, tensor: tensor.clone(), allowed: tolerance(dtype) }
}

fn outputs<const N: usize>(tensors: [(&'static str, &Tensor); N], dtype: DType) -> Vec<Output> {
    tensors.map(|(name, tensor)| output(name, tensor, dtype)).into()
}

/// Attention and its gradients. With grouped heads, values have a separate tensor, as norms of heads leave them.
fn attention(t: &Trial<'_>, shape: Shape, documents: bool, dtype: DType, drops: bool) -> Result<Vec<Output>> {
    let (tokens, [width, _, values]) = (shape.batch * shape.seq_len, shape.widths());
    let packed = [tokens, shape.widths().iter().sum::<usize>()];
    let starts: Vec<u32> = (0..tokens).map(|row| if row % shape.seq_len < 19 { 0 } else { 19 }).collect();
    let (qkv, apart) = (t.numbers(1, &packed, dtype)?, t.numbers(3, &[tokens, values], dtype)?);
    let (dqkv, dv) = (t.numbers(4, &packed, dtype)?, t.numbers(5, &[tokens, values], dtype)?);
    let (out, lse) = (&t.poisoned(&[tokens, width], dtype)?, &t.poisoned(&[tokens * shape.heads], DType::F32)?);
    let parts = |packed, values| -> Result<_> {
        let mut parts = Columns::split(packed, shape.widths())?;
        if shape.kv_heads != shape.heads {
            parts[2] = Columns::all(values)?;
        }
        Ok(parts)
    };
    let (dropout, documents) = (t.dropout().filter(|_| drops), documents.then_some(&starts[..]));
    let operands = Operands { qkv: parts(&qkv, &apart)?, documents, dropout };
    let (dout, gradients) = (&t.numbers(2, &[tokens, width], dtype)?, parts(&dqkv, &dv)?);
    t.run(op::Attention { shape, operands, out, lse })?;
    t.run(op::AttentionBackward { shape, operands, dout, out, lse, gradients })?;
    let mut outputs = outputs([("the output", out), ("the gradient", &dqkv), ("the values' gradient", &dv)], dtype);
    // Tensor cores take scores and their gradients rounded.
    outputs[1].allowed *= 3.0;
    outputs[2].allowed *= 3.0;
    outputs.push(output("the log-sum-exp", lse, DType::F32));
    Ok(outputs)
}

/// A norm and its gradients, of groups of `width` in the columns from `first` of rows of `stride`.
fn norms(
    t: &Trial<'_>,
    norm: Norm,
    [stream, compute]: [DType; 2],
    [rows, columns]: [usize; 2],
    (first, width, stride): (usize, usize, usize),
    mode: WriteMode,
) -> Result<Vec<Output>> {
    let (settings, shape, groups) = (NormSettings { norm, eps: 1e-5 }, [rows, stride], rows * columns / width);
    // Away from zero, so that a variance by differences of squares would show.
    let x = t.mapped(1, &shape, stream, |x| x + 3.0)?;
    let [weight, bias] = [2, 3].map(|salt| t.numbers(salt, &[width], compute));
    let (weight, bias, dy) = (&weight?, bias?, t.numbers(4, &shape, compute)?);
    // What is next to the columns stays.
    let (y, dx) = (t.numbers(5, &shape, compute)?, t.numbers(5, &shape, stream)?);
    let (mean, rstd) = (t.poisoned(&[groups], DType::F32)?, &t.poisoned(&[groups], DType::F32)?);
    let (dweight, dbias) = (t.poisoned(&[width], compute)?, t.numbers(6, &[width], compute)?);
    let of_layer = |x| settings.centers().then_some(x);
    let of = |x| Columns::new(x, first..first + columns);
    let (mean, to) = (of_layer(&mean), of(&dx)?);
    t.run(op::Norm { settings, x: of(&x)?, weight, bias: of_layer(&bias), y: of(&y)?, mean, rstd })?;
    let (dy, x, dw, db) = (of(&dy)?, of(&x)?, Some(&dweight), of_layer(&dbias));
    t.run(op::NormBackward { settings, dy, x, weight, mean, rstd, dx: to, mode, dweight: dw, dbias: db })?;
    // A frozen norm has the same gradient.
    let frozen = t.numbers(5, &shape, stream)?;
    let to = of(&frozen)?;
    t.run(op::NormBackward { settings, dy, x, weight, mean, rstd, dx: to, mode, dweight: None, dbias: None })?;
    let difference = Output { name: "dx of a frozen norm", tensor: (&dx - frozen)?, allowed: 0.0 };
    let mut outputs = outputs([("the output", &y), ("dweight", &dweight), ("dbias", &dbias)], compute);
    outputs.extend([output("the deviation", rstd, DType::F32), output("dx", &dx, stream), difference]);
    outputs.extend(mean.map(|mean| output("the mean", mean, DType::F32)));
    Ok(outputs)
}

/// The figures of a tensor's statistics. Exact figures come from a CPU, whose counts and sums are exact or in FP64.
fn statistics(t: &Trial<'_>, len: usize, broken: bool, dtype: DType, exponents: bool) -> Result<Vec<Output>> {
    let on_cpu = Trial { seed: t.seed, ..Trial::on_cpu(&CandleKernels) };
    let mut values: Vec<f32> = on_cpu.numbers(1, &[len], DType::F32)?.to_vec1()?;
    for (i, value) in values.iter_mut().enumerate() {
        *value *= if i % 9 == 0 { 0.0 } else { 2f32.powi(-((i % 40) as i32)) };
    }
    if broken {
        (values[7], values[50], values[len - 1]) = (f32::INFINITY, f32::NEG_INFINITY, f32::NAN);
    }
    let (tensor, format) = (Tensor::new(values, &Device::Cpu)?.to_dtype(dtype)?, view::float_format(dtype));
    let TensorSurvey { stats, exponents } = match t.kernels {
        Some(kernels) => kernels.survey(&tensor.to_device(t.device)?, format, exponents)?,
        None => survey::survey(&tensor, format, exponents)?,
    };
    let counts = [stats.count, stats.zero, stats.subnormal, stats.inf, stats.nan];
    let counts = counts.into_iter().chain([exponents.zero, exponents.inf, exponents.nan]);
    let counts = counts.chain((ExponentHistogram::LOWEST..=ExponentHistogram::HIGHEST).map(|e| exponents.count(e)));
    let extremes = [stats.min_nonzero.unwrap_or(-1.0), stats.max_abs].map(f64::from);
    let exact: Vec<f64> = counts.map(|count| count as f64).chain(extremes).collect();
    let squares = Tensor::new(&[stats.sum_squares], &Device::Cpu)?;
    Ok(vec![
        Output { name: "counts and extremes", tensor: Tensor::new(exact, &Device::Cpu)?, allowed: 0.0 },
        Output { name: "the sum of squares", tensor: squares, allowed: 2e-5 },
    ])
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;
    use crate::Fused;

    #[test]
    fn kernels_for_a_cpu_are_within_the_bounds() {
        for kernels in [&Fused as &dyn Kernels, &CandleKernels] {
            for case in cases() {
                case.check(kernels, &Device::Cpu, 1, 1.0).unwrap_or_else(|error| panic!("{}: {error}", kernels.name()));
            }
        }
    }
}
