//! Cross-entropy.

use super::super::cross_entropy;
use super::*;

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
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn cross_entropies() {
    for dtype in TYPES {
        for (rows, vocab, stride) in
            [(5, 3, 3), (3, 97, 97), (3, 97, 104), (2, 5003, 5008), (4, 64, 64), (3, 5056, 5056)]
        {
            let mut targets: Vec<u32> = (0..rows).map(|row| (row * 31 % vocab) as u32).collect();
            targets[1] = u32::MAX;
            let seed = 1024.0 / (rows - 1) as f32;
            let mut logits =
                rounded(pattern(rows * vocab, 1, DType::F32).into_iter().map(|x| 8.0 * x).collect(), dtype);
            for row in logits.chunks_exact_mut(vocab) {
                // Some threads meet nothing but -∞ at first.
                row[vocab / 2..][..vocab / 4].fill(f32::NEG_INFINITY);
            }
            for (row, target) in logits.chunks_exact_mut(vocab).zip(&targets).filter(|(_, target)| **target != u32::MAX)
            {
                row[*target as usize] = 1.5;
            }
            // Values after a row's end are not read.
            let strided: Vec<f32> = logits
                .chunks_exact(vocab)
                .flat_map(|row| row.iter().copied().chain(std::iter::repeat_n(f32::NAN, stride - vocab)))
                .collect();
            let found = in_every_order(|gpu| {
                let (trained, judged) = (gpu.state(&strided, dtype), gpu.state(&strided, dtype));
                let (targets, losses) = (gpu.words(&targets), gpu.output(rows, DType::F32));
                let sizes = [rows, vocab, stride];
                let alone = gpu.output(rows, DType::F32);
                cross_entropy::rows(gpu, sizes, judged, targets, alone, None).unwrap();
                assert!(
                    gpu.read(judged)
                        .iter()
                        .zip(&strided)
                        .all(|(after, before)| after.to_bits() == before.to_bits() || after.is_nan())
                );
                cross_entropy::rows(gpu, sizes, trained, targets, losses, Some(seed)).unwrap();
                assert_eq!(gpu.read(losses), gpu.read(alone));
                vec![gpu.read(losses), gpu.read(trained)]
            });
            for (row, target) in targets.iter().enumerate() {
                let (loss, gradient) = exact_row(&logits[row * vocab..][..vocab], *target, f64::from(seed));
                let what = format!("cross-entropy over {vocab}");
                assert_close(&format!("{what}: loss"), &found[0][row..=row], &[loss as f32], DType::F32);
                let gradient: Vec<f32> = gradient.into_iter().map(|x| x as f32).collect();
                let counted = &found[1][row * stride..][..vocab];
                assert_close(&format!("{what}: gradient"), counted, &rounded(gradient, dtype), dtype);
            }
        }
    }
}

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn a_logit_that_is_no_number_shows_in_loss_and_gradient() {
    for bad in [f32::NAN, f32::INFINITY] {
        let gpu = Emulator::new(0);
        let (logits, losses) = (gpu.state(&[0.0, bad, 1.0], DType::F32), gpu.output(1, DType::F32));
        cross_entropy::rows(&gpu, [1, 3, 3], logits, gpu.words(&[0]), losses, Some(1.0)).unwrap();
        assert!(gpu.read(losses)[0].is_nan() && gpu.read(logits).iter().any(|x| x.is_nan()), "{bad}");
    }
}
