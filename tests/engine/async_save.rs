//! A checkpoint is written while the next step's passes run, and holds nothing of that step.

use crate::common::checkpoint::{folder, names};
use crate::run::{self, attach, trainer};
use finetune::engine::collective::{Job, ProcessGroup, SingleProcess};
use finetune::engine::optim::OptimizerKind;
use finetune::precision::PrecisionPolicy;
use finetune::store::checkpoint::{Disk, FsOp, Run, list, verify};
use finetune::telemetry::{Command, Emitter, Event, FinishReason};
use finetune::train::{Config, Interval, Trainer};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

fn config(policy: PrecisionPolicy) -> Config {
    let mut config = run::config(policy, (2, 32));
    config.train.steps = Some(4);
    config.train.eval_every = Interval::Steps(0);
    config.checkpoint.save_every = Interval::Steps(2);
    config.scaler.init_scale = 1024.0;
    config
}

/// A single process that counts the steps whose passes are done: each then asks for the job, whose communication it
/// records.
#[derive(Debug, Default)]
struct Counting(AtomicUsize);

impl ProcessGroup for Counting {
    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        1
    }

    fn job(&self) -> Option<&Job> {
        self.0.fetch_add(1, Ordering::SeqCst);
        None
    }

    fn all_to_all(&self, out: &[&[u8]], into: &mut [&mut [u8]]) -> finetune::Result<()> {
        SingleProcess.all_to_all(out, into)
    }
}

/// A run in `folder` on `disk`, its events, and why it ended.
fn run(
    config: Config,
    group: Arc<dyn ProcessGroup>,
    folder: &Path,
    disk: Disk,
    commands: &[Command],
) -> (Vec<Event>, FinishReason) {
    let mut trainer = Trainer::new(group, config, None, &mut |_| ()).unwrap();
    let records = attach(&mut trainer, Run::open_on(folder, disk).unwrap());
    let (sender, receiver) = mpsc::channel();
    for command in commands {
        sender.send(*command).unwrap();
    }
    trainer.commands = Some(receiver);
    let reason = trainer.run().unwrap();
    (run::events(&records), reason)
}

fn files(checkpoint: &Path) -> BTreeMap<String, Vec<u8>> {
    names(checkpoint).into_iter().map(|name| (name.clone(), std::fs::read(checkpoint.join(&name)).unwrap())).collect()
}

/// The steps and saves in a log, in order.
fn told(events: &[Event]) -> Vec<String> {
    let brief = |event: &Event| match event {
        Event::Step(step) => Some(format!("step {}", step.step)),
        Event::CheckpointSaved(saved) => Some(format!("saved {}", saved.step)),
        Event::Warning(warning) => Some(format!("warning {}: {}", warning.step, warning.message)),
        Event::Phase { step, what } if what == "saving" => Some(format!("saving {step}")),
        Event::Paused { .. } => Some("paused".into()),
        _ => None,
    };
    events.iter().filter_map(brief).collect()
}

