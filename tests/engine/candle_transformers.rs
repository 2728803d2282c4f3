//! A second oracle for logits in addition to transformers: the models of candle-transformers, if it has the family.
//!
//! Its windows are one token wider than the windows of transformers, so no text here is longer than a window.

use crate::common::compare::distance;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{gemma3, llama, mistral, qwen2, qwen3};
use finetune::engine::kernels::{CandleKernels, Fused, Kernels, view};
use finetune::engine::model::{Decoder, ForwardMode, InputIds, ModelSpec, Parameters, Workspace};
use finetune::precision::PrecisionPolicy;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::Arc;

/// Keys that all families here share.
fn config(model_type: &str, own: &Value) -> Value {
    let mut config = json!({
        "model_type": model_type, "vocab_size": 50, "hidden_size": 24, "intermediate_size": 28, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 32,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": false, "hidden_act": "silu",
        "attention_bias": false, "sliding_window": 32, "use_sliding_window": false, "max_window_layers": 3,
    });
    config.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
    config
}

/// Weights in which every parameter matters: no zeros, no ones.
fn weights(spec: &ModelSpec) -> Parameters {
    let weights = Parameters::zeros(&spec.parameters(), DType::F32, &Device::Cpu).unwrap();
    for (index, (entry, tensor)) in weights.layout().iter().zip(weights.tensors()).enumerate() {
        let is_norm = entry.init == finetune::engine::model::ParamInit::Ones;
        view::write_f32(tensor, |out| {
            for (i, x) in out.iter_mut().enumerate() {
                let noise = ((i * 7919 + index * 104_729) as f32 * 0.618).sin();
                *x = if is_norm { 1.0 + 0.3 * noise } else { 0.4 * noise };
            }
        })
        .unwrap();
    }
    weights
}

fn ours(spec: &ModelSpec, weights: &Parameters, ids: &[u32], kernels: Arc<dyn Kernels>) -> Vec<f32> {
    let model = Decoder::new(spec, weights, kernels).unwrap();
    let shape = (1, ids.len());
    let mut workspace = Workspace::for_evaluation(spec, PrecisionPolicy::FP32, shape, &Device::Cpu).unwrap();
    model.forward(weights, InputIds::new(ids, ids.len()), ForwardMode::Eval, &mut workspace, &mut ()).unwrap();
    let last = workspace.hidden().narrow(0, ids.len() - 1, 1).unwrap();
    model.logits(weights, &last).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Compares the last logits of texts of several lengths with the logits of the model that `theirs` returns.
fn compare(config: &Value, mut theirs: impl FnMut(VarBuilder<'static>, &Tensor) -> candle_core::Result<Tensor>) {
    let spec = ModelSpec::from_json(config.to_string().as_bytes(), "config.json").unwrap();
    let weights = weights(&spec);
    let named = |(name, tensor): (&str, &Tensor)| (spec.family.stored_name(name), tensor.force_contiguous().unwrap());
    let tensors: HashMap<String, Tensor> = weights.iter().map(named).collect();
    for length in [1_u32, 5, 12] {
        let ids: Vec<u32> = (0..length).map(|i| (i * 11 + 3) % 50).collect();
        let builder = VarBuilder::from_tensors(tensors.clone(), DType::F32, &Device::Cpu);
        let input = Tensor::new(&ids[..], &Device::Cpu).unwrap().unsqueeze(0).unwrap();
        let expected = theirs(builder, &input).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for kernels in [Arc::new(Fused) as Arc<dyn Kernels>, Arc::new(CandleKernels)] {
            let name = kernels.name().to_owned();
            let error = distance(&ours(&spec, &weights, &ids, kernels), &expected);
            assert!(error < 1e-5, "{} by {name}, {length} tokens: {error:.1e}", config["model_type"]);
        }
    }
}

fn parsed<T: serde::de::DeserializeOwned>(config: &Value) -> T {
    serde_json::from_value(config.clone()).unwrap()
}

#[test]
fn llama_has_the_same_logits() {
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64});
    for own in [json!({}), json!({"tie_word_embeddings": true}), json!({ "rope_scaling": llama3 })] {
        let config = config("llama", &own);
        compare(&config, |builder, ids| {
            let config = parsed::<llama::LlamaConfig>(&config).into_config(false);
            let mut cache = llama::Cache::new(false, DType::F32, &config, &Device::Cpu)?;
            llama::Llama::load(builder, &config)?.forward(ids, 0, &mut cache)
        });
    }
}

#[test]
fn mistral_has_the_same_logits() {
    let config = config("mistral", &json!({"head_dim": 10}));
    compare(&config, |builder, ids| mistral::Model::new(&parsed(&config), builder)?.forward(ids, 0));
}

#[test]
fn qwen2_has_the_same_logits() {
    let config = config("qwen2", &json!({}));
    compare(&config, |builder, ids| qwen2::ModelForCausalLM::new(&parsed(&config), builder)?.forward(ids, 0));
}

#[test]
fn qwen3_has_the_same_logits() {
    for own in [json!({"head_dim": 10}), json!({"attention_bias": true, "tie_word_embeddings": true})] {
        let config = config("qwen3", &own);
        compare(&config, |builder, ids| qwen3::ModelForCausalLM::new(&parsed(&config), builder)?.forward(ids, 0));
    }
}

/// With one key head: with more, candle stores values in its cache that are not contiguous, which fails. Scores are
/// scaled by the head size, because candle ignores `query_pre_attn_scalar`.
#[test]
fn gemma3_has_the_same_logits() {
    let own = json!({
        "hidden_act": null, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": true, "query_pre_attn_scalar": 6,
        "num_key_value_heads": 1,
        "sliding_window_pattern": 2, "rope_local_base_freq": 100.0, "rope_theta": 1e6,
    });
    let config = config("gemma3_text", &own);
    compare(&config, |builder, ids| gemma3::Model::new(false, &parsed(&config), builder)?.forward(ids, 0));
}
