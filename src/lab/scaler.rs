//! The dynamic loss scale, step by step: what settings would do with given overflows, or with those of a run.

use std::iter::repeat_n;

use serde::Serialize;

use super::number::{percent, short};
use super::page::{Line, Page, Role, column_cell};
use crate::precision::{FloatFormat, GradScaler, GradScalerConfig, OnOverflow, ScaleChange};
use crate::random::{Domain, Stream};
use crate::{Error, Result};

/// What decides whether a step's gradients are finite.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Visit {
    /// They are, at any scale.
    Clean,
    /// They are not the first time, at any scale; if the batch is run again, they are.
    Overflow,
    /// They are up to this scale.
    Limit(f32),
    /// They never are: the forward pass broke.
    Broken,
}

/// A run's steps, for the scaler's purposes.
#[derive(Debug, Clone, PartialEq)]
pub struct Overflows {
    /// Where they come from, in words.
    pub source: String,
    /// The number of the first step.
    pub first: u64,
    /// One a step.
    pub visits: Vec<Visit>,
    /// Tokens of a step; 0 where unknown.
    pub tokens_per_step: u64,
}

/// What settings made of the same steps.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// Where the overflows come from.
    pub source: String,
    /// Steps of the run.
    pub steps: usize,
    /// Tokens of a step; 0 where unknown.
    pub tokens_per_step: u64,
    /// One for each setting.
    pub trajectories: Vec<Trajectory>,
}

/// What a setting made of the steps.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Trajectory {
    /// The setting, in words.
    pub label: String,
    /// Its options.
    pub config: GradScalerConfig,
    /// Every attempt at a step; more than one a step where overflowing batches are run again.
    pub attempts: Vec<Attempt>,
    /// Attempts whose gradients were not finite.
    pub overflows: usize,
    /// Batches given up.
    pub lost: usize,
    /// Attempts beyond one a step.
    pub repeated: usize,
    /// Times the scale grew.
    pub growths: usize,
    /// Attempts made at the floor.
    pub at_floor: usize,
    /// Mean of log2 of the scale over the attempts.
    pub mean_log2: f64,
}

/// One attempt at a step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Attempt {
    /// The step.
    pub step: u64,
    /// The scale it ran with.
    pub scale: f32,
    /// Whether its gradients were finite.
    pub finite: bool,
    /// The scale afterwards.
    pub after: f32,
    /// What the scaler did, and why.
    pub change: ScaleChange,
}

/// Attempts at one batch before it is given up, whatever the settings.
const RETRIES: usize = 300;

impl Overflows {
    /// `steps` steps from 0 that overflow exactly at those named.
    pub fn at(overflowing: &[u64], steps: usize) -> Self {
        let visit = |step| if overflowing.contains(&step) { Visit::Overflow } else { Visit::Clean };
        let listed: Vec<_> = overflowing.iter().map(u64::to_string).collect();
        let source =
            if listed.is_empty() { "no overflow".to_owned() } else { format!("overflow at {}", listed.join(", ")) };
        Self { source, first: 0, visits: (0..steps as u64).map(visit).collect(), tokens_per_step: 0 }
    }

    /// `steps` steps from 0 that overflow independently, each with probability `rate`.
    pub fn drawn(rate: f64, steps: usize, seed: u64) -> Self {
        let stream = Stream::new(seed, Domain::Bench);
        let uniform = |step| f64::from(stream.block(0, step, 0)[0]) / 2f64.powi(32);
        let visit = |step| if uniform(step) < rate { Visit::Overflow } else { Visit::Clean };
        let source = format!("overflow in {} % of steps, seed {seed}", percent(rate));
        Self { source, first: 0, visits: (0..steps as u64).map(visit).collect(), tokens_per_step: 0 }
    }
}

impl Visit {
    /// What a step tells of other scales: it ran at `scale`, and its largest scaled gradient was `max_abs`. One that
    /// overflowed tells only that `scale` is too large.
    pub fn of_step(scale: f32, max_abs: f32, finite: bool, loss_finite: bool, format: FloatFormat) -> Self {
        match (finite, loss_finite) {
            (_, false) => Self::Broken,
            (false, true) => Self::Limit(scale.next_down()),
            (true, true) if max_abs == 0.0 => Self::Clean,
            (true, true) => Self::Limit((f64::from(scale) * (format.max() / f64::from(max_abs))) as f32),
        }
    }

