//! A steady-state training step allocates almost nothing, because its buffers are allocated in the first step.

use crate::alone;
use crate::common::allocator::Counting;
use crate::common::engine::{Settings, engine};
use crate::common::gguf::{with_lora, write_random};
use crate::common::processes::together;
use candle_core::quantized::GgmlDType::{Q4_1, Q8_0};
use candle_core::{DType, Device, Tensor};
use finetune::data::{BatchLoader, TokenSource, Tokenizer, grammar};
use finetune::engine::collective::ProcessGroup;
use finetune::engine::kernels::attention::{AttentionInputs, AttentionShape};
use finetune::engine::kernels::columns::ColumnSlice;
use finetune::engine::kernels::dropout::Dropout;
use finetune::engine::kernels::{CandleKernels, Fused, Kernels, op};
use finetune::engine::model::{ModelSpec, Parameters};
use finetune::engine::optim::{AdamWConfig, MasterWeights, OptimizerKind, Sharding};
use finetune::inference::export::{ExportFormat, ExportScope, export};
use finetune::inference::trained::TrainedModel;
use finetune::lab::{MemoryCategory, MemoryItem, TrainSetup};
use finetune::precision::{Dtype, GradScaler, GradScalerConfig, PrecisionPolicy};
use finetune::store::{GgufModel, StoredModel, WeightSource};
use finetune::train::{Config, DistributedLayout, MemoryExtras, MemoryInputs, Trainer, WeightInit};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Barrier};

