//! The arguments of `finetune lab`: the views and their flags.

use crate::engine::optim::Sharding;
use crate::lab::screen::Adjust::{self, Among, By, Count, Double, Scale, Typed};
use crate::lab::screen::{Control, Controls};
use crate::lab::{Bits, FailureDemo, Scheme, Softmax, Terms, parse_format, parse_value};
use crate::precision::{FloatFormat, PrecisionPolicy};
use clap::builder::{PossibleValuesParser, RangedI64ValueParser, TypedValueParser};
use clap::{Args, Subcommand};
use std::error::Error;
use std::str::FromStr;
use strum::VariantNames;

#[derive(Debug, Subcommand)]
pub(super) enum LabView {
    /// A number in every format: its bits, what is stored, what is lost
    Bits(BitsArgs),
    /// Every format's range on a log2 axis, with a value's or a run's numbers
    Ranges(RangesArgs),
    /// The values of each format around a weight, and whether an update survives rounding
    Ulp(UlpArgs),
    /// A simulation of the dynamic loss scale, for up to four settings
    Scaler(ScalerArgs),
    /// A histogram of gradients under an adjustable loss scale
    Underflow(UnderflowArgs),
    /// Memory for training a model, by recipe
    Memory(MemoryArgs),
    /// The error of long sums and dot products, by accumulator
    Sums(SumsArgs),
    /// A tensor's scales, codes and errors in FP8, MXFP8, NVFP4 and INT8
    Blocks(BlocksArgs),
    /// Softmax and positions in half precision
    Softmax(SoftmaxArgs),
    /// Underflowing gradients, overflowing activations, lost updates: causes and remedies
    Failures(FailuresArgs),
    /// The type inside each operation, measured, and of each tensor that a step stores
    Dtypes(DtypesArgs),
}

const FORMATS: &[&str] = &["fp16", "bf16", "fp32", "e4m3", "e5m2"];
const MODELS: &[&str] = &["tiny", "distilgpt2", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "7b"];
const MEMORY_SIZES: &[&str] = &["4GB", "8GB", "16GB", "24GB", "40GB", "80GB", "141GB"];
const SWITCH: Control = control(Among(&["", "yes"])).start("");

const fn control(adjust: Adjust) -> Control {
    Control::new(adjust)
}

/// Parses the name of a variant.
fn variants<T: VariantNames + FromStr<Err: Error + Send + Sync> + Clone + Send + Sync + 'static>()
-> impl TypedValueParser<Value = T> {
    PossibleValuesParser::new(T::VARIANTS).try_map(|name| name.parse())
}

/// Parses an exponent in a range wider than FP32's, from -149 to 127.
fn exponents() -> RangedI64ValueParser<i32> {
    RangedI64ValueParser::new().range(-256..=256)
}

/// The scaler's options as parameters, named as in the `[scaler]` table.
const OPTIONS: &[(&str, Control)] = &[
    ("init_scale", control(Scale).start_from_run("65536")),
    ("growth_factor", control(By(0.5)).within(1.5, f64::MAX).start_from_run("2")),
    ("backoff_factor", control(By(0.05)).within(0.05, 0.95).start_from_run("0.5")),
    ("growth_interval", control(Double(50)).start_from_run("50")),
    ("min_scale", control(Scale).start_from_run("1").rare()),
    ("hysteresis", control(Count(1)).within(1.0, f64::MAX).start_from_run("1").rare()),
    ("consecutive_hysteresis", control(Among(&["false", "true"])).start_from_run("false").rare()),
    ("on_overflow", control(Among(&["skip", "retry"])).start_from_run("skip").rare()),
    ("mode", control(Among(&["dynamic", "predictive"])).start_from_run("dynamic").rare()),
];
const SETTINGS: &[(&str, Control)] =
    &[("setting-2", control(Typed)), ("setting-3", control(Typed).rare()), ("setting-4", control(Typed).rare())];

#[derive(Args, Debug)]
pub(super) struct BitsArgs {
    /// `1e-8`, `pi`, `2^-24`, `1 + 2^-11`, or a pattern: `fp16:0x3c00`, `bf16:…`, `fp32:…`, `e4m3:…`, `e5m2:…`
    #[arg(allow_hyphen_values = true, default_value = "pi", add = control(Among(&Bits::PRESETS)))]
    pub(super) value: String,
    /// The format whose bit is marked
    #[arg(long = "in", value_name = "FORMAT", default_value = "fp16", value_parser = parse_format,
          add = control(Among(FORMATS)))]
    pub(super) format: FloatFormat,
    /// A bit to explain, counted from the left
    #[arg(long, value_name = "BIT", value_parser = clap::value_parser!(u32).range(..32),
          add = control(Count(0)).start("0").within(0.0, 31.0))]
    pub(super) cursor: Option<u32>,
}

