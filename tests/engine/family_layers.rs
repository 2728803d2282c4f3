//! The layers of Llama-like models as `common/layer.rs` compares them: with plain operations, autograd and finite
//! differences, in every type, on odd shapes. Then what no oracle shows: windows save work, threads change no bit.

use crate::common::compare::{relative, values};
use crate::common::family_oracle::{self, Attention};
use crate::common::layer::{KERNELS, Layer, allocate, flat, like, pattern, tolerance};
use crate::common::oracle;
use candle_core::{DType, Device, Result, Tensor};
use finetune::engine::kernels::attention::{Operands, Shape};
use finetune::engine::kernels::columns::{Columns, Factor, WriteMode};
use finetune::engine::kernels::decode_attention::KeyValues;
use finetune::engine::kernels::embedding;
use finetune::engine::kernels::gated::{self, Gate};
use finetune::engine::kernels::op::{self, Embedding};
use finetune::engine::kernels::rope::{Direction, Positions, Table};
use finetune::engine::kernels::view::zeros;
use finetune::engine::kernels::{Activation, Fused, Kernels, LowRank, Norm, NormSettings, Normed, WeightLayout};

const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// A layer's output, and the gradients of its inputs.
type Outcome = (Tensor, Vec<Tensor>);

/// `x` as the columns of a wider buffer, between others that no kernel may touch.
fn between(x: &Tensor, before: usize, after: usize) -> Result<Tensor> {
    let margin = |columns| (zeros(&[x.dim(0)?, columns], x.dtype(), &Device::Cpu)? + 7.0)?.to_dtype(x.dtype());
    Tensor::cat(&[margin(before)?, x.clone(), margin(after)?], 1)?.contiguous()
}

/// The columns `first..first + count` of `buffer`, after a look at the others.
fn inner(buffer: &Tensor, first: usize, count: usize) -> Result<Tensor> {
    let columns = buffer.dim(1)?;
    for margin in [buffer.narrow(1, 0, first)?, buffer.narrow(1, first + count, columns - first - count)?] {
        assert!(values(&margin).iter().all(|&value| value == 7.0), "a kernel wrote beside its columns");
    }
    buffer.narrow(1, first, count)?.contiguous()
}

#[test]
fn rms_norms_of_rows_and_of_heads() {
    const EPSILON: f64 = 1e-5;
    // (rows, groups in a row, width of a group, the number that is added to weights)
    for (rows, groups, width, offset) in [(1, 1, 8, 0.0), (7, 1, 65, 1.0), (40, 3, 10, 0.0), (9, 4, 130, 1.0)] {
        let columns = groups * width;
        let settings = NormSettings { norm: Norm::Rms { unit_offset: offset == 1.0 }, eps: EPSILON as f32 };
        {
            Layer {
                name: &format!("RMS norm {rows}×{groups}×{width}"),
                inputs: vec![pattern(&[rows, columns], 1), pattern(&[width], 2)],
                plain: &|inputs| family_oracle::rms_norm(&inputs[0], &inputs[1], offset, EPSILON),
                engine: &|kernels, inputs, dy| {
                    let x = between(&inputs[0], 3, 2)?;
                    let x = Columns::new(&x, 3..3 + columns)?;
                    let y = between(&like(dy)?, 2, 4)?;
                    let rstd = zeros(&[rows * groups], DType::F32, &Device::Cpu)?;
                    let weight = &inputs[1];
                    op::Norm {
                        settings,
                        x,
                        weight,
                        y: Columns::new(&y, 2..2 + columns)?,
                        rstd: &rstd,
                        bias: None,
                        mean: None,
                    }
                    .run(kernels)?;
                    // What must not be read.
                    let dx = between(dy, 0, 5)?;
                    let dweight = like(&inputs[1])?;
                    let into = Columns::new(&dx, 0..columns)?;
                    op::NormBackward {
                        settings,
                        dy: Columns::all(dy)?,
                        x,
                        weight,
                        rstd: &rstd,
                        dx: into,
                        dweight: Some(&dweight),
                        mode: WriteMode::Overwrite,
                        mean: None,
                        dbias: None,
                    }
                    .run(kernels)?;
                    Ok((inner(&y, 2, columns)?, vec![inner(&dx, 0, columns)?, dweight]))
                },
            }
            .check();
        }
    }
}

