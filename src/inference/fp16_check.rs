//! Checks whether a model can train in FP16, by measuring every tensor of forward and backward passes on real text.
//!
//! Passes in FP32 measure the activations and gradients without saturation. They determine the units (blocks, or the
//! head) that cannot stay in FP16, and the best loss scale for the others. Passes in FP16 at that scale, with those
//! units in FP32, then verify the result.

use crate::Result;
use crate::data::{Batch, BatchLoader, TokenSource};
use crate::engine::kernels::Kernels;
use crate::engine::kernels::summary::TensorSummary;
use crate::engine::model::{
    Checkpointing, Decoder, ForwardMode, Hook, HookPoint, ModelSpec, ModuleId, Parameters, TensorKind, Workspace,
    candle_dtype,
};
use crate::engine::optim::{Gradients, MasterWeights};
use crate::precision::{Dtype, FloatFormat, PrecisionPolicy, PrecisionUnit};
use candle_core::Tensor;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

const FP16_MAX: f32 = 65504.0;
/// The factor between the largest scaled gradient and [`FP16_MAX`], because the next batch's may be larger.
const HEADROOM: f32 = 2.0;
/// The highest scale considered, the top of `GradScaler`'s usual range.
const MAX_SCALE: f32 = 16_777_216.0;
/// Maximum share of weight gradients that may flush to zero at the best scale.
const MAX_FLUSHED: f64 = 0.01;
const SEED: u64 = 1;

/// The amount of text to measure on.
#[derive(Clone, Copy, Debug)]
pub struct SampleSize {
    /// Number of batches.
    pub batches: usize,
    /// Sequences per batch.
    pub batch_size: usize,
    /// Tokens per sequence.
    pub seq_len: usize,
}

/// The largest magnitude among tensors, and the tensor.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TensorAmax {
    /// The magnitude; NaN if a value is not finite even in FP32.
    pub max_abs: f32,
    /// The layer and its tensor, such as `h.3.mlp.c_fc output`.
    pub tensor: String,
}

/// The figures of a unit: a block, or the head.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct UnitReport {
    /// `h.3`, or `head`.
    pub unit: PrecisionUnit,
    /// The largest activation.
    pub activation: TensorAmax,
    /// The largest unscaled gradient.
    pub gradient: TensorAmax,
    /// Share of its non-zero weight gradients that FP16 flushes to zero at the best scale.
    pub flushed: f64,
    /// Share of them that FP16 stores as subnormals.
    pub subnormal: f64,
}

/// The recommended precision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "verdict")]
pub enum PrecisionAdvice {
    /// FP16 without fallback.
    Fp16,
    /// FP16, with these units in FP32.
    Fp16WithFallback {
        /// The units that overflow, or whose gradients limit the loss scale of all others.
        units: Vec<PrecisionUnit>,
    },
    /// BF16.
    Bf16 {
        /// Why FP16 is not suitable.
        reason: String,
    },
}

/// The result of the check.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fp16Report {
    /// The recommendation.
    #[serde(flatten)]
    pub advice: PrecisionAdvice,
    /// The best loss scale for the units in FP16.
    pub best_scale: f32,
    /// Share of the non-zero weight gradients in FP16 that flush to zero at that scale.
    pub flushed: f64,
    /// By unit, blocks first.
    pub units: Vec<UnitReport>,
    /// Tokens measured.
    pub tokens: usize,
}

#[derive(Default)]
struct UnitStats {
    activation: TensorAmax,
    gradient: TensorAmax,
    weights: TensorSummary,
}

struct RangeHook<'a> {
    spec: &'a ModelSpec,
    kernels: &'a dyn Kernels,
    units: BTreeMap<PrecisionUnit, UnitStats>,
}

