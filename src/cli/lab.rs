//! `finetune lab`: the number-format laboratory, as text, JSON or a screen.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

use clap::{Args, Parser, Subcommand};
use serde::Serialize;

use crate::engine::model::ModelSpec;
use crate::lab::screen::{self, Adjust, Field, Instrument, Theme};
use crate::lab::{
    Bits, Comparison, Extent, Memory, Overflows, Page, Ranges, RunFigures, Scaling, UlpGrid, apply_setting, log_normal,
    model_named, parse_format, parse_value,
};
use crate::precision::FloatFormat;
use crate::telemetry::ProcessStats;
use crate::{Error, Result};

/// Flags of the laboratory.
#[derive(Args, Debug)]
#[command(subcommand_value_name = "VIEW", subcommand_help_heading = "Views")]
pub(crate) struct LabArgs {
    #[command(subcommand)]
    view: Option<View>,
    /// Print the report as JSON
    #[arg(long, global = true)]
    json: bool,
    /// Keep to ASCII
    #[arg(long, global = true)]
    ascii: bool,
    /// Columns of the text [default: the terminal's, or 80]
    #[arg(long, value_name = "COLUMNS", global = true)]
    width: Option<usize>,
    /// A run's folder or `events.jsonl`, to start from its numbers
    // An id of its own: a global flag's value is handed to the program's own `--run`, too, which names a run.
    #[arg(id = "lab_run", long = "run", value_name = "RUN", global = true)]
    run: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum View {
    /// A number in every format: its bits, what is stored, what is lost
    Bits {
        /// `1e-8`, `pi`, `2^-24`, `1 + 2^-11`, or a pattern: `fp16:0x3c00`, `bf16:…`, `fp32:…`, `e4m3:…`, `e5m2:…`
        #[arg(allow_hyphen_values = true)]
        value: String,
    },
    /// Every format's range on a log2 axis, with a value's or a run's numbers
    Ranges(RangesArgs),
    /// The grid of each format around a weight: does an update survive?
    Ulp(UlpArgs),
    /// The dynamic loss scale step by step, for up to four settings
    Scaler(ScalerArgs),
    /// A gradient's histogram under a movable loss scale
    Scaling(ScalingArgs),
    /// Bytes of training a model, by recipe
    Memory(MemoryArgs),
}

#[derive(Args, Debug)]
struct RangesArgs {
    /// Values to mark
    #[arg(allow_negative_numbers = true)]
    values: Vec<String>,
    /// Exponent at the chart's left end
    #[arg(long, value_name = "EXPONENT", default_value_t = Ranges::WHOLE.0, allow_negative_numbers = true)]
    from: i32,
    /// Exponent at the chart's right end
    #[arg(long, value_name = "EXPONENT", default_value_t = Ranges::WHOLE.1, allow_negative_numbers = true)]
    to: i32,
}

#[derive(Args, Debug)]
struct UlpArgs {
    /// The weight
    #[arg(long, value_name = "VALUE", default_value = "1.0", value_parser = parse_value, allow_hyphen_values = true)]
    center: f64,
    /// What a step adds to it
    #[arg(long, value_name = "VALUE", default_value = "5e-5", value_parser = parse_value, allow_hyphen_values = true)]
    update: f64,
}

#[derive(Args, Debug)]
struct ScalerArgs {
    /// Options of the scaler that all settings share, such as `init_scale=32768,growth_interval=5`
    #[arg(long, value_name = "KEY=VALUE,…", default_value = "")]
    base: String,
    /// A setting to compare with the base, such as `growth_interval=200,hysteresis=2`; up to three
    #[arg(long, value_name = "KEY=VALUE,…")]
    setting: Vec<String>,
    /// Steps, where no run is replayed
    #[arg(long, default_value_t = 20)]
    steps: usize,
    /// Steps that overflow, counted from 0
    #[arg(long, value_name = "STEP,…", value_delimiter = ',')]
    overflow_at: Vec<u64>,
    /// Probability that a step overflows
    #[arg(long, value_name = "SHARE", conflicts_with = "overflow_at")]
    rate: Option<f64>,
    /// The seed of drawn overflows
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

#[derive(Args, Debug)]
struct ScalingArgs {
    /// `fp16`, `bf16`, `fp32`, `e4m3` or `e5m2`
    #[arg(long, default_value = "fp16", value_parser = parse_format)]
    format: FloatFormat,
    /// log2 of the loss scale in view [default: the best]
    #[arg(long, value_name = "EXPONENT", allow_negative_numbers = true)]
    scale: Option<i32>,
    /// Mean of log2 of the magnitudes, where no run is read
    #[arg(long, default_value_t = -22.0, allow_negative_numbers = true)]
    mu: f64,
    /// Standard deviation of log2 of the magnitudes
    #[arg(long, default_value_t = 4.0)]
    sigma: f64,
    /// Number of gradients
    #[arg(long, default_value_t = 82_000_000)]
    count: u64,
}

#[derive(Args, Debug)]
struct MemoryArgs {
    /// `tiny`, `distilgpt2`, `gpt2`, …, `gpt2-xl`, `7b`, or a number of parameters such as `350M`
    #[arg(long)]
    model: Option<String>,
    /// Sequences in a micro-batch
    #[arg(long)]
    batch: Option<usize>,
    /// Tokens in a sequence
    #[arg(long)]
    seq: Option<usize>,
    /// Micro-batches in a step
    #[arg(long)]
    grad_accum: Option<usize>,
    /// Memory to fit in: `16G`, `512M`
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    memory: Option<u64>,
}

/// Prints a view, or shows the screen where none is named.
pub(crate) fn run(args: &LabArgs, out: &mut dyn Write) -> Result<()> {
    let mut bench = Bench::new();
    let terminal = std::io::stdout().is_terminal();
    let Some(view) = &args.view else {
        if !terminal || !std::io::stdin().is_terminal() || args.json {
            let message =
                "the screen needs a terminal; name a view to print: bits, ranges, ulp, scaler, scaling, memory";
            return Err(Error::config("lab", message));
        }
        return show_screen(args, &mut bench);
    };
    let report = bench.report(view, args.run.as_deref())?;
    let text = if args.json {
        report.json()? + "\n"
    } else {
        let page = (report.page)(args.width.unwrap_or_else(terminal_width));
        let page = if args.ascii { page.ascii() } else { page };
        page.printed(terminal)
    };
    out.write_all(text.as_bytes()).map_err(Error::io("write to", "standard output"))
}

pub(super) fn terminal_width() -> usize {
    let size = std::io::stdout().is_terminal().then(ratatui::crossterm::terminal::size);
    size.and_then(std::result::Result::ok).map_or(80, |(columns, _)| usize::from(columns).max(40))
}

/// A report that is not yet rendered.
struct Report {
    page: Box<dyn Fn(usize) -> Page>,
    json: serde_json::Result<String>,
}

impl Report {
    fn new<T: Serialize + 'static>(report: T, page: fn(&T, usize) -> Page) -> Self {
        Self { json: serde_json::to_string_pretty(&report), page: Box::new(move |width| page(&report, width)) }
    }

