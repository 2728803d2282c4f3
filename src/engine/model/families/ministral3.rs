//! Ministral 3 (Mistral AI, 2025): Mistral without windows, with queries that are scaled by their position.

use super::llama;
use crate::engine::model::family::{ConfigReader, Family, GgufFormat};
use crate::engine::model::rope::{self, ORIGINAL, QueryScale, Rope, RopeType};
use crate::engine::model::spec::ModelSpec;
use serde_json::{Value, json};

pub(super) static MINISTRAL3: Family = Family {
    model_type: "ministral3",
    class: "Ministral3ForCausalLM",
    bias_keys: &[],
    named: &[],
    read,
    write: |spec| {
        let mut json = llama::write(spec);
        let rope = &mut json["rope_parameters"];
        rope[BETA] = spec.query_scale.map_or(0.0, |scale| scale.beta).into();
        if rope[ORIGINAL].is_null() {
            rope[ORIGINAL] = spec.query_scale.map_or(spec.max_position_embeddings, |scale| scale.context).into();
        }
        json
    },
    gguf: GgufFormat {
        architecture: "mistral3",
        yarn_log_multiplier: true,
        read: |keys, json| {
            let Some(Value::Object(rope)) = json.get_mut("rope_scaling") else {
                json.insert("rope_parameters".into(), json!({"rope_type": "default"}));
                return;
            };
            if let Some(all) = keys.remove("rope.scaling.yarn_log_multiplier") {
                rope.extend([("mscale".to_owned(), json!(1.0)), ("mscale_all_dim".to_owned(), all)]);
            }
            rope.extend(keys.remove(TEMPERATURE).map(|beta| (BETA.to_owned(), beta)));
        },
        write: |spec, keys| {
            let Some(scale) = spec.query_scale else { return Ok(()) };
            if !matches!(spec.rope, Some(Rope { kind: RopeType::Yarn { .. }, .. })) {
                return Err(format!("llama.cpp has `{BETA}` with rotary embeddings of the type `yarn` only"));
            }
            keys.push((TEMPERATURE, scale.beta.into()));
            Ok(())
        },
        ..llama::BASE.gguf
    },
    ..llama::BASE
};

/// The key of the growth of queries.
const BETA: &str = "llama_4_scaling_beta";
/// Its key in GGUF.
const TEMPERATURE: &str = "attention.temperature_scale";

/// The defaults of transformers for missing keys.
fn default() -> ModelSpec {
    ModelSpec {
        family: &MINISTRAL3,
        vocab_size: 131_072,
        max_position_embeddings: 262_144,
        num_layers: 34,
        intermediate_size: 14_336,
        norm_eps: 1e-5,
        ..llama::default()
    }
}

fn read(keys: &ConfigReader<'_>) -> Result<ModelSpec, String> {
    if let Some(window) = keys.0.get("sliding_window").filter(|window| !window.is_null()) {
        return Err(format!("`sliding_window` is {window}; the engine has models of this family without it only"));
    }
    let yarn = json!({"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, ORIGINAL: 16_384, "mscale": 1.0,
        "mscale_all_dim": 1.0, BETA: 0.1});
    let mut config = rope::with_default(keys.0, yarn)?;
    let spelling = rope::parameters(&config)?.map(|(key, _)| key);
    let mut query_scale = None;
    if let Some(Value::Object(rope)) = spelling.and_then(|key| config.get_mut(key)) {
        rope.remove("max_position_embeddings");
        let outside = keys.0.get(ORIGINAL).filter(|value| !value.is_null());
        rope.extend(outside.map(|value| (ORIGINAL.to_owned(), value.clone())));
        let beta = ConfigReader(rope).f64(BETA, 0.0)?;
        if beta != 0.0 {
            if !rope.contains_key(ORIGINAL) {
                return Err(format!("`{ORIGINAL}` is missing; `{BETA}` needs it"));
            }
            query_scale = Some(QueryScale { beta, context: ConfigReader(rope).positive_usize(ORIGINAL, 1)? });
        }
        rope.remove(BETA);
    }
    let spec = llama::read_uniform(&ConfigReader(&config), default(), [Some(8), Some(128)])?;
    Ok(ModelSpec { query_scale, ..spec })
}
