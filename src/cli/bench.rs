//! `finetune bench`: measures training speed on this machine, and its share of the arithmetic peak.

mod latency;
mod profile;
mod table;

use crate::cli::flags::lora;
use crate::cli::model::{DtypeList, print_notice};
use crate::cli::reporter::Reporter;
use crate::cli::train::thread_pool;
use crate::data::Batch;
use crate::engine::collective::SingleProcess;
use crate::engine::kernels::isa::Isa;
use crate::engine::kernels::machine::allocator::Allocations;
use crate::engine::kernels::machine::peak::{Peak, measure_peak_bf16, measure_peak_f32};
use crate::engine::kernels::profile::Profile;
use crate::engine::kernels::{KernelBackend, Kernels};
use crate::engine::model::{ModelSpec, ModuleOp, Parameters, Recurrence, candle_dtype};
use crate::engine::optim::MasterWeights;
use crate::precision::{Dtype, PrecisionPolicy};
use crate::random::{Domain, Stream};
use crate::store::{StoredModel, WeightSource};
use crate::telemetry::ProcessStats;
use crate::train::{Config, ConfigLayers, StepOutcome, StepReport, WeightInit, engine};
use crate::{Error, Result};
use clap::Args;
use clap::builder::RangedU64ValueParser;
use profile::Limits;
use serde_json::json;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Flags of `finetune bench`. Tokens and weights are random.
#[derive(Args, Debug)]
pub(super) struct BenchArgs {
    /// An architecture's name, or a Hugging Face folder or .gguf file that defines the shape
    #[arg(long, default_value = "distilgpt2")]
    model: String,
    /// Number of layers [default: the model's]
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..=1000))]
    layers: Option<usize>,
    /// Sequences in a batch
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = at_least_one())]
    batch_size: usize,
    /// Tokens in a sequence
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = at_least_one())]
    seq_len: usize,
    /// fp16, bf16, fp32, or a policy such as `p=f32,c=f16,g=f32,r=f32`; several types, `fp32,fp16,bf16`, for a table
    #[arg(long, value_name = "DTYPE,…", default_value = "fp16", overrides_with = "dtype")]
    dtype: DtypeList,
    /// Batches in a step
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one())]
    grad_accum: usize,
    /// Benchmark LoRA instead of full fine-tuning: a rank, or the settings that `--lora` has in training
    #[arg(long, value_name = "SETTINGS", conflicts_with = "latency")]
    lora: Option<String>,
    /// Measured steps
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = at_least_one())]
    steps: usize,
    /// Warm-up steps before the measured ones
    #[arg(long, value_name = "N", default_value_t = 2)]
    warmup: usize,
    /// Device: auto, cpu, cuda, cuda:N or metal
    #[arg(long, default_value = "auto")]
    device: String,
    /// Kernels: auto, candle or fused
    #[arg(long, value_name = "NAME", hide = true, default_value = "auto")]
    kernels: KernelBackend,
    /// Threads [default: one per core]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Measure latency instead: N forward passes over one sequence, and N tokens generated after it
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "100", value_parser = at_least_one())]
    latency: Option<usize>,
    /// Print a table of a step's operations: calls, time, memory traffic, arithmetic, and fractions of the machine's
    /// limits
    #[arg(long, conflicts_with = "latency")]
    profile: bool,
    /// Do not count the exponents of gradients
    #[arg(long)]
    no_histogram: bool,
}

fn at_least_one() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=1 << 20)
}

/// Measures and prints one JSON object; for several types a table.
pub(super) fn run(args: &BenchArgs, out: &mut dyn Write) -> Result<ExitCode> {
    if args.profile && args.dtype.0.len() > 1 {
        return Err(Error::config("--profile", "measures one type at a time; use a single `--dtype`"));
    }
    args.spec()?;
    let reporter = Reporter::of("measuring");
    let text = match &args.dtype.0[..] {
        [(_, policy)] => {
            let config = args.config(*policy)?;
            config.validate()?;
            let measured = |args: &BenchArgs| match args.latency {
                Some(count) => latency::measure(args, &config, count),
                None => measure(args, &config),
            };
            let report = thread_pool(&config, 1)?.install(|| measured(args))?;
            if args.profile { profile::table(&report) } else { report.to_string() }
        }
        types => table::of(args, types)?,
    };
    drop(reporter);
    writeln!(out, "{text}").map_err(Error::stdout)?;
    Ok(ExitCode::SUCCESS)
}

