//! OLMo 3 (OLMo Team, 2025): OLMo 2 with windows in three of four layers. Only layers without a window have extended
//! rotary embeddings.

use super::{llama, olmo2};
use crate::engine::model::family::{ConfigReader, Family, GgufFormat};
use crate::engine::model::rope::Rope;
use crate::engine::model::spec::{ModelSpec, Sliding};
use serde_json::{Map, Value};

pub(super) static OLMO3: Family = Family {
    model_type: "olmo3",
    class: "Olmo3ForCausalLM",
    read,
    write: |spec| {
        let mut json = llama::write(spec);
        json["layer_types"] = llama::layer_types(spec);
        llama::write_windows(spec, &mut json);
        json
    },
    gguf: GgufFormat {
        claims: |keys| keys.contains_key("attention.sliding_window"),
        read: read_flags,
        write: |spec, _| {
            let Some(sliding) = &spec.sliding else { return Ok(()) };
            if (1..).zip(&sliding.layers).any(|(layer, sliding)| *sliding == (layer % PATTERN == 0)) {
                return Err(format!("llama.cpp has windows in all layers except every {PATTERN}th; export a folder"));
            }
            if Some(&sliding.rope) != spec.rope.as_ref().map(|rope| Rope::plain(rope.theta)).as_ref() {
                return Err("llama.cpp has no key for the rotary embeddings of layers with a window".into());
            }
            Ok(())
        },
        ..olmo2::BASE.gguf
    },
    ..olmo2::BASE
};

/// One layer in this many has no window.
const PATTERN: usize = 4;
/// The base of the rotary embeddings.
const THETA: f64 = 5e5;

fn read(keys: &ConfigReader<'_>) -> Result<ModelSpec, String> {
    llama::only_silu(keys)?;
    let spec = llama::read(keys, ModelSpec { family: &OLMO3, ..olmo2::default() }, None)?;
    let [full, rope] = Rope::by_layer_type(keys.0, [("rope_theta", THETA); 2], spec.max_position_embeddings)?;
    let layers = llama::sliding_layers(keys, spec.num_layers, |layer| (layer + 1) % PATTERN != 0)?;
    let sliding = Some(Sliding { window: keys.positive_usize("sliding_window", 4096)?, layers, rope });
    Ok(ModelSpec { head_dim: llama::head_dim(keys, &spec, None)?, rope: Some(full), sliding, ..spec })
}

/// Reads the flags of layers with a window, which llama.cpp's converter writes. llama.cpp itself takes every fourth
/// layer to be full.
pub(super) fn read_flags(keys: &mut Map<String, Value>, json: &mut Map<String, Value>) {
    let Some(Value::Array(flags)) = keys.remove("attention.sliding_window_pattern") else { return };
    let name = |flag: &Value| if flag == &Value::Bool(true) { "sliding_attention" } else { "full_attention" };
    json.insert("layer_types".into(), flags.iter().map(name).collect());
}
