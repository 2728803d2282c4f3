//! Qwen 3.5, text only (Qwen Team, 2026): a gated delta rule (Yang et al., 2024) instead of attention in most layers,
//! and gates of attention's output in the others.

use super::llama;
use crate::engine::kernels::NormKind;
use crate::engine::kernels::gated_delta::DeltaHeads;
use crate::engine::model::family::{ConfigReader, Family, GgufEntries, GgufFormat, GgufKey};
use crate::engine::model::spec::{ModelSpec, ModuleOp, QkNorm, Recurrence, RecurrentLayers};
use serde_json::{Map, Value, json};

pub(super) static QWEN3_5: Family = Family {
    model_type: "qwen3_5_text",
    class: "Qwen3_5ForCausalLM",
    bias_keys: &["attention_bias"],
    named: &[],
    read,
    write,
    layer_name: |layer| match layer.op {
        ModuleOp::ShortConv => llama::in_block(layer.block, "linear_attn.conv1d"),
        _ => llama::layer_name(layer),
    },
    parameter_name: |tensor| {
        // The layers that predict several tokens at once are not trained.
        if tensor.starts_with("mtp.") { None } else { llama::parameter_name(tensor) }
    },
    gguf: GgufFormat {
        architecture: "qwen35",
        keys: &[llama::GGUF_KEYS, &[llama::WIDTH_KEY], GGUF_KEYS],
        mlp_norm: "post_attention_norm",
        read: read_gguf,
        write: write_gguf,
        ..llama::OTHER_GGUF
    },
    ..llama::BASE
};

/// The parts of a head's pairs whose positions images have along each axis. A text has one position for all.
const IMAGE_KEYS: [&str; 2] = ["mrope_section", "mrope_interleaved"];
/// The part of a head that is rotated.
const PARTIAL: f64 = 0.25;
/// One layer in this many has attention.
const INTERVAL: usize = 4;

/// The keys of a layer's heads with the defaults of transformers.
const HEADS: [(&str, usize); 4] = [
    ("linear_num_key_heads", 16),
    ("linear_num_value_heads", 32),
    ("linear_key_head_dim", 128),
    ("linear_value_head_dim", 128),
];
/// The key of the number of tokens that a convolution reads, and its default.
const TAPS: (&str, usize) = ("linear_conv_kernel_dim", 4);

/// The key of how many layers have one with attention.
const INTERVAL_KEY: &str = "full_attention_interval";
/// The metadata of a layer's heads in GGUF.
const GGUF_KEYS: &[GgufKey] = &[
    ("ssm.group_count", HEADS[0].0, true),
    ("ssm.time_step_rank", HEADS[1].0, true),
    ("ssm.state_size", HEADS[2].0, true),
    ("ssm.conv_kernel", TAPS.0, true),
];
/// The key of all value heads' width in GGUF.
const INNER_SIZE: &str = "ssm.inner_size";
/// The key of the parts of a head's pairs in GGUF.
const SECTIONS: &str = "rope.dimension_sections";

/// The defaults of transformers for missing keys.
fn default() -> ModelSpec {
    ModelSpec {
        family: &QWEN3_5,
        vocab_size: 248_320,
        max_position_embeddings: 32_768,
        intermediate_size: 12_288,
        heads: 16,
        norm: NormKind::Rms { unit_offset: true },
        qk_norm: Some(QkNorm::PerHead),
        attention_gate: true,
        bos_token_id: None,
        eos_token_ids: Vec::new(),
        ..llama::default()
    }
}

