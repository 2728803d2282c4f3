//! `finetune lab`: the number-format lab, as text, JSON or a screen.

mod args;
mod reports;

use self::args::LabView;
use crate::cli::reporter::Reporter;
use crate::cli::run_lookup::{RunsDirArgs, find_log};
use crate::data::Tokenizer;
use crate::lab::guide;
use crate::lab::screen::{self, LabTab};
use crate::lab::{
    Bits, BlockScaling, DtypeReport, FailureDemo, MemoryPlan, Ranges, RunData, ScalerComparison, Softmax,
    SummationReport, UlpGrid, UnderflowReport,
};
use crate::screen::Terminal;
use crate::telemetry::ProcessStats;
use crate::ui::{Page, Role, Theme};
use crate::untrusted::SanitizingWriter;
use crate::{Error, Result};
use clap::builder::RangedU64ValueParser;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, Parser, Subcommand};
use serde::Serialize;
use std::ffi::OsString;
use std::io::{BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::LazyLock;

#[derive(Args, Debug)]
#[command(subcommand_value_name = "VIEW", subcommand_help_heading = "Views")]
pub(crate) struct LabArgs {
    #[command(subcommand)]
    view: Option<LabView>,
    /// Show the screen, with this view and its parameters first
    #[arg(long, global = true, conflicts_with = "json")]
    screen: bool,
    /// Print the report as JSON
    #[arg(long, global = true)]
    json: bool,
    /// Use only ASCII characters [default: on a terminal whose locale is not UTF-8]
    #[arg(long, global = true)]
    ascii: bool,
    /// Width of the text [default: the terminal's, or 80]
    #[arg(long, value_name = "COLUMNS", global = true, value_parser = page_width())]
    width: Option<usize>,
    /// A run by name or folder, or its `events.jsonl`, to start from its numbers
    // Separate ids, because clap would otherwise also pass global values to the flags of training.
    #[arg(id = "lab_run", long = "run", value_name = "RUN", global = true)]
    run: Option<PathBuf>,
    #[command(flatten)]
    runs_dir: RunsDirArgs,
}

/// Prints a view, or shows the screen if none is named.
pub(crate) fn run(args: &LabArgs, out: &mut dyn Write) -> Result<()> {
    let mut session = LabSession::new(&args.runs_dir.path);
    let terminal = Terminal::current();
    let Some(view) = args.view.as_ref().filter(|_| !args.screen) else {
        if !terminal.stdout || terminal.dumb || !std::io::stdin().is_terminal() || args.json {
            let message =
                "the screen needs a terminal (and `TERM`); name a view to print, such as `bits 0.1`; --help lists them";
            return Err(Error::config("lab", message));
        }
        return show_screen(args, &mut session);
    };
    let reporter = Reporter::of("computing");
    let report = session.report(view, args.run.as_deref())?;
    drop(reporter);
    let written = if args.json {
        let mut out = BufWriter::new(SanitizingWriter::new(out));
        (report.json)(&mut out).map_err(Into::into).and_then(|()| writeln!(out)).and_then(|()| out.flush())
    } else {
        let page = report.explained(args.width.unwrap_or_else(terminal_width));
        out.write_all(page.printed(args.ascii, terminal.stdout).as_bytes())
    };
    written.map_err(Error::stdout)
}

/// Parses the width of a page, which must fit in memory.
pub(super) fn page_width() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=1000)
}

pub(super) fn terminal_width() -> usize {
    let size = std::io::stdout().is_terminal().then(ratatui::crossterm::terminal::size);
    size.and_then(std::result::Result::ok).map_or(80, |(columns, _)| usize::from(columns).max(40))
}

type WriteJson = dyn Fn(&mut dyn Write) -> serde_json::Result<()>;

/// A report before rendering.
struct LabReport {
    view: &'static str,
    page: Box<dyn Fn(usize) -> Page>,
    json: Box<WriteJson>,
}

impl LabReport {
    fn new<T: Serialize + 'static>(view: &'static str, report: T, page: fn(&T, usize) -> Page) -> Self {
        let report = Rc::new(report);
        let same = Rc::clone(&report);
        Self {
            view,
            page: Box::new(move |width| page(&report, width)),
            json: Box::new(move |out| serde_json::to_writer_pretty(out, &*same)),
        }
    }

    /// The page followed by the view's explanation.
    fn explained(&self, width: usize) -> Page {
        let mut page = (self.page)(width);
        page.gap();
        page.wrapped(Role::Dim, guide::about(self.view), width);
        page
    }
}

/// Makes reports and caches the run it has read.
struct LabSession {
    read: Option<(PathBuf, RunData)>,
    /// The folder of all runs.
    runs: PathBuf,
    /// The program's own memory, in bytes.
    program: u64,
    /// Bytes of the run's tokenizer; `None` until it is read.
    tokenizer: Option<u64>,
}

