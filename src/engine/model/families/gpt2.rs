//! GPT-2 (Radford et al., 2019): learned positions, layer norms with biases, packed queries, keys and values in
//! `[in, out]` weights, GELU in its tanh form.

use super::llama;
use crate::engine::kernels::{Activation, NormKind, WeightLayout};
use crate::engine::model::family::{ConfigReader, ExpertTensors, Family, GgufFormat, one_or_more};
use crate::engine::model::spec::{Biases, DropoutRates, LinearRole, ModelSpec, ModuleId, ModuleOp, NormRole};
use serde_json::{Value, json};

pub(super) static GPT2: Family = Family {
    model_type: "gpt2",
    class: "GPT2LMHeadModel",
    aliases: &[
        ("hidden_size", "n_embd"),
        ("max_position_embeddings", "n_positions"),
        ("num_attention_heads", "n_head"),
        ("num_hidden_layers", "n_layer"),
    ],
    bias_keys: &[],
    named: &[
        // Ours: 0.8 million parameters over 256 bytes and one end-of-text token.
        ("tiny", || ModelSpec {
            vocab_size: 257,
            max_position_embeddings: 128,
            bos_token_id: Some(256),
            eos_token_ids: vec![256],
            ..sized(4, 128, 4)
        }),
        ("distilgpt2", || sized(6, 768, 12)),
        ("gpt2", || sized(12, 768, 12)),
        ("gpt2-medium", || sized(24, 1024, 16)),
        ("gpt2-large", || sized(36, 1280, 20)),
        ("gpt2-xl", || sized(48, 1600, 25)),
    ],
    read,
    write,
    layer_name,
    parameter_name,
    prefix: "transformer.",
    expert_tensors: ExpertTensors::Separate,
    gguf: GgufFormat {
        architecture: "gpt2",
        keys: &[&[
            ("context_length", "n_positions", true),
            ("embedding_length", "n_embd", true),
            ("feed_forward_length", "n_inner", true),
            ("block_count", "n_layer", true),
            ("attention.head_count", "n_head", true),
            ("attention.layer_norm_epsilon", "layer_norm_epsilon", true),
        ]],
        biases: true,
        ..llama::OTHER_GGUF
    },
};

/// The smallest of `OpenAI`'s, which is also what transformers puts in for a missing key.
pub(super) fn default() -> ModelSpec {
    ModelSpec {
        family: &GPT2,
        vocab_size: 50257,
        max_position_embeddings: 1024,
        hidden_size: 768,
        num_layers: 12,
        heads: 12,
        kv_heads: 12,
        head_dim: 64,
        intermediate_size: 4 * 768,
        norm: NormKind::Layer,
        norm_eps: 1e-5,
        activation: Activation::Gelu,
        weight_layout: WeightLayout::InOut,
        fused_qkv: true,
        biases: Biases { qkv: true, out: true, mlp: true },
        learned_positions: true,
        rope: None,
        tie_word_embeddings: true,
        dropout: DropoutRates { embedding: 0.1, residual: 0.1, attention: 0.1 },
        bos_token_id: Some(50256),
        eos_token_ids: vec![50256],
        ..llama::default()
    }
}

fn sized(layers: usize, width: usize, heads: usize) -> ModelSpec {
    ModelSpec { dropout: DropoutRates::default(), ..default().resized(layers, width, heads) }
}

