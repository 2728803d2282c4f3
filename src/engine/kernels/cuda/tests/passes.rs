//! Embeddings, cross-entropy.

use super::super::cross_entropy;
use super::super::embedding as device_embedding;
use super::*;
use crate::engine::kernels::dropout::Dropout;
use crate::engine::kernels::embedding::{self, Tables};
use crate::engine::kernels::rope::Positions;
use device_embedding::Tokens;

#[test]
fn groups_hold_every_row_once() {
    let ids = [5, 2, 5, 9, 2, 2];
    let (mut order, mut starts) = ([0; 6], [0; 7]);
    device_embedding::group(&ids, 10, &mut order, &mut starts).unwrap();
    assert_eq!((order, starts), ([1, 4, 5, 0, 2, 3], [0, 3, 5, 6, 6, 6, 6]));
    let error = device_embedding::group(&ids, 9, &mut order, &mut starts).unwrap_err().to_string();
    assert!(error.starts_with("token id 9 is outside the model's vocabulary of 9"), "{error}");
}

#[test]
fn embeddings() {
    let draw = 1 << 33 | 9;
    // Gradients are of the products' type or FP32, whatever the stream's.
    let cases = STREAM_AND_COMPUTE
        .iter()
        .flat_map(|&[stream, compute]| [(stream, compute, compute), (stream, compute, DType::F32)]);
    for (stream, compute, grads) in cases {
        for (vocab, context, width, batch, seq_len) in [(13, 9, 24, 3, 7), (40, 5, 261, 2, 5), (3, 64, 7, 5, 33)] {
            let rows = batch * seq_len;
            let places = Positions { seq_len, past: 0, documents: None };
            let ids: Vec<u32> = (0..rows).map(|i| (i * i % vocab.min(11)) as u32).collect();
            let (wte, wpe) = (pattern(vocab * width, 1, compute), pattern(context * width, 2, compute));
            let (dx, before) = (pattern(rows * width, 3, stream), pattern(vocab * width, 4, grads));
            for dropout in [None, Dropout::new(0.25, 3, 0, draw)] {
                let out = poisoned(&[rows, width], stream);
                let cpu_wte = tensor(&wte, &[vocab, width], compute);
                let cpu_wpe = tensor(&wpe, &[context, width], compute);
                let tables = Tables { tokens: &cpu_wte, positions: Some(&cpu_wpe), scale: 1.0 };
                embedding::forward(tables, &ids, places, dropout, &out).unwrap();
                let dwte = tensor(&before, &[vocab, width], grads);
                let dwpe = poisoned(&[context, width], grads);
                let mut order = vec![0; rows];
                let cpu_dx = tensor(&dx, &[rows, width], stream);
                let grads_of = Tables { tokens: &dwte, positions: Some(&dwpe), scale: 1.0 };
                embedding::backward(&cpu_dx, &ids, places, dropout, &mut order, grads_of).unwrap();

                let found = in_every_order(|gpu| {
                    let (mut order, mut starts) = (vec![0; rows], vec![0; rows + 1]);
                    device_embedding::group(&ids, vocab, &mut order, &mut starts).unwrap();
                    let [ids, order, starts] = [&ids, &order, &starts].map(|words| gpu.words(words));
                    let tokens = Tokens { ids, order, starts, draw: draw_words(gpu, draw) };
                    let weights = [gpu.input(&wte, compute), gpu.input(&wpe, compute)];
                    let (out, sizes) = (gpu.output(rows * width, stream), [rows, width, seq_len]);
                    device_embedding::forward(gpu, sizes, weights, tokens, dropout, out).unwrap();
                    let (dwte, dwpe) = (gpu.state(&before, grads), gpu.output(context * width, grads));
                    let dx = gpu.input(&dx, stream);
                    device_embedding::backward(gpu, sizes, dx, tokens, dropout, [dwte, dwpe]).unwrap();
                    [out, dwte, dwpe].map(|buffer| gpu.read(buffer)).to_vec()
                });
                let what = format!("embedding of {vocab}×{width}");
                assert_eq!(found[0], numbers(&out), "{what}");
                assert_close(&format!("{what}: dwte"), &found[1], &numbers(&dwte), grads);
                assert_close(&format!("{what}: dwpe"), &found[2], &numbers(&dwpe), grads);
            }
        }
    }
}

