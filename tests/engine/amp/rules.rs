//! Lines of the project's list of the scaler's rules (C, G), by their numbers, with tensors.

use super::*;

#[test]
fn c3_disabled_it_is_not_there() {
    let mut scaler = disabled();
    let loss = Tensor::new(f16::from_f32(3.0), &CPU).unwrap();
    let scaled = scaler.scale(&loss).unwrap();
    assert_eq!((scaled.dtype(), bits(&scaled)), (DType::F16, bits(&loss)));
    let (var, mut optimizer) = single(DType::F16);
    let mut grads = store([(&var, full(f32::INFINITY, &var))]);
    scaler.unscale(&optimizer, &mut grads).unwrap();
    assert!(scaler.step(&mut optimizer, &mut grads).unwrap());
    assert!(!values(&var)[0].is_finite(), "an optimizer runs on anything");
    assert_eq!((scaler.update().unwrap(), scaler.get_scale()), (ScaleChange::Held, 1.0));
    assert_eq!(scaler.state_dict(), None);
}

#[test]
fn c6_a_scaled_loss_keeps_its_shape_and_has_room() {
    let scaler = scaler(65536.0, 2000);
    for dtype in DTYPES {
        let losses = Tensor::new(&[[10f32, 0.5], [0.0, -3.0]], &CPU).unwrap().to_dtype(dtype).unwrap();
        let scaled = scaler.scale(&losses).unwrap();
        assert_eq!(scaled.dims(), [2, 2]);
        assert_eq!(values(&scaled), [655_360.0, 32768.0, 0.0, -196_608.0], "{dtype:?}");
    }
    let list = [1f32, 2.0].map(|loss| scaler.scale(&Tensor::new(loss, &CPU).unwrap()).unwrap());
    assert_eq!(list.map(|loss| loss.to_scalar::<f32>().unwrap()), [65536.0, 131_072.0]);
    let counts = Tensor::new(3u32, &CPU).unwrap();
    assert!(scaler.scale(&counts).unwrap_err().to_string().contains("has no gradient"));
}

#[test]
fn several_losses_are_scaled_at_once_and_factors_can_be_set() {
    let mut scaler = scaler(1024.0, 2000);
    let losses = [1f32, -2.0].map(|loss| Tensor::new(loss, &CPU).unwrap());
    let scaled = scaler.scale_all(&losses).unwrap();
    assert_eq!([values(&scaled[0])[0], values(&scaled[1])[0]], [1024.0, -2048.0]);
    scaler.set_growth_factor(4.0).unwrap();
    scaler.set_backoff_factor(0.25).unwrap();
    scaler.set_growth_interval(1).unwrap();
    assert_eq!((scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()), (4.0, 0.25, 1));
    assert!(scaler.set_growth_factor(1.0).is_err() && scaler.set_backoff_factor(1.0).is_err());
    assert!(scaler.set_growth_interval(0).is_err());
    assert_eq!((scaler.get_growth_factor(), scaler.get_scale(), scaler.is_enabled()), (4.0, 1024.0, true));
    let (var, mut optimizer) = single(DType::F32);
    for (gradient, scale) in [(1.0, 4096.0), (f32::INFINITY, 1024.0)] {
        let mut grads = store([(&var, full(gradient, &var))]);
        scaler.step(&mut optimizer, &mut grads).unwrap();
        scaler.update().unwrap();
        assert_eq!(scaler.get_scale(), scale);
    }
}

#[test]
fn c7_the_inverse_is_divided_in_f64_and_rounded_once() {
    let grad = [0.1f32, -7.0, f32::MIN_POSITIVE, 1e-40];
    for scale in [3.0f32, 65536.0, 1e38, 0.3, 1.0] {
        let mut scaler = scaler(65536.0, 1);
        scaler.update_to(scale).unwrap();
        let var = Var::zeros(4, DType::F32, &CPU).unwrap();
        let mut grads = store([(&var, Tensor::new(&grad, &CPU).unwrap())]);
        scaler.unscale(&adamw(vec![var.clone()]), &mut grads).unwrap();
        let inverse = (1.0 / f64::from(scale)) as f32;
        assert_eq!(values(grads.get(&var).unwrap()), grad.map(|g| g * inverse));
    }
}

/// 1e20 over a scale of 1e-30 is infinite: PyTorch writes that into the weights.
#[test]
fn c9_a_gradient_that_unscaling_makes_infinite_is_found() {
    for separately in [false, true] {
        let mut scaler = scaler(65536.0, 1);
        scaler.update_to(1e-30).unwrap();
        let (var, mut optimizer) = single(DType::F32);
        let before = state_bits(&optimizer);
        let mut grads = store([(&var, full(1e20, &var))]);
        if separately {
            scaler.unscale(&optimizer, &mut grads).unwrap();
        }
        assert!(!scaler.step(&mut optimizer, &mut grads).unwrap());
        assert_eq!(state_bits(&optimizer), before);
        assert!(matches!(scaler.update().unwrap(), ScaleChange::AtMinScale { streak: 1, .. }));
    }
}

