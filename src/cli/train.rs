//! `finetune` without a command: trains on a separate thread and shows the run.

use crate::cli::find_lr;
use crate::cli::flags::ConfigArgs;
use crate::cli::model::{on_threads, pool};
use crate::cli::notify::Notify;
use crate::cli::processes::{self, ProcessArgs};
use crate::cli::reporter::Reporter;
use crate::cli::run_lookup::{did_you_mean, is_run_or_step, is_step, quoted, run_or_path};
use crate::cli::runs::LOG_END;
use crate::cli::show::{ShowArgs, show};
use crate::engine::collective::ProcessGroup;
use crate::screen::LiveSource;
use crate::screen::terminal::{SignalHandler, ignore_stop_signals, set_training};
use crate::store::checkpoint::{Checkpoint, CheckpointKind, Run, latest_run, latest_valid, list};
use crate::store::hub::free_bytes;
use crate::telemetry::{
    self, Command, Diagnostic, Emitter, Event, EventLog, FinishReason, Prometheus, Record, RunState, TensorBoard,
};
use crate::train::{Config, RunEnd, RunStart, Trainer, open_device, with_heartbeat};
use crate::ui::format::{clock, loss};
use crate::untrusted::sanitize_block;
use crate::{Error, Result};
use clap::Args;
use std::collections::BTreeSet;
use std::fmt::Display;
use std::io::{ErrorKind, Write, stderr};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf, absolute};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Instant;

#[derive(Args, Clone, Debug, Default)]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    #[expect(clippy::option_option, reason = "the flag's value is optional")]
    /// Continue from the newest good checkpoint of the newest run, or of the run given by name or folder, or from a
    /// step folder
    #[arg(long, value_name = "RUN", num_args = 0..=1)]
    pub(crate) resume: Option<Option<PathBuf>>,
    /// Serve Prometheus metrics at /metrics on this port of localhost, or on ADDRESS:PORT
    #[arg(long, value_name = "[ADDRESS:]PORT", value_parser = metrics_port)]
    pub(crate) metrics_port: Option<SocketAddr>,
    /// Run a program (without a shell) at a new best validation loss, at divergence and at the end; its last arguments
    /// are the event, the run's name and a sentence
    #[arg(long, value_name = "COMMAND", help_heading = "Along the way")]
    pub(crate) notify: Option<String>,
    /// Show the loss of 100 steps at rising learning rates, and suggest a rate; nothing is saved
    #[arg(long, conflicts_with = "resume", help_heading = "Training")]
    pub(crate) find_lr: bool,
    #[command(flatten)]
    pub(crate) processes: ProcessArgs,
    #[command(flatten)]
    pub(crate) show: ShowArgs,
}

fn metrics_port(text: &str) -> Result<SocketAddr, String> {
    let port = text.parse().map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    let address = port.or_else(|_| text.parse()).ok().filter(|address| address.port() > 0);
    address.ok_or_else(|| "must be a port such as 9464, or an address with a port such as 0.0.0.0:9464".into())
}

/// The starting point of a resumed run.
struct Resumed {
    run: Run,
    /// `None` if the run was killed before its first checkpoint.
    checkpoint: Option<Checkpoint>,
    warnings: BTreeSet<String>,
}

impl Resumed {
    /// Whether the log has the end of the run, which is missing if it was killed after its last checkpoint.
    fn is_finished(&self) -> bool {
        let last = telemetry::last_records(&self.run.path().join("events.jsonl"), LOG_END).next();
        last.is_some_and(|last| matches!(last.event, Event::Finished(end) if end.reason != FinishReason::Failed))
    }
}