#[derive(Args, Debug)]
pub(super) struct SumsArgs {
    /// The numbers that are summed
    #[arg(long, default_value = "uniform", value_parser = variants::<Terms>(), add = control(Among(Terms::VARIANTS)))]
    pub(super) terms: Terms,
    /// Terms of the longest sum [default: 16384, or the longest product of the run's model]
    #[arg(long, add = control(Double(4096)).start_from_run("16384"))]
    pub(super) length: Option<usize>,
    /// Sum products of two sequences
    #[arg(long, add = SWITCH)]
    pub(super) dot: bool,
    /// The seed of stochastic rounding
    #[arg(long, default_value_t = 0, add = control(Count(0)).within(0.0, f64::MAX))]
    pub(super) seed: u64,
}

#[derive(Args, Debug)]
pub(super) struct BlocksArgs {
    /// The scheme whose first block is shown
    #[arg(long, default_value = "mxfp8", value_parser = variants::<Scheme>(), add = control(Among(Scheme::VARIANTS)))]
    pub(super) scheme: Scheme,
    /// Factor on the first value of each row
    #[arg(long, value_name = "FACTOR", default_value = "1", value_parser = parse_value, allow_hyphen_values = true,
          add = control(Scale))]
    pub(super) outlier: f64,
    /// The amax that delayed scaling uses, as a factor on the tensor's actual one
    #[arg(long, value_name = "FACTOR", default_value = "1", value_parser = parse_value, add = control(Scale))]
    pub(super) stale_amax: f64,
    /// Rows of the tensor, without a run
    #[arg(long, default_value_t = 8, add = control(Double(8)))]
    pub(super) rows: usize,
    /// Its columns, a multiple of 128
    #[arg(long, default_value_t = 512, add = control(Double(512)))]
    pub(super) columns: usize,
    /// The seed of its values
    #[arg(long, default_value_t = 0, add = control(Count(0)).within(0.0, f64::MAX))]
    pub(super) seed: u64,
}

#[derive(Args, Debug)]
pub(super) struct SoftmaxArgs {
    /// The largest logit; the others are 0 [default: 12, or the largest that a run's FP32 probe saw]
    #[arg(long, value_parser = parse_value, allow_hyphen_values = true, add = control(By(1.0)).start_from_run("12"))]
    pub(super) logit: Option<f64>,
    /// Tokens [default: 4096, or the run's sequence]
    #[arg(long, value_parser = clap::value_parser!(u64).range(2..=Softmax::MAX_LENGTH),
          add = control(Double(4096)).start_from_run("4096"))]
    pub(super) length: Option<u64>,
    /// A position
    #[arg(long, value_parser = parse_value, default_value = "4095", add = control(Count(4095)).within(0.0, f64::MAX))]
    pub(super) position: f64,
}

#[derive(Args, Debug)]
pub(super) struct DtypesArgs {
    /// `fp32`, `fp16`, `bf16`, or `p=f32,c=f16,g=f32,r=f32` [default: the run's, or fp16]
    #[arg(long, add = control(Among(&["fp16", "bf16", "fp32"])).start_from_run("fp16"))]
    pub(super) policy: Option<PrecisionPolicy>,
}

#[derive(Args, Debug)]
pub(super) struct FailuresArgs {
    /// A small gradient [default: 1e-8, or the run's smallest]
    #[arg(long, value_parser = parse_value, allow_hyphen_values = true, add = control(Scale).start_from_run("1e-8"))]
    pub(super) small: Option<f64>,
    /// A large gradient [default: 3, or the run's largest]
    #[arg(long, value_parser = parse_value, allow_hyphen_values = true, add = control(Scale).start_from_run("3"))]
    pub(super) large: Option<f64>,
    /// The loss scale [default: 65536, or the run's first]
    #[arg(long, value_parser = parse_value, add = control(Scale).start_from_run("65536"))]
    pub(super) scale: Option<f64>,
    /// An activation, which a norm squares and attention multiplies
    #[arg(long, value_parser = parse_value, allow_hyphen_values = true, default_value = "300", add = control(Scale))]
    pub(super) activation: f64,
    /// A weight
    #[arg(long, value_parser = parse_value, allow_hyphen_values = true, default_value = "1", add = control(Scale))]
    pub(super) weight: f64,
    /// The update of a step [default: 5e-5, or the run's learning rate, Adam's usual step]
    #[arg(long, value_parser = parse_value, allow_hyphen_values = true, add = control(Scale).start_from_run("5e-5"))]
    pub(super) update: Option<f64>,
    /// Steps
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(..=FailureDemo::MAX_STEPS),
          add = control(Double(3)))]
    pub(super) steps: u64,
}