#[test]
fn c10_variables_without_a_gradient_are_skipped_and_none_is_an_error() {
    let [used, idle] = [(); 2].map(|()| Var::ones(2, DType::F32, &CPU).unwrap());
    let mut scaler = scaler(4.0, 1);
    let mut optimizer = adamw(vec![used.clone(), idle.clone()]);
    assert!(scaler.step(&mut optimizer, &mut store([(&used, full(1.0, &used))])).unwrap());
    scaler.update().unwrap();
    assert!(values(&used)[0] < 1.0);
    assert_eq!(values(&idle), [1.0; 2]);

    let stranger = Var::ones(2, DType::F32, &CPU).unwrap();
    let mut grads = store([(&stranger, full(1.0, &stranger))]);
    scaler.unscale(&optimizer, &mut grads).unwrap();
    let error = scaler.step(&mut optimizer, &mut grads).unwrap_err().to_string();
    assert!(error.contains("none of its parameters has a gradient"), "{error}");
    assert!(scaler.update().is_err());
}

#[test]
fn c13_unscaling_again_is_an_error_that_leaves_the_gradients_alone() {
    let (var, mut optimizer) = single(DType::F32);
    let mut scaler = scaler(4.0, 1);
    let mut grads = store([(&var, full(4.0, &var))]);
    scaler.unscale(&optimizer, &mut grads).unwrap();
    assert!(scaler.unscale(&optimizer, &mut grads).unwrap_err().to_string().contains("already called"));
    assert_eq!(values(grads.get(&var).unwrap()), [1.0]);
    scaler.step(&mut optimizer, &mut grads).unwrap();
    assert!(scaler.unscale(&optimizer, &mut grads).unwrap_err().to_string().contains("after `step`"));
    assert_eq!(values(grads.get(&var).unwrap()), [1.0]);
}

/// One of two optimizers that share the scaler is unscaled by hand, the other by its step; neither twice.
#[test]
fn c15_step_unscales_unless_that_was_done() {
    let [(first, mut by_hand), (second, mut by_step)] = [(); 2].map(|()| single(DType::F32));
    let mut scaler = scaler(4.0, 2000);
    let mut grads = store([(&first, full(8.0, &first)), (&second, full(8.0, &second))]);
    scaler.unscale(&by_hand, &mut grads).unwrap();
    assert_eq!([&first, &second].map(|var| values(grads.get(var).unwrap())[0]), [2.0, 8.0]);
    assert!(scaler.step(&mut by_hand, &mut grads).unwrap() && scaler.step(&mut by_step, &mut grads).unwrap());
    assert_eq!([&first, &second].map(|var| values(grads.get(var).unwrap())[0]), [2.0, 2.0]);
    assert_eq!(bits(&first), bits(&second));

    // The verdict of `unscale` holds, even if the gradient was mended since.
    scaler.update().unwrap();
    let mut grads = store([(&first, full(f32::NAN, &first))]);
    scaler.unscale(&by_hand, &mut grads).unwrap();
    grads.insert(&first, full(1.0, &first));
    assert!(!scaler.step(&mut by_hand, &mut grads).unwrap());
}

#[test]
fn c16_an_overflow_leaves_variables_moments_and_counters_bit_identical() {
    let vars: Vec<_> = DTYPES.iter().map(|dtype| Var::ones((3, 2), *dtype, &CPU).unwrap()).collect();
    let mut optimizer = adamw(vars.clone());
    let mut scaler = scaler(4.0, 2000);
    let mut round = |last: f32, optimizer: &mut AdamW| {
        let mut grads = store(vars.iter().map(|var| (var, full(0.3, var))));
        grads.insert(&vars[3], full(last, &vars[3]));
        let applied = scaler.step(optimizer, &mut grads).unwrap();
        scaler.update().unwrap();
        applied
    };
    assert!(round(0.3, &mut optimizer));
    let before = (all_bits(&vars), state_bits(&optimizer));
    assert!(!round(f32::INFINITY, &mut optimizer));
    assert_eq!((all_bits(&vars), state_bits(&optimizer)), before);
    assert!(round(0.3, &mut optimizer));
    assert_ne!(state_bits(&optimizer), before.1);
}