/// Bytes allocated since the start by all threads, not reduced by freeing.
static ALLOCATED: AtomicUsize = AtomicUsize::new(0);
/// Bytes in use, and their maximum since the last reset.
static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn count(change: isize) {
    let bytes = change.unsigned_abs();
    if change > 0 {
        ALLOCATED.fetch_add(bytes, Relaxed);
        PEAK.fetch_max(LIVE.fetch_add(bytes, Relaxed) + bytes, Relaxed);
    } else {
        LIVE.fetch_sub(bytes, Relaxed);
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting(count);

/// Limit on the allocations of a step: 27,088 bytes were the most, with two micro-batches in half precision.
const LIMIT: usize = 32 << 10;
/// Limit on the allocations for an expert of a block in a micro-batch: ten views of its rows, of 184 bytes each, and
/// candle's 64 bytes for each of six results. An expert's rows differ from step to step, so no view can be kept.
const EXPERT_LIMIT: usize = 10 * 184 + 6 * 64;
/// Limit on a dense engine's allocations besides its buffers: the statistics' histogram for each parameter, and names;
/// and the queues of the threads' pool, which occasionally take another block of 1.5 kB.
const SMALL_THINGS: usize = (128 << 10) + (8 << 10);
/// After these steps, every thread has its scratch memory for every part of a step.
const WARM_UP: usize = 20;

/// The memory that the laboratory predicts for steps of 4 × 64 tokens.
fn memory(spec: &ModelSpec, policy: PrecisionPolicy, grad_accum: usize) -> Vec<MemoryItem> {
    let setup = TrainSetup { shape: [4, 64, grad_accum], ..TrainSetup::default() };
    setup.engine(spec, policy, OptimizerKind::AdamW).unwrap()
}

#[test]
fn a_steady_state_step_allocates_at_most_32_kib() {
    let _alone = alone();
    steady_state(&ModelSpec::named("tiny").unwrap().resized(2, 64, 4), 0);
}

#[test]
fn a_steady_state_step_of_a_mixture_allocates_little_more_for_each_expert() {
    let _alone = alone();
    let config = br#"{"model_type": "olmoe", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_experts": 8, "num_experts_per_tok": 2}"#;
    steady_state(&ModelSpec::from_json(config, "the mixture").unwrap(), 2 * 8);
}

/// Checks the allocations of the first step and of later ones of a model with this number of experts in all blocks.
fn steady_state(spec: &ModelSpec, experts: usize) {
    let text = grammar::text(1, 60_000);
    // Each expert has three parameters, and so three histograms.
    let small_things = SMALL_THINGS + experts * 3 * (1 << 10);
    for policy in [PrecisionPolicy::FP32, PrecisionPolicy::FP16, PrecisionPolicy::BF16] {
        for grad_accum in [1, 2] {
            let scaler = GradScalerConfig { growth_interval: 7, ..GradScalerConfig::default() };
            let masters = Parameters::random(&spec.parameters(), 3, &Device::Cpu).unwrap();
            let settings = Settings {
                policy,
                scaler: GradScaler::new(scaler).unwrap(),
                adamw: AdamWConfig { betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1 },
                lr: 1e-3,
                max_grad_norm: Some(1.0),
                batch: (4, 64),
                grad_accum,
            };
            let items = memory(spec, policy, grad_accum);
            let before = ALLOCATED.load(Relaxed);
            let mut engine = engine(spec, masters, settings);
            // The masters were there before.
            let told: u64 =
                items.iter().filter(|item| item.group != MemoryCategory::Masters).map(|item| item.bytes).sum();
            let allocated = ALLOCATED.load(Relaxed) - before;
            let untold = allocated.checked_sub(told as usize);
            assert!(untold.is_some_and(|bytes| bytes < small_things), "{policy}: allocated {allocated}, told {told}");
            engine.count_exponents = true;
            let tokens = TokenSource::from_ids(text.bytes().map(u32::from).collect());
            let mut loader = BatchLoader::new(tokens, 4, 64, 5).unwrap();
            let mut micro_batches = vec![loader.batch(); grad_accum];
            let mut step = || {
                let before = ALLOCATED.load(Relaxed);
                for batch in &mut micro_batches {
                    loader.next_batch(batch);
                }
                engine.step(&micro_batches).unwrap();
                ALLOCATED.load(Relaxed) - before
            };
            let most = (0..WARM_UP + 20).map(|_| step()).skip(WARM_UP).max().unwrap();
            let limit = LIMIT + experts * grad_accum * EXPERT_LIMIT;
            assert!(most <= limit, "{policy}, {grad_accum} micro-batches: a step allocated {most} bytes");
        }
    }
}

/// Masters and moments take 12 bytes per parameter in one process and 3 in each of four, and nothing keeps the rest
/// alive. In one process four micro-batches have two sums, in each of four none, and the sum of its shard.
#[test]
fn each_of_four_processes_holds_a_quarter_of_masters_and_moments() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let spec = ModelSpec::named("tiny").unwrap().resized(4, 256, 4);
    std::fs::write(folder.path().join("config.json"), spec.to_json("float32")).unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), Tokenizer::byte().json()).unwrap();
    let mut config =
        Config { model: folder.path().to_str().unwrap().to_owned(), init: WeightInit::Random, ..Config::default() };
    config.train.batch_size = 1;
    config.train.seq_len = 16;
    config.train.grad_accum = 4;
    config.dtype = PrecisionPolicy::FP16;
    config.train.sample_tokens = 0;
    let held = |world: usize, sharding: Sharding, grad_accum: usize| {
        let everyone = Barrier::new(world);
        let mut config = config.clone();
        config.train.shard = sharding;
        config.train.grad_accum = grad_accum;
        let before = LIVE.load(Relaxed);
        let held = together(world, |process: Arc<dyn ProcessGroup>| {
            let trainer = Trainer::new(process, config.clone(), None, &mut |_| ()).unwrap();
            everyone.wait();
            let held = LIVE.load(Relaxed) - before;
            everyone.wait();
            drop(trainer);
            held
        });
        held[0] as f64 / world as f64
    };
    let parameters: usize = spec.parameters().iter().map(|entry| entry.shape.iter().product::<usize>()).sum();
    let (alone, of_four) = (held(1, Sharding::Optimizer, 4), held(4, Sharding::Optimizer, 4));
    let saved = (alone - of_four) / parameters as f64;
    assert!((15.9..16.1).contains(&saved), "{saved} bytes per parameter less: 9 are of masters and moments, 7 of sums");

    // Gradients of one block instead of four, and with several micro-batches in a process no sums of whole gradients.
    for grad_accum in [4, 8] {
        let told = |sharding| {
            let layout = DistributedLayout { world_size: 4, sharding, ..DistributedLayout::default() };
            let keep = config.train.gradient_checkpointing.into();
            let optimizer = config.train.optimizer;
            let shape = [1, 16, grad_accum];
            let spec = &spec;
            let policy = config.dtype;
            let inputs = MemoryInputs { layout, spec, policy, shape, keep, optimizer, kernels: &Fused };
            inputs.estimate(MemoryExtras::default()).unwrap().total() as f64
        };
        let saved = |bytes: &dyn Fn(Sharding) -> f64| {
            (bytes(Sharding::Optimizer) - bytes(Sharding::Gradients)) / parameters as f64
        };
        let [told, measured] = [saved(&told), saved(&|sharding| held(4, sharding, grad_accum))];
        assert!(told > 1.4 + if grad_accum > 4 { 4.0 } else { 0.0 }, "{told}");
        assert!((measured - told).abs() < 0.1, "{grad_accum}: {measured} bytes less per parameter, told {told}");
    }
}

