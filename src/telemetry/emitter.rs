//! Where training hands in its events: they get a time, a line in the log, and a place on the screen if there is one.

use super::event::{Event, Record, Trouble, VERSION};
use super::log::EventLog;
use crate::Result;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Events a screen may lag behind before some are kept from it.
const QUEUE: usize = 8192;

/// Stamps events, appends them to the log, and passes them to a screen without ever waiting for it.
#[derive(Debug)]
pub struct Emitter {
    log: Option<EventLog>,
    screen: Option<SyncSender<Record>>,
    /// Events the screen has missed because its queue was full.
    missed: u64,
    began: Instant,
    /// Seconds the run had been running before this process.
    before: f64,
}

impl Emitter {
    /// An emitter that writes to `log`; none in tests and measurements.
    pub fn new(log: Option<EventLog>) -> Self {
        let before = log.as_ref().map_or(0.0, EventLog::last_seconds);
        Self { log, screen: None, missed: 0, began: Instant::now(), before }
    }

    /// The events from now on, for a screen on another thread. A screen that stops reading (a suspended terminal) loses
    /// events, which stay in the log; it never stops training.
    pub fn connect(&mut self) -> Receiver<Record> {
        let (sender, receiver) = sync_channel(QUEUE);
        self.screen = Some(sender);
        receiver
    }

    /// Seconds the run has been running, earlier processes included.
    pub fn seconds(&self) -> f64 {
        self.before + self.began.elapsed().as_secs_f64()
    }

    /// Takes in an event that happened just now.
    ///
    /// # Errors
    /// If the log cannot be written. A screen that is gone is no error.
    pub fn emit(&mut self, event: Event) -> Result<()> {
        let record = self.stamp(event);
        if let Some(log) = &mut self.log {
            log.append(&record)?;
        }
        self.show(record);
        Ok(())
    }

    fn stamp(&self, event: Event) -> Record {
        let t = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
        Record { v: VERSION, t, s: self.seconds(), event }
    }

    fn show(&mut self, record: Record) {
        let Some(screen) = &self.screen else { return };
        if self.missed > 0 {
            let step = record.event.step().unwrap_or(0);
            let message = format!("the screen fell behind: {} events are only in `events.jsonl`", self.missed);
            if screen.try_send(self.stamp(Event::Warning(Trouble { step, message }))).is_ok() {
                self.missed = 0;
            }
        }
        match screen.try_send(record) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => self.missed += 1,
            Err(TrySendError::Disconnected(_)) => self.screen = None,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
    use super::*;

    #[test]
    fn a_screen_that_does_not_read_never_stops_training_and_learns_what_it_missed() {
        let mut emitter = Emitter::new(None);
        let screen = emitter.connect();
        for step in 0..QUEUE as u64 + 5 {
            emitter.emit(Event::Paused { step }).unwrap();
        }
        assert_eq!(screen.try_iter().count(), QUEUE);
        emitter.emit(Event::Paused { step: 0 }).unwrap();
        let Event::Warning(Trouble { message, .. }) = screen.recv().unwrap().event else { panic!("no warning") };
        assert!(message.contains("5 events"), "{message}");
        assert_eq!(screen.recv().unwrap().event, Event::Paused { step: 0 });
    }

    #[test]
    fn a_screen_that_is_gone_is_no_error() {
        let mut emitter = Emitter::new(None);
        drop(emitter.connect());
        emitter.emit(Event::Paused { step: 1 }).unwrap();
        emitter.emit(Event::Paused { step: 2 }).unwrap();
    }
}
