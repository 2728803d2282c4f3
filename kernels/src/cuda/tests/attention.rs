//! Attention: in FP32, and on tensor cores in FP16 and BF16.

use super::*;
use crate::Ran;
use crate::attention::{AttentionInputs, AttentionShape};
use crate::columns::ColumnSlice;
use crate::dropout::Dropout;
use crate::op::cases::{Documents, Operation};

/// Output, log-sum-exps and gradients.
fn attend(
    kernels: &dyn Kernels,
    shape: AttentionShape,
    dtype: DType,
    dropout: Option<Dropout>,
    qkv: &[f32],
    dout: &[f32],
) -> [Vec<f32>; 3] {
    let AttentionShape { batch, seq_len, heads, head_size, .. } = shape;
    let (tokens, width) = (batch * seq_len, heads * head_size);
    let qkv = tensor(qkv, &[tokens, 3 * width], dtype);
    let dout = tensor(dout, &[tokens, width], dtype);
    let out = poisoned(&[tokens, width], dtype);
    let dqkv = poisoned(&[tokens, 3 * width], dtype);
    let lse = poisoned(&[tokens * heads], DType::F32);
    let operands = AttentionInputs::packed(&shape, &qkv, dropout).unwrap();
    op::Attention { shape, operands, out: &out, lse: &lse }.run(kernels).unwrap();
    let gradients = ColumnSlice::split(&dqkv, shape.widths()).unwrap();
    op::AttentionBackward { shape, operands, dout: &dout, out: &out, lse: &lse, gradients, dsinks: None }
        .run(kernels)
        .unwrap();
    [out, lse, dqkv].map(|tensor| numbers(&tensor))
}

fn operands(shape: AttentionShape, dtype: DType) -> (Vec<f32>, Vec<f32>) {
    let elements = shape.batch * shape.seq_len * shape.heads * shape.head_size;
    let qkv = pattern(3 * elements, 1, DType::F32).into_iter().map(|x| 2.0 * x).collect();
    (rounded(qkv, dtype), pattern(elements, 2, dtype))
}

/// Checks a case of the table's kind, with scores as large as a model's.
fn check(shape: AttentionShape, documents: Documents, dtype: DType, drops: bool) {
    let shape = AttentionShape { scale: 4.0 * shape.scale, ..shape };
    check_case(&Operation::Attention { shape, documents, dtype, drops, packed: true, sinks: false }.into());
}

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn in_fp32_of_all_head_sizes() {
    for (seq_len, head_size) in [(1, 1), (65, 20), (131, 32), (64, 48), (33, 80), (70, 96), (41, 128), (40, 256)] {
        check(AttentionShape::new(1, seq_len, 2, head_size), &[], DType::F32, false);
    }
    for shape in
        [AttentionShape::new(2, 13, 3, 8), AttentionShape::new(1, 72, 2, 64), AttentionShape::new(1, 40, 1, 100)]
    {
        for drops in [false, true] {
            check(shape, &[], DType::F32, drops);
        }
    }
}

/// Within a warp's rows and a tile, at their ends, and over them; lengths in which lanes can share draws of masks, and
/// others.
const LENGTHS: [usize; 8] = [1, 7, 32, 63, 64, 65, 100, 130];
/// The kernels' own head sizes and smaller ones, the last of them with rows that are not aligned.
const HEAD_SIZES: [usize; 10] = [32, 40, 64, 80, 96, 128, 8, 33, 256, 160];

/// The case of number `i`, of all types and masks.
fn case(shape: AttentionShape, i: usize) {
    check(shape, &[], [DType::F16, DType::BF16][i % 2], i % 4 < 2);
}

fn of_length(seq_len: usize, head_size: usize) -> AttentionShape {
    let (batch, heads) = if seq_len < 64 { (2, 3) } else { (1, 2) };
    AttentionShape::new(batch, seq_len, heads, head_size)
}

