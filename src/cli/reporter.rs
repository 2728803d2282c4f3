//! Reports preparation on standard error: notices at once, and phases once they take long enough.

use crate::data::LoadEvent;
use crate::screen::status_line;
use crate::telemetry::{Activity, PhaseLines, PhaseProgress, bytes};
use crate::train::SetupEvent;
use crate::ui::may_color;
use crate::untrusted::sanitize_line;
use std::io::{IsTerminal, Write, stderr};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Work on fewer bytes is too short to report.
const MIN_REPORTED_BYTES: u64 = 4 << 20;
/// Time between two updates of the phase.
const UPDATE_INTERVAL: Duration = Duration::from_millis(100);

/// Reports the preparation on its own thread until it is dropped.
pub(crate) struct Reporter {
    pub(crate) activity: Activity,
    /// Cleaned lines to print above the status line; `None` only while it is being dropped.
    notices: Option<Sender<String>>,
    thread: Option<JoinHandle<()>>,
}

impl Reporter {
    pub(crate) fn start() -> Self {
        let activity = Activity::default();
        let (notices, waiting) = channel::<String>();
        let watched = activity.clone();
        let show = move || {
            let (mut line, mut said) = (SetupStatusLine::new(), Instant::now());
            loop {
                // Several short phases in a row must not be silent for longer than one.
                let least = PhaseLines::MIN_DURATION.saturating_sub(said.elapsed());
                let shown = match waiting.recv_timeout(UPDATE_INTERVAL) {
                    Ok(text) => line.print_above(&text),
                    Err(RecvTimeoutError::Timeout) => line.show(&watched, least),
                    Err(RecvTimeoutError::Disconnected) => break line.clear(),
                };
                if shown {
                    said = Instant::now();
                }
            }
        };
        // The reports are optional, so failing to start the thread is not an error.
        let thread = std::thread::Builder::new().name("reporter".into()).spawn(show).ok();
        Self { activity, notices: Some(notices), thread }
    }

    /// Starts the thread in a phase.
    pub(crate) fn of(phase: &str) -> Self {
        let reporter = Self::start();
        reporter.activity.begin(phase);
        reporter
    }

    pub(crate) fn report(&self, event: SetupEvent) {
        match event {
            SetupEvent::Phase(what) => self.activity.begin(&what),
            SetupEvent::Load(LoadEvent::Notice(notice)) => self.notice(&notice),
            SetupEvent::Preview(preview) => {
                let color = stderr().is_terminal() && may_color();
                self.send(preview.text(color));
            }
            SetupEvent::Load(LoadEvent::Progress { what, done, total }) if done < total => {
                self.activity.advance(&what, PhaseProgress::Bytes(done, total));
            }
            SetupEvent::Load(LoadEvent::Progress { what, total, .. }) => {
                self.activity.end();
                if total >= MIN_REPORTED_BYTES {
                    self.notice(&format!("{what}: {}", bytes(total)));
                }
            }
        }
    }

    pub(crate) fn notice(&self, text: &str) {
        self.send(format!("{}\n", sanitize_line(text)));
    }

    fn send(&self, text: String) {
        if let Some(notices) = &self.notices {
            notices.send(text).ok();
        }
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        drop(self.notices.take());
        self.thread.take().map(JoinHandle::join);
    }
}

/// The phase in progress: on a terminal a line at the bottom that is rewritten in place, elsewhere lines that stay.
struct SetupStatusLine {
    terminal: bool,
    open: bool,
    lines: PhaseLines,
}

impl SetupStatusLine {
    fn new() -> Self {
        Self { terminal: stderr().is_terminal(), open: false, lines: PhaseLines::default() }
    }

    /// Shows the phase that has lasted for at least `least`; `false` if there is nothing to show.
    fn show(&mut self, activity: &Activity, least: Duration) -> bool {
        if !self.terminal {
            return self.lines.due(activity, least).is_some_and(|text| write!(stderr(), "{text}").is_ok());
        }
        let phase = activity.running_for(least);
        match &phase {
            Some(phase) => {
                self.open = true;
                write!(stderr(), "{}", status_line(&format!("{}…", sanitize_line(&phase.to_string())))).ok();
            }
            None => self.clear(),
        }
        phase.is_some()
    }

    fn print_above(&mut self, text: &str) -> bool {
        self.clear();
        write!(stderr(), "{text}").ok();
        true
    }

    fn clear(&mut self) {
        let end = if std::mem::take(&mut self.open) { "\r\x1b[K" } else { self.lines.end() };
        write!(stderr(), "{end}").ok();
    }
}
