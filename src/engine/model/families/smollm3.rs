//! SmolLM3 (Hugging Face, 2025): Llama without rotary position embeddings in some layers, one of four by default.

use super::{llama, qwen2};
use crate::engine::model::family::{ConfigReader, Family, GgufFormat};
use crate::engine::model::rope::Rope;
use crate::engine::model::spec::ModelSpec;
use serde_json::Value;

pub(super) static SMOLLM3: Family = Family {
    model_type: "smollm3",
    class: "SmolLM3ForCausalLM",
    named: &[],
    read,
    write: |spec| {
        let mut json = qwen2::write(spec);
        json["no_rope_layers"] = spec.unrotated.iter().map(|unrotated| u8::from(!unrotated)).collect();
        json
    },
    gguf: GgufFormat {
        architecture: "smollm3",
        interleaved: true,
        read: |_, json| {
            json.insert("no_rope_layer_interval".into(), INTERVAL.into());
        },
        write: |spec, _| {
            llama::no_windows(spec)?;
            if (1..).zip(&spec.unrotated).all(|(layer, unrotated)| *unrotated == (layer % INTERVAL == 0)) {
                return Ok(());
            }
            Err(format!("llama.cpp rotates all layers but every {INTERVAL}th; export this model as a folder"))
        },
        ..llama::OTHER_GGUF
    },
    ..llama::BASE
};

/// One layer in this many has no rotary embeddings; llama.cpp supports no other number.
const INTERVAL: usize = 4;

/// The defaults of transformers for missing keys.
fn default() -> ModelSpec {
    ModelSpec {
        family: &SMOLLM3,
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

fn read(keys: &ConfigReader<'_>) -> Result<ModelSpec, String> {
    let spec = llama::read_uniform(keys, default(), [Some(4), None])?;
    let unrotated = unrotated(keys, spec.num_layers)?;
    let spec = qwen2::with_windows(keys, spec, |layer| unrotated[layer])?;
    Ok(ModelSpec { unrotated, ..spec })
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
