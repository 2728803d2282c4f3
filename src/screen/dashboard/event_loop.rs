//! The dashboard's loop: drain records, draw at most ten times a second, wait for a key.

use super::panels::header::BLINK;
use super::plain::{Plain, announcement};
use super::state::{Exit, Mode, Msg, Playback, ViewModel, update};
use super::view;
use crate::screen::terminal::keys::is_ctrl_z;
use crate::screen::terminal::{Ending, Screen};
use crate::telemetry::{Activity, Command, Event, PhaseLines, Record, RunState};
use crate::ui::Theme;
use crate::{Error, Result};
use ratatui::crossterm::event::{Event as TerminalEvent, KeyEventKind, MouseEventKind};
use std::io::{Write, stderr, stdout};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Minimum time between two frames.
const FRAME: Duration = Duration::from_millis(100);
/// How long the loop waits for a key when nothing happens.
const IDLE: Duration = Duration::from_millis(40);
/// Maximum number of records read between two checks of the keyboard.
const BATCH: usize = 4096;

/// A source of messages besides the keyboard and signals.
pub(super) trait Source {
    /// Passes on the messages since the last call, or some of them; `true` if there are more already.
    fn poll(&mut self, pass: &mut dyn FnMut(Msg)) -> Result<bool>;

    /// Applies pause, speed and seek to a replay, and updates its position.
    fn play(&mut self, _playback: &mut Option<Playback>) {}

    /// The wall-clock time to show, in milliseconds.
    fn clock(&self) -> u64 {
        wall_clock()
    }

    /// The slow work training does between two steps, if any.
    fn activity(&self) -> Option<String> {
        None
    }
}

pub(super) fn wall_clock() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// The training thread of this process.
struct Attached<'a> {
    events: &'a Receiver<Record>,
    activity: &'a Activity,
    closed: bool,
    /// The run's name.
    run: String,
    total_steps: u64,
    /// The line that announces the run's end.
    end: Option<String>,
}

