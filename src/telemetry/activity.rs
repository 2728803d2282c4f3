//! The current phase of a run, with its progress: written by one thread, displayed by another.
//!
//! The log has the start of a phase, but not its progress.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A shared handle to the phase in progress; clones share it.
#[derive(Clone, Debug, Default)]
pub struct Activity {
    phase: Arc<Mutex<Option<CurrentPhase>>>,
}

/// A phase in progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CurrentPhase {
    /// Its name, such as "evaluating".
    pub what: String,
    /// Its progress.
    pub amount: PhaseProgress,
    /// Its start.
    pub since: Instant,
}

/// The progress of a phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PhaseProgress {
    /// Not known.
    #[default]
    Unknown,
    /// Items done, and their total.
    Items(u64, u64),
    /// Bytes done, and their total.
    Bytes(u64, u64),
}

impl Activity {
    /// Begins a phase, unless it is in progress, and ends the previous one.
    pub fn begin(&self, what: &str) {
        self.advance(what, PhaseProgress::Unknown);
    }

    /// Sets the progress of the phase called `what`; begins it if it is not in progress.
    pub fn advance(&self, what: &str, amount: PhaseProgress) {
        let mut phase = self.lock();
        match &mut *phase {
            Some(now) if now.what == what => now.amount = amount,
            other => *other = Some(CurrentPhase { what: what.to_owned(), amount, since: Instant::now() }),
        }
    }

    /// Ends the phase.
    pub fn end(&self) {
        *self.lock() = None;
    }

    /// The phase in progress, if it has lasted for at least `least`.
    pub fn running_for(&self, least: Duration) -> Option<CurrentPhase> {
        self.lock().clone().filter(|phase| phase.since.elapsed() >= least)
    }

    fn lock(&self) -> MutexGuard<'_, Option<CurrentPhase>> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A size with a decimal prefix: `21.4 GB`. The one format of sizes.
pub fn bytes(value: u64) -> String {
    let (digits, unit) = with_prefix(value, value);
    format!("{digits} {unit}")
}

/// A part of a size, in the unit of the whole: `3.1/21.4 GB`.
pub fn bytes_of(part: u64, whole: u64) -> String {
    let [(part, _), (whole, unit)] = [with_prefix(part, whole), with_prefix(whole, whole)];
    format!("{part}/{whole} {unit}")
}

/// `value` in the unit that suits `whole`.
fn with_prefix(value: u64, whole: u64) -> (String, &'static str) {
    const UNITS: [(&str, f64); 4] = [("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)];
    // A value that rounds to 1000.0 gets the next unit.
    match UNITS.into_iter().find(|(_, size)| whole as f64 >= 0.99995 * size) {
        Some((unit, size)) => (format!("{:.1}", value as f64 / size), unit),
        None => (value.to_string(), "B"),
    }
}

impl std::fmt::Display for CurrentPhase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { what, amount, .. } = self;
        match *amount {
            PhaseProgress::Unknown => write!(f, "{what}"),
            PhaseProgress::Items(done, total) => write!(f, "{what} {done}/{total}"),
            PhaseProgress::Bytes(done, total) => write!(f, "{what} {}", bytes_of(done, total)),
        }
    }
}

/// Text for a terminal or file that keeps every line: a phase's name after [`Self::MIN_DURATION`] and every 5 s, and a
/// dot wherever nothing would be written for longer than [`Self::MIN_DURATION`].
#[derive(Debug, Default)]
pub struct PhaseLines {
    /// Since when the last phase lasts, and when its name was written.
    named: Option<(Instant, Instant)>,
    /// When something was written last.
    written: Option<Instant>,
    /// Whether that line has not ended.
    open: bool,
}

impl PhaseLines {
    /// Shorter phases are not printed.
    pub const MIN_DURATION: Duration = Duration::from_millis(400);
    const NEXT: Duration = Duration::from_secs(5);

    /// The text to append now, if any, for a phase that has lasted for at least `least`.
    pub fn due(&mut self, activity: &Activity, least: Duration) -> Option<String> {
        let phase = activity.running_for(least)?;
        let now = Instant::now();
        let silent = self.written.is_none_or(|written| now - written >= Self::MIN_DURATION);
        let is_new = self.named.is_none_or(|(since, named)| since != phase.since || now - named >= Self::NEXT);
        if !is_new && !silent {
            return None;
        }
        let text = if is_new || !self.open {
            let name = format!("{}{}", self.end(), crate::untrusted::sanitize_line(&phase.to_string()));
            self.named = Some((phase.since, now));
            name
        } else {
            ".".into()
        };
        self.written = Some(now);
        self.open = true;
        Some(text)
    }

    /// The end of an unfinished line, to write before anything else.
    pub fn end(&mut self) -> &'static str {
        self.written = Some(Instant::now());
        if std::mem::take(&mut self.open) { "\n" } else { "" }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_is_printed_once_it_lasts_then_dots_and_not_again_at_once() {
        let (activity, mut lines) = (Activity::default(), PhaseLines::default());
        let wait = || std::thread::sleep(PhaseLines::MIN_DURATION);
        activity.begin("evaluating");
        assert_eq!(lines.due(&activity, PhaseLines::MIN_DURATION), None, "it may be over in a moment");
        wait();
        activity.advance("evaluating", PhaseProgress::Items(5, 16));
        assert_eq!(lines.due(&activity, PhaseLines::MIN_DURATION).unwrap(), "evaluating 5/16");
        assert_eq!(lines.due(&activity, PhaseLines::MIN_DURATION), None);
        wait();
        assert_eq!(lines.due(&activity, PhaseLines::MIN_DURATION).unwrap(), ".");
        activity.advance("saving", PhaseProgress::Bytes(400_000_000, 1_100_000_000));
        assert_eq!(lines.due(&activity, PhaseLines::MIN_DURATION), None);
        wait();
        assert_eq!(lines.due(&activity, PhaseLines::MIN_DURATION).unwrap(), "\nsaving 0.4/1.1 GB");
        assert_eq!((lines.end(), lines.end()), ("\n", ""), "before a line of something else");
        wait();
        assert_eq!(lines.due(&activity, PhaseLines::MIN_DURATION).unwrap(), "saving 0.4/1.1 GB", "the phase continues");
        activity.begin("reading");
        assert_eq!(lines.due(&activity, Duration::ZERO).unwrap(), "\nreading", "others before it took long enough");
        activity.end();
        assert_eq!(lines.due(&activity, Duration::ZERO), None);
    }
}
