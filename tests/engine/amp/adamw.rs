//! AdamW over FP32 masters: the definition, exact resumption, groups.

use super::*;

/// Five updates against the definition in f64, in every type of variable; one in half holds its rounded master.
#[test]
fn adamw_follows_the_definition_in_every_type() {
    let params = ParamsAdamW { lr: 0.01, weight_decay: 0.1, ..ParamsAdamW::default() };
    for dtype in DTYPES {
        let var = Var::from_tensor(&wave(0.7, (4, 8)).to_dtype(dtype).unwrap()).unwrap();
        let mut optimizer = AdamW::new(vec![var.clone()], params.clone()).unwrap();
        let start = var.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
        let mut expected: Vec<_> = start.into_iter().map(|p| (p, 0.0, 0.0)).collect();
        for t in 1..=5 {
            let grad = (wave(0.3 * t as f32, (4, 8)) * 1e-3).unwrap();
            optimizer.step(&store([(&var, grad.clone())])).unwrap();
            for ((p, m, v), g) in expected.iter_mut().zip(values(&grad)) {
                let g = f64::from(g);
                *m = 0.9 * *m + 0.1 * g;
                *v = 0.999 * *v + 0.001 * g * g;
                let (m, v) = (*m / (1.0 - 0.9f64.powi(t)), *v / (1.0 - 0.999f64.powi(t)));
                *p = *p * (1.0 - 0.01 * 0.1) - 0.01 * m / (v.sqrt() + 1e-8);
            }
        }
        let master = optimizer.masters().next().unwrap();
        for (got, (expected, ..)) in values(master).iter().zip(&expected) {
            assert!((f64::from(*got) - expected).abs() < 1e-6, "{dtype:?}: {got} {expected}");
        }
        assert_eq!(bits(&master.to_dtype(dtype).unwrap()), bits(&var));
    }
}

/// Saved to a file after three updates and loaded into an optimizer of other variables: the next three are the same.
#[test]
fn adamw_resumes_bit_identically() {
    let new = |frequency: f32| {
        let vars: Vec<_> =
            DTYPES.map(|dtype| Var::from_tensor(&wave(frequency, (3, 5)).to_dtype(dtype).unwrap()).unwrap()).into();
        (adamw(vars.clone()), vars)
    };
    let train = |optimizer: &mut AdamW, vars: &[Var], steps: std::ops::Range<u8>| {
        for step in steps {
            let grad = |var: &Var| wave(f32::from(step), (3, 5)).to_dtype(var.dtype()).unwrap();
            optimizer.step(&store(vars.iter().map(|var| (var, grad(var))))).unwrap();
        }
    };
    let (mut straight, vars) = new(0.7);
    train(&mut straight, &vars, 0..3);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("optimizer.safetensors");
    let state = straight.state_dict().unwrap();
    candle_core::safetensors::save(&state, &file).unwrap();
    train(&mut straight, &vars, 3..6);

    let (mut resumed, others) = new(1.3);
    resumed.load_state_dict(&candle_core::safetensors::load(&file, &CPU).unwrap()).unwrap();
    train(&mut resumed, &others, 3..6);
    assert_eq!((all_bits(&others), state_bits(&resumed)), (all_bits(&vars), state_bits(&straight)));
    // The saved state did not change with the variables.
    straight.load_state_dict(&state).unwrap();
    train(&mut straight, &vars, 3..6);
    assert_eq!(state_bits(&resumed), state_bits(&straight));
}

#[test]
fn adamw_refuses_a_state_of_other_variables() {
    let (_, mut optimizer) = single(DType::F16);
    let good = optimizer.state_dict().unwrap();
    let before = state_bits(&optimizer);
    let mut refusal = |change: fn(&mut HashMap<String, Tensor>)| {
        let mut state = good.clone();
        change(&mut state);
        let error = optimizer.load_state_dict(&state).unwrap_err().to_string();
        assert_eq!(state_bits(&optimizer), before);
        error
    };
    assert!(refusal(HashMap::clear).contains("the state has 0 tensors, but 1 variables"));
    assert!(
        refusal(|state| {
            let tensor = state.remove("0.exp_avg").unwrap();
            state.insert("0.exp_avf".into(), tensor);
        })
        .contains("`0.exp_avg` is missing")
    );
    let wrong_shape = refusal(|state| {
        state.insert("0.exp_avg_sq".into(), Tensor::zeros(7, DType::F32, &CPU).unwrap());
    });
    assert_eq!(wrong_shape, "optimizer state: `0.exp_avg_sq` is (F32, [7]), but the variable needs (F32, [1])");
}

#[test]
fn groups_have_their_own_settings_and_a_variable_has_one_group() {
    let [matrix, bias] = [Var::ones((2, 2), DType::F32, &CPU), Var::ones(2, DType::F32, &CPU)].map(Result::unwrap);
    let params = ParamsAdamW { lr: 0.1, weight_decay: 0.5, ..ParamsAdamW::default() };
    let mut optimizer = AdamW::with_decay_on_matrices(vec![bias.clone(), matrix.clone()], params.clone()).unwrap();
    assert_eq!(optimizer.groups().iter().map(|group| group.weight_decay).collect::<Vec<_>>(), [0.5, 0.0]);
    // Without a gradient's push only the decay moves anything.
    optimizer.step(&store([&matrix, &bias].map(|var| (var, full(0.0, var))))).unwrap();
    assert_eq!((values(&matrix), values(&bias)), (vec![0.95; 4], vec![1.0; 2]));

    let twice = optimizer.add_group(vec![matrix], params.clone()).unwrap_err().to_string();
    assert!(twice.contains("is in two groups"), "{twice}");
    assert_eq!((optimizer.groups().len(), optimizer.vars().len()), (2, 2));
    optimizer.groups_mut()[1].lr = 0.7;
    assert_eq!(optimizer.learning_rate(), 0.1);
    optimizer.set_learning_rate(0.2);
    assert_eq!(optimizer.groups().iter().map(|group| group.lr).collect::<Vec<_>>(), [0.2; 2]);
}

/// As in PyTorch: the first update of a variable is corrected as a first one, whenever it comes.
#[test]
fn a_variable_counts_its_own_updates() {
    let [early, late] = [(); 2].map(|()| Var::ones(1, DType::F32, &CPU).unwrap());
    let mut optimizer = adamw(vec![early.clone(), late.clone()]);
    optimizer.step(&store([(&early, full(0.3, &early))])).unwrap();
    let after_one = bits(&early);
    optimizer.step(&store([(&early, full(0.3, &early)), (&late, full(0.3, &late))])).unwrap();
    assert_eq!(bits(&late), after_one);
}

#[test]
fn candles_optimizers_refuse_half_precision_variables() {
    let var = Var::zeros(1, DType::BF16, &CPU).unwrap();
    let error = WithVars::<SGD>::new(vec![var], 0.1).unwrap_err().to_string();
    assert!(error.contains("keep it in F32") && error.contains("amp::AdamW"), "{error}");
}