    fn json(self) -> Result<String> {
        self.json.map_err(|error| Error::config("json", error.to_string()))
    }
}

/// Makes reports; keeps the run it has read.
struct Bench {
    read: Option<(PathBuf, RunFigures)>,
    /// What the program takes by itself, in bytes.
    program: u64,
}

impl Bench {
    fn new() -> Self {
        // What training needs beyond that, measured with `tiny` in each type: some 5 MB of code and tables that this command
        // does not touch; packed operands, threads' stacks, text, tokenizer, and what the allocator holds back.
        const TRAINING: u64 = 10 << 20;
        Self { read: None, program: ProcessStats::now().rss_bytes.unwrap_or(0) + TRAINING }
    }

    fn report(&mut self, view: &View, run: Option<&Path>) -> Result<Report> {
        let program = self.program;
        let run = run.map(|path| self.read(path)).transpose()?;
        Ok(match view {
            View::Bits { value } => Report::new(Bits::of(value)?, Bits::page),
            View::Ranges(args) => Report::new(args.report(run)?, Ranges::page),
            View::Ulp(args) => Report::new(UlpGrid::new(args.center, args.update), UlpGrid::page),
            View::Scaler(args) => Report::new(args.report(run)?, Comparison::page),
            View::Scaling(args) => Report::new(args.report(run)?, Scaling::page),
            View::Memory(args) => Report::new(args.report(run, program)?, Memory::page),
        })
    }

