//! `finetune bisect`: the cost of 16 bits in a training step, by layer and kind of tensor.

use crate::cli::flags::ConfigArgs;
use crate::cli::reporter::Reporter;
use crate::cli::run_lookup::{file_of_run, run_folder};
use crate::cli::train::thread_pool;
use crate::engine::collective::SingleProcess;
use crate::precision::{Dtype, PrecisionUnit};
use crate::settings::number;
use crate::store::checkpoint::{Checkpoint, CheckpointKind};
use crate::train::{Bisection, GradientError, KeptSites, RecordedRun, RoundingCost, Site, SiteKind, Trainer};
use crate::ui::format::{scale, short};
use crate::ui::{Column, Line, Page, Role, column_cell};
use crate::{Error, Result, temporary};
use clap::Args;
use std::collections::BTreeSet;
use std::io::{IsTerminal, Write, stdout};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use strum::VariantArray;

/// Columns of text.
const WIDTH: usize = 100;

/// Flags of `bisect`, including those that define a run.
#[derive(Args, Debug)]
pub(super) struct BisectArgs {
    /// The run with the step (name or folder); it is not changed. Without it, the first step of a configuration is used
    // Not `run`, which is the id of a flag below.
    #[arg(value_name = "RUN", conflicts_with = "config")]
    like: Option<PathBuf>,
    #[command(flatten)]
    config: ConfigArgs,
    /// Use the step after this one, which has a checkpoint; 0 for the first [default: the last possible]
    #[arg(long, value_name = "STEP", requires = "like")]
    from: Option<u64>,
    /// The type to round to: f16 or bf16 [default: the type that the run computes in, or f16]
    #[arg(long, value_name = "TYPE")]
    round: Option<Dtype>,
    /// The relative error of the gradient to allow
    #[arg(long, value_name = "E", value_parser = number, default_value_t = 0.01)]
    tolerance: f64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Bisects a step; exit code 1 if it does not have the bits of the run's record.
pub(super) fn run(args: &BisectArgs, out: &mut dyn Write) -> Result<ExitCode> {
    if args.tolerance.is_nan() || args.tolerance < 0.0 {
        return Err(Error::config("--tolerance", "must be a number of at least 0"));
    }
    let reporter = Reporter::start();
    let mut recorded = RecordedRun::default();
    let mut folder = PathBuf::new();
    let mut from = 0;
    let config = if let Some(run) = &args.like {
        reporter.activity.begin("reading the run");
        folder = run_folder(run, &args.config.runs())?;
        let log = file_of_run(&folder, "events.jsonl")?;
        recorded = RecordedRun::read(&log)?;
        let possible = |step: &u64| {
            recorded.numbers.contains(&step.saturating_add(1))
                && folder.join(CheckpointKind::Full.directory(*step)).exists()
        };
        from = args.from.unwrap_or_else(|| recorded.checkpoints.keys().copied().rfind(possible).unwrap_or(0));
        let step = from.saturating_add(1);
        if !recorded.numbers.contains(&step) {
            let message = format!("the log has no step {step}; use a step of a checkpoint that a step follows");
            return Err(Error::config("--from", message));
        }
        recorded.read_steps(&log, step..=step)?;
        match recorded.config_after(from) {
            Some(text) => args.config.resolve_from_text(&run.display().to_string(), text)?,
            None => args.config.resolve_from_run(&folder)?,
        }
    } else {
        args.config.resolve()?
    };
    let own = if config.dtype.compute == Dtype::F32 { Dtype::F16 } else { config.dtype.compute };
    let dtype = args.round.unwrap_or(own);
    if dtype == Dtype::F32 {
        return Err(Error::config("--round", "rounding to `f32` changes nothing; use `f16` or `bf16`"));
    }
    let saved = folder.join(CheckpointKind::Full.directory(from));
    let checkpoint = (from > 0).then(|| Checkpoint::open(saved)).transpose()?;
    let (temporary, _lock) = temporary::folder(&std::env::temp_dir(), ".finetune-bisect-")?;
    let (bisection, difference) = thread_pool(&config, 1)?.install(|| {
        let mut tell = |event| reporter.report(event);
        let mut trainer = Trainer::new(Arc::new(SingleProcess), config.clone(), checkpoint.as_ref(), &mut tell)?;
        let bisection = trainer.bisect(dtype, args.tolerance, &reporter.activity)?;
        let difference = if args.like.is_some() {
            recorded.repeat(&mut trainer, &folder, from.saturating_add(1), temporary.path(), &reporter.activity)?
        } else {
            None
        };
        Ok::<_, Error>((bisection, difference))
    })?;
    drop(reporter);
    let text = if args.json {
        serde_json::to_string(&bisection).map_err(|error| Error::config("--json", error.to_string()))? + "\n"
    } else {
        page(&bisection, args.tolerance, args.like.is_some()).printed(false, stdout().is_terminal())
    };
    out.write_all(text.as_bytes()).map_err(Error::stdout)?;
    if let Some(difference) = difference {
        writeln!(out, "this is not the run's step: {difference}").map_err(Error::stdout)?;
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

/// The measurements as tables.
fn page(found: &Bisection, tolerance: f64, is_recorded: bool) -> Page {
    let mut page = Page::new();
    let step = if is_recorded { format!("step {} of the run", found.step) } else { "first step".to_owned() };
    page.title(format!("{step}, rounded to {} at loss scale {}", found.dtype, scale(found.loss_scale)));
    let loss = found.loss;
    let norm = found.grad_norm;
    let all = describe(found.all);
    page.push(Line::new().plain(format!("in FP32: loss {loss:.4}, gradient norm {}", short(norm))));
    page.push(Line::new().plain(format!("everything rounded: {all}")));
    let largest = |error: fn(&RoundingCost<Site>) -> f64| found.sites.iter().map(error).fold(0.0, f64::max);
    let alone = |cost: &RoundingCost<Site>| cost.alone.relative;
    let others = |cost: &RoundingCost<Site>| cost.others.relative;
    let (largest_alone, largest_others) = (largest(alone), largest(others));
    heat_map(&mut page, found, "Relative error of the gradient if only this is rounded", |cost| {
        heat(alone(cost), largest_alone)
    });
    heat_map(&mut page, found, "Relative error of the gradient if all others are rounded", |cost| {
        heat(others(cost), largest_others)
    });
    heat_map(&mut page, found, "Values that become infinite (✕) or zero", |cost| {
        let share = 100.0 * cost.underflows as f64 / cost.values.max(1) as f64;
        match cost.overflows {
            0 => (Role::graded(share, [1.0, 10.0]), format!("{} %", short(share))),
            overflows => (Role::Overflow, format!("{overflows} ✕")),
        }
    });
    page.gap();
    let name = |cost: &RoundingCost<KeptSites>| {
        let name = match cost.rounded {
            KeptSites::Layer(layer) => layer.to_string(),
            KeptSites::Residual => "residual streams".to_owned(),
            KeptSites::WeightGradients => "weight gradients".to_owned(),
        };
        (Role::Text, name)
    };
    let error = |error: GradientError| (Role::Text, describe(error));
    let columns: [Column<'_, RoundingCost<KeptSites>>; 3] = [
        ("what training can keep", -24, &name),
        ("if only this is rounded", -36, &|cost| error(cost.alone)),
        ("if all others are rounded", -36, &|cost| error(cost.others)),
    ];
    page.table(&found.layers, &columns);
    page.gap();
    let text = format!(
        "For an error of at most {}, train with this policy; {}:",
        short(tolerance),
        describe(found.policy.error)
    );
    page.wrapped(Role::Text, &text, WIDTH);
    page.push(Line::new().with(Role::Good, format!("  {}", found.policy.flags)));
    page
}

fn describe(error: GradientError) -> String {
    if error.relative.is_nan() {
        return "the gradient overflows".to_owned();
    }
    format!("error {}, 1 − cos {}", significant(error.relative), significant(error.direction))
}

/// An error with three significant digits: errors with one site less rounded differ only in the second or third.
fn significant(error: f64) -> String {
    if error > 0.0 && error < 0.1 { format!("{error:.2e}") } else { short(error) }
}

/// A number with a bar, whose height falls by an eighth for each factor of two below the largest.
fn heat(error: f64, largest: f64) -> (Role, String) {
    if error.is_nan() {
        return (Role::Overflow, "overflow".to_owned());
    }
    let level = (8.0 + (error / largest).log2().round()).clamp(0.0, 8.0) as usize;
    (Role::graded(error / largest, [0.1, 0.5]), format!("{} {}", significant(error), column_cell(level, 0)))
}

/// Adds a table with a row for each layer and a column for each kind of tensor.
fn heat_map(page: &mut Page, found: &Bisection, title: &str, cell: impl Fn(&RoundingCost<Site>) -> (Role, String)) {
    let layers: Vec<PrecisionUnit> =
        found.sites.iter().map(|cost| cost.rounded.layer).collect::<BTreeSet<_>>().into_iter().collect();
    let of_kind = |kind: SiteKind| {
        let (sites, cell) = (&found.sites, &cell);
        move |layer: &PrecisionUnit| {
            let own = sites.iter().find(|cost| cost.rounded == Site { layer: *layer, kind });
            own.map_or((Role::Text, String::new()), cell)
        }
    };
    let cells: Vec<_> = SiteKind::VARIANTS.iter().map(|kind| (heading(*kind), of_kind(*kind))).collect();
    let name = |layer: &PrecisionUnit| (Role::Text, layer.to_string());
    let mut columns: Vec<Column<'_, PrecisionUnit>> = vec![("layer", -6, &name)];
    columns.extend(cells.iter().map(|(heading, cell)| (heading.as_str(), 12, cell as &dyn Fn(&_) -> _)));
    page.gap();
    page.title(title);
    page.table(&layers, &columns);
}

fn heading(kind: SiteKind) -> String {
    match kind {
        SiteKind::WeightGradient => "weight grad".to_owned(),
        kind => kind.to_string(),
    }
}