/// Trains. Returns how the run ended.
pub(crate) fn run(args: &TrainArgs, group: &Arc<dyn ProcessGroup>) -> Result<FinishReason> {
    processes::check_launch(&**group)?;
    let notify = args.notify.as_deref().map(Notify::new).transpose()?;
    let signals = SignalHandler::listen().map_err(Error::io("listen to signals in", "."))?;
    let reporter = Reporter::start();
    // A launcher's processes wait until a checkpoint is verified.
    let (config, resumed) = with_heartbeat(&**group, &Mutex::default(), || resolve(args, &reporter))?;
    let metrics = args.metrics_port.map(Prometheus::listen).transpose()?;
    let group = &args.processes.start(group, &config)?;
    let warning = check_processes(group.world_size(), &config)?;
    let pool = thread_pool(&config, group.core_sharers())?;
    let checkpoint = resumed.as_ref().and_then(|resumed| resumed.checkpoint.as_ref());
    let best = checkpoint.and_then(|checkpoint| checkpoint.state().best).map(|best| best.loss);
    let step = checkpoint.map_or(0, |checkpoint| checkpoint.state().step);
    let mut tell = |event| reporter.report(event);
    let mut trainer = pool.install(|| Trainer::lead(group, config.clone(), checkpoint, &mut tell))?;
    if let Some(text) = trainer.nothing_left()
        && resumed.as_ref().is_some_and(Resumed::is_finished)
    {
        reporter.notice(&text);
        trainer.stop_workers()?;
        // With the exit code of the first time.
        return trainer.check_result().map(|()| FinishReason::Done);
    }
    processes::start_workers(&trainer, checkpoint, &**group)?;
    if args.find_lr {
        pool.install(|| find_lr::run(&mut trainer, reporter))?;
        return Ok(FinishReason::Done);
    }
    let (run, mut warnings) = if let Some(resumed) = resumed {
        if resumed.checkpoint.is_none() {
            trainer.start_over();
        }
        (resumed.run, resumed.warnings)
    } else {
        // A run that is refused leaves no folder.
        check_disk(&config.checkpoint.dir, &config, trainer.checkpoint_bytes())?;
        (new_run(&config)?, BTreeSet::new())
    };
    warnings.extend(warning);
    warnings.extend(check_disk(run.path(), &config, trainer.checkpoint_bytes())?);
    warnings.extend(trainer.changes().iter().map(changed));
    run.write_config(&trainer.config.to_toml()?)?;
    let log = EventLog::open(run.path().join("events.jsonl"))?;
    reporter.activity.begin("reading the log");
    let history = RunState::history(log.path())?;
    // Settings changed in the run's `config.toml` too.
    let logged = history.configs.last().map(|(_, config)| serde_json::from_value::<Config>(config.clone()));
    if let Some(Ok(logged)) = logged {
        warnings.extend(trainer.config.check_resumable(&logged)?.iter().map(changed));
    }
    trainer.restore_last_step(&history);
    drop(reporter);
    let mut emitter = Emitter::new(Some(log));
    let records = emitter.connect();
    if let Some(metrics) = metrics {
        emitter.add_sink(Box::new(metrics));
    }
    if config.telemetry.tensorboard {
        emitter.add_sink(Box::new(TensorBoard::create(&run.path().join("tensorboard"))?));
    }
    if let Some(notify) = notify {
        emitter.add_sink(Box::new(notify.only_below(best)));
    }
    for message in warnings {
        emitter.emit(Event::Warning(Diagnostic { step, message }));
    }
    trainer.attach(run, emitter);
    train_and_show(trainer, pool, &signals, &records, history, args)
}

/// The run's configuration, and the starting point of a resumed one.
fn resolve(args: &TrainArgs, reporter: &Reporter) -> Result<(Config, Option<Resumed>)> {
    let Some(path) = &args.resume else {
        // A name that is not UTF-8 cannot be in the run's configuration.
        let folder = std::env::current_dir().ok().filter(|folder| folder.to_str().is_some());
        let config = Config { folder, ..args.config.resolve()? };
        return Ok((if args.find_lr { config.for_range_test()? } else { config }, None));
    };
    args.config.check_resume()?;
    let mut resumed = find(path.as_deref(), args, reporter)?;
    let (config, changes) = args.config.resolve_for_resume(resumed.run.path())?;
    resumed.warnings.extend(changes.iter().map(changed));
    Ok((config, Some(resumed)))
}

/// A warning about a changed setting.
fn changed(change: impl Display) -> String {
    format!("resumed with a changed setting: {change}")
}

/// Refuses data that only one of several processes could read. Returns a warning if some have nothing to compute.
fn check_processes(world_size: usize, config: &Config) -> Result<Option<String>> {
    if world_size > 1 && config.stdin_reads()? > 0 {
        let message = "only one process can read standard input; use a file that all processes can read";
        return Err(Error::config("data", message));
    }
    let micro_batches = config.train.grad_accum;
    Ok(world_size.checked_sub(micro_batches).filter(|idle| *idle > 0).map(|idle| {
        format!(
            "{idle} of {world_size} processes have no micro-batch: a step has {micro_batches}; set `--grad-accum` to \
             {world_size} or more"
        )
    }))
}

