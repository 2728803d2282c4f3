//! Renders a simulation: the loss scale as a chart under its ceiling, a table of the settings, and one step as text.

use super::{Mean, ScalerComparison, SimulatedStep, Trajectory};
use crate::lab::number::short;
use crate::precision::ScaleChange;
use crate::ui::format::letter;
use crate::ui::{Column, Line, Page, Role, column_cell, extent, plain};
use std::iter::repeat_n;

impl ScalerComparison {
    pub(crate) fn page(&self, width: usize) -> Page {
        let mut page = Page::new();
        page.headed(&format!("{} steps", self.steps), &self.source, width);
        if let Some([first, .., last] | [first @ last]) = self.trajectories.first().map(|first| &first.attempts[..]) {
            page.steps = (first.step, last.step);
        }
        for (i, trajectory) in self.trajectories.iter().enumerate() {
            trajectory.chart(&mut page, i, width, self);
        }
        if self.has_ceiling() {
            let text = format!("       █ scale  · ceiling {} / max|g|; a scale above it overflows: ✕", short(self.max));
            page.push(Line::new().dim(text));
        }
        if let Some(cursor) = self.cursor {
            for (i, trajectory) in self.trajectories.iter().enumerate() {
                trajectory.verdict(&mut page, i, cursor);
            }
        }
        page.gap();
        self.table(&mut page);
        if let ([only], None, ..=100) = (&self.trajectories[..], self.cursor, self.steps) {
            page.gap();
            only.list(&mut page);
        }
        page
    }

    fn attempts(&self) -> impl Iterator<Item = &SimulatedStep> {
        self.trajectories.iter().flat_map(|trajectory| &trajectory.attempts)
    }

    /// Whether any gradient was measured, so that its step has a ceiling of the scale.
    fn has_ceiling(&self) -> bool {
        self.attempts().any(|attempt| attempt.largest.is_some())
    }

    /// The range of log2 of all scales, with room for the ceiling.
    fn range(&self) -> (f64, f64) {
        let Some((low, high)) = extent(self.attempts().map(SimulatedStep::log2_scale)) else { return (0.0, 1.0) };
        let room = if self.has_ceiling() { 1.0 } else { 0.0 };
        (low.floor(), high.ceil().max(low.floor() + 1.0) + room)
    }

    fn table(&self, page: &mut Page) {
        let name = |i: usize| {
            let label: String = self.trajectories[i].label.chars().take(19).collect();
            (Role::Series(i), format!("{} {label}", letter(i)))
        };
        let settings: Vec<_> = self.trajectories.iter().enumerate().collect();
        let columns: &[Column<(usize, &Trajectory)>] = &[
            ("setting", -22, &|(i, _)| name(*i)),
            ("overflows", 9, &|(_, t)| plain(t.overflows)),
            ("lost", 6, &|(_, t)| plain(t.lost)),
            ("repeated", 9, &|(_, t)| plain(t.repeated)),
            ("growths", 9, &|(_, t)| plain(t.growths)),
            ("at min", 9, &|(_, t)| plain(t.at_min_scale)),
            ("mean scale", 12, &|(_, t)| plain(format!("2^{:.2}", t.mean_log2))),
        ];
        page.table(&settings, columns);
        if !self.over_seeds.is_empty() {
            page.gap();
            let means: Vec<_> = self.over_seeds.iter().enumerate().collect();
            let columns: &[Column<(usize, &(Mean, Mean))>] = &[
                (&format!("{} seeds, 95 %", self.seeds), -22, &|(i, _)| name(*i)),
                ("overflows", 24, &|(_, (overflows, _))| plain(overflows)),
                ("mean log2 scale", 28, &|(_, (_, scale))| plain(scale)),
            ];
            page.table(&means, columns);
        }
        if self.tokens_per_step > 0 {
            let lost = |t: &Trajectory| (t.lost as u64 * self.tokens_per_step).to_string();
            let lost: Vec<_> = self.trajectories.iter().map(lost).collect();
            page.push(Line::new().dim(format!("tokens never trained on: {}", lost.join(", "))));
        }
    }
}

impl Trajectory {
    /// Bars of log2 of the scale under the lowest ceiling of the column's steps. Overflows and the cursor, where the
    /// chart ends, are marked below.
    fn chart(&self, page: &mut Page, index: usize, width: usize, comparison: &ScalerComparison) {
        let height = [8, 8, 4, 3, 2][comparison.trajectories.len().min(4)];
        let (low, high) = comparison.range();
        let room = width.saturating_sub(7).max(8);
        let count = room.min(self.attempts.len().max(1));
        // Draw few attempts wide.
        let each = (room / count).clamp(1, 3);
        let eighths = |log2: f64| 1 + ((log2 - low) / (high - low) * (height * 8 - 1) as f64).round() as usize;
        let bounds = |column: usize| column * self.attempts.len() / count..(column + 1) * self.attempts.len() / count;
        let column =
            |column: usize| ChartColumn::new(&self.attempts[bounds(column)], comparison.cursor, comparison.max);
        let columns: Vec<_> = (0..count).map(column).collect();
        for row in (0..height).rev() {
            let label = match row {
                _ if row + 1 == height => format!("{}{:>5}", letter(index), format!("2^{high}")),
                0 => format!("2^{low}"),
                _ => String::new(),
            };
            let mut line = Line::new().dim(format!("{label:>6} "));
            for column in &columns {
                let ceiling = column.ceiling.filter(|log2| *log2 > low && *log2 < high);
                // The lowest scale still gets an eighth, to be visible.
                let (role, glyph) = match column_cell(column.scale.map_or(0, eighths), row) {
                    ' ' if ceiling.is_some_and(|log2| (eighths(log2) - 1) / 8 == row) => (Role::Dim, '·'),
                    bar if column.overflows => (Role::Bad, bar),
                    bar => (Role::Series(index), bar),
                };
                line = line.with(role, repeat_n(glyph, each).collect::<String>());
            }
            page.push(line);
        }
        let mut line = Line::new().plain("       ");
        for column in &columns {
            let (role, mark) = match column {
                ChartColumn { at_cursor: true, .. } => (Role::Title, '▲'),
                ChartColumn { overflows: true, .. } => (Role::Bad, '✕'),
                _ => (Role::Text, ' '),
            };
            line = line.with(role, [mark].into_iter().chain(repeat_n(' ', each - 1)).collect::<String>());
        }
        page.push(line);
    }

