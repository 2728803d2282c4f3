//! Every layer's forward and backward pass against candle's autograd on plain operations, and against finite differences.
//!
//! A layer is compared three ways on the same inputs: with the plain operation's value, with its gradients by autograd
//! in FP32, and with central differences of it in FP64. In FP16 and BF16 it is compared with the plain operation in FP32
//! on the same rounded inputs: what is left is the rounding of what the layer stores.
#![allow(clippy::unwrap_used, reason = "a test stops at the first thing that is not as it should be")]

mod common {
    pub(crate) mod compare;
    pub(crate) mod oracle;
}

use candle_core::{DType, Device, Result, Tensor, Var};
use common::compare::{relative, values};
use common::oracle;
use finetune::engine::kernels::cross_entropy::{HeadGradient, HeadWorkspace, IGNORE, head};
use finetune::engine::kernels::view::zeros;
use finetune::engine::kernels::{attention, embedding, gelu, layer_norm, linear, residual};

/// A layer's forward value, and its inputs' gradients in the order of the inputs.
type Outcome = (Tensor, Vec<Tensor>);

/// One layer at one shape.
struct Layer<'a> {
    name: &'a str,
    inputs: Vec<Tensor>,
    /// The layer in plain differentiable operations.
    plain: &'a dyn Fn(&[Tensor]) -> Result<Tensor>,
    /// The engine's layer, given its inputs and the gradient of its output.
    engine: &'a dyn Fn(&[Tensor], &Tensor) -> Result<Outcome>,
}

/// How far stored results may be from exact ones, relatively: rounding each value once gives 2e-4 in FP16 and 1.7e-3 in
/// BF16; the head rounds its logits' gradient as well.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 1e-6,
        DType::F16 => 6e-4,
        _ => 5e-3,
    }
}

impl Layer<'_> {
    /// Runs all comparisons, in all types the engine stores.
    fn check(self) {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            // What both sides start from: values that the type can hold.
            let stored: Vec<Tensor> = self.inputs.iter().map(|input| input.to_dtype(dtype).unwrap()).collect();
            let rounded: Vec<Tensor> = stored.iter().map(|input| input.to_dtype(DType::F32).unwrap()).collect();
            let shape = (self.plain)(&rounded).unwrap().shape().clone();
            let seed = pattern(shape.dims(), 77).to_dtype(dtype).unwrap();
            let (value, gradients) = (self.engine)(&stored, &seed).unwrap();
            let seed = seed.to_dtype(DType::F32).unwrap();
            let (plain_value, plain_gradients) = self.autograd(&rounded, &seed);
            self.compare(dtype, "value", &value, &plain_value);
            assert_eq!(gradients.len(), plain_gradients.len());
            for (index, (gradient, plain)) in gradients.iter().zip(&plain_gradients).enumerate() {
                self.compare(dtype, &format!("gradient {index}"), gradient, plain);
            }
            if dtype == DType::F32 {
                self.compare_with_differences(&gradients, &seed);
            }
        }
    }

    fn autograd(&self, inputs: &[Tensor], seed: &Tensor) -> Outcome {
        let variables: Vec<Var> = inputs.iter().map(|input| Var::from_tensor(input).unwrap()).collect();
        let inputs: Vec<Tensor> = variables.iter().map(|variable| variable.as_tensor().clone()).collect();
        let value = (self.plain)(&inputs).unwrap();
        let mut store = (&value * seed).unwrap().sum_all().unwrap().backward().unwrap();
        let gradients = variables.iter().map(|variable| store.remove(variable).unwrap()).collect();
        (value.detach(), gradients)
    }

    fn compare(&self, dtype: DType, what: &str, value: &Tensor, truth: &Tensor) {
        let error = relative(&value.reshape(truth.shape()).unwrap(), truth);
        let tolerance = tolerance(dtype);
        assert!(
            error <= tolerance,
            "{} in {dtype:?}: {what} is {error:.1e} away, more than {tolerance:.0e}",
            self.name
        );
    }

    /// Slopes of the plain operation in FP64 along a few directions of each input.
    fn compare_with_differences(&self, gradients: &[Tensor], seed: &Tensor) {
        const STEP: f64 = 1e-4;
        let double = |tensor: &Tensor| tensor.to_dtype(DType::F64).unwrap();
        let seed = double(seed);
        let inputs: Vec<Tensor> = self.inputs.iter().map(double).collect();
        for (index, gradient) in gradients.iter().enumerate() {
            let size = values(gradient).iter().map(|g| g * g).sum::<f64>().sqrt();
            for salt in 0..3 {
                let direction = double(&pattern(inputs[index].dims(), salt));
                let length = values(&direction).iter().map(|d| d * d).sum::<f64>().sqrt();
                let direction = (direction / length).unwrap();
                let value_at = |step: f64| {
                    let mut inputs = inputs.clone();
                    inputs[index] = (&inputs[index] + (&direction * step).unwrap()).unwrap();
                    let value = ((self.plain)(&inputs).unwrap() * &seed).unwrap();
                    value.sum_all().unwrap().to_scalar::<f64>().unwrap()
                };
                let measured = (value_at(STEP) - value_at(-STEP)) / (2.0 * STEP);
                let gradient = gradient.reshape(direction.shape()).unwrap();
                let slope = (double(&gradient) * &direction).unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap();
                let error = (measured - slope).abs() / size;
                assert!(error < 1e-5, "{}: slope {slope} of input {index}, measured {measured}", self.name);
            }
        }
    }
}

