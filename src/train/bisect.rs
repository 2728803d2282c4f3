//! Bisection of a step's rounding error: the tensors that cost accuracy in 16 bits, and the layers to keep in FP32.
//!
//! The step is computed in FP32, except that chosen tensors are rounded to the 16-bit type as soon as they are
//! computed. The kernels compute in FP32 and round when they store, so these are the values of a step that stores those
//! tensors in 16 bits.

use crate::data::Batch;
use crate::engine::kernels::Kernels;
use crate::engine::kernels::view::{read, to_host, zeros};
use crate::engine::model::{
    Checkpointing, Hook, HookPoint, ModuleOp, NormRole, Parameters, TensorKind, Workspace, candle_dtype,
};
use crate::engine::optim::Gradients;
use crate::precision::{Dtype, GradScaler, GradScalerConfig, PrecisionPolicy, PrecisionUnit, TensorStats};
use crate::telemetry::{Activity, PhaseProgress};
use crate::train::engine::{Passes, TrainEngine};
use crate::train::probe::to_fp32;
use crate::{Error, Result};
use candle_core::Tensor;
use rayon::prelude::*;
use serde::Serialize;
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;
use strum::{Display, VariantArray};

/// The kinds of tensors that a layer stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Display, VariantArray)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum SiteKind {
    /// The working weights.
    Weights,
    /// The outputs of norms, which are operands of products.
    Norm,
    /// The outputs of products; outside the blocks the logits.
    Product,
    /// The output of attention. Its scores and probabilities are always FP32.
    Softmax,
    /// The output of the MLP's activation.
    Activation,
    /// The residual stream after the layer, and its gradient.
    Residual,
    /// Other gradients of activations.
    Gradient,
    /// The gradients of the weights.
    WeightGradient,
}

impl SiteKind {
    /// The kind of a tensor that a hook receives; `None` for queries without their keys, which are a part of the next
    /// tensor.
    fn of(point: HookPoint) -> Option<Self> {
        use TensorKind::{BiasGradient, InputGradient, WeightGradient};
        Some(match (point.kind, point.layer.op) {
            (WeightGradient | BiasGradient, _) => Self::WeightGradient,
            (InputGradient, ModuleOp::Norm(NormRole::Attention | NormRole::Mlp | NormRole::Final)) => Self::Residual,
            (kind, _) if !kind.is_forward() => Self::Gradient,
            (_, ModuleOp::Norm(NormRole::Query)) => return None,
            (_, ModuleOp::Norm(_)) => Self::Norm,
            (_, ModuleOp::Linear(_) | ModuleOp::Expert(..) | ModuleOp::Router | ModuleOp::Head) => Self::Product,
            (_, ModuleOp::Attention) => Self::Softmax,
            (_, ModuleOp::Activation | ModuleOp::ShortConv | ModuleOp::GatedDelta) => Self::Activation,
            _ => Self::Residual,
        })
    }
}

/// The tensors of one kind in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Site {
    /// The block, or everything outside the blocks.
    pub layer: PrecisionUnit,
    /// The kind.
    pub kind: SiteKind,
}

/// A set of sites that training can keep in FP32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KeptSites {
    /// All sites of a layer except its residual stream.
    Layer(PrecisionUnit),
    /// The residual stream of all layers.
    Residual,
    /// The gradients of all weights.
    WeightGradients,
}

impl KeptSites {
    fn contains(self, site: Site) -> bool {
        match self {
            Self::Layer(layer) => site.layer == layer && site.kind != SiteKind::Residual,
            Self::Residual => site.kind == SiteKind::Residual,
            Self::WeightGradients => site.kind == SiteKind::WeightGradient,
        }
    }
}

/// The distance of a gradient g from the FP32 gradient e.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct GradientError {
    /// ‖g − e‖ / ‖e‖; NaN if g is not finite.
    pub relative: f64,
    /// 1 − cos of the angle between both.
    pub direction: f64,
}