impl Hook for RangeHook<'_> {
    fn record(&mut self, HookPoint { layer, kind, .. }: HookPoint, tensor: &Tensor) -> candle_core::Result<()> {
        let weights = matches!(kind, TensorKind::WeightGradient | TensorKind::BiasGradient);
        let found = self.kernels.summarize(tensor, FloatFormat::FP32, weights)?;
        let max_abs = if found.stats.is_finite() { found.stats.max_abs } else { f32::NAN };
        let seen = self.units.entry(layer.unit()).or_default();
        if weights {
            seen.weights.merge(&found);
        }
        let largest = if kind.is_forward() { &mut seen.activation } else { &mut seen.gradient };
        if max_abs.is_nan() || max_abs > largest.max_abs {
            *largest = TensorAmax { max_abs, tensor: name_of(self.spec, layer, kind) };
        }
        Ok(())
    }
}

/// The first tensor that is not finite.
struct FiniteCheckHook<'a> {
    spec: &'a ModelSpec,
    kernels: &'a dyn Kernels,
    found: Option<String>,
}

impl Hook for FiniteCheckHook<'_> {
    fn record(&mut self, HookPoint { layer, kind, .. }: HookPoint, tensor: &Tensor) -> candle_core::Result<()> {
        if self.found.is_none() && !self.kernels.summarize(tensor, FloatFormat::FP32, false)?.stats.is_finite() {
            self.found = Some(name_of(self.spec, layer, kind));
        }
        Ok(())
    }
}

fn name_of(spec: &ModelSpec, layer: ModuleId, kind: TensorKind) -> String {
    format!("{} {}", spec.layer_name(layer), kind.name().replace('_', " "))
}

/// Checks `model` with FP32 `masters` on `tokens`; calls `progress` with the passes done and their total.
pub fn fp16_check(
    model: &Decoder,
    masters: Parameters,
    tokens: TokenSource,
    size: SampleSize,
    mut progress: impl FnMut(usize, usize),
) -> Result<Fp16Report> {
    let SampleSize { batches, batch_size, seq_len } = size;
    let (spec, kernels) = (model.spec(), model.kernels());
    let mut loader = BatchLoader::new(tokens, batch_size, seq_len, SEED)?;
    let batches: Vec<Batch> = (0..batches)
        .map(|_| {
            let mut batch = loader.batch();
            loader.next_batch(&mut batch);
            batch
        })
        .filter(|batch| batch.num_label_tokens > 0)
        .collect();
    loader.check()?;
    let total = 2 * batches.len();
    let mut record = RangeHook { spec, kernels, units: BTreeMap::new() };
    {
        let mut passes = CheckPasses::new(model, PrecisionPolicy::FP32, &masters, (batch_size, seq_len))?;
        for (done, batch) in batches.iter().enumerate() {
            passes.run(&masters, batch, 1.0, &mut record)?;
            progress(done + 1, total);
        }
    }
    let fp32 = fp32_units(&record.units);
    let (mut advice, best_scale, flushed) = recommend(&record.units, &fp32);
    if !matches!(advice, PrecisionAdvice::Bf16 { .. }) {
        // Verify in FP16.
        let policy = PrecisionPolicy::FP16;
        let (masters, mut weights) = MasterWeights::new(masters, policy, kernels)?;
        let mut passes = CheckPasses::new(model, policy, &weights, (batch_size, seq_len))?;
        for &unit in &fp32 {
            passes.workspace.change_dtype(spec, unit, Dtype::F32)?;
            masters.change_dtype(unit, candle_dtype(Dtype::F32), &mut weights, kernels)?;
            for pack in weights.fused_in(unit) {
                passes.grads.change_dtype(pack, Dtype::F32)?;
            }
        }
        let mut non_finite = FiniteCheckHook { spec, kernels, found: None };
        for (done, batch) in batches.iter().enumerate() {
            passes.run(&weights, batch, best_scale, &mut non_finite)?;
            progress(batches.len() + done + 1, total);
        }
        if let Some(tensor) = non_finite.found {
            let reason = format!("in FP16 at loss scale {best_scale} the {tensor} is not finite");
            advice = PrecisionAdvice::Bf16 { reason };
        }
    }
    let shift = best_scale.log2() as i32;
    let units = record.units.into_iter().map(|(unit, seen)| {
        let shares = seen.weights.exponents.shares_at(shift, FloatFormat::FP16);
        let UnitStats { activation, gradient, .. } = seen;
        UnitReport { unit, activation, gradient, flushed: shares.flushed, subnormal: shares.subnormal }
    });
    let tokens = batches.iter().map(|batch| batch.num_label_tokens).sum();
    Ok(Fp16Report { advice, best_scale, flushed, units: units.collect(), tokens })
}