    fn read(&mut self, path: &Path) -> Result<&RunFigures> {
        if self.read.as_ref().is_none_or(|(read, _)| read != path) {
            self.read = None;
        }
        let (_, figures) = match self.read.take() {
            Some(kept) => self.read.insert(kept),
            None => self.read.insert((path.to_path_buf(), RunFigures::read(path)?)),
        };
        Ok(figures)
    }
}

impl RangesArgs {
    fn report(&self, run: Option<&RunFigures>) -> Result<Ranges> {
        let values = self.values.iter().map(|text| Ok(Extent::value(text.trim(), parse_value(text)?)));
        let mut extents = values.collect::<Result<Vec<_>>>()?;
        if let Some(run) = run {
            extents.extend(run.extents()?);
        }
        Ok(Ranges::new(extents, (self.from, self.to)))
    }
}

impl ScalerArgs {
    fn report(&self, run: Option<&RunFigures>) -> Result<Comparison> {
        if self.setting.len() > 3 {
            return Err(Error::config("--setting", "four settings can be compared: the base and three others"));
        }
        if let Some(rate) = self.rate.filter(|rate| !(0.0..=1.0).contains(rate)) {
            return Err(Error::config("--rate", format!("{rate} is not a share between 0 and 1")));
        }
        let started = run.and_then(|run| serde_json::from_value(run.started.config.get("scaler")?.clone()).ok());
        let base = apply_setting(started.unwrap_or_default(), &self.base)?;
        let overflows = match (run, self.rate) {
            (Some(run), _) => run.overflows(),
            (None, Some(rate)) => Overflows::drawn(rate, self.steps, self.seed),
            (None, None) => Overflows::at(&self.overflow_at, self.steps),
        };
        let label = if self.base.is_empty() { "base" } else { self.base.trim() };
        let others = self.setting.iter().map(|text| Ok((text.clone(), apply_setting(base, text)?)));
        let settings = std::iter::once(Ok((label.to_owned(), base))).chain(others).collect::<Result<_>>()?;
        Comparison::run(settings, &overflows)
    }
}

impl ScalingArgs {
    fn report(&self, run: Option<&RunFigures>) -> Result<Scaling> {
        if !(self.sigma > 0.0 && self.sigma.is_finite() && self.mu.is_finite()) {
            return Err(Error::config("--sigma", "the mean must be finite, the deviation finite and above 0"));
        }
        let (source, gradients) = if let Some(run) = run {
            run.gradients()?
        } else {
            let source = format!("log-normal around 2^{}, deviation {} binades", self.mu, self.sigma);
            (source, log_normal(self.mu, self.sigma, self.count))
        };
        Ok(Scaling::new(source, gradients, self.format, self.scale))
    }
}

impl MemoryArgs {
    /// What is not given is the run's, or that of a small fine-tuning on distilgpt2.
    fn report(&self, run: Option<&RunFigures>, program: u64) -> Result<Memory> {
        let setting = |path| run.and_then(|run| run.setting(path)).map(|value| value as usize);
        let batch = self.batch.or_else(|| setting("/train/batch_size")).unwrap_or(32);
        let seq = self.seq.or_else(|| setting("/train/seq_len")).unwrap_or(32);
        let accum = self.grad_accum.or_else(|| setting("/train/grad_accum")).unwrap_or(1);
        let (name, config) = match (&self.model, run) {
            (None, Some(run)) => (run.started.model.clone(), shape_of(run)?),
            (name, _) => {
                let name = name.as_deref().unwrap_or("distilgpt2");
                (name.to_owned(), model_named(name)?)
            }
        };
        if [batch, seq, accum].contains(&0) {
            return Err(Error::config("--batch", "batch, sequence and micro-batches must be 1 or more"));
        }
        let mut memory = Memory::new(&name, &config, (batch, seq, accum), self.memory, program)?;
        let as_it_ran = self.model.is_none() && self.batch.is_none() && self.seq.is_none() && self.grad_accum.is_none();
        if as_it_ran && let Some(run) = run {
            memory.measured = run.peak_rss_bytes.map(|peak| (run.policy(), peak));
        }
        Ok(memory)
    }
}

/// The shape of a run's model: its `config.json`, or in a log of an earlier version what the dimensions say of a GPT-2.
fn shape_of(run: &RunFigures) -> Result<ModelSpec> {
    if run.started.model_config.is_object() {
        return ModelSpec::from_json(run.started.model_config.to_string().as_bytes(), "the run's log");
    }
    let shape = run.started.shape;
    let (vocab_size, context) = (shape.vocab_size, shape.n_positions);
    let base = model_named("gpt2")?.resized(shape.n_layer, shape.n_embd, shape.n_head);
    let spec = ModelSpec { vocab_size, context, ..base };
    let tied = run.started.parameters <= spec.parameter_count();
    Ok(ModelSpec { tied, ..spec })
}

/// Reads `16G`, `512M`, `1.5GiB`; units are binary.
fn parse_bytes(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        other => return Err(format!("`{other}` is no unit; write `16G` or `512M`")),
    };
    let value: f64 = digits.trim().parse().map_err(|_| format!("`{text}` is no size; write `16G` or `512M`"))?;
    if value > 0.0 && value < 1e6 * f64::from(1u32 << 20) {
        Ok((value * 2f64.powi(unit)) as u64)
    } else {
        Err("must be above 0".into())
    }
}