fn read(keys: &ConfigReader<'_>) -> Result<ModelSpec, String> {
    // Three names of one function.
    const TANH_GELU: [&str; 3] = ["gelu_new", "gelu_pytorch_tanh", "gelu_fast"];
    let activation = keys.str("activation_function", TANH_GELU[0])?;
    if !TANH_GELU.contains(&activation) {
        return Err(format!(
            "`activation_function` is `{activation}`; the engine has `gelu_new` only (GELU, tanh form)"
        ));
    }
    keys.require_value("scale_attn_weights", true)?;
    for key in ["scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"] {
        keys.require_value(key, false)?;
    }
    let default = default();
    let (width, heads) =
        (keys.positive_usize("n_embd", default.hidden_size)?, keys.positive_usize("n_head", default.heads)?);
    if !width.is_multiple_of(heads) {
        return Err(format!("`n_head` = {heads} does not divide `n_embd` = {width}"));
    }
    let rates = default.dropout;
    Ok(ModelSpec {
        vocab_size: keys.positive_usize("vocab_size", default.vocab_size)?,
        max_position_embeddings: keys.positive_usize("n_positions", default.max_position_embeddings)?,
        intermediate_size: keys.positive_usize("n_inner", 4 * width)?,
        norm_eps: keys.positive("layer_norm_epsilon", default.norm_eps)?,
        initializer_range: keys.positive("initializer_range", default.initializer_range)?,
        dropout: DropoutRates {
            embedding: keys.dropout("embd_pdrop", rates.embedding)?,
            residual: keys.dropout("resid_pdrop", rates.residual)?,
            attention: keys.dropout("attn_pdrop", rates.attention)?,
        },
        tie_word_embeddings: keys.bool("tie_word_embeddings", default.tie_word_embeddings)?,
        bos_token_id: keys.token("bos_token_id", default.bos_token_id)?,
        eos_token_ids: keys.tokens("eos_token_id", &default.eos_token_ids)?,
        ..default.clone().resized(keys.depth("n_layer", default.num_layers)?, width, heads)
    })
}

fn write(spec: &ModelSpec) -> Value {
    json!({
        "activation_function": "gelu_new",
        "architectures": [spec.family.class],
        "attn_pdrop": spec.dropout.attention,
        "bos_token_id": spec.bos_token_id,
        "embd_pdrop": spec.dropout.embedding,
        "eos_token_id": one_or_more(&spec.eos_token_ids),
        "initializer_range": spec.initializer_range,
        "layer_norm_epsilon": spec.norm_eps,
        "model_type": "gpt2",
        "n_ctx": spec.max_position_embeddings,
        "n_embd": spec.hidden_size,
        "n_head": spec.heads,
        "n_inner": spec.intermediate_size,
        "n_layer": spec.num_layers,
        "n_positions": spec.max_position_embeddings,
        "resid_pdrop": spec.dropout.residual,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "vocab_size": spec.vocab_size,
    })
}

fn layer_name(ModuleId { block, op }: ModuleId) -> String {
    let name = match op {
        ModuleOp::Embedding => "wte",
        ModuleOp::Positions => "wpe",
        ModuleOp::Norm(NormRole::Attention) => "ln_1",
        ModuleOp::Norm(NormRole::Mlp) => "ln_2",
        ModuleOp::Norm(NormRole::Final) => "ln_f",
        ModuleOp::Norm(NormRole::Query) => "attn.query_norm",
        ModuleOp::Norm(NormRole::Key) => "attn.key_norm",
        ModuleOp::Norm(NormRole::PostAttention) => "attn.branch_norm",
        ModuleOp::Norm(NormRole::PostMlp) => "mlp.branch_norm",
        ModuleOp::Linear(LinearRole::Qkv) => "attn.c_attn",
        ModuleOp::Linear(LinearRole::Query) => "attn.query",
        ModuleOp::Linear(LinearRole::Key) => "attn.key",
        ModuleOp::Linear(LinearRole::Value) => "attn.value",
        ModuleOp::Linear(LinearRole::Out) => "attn.c_proj",
        ModuleOp::Linear(LinearRole::Up) => "mlp.c_fc",
        ModuleOp::Linear(LinearRole::Gate | LinearRole::GateUp) | ModuleOp::Router => "mlp.gate",
        ModuleOp::Linear(LinearRole::Down) => "mlp.c_proj",
        ModuleOp::Attention => "attn",
        ModuleOp::AttnResidual => "attn.residual",
        ModuleOp::Activation => "mlp.gelu",
        ModuleOp::Expert(..) => "mlp.experts",
        ModuleOp::MlpResidual => "mlp.residual",
        ModuleOp::Head => "lm_head",
        _ => "recurrence",
    };
    block.map_or_else(|| name.to_owned(), |block| format!("h.{block}.{name}"))
}

/// Older versions of transformers saved the causal mask with every layer: `h.0.attn.bias`, `h.0.attn.masked_bias`.
fn parameter_name(tensor: &str) -> Option<&str> {
    let name = tensor.strip_prefix("transformer.").unwrap_or(tensor);
    let inner = name.strip_prefix("h.").and_then(|rest| rest.split_once('.'));
    let mask = inner.is_some_and(|(layer, rest)| {
        layer.parse::<usize>().is_ok() && matches!(rest, "attn.bias" | "attn.masked_bias")
    });
    (!mask).then_some(name)
}
