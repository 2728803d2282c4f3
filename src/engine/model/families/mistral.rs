//! Mistral (Jiang et al., 2023): Llama with a window in every layer, or in none.

use super::llama::{self, head_dim, only_silu, with_rope};
use crate::engine::model::family::{ConfigReader, GgufFormat, ModelFamily};
use crate::engine::model::spec::{FamilyRef, ModelSpec, Sliding};
use serde_json::{Map, Value};

/// The family.
pub(super) struct Mistral;

impl ModelFamily for Mistral {
    fn model_type(&self) -> &'static str {
        "mistral"
    }

    fn read(&self, keys: &ConfigReader<'_>) -> Result<ModelSpec, String> {
        only_silu(keys)?;
        let default = ModelSpec {
            family: FamilyRef(&Mistral),
            max_position_embeddings: 131_072,
            intermediate_size: 14_336,
            ..llama::default()
        };
        let spec = llama::read(keys, default, Some(8))?;
        let spec = ModelSpec { head_dim: head_dim(keys, &spec, None)?, ..spec };
        let spec = with_rope(keys, spec, 1e4)?;
        // A missing key stands for a window of 4096, `null` for none.
        let window = match keys.0.get("sliding_window") {
            Some(Value::Null) => return Ok(spec),
            _ => keys.positive_usize("sliding_window", 4096)?,
        };
        let rope = spec.rope.clone().ok_or("no rotary position embeddings")?;
        let sliding = Some(Sliding { window, layers: vec![true; spec.num_layers], rope });
        Ok(ModelSpec { sliding, ..spec })
    }

    fn write(&self, spec: &ModelSpec) -> Value {
        let mut json = llama::write(spec, "MistralForCausalLM");
        json["sliding_window"] = spec.sliding.as_ref().map(|sliding| sliding.window).into();
        json
    }

    fn gguf(&self) -> GgufFormat {
        llama::Llama.gguf()
    }

    fn claims_gguf(&self, keys: &Map<String, Value>) -> bool {
        keys.contains_key("attention.sliding_window")
    }

    fn write_gguf(&self, _: &ModelSpec, _: &mut Vec<(&'static str, Value)>) -> Result<(), String> {
        Ok(())
    }
}
