//! The dashboard over a log instead of a channel: of a run in another process, or of one that is long over.

use super::event_loop::{Source, show};
use super::plain::Plain;
use super::state::{Exit, Mode, Msg};
use super::theme::Theme;
use crate::telemetry::{Event, ProcessId, Record, Tail, Trouble, VERSION};
use crate::{Error, Result};
use std::collections::VecDeque;
use std::io::{Write, stdout};
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How often a silent run's process is looked for, and a log without a screen is read.
const LOOK: Duration = Duration::from_millis(500);

/// Shows the run whose events are in `log` on standard output, a terminal. With a `speed` it is replayed, that many times
/// as fast as it was; without, the picture starts where the log ends and follows it.
///
/// # Errors
/// If the log cannot be read or the terminal cannot be taken.
pub fn watch(log: &Path, speed: Option<f64>, theme: Theme) -> Result<Exit> {
    let mode = speed.map_or(Mode::Watching, Mode::Replaying);
    show(stdout(), mode, &mut Watched::new(log, speed), None, theme)
}

/// Writes the run whose events are in `log` as plain lines, and follows it until it ends.
///
/// # Errors
/// If the log cannot be read or `out` is closed.
pub fn watch_plain<W: Write>(log: &Path, out: W, log_every: u64) -> Result<()> {
    let mut plain = Plain::new(out, log_every);
    let mut source = Watched::new(log, None);
    loop {
        let mut over = false;
        let mut failure = None;
        let more = source.poll(&mut |msg| match msg {
            Msg::Record(record) => {
                over = matches!(record.event, Event::Finished(_));
                failure = plain.show(&record).err().or(failure.take());
            }
            Msg::Gone => over = true,
            _ => {}
        })?;
        if let Some(error) = failure {
            return Err(Error::io("write", "standard output")(error));
        }
        if over && !more {
            return Ok(());
        }
        if !more {
            sleep(LOOK);
        }
    }
}

/// A log as a source of messages.
pub(super) struct Watched {
    tail: Tail,
    replay: Option<Replay>,
    /// The process that trains, as the log names it, until it has finished.
    process: Option<ProcessId>,
    looked: Instant,
}

/// Records waiting for their time.
struct Replay {
    speed: f64,
    began: Instant,
    /// Run-relative seconds of the first record.
    first: Option<f64>,
    waiting: VecDeque<Record>,
    /// Wall clock of the last record shown.
    clock: u64,
}

impl Watched {
    pub(super) fn new(log: &Path, speed: Option<f64>) -> Self {
        let replay = speed.map(|speed| Replay {
            speed: speed.max(f64::MIN_POSITIVE),
            began: Instant::now(),
            first: None,
            waiting: VecDeque::new(),
            clock: 0,
        });
        let tail = Tail::new(log);
        let tail = if replay.is_some() { tail } else { tail.hurried() };
        Self { tail, replay, process: None, looked: Instant::now() }
    }

    fn follow(&mut self, pass: &mut dyn FnMut(Msg)) -> Result<bool> {
        let poll = self.tail.poll()?;
        let last = poll.records.last().map(|record| (record.t, record.s, record.event.step().unwrap_or(0)));
        let quiet = poll.records.is_empty();
        for record in poll.records {
            match &record.event {
                Event::Started(started) => self.process.clone_from(&started.process),
                Event::Finished(_) => self.process = None,
                _ => {}
            }
            pass(Msg::Record(Box::new(record)));
        }
        if poll.unreadable > 0 {
            pass(Msg::Record(Box::new(unreadable(poll.unreadable, last.unwrap_or_default()))));
        }
        if quiet && !poll.more && self.looked.elapsed() >= LOOK {
            self.looked = Instant::now();
            if self.process.as_ref().and_then(ProcessId::is_alive) == Some(false) {
                self.process = None;
                // Its last words may have come between the poll and the look.
                let last = self.tail.poll()?.records;
                let finished = last.iter().any(|record| matches!(record.event, Event::Finished(_)));
                for record in last {
                    pass(Msg::Record(Box::new(record)));
                }
                if !finished {
                    pass(Msg::Gone);
                }
            }
        }
        Ok(poll.more)
    }
}

impl Source for Watched {
    fn poll(&mut self, pass: &mut dyn FnMut(Msg)) -> Result<bool> {
        let Some(replay) = &mut self.replay else { return self.follow(pass) };
        if replay.waiting.len() < 1024 {
            replay.waiting.extend(self.tail.poll()?.records);
        }
        let Some(next) = replay.waiting.front() else { return Ok(false) };
        let first = *replay.first.get_or_insert(next.s);
        let due = first + replay.began.elapsed().as_secs_f64() * replay.speed;
        while replay.waiting.front().is_some_and(|record| record.s <= due) {
            if let Some(record) = replay.waiting.pop_front() {
                replay.clock = record.t;
                pass(Msg::Record(Box::new(record)));
            }
        }
        Ok(replay.waiting.is_empty())
    }

    fn clock(&self) -> u64 {
        match &self.replay {
            Some(replay) => replay.clock,
            None => super::event_loop::wall_clock(),
        }
    }
}

/// What a log with damaged lines says about itself, at the time and step of its neighbours.
fn unreadable(lines: usize, (t, s, step): (u64, f64, u64)) -> Record {
    let message = format!("{lines} lines of the log could not be read: damaged, or written by a newer program");
    Record { v: VERSION, t, s, event: Event::Warning(Trouble { step, message }) }
}