/// Loss and gradient of one row by the definition.
fn exact_row(logits: &[f32], target: u32, seed: f64) -> (f64, Vec<f64>) {
    if target == u32::MAX {
        return (0.0, vec![0.0; logits.len()]);
    }
    let top = logits.iter().fold(f64::NEG_INFINITY, |top, &x| top.max(f64::from(x)));
    let total: f64 = logits.iter().map(|&x| (f64::from(x) - top).exp()).sum();
    let mut gradient: Vec<f64> = logits.iter().map(|&x| (f64::from(x) - top).exp() / total * seed).collect();
    gradient[target as usize] -= seed;
    (total.ln() + top - f64::from(logits[target as usize]), gradient)
}

#[test]
fn cross_entropies() {
    for dtype in TYPES {
        for (rows, vocab, stride) in [(5, 3, 3), (3, 97, 128), (2, 5003, 5056), (4, 64, 64)] {
            let mut targets: Vec<u32> = (0..rows).map(|row| (row * 31 % vocab) as u32).collect();
            targets[1] = u32::MAX;
            let seed = 1024.0 / (rows - 1) as f32;
            let mut logits =
                rounded(pattern(rows * stride, 1, DType::F32).into_iter().map(|x| 8.0 * x).collect(), dtype);
            for row in logits.chunks_exact_mut(stride) {
                // Nothing may come out of the padding, whatever lies there.
                row[vocab..].fill(f32::NAN);
                // Some threads meet nothing but -∞ at first.
                row[vocab / 2..][..vocab / 4].fill(f32::NEG_INFINITY);
            }
            for (row, target) in
                logits.chunks_exact_mut(stride).zip(&targets).filter(|(_, target)| **target != u32::MAX)
            {
                row[*target as usize] = 1.5;
            }
            let found = in_every_order(|gpu| {
                let (trained, judged) = (gpu.state(&logits, dtype), gpu.state(&logits, dtype));
                let (targets, losses) = (gpu.words(&targets), gpu.output(rows, DType::F32));
                let sizes = [rows, vocab, stride];
                let alone = gpu.output(rows, DType::F32);
                cross_entropy::rows(gpu, sizes, judged, targets, alone, None).unwrap();
                assert!(
                    gpu.read(judged)
                        .iter()
                        .zip(&logits)
                        .all(|(after, before)| after.to_bits() == before.to_bits() || after.is_nan())
                );
                cross_entropy::rows(gpu, sizes, trained, targets, losses, Some(seed)).unwrap();
                assert_eq!(gpu.read(losses), gpu.read(alone));
                let mut total = gpu.structs(&[1.0f64], true);
                (total.dtype, total.len) = (DType::F64, 1);
                cross_entropy::sum_losses(gpu, rows, losses, total).unwrap();
                vec![gpu.read(losses), gpu.read(trained), vec![gpu.read_structs::<f64>(total)[0] as f32]]
            });
            let mut sum = 1.0;
            for (row, target) in targets.iter().enumerate() {
                let (loss, gradient) = exact_row(&logits[row * stride..][..vocab], *target, f64::from(seed));
                sum += loss;
                let what = format!("cross-entropy over {vocab}");
                assert_close(&format!("{what}: loss"), &found[0][row..=row], &[loss as f32], DType::F32);
                let gradient: Vec<f32> = gradient.into_iter().map(|x| x as f32).collect();
                let (counted, padding) = found[1][row * stride..][..stride].split_at(vocab);
                assert_close(&format!("{what}: gradient"), counted, &rounded(gradient, dtype), dtype);
                assert!(padding.iter().all(|&x| x == 0.0), "{what}: the padding's gradient is not zero");
            }
            assert_close("the sum of the losses", &found[2], &[sum as f32], DType::F32);
        }
    }
}

#[test]
fn a_logit_that_is_no_number_shows_in_loss_and_gradient() {
    for bad in [f32::NAN, f32::INFINITY] {
        let gpu = Emulator::new(0);
        let (logits, losses) = (gpu.state(&[0.0, bad, 1.0], DType::F32), gpu.output(1, DType::F32));
        cross_entropy::rows(&gpu, [1, 3, 3], logits, gpu.words(&[0]), losses, Some(1.0)).unwrap();
        assert!(gpu.read(losses)[0].is_nan() && gpu.read(logits).iter().any(|x| x.is_nan()), "{bad}");
    }
}