/// Regression: the weights and all converted tensors were in memory at the same time.
#[test]
fn an_export_to_gguf_holds_the_weights_once() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    let spec = ModelSpec::named("tiny").unwrap().resized(4, 256, 4);
    std::fs::write(file("config.json"), spec.to_json("float32")).unwrap();
    std::fs::write(file("tokenizer.json"), Tokenizer::byte().json()).unwrap();
    let weights = Parameters::random(&spec.parameters(), 7, &Device::Cpu).unwrap();
    let bytes = weights.bytes() as usize;
    let tensors: HashMap<_, _> = weights.iter().map(|(name, tensor)| (name.to_owned(), tensor.clone())).collect();
    candle_core::safetensors::save(&tensors, file("model.safetensors")).unwrap();
    drop((weights, tensors));
    let trained = TrainedModel::open(folder.path(), None).unwrap();
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    export(&trained, Dtype::F32, ExportFormat::Gguf, ExportScope::Merged, &file("model.gguf")).unwrap();
    let peak = PEAK.load(Relaxed) - before;
    assert!(peak < bytes + bytes / 4, "{peak} bytes for weights of {bytes}");
}

/// The second of four processes, which exchange nothing.
#[derive(Debug)]
struct SecondOfFour;

impl ProcessGroup for SecondOfFour {
    fn rank(&self) -> usize {
        1
    }

    fn world_size(&self) -> usize {
        4
    }

    fn all_to_all(&self, _: &[&[u8]], _: &mut [&mut [u8]]) -> finetune::Result<()> {
        unreachable!("the start needs no exchange")
    }
}

/// At the start a process never has more than one parameter in FP32 in addition to its shard.
#[test]
fn no_process_of_several_ever_has_all_masters() {
    let _alone = alone();
    let entries = ModelSpec::named("tiny").unwrap().resized(4, 256, 4).parameters();
    let sizes = || entries.iter().map(|entry| entry.shape.iter().product::<usize>());
    let all = sizes().sum::<usize>();
    let largest = sizes().max().unwrap();
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    let policy = PrecisionPolicy::FP16;
    let draw = |one: &Parameters| Ok(one.init_weights(3)?);
    let (masters, weights) =
        MasterWeights::from_shard_fn(&entries, policy, &Device::Cpu, &SecondOfFour, &Fused, draw).unwrap();
    let peak = PEAK.load(Relaxed) - before;
    let own = masters.parameters().elements() as usize;
    assert_eq!(weights.elements() as usize, all);
    assert!(own < all / 3, "a shard of {own} of {all}");
    assert!(peak < 2 * all + 4 * (own + largest) + SMALL_THINGS, "{peak} bytes for {all} parameters");
}

