//! The lab's guide: each view's scenarios, keys and explanation.

use super::screen::{Adjust, Field, LabTab, Scenario, ViewKey};
use super::{Bits, parse_format};
use crate::precision::FloatFormat;
use clap::Command;
use ratatui::crossterm::event::KeyCode;

const fn key(
    code: KeyCode,
    written: &'static str,
    footer: &'static str,
    help: &'static str,
    act: fn(&mut LabTab),
) -> ViewKey {
    ViewKey { code, written, footer, help, act }
}

/// The explanations and scenarios: `# VIEW` with its explanation, then `## SCENARIO: FLAG=VALUE …` with its text.
/// `run=` unloads a run, whose gradients would replace those of the scenario.
const TEXT: &str = include_str!("guide.md");

/// The parts of a view's chapter: its name with the explanation, then its scenarios.
fn chapter(view: &str) -> std::str::Split<'static, &'static str> {
    let mut chapters = TEXT.trim_start_matches("# ").split("\n# ");
    chapters.find(|chapter| chapter.lines().next() == Some(view)).unwrap_or_default().split("\n## ")
}

/// The explanation of a view.
pub(crate) fn about(view: &str) -> &'static str {
    chapter(view).next().and_then(|part| part.split_once('\n')).map_or("", |(_, text)| text.trim())
}

fn scenarios(view: &str) -> Vec<Scenario> {
    let scenario = |part: &'static str| {
        let (head, text) = part.split_once('\n')?;
        let (name, set) = head.split_once(':')?;
        let set = set.split_whitespace().filter_map(|pair| pair.split_once('=')).collect();
        Some(Scenario { name, set, text: text.trim() })
    };
    chapter(view).skip(1).filter_map(scenario).collect()
}

fn cursor(lab_tab: &mut LabTab, change: i64) {
    let at = lab_tab.value("cursor").parse::<i64>().unwrap_or(0);
    let width = parse_format(lab_tab.value("in")).map_or(16, |format| i64::from(format.bits()));
    lab_tab.set("cursor", (at + change).rem_euclid(width).to_string());
}

fn replace(lab_tab: &mut LabTab, make: impl Fn(&str, FloatFormat) -> Result<String, String>) {
    let format = parse_format(lab_tab.value("in"));
    if let Ok(value) = format.and_then(|format| make(lab_tab.value("value"), format)) {
        lab_tab.set("value", value);
    }
}

const BITS_KEYS: &[ViewKey] = &[
    key(KeyCode::Char('f'), "f", "flip", "flip the marked bit of the format `in`", |bits| {
        let bit = bits.value("cursor").parse().unwrap_or(0);
        replace(bits, |value, format| Bits::flipped(value, format, bit));
    }),
    key(KeyCode::Char('n'), "n", "next", "the next number of the format `in`", |bits| {
        replace(bits, |value, format| Bits::neighbor(value, format, true));
    }),
    key(KeyCode::Char('p'), "p", "previous", "the previous number of the format `in`", |bits| {
        replace(bits, |value, format| Bits::neighbor(value, format, false));
    }),
    key(KeyCode::Left, "←", "", "mark the bit to the left", |bits| cursor(bits, -1)),
    key(KeyCode::Right, "→", "", "mark the bit to the right", |bits| cursor(bits, 1)),
];

/// Moves the scaler's cursor by a share of the steps, at least one; `false` at the end.
fn advance(scaler: &mut LabTab, share: f64, forwards: bool) -> bool {
    let (first, last) = scaler.steps;
    let step = ((last - first) as f64 * share).round().max(1.0) as u64;
    let at = scaler.value("cursor").parse::<u64>().unwrap_or(if forwards { first } else { last });
    let to = if forwards { at.saturating_add(step) } else { at.saturating_sub(step) }.clamp(first, last);
    scaler.set("cursor", to.to_string());
    to < last
}

const SCALER_KEYS: &[ViewKey] = &[
    key(KeyCode::Char('.'), ".", "step", "one step forward", |scaler| {
        advance(scaler, 0.0, true);
    }),
    key(KeyCode::Char('o'), "o", "overflow", "inject an overflow at the cursor's step", |scaler| {
        let at = scaler.value("cursor").to_owned();
        let at = if at.is_empty() { scaler.steps.1.to_string() } else { at };
        let mut steps: Vec<&str> = scaler.value("overflow-at").split(',').filter(|step| !step.is_empty()).collect();
        if !steps.contains(&at.as_str()) {
            steps.push(&at);
        }
        let steps = steps.join(",");
        scaler.set("overflow-at", steps);
    }),
    key(KeyCode::Left, "←", "", "move the cursor a column back", |scaler| {
        advance(scaler, 1.0 / 70.0, false);
    }),
    key(KeyCode::Right, "→", "", "move the cursor a column forward", |scaler| {
        advance(scaler, 1.0 / 70.0, true);
    }),
    key(KeyCode::Home, "Home", "", "move the cursor to the first step", |scaler| {
        scaler.set("cursor", scaler.steps.0.to_string());
    }),
    key(KeyCode::End, "End", "", "show everything, without a cursor", |scaler| scaler.set("cursor", "")),
];

/// Advances the scaler's playback by a frame; restarts at the end.
fn play(scaler: &mut LabTab) -> bool {
    let at = scaler.value("cursor").parse::<u64>();
    if at.is_err() || at == Ok(scaler.steps.1) {
        scaler.set("cursor", scaler.steps.0.to_string());
        return true;
    }
    advance(scaler, 1.0 / 140.0, true)
}

/// The views with their initial parameters, from the arguments of the commands that print them.
pub(crate) fn lab_tabs(views: &'static Command, run: &str) -> Vec<LabTab> {
    let lab_tab = |view: &'static Command| {
        let name = view.get_name();
        let keys: &[_] = match name {
            "bits" => BITS_KEYS,
            "scaler" => SCALER_KEYS,
            _ => &[],
        };
        let mut fields: Vec<_> = view.get_arguments().flat_map(Field::of).collect();
        if name != "bits" {
            fields.push(Field::new("run", run, Adjust::Typed));
        }
        let play = (name == "scaler").then_some(play as fn(&mut LabTab) -> bool);
        LabTab { scenarios: scenarios(name), keys, play, ..LabTab::new(name, fields) }
    };
    views.get_subcommands().map(lab_tab).collect()
}