    /// The largest unscaled gradient, where it is known: what the predictive rule measures.
    fn largest(self) -> Option<f32> {
        match self {
            Self::Limit(limit) => Some((FloatFormat::FP16.max() / f64::from(limit)) as f32),
            Self::Clean | Self::Overflow | Self::Broken => None,
        }
    }

    fn is_finite(self, scale: f32, first_time: bool) -> bool {
        match self {
            Self::Clean => true,
            Self::Overflow => !first_time,
            Self::Limit(limit) => scale <= limit,
            Self::Broken => false,
        }
    }
}

impl Comparison {
    /// Runs every setting over the same steps.
    pub fn run(settings: Vec<(String, GradScalerConfig)>, overflows: &Overflows) -> Result<Self> {
        let run = |(label, config)| Trajectory::run(label, config, overflows);
        Ok(Self {
            source: overflows.source.clone(),
            steps: overflows.visits.len(),
            tokens_per_step: overflows.tokens_per_step,
            trajectories: settings.into_iter().map(run).collect::<Result<_>>()?,
        })
    }

    /// The report as text, `width` columns wide.
    pub fn page(&self, width: usize) -> Page {
        let mut page = Page::new();
        page.push(Line::new().with(Role::Title, format!("{} steps", self.steps)).dim(format!("   {}", self.source)));
        let height = [8, 8, 4, 2, 2][self.trajectories.len().min(4)];
        let range = self.range();
        for (i, trajectory) in self.trajectories.iter().enumerate() {
            trajectory.chart(&mut page, i, width, height, range);
        }
        page.gap();
        self.table(&mut page);
        if let [only] = &self.trajectories[..] {
            page.gap();
            only.list(&mut page);
        }
        page
    }

    /// The lowest and highest log2 of any scale.
    fn range(&self) -> (f64, f64) {
        let scales = self.trajectories.iter().flat_map(|trajectory| &trajectory.attempts);
        let (low, high) = scales.fold((f64::MAX, f64::MIN), |(low, high), attempt| {
            let log2 = f64::from(attempt.scale).log2();
            (low.min(log2), high.max(log2))
        });
        if low > high { (0.0, 1.0) } else { (low.floor(), high.ceil().max(low.floor() + 1.0)) }
    }

    fn table(&self, page: &mut Page) {
        page.title(format!(
            "{:<22}{:>9}{:>6}{:>9}{:>9}{:>9}{:>12}",
            "setting", "overflows", "lost", "repeated", "growths", "at floor", "mean scale"
        ));
        for (i, t) in self.trajectories.iter().enumerate() {
            let label: String = t.label.chars().take(19).collect();
            page.push(Line::new().with(Role::Series(i), format!("{} {label:<20}", letter(i))).plain(format!(
                "{:>9}{:>6}{:>9}{:>9}{:>9}{:>12}",
                t.overflows,
                t.lost,
                t.repeated,
                t.growths,
                t.at_floor,
                format!("2^{:.2}", t.mean_log2)
            )));
        }
        if self.tokens_per_step > 0 {
            let lost = |t: &Trajectory| (t.lost as u64 * self.tokens_per_step).to_string();
            let lost: Vec<_> = self.trajectories.iter().map(lost).collect();
            page.push(Line::new().dim(format!("tokens never trained on: {}", lost.join(", "))));
        }
    }
}

