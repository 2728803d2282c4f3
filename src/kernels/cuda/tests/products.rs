//! The linear layer and the head, with the emulator's plain product in the place of the GPU's library.

use super::super::cross_entropy::Seed;
use super::super::product::{self, HeadGradient, HeadShape};
use super::*;
use crate::kernels::cross_entropy::{self, HeadWorkspace, IGNORE};
use crate::kernels::{linear, view};

#[test]
fn linear_layers() {
    for dtype in TYPES {
        for sizes @ [rows, inner, columns] in [[1, 1, 1], [5, 24, 72], [33, 64, 17]] {
            let (x, weight) = (pattern(rows * inner, 1, dtype), pattern(inner * columns, 2, dtype));
            let (bias, dy) = (pattern(columns, 3, dtype), pattern(rows * columns, 4, dtype));
            let (cpu_x, cpu_weight) = (tensor(&x, &[rows, inner], dtype), tensor(&weight, &[inner, columns], dtype));
            let (cpu_bias, cpu_dy) = (tensor(&bias, &[columns], dtype), tensor(&dy, &[rows, columns], dtype));
            let (y, dx) = (poisoned(&[rows, columns], dtype), poisoned(&[rows, inner], dtype));
            let (dweight, dbias) = (poisoned(&[inner, columns], dtype), poisoned(&[columns], dtype));
            linear::forward(&cpu_x, &cpu_weight, &cpu_bias, &y).unwrap();
            linear::backward_input(&cpu_dy, &cpu_weight, &dx).unwrap();
            linear::backward_weight(&cpu_x, &cpu_dy, &dweight, &dbias).unwrap();
            let found = in_every_order(|gpu| {
                let [x, weight, bias, dy] = [&x, &weight, &bias, &dy].map(|values| gpu.input(values, dtype));
                let [y, dx, dweight, dbias] =
                    [rows * columns, rows * inner, inner * columns, columns].map(|len| gpu.output(len, dtype));
                product::linear_forward(gpu, sizes, [x, weight, bias], y).unwrap();
                product::linear_backward_input(gpu, sizes, [dy, weight], dx).unwrap();
                product::linear_backward_weight(gpu, sizes, [x, dy], dweight, dbias).unwrap();
                [y, dx, dweight, dbias].map(|buffer| gpu.read(buffer)).to_vec()
            });
            for (found, truth) in found.iter().zip([&y, &dx, &dweight, &dbias]) {
                assert_close(&format!("linear {sizes:?}"), found, &numbers(truth), dtype);
            }
        }
    }
}

#[test]
fn heads_on_a_padded_vocabulary() {
    let (rows, width, vocab, padded) = (9, 20, 50, 64);
    let mut targets: Vec<u32> = (0..rows).map(|row| (row * 7 % vocab) as u32).collect();
    targets[4] = IGNORE;
    for dtype in TYPES {
        let (x, mut weight) = (pattern(rows * width, 1, dtype), pattern(vocab * width, 2, dtype));
        let (cpu_x, cpu_weight) = (tensor(&x, &[rows, width], dtype), tensor(&weight, &[vocab, width], dtype));
        let (dx, dweight) = (poisoned(&[rows, width], dtype), poisoned(&[vocab, width], dtype));
        let allocate = |shape: &[usize], dtype| view::zeros(shape, dtype, &Device::Cpu);
        let workspace = HeadWorkspace::lay_out(rows, vocab, width, dtype, Some(dtype), &allocate).unwrap();
        let gradient = cross_entropy::HeadGradient { seed: 2.0, dx: &dx, dweight: &dweight };
        let loss =
            cross_entropy::head(&cpu_x, &cpu_weight, &targets, &workspace, Some(gradient), |_, _, _| Ok(())).unwrap();
        weight.resize(padded * width, 0.0);
        let shape = HeadShape { rows, width, vocab, padded };
        let found = in_every_order(|gpu| {
            let operands = [gpu.input(&x, dtype), gpu.input(&weight, dtype), gpu.output(rows * padded, dtype)];
            let losses = gpu.output(rows, DType::F32);
            let gradient = HeadGradient {
                seed: Seed { scale: gpu.input(&[16.0], DType::F32), targets: gpu.words(&[8]) },
                dx: gpu.output(rows * width, dtype),
                dweight: gpu.output(padded * width, dtype),
                accumulate: false,
            };
            product::head(gpu, shape, operands, gpu.words(&targets), losses, Some(gradient)).unwrap();
            [losses, gradient.dx, gradient.dweight].map(|buffer| gpu.read(buffer)).to_vec()
        });
        let sum: f32 = found[0].iter().sum();
        assert_close("the head's loss", &[sum], &[loss as f32], dtype);
        assert_close("the head's dx", &found[1], &numbers(&dx), dtype);
        assert_close("the head's dweight", &found[2][..vocab * width], &numbers(&dweight), dtype);
        assert!(found[2][vocab * width..].iter().all(|&x| x == 0.0), "the padding has a gradient");
    }
}
