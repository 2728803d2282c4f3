//! Finds where an overflow began: repeats the step's passes with a hook that inspects every tensor they compute.
//!
//! A skipped step changes neither weights nor dropout masks (a function of the step number), so the same infinities
//! appear again. Clean steps cost nothing.

use crate::Result;
use crate::data::Batch;
use crate::engine::kernels::summary::summarize;
use crate::engine::model::{Hook, HookPoint, ModelSpec};
use crate::precision::{FloatFormat, PrecisionUnit, TensorStats};
use crate::telemetry::{FirstNonFinite, Pass};
use crate::train::callbacks::StepContext;
use crate::train::engine::{StepReport, TrainEngine};
use crate::train::objective::LossFactors;
use candle_core::Tensor;

/// Finds the tensor in which the overflow of a skipped step began.
pub(super) fn after_step(engine: &mut TrainEngine, context: &mut StepContext<'_>) -> Result<()> {
    if context.is_skipped() {
        context.first_nonfinite = first_nonfinite(engine, context.batches, &context.report)?;
    }
    Ok(())
}

/// The first tensor of the step, in order of computation, that is not finite, and the unit of its layer. `None` if all
/// are finite and only their sum over micro-batches or the unscaling overflowed. Call it right after the step that
/// `report` describes. Overwrites buffers and gradients, and nothing that outlives a step.
fn first_nonfinite(
    engine: &mut TrainEngine,
    micro_batches: &[Batch],
    report: &StepReport,
) -> Result<Option<(FirstNonFinite, PrecisionUnit)>> {
    let (mut passes, _) = engine.passes()?;
    passes.counters = passes.counters.before_skipped();
    let factors = LossFactors::new(report.scale, passes.objective, micro_batches);
    let mut first = None;
    for index in passes.grads.local_micro_batches(micro_batches.len()) {
        let batch = &micro_batches[index];
        let mut search = FirstNonFiniteHook { seq_len: batch.seq_len, found: None };
        passes.micro_batch(index, batch, factors, &mut search, &mut |_, _| Ok(()))?;
        if let Some(found) = search.found {
            let unit = found.point.layer.unit();
            first = Some((found.first_nonfinite(passes.model.spec(), index), unit));
            break;
        }
    }
    let all = passes.group.all_gather_messages(&first)?;
    Ok(all.into_iter().flatten().min_by_key(|(found, _)| found.micro_batch))
}

/// Keeps the first tensor that is not finite.
struct FirstNonFiniteHook {
    seq_len: usize,
    found: Option<NonFinite>,
}

struct NonFinite {
    point: HookPoint,
    stats: TensorStats,
    samples: Vec<usize>,
}

impl Hook for FirstNonFiniteHook {
    fn record(&mut self, point: HookPoint, tensor: &Tensor) -> candle_core::Result<()> {
        // The head's tiles arrive one by one and count as one tensor.
        let same_tensor = |found: &NonFinite| (found.point.layer, found.point.kind) == (point.layer, point.kind);
        if self.found.as_ref().is_some_and(|found| !same_tensor(found)) {
            return Ok(());
        }
        let stats = stats_of(tensor)?;
        if self.found.is_none() && stats.is_finite() {
            return Ok(());
        }
        let samples = match point.first_token {
            Some(first) if point.kind.has_tokens() => self.samples(first, tensor)?,
            _ => Vec::new(),
        };
        let found = self.found.get_or_insert(NonFinite { point, stats: TensorStats::default(), samples: Vec::new() });
        found.stats.merge(&stats);
        found.samples.extend(samples);
        // A tile may begin in the middle of a sequence.
        found.samples.dedup();
        Ok(())
    }
}

impl FirstNonFiniteHook {
    /// The sequences with an infinity or NaN in their rows of `tensor`, whose first row is token `first`.
    fn samples(&self, first: usize, tensor: &Tensor) -> candle_core::Result<Vec<usize>> {
        let end = first + tensor.dim(0)?;
        let mut broken = Vec::new();
        for sample in first / self.seq_len..end.div_ceil(self.seq_len) {
            let from = first.max(sample * self.seq_len);
            let to = end.min((sample + 1) * self.seq_len);
            if !stats_of(&tensor.narrow(0, from - first, to - from)?)?.is_finite() {
                broken.push(sample);
            }
        }
        Ok(broken)
    }
}

