//! Keys of `config.json` that Llama-like families share.

use crate::engine::model::family::{ConfigReader, one_or_more};
use crate::engine::model::rope::{Rope, RopeType};
use crate::engine::model::spec::{Biases, DropoutRates, ModelSpec};
use serde_json::{Map, Value, json};

/// Reads the keys that all Llama-like families share. `default` provides missing keys except the size of a head. The
/// number of key heads defaults to `kv_heads`; without it, and for `null`, to the number of query heads.
pub(super) fn read(keys: &ConfigReader<'_>, default: ModelSpec, kv_heads: Option<usize>) -> Result<ModelSpec, String> {
    let heads = keys.positive_usize("num_attention_heads", default.heads)?;
    let kv_heads = kv_heads.filter(|_| !is_null(keys, "num_key_value_heads")).unwrap_or(heads);
    let kv_heads = keys.positive_usize("num_key_value_heads", kv_heads)?;
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

/// The size of a head: `head_dim`, otherwise `default`; without it, and for `null`, the hidden size over the number of
/// heads.
pub(super) fn head_dim(keys: &ConfigReader<'_>, spec: &ModelSpec, default: Option<usize>) -> Result<usize, String> {
    let (width, heads) = (spec.hidden_size, spec.heads);
    let default = default.filter(|_| !is_null(keys, "head_dim"));
    let quotient = default.unwrap_or(width / heads).max(1);
    let head_dim = keys.positive_usize("head_dim", quotient)?;
    let given = keys.0.get("head_dim").is_some_and(|value| !value.is_null());
    if !given && default.is_none() && !width.is_multiple_of(heads) {
        return Err(format!("`num_attention_heads` = {heads} does not divide `hidden_size` = {width}"));
    }
    if head_dim.is_multiple_of(2) {
        Ok(head_dim)
    } else {
        Err(format!("`head_dim` is {head_dim}; rotary position embeddings need an even number"))
    }
}

fn is_null(keys: &ConfigReader<'_>, key: &str) -> bool {
    keys.0.get(key).is_some_and(Value::is_null)
}

/// Rejects activations other than `silu`.
pub(super) fn only_silu(keys: &ConfigReader<'_>) -> Result<(), String> {
    match keys.str("hidden_act", "silu")? {
        "silu" | "swish" => Ok(()),
        other => Err(format!("`hidden_act` is `{other}`; the engine has `silu` only for this family")),
    }
}

/// Reads the keys of a family whose layers have the same rotary embeddings, with the defaults of [`read`] and
/// [`head_dim`] for key heads and the size of a head.
pub(super) fn read_uniform(
    keys: &ConfigReader<'_>,
    default: ModelSpec,
    [kv_heads, head]: [Option<usize>; 2],
) -> Result<ModelSpec, String> {
    only_silu(keys)?;
    let spec = read(keys, default, kv_heads)?;
    with_rope(keys, ModelSpec { head_dim: head_dim(keys, &spec, head)?, ..spec })
}

/// `spec` with the rotary embeddings of a configuration in which they are the same for all layers. Its own base
/// replaces a missing one.
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

/// The key of the part of a head that is rotated.
pub(super) const PARTIAL: &str = "partial_rotary_factor";

/// [`with_rope`] for rotary embeddings of a part of each head; a missing key means `default`.
pub(super) fn with_partial_rope(
    mut config: Map<String, Value>,
    spec: ModelSpec,
    default: f64,
) -> Result<ModelSpec, String> {
    let mut partial = ConfigReader(&config).f64(PARTIAL, default)?;
    config.remove(PARTIAL);
    for key in ["rope_scaling", "rope_parameters"] {
        let Some(Value::Object(rope)) = config.get_mut(key) else { continue };
        partial = ConfigReader(rope).f64(PARTIAL, partial)?;
        rope.remove(PARTIAL);
    }
    let head_dim = spec.head_dim;
    let rotary_dim = (head_dim as f64 * partial + 1e-6) as usize;
    if !(rotary_dim.is_multiple_of(2) && (2..=head_dim).contains(&rotary_dim)) {
        let whole = format!("of a head of {head_dim}; they need an even number of elements");
        return Err(format!("`{PARTIAL}` is {partial}: rotary position embeddings of {rotary_dim} elements {whole}"));
    }
    with_rope(&ConfigReader(&config), ModelSpec { rotary_dim: (rotary_dim < head_dim).then_some(rotary_dim), ..spec })
}

/// Reads the part of a head that is rotated from the metadata of a GGUF file.
pub(super) fn read_partial_rope(keys: &Map<String, Value>, json: &mut Map<String, Value>) {
    let number = |value: Option<&Value>| value.and_then(Value::as_f64).filter(|number| *number > 0.0);
    let sizes = (number(keys.get("rope.dimension_count")), number(json.get("head_dim")));
    if let (Some(rotated), Some(whole)) = sizes {
        json.insert(PARTIAL.into(), json!(rotated / whole));
    }
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