    /// The step under the cursor as text: its numbers, and on the next line its outcome.
    fn verdict(&self, page: &mut Page, index: usize, cursor: u64) {
        let Some(attempt) = self.attempts.iter().rev().find(|attempt| attempt.step <= cursor) else {
            page.push(Line::new().dim("no step yet"));
            return;
        };
        let interval = self.config.growth_interval;
        let scaled = match attempt.largest {
            Some(largest) => {
                let product = f64::from(largest) * f64::from(attempt.scale);
                format!(" × max|g| {} = {}", brief(f64::from(largest)), brief(product))
            }
            None if !attempt.finite => "   max|g| not measured".to_owned(),
            None => String::new(),
        };
        let (role, outcome) =
            if attempt.finite { (Role::Good, "✓ applied") } else { (Role::Bad, "✕ overflow, skipped") };
        let effect = effect(attempt);
        let then = if effect.is_empty() { String::new() } else { format!("; {effect}") };
        page.push(
            Line::new()
                .with(Role::Series(index), format!("{} step {}: ", letter(index), attempt.step))
                .plain(format!("S {}{scaled}", short(f64::from(attempt.scale))))
                .dim(format!("   clean {} of {interval}", attempt.clean)),
        );
        page.push(Line::new().with(role, format!("  {outcome}{then}")));
    }

    /// Every attempt: its scale, whether its step was applied, the clean steps after it, and its effect on the scale.
    fn list(&self, page: &mut Page) {
        let outcome = |finite: bool| {
            let (role, outcome) = if finite { (Role::Good, "✓ applied") } else { (Role::Bad, "✕ skipped") };
            (role, format!("   {outcome}"))
        };
        let columns: &[Column<SimulatedStep>] = &[
            ("step", -8, &|attempt| plain(attempt.step)),
            ("scale", 12, &|attempt| plain(f64::from(attempt.scale))),
            ("   outcome", -13, &|attempt| outcome(attempt.finite)),
            ("clean after", 14, &|attempt| {
                (Role::Dim, format!("{} of {}", attempt.clean, self.config.growth_interval))
            }),
            ("   then", 0, &|attempt| plain(format!("   {}", effect(attempt)))),
        ];
        page.table(&self.attempts, columns);
    }
}

/// A column of a chart: consecutive attempts.
struct ChartColumn {
    /// log2 of the scale of the last attempt up to the cursor.
    scale: Option<f64>,
    /// log2 of the lowest scale at which an attempt overflows.
    ceiling: Option<f64>,
    /// Whether an attempt overflows, in a column that begins before the cursor.
    overflows: bool,
    at_cursor: bool,
}

impl ChartColumn {
    fn new(attempts: &[SimulatedStep], cursor: Option<u64>, max: f64) -> Self {
        let is_shown = |attempt: &SimulatedStep| cursor.is_none_or(|cursor| attempt.step <= cursor);
        let largest = attempts.iter().filter_map(|attempt| attempt.largest).reduce(f32::max);
        let span = attempts.first().zip(attempts.last());
        Self {
            scale: attempts.iter().rfind(|attempt| is_shown(attempt)).map(SimulatedStep::log2_scale),
            ceiling: largest.map(|largest| (max / f64::from(largest)).log2()),
            overflows: attempts.first().is_some_and(is_shown) && attempts.iter().any(|attempt| !attempt.finite),
            at_cursor: cursor.zip(span).is_some_and(|(at, (first, last))| (first.step..=last.step).contains(&at)),
        }
    }
}

/// Three significant digits.
fn brief(x: f64) -> String {
    if (1e-2..1e6).contains(&x) {
        format!("{x:.*}", (2 - x.log10().floor() as i32).clamp(0, 4) as usize)
    } else {
        format!("{x:.2e}")
    }
}

/// The effect of an attempt on the scale; empty if it held.
fn effect(attempt: &SimulatedStep) -> String {
    let after = short(f64::from(attempt.after));
    match attempt.change {
        ScaleChange::Held if attempt.finite => String::new(),
        ScaleChange::Held => "held by hysteresis".into(),
        ScaleChange::Grew { .. } => format!("grew to {after}"),
        ScaleChange::Lowered { .. } => format!("lowered to {after}, before an overflow"),
        ScaleChange::BackedOff { .. } => format!("backed off to {after}"),
        ScaleChange::AtMinScale { .. } => "at min_scale".into(),
    }
}