/// Values between -1 and 1 in no order, the same in every run.
fn pattern(shape: &[usize], salt: u64) -> Tensor {
    let count: usize = shape.iter().product();
    let entry = |i: u64| {
        // The finaliser of SplitMix64: neighbours get unrelated values, so that no sum cancels by its pattern.
        let mut bits = (i + 1 + (salt << 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((bits >> 40) as f32 / (1 << 23) as f32) - 1.0
    };
    Tensor::from_vec((0..count as u64).map(entry).collect(), shape, &Device::Cpu).unwrap()
}

fn like(tensor: &Tensor) -> Result<Tensor> {
    zeros(tensor.dims(), tensor.dtype(), &Device::Cpu)
}

fn flat(tensor: &Tensor) -> Result<Tensor> {
    tensor.reshape(((), tensor.dims().last().copied().unwrap_or(1)))?.contiguous()
}

#[test]
fn linear_layers() {
    for (rows, inner, columns) in [(1, 1, 1), (5, 24, 72), (33, 64, 17), (70, 130, 96)] {
        Layer {
            name: &format!("linear {rows}×{inner}×{columns}"),
            inputs: vec![pattern(&[rows, inner], 1), pattern(&[inner, columns], 2), pattern(&[columns], 3)],
            plain: &|inputs| oracle::linear(&inputs[0], &inputs[1], &inputs[2]),
            engine: &|inputs, dy| {
                let (y, gradients) = (like(dy)?, inputs.iter().map(like).collect::<Result<Vec<_>>>()?);
                linear::forward(&inputs[0], &inputs[1], &inputs[2], &y)?;
                linear::backward_weight(&inputs[0], dy, &gradients[1], &gradients[2])?;
                linear::backward_input(dy, &inputs[1], &gradients[0])?;
                Ok((y, gradients))
            },
        }
        .check();
    }
}

#[test]
fn layer_norms() {
    const EPSILON: f64 = 1e-5;
    for (rows, width) in [(1, 8), (7, 24), (40, 65), (3, 768)] {
        Layer {
            name: &format!("layer norm {rows}×{width}"),
            inputs: vec![pattern(&[rows, width], 1), pattern(&[width], 2), pattern(&[width], 3)],
            plain: &|inputs| oracle::layer_norm(&inputs[0], &inputs[1], &inputs[2], EPSILON),
            engine: &|inputs, dy| {
                let (y, gradients) = (like(dy)?, inputs.iter().map(like).collect::<Result<Vec<_>>>()?);
                let statistic = || zeros(&[rows], DType::F32, &Device::Cpu);
                let (mean, rstd) = (statistic()?, statistic()?);
                let [x, weight, bias] = inputs else { unreachable!() };
                layer_norm::forward(x, weight, bias, EPSILON as f32, &y, &mean, &rstd)?;
                let [dx, dweight, dbias] = &gradients[..] else { unreachable!() };
                layer_norm::backward(dy, x, weight, &mean, &rstd, dx, dweight, dbias)?;
                Ok((y, gradients))
            },
        }
        .check();
    }
}

#[test]
fn gelus() {
    for (rows, width) in [(1, 3), (9, 31), (64, 192)] {
        Layer {
            name: &format!("gelu {rows}×{width}"),
            inputs: vec![(pattern(&[rows, width], 1) * 4.0).unwrap()],
            plain: &|inputs| oracle::gelu(&inputs[0]),
            engine: &|inputs, dy| {
                let (y, dx) = (like(dy)?, dy.copy()?);
                gelu::forward(&inputs[0], &y)?;
                gelu::backward(&inputs[0], &dx)?;
                Ok((y, vec![dx]))
            },
        }
        .check();
    }
}

#[test]
fn attentions() {
    for (batch, seq_len, heads, head_size) in [(1, 1, 1, 8), (2, 11, 3, 8), (2, 33, 2, 16), (1, 131, 1, 64)] {
        let width = heads * head_size;
        Layer {
            name: &format!("attention {batch}×{seq_len}, {heads} heads of {head_size}"),
            inputs: vec![pattern(&[batch, seq_len, 3 * width], 1)],
            plain: &|inputs| oracle::attention(&inputs[0], heads),
            engine: &|inputs, dy| {
                let shape = attention::Shape { batch, seq_len, heads, head_size };
                let (qkv, dy) = (flat(&inputs[0])?, flat(dy)?);
                let (out, dqkv) = (like(&dy)?, like(&qkv)?);
                let lse = zeros(&[batch * heads * seq_len], DType::F32, &Device::Cpu)?;
                attention::forward(shape, &qkv, None, &out, &lse)?;
                attention::backward(shape, &dy, &qkv, &out, &lse, None, &dqkv)?;
                Ok((out, vec![dqkv]))
            },
        }
        .check();
    }
}

#[test]
fn embeddings() {
    let (vocab, context, width, batch, seq_len) = (13, 9, 24, 3, 7);
    // Some tokens come up several times, some never.
    let ids: Vec<u32> = (0..batch * seq_len).map(|i| (i * i % 11) as u32).collect();
    let tokens = Tensor::from_vec(ids.clone(), (batch, seq_len), &Device::Cpu).unwrap();
    Layer {
        name: "embedding",
        inputs: vec![pattern(&[vocab, width], 1), pattern(&[context, width], 2)],
        plain: &|inputs| oracle::embed(&tokens, &inputs[0], &inputs[1]),
        engine: &|inputs, dy| {
            let out = like(&flat(dy)?)?;
            let gradients = inputs.iter().map(like).collect::<Result<Vec<_>>>()?;
            embedding::forward(&inputs[0], &inputs[1], &ids, seq_len, None, &out)?;
            let mut order = vec![0; ids.len()];
            embedding::backward(&flat(dy)?, &ids, seq_len, None, &mut order, &gradients[0], &gradients[1])?;
            Ok((out, gradients))
        },
    }
    .check();
}

#[test]
fn residual_sums() {
    Layer {
        name: "residual",
        inputs: vec![pattern(&[19, 24], 1), pattern(&[19, 24], 2)],
        plain: &|inputs| &inputs[0] + &inputs[1],
        engine: &|inputs, dy| {
            let (out, branch) = (like(dy)?, like(dy)?);
            residual::add(&inputs[0], &inputs[1], None, &out)?;
            residual::branch_gradient(dy, None, &branch)?;
            // The stream's own gradient passes through untouched.
            Ok((out, vec![dy.clone(), branch]))
        },
    }
    .check();
}

/// The head returns the sum of the losses, so its output gradient is a factor on every one: the seed.
#[test]
fn heads_with_cross_entropy() {
    for (rows, width, vocab) in [(1, 8, 5), (21, 24, 50), (64, 48, 257)] {
        let ids: Vec<i64> =
            (0..rows).map(|i| if i % 5 == 3 { oracle::IGNORED } else { (i * 7 % vocab) as i64 }).collect();
        let targets: Vec<u32> = ids.iter().map(|&id| u32::try_from(id).unwrap_or(IGNORE)).collect();
        let count = targets.iter().filter(|&&target| target != IGNORE).count() as f64;
        let ids = Tensor::from_vec(ids, (1, rows), &Device::Cpu).unwrap();
        Layer {
            name: &format!("head {rows}×{width}, vocabulary {vocab}"),
            inputs: vec![pattern(&[rows, width], 1), pattern(&[vocab, width], 2)],
            plain: &|inputs| {
                let logits = oracle::project(&inputs[0], &inputs[1].t()?)?.unsqueeze(0)?;
                oracle::cross_entropy(&logits, &ids)? * count
            },
            engine: &|inputs, seed| {
                let (x, weight) = (&inputs[0], &inputs[1]);
                let seed = values(seed)[0] as f32;
                let workspace =
                    HeadWorkspace::lay_out(rows, vocab, width, x.dtype(), Some(x.dtype()), &|shape, dtype| {
                        Tensor::zeros(shape, dtype, &Device::Cpu)
                    })?;
                let (dx, dweight) = (like(x)?, like(weight)?);
                let gradient = HeadGradient { seed, dx: &dx, dweight: &dweight };
                let loss = head(x, weight, &targets, &workspace, Some(gradient), &mut |_, _, _| Ok(()))?;
                assert_eq!(loss, head(x, weight, &targets, &workspace, None, &mut |_, _, _| Ok(()))?);
                Ok((Tensor::new(loss as f32, &Device::Cpu)?, vec![dx, dweight]))
            },
        }
        .check();
    }
}
