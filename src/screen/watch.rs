//! A run's log as a source: of a run in another process, or of a finished one.

use super::dashboard::{App, DashboardMode};
use super::plain::PlainPrinter;
use super::renderer::{MessageSource, Playback, ScreenMessage, drive};
use crate::Result;
use crate::store::checkpoint::is_in_use;
use crate::telemetry::{
    Detail, Diagnostic, Event, PhaseLines, Poll, ProcessId, Record, RunState, Tail, VERSION, last_records, wall_clock,
};
use crate::ui::Theme;
use crate::untrusted::sanitize_line;
use std::collections::VecDeque;
use std::io::{Write, stdout};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How often to check a silent run's process.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// How long a process of another machine, or of before a restart of this one, may be silent, in milliseconds.
const SILENCE: u64 = 60_000;
/// How long a replay waits for its next record: a run may pause for hours, and the times of a damaged log may differ by
/// centuries.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// Shows the run of the first of `logs` on standard output, which must be a terminal, with the others overlaid. With a
/// `speed`, replays it that many times as fast as it ran; without, follows the log from its end.
pub(crate) fn watch(logs: &[PathBuf], speed: Option<f64>, theme: Theme, mouse: bool) -> Result<()> {
    let mut app = App::watching(logs);
    app.scene.playback = speed.map(|speed| Playback { speed, paused: false, seek: None, at: 0.0 });
    app.run(stdout(), &mut LogSource::new(logs, speed), None, theme, mouse).map(drop)
}

/// Writes the run of `log` as plain lines, and follows it until it ends. With a `speed`, replays the existing records
/// that many times as fast as the run.
pub(crate) fn watch_plain<W: Write>(log: &Path, speed: Option<f64>, out: W, log_every: u64) -> Result<()> {
    let mut source = LogSource::new(&[log.to_path_buf()], speed);
    // A skimmed step lacks most of its line's figures.
    source.tail = Tail::new(log);
    drive(&mut source, &mut PlainPrinter::new(out, log_every)).map(drop)
}

impl App {
    /// A dashboard for these logs.
    pub(super) fn watching(logs: &[PathBuf]) -> Self {
        let mut app = Self::new(DashboardMode::Watching, RunState::default());
        app.scene.others = logs.iter().skip(1).map(|_| RunState::default()).collect();
        app
    }
}

pub(super) struct LogSource {
    tail: Tail,
    /// The logs of overlaid runs.
    others: Vec<Tail>,
    replay: Option<Replay>,
    /// The training process from the log, until it has finished.
    process: Option<ProcessId>,
    /// The slow phase that the process is in, and when it was logged, in wall-clock milliseconds.
    phase: Option<(String, u64)>,
    /// The phase that was written last.
    said: Option<(String, u64)>,
    /// The last record that was read.
    last: LastRecord,
    checked: Instant,
    /// Whether the run has ended, or its process without a last record.
    over: bool,
}

/// The times and the step of a record.
#[derive(Clone, Copy, Default)]
struct LastRecord {
    /// Wall clock.
    t: u64,
    /// Run-relative seconds.
    s: f64,
    step: u64,
}

/// Records that are not due yet.
struct Replay {
    speed: f64,
    paused: bool,
    /// Run-relative seconds at the moment `since`.
    position: f64,
    since: Instant,
    /// Run-relative seconds of the first record, once it is read.
    first: Option<f64>,
    /// Run-relative seconds of the last record.
    last: f64,
    /// Whether to read the log again from its start.
    rewind: bool,
    waiting: VecDeque<Record>,
    /// Wall clock of the last record shown.
    clock: u64,
}

impl Replay {
    fn new(log: &Path, speed: f64) -> Self {
        Self {
            speed,
            paused: false,
            position: 0.0,
            since: Instant::now(),
            first: None,
            last: last_records(log, 1 << 20).next().map_or(0.0, |record| record.s),
            rewind: false,
            waiting: VecDeque::new(),
            clock: 0,
        }
    }

    /// The current position in run-relative seconds.
    fn now(&self) -> f64 {
        let since = if self.paused { 0.0 } else { self.since.elapsed().as_secs_f64() * self.speed };
        self.position + since
    }

    /// Continues from a position in run-relative seconds.
    fn continue_from(&mut self, from: f64) {
        self.position = from;
        self.since = Instant::now();
    }

    /// Adds records. The times of a log never decrease, so one that is above the next is damaged, and counts as the
    /// next.
    fn extend(&mut self, records: Vec<Record>) {
        for record in records {
            if let Some(last) = self.waiting.back_mut() {
                last.s = last.s.min(record.s);
            }
            self.waiting.push_back(record);
        }
    }