/// What a view's fields amount to, read as if typed.
#[derive(Parser)]
#[command(no_binary_name = true, disable_help_flag = true)]
struct Typed {
    #[command(subcommand)]
    view: View,
}

fn show_screen(args: &LabArgs, bench: &mut Bench) -> Result<()> {
    screen::run(instruments(args.run.as_deref()), Theme::from_env(args.ascii), |view, fields, width| {
        evaluate(bench, view, fields, width)
    })
}

/// The page of `view` for the values of its fields, as `finetune lab VIEW` would print it.
fn evaluate(bench: &mut Bench, view: &str, fields: &[(&str, &str)], width: usize) -> Result<Page> {
    let run = fields.iter().find(|(flag, _)| *flag == "run").map(|(_, path)| PathBuf::from(path));
    let mut typed = vec![view.to_owned()];
    for (flag, value) in fields.iter().filter(|(flag, _)| *flag != "run") {
        match *flag {
            "value" => typed.push((*value).to_owned()),
            "values" => typed.extend(value.split(',').map(str::to_owned)),
            // Numbered, so that each of them has a field.
            "setting-2" | "setting-3" | "setting-4" => typed.push(format!("--setting={value}")),
            flag => typed.push(format!("--{flag}={value}")),
        }
    }
    let typed = Typed::try_parse_from(typed).map_err(|error| {
        let text = error.to_string();
        Error::config(view, text.lines().next().unwrap_or_default().trim_start_matches("error: "))
    })?;
    let report = bench.report(&typed.view, run.as_deref())?;
    Ok((report.page)(width))
}

