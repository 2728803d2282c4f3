//! LFM2 and LFM2.5 (Liquid AI, 2025): Llama with norms of each head, and with short convolutions instead of attention
//! in most layers.

use super::llama;
use crate::engine::model::family::{ConfigReader, Family, GgufFormat};
use crate::engine::model::rope::Rope;
use crate::engine::model::spec::{LinearRole, ModelSpec, ModuleOp, NormRole, QkNorm, Recurrence, RecurrentLayers};
use serde_json::{Map, Value};

pub(super) static LFM2: Family = Family {
    model_type: "lfm2",
    class: "Lfm2ForCausalLM",
    aliases: &[
        ("block_ff_dim", "intermediate_size"),
        ("tie_embedding", "tie_word_embeddings"),
        ("norm_eps", "rms_norm_eps"),
    ],
    bias_keys: &[],
    named: &[],
    read,
    write: |spec| {
        let mut json = llama::write(spec);
        json[ADJUSTS] = false.into();
        json["norm_eps"] = spec.norm_eps.into();
        json[TAPS] = match spec.recurrent {
            Some(RecurrentLayers { recurrence: Recurrence::ShortConv { taps }, .. }) => taps,
            _ => DEFAULT_TAPS,
        }
        .into();
        let kind = |block| if spec.recurrence(block).is_some() { "conv" } else { "full_attention" };
        json["layer_types"] = (0..spec.num_layers).map(kind).collect();
        json
    },
    layer_name: |layer| {
        let name = match layer.op {
            ModuleOp::Norm(NormRole::Attention) => "operator_norm",
            ModuleOp::Norm(NormRole::Mlp) => "ffn_norm",
            ModuleOp::Norm(NormRole::Query) => "self_attn.q_layernorm",
            ModuleOp::Norm(NormRole::Key) => "self_attn.k_layernorm",
            ModuleOp::Norm(NormRole::Final) => "embedding_norm",
            ModuleOp::Linear(LinearRole::Out) => "self_attn.out_proj",
            ModuleOp::Linear(LinearRole::Gate) => "feed_forward.w1",
            ModuleOp::Linear(LinearRole::Down) => "feed_forward.w2",
            ModuleOp::Linear(LinearRole::Up) => "feed_forward.w3",
            _ => return llama::layer_name(layer),
        };
        llama::in_block(layer.block, name)
    },
    gguf: GgufFormat {
        architecture: "lfm2",
        keys: &[llama::GGUF_KEYS, &[llama::WIDTH_KEY, ("shortconv.l_cache", TAPS, true)]],
        final_norm: "token_embd_norm",
        read: read_gguf,
        write: |spec, keys| {
            let heads = |block| if spec.recurrence(block).is_some() { 0 } else { spec.kv_heads };
            keys.retain(|(key, _)| *key != KV_HEADS);
            keys.push((KV_HEADS, (0..spec.num_layers).map(heads).collect()));
            Ok(())
        },
        ..llama::OTHER_GGUF
    },
    ..llama::BASE
};

/// The key of whether the MLP has a smaller width than `intermediate_size`.
const ADJUSTS: &str = "block_auto_adjust_ff_dim";
/// The key of the number of tokens that a convolution reads.
const TAPS: &str = "conv_L_cache";
const DEFAULT_TAPS: usize = 3;
/// The key of GGUF for the number of key heads, a list in which layers with a convolution have none.
const KV_HEADS: &str = "attention.head_count_kv";

/// The defaults of transformers for missing keys.
fn default() -> ModelSpec {
    ModelSpec {
        family: &LFM2,
        vocab_size: 65_536,
        max_position_embeddings: 128_000,
        hidden_size: 2560,
        intermediate_size: 12_288,
        norm_eps: 1e-5,
        rope: Some(Rope::plain(1e6)),
        qk_norm: Some(QkNorm::PerHead),
        tie_word_embeddings: true,
        ..llama::default()
    }
}

fn read(keys: &ConfigReader<'_>) -> Result<ModelSpec, String> {
    keys.require_value("conv_bias", false)?;
    let spec = llama::read_uniform(keys, default(), [Some(8), None])?;
    if spec.attn_out_size() != spec.hidden_size {
        return Err(format!("`head_dim` is {}; heads must be as wide as `hidden_size` together", spec.head_dim));
    }
    let taps = keys.positive_usize(TAPS, DEFAULT_TAPS)?;
    let layers = convolutions(keys, spec.num_layers)?;
    let recurrence = Recurrence::ShortConv { taps };
    let recurrent = layers.contains(&true).then_some(RecurrentLayers { recurrence, layers });
    Ok(ModelSpec { intermediate_size: inner_size(keys, spec.intermediate_size)?, recurrent, ..spec })
}

/// The width of the MLP. transformers cuts it to two thirds by default, times a factor, and rounds it up to whole
/// blocks.
fn inner_size(keys: &ConfigReader<'_>, size: usize) -> Result<usize, String> {
    if !keys.bool(ADJUSTS, true)? {
        return Ok(size);
    }
    let factor = keys.positive("block_ffn_dim_multiplier", 1.0)?;
    let multiple = keys.positive_usize("block_multiple_of", 256)?;
    let cut = (factor * (2 * size / 3) as f64) as usize;
    Ok(cut.div_ceil(multiple).max(1) * multiple)
}

/// Whether each layer has a convolution: by `layer_types` or, without that key, if `full_attn_idxs` leaves it out.
fn convolutions(keys: &ConfigReader<'_>, layers: usize) -> Result<Vec<bool>, String> {
    if let Some(types) = keys.0.get("layer_types").filter(|types| !types.is_null()) {
        return llama::layers_of_type(types, layers, ["full_attention", "conv"]);
    }
    match keys.0.get("full_attn_idxs") {
        None | Some(Value::Null) => Ok(vec![false; layers]),
        Some(Value::Array(indices)) => Ok((0..layers).map(|layer| !indices.contains(&layer.into())).collect()),
        Some(other) => Err(format!("`full_attn_idxs` is {other}; it must be a list")),
    }
}

/// Reads the list of key heads.
fn read_gguf(_: &mut Map<String, Value>, json: &mut Map<String, Value>) {
    json.insert(ADJUSTS.into(), false.into());
    let Some(Value::Array(heads)) = json.get("num_key_value_heads").cloned() else { return };
    let kind = |heads: &Value| if heads == &Value::from(0) { "conv" } else { "full_attention" };
    json.insert("layer_types".into(), heads.iter().map(kind).collect());
    if let Some(most) = heads.iter().find(|heads| *heads != &Value::from(0)) {
        json.insert("num_key_value_heads".into(), most.clone());
    }
}
