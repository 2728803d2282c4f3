//! The first line: the run's phase, its name, and the tabs. If it is too narrow, it drops in this order: the long form
//! of the precision, the model if the run's name contains it, the tabs' names, the run.

use super::app::TABS;
use super::scene::{DashboardMode, Scene};
use crate::telemetry::{FinishReason, Phase};
use crate::ui::{Canvas, Role, format};

pub(super) fn draw(scene: &Scene, tab: usize, canvas: &mut Canvas) {
    let x = draw_state(scene, canvas);
    let (about, named) = pieces(scene, tab, x, canvas.width());
    if !about.is_empty() {
        canvas.text(x + 2, 0, &about, Role::Dim);
    }
    for (at, label, one) in tabs(tab, named, x, canvas.width()) {
        canvas.text(at, 0, &label, if one == tab { Role::Title } else { Role::Dim });
    }
}

/// Draws the run's phase; returns the column after it.
pub(super) fn draw_state(scene: &Scene, canvas: &mut Canvas) -> u16 {
    canvas.spans(0, 0, &state(scene).each_ref().map(|(text, role)| (text.as_str(), *role)))
}

/// The program's name, the run's phase, and the step at which the view was frozen.
fn state(scene: &Scene) -> [(String, Role); 3] {
    let frozen = scene.frozen_at().map_or_else(String::new, |step| format!(" view frozen at {step}"));
    [("finetune ".to_owned(), Role::Title), phase(scene), (frozen, Role::Subnormal)]
}

/// The tab at a column of the first line.
pub(super) fn tab_at(scene: &Scene, tab: usize, width: u16, column: u16) -> Option<usize> {
    let x: u16 = state(scene).iter().map(|(text, _)| format::columns(text) as u16).sum();
    let (_, named) = pieces(scene, tab, x, width);
    let mut tabs = tabs(tab, named, x, width).into_iter();
    tabs.find(|(at, label, _)| (*at..*at + label.len() as u16).contains(&column)).map(|(_, _, tab)| tab)
}

/// A tab's label. The current one is in brackets; without names, the others show only their numbers.
fn label(tab: usize, chosen: usize, named: bool) -> String {
    match (named || tab == chosen, tab == chosen) {
        (_, true) => format!("[{} {}]", tab + 1, TABS[tab]),
        (true, false) => format!(" {} {} ", tab + 1, TABS[tab]),
        (false, false) => format!(" {} ", tab + 1),
    }
}

/// Each tab's column, label and number, right-aligned.
fn tabs(chosen: usize, named: bool, x: u16, width: u16) -> Vec<(u16, String, usize)> {
    let labels = (0..TABS.len()).map(|tab| label(tab, chosen, named));
    let all = labels.clone().map(|label| label.len() as u16).sum::<u16>();
    let mut at = width.saturating_sub(all).max(x + 1);
    let place = |(tab, label): (usize, String)| {
        let here = at;
        at += label.len() as u16;
        (here, label, tab)
    };
    labels.enumerate().map(place).collect()
}

/// The text about the run that fits between the columns `x` and `width`, and whether the tabs show their names.
fn pieces(scene: &Scene, tab: usize, x: u16, width: u16) -> (String, bool) {
    let columns = |named: bool| (0..TABS.len()).map(|one| label(one, tab, named).len()).sum::<usize>();
    let room = |named: bool| usize::from(width).saturating_sub(usize::from(x) + columns(named));
    let fits = |about: &str, named: bool| {
        let length = format::columns(about);
        length + if length > 0 { 3 } else { 1 } <= room(named)
    };
    let nothing = || (String::new(), fits("", true));
    let Some(started) = &scene.run().started else { return nothing() };
    let model = format::printable(format::base_name(&started.model));
    let run = format::printable(&started.run);
    let policy: Vec<_> = started.policy.split(',').take(2).collect();
    let long = policy.join(" ");
    let dtype = started.precision().compute.to_string();
    let run_of = if run.is_empty() { String::new() } else { format!("run {run}") };
    let join =
        |pieces: &[&str]| pieces.iter().filter(|piece| !piece.is_empty()).copied().collect::<Vec<_>>().join(" · ");
    let telling = if run.contains(&model) { join(&[&dtype, &run]) } else { join(&[&model, &dtype, &run]) };
    let candidates = [
        (join(&[&model, &long, &run_of]), true),
        (join(&[&model, &dtype, &run]), true),
        (telling.clone(), true),
        (telling, false),
        (join(&[&dtype, &run]), false),
        (join(&[&model, &dtype]), false),
        (dtype, false),
    ];
    candidates.into_iter().find(|(about, named)| fits(about, *named)).unwrap_or_else(nothing)
}

/// Milliseconds between two looks of a run's glyph while nothing else happens.
pub(super) const BLINK: u64 = 400;

/// The run's phase as a glyph and a word.
fn phase(scene: &Scene) -> (String, Role) {
    let run = &scene.live;
    let (word, role) = match &run.phase {
        Phase::Waiting => ("∙ waiting".to_owned(), Role::Dim),
        Phase::Running => ("▶ running".to_owned(), Role::Good),
        Phase::Paused => ("‖ paused".to_owned(), Role::Subnormal),
        Phase::Finished(finished) => match finished.reason {
            reason @ (FinishReason::Diverged | FinishReason::Failed) => (format!("✕ {reason}"), Role::Overflow),
            reason @ (FinishReason::Done | FinishReason::EarlyStopped) => (format!("■ {reason}"), Role::Good),
            reason => (format!("■ {reason}"), Role::Subnormal),
        },
        Phase::Lost => ("✕ process gone".to_owned(), Role::Overflow),
    };
    if let Some(playback) = scene.playback
        && !run.is_over()
    {
        let glyph = if playback.paused { '‖' } else { '▶' };
        return (format!("{glyph} replay ×{}", playback.speed), role);
    }
    // A watched run without new records may hang or be in a slow step, so show for how long.
    let silent = scene.now.saturating_sub(run.last_t) as f64 / 1000.0;
    if scene.mode == DashboardMode::Watching && run.phase == Phase::Running && run.last_t > 0 && silent > 30.0 {
        return (format!("{word}, silent for {}", format::ago(silent)), Role::Subnormal);
    }
    // Something moves during a slow step.
    let still = scene.now.saturating_sub(run.last_t) / BLINK;
    if run.phase == Phase::Running && scene.frozen_at().is_none() && still % 2 == 1 {
        return (word.replace('▶', "▷"), role);
    }
    (word, role)
}
