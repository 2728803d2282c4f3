//! Granite 3 with experts (IBM, 2024): Granite 3 with a mixture of MLPs in every block. Files have one tensor of all
//! experts.

use super::{granite, llama};
use crate::engine::model::family::{ExpertTensors, Family, GgufFormat};
use crate::engine::model::mixture::Experts;
use crate::engine::model::spec::{LinearRole, ModelSpec, ModuleOp};

pub(super) static GRANITE_MOE: Family = Family {
    model_type: "granitemoe",
    class: "GraniteMoeForCausalLM",
    bias_keys: &["attention_bias"],
    read: |keys| {
        let default = ModelSpec { family: &GRANITE_MOE, fused_gate_up: true, ..llama::default() };
        let spec = granite::read(keys, default)?;
        let experts = Experts::read(keys, (COUNT, 8), 2, 0.001, spec.num_layers, true)?;
        Ok(ModelSpec { experts: Some(experts), ..spec })
    },
    write: |spec| {
        let mut json = granite::write(spec);
        Experts::write(spec, &mut json, COUNT);
        json
    },
    layer_name: |layer| {
        let name = match layer.op {
            ModuleOp::Router => "router.layer",
            ModuleOp::Expert(expert, LinearRole::Down) => &format!("output_linear.{expert}"),
            ModuleOp::Expert(expert, _) => &format!("input_linear.{expert}"),
            _ => return llama::layer_name(layer),
        };
        llama::in_block(layer.block, &format!("block_sparse_moe.{name}"))
    },
    expert_tensors: ExpertTensors::OfLayer,
    gguf: GgufFormat {
        architecture: "granitemoe",
        keys: &[llama::GGUF_KEYS, &[llama::WIDTH_KEY], &Experts::gguf_keys(COUNT)],
        splits_gate_up: true,
        ..granite::BASE.gguf
    },
    ..granite::BASE
};

/// The key of the number of experts.
const COUNT: &str = "num_local_experts";
