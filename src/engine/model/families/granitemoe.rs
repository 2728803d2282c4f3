//! Granite 3 with experts (IBM, 2024): Granite 3 with a mixture of MLPs in every block. Files have one tensor of all experts.

use super::{granite, llama};
use crate::engine::model::family::{ExpertTensors, Family, GgufFormat};
use crate::engine::model::mixture::Experts;
use crate::engine::model::spec::{LinearRole, ModelSpec, ModuleOp};

/// The family.
pub(super) static GRANITE_MOE: Family = Family {
    model_type: "granitemoe",
    class: "GraniteMoeForCausalLM",
    bias_keys: &["attention_bias"],
    read: |keys| {
        let default = ModelSpec { family: &GRANITE_MOE, fused_gate_up: true, ..llama::default() };
        let spec = granite::read(keys, default)?;
        let experts = Experts::read(keys, (COUNT, 8), (2, 0.001), (spec.num_layers, true))?;
        Ok(ModelSpec { experts: Some(experts), ..spec })
    },
    write: |spec| {
        let mut json = granite::write(spec);
        if let Some(experts) = spec.experts {
            experts.write(&mut json, COUNT);
        }
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
        keys: &[
            ("context_length", "max_position_embeddings", true),
            ("embedding_length", "hidden_size", true),
            ("feed_forward_length", "intermediate_size", true),
            ("expert_count", COUNT, true),
            ("expert_used_count", "num_experts_per_tok", true),
            ("block_count", "num_hidden_layers", true),
            ("attention.head_count", "num_attention_heads", true),
            ("attention.layer_norm_rms_epsilon", "rms_norm_eps", true),
            ("attention.head_count_kv", "num_key_value_heads", false),
            ("attention.key_length", "head_dim", false),
            ("rope.freq_base", "rope_theta", false),
        ],
        splits_gate_up: true,
        ..granite::BASE.gguf
    },
    ..granite::BASE
};

/// The key of the number of experts.
const COUNT: &str = "num_local_experts";
