//! Qwen 3 with experts (Yang et al., 2025): Qwen 3 with a mixture of MLPs in every block.

use super::olmoe::COUNT;
use super::{llama, olmoe, qwen2};
use crate::engine::model::family::{ConfigReader, Family, GgufFormat};
use crate::engine::model::mixture::{Experts, NORMALIZED};
use crate::engine::model::rope::Rope;
use crate::engine::model::spec::{ModelSpec, QkNorm};
use serde_json::Value;

pub(super) static QWEN3_MOE: Family = Family {
    model_type: "qwen3_moe",
    class: "Qwen3MoeForCausalLM",
    aliases: &[("num_local_experts", COUNT)],
    bias_keys: &["attention_bias"],
    named: &[],
    read,
    write: |spec| {
        let mut json = olmoe::write(spec);
        json[INNER] = spec.intermediate_size.into();
        json
    },
    gguf: GgufFormat {
        architecture: "qwen3moe",
        keys: &[llama::GGUF_KEYS, &Experts::gguf_keys(COUNT), &Experts::gguf_width(INNER)],
        read: |_, json| drop(json.insert(NORMALIZED.into(), true.into())),
        write: |spec, _| spec.check_normalized(true),
        ..llama::OTHER_GGUF
    },
    ..llama::BASE
};

/// The key of an expert's width.
const INNER: &str = "moe_intermediate_size";

fn read(keys: &ConfigReader<'_>) -> Result<ModelSpec, String> {
    let default = ModelSpec {
        qk_norm: Some(QkNorm::PerHead),
        hidden_size: 2048,
        num_layers: 24,
        rope: Some(Rope::plain(1e4)),
        ..qwen2::default(&QWEN3_MOE)
    };
    let spec = llama::read_uniform(keys, default, [Some(4), None])?;
    keys.require_value("use_sliding_window", false)?;
    let dense =
        keys.0.get("mlp_only_layers").filter(|layers| !layers.is_null() && **layers != Value::Array(Vec::new()));
    if let Some(layers) = dense {
        return Err(format!("`mlp_only_layers` is {layers}; the engine has experts in all blocks or in none"));
    }
    let step = keys.positive_usize("decoder_sparse_step", 1)?;
    if step != 1 {
        return Err(format!("`decoder_sparse_step` is {step}; the engine has experts in all blocks or in none"));
    }
    let inner = keys.positive_usize(INNER, 768)?;
    let normalized = keys.bool(NORMALIZED, false)?;
    let experts = Experts::read(keys, (COUNT, 128), 8, 0.001, spec.num_layers, normalized)?;
    Ok(ModelSpec { intermediate_size: inner, experts: Some(experts), ..spec })
}