#[test]
fn c18_and_c25_a_second_step_and_an_update_without_a_check_are_errors() {
    let (var, mut optimizer) = single(DType::F32);
    let mut scaler = scaler(4.0, 2000);
    assert!(scaler.update().unwrap_err().to_string().contains("without any gradient checked"));
    let mut grads = store([(&var, full(4.0, &var))]);
    scaler.step(&mut optimizer, &mut grads).unwrap();
    let after = bits(&var);
    assert!(scaler.step(&mut optimizer, &mut grads).unwrap_err().to_string().contains("already called"));
    assert_eq!(bits(&var), after);
    scaler.update().unwrap();
    // Unscaling without a step counts as a check.
    grads.insert(&var, full(f32::INFINITY, &var));
    scaler.unscale(&optimizer, &mut grads).unwrap();
    assert_eq!(scaler.update().unwrap(), ScaleChange::BackedOff { from: 4.0, to: 2.0 });
    assert!(scaler.update().is_err());
}

#[test]
fn c26_a_new_scale_ignores_what_was_found_and_starts_the_next_round() {
    let (var, mut optimizer) = single(DType::F32);
    let mut scaler = scaler(4.0, 2000);
    scaler.step(&mut optimizer, &mut store([(&var, full(4.0, &var))])).unwrap();
    scaler.update().unwrap();
    let mut grads = store([(&var, full(4.0, &var))]);
    scaler.unscale(&optimizer, &mut grads).unwrap();
    grads.insert(&var, full(f32::NAN, &var));
    assert!(!scaler.step(&mut optimizer, &mut grads).unwrap());
    scaler.update_to(64.0).unwrap();
    assert_eq!((scaler.get_scale(), tracker(&scaler)), (64.0, 1));
    assert!(scaler.step(&mut optimizer, &mut store([(&var, full(4.0, &var))])).unwrap());
    assert_eq!(scaler.update().unwrap(), ScaleChange::Held);
    assert!(scaler.update_to(f32::NAN).is_err() && scaler.update_to(0.0).is_err());
    assert_eq!(scaler.get_scale(), 64.0);
}

#[test]
fn c32_unscaling_a_micro_batch_at_a_time_is_refused() {
    let model = Model::new();
    let mut scaler = scaler(4.0, 2000);
    let optimizer = sgd(model.vars.clone());
    let [mut first, mut second] = [0, 1].map(|i| scaler.scale(&model.loss(&batches()[i])).unwrap().backward().unwrap());
    scaler.unscale(&optimizer, &mut first).unwrap();
    assert!(scaler.unscale(&optimizer, &mut second).is_err());
}

#[test]
fn c33_clipping_at_m_after_unscaling_equals_clipping_at_m_times_the_scale_before() {
    let model = Model::new();
    let mut scaler = scaler(1024.0, 2000);
    let optimizer = sgd(model.vars.clone());
    let backward = |scaler: &GradScaler| scaler.scale(&model.loss(&batches()[0])).unwrap().backward().unwrap();
    let (mut after, mut before) = (backward(&scaler), backward(&scaler));
    scaler.unscale(&optimizer, &mut after).unwrap();
    let norm = clip_grad_norm(&mut after, &model.vars, 0.1).unwrap();
    assert_eq!(clip_grad_norm(&mut before, &model.vars, 0.1 * 1024.0).unwrap(), norm * 1024.0);
    scaler.update().unwrap();
    scaler.update_to(1024.0).unwrap();
    scaler.unscale(&optimizer, &mut before).unwrap();
    for var in &model.vars {
        assert_eq!(bits(after.get(var).unwrap()), bits(before.get(var).unwrap()));
    }
    let clipped = clip_grad_norm(&mut after, &model.vars, 1.0).unwrap();
    assert!((clipped - 0.1).abs() < 1e-7, "{clipped}");
    // Below the limit nothing changes, and values that are not finite are left for the scaler to find.
    let kept = bits(after.get(&model.vars[0]).unwrap());
    model.break_weight(&mut after);
    assert!(clip_grad_norm(&mut after, &model.vars, 0.01).unwrap().is_infinite());
    assert_eq!(bits(after.get(&model.vars[0]).unwrap()), kept);
}

/// Norms are summed in FP32: in FP16 this one would be 65504 at most, squared and rooted infinite.
#[test]
fn a_norm_has_room_in_half_precision() {
    let var = Var::zeros(10_000, DType::F16, &CPU).unwrap();
    let mut grads = store([(&var, full(1000.0, &var))]);
    let norm = clip_grad_norm(&mut grads, std::slice::from_ref(&var), 100.0).unwrap();
    assert!((norm - 1e5).abs() < 1.0, "{norm}");
    assert!(values(grads.get(&var).unwrap()).iter().all(|value| (value - 1.0).abs() < 1e-3));
}

