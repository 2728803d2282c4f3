//! AdamW over FP32 masters: the update of the mixed-precision recipe. To save memory, also with 8-bit moments, and over
//! BF16 weights with stochastic rounding. To measure the effect of masters, also over 16-bit weights without them.

use crate::engine::collective::{ProcessGroup, Shards, gather};
use crate::engine::kernels::adamw::{AdamWStep, AdamWTensor};
use crate::engine::kernels::blockwise::{BLOCK_SIZE, BlockwiseQuantized, MIN_QUANTIZED_ELEMENTS, Moment};
use crate::engine::kernels::summary::TASK_ELEMENTS;
use crate::engine::kernels::{Fused, Kernels, op, stochastic, view};
use crate::engine::model::{ParamSpec, Parameters, candle_dtype};
use crate::precision::{Dtype, PrecisionPolicy, PrecisionUnit, UpdateCounts};
use candle_core::{DType, Device, Result, Tensor};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::Arc;

/// How Adam's moments are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// In FP32.
    #[default]
    AdamW,
    /// In 8 bits, with a magnitude for each block of 256.
    AdamW8bit,
}

/// An optimizer: its settings, how it stores moments, and how it rounds weights without masters.
#[derive(Clone, Copy, Debug)]
pub struct OptimizerConfig {
    /// AdamW's settings.
    pub adamw: AdamWConfig,
    /// How moments are stored.
    pub kind: OptimizerKind,
    /// The seed of stochastic rounding; `None` rounds to nearest.
    pub rounding_seed: Option<u64>,
}

/// AdamW's settings.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdamWConfig {
    /// Decay rates of the two moments.
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay of parameters of two or more dimensions; biases and layer norms have none.
    pub weight_decay: f64,
}

/// Adam's moments.
#[derive(Debug)]
pub struct AdamW {
    /// Its settings.
    pub config: AdamWConfig,
    rounding_seed: Option<u64>,
    /// First moments in FP32.
    pub exp_avg: Parameters,
    /// Second moments in FP32.
    pub exp_avg_sq: Parameters,
    /// Both moments of the other parameters, in 8 bits.
    pub quantized_moments: Vec<QuantizedMoments>,
    /// The storage of each parameter's moments, in order.
    storage: Vec<MomentStorage>,
    /// FP32 values of the current master, if some are not FP32.
    upcast_copy: Option<Tensor>,
}

/// The moments of a parameter in 8 bits.
#[derive(Debug)]
pub struct QuantizedMoments {
    /// The parameter's name.
    pub name: String,
    /// Elements of the parameter.
    pub elements: usize,
    /// The elements whose moments this process holds; shards are cut at block boundaries.
    pub range: Range<usize>,
    /// First and second moment.
    pub moments: [BlockwiseQuantized; 2],
}

/// The index of a parameter's moments.
#[derive(Clone, Copy, Debug)]
enum MomentStorage {
    Fp32(usize),
    Int8(usize),
}

// Shards are cut at the blocks of the gradient statistics, so a process never has a part of a block.
const _: () = assert!(TASK_ELEMENTS.is_multiple_of(BLOCK_SIZE));

impl AdamW {
    /// Zero moments for parameters laid out as `masters`.
    pub fn new(config: OptimizerConfig, masters: &Parameters) -> Result<Self> {
        let OptimizerConfig { adamw, kind, rounding_seed } = config;
        let (mut exact, mut quantized, mut storage) = (Vec::new(), Vec::new(), Vec::new());
        for (index, entry) in masters.layout().iter().enumerate() {
            let elements: usize = entry.shape.iter().product();
            if kind == OptimizerKind::AdamW8bit && elements >= MIN_QUANTIZED_ELEMENTS {
                storage.push(MomentStorage::Int8(quantized.len()));
                let range = masters.range(index);
                let zeros = |moment| BlockwiseQuantized::zeros(range.len(), moment, &masters.device());
                let moments = [zeros(Moment::First)?, zeros(Moment::Second)?];
                quantized.push(QuantizedMoments { name: entry.name.clone(), elements, range, moments });
            } else {
                storage.push(MomentStorage::Fp32(exact.len()));
                exact.push(index);
            }
        }
        let moments = || match kind {
            OptimizerKind::AdamW => masters.zeros_like(DType::F32),
            OptimizerKind::AdamW8bit => masters.zeros_for(&exact, DType::F32),
        };
        let narrow = masters.tensors().iter().filter(|master| master.dtype() != DType::F32);
        let widest = narrow.map(Tensor::elem_count).max();
        let upcast_copy = widest.map(|elements| view::zeros(&[elements], DType::F32, &masters.device())).transpose()?;
        Ok(Self {
            config: adamw,
            rounding_seed,
            exp_avg: moments()?,
            exp_avg_sq: moments()?,
            quantized_moments: quantized,
            storage,
            upcast_copy,
        })
    }

