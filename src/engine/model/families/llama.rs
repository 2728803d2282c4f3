//! Llama (Touvron et al., 2023), and what related families share with it: RMS norms, rotary positions, grouped queries, a
//! SiLU-gated MLP, `[out, in]` weights. SmolLM2, TinyLlama and Llama 3 belong to this family.

use crate::engine::kernels::{Activation, Norm, WeightLayout};
use crate::engine::model::family::{ConfigReader, Family, GgufFormat, one_or_more};
use crate::engine::model::rope::{Rope, RopeType};
use crate::engine::model::spec::{
    Biases, DropoutRates, EmbeddingScale, LinearRole, ModelSpec, ModuleId, ModuleOp, NormRole, Sliding,
};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// The family, from which others take the fields that they share.
pub(super) static LLAMA: Family = BASE;

/// [`LLAMA`] as a constant.
pub(super) const BASE: Family = Family {
    model_type: "llama",
    class: "LlamaForCausalLM",
    bias_keys: &["attention_bias", "mlp_bias"],
    named: &[
        ("smollm2-135m", || ModelSpec { initializer_range: 1.0 / 24.0, ..smollm2(30, 576, 9, 1536) }),
        ("smollm2-360m", || smollm2(32, 960, 15, 2560)),
        ("llama3.2-1b", llama3_2_1b),
    ],
    read: |keys| read_uniform(keys, default(), [None, None]),
    write,
    layer_name,
    parameter_name,
    prefix: "model.",
    stacked_experts: false,
    gguf: GgufFormat {
        architecture: "llama",
        keys: &[
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
        ],
        interleaved: true,
        splits_gate_up: false,
        yarn_log_multiplier: false,
        claims: |_| true,
        read: |_, _| {},
        write: |spec, _| no_windows(spec),
    },
};

fn smollm2(layers: usize, width: usize, heads: usize, inner: usize) -> ModelSpec {
    ModelSpec {
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
    }
}

fn llama3_2_1b() -> ModelSpec {
    ModelSpec {
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
    }
}

