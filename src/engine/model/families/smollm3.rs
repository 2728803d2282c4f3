//! SmolLM3 (Hugging Face, 2025): Llama without rotary position embeddings in some layers, one of four by default.

use super::llama::{self, head_dim, only_silu, with_rope};
use super::qwen2;
use crate::engine::model::family::{ConfigReader, GgufFormat, ModelFamily};
use crate::engine::model::rope::Rope;
use crate::engine::model::spec::{FamilyRef, ModelSpec};
use serde_json::{Map, Value};

/// The family.
pub(super) struct SmolLm3;

/// One layer in this many has no rotary embeddings; llama.cpp supports no other number.
const INTERVAL: usize = 4;

/// The defaults of transformers for missing keys.
fn default() -> ModelSpec {
    ModelSpec {
        family: FamilyRef(&SmolLm3),
        vocab_size: 128_256,
        max_position_embeddings: 32_768,
        hidden_size: 2048,
        num_layers: 36,
        heads: 16,
        rope: Some(Rope::plain(2e6)),
        tie_word_embeddings: true,
        bos_token_id: Some(128_000),
        eos_token_ids: vec![128_001],
        ..llama::default()
    }
}

/// Whether each of `layers` layers has no rotary embeddings; the configuration marks such a layer with 0.
fn unrotated(keys: &ConfigReader<'_>, layers: usize) -> Result<Vec<bool>, String> {
    let interval = keys.positive_usize("no_rope_layer_interval", INTERVAL)?;
    let list = match keys.0.get("no_rope_layers") {
        None | Some(Value::Null) => return Ok((1..=layers).map(|layer| layer % interval == 0).collect()),
        Some(list) => list,
    };
    let flag = |value: &Value| value.as_u64().filter(|flag| *flag < 2).map(|flag| flag == 0);
    let flags = list.as_array().and_then(|list| list.iter().map(flag).collect::<Option<Vec<_>>>());
    match flags {
        Some(flags) if flags.len() >= layers => Ok(flags[..layers].to_vec()),
        _ => Err(format!("`no_rope_layers` is {list}; it must be a list of 0 or 1 for each layer")),
    }
}

impl ModelFamily for SmolLm3 {
    fn model_type(&self) -> &'static str {
        "smollm3"
    }

    fn read(&self, keys: &ConfigReader<'_>) -> Result<ModelSpec, String> {
        only_silu(keys)?;
        let spec = llama::read(keys, default(), Some(4))?;
        let biases = llama::biases(keys)?;
        let unrotated = unrotated(keys, spec.num_layers)?;
        let spec = ModelSpec { head_dim: head_dim(keys, &spec, None)?, biases, ..spec };
        let spec = qwen2::with_windows(keys, with_rope(keys, spec, 2e6)?, |layer| unrotated[layer])?;
        Ok(ModelSpec { unrotated, ..spec })
    }

    fn write(&self, spec: &ModelSpec) -> Value {
        let mut json = llama::write(spec, "SmolLM3ForCausalLM");
        json["attention_bias"] = spec.biases.qkv.into();
        json["mlp_bias"] = spec.biases.mlp.into();
        json["no_rope_layers"] = spec.unrotated.iter().map(|unrotated| u8::from(!unrotated)).collect();
        qwen2::write_windows(&mut json, spec);
        json
    }

    fn gguf(&self) -> GgufFormat {
        GgufFormat { architecture: "smollm3", keys: &llama::GGUF_KEYS, interleaved: true }
    }

    fn read_gguf(&self, _: &mut Map<String, Value>, json: &mut Map<String, Value>) -> Result<(), String> {
        json.insert("no_rope_layer_interval".into(), INTERVAL.into());
        Ok(())
    }

    fn write_gguf(&self, spec: &ModelSpec, _: &mut Vec<(&'static str, Value)>) -> Result<(), String> {
        if spec.sliding.is_some() {
            return Err("GGUF has no key for the windows of `smollm3`; export it as a folder".into());
        }
        if (1..).zip(&spec.unrotated).all(|(layer, unrotated)| *unrotated == (layer % INTERVAL == 0)) {
            return Ok(());
        }
        Err(format!("llama.cpp rotates all layers but every {INTERVAL}th; export this model as a folder"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(json: &Value) -> Result<ModelSpec, String> {
        ModelSpec::from_json(json.to_string().as_bytes(), "config.json").map_err(|error| error.to_string())
    }

    #[test]
    fn layers_without_rotation_are_those_of_transformers() {
        let mut config = json!({"model_type": "smollm3", "num_hidden_layers": 5, "no_rope_layer_interval": 2});
        assert_eq!(read(&config).unwrap().unrotated, [false, true, false, true, false]);
        config["no_rope_layers"] = json!([0, 1, 1, 0, 1, 0]);
        let spec = read(&config).unwrap();
        assert_eq!(spec.unrotated, [true, false, false, true, false]);
        config["use_sliding_window"] = true.into();
        config["sliding_window"] = 7.into();
        assert_eq!(read(&config).unwrap().sliding.unwrap().layers, spec.unrotated);
        for wrong in [json!([0, 1]), json!([0, 1, 2, 0, 1]), json!(1)] {
            config["no_rope_layers"] = wrong;
            assert!(read(&config).unwrap_err().contains("it must be a list of 0 or 1 for each layer"));
        }
    }
}