    /// Bytes that [`AdamW::new`] allocates for parameters with these element counts.
    pub fn bytes(kind: OptimizerKind, policy: PrecisionPolicy, tensors: impl IntoIterator<Item = u64>) -> u64 {
        let (mut bytes, mut widest) = (0, 0);
        for elements in tensors {
            widest = widest.max(elements);
            if kind == OptimizerKind::AdamW8bit && elements >= MIN_QUANTIZED_ELEMENTS as u64 {
                bytes += 2 * BlockwiseQuantized::bytes(elements);
            } else {
                bytes += 2 * elements * Dtype::F32.size_in_bytes() as u64;
            }
        }
        let upcast_copy = if policy.params == Dtype::F32 { 0 } else { widest };
        bytes + upcast_copy * Dtype::F32.size_in_bytes() as u64
    }

    /// Both moments of a parameter, and their scales if they have 8 bits.
    fn moments(&self, index: usize) -> ([&Tensor; 2], Option<[op::MomentScales<'_>; 2]>) {
        match self.storage[index] {
            MomentStorage::Fp32(at) => ([&self.exp_avg[at], &self.exp_avg_sq[at]], None),
            MomentStorage::Int8(at) => {
                let [m, v] = &self.quantized_moments[at].moments;
                ([&m.codes, &v.codes], Some([m.scales(), v.scales()]))
            }
        }
    }

    /// Updates `masters` from `grads · grad_factor`, and rounds them into the working copy `weights`. Appends to
    /// `counts`, for each parameter, the updates that a 16-bit copy shows.
    pub fn step(
        &mut self,
        kernels: &dyn Kernels,
        grads: &Parameters,
        Update { lr, grad_factor, updates }: Update,
        masters: &mut MasterWeights,
        weights: &Parameters,
        counts: Option<&mut Vec<UpdateCounts>>,
    ) -> Result<()> {
        let t = i32::try_from(updates + 1).unwrap_or(i32::MAX);
        let AdamWConfig { betas, eps, weight_decay } = self.config;
        let bias_corrections = betas.map(|beta| (1.0 - beta.powi(t)) as f32);
        let step = AdamWStep { lr: lr as f32, betas, eps: eps as f32, bias_corrections, grad_factor };
        let mut counts = counts.map(|counts| {
            let first = counts.len();
            counts.resize(first + self.storage.len(), UpdateCounts::default());
            counts[first..].iter_mut()
        });
        // FP32 masters are updated at once, which on a GPU is one launch.
        let mut together = Vec::with_capacity(self.storage.len());
        for (i, entry) in grads.layout().iter().enumerate() {
            let (master, weight) = (&masters.parameters()[i], &weights[i]);
            // FP32 copies, which some processes have of wide layers, show every update.
            let counts = counts.as_mut().and_then(Iterator::next).filter(|_| weight.dtype() != DType::F32);
            if master.elem_count() == 0 {
                // Other processes have its elements.
                continue;
            }
            let ([exp_avg, exp_avg_sq], scales) = self.moments(i);
            let weight = (!view::share_storage(master, weight)).then_some(weight);
            let weight_decay = if entry.decay { weight_decay as f32 } else { 0.0 };
            let grad = &grads[i];
            let tensor = AdamWTensor { grad, master, exp_avg, exp_avg_sq, scales, weight, weight_decay, counts };
            let Some(upcast_copy) = self.upcast_copy.as_ref().filter(|_| master.dtype() != DType::F32) else {
                together.push(tensor);
                continue;
            };
            let updated = &upcast_copy.narrow(0, 0, master.elem_count())?.reshape(master.shape())?;
            kernels.copy(master, updated)?;
            let rounded = self.rounding_seed.is_none().then_some(master);
            let tensor = AdamWTensor { master: updated, weight: rounded, ..tensor };
            op::AdamW { step, tensors: vec![tensor] }.run(kernels)?;
            if let Some(seed) = self.rounding_seed {
                let first = masters.parameters().range(i).start;
                stochastic::round(updated, master, first, seed, &entry.name, updates)?;
            }
            if let Some(weight) = weight {
                kernels.copy(master, weight)?;
            }
        }
        op::AdamW { step, tensors: together }.run(kernels)
    }
}

/// The numbers of one update of all parameters.
#[derive(Clone, Copy, Debug)]
pub struct Update {
    /// Learning rate.
    pub lr: f64,
    /// Multiplies the gradients.
    pub grad_factor: f32,
    /// The number of updates before this one.
    pub updates: u64,
}

/// The weights that updates accumulate in: FP32, with a working copy that is rounded to the compute type; or weights of
/// the compute type, without a separate working copy.
#[derive(Debug)]
pub struct MasterWeights {
    parameters: Parameters,
}

impl MasterWeights {
    /// Takes FP32 `parameters`, whose base stays with the working copy, and rounds a working copy of the policy's
    /// compute type from them. If masters and working copy have the same type, they share their storage.
    pub fn new(parameters: Parameters, policy: PrecisionPolicy, kernels: &dyn Kernels) -> Result<(Self, Parameters)> {
        let base = parameters.base().cloned();
        let mut parameters = parameters.with_base(None);
        if policy.params != Dtype::F32 {
            parameters = parameters.to_dtype(candle_dtype(policy.params), kernels)?;
        }
        let shared = policy.compute == policy.params;
        let compute = candle_dtype(policy.compute);
        let weights = if shared { parameters.clone() } else { parameters.to_dtype(compute, kernels)? };
        Ok((Self { parameters }, weights.with_base(base)))
    }

