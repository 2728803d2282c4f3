//! Gemma 3, text only (Gemma Team, 2025): norms before and after attention and MLP that multiply by 1 + weight, head norms,
//! embeddings scaled by `√width`, a GELU-gated MLP, and sliding-window layers with their own rotary embeddings.

use super::llama::{self, head_dim, layer_types, sliding_layers};
use crate::engine::kernels::{Activation, Norm};
use crate::engine::model::family::{ConfigReader, Family, GgufFormat};
use crate::engine::model::rope::Rope;
use crate::engine::model::spec::{EmbeddingScale, ModelSpec, ModuleId, ModuleOp, NormRole, QkNorm, Sliding};
use serde_json::{Map, Value, json};

/// The family.
pub(super) static GEMMA3: Family = Family {
    model_type: "gemma3_text",
    class: "Gemma3ForCausalLM",
    bias_keys: &["attention_bias"],
    named: &[("gemma3-270m", gemma3_270m)],
    read,
    write,
    layer_name,
    gguf: GgufFormat {
        architecture: "gemma3",
        interleaved: false,
        read: read_gguf,
        write: write_gguf,
        ..llama::BASE.gguf
    },
    ..llama::BASE
};

/// Bases of the rotary embeddings of layers without and with a window.
const THETA: [f64; 2] = [1e6, 1e4];
/// One layer in this many has no window.
const PATTERN: usize = 6;
/// The layer count by which llama.cpp recognises the model of 27B, which scales its scores differently.
const LAYERS_27B: usize = 62;

/// The defaults of transformers for missing keys.
fn default() -> ModelSpec {
    ModelSpec {
        family: &GEMMA3,
        vocab_size: 262_208,
        max_position_embeddings: 131_072,
        hidden_size: 2304,
        num_layers: 26,
        heads: 8,
        kv_heads: 4,
        head_dim: 256,
        intermediate_size: 9216,
        norm: Norm::Rms { unit_offset: true },
        norm_eps: 1e-6,
        activation: Activation::GeGlu,
        rope: Some(Rope::plain(THETA[0])),
        attention_scale: Some(1.0 / 16.0),
        qk_norm: Some(QkNorm::PerHead),
        post_norms: true,
        embedding_scale: EmbeddingScale::RootOfWidth,
        tie_word_embeddings: true,
        bos_token_id: Some(2),
        eos_token_ids: vec![1],
        ..llama::default()
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
    // transformers reads the first of these, and older files have the second as well.
    let activation = keys.str("hidden_activation", keys.str("hidden_act", "gelu_pytorch_tanh")?)?;
    if activation != "gelu_pytorch_tanh" {
        return Err(format!("`hidden_activation` is `{activation}`; the engine has `gelu_pytorch_tanh` only"));
    }
    for key in ["final_logit_softcapping", "attn_logit_softcapping"] {
        if let Some(value) = keys.0.get(key).filter(|value| !value.is_null()) {
            return Err(format!("`{key}` is {value}; the engine has models without it only"));
        }
    }
    keys.require_value("use_bidirectional_attention", false)?;
    let spec = llama::read(keys, default(), Some(4))?;
    let [full, sliding] = Rope::by_layer_type(keys.0, THETA, spec.max_position_embeddings)?;
    let pattern =
        keys.positive_usize("sliding_window_pattern", keys.positive_usize("_sliding_window_pattern", PATTERN)?)?;
    let layers = sliding_layers(keys, spec.num_layers, |layer| (layer + 1) % pattern != 0)?;
    Ok(ModelSpec {
        head_dim: head_dim(keys, &spec, Some(256))?,
        rope: Some(full),
        sliding: Some(Sliding { window: keys.positive_usize("sliding_window", 4096)?, layers, rope: sliding }),
        attention_scale: Some(keys.positive("query_pre_attn_scalar", 256.0)?.powf(-0.5)),
        ..spec
    })
}

fn write(spec: &ModelSpec) -> Value {
    let mut json = llama::write(spec);
    if let Some(keys) = json.as_object_mut() {
        keys.remove("hidden_act");
    }
    json["hidden_activation"] = "gelu_pytorch_tanh".into();
    json["layer_types"] = layer_types(spec);
    json["query_pre_attn_scalar"] = scalar(spec);
    if let (Some(full), Some(sliding)) = (&spec.rope, &spec.sliding) {
        json["sliding_window"] = sliding.window.into();
        json["rope_parameters"] =
            json!({"full_attention": full.to_json(), "sliding_attention": sliding.rope.to_json()});
    }
    json
}

fn layer_name(layer: ModuleId) -> String {
    let name = match layer.op {
        ModuleOp::Norm(NormRole::PostAttention) => "post_attention_layernorm",
        ModuleOp::Norm(NormRole::Mlp) => "pre_feedforward_layernorm",
        ModuleOp::Norm(NormRole::PostMlp) => "post_feedforward_layernorm",
        _ => return llama::layer_name(layer),
    };
    llama::in_block(layer.block, name)
}

fn read_gguf(keys: &mut Map<String, Value>, json: &mut Map<String, Value>) {
    let number = |key: &str| json.get(key).and_then(Value::as_u64).unwrap_or(1).max(1) as usize;
    let sizes = ["num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim"].map(number);
    json.insert("query_pre_attn_scalar".into(), json!(gguf_scale(sizes)));
    for (theirs, ours) in [
        ("attention.sliding_window_pattern", "sliding_window_pattern"),
        ("rope.freq_base_swa", "rope_local_base_freq"),
        ("final_logit_softcapping", "final_logit_softcapping"),
        ("attn_logit_softcapping", "attn_logit_softcapping"),
    ] {
        if let Some(value) = keys.remove(theirs) {
            json.insert(ours.into(), value);
        }
    }
}

fn write_gguf(spec: &ModelSpec, keys: &mut Vec<(&'static str, Value)>) -> Result<(), String> {
    let scale = gguf_scale([spec.num_layers, spec.hidden_size, spec.heads, spec.head_dim]);
    if spec.attention_scale.is_none_or(|ours| (ours * scale.sqrt() - 1.0).abs() > 1e-9) {
        return Err(format!("llama.cpp takes `query_pre_attn_scalar` to be {scale}, which this model's is not"));
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

/// The `query_pre_attn_scalar` that llama.cpp assumes.
fn gguf_scale([layers, width, heads, head_dim]: [usize; 4]) -> f64 {
    if layers == LAYERS_27B { width as f64 / heads as f64 } else { head_dim as f64 }
}

/// `query_pre_attn_scalar`, which is 1 over the square of the scale; a whole number in all models there are.
fn scalar(spec: &ModelSpec) -> Value {
    let value = spec.attention_scale.map_or(spec.head_dim as f64, |scale| scale.powi(-2));
    let whole = value.round();
    if (value / whole - 1.0).abs() < 1e-12 { json!(whole as u64) } else { json!(value) }
}
