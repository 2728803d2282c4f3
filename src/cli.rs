//! The command line: parses the arguments and calls the library.

mod bench;
mod bisect;
mod chat;
mod checkpoint;
mod compare;
mod completions;
mod data;
mod doctor;
mod eval;
mod export;
mod export_metrics;
mod find_lr;
mod flags;
mod fp16_check;
mod generate;
mod lab;
mod merge;
mod mismatch;
mod model;
mod notify;
mod processes;
mod report;
mod reporter;
mod run_lookup;
mod runs;
mod show;
mod suggestions;
mod train;
mod verify;
mod verify_distributed;
mod watch;

use crate::data::{parquet_rows, template_sandbox};
use crate::engine::collective::ProcessGroup;
use crate::engine::kernels::isa::{ISA_VARIABLE, Isa};
#[cfg(feature = "cuda")]
use crate::engine::preflight;
use crate::settings::{integer, number};
use crate::telemetry::FinishReason;
use crate::train::check_threads;
use crate::untrusted::{SanitizingWriter, sanitize_block, subprocess};
use crate::{Error, Result};
use clap::error::ContextKind;
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand};
use flags::ConfigArgs;
use std::error::Error as _;
use std::ffi::OsString;
use std::io::{ErrorKind, IsTerminal, Write, stderr, stdout};
use std::num::ParseIntError;
use std::process::ExitCode;
use std::sync::Arc;

/// The default number of threads.
const THREADS_VARIABLE: &str = "RAYON_NUM_THREADS";

/// Printed at the end of `finetune --help`.
const EXAMPLES: &str = "\
Examples:
  finetune                                                     train the built-in model on the built-in grammar
  finetune --model distilgpt2 --data notes.jsonl --epochs 3    fine-tune distilgpt2 on your own text
  finetune --resume                                            continue the newest run

`finetune config --explain` prints every setting with an explanation.";

/// Fine-tunes language models in mixed precision, and shows the numbers while it does.
///
/// Without a command it trains; without flags, it trains a built-in model on a built-in text in FP16 in under a minute.
#[derive(Debug, Parser)]
#[command(version, args_conflicts_with_subcommands = true, max_term_width = 120, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Option<CliCommand>,
    #[command(flatten)]
    train: train::TrainArgs,
}

#[derive(Debug, Subcommand)]
enum CliCommand {
    /// List the runs, or delete some
    Runs(runs::RunsArgs),
    /// Show the dashboard of a run in another process, or of a finished one
    Watch(watch::WatchArgs),
    /// Generate text with a model
    Generate(Box<generate::GenerateArgs>),
    /// Chat with a model in the terminal
    Chat(Box<chat::ChatArgs>),
    /// Evaluate a model on a text: loss, perplexity, bits per byte
    Eval(Box<eval::EvalArgs>),
    /// Show or count the training data without training
    Data(data::DataArgs),
    /// Check whether a model can train in FP16, by measuring every tensor of a forward and backward pass
    Fp16Check(Box<fp16_check::Fp16CheckArgs>),
    /// Measure what 16 bits cost in a training step, by layer and kind of tensor, and what to keep in FP32
    Bisect(Box<bisect::BisectArgs>),
    /// Measure the mismatch of training and generation in each type: log-probabilities of the same tokens
    Mismatch(Box<mismatch::MismatchArgs>),
    /// Export a model for other programs: a Hugging Face folder, GGUF or ONNX
    Export(Box<export::ExportArgs>),
    /// Merge adapters into their base model, and print the largest logit error of the merged model
    Merge(Box<merge::MergeArgs>),
    /// List, show, verify, prune and compare checkpoints
    Checkpoint(checkpoint::CheckpointArgs),
    /// Export a run's metrics as CSV, JSON Lines, or TensorBoard event files
    ExportMetrics(export_metrics::ExportMetricsArgs),
    /// Write an HTML report of a run: charts, overflows and their origins, precision, samples, configuration
    Report(report::ReportArgs),
    /// Compare runs: settings, losses, loss scale, overflows; with several seeds, also the significance of differences
    Compare(compare::CompareArgs),
    /// Verify a run: repeat its steps from a checkpoint with any number of threads, and compare every bit
    #[command(alias = "verify-resume")]
    Verify(Box<verify::VerifyArgs>),
    /// Verify on this machine that results do not depend on the number of processes
    VerifyDistributed(Box<verify_distributed::VerifyDistributedArgs>),
    /// Print the resolved configuration
    Config(Box<ConfigCommand>),
    /// Explore and predict the effects of number formats
    Lab(Box<lab::LabArgs>),
    /// Measure the training speed of this machine, and print it as JSON
    Bench(Box<bench::BenchArgs>),
    /// Show the capabilities of this machine: processor, memory, GPU support, folders, the Hub
    Doctor(doctor::DoctorArgs),
    /// Print a shell's completion script
    Completions(completions::CompletionsArgs),
    /// Print the manual page, in roff
    Man,
}

