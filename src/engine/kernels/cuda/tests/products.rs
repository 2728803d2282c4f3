//! The linear layer and the head, with the emulator's plain product in the place of the GPU's library.

use super::super::cross_entropy::Seed;
use super::super::peak::{dense_rate, product_size};
use super::super::product::{self, HeadGradient, HeadShape};
use super::*;
use crate::engine::kernels::cross_entropy::{self, HeadWorkspace, IGNORE, TileLimit};
use crate::engine::kernels::peak::Peak;
use crate::engine::kernels::{gelu, linear, view};

/// The testbed, and where it is the emulator also one whose products have no epilogues but biases.
fn with_and_without_epilogues(run: impl Fn(&Testbed)) {
    let mut testbed = Testbed::new(0);
    run(&testbed);
    #[cfg_attr(not(feature = "cuda"), expect(irrefutable_let_patterns, reason = "a GPU is the other variant"))]
    if let Testbed::Emulator(emulator) = &mut testbed {
        emulator.epilogues = false;
        run(&testbed);
    }
}

/// Both ways to get a GELU with its linear layers: within the products, or by kernels of its own.
#[test]
fn linear_layers_around_a_gelu() {
    for dtype in TYPES {
        for [rows, inner, wide] in [[5, 24, 72], [33, 64, 16], [7, 9, 17]] {
            let (x, weight) = (pattern(rows * inner, 1, dtype), pattern(inner * wide, 2, dtype));
            let (bias, dy) = (pattern(wide, 3, dtype), pattern(rows * inner, 4, dtype));
            let (y, activated) = (poisoned(&[rows, wide], dtype), poisoned(&[rows, wide], dtype));
            let cpu_weight = tensor(&weight, &[inner, wide], dtype);
            linear::forward(&tensor(&x, &[rows, inner], dtype), &cpu_weight, &tensor(&bias, &[wide], dtype), &y)
                .unwrap();
            gelu::forward(&y, &activated).unwrap();
            // The same weight's transpose is a layer back to the narrow width.
            let back = cpu_weight.t().unwrap().contiguous().unwrap();
            let dx = poisoned(&[rows, wide], dtype);
            linear::backward_input(&tensor(&dy, &[rows, inner], dtype), &back, &dx).unwrap();
            gelu::backward(&y, &dx).unwrap();
            with_and_without_epilogues(|gpu| {
                let [x, weight, bias, dy, back] =
                    [&x, &weight, &bias, &dy, &numbers(&back)].map(|values| gpu.input(values, dtype));
                let [found_y, found, found_dx] = [(); 3].map(|()| gpu.output(rows * wide, dtype));
                let (up, down) = ([rows, inner, wide], [rows, wide, inner]);
                product::linear_gelu_forward(gpu, up, [x, weight, bias], found_y, found).unwrap();
                // From the same rounded values: the derivative of two neighbours differs by more than a rounding.
                let same_y = gpu.input(&numbers(&y), dtype);
                product::linear_gelu_backward_input(gpu, down, [dy, back], same_y, found_dx).unwrap();
                for (buffer, truth) in [(found_y, &y), (found, &activated), (found_dx, &dx)] {
                    let what = format!("linear and GELU {rows} × {inner} × {wide}");
                    assert_close(&what, &gpu.read(buffer), &numbers(truth), dtype);
                }
            });
        }
    }
}

#[test]
fn no_number_stays_none_in_a_gelu_beside_a_product() {
    with_and_without_epilogues(|gpu| {
        let [mut x, weight] = [vec![1.0; 2 * 8], vec![0.5; 8 * 8]];
        x[0] = f32::NAN;
        let dtype = DType::F16;
        let [x, weight, bias] = [&x, &weight, &vec![0.0; 8]].map(|values| gpu.input(values, dtype));
        let [y, activated, dx] = [(); 3].map(|()| gpu.output(16, dtype));
        product::linear_gelu_forward(gpu, [2, 8, 8], [x, weight, bias], y, activated).unwrap();
        let ones = gpu.input(&[1.0; 16], dtype);
        product::linear_gelu_backward_input(gpu, [2, 8, 8], [ones, weight], y, dx).unwrap();
        for buffer in [y, activated, dx] {
            let values = gpu.read(buffer);
            assert!(values[..8].iter().all(|x| x.is_nan()) && values[8..].iter().all(|x| x.is_finite()), "{values:?}");
        }
    });
}

/// A sum in half precision would stop growing at 2,048 in FP16 and at 256 in BF16.
#[test]
fn a_bias_gradient_is_summed_in_fp32() {
    for dtype in TYPES {
        let (rows, inner, columns) = (6000, 8, 16);
        with_and_without_epilogues(|gpu| {
            let (x, dy) = (gpu.input(&vec![0.5; rows * inner], dtype), gpu.input(&vec![1.0; rows * columns], dtype));
            let (dweight, dbias) = (gpu.output(inner * columns, dtype), gpu.output(columns, dtype));
            product::linear_backward_weight(gpu, [rows, inner, columns], [x, dy], dweight, dbias).unwrap();
            assert_eq!(gpu.read(dbias), rounded(vec![6000.0; columns], dtype));
            assert_eq!(gpu.read(dweight), rounded(vec![3000.0; inner * columns], dtype));
        });
    }
}

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
            with_and_without_epilogues(|gpu| {
                let [x, weight, bias, dy] = [&x, &weight, &bias, &dy].map(|values| gpu.input(values, dtype));
                let [found_y, found_dx, found_dweight, found_dbias] =
                    [rows * columns, rows * inner, inner * columns, columns].map(|len| gpu.output(len, dtype));
                product::linear_forward(gpu, sizes, [x, weight, bias], found_y).unwrap();
                product::linear_backward_input(gpu, sizes, [dy, weight], found_dx).unwrap();
                product::linear_backward_weight(gpu, sizes, [x, dy], found_dweight, found_dbias).unwrap();
                for (buffer, truth) in
                    [found_y, found_dx, found_dweight, found_dbias].iter().zip([&y, &dx, &dweight, &dbias])
                {
                    assert_close(&format!("linear {sizes:?}"), &gpu.read(*buffer), &numbers(truth), dtype);
                }
            });
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
        let workspace =
            HeadWorkspace::lay_out(rows, vocab, width, dtype, Some(dtype), TileLimit::Cpu, &allocate).unwrap();
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

#[test]
fn the_rate_of_products_is_that_of_what_was_multiplied() {
    assert_eq!([1e15, 1.2e12, 1e12, 0.0].map(product_size), [8192, 8192, 4096, 64]);
    for dtype in TYPES {
        let Peak { held, best } = dense_rate(&Testbed::new(0), dtype, 64).unwrap();
        // In GFLOP/s: between a slow interpreter and any machine there is.
        assert!(1e-6 < held && held <= best && best < 1e8, "{held} {best}");
    }
}
