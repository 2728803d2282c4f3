//! Checks whether a model can train in FP16, by measuring every tensor of forward and backward passes on real text.
//!
//! Passes in FP32 measure the activations and gradients without saturation. They determine the units (blocks, or the
//! head) that cannot stay in FP16, and the best loss scale for the others. Passes in FP16 at that scale, with those
//! units in FP32, then verify the result.

use crate::Result;
use crate::data::{Batch, BatchLoader, TokenSource};
use crate::engine::collective::SingleProcess;
use crate::engine::kernels::Kernels;
use crate::engine::kernels::survey::TensorSurvey;
use crate::engine::model::{
    Checkpointing, Decoder, ForwardMode, Hook, HookPoint, ModelSpec, ModuleId, Parameters, TensorKind, Workspace,
    candle_dtype,
};
use crate::engine::optim::{Gradients, MasterWeights};
use crate::precision::{Dtype, FloatFormat, PrecisionPolicy, PrecisionUnit};
use candle_core::Tensor;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// FP16's largest value.
const TOP: f32 = 65504.0;
/// The factor between the largest scaled gradient and [`TOP`], because the next batch's may be larger.
const ROOM: f32 = 2.0;
/// The highest scale considered, the top of `GradScaler`'s usual range.
const HIGHEST_SCALE: f32 = 16_777_216.0;
/// Maximum share of weight gradients that may flush to zero at the best scale.
const MOST_FLUSHED: f64 = 0.01;
const SEED: u64 = 1;

/// The amount of text to measure on.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Number of batches.
    pub batches: usize,
    /// Sequences per batch.
    pub batch_size: usize,
    /// Tokens per sequence.
    pub seq_len: usize,
}

/// The largest magnitude among tensors, and the tensor.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Largest {
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
    pub activation: Largest,
    /// The largest unscaled gradient.
    pub gradient: Largest,
    /// Share of its non-zero weight gradients that FP16 flushes to zero at the best scale.
    pub flushed: f64,
    /// Share of them that FP16 stores as subnormals.
    pub subnormal: f64,
}

/// The recommended precision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "verdict")]
pub enum Verdict {
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
    pub verdict: Verdict,
    /// The best loss scale for the units in FP16.
    pub best_scale: f32,
    /// Share of the non-zero weight gradients in FP16 that flush to zero at that scale.
    pub flushed: f64,
    /// By unit, blocks first.
    pub units: Vec<UnitReport>,
    /// Tokens measured.
    pub tokens: usize,
}

/// The measurements of a unit.
#[derive(Default)]
struct Measured {
    activation: Largest,
    gradient: Largest,
    weights: TensorSurvey,
}

struct Record<'a> {
    spec: &'a ModelSpec,
    kernels: &'a dyn Kernels,
    units: BTreeMap<PrecisionUnit, Measured>,
}

impl Hook for Record<'_> {
    fn record(&mut self, HookPoint { layer, kind: part, .. }: HookPoint, tensor: &Tensor) -> candle_core::Result<()> {
        let weights = matches!(part, TensorKind::WeightGradient | TensorKind::BiasGradient);
        let found = self.kernels.survey(tensor, FloatFormat::FP32, weights)?;
        let max_abs = if found.stats.is_finite() { found.stats.max_abs } else { f32::NAN };
        let seen = self.units.entry(layer.unit()).or_default();
        if weights {
            seen.weights.merge(&found);
        }
        let largest = if part.is_forward() { &mut seen.activation } else { &mut seen.gradient };
        if max_abs.is_nan() || max_abs > largest.max_abs {
            *largest = Largest { max_abs, tensor: name_of(self.spec, layer, part) };
        }
        Ok(())
    }
}

/// The first tensor that is not finite.
struct FirstBroken<'a> {
    spec: &'a ModelSpec,
    kernels: &'a dyn Kernels,
    found: Option<String>,
}

impl Hook for FirstBroken<'_> {
    fn record(&mut self, HookPoint { layer, kind: part, .. }: HookPoint, tensor: &Tensor) -> candle_core::Result<()> {
        if self.found.is_none() && !self.kernels.survey(tensor, FloatFormat::FP32, false)?.stats.is_finite() {
            self.found = Some(name_of(self.spec, layer, part));
        }
        Ok(())
    }
}

fn name_of(spec: &ModelSpec, layer: ModuleId, part: TensorKind) -> String {
    format!("{} {}", spec.layer_name(layer), part.name().replace('_', " "))
}

