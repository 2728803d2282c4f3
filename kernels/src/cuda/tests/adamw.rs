//! The update with moments in 8 bits against FP32 moments that the host converts.

use super::*;
use crate::adamw::{AdamWStep, AdamWTensor};
use crate::blockwise::{BlockwiseQuantized, Moment, by_fp32_moments};

/// Codes, magnitudes and masters have the same bits: in blocks of zeros, of zeros and tiny numbers, and in one that
/// ends early.
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
        let moments = [Moment::First, Moment::Second].map(|moment| {
            let value = |x: f32| if moment == Moment::First { x } else { x * x };
            let values = scaled(3).into_iter().map(value).collect::<Vec<_>>();
            BlockwiseQuantized::from_values(&values, moment, &Device::Cpu).unwrap()
        });
        let [m, v] = &moments;
        let (exp_avg, exp_avg_sq) = (&m.codes, &v.codes);
        let (grad, master) = (&tensor(&scaled(1), &[LEN], DType::F16), &tensor(&scaled(2), &[LEN], DType::F32));
        let scales = Some([m.scales(), v.scales()]);
        let weight = Some(&poisoned(&[LEN], DType::F16)).cloned();
        let counts = None;
        let weight = weight.as_ref();
        let weight_decay = 0.1;
        let tensor = AdamWTensor { grad, master, exp_avg, exp_avg_sq, scales, weight, weight_decay, counts };
        let alone = |tensor: AdamWTensor<'_>| op::AdamW { step, tensors: vec![tensor] }.run(&kernels(order));
        if host {
            by_fp32_moments(tensor, alone).unwrap();
        } else {
            alone(tensor).unwrap();
        }
        let mut results = vec![numbers(master), numbers(weight.unwrap())];
        for moment in &moments {
            results.push(moment.codes.to_vec1::<u8>().unwrap().into_iter().map(f32::from).collect());
            results.push(moment.absmax.to_vec1().unwrap());
        }
        results
    };
    let bits = |results: Vec<Vec<f32>>| {
        results.into_iter().map(|x| x.into_iter().map(f32::to_bits).collect()).collect::<Vec<Vec<_>>>()
    };
    let found = bits(in_every_order(|order| run(false, order)));
    let expected = bits(run(true, 0));
    assert!(found == expected, "they differ");
    let codes = |at: usize| found[at].iter().collect::<std::collections::HashSet<_>>().len();
    assert!(codes(2) > 150 && codes(4) > 150, "few codes are in use: {} and {}", codes(2), codes(4));
}