impl BenchArgs {
    fn config(&self, dtype: PrecisionPolicy) -> Result<Config> {
        let mut config = Config {
            model: self.model.clone(),
            init: WeightInit::Random,
            dtype,
            device: self.device.clone(),
            kernels: self.kernels,
            threads: self.threads,
            ..Config::default()
        };
        config.train.batch_size = self.batch_size;
        config.train.seq_len = self.seq_len;
        config.train.grad_accum = self.grad_accum;
        if let Some(settings) = &self.lora {
            config.lora =
                Config::resolve(&ConfigLayers { overrides: lora(settings)?, ..ConfigLayers::default() })?.lora;
        }
        Ok(config)
    }

    fn spec(&self) -> Result<ModelSpec> {
        let mut spec = match ModelSpec::named(&self.model) {
            Some(spec) => spec,
            None if Path::new(&self.model).exists() => StoredModel::shape(Path::new(&self.model))?,
            None => {
                let names = ModelSpec::names().join(", ");
                let message = format!("`{}` is neither a folder, nor a `.gguf` file, nor one of {names}", self.model);
                return Err(Error::config("--model", message));
            }
        };
        spec.num_layers = self.layers.unwrap_or(spec.num_layers);
        if self.seq_len > spec.max_position_embeddings {
            let message = format!("{} exceeds the context of {} tokens", self.seq_len, spec.max_position_embeddings);
            return Err(Error::config("--seq-len", message));
        }
        Ok(spec)
    }
}

struct Measurement {
    wall: Duration,
    report: StepReport,
    allocations: Allocations,
    /// The processor's peak right after the step, in the arithmetic type of the matrix products.
    peak: Option<Peak>,
}

fn measure(args: &BenchArgs, config: &Config) -> Result<serde_json::Value> {
    let begin = Instant::now();
    let spec = config.with_trained_parts(args.spec()?)?;
    let open = config.device_spec()?.open(config.dtype, config.kernels, &mut |notice| print_notice(&notice))?;
    let masters = if spec.lora.is_none() {
        Parameters::random(&spec.parameters(), config.seed, &open.device)?
    } else {
        let weights = WeightSource::Random(config.seed);
        weights.load_adapters(&spec, config.dtype.compute, config.seed, false, &open.device, &args.model)?.parameters
    };
    let weights = MasterWeights::new(masters, config.dtype, &*open.kernels)?;
    let profile = args.profile.then(|| Arc::new(Profile::new(open.kernels.clone(), &open.device)));
    let kernels = profile.clone().map_or_else(|| open.kernels.clone(), |profile| profile as Arc<dyn Kernels>);
    let steps = (args.warmup + args.steps) as u64;
    let mut engine = engine(Arc::new(SingleProcess), config, &spec, weights, kernels, steps)?;
    engine.count_exponents = !args.no_histogram;
    let startup = begin.elapsed();
    let mut batches: Vec<Batch> = (0..args.grad_accum).map(|_| Batch::new(args.batch_size, args.seq_len)).collect();
    let mut draws = 0..;
    let mut refill = |batches: &mut [Batch]| {
        batches.iter_mut().zip(&mut draws).for_each(|(batch, draw)| fill(batch, spec.vocab_size, draw));
    };
    let peak: Option<fn() -> Peak> = match config.dtype.compute {
        _ if !open.device.is_cpu() => None,
        Dtype::BF16 => Some(measure_peak_bf16),
        _ => Some(measure_peak_f32),
    };
    let mut step = || {
        let began = Instant::now();
        refill(&mut batches);
        // A GPU still updates the weights in the meantime.
        let began = if open.device.is_cpu() { Instant::now() } else { began };
        let before = Allocations::now();
        let report = engine.step(&batches)?;
        let wall = began.elapsed();
        let allocations = Allocations::now().since(before);
        Ok(Measurement { wall, report, allocations, peak: peak.map(|measure| measure()) })
    };
    let warmup = (0..args.warmup).map(|_| step()).collect::<Result<Vec<_>>>()?;
    if let Some(profile) = &profile {
        profile.take()?;
    }
    let samples = (0..args.steps).map(|_| step()).collect::<Result<Vec<_>>>()?;
    if let Some(why) = engine.model.kernels().take_notice() {
        print_notice(&format!("passes run without a CUDA graph: {why}"));
    }
    let first_loss = warmup.first().or(samples.first()).map(|sample| sample.report.loss);
    let first_step = warmup.first().map(|sample| sample.wall);
    let mut report = summary(args, &spec, &samples);
    if report["disturbed"] == true {
        print_notice("other work disturbed the measurement of the processor's peak; repeat on a quiet machine");
    }
    if let Some(profile) = &profile {
        let costs = profile.take()?;
        let limits = match report["peak_gflops"].as_f64() {
            Some(gflops) => Limits::of_cpu(gflops),
            None => Limits::of_gpu(profile, candle_dtype(config.dtype.compute), &open.device)?,
        };
        let step = samples.iter().map(|sample| sample.wall).sum::<Duration>() / args.steps as u32;
        report["profiled_step_ms"] = json!(millis(step));
        report["profile"] = profile::report(costs, args.steps, step, limits);
    }
    report["dtype"] = json!(config.dtype.to_string());
    report["loss_first"] = json!(first_loss);
    report["device"] = json!(open.name);
    report["peak_device_mib"] = json!(open.peak_bytes().map(|bytes| bytes >> 20));
    report["kernels"] = json!(engine.model.kernels().name());
    report["first_step_ms"] = json!(first_step.map(millis));
    report["startup_ms"] = json!(millis(startup));
    Ok(report)
}