#[test]
fn a_checkpoint_written_beside_the_next_steps_passes_is_that_of_its_step() {
    let exact = config(PrecisionPolicy::FP16);
    let mut narrow = exact.clone();
    let mut fp8 = exact.clone();
    let mut own = config(PrecisionPolicy::FP32);
    narrow.train.optimizer = OptimizerKind::AdamW8bit;
    fp8.precision.fp8.block = Some(1.into());
    own.checkpoint.keep_best = false;
    for config in [exact, narrow, own, fp8] {
        let folder = folder();
        let group = Arc::new(Counting::default());
        let passed = group.clone();
        let held = Arc::new(AtomicUsize::new(0));
        let waited = held.clone();
        let first = OnceLock::new();
        // The first tensors of step 2 are not written before the passes of step 3 are done, and then no sooner than the
        // update would be, if it did not wait.
        let disk = Disk::with_hook(move |operation, path| {
            // The first operation opens the run, before its first step.
            let before = *first.get_or_init(|| passed.0.load(Ordering::SeqCst));
            let is_first = operation == FsOp::Write && path.ends_with(".step-000002.tmp/model.safetensors");
            if !is_first || waited.fetch_add(1, Ordering::SeqCst) > 0 {
                return Ok(());
            }
            let began = Instant::now();
            while passed.0.load(Ordering::SeqCst) < before + 3 {
                assert!(began.elapsed() < Duration::from_mins(1), "no passes run during the save");
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(Duration::from_millis(200));
            Ok(())
        });
        let (events, _) = run(config.clone(), group, &folder.path().join("run"), disk, &[]);
        let expected =
            ["step 1", "step 2", "saving 2", "saved 2", "step 3", "step 4", "saving 4", "saved 4"].map(str::to_owned);
        assert_eq!(told(&events), expected);
        assert!(held.load(Ordering::SeqCst) > 0, "no save ran during a step");

        let mut alone = trainer(&config);
        alone.attach(Run::open(folder.path().join("alone/run")).unwrap(), Emitter::new(None));
        alone.advance(2).unwrap();
        alone.save().unwrap();
        let beside = folder.path().join("run/step-000002");
        let alone = alone.checkpoint().unwrap();
        assert_eq!(verify(&beside), []);
        let beside = files(&beside);
        let alone = files(alone);
        assert_eq!(beside.keys().collect::<Vec<_>>(), alone.keys().collect::<Vec<_>>());
        for (name, bytes) in &beside {
            assert!(*bytes == alone[name], "{name}");
        }
    }
}

#[test]
fn a_save_that_fails_beside_a_step_is_a_warning_of_its_step_and_training_goes_on() {
    let folder = folder();
    let path = folder.path().join("run");
    let disk = Disk::with_hook(|operation, path| {
        let fails = operation == FsOp::Write && path.display().to_string().contains("step-000001");
        if fails { Err(io::Error::from_raw_os_error(libc::ENOSPC)) } else { Ok(()) }
    });
    let mut config = config(PrecisionPolicy::FP16);
    config.checkpoint.save_every = Interval::Steps(1);
    let (events, reason) = run(config, Arc::new(SingleProcess), &path, disk, &[]);
    let told = told(&events);
    let file = path.join(".step-000001.tmp/config.json");
    let warning = format!(
        "warning 1: no checkpoint at step 1: cannot write `{}`: No space left on device (os error 28); training continues",
        file.display()
    );
    assert_eq!(told[..6], ["step 1", "saving 1", &warning, "step 2", "saving 2", "saved 2"].map(str::to_owned));
    assert_eq!(reason, FinishReason::Done);
    assert_eq!(names(&path), [".lock", "latest", "step-000003", "step-000004"]);
    assert!(list(&path).unwrap().iter().all(|one| verify(&one.path).is_empty()));
}

/// If no step follows, everything that was asked for is still written.
#[test]
fn a_save_that_is_due_is_written_before_a_run_pauses_or_stops() {
    for (commands, expected) in [
        (&[Command::SaveNow, Command::Stop { save: false }][..], &["saving 0", "saved 0"][..]),
        (&[Command::SaveNow, Command::Stop { save: true }], &["saving 0", "saved 0"]),
        (&[Command::SaveNow, Command::SaveNow, Command::Interrupt], &["saving 0", "saved 0"]),
        (&[Command::SaveNow, Command::Pause, Command::Stop { save: false }], &["saving 0", "paused", "saved 0"]),
    ] {
        let folder = folder();
        let path = folder.path().join("run");
        let (events, reason) =
            run(config(PrecisionPolicy::FP16), Arc::new(SingleProcess), &path, Disk::default(), commands);
        assert_eq!(told(&events), expected, "{commands:?}");
        assert!(matches!(reason, FinishReason::Stopped | FinishReason::Interrupted));
        assert_eq!(names(&path), [".lock", "latest", "step-000000"]);
    }
    // While a run is paused no step comes, and a save does not wait for one.
    let folder = folder();
    let mut trainer = trainer(&config(PrecisionPolicy::FP16));
    let events = attach(&mut trainer, Run::open(folder.path().join("run")).unwrap());
    let (sender, receiver) = mpsc::channel();
    for command in [Command::Pause, Command::SaveNow] {
        sender.send(command).unwrap();
    }
    trainer.commands = Some(receiver);
    let training = std::thread::spawn(move || trainer.run());
    let saved = events.iter().find(|record| matches!(record.event, Event::CheckpointSaved(_)));
    assert!(saved.is_some_and(|record| record.event.step() == Some(0)));
    sender.send(Command::Stop { save: false }).unwrap();
    assert_eq!(training.join().unwrap().unwrap(), FinishReason::Stopped);
}

/// Regression: a run that was killed before its first checkpoint counted as saved at step 0.
#[test]
fn a_run_that_starts_over_is_saved_when_it_is_interrupted_at_once() {
    let folder = folder();
    let mut trainer = trainer(&config(PrecisionPolicy::FP16));
    trainer.start_over();
    let events = attach(&mut trainer, Run::open(folder.path().join("run")).unwrap());
    trainer.interrupt.store(true, Ordering::SeqCst);
    assert_eq!(trainer.run().unwrap(), FinishReason::Interrupted);
    drop(trainer);
    let events: Vec<_> = events.into_iter().map(|record| record.event).collect();
    assert!(events.iter().any(|event| matches!(event, Event::Started(started) if started.resumed_from == Some(0))));
    assert_eq!(told(&events), ["saving 0", "saved 0"]);
}
