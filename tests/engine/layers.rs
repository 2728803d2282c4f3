//! Every layer of GPT-2 as `common/layer.rs` compares it: with plain operations, autograd and finite differences, by
//! every set of kernels. Then the behaviour that both sets must share: dropout masks, tiles of the head, surveys.

use crate::common::compare::{relative, values};
use crate::common::layer::{KERNELS, Layer, allocate, flat, like, pattern, tolerance};
use crate::common::oracle;
use candle_core::{DType, Device, Result, Tensor};
use finetune::engine::kernels::attention::{Operands, Shape};
use finetune::engine::kernels::columns::{Columns, WriteMode};
use finetune::engine::kernels::cross_entropy::{self, HeadGradient, HeadWorkspace, IGNORE};
use finetune::engine::kernels::dropout::Dropout;
use finetune::engine::kernels::op::{self, Embedding};
use finetune::engine::kernels::{Activation, Kernels, Norm, NormSettings, Normed, WeightLayout};

#[test]
fn linear_layers() {
    for (rows, inner, columns) in [(1, 1, 1), (5, 24, 72), (33, 64, 17), (70, 130, 96)] {
        Layer {
            name: &format!("linear {rows}×{inner}×{columns}"),
            inputs: vec![pattern(&[rows, inner], 1), pattern(&[inner, columns], 2), pattern(&[columns], 3)],
            plain: &|inputs| oracle::linear(&inputs[0], &inputs[1], &inputs[2]),
            engine: &|kernels, inputs, dy| {
                let (y, gradients) = (like(dy)?, inputs.iter().map(like).collect::<Result<Vec<_>>>()?);
                let layout = WeightLayout::InOut;
                op::Linear { layout, x: &inputs[0], weight: &inputs[1], bias: Some(&inputs[2]), y: &y, low_rank: None }
                    .run(kernels)?;
                op::linear_weight_gradient(kernels, layout, [&inputs[0], dy], &gradients[1], Some(&gradients[2]))?;
                op::Linear {
                    layout: layout.transposed(),
                    x: dy,
                    weight: &inputs[1],
                    bias: None,
                    low_rank: None,
                    y: &gradients[0],
                }
                .run(kernels)?;
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
            engine: &|kernels, inputs, dy| {
                let gradients = inputs.iter().map(like).collect::<Result<Vec<_>>>()?;
                let settings = NormSettings { norm: Norm::Layer, eps: EPSILON as f32 };
                let normed = Normed::lay_out(Norm::Layer, rows, width, dy.dtype(), &allocate)?;
                let [x, weight, bias] = inputs else { unreachable!() };
                op::Norm {
                    settings,
                    x: Columns::all(x)?,
                    weight,
                    bias: Some(bias),
                    y: Columns::all(&normed.out)?,
                    mean: normed.mean.as_ref(),
                    rstd: &normed.rstd,
                }
                .run(kernels)?;
                let [dx, dweight, dbias] = &gradients[..] else { unreachable!() };
                op::NormBackward {
                    settings,
                    dy: Columns::all(dy)?,
                    x: Columns::all(x)?,
                    weight,
                    mean: normed.mean.as_ref(),
                    rstd: &normed.rstd,
                    dx: Columns::all(dx)?,
                    mode: WriteMode::Accumulate,
                    dweight: Some(dweight),
                    dbias: Some(dbias),
                }
                .run(kernels)?;
                Ok((normed.out, gradients))
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
            engine: &|kernels, inputs, dy| {
                let (y, again, dx) = (like(dy)?, like(dy)?, dy.copy()?);
                op::Activate { activation: Activation::Gelu, x: &inputs[0], y: &y }.run(kernels)?;
                op::ActivateBackward { activation: Activation::Gelu, x: &inputs[0], dy: &dx, dx: &dx, y: &again }
                    .run(kernels)?;
                assert!(relative(&again, &y) == 0.0);
                Ok((again, vec![dx]))
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
            engine: &|kernels, inputs, dy| {
                let shape = Shape::new(batch, seq_len, heads, head_size);
                let (qkv, dy) = (flat(&inputs[0])?, flat(dy)?);
                let (out, dqkv) = (like(&dy)?, like(&qkv)?);
                let lse = allocate(&[batch * heads * seq_len], DType::F32)?;
                let operands = Operands::packed(&shape, &qkv, None)?;
                op::Attention { shape, operands, out: &out, lse: &lse }.run(kernels)?;
                let gradients = Columns::split(&dqkv, shape.widths())?;
                op::AttentionBackward { shape, operands, dout: &dy, out: &out, lse: &lse, gradients }.run(kernels)?;
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
        engine: &|kernels, inputs, dy| {
            let out = like(&flat(dy)?)?;
            let gradients = inputs.iter().map(like).collect::<Result<Vec<_>>>()?;
            let (table, positions) = (&inputs[0], Some(&inputs[1]));
            let embedding =
                Embedding { table, positions, ids: &ids, seq_len, documents: None, scale: 1.0, dropout: None };
            op::Embed { input: embedding, out: &out }.run(kernels)?;
            let mut order = vec![0; ids.len()];
            op::EmbedBackward {
                input: embedding,
                dx: &flat(dy)?,
                order: &mut order,
                dtable: &gradients[0],
                dpositions: Some(&gradients[1]),
            }
            .run(kernels)?;
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
        engine: &|kernels, inputs, dy| {
            let (out, branch) = (like(dy)?, like(dy)?);
            op::AddBranch { stream: &inputs[0], branch: &inputs[1], dropout: None, out: &out }.run(kernels)?;
            op::Copy { x: dy, dropout: None, out: &branch }.run(kernels)?;
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
            engine: &|kernels, inputs, seed| {
                let (x, weight) = (&inputs[0], &inputs[1]);
                let seed = values(seed)[0] as f32;
                let dtype = x.dtype();
                let workspace = HeadWorkspace::lay_out(rows, vocab, width, dtype, Some(dtype), &allocate)?;
                let (dx, dweight) = (like(x)?, like(weight)?);
                let gradient = HeadGradient { seed, dx: &dx, dweight: Some(&dweight) };
                let loss = cross_entropy::head(kernels, x, weight, &targets, &workspace, Some(gradient), None)?;
                assert_eq!(loss, cross_entropy::head(kernels, x, weight, &targets, &workspace, None, None)?);
                Ok((Tensor::new(loss as f32, &Device::Cpu)?, vec![dx, dweight]))
            },
        }
        .check();
    }
}

/// Runs the same operations with each set of kernels and asserts that their results agree within the type's tolerance.
fn agree(dtype: DType, run: &dyn Fn(&dyn Kernels) -> Result<Vec<Tensor>>) {
    let [fused, plain] = KERNELS.map(|kernels| run(kernels).unwrap());
    for (index, (fused, plain)) in fused.iter().zip(&plain).enumerate() {
        let error = relative(plain, fused);
        assert!(error <= tolerance(dtype), "result {index} in {dtype:?} is {error:.1e} away");
    }
}

/// Masks come from the project's counter-based stream: both sets of kernels drop the same elements, forward and back.
#[test]
fn dropout_masks_are_the_same_for_all_kernels() {
    let (batch, seq_len, heads, head_size) = (2, 9, 2, 8);
    let (width, dropout) = (heads * head_size, Dropout::new(0.3, 5, 6, 7));
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let values = |shape: &[usize], salt| pattern(shape, salt).to_dtype(dtype);
        agree(dtype, &|kernels| {
            let shape = Shape::new(batch, seq_len, heads, head_size);
            let tokens = batch * seq_len;
            let (qkv, dy) = (values(&[tokens, 3 * width], 1)?, values(&[tokens, width], 2)?);
            let (out, dqkv, lse) = (like(&dy)?, like(&qkv)?, allocate(&[tokens * heads], DType::F32)?);
            let operands = Operands::packed(&shape, &qkv, dropout)?;
            op::Attention { shape, operands, out: &out, lse: &lse }.run(kernels)?;
            let gradients = Columns::split(&dqkv, shape.widths())?;
            op::AttentionBackward { shape, operands, dout: &dy, out: &out, lse: &lse, gradients }.run(kernels)?;
            let (sum, branch) = (like(&dy)?, like(&dy)?);
            op::AddBranch { stream: &out, branch: &dy, dropout, out: &sum }.run(kernels)?;
            op::Copy { x: &dy, dropout, out: &branch }.run(kernels)?;
            let (table, positions) = (values(&[13, width], 3)?, values(&[seq_len + 2, width], 4)?);
            let ids: Vec<u32> = (0..tokens).map(|i| (i * i % 11) as u32).collect();
            let (table, positions) = (&table, Some(&positions));
            let embedding = Embedding { table, positions, ids: &ids, seq_len, documents: None, scale: 1.5, dropout };
            let (x, dtable, dpositions) =
                (like(&dy)?, values(&[13, width], 5)?, allocate(&[seq_len + 2, width], dtype)?);
            op::Embed { input: embedding, out: &x }.run(kernels)?;
            op::EmbedBackward {
                input: embedding,
                dx: &dy,
                order: &mut vec![0; tokens],
                dtable: &dtable,
                dpositions: Some(&dpositions),
            }
            .run(kernels)?;
            Ok(vec![out, lse, dqkv, sum, branch, x, dtable, dpositions])
        });
    }
}

/// A head that needs several tiles, with rows that are no targets, against one that needs one.
#[test]
fn tiles_of_the_head_sum_up() {
    let (rows, width, vocab) = (10, 24, 50);
    let targets: Vec<u32> = (0..rows).map(|i| if i % 4 == 1 { IGNORE } else { (i * 7 % vocab) as u32 }).collect();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let (x, weight) = (pattern(&[rows, width], 1).to_dtype(dtype).unwrap(), pattern(&[vocab, width], 2));
        let weight = weight.to_dtype(dtype).unwrap();
        for tiles in [3, 1] {
            agree(dtype, &|kernels| {
                let (dx, dweight) = (like(&x)?, like(&weight)?);
                let workspace = HeadWorkspace::with_tiles(tiles, [rows, vocab, width], dtype, Some(dtype), &allocate)?;
                let gradient = HeadGradient { seed: 0.5, dx: &dx, dweight: Some(&dweight) };
                let loss = cross_entropy::head(kernels, &x, &weight, &targets, &workspace, Some(gradient), None)?;
                Ok(vec![Tensor::new(&[loss], &Device::Cpu)?, dx, dweight])
            });
        }
    }
}

/// Values that are not finite must be seen: a maximum that drops NaN, as CUDA's does, would hide them.
#[test]
fn surveys_count_alike() {
    let special = [0.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-40, -1e-7, 6e-5, 65504.0, 1e20, -3e38];
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (count, factor) in [(1, 1.0), (10, 1.0), (1024, 1e-30), (5000, 1.0), (70_000, 1e25)] {
            let mut values =
                (pattern(&[count], 9).to_dtype(DType::F32).unwrap() * factor).unwrap().to_vec1::<f32>().unwrap();
            for with_special in [false, true] {
                if with_special {
                    for (i, value) in special.iter().enumerate() {
                        let at = i * 997 % count;
                        values[at] = *value;
                    }
                }
                let tensor = Tensor::from_slice(&values, count, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
                let format = finetune::engine::kernels::view::float_format(dtype);
                let [fused, plain] = KERNELS.map(|kernels| kernels.survey(&tensor, format, false).unwrap().stats);
                let counts = |s: finetune::precision::TensorStats| (s.count, s.zero, s.subnormal, s.inf, s.nan);
                assert_eq!(counts(fused), counts(plain), "{dtype:?} × {count} × {factor}");
                assert_eq!((fused.min_nonzero, fused.max_abs), (plain.min_nonzero, plain.max_abs));
                let error = (plain.norm() - fused.norm()).abs();
                assert!(error <= 1e-6 * fused.norm(), "{dtype:?} × {count}: {} and {}", plain.norm(), fused.norm());
                if fused.is_finite() {
                    let [fused_sum, plain_sum] = KERNELS.map(|kernels| kernels.sum(&tensor).unwrap());
                    assert!((fused_sum - plain_sum).abs() <= 1e-12 * fused.norm() * count as f64);
                }
            }
        }
    }
}