impl Trajectory {
    fn run(label: String, config: GradScalerConfig, overflows: &Overflows) -> Result<Self> {
        let mut scaler = GradScaler::new(config)?;
        let mut attempts = Vec::with_capacity(overflows.visits.len());
        let mut lost = 0;
        for (visit, step) in overflows.visits.iter().zip(overflows.first..) {
            let before = attempts.len();
            if scaler.wants_measure() {
                visit.largest().map(|largest| scaler.measure(largest));
            }
            loop {
                let scale = scaler.scale();
                let finite = visit.is_finite(scale, attempts.len() == before);
                let mut change = scaler.update_measured(finite, visit.largest().map_or(0.0, |largest| largest * scale));
                if let (ScaleChange::BackedOff { to, .. }, Some(largest)) = (&mut change, visit.largest()) {
                    *to = scaler.measure(largest);
                }
                attempts.push(Attempt { step, scale, finite, after: scaler.scale(), change });
                let hopeless = matches!(change, ScaleChange::AtFloor { .. }) || attempts.len() - before > RETRIES;
                if finite {
                    break;
                }
                if config.on_overflow == OnOverflow::Skip || hopeless {
                    lost += 1;
                    break;
                }
            }
        }
        let count = |test: fn(&Attempt) -> bool| attempts.iter().filter(|attempt| test(attempt)).count();
        let sum: f64 = attempts.iter().map(|attempt| f64::from(attempt.scale).log2()).sum();
        Ok(Self {
            label,
            config,
            overflows: count(|attempt| !attempt.finite),
            lost,
            repeated: attempts.len() - overflows.visits.len(),
            growths: count(|attempt| matches!(attempt.change, ScaleChange::Grew { .. })),
            at_floor: attempts.iter().filter(|attempt| attempt.scale <= config.min_scale).count(),
            mean_log2: sum / attempts.len().max(1) as f64,
            attempts,
        })
    }

    /// Bars of log2 of the scale (a column shows the last attempt within it), overflows marked below.
    fn chart(&self, page: &mut Page, index: usize, width: usize, height: usize, (low, high): (f64, f64)) {
        let room = width.saturating_sub(7).max(8);
        let columns = room.min(self.attempts.len().max(1));
        // A few attempts are drawn wide.
        let each = (room / columns).clamp(1, 3);
        let bounds =
            |column: usize| column * self.attempts.len() / columns..(column + 1) * self.attempts.len() / columns;
        let buckets: Vec<&[Attempt]> = (0..columns).map(|column| &self.attempts[bounds(column)]).collect();
        // The lowest scale still has an eighth, so that it is not mistaken for nothing.
        let level = |bucket: &&[Attempt]| {
            let log2 = bucket.last().map_or(low, |attempt| f64::from(attempt.scale).log2());
            1 + ((log2 - low) / (high - low) * (height * 8 - 1) as f64).round() as usize
        };
        let levels: Vec<_> = buckets.iter().map(level).collect();
        for row in (0..height).rev() {
            let cells: String = levels.iter().flat_map(|level| repeat_n(column_cell(*level, row), each)).collect();
            let label = match row {
                _ if row + 1 == height => format!("{}{:>5}", letter(index), format!("2^{high}")),
                0 => format!("2^{low}"),
                _ => String::new(),
            };
            page.push(Line::new().dim(format!("{label:>6} ")).with(Role::Series(index), cells));
        }
        let overflown = |bucket: &&[Attempt]| bucket.iter().any(|attempt| !attempt.finite);
        let mark = |bucket| if overflown(bucket) { '✕' } else { ' ' };
        let marks: String =
            buckets.iter().flat_map(|bucket| [mark(bucket)].into_iter().chain(repeat_n(' ', each - 1))).collect();
        page.push(Line::new().plain("       ").with(Role::Bad, marks.trim_end()));
    }

    /// The scale after each step, steps of equal scale in one line.
    fn list(&self, page: &mut Page) {
        const LINES: usize = 200;
        page.title(format!("{:<14}{:>12}  {}", "steps", "scale after", "what happened"));
        let runs = self.attempts.chunk_by(|a, b| a.after == b.after && b.finite);
        let total = runs.clone().count();
        for run in runs.take(LINES) {
            let (first, last) = (run[0], run[run.len() - 1]);
            let steps = if first.step == last.step {
                first.step.to_string()
            } else {
                format!("{}–{}", first.step, last.step)
            };
            let (role, event) = match first.change {
                ScaleChange::Held if first.finite => (Role::Plain, String::new()),
                ScaleChange::Held => (Role::Warn, "✕ overflow, skipped; held by hysteresis".into()),
                ScaleChange::Grew { from, .. } => (Role::Good, format!("grew from {}", short(f64::from(from)))),
                ScaleChange::Lowered { from, .. } => {
                    (Role::Good, format!("lowered from {}, before anything overflows", short(f64::from(from))))
                }
                ScaleChange::BackedOff { from, .. } => {
                    (Role::Bad, format!("✕ overflow, skipped; backed off from {}", short(f64::from(from))))
                }
                ScaleChange::AtFloor { .. } => (Role::Bad, "✕ overflow, skipped; at the floor".into()),
            };
            page.push(Line::new().plain(format!("{steps:<14}{:>12}  ", f64::from(first.after))).with(role, event));
        }
        if total > LINES {
            page.push(Line::new().dim(format!("… {} more lines; --json has every step", total - LINES)));
        }
    }
}

