//! Windows of attention in some layers, as Llama-like families' files have them.

use crate::engine::model::family::ConfigReader;
use crate::engine::model::spec::{ModelSpec, Sliding};
use serde_json::{Value, json};

/// `spec` with windows in `layers`; all layers have the same rotary embeddings.
pub(super) fn with_windows(keys: &ConfigReader<'_>, spec: ModelSpec, layers: Vec<bool>) -> Result<ModelSpec, String> {
    let rope = spec.rope.clone().ok_or("no rotary position embeddings")?;
    let sliding = Some(Sliding { window: keys.positive_usize("sliding_window", 4096)?, layers, rope });
    Ok(ModelSpec { sliding, ..spec })
}

/// Whether no layer has a window, which `null` stands for; a missing key stands for a window of the default size.
pub(super) fn has_no_window(keys: &ConfigReader<'_>) -> bool {
    keys.0.get("sliding_window") == Some(&Value::Null)
}

/// The value of `sliding_window`.
pub(super) fn window(spec: &ModelSpec) -> Value {
    spec.sliding.as_ref().map(|sliding| sliding.window).into()
}

/// Rejects windows for which GGUF has no key.
pub(super) fn no_windows(spec: &ModelSpec) -> Result<(), String> {
    let family = spec.family.model_type;
    let refused = format!("GGUF has no key for the windows of `{family}`; export it as a folder");
    if spec.sliding.is_some() { Err(refused) } else { Ok(()) }
}

/// Whether each layer has a sliding window, according to `layer_types` or, without that key, `default`.
pub(super) fn sliding_layers(
    keys: &ConfigReader<'_>,
    layers: usize,
    default: impl Fn(usize) -> bool,
) -> Result<Vec<bool>, String> {
    match keys.0.get("layer_types") {
        None | Some(Value::Null) => Ok((0..layers).map(default).collect()),
        Some(types) => layers_of_type(types, layers, ["full_attention", "sliding_attention"]),
    }
}

/// Whether each layer in the value of `layer_types` has the second of these types; all others must have the first.
pub(super) fn layers_of_type(types: &Value, layers: usize, [first, second]: [&str; 2]) -> Result<Vec<bool>, String> {
    let Value::Array(types) = types else {
        return Err(format!("`layer_types` is {types}; it must be a list"));
    };
    if types.len() != layers {
        return Err(format!("`layer_types` has {} entries for `num_hidden_layers` = {layers}", types.len()));
    }
    let read = |value: &Value| match value.as_str() {
        Some(kind) if kind == first => Ok(false),
        Some(kind) if kind == second => Ok(true),
        _ => Err(format!("`layer_types` has {value}; supported: `{first}`, `{second}`")),
    };
    types.iter().map(read).collect()
}

/// Whether a layer has a window in a family in which every other layer has one.
pub(super) fn alternates(layer: usize) -> bool {
    layer.is_multiple_of(2)
}

/// Rejects a model for GGUF unless every other layer has a window.
pub(super) fn check_alternation(spec: &ModelSpec) -> Result<(), String> {
    if (0..spec.num_layers).any(|layer| spec.is_sliding(layer) != alternates(layer)) {
        return Err("llama.cpp has windows in every other layer; export this model as a folder".into());
    }
    Ok(())
}

/// Writes windows, and rotary embeddings that differ between layers with and without one.
pub(super) fn write_windows(spec: &ModelSpec, json: &mut Value) {
    let (Some(full), Some(sliding)) = (&spec.rope, &spec.sliding) else { return };
    json["sliding_window"] = sliding.window.into();
    json["rope_parameters"] = json!({"full_attention": full.to_json(), "sliding_attention": sliding.rope.to_json()});
}

pub(super) fn layer_types(spec: &ModelSpec) -> Value {
    let name = |block| if spec.is_sliding(block) { "sliding_attention" } else { "full_attention" };
    (0..spec.num_layers).map(name).collect()
}
