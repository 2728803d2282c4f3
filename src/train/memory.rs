//! The memory that training's buffers take, summed from the types that allocate them.

use crate::data::counted;
use crate::engine::kernels::Kernels;
use crate::engine::kernels::attention::AttentionShape;
use crate::engine::model::{
    Checkpointing, KvCache, ModelSpec, ModuleId, ModuleOp, ParamSpec, Parameters, Workspace, WorkspaceBytes,
};
use crate::engine::optim::{AdamW, Gradients, MasterWeights, OptimizerKind, Sharding};
use crate::inference::generate::BATCH_SIZE;
use crate::precision::{Dtype, PrecisionPolicy};
use crate::telemetry;
use crate::train::config::{Config, ObjectiveSection};
use crate::{Error, Result};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

/// The distribution of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DistributedLayout {
    /// Number of processes.
    pub world_size: usize,
    /// The state that is split among the processes.
    pub sharding: Sharding,
    /// Whether the memory is a GPU's.
    pub on_gpu: bool,
    /// Whether the shards of several processes on GPUs are on the CPU.
    pub shards_on_host: bool,
}

impl Default for DistributedLayout {
    /// A single process on a CPU.
    fn default() -> Self {
        Self { world_size: 1, sharding: Sharding::Optimizer, on_gpu: false, shards_on_host: false }
    }
}

/// Bytes by purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryEstimate {
    /// The working copy of the weights, and a second model that is the objective's reference, with its buffers.
    pub weights: u64,
    /// FP32 masters.
    pub masters: u64,
    /// Gradients, and their FP32 sums over micro-batches: the binary logarithm of their number, rounded down.
    pub gradients: u64,
    /// Adam's moments.
    pub adam: u64,
    /// Activations that the forward pass keeps for the backward pass.
    pub activations: u64,
    /// Buffers that are reused: a tile of logits, gradients of activations.
    pub scratch: u64,
    /// Attention's scores, if the kernels store them; candle's do.
    pub scores: u64,
    /// The FP32 probe's activations, gradients and weights.
    pub probe: u64,
}

/// The work of a run in addition to its steps, and the packed operands of both.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MemoryExtras<'a> {
    /// Whether FP32 probes run between the steps.
    pub probes: bool,
    /// The maximum number of tokens of a text sample, and the bytes of its prompt.
    pub sample: [usize; 2],
    /// The objective, which may sample completions between the steps and have a second model as its reference.
    pub objective: Option<&'a ObjectiveSection>,
    /// The threads of a run on this machine, whose packed operands are counted. `None` for figures that are the same on
    /// every machine.
    pub threads: Option<usize>,
}

/// The settings that determine the memory of a run in each of its processes.
#[derive(Clone, Copy)]
pub struct MemoryInputs<'a> {
    /// The processes.
    pub layout: DistributedLayout,
    /// The model.
    pub spec: &'a ModelSpec,
    /// Its types.
    pub policy: PrecisionPolicy,
    /// Sequences in a micro-batch, tokens in a sequence, micro-batches in a step.
    pub shape: [usize; 3],
    /// The activations that the forward pass keeps.
    pub keep: Checkpointing,
    /// How Adam's moments are stored.
    pub optimizer: OptimizerKind,
    /// The kernels that compute the model.
    pub kernels: &'a dyn Kernels,
}

