//! Llama (Touvron et al., 2023), and what related families share with it: RMS norms, rotary positions, grouped queries, a
//! SiLU-gated MLP, `[out, in]` weights. SmolLM2, TinyLlama and Llama 3 belong to this family.

use super::architecture::{Architecture, Keys, one_or_more};
use super::rope::{Rope, RopeType};
use super::spec::{Biases, DropoutRates, Family, Layer, LinearRole, ModelSpec, NormRole, Op};
use crate::engine::kernels::{Activation, Norm, WeightLayout};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The family.
pub(super) struct Llama;

/// The defaults of transformers for missing keys.
pub(super) fn default() -> ModelSpec {
    ModelSpec {
        family: Family(&Llama),
        vocab_size: 32_000,
        context: 2048,
        width: 4096,
        layers: 32,
        heads: 32,
        kv_heads: 32,
        head_dim: 128,
        inner: 11_008,
        norm: Norm::Rms { unit_offset: false },
        norm_eps: 1e-6,
        activation: Activation::GatedSilu,
        weight_layout: WeightLayout::OutIn,
        packed_qkv: false,
        biases: Biases { qkv: false, out: false, mlp: false },
        learned_positions: false,
        rope: Some(Rope::plain(1e4)),
        sliding: None,
        attention_scale: None,
        qk_norm: false,
        branch_norms: false,
        scaled_embedding: false,
        tied: false,
        dropout: DropoutRates::default(),
        initializer_range: 0.02,
        bos_token_id: Some(1),
        eos_token_ids: vec![2],
        lora: None,
        quantised: BTreeMap::new(),
    }
}

/// Reads the keys that all Llama-like families share. `default` provides missing keys except the size of a head;
/// without `kv_heads`, the number of key heads defaults to the number of query heads.
pub(super) fn read(keys: &Keys<'_>, default: ModelSpec, kv_heads: Option<usize>) -> Result<ModelSpec, String> {
    let heads = keys.size("num_attention_heads", default.heads)?;
    let kv_heads = keys.size("num_key_value_heads", kv_heads.unwrap_or(heads))?;
    if !heads.is_multiple_of(kv_heads) {
        return Err(format!("`num_key_value_heads` = {kv_heads} does not divide `num_attention_heads` = {heads}"));
    }
    Ok(ModelSpec {
        vocab_size: keys.size("vocab_size", default.vocab_size)?,
        context: keys.size("max_position_embeddings", default.context)?,
        width: keys.size("hidden_size", default.width)?,
        layers: keys.depth("num_hidden_layers", default.layers)?,
        heads,
        kv_heads,
        inner: keys.size("intermediate_size", default.inner)?,
        norm_eps: keys.positive("rms_norm_eps", default.norm_eps)?,
        dropout: DropoutRates { attention: keys.dropout("attention_dropout", 0.0)?, ..DropoutRates::default() },
        initializer_range: keys.positive("initializer_range", default.initializer_range)?,
        tied: keys.flag("tie_word_embeddings", default.tied)?,
        bos_token_id: keys.token("bos_token_id", default.bos_token_id)?,
        eos_token_ids: keys.tokens("eos_token_id", &default.eos_token_ids)?,
        ..default
    })
}

/// The size of a head: `head_dim`, otherwise `default`, otherwise the hidden size over the number of heads.
pub(super) fn head_dim(keys: &Keys<'_>, spec: &ModelSpec, default: Option<usize>) -> Result<usize, String> {
    let (width, heads) = (spec.width, spec.heads);
    let quotient = default.unwrap_or(width / heads).max(1);
    let head_dim = keys.size("head_dim", quotient)?;
    if default.is_none() && head_dim == quotient && !width.is_multiple_of(heads) {
        return Err(format!("`num_attention_heads` = {heads} does not divide `hidden_size` = {width}"));
    }
    if head_dim.is_multiple_of(2) {
        Ok(head_dim)
    } else {
        Err(format!("`head_dim` is {head_dim}; rotary position embeddings need an even number"))
    }
}

