//! The loop behind the screen: drain what has happened, draw at most ten times a second, wait for a key.

use super::screen::Screen;
use super::state::{Exit, Mode, Msg, ViewModel, update};
use super::theme::Theme;
use crate::telemetry::{Command, Record};
use crate::{Error, Result};
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::{SigId, low_level};
use std::io::{self, IsTerminal, Write, stdout};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Time between two frames, at least.
const FRAME: Duration = Duration::from_millis(100);
/// How long the loop sleeps when nothing happens.
const IDLE: Duration = Duration::from_millis(40);
/// Records taken between two looks at the keyboard.
const BATCH: usize = 4096;

/// Where messages come from, beside the keyboard and signals.
pub(super) trait Source {
    /// Passes on what has happened since the last call, or part of it: `true` if there is more already.
    fn poll(&mut self, pass: &mut dyn FnMut(Msg)) -> Result<bool>;

    /// The time the picture shows, in wall-clock milliseconds.
    fn clock(&self) -> u64 {
        wall_clock()
    }
}

pub(super) fn wall_clock() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// The training thread of this process.
struct Attached<'a> {
    events: &'a Receiver<Record>,
    closed: bool,
}

impl Source for Attached<'_> {
    fn poll(&mut self, pass: &mut dyn FnMut(Msg)) -> Result<bool> {
        for _ in 0..BATCH {
            match self.events.try_recv() {
                Ok(record) => pass(Msg::Record(Box::new(record))),
                Err(TryRecvError::Empty) => return Ok(false),
                Err(TryRecvError::Disconnected) if self.closed => return Ok(false),
                Err(TryRecvError::Disconnected) => {
                    self.closed = true;
                    pass(Msg::Closed);
                }
            }
        }
        Ok(true)
    }
}

/// Shows the dashboard on standard output, a terminal, until the run or the person ends it. Call it on the main thread,
/// with training on another one that sends `events` and looks for `commands` between two steps.
///
/// The terminal is given back before this returns, and before any thread's panic message is printed. If drawing itself
/// panics the answer is [`Exit::Crashed`]: the run goes on, and its events can be followed as plain lines.
///
/// # Errors
/// If the terminal cannot be taken or written to.
pub fn run(events: &Receiver<Record>, commands: &Sender<Command>, theme: Theme) -> Result<Exit> {
    run_on(stdout(), events, commands, theme)
}

/// [`run`] with another way to the same terminal.
///
/// # Errors
/// As [`run`].
pub fn run_on<W: Write>(
    writer: W,
    events: &Receiver<Record>,
    commands: &Sender<Command>,
    theme: Theme,
) -> Result<Exit> {
    let mut source = Attached { events, closed: false };
    show(writer, Mode::Attached, &mut source, Some(commands), theme)
}

/// Takes the terminal and drives the dashboard on it.
pub(super) fn show<W: Write>(
    writer: W,
    mode: Mode,
    source: &mut dyn Source,
    commands: Option<&Sender<Command>>,
    theme: Theme,
) -> Result<Exit> {
    let signals = Signals::register().map_err(Error::io("watch for signals on", "terminal"))?;
    let mut screen = Screen::take(writer).map_err(Error::io("take over", "terminal"))?;
    let mut view = ViewModel::new(mode);
    let driven = catch_unwind(AssertUnwindSafe(|| drive(&mut screen, &mut view, source, commands, &signals, theme)));
    drop(screen);
    driven.unwrap_or(Ok(Exit::Crashed))
}

fn drive<W: Write>(
    screen: &mut Screen<W>,
    view: &mut ViewModel,
    source: &mut dyn Source,
    commands: Option<&Sender<Command>>,
    signals: &Signals,
    theme: Theme,
) -> Result<Exit> {
    let say = |command: Option<Command>| {
        if let (Some(command), Some(commands)) = (command, commands) {
            // Training that has ended does not listen any more, and that is shown already.
            let _ = commands.send(command);
        }
    };
    let mut drawn: Option<Instant> = None;
    let mut changed = true;
    loop {
        let more = source.poll(&mut |msg| {
            changed = true;
            say(update(view, msg));
        })?;
        while let Some(msg) = signals.next() {
            changed = true;
            say(update(view, msg));
        }
        let now = source.clock();
        changed |= now / 1000 != view.now / 1000;
        update(view, Msg::Clock(now));
        if let Some(exit) = view.exit {
            return Ok(exit);
        }
        if changed && drawn.is_none_or(|drawn| drawn.elapsed() >= FRAME) {
            match screen.draw(view, theme) {
                Ok(true) => (drawn, changed) = (Some(Instant::now()), false),
                // A thread has panicked, and its message is on the terminal.
                Ok(false) => return Ok(Exit::Lost),
                Err(_) => {
                    say(update(view, Msg::Terminate));
                    continue;
                }
            }
        }
        if !more {
            sleep(IDLE);
        }
        match read_keys() {
            Ok(messages) => {
                for msg in messages {
                    changed = true;
                    if let Some(msg) = msg {
                        say(update(view, msg));
                    }
                }
            }
            // The terminal is gone.
            Err(_) => say(update(view, Msg::Terminate)),
        }
    }
}

/// What the terminal has to say: keys, or `None` for a new size.
///
/// crossterm's reader never returns from a terminal that has hung up, so that is looked at first; and it is only asked
/// for what is there already, never to wait.
fn read_keys() -> io::Result<Vec<Option<Msg>>> {
    let mut messages = Vec::new();
    if !stdout().is_terminal() {
        return Err(io::ErrorKind::BrokenPipe.into());
    }
    while event::poll(Duration::ZERO)? {
        match event::read()? {
            Event::Key(key) if key.kind != KeyEventKind::Release => messages.push(Some(Msg::Key(key))),
            Event::Resize(..) => messages.push(None),
            _ => {}
        }
    }
    Ok(messages)
}

/// Flags that signals raise while the dashboard is open.
struct Signals {
    interrupt: Arc<AtomicBool>,
    terminate: Arc<AtomicBool>,
    registered: Vec<SigId>,
}

impl Signals {
    fn register() -> io::Result<Self> {
        let (interrupt, terminate) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let mut signals = Self { interrupt, terminate, registered: Vec::new() };
        for (signal, flag) in
            [(SIGINT, &signals.interrupt), (SIGTERM, &signals.terminate), (SIGHUP, &signals.terminate)]
        {
            signals.registered.push(signal_hook::flag::register(signal, Arc::clone(flag))?);
        }
        Ok(signals)
    }

    fn next(&self) -> Option<Msg> {
        if self.terminate.swap(false, Ordering::SeqCst) {
            return Some(Msg::Terminate);
        }
        self.interrupt.swap(false, Ordering::SeqCst).then_some(Msg::Interrupt)
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for id in self.registered.drain(..) {
            low_level::unregister(id);
        }
    }
}