#[test]
fn an_rms_norms_gradient_joins_the_streams() {
    let [x, dy, stream, weight] = [1, 2, 3, 4].map(|salt| pattern(&[5, 24], salt));
    let weight = weight.get(0).unwrap().contiguous().unwrap();
    let settings = NormSettings { norm: Norm::Rms { unit_offset: false }, eps: 1e-5 };
    for kernels in KERNELS {
        let normed = Normed::lay_out(settings.norm, 5, 24, DType::F32, &allocate).unwrap();
        op::Norm {
            settings,
            x: Columns::all(&x).unwrap(),
            weight: &weight,
            bias: None,
            y: Columns::all(&normed.out).unwrap(),
            mean: normed.mean.as_ref(),
            rstd: &normed.rstd,
        }
        .run(kernels)
        .unwrap();
        let (alone, joined, dweight) = (dy.copy().unwrap(), stream.copy().unwrap(), like(&weight).unwrap());
        for into in [(&alone, WriteMode::Overwrite), (&joined, WriteMode::Accumulate)] {
            let all = |tensor| Columns::all(tensor).unwrap();
            op::NormBackward {
                settings,
                dy: all(&dy),
                x: all(&x),
                weight: &weight,
                mean: None,
                rstd: &normed.rstd,
                dx: all(into.0),
                mode: into.1,
                dweight: Some(&dweight),
                dbias: None,
            }
            .run(kernels)
            .unwrap();
        }
        assert!(relative(&joined, &(alone + &stream).unwrap()) < 1e-7, "{}", kernels.name());
    }
}

fn table(half: usize, positions: usize) -> Table {
    let frequencies: Vec<f32> = (0..half).map(|i| 0.3f32.powi(i as i32)).collect();
    Table::new(&frequencies, 1.25, 0..positions, &Device::Cpu).unwrap()
}

#[test]
fn rotations_by_position() {
    let documents: Vec<u32> = (0..3 * 7).map(|row| if row % 7 >= 4 { 4 } else { 0 }).collect();
    for (heads, half, past, documents) in
        [(1, 1, 0, None), (3, 5, 0, None), (2, 32, 6, None), (2, 5, 0, Some(&documents[..]))]
    {
        let (seq_len, rows, columns) = (7, 21, 2 * half * heads);
        let table = table(half, 13);
        let positions = Positions { seq_len, past, documents };
        let expected = |row: usize| (past + row % seq_len - documents.map_or(0, |starts| starts[row] as usize)) as u32;
        let index = Tensor::new((0..rows).map(expected).collect::<Vec<u32>>(), &Device::Cpu).unwrap();
        let [cos, sin] = [&table.cos, &table.sin].map(|table| table.index_select(&index, 0).unwrap());
        Layer {
            name: &format!("rotation of {heads} heads of {}, {past} before", 2 * half),
            inputs: vec![pattern(&[rows, columns], 1)],
            plain: &|inputs| family_oracle::rotate(&inputs[0], &cos, &sin),
            engine: &|kernels, inputs, dy| {
                let (y, dx) = (between(&inputs[0], 2, 1)?, between(dy, 0, 3)?);
                op::Rotate {
                    x: Columns::new(&y, 2..2 + columns)?,
                    table: &table,
                    positions,
                    direction: Direction::Forward,
                }
                .run(kernels)?;
                op::Rotate {
                    x: Columns::new(&dx, 0..columns)?,
                    table: &table,
                    positions,
                    direction: Direction::Backward,
                }
                .run(kernels)?;
                Ok((inner(&y, 2, columns)?, vec![inner(&dx, 0, columns)?]))
            },
        }
        .check();
    }
    let x = zeros(&[14, 4], DType::F32, &Device::Cpu).unwrap();
    let positions = Positions { seq_len: 14, past: 0, documents: None };
    for kernels in KERNELS {
        assert!(
            op::Rotate { x: Columns::all(&x).unwrap(), table: &table(2, 13), positions, direction: Direction::Forward }
                .run(kernels)
                .is_err()
        );
    }
}