/// Runs forward and backward passes; owns their buffers.
struct CheckPasses<'a> {
    model: &'a Decoder,
    workspace: Workspace,
    grads: Gradients,
}

impl<'a> CheckPasses<'a> {
    fn new(model: &'a Decoder, policy: PrecisionPolicy, like: &Parameters, shape: (usize, usize)) -> Result<Self> {
        let workspace = Workspace::for_training(model.spec(), policy, shape, Checkpointing::PerBlock, &like.device())?;
        Ok(Self { model, workspace, grads: Gradients::new(like, policy, 1)? })
    }

    fn run(&mut self, weights: &Parameters, batch: &Batch, scale: f32, hook: &mut dyn Hook) -> Result<()> {
        let Self { model, workspace, grads } = self;
        let tokens = batch.tokens();
        let mut narrow = None;
        let workspace = workspace.for_shape(batch.shape(), &mut narrow)?;
        let seed = scale / batch.num_label_tokens as f32;
        let grads = grads.micro_batch_grads();
        model.forward(weights, tokens, ForwardMode::Eval, workspace, hook)?;
        model.loss_and_head_gradient(weights, &batch.labels, (seed, None), workspace, grads, hook)?;
        Ok(model.backward(weights, tokens, ForwardMode::Eval, workspace, grads, hook)?)
    }
}

/// The units that cannot stay in FP16: units whose activations overflow, and, while the loss scale flushes too much of
/// the others, the one whose gradient limits it.
fn fp32_units(units: &BTreeMap<PrecisionUnit, UnitStats>) -> BTreeSet<PrecisionUnit> {
    let overflows = |seen: &UnitStats| seen.activation.max_abs.is_nan() || seen.activation.max_abs > FP16_MAX;
    let mut fp32: BTreeSet<PrecisionUnit> =
        units.iter().filter(|(_, seen)| overflows(seen)).map(|(unit, _)| *unit).collect();
    while 2 * fp32.len() < units.len() && best_scale(units, &fp32).1 > MAX_FLUSHED {
        let rest = units.iter().filter(|(unit, _)| !fp32.contains(unit));
        let Some((unit, _)) = rest.max_by(|a, b| a.1.gradient.max_abs.total_cmp(&b.1.gradient.max_abs)) else { break };
        fp32.insert(*unit);
    }
    fp32
}

/// The largest power of two that leaves headroom for the gradients of the units in FP16, and the share of their weight
/// gradients that flush to zero at it.
fn best_scale(units: &BTreeMap<PrecisionUnit, UnitStats>, fp32: &BTreeSet<PrecisionUnit>) -> (f32, f64) {
    let kept = || units.iter().filter(|(unit, _)| !fp32.contains(unit)).map(|(_, seen)| seen);
    let largest = kept().map(|seen| seen.gradient.max_abs).fold(0.0, f32::max);
    let scale = (FP16_MAX / HEADROOM / largest.max(f32::MIN_POSITIVE)).min(MAX_SCALE).log2().floor().exp2();
    let mut weights = TensorSummary::default();
    for seen in kept() {
        weights.merge(&seen.weights);
    }
    (scale.max(1.0), weights.exponents.shares_at(scale.log2() as i32, FloatFormat::FP16).flushed)
}