/// Every length with these head sizes, and each pair with one of the types and masks.
fn check_head_sizes(numbers: std::ops::Range<usize>) {
    for number in numbers {
        for (i, seq_len) in LENGTHS.into_iter().enumerate() {
            case(of_length(seq_len, HEAD_SIZES[number]), number + i);
        }
    }
}

/// Tests that each check some of the head sizes, side by side.
macro_rules! head_sizes {
    ($($name:ident: $numbers:expr;)*) => {$(
        #[test]
        #[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
        fn $name() {
            check_head_sizes($numbers);
        }
    )*};
}

head_sizes! {
    on_tensor_cores_with_small_heads: 0..2;
    on_tensor_cores_with_heads_of_64_and_80: 2..4;
    on_tensor_cores_with_large_heads: 4..6;
    on_tensor_cores_with_heads_that_fill_no_tile: 6..8;
    on_tensor_cores_with_the_largest_heads: 8..10;
}

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn with_soft_caps() {
    for (i, head_size) in [32, 64, 96, 128, 256].into_iter().enumerate() {
        let shape = AttentionShape { kv_heads: 1, ..AttentionShape::new(1, 70, 2, head_size) };
        for dtype in TYPES {
            // Caps of every score, and of the largest ones.
            let softcap = Some([0.5, 4.0][i % 2]);
            check(AttentionShape { softcap, window: (i > 2).then_some(20), ..shape }, &[], dtype, i % 2 == 0);
        }
    }
}

#[test]
#[ignore = "minutes, and needs a C++ compiler with sanitizers; .ci/full runs it"]
fn every_shape_on_tensor_cores() {
    for head_size in HEAD_SIZES {
        for seq_len in LENGTHS {
            (0..4).for_each(|i| case(of_length(seq_len, head_size), i));
        }
    }
}