#[test]
fn gated_activations() {
    for (rows, width) in [(1, 3), (9, 31), (5, 1100)] {
        for (activation, plain) in
            [(Gate::Silu, family_oracle::silu as fn(&Tensor) -> Result<Tensor>), (Gate::Gelu, oracle::gelu)]
        {
            let inputs = vec![(pattern(&[rows, width], 1) * 4.0).unwrap(), pattern(&[rows, width], 2)];
            let plain = |inputs: &[Tensor]| plain(&inputs[0])? * &inputs[1];
            let name = format!("{activation:?} {rows}×{width}");
            Layer {
                name: &name,
                inputs: inputs.clone(),
                plain: &plain,
                engine: &|_, inputs, dy| {
                    let (y, again, dgate, dup) = (like(dy)?, like(dy)?, like(dy)?, like(dy)?);
                    let [gate, up] = [Columns::all(&inputs[0])?, Columns::all(&inputs[1])?];
                    gated::forward(activation, gate, up, &y)?;
                    let gradients = [Columns::all(&dgate)?, Columns::all(&dup)?];
                    gated::backward(activation, gate, up, dy, gradients, &again)?;
                    assert!(relative(&again, &y) == 0.0);
                    Ok((again, vec![dgate, dup]))
                },
            }
            .check();
            Layer {
                name: &format!("{name}, packed"),
                inputs,
                plain: &plain,
                engine: &|kernels, inputs, dy| {
                    let packed = Tensor::cat(&[&inputs[0], &inputs[1]], 1)?.contiguous()?;
                    let (y, again, gradient) = (like(dy)?, like(dy)?, like(&packed)?);
                    let activation =
                        if activation == Gate::Silu { Activation::GatedSilu } else { Activation::GatedGelu };
                    op::Activate { activation, x: &packed, y: &y }.run(kernels)?;
                    op::ActivateBackward { activation, x: &packed, dy, dx: &gradient, y: &again }.run(kernels)?;
                    assert!(relative(&again, &y) == 0.0);
                    Ok((again, vec![inner_half(&gradient, 0)?, inner_half(&gradient, 1)?]))
                },
            }
            .check();
        }
    }
}