fn stats_of(tensor: &Tensor) -> candle_core::Result<TensorStats> {
    Ok(summarize(tensor, FloatFormat::FP32, false)?.stats)
}

impl NonFinite {
    fn first_nonfinite(self, spec: &ModelSpec, micro_batch: usize) -> FirstNonFinite {
        let Self { point: HookPoint { layer, kind, .. }, stats, samples } = self;
        FirstNonFinite {
            pass: if kind.is_forward() { Pass::Forward } else { Pass::Backward },
            layer: spec.layer_name(layer),
            tensor: kind.name().to_owned(),
            count: stats.count,
            inf: stats.inf,
            nan: stats.nan,
            max_abs: stats.max_abs,
            micro_batch,
            samples,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::collective::SingleProcess;
    use crate::engine::kernels::{KernelBackend, view};
    use crate::engine::model::{ModuleId, ModuleOp, Parameters, TensorKind};
    use crate::engine::optim::MasterWeights;
    use crate::precision::{GradScalerConfig, PrecisionPolicy};
    use crate::train::Config;
    use crate::train::engine::StepOutcome;
    use crate::train::setup::engine;
    use candle_core::Device;
    use std::sync::Arc;

    const SHAPE: (usize, usize) = (3, 8);

    /// A parameter's name, and the new value for each index and old value.
    type Change<'a> = (&'a str, &'a dyn Fn(usize, f32) -> f32);

    /// Two-block FP16 engines at loss scale `scale` with the weights named in `change` modified; one for each set of
    /// kernels.
    fn crafted(scale: f32, change: &[Change<'_>]) -> [TrainEngine; 2] {
        [KernelBackend::Fused, KernelBackend::Candle].map(|kernels| crafted_of(kernels, scale, change))
    }

    fn crafted_of(kernels: KernelBackend, scale: f32, change: &[Change<'_>]) -> TrainEngine {
        let mut config = Config { dtype: PrecisionPolicy::FP16, device: "cpu".into(), kernels, ..Config::default() };
        (config.train.batch_size, config.train.seq_len) = SHAPE;
        config.train.grad_accum = 2;
        config.scaler = GradScalerConfig { init_scale: scale, ..GradScalerConfig::default() };
        let shape = ModelSpec { vocab_size: 64, ..tiny().resized(2, 16, 2) };
        let masters = Parameters::random(&shape.parameters(), 5, &Device::Cpu).unwrap();
        for (name, change) in change {
            view::write_f32(masters.get(name).unwrap(), |values| {
                for (i, value) in values.iter_mut().enumerate() {
                    *value = change(i, *value);
                }
            })
            .unwrap();
        }
        let kernels = crate::engine::device::kernels(kernels, &Device::Cpu, &mut |_| ()).unwrap();
        let weights = MasterWeights::new(masters, config.dtype, &*kernels).unwrap();
        engine(Arc::new(SingleProcess), &config, &shape, weights, kernels, 10).unwrap()
    }

    fn tiny() -> ModelSpec {
        ModelSpec::named("tiny").unwrap()
    }

    /// Sequence `i` of the micro-batch consists of the token `first + i`.
    fn batch(first: u32) -> Batch {
        let (rows, seq_len) = SHAPE;
        let inputs: Vec<u32> = (0..rows * seq_len).map(|at| first + (at / seq_len) as u32).collect();
        Batch {
            labels: inputs.iter().map(|id| id + 8).collect(),
            num_label_tokens: inputs.len(),
            inputs,
            ..Batch::new(rows, seq_len)
        }
    }

    /// The origin that an overflowing step on two micro-batches is attributed to; every set of kernels must agree.
    fn traced(engines: [TrainEngine; 2]) -> FirstNonFinite {
        let [fused, plain] = engines.map(|mut engine| {
            let batches = [batch(1), batch(20)];
            let report = engine.step(&batches).unwrap();
            assert_eq!(report.outcome, StepOutcome::Skipped);
            first_nonfinite(&mut engine, &batches, &report).unwrap().unwrap().0
        });
        assert_eq!(brief(&plain), brief(&fused));
        assert_eq!((plain.count, plain.inf, plain.nan), (fused.count, fused.inf, fused.nan));
        fused
    }

    fn brief(origin: &FirstNonFinite) -> (String, usize, &[usize]) {
        let FirstNonFinite { pass, layer, tensor, micro_batch, samples, .. } = origin;
        (format!("{pass} {layer} {tensor}"), *micro_batch, samples)
    }

    #[test]
    fn a_huge_weight_is_found_in_the_forward_pass_of_its_layer() {
        let found = traced(crafted(1.0, &[("h.1.mlp.c_fc.weight", &|_, _| 6e4), ("h.1.ln_2.bias", &|_, _| 1.0)]));
        assert_eq!(brief(&found), ("forward h.1.mlp.c_fc output".into(), 0, &[0, 1, 2][..]));
        assert_eq!((found.count, found.inf, found.nan), (24 * 64, 24 * 64, 0));
    }

    #[test]
    fn a_huge_loss_scale_is_found_where_the_backward_pass_begins() {
        let found = traced(crafted(2f32.powi(40), &[]));
        assert_eq!(brief(&found), ("backward lm_head output_gradient".into(), 0, &[0, 1, 2][..]));
        assert_eq!((found.count, found.inf), (24 * 64, 24 * 64), "every probability is about 1/64");
    }

    /// The layer's input is zero, so its output and its weight gradient are too; its input gradient is not.
    #[test]
    fn a_large_weight_under_a_zero_input_is_found_in_the_backward_pass_of_its_layer() {
        let found = traced(crafted(
            1024.0,
            &[("h.0.mlp.c_fc.weight", &|_, _| 0.0), ("h.0.mlp.c_proj.weight", &|_, value| 6e4 * value.signum())],
        ));
        assert_eq!(brief(&found), ("backward h.0.mlp.c_proj input_gradient".into(), 0, &[0, 1, 2][..]));
        assert!(found.inf > 0 && found.max_abs <= 65504.0);
    }

    #[test]
    fn an_infinite_embedding_is_found_with_the_micro_batch_and_sequence_that_has_its_token() {
        // The tied head multiplies with every row of the table, but the embedding comes first where the token occurs.
        let row = |token: usize| move |i: usize, value: f32| if i / 16 == token { f32::INFINITY } else { value };
        let found = traced(crafted(1.0, &[("wte.weight", &row(3))]));
        assert_eq!(brief(&found), ("forward wte output".into(), 0, &[2][..]));
        assert_eq!((found.count, found.inf, found.nan), (24 * 16, 8 * 16, 0));
        let row = |i: usize, value: f32| if i / 16 == 6 { f32::INFINITY } else { value };
        let found = traced(crafted(1.0, &[("wpe.weight", &row)]));
        assert_eq!(brief(&found), ("forward wte output".into(), 0, &[0, 1, 2][..]));
        assert_eq!(found.inf, 3 * 16);
    }

    #[test]
    fn the_second_micro_batch_is_named_where_only_it_overflows() {
        // Only sequence 1 of the second micro-batch has token 21, whose embedding points along the first coordinate.
        let row =
            |i: usize, value: f32| if i / 16 == 21 { if i.is_multiple_of(16) { 4.0 } else { 0.0 } } else { value };
        let first = |i: usize, _: f32| if i / 64 == 0 { 1.8e4 } else { 0.0 };
        let found = traced(crafted(
            1.0,
            &[
                ("wte.weight", &row),
                ("wpe.weight", &|_, _| 0.0),
                ("h.0.attn.c_attn.weight", &|_, _| 0.0),
                ("h.0.mlp.c_fc.weight", &first),
            ],
        ));
        assert_eq!(brief(&found), ("forward h.0.mlp.c_fc output".into(), 1, &[1][..]));
    }

    #[test]
    fn tiles_of_the_head_are_one_tensor() {
        let mut search = FirstNonFiniteHook { seq_len: 4, found: None };
        let tile = |broken: bool| Tensor::full(if broken { f32::NAN } else { 1.0 }, (6, 2), &Device::Cpu).unwrap();
        let point = |kind, first| HookPoint { layer: ModuleId::global(ModuleOp::Head), kind, first_token: Some(first) };
        search.record(point(TensorKind::Output, 0), &tile(true)).unwrap();
        search.record(point(TensorKind::OutputGradient, 0), &tile(true)).unwrap();
        search.record(point(TensorKind::Output, 6), &tile(true)).unwrap();
        search.record(point(TensorKind::Output, 12), &tile(false)).unwrap();
        let found = search.found.unwrap().first_nonfinite(&tiny(), 0);
        assert_eq!((found.count, found.nan, found.tensor.as_str()), (36, 24, "output"));
        assert_eq!(found.samples, [0, 1, 2]);
    }
}
