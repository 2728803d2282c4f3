//! Distributes training's events: to the log, the screen and other sinks.

use super::event::{Diagnostic, Event, Record, VERSION};
use super::log::EventLog;
use crate::Result;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Capacity of the screen's queue; a screen that lags further misses events.
const QUEUE: usize = 8192;

/// Another consumer of a run's records, such as a TensorBoard file or a Prometheus endpoint.
pub trait Sink: std::fmt::Debug + Send {
    /// Processes a record. After an error the sink gets no further records, and training continues.
    fn write(&mut self, record: &Record) -> Result<()>;

    /// A warning about a problem that does not end the sink; returned once.
    fn take_warning(&mut self) -> Option<String> {
        None
    }

    /// The name used in warnings.
    fn name(&self) -> &'static str;
}

/// Stamps events, appends them to the log, and sends them to a screen without ever waiting for it.
#[derive(Debug)]
pub struct Emitter {
    log: Option<EventLog>,
    screen: Option<SyncSender<Record>>,
    sinks: Vec<Box<dyn Sink>>,
    /// Events dropped because the screen's queue was full.
    dropped: u64,
    /// Whether the last event could not be written.
    log_failing: bool,
    began: Instant,
    /// Seconds the run took before this process.
    before: f64,
}

impl Emitter {
    /// An emitter that writes to `log`, if there is one.
    pub fn new(log: Option<EventLog>) -> Self {
        let before = log.as_ref().map_or(0.0, EventLog::last_seconds);
        Self { log, screen: None, sinks: Vec::new(), dropped: 0, log_failing: false, began: Instant::now(), before }
    }

    /// Connects a screen on another thread to all later events. A screen that stops reading (a suspended terminal)
    /// misses events, which stay in the log; it never blocks training.
    pub fn connect(&mut self) -> Receiver<Record> {
        let (sender, receiver) = sync_channel(QUEUE);
        self.screen = Some(sender);
        receiver
    }

    /// Adds a sink, which receives every later event.
    pub fn add_sink(&mut self, sink: Box<dyn Sink>) {
        self.sinks.push(sink);
    }

    /// Seconds the run has taken, earlier processes included.
    pub fn seconds(&self) -> f64 {
        self.before + self.began.elapsed().as_secs_f64()
    }

    /// Emits an event that happened just now. A failing log or a closed screen is not an error, because training
    /// continues without them; the first failed write and the recovery are logged as warnings.
    pub fn emit(&mut self, event: Event) {
        let step = event.step().unwrap_or(0);
        let record = self.stamp(event);
        let mut failed = Vec::new();
        self.sinks.retain_mut(|sink| match sink.write(&record) {
            Ok(()) => {
                failed.extend(sink.take_warning());
                true
            }
            Err(error) => {
                failed.push(format!("{error}; {} gets no further events", sink.name()));
                false
            }
        });
        let is_save = matches!(record.event, Event::CheckpointSaved(_));
        self.write(record, step);
        if let Some(log) = self.log.take_if(|log| is_save && log.is_detached()) {
            failed.push(format!("`{}` was deleted or replaced; a new one has the later events", log.path().display()));
            self.log = EventLog::open(log.path()).map_err(|error| failed.push(error.to_string())).ok();
        }
        for message in failed {
            self.emit(Event::Warning(Diagnostic { step, message }));
        }
    }

    /// Appends a record to the log and sends it to the screen.
    fn write(&mut self, record: Record, step: u64) {
        let appended = self.log.as_mut().map_or(Ok(()), |log| log.append(&record));
        self.show(record);
        let message = match (appended, self.log_failing) {
            (Err(error), false) => format!("{error}; training continues and retries with each event"),
            (Ok(()), true) => match self.log.as_mut().map_or(0, EventLog::take_dropped) {
                0 => "writing the log works again; no events were lost".to_owned(),
                dropped => format!("writing the log works again; {dropped} events before this one were lost"),
            },
            _ => return,
        };
        self.log_failing = !self.log_failing;
        let warning = self.stamp(Event::Warning(Diagnostic { step, message }));
        if let Some(log) = &mut self.log {
            // A failure to write this one has been reported already.
            let _ = log.append(&warning);
        }
        self.show(warning);
    }

    fn stamp(&self, event: Event) -> Record {
        Record { v: VERSION, t: wall_clock(), s: self.seconds(), event }
    }