#[derive(Args, Debug)]
pub(super) struct RangesArgs {
    /// Values to mark
    #[arg(allow_negative_numbers = true, default_values = ["1e-8", "65504"], add = control(Typed).start("1e-8,65504"))]
    pub(super) values: Vec<String>,
    /// Exponent at the chart's left end [default: automatic]
    #[arg(long, value_name = "EXPONENT", allow_negative_numbers = true, value_parser = exponents(),
          add = control(Count(-30)))]
    pub(super) from: Option<i32>,
    /// Exponent at the chart's right end [default: automatic]
    #[arg(long, value_name = "EXPONENT", allow_negative_numbers = true, value_parser = exponents(),
          add = control(Count(40)))]
    pub(super) to: Option<i32>,
}

#[derive(Args, Debug)]
pub(super) struct UlpArgs {
    /// The weight [default: 1, or the root mean square of the run's]
    #[arg(long, value_name = "VALUE", value_parser = parse_value, allow_hyphen_values = true,
          add = control(Scale).start_from_run("1"))]
    pub(super) center: Option<f64>,
    /// The update of a step [default: 5e-5, or the run's learning rate, Adam's usual step]
    #[arg(long, value_name = "VALUE", value_parser = parse_value, allow_hyphen_values = true,
          add = control(Scale).start_from_run("5e-5"))]
    pub(super) update: Option<f64>,
}

#[derive(Args, Debug)]
pub(super) struct ScalerArgs {
    /// Options of the scaler that all settings share, such as `init_scale=32768` [default: `growth_interval=50`, or the
    /// run's]
    #[arg(long, value_name = "KEY=VALUE,…", add = Controls(OPTIONS))]
    pub(super) base: Option<String>,
    /// A setting to compare with the base, such as `growth_interval=200,hysteresis=2`; up to three
    #[arg(long, value_name = "KEY=VALUE,…", add = Controls(SETTINGS))]
    pub(super) setting: Vec<String>,
    /// Mean of log2 max|g|, or `none` for gradients that overflow only where forced
    #[arg(long, value_name = "EXPONENT", default_value = "-1", allow_hyphen_values = true, add = control(By(1.0)))]
    pub(super) level: String,
    /// Standard deviation of log2 max|g|
    #[arg(long, value_parser = parse_value, default_value_t = 1.0, add = control(By(0.25)).within(0.0, f64::MAX))]
    pub(super) sigma: f64,
    /// Change of the level in 1,000 steps, in binades
    #[arg(long, value_parser = parse_value, default_value_t = 0.0, allow_negative_numbers = true,
          add = control(By(0.5)).rare())]
    pub(super) drift: f64,
    /// Share of steps with a spike
    #[arg(long, value_name = "SHARE", value_parser = parse_value, default_value_t = 0.0,
          add = control(By(0.005)).within(0.0, 1.0).rare())]
    pub(super) spikes: f64,
    /// Height of a spike, in binades
    #[arg(long, value_parser = parse_value, default_value_t = 6.0, allow_negative_numbers = true,
          add = control(By(1.0)).rare())]
    pub(super) spike: f64,
    /// The step at which the level rises by `--jump` binades
    #[arg(long, value_name = "STEP", add = control(Count(1000)).within(0.0, f64::MAX).rare())]
    pub(super) jump_at: Option<u64>,
    /// Height of the jump at `--jump-at`, in binades
    #[arg(long, value_parser = parse_value, default_value_t = 6.0, allow_negative_numbers = true,
          add = control(By(1.0)).rare())]
    pub(super) jump: f64,
    /// Number of steps, without a run
    // The help has it after `--setting`.
    #[arg(long, display_order = 1, default_value_t = 2000, add = control(Double(2000)))]
    pub(super) steps: usize,
    /// Steps that are forced to overflow, counted from 0
    #[arg(long, value_name = "STEP,…", value_delimiter = ',', add = control(Typed))]
    pub(super) overflow_at: Vec<u64>,
    /// Probability that a step is forced to overflow
    #[arg(long, value_name = "SHARE", value_parser = parse_value, default_value_t = 0.0,
          add = control(By(0.01)).start("").within(0.0, 1.0).rare())]
    pub(super) rate: f64,
    /// The seed of the gradients
    #[arg(long, default_value_t = 0, add = control(Count(0)).within(0.0, f64::MAX).rare())]
    pub(super) seed: u64,
    /// Repeat with this many seeds, and print means with 95 % intervals
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(2..=10_000),
          add = control(Count(10)).within(2.0, 100.0).rare())]
    pub(super) seeds: Option<u64>,
    /// A step to explain, where the chart ends
    #[arg(long, value_name = "STEP", add = control(Count(0)).within(0.0, f64::MAX).rare())]
    pub(super) cursor: Option<u64>,
}

