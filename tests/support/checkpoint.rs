//! A small model's checkpoint that tests can make in a millisecond.

#![allow(clippy::unwrap_used, dead_code, reason = "a test fails by panicking; not every test uses all of it")]

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use finetune::Result;
use finetune::checkpoint::{Contents, FORMAT_VERSION, Identity, Kind, Run, Saved, State, Tensors};
use finetune::model::Gpt2Config;
use serde_json::json;

/// What stands for `tokenizer.json`.
pub(crate) const TOKENIZER: &[u8] = br#"{"version":"1.0"}"#;

/// Everything a checkpoint of `step` is made of; another step has other values in every tensor.
pub(crate) struct Sample {
    pub(crate) config: Gpt2Config,
    pub(crate) state: State,
    pub(crate) weights: Tensors,
    pub(crate) masters: Tensors,
    pub(crate) exp_avg: Tensors,
    pub(crate) exp_avg_sq: Tensors,
}

impl Sample {
    pub(crate) fn new(step: u64) -> Self {
        let tiny = Gpt2Config::named("tiny").unwrap();
        let config =
            Gpt2Config { vocab_size: 17, n_positions: 8, n_embd: 8, n_layer: 2, n_head: 2, n_inner: 32, ..tiny };
        let identity = Identity { model: "sample".into(), policy: "p=f32,c=f16,g=f16,r=f32".into(), data: "d".into() };
        let state = State {
            format_version: FORMAT_VERSION,
            step,
            updates: step - 1,
            tokens: 1024 * step,
            seed: 1,
            identity,
            scaler: json!({"scale": 65536.0, "growth_tracker": step, "hysteresis_left": 1, "floor_streak": 0}),
            cursor: json!({"epoch": 0, "window": step}),
            schedule: json!(null),
            validation_loss: None,
            best: None,
        };
        let masters = fill(&config, step as f32);
        let weights = masters.iter().map(|(name, t)| (name.clone(), t.to_dtype(DType::F16).unwrap())).collect();
        let (exp_avg, exp_avg_sq) = (fill(&config, 0.01 * step as f32), fill(&config, 0.001 * step as f32));
        Self { config, state, weights, masters, exp_avg, exp_avg_sq }
    }

    /// With a validation loss.
    pub(crate) fn with_loss(step: u64, loss: f64) -> Self {
        let mut sample = Self::new(step);
        sample.state.validation_loss = Some(loss);
        sample
    }

    pub(crate) fn contents(&self) -> Contents<'_> {
        Contents {
            state: &self.state,
            config: &self.config,
            tokenizer: TOKENIZER,
            weights: self.weights.clone(),
            masters: self.masters.clone(),
            exp_avg: self.exp_avg.clone(),
            exp_avg_sq: self.exp_avg_sq.clone(),
        }
    }

    pub(crate) fn save(&self, run: &mut Run) -> Result<Saved> {
        run.save(&self.contents(), Kind::Full)
    }
}

fn fill(config: &Gpt2Config, offset: f32) -> Tensors {
    let make = |(name, shape): (String, Vec<usize>)| {
        let count: usize = shape.iter().product();
        let values: Vec<f32> = (0..count).map(|i| offset + (i as f32).sin()).collect();
        (name, Tensor::from_vec(values, shape, &Device::Cpu).unwrap())
    };
    config.parameter_shapes().into_iter().map(make).collect()
}

/// The values of a tensor, flat.
pub(crate) fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// The visible and hidden names in a folder, sorted.
pub(crate) fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