/// Fills in random ids; each is the target of the previous one, as in a text.
fn fill(batch: &mut Batch, vocab: usize, draw: u64) {
    let stream = Stream::new(1, Domain::Bench);
    for (block, ids) in batch.inputs.chunks_mut(4).enumerate() {
        let random = stream.block(0, draw, block as u32);
        ids.iter_mut().zip(random).for_each(|(id, random)| *id = random % vocab as u32);
    }
    batch.labels.copy_from_slice(&batch.inputs);
    batch.labels.rotate_left(1);
    batch.num_label_tokens = batch.labels.len();
}

/// Floating-point operations of a step by the usual count: six per matrix weight and token, four of a frozen one, plus
/// those of causal attention and of the gated delta rule.
fn operations(args: &BenchArgs, spec: &ModelSpec) -> f64 {
    let tokens = args.batch_size * args.seq_len * args.grad_accum;
    let products = spec.base_parameters().into_iter().filter(|entry| entry.shape.len() == 2);
    let weights = products.map(|entry| {
        let elements = entry.shape.iter().product::<usize>() as f64;
        match (entry.layer.op, spec.experts) {
            (ModuleOp::Linear(_) | ModuleOp::Router, _) => elements,
            (ModuleOp::Expert(..), Some(experts)) => elements * experts.router.top_k as f64 / experts.count as f64,
            _ => 0.0,
        }
    });
    let weights = weights.sum::<f64>() + (spec.hidden_size * spec.vocab_size) as f64;
    // Frozen weights have no gradient; their adapters' products are not counted.
    let of_weight = if spec.lora.is_some() { 4.0 } else { 6.0 };
    let mixer = |block: usize| match spec.recurrence(block) {
        None => 6 * spec.attn_out_size() * args.seq_len,
        Some(Recurrence::GatedDelta { heads, .. }) => 18 * heads.state_elements(),
        Some(Recurrence::ShortConv { .. }) => 0,
    };
    (of_weight * weights + (0..spec.num_layers).map(mixer).sum::<usize>() as f64) * tokens as f64
}

/// Limit on the best burst as a multiple of the peak. Clocks differ by less; another program that takes a thread's
/// place halves the peak.
const MAX_SPREAD: f64 = 1.8;