impl MemoryInputs<'_> {
    /// The memory of the run with `extras`.
    pub fn estimate(&self, extras: MemoryExtras<'_>) -> Result<MemoryEstimate> {
        let Self { spec, policy, shape: [_, seq_len, _], .. } = *self;
        let MemoryExtras { probes, sample: [tokens, prompt], objective, threads } = extras;
        let mut estimate = self.step()?;
        estimate.scratch += sample_bytes(spec, policy, tokens, prompt);
        if objective.is_some_and(|objective| objective.kind.samples_completions()) {
            // Completions have a KV cache each, and weights that stay packed.
            let weights = if estimate.weights == 0 { estimate.masters } else { estimate.weights };
            estimate.scratch += BATCH_SIZE as u64 * sample_bytes(spec, policy, seq_len, 0) + weights;
        }
        if let Some(threads) = threads {
            estimate.scratch += self.packed_bytes(probes, threads)?;
        }
        if probes {
            estimate.probe = self.probe_bytes()?;
        }
        if let Some(objective) = objective.filter(|objective| objective.loads_reference(spec)) {
            estimate.weights += self.reference_bytes(objective, &estimate)?;
        }
        Ok(estimate)
    }

    /// The memory of the steps alone.
    fn step(&self) -> Result<MemoryEstimate> {
        let Self { layout, spec, policy, shape: [batch, seq_len, grad_accum], keep, optimizer, kernels } = *self;
        let DistributedLayout { world_size, sharding, on_gpu, shards_on_host } = layout;
        let entries = spec.parameters();
        let trained: Vec<_> = entries.iter().map(|entry| entry.shape.iter().product::<usize>() as u64).collect();
        let parameters: u64 = trained.iter().sum();
        let one_block = match sharding {
            Sharding::Gradients => Parameters::elements_of_one_block(entries),
            Sharding::Optimizer => parameters,
        };
        let frozen = FrozenBytes::new(spec, policy, batch * seq_len);
        let WorkspaceBytes { activations, scratch } = Workspace::bytes(spec, policy, [batch, seq_len], keep, on_gpu)?;
        let (mut masters, weights) = MasterWeights::bytes(parameters, policy, world_size);
        let (mut gradients, sum) = Gradients::bytes(parameters, one_block, policy, grad_accum, world_size, sharding);
        let scores = kernels.score_bytes(&AttentionShape::new(batch, seq_len, spec.heads, spec.head_dim))?;
        let mut adam = AdamW::bytes(optimizer, policy, trained).div_ceil(world_size as u64);
        if world_size > 1 && shards_on_host {
            adam = 0;
            // Masters that are also the weights stay on the GPU.
            masters = if weights == 0 { masters } else { 0 };
        } else {
            gradients += sum;
        }
        let weights = weights + frozen.dense + frozen.blocks;
        let scratch = scratch + frozen.buffer;
        Ok(MemoryEstimate { weights, masters, gradients, adam, activations, scratch, scores, probe: 0 })
    }

    /// The bytes of a second model in addition to `own`. It is kept if it reads sampled completions; otherwise it is
    /// dropped before the first step. Its masters are dropped as soon as it is loaded. Until the first step, a CPU has
    /// not touched the buffers of a step.
    fn reference_bytes(&self, objective: &ObjectiveSection, own: &MemoryEstimate) -> Result<u64> {
        let Self { layout: DistributedLayout { world_size, on_gpu, .. }, policy, shape: [batch, seq_len, _], .. } =
            *self;
        let mut spec = Cow::Borrowed(self.spec);
        if objective.reference.is_some() {
            // Its shape is not known yet; usually it is the same.
            let spec = spec.to_mut();
            spec.lora = None;
            spec.frozen = BTreeSet::new();
        }
        let (masters, weights) = MasterWeights::bytes(spec.trained_count(), policy, world_size);
        let (masters, weights) = if weights == 0 { (0, masters) } else { (masters, weights) };
        let FrozenBytes { dense, blocks, buffer } = FrozenBytes::new(&spec, policy, batch * seq_len);
        let passes = Workspace::evaluation_bytes(&spec, policy, [batch, seq_len], on_gpu)?;
        let model = weights + dense + blocks + buffer + passes;
        let MemoryEstimate { gradients, activations, scratch, scores, probe, .. } = own;
        let untouched = if on_gpu { 0 } else { gradients + activations + scratch + scores + probe };
        let kept = if objective.kind.samples_completions() { model } else { 0 };
        Ok(kept.max((model + masters).saturating_sub(untouched)))
    }

    /// The bytes of an FP32 probe of a micro-batch in one of the processes, in addition to the engine: a separate
    /// workspace and gradients, and FP32 weights unless the weights are FP32; also whole masters, and whole gradients
    /// if they are sharded. The blocks of a base are shared.
    fn probe_bytes(&self) -> Result<u64> {
        let Self { layout, spec, policy, shape: [batch, seq_len, _], .. } = *self;
        let DistributedLayout { world_size, sharding, on_gpu, .. } = layout;
        let exact = PrecisionPolicy::FP32;
        let trained = spec.trained_count();
        let keep = Checkpointing::None;
        let WorkspaceBytes { activations, scratch } = Workspace::bytes(spec, exact, [batch, seq_len], keep, on_gpu)?;
        let mut gathered = if world_size > 1 { trained * policy.params.size_in_bytes() as u64 } else { 0 };
        if world_size > 1 && sharding == Sharding::Gradients {
            gathered += trained * policy.grads.size_in_bytes() as u64;
        }
        let widened = if policy.params == Dtype::F32 { 0 } else { trained * Dtype::F32.size_in_bytes() as u64 };
        let frozen = FrozenBytes::new(spec, exact, batch * seq_len);
        let base = if policy.compute == Dtype::F32 { 0 } else { frozen.dense + frozen.buffer };
        Ok(activations
            + scratch
            + Gradients::bytes(trained, trained, exact, 1, 1, Sharding::Optimizer).0
            + gathered
            + widened
            + base)
    }

    /// Bytes of the packing buffers of matrix products for micro-batches on `threads` threads. They depend on the CPU:
    /// without BF16 instructions, BF16 operands are packed as FP32. FP32 `probes` reuse the same buffers.
    fn packed_bytes(&self, probes: bool, threads: usize) -> Result<u64> {
        let [batch, seq_len, _] = self.shape;
        let mut products = self.spec.gemm_shapes(self.policy, batch * seq_len)?;
        if probes {
            products.extend(self.spec.gemm_shapes(PrecisionPolicy::FP32, batch * seq_len)?);
        }
        Ok(self.kernels.packing_bytes(&products, threads)?)
    }
}