impl Source for Attached<'_> {
    fn poll(&mut self, pass: &mut dyn FnMut(Msg)) -> Result<bool> {
        for _ in 0..BATCH {
            match self.events.try_recv() {
                Ok(record) => {
                    match &record.event {
                        Event::Started(started) => {
                            self.run.clone_from(&started.run);
                            self.total_steps = started.total_steps;
                        }
                        Event::Finished(_) => self.end = announcement(&record.event),
                        _ => {}
                    }
                    pass(Msg::Record(Box::new(record)));
                }
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

    fn activity(&self) -> Option<String> {
        self.activity.running_for(PhaseLines::FIRST).map(|phase| phase.to_string())
    }
}

/// Shows the dashboard on `writer`, a handle to standard output, which must be a terminal, until the run ends or the user
/// leaves; from then until training ends, prints plain lines for every `log_every`-th step. Call it on the main thread, with
/// training on another one that sends `records` and serves `commands` between two steps. `history` is the state of a
/// resumed run; the flag enables the mouse.
///
/// The terminal is restored before any line and before any thread's panic message is printed. If drawing panics, the result
/// is [`Exit::Crashed`], and the run continues. [`Exit::Aborted`] returns without waiting for training.
pub fn follow<W: Write>(
    writer: W,
    (records, activity): (&Receiver<Record>, &Activity),
    commands: &Sender<Command>,
    (theme, mouse): (Theme, bool),
    log_every: u64,
    history: RunState,
) -> Exit {
    let mut source =
        Attached { events: records, activity, closed: false, run: String::new(), total_steps: 0, end: None };
    let view = ViewModel::after(Mode::Attached, history);
    let exit = show(writer, view, &mut source, Some(commands), theme, mouse).unwrap_or_else(|error| {
        // A closed standard error is not a failure.
        let _ = writeln!(stderr(), "warning: no dashboard: {error}");
        Exit::Crashed
    });
    if let Some(end) = source.end {
        // The screen that showed it has closed.
        let _ = writeln!(stdout(), "{end}");
    }
    if exit != Exit::Aborted {
        if exit == Exit::Detached {
            let _ =
                writeln!(stdout(), "detached; `finetune watch {}` in another terminal shows the dashboard", source.run);
        }
        follow_plain(records, activity, &mut Plain::midway(stdout(), log_every, source.total_steps));
    }
    exit
}

/// Writes lines until training has ended. A closed output does not stop training: the log has everything.
pub fn follow_plain<W: Write>(records: &Receiver<Record>, activity: &Activity, plain: &mut Plain<W>) {
    let mut show = || loop {
        match records.recv_timeout(FRAME) {
            Ok(record) => plain.show(&record)?,
            Err(RecvTimeoutError::Timeout) => plain.phase(activity)?,
            Err(RecvTimeoutError::Disconnected) => return Ok::<_, std::io::Error>(()),
        }
    };
    let _ = show();
    plain.end();
    records.iter().for_each(drop);
}

/// Takes over the terminal and runs the dashboard on it.
pub(super) fn show<W: Write>(
    writer: W,
    mut view: ViewModel,
    source: &mut dyn Source,
    commands: Option<&Sender<Command>>,
    theme: Theme,
    mouse: bool,
) -> Result<Exit> {
    let ending = Ending::listen().map_err(Error::io("watch for signals on", "terminal"))?;
    let mut screen = Screen::take(writer, mouse).map_err(Error::io("take over", "terminal"))?;
    view.first_look = theme.look();
    let driven = catch_unwind(AssertUnwindSafe(|| drive(&mut screen, &mut view, source, commands, &ending, theme)));
    drop(screen);
    driven.unwrap_or(Ok(Exit::Crashed))
}

fn drive<W: Write>(
    screen: &mut Screen<W>,
    view: &mut ViewModel,
    source: &mut dyn Source,
    commands: Option<&Sender<Command>>,
    ending: &Ending,
    theme: Theme,
) -> Result<Exit> {
    let say = |command: Option<Command>| {
        if let (Some(command), Some(commands)) = (command, commands) {
            // Training that has ended has dropped the receiver; the screen already shows its end.
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
        source.play(&mut view.playback);
        if ending.arrived() {
            say(update(view, Msg::Terminate));
        }
        let now = source.clock();
        changed |= now / BLINK != view.now / BLINK;
        update(view, Msg::Clock(now));
        let activity = source.activity();
        changed |= activity != view.activity;
        view.activity = activity;
        if let Some(exit) = view.exit {
            return Ok(exit);
        }
        if changed && drawn.is_none_or(|drawn| drawn.elapsed() >= FRAME) {
            let mut size = (0, 0);
            let draw = |frame: &mut ratatui::Frame| {
                size = (frame.area().width, frame.area().height);
                view::draw(view, theme, frame.buffer_mut());
            };
            let drawn_now = screen.draw(draw);
            update(view, Msg::Size(size.0, size.1));
            match drawn_now {
                Ok(true) => (drawn, changed) = (Some(Instant::now()), false),
                // A thread panicked, and its message is on the terminal.
                Ok(false) => return Ok(Exit::Lost),
                Err(_) => {
                    say(update(view, Msg::Terminate));
                    continue;
                }
            }
        }
        match screen.next_event(if more { Duration::ZERO } else { IDLE }) {
            Ok(Some(TerminalEvent::Key(key))) if is_ctrl_z(key) && key.kind == KeyEventKind::Press => {
                if screen.suspend().is_err() {
                    say(update(view, Msg::Terminate));
                }
                changed = true;
            }
            Ok(Some(TerminalEvent::Key(key))) if key.kind != KeyEventKind::Release => {
                changed = true;
                say(update(view, Msg::Key(key)));
            }
            Ok(Some(TerminalEvent::Mouse(mouse))) if mouse.kind != MouseEventKind::Moved => {
                changed = true;
                say(update(view, Msg::Mouse(mouse)));
            }
            Ok(Some(TerminalEvent::Resize(..))) => changed = true,
            Ok(_) => {}
            // The terminal has hung up.
            Err(_) => say(update(view, Msg::Terminate)),
        }
    }
}
