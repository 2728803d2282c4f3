//! Frozen modules: they keep their bits and cost no training state, and the others train as if nothing were frozen.

use crate::common::compare::values;
use crate::distributed::{assert_same_bits, config, resume};
use crate::run::trainer;
use finetune::store::checkpoint::Checkpoint;
use finetune::train::Config;
use std::collections::BTreeMap;

/// Names of frozen modules, and how many of the 52 parameters of `tiny` they leave: with the first block frozen but not
/// the positions, a backward pass has to reach them; with both, it ends above that block.
const FROZEN: [(&str, usize); 4] =
    [("h.0-1,wte", 27), ("h.0,wte,wpe", 38), ("h.1.mlp,c_attn", 40), ("h.0-3,wte,wpe", 2)];

fn freezing(names: Option<&str>) -> Config {
    let mut config = config("fp16");
    config.train.freeze = names.map(str::to_owned);
    config.scaler.init_scale = 1024.0;
    config
}

/// The gradients of the first step.
fn gradients(config: &Config) -> BTreeMap<String, Vec<f64>> {
    let mut trainer = trainer(config);
    trainer.advance(1).unwrap();
    let total = trainer.engine.grads.total();
    total.iter().map(|(name, tensor)| (name.to_owned(), values(tensor))).collect()
}

#[test]
fn trained_modules_have_the_gradients_of_a_run_that_trains_everything() {
    let all = gradients(&freezing(None));
    for (names, trained) in FROZEN {
        for per_block in [false, true] {
            let mut config = freezing(Some(names));
            config.train.gradient_checkpointing = per_block;
            let some = gradients(&config);
            assert_eq!(some.len(), trained, "{names}");
            assert!(some.iter().all(|(name, gradient)| all[name] == *gradient), "{names}, {per_block}");
        }
    }
}

#[test]
fn frozen_modules_have_no_training_state() {
    let whole = trainer(&freezing(None));
    for (names, trained) in FROZEN {
        let some = trainer(&freezing(Some(names)));
        let state = &some.engine.state;
        let held = [state.masters.parameters(), &state.adamw.exp_avg, &state.adamw.exp_avg_sq, &state.weights];
        assert_eq!(held.map(|one| one.tensors().len()), [trained; 4], "{names}");
        assert!(some.checkpoint_bytes() < whole.checkpoint_bytes(), "{names}");
    }
}

/// A checkpoint has the initial bits of frozen weights, and resumes with the bits of a run that was not interrupted.
#[test]
fn checkpoints_contain_frozen_weights_for_any_number_of_processes() {
    let folder = tempfile::tempdir().unwrap();
    let config = freezing(Some(FROZEN[0].0));
    assert_same_bits(&config, folder.path(), &[3]);
    for (before, after) in [(3, 1), (1, 3)] {
        resume(&config, folder.path(), before, after);
    }
    let start = trainer(&freezing(None));
    let initial = &start.engine.state.weights;
    let checkpoint = Checkpoint::open(folder.path().join("1/step-000004")).unwrap();
    for (name, tensor) in initial.iter() {
        let stored = checkpoint.weights().require(&format!("transformer.{name}")).unwrap();
        let frozen = ["h.0.", "h.1.", "wte."].iter().any(|prefix| name.starts_with(prefix));
        let stored: Vec<f64> = stored.to_f32().unwrap().into_iter().map(f64::from).collect();
        assert_eq!(stored == values(tensor), frozen, "{name}");
    }
}
