//! Qwen 2 and 2.5 (Yang et al., 2024): Llama with biases on queries, keys and values, and windows in its upper layers
//! if it has any.

use super::llama::{self, layer_types, sliding_layers};
use crate::engine::model::family::{ConfigReader, Family, GgufFormat};
use crate::engine::model::rope::Rope;
use crate::engine::model::spec::{Biases, ModelSpec};
use serde_json::Value;

pub(super) static QWEN2: Family = Family {
    model_type: "qwen2",
    class: "Qwen2ForCausalLM",
    bias_keys: &[],
    named: &[("qwen2.5-0.5b", || ModelSpec {
        num_layers: 24,
        hidden_size: 896,
        heads: 14,
        kv_heads: 2,
        head_dim: 64,
        intermediate_size: 4864,
        norm_eps: 1e-6,
        biases: BIASES,
        rope: Some(Rope::plain(1e6)),
        tie_word_embeddings: true,
        bos_token_id: Some(151_643),
        eos_token_ids: vec![151_643],
        ..default(&QWEN2)
    })],
    read: |keys| read(keys, ModelSpec { biases: BIASES, ..default(&QWEN2) }, None),
    write,
    gguf: GgufFormat { architecture: "qwen2", ..llama::OTHER_GGUF },
    ..llama::BASE
};

/// Biases that no key turns off.
const BIASES: Biases = Biases { qkv: true, out: false, mlp: false };

/// The defaults of transformers for missing keys of Qwen 2 and 3.
pub(super) fn default(family: &'static Family) -> ModelSpec {
    ModelSpec {
        family,
        vocab_size: 151_936,
        max_position_embeddings: 32_768,
        intermediate_size: 22_016,
        bos_token_id: None,
        eos_token_ids: Vec::new(),
        ..llama::default()
    }
}

/// Reads the keys that Qwen 2 and 3 share; `head` is the default size of a head.
pub(super) fn read(keys: &ConfigReader<'_>, default: ModelSpec, head: Option<usize>) -> Result<ModelSpec, String> {
    let spec = llama::read_uniform(keys, default, [Some(32), head])?;
    let from = keys.usize("max_window_layers", 28)?;
    with_windows(keys, spec, |layer| layer >= from)
}

/// `spec` with windows in the layers that `layer_types` names, otherwise in those of `default`.
pub(super) fn with_windows(
    keys: &ConfigReader<'_>,
    spec: ModelSpec,
    default: impl Fn(usize) -> bool,
) -> Result<ModelSpec, String> {
    let windows = keys.bool("use_sliding_window", false)? && !llama::has_no_window(keys);
    let layers = sliding_layers(keys, spec.num_layers, |layer| windows && default(layer))?;
    match (layers.contains(&true), windows) {
        (false, _) => Ok(spec),
        (true, false) => Err("`layer_types` has `sliding_attention`, but `use_sliding_window` is false".into()),
        (true, true) => llama::with_windows(keys, spec, layers),
    }
}

/// Writes the keys of a family whose windows [`with_windows`] reads.
pub(super) fn write(spec: &ModelSpec) -> Value {
    let mut json = llama::write(spec);
    json["use_sliding_window"] = spec.sliding.is_some().into();
    json["sliding_window"] = llama::window(spec);
    json["layer_types"] = layer_types(spec);
    json
}
