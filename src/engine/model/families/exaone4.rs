//! EXAONE 4 (LG AI Research, 2025): OLMo 2 with norms of each head. Large models have windows in three of four layers,
//! and rotary position embeddings only there.

use super::{llama, olmo2, olmo3};
use crate::engine::model::family::{ConfigReader, Family, GgufFormat};
use crate::engine::model::spec::{ModelSpec, QkNorm};
use serde_json::Value;

pub(super) static EXAONE4: Family = Family {
    model_type: "exaone4",
    class: "Exaone4ForCausalLM",
    bias_keys: &[],
    read,
    write: |spec| {
        let mut json = llama::write(spec);
        json["layer_types"] = llama::layer_types(spec);
        json["sliding_window"] = llama::window(spec);
        json
    },
    gguf: GgufFormat {
        architecture: "exaone4",
        tied_head: None,
        frequency_factors: llama::BASE.gguf.frequency_factors,
        read: |keys, json| {
            olmo3::read_flags(keys, json);
            json.entry("sliding_window").or_insert(Value::Null);
        },
        write: |spec, _| llama::no_windows(spec),
        ..olmo2::BASE.gguf
    },
    ..olmo2::BASE
};

/// One layer in this many has no window.
const PATTERN: usize = 4;

/// The defaults of transformers for missing keys.
fn default() -> ModelSpec {
    ModelSpec {
        family: &EXAONE4,
        vocab_size: 102_400,
        intermediate_size: 16_384,
        qk_norm: Some(QkNorm::PerHead),
        bos_token_id: Some(0),
        eos_token_ids: vec![2],
        ..olmo2::default()
    }
}

fn read(keys: &ConfigReader<'_>) -> Result<ModelSpec, String> {
    let spec = llama::read_uniform(keys, default(), [Some(32), None])?;
    if llama::has_no_window(keys) {
        return Ok(spec);
    }
    let pattern = if keys.0.contains_key("layer_types") {
        PATTERN
    } else {
        keys.positive_usize("sliding_window_pattern", PATTERN)?
    };
    let layers = llama::sliding_layers(keys, spec.num_layers, |layer| (layer + 1) % pattern != 0)?;
    let unrotated = layers.iter().map(|sliding| !sliding).collect();
    llama::with_windows(keys, ModelSpec { unrotated, ..spec }, layers)
}