/// Trains on a separate thread, and shows the run on this one until it ends.
fn train_and_show(
    mut trainer: Trainer,
    pool: rayon::ThreadPool,
    signals: &SignalHandler,
    records: &Receiver<Record>,
    history: RunState,
    args: &TrainArgs,
) -> Result<FinishReason> {
    let (commands, orders) = channel();
    trainer.commands = Some(orders);
    let save_commands = commands.clone();
    set_training(true);
    // A finished run has nothing to save.
    signals.attach(trainer.interrupt.clone(), move || {
        save_commands.send(Command::SaveNow).ok();
    });
    let activity = trainer.activity.clone();
    let began = Instant::now();
    let log_every = trainer.config.telemetry.log_every;
    let prompt = trainer.config.train.prompt.clone();
    let training = std::thread::Builder::new()
        .name("training".into())
        .spawn(move || {
            let (reason, end) = pool.install(|| (trainer.run(), trainer.end()));
            // The dashboard may stay open after the end.
            let seconds = began.elapsed().as_secs_f64();
            drop(trainer);
            set_training(false);
            (reason, end, seconds)
        })
        .map_err(Error::io("start a thread in", "."))?;
    show(LiveSource::new(records, &activity), &commands, &args.show, log_every, history);
    let Ok((reason, end, seconds)) = training.join() else {
        return Err(Error::engine("training stopped with a panic; this is a bug in finetune"));
    };
    let reason = reason?;
    let text = closing_words(&end, reason, seconds, &prompt);
    writeln!(stderr(), "{}", sanitize_block(text.trim_end())).ok();
    Ok(reason)
}

/// A sentence on how a run ended, and commands to use and to continue it.
fn closing_words(end: &RunEnd, reason: FinishReason, seconds: f64, prompt: &str) -> String {
    let RunEnd { step, total_steps, best, best_is_saved, checkpoint, chats, length: (flag, length) } = end;
    let at = if step < total_steps { format!(" at step {step} of {total_steps}") } else { String::new() };
    let best_loss = match best {
        Some(best) => format!("; best validation loss {} at step {}", loss(best.loss), best.step),
        None => String::new(),
    };
    let text = format!("{reason}{at} after {}{best_loss}", clock(seconds));
    let Some(checkpoint) = checkpoint else { return text + "; nothing was saved\n" };
    let text = format!("{text}; the model is `{}`\n", checkpoint.display());
    let run = checkpoint.parent().unwrap_or(checkpoint);
    let by_name = run.parent() == Some(Path::new("checkpoints"));
    let run = if by_name { run.file_name().unwrap_or_default().to_string_lossy() } else { run.to_string_lossy() };
    let run = quoted(&run);
    let is_best = best.is_none_or(|best| checkpoint.ends_with(CheckpointKind::Full.directory(best.step)));
    let command = if *chats { "chat" } else { "generate" };
    let best = if is_best || !best_is_saved { "" } else { " --best" };
    let prompt = if *chats || prompt.is_empty() { String::new() } else { format!(" --prompt {}", quoted(prompt)) };
    let more = match reason {
        FinishReason::Done => format!(" {flag} {}", 2.0 * length),
        FinishReason::EarlyStopped => " --early-stopping 0".into(),
        _ => String::new(),
    };
    text + &format!("try it:   finetune {command} {run}{best}{prompt}\ncontinue: finetune --resume {run}{more}\n")
}

/// Takes part in the leader's run.
pub(crate) fn run_worker(group: &Arc<dyn ProcessGroup>) -> Result<()> {
    ignore_stop_signals().map_err(Error::io("listen to signals in", "."))?;
    let Some(config) = RunStart::receive_config(&**group)? else { return Ok(()) };
    thread_pool(&config, group.core_sharers())?.install(|| {
        let opened = open_device(group.clone(), &config, &mut |_| ())?;
        let Some(RunStart { config, checkpoint }) = RunStart::receive(&**group)? else { return Ok(()) };
        let checkpoint = checkpoint.map(Checkpoint::open_verified).transpose()?;
        let mut trainer = Trainer::on_device(opened, config, checkpoint.as_ref(), &mut |_| ())?;
        trainer.check_consistency(checkpoint.as_ref())?;
        trainer.run_worker()
    })
}

