//! Whether our own kernels compute on a GPU what candle's operations compute.

use super::own::{Operation, Own};
use crate::adamw::{AdamWStep, Moments};
use crate::attention::{Operands, Shape};
use crate::columns::{Columns, Factor, Store};
use crate::cross_entropy::IGNORE;
use crate::dropout::Dropout;
use crate::plain::{Plain, Replacements};
use crate::precision::FloatFormat;
use crate::random::{Domain, Stream};
use crate::rope::{Direction, Positions, Table};
use crate::survey::TensorSurvey;
use crate::{Activation, Embedding, Kernels, Norm, NormGradients, NormSettings, Normed, WeightLayout};
use candle_core::{DType, Device, Result, Tensor, bail};
use std::collections::BTreeSet;
use std::time::{SystemTime, UNIX_EPOCH};

/// Compares one operation's kernels with candle's operations, on numbers that no earlier check has seen.
pub fn check(operation: Operation, device: &Device) -> Result<()> {
    let seed = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
    let own = Own::new(device, BTreeSet::from([operation]))?;
    let bench = Bench { own, candle: Plain::new(), device: device.clone(), seed };
    match operation {
        Operation::AdamW => bench.adamw(),
        Operation::Attention => bench.attention(),
        Operation::CrossEntropy => bench.cross_entropy(),
        Operation::Elementwise => bench.elementwise(),
        Operation::Embedding => bench.embedding(),
        Operation::Norm => bench.norm(),
        Operation::Product => bench.product(),
        Operation::Rope => bench.rope(),
        Operation::Survey => bench.survey(),
    }
}

/// Types of the residual stream and of the products, or of gradients and working copies.
const PAIRS: [[DType; 2]; 5] = [
    [DType::F32, DType::F32],
    [DType::F32, DType::F16],
    [DType::F16, DType::F16],
    [DType::F32, DType::BF16],
    [DType::BF16, DType::BF16],
];

/// How far two roundings of nearly the same number may be apart, relatively.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 1e-5,
        DType::F16 => 2e-3,
        _ => 2e-2,
    }
}

/// Fails unless our kernels have computed.
fn require(computed: bool, what: &str) -> Result<()> {
    if computed { Ok(()) } else { bail!("has no kernel for {what}") }
}

/// Queries, keys and values side by side; of grouped heads the values in a tensor of their own, as norms of heads leave them.
fn parts<'a>(shape: &Shape, packed: &'a Tensor, values: &'a Tensor) -> Result<[Columns<'a>; 3]> {
    let mut parts = Columns::split(packed, shape.widths())?;
    if shape.kv_heads != shape.heads {
        parts[2] = Columns::all(values)?;
    }
    Ok(parts)
}

/// One way of updating a master, its moments and its working copy.
type Update<'a> = dyn Fn(&Tensor, Moments<'_>, Option<&Tensor>) -> Result<()> + 'a;

/// Both ways of computing, and the numbers they are tried on.
struct Bench {
    own: Own,
    candle: Plain,
    device: Device,
    seed: u64,
}

impl Bench {
    /// Numbers between -1 and 1.
    fn numbers(&self, salt: u64, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let mut values = vec![0.0f32; shape.iter().product()];
        let stream = Stream::new(self.seed, Domain::Bench);
        for (block, values) in values.chunks_mut(4).enumerate() {
            let random = stream.block(1, salt, block as u32);
            values.iter_mut().zip(random).for_each(|(value, word)| *value = word as f32 / 2_147_483_648.0 - 1.0);
        }
        Tensor::from_vec(values, shape, &self.device)?.to_dtype(dtype)
    }

    /// Room for a result, full of NaN.
    fn poisoned(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        Tensor::full(f32::NAN, shape, &self.device)?.to_dtype(dtype)?.contiguous()
    }