/// QLoRA: a quantized base holds only its blocks, and a run over it takes the memory that the memory check counts.
#[test]
fn a_base_in_blocks_holds_its_blocks() {
    let _alone = alone();
    let shape = ModelSpec { vocab_size: 1024, ..ModelSpec::named("tiny").unwrap().resized(2, 256, 4) };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    write_random(&shape, &[Q4_1, Q8_0], &path);
    let file = GgufModel::open(&path).unwrap();
    let weights = WeightSource::Stored(StoredModel::open(&path).unwrap());
    let spec = with_lora(file.spec(), false);
    let policy = PrecisionPolicy::BF16;
    let in_blocks: u64 = file
        .gguf
        .tensors()
        .filter(|(_, dtype, _)| dtype.block_size() > 1)
        .map(|(_, dtype, shape)| (shape.iter().product::<usize>() / dtype.block_size() * dtype.type_size()) as u64)
        .sum();
    let before = LIVE.load(Relaxed);
    let over = weights.load_adapters(&spec, policy.compute, 3, true, &Device::Cpu, "base").unwrap();
    let held = (LIVE.load(Relaxed) - before) as u64 - over.parameters.bytes();
    let (bytes, dense) = over.parameters.base().unwrap().quantization_savings().unwrap();
    // The positions' table and the norms are not quantized.
    assert!(bytes >= in_blocks && bytes < in_blocks + (dense >> 3), "{bytes} held, {in_blocks} of them in blocks");
    assert!(bytes * 2 < dense + in_blocks && held.abs_diff(bytes) < SMALL_THINGS as u64, "{held} {bytes} {dense}");

    let items = memory(&spec, policy, 1);
    let told: u64 = items.iter().map(|item| item.bytes).sum();
    let settings = Settings {
        policy,
        scaler: GradScaler::disabled(),
        adamw: AdamWConfig { betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1 },
        lr: 1e-3,
        max_grad_norm: Some(1.0),
        batch: (4, 64),
        grad_accum: 1,
    };
    let mut engine = engine(&spec, over.parameters, settings);
    let tokens = TokenSource::from_ids(grammar::text(1, 60_000).bytes().map(u32::from).collect());
    let mut loader = BatchLoader::new(tokens, 4, 64, 5).unwrap();
    let mut batch = loader.batch();
    loader.next_batch(&mut batch);
    engine.step(std::slice::from_ref(&batch)).unwrap();
    let base = engine.state.weights.base().unwrap();
    assert!(base.buffer_bytes() <= 2 * 1024 * 1024, "the buffer holds one matrix: {}", base.buffer_bytes());
    let live = (LIVE.load(Relaxed) - before) as u64;
    let share = live as f64 / told as f64;
    // In addition to the buffers each thread has scratch memory for packing.
    assert!((0.95..1.6).contains(&share), "{live} bytes in use, {told} told");
}

/// The memory check's count for attention on a GPU, measured with the same operations of candle on the CPU.
#[test]
fn stored_scores_take_what_is_predicted() {
    let _alone = alone();
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu).unwrap();
    for (shape, dropout) in [
        (AttentionShape::new(2, 256, 4, 16), Dropout::new(0.1, 1, 2, 3)),
        (AttentionShape { softcap: Some(30.0), ..AttentionShape::new(1, 384, 2, 16) }, None),
    ] {
        let (tokens, width) = (shape.batch * shape.seq_len, shape.heads * shape.head_size);
        let (qkv, dqkv) = (zeros(&[tokens, 3 * width], DType::F32), zeros(&[tokens, 3 * width], DType::F32));
        let out = zeros(&[tokens, width], DType::F32);
        let lse = zeros(&[tokens * shape.heads], DType::F32);
        let operands = AttentionInputs::packed(&shape, &qkv, dropout).unwrap();
        let kernels = CandleKernels;
        let predicted = kernels.score_bytes(&shape).unwrap() as usize;
        let before = LIVE.load(Relaxed);
        PEAK.store(before, Relaxed);
        op::Attention { shape, operands, out: &out, lse: &lse }.run(&kernels).unwrap();
        let gradients = ColumnSlice::split(&dqkv, shape.widths()).unwrap();
        op::AttentionBackward { shape, operands, dout: &out, out: &out, lse: &lse, gradients, dsinks: None }
            .run(&kernels)
            .unwrap();
        let measured = PEAK.load(Relaxed) - before;
        // In addition to the scores there are heads and a mask of one byte per element.
        let share = measured as f64 / predicted as f64;
        assert!((0.8..1.15).contains(&share), "{shape:?}: {measured} bytes, predicted {predicted}");
    }
}
