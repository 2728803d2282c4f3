//! Granite 3 (IBM, 2024): Llama with factors of embeddings, attention scores, branches and logits.

use super::llama;
use crate::engine::model::family::{ConfigReader, Family, GgufFormat};
use crate::engine::model::spec::{EmbeddingScale, ModelSpec};
use serde_json::Value;

/// The family, from which its successor takes the fields that they share.
pub(super) static GRANITE: Family = BASE;

/// [`GRANITE`] as a constant.
pub(super) const BASE: Family = Family {
    model_type: "granite",
    class: "GraniteForCausalLM",
    named: &[],
    read: |keys| read(keys, ModelSpec { family: &GRANITE, ..llama::default() }),
    write,
    gguf: GgufFormat {
        architecture: "granite",
        read: |keys, json| {
            let head_dim = json.get("head_dim").and_then(Value::as_f64).unwrap_or(1.0);
            for (theirs, ours) in FACTORS {
                // llama.cpp takes a missing factor, and 0, for that of a Llama.
                let given = keys.remove(theirs).filter(|value| value.as_f64() != Some(0.0));
                let usual = if ours == "attention_multiplier" { head_dim.powf(-0.5) } else { 1.0 };
                json.insert(ours.into(), given.unwrap_or_else(|| usual.into()));
            }
        },
        write: |spec, keys| {
            keys.extend(FACTORS.into_iter().zip(factors(spec)).map(|((theirs, _), factor)| (theirs, factor.into())));
            Ok(())
        },
        ..llama::BASE.gguf
    },
    ..llama::BASE
};

/// The factors' keys in GGUF and in `config.json`.
const FACTORS: [(&str, &str); 4] = [
    ("embedding_scale", "embedding_multiplier"),
    ("attention.scale", "attention_multiplier"),
    ("residual_scale", "residual_multiplier"),
    ("logit_scale", "logits_scaling"),
];

pub(super) fn read(keys: &ConfigReader<'_>, default: ModelSpec) -> Result<ModelSpec, String> {
    let spec = llama::read_uniform(keys, default, [None, None])?;
    let [embedding, attention, residual, logits] = FACTORS.map(|(_, key)| keys.positive(key, 1.0));
    Ok(ModelSpec {
        embedding_scale: EmbeddingScale::Factor(embedding?),
        attention_scale: Some(attention?),
        residual_multiplier: residual?,
        logits_scaling: logits?,
        ..spec
    })
}

pub(super) fn write(spec: &ModelSpec) -> Value {
    let mut json = llama::write(spec);
    for ((_, key), factor) in FACTORS.into_iter().zip(factors(spec)) {
        json[key] = factor.into();
    }
    json
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