/// Checks `model` with FP32 `masters` on `tokens`; calls `progress` with the passes done and their total.
pub fn fp16_check(
    model: &Decoder,
    masters: Parameters,
    tokens: TokenSource,
    extent: Extent,
    mut progress: impl FnMut(usize, usize),
) -> Result<Fp16Report> {
    let Extent { batches, batch_size, seq_len } = extent;
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
    let total = 2 * batches.len();
    let mut record = Record { spec, kernels, units: BTreeMap::new() };
    {
        let mut passes = Passes::new(model, PrecisionPolicy::FP32, &masters, (batch_size, seq_len))?;
        for (done, batch) in batches.iter().enumerate() {
            passes.run(&masters, batch, 1.0, &mut record)?;
            progress(done + 1, total);
        }
    }
    let wide = wide_units(&record.units);
    let (best_scale, flushed) = best_scale(&record.units, &wide);
    let mut verdict = judge(&record.units, &wide, flushed);
    if !matches!(verdict, Verdict::Bf16 { .. }) {
        // Verify in FP16.
        let policy = PrecisionPolicy::FP16;
        let (masters, mut weights) = MasterWeights::new(masters, policy, kernels)?;
        let mut passes = Passes::new(model, policy, &weights, (batch_size, seq_len))?;
        for &unit in &wide {
            passes.workspace.retype(spec, unit, Dtype::F32)?;
            for pack in weights.fused_in(unit) {
                masters.retype(pack, candle_dtype(Dtype::F32), &mut weights, kernels)?;
                passes.grads.retype(pack, Dtype::F32)?;
            }
        }
        let mut broken = FirstBroken { spec, kernels, found: None };
        for (done, batch) in batches.iter().enumerate() {
            passes.run(&weights, batch, best_scale, &mut broken)?;
            progress(batches.len() + done + 1, total);
        }
        if let Some(tensor) = broken.found {
            let reason = format!("in FP16 at loss scale {best_scale} the {tensor} is not finite");
            verdict = Verdict::Bf16 { reason };
        }
    }
    let shift = best_scale.log2() as i32;
    let units = record.units.into_iter().map(|(unit, seen)| {
        let shares = seen.weights.exponents.shares_at(shift, FloatFormat::FP16);
        let Measured { activation, gradient, .. } = seen;
        UnitReport { unit, activation, gradient, flushed: shares.flushed, subnormal: shares.subnormal }
    });
    let tokens = batches.iter().map(|batch| batch.num_label_tokens).sum();
    Ok(Fp16Report { verdict, best_scale, flushed, units: units.collect(), tokens })
}

/// Runs forward and backward passes; owns their buffers.
struct Passes<'a> {
    model: &'a Decoder,
    workspace: Workspace,
    grads: Gradients,
}

impl<'a> Passes<'a> {
    fn new(model: &'a Decoder, policy: PrecisionPolicy, like: &Parameters, shape: (usize, usize)) -> Result<Self> {
        let workspace = Workspace::for_training(model.spec(), policy, shape, Checkpointing::PerBlock, &like.device())?;
        Ok(Self { model, workspace, grads: Gradients::new(like, policy, 1, &SingleProcess)? })
    }

    fn run(&mut self, weights: &Parameters, batch: &Batch, scale: f32, hook: &mut dyn Hook) -> Result<()> {
        let Self { model, workspace, grads } = self;
        let (tokens, mut narrow) = (batch.tokens(), None);
        let workspace = workspace.for_seq_len(batch.seq_len, &mut narrow)?;
        let (seed, grads) = (scale / batch.num_label_tokens as f32, grads.micro_batch());
        model.forward(weights, tokens, ForwardMode::Eval, workspace, hook)?;
        model.loss_and_head_gradient(weights, &batch.labels, seed, workspace, grads, hook)?;
        Ok(model.backward(weights, tokens, ForwardMode::Eval, workspace, grads, hook)?)
    }
}

/// The units that cannot stay in FP16: units whose activations overflow, and, while the loss scale flushes too much of
/// the others, the one whose gradient limits it.
fn wide_units(units: &BTreeMap<PrecisionUnit, Measured>) -> BTreeSet<PrecisionUnit> {
    let overflows = |seen: &Measured| seen.activation.max_abs.is_nan() || seen.activation.max_abs > TOP;
    let mut wide: BTreeSet<PrecisionUnit> =
        units.iter().filter(|(_, seen)| overflows(seen)).map(|(unit, _)| *unit).collect();
    while 2 * wide.len() < units.len() && best_scale(units, &wide).1 > MOST_FLUSHED {
        let rest = units.iter().filter(|(unit, _)| !wide.contains(unit));
        let Some((unit, _)) = rest.max_by(|a, b| a.1.gradient.max_abs.total_cmp(&b.1.gradient.max_abs)) else { break };
        wide.insert(*unit);
    }
    wide
}