    fn next_due(&mut self) -> Option<Record> {
        let next = self.waiting.front()?.s;
        let longest = LONGEST_WAIT.as_secs_f64() * self.speed;
        if self.first.is_none() {
            self.first = Some(next);
            self.continue_from(next);
        } else if next - self.now() > longest && !self.paused {
            self.continue_from(next - longest);
        }
        if next <= self.now() { self.waiting.pop_front() } else { None }
    }

    fn play(&mut self, playback: &mut Playback) {
        let first = self.first.unwrap_or(0.0);
        let now = self.now();
        let span = (self.last - first).max(f64::MIN_POSITIVE);
        if let Some(share) = playback.seek.take() {
            let target = first + share * span;
            self.rewind |= target < now;
            self.continue_from(target);
        } else if (playback.speed, playback.paused) != (self.speed, self.paused) {
            self.continue_from(now.min(self.last));
        }
        self.speed = playback.speed;
        self.paused = playback.paused;
        playback.at = ((self.now() - first) / span).clamp(0.0, 1.0);
    }
}

impl LogSource {
    /// The run of the first log, with the others overlaid.
    pub(super) fn new(logs: &[PathBuf], speed: Option<f64>) -> Self {
        let log = logs.first().map_or(Path::new(""), PathBuf::as_path);
        let replay = speed.map(|speed| Replay::new(log, speed));
        let tail = Tail::new(log);
        let tail = if replay.is_some() { tail } else { tail.with(Detail::Leading) };
        let others = logs.iter().skip(1).map(|log| Tail::new(log).with(Detail::Leading)).collect();
        Self {
            tail,
            others,
            replay,
            process: None,
            phase: None,
            said: None,
            last: LastRecord::default(),
            checked: Instant::now(),
            over: false,
        }
    }

    /// Passes on the records of the other runs; `true` if there are more already.
    fn poll_others(&mut self, pass: &mut dyn FnMut(ScreenMessage)) -> Result<bool> {
        let mut more = false;
        for (at, tail) in self.others.iter_mut().enumerate() {
            let poll = tail.poll()?;
            poll.records.into_iter().for_each(|record| pass(ScreenMessage::Other(at, Box::new(record))));
            more |= poll.more;
        }
        Ok(more)
    }

    /// Whether the training process has ended. The lock is visible in other containers, where the process id is not; on
    /// other machines neither may be, nor in a log whose start is damaged, and a run counts as alive while it writes.
    fn has_ended(&self) -> bool {
        let writes = || wall_clock().saturating_sub(self.last.t) < SILENCE;
        let is_alive = self.process.as_ref().and_then(ProcessId::is_alive);
        !self.tail.path().parent().is_some_and(is_in_use) && !is_alive.unwrap_or_else(writes)
    }

    fn follow(&mut self, pass: &mut dyn FnMut(ScreenMessage)) -> Result<bool> {
        let mut poll = poll_lines(&mut self.tail, &mut self.last)?;
        let mut gone = false;
        if poll.records.is_empty() && !poll.more && self.checked.elapsed() >= CHECK_INTERVAL {
            self.checked = Instant::now();
            gone = !self.over && self.has_ended();
            if gone {
                self.process = None;
                self.phase = None;
                // The process may have written its last records between the poll and the check.
                poll = poll_lines(&mut self.tail, &mut self.last)?;
            }
        }
        for record in poll.records {
            match &record.event {
                Event::Started(started) => {
                    self.process.clone_from(&started.process);
                    self.over = false;
                }
                Event::Finished(_) => {
                    self.process = None;
                    self.over = true;
                }
                _ => {}
            }
            self.phase = match &record.event {
                Event::Phase { what, .. } => Some((what.clone(), record.t)),
                _ => None,
            };
            pass(ScreenMessage::Record(Box::new(record)));
        }
        if gone && !self.over {
            self.over = true;
            pass(ScreenMessage::Gone);
        }
        Ok(poll.more)
    }

    fn read(&mut self, pass: &mut dyn FnMut(ScreenMessage)) -> Result<bool> {
        let more = self.poll_others(pass)?;
        let Some(replay) = &mut self.replay else { return Ok(self.follow(pass)? || more) };
        if std::mem::take(&mut replay.rewind) {
            self.tail = Tail::new(self.tail.path());
            self.last = LastRecord::default();
            replay.waiting.clear();
            pass(ScreenMessage::Rewind);
        }
        if replay.waiting.len() < 1024 {
            replay.extend(poll_lines(&mut self.tail, &mut self.last)?.records);
        }
        let is_empty = replay.waiting.is_empty();
        while let Some(record) = replay.next_due() {
            replay.clock = record.t;
            pass(ScreenMessage::Record(Box::new(record)));
        }
        Ok(!is_empty && replay.waiting.is_empty())
    }
}