/// Rejects activations other than `silu`.
pub(super) fn only_silu(keys: &Keys<'_>) -> Result<(), String> {
    match keys.text("hidden_act", "silu")? {
        "silu" | "swish" => Ok(()),
        other => Err(format!("`hidden_act` is `{other}`; the engine has `silu` only for this family")),
    }
}

/// `spec` with the rotary embeddings of a configuration in which they are the same for all layers.
pub(super) fn with_rope(keys: &Keys<'_>, spec: ModelSpec, theta: f64) -> Result<ModelSpec, String> {
    let rope = Rope::flat(keys.0, theta, spec.context)?;
    // The base grows with the sequence, which may be longer than the context by the factor.
    let context = match rope.kind {
        RopeType::Dynamic { factor, .. } => (spec.context as f64 * factor) as usize,
        _ => spec.context,
    };
    Ok(ModelSpec { rope: Some(rope), context, ..spec })
}

/// Writes the keys that all Llama-like families share.
pub(super) fn write(spec: &ModelSpec, class: &str) -> Value {
    let context = match &spec.rope {
        Some(Rope { kind: RopeType::Dynamic { max_position_embeddings, .. }, .. }) => *max_position_embeddings,
        _ => spec.context,
    };
    json!({
        "architectures": [class],
        "attention_dropout": spec.dropout.attention,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": one_or_more(&spec.eos_token_ids),
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.width,
        "initializer_range": spec.initializer_range,
        "intermediate_size": spec.inner,
        "max_position_embeddings": context,
        "model_type": spec.family.model_type(),
        "num_attention_heads": spec.heads,
        "num_hidden_layers": spec.layers,
        "num_key_value_heads": spec.kv_heads,
        "rms_norm_eps": spec.norm_eps,
        "rope_parameters": spec.rope.as_ref().map(Rope::to_json),
        "tie_word_embeddings": spec.tied,
        "vocab_size": spec.vocab_size,
    })
}

/// Names of layers that all Llama-like families share. The norm after attention has the name of other families' MLP
/// norm.
pub(super) fn layer_name(Layer { block, op }: Layer) -> String {
    let name = match op {
        Op::Embedding => "embed_tokens",
        Op::Positions => "embed_positions",
        Op::Norm(NormRole::Attention) => "input_layernorm",
        Op::Norm(NormRole::Query) => "self_attn.q_norm",
        Op::Norm(NormRole::Key) => "self_attn.k_norm",
        Op::Norm(NormRole::AttentionBranch) => "self_attn.branch_norm",
        Op::Norm(NormRole::Mlp) => "post_attention_layernorm",
        Op::Norm(NormRole::MlpBranch) => "mlp.branch_norm",
        Op::Norm(NormRole::Final) => "norm",
        Op::Linear(LinearRole::Qkv) => "self_attn.qkv",
        Op::Linear(LinearRole::Query) => "self_attn.q_proj",
        Op::Linear(LinearRole::Key) => "self_attn.k_proj",
        Op::Linear(LinearRole::Value) => "self_attn.v_proj",
        Op::Linear(LinearRole::Out) => "self_attn.o_proj",
        Op::Linear(LinearRole::GateUp) => "mlp.gate_up",
        Op::Linear(LinearRole::Gate) => "mlp.gate_proj",
        Op::Linear(LinearRole::Up) => "mlp.up_proj",
        Op::Linear(LinearRole::Down) => "mlp.down_proj",
        Op::Attention => "self_attn",
        Op::AttentionSum => "self_attn.residual",
        Op::Activation => "mlp.act",
        Op::MlpSum => "mlp.residual",
        Op::Head => "lm_head",
    };
    block.map_or_else(|| name.to_owned(), |block| format!("layers.{block}.{name}"))
}

/// Older versions of transformers saved the frequencies of rotary embeddings with every layer.
pub(super) fn parameter_name(tensor: &str) -> Option<&str> {
    let name = tensor.strip_prefix("model.").unwrap_or(tensor);
    (!name.ends_with("rotary_emb.inv_freq")).then_some(name)
}

