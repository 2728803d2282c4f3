//! Llama (Touvron et al., 2023), and what related families share with it: RMS norms, rotary positions, grouped queries, a
//! SiLU-gated MLP, `[out, in]` weights. SmolLM2, TinyLlama and Llama 3 belong to this family.

use crate::engine::kernels::{Activation, Norm, WeightLayout};
use crate::engine::model::family::{ConfigReader, GgufFormat, GgufKey, ModelFamily, one_or_more};
use crate::engine::model::rope::{Rope, RopeType};
use crate::engine::model::spec::{
    Biases, DropoutRates, EmbeddingScale, FamilyRef, LinearRole, ModelSpec, ModuleId, ModuleOp, NormRole,
};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The family.
pub(super) struct Llama;

/// The metadata keys that all Llama-like families share.
pub(super) const GGUF_KEYS: [GgufKey; 10] = [
    ("context_length", "max_position_embeddings", true),
    ("embedding_length", "hidden_size", true),
    ("feed_forward_length", "intermediate_size", true),
    ("block_count", "num_hidden_layers", true),
    ("attention.head_count", "num_attention_heads", true),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps", true),
    ("attention.head_count_kv", "num_key_value_heads", false),
    ("attention.key_length", "head_dim", false),
    ("rope.freq_base", "rope_theta", false),
    ("attention.sliding_window", "sliding_window", false),
];

/// The defaults of transformers for missing keys.
pub(super) fn default() -> ModelSpec {
    ModelSpec {
        family: FamilyRef(&Llama),
        vocab_size: 32_000,
        max_position_embeddings: 2048,
        hidden_size: 4096,
        num_layers: 32,
        heads: 32,
        kv_heads: 32,
        head_dim: 128,
        intermediate_size: 11_008,
        norm: Norm::Rms { unit_offset: false },
        norm_eps: 1e-6,
        activation: Activation::SwiGlu,
        weight_layout: WeightLayout::OutIn,
        fused_qkv: false,
        fused_gate_up: false,
        biases: Biases { qkv: false, out: false, mlp: false },
        learned_positions: false,
        rope: Some(Rope::plain(1e4)),
        rotary_dim: None,
        unrotated: Vec::new(),
        sliding: None,
        attention_scale: None,
        qk_norm: None,
        pre_norms: true,
        post_norms: false,
        embedding_scale: EmbeddingScale::Factor(1.0),
        residual_multiplier: 1.0,
        logits_scaling: 1.0,
        tie_word_embeddings: false,
        dropout: DropoutRates::default(),
        initializer_range: 0.02,
        bos_token_id: Some(1),
        eos_token_ids: vec![2],
        lora: None,
        quantized: BTreeMap::new(),
    }
}

/// Reads the keys that all Llama-like families share. `default` provides missing keys except the size of a head;
/// without `kv_heads`, the number of key heads defaults to the number of query heads.
pub(super) fn read(keys: &ConfigReader<'_>, default: ModelSpec, kv_heads: Option<usize>) -> Result<ModelSpec, String> {
    let heads = keys.positive_usize("num_attention_heads", default.heads)?;
    let kv_heads = keys.positive_usize("num_key_value_heads", kv_heads.unwrap_or(heads))?;
    if !heads.is_multiple_of(kv_heads) {
        return Err(format!("`num_key_value_heads` = {kv_heads} does not divide `num_attention_heads` = {heads}"));
    }
    Ok(ModelSpec {
        vocab_size: keys.positive_usize("vocab_size", default.vocab_size)?,
        max_position_embeddings: keys.positive_usize("max_position_embeddings", default.max_position_embeddings)?,
        hidden_size: keys.positive_usize("hidden_size", default.hidden_size)?,
        num_layers: keys.depth("num_hidden_layers", default.num_layers)?,
        heads,
        kv_heads,
        intermediate_size: keys.positive_usize("intermediate_size", default.intermediate_size)?,
        norm_eps: keys.positive("rms_norm_eps", default.norm_eps)?,
        dropout: DropoutRates { attention: keys.dropout("attention_dropout", 0.0)?, ..DropoutRates::default() },
        initializer_range: keys.positive("initializer_range", default.initializer_range)?,
        tie_word_embeddings: keys.bool("tie_word_embeddings", default.tie_word_embeddings)?,
        bos_token_id: keys.token("bos_token_id", default.bos_token_id)?,
        eos_token_ids: keys.tokens("eos_token_id", &default.eos_token_ids)?,
        ..default
    })
}

