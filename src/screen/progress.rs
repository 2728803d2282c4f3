//! One status line that is rewritten in place, for a terminal without the dashboard.

use super::renderer::{Exit, MessageSource, Renderer, ScreenMessage};
use super::words::brief;
use crate::telemetry::{Event, PhaseLines, RunState};
use crate::ui::format::{clock, count, loss, scale, steps};
use crate::ui::to_ascii;
use ratatui::crossterm::terminal;
use std::io::{self, Write};
use std::time::{Duration, Instant};

/// Minimum time between two redraws.
const REDRAW_INTERVAL: Duration = Duration::from_millis(100);
/// Width of the bar, in cells.
const BAR: usize = 24;

/// Keeps a status line on a terminal; overflows, saves and the like are written above it.
#[derive(Debug)]
pub(crate) struct StatusLine<W: Write> {
    err: W,
    run: RunState,
    drawn: Option<Instant>,
    /// Whether the cursor is at the end of a status line.
    open: bool,
    /// The share of the steps that are done, and the last figures.
    status: (f64, Vec<String>),
    /// When the step in progress began.
    since: Option<Instant>,
    ascii: bool,
}

impl<W: Write> StatusLine<W> {
    /// A status line on `err`, which should be a terminal.
    pub(crate) fn new(err: W, ascii: bool) -> Self {
        let run = RunState::default();
        let status = (0.0, Vec::new());
        Self { err, run, drawn: None, open: false, status, since: None, ascii }
    }

    fn put(&mut self, text: String) -> io::Result<()> {
        let text = if self.ascii { text.chars().map(to_ascii).collect() } else { text };
        self.err.write_all(text.as_bytes())?;
        self.err.flush()
    }

    /// Shows a slow phase instead of the figures.
    fn phase(&mut self, phase: &str) -> io::Result<()> {
        self.open = true;
        // Redraw at the next step.
        self.drawn = None;
        self.since = Some(Instant::now());
        self.put(status_line(&format!("{phase}...")))
    }

    /// Shows for how long a slow step has been running.
    fn wait(&mut self) -> io::Result<()> {
        let Some(running) = self.since.map(|since| since.elapsed()).filter(|time| *time >= PhaseLines::MIN_DURATION)
        else {
            return Ok(());
        };
        self.open = true;
        self.drawn = None;
        let running = format!(" (+{:.1} s)", running.as_secs_f64());
        let line = self.line(width().saturating_sub(running.len()));
        self.put(status_line(&format!("{line}{running}")))
    }

    fn draw(&mut self) -> io::Result<()> {
        self.drawn = Some(Instant::now());
        self.open = true;
        self.status = self.figures();
        self.put(status_line(&self.line(width())))
    }

    fn figures(&self) -> (f64, Vec<String>) {
        let step = &self.run.step;
        let total = self.run.total_steps();
        let share = if total == 0 { 0.0 } else { step.step as f64 / total as f64 };
        let eta = self.run.remaining().map_or_else(|| "--:--:--".into(), clock);
        let figures = vec![
            format!("{:.1}%", share * 100.0),
            format!("step {}", steps(step.step, total)),
            format!("ETA {eta}"),
            format!("{} tok/s", count(step.tokens_per_s)),
            format!("loss {}", loss(f64::from(step.loss))),
            format!("scale {}", scale(step.loss_scale)),
            format!("skipped {}", step.skipped),
        ];
        (share, figures)
    }

    /// The figures that fit in `width` columns, after a bar that takes the rest of the space.
    fn line(&self, width: usize) -> String {
        let (share, figures) = &self.status;
        let mut text = String::new();
        for figure in figures {
            if text.chars().count() + figure.chars().count() + 1 > width {
                break;
            }
            text = format!("{text} {figure}");
        }
        let cells = BAR.min(width - text.chars().count());
        let full = (share.clamp(0.0, 1.0) * cells as f64).round() as usize;
        format!("{}{}{text}", "━".repeat(full), "─".repeat(cells - full)).trim_start().to_owned()
    }

    fn above(&mut self, line: &str) -> io::Result<()> {
        let erase = if std::mem::take(&mut self.open) { "\r\x1b[K" } else { "" };
        self.drawn = None;
        self.put(format!("{erase}{line}\n"))
    }
}

impl<W: Write> Renderer for StatusLine<W> {
    fn show(&mut self, message: ScreenMessage) -> io::Result<()> {
        let ScreenMessage::Record(record) = message else { return Ok(()) };
        self.since = (!matches!(record.event, Event::Finished(_))).then(Instant::now);
        let line = brief(&record.event);
        let stepped = matches!(record.event, Event::Step(_));
        if let Event::Started(started) = &record.event {
            let done = started.resumed_from.unwrap_or(0);
            let total = started.total_steps;
            self.status = (done as f64 / total.max(1) as f64, vec![format!("step {done}/{total}")]);
        }
        self.run.apply(*record);
        let due = || self.drawn.is_none_or(|drawn| drawn.elapsed() >= REDRAW_INTERVAL);
        if stepped && (due() || self.run.step.step == self.run.total_steps()) {
            return self.draw();
        }
        line.map_or(Ok(()), |line| self.above(&line))
    }