impl GradientError {
    /// Compares FP32 tensors.
    fn new(exact: &Parameters, found: &Parameters) -> Result<Self> {
        let sums = |(exact, found): (&Tensor, &Tensor)| -> Result<[f64; 3]> {
            let (exact, found) = (to_host(exact)?, to_host(found)?);
            let (exact, found) = (read(&exact)?, read(&found)?);
            let pairs = exact.typed::<f32>()?.iter().zip(found.typed::<f32>()?);
            let pairs = pairs.map(|(exact, found)| (f64::from(*exact), f64::from(*found)));
            Ok(pairs.fold([0.0; 3], |[d, e, f], (exact, found)| {
                [d + (found - exact).powi(2), e + exact * exact, f + found * found]
            }))
        };
        let tensors = exact.tensors().par_iter().zip(found.tensors()).map(sums).collect::<Result<Vec<_>>>()?;
        let total = |index: usize| tensors.iter().map(|sums| sums[index]).sum::<f64>().sqrt();
        let [difference, exact, found] = [total(0), total(1), total(2)];
        // Without the cancellation of 1 − cos.
        let direction = (difference.powi(2) - (found - exact).powi(2)) / (2.0 * exact * found);
        Ok(Self { relative: difference / exact, direction })
    }
}

/// The cost of rounding a site, or the sites of a [`KeptSites`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RoundingCost<T> {
    /// The tensors.
    pub rounded: T,
    /// The error if nothing else is rounded.
    pub alone: GradientError,
    /// The error if everything else is rounded.
    pub others: GradientError,
    /// Values rounded.
    pub values: u64,
    /// Finite values that become infinite.
    pub overflows: u64,
    /// Values that become zero.
    pub underflows: u64,
}

/// The precision that keeps the error within the tolerance.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KeptLayers {
    /// All that stays in FP32.
    pub keep: Vec<KeptSites>,
    /// The error that remains.
    pub error: GradientError,
    /// The flags of a training run.
    pub flags: String,
}

/// The cost of 16 bits in one step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bisection {
    /// The step.
    pub step: u64,
    /// The type that tensors are rounded to.
    pub dtype: Dtype,
    /// The factor of all gradients.
    pub loss_scale: f32,
    /// The loss in FP32.
    pub loss: f64,
    /// The norm of the unscaled gradient in FP32.
    pub grad_norm: f64,
    /// The norm of the unscaled gradient if all sites are rounded.
    pub rounded_grad_norm: f64,
    /// The error if all sites are rounded.
    pub all: GradientError,
    /// The cost of each site.
    pub sites: Vec<RoundingCost<Site>>,
    /// The cost of each set that training can keep in FP32.
    pub layers: Vec<RoundingCost<KeptSites>>,
    /// The precision to train in.
    pub policy: KeptLayers,
}

/// Rounds the tensors of chosen sites in place.
struct RoundingHook {
    kernels: Arc<dyn Kernels>,
    dtype: Dtype,
    chosen: BTreeSet<Site>,
    /// All sites that passes have shown.
    seen: BTreeSet<Site>,
    /// Statistics before and after rounding.
    stats: [TensorStats; 2],
    /// The largest gradient of a pass that rounds nothing.
    largest: f32,
}

impl RoundingHook {
    fn round(&mut self, tensor: &Tensor) -> candle_core::Result<()> {
        let narrow = zeros(tensor.dims(), candle_dtype(self.dtype), tensor.device())?;
        let format = self.dtype.format();
        self.stats[0].merge(&self.kernels.summarize(tensor, format, false)?.stats);
        self.kernels.copy(tensor, &narrow)?;
        self.kernels.copy(&narrow, tensor)?;
        self.stats[1].merge(&self.kernels.summarize(tensor, format, false)?.stats);
        Ok(())
    }

    /// `weights` with copies of those of the chosen sites, rounded; without matrices in quantized blocks.
    fn round_weights(&mut self, weights: &Parameters) -> Result<Parameters> {
        let mut rounded = weights.clone();
        let sites: Vec<Site> = self.chosen.iter().copied().filter(|site| site.kind == SiteKind::Weights).collect();
        for index in sites.iter().flat_map(|site| weights.fused_in(site.layer)) {
            let weight = weights.fused_at(index).force_contiguous()?;
            if weight.elem_count() > 0 {
                self.round(&weight)?;
                rounded.replace_fused(index, weight)?;
            }
        }
        let base = weights.base().map(|base| self.round_weights(base)).transpose()?;
        Ok(rounded.with_base(base.map(Arc::new)))
    }
}

