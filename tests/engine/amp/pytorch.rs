//! PyTorch's tests of its scaler, under their names. Most are cases: a model is trained with the scaler's calls, and a

//! control without, which leaves out the batch on which the scaler is made to find an overflow.

use super::*;
use crate::common::launch;

const SKIP_ITER: usize = 2;
/// Below every norm the cases meet, so that clipping always acts.
const MAX_NORM: f64 = 0.02;

/// One run: of the control, or through the scaler.
struct Case<O> {
    model: Model,
    optimizer: O,
    scaler: GradScaler,
    control: bool,
}

impl<O: ScaledOptimizer> Case<O> {
    fn scale(&self, loss: &Tensor) -> Tensor {
        if self.control { loss.clone() } else { self.scaler.scale(loss).unwrap() }
    }

    /// The factor of its gradients: 1 in the control.
    fn factor(&self) -> f64 {
        if self.control { 1.0 } else { f64::from(self.scaler.get_scale()) }
    }

    /// Breaks the gradients of batch `i` if `i` is `SKIP_ITER`, then steps and updates, or does the same as the
    /// control.
    fn step(&mut self, i: usize, grads: &mut GradStore) {
        let skips = i == SKIP_ITER && self.scaler.is_enabled();
        if !self.control {
            assert_eq!(self.scaler.step(&mut self.optimizer, grads).unwrap(), !skips);
            self.scaler.update().unwrap();
        } else if !skips {
            self.optimizer.step(grads).unwrap();
        }
    }
}

/// Runs control and case, enabled and disabled, and compares the parameters' bits; the scale after the `unskipped`
/// clean and `skipped` other updates is known.
fn run_scaling_case<O: ScaledOptimizer>(
    new: fn(Vec<Var>) -> O,
    [unskipped, skipped]: [i32; 2],
    run: impl Fn(&mut Case<O>),
) {
    for enabled in [true, false] {
        let config = GradScalerConfig { enabled, init_scale: 128.0, growth_interval: 1, ..GradScalerConfig::default() };
        let start = all_bits(&Model::new().vars);
        let [control, case] = [true, false].map(|control| {
            let model = Model::new();
            let optimizer = new(model.vars.clone());
            let mut case = Case { model, optimizer, scaler: GradScaler::new(config).unwrap(), control };
            run(&mut case);
            case
        });
        let scale = if enabled { 128.0 * 2f32.powi(unskipped - skipped) } else { 1.0 };
        assert_eq!(case.scaler.get_scale(), scale);
        assert_eq!(all_bits(&case.model.vars), all_bits(&control.model.vars));
        assert_ne!(all_bits(&case.model.vars), start);
    }
}

/// The loop of most cases; `between` acts on the gradients before the step.
fn train<O: ScaledOptimizer>(case: &mut Case<O>, between: impl Fn(&mut Case<O>, &mut GradStore)) {
    for (i, batch) in batches().iter().enumerate() {
        let loss = case.model.loss(batch);
        let mut grads = case.scale(&loss).backward().unwrap();
        if i == SKIP_ITER && case.scaler.is_enabled() && !case.control {
            case.model.break_weight(&mut grads);
        }
        between(case, &mut grads);
        case.step(i, &mut grads);
    }
}

#[test]
fn g3_one_overflow_in_four_batches() {
    fn candles_adamw(vars: Vec<Var>) -> WithVars<candle_nn::AdamW> {
        WithVars::new(vars, ParamsAdamW::default()).unwrap()
    }
    run_scaling_case(sgd, [3, 1], |case| train(case, |_, _| {}));
    run_scaling_case(adamw, [3, 1], |case| train(case, |_, _| {}));
    run_scaling_case(candles_adamw, [3, 1], |case| train(case, |_, _| {}));
}

/// Clipping while scaled, at the scaled norm, equals clipping the unscaled gradients (C33).
#[test]
fn test_grad_scaling_clipping() {
    run_scaling_case(sgd, [3, 1], |case| {
        train(case, |case, grads| {
            let norm = clip_grad_norm(grads, &case.model.vars, MAX_NORM * case.factor()).unwrap();
            assert!(norm > MAX_NORM * case.factor());
        });
    });
}

