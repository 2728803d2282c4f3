//! Gemma 2 (Gemma Team, 2024): norms before and after attention and MLP that multiply by 1 + weight, embeddings scaled
//! by `√width`, a GELU-gated MLP, soft caps of scores and logits, and windows in every other layer.

use super::llama::{self, head_dim};
use crate::engine::kernels::{Activation, NormKind};
use crate::engine::model::family::{ConfigReader, Family, GgufFormat};
use crate::engine::model::spec::{EmbeddingScale, ModelSpec, ModuleId, ModuleOp, NormRole};
use serde_json::{Map, Value, json};

/// The family, from which its successor takes the fields that they share.
pub(super) static GEMMA2: Family = BASE;

/// [`GEMMA2`] as a constant.
pub(super) const BASE: Family = Family {
    model_type: "gemma2",
    class: "Gemma2ForCausalLM",
    bias_keys: &["attention_bias"],
    named: &[],
    read: |keys| {
        let caps = ModelSpec { attention_softcap: Some(50.0), logits_softcap: Some(30.0), ..default() };
        let spec = llama::with_rope(keys, read(keys, caps)?)?;
        let layers = llama::sliding_layers(keys, spec.num_layers, llama::alternates)?;
        llama::with_windows(keys, spec, layers)
    },
    write: |spec| {
        let mut json = write(spec);
        json["sliding_window"] = llama::window(spec);
        json
    },
    layer_name,
    gguf: GgufFormat {
        architecture: "gemma2",
        tied_head: Some(true),
        read: |keys, json| read_gguf(keys, json, LAYERS_27B),
        write: |spec, keys| {
            check_gguf_scale(spec, LAYERS_27B)?;
            for (key, cap) in caps(spec) {
                let cap = cap.ok_or_else(|| format!("llama.cpp needs `{key}`; export this model as a folder"))?;
                keys.push((key, cap.into()));
            }
            llama::check_alternation(spec)
        },
        ..llama::OTHER_GGUF
    },
    ..llama::BASE
};

/// The layer count by which llama.cpp recognizes the model of 27B, which scales its scores differently.
const LAYERS_27B: usize = 46;
/// The keys of the soft caps, in GGUF too.
const CAPS: [&str; 2] = ["attn_logit_softcapping", "final_logit_softcapping"];

/// The defaults of transformers for missing keys, without soft caps.
pub(super) fn default() -> ModelSpec {
    ModelSpec {
        family: &GEMMA2,
        vocab_size: 256_000,
        max_position_embeddings: 8192,
        hidden_size: 2304,
        num_layers: 26,
        heads: 8,
        kv_heads: 4,
        head_dim: 256,
        intermediate_size: 9216,
        norm: NormKind::Rms { unit_offset: true },
        activation: Activation::GeGlu,
        attention_scale: Some(1.0 / 16.0),
        post_norms: true,
        embedding_scale: EmbeddingScale::RootOfWidth,
        tie_word_embeddings: true,
        bos_token_id: Some(2),
        eos_token_ids: vec![1],
        ..llama::default()
    }
}

/// Reads the keys that Gemma 2 and 3 share.
pub(super) fn read(keys: &ConfigReader<'_>, default: ModelSpec) -> Result<ModelSpec, String> {
    // transformers reads the first of these, and older files have the second as well.
    let activation = keys.str("hidden_activation", keys.str("hidden_act", "gelu_pytorch_tanh")?)?;
    if activation != "gelu_pytorch_tanh" {
        return Err(format!("`hidden_activation` is `{activation}`; the engine has `gelu_pytorch_tanh` only"));
    }
    keys.require_value("use_bidirectional_attention", false)?;
    let spec = llama::read(keys, default, Some(4))?;
    // `null` means that there is no cap, so only a missing key takes the default.
    let cap = |key: &str, default: Option<f64>| match keys.0.get(key) {
        None => Ok(default),
        Some(Value::Null) => Ok(None),
        Some(_) => keys.positive(key, 1.0).map(Some),
    };
    Ok(ModelSpec {
        head_dim: head_dim(keys, &spec, Some(256))?,
        attention_scale: Some(keys.positive("query_pre_attn_scalar", 256.0)?.powf(-0.5)),
        attention_softcap: cap(CAPS[0], spec.attention_softcap)?,
        logits_softcap: cap(CAPS[1], spec.logits_softcap)?,
        ..spec
    })
}

/// Writes the keys that Gemma 2 and 3 share.
pub(super) fn write(spec: &ModelSpec) -> Value {
    let mut json = llama::write(spec);
    if let Some(keys) = json.as_object_mut() {
        keys.remove("hidden_act");
    }
    json["hidden_activation"] = "gelu_pytorch_tanh".into();
    json["layer_types"] = llama::layer_types(spec);
    json["query_pre_attn_scalar"] = scalar(spec);
    for (key, cap) in caps(spec) {
        json[key] = cap.into();
    }
    json
}

/// The soft caps with their keys.
fn caps(spec: &ModelSpec) -> [(&'static str, Option<f64>); 2] {
    [(CAPS[0], spec.attention_softcap), (CAPS[1], spec.logits_softcap)]
}

pub(super) fn layer_name(layer: ModuleId) -> String {
    let name = match layer.op {
        ModuleOp::Norm(NormRole::PostAttention) => "post_attention_layernorm",
        ModuleOp::Norm(NormRole::Mlp) => "pre_feedforward_layernorm",
        ModuleOp::Norm(NormRole::PostMlp) => "post_feedforward_layernorm",
        _ => return llama::layer_name(layer),
    };
    llama::in_block(layer.block, name)
}

/// Moves the soft caps, and adds the scale that llama.cpp assumes; the model of 27B has `layers_27b` layers.
pub(super) fn read_gguf(keys: &mut Map<String, Value>, json: &mut Map<String, Value>, layers_27b: usize) {
    let number = |key: &str| json.get(key).and_then(Value::as_u64).unwrap_or(1).max(1) as usize;
    let sizes = ["num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim"].map(number);
    json.insert("query_pre_attn_scalar".into(), json!(gguf_scale(sizes, layers_27b)));
    json.extend(CAPS.into_iter().filter_map(|key| Some((key.to_owned(), keys.remove(key)?))));
}

/// Rejects a scale that llama.cpp does not assume.
pub(super) fn check_gguf_scale(spec: &ModelSpec, layers_27b: usize) -> Result<(), String> {
    let scale = gguf_scale([spec.num_layers, spec.hidden_size, spec.heads, spec.head_dim], layers_27b);
    if spec.attention_scale.is_none_or(|ours| (ours * scale.sqrt() - 1.0).abs() > 1e-9) {
        return Err(format!("llama.cpp takes `query_pre_attn_scalar` to be {scale}, which this model's is not"));
    }
    Ok(())
}

/// The `query_pre_attn_scalar` that llama.cpp assumes.
fn gguf_scale([layers, width, heads, head_dim]: [usize; 4], layers_27b: usize) -> f64 {
    if layers == layers_27b { width as f64 / heads as f64 } else { head_dim as f64 }
}

/// `query_pre_attn_scalar`, which is 1 over the square of the scale; a whole number in all models there are.
fn scalar(spec: &ModelSpec) -> Value {
    let value = spec.attention_scale.map_or(spec.head_dim as f64, |scale| scale.powi(-2));
    let whole = value.round();
    if (value / whole - 1.0).abs() < 1e-12 { json!(whole as u64) } else { json!(value) }
}