impl Hook for RoundingHook {
    fn record(&mut self, point: HookPoint, tensor: &Tensor) -> candle_core::Result<()> {
        let layer = point.layer.unit();
        self.seen.insert(Site { layer, kind: SiteKind::Weights });
        let Some(site) = SiteKind::of(point).map(|kind| Site { layer, kind }) else { return Ok(()) };
        self.seen.insert(site);
        if self.chosen.contains(&site) {
            self.round(tensor)?;
        } else if self.chosen.is_empty() && !point.kind.is_forward() {
            let stats = self.kernels.summarize(tensor, self.dtype.format(), false)?.stats;
            self.largest = self.largest.max(stats.max_abs);
        }
        Ok(())
    }
}

/// A step that is repeated with rounded tensors.
struct Bisector<'a> {
    engine: &'a mut TrainEngine,
    batches: &'a [Batch],
    /// The weights in FP32.
    weights: Parameters,
    workspace: Workspace,
    grads: Gradients,
    hook: RoundingHook,
    /// Replaces the run's loss scale.
    scaler: Option<GradScaler>,
    /// The gradients in FP32.
    exact: Option<Parameters>,
    activity: &'a Activity,
    passes: u64,
}

impl Bisector<'_> {
    /// Computes the step with the sites `chosen` rounded, and returns its loss.
    fn step(&mut self, chosen: BTreeSet<Site>) -> Result<f64> {
        self.passes += 1;
        self.activity.advance("repeating the step", PhaseProgress::Items(self.passes, self.total_passes()));
        self.hook.chosen = chosen;
        self.hook.stats = [TensorStats::default(); 2];
        let weights = Cow::Owned(self.hook.round_weights(&self.weights)?);
        let (passes, _) = self.engine.passes()?;
        let scaler = self.scaler.as_ref().unwrap_or(passes.scaler);
        let (hook, workspace, grads) = (&mut self.hook, &mut self.workspace, &mut self.grads);
        Ok(Passes { weights, hook, scaler, workspace, grads, ..passes }.gradients(self.batches)?.loss)
    }

    /// An estimate, because the search may end early.
    fn total_passes(&self) -> u64 {
        let layers: BTreeSet<PrecisionUnit> = self.hook.seen.iter().map(|site| site.layer).collect();
        (2 * self.hook.seen.len() + 4 * layers.len() + 10) as u64
    }

    /// The error of the gradient with the sites `chosen` rounded.
    fn error(&mut self, chosen: BTreeSet<Site>) -> Result<GradientError> {
        self.step(chosen)?;
        match &self.exact {
            Some(exact) => GradientError::new(exact, self.grads.total()),
            None => Ok(GradientError::default()),
        }
    }

    fn cost<T: Copy>(&mut self, rounded: T, contains: impl Fn(T, Site) -> bool) -> Result<RoundingCost<T>> {
        let (own, rest) = self.hook.seen.clone().into_iter().partition(|site| contains(rounded, *site));
        let alone = self.error(own)?;
        let [before, after] = self.hook.stats;
        let others = self.error(rest)?;
        let (overflows, underflows) = (after.inf.saturating_sub(before.inf), after.zero.saturating_sub(before.zero));
        Ok(RoundingCost { rounded, alone, others, values: before.count, overflows, underflows })
    }

    /// The error with everything rounded except `keep`.
    fn error_without(&mut self, keep: &[KeptSites]) -> Result<GradientError> {
        let rounded = |site: &Site| !keep.iter().any(|keep| keep.contains(*site));
        let chosen = self.hook.seen.iter().copied().filter(rounded).collect();
        self.error(chosen)
    }

    /// Finds a set whose error is at most `tolerance`, and none of whose members can be left out: adds the most costly
    /// first, then removes those that became superfluous.
    fn search(&mut self, costs: &[RoundingCost<KeptSites>], all: GradientError, tolerance: f64) -> Result<KeptLayers> {
        let finite = |error: f64| if error.is_nan() { f64::INFINITY } else { error };
        let rank = |cost: &RoundingCost<KeptSites>| (finite(cost.others.relative), -finite(cost.alone.relative));
        let mut costs = costs.to_vec();
        costs.sort_by(|a, b| rank(a).partial_cmp(&rank(b)).unwrap_or(std::cmp::Ordering::Equal));
        let mut keep = Vec::new();
        let mut error = all;
        for cost in costs {
            if error.relative <= tolerance {
                break;
            }
            keep.push(cost.rounded);
            error = self.error_without(&keep)?;
        }
        for member in keep.clone() {
            let fewer: Vec<KeptSites> = keep.iter().copied().filter(|other| *other != member).collect();
            let without = if fewer.is_empty() { all } else { self.error_without(&fewer)? };
            if without.relative <= tolerance {
                keep = fewer;
                error = without;
            }
        }
        let flags = self.flags(&keep);
        Ok(KeptLayers { keep, error, flags })
    }

    /// The flags with which training keeps `keep` in FP32.
    fn flags(&self, keep: &[KeptSites]) -> String {
        if self.hook.seen.iter().all(|site| keep.iter().any(|keep| keep.contains(*site))) {
            return "--dtype fp32".to_owned();
        }
        let dtype = |kept| if keep.contains(&kept) { Dtype::F32 } else { self.hook.dtype };
        let (grads, residual) = (dtype(KeptSites::WeightGradients), dtype(KeptSites::Residual));
        let policy = PrecisionPolicy { params: Dtype::F32, compute: self.hook.dtype, grads, residual };
        let layers: Vec<String> = keep
            .iter()
            .filter_map(|keep| if let KeptSites::Layer(layer) = keep { Some(layer.to_string()) } else { None })
            .collect();
        let layers =
            if layers.is_empty() { String::new() } else { format!(" --set precision.keep={}", layers.join(",")) };
        format!("--dtype {policy}{layers}")
    }
}