    /// Like [`Self::new`], but keeps only the shard of this process in `group`. `fill` writes FP32 values. If there are
    /// several processes, it receives one of `entries` at a time, so no process ever has all masters.
    pub fn from_shard_fn(
        entries: &[ParamSpec],
        policy: PrecisionPolicy,
        device: &Device,
        group: &dyn ProcessGroup,
        kernels: &dyn Kernels,
        mut fill: impl FnMut(&Parameters) -> crate::Result<()>,
    ) -> crate::Result<(Self, Parameters)> {
        if group.world_size() == 1 {
            let parameters = Parameters::zeros(entries, DType::F32, device)?;
            fill(&parameters)?;
            return Ok(Self::new(parameters, policy, kernels)?);
        }
        let weights = Parameters::zeros(entries, candle_dtype(policy.compute), device)?;
        let mut parameters = weights.shard(&shards(&weights, group), group.rank())?;
        if !is_part_of_weights(&parameters, candle_dtype(policy.params)) {
            parameters = parameters.zeros_like(candle_dtype(policy.params))?;
        }
        for (index, entry) in weights.layout().iter().enumerate() {
            let one = Parameters::zeros(std::slice::from_ref(entry), DType::F32, device)?;
            fill(&one)?;
            kernels.copy(&one[0], &weights[index])?;
            let range = parameters.range(index);
            if !range.is_empty() && !view::share_storage(&parameters[index], &weights[index]) {
                view::copy(&view::host_range(&one[0], range)?, &parameters[index])?;
            }
        }
        Ok((Self { parameters }, weights))
    }

    /// Keeps the shard of this process in `group`; of a single process, all. If masters are their own working copy, the
    /// shard is a part of `weights`, which every process has as a whole.
    pub fn shard(self, group: &dyn ProcessGroup, weights: &Parameters) -> Result<Self> {
        if group.world_size() == 1 {
            return Ok(self);
        }
        let shards = shards(weights, group);
        let part = self.parameters.shard(&shards, group.rank())?;
        if is_part_of_weights(&weights.shard(&shards, group.rank())?, self.dtype()) {
            return Ok(Self { parameters: part });
        }
        let parameters = part.zeros_like(self.dtype())?;
        for (part, own) in part.tensors().iter().zip(parameters.tensors()).filter(|(part, _)| part.elem_count() > 0) {
            view::copy(&view::host_range(part, 0..part.elem_count())?, own)?;
        }
        Ok(Self { parameters })
    }