/// Flags of `finetune config`.
#[derive(Debug, clap::Args)]
struct ConfigCommand {
    #[command(flatten)]
    config: ConfigArgs,
    /// Explain each setting in a comment above it
    #[arg(long)]
    explain: bool,
}

/// The command line's definition. Numbers may be negative, so that the error comes from their validation and not from
/// the parser, which would take them for flags.
pub fn definition() -> clap::Command {
    fn with_numbers(command: clap::Command) -> clap::Command {
        let command = command.mut_args(|arg| {
            let takes_value = arg.get_action().takes_values();
            if takes_value { arg.allow_negative_numbers(true) } else { arg }
        });
        command.mut_subcommands(with_numbers)
    }
    with_numbers(Cli::command())
}

/// Parses the command line. Where clap reads a number itself, `2^24`, `1/3` and `6e-8` are numbers too, as in settings.
fn parse(mut words: Vec<OsString>) -> Result<ArgMatches, clap::Error> {
    loop {
        let error = match definition().try_get_matches_from(&words) {
            Ok(matches) => return Ok(matches),
            Err(error) => error,
        };
        let Some((flag, text)) = invalid_value(&error) else { return Err(error) };
        let Some(digits) = in_digits(&text) else { return Err(with_problem(error, &flag, &text)) };
        // Other words may contain the same text, such as a prompt. Only the flag's own word changes the error.
        let corrected = (1..words.len()).find_map(|at| {
            let word = words[at].to_str().filter(|word| word.contains(&text))?;
            let mut corrected = words.clone();
            corrected[at] = word.replace(&text, &digits).into();
            let next = definition().try_get_matches_from(&corrected).err().as_ref().and_then(invalid_value);
            let is_same = next.is_some_and(|(other, value)| other == flag && (value == text || value == digits));
            (!is_same).then_some(corrected)
        });
        match corrected {
            Some(corrected) => words = corrected,
            // Not a value in digits either: name the one that was typed.
            None => return Err(with_problem(error, &flag, &text)),
        }
    }
}

/// The flag and the value that an error rejects.
fn invalid_value(error: &clap::Error) -> Option<(String, String)> {
    let text = |kind| suggestions::typed(error, kind).map(str::to_owned);
    Some((text(ContextKind::InvalidArg)?, text(ContextKind::InvalidValue)?))
}

/// `error`; if `text` is not a whole number for `flag`, with the problem that settings would name.
fn with_problem(error: clap::Error, flag: &str, text: &str) -> clap::Error {
    let is_integer = error.source().and_then(|source| source.downcast_ref::<ParseIntError>()).is_some();
    match integer(text) {
        Err(problem) if is_integer => {
            let help = "For more information, try '--help'.";
            clap::Error::raw(error.kind(), format!("invalid value '{text}' for '{flag}': {problem}\n\n{help}\n"))
        }
        _ => error,
    }
}

/// A number with a power, a fraction or an exponent in digits alone.
fn in_digits(text: &str) -> Option<String> {
    let number = number(text).ok().filter(|number| number.is_finite())?;
    let digits = integer(text).map_or_else(|_| number.to_string(), |whole| whole.to_string());
    (digits != text).then_some(digits)
}

