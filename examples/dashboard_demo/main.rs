//! The dashboard over a synthetic run, to try it without training, and for `tests/cli/terminal.rs`.
//!
//! `cargo run --example dashboard_demo [-- --panic training|screen] [--log FILE] [--stubborn] [--ascii]`
//!
//! The run never ends and takes a hundred steps per second. It executes every command, and prints the commands and how
//! the dashboard ended. With `--stubborn` it ignores requests to stop, like a very long step.

#![allow(clippy::expect_used, reason = "a program for people and tests")]

use finetune::screen::terminal::SignalHandler;
use finetune::screen::{self, Exit, LiveSource};
use finetune::telemetry::{
    self, Activity, CheckpointSaved, Command, Emitter, Event, EventLog, FinishReason, ProcessId, RunState,
};
use finetune::ui::Theme;
use std::io::{Write, stdout};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

mod invented;

use invented::{Invented, InventedRun};

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let has = |name: &str| arguments.iter().any(|argument| argument == name);
    let value = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name)?;
        arguments.get(at + 1).cloned()
    };
    let panics = value("--panic").unwrap_or_default();
    let log = value("--log").map(|path| EventLog::open(path).expect("the log can be written"));

    let mut emitter = Emitter::new(log);
    let (commands, orders) = channel();
    let events = emitter.connect();
    let interrupt: Arc<AtomicBool> = Arc::default();
    SignalHandler::listen().expect("signals can be listened to").attach(interrupt.clone(), || {});
    let panic_at = if panics == "training" { 100 } else { u64::MAX };
    let trained = Trained { orders, interrupt, stubborn: has("--stubborn"), panic_at };
    let training = thread::Builder::new().name("training".into());
    let training = training.spawn(move || train(emitter, &trained)).expect("a thread can be spawned");

    let frames = if panics == "screen" { 3 } else { usize::MAX };
    let writer = PanickingWriter { frames };
    let theme = Theme::from_env(has("--ascii"), None);
    let activity = Activity::default();
    let source = LiveSource::new(&events, &activity);
    let exit = screen::follow(writer, source, &commands, theme, true, 10, RunState::default());
    say(&format!("exit: {exit:?}"));
    if exit == Exit::Killed {
        std::process::exit(130);
    }
    let told = training.join().unwrap_or_else(|_| vec!["training panicked".into()]);
    say(&format!("told: {}", told.join(" ")));
}

/// Prints a line; ignores a closed terminal.
fn say(line: &str) {
    writeln!(stdout(), "{line}").ok();
}

/// The inputs and the behaviour of the synthetic training.
struct Trained {
    orders: Receiver<Command>,
    interrupt: Arc<AtomicBool>,
    stubborn: bool,
    panic_at: u64,
}

/// Emits synthetic steps and serves commands; returns the commands.
fn train(mut emitter: Emitter, trained: &Trained) -> Vec<String> {
    let mut told = Vec::new();
    let mut run = InventedRun::new(Invented { total_steps: 1_000_000, ..Invented::default() });
    let mut paused = false;
    let mut step = 0;
    loop {
        if trained.interrupt.load(Ordering::Relaxed) && !trained.stubborn {
            told.push("interrupt".into());
            emitter.emit(run.finished(FinishReason::Interrupted));
            return told;
        }
        for order in trained.orders.try_iter().filter(|_| !trained.stubborn) {
            told.push(format!("{order:?}"));
            match order {
                Command::Pause | Command::Resume => {
                    paused = order == Command::Pause;
                    let event = if paused { Event::Paused { step } } else { Event::Resumed { step } };
                    emitter.emit(event);
                }
                Command::SaveNow => {
                    let saved = CheckpointSaved { step, path: "nowhere".into(), ..CheckpointSaved::default() };
                    emitter.emit(Event::CheckpointSaved(saved));
                }
                Command::Interrupt => {
                    emitter.emit(run.finished(FinishReason::Interrupted));
                    return told;
                }
                Command::Stop { .. } => {
                    emitter.emit(run.finished(FinishReason::Stopped));
                    return told;
                }
                _ => {}
            }
        }
        if !paused {
            let mut record = run.next().expect("the run is endless");
            if let Event::Started(started) = &mut record.event {
                started.process = ProcessId::own();
            }
            step = record.event.step().unwrap_or(step);
            assert!(step < trained.panic_at, "an invented panic in training");
            emitter.emit(record.event);
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// Standard output that panics once after a number of frames, like a bug in drawing.
struct PanickingWriter {
    frames: usize,
}

impl Write for PanickingWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.frames == 0 {
            self.frames = usize::MAX;
            panic!("an invented panic in drawing");
        }
        stdout().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.frames -= 1;
        stdout().flush()
    }
}
