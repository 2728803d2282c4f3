//! Distances between tensors, and skipping tests whose requirements are missing.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Tensor};

/// The values of `tensor` in FP64.
pub(crate) fn values(tensor: &Tensor) -> Vec<f64> {
    tensor.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// The largest absolute difference; the shapes must be the same.
pub(crate) fn max_difference(value: &Tensor, truth: &Tensor) -> f64 {
    assert_eq!(value.dims(), truth.dims());
    let (value, truth) = (values(value), values(truth));
    // A NaN must not be swallowed by `f64::max`.
    value.iter().zip(&truth).fold(0.0, |worst, (v, t)| if (v - t).abs() <= worst { worst } else { (v - t).abs() })
}

/// The L2 norm of the difference over that of `truth`; the shapes must be the same.
pub(crate) fn relative(value: &Tensor, truth: &Tensor) -> f64 {
    assert_eq!(value.dims(), truth.dims());
    let (value, truth) = (values(value), values(truth));
    let difference: f64 = value.iter().zip(&truth).map(|(v, t)| (v - t).powi(2)).sum();
    (difference / truth.iter().map(|t| t * t).sum::<f64>()).sqrt()
}

/// `tensors` with the key third of every `c_attn.bias` under a name of its own, `….c_attn.bias[key]`.
///
/// Softmax is invariant to a constant added to all scores of a row, so this third's true gradient is zero, and the computed
/// one is rounding noise, which Adam divides by itself.
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

/// Asserts that both hold the same names and that every tensor is within `tolerance` of the truth, [`relative`]ly.
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
            Some(bias) => (distance(&values[name], truth) / norm(&truths[bias]), key_tolerance),
        };
        assert!(error <= tolerance, "{what}: `{name}` is {error:.2e} away, more than {tolerance:.0e}");
    }
}

fn norm(tensor: &Tensor) -> f64 {
    values(tensor).iter().map(|v| v * v).sum::<f64>().sqrt()
}

fn distance(value: &Tensor, truth: &Tensor) -> f64 {
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
