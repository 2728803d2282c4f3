//! The dialogs over the tabs: help, the question before leaving, the summary at the end.

use crate::screen::dashboard::keys::{Action, KEYS};
use crate::screen::dashboard::state::{Dialog, Mode, ViewModel};
use crate::screen::terminal::Binding;
use crate::telemetry::Phase;
use crate::telemetry::{FinishReason, Finished};
use crate::ui::{Pad, Role, format};

/// Draws the dialog that is open, if any.
pub(in crate::screen::dashboard) fn draw(view: &ViewModel, pad: &mut Pad) {
    match view.dialog {
        Some(Dialog::Help) => help(view, pad),
        Some(Dialog::Quit) => quit(pad),
        Some(Dialog::Discard) => discard(view, pad),
        Some(Dialog::Summary) => {
            if let Phase::Finished(finished) = &view.live().phase {
                summary(view, finished, pad);
            }
        }
        None => {}
    }
}

fn help(view: &ViewModel, pad: &mut Pad) {
    // Keys that command training do nothing in a watcher, but that of a pause, which a replay has too.
    let pauses = |key: &Binding<Action>| view.playback.is_some() && key.does(|action| action == Action::Pause);
    let works = |key: &&Binding<Action>| view.mode == Mode::Attached || !key.does(Action::commands) || pauses(key);
    let keys: Vec<_> = KEYS.iter().filter(works).collect();
    let mut popup = pad.popup(78, keys.len() as u16 + 3);
    let rows = popup.height().saturating_sub(3);
    let top = view.help_top.min((keys.len() as u16).saturating_sub(rows));
    let scrolls = rows < keys.len() as u16;
    let hint = if scrolls { "   j k scroll, any other key closes" } else { "   any key closes" };
    let mut inner = popup.frame(&[("Keys", Role::Title), (hint, Role::Dim)]);
    for (y, binding) in (0..rows).zip(&keys[usize::from(top)..]) {
        inner.text(1, y, binding.written, Role::Title);
        inner.text(8, y, binding.help, Role::Text);
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

fn quit(pad: &mut Pad) {
    let mut popup = pad.popup(44, 6);
    let mut inner = popup.frame(&[("Leave?", Role::Title)]);
    let answers = [
        ("s", "save and stop"),
        ("d", "detach: continue as plain lines"),
        ("D", "discard: stop without saving"),
        ("Esc", "back"),
    ];
    for (y, (key, meaning)) in (0..).zip(answers) {
        inner.text(1, y, key, Role::Title);
        inner.text(6, y, meaning, Role::Text);
    }
}

fn discard(view: &ViewModel, pad: &mut Pad) {
    let run = view.live();
    let saved = run.saved.as_ref().map_or(0, |(saved, _)| saved.step);
    let lost = run.step.step.saturating_sub(saved);
    let mut popup = pad.popup(44, 5);
    let mut inner = popup.frame(&[("Discard?", Role::Overflow)]);
    inner.text(1, 0, &format!("{lost} steps since the last save are lost"), Role::Text);
    for (y, (key, meaning)) in (1..).zip([("y", "stop without saving"), ("Esc", "back")]) {
        inner.text(1, y, key, Role::Title);
        inner.text(6, y, meaning, Role::Text);
    }
}

fn summary(view: &ViewModel, finished: &Finished, pad: &mut Pad) {
    let run = view.live();
    let reason = match finished.reason {
        FinishReason::Done => "Done",
        FinishReason::EarlyStopped => "Stopped early",
        FinishReason::Interrupted => "Interrupted",
        FinishReason::Stopped => "Stopped",
        FinishReason::Diverged => "Diverged",
    };
    let mut lines = vec![
        ("steps", format!("{}, {} applied, {} skipped", finished.step, finished.updates, finished.skipped)),
        ("tokens", format::count(finished.tokens as f64)),
        // Of all the run's processes.
        ("time", format::clock(run.last_s.max(finished.seconds))),
        ("loss", format::loss(f64::from(finished.loss))),
    ];
    if let Some(loss) = finished.val_loss.or(run.last_validation()) {
        let best = run.best_validation().map(|(best, at)| format!(", best {} at step {at}", format::loss(best)));
        lines.push(("val loss", format::loss(loss) + &best.unwrap_or_default()));
    }
    lines.push(("loss scale", format::scale(finished.loss_scale)));
    lines.extend(finished.peak_rss_bytes.map(|peak| ("peak memory", format::bytes(peak))));
    lines.extend(finished.checkpoint.clone().map(|path| ("checkpoint", path)));
    let mut popup = pad.popup(64, lines.len() as u16 + 4);
    let mut inner = popup.frame(&[(reason, Role::Title)]);
    for (y, (what, value)) in (0..).zip(&lines) {
        inner.text(1, y, what, Role::Dim);
        inner.text(13, y, value, Role::Text);
    }
    let y = inner.height().saturating_sub(1);
    inner.text(1, y, "Esc closes this, q quits", Role::Dim);
}