impl MessageSource for LogSource {
    fn poll(&mut self, wait: Duration, pass: &mut dyn FnMut(ScreenMessage)) -> Result<bool> {
        let mut quiet = true;
        let more = self.read(&mut |message| {
            quiet = false;
            pass(message);
        })?;
        if quiet && !more {
            sleep(wait);
        }
        Ok(more)
    }

    fn is_over(&self) -> bool {
        match &self.replay {
            Some(replay) => replay.first.is_some() && replay.waiting.is_empty(),
            None => self.over,
        }
    }

    fn phase(&mut self, lines: &mut PhaseLines) -> Option<String> {
        let text = self.activity().filter(|_| self.phase != self.said)?;
        self.said.clone_from(&self.phase);
        Some(format!("{}{}\n", lines.end(), sanitize_line(&text)))
    }

    fn play(&mut self, playback: &mut Option<Playback>) {
        if let (Some(replay), Some(playback)) = (&mut self.replay, playback) {
            replay.play(playback);
        }
    }

    fn clock(&self) -> u64 {
        match &self.replay {
            Some(replay) => replay.clock,
            None => wall_clock(),
        }
    }

    fn activity(&self) -> Option<String> {
        let (what, since) = self.phase.as_ref()?;
        let lasts = Duration::from_millis(wall_clock().saturating_sub(*since));
        (lasts >= PhaseLines::MIN_DURATION).then(|| format!("{what} for {} s", lasts.as_secs()))
    }
}

/// Reads new lines, and adds a warning about unreadable ones, at the time and step of the last record.
fn poll_lines(tail: &mut Tail, last: &mut LastRecord) -> Result<Poll> {
    let mut poll = tail.poll()?;
    for record in &poll.records {
        *last = LastRecord { t: record.t, s: record.s, step: record.event.step().unwrap_or(last.step) };
    }
    if poll.unreadable > 0 {
        let lines = poll.unreadable;
        let message = format!("unreadable lines in the log: {lines}; they are damaged, or of a newer version");
        let LastRecord { t, s, step } = *last;
        poll.records.push(Record { v: VERSION, t, s, event: Event::Warning(Diagnostic { step, message }) });
    }
    Ok(poll)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::checkpoint::Run;

    /// Regression: a run whose machine was restarted was followed forever, and one in another container counted as
    /// gone.
    #[test]
    fn the_end_of_a_process_is_known_by_its_lock_and_its_silence() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("events.jsonl");
        let own = ProcessId::own().unwrap();
        let ended = |process: Option<&ProcessId>, last| {
            let mut source = LogSource::new(std::slice::from_ref(&log), None);
            source.process = process.cloned();
            source.last.t = last;
            source.has_ended()
        };
        let dead = ProcessId { start: 0, ..own.clone() };
        let restarted = ProcessId { boot: "other".into(), ..own.clone() };
        let now = wall_clock();
        let known = [(&own, 0), (&dead, now), (&restarted, now), (&restarted, 0)];
        let all = || known.map(|(process, last)| ended(Some(process), last));
        assert_eq!(all(), [false, true, false, true]);
        assert_eq!([ended(None, now), ended(None, 0)], [false, true]);
        let _lock = Run::open(folder.path()).unwrap();
        assert_eq!(all(), [false; 4]);
    }

    /// A replay at the run's speed of records with these times.
    fn replay(times: &[f64]) -> Replay {
        let mut replay = Replay::new(Path::new("no log"), 1.0);
        let record = |&s| Record { v: VERSION, t: 0, s, event: Event::Paused { step: 0 } };
        replay.extend(times.iter().map(record).collect());
        replay
    }

    /// Regression: a time of centuries stalled a replay.
    #[test]
    fn a_damaged_time_stalls_no_replay() {
        let times = |replay: &Replay| replay.waiting.iter().map(|record| record.s).collect::<Vec<_>>();
        assert_eq!(times(&replay(&[0.0, 1e300, 200.0, -1e300, 201.0])), [0.0, 200.0, -1e300, -1e300, 201.0]);
        let mut last = replay(&[0.0, 1e300]);
        assert!(last.next_due().is_some() && last.next_due().is_some() && last.next_due().is_none());
        let mut first = replay(&[-1e300, 1.0]);
        assert!(first.next_due().is_some() && first.next_due().is_none());
        assert!(1.0 - first.now() <= 10.0, "{}", first.now());
    }

    #[test]
    fn a_long_wait_is_cut() {
        let mut hours = replay(&[0.0, 7200.0]);
        hours.paused = true;
        assert!(hours.next_due().is_some() && hours.next_due().is_none());
        assert_eq!(hours.now(), 0.0);
        hours.paused = false;
        assert!(hours.next_due().is_none());
        assert!((7190.0..7200.0).contains(&hours.now()), "{}", hours.now());
        let mut seconds = replay(&[0.0, 9.0]);
        assert!(seconds.next_due().is_some() && seconds.next_due().is_none() && seconds.now() < 9.0);
    }
}
