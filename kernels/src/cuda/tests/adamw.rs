//! The update with moments in 8 bits against FP32 moments that the host converts.

use super::*;
use crate::adamw::{AdamWStep, AdamWTensor};
use crate::blockwise::{self, BlockwiseQuantized};

/// Codes, magnitudes and masters have the same bits: in blocks of zeros, of zeros and tiny numbers, and in one that ends early.
#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn moments_in_8_bits_are_those_of_the_host() {
    const LEN: usize = 5003;
    let step =
        AdamWStep { lr: 0.01, betas: [0.9, 0.999], eps: 1e-8, bias_corrections: [0.1, 0.001], grad_factor: 0.125 };
    let scaled = |salt| -> Vec<f32> {
        let scale = |i: usize| [1.0, 0.0, 1e-20, 1e-6][i / 256 % 4] * [1.0, -0.0, 1e-4][i % 3];
        pattern(LEN, salt, DType::F32).into_iter().enumerate().map(|(i, x)| x * scale(i)).collect()
    };
    let run = |host: bool, order: u32| {
        let moments = [true, false].map(|signed| {
            let values = scaled(3).into_iter().map(|x| if signed { x } else { x * x }).collect::<Vec<_>>();
            let mut moment = BlockwiseQuantized::zeros(LEN, signed, &Device::Cpu).unwrap();
            moment.store(&tensor(&values, &[LEN], DType::F32)).unwrap();
            moment.on(&Device::Cpu).unwrap()
        });
        let [Some((exp_avg, m)), Some((exp_avg_sq, v))] = moments.each_ref().map(BlockwiseQuantized::on_device) else {
            unreachable!("they are tensors")
        };
        let (grad, master) = (&tensor(&scaled(1), &[LEN], DType::F16), &tensor(&scaled(2), &[LEN], DType::F32));
        let (scales, weight, counts) = (Some([m, v]), Some(&poisoned(&[LEN], DType::F16)).cloned(), None);
        let weight = weight.as_ref();
        let weight_decay = 0.1;
        let tensor = AdamWTensor { grad, master, exp_avg, exp_avg_sq, scales, weight, weight_decay, counts };
        let alone =
            |step: AdamWStep, tensor: AdamWTensor<'_>| op::AdamW { step, tensors: vec![tensor] }.run(&kernels(order));
        if host {
            blockwise::adamw(&mut op::AdamW { step, tensors: vec![tensor] }, alone).unwrap();
        } else {
            alone(step, tensor).unwrap();
        }
        let mut results = vec![numbers(master), numbers(weight.unwrap())];
        for moment in &moments {
            results.push(moment.codes(0..LEN).unwrap().iter().copied().map(f32::from).collect());
            results.push(moment.absmax(0..LEN.div_ceil(256)).unwrap().into());
        }
        results
    };
    let bits = |results: Vec<Vec<f32>>| {
        results.into_iter().map(|x| x.into_iter().map(f32::to_bits).collect()).collect::<Vec<Vec<_>>>()
    };
    let (found, expected) = (bits(in_every_order(|order| run(false, order))), bits(run(true, 0)));
    assert!(found == expected, "they differ");
    let codes = |at: usize| found[at].iter().collect::<std::collections::HashSet<_>>().len();
    assert!(codes(2) > 150 && codes(4) > 150, "few codes are in use: {} and {}", codes(2), codes(4));
}