/// The largest power of two that leaves headroom for the gradients of the units in FP16, and the share of their weight
/// gradients that flush to zero at it.
fn best_scale(units: &BTreeMap<PrecisionUnit, Measured>, wide: &BTreeSet<PrecisionUnit>) -> (f32, f64) {
    let kept = || units.iter().filter(|(unit, _)| !wide.contains(unit)).map(|(_, seen)| seen);
    let largest = kept().map(|seen| seen.gradient.max_abs).fold(0.0, f32::max);
    let scale = (TOP / ROOM / largest.max(f32::MIN_POSITIVE)).min(HIGHEST_SCALE).log2().floor().exp2();
    let mut weights = TensorSurvey::default();
    for seen in kept() {
        weights.merge(&seen.weights);
    }
    (scale.max(1.0), weights.exponents.shares_at(scale.log2() as i32, FloatFormat::FP16).flushed)
}

fn judge(units: &BTreeMap<PrecisionUnit, Measured>, wide: &BTreeSet<PrecisionUnit>, flushed: f64) -> Verdict {
    if let Some((unit, _)) =
        units.iter().find(|(_, seen)| seen.activation.max_abs.is_nan() || seen.gradient.max_abs.is_nan())
    {
        return Verdict::Bf16 { reason: format!("{unit} is not finite even in FP32; no type will help") };
    }
    if 2 * wide.len() > units.len() {
        let reason = format!("{} of {} units overflow FP16 or limit its loss scale", wide.len(), units.len());
        return Verdict::Bf16 { reason };
    }
    if flushed > MOST_FLUSHED {
        let reason = format!("{:.1} % of the weight gradients flush to zero at the best loss scale", 100.0 * flushed);
        return Verdict::Bf16 { reason };
    }
    if wide.is_empty() { Verdict::Fp16 } else { Verdict::Fp16WithFallback { units: wide.iter().copied().collect() } }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::precision::{ExponentHistogram, TensorStats};

    /// A unit with this largest activation and gradient, and weight gradients around `2^binade`.
    fn seen(activation: f32, gradient: f32, binade: i32) -> Measured {
        let exponents = ExponentHistogram::from_counts([(binade, 1000)]);
        let of = |max_abs| Largest { max_abs, tensor: String::new() };
        let weights = TensorSurvey { stats: TensorStats::default(), exponents };
        Measured { activation: of(activation), gradient: of(gradient), weights }
    }

    fn verdict(units: [Measured; 4]) -> (Verdict, f32) {
        let units: BTreeMap<PrecisionUnit, Measured> =
            units.into_iter().enumerate().map(|(block, seen)| (PrecisionUnit::Block(block), seen)).collect();
        let wide = wide_units(&units);
        let (scale, flushed) = best_scale(&units, &wide);
        (judge(&units, &wide, flushed), scale)
    }

    #[test]
    fn gradients_with_a_common_range_need_no_fallback() {
        let units = [0, 1, 2, 3].map(|_| seen(10.0, 1.0, -12));
        assert_eq!(verdict(units), (Verdict::Fp16, 16384.0));
    }

    #[test]
    fn a_unit_that_limits_the_scale_gets_a_wider_type() {
        // At 2^4, which suits the second unit, 2^-32 of the others flushes to zero; at 2^14 it does not.
        let units = [seen(10.0, 1.0, -32), seen(10.0, 1024.0, -8), seen(10.0, 1.0, -32), seen(10.0, 1.0, -32)];
        assert_eq!(verdict(units), (Verdict::Fp16WithFallback { units: vec![PrecisionUnit::Block(1)] }, 16384.0));
    }

    #[test]
    fn too_wide_a_range_everywhere_needs_bf16() {
        let units = [0, 1, 2, 3].map(|_| seen(10.0, 1024.0, -40));
        assert!(matches!(verdict(units).0, Verdict::Bf16 { reason } if reason.contains("flush to zero")));
        let units = [0, 1, 2, 3].map(|block| seen(if block > 0 { 1e6 } else { 1.0 }, 1.0, -12));
        assert!(matches!(verdict(units).0, Verdict::Bf16 { reason } if reason.starts_with("3 of 4 units")));
        let units = [0, 1, 2, 3].map(|block| seen(if block > 2 { f32::NAN } else { 1.0 }, 1.0, -12));
        assert!(matches!(verdict(units).0, Verdict::Bf16 { reason } if reason.starts_with("h.3 is not finite")));
    }
}