#[test]
fn thin_products_beside_a_layers_own() {
    for (rows, inner, columns, rank) in [(1, 24, 72, 4), (5, 24, 72, 3), (70, 130, 96, 20)] {
        let shapes = [vec![rows, inner], vec![columns, inner], vec![rows, rank], vec![columns, rank]];
        let inputs: Vec<Tensor> = shapes.iter().zip(1..).map(|(shape, salt)| pattern(shape, salt)).collect();
        let layout = WeightLayout::OutIn;
        Layer {
            name: &format!("linear {rows}×{inner}×{columns} and {rank}"),
            inputs,
            plain: &|inputs| {
                let own = family_oracle::linear(&inputs[0], &inputs[1], None)?;
                own + (family_oracle::linear(&inputs[2], &inputs[3], None)? * 1.5)?
            },
            engine: &|kernels, inputs, dy| {
                let (y, gradients) = (like(dy)?, inputs.iter().map(like).collect::<Result<Vec<_>>>()?);
                let [x, weight, low, factor] = inputs else { unreachable!() };
                let low_rank =
                    LowRank { low, factor: Factor::transposed(Columns::all(factor)?), alpha: 1.5, shares: &[] };
                op::Linear { layout, x, weight, bias: None, low_rank: Some(low_rank), y: &y }.run(kernels)?;
                let [dx, dweight, dlow, dfactor] = &gradients[..] else { unreachable!() };
                op::linear_weight_gradient(kernels, layout, [x, dy], dweight, None)?;
                op::Linear { layout: layout.transposed(), x: dy, weight, bias: None, low_rank: None, y: dx }
                    .run(kernels)?;
                let whole = |x| Columns::all(x);
                let (dy, low, factor) = (whole(dy)?, whole(low)?, whole(factor)?);
                op::Product {
                    a: Factor::plain(dy),
                    b: Factor::plain(factor),
                    alpha: 1.5,
                    c: whole(dlow)?,
                    mode: WriteMode::Overwrite,
                }
                .run(kernels)?;
                op::Product {
                    a: Factor::transposed(dy),
                    b: Factor::plain(low),
                    alpha: 1.5,
                    c: whole(dfactor)?,
                    mode: WriteMode::Overwrite,
                }
                .run(kernels)?;
                Ok((y, gradients))
            },
        }
        .check();
    }
}

fn inner_half(packed: &Tensor, index: usize) -> Result<Tensor> {
    let width = packed.dim(1)? / 2;
    packed.narrow(1, index * width, width)?.contiguous()
}