/// Parses and executes the command line. Returns the exit code: 0 done, 1 failure, 2 usage or configuration, 3
/// diverged, 130 interrupted after a save.
pub fn main() -> ExitCode {
    // Otherwise a log that outgrows `ulimit -f` would kill the run.
    crate::screen::terminal::outlive_file_size_limit().ok();
    let mut arguments = std::env::args_os().skip(1);
    match arguments.next() {
        Some(first) if first == parquet_rows::ARGUMENT => return parquet_rows::worker_main(arguments),
        Some(first) if first == template_sandbox::ARGUMENT => return template_sandbox::worker_main(),
        #[cfg(feature = "cuda")]
        Some(first) if first == preflight::ARGUMENT => return preflight::worker_main(arguments),
        _ => (),
    }
    if let Ok(program) = std::env::current_exe() {
        subprocess::register_executable(&program);
    }
    let group = processes::init();
    let parsed = parse(std::env::args_os().collect()).and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(mut error) => {
            if group.is_ok_and(|group| !group.is_leader()) {
                processes::finalize();
                return ExitCode::from(if error.use_stderr() { 2 } else { 0 });
            }
            let suggestion = suggestions::suggestion(&error);
            if suggestion.is_some() {
                // clap's guess compares only letters.
                for guess in [ContextKind::SuggestedArg, ContextKind::SuggestedSubcommand, ContextKind::Usage] {
                    error.remove(guess);
                }
            }
            // clap chooses the stream.
            let printed = error.print();
            processes::finalize();
            if let Some(suggestion) = suggestion {
                writeln!(stderr(), "\n  tip: {suggestion}").ok();
            }
            return if error.use_stderr() {
                ExitCode::from(2)
            } else {
                exit_code(done(printed.map_err(Error::stdout)))
            };
        }
    };
    let done = group.and_then(|group| dispatch(cli, &group));
    if let Err(error) = &done {
        processes::abort_with(&error.to_string(), error.exit_code());
    }
    processes::finalize();
    exit_code(done)
}

/// The exit code of a command's result, whose error it prints.
fn exit_code(result: Result<ExitCode>) -> ExitCode {
    match result {
        Ok(code) => code,
        // The reader closed the pipe, as in `finetune man | head`.
        Err(Error::Io { source, .. }) if source.kind() == ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            writeln!(stderr(), "error: {}", sanitize_block(&error.to_string())).ok();
            if let Some(frames) = error.backtrace() {
                writeln!(stderr(), "{}", sanitize_block(frames)).ok();
            }
            ExitCode::from(error.exit_code())
        }
    }
}