#[test]
fn test_grad_scaling_clipping_separate_unscale() {
    run_scaling_case(sgd, [3, 1], |case| {
        train(case, |case, grads| {
            if !case.control {
                case.scaler.unscale(&case.optimizer, grads).unwrap();
            }
            assert!(clip_grad_norm(grads, &case.model.vars, MAX_NORM).unwrap() > MAX_NORM);
        });
    });
}

/// G4 and C32: two micro-batches an update; the scale moves between updates only, and nothing is skipped.
#[test]
fn test_grad_scaling_accumulation() {
    run_scaling_case(sgd, [2, 0], |case| {
        for pair in batches().chunks(2) {
            let scale = case.scaler.get_scale();
            let mut grads = GradStore::default();
            for batch in pair {
                let loss = (case.model.loss(batch) / 2.0).unwrap();
                grads.extend(case.scale(&loss).backward().unwrap()).unwrap();
                assert_eq!(case.scaler.get_scale(), scale);
            }
            case.step(usize::MAX, &mut grads);
        }
    });
}

/// Two models, two losses that each need both, one scaler: an overflow of the second model's gradients skips its step
/// alone, and lowers the one scale (C21).
#[test]
fn test_grad_scaling_multiple() {
    for enabled in [true, false] {
        let config = GradScalerConfig { enabled, init_scale: 128.0, growth_interval: 1, ..GradScalerConfig::default() };
        let [control, scaled] = [true, false].map(|control| {
            let mut scaler = GradScaler::new(config).unwrap();
            let models = [Model::new(), Model::new()];
            let (mut first, mut second) = (sgd(models[0].vars.clone()), adamw(models[1].vars.clone()));
            for (i, (x, y)) in batches().iter().enumerate() {
                let [a, b] = [0, 1].map(|m| models[m].forward(x));
                let blends = [(0.3, 0.7), (0.6, -0.4)].map(|(p, q)| ((&a * p).unwrap() + (&b * q).unwrap()).unwrap());
                let mut grads = GradStore::default();
                for loss in blends.map(|blend| mse(&blend, y).unwrap()) {
                    let loss = if control { loss } else { scaler.scale(&loss).unwrap() };
                    grads.extend(loss.backward().unwrap()).unwrap();
                }
                let skips = i == SKIP_ITER && enabled;
                if control {
                    first.step(&grads).unwrap();
                    if !skips {
                        second.step(&grads).unwrap();
                    }
                } else {
                    if skips {
                        models[1].break_weight(&mut grads);
                    }
                    assert!(scaler.step(&mut first, &mut grads).unwrap());
                    assert_eq!(scaler.step(&mut second, &mut grads).unwrap(), !skips);
                    scaler.update().unwrap();
                }
            }
            assert!(control || scaler.get_scale() == if enabled { 128.0 * 4.0 } else { 1.0 });
            models.map(|model| all_bits(&model.vars))
        });
        assert_eq!(scaled, control);
    }
}

/// A loss that includes its own gradient's norm. candle has second derivatives only in a process whose environment says
/// so from the start, so the test runs itself again in one.
#[test]
fn test_grad_scaling_penalty() {
    const SWITCH: &str = "CANDLE_GRAD_DO_NOT_DETACH";
    if std::env::var_os(SWITCH).is_none() {
        let mut child = launch::command(std::env::current_exe().unwrap());
        let output =
            child.args(["--exact", "amp::pytorch::test_grad_scaling_penalty"]).env(SWITCH, "1").output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
        return;
    }
    // (x³)' = 3x², and the derivative of its square is 36x³.
    let x = Var::new(&[2f32], &CPU).unwrap();
    let slope = x.powf(3.0).unwrap().sum_all().unwrap().backward().unwrap().get(&x).unwrap().clone();
    let second = slope.sqr().unwrap().sum_all().unwrap().backward().unwrap();
    assert_eq!(values(second.get(&x).unwrap()), [36.0 * 8.0]);

    run_scaling_case(sgd, [3, 1], |case| {
        for (i, batch) in batches().iter().enumerate() {
            let loss = case.model.loss(batch);
            let grads = case.scale(&loss).backward().unwrap();
            let squares = case.model.vars.iter().map(|var| {
                let unscaled = (grads.get(var).unwrap() / case.factor()).unwrap();
                unscaled.sqr().unwrap().sum_all().unwrap()
            });
            let norm = squares.reduce(|a, b| (a + b).unwrap()).unwrap().sqrt().unwrap();
            let mut grads = case.scale(&(loss + norm).unwrap()).backward().unwrap();
            if i == SKIP_ITER && case.scaler.is_enabled() && !case.control {
                case.model.break_weight(&mut grads);
            }
            case.step(i, &mut grads);
        }
    });
}

