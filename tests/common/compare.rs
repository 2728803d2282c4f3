//! Distances between tensors, and skipping tests whose requirements are missing.

use candle_core::{DType, Tensor};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The values of `tensor` in FP64.
pub(crate) fn values(tensor: &Tensor) -> Vec<f64> {
    tensor.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// The largest magnitude, or 0 without numbers. Panics if a number is not finite, because `f64::max` drops a NaN.
pub(crate) fn largest(numbers: &[impl Into<f64> + Copy]) -> f64 {
    let magnitudes = numbers.iter().enumerate().map(|(at, number)| {
        let number: f64 = (*number).into();
        assert!(number.is_finite(), "number {at} is {number}");
        number.abs()
    });
    magnitudes.fold(0.0, f64::max)
}

/// The largest absolute difference of numbers that must all be finite; the lengths must be the same.
pub(crate) fn furthest(value: &[impl Into<f64> + Copy], truth: &[impl Into<f64> + Copy]) -> f64 {
    assert_eq!(value.len(), truth.len());
    let differences = value.iter().zip(truth).map(|(value, truth)| (*value).into() - (*truth).into());
    largest(&differences.collect::<Vec<f64>>())
}

/// [`furthest`] relative to the largest magnitude of `truth`.
pub(crate) fn distance(value: &[impl Into<f64> + Copy], truth: &[impl Into<f64> + Copy]) -> f64 {
    furthest(value, truth) / largest(truth)
}

/// [`furthest`] of tensors of one shape.
pub(crate) fn max_difference(value: &Tensor, truth: &Tensor) -> f64 {
    assert_eq!(value.dims(), truth.dims());
    furthest(&values(value), &values(truth))
}

/// The L2 norm of the difference divided by the norm of `truth`; 0 if both are zero. The shapes must be the same, and
/// all values finite.
pub(crate) fn relative(value: &Tensor, truth: &Tensor) -> f64 {
    assert_eq!(value.dims(), truth.dims());
    let difference = norm_of_difference(value, truth);
    if difference == 0.0 { 0.0 } else { difference / norm(truth) }
}

/// `tensors` with the key third of every `c_attn.bias` under a separate name, `….c_attn.bias[key]`.
///
/// Softmax is invariant to a constant added to all scores of a row, so this third's true gradient is zero, and the
/// computed one is rounding noise, which Adam divides by itself.
pub(crate) fn key_bias_apart(tensors: &BTreeMap<String, Tensor>) -> BTreeMap<String, Tensor> {
    let mut apart = BTreeMap::new();
    for (name, tensor) in tensors {
        if name.ends_with("c_attn.bias") {
            let [query, key, value]: [Tensor; 3] = tensor.chunk(3, 0).unwrap().try_into().unwrap();
            apart.insert(name.clone(), Tensor::cat(&[query, value], 0).unwrap());
            apart.insert(format!("{name}[key]"), key);
        } else {
            apart.insert(name.clone(), tensor.clone());
        }
    }
    apart
}

/// Asserts that both hold the same names and that every tensor is within a [`relative`] `tolerance` of the reference.
///
/// The key third of `c_attn.bias` is compared on the scale of the whole bias, to `key_tolerance`.
pub(crate) fn assert_close(
    what: &str,
    values: &BTreeMap<String, Tensor>,
    truths: &BTreeMap<String, Tensor>,
    tolerance: f64,
    key_tolerance: f64,
) {
    assert!(values.keys().eq(truths.keys()), "{what}: {:?} against {:?}", values.keys(), truths.keys());
    let (values, truths) = (key_bias_apart(values), key_bias_apart(truths));
    for (name, truth) in &truths {
        let (error, tolerance) = match name.strip_suffix("[key]") {
            None => (relative(&values[name], truth), tolerance),
            Some(bias) => (norm_of_difference(&values[name], truth) / norm(&truths[bias]), key_tolerance),
        };
        assert!(error <= tolerance, "{what}: `{name}` is {error:.2e} away, more than {tolerance:.0e}");
    }
}

/// The L2 norm of values that must all be finite.
fn norm(tensor: &Tensor) -> f64 {
    let values = values(tensor);
    largest(&values);
    values.iter().map(|v| v * v).sum::<f64>().sqrt()
}

fn norm_of_difference(value: &Tensor, truth: &Tensor) -> f64 {
    norm(&(value.to_dtype(DType::F64).unwrap() - truth.to_dtype(DType::F64).unwrap()).unwrap())
}

/// Skips a test with a message, but fails if `FINETUNE_REQUIRE` lists `requirement`, as `.ci/run` does.
#[expect(clippy::print_stderr, reason = "a test has no other output")]
pub(crate) fn skip(requirement: &str, reason: &str) {
    let required = std::env::var("FINETUNE_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|name| name == requirement), "`{requirement}` is required: {reason}");
    eprintln!("skipped: {reason}");
}

/// The path of GPT-2's `tokenizer.json`, which is stored next to this project. Without it the test is skipped.
pub(crate) fn gpt2_tokenizer() -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/data/gpt2/tokenizer.json");
    if !path.is_file() {
        skip("shared", "there is no ../shared/data/gpt2/tokenizer.json");
        return None;
    }
    Some(path)
}
