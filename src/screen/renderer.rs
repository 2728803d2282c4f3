//! Shows a run while it trains: one loop passes messages from a source to a renderer. Sources are training in this
//! process and a run's log; renderers are the dashboard, the status line and plain lines.

use super::dashboard::{App, DashboardMode};
use super::plain::PlainPrinter;
use super::terminal::SAVING;
use super::words::announcement;
use crate::telemetry::{Activity, Command, Event, Phase, PhaseLines, Record, RunState, wall_clock};
use crate::ui::Theme;
use crate::{Error, Result};
use std::io::{self, Write, stderr, stdout};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

/// Maximum number of records read between two checks of the keyboard.
const BATCH: usize = 4096;

/// How the dashboard ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// The run is over, or was only watched.
    Ended,
    /// The user left, and training continues.
    Detached,
    /// A signal came or the terminal is lost; training saves and stops.
    Terminated,
    /// The user does not want to wait: the process should end at once.
    Killed,
    /// Training panicked.
    TrainerPanicked,
}

/// News of the runs.
#[derive(Debug)]
pub(crate) enum ScreenMessage {
    Record(Box<Record>),
    /// A record of an overlaid run.
    Other(usize, Box<Record>),
    /// A replay starts over, so discard the state.
    Rewind,
    /// There will be no more records.
    Closed,
    /// The watched process has ended.
    Gone,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Playback {
    /// Speed relative to the run's.
    pub(crate) speed: f64,
    pub(crate) paused: bool,
    /// Position to seek to, as a share of the run; the replay takes it.
    pub(crate) seek: Option<f64>,
    /// Current position, as a share of the run.
    pub(crate) at: f64,
}

pub(crate) trait MessageSource {
    /// Passes on the messages since the last call, or some of them; `true` if there are more already. If there are
    /// none, it may wait for this long.
    fn poll(&mut self, wait: Duration, pass: &mut dyn FnMut(ScreenMessage)) -> Result<bool>;

    /// Whether there will be no more records.
    fn is_over(&self) -> bool;

    /// The slow work training does between two steps, if any.
    fn activity(&self) -> Option<String>;

    /// The line to write about that work now, if one is due, for an output that keeps every line.
    fn phase(&mut self, lines: &mut PhaseLines) -> Option<String>;

    /// Applies pause, speed and seek to a replay, and updates its position.
    fn play(&mut self, _playback: &mut Option<Playback>) {}

    /// The wall-clock time to show, in milliseconds.
    fn clock(&self) -> u64 {
        wall_clock()
    }
}

/// Shows a run, whose state it has.
pub(crate) trait Renderer {
    /// How long a source may wait for news.
    const POLL_INTERVAL: Duration = Duration::from_millis(100);

    fn show(&mut self, message: ScreenMessage) -> io::Result<()>;

    /// Shows everything else after a poll; `quiet` if the poll passed no message. A result ends the loop.
    fn idle(&mut self, source: &mut dyn MessageSource, quiet: bool, more: bool) -> io::Result<Option<Exit>>;
}

/// Passes the source's messages to the renderer until it ends.
pub(super) fn drive<R: Renderer>(source: &mut dyn MessageSource, renderer: &mut R) -> Result<Exit> {
    loop {
        let mut quiet = true;
        let mut shown = Ok(());
        let more = source.poll(R::POLL_INTERVAL, &mut |message| {
            quiet = false;
            if shown.is_ok() {
                shown = renderer.show(message);
            }
        })?;
        let exit = shown.and_then(|()| renderer.idle(source, quiet, more));
        if let Some(exit) = exit.map_err(Error::io("write", "standard output"))? {
            return Ok(exit);
        }
    }
}

/// The training thread of this process.
#[derive(Debug)]
pub struct LiveSource<'a> {
    records: &'a Receiver<Record>,
    activity: &'a Activity,
    closed: bool,
}

impl<'a> LiveSource<'a> {
    /// The thread that sends `records` and sets its `activity`.
    pub fn new(records: &'a Receiver<Record>, activity: &'a Activity) -> Self {
        Self { records, activity, closed: false }
    }

    /// Shows the rest of the run; returns when training has ended. A closed output does not stop it: the log has
    /// everything.
    pub(crate) fn follow<R: Renderer>(&mut self, renderer: &mut R) {
        let _ = drive(self, renderer);
        self.records.iter().for_each(drop);
    }
}

impl MessageSource for LiveSource<'_> {
    fn poll(&mut self, mut wait: Duration, pass: &mut dyn FnMut(ScreenMessage)) -> Result<bool> {
        for _ in 0..BATCH {
            match self.records.recv_timeout(wait) {
                Ok(record) => pass(ScreenMessage::Record(Box::new(record))),
                Err(RecvTimeoutError::Disconnected) if !self.closed => {
                    self.closed = true;
                    pass(ScreenMessage::Closed);
                }
                Err(_) => return Ok(false),
            }
            wait = Duration::ZERO;
        }
        Ok(true)
    }

    fn is_over(&self) -> bool {
        self.closed
    }

    fn activity(&self) -> Option<String> {
        self.activity.running_for(PhaseLines::MIN_DURATION).map(|phase| phase.to_string())
    }

    fn phase(&mut self, lines: &mut PhaseLines) -> Option<String> {
        lines.due(self.activity, PhaseLines::MIN_DURATION)
    }
}

/// Shows the dashboard on `writer`, a handle to standard output, which must be a terminal, until the run ends or the
/// user leaves; from then until training ends, prints plain lines for every `log_every`-th step. Call it on the main
/// thread, with training on another one that feeds `source` and serves `commands` between two steps. `history` is the
/// state of a resumed run.
///
/// The terminal is restored before any line and before any thread's panic message is printed. If drawing panics, the
/// run continues. [`Exit::Killed`] returns without waiting for training.
pub fn follow<W: Write>(
    writer: W,
    mut source: LiveSource<'_>,
    commands: &Sender<Command>,
    theme: Theme,
    mouse: bool,
    log_every: u64,
    history: RunState,
) -> Exit {
    let mut app = App::new(DashboardMode::Attached, history);
    let exit = app.run(writer, &mut source, Some(commands), theme, mouse).unwrap_or_else(|error| {
        // A closed standard error is not a failure.
        let _ = writeln!(stderr(), "warning: no dashboard: {error}");
        Exit::Ended
    });
    let run = app.scene.live;
    if let Phase::Finished(finished) = &run.phase
        && let Some(end) = announcement(&Event::Finished(finished.as_ref().clone()))
    {
        // The screen that showed it has closed.
        let _ = writeln!(stdout(), "{end}");
    }
    match exit {
        Exit::Killed => return exit,
        Exit::Detached => {
            let name = run.started.as_ref().map_or("", |started| &started.run);
            let _ = writeln!(stdout(), "detached; `finetune watch {name}` in another terminal shows the dashboard");
        }
        // The screen was still shown when the signal arrived.
        Exit::Terminated if !run.is_over() => drop(writeln!(stderr(), "{SAVING}")),
        _ => {}
    }
    source.follow(&mut PlainPrinter::after(run, stdout(), log_every));
    exit
}