/// A pool of the configured number of threads, by default one per core. `sharers` processes share the cores.
pub(crate) fn thread_pool(config: &Config, sharers: usize) -> Result<rayon::ThreadPool> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let share = if sharers > 1 { (cores / sharers).max(1) } else { 0 };
    pool("threads", config.threads.unwrap_or(share))
}

fn find(run: Option<&Path>, args: &TrainArgs, reporter: &Reporter) -> Result<Resumed> {
    reporter.activity.begin("verifying the checkpoint");
    let named = args.config.given("checkpoint.run");
    let named = named.as_ref().and_then(toml::Value::as_str);
    if let (Some(run), Some(name)) = (run, named) {
        let message = format!("`--resume {}` already selects the run; remove the name `{name}`", run.display());
        return Err(Error::config("checkpoint.run", message));
    }
    let dir = &args.config.runs();
    let path = run.map(|run| run_or_path(run, dir, is_run_or_step));
    let path = path.as_deref();
    let step = path.filter(|path| is_step(path));
    let folder = match (path, step) {
        (None, _) => named.map_or_else(|| latest_run(dir), |run| Ok(dir.join(run)))?,
        // A relative path may be without a parent.
        (_, Some(step)) => absolute(step).map_err(Error::io("read", step))?.parent().unwrap_or(step).to_path_buf(),
        (Some(path), None) if path.is_dir() => path.to_path_buf(),
        (Some(path), None) => {
            let message = format!("no folder or run with this name exists{}", did_you_mean(run.unwrap_or(path), dir));
            return Err(Error::checkpoint(path, message));
        }
    };
    let settings = folder.join("config.toml");
    match std::fs::metadata(&settings) {
        Ok(found) if found.is_file() => (),
        // Such as a folder that this user may not enter.
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(Error::io("read", settings)(error)),
        _ => return Err(Error::checkpoint(&folder, "not a run's folder: it has no `config.toml`")),
    }
    let run = Run::open(&folder)?;
    let threads = args.config.given("threads").and_then(|threads| threads.as_integer()?.try_into().ok());
    if let Some(step) = step {
        let checkpoint = Some(on_threads(threads, || Checkpoint::open(step))?);
        return Ok(Resumed { run, checkpoint, warnings: BTreeSet::new() });
    }
    if list(&folder)?.iter().all(|one| one.kind != CheckpointKind::Full) {
        let warnings = ["this run has no checkpoint yet; starting over".into()].into();
        return Ok(Resumed { run, checkpoint: None, warnings });
    }
    let found = on_threads(threads, || latest_valid(&folder))?;
    let warnings = found.corrupt_files.iter().map(|damage| format!("skipped a damaged checkpoint: {damage}")).collect();
    Ok(Resumed { run, checkpoint: Some(found.checkpoint), warnings })
}

/// Checks the free space for `run`, or for a new one in that folder: too little for one checkpoint is an error, too
/// little for all that are kept a warning.
fn check_disk(run: &Path, config: &Config, bytes: u64) -> Result<Option<String>> {
    let Some(free) = free_bytes(run) else { return Ok(None) };
    let checkpoints = if run.is_dir() { list(run)? } else { Vec::new() };
    let there = checkpoints.iter().filter(|one| one.kind == CheckpointKind::Full).count() as u64;
    let most = (config.checkpoint.keep_last as u64 + 1).saturating_sub(there).max(1);
    has_room(run, bytes, most, free)
}

/// Whether `free` bytes are enough for `most` checkpoints.
fn has_room(run: &Path, bytes: u64, most: u64, free: u64) -> Result<Option<String>> {
    let message = format!(
        "each checkpoint needs {} and up to {most} are written before the oldest is deleted, but only {} are free in `{}`",
        telemetry::bytes(bytes),
        telemetry::bytes(free),
        run.display()
    );
    match () {
        () if free < bytes => {
            let advice = "free some space, or choose another folder with --checkpoint-dir";
            Err(Error::config("checkpoint.dir", format!("{message}; {advice}")))
        }
        () if free < bytes.saturating_mul(most) => Ok(Some(format!("{message}; free some space, or keep fewer"))),
        () => Ok(None),
    }
}