#[test]
fn linear_layers_on_weights_stored_by_output() {
    for (rows, inner, columns) in [(1, 1, 1), (5, 24, 72), (33, 64, 17), (70, 130, 96)] {
        let (x, weight, bias) = (pattern(&[rows, inner], 1), pattern(&[columns, inner], 2), pattern(&[columns], 3));
        Layer {
            name: &format!("linear {rows}×{inner}×{columns}"),
            inputs: vec![x.clone(), weight.clone(), bias],
            plain: &|inputs| family_oracle::linear(&inputs[0], &inputs[1], Some(&inputs[2])),
            engine: &|kernels, inputs, dy| {
                let (y, gradients) = (like(dy)?, inputs.iter().map(like).collect::<Result<Vec<_>>>()?);
                let layout = WeightLayout::OutIn;
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
        Layer {
            name: &format!("linear {rows}×{inner}×{columns} without a bias"),
            inputs: vec![x, weight],
            plain: &|inputs| family_oracle::linear(&inputs[0], &inputs[1], None),
            engine: &|kernels, inputs, dy| {
                let (y, gradients) = (like(dy)?, inputs.iter().map(like).collect::<Result<Vec<_>>>()?);
                let layout = WeightLayout::OutIn;
                op::Linear { layout, x: &inputs[0], weight: &inputs[1], bias: None, y: &y, low_rank: None }
                    .run(kernels)?;
                op::linear_weight_gradient(kernels, layout, [&inputs[0], dy], &gradients[1], None)?;
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
fn embeddings_with_a_scale() {
    let (vocab, width, rows) = (13, 24, 21);
    let ids: Vec<u32> = (0..rows).map(|i| i * i % 11).collect();
    Layer {
        name: "embedding",
        inputs: vec![pattern(&[vocab, width], 1)],
        plain: &|inputs| family_oracle::embed(&ids, &inputs[0], 4.75),
        engine: &|kernels, inputs, dy| {
            let (out, gradient, mut order) = (like(dy)?, like(&inputs[0])?, vec![0; ids.len()]);
            let table = &inputs[0];
            let embedding = Embedding {
                table,
                positions: None,
                ids: &ids,
                seq_len: 7,
                documents: None,
                scale: 4.75,
                dropout: None,
            };
            op::Embed { input: embedding, out: &out }.run(kernels)?;
            op::EmbedBackward { input: embedding, dx: dy, order: &mut order, dtable: &gradient, dpositions: None }
                .run(kernels)?;
            Ok((out, vec![gradient]))
        },
    }
    .check();
    // √640 is 25.298: BF16 has 25.25, and FP16 25.297.
    let scale = |dtype| embedding::scale_of_width(640, dtype);
    assert_eq!([DType::F32, DType::F16, DType::BF16].map(scale), [640f32.sqrt(), 25.296_875, 25.25]);
}

/// Shapes of attention that differ from GPT-2's in one way each, then in all.
fn attention_cases() -> Vec<(usize, usize, Attention)> {
    let plain = Attention { heads: 4, kv_heads: 2, head_size: 10, scale: 0.3, ..Attention::default() };
    let starts = |seq: usize, cuts: &[usize]| -> Vec<u32> {
        (0..seq).map(|t| cuts.iter().filter(|cut| **cut <= t).max().map_or(0, |cut| *cut as u32)).collect()
    };
    let documents = [starts(37, &[5, 6, 30]), starts(37, &[17])].concat();
    vec![
        (1, 1, plain.clone()),
        (2, 33, plain.clone()),
        (2, 19, Attention { heads: 3, kv_heads: 1, head_size: 64, ..plain.clone() }),
        (2, 50, Attention { window: Some(1), ..plain.clone() }),
        (1, 131, Attention { window: Some(21), ..plain.clone() }),
        (1, 40, Attention { window: Some(100), ..plain.clone() }),
        (2, 33, Attention { softcap: Some(0.7), ..plain.clone() }),
        (2, 37, Attention { documents: Some(documents.clone()), ..plain.clone() }),
        (2, 37, Attention { window: Some(9), softcap: Some(0.5), documents: Some(documents), ..plain }),
    ]
}

fn shape_of(batch: usize, seq_len: usize, attention: &Attention) -> Shape {
    let Attention { heads, kv_heads, head_size, scale, window, softcap, .. } = *attention;
    let softcap = softcap.map(|cap| cap as f32);
    Shape { kv_heads, scale: scale as f32, window, softcap, ..Shape::new(batch, seq_len, heads, head_size) }
}

/// All columns of three matrices.
fn separate(tensors: &[Tensor]) -> Result<[Columns<'_>; 3]> {
    Ok([Columns::all(&tensors[0])?, Columns::all(&tensors[1])?, Columns::all(&tensors[2])?])
}

/// Output and gradients of attention on separate buffers.
fn attend(
    kernels: &dyn Kernels,
    shape: &Shape,
    attention: &Attention,
    inputs: &[Tensor],
    dy: &Tensor,
) -> Result<Outcome> {
    let (out, gradients) = (like(dy)?, inputs.iter().map(like).collect::<Result<Vec<_>>>()?);
    let lse = zeros(&[shape.batch * shape.heads * shape.seq_len], DType::F32, &Device::Cpu)?;
    let operands = Operands { qkv: separate(inputs)?, documents: attention.documents.as_deref(), dropout: None };
    op::Attention { shape: *shape, operands, out: &out, lse: &lse }.run(kernels)?;
    op::AttentionBackward { shape: *shape, operands, dout: dy, out: &out, lse: &lse, gradients: separate(&gradients)? }
        .run(kernels)?;
    Ok((out, gradients))
}

/// Runs attention on one buffer that packs queries, keys and values.
fn attend_packed(
    kernels: &dyn Kernels,
    shape: &Shape,
    attention: &Attention,
    qkv: &Tensor,
    dy: &Tensor,
) -> Result<Outcome> {
    let (out, gradient) = (like(dy)?, like(qkv)?);
    let lse = zeros(&[shape.batch * shape.heads * shape.seq_len], DType::F32, &Device::Cpu)?;
    let operands = Operands { documents: attention.documents.as_deref(), ..Operands::packed(shape, qkv, None)? };
    op::Attention { shape: *shape, operands, out: &out, lse: &lse }.run(kernels)?;
    let gradients = Columns::split(&gradient, shape.widths())?;
    op::AttentionBackward { shape: *shape, operands, dout: dy, out: &out, lse: &lse, gradients }.run(kernels)?;
    Ok((out, vec![gradient]))
}

/// Queries, keys and values in rows of all sequences.
fn queries_keys_values(batch: usize, seq_len: usize, attention: &Attention) -> Vec<Tensor> {
    let columns = [attention.heads, attention.kv_heads, attention.kv_heads].map(|heads| heads * attention.head_size);
    (1..).zip(columns).map(|(salt, columns)| (pattern(&[batch * seq_len, columns], salt) * 2.0).unwrap()).collect()
}

/// Queries, keys and values are one input: if there is only one key, gradients of queries and keys are zero, and a
/// relative error of them is meaningless.
#[test]
fn attentions_with_grouped_queries_windows_soft_caps_and_documents() {
    for (batch, seq_len, attention) in attention_cases() {
        let shape = shape_of(batch, seq_len, &attention);
        let part = |x: &Tensor, index: usize| {
            let widths = shape.widths();
            x.narrow(1, widths[..index].iter().sum(), widths[index])?.contiguous()
        };
        let plain = |inputs: &[Tensor]| {
            let part = |index| part(&inputs[0], index)?.reshape((batch, seq_len, shape.widths()[index]));
            flat(&attention.attend(&part(0)?, &part(1)?, &part(2)?)?)
        };
        let inputs = vec![Tensor::cat(&queries_keys_values(batch, seq_len, &attention), 1).unwrap()];
        Layer {
            name: &format!("{shape:?}, packed"),
            inputs: inputs.clone(),
            plain: &plain,
            engine: &|kernels, inputs, dy| attend_packed(kernels, &shape, &attention, &inputs[0], dy),
        }
        .check();
        Layer {
            name: &format!("{shape:?}"),
            inputs,
            plain: &plain,
            engine: &|kernels, inputs, dy| {
                let parts = [part(&inputs[0], 0)?, part(&inputs[0], 1)?, part(&inputs[0], 2)?];
                let (out, gradients) = attend(kernels, &shape, &attention, &parts, dy)?;
                Ok((out, vec![Tensor::cat(&gradients, 1)?]))
            },
        }
        .check();
    }
}

/// Generating text token by token, and in pieces, gives the result of the whole sequence.
#[test]
fn a_kv_cache_attends_as_the_whole_sequence_does() {
    for dtype in TYPES {
        for (_, seq_len, attention) in attention_cases().into_iter().filter(|case| case.2.documents.is_none()) {
            let inputs: Vec<Tensor> = queries_keys_values(1, seq_len, &attention)
                .iter()
                .map(|input| input.to_dtype(dtype).unwrap())
                .collect();
            let wide: Vec<Tensor> =
                inputs.iter().map(|x| x.to_dtype(DType::F32).unwrap().unsqueeze(0).unwrap()).collect();
            let expected = flat(&attention.attend(&wide[0], &wide[1], &wide[2]).unwrap()).unwrap();
            for kernels in KERNELS {
                let (kv_heads, head_size) = (attention.kv_heads, attention.head_size);
                let cache = KeyValues::new(kv_heads, seq_len + 3, head_size, dtype, &Device::Cpu).unwrap();
                let mut past = 0;
                while past < seq_len {
                    let new = (past % 4 + 1).min(seq_len - past);
                    let rows: Vec<Tensor> =
                        inputs.iter().map(|x| x.narrow(0, past, new).unwrap().contiguous().unwrap()).collect();
                    let (out, shape) = (like(&rows[0]).unwrap(), shape_of(1, new, &attention));
                    op::DecodeAttention { shape, cache: &cache, past, qkv: separate(&rows).unwrap(), out: &out }
                        .run(kernels)
                        .unwrap();
                    let (error, by) = (relative(&out, &expected.narrow(0, past, new).unwrap()), kernels.name());
                    assert!(error < tolerance(dtype), "{attention:?} in {dtype:?} by {by} after {past}: {error:.1e}");
                    past += new;
                }
            }
        }
    }
}

/// Documents that share a sequence get the results of each document alone, with positions starting at 0, bit for bit
/// except for the blocks that queries are cut into.
#[test]
fn packed_documents_are_computed_as_if_alone() {
    for kernels in KERNELS {
        packed_documents(kernels);
    }
}

fn packed_documents(kernels: &dyn Kernels) {
    let attention = Attention { heads: 4, kv_heads: 2, head_size: 10, scale: 0.3, ..Attention::default() };
    let table = table(5, 64);
    let lengths = [13, 1, 23];
    let seq_len = lengths.iter().sum();
    let inputs = queries_keys_values(1, seq_len, &attention);
    let dy = pattern(&[seq_len, 40], 9);
    let starts: Vec<u32> = [(0, 13), (13, 1), (14, 23)].iter().flat_map(|&(start, len)| vec![start; len]).collect();
    let turn = |x: &Tensor, positions: Positions<'_>, direction| {
        let x = x.copy().unwrap();
        op::Rotate { x: Columns::all(&x).unwrap(), table: &table, positions, direction }.run(kernels).unwrap();
        x
    };
    let run = |inputs: &[Tensor], dy: &Tensor, seq_len: usize, documents: Option<Vec<u32>>| {
        let attention = Attention { documents: documents.clone(), ..attention.clone() };
        let positions = Positions { seq_len, past: 0, documents: documents.as_deref() };
        let turned: Vec<Tensor> =
            inputs[..2].iter().map(|x| turn(x, positions, Direction::Forward)).chain([inputs[2].clone()]).collect();
        let (out, gradients) = attend(kernels, &shape_of(1, seq_len, &attention), &attention, &turned, dy).unwrap();
        let dq = turn(&gradients[0], positions, Direction::Backward);
        [out, dq, turn(&gradients[1], positions, Direction::Backward), gradients[2].clone()]
    };
    let together = run(&inputs, &dy, seq_len, Some(starts));
    let mut first = 0;
    for length in lengths {
        let part = |x: &Tensor| x.narrow(0, first, length).unwrap().contiguous().unwrap();
        let alone = run(&inputs.iter().map(part).collect::<Vec<_>>(), &part(&dy), length, None);
        for (alone, together) in alone.iter().zip(&together) {
            let part = together.narrow(0, first, length).unwrap();
            let size = |x: &Tensor| values(x).iter().map(|x| x * x).sum::<f64>().sqrt();
            // Queries and keys of a document of one token have no gradient: what rounding leaves is held against the others'.
            let scale = size(if length == 1 { together } else { alone });
            assert!(size(&(part - alone).unwrap()) < 1e-6 * scale, "{length} tokens by {}", kernels.name());
        }
        first += length;
    }
    // A start that lies ahead, or goes back, is an error.
    for starts in [vec![1; seq_len], (0..seq_len as u32).map(|t| u32::from(t == 3)).collect()] {
        let attention = Attention { documents: Some(starts), ..attention.clone() };
        assert!(attend(kernels, &shape_of(1, seq_len, &attention), &attention, &inputs, &dy).is_err());
    }
}

/// Keys that no query of a block can see are not even read by the fused kernels: they are NaN here, which any arithmetic would spread.
#[test]
fn keys_outside_of_the_window_are_not_computed() {
    let attention =
        Attention { heads: 2, kv_heads: 1, head_size: 8, scale: 0.3, window: Some(16), ..Attention::default() };
    let seq_len = 96;
    let poison = |x: &Tensor| {
        let nan = Tensor::full(f32::NAN, (32, 8), &Device::Cpu).unwrap();
        Tensor::cat(&[nan, x.narrow(0, 32, seq_len - 32).unwrap()], 0).unwrap()
    };
    let clean = queries_keys_values(1, seq_len, &attention);
    let poisoned = [clean[0].clone(), poison(&clean[1]), poison(&clean[2])];
    let dy = pattern(&[seq_len, 16], 9);
    let shape = shape_of(1, seq_len, &attention);
    let rows = |outcome: &Tensor| outcome.narrow(0, 48, seq_len - 48).unwrap();
    let (out, gradients) = attend(&Fused, &shape, &attention, &poisoned, &dy).unwrap();
    let (clean_out, clean_gradients) = attend(&Fused, &shape, &attention, &clean, &dy).unwrap();
    assert_eq!(values(&rows(&out)), values(&rows(&clean_out)));
    assert_eq!(values(&rows(&gradients[0])), values(&rows(&clean_gradients[0])));
}

/// Everything at once, on pools of different sizes: the same bits.
#[test]
fn the_number_of_threads_changes_no_bit() {
    let (_, _, attention) = attention_cases().pop().unwrap();
    let shape = shape_of(2, 37, &attention);
    let rows = 2 * 37;
    let run = |kernels: &dyn Kernels, dtype: DType| -> Vec<Vec<f64>> {
        let stored = |tensor: Tensor| tensor.to_dtype(dtype).unwrap();
        let inputs: Vec<Tensor> = queries_keys_values(2, 37, &attention).into_iter().map(stored).collect();
        let dy = stored(pattern(&[rows, 40], 9));
        let (out, mut found) = attend(kernels, &shape, &attention, &inputs, &dy).unwrap();
        let (x, weight) = (stored(pattern(&[rows, 40], 4)), stored(pattern(&[10], 5)));
        let (y, dx, dweight) = (like(&x).unwrap(), like(&x).unwrap(), like(&weight).unwrap());
        let rstd = zeros(&[rows * 4], DType::F32, &Device::Cpu).unwrap();
        let settings = NormSettings { norm: Norm::Rms { unit_offset: true }, eps: 1e-5 };
        let all = |tensor| Columns::all(tensor).unwrap();
        let (weight, mode) = (&weight, WriteMode::Overwrite);
        let (x_columns, y_columns, rstd, dweight) = (all(&x), all(&y), &rstd, &dweight);
        op::Norm { settings, x: x_columns, weight, bias: None, y: y_columns, mean: None, rstd }.run(kernels).unwrap();
        op::NormBackward {
            settings,
            dy: all(&dy),
            x: x_columns,
            weight,
            mean: None,
            rstd,
            dx: all(&dx),
            mode,
            dweight: Some(dweight),
            dbias: None,
        }
        .run(kernels)
        .unwrap();
        let positions = Positions { seq_len: 37, past: 0, documents: None };
        op::Rotate { x: all(&x), table: &table(5, 37), positions, direction: Direction::Forward }.run(kernels).unwrap();
        let [gated, again, dgate, dup] = [(); 4].map(|()| like(&x).unwrap());
        gated::forward(Gate::Silu, all(&x), all(&dy), &gated).unwrap();
        gated::backward(Gate::Silu, all(&x), all(&dy), &dy, [all(&dgate), all(&dup)], &again).unwrap();
        found.extend([out, y, dx, dweight.clone(), x, gated, again, dgate, dup]);
        found.iter().map(values).collect()
    };
    for (kernels, dtype) in KERNELS.into_iter().flat_map(|kernels| TYPES.map(|dtype| (kernels, dtype))) {
        let pool = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let on = |threads| pool(threads).install(|| run(kernels, dtype));
        let one = on(1);
        assert!(one.iter().flatten().all(|value| value.is_finite()));
        assert!([2, 3, 7].iter().all(|&threads| on(threads) == one), "{dtype:?} by {}", kernels.name());
    }
}