/// Unscales `grads` at a scale of 4; then whether a step went ahead.
fn unscale(grads: &[Tensor]) -> (Vec<Tensor>, bool) {
    let vars: Vec<_> = grads.iter().map(|g| Var::zeros(g.shape(), g.dtype(), &CPU).unwrap()).collect();
    let mut scaler = scaler(4.0, 2000);
    let mut optimizer = adamw(vars.clone());
    let mut grads = store(vars.iter().zip(grads.iter().cloned()));
    scaler.unscale(&optimizer, &mut grads).unwrap();
    let unscaled = vars.iter().map(|var| grads.get(var).unwrap().clone()).collect();
    (unscaled, scaler.step(&mut optimizer, &mut grads).unwrap())
}

/// 20 × 20 of `value`, contiguous, transposed, and a slice of something larger; everything around the slice is NaN.
fn layouts(value: f32, dtype: DType) -> [Tensor; 3] {
    let plain = Tensor::full(value, (20, 20), &CPU).unwrap().to_dtype(dtype).unwrap();
    let around = Tensor::full(f32::NAN, (20, 5), &CPU).unwrap().to_dtype(dtype).unwrap();
    let wide = Tensor::cat(&[&around, &plain, &around], 1).unwrap();
    [plain.clone(), plain.t().unwrap(), wide.narrow(1, 5, 20).unwrap()]
}

/// Like `layouts`, but with one of its values replaced.
fn layouts_with(odd: f32, dtype: DType) -> [Tensor; 3] {
    layouts(4.0, dtype).map(|tensor| {
        let mut mask = vec![0u8; 400];
        mask[20 * 7 + 13] = 1;
        let mask = Tensor::from_vec(mask, (20, 20), &CPU).unwrap();
        let plain = mask.where_cond(&full(odd, &tensor), &tensor.contiguous().unwrap()).unwrap();
        if tensor.is_contiguous() { plain } else { plain.t().unwrap() }
    })
}

/// G7 and C14: 4 unscales to exactly 1 in every type and layout; what is not finite is found wherever it is, alone or
/// among tensors of other types. (Devices other than the CPU need a GPU to be tested.)
#[test]
fn test_grad_scaling_unscale() {
    for dtype in DTYPES {
        for grad in layouts(4.0, dtype) {
            let (unscaled, applied) = unscale(&[grad]);
            assert!(applied && values(&unscaled[0]).iter().all(|value| *value == 1.0), "{dtype:?}");
        }
        for odd in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            for grad in layouts_with(odd, dtype) {
                assert!(!unscale(&[grad]).1, "{odd} in {dtype:?}");
            }
        }
    }
    let mixed = DTYPES.map(|dtype| layouts(4.0, dtype)).concat();
    let (unscaled, applied) = unscale(&mixed);
    assert!(applied && unscaled.iter().flat_map(values).all(|value| value == 1.0));
    let broken = DTYPES.map(|dtype| layouts_with(f32::NAN, dtype)).concat();
    for i in 0..mixed.len() {
        let mut grads = mixed.clone();
        grads[i] = broken[i].clone();
        assert!(!unscale(&grads).1, "gradient {i}");
    }
}