impl LabSession {
    fn new(runs: &Path) -> Self {
        // Training's additional memory, measured with `tiny` in each type: about 5 MB of code and tables that this
        // command does not use, thread stacks, rows in FP32, text, tokenizer, and memory that the allocator retains.
        const TRAINING: u64 = 12 << 20;
        let program = ProcessStats::now().rss_bytes.unwrap_or(0) + TRAINING;
        Self { read: None, runs: runs.to_path_buf(), program, tokenizer: None }
    }

    fn report(&mut self, view: &LabView, run: Option<&Path>) -> Result<LabReport> {
        if let (LabView::Memory(_), Some(path)) = (view, run) {
            self.read_tokenizer(path)?;
        }
        let program = self.program + run.and(self.tokenizer).unwrap_or(0);
        let run = run.map(|path| self.read(path)).transpose()?;
        Ok(match view {
            LabView::Bits(args) => LabReport::new("bits", args.report()?, Bits::page),
            LabView::Ranges(args) => LabReport::new("ranges", args.report(run)?, Ranges::page),
            LabView::Ulp(args) => LabReport::new("ulp", args.report(run)?, UlpGrid::page),
            LabView::Scaler(args) => LabReport::new("scaler", args.report(run)?, ScalerComparison::page),
            LabView::Underflow(args) => LabReport::new("underflow", args.report(run)?, UnderflowReport::page),
            LabView::Memory(args) => LabReport::new("memory", args.report(run, program)?, MemoryPlan::page),
            LabView::Sums(args) => LabReport::new("sums", args.report(run)?, SummationReport::page),
            LabView::Blocks(args) => LabReport::new("blocks", args.report(run)?, BlockScaling::page),
            LabView::Softmax(args) => LabReport::new("softmax", args.report(run), Softmax::page),
            LabView::Failures(args) => LabReport::new("failures", args.report(run)?, FailureDemo::page),
            LabView::Dtypes(args) => LabReport::new("dtypes", args.report(run)?, DtypeReport::page),
        })
    }

    fn read(&mut self, path: &Path) -> Result<&RunData> {
        let read = if let Some(kept) = self.read.take().filter(|(read, _)| read == path) {
            kept
        } else {
            self.tokenizer = None;
            (path.to_path_buf(), RunData::read(&find_log(Some(path), &self.runs)?)?)
        };
        Ok(&self.read.insert(read).1)
    }

    /// Measures the memory of a run's tokenizer by reading it as training does: 50,000 tokens take as much as a small
    /// model.
    fn read_tokenizer(&mut self, run: &Path) -> Result<()> {
        let file = self.read(run)?.tokenizer();
        if self.tokenizer.is_none() {
            let resident = || ProcessStats::now().rss_bytes.unwrap_or(0);
            let before = resident();
            let read = file.map(Tokenizer::from_file).transpose()?;
            self.tokenizer = Some(resident().saturating_sub(before));
            drop(read);
        }
        Ok(())
    }
}

/// A view parsed from its fields as if typed.
#[derive(Parser)]
#[command(no_binary_name = true, disable_help_flag = true)]
struct ParsedView {
    #[command(subcommand)]
    view: LabView,
}

static VIEWS: LazyLock<Command> = LazyLock::new(|| LabView::augment_subcommands(Command::new("lab")));

fn show_screen(args: &LabArgs, session: &mut LabSession) -> Result<()> {
    let run = args.run.as_deref().map(|run| run.display().to_string()).unwrap_or_default();
    let theme = Theme::from_env(args.ascii, None);
    let mut lab_tabs = guide::lab_tabs(&VIEWS, &run);
    let tab = choose_typed(&mut lab_tabs, std::env::args_os());
    screen::run(lab_tabs, tab, theme, &mut |view, fields, width| evaluate(session, view, fields, width))
}

/// Sets the parameters that the command line names; returns the index of its view.
fn choose_typed(lab_tabs: &mut [LabTab], typed: impl IntoIterator<Item = OsString>) -> usize {
    let matches = super::parse(typed.into_iter().collect()).ok();
    let lab = matches.as_ref().and_then(|matches| matches.subcommand_matches("lab"));
    let Some((name, matches)) = lab.and_then(ArgMatches::subcommand) else { return 0 };
    let arguments = VIEWS.find_subcommand(name).into_iter().flat_map(Command::get_arguments);
    let Some(tab) = lab_tabs.iter().position(|lab_tab| lab_tab.name == name) else { return 0 };
    for arg in arguments {
        let id = arg.get_id().as_str();
        if matches.value_source(id) == Some(ValueSource::CommandLine) {
            let values = matches.get_raw(id).into_iter().flatten().map(|value| value.to_string_lossy().into_owned());
            screen::choose(&mut lab_tabs[tab], arg, &values.collect::<Vec<_>>());
        }
    }
    tab
}

