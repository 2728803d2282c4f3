//! Mistral (Jiang et al., 2023): Llama with a window in every layer, or in none.

use super::llama;
use crate::engine::model::family::{ConfigReader, Family, GgufFormat};
use crate::engine::model::spec::ModelSpec;

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
        claims: |keys| keys.contains_key("attention.sliding_window"),
        write: |_, _| Ok(()),
        ..llama::BASE.gguf
    },
    ..llama::BASE
};

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