/// Whether each layer has a sliding window, according to `layer_types` or, without that key, `default`.
pub(super) fn sliding_layers(
    keys: &Keys<'_>,
    layers: usize,
    default: impl Fn(usize) -> bool,
) -> Result<Vec<bool>, String> {
    let types = match keys.0.get("layer_types") {
        None | Some(Value::Null) => return Ok((0..layers).map(default).collect()),
        Some(Value::Array(types)) => types,
        Some(other) => return Err(format!("`layer_types` is {other}; it must be a list")),
    };
    if types.len() != layers {
        return Err(format!("`layer_types` has {} entries for `num_hidden_layers` = {layers}", types.len()));
    }
    let read = |value: &Value| match value.as_str() {
        Some("full_attention") => Ok(false),
        Some("sliding_attention") => Ok(true),
        _ => Err(format!("`layer_types` has {value}; supported: `full_attention`, `sliding_attention`")),
    };
    types.iter().map(read).collect()
}

/// The value of `layer_types`.
pub(super) fn layer_types(spec: &ModelSpec) -> Value {
    let name = |block| if spec.is_sliding(block) { "sliding_attention" } else { "full_attention" };
    (0..spec.layers).map(name).collect()
}

impl Architecture for Llama {
    fn model_type(&self) -> &'static str {
        "llama"
    }

    fn names(&self) -> &'static [&'static str] {
        &["smollm2-135m", "smollm2-360m", "llama3.2-1b"]
    }

    fn named(&self, name: &str) -> Option<ModelSpec> {
        let smollm2 = |layers, width, heads, inner| ModelSpec {
            vocab_size: 49_152,
            context: 8192,
            layers,
            width,
            heads,
            kv_heads: heads / 3,
            head_dim: 64,
            inner,
            norm_eps: 1e-5,
            rope: Some(Rope::plain(1e5)),
            tied: true,
            bos_token_id: Some(0),
            eos_token_ids: vec![0],
            ..default()
        };
        Some(match name {
            "smollm2-135m" => ModelSpec { initializer_range: 1.0 / 24.0, ..smollm2(30, 576, 9, 1536) },
            "smollm2-360m" => smollm2(32, 960, 15, 2560),
            "llama3.2-1b" => ModelSpec {
                vocab_size: 128_256,
                context: 131_072,
                layers: 16,
                width: 2048,
                heads: 32,
                kv_heads: 8,
                head_dim: 64,
                inner: 8192,
                norm_eps: 1e-5,
                rope: Some(Rope {
                    theta: 5e5,
                    kind: RopeType::Llama3 {
                        factor: 32.0,
                        low_freq_factor: 1.0,
                        high_freq_factor: 4.0,
                        original_max_position_embeddings: 8192,
                    },
                }),
                tied: true,
                bos_token_id: Some(128_000),
                eos_token_ids: vec![128_001],
                ..default()
            },
            _ => return None,
        })
    }

    fn read(&self, keys: &Keys<'_>) -> Result<ModelSpec, String> {
        only_silu(keys)?;
        let spec = read(keys, default(), None)?;
        let attention = keys.flag("attention_bias", false)?;
        let biases = Biases { qkv: attention, out: attention, mlp: keys.flag("mlp_bias", false)? };
        let spec = ModelSpec { head_dim: head_dim(keys, &spec, None)?, biases, ..spec };
        with_rope(keys, spec, 1e4)
    }

    fn write(&self, spec: &ModelSpec) -> Value {
        let mut json = write(spec, "LlamaForCausalLM");
        json["attention_bias"] = spec.biases.qkv.into();
        json["mlp_bias"] = spec.biases.mlp.into();
        json
    }

    fn layer_name(&self, layer: Layer) -> String {
        layer_name(layer)
    }

    fn parameter_name<'a>(&self, tensor: &'a str) -> Option<&'a str> {
        parameter_name(tensor)
    }

    fn prefix(&self) -> &'static str {
        "model."
    }
}

#[cfg(test)]
mod tests;