    fn idle(&mut self, source: &mut dyn MessageSource, quiet: bool, more: bool) -> io::Result<Option<Exit>> {
        if quiet {
            match source.activity() {
                Some(phase) => self.phase(&phase)?,
                None => self.wait()?,
            }
        }
        Ok((source.is_over() && !more).then_some(Exit::Ended))
    }
}

/// Replaces the line of the cursor by as much of `text` as fits: a line that wraps would stay when the next one is
/// written.
pub(crate) fn status_line(text: &str) -> String {
    let text: String = text.chars().take(width()).collect();
    // Return to the first column, write, and erase the rest of the line.
    format!("\r{text}\x1b[K")
}

/// Columns of the terminal without the last, in which some terminals wrap.
fn width() -> usize {
    terminal::size().map_or(80, |(columns, _)| usize::from(columns)).saturating_sub(1)
}

impl<W: Write> Drop for StatusLine<W> {
    fn drop(&mut self) {
        if self.open {
            // Start the next output on its own line; a closed terminal is not a failure.
            let _ = writeln!(self.err);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::{CheckpointSaved, Record, SampleText, Started, StepRecord, VERSION};

    fn message(s: f64, event: Event) -> ScreenMessage {
        ScreenMessage::Record(Box::new(Record { v: VERSION, t: 0, s, event }))
    }

    fn output(ascii: bool, write: impl FnOnce(&mut StatusLine<&mut Vec<u8>>)) -> String {
        let mut out = Vec::new();
        write(&mut StatusLine::new(&mut out, ascii));
        String::from_utf8(out).unwrap()
    }

    fn started(total_steps: u64) -> ScreenMessage {
        message(0.0, Event::Started(Box::new(Started { total_steps, ..Default::default() })))
    }

    fn step(step: u64) -> ScreenMessage {
        let record = StepRecord { step, loss: 2.5, loss_scale: 32768.0, ..Default::default() };
        message(1.0, Event::Step(Box::new(record)))
    }

    #[test]
    fn the_line_is_rewritten_and_events_are_above_it() {
        let saved = message(1.0, Event::CheckpointSaved(CheckpointSaved { step: 1, ..Default::default() }));
        let messages = [started(4), step(1), saved, step(4)];
        let text = output(false, |progress| messages.into_iter().for_each(|one| progress.show(one).unwrap()));
        let [first, erased, last, end] = text.split("\x1b[K").collect::<Vec<_>>()[..] else { panic!("{text:?}") };
        assert!(first.starts_with('\r') && first.contains("25.0% step 1/4 ETA --:--:--"), "{text:?}");
        assert_eq!(erased, "\r");
        assert!(last.starts_with("saved step=1") && last.contains("\n\r━"), "{text:?}");
        assert!(last.contains("100.0% step 4/4 ETA 00:00:00"), "{text:?}");
        assert_eq!(end, "\n");
    }

    #[test]
    fn n3_a_slow_step_is_seen_to_run() {
        let text = output(false, |progress| {
            progress.show(started(4)).unwrap();
            progress.wait().unwrap();
            progress.since = progress.since.unwrap().checked_sub(PhaseLines::MIN_DURATION);
            progress.wait().unwrap();
            progress.show(step(1)).unwrap();
            progress.wait().unwrap();
        });
        assert!(text.contains("step 0/4 (+") && text.matches("(+").count() == 1, "{text:?}");
    }

    #[test]
    fn a_step_of_any_length_keeps_its_line() {
        let text = output(false, |progress| {
            progress.status.1 = vec!["figures".to_owned(); 100];
            progress.since = Instant::now().checked_sub(Duration::from_secs(2000));
            progress.wait().unwrap();
        });
        assert!(text.contains(" (+2000.") && text.trim_end().chars().count() <= width() + "\r\x1b[K".len(), "{text:?}");
    }

    /// Regression: the path of a run wrapped the line of a command that read it, which stayed at each update.
    #[test]
    fn a_phase_of_any_length_keeps_its_line() {
        let line = status_line(&"reading ".repeat(100));
        assert!(line.starts_with("\rreading") && line.len() <= width() + "\r\x1b[K".len(), "{line:?}");
    }

    #[test]
    fn a_narrow_terminal_gets_a_shorter_line() {
        output(false, |progress| {
            progress.show(started(10)).unwrap();
            progress.show(step(5)).unwrap();
            for width in 0..200 {
                let line = progress.line(width);
                assert!(line.chars().count() <= width, "{width}: {line}");
                assert!(!line.contains("scale") || line.contains("scale 2^15"), "{line}");
            }
            progress.run = RunState::default();
            progress.status = progress.figures();
            assert!(progress.line(200).starts_with(&"─".repeat(BAR)));
        });
    }

    #[test]
    fn a_status_line_in_ascii() {
        let text = output(true, |progress| {
            progress.phase("saving").unwrap();
            let sample = SampleText { step: 1, prompt: "né".into(), text: " →".into() };
            progress.show(message(0.0, Event::Sample(sample))).unwrap();
            progress.show(step(1)).unwrap();
        });
        assert!(text.is_ascii() && text.contains("saving...") && text.contains("text=\"n? >\""), "{text:?}");
        assert!(text.contains("\r----"), "{text:?}");
    }
}