/// The report. Rates and times are medians of the applied steps, because a skipped one lacks the update; `null` without
/// any.
fn summary(args: &BenchArgs, spec: &ModelSpec, samples: &[Measurement]) -> serde_json::Value {
    let tokens = args.batch_size * args.seq_len * args.grad_accum;
    let applied = || samples.iter().filter(|sample| sample.report.outcome != StepOutcome::Skipped);
    let of_applied = |of: fn(&Measurement) -> Duration| {
        median(applied().map(|sample| of(sample).as_secs_f64())).map(Duration::from_secs_f64)
    };
    let step = of_applied(|sample| sample.wall);
    let gflops = step.map(|step| operations(args, spec) / step.as_secs_f64() / 1e9);
    let peaks = || samples.iter().filter_map(|sample| sample.peak);
    let (peak, burst) = (median(peaks().map(|peak| peak.sustained)), peaks().map(|peak| peak.burst).reduce(f64::max));
    let part = |of: fn(&Measurement) -> Duration| of_applied(of).map(millis);
    let skipped = samples.len() - applied().count();
    json!({
        "who": "finetune",
        "version": env!("CARGO_PKG_VERSION"),
        "model": args.model,
        "layers": spec.num_layers,
        "batch": args.batch_size,
        "seq": args.seq_len,
        "grad_accum": args.grad_accum,
        "lora": spec.lora.as_ref().map(|lora| lora.r),
        "threads": rayon::current_num_threads(),
        "isa": Isa::current().to_string(),
        "tokens_per_s": step.map(|step| round(tokens as f64 / step.as_secs_f64())),
        "step_ms": step.map(millis),
        "forward_ms": part(|sample| sample.report.time.forward),
        "backward_ms": part(|sample| sample.report.time.backward),
        "grad_stats_ms": part(|sample| sample.report.time.grad_stats),
        "optimizer_ms": part(|sample| sample.report.time.optimizer),
        "step_ms_all": samples.iter().map(|sample| millis(sample.wall)).collect::<Vec<_>>(),
        "gflops": gflops.map(round),
        "peak_gflops": peak.map(round),
        "best_burst_gflops": burst.map(round),
        "disturbed": peak.zip(burst).map(|(peak, burst)| burst > MAX_SPREAD * peak),
        "share_of_peak": gflops.zip(peak).map(|(gflops, peak)| round(gflops / peak)),
        "peak_rss_mib": ProcessStats::now().peak_rss_bytes.map(|bytes| (bytes as f64 / 102.4 / 1024.0).round() / 10.0),
        "allocations_per_step": samples.iter().map(|sample| sample.allocations.count).min(),
        "allocated_bytes_per_step": samples.iter().map(|sample| sample.allocations.bytes).min(),
        "skipped": skipped,
        "loss_last": samples.last().map(|sample| sample.report.loss),
    })
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_unstable_by(f64::total_cmp);
    let middle = values.len() / 2;
    let upper = *values.get(values.len() / 2)?;
    Some(if values.len().is_multiple_of(2) { f64::midpoint(values[middle - 1], upper) } else { upper })
}

fn millis(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e5).round() / 1e2
}

