//! The dialogs over the tabs: help, the questions before leaving, the summary at the end.

use super::app::App;
use super::keys::{Action, KEYS};
use crate::data::counted;
use crate::screen::renderer::Exit;
use crate::screen::terminal::keys::{action, is_plain};
use crate::telemetry::{Command, Finished, Phase};
use crate::ui::{Canvas, Role, format};
use ratatui::crossterm::event::{KeyCode, KeyEvent};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialog {
    /// The keys.
    Help,
    Quit,
    /// Whether to stop without saving.
    Discard,
    /// The totals of a run that has ended.
    Summary,
}

impl App {
    /// Handles a key while a dialog is open.
    pub(super) fn answer(&mut self, dialog: Dialog, key: KeyEvent) -> Option<Command> {
        match (dialog, key.code) {
            (Dialog::Help, _) => match action(KEYS, key) {
                Some(Action::Down) => self.scroll_help(1),
                Some(Action::Up) => self.scroll_help(-1),
                _ => self.dialog = None,
            },
            _ if !is_plain(key) => {}
            (Dialog::Quit, KeyCode::Char('s')) => return Some(self.stop(true)),
            (Dialog::Quit, KeyCode::Char('d')) => {
                self.exit = Some(Exit::Detached);
                return Some(Command::Detach);
            }
            (Dialog::Quit, KeyCode::Char('D')) => self.open(Dialog::Discard),
            (Dialog::Discard, KeyCode::Char('y')) => return Some(self.stop(false)),
            (Dialog::Quit, KeyCode::Esc) | (Dialog::Discard, KeyCode::Esc | KeyCode::Char('n' | 'q')) => {
                self.dialog = None;
            }
            _ => {}
        }
        None
    }

    pub(super) fn scroll_help(&self, by: isize) {
        self.help_top.set(self.help_top.get().saturating_add_signed(by));
    }

    pub(super) fn draw_dialog(&self, canvas: &mut Canvas) {
        match (self.dialog, &self.scene.live.phase) {
            (Some(Dialog::Help), _) => self.draw_help(canvas),
            (Some(Dialog::Quit), _) => {
                let answers = [
                    ("s", "save and stop"),
                    ("d", "detach: continue as plain lines"),
                    ("D", "discard: stop without saving"),
                    ("Esc", "back"),
                ];
                draw_question(canvas, ("Leave?", Role::Title), None, &answers);
            }
            (Some(Dialog::Discard), _) => {
                let run = &self.scene.live;
                let saved = run.saved.as_ref().map_or(0, |(saved, _)| saved.step);
                let steps = counted(run.step.step.saturating_sub(saved), "step");
                let lost = format!("discards {steps} since the last save");
                let answers = [("y", "stop without saving"), ("Esc", "back")];
                draw_question(canvas, ("Discard?", Role::Overflow), Some(&lost), &answers);
            }
            (Some(Dialog::Summary), Phase::Finished(finished)) => self.draw_summary(finished, canvas),
            _ => {}
        }
    }

    fn draw_help(&self, canvas: &mut Canvas) {
        let keys: Vec<_> = KEYS.iter().filter(|key| self.works(key)).collect();
        let mut popup = canvas.popup(78, keys.len() as u16 + 3);
        let rows = popup.height().saturating_sub(3);
        self.help_top.set(self.help_top.get().min(keys.len().saturating_sub(usize::from(rows))));
        let scrolls = rows < keys.len() as u16;
        let hint = if scrolls { "   j k scroll, any other key closes" } else { "   any key closes" };
        let mut inner = popup.frame(&[("Keys", Role::Title), (hint, Role::Dim)]);
        for (y, binding) in (0..rows).zip(&keys[self.help_top.get()..]) {
            inner.text(1, y, binding.written, Role::Title);
            let does = |sought: Action| binding.does(|action| action == sought);
            let help = if self.scene.can_command() {
                binding.help
            } else if does(Action::Quit) {
                "quit"
            } else if does(Action::Pause) {
                "pause or continue the replay"
            } else {
                binding.help
            };
            inner.text(8, y, help, Role::Text);
        }
        let range = [
            ("├ ● ┤", Role::Train),
            (" min, RMS, max  ", Role::Text),
            ("▾", Role::Subnormal),
            (" format's minimum  ", Role::Text),
            ("▴", Role::Subnormal),
            (" wider type  ", Role::Text),
            ("8", Role::Subnormal),
            (" FP8  ", Role::Text),
            ("✕", Role::Overflow),
            (" overflow", Role::Text),
        ];
        inner.spans(1, rows, &range);
    }

    fn draw_summary(&self, finished: &Finished, canvas: &mut Canvas) {
        let run = &self.scene.live;
        let reason = finished.reason.to_string();
        let reason = reason[..1].to_uppercase() + &reason[1..];
        let mut lines = vec![
            ("steps", format!("{}, {} applied, {} skipped", finished.step, finished.updates, finished.skipped)),
            ("tokens", format::count(finished.tokens as f64)),
            // Includes earlier processes of the run.
            ("time", format::clock(run.last_s.max(finished.seconds))),
            ("loss", format::loss(f64::from(finished.loss))),
        ];
        if let Some(loss) = finished.val_loss.or(run.figures().validation.map(|(last, _)| last)) {
            let best = run.best_validation().map(|(best, at)| format!(", best {} at step {at}", format::loss(best)));
            lines.push(("val loss", format::loss(loss) + &best.unwrap_or_default()));
        }
        lines.push(("loss scale", format::scale(finished.loss_scale)));
        lines.extend(finished.peak_rss_bytes.map(|peak| ("peak memory", format::bytes(peak))));
        lines.extend(finished.checkpoint.clone().map(|path| ("checkpoint", path)));
        let mut popup = canvas.popup(64, lines.len() as u16 + 4);
        let mut inner = popup.frame(&[(&reason, Role::Title)]);
        for (y, (what, value)) in (0..).zip(&lines) {
            inner.text(1, y, what, Role::Dim);
            inner.text(13, y, value, Role::Text);
        }
        let y = inner.height().saturating_sub(1);
        inner.text(1, y, "Esc closes this, q quits", Role::Dim);
    }
}

/// Draws a question: what it is about, and the keys that answer it.
fn draw_question(canvas: &mut Canvas, title: (&str, Role), about: Option<&str>, answers: &[(&str, &str)]) {
    let first = u16::from(about.is_some());
    let mut popup = canvas.popup(44, first + answers.len() as u16 + 2);
    let mut inner = popup.frame(&[title]);
    inner.text(1, 0, about.unwrap_or_default(), Role::Text);
    for (y, (key, meaning)) in (first..).zip(answers) {
        inner.text(1, y, key, Role::Title);
        inner.text(6, y, meaning, Role::Text);
    }
}