/// A skipped step is nowhere to be seen: clean, overflow, clean equals clean, clean.
#[test]
fn c34_bias_correction_and_schedule_count_applied_steps_only() {
    let run = |grads: &[f32]| {
        let (var, mut optimizer) = single(DType::F32);
        let mut scaler = scaler(1.0, 2000);
        let mut updates = 0;
        for grad in grads {
            optimizer.set_learning_rate(0.1 / f64::from(1 + updates));
            updates += i32::from(scaler.step(&mut optimizer, &mut store([(&var, full(*grad, &var))])).unwrap());
            scaler.update().unwrap();
        }
        (bits(&var), state_bits(&optimizer), updates)
    };
    assert_eq!(run(&[0.5, f32::INFINITY, -0.25]), run(&[0.5, -0.25]));
}

/// The gradient that overflows is the input times the scale in FP16: 20000 × 4 > 65504, 40000 × 2 too.
#[test]
fn g2_half_precision_gradients() {
    let (var, mut optimizer) = single(DType::F16);
    let mut scaler = scaler(4.0, 2000);
    let seen = [5.0, 20000.0, 5.0, 40000.0].map(|input: f64| {
        let loss = (var.to_dtype(DType::F32).unwrap() * input).unwrap().sum_all().unwrap();
        let mut grads = scaler.scale(&loss).unwrap().backward().unwrap();
        let scaled = values(grads.get(&var).unwrap())[0];
        assert_eq!(scaler.step(&mut optimizer, &mut grads).unwrap(), scaled.is_finite());
        scaler.update().unwrap();
        (scaled, scaler.get_scale(), tracker(&scaler))
    });
    assert_eq!(seen, [(20.0, 4.0, 1), (f32::INFINITY, 2.0, 0), (10.0, 2.0, 1), (f32::INFINITY, 1.0, 0)]);
}

/// 2^-24 in FP16, unscaled by 65536, is 2^-40: a store of FP16 gradients would make it zero again.
#[test]
fn unscaled_half_precision_gradients_are_wide() {
    let (var, optimizer) = single(DType::F16);
    let mut scaler = scaler(65536.0, 2000);
    let mut grads = store([(&var, Tensor::new(&[f16::from_bits(1)], &CPU).unwrap())]);
    scaler.unscale(&optimizer, &mut grads).unwrap();
    assert_eq!(grads.get(&var).unwrap().to_vec1::<f32>().unwrap(), [2f32.powi(-40)]);
}

#[test]
fn a_run_of_nans_ends() {
    let (var, mut optimizer) = single(DType::F32);
    let mut scaler = scaler(65536.0, 2000);
    let mut steps = 0;
    while !scaler.is_stuck() {
        assert!(!scaler.step(&mut optimizer, &mut store([(&var, full(f32::NAN, &var))])).unwrap());
        scaler.update().unwrap();
        steps += 1;
    }
    assert_eq!(steps, 16 + 16, "from 2^16 to the floor, then `patience`");
    assert_eq!(values(&var), [1.0]);
}

#[test]
fn a_gradient_whose_square_overflows_fp32_is_clipped() {
    let var = Var::zeros(4, DType::F32, &CPU).unwrap();
    let mut grads = store([(&var, full(1e20, &var))]);
    let norm = clip_grad_norm(&mut grads, std::slice::from_ref(&var), 1.0).unwrap();
    assert!((norm / 2e20 - 1.0).abs() < 1e-6, "{norm}");
    assert_eq!(values(grads.get(&var).unwrap()), [0.5; 4]);
}

#[test]
fn settings_that_ruin_every_weight_are_refused() {
    use candle_nn::ParamsAdamW;
    let fine = ParamsAdamW::default();
    for (params, name) in [
        (ParamsAdamW { lr: f64::NAN, ..fine.clone() }, "lr"),
        (ParamsAdamW { lr: f64::INFINITY, ..fine.clone() }, "lr"),
        (ParamsAdamW { beta2: 1.0, ..fine.clone() }, "beta2"),
        (ParamsAdamW { eps: -1.0, ..fine.clone() }, "eps"),
        (ParamsAdamW { eps: 0.0, ..fine.clone() }, "eps"),
        (ParamsAdamW { eps: 1e-50, ..fine.clone() }, "eps"),
    ] {
        let var = Var::zeros(4, DType::F32, &CPU).unwrap();
        let message = AdamW::new(vec![var], params).unwrap_err().to_string();
        assert!(message.starts_with(&format!("`{name}` of `AdamW` is")), "{message}");
    }
    let (var, mut optimizer) = single(DType::F32);
    optimizer.set_learning_rate(f64::NAN);
    let before = values(&var);
    assert!(optimizer.step(&store([(&var, full(1.0, &var))])).unwrap_err().to_string().contains("lr"));
    assert_eq!(values(&var), before);
}
