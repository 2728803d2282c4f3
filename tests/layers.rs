//! Every layer of GPT-2 as `common/layer.rs` compares it: with plain operations, autograd and finite differences.
#![allow(clippy::unwrap_used, reason = "a test stops at the first thing that is not as it should be")]

mod common {
    pub(crate) mod compare;
    pub(crate) mod layer;
    pub(crate) mod oracle;
}

use candle_core::{DType, Device, Result, Tensor};
use common::compare::values;
use common::layer::{Layer, flat, like, pattern};
use common::oracle;
use finetune::engine::kernels::attention::{self, Operands, Shape};
use finetune::engine::kernels::columns::{Columns, Store};
use finetune::engine::kernels::cross_entropy::{HeadGradient, HeadWorkspace, IGNORE, head};
use finetune::engine::kernels::embedding::{self, Tables};
use finetune::engine::kernels::linear::{self, Weight};
use finetune::engine::kernels::view::zeros;
use finetune::engine::kernels::{gelu, layer_norm, residual};

#[test]
fn linear_layers() {
    for (rows, inner, columns) in [(1, 1, 1), (5, 24, 72), (33, 64, 17), (70, 130, 96)] {
        Layer {
            name: &format!("linear {rows}×{inner}×{columns}"),
            inputs: vec![pattern(&[rows, inner], 1), pattern(&[inner, columns], 2), pattern(&[columns], 3)],
            plain: &|inputs| oracle::linear(&inputs[0], &inputs[1], &inputs[2]),
            engine: &|inputs, dy| {
                let (y, gradients) = (like(dy)?, inputs.iter().map(like).collect::<Result<Vec<_>>>()?);
                linear::forward(&inputs[0], Weight::in_out(&inputs[1]), Some(&inputs[2]), &y)?;
                linear::backward_weight(&inputs[0], dy, Weight::in_out(&gradients[1]), Some(&gradients[2]))?;
                linear::backward_input(dy, Weight::in_out(&inputs[1]), &gradients[0], Store::Overwrite)?;
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
                let shape = Shape::new(batch, seq_len, heads, head_size);
                let (qkv, dy) = (flat(&inputs[0])?, flat(dy)?);
                let (out, dqkv) = (like(&dy)?, like(&qkv)?);
                let lse = zeros(&[batch * heads * seq_len], DType::F32, &Device::Cpu)?;
                let operands = Operands::packed(&shape, &qkv, None)?;
                attention::forward(&shape, &operands, &out, &lse)?;
                let gradients = Columns::split(&dqkv, shape.widths())?;
                attention::backward(&shape, &operands, &dy, &out, &lse, gradients)?;
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
            let tables = Tables { tokens: &inputs[0], positions: Some(&inputs[1]), scale: 1.0 };
            embedding::forward(tables, &ids, seq_len, None, &out)?;
            let mut order = vec![0; ids.len()];
            let tables = Tables { tokens: &gradients[0], positions: Some(&gradients[1]), scale: 1.0 };
            embedding::backward(&flat(dy)?, &ids, seq_len, None, &mut order, tables)?;
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
