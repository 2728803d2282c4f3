//! gpt-oss (`OpenAI`, 2025): a mixture of MLPs with biases and clamped gates in every block, attention with sinks, and
//! windows in every other layer.

use super::llama;
use crate::engine::kernels::{Activation, WeightLayout};
use crate::engine::model::family::{ConfigReader, ExpertTensors, Family, GgufFormat};
use crate::engine::model::mixture::Experts;
use crate::engine::model::rope::{self, Rope};
use crate::engine::model::spec::{Biases, LinearRole, ModelSpec, ModuleOp};
use serde_json::{Value, json};

pub(super) static GPT_OSS: Family = Family {
    model_type: "gpt_oss",
    class: "GptOssForCausalLM",
    aliases: &[("num_experts", COUNT)],
    bias_keys: &["attention_bias"],
    named: &[],
    read,
    write: |spec| {
        let mut json = llama::write(spec);
        Experts::write(spec, &mut json, COUNT);
        json["layer_types"] = llama::layer_types(spec);
        json["sliding_window"] = llama::window(spec);
        for (key, value) in CLAMP {
            json[key] = value.into();
        }
        json
    },
    layer_name: |layer| {
        let name = match layer.op {
            ModuleOp::Router => "router",
            ModuleOp::Expert(expert, LinearRole::Down) => &format!("experts.down_proj.{expert}"),
            ModuleOp::Expert(expert, _) => &format!("experts.gate_up_proj.{expert}"),
            _ => return llama::layer_name(layer),
        };
        llama::in_block(layer.block, &format!("mlp.{name}"))
    },
    expert_tensors: ExpertTensors::Plain,
    gguf: GgufFormat {
        architecture: "gpt-oss",
        keys: &[
            llama::GGUF_KEYS,
            &Experts::gguf_keys(COUNT),
            &Experts::gguf_width("intermediate_size"),
            &[("attention.sliding_window", "sliding_window", true)],
        ],
        biases: true,
        tied_head: Some(false),
        splits_gate_up: true,
        yarn_truncates: false,
        mlp_norm: "post_attention_norm",
        read: |_, json| {
            if let Some(Value::Object(scaling)) = json.get_mut("rope_scaling") {
                scaling.insert("truncate".into(), false.into());
            } else {
                json.insert("rope_parameters".into(), json!({"rope_type": "default"}));
            }
        },
        write: |spec, _| {
            if !spec.biases.qkv {
                return Err("llama.cpp needs biases in attention; export a folder".into());
            }
            llama::check_alternation(spec)
        },
        ..llama::OTHER_GGUF
    },
    ..llama::BASE
};

/// The key of the number of experts.
const COUNT: &str = "num_local_experts";
/// The keys of the clamped activation, each with the only value that can be computed.
const CLAMP: [(&str, f64); 2] = [("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)];
/// The window of layers that have one.
const WINDOW: usize = 128;

fn read(keys: &ConfigReader<'_>) -> Result<ModelSpec, String> {
    let default = ModelSpec {
        family: &GPT_OSS,
        vocab_size: 201_088,
        max_position_embeddings: 131_072,
        hidden_size: 2880,
        num_layers: 36,
        heads: 64,
        intermediate_size: 2880,
        norm_eps: 1e-5,
        activation: Activation::ClampedSwiGlu,
        expert_layout: WeightLayout::InOut,
        fused_gate_up: true,
        rope: Some(Rope::plain(150_000.0)),
        attention_sinks: true,
        bos_token_id: None,
        eos_token_ids: Vec::new(),
        ..llama::default()
    };
    let yarn = json!({"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
        "original_max_position_embeddings": 4096});
    let mut config = rope::with_default(keys.0, yarn)?;
    config.entry("sliding_window").or_insert_with(|| WINDOW.into());
    let keys = &ConfigReader(&config);
    for (key, supported) in CLAMP {
        let value = keys.f64(key, supported)?;
        if value != supported {
            return Err(format!("`{key}` is {value}; the engine has {supported} only"));
        }
    }
    let spec = llama::read_uniform(keys, default, [Some(8), Some(64)])?;
    let layers = llama::sliding_layers(keys, spec.num_layers, llama::alternates)?;
    let experts = Experts::read(keys, (COUNT, 128), 4, 0.001, spec.num_layers, true)?;
    let attention = keys.bool("attention_bias", true)?;
    let biases = Biases { qkv: attention, out: attention, mlp: true };
    let spec = ModelSpec { biases, experts: Some(experts), ..spec };
    match (layers.contains(&true), llama::has_no_window(keys)) {
        (false, _) => Ok(spec),
        (true, true) => Err("`sliding_window` is null, but `layer_types` has `sliding_attention`".into()),
        (true, false) => llama::with_windows(keys, spec, layers),
    }
}
