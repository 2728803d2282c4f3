//! The table of operations' cases: every set of kernels for a CPU against the exact results, and these against autograd
//! on plain operations and finite differences. Then the head, and properties that results do not show: refusals,
//! skipped work, threads.

use crate::common::compare::{relative, values};
use crate::common::reference::{self, Attention};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var};
use finetune::engine::kernels::attention::{AttentionInputs, AttentionShape};
use finetune::engine::kernels::columns::{ColumnSlice, WriteMode};
use finetune::engine::kernels::cross_entropy::{self, CrossEntropyWorkspace, HeadGradient, HeadInput, IGNORE};
use finetune::engine::kernels::embedding::scale_of_width;
use finetune::engine::kernels::gated_delta::DeltaHeads;
use finetune::engine::kernels::op;
use finetune::engine::kernels::op::cases::{self, Bounds, Case, Exact, Operation, cases, check_family};
use finetune::engine::kernels::rope::{Direction, PositionIds};
use finetune::engine::kernels::view::zeros;
use finetune::engine::kernels::{Activation, CandleKernels, Fused, Kernels, NormKind, NormSettings, WeightLayout};

/// Every set of kernels that computes on a CPU.
const KERNELS: [&dyn Kernels; 2] = [&Fused, &CandleKernels];
const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
const EPSILON: f64 = 1e-5f32 as f64;

#[test]
fn results_are_within_their_bounds() {
    for kernels in KERNELS {
        let check = |case: Case| case.check(kernels, &Device::Cpu, 1, Bounds::Cpu).err();
        let failures: Vec<String> = cases().into_iter().filter_map(check).map(|error| error.to_string()).collect();
        assert!(failures.is_empty(), "{}:\n{}", kernels.name(), failures.join("\n"));
    }
}

#[test]
fn decoded_rows_of_gated_delta_layers_have_the_bits_of_the_forward_pass() {
    let mut compared = 0;
    for case in cases() {
        if !matches!(case.operation, Operation::GatedDelta { documents: &[], .. }) {
            continue;
        }
        let results = case.compute(&Fused, &Device::Cpu, 1).unwrap();
        assert_eq!(values(&results[0]), values(&results[1]), "{case:?}");
        compared += 1;
    }
    assert!(compared > 8, "{compared}");
}

/// A preflight draws numbers that no test has seen, and must not reject correct kernels.
#[test]
fn small_losses_are_within_their_bounds_for_any_seed() {
    let case = Case::from(Operation::CrossEntropy { sizes: [5, 3, 3], softcap: None, dtype: DType::F32 });
    for seed in 0..2000 {
        case.check(&Fused, &Device::Cpu, seed, Bounds::Preflight).unwrap();
    }
}

/// One number is left from a subtraction of nearly equal ones, and its error exceeds the bound.
#[test]
fn a_preflight_draws_other_numbers_if_a_result_almost_cancels() {
    const SEED: u64 = 77_234_007;
    let small = |case: &Case| matches!(case.operation, Operation::AdamW { len: 1, .. });
    let check = |case: Case| case.check(&Fused, &Device::Cpu, SEED, Bounds::Preflight).err();
    assert_ne!(cases().into_iter().filter(small).filter_map(check).count(), 0);
    check_family("adamw", &Fused, &Device::Cpu, SEED).unwrap();
}

/// The value of an operation from its inputs.
type Compute = Box<dyn Fn(&[Tensor]) -> Result<Tensor>>;

/// An operation in plain differentiable operations, and the results of the table to compare it with.
struct Plain {
    inputs: Vec<Tensor>,
    compute: Compute,
    /// `None` if the case has only gradients.
    value: Option<Tensor>,
    /// The gradient of the value.
    seed: Tensor,
    /// The gradients of the first inputs.
    gradients: Vec<Tensor>,
}