/// The defaults of transformers for missing keys.
pub(super) fn default() -> ModelSpec {
    ModelSpec {
        family: &LLAMA,
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
        experts: None,
        biases: Biases { qkv: false, out: false, mlp: false },
        learned_positions: false,
        rope: Some(Rope::plain(1e4)),
        rotary_dim: None,
        unrotated: Vec::new(),
        query_scale: None,
        sliding: None,
        attention_scale: None,
        attention_softcap: None,
        qk_norm: None,
        pre_norms: true,
        post_norms: false,
        embedding_scale: EmbeddingScale::Factor(1.0),
        residual_multiplier: 1.0,
        logits_scaling: 1.0,
        logits_softcap: None,
        tie_word_embeddings: false,
        dropout: DropoutRates::default(),
        initializer_range: 0.02,
        bos_token_id: Some(1),
        eos_token_ids: vec![2],
        lora: None,
        frozen: BTreeSet::new(),
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
    let on = |key| if default.family.bias_keys.contains(&key) { keys.bool(key, false) } else { Ok(false) };
    let (attention, mlp) = (on("attention_bias")?, on("mlp_bias")?);
    Ok(ModelSpec {
        vocab_size: keys.positive_usize("vocab_size", default.vocab_size)?,
        max_position_embeddings: keys.positive_usize("max_position_embeddings", default.max_position_embeddings)?,
        hidden_size: keys.positive_usize("hidden_size", default.hidden_size)?,
        num_layers: keys.depth("num_hidden_layers", default.num_layers)?,
        heads,
        kv_heads,
        intermediate_size: keys.positive_usize("intermediate_size", default.intermediate_size)?,
        norm_eps: keys.positive("rms_norm_eps", default.norm_eps)?,
        biases: Biases { qkv: attention || default.biases.qkv, out: attention, mlp },
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

/// Reads the keys of a family whose layers have the same rotary embeddings, with the defaults of [`read`] and [`head_dim`] for key
/// heads and the size of a head.
pub(super) fn read_uniform(
    keys: &ConfigReader<'_>,
    default: ModelSpec,
    [kv_heads, head]: [Option<usize>; 2],
) -> Result<ModelSpec, String> {
    only_silu(keys)?;
    let spec = read(keys, default, kv_heads)?;
    with_rope(keys, ModelSpec { head_dim: head_dim(keys, &spec, head)?, ..spec })
}

/// `spec` with the rotary embeddings of a configuration in which they are the same for all layers. Its own base replaces a
/// missing one.
pub(super) fn with_rope(keys: &ConfigReader<'_>, spec: ModelSpec) -> Result<ModelSpec, String> {
    let theta = spec.rope.as_ref().map_or(1e4, |rope| rope.theta);
    let rope = Rope::flat(keys.0, theta, spec.max_position_embeddings)?;
    // The base grows with the sequence, which may be longer than the context by the factor.
    let context = match rope.kind {
        RopeType::Dynamic { factor, .. } => (spec.max_position_embeddings as f64 * factor) as usize,
        _ => spec.max_position_embeddings,
    };
    Ok(ModelSpec { rope: Some(rope), max_position_embeddings: context, ..spec })
}

/// `spec` with windows in `layers`; all layers have the same rotary embeddings.
pub(super) fn with_windows(keys: &ConfigReader<'_>, spec: ModelSpec, layers: Vec<bool>) -> Result<ModelSpec, String> {
    let rope = spec.rope.clone().ok_or("no rotary position embeddings")?;
    let sliding = Some(Sliding { window: keys.positive_usize("sliding_window", 4096)?, layers, rope });
    Ok(ModelSpec { sliding, ..spec })
}

/// Writes the keys that all Llama-like families share.
pub(super) fn write(spec: &ModelSpec) -> Value {
    let context = match &spec.rope {
        Some(Rope { kind: RopeType::Dynamic { max_position_embeddings, .. }, .. }) => *max_position_embeddings,
        _ => spec.max_position_embeddings,
    };
    let mut json = json!({
        "architectures": [spec.family.class],
        "attention_dropout": spec.dropout.attention,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": one_or_more(&spec.eos_token_ids),
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "initializer_range": spec.initializer_range,
        "intermediate_size": spec.intermediate_size,
        "max_position_embeddings": context,
        "model_type": spec.family.model_type,
        "num_attention_heads": spec.heads,
        "num_hidden_layers": spec.num_layers,
        "num_key_value_heads": spec.kv_heads,
        "rms_norm_eps": spec.norm_eps,
        "rope_parameters": spec.rope.as_ref().map(Rope::to_json),
        "tie_word_embeddings": spec.tie_word_embeddings,
        "vocab_size": spec.vocab_size,
    });
    for (key, on) in [("attention_bias", spec.biases.qkv), ("mlp_bias", spec.biases.mlp)] {
        if spec.family.bias_keys.contains(&key) {
            json[key] = on.into();
        }
    }
    json
}

/// Rejects windows for which GGUF has no key.
pub(super) fn no_windows(spec: &ModelSpec) -> Result<(), String> {
    let family = spec.family.model_type;
    let refused = format!("GGUF has no key for the windows of `{family}`; export it as a folder");
    if spec.sliding.is_some() { Err(refused) } else { Ok(()) }
}

/// Names of layers that all Llama-like families share. The norm after attention has the name of other families' MLP
/// norm.
pub(super) fn layer_name(ModuleId { block, op }: ModuleId) -> String {
    let name = match op {
        ModuleOp::Expert(expert, role) => {
            let name = layer_name(ModuleId::global(ModuleOp::Linear(role)));
            let part = name.rsplit('.').next().unwrap_or_default();
            return in_block(block, &format!("mlp.experts.{expert}.{part}"));
        }
        ModuleOp::Router => "mlp.gate",
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
fn parameter_name(tensor: &str) -> Option<&str> {
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