/// G1, by steps of an optimizer.
#[test]
fn test_grad_scaling_update_scale() {
    let config =
        GradScalerConfig { init_scale: 4.0, backoff_factor: 0.25, growth_interval: 2, ..GradScalerConfig::default() };
    let mut scaler = GradScaler::new(config).unwrap();
    let (var, mut optimizer) = single(DType::F32);
    let seen = [1.0, 1.0, f32::INFINITY].map(|grad| {
        scaler.step(&mut optimizer, &mut store([(&var, full(grad, &var))])).unwrap();
        scaler.update().unwrap();
        (scaler.get_scale(), tracker(&scaler))
    });
    assert_eq!(seen, [(4.0, 1), (8.0, 0), (2.0, 0)]);
}

/// G6, C29 and C30: loading overrides everything, whether the scaler was used before or not.
#[test]
fn test_grad_scaling_state_dict() {
    let saved =
        StateDict { scale: 3.0, growth_factor: 4.0, backoff_factor: 0.5, growth_interval: 2, growth_tracker: 0 };
    for used in [false, true] {
        let config = GradScalerConfig {
            init_scale: 6.0,
            growth_factor: 7.0,
            backoff_factor: 0.8,
            growth_interval: 10,
            ..GradScalerConfig::default()
        };
        let mut scaler = GradScaler::new(config).unwrap();
        if used {
            let (var, mut optimizer) = single(DType::F32);
            for _ in 0..7 {
                scaler.step(&mut optimizer, &mut store([(&var, full(1.0, &var))])).unwrap();
                scaler.update().unwrap();
            }
            assert_eq!(tracker(&scaler), 7);
        }
        scaler.load_state_dict(Some(&saved)).unwrap();
        assert_eq!((scaler.state_dict(), scaler.get_scale()), (Some(saved), 3.0));
        assert!(scaler.load_state_dict(None).is_err());
        assert_eq!(scaler.state_dict(), Some(saved));
    }
}

/// G5: growth by 16 from 1e38 would leave FP32.
#[test]
fn test_grad_scale_will_not_overflow() {
    let config =
        GradScalerConfig { init_scale: 1e38, growth_factor: 16.0, growth_interval: 1, ..GradScalerConfig::default() };
    let mut scaler = GradScaler::new(config).unwrap();
    let (var, mut optimizer) = single(DType::F32);
    let loss = (var.sum_all().unwrap() * 1e-3).unwrap();
    let mut grads = scaler.scale(&loss).unwrap().backward().unwrap();
    assert!(scaler.step(&mut optimizer, &mut grads).unwrap());
    assert_eq!(scaler.update().unwrap(), ScaleChange::Held);
    assert_eq!((scaler.get_scale(), tracker(&scaler)), (1e38, 0));
}

/// Our deliberate difference: in PyTorch every parameter ends as NaN here. Ours looks again right before the optimizer
/// runs (C17), skips the step and counts it as an overflow.
#[test]
fn test_params_invalidated_with_grads_invalidated_between_unscale_and_step() {
    let model = Model::new();
    let mut optimizer = adamw(model.vars.clone());
    let mut scaler = scaler(128.0, 1);
    let before = (all_bits(&model.vars), state_bits(&optimizer));
    let mut grads = scaler.scale(&model.loss(&batches()[0])).unwrap().backward().unwrap();
    scaler.unscale(&optimizer, &mut grads).unwrap();
    for (i, var) in model.vars.iter().enumerate() {
        grads.insert(var, full(if i % 2 == 0 { f32::INFINITY } else { f32::NAN }, var));
    }
    assert!(!scaler.step(&mut optimizer, &mut grads).unwrap());
    assert_eq!(scaler.update().unwrap(), ScaleChange::BackedOff { from: 128.0, to: 64.0 });
    assert_eq!((all_bits(&model.vars), state_bits(&optimizer)), before);
    // The verdict does not outlive its update.
    let mut grads = scaler.scale(&model.loss(&batches()[0])).unwrap().backward().unwrap();
    assert!(scaler.step(&mut optimizer, &mut grads).unwrap());
    assert_eq!(scaler.update().unwrap(), ScaleChange::Grew { from: 64.0, to: 128.0 });
}