fn read(keys: &ConfigReader<'_>) -> Result<ModelSpec, String> {
    llama::only_silu(keys)?;
    keys.require_value("attn_output_gate", true)?;
    let spec = llama::read(keys, default(), Some(4))?;
    let spec = ModelSpec { head_dim: llama::head_dim(keys, &spec, Some(256))?, ..spec };
    let mut config = keys.0.clone();
    for key in ["rope_scaling", "rope_parameters"] {
        if let Some(rope) = config.get_mut(key).and_then(Value::as_object_mut) {
            rope.retain(|key, _| !IMAGE_KEYS.contains(&key.as_str()));
        }
    }
    let spec = llama::with_partial_rope(config, spec, PARTIAL)?;
    let [key_heads, value_heads, key_dim, value_dim] = HEADS.map(|(key, default)| keys.positive_usize(key, default));
    let heads =
        DeltaHeads { key_heads: key_heads?, value_heads: value_heads?, key_dim: key_dim?, value_dim: value_dim? };
    if !heads.value_heads.is_multiple_of(heads.key_heads) {
        let [(key, _), (value, _), ..] = HEADS;
        return Err(format!("`{key}` = {} does not divide `{value}` = {}", heads.key_heads, heads.value_heads));
    }
    let recurrence = Recurrence::GatedDelta { heads, taps: keys.positive_usize(TAPS.0, TAPS.1)? };
    let interval = keys.positive_usize(INTERVAL_KEY, INTERVAL)?;
    let layers = match keys.0.get("layer_types").filter(|types| !types.is_null()) {
        Some(types) => llama::layers_of_type(types, spec.num_layers, ["full_attention", "linear_attention"])?,
        None => (1..=spec.num_layers).map(|layer| !layer.is_multiple_of(interval)).collect(),
    };
    Ok(ModelSpec { recurrent: Some(RecurrentLayers { recurrence, layers }), ..spec })
}

fn write(spec: &ModelSpec) -> Value {
    let mut json = llama::write(spec);
    json["rope_parameters"][llama::PARTIAL] = json!(spec.rotary_dim() as f64 / spec.head_dim as f64);
    let kind = |block| if spec.recurrence(block).is_some() { "linear_attention" } else { "full_attention" };
    json["layer_types"] = (0..spec.num_layers).map(kind).collect();
    if let Some(RecurrentLayers { recurrence: Recurrence::GatedDelta { heads, taps }, .. }) = spec.recurrent {
        let values = [heads.key_heads, heads.value_heads, heads.key_dim, heads.value_dim];
        for ((key, _), value) in HEADS.into_iter().zip(values).chain([(TAPS, taps)]) {
            json[key] = value.into();
        }
    }
    json
}

/// Reads the interval of layers with attention and the width of a value head.
fn read_gguf(keys: &mut Map<String, Value>, json: &mut Map<String, Value>) {
    llama::read_partial_rope(keys, json);
    keys.remove(SECTIONS);
    json.extend(keys.remove(INTERVAL_KEY).map(|interval| (INTERVAL_KEY.to_owned(), interval)));
    let [_, (heads, _), _, (width, _)] = HEADS;
    let inner = keys.remove(INNER_SIZE).and_then(|inner| inner.as_u64());
    if let (Some(inner), Some(heads @ 1..)) = (inner, json.get(heads).and_then(Value::as_u64)) {
        json.insert(width.into(), (inner / heads).into());
    }
}

fn write_gguf(spec: &ModelSpec, keys: &mut GgufEntries) -> Result<(), String> {
    let attends = |block: &usize| spec.recurrence(*block).is_none();
    let interval = (0..spec.num_layers).find(attends).unwrap_or(spec.num_layers) + 1;
    if (0..spec.num_layers).any(|block| attends(&block) != (block + 1).is_multiple_of(interval)) {
        return Err("llama.cpp has attention at regular intervals; export this model as a folder".into());
    }
    keys.push((INTERVAL_KEY, interval.into()));
    if let Some(RecurrentLayers { recurrence: Recurrence::GatedDelta { heads, .. }, .. }) = spec.recurrent {
        if heads.value_dim != heads.key_dim {
            return Err("llama.cpp has value heads as wide as key heads; export this model as a folder".into());
        }
        keys.push((INNER_SIZE, heads.values().into()));
    }
    // Images have positions along three axes, and a text has one for all.
    let pairs = spec.rotary_dim() / 2;
    keys.push((SECTIONS, json!([pairs.div_ceil(3), (pairs + 1) / 3, pairs / 3, 0])));
    Ok(())
}