/// Measures the cost of rounding to `dtype` in the step over `batches`, and searches a smallest set to keep in FP32 for
/// an error of the gradient of at most `tolerance`. Overwrites buffers and gradients, and nothing that outlives a step.
pub(super) fn bisect(
    engine: &mut TrainEngine,
    batches: &[Batch],
    dtype: Dtype,
    tolerance: f64,
    activity: &Activity,
) -> Result<Bisection> {
    let (state, model) = (&engine.state, &engine.model);
    let shape = (engine.workspace.batch(), engine.workspace.seq_len());
    let device = state.weights.device();
    let hook = RoundingHook {
        kernels: model.shared_kernels(),
        dtype,
        chosen: BTreeSet::new(),
        seen: BTreeSet::new(),
        stats: [TensorStats::default(); 2],
        largest: 0.0,
    };
    let mut bisector = Bisector {
        weights: to_fp32(&state.weights, state.masters.parameters(), model.kernels())?,
        workspace: Workspace::for_training(model.spec(), PrecisionPolicy::FP32, shape, Checkpointing::None, &device)?,
        grads: Gradients::new(&state.weights, PrecisionPolicy::FP32, batches.len())?,
        engine,
        batches,
        hook,
        scaler: None,
        exact: None,
        activity,
        passes: 0,
    };
    let mut loss = bisector.step(BTreeSet::new())?;
    if dtype == Dtype::F16 && !bisector.engine.state.scaler.config().enabled {
        let config = GradScalerConfig::default();
        let init_scale = GradScaler::new(config)?.scale_for(bisector.hook.largest);
        bisector.scaler = Some(GradScaler::new(GradScalerConfig { init_scale, ..config })?);
        loss = bisector.step(BTreeSet::new())?;
    }
    bisector.exact = Some(bisector.grads.total().deep_clone()?);
    let scale = bisector.scaler.as_ref().unwrap_or(&bisector.engine.state.scaler).scale();
    let norm = |bisector: &Bisector<'_>| bisector.engine.grad_stats.total.stats.norm() / f64::from(scale);
    let grad_norm = norm(&bisector);
    if !(grad_norm.is_finite() && grad_norm > 0.0) {
        let message = "its gradient is zero or not finite even in FP32; there is nothing to compare with";
        return Err(Error::data("the step", message));
    }
    let all = bisector.error_without(&[])?;
    let rounded_grad_norm = norm(&bisector);
    let sites = bisector.hook.seen.clone().into_iter();
    let sites: Vec<_> = sites.map(|site| bisector.cost(site, |own, site| own == site)).collect::<Result<_>>()?;
    let layers: BTreeSet<PrecisionUnit> = sites.iter().map(|cost| cost.rounded.layer).collect();
    let sets = layers.into_iter().map(KeptSites::Layer).chain([KeptSites::Residual, KeptSites::WeightGradients]);
    let layers = sets.map(|keep| bisector.cost(keep, KeptSites::contains)).collect::<Result<Vec<_>>>()?;
    let policy = bisector.search(&layers, all, tolerance)?;
    let step = bisector.engine.state.counters.step + 1;
    Ok(Bisection { step, dtype, loss_scale: scale, loss, grad_norm, rounded_grad_norm, all, sites, layers, policy })
}