impl MemoryEstimate {
    /// The sum.
    pub fn total(&self) -> u64 {
        let Self { weights, masters, gradients, adam, activations, scratch, scores, probe } = self;
        weights + masters + gradients + adam + activations + scratch + scores + probe
    }
}

/// KV-cache bytes of a generated sample: `tokens` plus the prompt, whose tokens are at most its `prompt` bytes.
pub fn sample_bytes(spec: &ModelSpec, policy: PrecisionPolicy, tokens: usize, prompt: usize) -> u64 {
    let capacity = tokens.saturating_add(prompt.max(1)).min(spec.max_position_embeddings);
    if tokens == 0 { 0 } else { KvCache::bytes(spec, policy, capacity) }
}

/// Bytes of a frozen base.
#[derive(Default)]
struct FrozenBytes {
    /// Parameters that are stored in the compute dtype.
    dense: u64,
    blocks: u64,
    /// For the largest of the matrices in blocks, dequantized, or for the rows of the embedding that tokens look up.
    buffer: u64,
}

impl FrozenBytes {
    fn new(spec: &ModelSpec, policy: PrecisionPolicy, tokens: usize) -> Self {
        let in_blocks = spec.quantized_params();
        let size = policy.compute.size_in_bytes() as u64;
        let mut frozen = Self::default();
        let mut dequantized = BTreeMap::<ModuleId, u64>::new();
        for ParamSpec { name, shape, fused_into, .. } in spec.frozen_parameters() {
            let elements = shape.iter().product::<usize>() as u64;
            let Some(dtype) = in_blocks.get(&name) else {
                frozen.dense += elements * size;
                continue;
            };
            frozen.blocks += elements / dtype.block_size() as u64 * dtype.type_size() as u64;
            // A tied embedding is the head's matrix as well.
            let looked_up = fused_into.op == ModuleOp::Embedding && !spec.tie_word_embeddings;
            let used = if looked_up { (tokens * spec.hidden_size) as u64 } else { elements };
            *dequantized.entry(fused_into).or_default() += used * size;
        }
        frozen.buffer = dequantized.into_values().max().unwrap_or(0);
        frozen
    }
}

