//! The load-balancing loss of mixtures of experts.
//!
//! The values are in `tests/golden/balanced.safetensors`; `make_balanced.py` documents how they were made.

use crate::common::compare::assert_close;
use crate::common::engine::{read_model, unscaled};
use crate::common::golden::{Case, json, path, tensors, with_prefix};
use candle_core::{DType, Device};
use finetune::data::{Batch, IGNORE_INDEX};
use finetune::engine::model::{Checkpointing, Experts, ModelSpec, Workspace};
use finetune::engine::optim::Gradients;
use finetune::precision::PrecisionPolicy;
use serde_json::Value;

/// Two micro-batches with padding and prompts; recomputed blocks must not count their decisions twice.
#[test]
fn the_load_balancing_loss_and_its_gradients_are_those_of_transformers() {
    let about: Value = json(&path("balanced.json"));
    let stored = tensors(&path("balanced.safetensors"));
    for (name, figures) in about["cases"].as_object().unwrap() {
        let list = |part: &str| {
            let tensor = stored[&format!("{name}.{part}")].flatten_from(1).unwrap().to_dtype(DType::I64).unwrap();
            tensor.to_vec2::<i64>().unwrap()
        };
        let [inputs, labels, lengths] = ["inputs", "labels", "lengths"].map(list);
        let rows = 2;
        let batches: Vec<Batch> = (0..inputs.len())
            .map(|i| {
                let label = |label: &i64| u32::try_from(*label).unwrap_or(IGNORE_INDEX);
                let mut batch = Batch::new(rows, inputs[i].len() / rows);
                batch.inputs = inputs[i].iter().map(|id| *id as u32).collect();
                batch.labels = labels[i].iter().map(label).collect();
                batch.row_lens = lengths[i].iter().map(|length| *length as usize).collect();
                batch.num_label_tokens = batch.labels.iter().filter(|label| **label != IGNORE_INDEX).count();
                batch
            })
            .collect();
        let shape = (rows, batches[0].seq_len);
        for case in Case::own(&format!("families/{name}")).for_all_kernels() {
            for keep in [Checkpointing::None, Checkpointing::PerBlock] {
                let (spec, masters) = read_model(&case.folder);
                let balance = about["coefficient"].as_f64().unwrap();
                let spec = ModelSpec { experts: spec.experts.map(|experts| Experts { balance, ..experts }), ..spec };
                let policy = PrecisionPolicy::FP32;
                let mut engine = case.engine_over(&spec, masters, policy, rows);
                engine.workspace = Workspace::for_training(&spec, policy, shape, keep, &Device::Cpu).unwrap();
                engine.grads = Gradients::new(&engine.state.weights, policy, batches.len()).unwrap();
                engine.max_grad_norm = None;
                let report = engine.step(&batches).unwrap();
                let loss = figures["loss"].as_f64().unwrap();
                assert!((report.loss / loss - 1.0).abs() < 1e-6, "{}: {}, not {loss}", case.name, report.loss);
                let expected = with_prefix(&stored, &format!("{name}.grad."));
                assert_close(&case.name, &unscaled(&engine, 1.0), &expected, 1e-5, 1e-5);
            }
        }
    }
}