/// The precision to recommend, with the scale and the share of [`best_scale`].
fn recommend(
    units: &BTreeMap<PrecisionUnit, UnitStats>,
    fp32: &BTreeSet<PrecisionUnit>,
) -> (PrecisionAdvice, f32, f64) {
    let (scale, flushed) = best_scale(units, fp32);
    let is_nan = |seen: &UnitStats| seen.activation.max_abs.is_nan() || seen.gradient.max_abs.is_nan();
    let problem = if let Some((unit, _)) = units.iter().find(|(_, seen)| is_nan(seen)) {
        Some(format!("{unit} is not finite even in FP32; no dtype will help"))
    } else if 2 * fp32.len() > units.len() {
        Some(format!("{} of {} units overflow FP16 or limit its loss scale", fp32.len(), units.len()))
    } else {
        let text = || format!("{:.1} % of the weight gradients flush to zero at the best loss scale", 100.0 * flushed);
        (flushed > MAX_FLUSHED).then(text)
    };
    let advice = match problem {
        Some(reason) => PrecisionAdvice::Bf16 { reason },
        None if fp32.is_empty() => PrecisionAdvice::Fp16,
        None => PrecisionAdvice::Fp16WithFallback { units: fp32.iter().copied().collect() },
    };
    (advice, scale, flushed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::precision::{ExponentHistogram, TensorStats};

    /// A unit with this largest activation and gradient, and weight gradients around `2^binade`.
    fn seen(activation: f32, gradient: f32, binade: i32) -> UnitStats {
        let exponents = ExponentHistogram::from_counts([(binade, 1000)]);
        let of = |max_abs| TensorAmax { max_abs, tensor: String::new() };
        let weights = TensorSummary { stats: TensorStats::default(), exponents };
        UnitStats { activation: of(activation), gradient: of(gradient), weights }
    }

    fn verdict(units: [UnitStats; 4]) -> (PrecisionAdvice, f32) {
        let units: BTreeMap<PrecisionUnit, UnitStats> =
            units.into_iter().enumerate().map(|(block, seen)| (PrecisionUnit::Block(block), seen)).collect();
        let (advice, scale, _) = recommend(&units, &fp32_units(&units));
        (advice, scale)
    }

    #[test]
    fn gradients_with_a_common_range_need_no_fallback() {
        let units = [0, 1, 2, 3].map(|_| seen(10.0, 1.0, -12));
        assert_eq!(verdict(units), (PrecisionAdvice::Fp16, 16384.0));
    }

    #[test]
    fn a_unit_that_limits_the_scale_gets_a_wider_type() {
        // At 2^4, which suits the second unit, 2^-32 of the others flushes to zero; at 2^14 it does not.
        let units = [seen(10.0, 1.0, -32), seen(10.0, 1024.0, -8), seen(10.0, 1.0, -32), seen(10.0, 1.0, -32)];
        assert_eq!(
            verdict(units),
            (PrecisionAdvice::Fp16WithFallback { units: vec![PrecisionUnit::Block(1)] }, 16384.0)
        );
    }

    #[test]
    fn too_wide_a_range_everywhere_needs_bf16() {
        let units = [0, 1, 2, 3].map(|_| seen(10.0, 1024.0, -40));
        assert!(matches!(verdict(units).0, PrecisionAdvice::Bf16 { reason } if reason.contains("flush to zero")));
        let units = [0, 1, 2, 3].map(|block| seen(if block > 0 { 1e6 } else { 1.0 }, 1.0, -12));
        assert!(matches!(verdict(units).0, PrecisionAdvice::Bf16 { reason } if reason.starts_with("3 of 4 units")));
        let units = [0, 1, 2, 3].map(|block| seen(if block > 2 { f32::NAN } else { 1.0 }, 1.0, -12));
        assert!(
            matches!(verdict(units).0, PrecisionAdvice::Bf16 { reason } if reason.starts_with("h.3 is not finite"))
        );
    }
}
