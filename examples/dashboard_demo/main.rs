//! The dashboard over an invented run: to look at it without training anything, and for `tests/dashboard_tmux.rs`.
//!
//! `cargo run --example dashboard_demo [-- --panic training|screen] [--log FILE] [--ascii]`
//!
//! The run goes on for ever, a hundred steps a second. It answers every command, and prints what it was told and how the
//! dashboard ended.

#![allow(clippy::expect_used, reason = "a program for people and tests")]

use finetune::dashboard::{self, Exit, Theme};
use finetune::telemetry::{self, Command, Emitter, Event, EventLog, FinishReason, ProcessId, Saved};
use std::io::{Write, stdout};
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
    let panic_at = if panics == "training" { 100 } else { u64::MAX };
    let training = thread::Builder::new().name("training".into());
    let training = training.spawn(move || train(emitter, &orders, panic_at)).expect("a thread can be spawned");

    let frames = if panics == "screen" { 3 } else { usize::MAX };
    let writer = PanickingWriter { frames };
    let exit = dashboard::run_on(writer, &events, &commands, Theme::from_env(has("--ascii"))).expect("a terminal");
    say(&format!("exit: {exit:?}"));
    match exit {
        Exit::Aborted => std::process::exit(130),
        Exit::Detached | Exit::Crashed => {
            // What training does now comes as lines; a few are enough to see that it goes on.
            let mut plain = dashboard::Plain::new(stdout(), 10);
            events.iter().take(50).for_each(|record| _ = plain.show(&record));
            say("still training");
        }
        Exit::Ended | Exit::Terminated | Exit::Lost => {
            drop(events);
            let told = training.join().unwrap_or_else(|_| vec!["training panicked".into()]);
            say(&format!("told: {}", told.join(" ")));
        }
    }
}

/// Prints a line, if the terminal is still there.
fn say(line: &str) {
    writeln!(stdout(), "{line}").ok();
}

/// Emits invented steps and does as it is told; gives what that was.
fn train(mut emitter: Emitter, orders: &Receiver<Command>, panic_at: u64) -> Vec<String> {
    let mut told = Vec::new();
    let mut run = InventedRun::new(Invented { total_steps: 1_000_000, ..Invented::default() });
    let mut paused = false;
    let mut step = 0;
    loop {
        for order in orders.try_iter() {
            told.push(format!("{order:?}"));
            match order {
                Command::Pause | Command::Resume => {
                    paused = order == Command::Pause;
                    let event = if paused { Event::Paused { step } } else { Event::Resumed { step } };
                    emitter.emit(event).expect("the log can be written");
                }
                Command::SaveNow => {
                    let saved = Saved { step, path: "nowhere".into(), ..Saved::default() };
                    emitter.emit(Event::Saved(saved)).expect("the log can be written");
                }
                Command::Stop { .. } => {
                    emitter.emit(run.finished(FinishReason::Stopped)).expect("the log can be written");
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
            assert!(step < panic_at, "an invented panic in training");
            emitter.emit(record.event).expect("the log can be written");
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// Standard output that panics once, after so many frames, as a bug in drawing would.
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