/// A model, and the memory that its training may take in each process.
#[derive(Clone, Copy)]
pub(super) struct MemoryLimit<'a> {
    pub(super) spec: &'a ModelSpec,
    pub(super) kernels: &'a dyn Kernels,
    pub(super) layout: DistributedLayout,
    /// Bytes.
    pub(super) available: u64,
}

impl MemoryLimit<'_> {
    /// The bytes that this configuration takes in each process with batches of `batch` samples and other kept
    /// activations.
    fn required_bytes(&self, config: &Config, batch: usize, keep: Checkpointing) -> Result<u64> {
        let Self { spec, kernels, layout, .. } = *self;
        let train = &config.train;
        let rows = config.objective.rows(batch);
        let shape = [rows, train.seq_len, train.grad_accum * train.batch_size.div_ceil(batch)];
        let extras = MemoryExtras {
            probes: config.telemetry.probe_every > 0,
            sample: [train.sample_tokens, train.prompt.len()],
            objective: Some(&config.objective),
            threads: Some(rayon::current_num_threads()),
        };
        let (policy, optimizer) = (config.dtype, train.optimizer);
        let inputs = MemoryInputs { layout, spec, policy, shape, keep, optimizer, kernels };
        Ok(inputs.estimate(extras)?.total())
    }

    /// Whether it fits. A size that cannot be computed does not.
    fn fits(&self, config: &Config, batch: usize, keep: Checkpointing) -> bool {
        self.required_bytes(config, batch, keep).is_ok_and(|bytes| bytes <= self.available)
    }

    fn largest_batch(&self, config: &Config, keep: Checkpointing) -> Option<usize> {
        largest_batch(self.available, |batch| self.required_bytes(config, batch, keep).unwrap_or(u64::MAX))
    }

    /// Rejects a configuration that does not fit into memory before anything is allocated, and names settings that
    /// would fit. Fails with [`Error::Config`] naming the bytes needed and available.
    pub(super) fn check(&self, config: &Config) -> Result<()> {
        let train = &config.train;
        let keep = train.gradient_checkpointing.into();
        let needed = self.required_bytes(config, train.batch_size, keep)?;
        if needed <= self.available {
            return Ok(());
        }
        let largest = self.largest_batch(config, keep);
        let advice = match largest {
            Some(largest) => {
                format!(
                    "the largest batch that fits is {largest}; use `--grad-accum` for several micro-batches per step"
                )
            }
            None => "not even a batch of 1 fits".into(),
        };
        let options = self.options(config, largest);
        let more = match (options.is_empty(), largest) {
            (false, _) => format!("; other options that fit: {}", options.join("; ")),
            (true, None) => "; use a shorter `--seq-len` or a smaller model".into(),
            (true, Some(_)) => String::new(),
        };
        let [needed, available] = [needed, self.available].map(telemetry::bytes);
        let (batch, tokens) = (counted(train.batch_size, "sequence"), train.seq_len);
        let message = format!(
            "a batch of {batch} of {tokens} tokens needs {needed}, but only {available} are available; {advice}{more}"
        );
        Err(Error::config("train.batch_size", message))
    }

    /// Settings with which `config` fits. Without them, the largest batch that fits is `largest`.
    fn options(&self, config: &Config, largest: Option<usize>) -> Vec<String> {
        let (batch, keep) = (config.train.batch_size, config.train.gradient_checkpointing.into());
        let mut options = Vec::new();
        if !config.train.gradient_checkpointing {
            match self.largest_batch(config, Checkpointing::PerBlock).map(|most| most.min(batch)) {
                Some(fits) if fits == batch => options.push("`--gradient-checkpointing`".into()),
                Some(fits) if largest.is_none() => {
                    options.push(format!("`--gradient-checkpointing` with `--batch-size {fits}`"));
                }
                _ => {}
            }
        }
        let [mut small_moments, mut no_probes] = [config.clone(), config.clone()];
        small_moments.train.optimizer = OptimizerKind::AdamW8bit;
        no_probes.telemetry.probe_every = 0;
        for (flag, changed) in
            [("`--optimizer adamw8bit`", small_moments), ("`--set telemetry.probe_every=0`", no_probes)]
        {
            if changed != *config && self.fits(&changed, batch, keep) {
                options.push(flag.into());
            }
        }
        let lora = with_lora(config);
        let spec = self.spec.clone();
        let adapters_fit = |spec: ModelSpec| MemoryLimit { spec: &spec, ..*self }.fits(&lora, batch, keep);
        if config.lora.r.is_none() && lora.with_trained_parts(spec).is_ok_and(adapters_fit) {
            options.push("`--lora r=16,alpha=32`".into());
        }
        options
    }

    /// Rejects a model if even one copy of its weights in the compute type does not fit. Other checks list every
    /// parameter several times per batch size, which takes seconds for thousands of blocks. Fails with
    /// [`Error::Config`] naming the bytes needed and available.
    pub(super) fn check_weights(&self, config: &Config) -> Result<()> {
        let count = self.spec.parameter_count();
        let dtype = config.dtype.compute;
        let bytes = count.saturating_mul(dtype.size_in_bytes() as u64);
        if !self.spec.quantized.is_empty() || bytes <= self.available {
            return Ok(());
        }
        let [needed, left] = [bytes, self.available].map(telemetry::bytes);
        let message = format!(
            "its {count} parameters need {needed} in {dtype}, but only {left} are available; use a smaller model"
        );
        Err(Error::config("model", message))
    }

    /// The first variant of `config` that fits, and a description of the changes. The variants have the same number of
    /// sequences per step in smaller micro-batches, or, if one sequence does not fit, with gradient checkpointing.
    /// Returns `config` unchanged if no change is needed or possible.
    pub(super) fn fitted(&self, config: &Config) -> Result<(Config, Option<String>)> {
        let (batch, accum) = (config.train.batch_size, config.train.grad_accum);
        for per_block in [config.train.gradient_checkpointing, true] {
            let divisors = (1..=batch).rev().filter(|divisor| batch.is_multiple_of(*divisor));
            // KTO needs two answers in a batch.
            for smaller in divisors.filter(|divisor| config.objective.validate(*divisor).is_ok()) {
                if self.required_bytes(config, smaller, per_block.into())? > self.available {
                    continue;
                }
                let mut fitted = config.clone();
                let train = &mut fitted.train;
                train.batch_size = smaller;
                train.grad_accum = batch / smaller * accum;
                train.gradient_checkpointing = per_block;
                let added = if per_block == config.train.gradient_checkpointing {
                    ""
                } else {
                    ", gradient_checkpointing = true"
                };
                let said =
                    format!("to fit into memory: batch_size = {smaller}, grad_accum = {}{added}", train.grad_accum);
                let changed = fitted != *config;
                return Ok((fitted, changed.then_some(said)));
            }
        }
        Ok((config.clone(), None))
    }
}

