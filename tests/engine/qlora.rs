//! QLoRA: a base that stays in the blocks of its GGUF file computes the same, to the bit, as that base dequantized when
//! it is read.

use crate::common::compare::values;
use crate::common::engine::{Settings, engine_of};
use crate::common::gguf::{with_lora, write_random};
use crate::common::processes::compute_alone;
use crate::mismatch::assert_exact;
use candle_core::Device;
use candle_core::quantized::GgmlDType::{self, F32, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
use finetune::data::{BatchLoader, TokenSource, grammar};
use finetune::engine::kernels::{CandleKernels, Fused, Kernels};
use finetune::engine::model::{KvCache, ModelSpec};
use finetune::precision::{GradScalerConfig, PrecisionPolicy};
use finetune::store::base::AdaptedModel;
use finetune::store::{GgufModel, StoredModel, WeightSource};
use finetune::train::{Config, ConfigLayers, ModelSource, TrainEngine};
use serde_json::json;
use std::path::Path;
use std::sync::Arc;

const BATCH: (usize, usize) = (2, 16);

/// Two blocks of each kind: rows of queries and keys that GGUF orders differently, an untied head, products of several
/// matrices; GPT-2's transposed weights and biases; norms of heads and branches; experts.
fn shapes() -> Vec<ModelSpec> {
    let gpt2 =
        json!({"model_type": "gpt2", "vocab_size": 257, "n_positions": 32, "n_embd": 256, "n_layer": 2, "n_head": 4});
    let of = |family: &str, tied: bool| {
        json!({
            "model_type": family, "vocab_size": 257, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 32,
            "tie_word_embeddings": tied, "query_pre_attn_scalar": 64, "rms_norm_eps": 1e-5, "moe_intermediate_size": 256,
            "num_experts": 3, "num_experts_per_tok": 2, "norm_topk_prob": true,
        })
    };
    let all = [gpt2, of("llama", false), of("qwen3", true), of("gemma3_text", true), of("qwen3_moe", false)];
    all.iter().map(|json| ModelSpec::from_json(json.to_string().as_bytes(), "a test's").unwrap()).collect()
}

/// The index of Llama in [`shapes`].
const LLAMA: usize = 1;

/// Types that change within a product, so that it is stacked from several; and every type that a block may have.
const TYPES: [&[GgmlDType]; 3] = [&[Q4_1, Q8_0, Q5_0], &[Q4_0, Q5_1], &[Q4K, Q6K, Q2K, Q3K, Q5K]];

fn read(spec: &ModelSpec, policy: PrecisionPolicy, path: &Path, in_blocks: bool) -> AdaptedModel {
    let weights = WeightSource::Stored(StoredModel::open(path).unwrap());
    weights.load_adapters(spec, policy.compute, 3, in_blocks, &Device::Cpu, "base").unwrap()
}

fn start(spec: &ModelSpec, over: AdaptedModel, policy: PrecisionPolicy, kernels: Arc<dyn Kernels>) -> TrainEngine {
    compute_alone();
    let scaler = GradScalerConfig { init_scale: 1024.0, ..GradScalerConfig::default() };
    engine_of(kernels, spec, over.parameters, Settings::new(policy, scaler, 1e-2, BATCH))
}

/// Losses of three steps, every bit that they have trained, and the logits of a sequence decoded token by token.
fn learned(mut engine: TrainEngine, policy: PrecisionPolicy) -> (Vec<u64>, Vec<Vec<f64>>, Vec<f64>) {
    let tokens = TokenSource::from_ids(grammar::text(1, 5000).bytes().map(u32::from).collect());
    let mut loader = BatchLoader::new(tokens, BATCH.0, BATCH.1, 5).unwrap();
    let mut batch = loader.batch();
    let mut step = || {
        loader.next_batch(&mut batch);
        engine.step(std::slice::from_ref(&batch)).unwrap().loss.to_bits()
    };
    let losses = (0..3).map(|_| step()).collect();
    let trained = engine.state.masters.parameters().tensors().iter().map(values).collect();
    let mut cache = KvCache::new(engine.model.spec(), policy, BATCH.1, &Device::Cpu).unwrap();
    let hidden = engine.model.decode(&engine.state.weights, &batch.inputs[..BATCH.1], &mut cache).unwrap();
    let logits = engine.model.logits(&engine.state.weights, hidden).unwrap();
    (losses, trained, values(&logits))
}

#[test]
fn a_llama_in_blocks_has_the_bits_of_the_dequantized_one() {
    // Every type, because GGUF stores Llama's rows in another order.
    for types in TYPES {
        assert_bits_of_dequantized(&shapes()[LLAMA], types);
    }
}

#[test]
fn other_families_in_blocks_have_the_bits_of_the_dequantized_ones() {
    for (index, shape) in shapes().iter().enumerate().filter(|(index, _)| *index != LLAMA) {
        assert_bits_of_dequantized(shape, TYPES[index % TYPES.len()]);
    }
}

fn assert_bits_of_dequantized(shape: &ModelSpec, types: &[GgmlDType]) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    write_random(shape, types, &path);
    let file = GgufModel::open(&path).unwrap();
    for (dora, policy) in [
        (false, PrecisionPolicy::BF16),
        (true, PrecisionPolicy::FP16),
        (false, PrecisionPolicy::FP16),
        (true, PrecisionPolicy::FP32),
    ] {
        let spec = with_lora(file.spec(), dora);
        let engine = start(&spec, read(&spec, policy, &path, true), policy, Arc::new(Fused));
        assert_exact("a base in blocks", (&engine.model, &engine.state.weights, policy));
        let plain = (dora && policy == PrecisionPolicy::FP16).then(|| Arc::new(CandleKernels) as Arc<dyn Kernels>);
        for kernels in [Arc::new(Fused) as Arc<dyn Kernels>].into_iter().chain(plain) {
            let what = format!("{:?} {types:?} {policy} {} dora {dora}", shape.family, kernels.name());
            let (blocks, dense) = (read(&spec, policy, &path, true), read(&spec, policy, &path, false));
            assert_eq!(blocks.sha256, dense.sha256, "{what}");
            let bytes = |over: &AdaptedModel| over.parameters.base().unwrap().bytes();
            assert!(bytes(&blocks) < bytes(&dense), "{what}: nothing is in blocks");
            let [blocks, dense] =
                [blocks, dense].map(|over| learned(start(&spec, over, policy, kernels.clone()), policy));
            assert!(dense.0.iter().all(|loss| f64::from_bits(*loss).is_finite()), "{what}: {:?}", dense.0);
            assert!(blocks == dense, "{what}: {:?} {:?}", blocks.0, dense.0);
        }
    }
}

