//! Gemma 3, text only (Gemma Team, 2025): Gemma 2 without soft caps, with head norms, and with other rotary embeddings
//! in layers that have a window.

use super::{gemma2, llama};
use crate::engine::model::family::{ConfigReader, Family, GgufEntries, GgufFormat};
use crate::engine::model::rope::Rope;
use crate::engine::model::spec::{ModelSpec, QkNorm, Sliding};
use serde_json::{Map, Value};

pub(super) static GEMMA3: Family = Family {
    model_type: "gemma3_text",
    class: "Gemma3ForCausalLM",
    named: &[("gemma3-270m", gemma3_270m)],
    read,
    write,
    gguf: GgufFormat {
        architecture: "gemma3",
        tied_head: None,
        read: read_gguf,
        write: write_gguf,
        ..gemma2::BASE.gguf
    },
    ..gemma2::BASE
};

/// Bases of the rotary embeddings of layers without and with a window.
const THETA: [f64; 2] = [1e6, 1e4];
/// The key of the second one in transformers before version 5.
const WINDOW_BASE: &str = "rope_local_base_freq";
/// One layer in this many has no window.
const PATTERN: usize = 6;
/// The layer count by which llama.cpp recognizes the model of 27B, which scales its scores differently.
const LAYERS_27B: usize = 62;

/// The defaults of transformers for missing keys.
fn default() -> ModelSpec {
    ModelSpec {
        family: &GEMMA3,
        vocab_size: 262_208,
        max_position_embeddings: 131_072,
        rope: Some(Rope::plain(THETA[0])),
        qk_norm: Some(QkNorm::PerHead),
        ..gemma2::default()
    }
}

fn gemma3_270m() -> ModelSpec {
    let layers = 18;
    ModelSpec {
        vocab_size: 262_144,
        max_position_embeddings: 32_768,
        num_layers: layers,
        hidden_size: 640,
        heads: 4,
        kv_heads: 1,
        intermediate_size: 2048,
        sliding: Some(Sliding {
            window: 512,
            layers: (1..=layers).map(|layer| layer % PATTERN != 0).collect(),
            rope: Rope::plain(THETA[1]),
        }),
        ..default()
    }
}

fn read(keys: &ConfigReader<'_>) -> Result<ModelSpec, String> {
    let spec = gemma2::read(keys, default())?;
    let theta = [("rope_theta", THETA[0]), (WINDOW_BASE, THETA[1])];
    let [full, sliding] = Rope::by_layer_type(keys.0, theta, spec.max_position_embeddings)?;
    let pattern = keys.positive_usize("sliding_window_pattern", PATTERN)?;
    let layers = llama::sliding_layers(keys, spec.num_layers, |layer| (layer + 1) % pattern != 0)?;
    Ok(ModelSpec {
        rope: Some(full),
        sliding: Some(Sliding { window: keys.positive_usize("sliding_window", 4096)?, layers, rope: sliding }),
        // transformers reads the cap of scores and ignores it.
        attention_softcap: None,
        ..spec
    })
}

fn write(spec: &ModelSpec) -> Value {
    let mut json = gemma2::write(spec);
    llama::write_windows(spec, &mut json);
    json[WINDOW_BASE] = json["rope_parameters"]["sliding_attention"]["rope_theta"].clone();
    json
}

fn read_gguf(keys: &mut Map<String, Value>, json: &mut Map<String, Value>) {
    gemma2::read_gguf(keys, json, LAYERS_27B);
    for (theirs, ours) in
        [("attention.sliding_window_pattern", "sliding_window_pattern"), ("rope.freq_base_swa", WINDOW_BASE)]
    {
        if let Some(value) = keys.remove(theirs) {
            json.insert(ours.into(), value);
        }
    }
}

fn write_gguf(spec: &ModelSpec, keys: &mut GgufEntries) -> Result<(), String> {
    gemma2::check_gguf_scale(spec, LAYERS_27B)?;
    if spec.logits_softcap.is_some() {
        return Err("llama.cpp has no `final_logit_softcapping` in this family; export this model as a folder".into());
    }
    let Some(sliding) = &spec.sliding else { return Ok(()) };
    if sliding.rope != Rope::plain(THETA[1]) {
        return Err("llama.cpp has no key for the rotary embeddings of layers with a window".into());
    }
    let pattern = |layers: &[bool], n: usize| layers.iter().enumerate().all(|(i, s)| *s == ((i + 1) % n != 0));
    match (1..=sliding.layers.len() + 1).rev().find(|n| pattern(&sliding.layers, *n)) {
        _ if pattern(&sliding.layers, PATTERN) => {}
        Some(n) => keys.push(("attention.sliding_window_pattern", n.into())),
        None => return Err("its layers with a window follow no pattern that GGUF can name".into()),
    }
    Ok(())
}