fn with_lora(config: &Config) -> Config {
    let mut config = config.clone();
    config.lora.r = Some(16);
    config.lora.alpha = Some(32.0);
    config
}

/// The largest batch whose `bytes` are within the budget; `None` if one sequence is too large.
pub fn largest_batch(budget: u64, bytes: impl Fn(usize) -> u64) -> Option<usize> {
    const MAX_BATCH: usize = 1 << 20;
    // Bytes grow almost linearly, so a few steps of interpolation mostly suffice.
    const INTERPOLATED: usize = 8;
    let mut low = (1, bytes(1));
    let mut high = (MAX_BATCH, bytes(MAX_BATCH));
    if low.1 > budget {
        return None;
    }
    for step in 0.. {
        if low.0 + 1 >= high.0 {
            break;
        }
        let share =
            u128::from(budget - low.1) * (high.0 - low.0) as u128 / u128::from(high.1.saturating_sub(low.1)).max(1);
        let line = (low.0 as u128 + share).clamp(low.0 as u128 + 1, high.0 as u128 - 1) as usize;
        let middle = if step < INTERPOLATED { line } else { usize::midpoint(low.0, high.0) };
        let needed = bytes(middle);
        if needed <= budget { low = (middle, needed) } else { high = (middle, needed) }
    }
    Some(low.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::kernels::{CandleKernels, Fused};
    use crate::engine::model::Recurrence;
    use crate::train::objective::ObjectiveKind;
    use candle_core::quantized::GgmlDType;

    const KERNELS: Fused = Fused;

    /// A single process in FP16.
    fn inputs(spec: &ModelSpec, shape: [usize; 3]) -> MemoryInputs<'_> {
        let (keep, optimizer) = (Checkpointing::None, OptimizerKind::AdamW);
        let layout = DistributedLayout::default();
        let policy = PrecisionPolicy::FP16;
        MemoryInputs { layout, spec, policy, shape, keep, optimizer, kernels: &KERNELS }
    }

    fn limit(spec: &ModelSpec, available: u64) -> MemoryLimit<'_> {
        MemoryLimit { spec, kernels: &KERNELS, layout: DistributedLayout::default(), available }
    }

    fn needed(config: &Config, spec: &ModelSpec) -> u64 {
        limit(spec, 0)
            .required_bytes(config, config.train.batch_size, config.train.gradient_checkpointing.into())
            .unwrap()
    }

    /// The system used to kill a run if its step fitted into memory but its probe did not.
    #[test]
    fn the_start_check_counts_probes_samples_and_packed_operands() {
        let spec = ModelSpec::named("tiny").unwrap();
        let config = Config::default();
        let mut probed = config.clone();
        probed.telemetry.probe_every = 5;
        let without = needed(&config, &spec);
        let memory = limit(&spec, without);
        memory.check(&config).unwrap();
        let message = memory.check(&probed).unwrap_err().to_string();
        assert!(message.contains("`--set telemetry.probe_every=0`"), "{message}");

        let train = &config.train;
        let shape = [train.batch_size, train.seq_len, train.grad_accum];
        let engine = MemoryInputs { policy: config.dtype, ..inputs(&spec, shape) }.step().unwrap();
        let mut silent = config.clone();
        silent.train.sample_tokens = 0;
        assert!(engine.total() < needed(&silent, &spec) && needed(&silent, &spec) < without);

        silent.train.batch_size = 8;
        let mut rewarded = silent.clone();
        rewarded.objective.kind = ObjectiveKind::Grpo;
        rewarded.train.batch_size = 1;
        assert_eq!((config.dtype, rewarded.objective.num_generations), (PrecisionPolicy::FP16, 8));
        let caches = 32 * sample_bytes(&spec, config.dtype, train.seq_len, 0);
        assert_eq!(needed(&rewarded, &spec) - needed(&silent, &spec), caches + 2 * spec.parameter_count());
    }

    /// Each sequence has them, for any number of tokens.
    #[test]
    fn a_sample_has_the_states_of_recurrences() {
        let model = r#"{"model_type": "lfm2", "full_attn_idxs": [1]}"#;
        let spec = ModelSpec::from_json(model.as_bytes(), "config.json").unwrap();
        let bytes = |tokens| sample_bytes(&spec, PrecisionPolicy::FP16, tokens, 1);
        let layers = (spec.num_layers - spec.attention_layers()) as u64;
        let Some(Recurrence::ShortConv { taps }) = spec.recurrence(0) else { panic!("no convolution") };
        assert_eq!(2 * bytes(1) - bytes(3), layers * (taps * spec.hidden_size * 4) as u64);
        assert_eq!(bytes(0), 0);
    }

    #[test]
    fn a_reference_takes_the_memory_of_a_second_model() {
        let spec = ModelSpec::named("tiny").unwrap();
        let mut config = Config::default();
        config.objective.kind = ObjectiveKind::Grpo;
        config.train.batch_size = 1;
        config.train.seq_len = 16;
        let referred = |config: &Config, spec: &ModelSpec| {
            let mut with_beta = config.clone();
            with_beta.objective.beta = Some(0.1);
            needed(&with_beta, spec) - needed(config, spec)
        };
        let passes = Workspace::evaluation_bytes(&spec, config.dtype, [8, 16], false).unwrap();
        let parameters = spec.parameter_count();
        let model = 2 * parameters + passes;
        assert_eq!(referred(&config, &spec), model);
        let mut frozen = config.clone();
        frozen.train.freeze = Some("h.0-1".into());
        assert_eq!(referred(&frozen, &frozen.with_trained_parts(spec.clone()).unwrap()), model);

        let mut adapters = with_lora(&config);
        let adapted = adapters.with_trained_parts(spec.clone()).unwrap();
        assert_eq!(referred(&adapters, &adapted), 0);
        adapters.objective.beta = Some(0.1);
        let over_base = needed(&adapters, &adapted);
        adapters.objective.reference = Some("other".into());
        assert!(needed(&adapters, &adapted) >= over_base + model);

        // Loading it takes FP32 masters, next to buffers that a GPU has allocated.
        let on_gpu = DistributedLayout { on_gpu: true, ..DistributedLayout::default() };
        let keep = config.train.gradient_checkpointing.into();
        let memory = MemoryLimit { layout: on_gpu, ..limit(&adapted, 0) };
        let on_gpu = |config: &Config| memory.required_bytes(config, 1, keep).unwrap();
        adapters.objective.kind = ObjectiveKind::Dpo;
        adapters.objective.beta = None;
        let other = on_gpu(&adapters);
        adapters.objective.reference = None;
        let passes = Workspace::evaluation_bytes(&spec, config.dtype, [2, 16], true).unwrap();
        assert_eq!(other - on_gpu(&adapters), 6 * parameters + passes);
        assert!(!adapters.objective.loads_reference(&spec), "a full model computes its reference itself");
    }

    #[test]
    fn a_size_that_cannot_be_computed_is_an_error() {
        let mut config = Config::default();
        let spec = ModelSpec::named("tiny").unwrap();
        config.train.seq_len = 1 << 17;
        let memory = MemoryLimit { kernels: &CandleKernels, ..limit(&spec, 1 << 50) };
        let errors = [memory.check(&config).unwrap_err(), memory.fitted(&config).unwrap_err()];
        for error in errors.map(|error| error.to_string()) {
            assert!(error.contains("use a shorter `seq_len`"), "{error}");
        }
    }

    #[test]
    fn smaller_micro_batches_are_counted_with_those_that_the_step_had() {
        let spec = ModelSpec::named("tiny").unwrap();
        let mut config = Config::default();
        config.train.batch_size = 4;
        config.train.grad_accum = 2;
        let mut split = config.clone();
        split.train.batch_size = 1;
        split.train.grad_accum = 8;
        let keep = config.train.gradient_checkpointing.into();
        assert_eq!(limit(&spec, 0).required_bytes(&config, 1, keep).unwrap(), needed(&split, &spec));
    }

    #[test]
    fn a_batch_is_not_split_below_what_its_objective_needs() {
        let mut config = Config::default();
        let spec = ModelSpec::named("tiny").unwrap();
        config.train.batch_size = 4;
        config.train.grad_accum = 3;
        config.train.seq_len = 1024;
        let available = limit(&spec, 0).required_bytes(&config, 1, config.train.gradient_checkpointing.into()).unwrap();
        let batch_of = |config: &Config| {
            let train = limit(&spec, available).fitted(config).unwrap().0.train;
            [train.batch_size, train.grad_accum]
        };
        assert_eq!(batch_of(&config), [1, 12]);
        config.objective.kind = ObjectiveKind::Kto;
        assert_ne!(batch_of(&config)[0], 1);
    }

    /// A GPU has no shard if tensors go through host memory.
    #[test]
    fn shards_on_the_host_take_no_memory_of_a_gpu() {
        let spec = ModelSpec::named("tiny").unwrap();
        let parameters = spec.parameter_count();
        let bytes = |policy, micro_batches, world_size, shards_on_host| {
            let layout = DistributedLayout { world_size, shards_on_host, ..DistributedLayout::default() };
            MemoryInputs { layout, policy, ..inputs(&spec, [1, 16, micro_batches]) }.step().unwrap()
        };
        for (policy, micro_batches, shard) in
            [(PrecisionPolicy::FP16, 4, 16), (PrecisionPolicy::FP16, 1, 14), (PrecisionPolicy::FP32, 4, 12)]
        {
            let [cpu, gpu] =
                [false, true].map(|shards_on_host| bytes(policy, micro_batches, 2, shards_on_host).total());
            assert_eq!(cpu - gpu, shard * parameters / 2, "{policy:?}");
            assert_eq!(bytes(policy, micro_batches, 1, true), bytes(policy, micro_batches, 1, false));
        }
    }

    /// Bytes of the probe of one block: a quantized base is shared, and dequantized to FP32 in a separate buffer; a
    /// dense one is copied unless it is in FP32. Masters in BF16 are upcast.
    #[test]
    fn a_probe_copies_what_is_not_in_fp32() {
        let whole = ModelSpec::named("tiny").unwrap();
        let spec = with_lora(&Config::default()).with_trained_parts(whole.clone()).unwrap();
        let probe =
            |spec: &ModelSpec, policy| MemoryInputs { policy, ..inputs(spec, [1, 16, 1]) }.probe_bytes().unwrap();
        let narrow = PrecisionPolicy { params: Dtype::BF16, ..PrecisionPolicy::BF16 };
        assert_eq!(probe(&whole, narrow) - probe(&whole, PrecisionPolicy::BF16), 4 * whole.parameter_count());

        let dense = probe(&spec, PrecisionPolicy::BF16) - probe(&spec, PrecisionPolicy::FP32);
        assert_eq!(dense, 4 * whole.parameter_count());
        let mut quantized = spec.clone();
        let matrices = spec.frozen_parameters().into_iter().filter(|entry| entry.shape.len() == 2);
        let elements: u64 = matrices.clone().map(|entry| entry.shape.iter().product::<usize>() as u64).sum();
        quantized.quantized = matrices.map(|entry| (entry.name, GgmlDType::Q8_0)).collect();
        let weights = |spec| inputs(spec, [1, 16, 1]).step().unwrap().weights;
        assert_eq!(weights(&spec) - weights(&quantized), 2 * elements - 34 * elements / 32);
        let in_blocks = FrozenBytes::new(&quantized, PrecisionPolicy::FP32, 16);
        let saved = probe(&spec, PrecisionPolicy::BF16) - probe(&quantized, PrecisionPolicy::BF16);
        assert_eq!(saved, dense - in_blocks.dense - in_blocks.buffer);
        assert!(in_blocks.blocks > in_blocks.dense + in_blocks.buffer);
    }

    /// An embedding that is not tied to the head dequantizes only the rows of a micro-batch.
    #[test]
    fn an_embedding_in_blocks_is_looked_up_by_rows() {
        let config = with_lora(&Config::default());
        let tied = ModelSpec { vocab_size: 100_000, ..ModelSpec::named("tiny").unwrap() };
        let buffer = |tied: bool, spec: &ModelSpec| {
            let mut spec = config.with_trained_parts(ModelSpec { tie_word_embeddings: tied, ..spec.clone() }).unwrap();
            let embedding =
                spec.frozen_parameters().into_iter().find(|entry| entry.fused_into.op == ModuleOp::Embedding).unwrap();
            spec.quantized = [(embedding.name, GgmlDType::Q8_0)].into();
            FrozenBytes::new(&spec, PrecisionPolicy::FP32, 16).buffer
        };
        assert_eq!(buffer(true, &tied), 4 * 100_000 * tied.hidden_size as u64);
        assert_eq!(buffer(false, &tied), 4 * 16 * tied.hidden_size as u64);
    }
}