    /// The tensors that updates are rounded into: the working copy, or the shard of process `rank`. If the weights are
    /// on a GPU and the shard on the CPU, it is zeros, which the masters then overwrite.
    pub fn compute_copy_of_shard(&self, weights: &Parameters, rank: usize) -> Result<Parameters> {
        let Some(shards) = self.parameters.shards() else { return Ok(weights.clone()) };
        let part = weights.shard(shards, rank)?;
        if weights.device().is_cpu() || !shards.on_host { Ok(part) } else { part.zeros_of_shard(Tensor::dtype) }
    }

    /// The kernels that update them. Shards may be on the CPU even if `kernels`, those of the passes, are a GPU's.
    pub fn kernels<'a>(&self, kernels: &'a dyn Kernels) -> &'a dyn Kernels {
        if self.parameters.shards().is_some_and(|shards| shards.on_host) { &Fused } else { kernels }
    }

    /// FP32, or the compute type.
    pub fn dtype(&self) -> DType {
        self.parameters.tensors().first().map_or(DType::F32, Tensor::dtype)
    }

    /// The bytes of masters and working copy of `parameters` parameters in each of `world_size` processes.
    pub fn bytes(parameters: u64, policy: PrecisionPolicy, world_size: usize) -> (u64, u64) {
        let masters = parameters * policy.params.size_in_bytes() as u64;
        if policy.compute == policy.params {
            return (masters, 0);
        }
        (masters.div_ceil(world_size as u64), parameters * policy.compute.size_in_bytes() as u64)
    }

    /// The tensors.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// Replaces the working copy of `unit` in `weights` by one with a different dtype; in FP32 it is the masters
    /// themselves.
    pub fn change_dtype(
        &self,
        unit: PrecisionUnit,
        compute: DType,
        weights: &mut Parameters,
        kernels: &dyn Kernels,
    ) -> Result<()> {
        for index in weights.fused_in(unit) {
            let fused = weights.fused_at(index);
            let zeros = || view::zeros(fused.dims(), compute, fused.device());
            let weight = if self.parameters.shards().is_some() {
                // The values follow when all processes have rounded theirs.
                zeros()?
            } else if compute == DType::F32 {
                self.parameters.fused_at(index).clone()
            } else {
                let weight = zeros()?;
                kernels.copy(self.parameters.fused_at(index), &weight)?;
                weight
            };
            weights.replace_fused(index, weight)?;
        }
        Ok(())
    }

    /// Rounds the masters of all processes into `weights`, the working copy of each.
    pub fn copy_to_weights(
        &self,
        weights: &Parameters,
        kernels: &dyn Kernels,
        group: &dyn ProcessGroup,
    ) -> crate::Result<()> {
        let counterpart = self.compute_copy_of_shard(weights, group.rank())?;
        copy_all(&self.parameters, &counterpart, self.kernels(kernels))?;
        gather::all_gather(weights, &counterpart, group)
    }
}

pub(super) fn shards(weights: &Parameters, group: &dyn ProcessGroup) -> Arc<Shards> {
    let entries = weights.layout().iter().zip(weights.tensors());
    let parameters = entries.map(|(entry, tensor)| (entry.layer.unit(), tensor.elem_count()));
    let mut shards = Shards::new(parameters, group.world_size());
    shards.on_host = group.gpus().is_none();
    Arc::new(shards)
}

/// Whether masters of this type are `part`, a shard of the working copy: if both have the same type, on the same
/// device.
fn is_part_of_weights(part: &Parameters, masters: DType) -> bool {
    let on_host = part.shards().is_some_and(|shards| shards.on_host);
    (part.device().is_cpu() || !on_host) && part.tensors().iter().all(|weight| weight.dtype() == masters)
}

/// Copies each tensor to the target at the same index, unless both are one tensor or have no elements.
fn copy_all(from: &Parameters, to: &Parameters, kernels: &dyn Kernels) -> Result<()> {
    let pairs = from.tensors().iter().zip(to.tensors()).filter(|(from, _)| from.elem_count() > 0);
    let mut pairs = pairs.filter(|(from, to)| !view::share_storage(from, to));
    pairs.try_for_each(|(from, to)| kernels.copy(from, to))
}
