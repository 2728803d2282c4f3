//! Mistral (Jiang et al., 2023): Llama with a window in every layer, or in none.

use super::llama;
use crate::engine::model::family::{ConfigReader, Family, GgufFormat};
use crate::engine::model::spec::ModelSpec;
use serde_json::{Map, Value};

pub(super) static MISTRAL: Family = Family {
    model_type: "mistral",
    class: "MistralForCausalLM",
    bias_keys: &[],
    named: &[],
    read,
    write: |spec| {
        let mut json = llama::write(spec);
        json["sliding_window"] = llama::window(spec);
        json
    },
    gguf: GgufFormat {
        claims: |keys| keys.contains_key("attention.sliding_window") || has_uneven_width(keys),
        read: |_, json| {
            json.entry("sliding_window").or_insert(Value::Null);
        },
        write: |_, _| Ok(()),
        ..llama::BASE.gguf
    },
    ..llama::BASE
};

/// Whether the hidden size is not a multiple of the number of heads, which transformers refuses for a Llama.
fn has_uneven_width(keys: &Map<String, Value>) -> bool {
    let number = |key| keys.get(key).and_then(Value::as_u64);
    let numbers = number("embedding_length").zip(number("attention.head_count"));
    numbers.is_some_and(|(width, heads)| !width.is_multiple_of(heads))
}

fn read(keys: &ConfigReader<'_>) -> Result<ModelSpec, String> {
    let default =
        ModelSpec { family: &MISTRAL, max_position_embeddings: 131_072, intermediate_size: 14_336, ..llama::default() };
    let spec = llama::read_uniform(keys, default, [Some(8), None])?;
    if llama::has_no_window(keys) {
        return Ok(spec);
    }
    let every = vec![true; spec.num_layers];
    llama::with_windows(keys, spec, every)
}