fn dispatch(cli: Cli, group: &Arc<dyn ProcessGroup>) -> Result<ExitCode> {
    Isa::pinned().map_err(|message| Error::config(ISA_VARIABLE, message))?;
    // Rayon has no limit, and ignores 0 and any other text.
    let threads = std::env::var(THREADS_VARIABLE).ok().and_then(|threads| threads.parse().ok());
    check_threads(THREADS_VARIABLE, threads.filter(|threads| *threads > 0))?;
    if !group.is_leader() {
        // Only the leader runs commands that do not train.
        return match cli.command {
            None | Some(CliCommand::Verify(_)) => train::run_worker(group).map(|()| ExitCode::SUCCESS),
            Some(_) => Ok(ExitCode::SUCCESS),
        };
    }
    let Some(command) = cli.command else {
        return Ok(match train::run(&cli.train, group)? {
            FinishReason::Done | FinishReason::EarlyStopped => ExitCode::SUCCESS,
            // By a key or a signal: a script must not take the run for whole.
            FinishReason::Stopped | FinishReason::Interrupted => ExitCode::from(130),
            FinishReason::Diverged => ExitCode::from(3),
            FinishReason::Failed => ExitCode::FAILURE,
        });
    };
    let out = &mut SanitizingWriter::new(stdout());
    match command {
        CliCommand::Generate(args) => {
            done(model::on_threads(args.model.threads, || generate::run(&args, &mut on_terminal())))
        }
        CliCommand::Chat(args) => done(model::on_threads(args.model.threads, || chat::run(&args, &mut on_terminal()))),
        CliCommand::Eval(args) => done(model::on_threads(args.model.threads, || eval::run(&args, out))),
        CliCommand::Data(args) => done(data::run(&args, &mut stdout())),
        CliCommand::Fp16Check(args) => fp16_check::run(&args, out),
        CliCommand::Bisect(args) => bisect::run(&args, &mut in_pipe()),
        CliCommand::Mismatch(args) => done(mismatch::run(&args, out)),
        CliCommand::Export(args) => done(export::run(&args, out)),
        CliCommand::Merge(args) => done(merge::run(&args, out)),
        CliCommand::ExportMetrics(args) => done(export_metrics::run(&args, out)),
        CliCommand::Report(args) => done(report::run(&args, out)),
        CliCommand::Config(args) => {
            let config = args.config.resolve()?;
            let text = if args.explain { config.explained()? } else { config.to_toml()? };
            // Escaped characters are valid TOML.
            done(out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(Error::stdout))
        }
        CliCommand::Lab(args) => done(lab::run(&args, &mut in_pipe())),
        CliCommand::Compare(args) => done(compare::run(&args, &mut in_pipe())),
        CliCommand::Doctor(args) => done(doctor::run(&args, out)),
        CliCommand::Completions(args) => done(completions::completions(definition(), &args, &mut stdout())),
        CliCommand::Man => done(completions::man(definition(), &mut stdout())),
        CliCommand::Bench(args) => bench::run(&args, out),
        CliCommand::Runs(args) => done(runs::run(&args, out)),
        CliCommand::Checkpoint(args) => checkpoint::run(&args, out),
        CliCommand::Verify(args) => verify::run(&args, group, out),
        CliCommand::VerifyDistributed(args) => verify_distributed::run(&args, out),
        CliCommand::Watch(args) => done(watch::run(&args)),
    }
}

/// Standard output for text that a pipe must get unchanged, such as generated text: cleaned only on a terminal.
fn on_terminal() -> Box<dyn Write> {
    if stdout().is_terminal() { Box::new(SanitizingWriter::new(stdout())) } else { Box::new(stdout()) }
}

/// Standard output for pages that clean their own text and color it on a terminal.
fn in_pipe() -> Box<dyn Write> {
    if stdout().is_terminal() { Box::new(stdout()) } else { Box::new(SanitizingWriter::new(stdout())) }
}

/// The exit code of a command without special codes.
fn done(result: Result<()>) -> Result<ExitCode> {
    result.map(|()| ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: the correction also changed a prompt, and never ended for a value in the word of its flag or in a
    /// list.
    #[test]
    fn a_number_is_corrected_in_its_own_word_only() {
        let parse = |line: &str| -> Result<Cli, clap::Error> {
            Cli::from_arg_matches(&parse(line.split(' ').map(OsString::from).collect())?)
        };
        for (line, expected) in [
            ("finetune generate m --prompt 2^3 -n 2^3", ["prompt: \"2^3\"", "max_tokens: 8"]),
            ("finetune generate m --prompt 1e1 -n1e1", ["prompt: \"1e1\"", "max_tokens: 10"]),
            ("finetune lab scaler --overflow-at 1e2,2e2 --seed=1e2", ["overflow_at: [100, 200]", "seed: 100"]),
        ] {
            let command = format!("{:?}", parse(line).unwrap().command);
            assert!(expected.iter().all(|part| command.contains(part)), "{command}");
        }
        for (text, problem) in
            [("1/3", "not a whole number such as 600"), ("-5", "below 0"), ("9e99", "too large: at most")]
        {
            let error = parse(&format!("finetune generate m --prompt {text} -n {text}")).unwrap_err().to_string();
            assert!(error.contains(&format!("'{text}' for '--max-tokens <N>': {problem}")), "{error}");
        }
    }
}