    /// Fails unless the differences' root mean square is within `allowed / 2`, relative to the tensor's, and each difference
    /// within `4 * allowed`, relative to its element or to the tensor's root mean square.
    ///
    /// The numbers are new at each start, so the bound on a single difference leaves room for the rare ones: roundings differ
    /// by up to `allowed` in one tensor of some hundred. A bound on their mean square does not need that room.
    fn compare(&self, what: &str, found: &Tensor, expected: &Tensor, allowed: f64) -> Result<()> {
        let host = |x: &Tensor| x.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>();
        let (found, expected) = (host(found)?, host(expected)?);
        let rms = |squares: f64| (squares / expected.len().max(1) as f64).sqrt();
        let typical = rms(expected.iter().map(|x| f64::from(*x).powi(2)).sum()).max(f64::MIN_POSITIVE);
        let seed = self.seed;
        let mut squares = 0.0;
        for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let difference = f64::from(found - expected).abs();
            let error = difference / f64::from(expected.abs()).max(typical);
            if error.is_nan() || error > 4.0 * allowed {
                bail!("computes otherwise than candle: {what}, element {i} is {found}, not {expected} (seed {seed})");
            }
            squares += difference.powi(2);
        }
        let error = rms(squares) / typical;
        if error > allowed / 2.0 {
            bail!(
                "computes otherwise than candle: {what} differs by {error:.1e} of its root mean square (seed {seed})"
            );
        }
        Ok(())
    }

    fn adamw(&self) -> Result<()> {
        let numbers = AdamWStep {
            lr: 0.01,
            betas: [0.9, 0.999],
            eps: 1e-8,
            weight_decay: 0.1,
            bias_corrections: [0.1, 0.001],
            grad_factor: 0.125,
        };
        for ([grads, copies], len) in PAIRS.into_iter().zip([5003, 70_001, 8, 1, 130]) {
            let grad = self.numbers(1, &[len], grads)?;
            let run = |update: &Update<'_>| -> Result<[Tensor; 4]> {
                let [master, exp_avg, root] = [2, 3, 4].map(|salt| self.numbers(salt, &[len], DType::F32));
                let (master, exp_avg, exp_avg_sq) = (master?, exp_avg?, root?.sqr()?);
                let copy = self.poisoned(&[len], copies)?;
                let moments = Moments { exp_avg: &exp_avg, exp_avg_sq: &exp_avg_sq };
                update(&master, moments, (copies != DType::F32).then_some(&copy))?;
                let copy = if copies == DType::F32 { master.clone() } else { copy };
                Ok([master, exp_avg, exp_avg_sq, copy])
            };
            let expected = run(&|master, moments, copy| self.candle.adamw(numbers, &grad, master, moments, copy))?;
            let found = run(&|master, moments, copy| {
                require(self.own.adamw(numbers, &grad, master, moments, copy)?, "the update")
            })?;
            let names = ["master", "exp_avg", "exp_avg_sq", "working copy"];
            for ((what, found), expected) in names.into_iter().zip(&found).zip(&expected) {
                self.compare(what, found, expected, tolerance(expected.dtype()))?;
            }
        }
        Ok(())
    }

    fn attention(&self) -> Result<()> {
        // Within a tile, over its end, and with heads of every size that there are kernels for.
        let shapes = [(2, 33, 3, 32, 3), (1, 130, 4, 64, 2), (2, 40, 2, 80, 2), (1, 70, 3, 128, 1), (1, 65, 2, 20, 2)]
            .map(|(b, t, h, s, kv_heads)| Shape { kv_heads, ..Shape::new(b, t, h, s) });
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for (i, shape) in shapes.iter().enumerate() {
                let dropout = Dropout::new(0.2, self.seed, 4, 5).filter(|_| i % 2 == 0);
                self.attention_of(shape, None, dtype, dropout)?;
                // In a window over which tiles are skipped, and in two documents.
                let windowed = Shape { window: Some(shape.seq_len / 3), ..*shape };
                let tokens = shape.batch * shape.seq_len;
                let starts: Vec<u32> = (0..tokens).map(|row| if row % shape.seq_len < 19 { 0 } else { 19 }).collect();
                self.attention_of(&windowed, None, dtype, dropout)?;
                self.attention_of(shape, Some(&starts), dtype, dropout)?;
            }
        }
        Ok(())
    }

    fn attention_of(
        &self,
        shape: &Shape,
        documents: Option<&[u32]>,
        dtype: DType,
        dropout: Option<Dropout>,
    ) -> Result<()> {
        let (tokens, width) = (shape.batch * shape.seq_len, shape.heads * shape.head_size);
        let packed = shape.widths().iter().sum::<usize>();
        let values = shape.widths()[2];
        let (qkv, dout) = (self.numbers(1, &[tokens, packed], dtype)?, self.numbers(2, &[tokens, width], dtype)?);
        let apart = self.numbers(3, &[tokens, values], dtype)?;
        let operands = Operands { qkv: parts(shape, &qkv, &apart)?, documents, dropout };
        let results = || -> Result<[Tensor; 4]> {
            let lse = self.poisoned(&[tokens * shape.heads], DType::F32)?;
            let gradients = (self.numbers(4, &[tokens, packed], dtype)?, self.numbers(5, &[tokens, values], dtype)?);
            Ok([self.poisoned(&[tokens, width], dtype)?, lse, gradients.0, gradients.1])
        };
        let [out, lse, dqkv, dv] = &results()?;
        self.candle.attention(shape, &operands, out, lse)?;
        self.candle.attention_backward(shape, &operands, &dout, out, lse, parts(shape, dqkv, dv)?)?;
        let [own_out, own_lse, own_dqkv, own_dv] = &results()?;
        require(self.own.attention(shape, &operands, own_out, own_lse)?, "attention")?;
        let gradients = parts(shape, own_dqkv, own_dv)?;
        let backward = self.own.attention_backward(shape, &operands, &dout, own_out, own_lse, gradients)?;
        require(backward, "attention's gradient")?;
        let Shape { batch, seq_len, heads, head_size, window, .. } = shape;
        let documents = if documents.is_some() { "two documents" } else { "one document" };
        let of = |what: &str| {
            let sizes = format!("{batch} × {seq_len} tokens with {heads} heads of {head_size} in {dtype:?}");
            format!("{what} of {sizes}, window {window:?}, {documents}")
        };
        self.compare(&of("the output"), own_out, out, tolerance(dtype))?;
        self.compare(&of("the log-sum-exp"), own_lse, lse, tolerance(DType::F32))?;
        // Tensor cores take scores and their gradients rounded.
        self.compare(&of("the gradient"), own_dqkv, dqkv, 3.0 * tolerance(dtype))?;
        self.compare(&of("the values' gradient"), own_dv, dv, 3.0 * tolerance(dtype))
    }

    fn cross_entropy(&self) -> Result<()> {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for (rows, vocab, stride) in [(5, 5003, 5003), (3, 97, 104), (4, 64, 64)] {
                let mut targets: Vec<u32> = (0..rows).map(|row| (row * 31 % vocab) as u32).collect();
                targets[1] = IGNORE;
                for seed in [None, Some(256.0)] {
                    let logits = || (self.numbers(1, &[rows, vocab], DType::F32)? * 8.0)?.to_dtype(dtype);
                    // What lies behind a row is not looked at.
                    let (candle, own) = (logits()?, self.poisoned(&[rows, stride], dtype)?);
                    own.slice_set(&candle, 1, 0)?;
                    let [losses, own_losses] = [(); 2].map(|()| self.poisoned(&[rows], DType::F32));
                    let (losses, own_losses) = (losses?, own_losses?);
                    crate::plain::cross_entropy(&targets, &candle, &losses, seed)?;
                    let columns = Columns::new(&own, 0..vocab)?;
                    require(self.own.cross_entropy(&targets, columns, &own_losses, seed)?, "the loss")?;
                    let own = own.narrow(1, 0, vocab)?.contiguous()?;
                    self.compare("the losses", &own_losses, &losses, tolerance(DType::F32))?;
                    self.compare(&format!("the gradient in {dtype:?}"), &own, &candle, tolerance(dtype))?;
                }
            }
        }
        Ok(())
    }

    fn elementwise(&self) -> Result<()> {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for activation in [Activation::Gelu, Activation::GatedSilu, Activation::GatedGelu] {
                let (rows, width) = (37, 72);
                let width_of_x = if activation.is_gated() { 2 * width } else { width };
                let x = (self.numbers(1, &[rows, width_of_x], DType::F32)? * 12.0)?.to_dtype(dtype)?;
                let dy = || self.numbers(2, &[rows, width], dtype);
                let run = |kernels: &mut dyn FnMut([&Tensor; 4]) -> Result<()>| -> Result<[Tensor; 3]> {
                    let [y, again] = [(); 2].map(|()| self.poisoned(&[rows, width], dtype));
                    let (y, again, dy) = (y?, again?, dy()?);
                    let dx =
                        if activation.is_gated() { self.poisoned(&[rows, width_of_x], dtype)? } else { dy.clone() };
                    kernels([&y, &dy, &dx, &again])?;
                    Ok([y, dx, again])
                };
                let expected = run(&mut |[y, dy, dx, again]| {
                    self.candle.activate(activation, &x, y)?;
                    self.candle.activate_backward(activation, &x, dy, dx, again)
                })?;
                let found = run(&mut |[y, dy, dx, again]| {
                    require(self.own.activate(activation, &x, y)?, "the activation")?;
                    require(self.own.activate_backward(activation, &x, dy, dx, again)?, "the activation's gradient")
                })?;
                for ((what, found), expected) in
                    ["the output", "dx", "the output again"].into_iter().zip(&found).zip(&expected)
                {
                    self.compare(&format!("{what} of {activation:?} in {dtype:?}"), found, expected, tolerance(dtype))?;
                }
            }
        }
        for ([stream, branch], len) in PAIRS.into_iter().zip([5003, 70_001, 8, 1, 130]) {
            for dropout in [None, Dropout::new(0.2, self.seed, 4, 5)] {
                let (x, y) = (self.numbers(3, &[len], stream)?, self.numbers(4, &[len], branch)?);
                let [sum, own_sum] = [(); 2].map(|()| self.poisoned(&[len], stream));
                let [grad, own_grad] = [(); 2].map(|()| self.poisoned(&[len], branch));
                let (sum, own_sum, grad, own_grad) = (sum?, own_sum?, grad?, own_grad?);
                self.candle.add_branch(&x, &y, dropout, &sum)?;
                require(self.own.add_branch(&x, &y, dropout, &own_sum)?, "a branch")?;
                self.compare("the stream with its branch", &own_sum, &sum, tolerance(stream))?;
                self.candle.branch_gradient(&x, dropout, &grad)?;
                require(self.own.branch_gradient(&x, dropout, &own_grad)?, "a branch's gradient")?;
                self.compare("the branch's gradient", &own_grad, &grad, tolerance(branch))?;
            }
        }
        Ok(())
    }

    fn embedding(&self) -> Result<()> {
        let (seq_len, vocab, width) = (33, 19, 136);
        let ids: Vec<u32> = (0..4 * seq_len as u32).map(|n| n * n % 17).collect();
        for [stream, table] in PAIRS {
            for dropout in [None, Dropout::new(0.2, self.seed, 4, 5)] {
                let tokens = self.numbers(1, &[vocab, width], table)?;
                let embedding = Embedding {
                    table: &tokens,
                    positions: None,
                    ids: &ids,
                    seq_len,
                    documents: None,
                    scale: 1.5,
                    dropout,
                };
                let dx = self.numbers(2, &[ids.len(), width], stream)?;
                let results = || -> Result<[Tensor; 2]> {
                    Ok([self.numbers(3, &[vocab, width], table)?, self.poisoned(&[seq_len + 3, width], table)?])
                };
                let ([dtable, dpositions], [own_dtable, own_dpositions]) = (results()?, results()?);
                let mut order = vec![0; ids.len()];
                self.candle.embed_backward(embedding, &dx, &mut order, &dtable, Some(&dpositions))?;
                let done = self.own.embed_backward(embedding, &dx, &own_dtable, Some(&own_dpositions))?;
                require(done, "the embedding's gradient")?;
                self.compare("the tokens' gradient", &own_dtable, &dtable, tolerance(table))?;
                self.compare("the positions' gradient", &own_dpositions, &dpositions, tolerance(table))?;
            }
        }
        Ok(())
    }

    fn product(&self) -> Result<()> {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            // The long sides are cut where they are no multiple of 8.
            for (rows, inner, width) in [(33, 72, 40), (5, 300, 96), (64, 64, 8), (5, 4099, 24), (9, 24, 4101)] {
                let x = self.numbers(1, &[rows, inner], dtype)?;
                for layout in [WeightLayout::InOut, WeightLayout::OutIn] {
                    let shape = if layout == WeightLayout::InOut { [inner, width] } else { [width, inner] };
                    let (weight, bias) = (self.numbers(2, &shape, dtype)?, self.numbers(3, &[width], dtype)?);
                    // There is no kernel for a bias of such a width.
                    for bias in [None, Some(&bias)].into_iter().filter(|bias| bias.is_none() || width % 8 == 0) {
                        let [y, own] = [(); 2].map(|()| self.poisoned(&[rows, width], dtype));
                        let (y, own) = (y?, own?);
                        self.candle.linear(layout, &x, &weight, bias, &y)?;
                        require(self.own.linear(layout, &x, &weight, bias, &own)?, "a layer")?;
                        self.compare(&format!("a layer's output in {dtype:?}"), &own, &y, tolerance(dtype))?;
                    }
                }
                // Some columns of wider matrices, added to a sum of either type.
                let dy = self.numbers(4, &[rows, width + 5], dtype)?;
                for out in [dtype, DType::F32] {
                    for how in [Store::Overwrite, Store::Add] {
                        let [sum, own] = [(); 2].map(|()| self.numbers(5, &[inner, width + 3], out));
                        let (sum, own) = (sum?, own?);
                        let a = Factor::transposed(Columns::all(&x)?);
                        let b = Factor::plain(Columns::new(&dy, 2..width + 2)?);
                        let into = |sum| Columns::new(sum, 1..width + 1);
                        self.candle.product(a, b, 0.5, into(&sum)?, how)?;
                        require(Replacements::product(&self.own, a, b, 0.5, into(&own)?, how)?, "a product")?;
                        self.compare(&format!("a product of {dtype:?} in {out:?}"), &own, &sum, tolerance(out))?;
                    }
                    let [sum, own] = [(); 2].map(|()| self.poisoned(&[inner], out));
                    let (sum, own) = (sum?, own?);
                    let ones = Tensor::ones((1, rows), dtype, &self.device)?;
                    let (ones, all) = (Factor::plain(Columns::all(&ones)?), Factor::plain(Columns::all(&x)?));
                    self.candle.product(ones, all, 1.0, Columns::all(&sum.unsqueeze(0)?)?, Store::Overwrite)?;
                    require(self.own.sum_rows(&x, &own)?, "a sum of rows")?;
                    self.compare(&format!("a sum of rows of {dtype:?} in {out:?}"), &own, &sum, tolerance(out))?;
                }
            }
        }
        Ok(())
    }

    fn norm(&self) -> Result<()> {
        for [stream, compute] in PAIRS {
            for (shape, how) in [([70, 768], Store::Add), ([9, 1000], Store::Overwrite), ([33, 65], Store::Add)] {
                for norm in [Norm::Layer, Norm::Rms { unit_offset: false }, Norm::Rms { unit_offset: true }] {
                    self.norm_of(norm, [stream, compute], shape, how)?;
                }
            }
        }
        self.head_norm()
    }

    fn norm_of(
        &self,
        norm: Norm,
        [stream, compute]: [DType; 2],
        shape @ [rows, width]: [usize; 2],
        how: Store,
    ) -> Result<()> {
        let (settings, centers) = (NormSettings { norm, eps: 1e-5 }, norm == Norm::Layer);
        // Away from zero, so that a variance by differences of squares would show.
        let x = (self.numbers(1, &shape, DType::F32)? + 3.0)?.to_dtype(stream)?;
        let [weight, bias] = [2, 3].map(|salt| self.numbers(salt, &[width], compute));
        let (weight, bias, dy) = (weight?, bias?, self.numbers(4, &shape, compute)?);
        let bias = centers.then_some(&bias);
        let results = || -> Result<(Normed, [Tensor; 3])> {
            let statistics = || self.poisoned(&[rows], DType::F32);
            let mean = centers.then(statistics).transpose()?;
            let normed = Normed { out: self.poisoned(&shape, compute)?, mean, rstd: statistics()? };
            let dx = self.numbers(5, &shape, stream)?;
            Ok((normed, [dx, self.poisoned(&[width], compute)?, self.numbers(6, &[width], compute)?]))
        };
        let gradients = |weight, bias| Some(NormGradients { weight, bias: centers.then_some(bias) });
        let (normed, [dx, dweight, dbias]) = &results()?;
        self.candle.norm(settings, &x, &weight, bias, normed)?;
        self.candle.norm_backward(settings, &dy, &x, &weight, normed, (dx, how), gradients(dweight, dbias))?;
        let (own, [own_dx, own_dweight, own_dbias]) = &results()?;
        require(self.own.norm(settings, &x, &weight, bias, own)?, "the norm")?;
        let (to, sums) = ((own_dx, how), gradients(own_dweight, own_dbias));
        let done = self.own.norm_backward(settings, &dy, &x, &weight, own, to, sums)?;
        require(done, "the norm's gradient")?;
        let (mean, own_mean) = (normed.mean.as_ref().unwrap_or(dx), own.mean.as_ref().unwrap_or(own_dx));
        let pairs = [
            ("the output", &own.out, &normed.out),
            ("the mean", own_mean, mean),
            ("the deviation", &own.rstd, &normed.rstd),
            ("dx", own_dx, dx),
            ("dweight", own_dweight, dweight),
            ("dbias", own_dbias, dbias),
        ];
        for (what, found, expected) in pairs {
            let what = format!("{what} of {norm:?} of {rows} × {width} in {stream:?} and {compute:?}");
            self.compare(&what, found, expected, tolerance(expected.dtype()))?;
        }
        Ok(())
    }

    /// Norms of heads in some columns of wider rows.
    fn head_norm(&self) -> Result<()> {
        let (rows, heads, width, first) = (70, 3, 64, 16);
        let settings = NormSettings { norm: Norm::Rms { unit_offset: true }, eps: 1e-5 };
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let shape = [rows, first + heads * width + 24];
            let columns = |x| Columns::new(x, first..first + heads * width);
            let (x, dy) = (self.numbers(1, &shape, dtype)?, self.numbers(2, &shape, dtype)?);
            let weight = self.numbers(3, &[width], dtype)?;
            let results = || -> Result<[Tensor; 4]> {
                let (rstd, dweight) = (self.poisoned(&[rows, heads], DType::F32)?, self.poisoned(&[width], dtype)?);
                Ok([self.numbers(4, &shape, dtype)?, rstd, self.numbers(4, &shape, dtype)?, dweight])
            };
            let (expected, found) = (results()?, results()?);
            let [y, rstd, dx, dweight] = &expected;
            self.candle.head_norm(settings, columns(&x)?, &weight, columns(y)?, rstd)?;
            let (dy, x) = (columns(&dy)?, columns(&x)?);
            self.candle.head_norm_backward(settings, dy, x, &weight, rstd, columns(dx)?, Some(dweight))?;
            let [y, rstd, dx, dweight] = &found;
            require(self.own.head_norm(settings, x, &weight, columns(y)?, rstd)?, "norms of heads")?;
            let done = self.own.head_norm_backward(settings, dy, x, &weight, rstd, columns(dx)?, Some(dweight))?;
            require(done, "the gradient of norms of heads")?;
            let names = ["the output", "the deviation", "dx", "dweight"];
            for ((what, found), expected) in names.into_iter().zip(&found).zip(&expected) {
                let what = format!("{what} of norms of heads in {dtype:?}");
                self.compare(&what, found, expected, tolerance(expected.dtype()))?;
            }
        }
        Ok(())
    }

    fn rope(&self) -> Result<()> {
        let (rows, seq_len, stride, first, half) = (66, 33, 160, 16, 32);
        let frequencies: Vec<f32> = (0..half).map(|i| 0.8f32.powi(i)).collect();
        let half = frequencies.len();
        let table = Table::new(&frequencies, 1.0, 0..seq_len + 2, &self.device)?;
        let starts: Vec<u32> = (0..rows as u32).map(|row| if row % 33 > 20 { 21 } else { 0 }).collect();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for documents in [None, Some(&starts[..])] {
                for direction in [Direction::Forward, Direction::Backward] {
                    let positions = Positions { seq_len, past: 2, documents };
                    let [x, own] = [(); 2].map(|()| self.numbers(1, &[rows, stride], dtype));
                    let (x, own) = (x?, own?);
                    let columns = |x| Columns::new(x, first..first + 4 * half);
                    self.candle.rotate(columns(&x)?, &table, positions, direction)?;
                    let done = Replacements::rotate(&self.own, columns(&own)?, &table, positions, direction)?;
                    require(done, "rotations")?;
                    self.compare(&format!("heads rotated in {dtype:?}"), &own, &x, tolerance(dtype))?;
                }
            }
        }
        Ok(())
    }

    fn survey(&self) -> Result<()> {
        let mut tensors = Vec::new();
        for (len, broken) in [(70_001, false), (3001, true), (8, false)] {
            for (dtype, format) in
                [(DType::F32, FloatFormat::FP32), (DType::F16, FloatFormat::FP16), (DType::BF16, FloatFormat::BF16)]
            {
                let mut values: Vec<f32> = self.numbers(1, &[len], DType::F32)?.to_vec1()?;
                for (i, value) in values.iter_mut().enumerate() {
                    *value *= if i % 9 == 0 { 0.0 } else { 2f32.powi(-((i % 40) as i32)) };
                }
                if broken {
                    (values[7], values[50], values[len - 1]) = (f32::INFINITY, f32::NEG_INFINITY, f32::NAN);
                }
                tensors.push((Tensor::new(values, &self.device)?.to_dtype(dtype)?, format));
            }
        }
        let all: Vec<_> = tensors.iter().map(|(tensor, format)| (tensor, *format)).collect();
        for exponents in [false, true] {
            let mut found = vec![TensorSurvey::default(); all.len()];
            require(self.own.surveys(&all, exponents, &mut found)?, "the survey")?;
            for (mut found, (tensor, format)) in found.into_iter().zip(&all) {
                let expected = self.candle.survey(tensor, *format, exponents)?;
                let (squares, own) = (expected.stats.sum_squares, found.stats.sum_squares);
                found.stats.sum_squares = squares;
                let close = (squares - own).abs() <= 1e-5 * squares.abs();
                if !close || found.stats != expected.stats || found.exponents != expected.exponents {
                    let (found, expected) = (found.stats, expected.stats);
                    bail!(
                        "computes otherwise than candle: {} of {:?} are {found:?} with squares of {own}, not {expected:?} \
                         (seed {})",
                        tensor.elem_count(),
                        tensor.dtype(),
                        self.seed
                    );
                }
            }
        }
        Ok(())
    }
}
