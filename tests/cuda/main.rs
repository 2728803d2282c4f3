//! candle's operations on a GPU against the CPU's, for every kind that training uses. Wants a GPU, or
//! `.ci/cuda-stand-in`'s libraries first in `LD_LIBRARY_PATH`: then candle's own kernels run on the CPU.
//!
//!     cargo test --features cuda --test cuda
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{D, DType, Device, Result, Tensor};
use finetune::engine::device::DeviceSpec;
use finetune::engine::kernels::op::cases::{Bounds, Case, cases};
use finetune::engine::kernels::quantized::QuantizedMatrix;
use finetune::engine::kernels::view::zeros;
use finetune::engine::kernels::{CandleKernels, KernelBackend};
use std::sync::LazyLock;

const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// One device for all tests: a second one would be another stream.
static GPU: LazyLock<Device> = LazyLock::new(|| {
    let policy = "bf16".parse().unwrap();
    DeviceSpec::Cuda(0).open(policy, KernelBackend::Candle, &mut |notice| panic!("{notice}")).unwrap().device
});

/// Numbers between -1 and 1 in no order.
fn pattern(shape: &[usize], salt: u32, dtype: DType, device: &Device) -> Result<Tensor> {
    let len: usize = shape.iter().product();
    let number = |i: u32| {
        let bits = (i + 1).wrapping_mul(2_654_435_769) ^ salt.wrapping_mul(40_503);
        (bits ^ bits >> 15).wrapping_mul(2_246_822_519) as f32 / u32::MAX as f32
    };
    let values: Vec<f32> = (0..len as u32).map(|i| 2.0 * number(i) - 1.0).collect();
    Tensor::from_vec(values, shape, device)?.to_dtype(dtype)
}

/// The maximum relative difference of two roundings of nearly the same number.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2e-3,
        DType::BF16 => 2e-2,
        DType::F32 | DType::F64 => 2e-6,
        _ => 0.0,
    }
}

fn values(tensor: &Tensor) -> Vec<f64> {
    let tensor = tensor.to_device(&Device::Cpu).unwrap();
    tensor.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// Asserts that the results of `run` on the GPU and on the CPU agree, within the type's tolerance.
fn same(what: &str, run: impl Fn(&Device) -> Result<Tensor>) {
    let expected = run(&Device::Cpu).unwrap();
    let found = run(&GPU).unwrap();
    assert_eq!((found.dims(), found.dtype()), (expected.dims(), expected.dtype()), "{what}");
    let allowed = tolerance(expected.dtype());
    let (found, expected) = (values(&found), values(&expected));
    let typical = (expected.iter().map(|x| x * x).sum::<f64>() / expected.len() as f64).sqrt();
    for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let close = (found - expected).abs() <= allowed * expected.abs().max(typical);
        assert!(
            close || found.is_nan() && expected.is_nan() || found == expected,
            "{what}: element {i} is {found}, not {expected}"
        );
    }
}