/// Rounds to four decimals.
fn round(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        bench: BenchArgs,
    }

    fn bench(flags: &str) -> Result<serde_json::Value> {
        let args = Line::parse_from(std::iter::once("bench").chain(flags.split_whitespace())).bench;
        let mut out = Vec::new();
        run(&args, &mut out)?;
        Ok(serde_json::from_slice(&out).unwrap())
    }

    #[test]
    fn prints_one_json_object_with_the_figures() {
        let report =
            bench("--device cpu --model tiny --layers 1 --batch-size 2 --seq-len 8 --steps 3 --grad-accum 2").unwrap();
        assert_eq!(report["layers"], 1);
        assert_eq!(report["step_ms_all"].as_array().unwrap().len(), 3);
        assert_eq!(report["device"], "cpu");
        for figure in ["tokens_per_s", "step_ms", "forward_ms", "gflops", "peak_gflops", "share_of_peak"] {
            assert!(report[figure].as_f64().unwrap() > 0.0, "{figure} of {report}");
        }
    }

    #[test]
    fn a_profile_has_every_operation_of_a_step() {
        for (model, states) in [("tiny", 0.0), ("tests/golden/families/qwen3_5", 2.0 * 4.0 * 5.0 * 5.0)] {
            let line = "bench --device cpu --batch-size 2 --seq-len 16 --dtype fp32 --steps 2 --profile --model";
            let args = Line::parse_from(line.split_whitespace().chain([model])).bench;
            let spec = args.spec().unwrap();
            let report = measure(&args, &args.config(PrecisionPolicy::FP32).unwrap()).unwrap();
            let sum = |key: &str, names: &[&str]| {
                let lines = report["profile"].as_array().unwrap().iter();
                let chosen =
                    lines.filter(|line| names.is_empty() || names.contains(&line["operation"].as_str().unwrap()));
                chosen.map(|line| line[key].as_f64().unwrap()).sum::<f64>()
            };
            // One update changes all parameters.
            assert_eq!(sum("calls", &["Attention"]), spec.attention_layers() as f64);
            assert_eq!(sum("calls", &["AdamW"]), 1.0);
            let attention = 6.0 * (spec.attention_layers() * spec.attn_out_size() * args.seq_len) as f64;
            let tokens = (args.batch_size * args.seq_len) as f64;
            assert_eq!(sum("gflop", &["GatedDelta", "GatedDeltaBackward"]), 22.0 * states * tokens / 1e9);
            let products = operations(&args, &spec) - (attention + 18.0 * states) * tokens;
            assert!((sum("gflop", &["Linear", "Matmul"]) * 1e9 / products - 1.0).abs() < 1e-9, "{report}");
            let masters = 4.0 * spec.parameter_count() as f64;
            assert!((sum("mb", &["AdamW"]) * 1e6 / (7.0 * masters) - 1.0).abs() < 1e-9, "{report}");
            let share = sum("share", &[]);
            assert!(share > 0.1 && share <= 1.0, "{share} of {report}");
            let table = profile::table(&report);
            assert!(table.contains("AttentionBackward") && table.contains("outside operations"), "{table}");
        }
    }

    #[test]
    fn operations_are_counted_as_the_peer_counts_them() {
        let args = Line::parse_from(["bench", "--seq-len", "64", "--steps", "1"]).bench;
        let spec = args.spec().unwrap();
        let (l, d, v) = (6.0, 768.0, 50257.0);
        let per_token = 6.0 * (12.0 * l * d * d + d * v) + 12.0 * l * d * 64.0 / 2.0;
        let gflops = summary(&args, &spec, &[sample(1, APPLIED)])["gflops"].as_f64().unwrap();
        assert!((gflops - per_token * 32.0 * 64.0 / 1e9).abs() < 1e-3, "{gflops}");
    }

    #[test]
    fn a_disturbed_peak_is_named() {
        let args = Line::parse_from(["bench"]).bench;
        let spec = args.spec().unwrap();
        let mut samples = [sample(1, APPLIED), sample(1, APPLIED)];
        assert_eq!(summary(&args, &spec, &samples)["disturbed"], false);
        samples[0].peak = Some(Peak { sustained: 1.0, burst: 2.0 });
        assert_eq!(summary(&args, &spec, &samples)["disturbed"], true);
    }

    const APPLIED: StepOutcome = StepOutcome::Applied { grad_norm: 1.0, clip: 1.0, lr: 1.0 };

    fn sample(seconds: u64, outcome: StepOutcome) -> Measurement {
        let report = StepReport {
            metrics: None,
            loss: 0.0,
            targets: 1,
            scale: 1.0,
            outcome,
            change: crate::precision::ScaleChange::Held,
            time: crate::train::StepTimings::default(),
        };
        let peak = Some(Peak { sustained: 1.0, burst: 1.0 });
        Measurement { wall: Duration::from_secs(seconds), report, allocations: Allocations::default(), peak }
    }

    #[test]
    fn the_median_of_an_even_number_of_values_is_between_two() {
        assert_eq!(median([4.0, 1.0, 2.0].into_iter()), Some(2.0));
        assert_eq!(median([4.0, 1.0, 2.0, 3.0].into_iter()), Some(2.5));
        assert_eq!(median(std::iter::empty()), None);
    }

    #[test]
    fn skipped_steps_are_counted_and_not_part_of_the_rate() {
        let args = Line::parse_from(["bench"]).bench;
        let spec = args.spec().unwrap();
        let report = |samples: &[Measurement]| summary(&args, &spec, samples);
        let skip = || sample(1, StepOutcome::Skipped);
        let mixed = report(&[skip(), sample(8, APPLIED), skip(), skip()]);
        assert_eq!((mixed["skipped"].as_u64(), mixed["tokens_per_s"].as_f64()), (Some(3), Some(128.0)));
        let none = report(&[skip()]);
        assert!(none["tokens_per_s"].is_null() && none["share_of_peak"].is_null() && none["skipped"] == 1, "{none}");
    }
}