/// The size of a head: `head_dim`, otherwise `default`, otherwise the hidden size over the number of heads.
pub(super) fn head_dim(keys: &ConfigReader<'_>, spec: &ModelSpec, default: Option<usize>) -> Result<usize, String> {
    let (width, heads) = (spec.hidden_size, spec.heads);
    let quotient = default.unwrap_or(width / heads).max(1);
    let head_dim = keys.positive_usize("head_dim", quotient)?;
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
pub(super) fn only_silu(keys: &ConfigReader<'_>) -> Result<(), String> {
    match keys.str("hidden_act", "silu")? {
        "silu" | "swish" => Ok(()),
        other => Err(format!("`hidden_act` is `{other}`; the engine has `silu` only for this family")),
    }
}

/// The biases of a family without biases in its MLPs.
pub(super) fn attention_biases(keys: &ConfigReader<'_>) -> Result<Biases, String> {
    let attention = keys.bool("attention_bias", false)?;
    Ok(Biases { qkv: attention, out: attention, mlp: false })
}

/// The biases of a family that may have them in attention and MLPs.
pub(super) fn biases(keys: &ConfigReader<'_>) -> Result<Biases, String> {
    Ok(Biases { mlp: keys.bool("mlp_bias", false)?, ..attention_biases(keys)? })
}

/// `spec` with the rotary embeddings of a configuration in which they are the same for all layers.
pub(super) fn with_rope(keys: &ConfigReader<'_>, spec: ModelSpec, theta: f64) -> Result<ModelSpec, String> {
    let rope = Rope::flat(keys.0, theta, spec.max_position_embeddings)?;
    // The base grows with the sequence, which may be longer than the context by the factor.
    let context = match rope.kind {
        RopeType::Dynamic { factor, .. } => (spec.max_position_embeddings as f64 * factor) as usize,
        _ => spec.max_position_embeddings,
    };
    Ok(ModelSpec { rope: Some(rope), max_position_embeddings: context, ..spec })
}

/// Writes the keys that all Llama-like families share.
pub(super) fn write(spec: &ModelSpec, class: &str) -> Value {
    let context = match &spec.rope {
        Some(Rope { kind: RopeType::Dynamic { max_position_embeddings, .. }, .. }) => *max_position_embeddings,
        _ => spec.max_position_embeddings,
    };
    json!({
        "architectures": [class],
        "attention_dropout": spec.dropout.attention,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": one_or_more(&spec.eos_token_ids),
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "initializer_range": spec.initializer_range,
        "intermediate_size": spec.intermediate_size,
        "max_position_embeddings": context,
        "model_type": spec.family.model_type(),
        "num_attention_heads": spec.heads,
        "num_hidden_layers": spec.num_layers,
        "num_key_value_heads": spec.kv_heads,
        "rms_norm_eps": spec.norm_eps,
        "rope_parameters": spec.rope.as_ref().map(Rope::to_json),
        "tie_word_embeddings": spec.tie_word_embeddings,
        "vocab_size": spec.vocab_size,
    })
}

/// Names of layers that all Llama-like families share. The norm after attention has the name of other families' MLP
/// norm.
pub(in crate::engine::model) fn layer_name(ModuleId { block, op }: ModuleId) -> String {
    let name = match op {
        ModuleOp::Embedding => "embed_tokens",
        ModuleOp::Positions => "embed_positions",
        ModuleOp::Norm(NormRole::Attention) => "input_layernorm",
        ModuleOp::Norm(NormRole::Query) => "self_attn.q_norm",
        ModuleOp::Norm(NormRole::Key) => "self_attn.k_norm",
        ModuleOp::Norm(NormRole::PostAttention) => "self_attn.branch_norm",
        ModuleOp::Norm(NormRole::Mlp) => "post_attention_layernorm",
        ModuleOp::Norm(NormRole::PostMlp) => "mlp.branch_norm",
        ModuleOp::Norm(NormRole::Final) => "norm",
        ModuleOp::Linear(LinearRole::Qkv) => "self_attn.qkv",
        ModuleOp::Linear(LinearRole::Query) => "self_attn.q_proj",
        ModuleOp::Linear(LinearRole::Key) => "self_attn.k_proj",
        ModuleOp::Linear(LinearRole::Value) => "self_attn.v_proj",
        ModuleOp::Linear(LinearRole::Out) => "self_attn.o_proj",
        ModuleOp::Linear(LinearRole::GateUp) => "mlp.gate_up",
        ModuleOp::Linear(LinearRole::Gate) => "mlp.gate_proj",
        ModuleOp::Linear(LinearRole::Up) => "mlp.up_proj",
        ModuleOp::Linear(LinearRole::Down) => "mlp.down_proj",
        ModuleOp::Attention => "self_attn",
        ModuleOp::AttnResidual => "self_attn.residual",
        ModuleOp::Activation => "mlp.act",
        ModuleOp::MlpResidual => "mlp.residual",
        ModuleOp::Head => "lm_head",
    };
    in_block(block, name)
}

/// The name of a layer of `block`, or outside the blocks.
pub(super) fn in_block(block: Option<usize>, name: &str) -> String {
    block.map_or_else(|| name.to_owned(), |block| format!("layers.{block}.{name}"))
}

/// Older versions of transformers saved the frequencies of rotary embeddings with every layer.
pub(in crate::engine::model) fn parameter_name(tensor: &str) -> Option<&str> {
    let name = tensor.strip_prefix("model.").unwrap_or(tensor);
    (!name.ends_with("rotary_emb.inv_freq")).then_some(name)
}

/// Whether each layer has a sliding window, according to `layer_types` or, without that key, `default`.
pub(super) fn sliding_layers(
    keys: &ConfigReader<'_>,
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
    (0..spec.num_layers).map(name).collect()
}

impl ModelFamily for Llama {
    fn model_type(&self) -> &'static str {
        "llama"
    }

    fn names(&self) -> &'static [&'static str] {
        &["smollm2-135m", "smollm2-360m", "llama3.2-1b"]
    }

    fn named(&self, name: &str) -> Option<ModelSpec> {
        let smollm2 = |layers, width, heads, inner| ModelSpec {
            vocab_size: 49_152,
            max_position_embeddings: 8192,
            num_layers: layers,
            hidden_size: width,
            heads,
            kv_heads: heads / 3,
            head_dim: 64,
            intermediate_size: inner,
            norm_eps: 1e-5,
            rope: Some(Rope::plain(1e5)),
            tie_word_embeddings: true,
            bos_token_id: Some(0),
            eos_token_ids: vec![0],
            ..default()
        };
        Some(match name {
            "smollm2-135m" => ModelSpec { initializer_range: 1.0 / 24.0, ..smollm2(30, 576, 9, 1536) },
            "smollm2-360m" => smollm2(32, 960, 15, 2560),
            "llama3.2-1b" => ModelSpec {
                vocab_size: 128_256,
                max_position_embeddings: 131_072,
                num_layers: 16,
                hidden_size: 2048,
                heads: 32,
                kv_heads: 8,
                head_dim: 64,
                intermediate_size: 8192,
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
                tie_word_embeddings: true,
                bos_token_id: Some(128_000),
                eos_token_ids: vec![128_001],
                ..default()
            },
            _ => return None,
        })
    }

    fn read(&self, keys: &ConfigReader<'_>) -> Result<ModelSpec, String> {
        only_silu(keys)?;
        let spec = read(keys, default(), None)?;
        let biases = biases(keys)?;
        let spec = ModelSpec { head_dim: head_dim(keys, &spec, None)?, biases, ..spec };
        with_rope(keys, spec, 1e4)
    }

    fn write(&self, spec: &ModelSpec) -> Value {
        let mut json = write(spec, "LlamaForCausalLM");
        json["attention_bias"] = spec.biases.qkv.into();
        json["mlp_bias"] = spec.biases.mlp.into();
        json
    }

    fn gguf(&self) -> GgufFormat {
        GgufFormat { architecture: "llama", keys: &GGUF_KEYS, interleaved: true }
    }
}

#[cfg(test)]
mod tests;