/// The page of `view` for the values of its fields, as `finetune lab VIEW` would print it.
fn evaluate(session: &mut LabSession, view: &str, fields: &[(&str, &str)], width: usize) -> Result<Page> {
    let run = fields.iter().find(|(flag, _)| *flag == "run").map(|(_, path)| PathBuf::from(path));
    let typed = VIEWS.find_subcommand(view).map(|view| screen::to_args(view, fields)).unwrap_or_default();
    let typed = ParsedView::try_parse_from(typed).map_err(|error| {
        let text = error.to_string();
        let reason = text.split("\n\n").next().unwrap_or_default().trim_start_matches("error: ");
        Error::config(view, reason.replace("\n ", ""))
    })?;
    Ok(session.report(&typed.view, run.as_deref())?.explained(width))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ui::folded;
    use std::collections::HashMap;

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

    /// A session of a program that takes 24 MiB.
    fn session() -> LabSession {
        LabSession { program: 24 << 20, ..LabSession::new(Path::new("checkpoints")) }
    }

    /// The values of a tab's fields.
    fn given(lab_tab: &LabTab) -> Vec<(&str, &str)> {
        let from_run = !lab_tab.value("run").is_empty();
        let given = lab_tab.fields.iter().filter(|field| !field.value.is_empty());
        let given = given.filter(|field| !(from_run && lab_tab.is_of_run(field)));
        given.map(|field| (field.flag, field.value.as_str())).collect()
    }

    /// A run's figures have longer lines than a model's: its path, its policy, its layers' names.
    #[test]
    fn every_page_fits() {
        let folder = tempfile::tempdir().unwrap();
        let long = folder.path().join("a-run-whose-name-fills-most-of-a-line-of-eighty-columns-by-itself");
        std::fs::create_dir(&long).unwrap();
        crate::lab::write_run(&long);
        let run = long.display().to_string();
        let mut session = session();
        for lab_tab in guide::lab_tabs(&VIEWS, "") {
            let scenarios = lab_tab.scenarios.iter().map(|scenario| scenario.set.clone());
            let cursors = [vec![], vec![("cursor", "7")], vec![("seeds", "3"), ("cursor", "3")]];
            let varied = [vec![], vec![("run", run.as_str())]].into_iter().chain(scenarios);
            for set in varied.flat_map(|set| cursors.iter().map(move |more| [&set[..], more].concat())) {
                let mut lab_tab = lab_tab.clone();
                for (flag, value) in &set {
                    lab_tab.set(flag, *value);
                }
                // No checkpoint, no matrix.
                if lab_tab.name == "blocks" && !lab_tab.value("run").is_empty() {
                    continue;
                }
                for width in [78, 118] {
                    let page = evaluate(&mut session, lab_tab.name, &given(&lab_tab), width).unwrap().text();
                    let wide: Vec<_> = page.lines().filter(|line| line.chars().count() > width).collect();
                    assert!(wide.is_empty(), "{} with {set:?}: {wide:#?}", lab_tab.name);
                    let lines = page.lines().count();
                    assert!(!set.is_empty() || lines <= 44, "{}: {lines} lines", lab_tab.name);
                }
            }
        }
    }

    #[test]
    fn every_view_has_an_explanation_and_scenarios_of_its_parameters() {
        for LabTab { name, fields, scenarios, .. } in guide::lab_tabs(&VIEWS, "") {
            assert!(guide::about(name).len() > 200 && scenarios.len() == 4, "{name}");
            for scenario in scenarios {
                let unknown = scenario.set.iter().find(|(flag, _)| fields.iter().all(|field| field.flag != *flag));
                assert!(unknown.is_none() && !scenario.text.is_empty(), "{name}, {}: {unknown:?}", scenario.name);
            }
        }
    }

    /// A view has the same values at first on the screen and as text.
    #[test]
    fn the_screen_and_the_text_have_the_same_defaults() {
        for lab_tab in guide::lab_tabs(&VIEWS, "") {
            let mut session = session();
            // The cursor marks a bit on the screen.
            let fields: Vec<_> = given(&lab_tab).into_iter().filter(|(flag, _)| *flag != "cursor").collect();
            let shown = evaluate(&mut session, lab_tab.name, &fields, 100).unwrap().text();
            let bare = ParsedView::try_parse_from([lab_tab.name]).unwrap();
            let printed = session.report(&bare.view, None).unwrap().explained(100).text();
            // The list of options names a setting of the scaler.
            let [shown, printed] =
                [shown, printed].map(|text| text.replace("growth_interval=50 ", "base               "));
            assert_eq!(shown, printed, "{}", lab_tab.name);
        }
    }

    #[test]
    fn typed_parameters_start_the_screen() {
        let mut lab_tabs = guide::lab_tabs(&VIEWS, "");
        let typed = "finetune lab scaler --screen --base growth_interval=7,min_scale=2 --level 3 --setting hysteresis=2 --steps 2^9";
        let tab = choose_typed(&mut lab_tabs, typed.split(' ').map(OsString::from));
        let value = |flag| lab_tabs[tab].value(flag);
        assert_eq!(lab_tabs[tab].name, "scaler");
        let found = ["growth_interval", "min_scale", "level", "setting-2", "sigma", "init_scale", "steps"].map(value);
        assert_eq!(found, ["7", "2", "3", "hysteresis=2", "1", "65536", "512"]);
        let tab = choose_typed(&mut lab_tabs, "finetune lab bits -1e-8 --screen".split(' ').map(OsString::from));
        assert_eq!((lab_tabs[tab].name, lab_tabs[tab].value("value")), ("bits", "-1e-8"));
    }

    /// Stores each tab at 120×36. At 80×24 it stores the lines around the page; the page equals the text of the command
    /// line.
    #[test]
    fn pictures() {
        let mut frames = String::new();
        for (tab, lab_tab) in guide::lab_tabs(&VIEWS, "").into_iter().enumerate() {
            let mut session = session();
            let mut evaluate = |view: &str, fields: &[(&str, &str)], width| evaluate(&mut session, view, fields, width);
            let mut picture = |size| screen::picture(guide::lab_tabs(&VIEWS, ""), tab, size, &mut evaluate);
            insta::assert_snapshot!(format!("{}_120x36", lab_tab.name), folded(&picture((120, 36))));
            let small = picture((80, 24));
            let page = evaluate(lab_tab.name, &given(&lab_tab), 78).unwrap().text();
            let page: Vec<_> = page.lines().map(|line| format!(" {line}").trim_end().to_owned()).collect();
            let lines: Vec<_> = small.lines().collect();
            let top = lines.iter().position(|line| *line == page[0]).unwrap();
            assert_eq!(lines[top..23], page[..23 - top], "{}", lab_tab.name);
            for line in lines[..top].iter().chain(&lines[23..]) {
                frames.push_str(line);
                frames.push('\n');
            }
        }
        insta::assert_snapshot!("frames_80x24", frames);
    }

    /// Every key that a view's help names, in every view, at both sizes.
    #[test]
    fn every_key_does_what_the_help_says() {
        for size in [(80, 24), (120, 36)] {
            let mut session = session();
            // Most keys start from the same page.
            let mut known = HashMap::new();
            let mut evaluate = |view: &str, fields: &[(&str, &str)], width| {
                let asked = format!("{view} {fields:?} {width}");
                if !known.contains_key(&asked) {
                    known.insert(asked.clone(), evaluate(&mut session, view, fields, width)?);
                }
                Ok(known[&asked].clone())
            };
            let dead = screen::key_tests::unresponsive_keys(&guide::lab_tabs(&VIEWS, ""), size, &mut evaluate);
            assert!(dead.is_empty(), "at {size:?}:\n{}", dead.join("\n"));
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
        assert!(lab("underflow --format e5m2 --scale -3").unwrap().starts_with("FP8 E5M2 at loss scale 2^-3"));
        assert!(lab("memory --model gpt2-xl --batch 1 --seq 1024 --memory 24G").unwrap().contains("KV cache FP32"));
        let simulated =
            lab("scaler --base init_scale=32768,growth_interval=5 --level none --steps 20 --overflow-at 10").unwrap();
        assert!(simulated.contains("✕ skipped         0 of 5   backed off to 2^16"), "{simulated}");
        let refused = lab("memory --model 1e15 --batch 1048576 --seq 1048576").unwrap_err().to_string();
        assert_eq!(refused, "--batch: the activations of this batch take more than an exbibyte; use a smaller one");
    }

    /// A micro-batch of GRPO has several completions per prompt. A run on a GPU has logged its host's memory.
    #[test]
    fn memory_of_a_run_with_rewards() {
        let folder = tempfile::tempdir().unwrap();
        crate::lab::write_run(folder.path());
        let log = folder.path().join("events.jsonl");
        let text = std::fs::read_to_string(&log).unwrap();
        let config = r#""config":{"objective":{"kind":"grpo","num_generations":4},"train":{"batch_size":2},"#;
        let text = text.replace(r#""config":{"#, config);
        let memory = |device: &str| -> serde_json::Value {
            std::fs::write(&log, text.replace(r#""device":"""#, &format!(r#""device":"{device}""#))).unwrap();
            serde_json::from_str(&lab(&format!("memory --run {} --json", folder.path().display())).unwrap()).unwrap()
        };
        let [cpu, gpu] = ["cpu", "cuda:0"].map(memory);
        assert_eq!((&cpu["batch"], cpu["measured"].is_null(), gpu["measured"].is_null()), (&8.into(), false, true));
    }
}