/// Names a setting in the chart and the table.
fn letter(index: usize) -> char {
    char::from(b'A' + index as u8 % 26)
}

/// Changes `config` by `text`, such as `growth_interval=200,hysteresis=2`; the keys are those of the `[scaler]` table.
pub fn apply_setting(config: GradScalerConfig, text: &str) -> Result<GradScalerConfig> {
    let fail = |message: String| Error::config("setting", message);
    let mut table = toml::Table::try_from(config).map_err(|error| fail(error.to_string()))?;
    for part in text.split(',').filter(|part| !part.trim().is_empty()) {
        let (key, value) =
            part.split_once('=').ok_or_else(|| fail(format!("cannot read `{part}`; write `growth_interval=200`")))?;
        let (key, value) = (key.trim(), value.trim());
        if !table.contains_key(key) {
            let known: Vec<_> = table.keys().map(|key| format!("`{key}`")).collect();
            return Err(fail(format!("`{key}` is no option of the scaler; there are {}", known.join(", "))));
        }
        let parsed = format!("x = {value}").parse::<toml::Table>().ok().and_then(|mut table| table.remove("x"));
        let mut parsed = parsed.unwrap_or_else(|| toml::Value::String(value.to_owned()));
        // `growth_factor=4` is meant as 4.0.
        if let (Some(toml::Value::Float(_)), toml::Value::Integer(whole)) = (table.get(key), &parsed) {
            parsed = toml::Value::Float(*whole as f64);
        }
        table.insert(key.to_owned(), parsed);
    }
    let config: GradScalerConfig = table.try_into().map_err(|error| fail(error.to_string().trim_end().to_owned()))?;
    config.validate()?;
    Ok(config)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    fn compare(settings: &[&str], overflows: &Overflows) -> Comparison {
        let base = GradScalerConfig { init_scale: 32768.0, growth_interval: 5, ..GradScalerConfig::default() };
        let settings = settings.iter().map(|text| ((*text).to_owned(), apply_setting(base, text).unwrap()));
        Comparison::run(settings.collect(), overflows).unwrap()
    }

    /// The simulation of the mixed-precision chapter, to the line: the scale after each of 20 steps.
    #[test]
    fn the_chapters_twenty_steps() {
        let comparison = compare(&[""], &Overflows::at(&[10], 20));
        let after: Vec<_> = comparison.trajectories[0].attempts.iter().map(|attempt| attempt.after).collect();
        let expected = [[32768.0; 4].as_slice(), &[65536.0; 5], &[131_072.0], &[65536.0; 5], &[131_072.0; 5]].concat();
        assert_eq!(after, expected);
        let lines: Vec<_> = comparison.page(80).text().lines().rev().take(5).map(str::to_owned).collect();
        assert_eq!(
            lines.into_iter().rev().collect::<Vec<_>>(),
            [
                "0–3                  32768",
                "4–8                  65536  grew from 2^15",
                "9                   131072  grew from 2^16",
                "10–14                65536  ✕ overflow, skipped; backed off from 2^17",
                "15–19               131072  grew from 2^16",
            ]
        );
        insta::assert_snapshot!("scaler_twenty_steps", comparison.page(80).text());
    }

    #[test]
    fn four_settings_side_by_side() {
        let settings = ["", "growth_interval=20", "hysteresis=2", "on_overflow=retry"];
        let comparison = compare(&settings, &Overflows::drawn(0.05, 200, 1));
        insta::assert_snapshot!("scaler_four_settings", comparison.page(80).text());
        let [standard, slow, _, retry] = &comparison.trajectories[..] else { panic!("four settings") };
        assert!(slow.growths < standard.growths);
        assert_eq!((retry.lost, retry.repeated), (0, retry.overflows));
        assert_eq!(standard.repeated, 0);
    }

    /// A step that was clean tells the largest scale it stands; one that overflowed, that its scale is too large.
    #[test]
    fn a_replay_depends_on_the_scale() {
        let fp16 = FloatFormat::FP16;
        assert_eq!(Visit::of_step(1024.0, 65504.0, true, true, fp16), Visit::Limit(1024.0));
        assert_eq!(Visit::of_step(1024.0, 32752.0, true, true, fp16), Visit::Limit(2048.0));
        assert_eq!(Visit::of_step(1024.0, 1.0, false, false, fp16), Visit::Broken);
        assert!(!Visit::of_step(1024.0, 1.0, false, true, fp16).is_finite(1024.0, false));
        assert!(Visit::of_step(1024.0, 1.0, false, true, fp16).is_finite(512.0, true));
        let visits = vec![Visit::Limit(20000.0); 6];
        let overflows = Overflows { source: "a run".into(), first: 1, visits, tokens_per_step: 1024 };
        let comparison = compare(&["growth_interval=2", "growth_interval=2,on_overflow=retry"], &overflows);
        let scales: Vec<_> = comparison.trajectories[0].attempts.iter().map(|attempt| attempt.scale).collect();
        assert_eq!(scales, [32768.0, 16384.0, 16384.0, 32768.0, 16384.0, 16384.0]);
        assert_eq!(comparison.trajectories[0].lost, 2);
        assert!(comparison.page(80).text().contains("tokens never trained on: 2048, 0"));
    }

    /// Largest gradients that fluctuate as those of real runs do: what the predictive rule is for.
    #[test]
    fn measuring_overflows_far_less_often_than_trying() {
        let stream = Stream::new(3, Domain::Bench);
        let noise = |step| stream.block(0, step, 0).iter().map(|&word| word as f32 / 2f32.powi(31)).sum::<f32>();
        let visits = (0..4000).map(|step| Visit::Limit(2f32.powf(18.3 - noise(step)))).collect();
        let overflows = Overflows { source: "noise".into(), first: 1, visits, tokens_per_step: 0 };
        let base = "init_scale=16777216,growth_interval=100";
        let comparison = compare(&[base, &format!("{base},policy=predictive")], &overflows);
        let [trying, measuring] = &comparison.trajectories[..] else { panic!("two settings") };
        assert!(trying.overflows > 30 && measuring.overflows * 8 <= trying.overflows, "{}", comparison.page(80).text());
        assert!(measuring.mean_log2 > trying.mean_log2 - 0.5, "{}", comparison.page(80).text());
        assert!(comparison.page(80).text().contains("overflows"));
    }

    #[test]
    fn a_broken_batch_ends_at_the_floor_even_with_retry() {
        let visits = vec![Visit::Broken, Visit::Clean];
        let overflows = Overflows { source: String::new(), first: 0, visits, tokens_per_step: 0 };
        let comparison = compare(&["on_overflow=retry"], &overflows);
        let t = &comparison.trajectories[0];
        assert_eq!((t.overflows, t.lost, t.at_floor), (16, 1, 2));
    }

    #[test]
    fn settings_that_cannot_be_are_refused_by_name() {
        let refused = |text| apply_setting(GradScalerConfig::default(), text).unwrap_err().to_string();
        assert!(refused("growth_intervall=3").contains("`growth_intervall` is no option"));
        assert!(refused("growth_interval").contains("cannot read"));
        assert!(refused("growth_factor=0.5").contains("scaler.growth_factor"));
        assert!(refused("on_overflow=explode").contains("explode"));
        let config = apply_setting(GradScalerConfig::default(), "growth_factor=4, hysteresis_refill=clean").unwrap();
        assert_eq!(config.growth_factor, 4.0);
    }

    #[test]
    fn nothing_to_simulate_is_no_panic() {
        assert!(!compare(&["", ""], &Overflows::at(&[], 0)).page(80).text().is_empty());
        assert!(!compare(&[], &Overflows::at(&[], 3)).page(10).text().is_empty());
    }
}