/// Creates a new run's folder: the requested one, which must not contain a run, or the next free number.
fn new_run(config: &Config) -> Result<Run> {
    let dir = &config.checkpoint.dir;
    if let Some(name) = &config.checkpoint.run {
        let path = dir.join(name);
        let refused = || {
            let message = "already contains a run; continue it with `--resume`, or choose another name with `--run`";
            Err(Error::checkpoint(&path, message))
        };
        if Run::exists(&path) {
            return refused();
        }
        let run = Run::open(&path)?;
        // Another process may have started a run between the check and the lock.
        return if Run::exists(&path) { refused() } else { Ok(run) };
    }
    let model = Path::new(&config.model).file_name().unwrap_or_default().to_string_lossy();
    // `--run` refuses names that begin so.
    let model = match model.trim_start_matches(['-', '.']) {
        "" => "model",
        name => name,
    };
    let dtype = config.dtype.compute;
    for number in 1..=u32::MAX {
        if let Some(run) = Run::create(dir.join(format!("{model}-{dtype}-{number:04}")))? {
            return Ok(run);
        }
    }
    Err(Error::checkpoint(dir, "all run numbers are in use; choose a name with `--run`"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::checkpoint::Best;

    #[test]
    fn a_run_is_named_after_its_model() {
        let folder = tempfile::tempdir().unwrap();
        for (model, name) in
            [("owner/gpt", "gpt-f16-0001"), ("a/gpt", "gpt-f16-0002"), ("-.b", "b-f16-0001"), ("..", "model-f16-0001")]
        {
            let mut config = Config { model: model.into(), ..Config::default() };
            config.checkpoint.dir = folder.path().into();
            assert!(new_run(&config).unwrap().path().ends_with(name), "{model}");
        }
    }

    #[test]
    fn the_end_of_a_run_names_its_model_and_the_next_commands() {
        let end = RunEnd {
            step: 600,
            total_steps: 600,
            best: Some(Best { step: 500, loss: 0.625 }),
            best_is_saved: true,
            checkpoint: Some("checkpoints/a run/step-000600".into()),
            chats: false,
            length: ("--steps", 600.0),
        };
        assert_eq!(
            closing_words(&end, FinishReason::Done, 72.0, "the "),
            "done after 00:01:12; best validation loss 0.625 at step 500; the model is `checkpoints/a run/step-000600`\n\
             try it:   finetune generate 'a run' --best --prompt 'the '\n\
             continue: finetune --resume 'a run' --steps 1200\n"
        );
        let end = RunEnd { step: 9, chats: true, checkpoint: Some("elsewhere/b/step-000500".into()), ..end };
        let words = closing_words(&end, FinishReason::Interrupted, 3.0, "");
        assert!(words.starts_with("interrupted at step 9 of 600 after 00:00:03; "), "{words}");
        assert!(words.ends_with("finetune chat elsewhere/b\ncontinue: finetune --resume elsewhere/b\n"), "{words}");
        let end = RunEnd { best_is_saved: false, checkpoint: Some("checkpoints/b/step-000009".into()), ..end };
        let words = closing_words(&end, FinishReason::Interrupted, 3.0, "");
        assert!(words.contains("at step 500; ") && words.contains("finetune chat b\n"), "{words}");
        let end = RunEnd { checkpoint: None, best: None, ..end };
        assert_eq!(
            closing_words(&end, FinishReason::Stopped, 3.0, ""),
            "stopped at step 9 of 600 after 00:00:03; nothing was saved\n"
        );
    }

    #[test]
    fn room_for_every_checkpoint_that_is_kept_is_looked_at() {
        let judge = |free| has_room(Path::new("r"), 100, 3, free);
        let refused = judge(99).unwrap_err();
        assert!(refused.to_string().starts_with("checkpoint.dir: ") && refused.exit_code() == 2, "{refused}");
        assert!(judge(100).unwrap().unwrap().contains("up to 3 are written"));
        assert!(judge(299).unwrap().is_some());
        assert_eq!(judge(300).unwrap(), None);
        assert!(has_room(Path::new("r"), u64::MAX, 3, u64::MAX).unwrap().is_none());
    }
}
