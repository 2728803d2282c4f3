//! OLMoE (Muennighoff et al., 2024): Llama with norms over all heads of queries and of keys, and a mixture of MLPs in
//! every block.

use super::llama;
use crate::engine::model::family::{ConfigReader, Family, GgufFormat};
use crate::engine::model::mixture::{Experts, NORMALIZED};
use crate::engine::model::spec::{ModelSpec, QkNorm};
use serde_json::Value;

pub(super) static OLMOE: Family = Family {
    model_type: "olmoe",
    class: "OlmoeForCausalLM",
    aliases: &[("num_local_experts", COUNT)],
    bias_keys: &["attention_bias"],
    named: &[],
    read,
    write,
    gguf: GgufFormat {
        architecture: "olmoe",
        keys: &[llama::GGUF_KEYS, &[llama::WIDTH_KEY], &Experts::gguf_keys(COUNT)],
        tied_head: Some(false),
        read: |_, json| drop(json.insert(NORMALIZED.into(), false.into())),
        write: |spec, _| spec.check_normalized(false),
        ..llama::OTHER_GGUF
    },
    ..llama::BASE
};

/// The key of the number of experts.
pub(super) const COUNT: &str = "num_experts";

/// Writes the keys that OLMoE and Qwen 3 share.
pub(super) fn write(spec: &ModelSpec) -> Value {
    let mut json = llama::write(spec);
    Experts::write(spec, &mut json, COUNT);
    json[NORMALIZED] = spec.experts.map(|experts| experts.router.normalized).into();
    json
}

fn read(keys: &ConfigReader<'_>) -> Result<ModelSpec, String> {
    let default = ModelSpec {
        family: &OLMOE,
        vocab_size: 50_304,
        max_position_embeddings: 4096,
        hidden_size: 2048,
        num_layers: 16,
        heads: 16,
        intermediate_size: 2048,
        norm_eps: 1e-5,
        qk_norm: Some(QkNorm::Whole),
        bos_token_id: None,
        eos_token_ids: vec![50_279],
        ..llama::default()
    };
    let spec = llama::read_uniform(keys, default, [None, None])?;
    if let Some(limit) = keys.0.get("clip_qkv").filter(|limit| !limit.is_null()) {
        return Err(format!("`clip_qkv` is {limit}; the engine does not clip queries, keys and values"));
    }
    let normalized = keys.bool(NORMALIZED, false)?;
    let experts = Experts::read(keys, (COUNT, 64), 8, 0.01, spec.num_layers, normalized)?;
    Ok(ModelSpec { experts: Some(experts), ..spec })
}
