//! What a run is doing right now, for whoever shows it: a phase with its progress, written by one thread and read by another.
//!
//! Events tell what has happened and go into the log. A phase is worth showing only while it lasts.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A shared view of the phase in progress; clones show the same one.
#[derive(Clone, Debug, Default)]
pub struct Activity {
    phase: Arc<Mutex<Option<PhaseNow>>>,
}

/// A phase in progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PhaseNow {
    /// What is being done, such as "evaluating".
    pub what: String,
    /// How much of it.
    pub amount: Amount,
    /// When it began.
    pub since: Instant,
}

/// How much of a phase is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Amount {
    /// Nobody knows.
    #[default]
    Unknown,
    /// So many of so many.
    Items(u64, u64),
    /// So many bytes of so many.
    Bytes(u64, u64),
}

impl Activity {
    /// A phase begins, and ends the one before.
    pub fn begin(&self, what: &str) {
        *self.lock() = Some(PhaseNow { what: what.to_owned(), amount: Amount::Unknown, since: Instant::now() });
    }

    /// So much of the phase called `what` is done; it begins if it is not in progress.
    pub fn advance(&self, what: &str, amount: Amount) {
        let mut phase = self.lock();
        match &mut *phase {
            Some(now) if now.what == what => now.amount = amount,
            other => *other = Some(PhaseNow { what: what.to_owned(), amount, since: Instant::now() }),
        }
    }

    /// The phase is over.
    pub fn end(&self) {
        *self.lock() = None;
    }

    /// The phase that has been in progress for `least`.
    pub fn lasting(&self, least: Duration) -> Option<PhaseNow> {
        self.lock().clone().filter(|phase| phase.since.elapsed() >= least)
    }

    fn lock(&self) -> MutexGuard<'_, Option<PhaseNow>> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Display for PhaseNow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { what, amount, .. } = self;
        match *amount {
            Amount::Unknown => write!(f, "{what}"),
            Amount::Items(done, total) => write!(f, "{what} {done}/{total}"),
            Amount::Bytes(done, total) if total >= 1_000_000_000 => {
                write!(f, "{what} {:.1}/{:.1} GB", done as f64 / 1e9, total as f64 / 1e9)
            }
            Amount::Bytes(done, total) => write!(f, "{what} {:.1}/{:.1} MB", done as f64 / 1e6, total as f64 / 1e6),
        }
    }
}

/// When to print a phase where every line stays: once it has lasted for half a second, and again from time to time.
#[derive(Debug, Default)]
pub struct PhaseLines {
    told: Option<(Instant, Instant)>,
}

impl PhaseLines {
    /// A phase is not worth a line before it has lasted so long.
    pub const FIRST: Duration = Duration::from_millis(400);
    const NEXT: Duration = Duration::from_secs(5);

    /// The line to print now, if there is one.
    pub fn due(&mut self, activity: &Activity) -> Option<String> {
        let phase = activity.lasting(Self::FIRST)?;
        let due = self.told.is_none_or(|(since, told)| since != phase.since || told.elapsed() >= Self::NEXT);
        due.then(|| {
            self.told = Some((phase.since, Instant::now()));
            phase.to_string()
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
    use super::*;

    #[test]
    fn a_phase_is_told_once_it_lasts_and_not_again_at_once() {
        let (activity, mut lines) = (Activity::default(), PhaseLines::default());
        activity.begin("evaluating");
        assert_eq!(lines.due(&activity), None, "it may be over in a moment");
        std::thread::sleep(PhaseLines::FIRST);
        activity.advance("evaluating", Amount::Items(5, 16));
        assert_eq!(lines.due(&activity).unwrap(), "evaluating 5/16");
        assert_eq!(lines.due(&activity), None);
        activity.advance("saving", Amount::Bytes(400_000_000, 1_100_000_000));
        assert_eq!(lines.due(&activity), None);
        std::thread::sleep(PhaseLines::FIRST);
        assert_eq!(lines.due(&activity).unwrap(), "saving 0.4/1.1 GB");
        activity.end();
        assert_eq!(lines.due(&activity), None);
    }
}