/// The views with their parameters, as the screen first shows them.
fn instruments(run: Option<&Path>) -> Vec<Instrument> {
    use Adjust::{Among, Count, Double, Scale, Typed};
    const FORMATS: &[&str] = &["fp16", "bf16", "fp32", "e4m3", "e5m2"];
    const MODELS: &[&str] = &["tiny", "distilgpt2", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "7b"];
    const MEMORY: &[&str] = &["4G", "8G", "16G", "24G", "40G", "80G", "141G"];
    let field = Field::new;
    let run = run.map(|run| run.display().to_string()).unwrap_or_default();
    let run = || field("run", &run, Typed);
    let instrument = |name, fields: Vec<Field>| Instrument { name, fields };
    vec![
        instrument("bits", vec![field("value", "pi", Among(&Bits::PRESETS))]),
        instrument(
            "ranges",
            vec![
                field("values", "1e-8,65504", Typed),
                field("from", "-150", Count(-150)),
                field("to", "130", Count(130)),
                run(),
            ],
        ),
        instrument("ulp", vec![field("center", "1", Scale), field("update", "5e-5", Scale)]),
        instrument(
            "scaler",
            vec![
                field("base", "init_scale=32768,growth_interval=5", Typed),
                field("setting-2", "", Typed),
                field("setting-3", "", Typed),
                field("setting-4", "", Typed),
                field("steps", "20", Double(20)),
                field("overflow-at", "10", Typed),
                field("rate", "", Typed),
                field("seed", "0", Count(0)),
                run(),
            ],
        ),
        instrument(
            "scaling",
            vec![
                field("scale", "0", Count(0)),
                field("format", "fp16", Among(FORMATS)),
                field("mu", "-22", Count(-22)),
                field("sigma", "4", Double(4)),
                run(),
            ],
        ),
        instrument(
            "memory",
            vec![
                field("model", "distilgpt2", Among(MODELS)),
                field("batch", "32", Double(32)),
                field("seq", "32", Double(32)),
                field("grad-accum", "1", Double(1)),
                field("memory", "16G", Among(MEMORY)),
            ],
        ),
    ]
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[derive(Parser)]
    struct Lab {
        #[command(flatten)]
        args: LabArgs,
    }

    fn lab(typed: &str) -> Result<String> {
        let args = Lab::try_parse_from(std::iter::once("lab").chain(typed.split(' '))).unwrap().args;
        let mut out = Vec::new();
        run(&args, &mut out)?;
        Ok(String::from_utf8(out).unwrap())
    }

    /// Every tab of the screen shows what the command line prints, at both sizes, without an error.
    #[test]
    fn every_instrument_has_a_page() {
        for instrument in instruments(None) {
            let given = instrument.fields.iter().filter(|field| !field.value.is_empty());
            let fields: Vec<_> = given.map(|field| (field.flag, field.value.as_str())).collect();
            for width in [78, 118] {
                let page = evaluate(&mut Bench::new(), instrument.name, &fields, width).unwrap();
                let widest = page.text().lines().map(|line| line.chars().count()).max().unwrap();
                assert!(widest <= width, "{}: {widest} > {width}\n{}", instrument.name, page.text());
                assert!(page.lines.len() <= 28, "{}: {} lines", instrument.name, page.lines.len());
            }
        }
    }

    #[test]
    fn pictures() {
        for (width, height) in [(80, 24), (120, 36)] {
            for (tab, instrument) in instruments(None).into_iter().enumerate() {
                let mut bench = Bench { program: 24 << 20, ..Bench::new() };
                let evaluate = |view: &str, fields: &[(&str, &str)], width| evaluate(&mut bench, view, fields, width);
                let picture = screen::picture(instruments(None), tab, (width, height), evaluate);
                insta::assert_snapshot!(format!("{}_{width}x{height}", instrument.name), picture);
            }
        }
    }

    #[test]
    fn views_print_text_or_json() {
        assert!(lab("bits -1e-8 --width 80").unwrap().contains("zero by underflow"));
        let json: serde_json::Value = serde_json::from_str(&lab("bits 65520 --json").unwrap()).unwrap();
        assert_eq!(json["formats"][1]["value"], "inf");
        assert_eq!(json["formats"][1]["fate"], "overflow");
        assert!(lab("ulp --center 1.0 --update -5e-5 --ascii").unwrap().is_ascii());
        let json: serde_json::Value = serde_json::from_str(&lab("ulp --json").unwrap()).unwrap();
        assert_eq!(json["formats"][1]["steps_with_master"], 10);
        assert!(lab("ranges 2^-24 65504 --from -30 --to 20").unwrap().contains("65504"));
        assert!(lab("scaling --format e5m2 --scale -3").unwrap().starts_with("FP8 E5M2 at loss scale 2^-3"));
        assert!(lab("memory --model gpt2-xl --batch 1 --seq 1024 --memory 24G").unwrap().contains("batch 24.0 GiB"));
        let simulated = lab("scaler --base init_scale=32768,growth_interval=5 --overflow-at 10").unwrap();
        assert!(simulated.contains("10–14                65536  ✕ overflow, skipped; backed off from 2^17"));
    }

    #[test]
    fn what_makes_no_sense_is_one_clear_error() {
        for (typed, part) in [
            ("bits one", "cannot read `one`"),
            ("scaler --rate 2", "--rate: 2 is not a share"),
            ("scaler --setting a=1", "`a` is no option of the scaler"),
            ("scaler --setting= --setting= --setting= --setting=", "four settings"),
            ("scaling --sigma 0", "above 0"),
            ("memory --model bert", "`bert` is not one of"),
            ("memory --batch 0", "1 or more"),
            ("ranges --run nowhere", "nowhere"),
        ] {
            let error = lab(typed).unwrap_err();
            assert!(error.to_string().contains(part), "{typed}: {error}");
        }
        assert!(parse_bytes("16Q").is_err() && parse_bytes("G").is_err() && parse_bytes("-1G").is_err());
        assert_eq!(parse_bytes("1.5 GiB"), Ok(3 << 29));
    }
}
