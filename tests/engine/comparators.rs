//! The comparators of the tests reject differences and numbers that are not finite.

use crate::common::compare::{assert_close, distance, furthest, largest, max_difference, relative, skip};
use crate::common::launch;
use candle_core::{Device, Tensor};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

const TRUTH: [f64; 5] = [3.0, -1.0, 0.5, 2.0, -4.0];

fn tensor(values: &[f64]) -> Tensor {
    Tensor::new(values, &Device::Cpu).unwrap()
}

fn is_refused<R>(compare: impl FnOnce() -> R) -> bool {
    catch_unwind(AssertUnwindSafe(compare)).is_err()
}

fn close(value: &[&[f64]], truth: &[&[f64]], tolerance: f64) {
    let named = |tensors: &[&[f64]]| -> BTreeMap<String, Tensor> {
        tensors.iter().enumerate().map(|(i, values)| (format!("{i}.c_attn.bias"), tensor(values))).collect()
    };
    assert_close("test", &named(value), &named(truth), tolerance, tolerance);
}

/// At each position, also ahead of a larger error, and in the value, in the truth or in both.
#[test]
fn a_number_that_is_not_finite_is_refused_wherever_it_is() {
    for at in 0..TRUTH.len() {
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let mut other = TRUTH.map(|x| x + 0.25);
            other[at] = bad;
            assert!(is_refused(|| largest(&other)), "{bad} at {at}");
            for (value, truth) in [(&other, &TRUTH), (&TRUTH, &other), (&other, &other)] {
                let (a, b) = (tensor(value), tensor(truth));
                assert!(is_refused(|| furthest(value, truth)), "{bad} at {at}");
                assert!(is_refused(|| distance(value, truth)), "{bad} at {at}");
                assert!(is_refused(|| max_difference(&a, &b)), "{bad} at {at}");
                assert!(is_refused(|| relative(&a, &b)), "{bad} at {at}");
                let (value, truth) = ([&value[..], &value[..1]].concat(), [&truth[..], &truth[..1]].concat());
                assert!(is_refused(|| close(&[&value], &[&truth], f64::INFINITY)), "{bad} at {at}");
            }
        }
    }
}

#[test]
fn differences_have_their_size() {
    let other = [3.0, -1.0, 0.75, 2.0, -4.5];
    assert_eq!((largest(&TRUTH), furthest(&other, &TRUTH), distance(&other, &TRUTH)), (4.0, 0.5, 0.125));
    assert_eq!(max_difference(&tensor(&other), &tensor(&TRUTH)), 0.5);
    assert!((relative(&tensor(&[0.0, 6.0]), &tensor(&[3.0, 2.0])) - (25.0_f64 / 13.0).sqrt()).abs() < 1e-12);
    assert!(
        is_refused(|| furthest(&TRUTH[1..], &TRUTH)) && is_refused(|| relative(&tensor(&TRUTH[1..]), &tensor(&TRUTH)))
    );
}

#[test]
fn a_swapped_tensor_and_an_error_of_one_percent_are_found() {
    let a = [1.0, 2.0, 3.0];
    let b = [1.5, -2.5, 0.5];
    close(&[&a, &b], &[&a, &b], 0.0);
    assert!(is_refused(|| close(&[&b, &a], &[&a, &b], 0.1)));
    assert!(is_refused(|| close(&[&a.map(|x| x * 1.01), &b], &[&a, &b], 0.0099)));
    assert!(is_refused(|| close(&[&a], &[&a, &b], 0.1)), "a tensor is missing");
    assert!(is_refused(|| close(&[&a, &b], &[&a], 0.1)), "there is a tensor too many");
}

#[test]
#[ignore = "started by the test below"]
fn skips_itself() {
    skip("shared", "it lacks something");
}

#[test]
fn what_is_missing_fails_a_test_if_it_is_required() {
    for (required, passes) in [("", true), ("python,tmux", true), ("python,shared", false)] {
        let mut test = launch::command(std::env::current_exe().unwrap());
        test.args(["--exact", "comparators::skips_itself", "--ignored"]);
        let output = test.env("FINETUNE_REQUIRE", required).output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() == passes && said.contains("1 test"), "{required}: {said}");
    }
}
