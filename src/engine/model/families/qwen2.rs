//! Qwen 2 and 2.5 (Yang et al., 2024): Llama with biases on queries, keys and values, and windows in its upper layers if it
//! has any.

use super::llama::{self, head_dim, layer_types, only_silu, sliding_layers, with_rope};
use crate::engine::model::family::{ConfigReader, GgufFormat, ModelFamily};
use crate::engine::model::rope::Rope;
use crate::engine::model::spec::{Biases, FamilyRef, ModelSpec, Sliding};
use serde_json::Value;

/// The family.
pub(super) struct Qwen2;

/// The defaults of transformers for missing keys of Qwen 2 and 3.
pub(super) fn default(family: FamilyRef) -> ModelSpec {
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
pub(super) fn read(
    keys: &ConfigReader<'_>,
    family: FamilyRef,
    head: Option<usize>,
    biases: Biases,
) -> Result<ModelSpec, String> {
    only_silu(keys)?;
    let spec = llama::read(keys, default(family), Some(32))?;
    let spec = ModelSpec { head_dim: head_dim(keys, &spec, head)?, biases, ..spec };
    let from = keys.usize("max_window_layers", 28)?;
    with_windows(keys, with_rope(keys, spec, 1e4)?, |layer| layer >= from)
}

/// `spec` with windows in the layers that `layer_types` names, otherwise in those of `default`.
pub(super) fn with_windows(
    keys: &ConfigReader<'_>,
    spec: ModelSpec,
    default: impl Fn(usize) -> bool,
) -> Result<ModelSpec, String> {
    let windows = keys.bool("use_sliding_window", false)? && keys.0.get("sliding_window") != Some(&Value::Null);
    let layers = sliding_layers(keys, spec.num_layers, |layer| windows && default(layer))?;
    if !layers.contains(&true) {
        return Ok(spec);
    }
    if !windows {
        return Err("`layer_types` has `sliding_attention`, but `use_sliding_window` is false".into());
    }
    let rope = spec.rope.clone().ok_or("no rotary position embeddings")?;
    let sliding = Some(Sliding { window: keys.positive_usize("sliding_window", 4096)?, layers, rope });
    Ok(ModelSpec { sliding, ..spec })
}

/// Writes the keys for sliding windows of Qwen 2 and 3.
pub(super) fn write_windows(json: &mut Value, spec: &ModelSpec) {
    json["use_sliding_window"] = spec.sliding.is_some().into();
    json["sliding_window"] = spec.sliding.as_ref().map(|sliding| sliding.window).into();
    json["layer_types"] = layer_types(spec);
}

impl ModelFamily for Qwen2 {
    fn model_type(&self) -> &'static str {
        "qwen2"
    }

    fn names(&self) -> &'static [&'static str] {
        &["qwen2.5-0.5b"]
    }

    fn named(&self, name: &str) -> Option<ModelSpec> {
        (name == "qwen2.5-0.5b").then(|| ModelSpec {
            num_layers: 24,
            hidden_size: 896,
            heads: 14,
            kv_heads: 2,
            head_dim: 64,
            intermediate_size: 4864,
            norm_eps: 1e-6,
            biases: Biases { qkv: true, out: false, mlp: false },
            rope: Some(Rope::plain(1e6)),
            tie_word_embeddings: true,
            bos_token_id: Some(151_643),
            eos_token_ids: vec![151_643],
            ..default(FamilyRef(&Qwen2))
        })
    }

    fn read(&self, keys: &ConfigReader<'_>) -> Result<ModelSpec, String> {
        read(keys, FamilyRef(&Qwen2), None, Biases { qkv: true, out: false, mlp: false })
    }

    fn write(&self, spec: &ModelSpec) -> Value {
        let mut json = llama::write(spec, "Qwen2ForCausalLM");
        write_windows(&mut json, spec);
        json
    }

    fn gguf(&self) -> GgufFormat {
        GgufFormat { architecture: "qwen2", keys: &llama::GGUF_KEYS, interleaved: false }
    }
}