/// Windows and documents within a tile, at its end, and over several, so that whole tiles are skipped on either side.
#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn in_windows_and_documents() {
    for (i, (seq_len, head_size, window)) in
        [(70, 32, 1), (130, 64, 40), (200, 128, 64), (260, 40, 130), (33, 64, 7)].into_iter().enumerate()
    {
        let shape = AttentionShape { window: Some(window), ..AttentionShape::new(2, seq_len, 2, head_size) };
        for dtype in TYPES {
            check(shape, &[], dtype, i % 2 == 0);
        }
    }
    // The second sequence is one document.
    let documents: [Documents; 3] = [&[&[1, 17, 80, 81], &[]], &[&[200, 231], &[]], &[&[64], &[]]];
    for (i, ((seq_len, head_size), documents)) in
        [(140, 64), (260, 96), (72, 32)].into_iter().zip(documents).enumerate()
    {
        for (window, dtype) in [(None, DType::F32), (Some(50), DType::F16), (None, DType::BF16)] {
            check(
                AttentionShape { window, ..AttentionShape::new(2, seq_len, 2, head_size) },
                documents,
                dtype,
                i % 2 == 1,
            );
        }
    }
}

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn later_tokens_change_nothing_earlier() {
    let shape = AttentionShape::new(1, 130, 2, 64);
    let width = shape.heads * shape.head_size;
    for (dtype, first) in [(DType::F32, 70), (DType::F16, 70), (DType::BF16, 5)] {
        let run = |qkv: &[f32], dout: &[f32]| attend(&kernels(0), shape, dtype, Dropout::new(0.1, 11, 4, 5), qkv, dout);
        let (mut qkv, mut dout) = operands(shape, dtype);
        let before = run(&qkv, &dout);
        qkv[first * 3 * width..].iter_mut().for_each(|x| *x = 1.5 - *x);
        dout[first * width..].iter_mut().for_each(|x| *x = -*x);
        let after = run(&qkv, &dout);
        assert_eq!(before[0][..first * width], after[0][..first * width], "{dtype:?}");
        assert_ne!(before[0][first * width..], after[0][first * width..], "{dtype:?}");
        for head in 0..shape.heads {
            let rows = head * shape.seq_len..head * shape.seq_len + first;
            assert_eq!(before[1][rows.clone()], after[1][rows], "{dtype:?}");
        }
        // Of the gradients, those of earlier queries.
        let queries = |result: &[Vec<f32>; 3]| -> Vec<f32> {
            result[2].chunks_exact(3 * width).take(first).flat_map(|row| row[..width].to_vec()).collect()
        };
        assert_eq!(queries(&before), queries(&after), "{dtype:?}");
    }
}

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn numbers_that_are_not_finite_show() {
    let shape = AttentionShape::new(1, 70, 1, 32);
    let width = shape.head_size;
    let (token, column) = (66, 3);
    for dtype in TYPES {
        let (qkv, dout) = operands(shape, dtype);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            // In a query, a key, a value.
            for part in 0..3 {
                let mut qkv = qkv.clone();
                qkv[token * 3 * width + part * width + column] = bad;
                let [out, lse, dqkv] = attend(&kernels(2), shape, dtype, None, &qkv, &dout);
                // An infinite key may be one that its query does not look at.
                if part != 1 || bad.is_nan() {
                    assert!(!out[token * width + column].is_finite(), "{bad} in part {part} in {dtype:?}");
                    assert!(part == 2 || !lse[token].is_finite(), "{bad} in part {part} in {dtype:?}");
                }
                assert!(dqkv.iter().any(|x| !x.is_finite()), "{bad} in part {part} in {dtype:?}");
            }
            let mut dout = dout.clone();
            dout[token * width + column] = bad;
            let [out, _, dqkv] = attend(&kernels(2), shape, dtype, None, &qkv, &dout);
            assert!(out.iter().all(|x| x.is_finite()));
            // Of the query, of the keys and of the values.
            for part in 0..3 {
                let rows = dqkv.chunks_exact(3 * width).map(|row| &row[part * width..][..width]);
                assert!(rows.flatten().any(|x| !x.is_finite()), "{bad} in the gradient, part {part} in {dtype:?}");
            }
        }
    }
}

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn an_overflow_in_between_shows() {
    // The output's gradient is finite, and so are the operands, but not their products as FP16 holds them.
    let shape = AttentionShape::new(1, 20, 1, 64);
    let (qkv, dout) = operands(shape, DType::F16);
    let dout: Vec<f32> = rounded(dout.into_iter().map(|x| 60_000.0 * x).collect(), DType::F16);
    let [out, _, dqkv] = attend(&kernels(1), shape, DType::F16, None, &qkv, &dout);
    assert!(out.iter().all(|x| x.is_finite()) && dqkv.iter().any(|x| !x.is_finite()));
    let [_, _, twin] = attend(&Fused, shape, DType::F16, None, &qkv, &dout);
    assert!(twin.iter().zip(&dqkv).all(|(twin, found)| twin.is_finite() || !found.is_finite()));
}

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn what_there_is_no_kernel_for_is_refused() {
    let attempt = |shape: AttentionShape| {
        let (width, tokens) = (shape.heads * shape.head_size, shape.batch * shape.seq_len);
        let qkv = poisoned(&[tokens, shape.widths().iter().sum()], DType::F32);
        let [out, lse] = [width, shape.heads].map(|width| poisoned(&[tokens, width], DType::F32));
        let lse = lse.flatten_all().unwrap();
        let operands = AttentionInputs::packed(&shape, &qkv, None).unwrap();
        let op = op::Attention { shape, operands, out: &out, lse: &lse };
        kernels(0).run(&mut op.into()).unwrap()
    };
    let shape = AttentionShape::new(1, 2, 2, 8);
    for (shape, ran) in [
        (shape, Ran::Done),
        (AttentionShape { window: Some(1), ..shape }, Ran::Done),
        (AttentionShape { kv_heads: 1, ..shape }, Ran::Done),
        (AttentionShape { softcap: Some(50.0), ..shape }, Ran::Done),
        (AttentionShape::new(1, 1, 1, 257), Ran::Unsupported),
        (AttentionShape::new(65_536, 1, 1, 8), Ran::Unsupported),
    ] {
        assert_eq!(attempt(shape), ran, "{shape:?}");
    }
}