/// The operations of a decoder against their exact results.
#[test]
fn operations() {
    let check = |case: Case| case.check(&CandleKernels, &GPU, 1, Bounds::Gpu).err();
    let failures: Vec<String> = cases().into_iter().filter_map(check).map(|error| error.to_string()).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn tensors_go_there_and_come_back() {
    for dtype in TYPES {
        same(&format!("{dtype:?}"), |device| pattern(&[3, 1000], 1, dtype, device));
        same("zeros", |device| Tensor::zeros((7, 5), dtype, device));
        same("ones", |device| Tensor::ones((7, 5), dtype, device));
        same("fill", |device| Tensor::full(0.5f32, (3, 129), device)?.to_dtype(dtype));
    }
}

#[test]
fn products() {
    for dtype in TYPES {
        for (m, k, n) in [(1, 1, 1), (33, 70, 17), (64, 64, 192), (5, 300, 9)] {
            let of = |what: &str| format!("{what} {m}×{k}×{n} {dtype:?}");
            let a = |device: &Device| pattern(&[m, k], 1, dtype, device);
            let b = |device: &Device| pattern(&[k, n], 2, dtype, device);
            same(&of("a·b"), |device| a(device)?.matmul(&b(device)?));
            same(&of("a·bᵀ"), |device| a(device)?.matmul(&pattern(&[n, k], 3, dtype, device)?.t()?));
            same(&of("aᵀ·b"), |device| pattern(&[k, m], 4, dtype, device)?.t()?.matmul(&b(device)?));
        }
        same("attention's batches", |device| {
            let qkv = pattern(&[2, 9, 3, 4, 8], 5, dtype, device)?;
            let head = |i: usize| qkv.narrow(2, i, 1)?.squeeze(2)?.transpose(1, 2)?.contiguous();
            let scores = head(0)?.matmul(&head(1)?.t()?)?;
            scores.matmul(&head(2)?)
        });
    }
}

#[test]
fn casts() {
    for from in TYPES {
        for to in [DType::F32, DType::F16, DType::BF16] {
            same(&format!("{from:?} to {to:?}"), |device| pattern(&[1003], 1, from, device)?.to_dtype(to));
            same(&format!("strided {from:?} to {to:?}"), |device| {
                pattern(&[17, 9], 1, from, device)?.t()?.to_dtype(to)
            });
        }
    }
    same("F32 to U8", |device| pattern(&[99], 1, DType::F32, device)?.gt(0.0)?.to_dtype(DType::F32));
    same("U32 to F32", |device| Tensor::arange(0u32, 77, device)?.to_dtype(DType::F32));
}

/// The values nearest to each rounding boundary of FP16 and BF16, subnormal and too large ones among them.
#[test]
fn casts_round_to_nearest_even() {
    let hard: Vec<f32> = (0..=u16::MAX)
        .step_by(3)
        .flat_map(|bits| {
            let half = half::f16::from_bits(bits).to_f32();
            let brain = half::bf16::from_bits(bits).to_f32();
            [half, half * 1.000_488_3, brain, brain * 1.003_906_3, f32::from_bits(half.to_bits() + 1)]
        })
        .filter(|x| !x.is_nan())
        .collect();
    for dtype in [DType::F16, DType::BF16] {
        let rounded = |device: &Device| {
            let all = Tensor::from_slice(&hard, hard.len(), device).unwrap();
            values(&all.to_dtype(dtype).unwrap().to_dtype(DType::F32).unwrap())
        };
        for ((found, expected), x) in rounded(&GPU).iter().zip(rounded(&Device::Cpu)).zip(&hard) {
            assert_eq!(*found, expected, "{x:e} in {dtype:?}");
        }
    }
}

#[test]
fn elementwise() {
    for dtype in TYPES {
        let x = |device: &Device| pattern(&[6, 35], 1, dtype, device);
        let y = |device: &Device| pattern(&[6, 35], 2, dtype, device);
        let row = |device: &Device| pattern(&[35], 3, dtype, device);
        same("add", |device| x(device)? + y(device)?);
        same("sub", |device| x(device)? - y(device)?);
        same("mul", |device| x(device)? * y(device)?);
        same("div", |device| x(device)? / y(device)?.affine(0.25, 2.0)?);
        same("add a row", |device| x(device)?.broadcast_add(&row(device)?));
        same("mul a column", |device| x(device)?.broadcast_mul(&pattern(&[6, 1], 4, dtype, device)?));
        same("add a transpose", |device| x(device)? + pattern(&[35, 6], 5, dtype, device)?.t()?);
        same("maximum", |device| x(device)?.maximum(&y(device)?));
        same("minimum", |device| x(device)?.minimum(&y(device)?));
        same("affine", |device| x(device)?.affine(3.0, -0.5));
        same("neg", |device| x(device)?.neg());
        same("abs", |device| x(device)?.abs());
        same("sqr", |device| x(device)?.sqr());
        same("sqrt", |device| x(device)?.abs()?.sqrt());
        same("exp", |device| x(device)?.exp());
        same("log", |device| x(device)?.sqr()?.affine(1.0, 1.0)?.log());
        same("tanh", |device| x(device)?.tanh());
        same("recip", |device| x(device)?.affine(0.25, 2.0)?.recip());
        same("less", |device| x(device)?.lt(&y(device)?));
        same("equal", |device| x(device)?.eq(&x(device)?));
        same("where", |device| x(device)?.gt(&y(device)?)?.where_cond(&x(device)?, &y(device)?));
    }
}

#[test]
fn reductions() {
    // Wider than a block, narrower than a warp, and in between.
    for columns in [1, 7, 32, 33, 100, 1024, 3001] {
        let x = |device: &Device| pattern(&[5, columns], 1, DType::F32, device);
        same("sum of rows", |device| x(device)?.sum_keepdim(D::Minus1));
        same("sum of columns", |device| x(device)?.sum_keepdim(0));
        same("sum", |device| x(device)?.sum_all());
        same("max", |device| x(device)?.max_keepdim(D::Minus1));
        same("min", |device| x(device)?.min_keepdim(D::Minus1));
        same("argmax", |device| x(device)?.argmax(D::Minus1));
        same("mean", |device| x(device)?.mean_keepdim(D::Minus1));
    }
    for dtype in [DType::F16, DType::BF16] {
        let x = |device: &Device| pattern(&[5, 700], 1, dtype, device);
        same("max", |device| x(device)?.max_keepdim(D::Minus1));
        same("a sum in FP32", |device| x(device)?.to_dtype(DType::F32)?.sum_keepdim(D::Minus1));
    }
}

/// CUDA's `max` drops NaN, so no check for finite values may rely on it.
#[test]
fn a_maximum_hides_nan() {
    let x = Tensor::new(&[1.0f32, f32::NAN, 3.0], &GPU).unwrap();
    assert_eq!(x.max(0).unwrap().to_scalar::<f32>().unwrap(), 3.0);
    assert!(x.sum_all().unwrap().to_scalar::<f32>().unwrap().is_nan());
}

#[test]
fn rows_by_index() {
    let ids = |device: &Device| Tensor::new(&[3u32, 0, 3, 12, 7], device);
    for dtype in TYPES {
        let table = |device: &Device| pattern(&[13, 24], 1, dtype, device);
        let rows = |device: &Device| pattern(&[5, 24], 2, dtype, device);
        same("index_select", |device| table(device)?.index_select(&ids(device)?, 0));
        same("index_add", |device| table(device)?.index_add(&ids(device)?, &rows(device)?, 0));
        let picked = |device: &Device| Tensor::new(&[[1u32], [23], [0], [5], [5]], device);
        same("gather", |device| rows(device)?.gather(&picked(device)?, 1));
        let one = |device: &Device| Tensor::ones((5, 1), dtype, device);
        same("scatter_add", |device| rows(device)?.scatter_add(&picked(device)?, &one(device)?, 1));
    }
}

/// Blocks of two types below each other, and rows of blocks, in the types that GGUF files have.
#[test]
fn quantized_blocks() {
    use GgmlDType::{Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
    for dtype in [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K] {
        let values = pattern(&[7, 512], 1, DType::F32, &Device::Cpu).unwrap();
        let blocks = |dtype, device: &Device| {
            let bytes = QTensor::quantize(&values, dtype)?.data()?.into_owned();
            QuantizedMatrix::new(dtype, bytes, [7, 512], device)
        };
        for out in TYPES {
            same(&format!("{dtype:?} to {out:?}"), |device| {
                let matrix = zeros(&[14, 512], out, device)?;
                QuantizedMatrix::stack(vec![blocks(dtype, device)?, blocks(Q8_0, device)?])?.dequantize(&matrix)?;
                Ok(matrix)
            });
            same(&format!("rows of {dtype:?} to {out:?}"), |device| {
                let rows = zeros(&[4, 512], out, device)?;
                blocks(dtype, device)?.gather(&[6, 0, 3, 3], &rows)?;
                Ok(rows)
            });
        }
    }
}

#[test]
fn copies() {
    for dtype in TYPES {
        let x = |device: &Device| pattern(&[4, 6, 10], 1, dtype, device);
        same("contiguous", |device| x(device)?.transpose(0, 2)?.contiguous());
        same("narrow", |device| x(device)?.narrow(2, 3, 4)?.contiguous());
        same("cat", |device| Tensor::cat(&[x(device)?, x(device)?.affine(2.0, 0.0)?], 2));
        same("slice_set", |device| {
            let out = Tensor::zeros((4, 6, 10), dtype, device)?;
            out.slice_set(&pattern(&[4, 2, 10], 2, dtype, device)?, 1, 3)?;
            Ok(out)
        });
    }
}

/// Tensors that are not contiguous and a bad id are errors of candle or of the kernel, not other numbers.
#[test]
fn index_add_wants_contiguous_rows() {
    let table = pattern(&[24, 13], 1, DType::F32, &GPU).unwrap().t().unwrap();
    let rows = pattern(&[24, 5], 2, DType::F32, &GPU).unwrap().t().unwrap();
    let ids = Tensor::new(&[3u32, 0, 3, 12, 7], &GPU).unwrap();
    table.contiguous().unwrap().index_add(&ids, &rows, 0).unwrap_err();
}