/// `None` for operations that are no functions of their operands, and with dropout.
fn plain(operation: Operation, [operands, results]: &Exact) -> Option<Plain> {
    let (operand, result) = (|name: &str| operands[name].clone(), |name: &str| results[name].clone());
    let difference = |name| (result(name) - operand(name)).unwrap();
    let columns = |x: Tensor, first: usize, count: usize| x.narrow(1, first, count).unwrap().contiguous().unwrap();
    let plain = |inputs, compute, value, seed, gradients| Some(Plain { inputs, compute, value, seed, gradients });
    match operation {
        Operation::Linear { layout, biased, rank, .. } => {
            let optional = |there: bool, names: &[&'static str]| names.iter().filter(move |_| there).copied().collect();
            let [bias, low]: [Vec<_>; 2] = [optional(biased, &["bias"]), optional(rank > 0, &["low", "factor"])];
            let inputs = ["x", "weight"].into_iter().chain(bias).chain(low).map(operand).collect();
            let compute = move |x: &[Tensor]| {
                let weight = if layout == WeightLayout::InOut { x[1].t()? } else { x[1].clone() };
                let y = reference::linear(&x[0], &weight, biased.then(|| &x[2]))?;
                match &x[2 + usize::from(biased)..] {
                    [low, factor] => y + (reference::linear(low, factor, None)? * 1.5)?,
                    _ => Ok(y),
                }
            };
            let gradients = ["dx", "dweight", "dbias"][..2 + usize::from(biased)].iter().map(|name| result(name));
            plain(inputs, Box::new(compute), Some(result("y")), operand("dy"), gradients.collect())
        }
        Operation::Product { sizes: [.., n], transposed, .. } => {
            let turned = |x: Tensor, turn| if turn { x.t().unwrap() } else { x };
            let b = operand("b");
            let b = columns(b.clone(), 2, b.dim(1).unwrap() - 5);
            let a = turned(operand("a"), transposed[0]);
            let b = turned(b, transposed[1]);
            let [product, sum] = [result("the product"), difference("sum")].map(|x| columns(x, 1, n));
            assert!(relative(&sum, &product) < 1e-12);
            let compute = |x: &[Tensor]| x[0].contiguous()?.matmul(&x[1].contiguous()?)? * 0.5;
            plain(vec![a, b], Box::new(compute), Some(product.clone()), product, vec![])
        }
        Operation::Norm { norm, sizes: [_, count], place: [first, ..], mode, .. } => {
            let part = |x| columns(x, first, count);
            let dx = if mode == WriteMode::Accumulate { difference("dx") } else { result("dx") };
            let mut inputs = vec![part(operand("x")), operand("weight")];
            let mut gradients = vec![part(dx), result("dweight")];
            if norm == NormKind::Layer {
                inputs.push(operand("bias"));
                gradients.push(result("dbias"));
            }
            let compute = move |x: &[Tensor]| match norm {
                NormKind::Layer => reference::layer_norm(&x[0], &x[1], &x[2], EPSILON),
                NormKind::Rms { unit_offset } => reference::rms_norm(&x[0], &x[1], f64::from(unit_offset), EPSILON),
            };
            plain(inputs, Box::new(compute), Some(part(result("y"))), part(operand("dy")), gradients)
        }
        Operation::Activate { activation, .. } => {
            let compute = move |x: &[Tensor]| {
                let halves = |x: &Tensor| x.chunk(2, 1);
                match activation {
                    Activation::Gelu => reference::gelu(&x[0]),
                    Activation::SwiGlu => reference::silu(&halves(&x[0])?[0])? * &halves(&x[0])?[1],
                    Activation::GeGlu => reference::gelu(&halves(&x[0])?[0])? * &halves(&x[0])?[1],
                    Activation::ClampedSwiGlu => reference::clamped_swiglu(&x[0]),
                }
            };
            plain(vec![operand("x")], Box::new(compute), Some(result("y")), operand("dy"), vec![result("dx")])
        }
        // If a query has only one key, gradients of queries and keys are zero: the three inputs are compared as one.
        Operation::Attention { shape, documents, drops: false, packed, sinks, .. } => {
            let [queries, keys, values] = shape.widths();
            let AttentionShape { batch, seq_len, .. } = shape;
            let joined = |all: Tensor, apart| {
                let parts = [columns(all, 0, queries + keys), apart];
                Tensor::cat(&parts, 1).unwrap()
            };
            let [qkv, gradient] = [(operand("qkv"), operand("values")), (result("dqkv"), result("dv"))]
                .map(|(all, apart)| if packed { all } else { joined(all, apart) });
            let attention = Attention {
                heads: shape.heads,
                kv_heads: shape.kv_heads,
                head_size: shape.head_size,
                scale: f64::from(shape.scale),
                window: shape.window,
                softcap: shape.softcap.map(f64::from),
                documents: (!documents.is_empty()).then(|| cases::starts(seq_len, documents)),
            };
            let compute = move |x: &[Tensor]| {
                let part = |first, width| x[0].narrow(1, first, width)?.contiguous()?.reshape((batch, seq_len, width));
                let [q, k, v] = [part(0, queries)?, part(queries, keys)?, part(queries + keys, values)?];
                attention.attend(&q, &k, &v, x.get(1))?.reshape((batch * seq_len, queries))
            };
            let inputs = [qkv].into_iter().chain(sinks.then(|| operand("sinks"))).collect();
            let gradients = [gradient].into_iter().chain(sinks.then(|| result("dsinks"))).collect();
            plain(inputs, Box::new(compute), Some(result("out")), operand("dout"), gradients)
        }
        Operation::CrossEntropy { sizes: [rows, vocab, _], softcap, .. } => {
            let target = |row| if row == 1 { reference::IGNORED } else { (row * 31 % vocab) as i64 };
            let targets = Tensor::from_vec((0..rows).map(target).collect(), (1, rows), &Device::Cpu).unwrap();
            let compute = move |x: &[Tensor]| {
                let logits = reference::soft_cap(x[0].clone(), softcap.map(f64::from))?;
                reference::cross_entropy(&logits.unsqueeze(0)?, &targets)? * (rows - 1) as f64
            };
            let losses = result("the losses").sum_all().unwrap();
            let seed = Tensor::new(256.0, &Device::Cpu).unwrap();
            plain(vec![operand("logits")], Box::new(compute), Some(losses), seed, vec![result("the gradient")])
        }
        Operation::Sums { drops: false, .. } => {
            let (stream, branch) = (operand("stream"), operand("branch"));
            assert_eq!(values(&result("the branch's gradient")), values(&stream));
            assert!(relative(&difference("total"), &branch) < 1e-12);
            let value = result("the stream with its branch");
            plain(vec![stream, branch], Box::new(|x| &x[0] + &x[1]), Some(value.clone()), value, vec![])
        }
        Operation::Embed { backward, positions, drops: false, .. } => {
            let ids = cases::tokens();
            let places: Vec<u32> = (0..ids.len() as u32).map(|n| n % 33).collect();
            let compute = move |x: &[Tensor]| {
                let tokens = reference::embed(&ids, &x[0], 1.5)?;
                if positions { tokens + reference::embed(&places, &x[1], 1.0)? } else { Ok(tokens) }
            };
            let inputs = ["table", "positions"][..=usize::from(positions)].iter().map(|name| operand(name)).collect();
            if !backward {
                let value = result("out");
                return plain(inputs, Box::new(compute), Some(value.clone()), value, vec![]);
            }
            let gradients = [difference("dtable")].into_iter().chain(positions.then(|| result("dpositions")));
            plain(inputs, Box::new(compute), None, operand("dx"), gradients.collect())
        }
        Operation::Rotate { seq_len, heads, half, past, documents, direction, .. } => {
            let starts = cases::starts(seq_len, if documents { cases::ROTATED } else { &[&[], &[]] });
            let index: Vec<u32> = (0..2 * seq_len).map(|row| (past + row % seq_len) as u32 - starts[row]).collect();
            let table = cases::angles(half, seq_len + past).unwrap();
            let index = Tensor::new(index, &Device::Cpu).unwrap();
            let [cos, sin] = [table.cos, table.sin].map(|table| table.index_select(&index, 0).unwrap());
            let [x, turned] = [operand("x"), result("the heads")].map(|x| columns(x, 16, 2 * half * heads));
            let compute = move |x: &[Tensor]| reference::rotate(&x[0], &cos, &sin);
            let (value, gradients) =
                if direction == Direction::Forward { (Some(turned), vec![]) } else { (None, vec![turned]) };
            plain(vec![x.clone()], Box::new(compute), value, x, gradients)
        }
        Operation::GateHeads { sizes: [rows, heads, head_dim], .. } => {
            let width = heads * head_dim;
            let part = move |x: &Tensor, i: usize| {
                x.reshape((rows, heads, 2, head_dim))?.narrow(2, i, 1)?.contiguous()?.reshape((rows, width))
            };
            // Queries and gated heads are one value, so that their gradients add up to the pairs'.
            let join = |a: Tensor, b: Tensor| Tensor::cat(&[a, b], 1).unwrap();
            let compute = move |x: &[Tensor]| {
                let open = (part(&x[0], 1)?.neg()?.exp()? + 1.0)?.recip()?;
                Tensor::cat(&[part(&x[0], 0)?, (&x[1] * open)?], 1)
            };
            let inputs = vec![columns(operand("product"), 1, 2 * width), operand("x")];
            let value = Some(join(result("queries"), result("out")));
            let seed = join(operand("dqueries"), operand("dy"));
            plain(inputs, Box::new(compute), value, seed, ["dpairs", "dx"].map(result).into())
        }
        Operation::ShortConv { sizes: [seq_len, width, taps], documents, .. } => {
            let starts = document_starts(seq_len, documents);
            let compute = move |x: &[Tensor]| {
                let part = |i| x[0].narrow(1, i * width, width)?.contiguous();
                part(1)? * convolution(&(part(0)? * part(2)?)?, &x[1].reshape((width, taps))?, seq_len, &starts)?
            };
            let inputs = ["input", "weight"].map(operand).into();
            let gradients = ["dinput", "dweight"].map(result).into();
            plain(inputs, Box::new(compute), Some(result("out")), operand("dy"), gradients)
        }
        Operation::GatedDelta { heads, sizes: [seq_len, taps], documents, .. } => {
            let starts = document_starts(seq_len, documents);
            let compute = move |x: &[Tensor]| {
                let channels = heads.channels();
                let inputs = x[0].narrow(1, 0, channels)?.contiguous()?;
                let mixed = convolution(&inputs, &x[1].reshape((channels, taps))?, seq_len, &starts)?;
                let rest = x[0].narrow(1, channels, heads.input_width() - channels)?.contiguous()?;
                gated_delta(heads, &reference::silu(&mixed)?, &rest, &x[2..], seq_len, &starts)
            };
            let inputs = ["input", "conv", "a_log", "dt_bias", "norm"].map(operand).into();
            let gradients = ["dinput", "dconv", "da_log", "ddt_bias", "dnorm"].map(result).into();
            plain(inputs, Box::new(compute), Some(result("out")), operand("dy"), gradients)
        }
        _ => None,
    }
}

/// The starts of the documents of two sequences; zeros if each sequence is one document.
fn document_starts(seq_len: usize, documents: cases::Documents) -> Vec<u32> {
    if documents.is_empty() { vec![0; 2 * seq_len] } else { cases::starts(seq_len, documents) }
}

/// The causal convolution of each column of `x` with a row of `weight`, whose last element is for the token itself.
fn convolution(x: &Tensor, weight: &Tensor, seq_len: usize, starts: &[u32]) -> Result<Tensor> {
    let weight = weight.t()?.contiguous()?;
    let (taps, rows) = (weight.dim(0)?, x.dim(0)?);
    // A row that no token has is zero.
    let padded = Tensor::cat(&[x, &x.zeros_like()?.narrow(0, 0, 1)?], 0)?;
    let mut sum = x.zeros_like()?;
    for before in 0..taps {
        let source = |row: usize| {
            let inside = row % seq_len >= before + starts[row] as usize;
            (if inside { row - before } else { rows }) as u32
        };
        let index = Tensor::new((0..rows).map(source).collect::<Vec<_>>(), &Device::Cpu)?;
        let term = padded.index_select(&index, 0)?.broadcast_mul(&weight.narrow(0, taps - 1 - before, 1)?)?;
        sum = (sum + term)?;
    }
    Ok(sum)
}

/// A gated delta layer after its convolution, token by token. `rest` has the columns `z`, `b` and `a`, and `params` are
/// `a_log`, `dt_bias` and the norm's weight.
fn gated_delta(
    heads: DeltaHeads,
    mixed: &Tensor,
    rest: &Tensor,
    params: &[Tensor],
    seq_len: usize,
    starts: &[u32],
) -> Result<Tensor> {
    let DeltaHeads { key_heads, value_heads, key_dim, value_dim } = heads;
    let [a_log, dt_bias, norm] = params else { unreachable!() };
    let mut rows = Vec::new();
    let mut states = Vec::new();
    for (row, start) in starts.iter().enumerate() {
        if row % seq_len == *start as usize {
            states = vec![Tensor::zeros((key_dim, value_dim), DType::F64, &Device::Cpu)?; value_heads];
        }
        let of = |x: &Tensor, first: usize, count: usize| x.narrow(0, row, 1)?.narrow(1, first, count)?.contiguous();
        let unit = |x: Tensor| x.broadcast_div(&(x.sqr()?.sum_all()? + f64::from(1e-6f32))?.sqrt()?);
        for (head, state) in states.iter_mut().enumerate() {
            let key_head = head / (value_heads / key_heads);
            let query = (unit(of(mixed, key_head * key_dim, key_dim)?)? / (key_dim as f64).sqrt())?;
            let key = unit(of(mixed, heads.keys() + key_head * key_dim, key_dim)?)?;
            let value = of(mixed, 2 * heads.keys() + head * value_dim, value_dim)?;
            let z = of(rest, head * value_dim, value_dim)?;
            let b = of(rest, heads.values() + head, 1)?;
            let a = of(rest, heads.values() + value_heads + head, 1)?;
            let strength = (b.neg()?.exp()? + 1.0)?.recip()?;
            let step = ((a + dt_bias.narrow(0, head, 1)?.reshape((1, 1))?)?.exp()? + 1.0)?.log()?;
            let decay = (a_log.narrow(0, head, 1)?.reshape((1, 1))?.exp()? * step)?.neg()?.exp()?;
            let decayed = state.broadcast_mul(&decay)?;
            let change = (value - key.matmul(&decayed)?)?.broadcast_mul(&strength)?;
            *state = (decayed + key.t()?.contiguous()?.matmul(&change)?)?;
            let output = query.matmul(state)?;
            rows.push((reference::rms_norm(&output, norm, 0.0, f64::from(0.01f32))? * reference::silu(&z)?)?);
        }
    }
    Tensor::cat(&rows, 1)?.reshape((mixed.dim(0)?, heads.values()))
}

impl Plain {
    /// Compares values and gradients with autograd, and gradients with the value's slopes along a few directions.
    fn check(&self, name: &str) {
        const STEP: f64 = 1e-4;
        let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
        let weighted = |value: &Tensor| (value * &self.seed).unwrap().sum_all().unwrap();
        let variables: Vec<Var> =
            self.inputs.iter().map(|input| Var::from_tensor(&input.copy().unwrap()).unwrap()).collect();
        let inputs: Vec<Tensor> = variables.iter().map(|variable| variable.as_tensor().clone()).collect();
        let value = (self.compute)(&inputs).unwrap();
        let store = weighted(&value).backward().unwrap();
        let gradients = variables.iter().map(|variable| store.get(variable).unwrap().clone());
        let truths = self.value.iter().map(|_| value.detach()).chain(gradients);
        let seeds = norm(&values(&self.seed));
        for (i, (found, truth)) in self.value.iter().chain(&self.gradients).zip(truths).enumerate() {
            let size = norm(&values(&truth)).max(1e-3 * seeds);
            let error = norm(&values(&(found - truth).unwrap())) / size;
            assert!(error < 1e-11, "{name}: result {i} is {error:.1e} away from autograd's");
        }
        for (index, gradient) in self.gradients.iter().enumerate() {
            let size = norm(&values(gradient)).max(1e-3 * seeds);
            for salt in 0..3 {
                let direction = pattern(self.inputs[index].dims(), salt).to_dtype(DType::F64).unwrap();
                let direction = (&direction / norm(&values(&direction))).unwrap();
                let value_at = |step: f64| {
                    let mut inputs = self.inputs.clone();
                    inputs[index] = (&inputs[index] + (&direction * step).unwrap()).unwrap();
                    weighted(&(self.compute)(&inputs).unwrap()).to_scalar::<f64>().unwrap()
                };
                let measured = (value_at(STEP) - value_at(-STEP)) / (2.0 * STEP);
                let slope = (gradient * &direction).unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap();
                let error = (measured - slope).abs() / size;
                assert!(error < 1e-6, "{name}: slope {slope} of input {index}, measured {measured}");
            }
        }
    }
}

/// The exact results do not depend on the types that operands are stored in, except for their rounding.
#[test]
fn exact_results_are_those_of_autograd_and_finite_differences() {
    let mut compared = 0;
    for Case { operation, .. } in cases().into_iter().filter(|case| !format!("{case:?}").contains("F16")) {
        let exact = Case::from(operation).exact(1).unwrap();
        if let Some(plain) = plain(operation, &exact) {
            plain.check(&format!("{operation:?}"));
            compared += 1;
        }
    }
    assert!(compared > 150, "{compared}");
}

/// Values between -1 and 1 in no order, the same in every run.
fn pattern(shape: &[usize], salt: u64) -> Tensor {
    let count: usize = shape.iter().product();
    let entry = |i: u64| {
        // The finalizer of SplitMix64: neighbors get unrelated values, so that no sum cancels by its pattern.
        let mut bits = (i + 1 + (salt << 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((bits >> 40) as f32 / (1 << 23) as f32) - 1.0
    };
    Tensor::from_vec((0..count as u64).map(entry).collect(), shape, &Device::Cpu).unwrap()
}

fn allocate(shape: &[usize], dtype: DType) -> Result<Tensor> {
    zeros(shape, dtype, &Device::Cpu)
}

/// In one tile and in several, with rows that are no targets, and with scaled logits.
#[test]
fn heads_with_cross_entropy() {
    // Rounding each value once gives 2e-4 in FP16 and 1.7e-3 in BF16, and the logits' gradient is rounded as well.
    for (dtype, tolerance) in TYPES.into_iter().zip([1e-6, 6e-4, 5e-3]) {
        for (rows, width, vocab, tiles, scale, softcap) in [
            (1, 8, 5, 1, 1.0_f32, None),
            (21, 24, 50, 3, 0.3, None),
            (21, 24, 50, 1, 1.0, None),
            (21, 24, 50, 2, 0.7, Some(3.0_f32)),
            (64, 48, 257, 2, 1.0, None),
        ] {
            let ids: Vec<i64> =
                (0..rows).map(|i| if i % 5 == 3 { reference::IGNORED } else { (i * 7 % vocab) as i64 }).collect();
            let targets: Vec<u32> = ids.iter().map(|&id| u32::try_from(id).unwrap_or(IGNORE)).collect();
            let count = targets.iter().filter(|&&target| target != IGNORE).count() as f64;
            let ids = Tensor::from_vec(ids, (1, rows), &Device::Cpu).unwrap();
            let inputs = [pattern(&[rows, width], 1), pattern(&[vocab, width], 2)];
            let [x, weight] = inputs.map(|input| input.to_dtype(dtype).unwrap());
            let [x64, weight64] = [&x, &weight].map(|x| Var::from_tensor(&x.to_dtype(DType::F64).unwrap()).unwrap());
            let logits = reference::linear(&x64, &weight64, None).unwrap().unsqueeze(0).unwrap();
            let logits = reference::soft_cap((logits * f64::from(scale)).unwrap(), softcap.map(f64::from)).unwrap();
            let truth = (reference::cross_entropy(&logits, &ids).unwrap() * count).unwrap();
            let store = truth.backward().unwrap();
            let weights: Vec<f32> = (0..rows).map(|row| (row % 4) as f32 - 1.5).collect();
            let weighted = |row: usize| {
                let [logits, ids] = [&logits, &ids].map(|x| x.narrow(1, row, 1).unwrap());
                (reference::cross_entropy(&logits, &ids).unwrap() * f64::from(weights[row])).unwrap()
            };
            let targeted: Vec<Tensor> = (0..rows).filter(|&row| targets[row] != IGNORE).map(weighted).collect();
            let weighted_store = Tensor::stack(&targeted, 0).unwrap().sum_all().unwrap().backward().unwrap();
            for kernels in KERNELS {
                let workspace =
                    CrossEntropyWorkspace::with_tiles(tiles, [rows, vocab, width], dtype, Some(dtype), &allocate)
                        .unwrap();
                let [dx, dweight] = [&x, &weight].map(|x| x.zeros_like().unwrap());
                let gradient = HeadGradient { seed: 0.5, weights: None, dx: &dx, dweight: Some(&dweight) };
                let input = HeadInput { x: &x, weight: &weight, scale, softcap };
                let head = |gradient| {
                    cross_entropy::write_losses(kernels, input, &targets, &workspace, gradient, None).unwrap();
                    workspace.total_loss().unwrap()
                };
                let loss = head(Some(gradient));
                assert_eq!(loss, head(None));
                let compare = |found: &Tensor, truth: &Tensor, what: &str| {
                    let error = relative(found, truth);
                    let name = kernels.name();
                    assert!(error <= tolerance, "{what} of {rows} × {vocab} in {dtype:?} by {name}: {error:.1e}");
                };
                compare(&Tensor::new(loss, &Device::Cpu).unwrap(), &truth.detach(), "loss");
                let half = |store: &GradStore, variable: &Var| (store.get(variable).unwrap() * 0.5).unwrap();
                compare(&dx, &half(&store, &x64), "dx");
                compare(&dweight, &half(&store, &weight64), "dweight");
                assert_eq!(loss, head(Some(HeadGradient { weights: Some(&weights), ..gradient })));
                compare(&dx, &half(&weighted_store, &x64), "weighted dx");
                compare(&dweight, &half(&weighted_store, &weight64), "weighted dweight");
            }
        }
    }
}

#[test]
fn the_scale_of_embeddings_is_rounded_to_their_type() {
    // √640 is 25.298: BF16 has 25.25, and FP16 25.297.
    assert_eq!(TYPES.map(|dtype| scale_of_width(640, dtype)), [640f32.sqrt(), 25.296_875, 25.25]);
}

/// All columns of three matrices.
fn separate(tensors: &[Tensor; 3]) -> [ColumnSlice<'_>; 3] {
    tensors.each_ref().map(|tensor| ColumnSlice::all(tensor).unwrap())
}

/// Output and gradients of attention on separate buffers.
fn attend(
    kernels: &dyn Kernels,
    shape: AttentionShape,
    documents: Option<&[u32]>,
    inputs: &[Tensor; 3],
    dout: &Tensor,
) -> Result<(Tensor, [Tensor; 3])> {
    let out = dout.zeros_like()?;
    let gradients = inputs.each_ref().map(|x| x.zeros_like().unwrap());
    let lse = &allocate(&[shape.batch * shape.heads * shape.seq_len], DType::F32)?;
    let operands = AttentionInputs { qkv: separate(inputs), documents, dropout: None, sinks: None };
    op::Attention { shape, operands, out: &out, lse }.run(kernels)?;
    let out = &out;
    let into = separate(&gradients);
    op::AttentionBackward { shape, operands, dout, out, lse, gradients: into, dsinks: None }.run(kernels)?;
    Ok((out.clone(), gradients))
}

/// Documents that share a sequence get the results of each document alone, with positions starting at 0.
#[test]
fn packed_documents_are_computed_as_if_alone() {
    let table = cases::angles(5, 64).unwrap();
    let lengths = [13, 1, 23];
    let seq_len = 37;
    let inputs = [40, 20, 20].map(|width| (pattern(&[seq_len, width], width as u64) * 2.0).unwrap());
    let dy = pattern(&[seq_len, 40], 9);
    let starts: Vec<u32> = [(0, 13), (13, 1), (14, 23)].iter().flat_map(|&(start, len)| vec![start; len]).collect();
    for kernels in KERNELS {
        let run = |inputs: &[Tensor; 3], dy: &Tensor, seq_len: usize, documents: Option<&[u32]>| {
            let positions = PositionIds { seq_len, past: 0, documents };
            let turn = |x: &Tensor, direction| {
                let x = x.copy().unwrap();
                let columns = ColumnSlice::all(&x).unwrap();
                op::Rotate { x: columns, table: &table, positions, direction }.run(kernels).unwrap();
                x
            };
            let [queries, keys, values] = inputs;
            let turned = [turn(queries, Direction::Forward), turn(keys, Direction::Forward), values.clone()];
            let shape = AttentionShape { kv_heads: 2, scale: 0.3, ..AttentionShape::new(1, seq_len, 4, 10) };
            let (out, [dq, dk, dv]) = attend(kernels, shape, documents, &turned, dy).unwrap();
            [out, turn(&dq, Direction::Backward), turn(&dk, Direction::Backward), dv]
        };
        let together = run(&inputs, &dy, seq_len, Some(&starts));
        let mut first = 0;
        for length in lengths {
            let part = |x: &Tensor| x.narrow(0, first, length).unwrap().contiguous().unwrap();
            for (alone, together) in run(&inputs.each_ref().map(part), &part(&dy), length, None).iter().zip(&together) {
                let size = |x: &Tensor| values(x).iter().map(|x| x * x).sum::<f64>().sqrt();
                // Queries and keys of a document of one token have no gradient: compare their rounding with the
                // others'.
                let scale = size(if length == 1 { together } else { alone });
                let error = size(&(part(together) - alone).unwrap());
                assert!(error < 1e-6 * scale, "{length} tokens by {}", kernels.name());
            }
            first += length;
        }
    }
}

/// A gradient that is added to a residual stream equals the sum of both.
#[test]
fn an_rms_norms_gradient_joins_the_stream() {
    let [x, dy, stream] = [1, 2, 3].map(|salt| pattern(&[5, 24], salt));
    let weight = &pattern(&[24], 4);
    let settings = NormSettings { norm: NormKind::Rms { unit_offset: false }, eps: 1e-5 };
    for kernels in KERNELS {
        let all = |tensor| ColumnSlice::all(tensor).unwrap();
        let y = x.zeros_like().unwrap();
        let rstd = &allocate(&[5], DType::F32).unwrap();
        op::Norm { settings, x: all(&x), weight, bias: None, y: all(&y), mean: None, rstd }.run(kernels).unwrap();
        let (alone, joined) = (dy.zeros_like().unwrap(), stream.copy().unwrap());
        let dweight = Some(weight.zeros_like().unwrap());
        for (dx, mode) in [(&alone, WriteMode::Overwrite), (&joined, WriteMode::Accumulate)] {
            let x = all(&x);
            let dy = all(&dy);
            let dx = all(dx);
            let dweight = dweight.as_ref();
            let backward =
                op::NormBackward { settings, dy, x, weight, mean: None, rstd, dx, mode, dweight, dbias: None };
            backward.run(kernels).unwrap();
        }
        assert!(relative(&joined, &(alone + &stream).unwrap()) < 1e-7, "{}", kernels.name());
    }
}

/// Keys that no query of a block can see are not even read by the fused kernels: they are NaN here, which any
/// arithmetic would spread.
#[test]
fn keys_outside_of_the_window_are_not_computed() {
    let shape = AttentionShape { kv_heads: 1, window: Some(16), ..AttentionShape::new(1, 96, 2, 8) };
    let [queries, keys, values_, dy] = [16, 8, 8, 16].map(|width| pattern(&[96, width], width as u64));
    let poison = |x: &Tensor| {
        let nan = Tensor::full(f32::NAN, (32, 8), &Device::Cpu).unwrap();
        Tensor::cat(&[nan, x.narrow(0, 32, 64).unwrap()], 0).unwrap()
    };
    let poisoned = [queries.clone(), poison(&keys), poison(&values_)];
    let rows = |outcome: &Tensor| values(&outcome.narrow(0, 48, 48).unwrap());
    let (out, gradients) = attend(&Fused, shape, None, &poisoned, &dy).unwrap();
    let (clean_out, clean_gradients) = attend(&Fused, shape, None, &[queries, keys, values_], &dy).unwrap();
    assert_eq!(rows(&out), rows(&clean_out));
    assert_eq!(rows(&gradients[0]), rows(&clean_gradients[0]));
}

#[test]
fn positions_that_are_not_there_are_refused() {
    let x = allocate(&[14, 4], DType::F32).unwrap();
    let table = &cases::angles(2, 13).unwrap();
    let positions = PositionIds { seq_len: 14, past: 0, documents: None };
    for kernels in KERNELS {
        let x = ColumnSlice::all(&x).unwrap();
        assert!(op::Rotate { x, table, positions, direction: Direction::Forward }.run(kernels).is_err());
    }
    // A document's start that lies ahead, or goes back.
    let inputs = [(); 3].map(|()| pattern(&[37, 8], 1));
    for starts in [vec![1; 37], (0..37).map(|t| u32::from(t == 3)).collect()] {
        for kernels in KERNELS {
            assert!(attend(kernels, AttentionShape::new(1, 37, 1, 8), Some(&starts), &inputs, &inputs[0]).is_err());
        }
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let on = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let all = KERNELS.into_iter().flat_map(|kernels| cases().into_iter().map(move |case| (kernels, case)));
            let results = all.flat_map(|(kernels, case)| case.compute(kernels, &Device::Cpu, 2).unwrap());
            results.map(|result| values(&result).into_iter().map(f64::to_bits).collect()).collect::<Vec<Vec<u64>>>()
        })
    };
    let one = on(1);
    for threads in [2, 3, 7] {
        let different = on(threads).iter().zip(&one).filter(|(result, one)| result != one).count();
        assert_eq!(different, 0, "results on {threads} threads");
    }
}
