//! Granite 3 and dense Granite 4 (IBM, 2024): Llama with factors of embeddings, attention scores, branches and logits.

use super::llama::{self, head_dim, only_silu, with_rope};
use crate::engine::model::family::{ConfigReader, GgufFormat, ModelFamily};
use crate::engine::model::spec::{EmbeddingScale, FamilyRef, ModelSpec};
use serde_json::{Map, Value};

/// The family.
pub(super) struct Granite;

/// The factors' keys in GGUF and in `config.json`.
const FACTORS: [(&str, &str); 4] = [
    ("embedding_scale", "embedding_multiplier"),
    ("attention.scale", "attention_multiplier"),
    ("residual_scale", "residual_multiplier"),
    ("logit_scale", "logits_scaling"),
];

impl ModelFamily for Granite {
    fn model_type(&self) -> &'static str {
        "granite"
    }

    fn read(&self, keys: &ConfigReader<'_>) -> Result<ModelSpec, String> {
        only_silu(keys)?;
        let default = ModelSpec { family: FamilyRef(&Granite), ..llama::default() };
        let spec = llama::read(keys, default, None)?;
        let [embedding, attention, residual, logits] = FACTORS.map(|(_, key)| keys.positive(key, 1.0));
        let spec = ModelSpec {
            head_dim: head_dim(keys, &spec, None)?,
            biases: llama::biases(keys)?,
            embedding_scale: EmbeddingScale::Factor(embedding?),
            attention_scale: Some(attention?),
            residual_multiplier: residual?,
            logits_scaling: logits?,
            ..spec
        };
        with_rope(keys, spec, 1e4)
    }

    fn write(&self, spec: &ModelSpec) -> Value {
        let mut json = llama::write(spec, "GraniteForCausalLM");
        json["attention_bias"] = spec.biases.qkv.into();
        json["mlp_bias"] = spec.biases.mlp.into();
        for ((_, key), factor) in FACTORS.into_iter().zip(factors(spec)) {
            json[key] = factor.into();
        }
        json
    }

    fn gguf(&self) -> GgufFormat {
        GgufFormat { architecture: "granite", keys: &llama::GGUF_KEYS, interleaved: true }
    }

    fn read_gguf(&self, keys: &mut Map<String, Value>, json: &mut Map<String, Value>) -> Result<(), String> {
        let head_dim = json.get("head_dim").and_then(Value::as_f64).unwrap_or(1.0);
        for (theirs, ours) in FACTORS {
            // llama.cpp takes a missing factor, and 0, for that of a Llama.
            let given = keys.remove(theirs).filter(|value| value.as_f64() != Some(0.0));
            let usual = if ours == "attention_multiplier" { head_dim.powf(-0.5) } else { 1.0 };
            json.insert(ours.into(), given.unwrap_or_else(|| usual.into()));
        }
        Ok(())
    }

    fn write_gguf(&self, spec: &ModelSpec, keys: &mut Vec<(&'static str, Value)>) -> Result<(), String> {
        for ((theirs, _), factor) in FACTORS.into_iter().zip(factors(spec)) {
            keys.push((theirs, factor.into()));
        }
        Ok(())
    }
}

/// The factors of `spec` in the order of [`FACTORS`].
fn factors(spec: &ModelSpec) -> [f64; 4] {
    let embedding = match spec.embedding_scale {
        EmbeddingScale::Factor(factor) => factor,
        EmbeddingScale::RootOfWidth => (spec.hidden_size as f64).sqrt(),
    };
    let attention = spec.attention_scale.unwrap_or_else(|| (spec.head_dim as f64).powf(-0.5));
    [embedding, attention, spec.residual_multiplier, spec.logits_scaling]
}