    fn show(&mut self, record: Record) {
        let Some(screen) = &self.screen else { return };
        if self.dropped > 0 {
            let step = record.event.step().unwrap_or(0);
            let message = format!("the screen was too slow: {} events are only in `events.jsonl`", self.dropped);
            if screen.try_send(self.stamp(Event::Warning(Diagnostic { step, message }))).is_ok() {
                self.dropped = 0;
            }
        }
        match screen.try_send(record) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => self.dropped += 1,
            Err(TrySendError::Disconnected(_)) => self.screen = None,
        }
    }
}

/// Milliseconds since 1970-01-01 UTC.
pub(crate) fn wall_clock() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::CheckpointSaved;

    #[test]
    fn a_screen_that_does_not_read_never_blocks_training_and_is_told_how_much_it_missed() {
        let mut emitter = Emitter::new(None);
        let screen = emitter.connect();
        for step in 0..QUEUE as u64 + 5 {
            emitter.emit(Event::Paused { step });
        }
        assert_eq!(screen.try_iter().count(), QUEUE);
        emitter.emit(Event::Paused { step: 0 });
        let Event::Warning(Diagnostic { message, .. }) = screen.recv().unwrap().event else { panic!("no warning") };
        assert!(message.contains("5 events"), "{message}");
        assert_eq!(screen.recv().unwrap().event, Event::Paused { step: 0 });
    }

    #[test]
    fn a_failing_log_is_reported_once_and_its_recovery_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.jsonl");
        let mut emitter = Emitter::new(Some(EventLog::open(&path).unwrap()));
        let screen = emitter.connect();
        let good = emitter.log.as_mut().unwrap().write_to(std::fs::File::open(&path).unwrap());
        for step in 1..=3 {
            emitter.emit(Event::Paused { step });
        }
        emitter.log.as_mut().unwrap().write_to(good);
        emitter.emit(Event::Resumed { step: 4 });
        let logged = super::super::read(&path).unwrap();
        let shown: Vec<Record> = screen.try_iter().collect();
        assert_eq!(shown, logged);
        // One that was deleted is reported by the next checkpoint, and begun again.
        std::fs::remove_file(&path).unwrap();
        for _ in 0..2 {
            emitter.emit(Event::CheckpointSaved(CheckpointSaved::default()));
        }
        let [record, saved] = &super::super::read(&path).unwrap()[..] else { panic!("not two events") };
        let Event::Warning(Diagnostic { message, .. }) = &record.event else { panic!("{record:?}") };
        assert!(message.contains("was deleted or replaced"), "{message}");
        assert!(matches!(saved.event, Event::CheckpointSaved(_)));
        let warnings: Vec<_> = logged
            .iter()
            .filter_map(|record| match &record.event {
                Event::Warning(Diagnostic { message, .. }) => Some(message.as_str()),
                _ => None,
            })
            .collect();
        assert_eq!((logged.len(), warnings.len()), (6, 2), "{warnings:?}");
        assert!(warnings[0].contains("events.jsonl") && warnings[0].contains("training continues"), "{warnings:?}");
        assert!(warnings[1].contains("works again; no events were lost"), "{warnings:?}");
    }

    #[derive(Debug)]
    struct Broken;

    impl Sink for Broken {
        fn write(&mut self, _: &Record) -> Result<()> {
            Err(crate::Error::config("disk", "is full"))
        }

        fn name(&self) -> &'static str {
            "tests"
        }
    }

    #[test]
    fn a_failing_sink_is_reported_once_and_dropped() {
        let mut emitter = Emitter::new(None);
        let screen = emitter.connect();
        emitter.add_sink(Box::new(Broken));
        emitter.emit(Event::Paused { step: 1 });
        emitter.emit(Event::Paused { step: 2 });
        let events: Vec<_> = screen.try_iter().map(|record| record.event).collect();
        let [Event::Paused { step: 1 }, Event::Warning(Diagnostic { message, .. }), Event::Paused { step: 2 }] =
            &events[..]
        else {
            panic!("{events:?}")
        };
        assert!(message.contains("disk") && message.contains("tests gets no further events"), "{message}");
    }

    #[test]
    fn a_closed_screen_is_not_an_error() {
        let mut emitter = Emitter::new(None);
        drop(emitter.connect());
        emitter.emit(Event::Paused { step: 1 });
        emitter.emit(Event::Paused { step: 2 });
    }
}