#[derive(Args, Debug)]
pub(super) struct UnderflowArgs {
    /// log2 of the loss scale to show [default: the best]
    // The help has it after `--format`.
    #[arg(long, display_order = 1, value_name = "EXPONENT", allow_negative_numbers = true, value_parser = exponents(),
          add = control(Count(0)))]
    pub(super) scale: Option<i32>,
    /// `fp16`, `bf16`, `fp32`, `e4m3` or `e5m2`
    #[arg(long, default_value = "fp16", value_parser = parse_format, add = control(Among(FORMATS)))]
    pub(super) format: FloatFormat,
    /// Mean of log2 of the magnitudes, without a run
    #[arg(long, value_parser = parse_value, default_value_t = -22.0, allow_negative_numbers = true,
          add = control(By(1.0)))]
    pub(super) mu: f64,
    /// Standard deviation of log2 of the magnitudes
    #[arg(long, value_parser = parse_value, default_value_t = 4.0, add = control(By(0.5)).within(0.5, f64::MAX))]
    pub(super) sigma: f64,
    /// Number of gradients
    #[arg(long, default_value_t = 82_000_000, value_parser = clap::value_parser!(u64).range(1..1 << 53))]
    pub(super) count: u64,
    /// Use a linear instead of a logarithmic axis for the counts
    #[arg(long, add = SWITCH)]
    pub(super) linear: bool,
}

#[derive(Args, Debug)]
pub(super) struct MemoryArgs {
    /// `tiny`, `distilgpt2`, `gpt2`, …, `gpt2-xl`, `7b`, a number of parameters such as `350M`, or a folder or .gguf
    /// file
    #[arg(long, add = control(Among(MODELS)).start_from_run("distilgpt2"))]
    pub(super) model: Option<String>,
    /// Sequences in a micro-batch
    #[arg(long, add = control(Double(32)).start_from_run("32"))]
    pub(super) batch: Option<usize>,
    /// Tokens in a sequence
    #[arg(long, add = control(Double(32)).start_from_run("32"))]
    pub(super) seq: Option<usize>,
    /// Micro-batches in a step
    #[arg(long, add = control(Double(1)).start_from_run("1"))]
    pub(super) grad_accum: Option<usize>,
    /// Processes that share a step; the figures are for one of them
    #[arg(long, default_value_t = 1, add = control(Double(1)))]
    pub(super) processes: usize,
    #[arg(long, value_name = "PART", default_value = "optimizer", value_parser = Sharding::parse,
          help = Sharding::HELP)]
    pub(super) shard: Sharding,
    /// Rank of the adapters of `LoRA`
    #[arg(long, default_value_t = 16, add = control(Double(16)))]
    pub(super) rank: usize,
    /// Memory to fit in: `16GB`, `512MB`, `16GiB`
    #[arg(long, value_name = "BYTES", default_value = "16GB", value_parser = parse_bytes,
          add = control(Among(MEMORY_SIZES)))]
    pub(super) memory: Option<u64>,
    /// Count attention's scores, which candle's operations on a GPU store [default: as the run did]
    #[arg(long)]
    pub(super) gpu: bool,
}

/// Reads `16G`, `16GB` and `512M`, whose units are decimal, and `1.5GiB`, whose unit is binary.
fn parse_bytes(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = text[digits.len()..].to_ascii_lowercase();
    let base: f64 = if unit.ends_with("ib") { 1024.0 } else { 1000.0 };
    let power = match unit.trim_end_matches('b').trim_end_matches('i') {
        "" => 0,
        "k" => 1,
        "m" => 2,
        "g" => 3,
        "t" => 4,
        _ => return Err(format!("unknown unit `{unit}`; write `16GB` or `16GiB`")),
    };
    let value: f64 = digits.trim().parse().map_err(|_| format!("`{text}` is not a size; write `16GB` or `16GiB`"))?;
    let bytes = value * base.powi(power);
    if (1.0..1e15).contains(&bytes) { Ok(bytes as u64) } else { Err("must be above 0 and below 1000TB".into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_decimal_or_binary_units() {
        assert!(parse_bytes("16Q").is_err() && parse_bytes("G").is_err() && parse_bytes("-1G").is_err());
        assert!(parse_bytes("1e9T").unwrap_err().contains("below 1000TB"));
        let sizes = ["1.5 GiB", "80GB", "80G", "512 MiB", "7", "2000000000000"].map(|size| parse_bytes(size).unwrap());
        assert_eq!(sizes, [3 << 29, 80_000_000_000, 80_000_000_000, 512 << 20, 7, 2_000_000_000_000]);
    }
}