/// If one part of a product is not quantized, the whole of it is dequantized; a saved layer is trained and so no base.
#[test]
fn products_are_in_blocks_as_a_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let [_, llama, ..] = &shapes()[..] else { unreachable!() };
    // By name: the embedding, then down, gate, up, k, o, q and v of each block, then the head.
    write_random(llama, &[Q8_0, Q8_0, Q8_0, F32, Q8_0, Q8_0, Q8_0, Q8_0, Q8_0], &path);
    let file = GgufModel::open(&path).unwrap();
    let mut spec = with_lora(file.spec(), false);
    let names =
        |spec: &ModelSpec| spec.quantized_params().into_keys().filter(|name| name.contains(".0.")).collect::<Vec<_>>();
    let of = |parts: &[&str]| parts.iter().map(|part| format!("layers.0.{part}.weight")).collect::<Vec<_>>();
    let attention = ["self_attn.k_proj", "self_attn.o_proj", "self_attn.q_proj", "self_attn.v_proj"];
    assert_eq!(names(&spec), of(&[&["mlp.down_proj"], &attention[..]].concat()));
    assert!(spec.quantized_params().contains_key("lm_head.weight"));
    let saved = finetune::engine::model::Lora::modules_to_save(&spec, &["lm_head"]).unwrap();
    spec.lora.as_mut().unwrap().modules_to_save = saved;
    assert!(!spec.quantized_params().contains_key("lm_head.weight"));
    let over = read(&spec, PrecisionPolicy::BF16, &path, true);
    let (losses, ..) = learned(start(&spec, over, PrecisionPolicy::BF16, Arc::new(Fused)), PrecisionPolicy::BF16);
    assert!(losses.iter().all(|loss| f64::from_bits(*loss).is_finite()));
}

/// The memory estimate counts matrices in blocks as they are in the file.
#[test]
fn a_randomly_drawn_base_is_in_no_blocks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    write_random(&shapes()[LLAMA], &[Q8_0], &path);
    let settings =
        [("model", path.to_str().unwrap()), ("tokenizer", "bytes"), ("train.seq_len", "32"), ("lora.r", "4")];
    let quantized = |init: &str| {
        let init = ("init", init);
        let all = settings.iter().chain([&init]);
        let value = |text: &str| text.parse().map_or_else(|_| toml::Value::String(text.into()), toml::Value::Integer);
        let overrides = all.map(|(key, text)| ((*key).to_owned(), value(text))).collect();
        let config = Config::resolve(&ConfigLayers { file: None, overrides }).unwrap();
        !ModelSource::open(&config, &mut |_| ()).unwrap().spec.quantized_params().is_empty()
    };
    assert_eq!(["pretrained", "random"].map(quantized), [true, false]);
}
