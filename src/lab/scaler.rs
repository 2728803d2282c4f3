//! Simulates the loss scale in closed loop: a step overflows if scale × max|g| exceeds FP16's largest number, which
//! determines the next scale. The gradients come from a model or from a run.

mod gradients;
mod page;

use super::number::percent;
use crate::precision::{FloatFormat, GradScaler, GradScalerConfig, OnOverflow, ScaleChange};
use crate::random::{Domain, Stream};
use crate::settings::{integer, number};
use crate::{Error, Result};
use serde::Serialize;

pub(crate) use gradients::{GradientModel, Mean};

/// The condition for a step's gradients to be finite.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum StepCondition {
    /// Finite at any scale.
    Clean,
    /// Not finite the first time, at any scale; finite if the batch is repeated.
    Overflow,
    /// Finite if the largest unscaled gradient, this one, times the scale is.
    Largest(f32),
    /// Overflowed at this scale; the smaller scales at which it would not have overflowed are unknown.
    Above(f32),
    /// Never finite, because the forward pass overflows.
    Broken,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct GradientTrace {
    pub(crate) source: String,
    /// The number of the first step.
    pub(crate) first: u64,
    pub(crate) visits: Vec<StepCondition>,
    /// The largest number of the format in which gradients overflow.
    pub(crate) max: f64,
    /// Tokens per step; 0 if unknown.
    pub(crate) tokens_per_step: u64,
}

/// Several settings simulated on the same steps.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct ScalerComparison {
    pub(crate) source: String,
    /// The largest number of the format in which gradients overflow.
    #[serde(skip)]
    max: f64,
    pub(crate) steps: usize,
    /// Tokens per step; 0 if unknown.
    pub(crate) tokens_per_step: u64,
    pub(crate) trajectories: Vec<Trajectory>,
    /// Overflows and mean log2 of the scale over several seeds, one pair for each setting; empty for one seed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) over_seeds: Vec<(Mean, Mean)>,
    #[serde(skip)]
    pub(crate) seeds: u64,
    /// The step under the cursor; the last step if `None`.
    #[serde(skip)]
    pub(crate) cursor: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Trajectory {
    pub(crate) label: String,
    pub(crate) config: GradScalerConfig,
    /// All attempts at steps; several per step if overflowing batches are repeated.
    pub(crate) attempts: Vec<SimulatedStep>,
    /// Attempts whose gradients were not finite.
    pub(crate) overflows: usize,
    /// Batches skipped for good.
    pub(crate) lost: usize,
    pub(crate) repeated: usize,
    pub(crate) growths: usize,
    pub(crate) at_min_scale: usize,
    /// Mean of log2 of the scale over the attempts.
    pub(crate) mean_log2: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct SimulatedStep {
    pub(crate) step: u64,
    /// The scale it ran with.
    pub(crate) scale: f32,
    pub(crate) finite: bool,
    pub(crate) after: f32,
    /// Consecutive clean steps afterwards, compared with `growth_interval`.
    pub(crate) clean: u32,
    /// The largest unscaled gradient, if it was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) largest: Option<f32>,
    pub(crate) change: ScaleChange,
}

impl SimulatedStep {
    fn log2_scale(&self) -> f64 {
        f64::from(self.scale).log2()
    }
}

/// Maximum attempts at one batch.
const MAX_RETRIES: usize = 300;

impl GradientTrace {
    /// `steps` steps from 0 without overflows.
    pub(crate) fn none(steps: usize) -> Self {
        Self {
            source: "no overflow".to_owned(),
            first: 0,
            visits: vec![StepCondition::Clean; steps],
            max: FloatFormat::FP16.max(),
            tokens_per_step: 0,
        }
    }

    /// Forces more steps to overflow at any scale: those in `at`, and each other with probability `rate`.
    #[must_use]
    pub(crate) fn injected(mut self, at: &[u64], rate: f64, seed: u64) -> Self {
        let stream = Stream::new(seed, Domain::Bench);
        let uniform = |step| f64::from(stream.block(0, step, 0)[0]) / 2f64.powi(32);
        for (visit, step) in self.visits.iter_mut().zip(self.first..) {
            if at.contains(&step) || uniform(step) < rate {
                *visit = StepCondition::Overflow;
            }
        }
        let steps = self.first..self.first + self.visits.len() as u64;
        let listed: Vec<_> = at.iter().filter(|step| steps.contains(step)).map(u64::to_string).collect();
        if !listed.is_empty() {
            self.source = format!("{}; injected at {}", self.source, listed.join(", "));
        }
        if rate > 0.0 {
            self.source = format!("{}; injected in {} % of steps", self.source, percent(rate));
        }
        self
    }
}

impl StepCondition {
    /// The condition from a step that ran at `scale` with the largest scaled gradient `max_abs`. A step that overflowed
    /// only shows that `scale` is too large.
    pub(crate) fn of_step(scale: f32, max_abs: f32, finite: bool, loss_finite: bool) -> Self {
        match (finite, loss_finite) {
            (_, false) => Self::Broken,
            (false, true) => Self::Above(scale),
            (true, true) if max_abs == 0.0 => Self::Clean,
            (true, true) => Self::Largest((f64::from(max_abs) / f64::from(scale)) as f32),
        }
    }

    /// The largest unscaled gradient, or a lower bound of it from an overflow beyond `max`, for the predictive rule.
    fn at_least(self, max: f64) -> Option<f32> {
        match self {
            Self::Largest(largest) => Some(largest),
            Self::Above(scale) => Some((max / f64::from(scale.next_down())) as f32),
            Self::Clean | Self::Overflow | Self::Broken => None,
        }
    }

    /// Whether gradients up to `max` are finite at `scale`.
    fn is_finite(self, scale: f32, first_time: bool, max: f64) -> bool {
        match self {
            Self::Clean => true,
            Self::Overflow => !first_time,
            Self::Largest(largest) => f64::from(scale) * f64::from(largest) <= max,
            Self::Above(limit) => scale < limit,
            Self::Broken => false,
        }
    }
}

impl ScalerComparison {
    pub(crate) fn run(settings: Vec<(String, GradScalerConfig)>, overflows: &GradientTrace) -> Result<Self> {
        let run = |(label, config)| Trajectory::run(label, config, overflows);
        Ok(Self {
            source: overflows.source.clone(),
            max: overflows.max,
            steps: overflows.visits.len(),
            tokens_per_step: overflows.tokens_per_step,
            trajectories: settings.into_iter().map(run).collect::<Result<_>>()?,
            over_seeds: Vec::new(),
            seeds: 1,
            cursor: None,
        })
    }

    /// Repeats the simulation with `seeds` seeds, starting at 0, and stores the means.
    pub(crate) fn repeat(&mut self, seeds: u64, steps: impl Fn(u64) -> GradientTrace) -> Result<()> {
        let settings: Vec<_> = self.trajectories.iter().map(|t| (t.label.clone(), t.config)).collect();
        let mut figures = vec![(Vec::new(), Vec::new()); settings.len()];
        for seed in 0..seeds {
            let run = Self::run(settings.clone(), &steps(seed))?;
            for ((overflows, scales), t) in figures.iter_mut().zip(&run.trajectories) {
                overflows.push(t.overflows as f64);
                scales.push(t.mean_log2);
            }
        }
        self.over_seeds = figures.iter().map(|(a, b)| (Mean::of(a), Mean::of(b))).collect();
        self.seeds = seeds;
        Ok(())
    }
}

impl Trajectory {
    fn run(label: String, config: GradScalerConfig, overflows: &GradientTrace) -> Result<Self> {
        let mut scaler = GradScaler::new(config)?;
        let mut attempts = Vec::with_capacity(overflows.visits.len());
        let mut lost = 0;
        for (visit, step) in overflows.visits.iter().zip(overflows.first..) {
            let before = attempts.len();
            let at_least = visit.at_least(overflows.max);
            let largest = at_least.filter(|_| matches!(visit, StepCondition::Largest(_)));
            if scaler.needs_amax() {
                at_least.map(|amax| scaler.set_amax(amax));
            }
            loop {
                let scale = scaler.scale();
                let finite = visit.is_finite(scale, attempts.len() == before, overflows.max);
                let mut change = scaler.update_with_amax(finite, at_least.map_or(0.0, |amax| amax * scale));
                if let (ScaleChange::BackedOff { to, .. }, Some(amax)) = (&mut change, at_least) {
                    *to = scaler.set_amax(amax);
                }
                let after = scaler.scale();
                let clean = scaler.state().growth_tracker;
                attempts.push(SimulatedStep { step, scale, finite, after, clean, largest, change });
                let hopeless =
                    matches!(change, ScaleChange::AtMinScale { .. }) || attempts.len() - before > MAX_RETRIES;
                if finite {
                    break;
                }
                if config.on_overflow == OnOverflow::Skip || hopeless {
                    lost += 1;
                    break;
                }
            }
        }
        let count = |test: fn(&SimulatedStep) -> bool| attempts.iter().filter(|attempt| test(attempt)).count();
        let sum: f64 = attempts.iter().map(SimulatedStep::log2_scale).sum();
        Ok(Self {
            label,
            config,
            overflows: count(|attempt| !attempt.finite),
            lost,
            repeated: attempts.len() - overflows.visits.len(),
            growths: count(|attempt| matches!(attempt.change, ScaleChange::Grew { .. })),
            at_min_scale: attempts.iter().filter(|it| config.enabled && it.scale <= config.min_scale).count(),
            mean_log2: sum / attempts.len().max(1) as f64,
            attempts,
        })
    }
}

/// Applies the text of a flag, such as `growth_interval=200,hysteresis=2`, to `config`. The `[scaler]` table has the
/// same keys.
pub(crate) fn apply_setting(config: GradScalerConfig, flag: &str, text: &str) -> Result<GradScalerConfig> {
    let fail = |message: String| Error::config(flag, message);
    let mut table = toml::Table::try_from(config).map_err(|error| fail(error.to_string()))?;
    for part in text.split(',').filter(|part| !part.trim().is_empty()) {
        let (key, value) =
            part.split_once('=').ok_or_else(|| fail(format!("cannot read `{part}`; write `growth_interval=200`")))?;
        let (key, value) = (key.trim(), value.trim());
        let parsed = match table.get(key) {
            Some(toml::Value::Float(_)) => number(value).map(toml::Value::from).ok(),
            Some(toml::Value::Integer(_)) => integer(value).map(toml::Value::from).ok(),
            Some(_) => None,
            None => {
                let known: Vec<_> = table.keys().map(|key| format!("`{key}`")).collect();
                let known = known.join(", ");
                return Err(fail(format!("`{key}` is not an option of the scaler; the options are {known}")));
            }
        };
        let parsed = parsed.or_else(|| format!("x = {value}").parse::<toml::Table>().ok()?.remove("x"));
        table.insert(key.to_owned(), parsed.unwrap_or_else(|| value.into()));
    }
    let config: GradScalerConfig = table.try_into().map_err(|error| fail(error.to_string().trim_end().to_owned()))?;
    config.validate()?;
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compare(settings: &[&str], overflows: &GradientTrace) -> ScalerComparison {
        let base = GradScalerConfig { init_scale: 32768.0, growth_interval: 5, ..GradScalerConfig::default() };
        let settings = settings.iter().map(|text| ((*text).to_owned(), apply_setting(base, "", text).unwrap()));
        ScalerComparison::run(settings.collect(), overflows).unwrap()
    }

    /// The example of the mixed-precision chapter: the scale after each of 20 steps.
    #[test]
    fn the_twenty_steps_of_the_chapter() {
        // There is no step 99.
        let comparison = compare(&[""], &GradientTrace::none(20).injected(&[10, 99], 0.0, 0));
        let after: Vec<_> = comparison.trajectories[0].attempts.iter().map(|attempt| attempt.after).collect();
        let expected = [[32768.0; 4].as_slice(), &[65536.0; 5], &[131_072.0], &[65536.0; 5], &[131_072.0; 5]].concat();
        assert_eq!(after, expected);
        insta::assert_snapshot!("scaler_twenty_steps", comparison.page(80).text());
    }

    /// The closed loop's figures, over 100 seeds: an independent simulation with numpy (`tests/python/lab_figures.py`)
    /// has 30.99 overflows at a mean scale of 2^14.47 for an interval of 50, and 16.30 at 2^14.21 for 100.
    #[test]
    fn the_closed_loop_over_a_hundred_seeds() {
        let model = GradientModel::default();
        let base = "init_scale=65536";
        for (interval, overflows, log2) in [(50, 30.99, 14.47), (100, 16.30, 14.21)] {
            let setting = format!("{base},growth_interval={interval}");
            let mut comparison = compare(&[&setting], &model.steps(0, 2000));
            comparison.repeat(100, |seed| model.steps(seed, 2000)).unwrap();
            let (count, scale) = comparison.over_seeds[0];
            assert!((count.mean - overflows).abs() < 2.0 * count.half_width, "{interval}: {count}");
            assert!((scale.mean - log2).abs() < 2.0 * scale.half_width, "{interval}: {scale}");
            assert!(count.half_width < 0.4 && scale.half_width < 0.03, "{interval}: {count}, {scale}");
        }
    }

    /// With random overflows instead of a closed loop, PyTorch's defaults fell to scale 1 and short intervals climbed
    /// to 2^82.
    #[test]
    fn the_scale_stays_near_its_ceiling() {
        for setting in ["init_scale=65536,growth_interval=2000", "init_scale=65536,growth_interval=5"] {
            let comparison = compare(&[setting], &GradientModel::default().steps(3, 20_000));
            let t = &comparison.trajectories[0];
            assert!((12.0..17.0).contains(&t.mean_log2) && t.at_min_scale == 0, "{setting}: {}", t.mean_log2);
            assert!(t.attempts.iter().all(|attempt| attempt.scale < 2f32.powi(20)));
        }
    }

    #[test]
    fn a_step_overflows_if_the_scaled_gradient_does() {
        let model = GradientModel { drift: 3.0, spikes: 0.01, jump_at: Some(700), ..GradientModel::default() };
        let comparison = compare(&["growth_interval=50"], &model.steps(1, 1500));
        let attempts = &comparison.trajectories[0].attempts;
        assert!(attempts.iter().any(|attempt| !attempt.finite));
        for attempt in attempts {
            let scaled = f64::from(attempt.scale) * f64::from(attempt.largest.unwrap());
            assert_eq!(attempt.finite, scaled <= 65504.0 * (1.0 + 1e-6), "{attempt:?}");
        }
    }

    #[test]
    fn four_settings_side_by_side() {
        let settings = ["", "growth_interval=20", "hysteresis=2", "on_overflow=retry"];
        let comparison = compare(&settings, &GradientTrace::none(200).injected(&[], 0.05, 1));
        insta::assert_snapshot!("scaler_four_settings", comparison.page(80).text());
        let [standard, slow, _, retry] = &comparison.trajectories[..] else { panic!("four settings") };
        assert!(slow.growths < standard.growths);
        assert_eq!((retry.lost, retry.repeated), (0, retry.overflows));
        assert_eq!(standard.repeated, 0);
    }

    #[test]
    fn a_replay_depends_on_the_scale() {
        let max = FloatFormat::FP16.max();
        let finite_up_to = |scale: f32, step: StepCondition| {
            assert!(step.is_finite(scale, true, max) && !step.is_finite(2.0 * scale, true, max), "{step:?}");
        };
        finite_up_to(1024.0, StepCondition::of_step(1024.0, 65504.0, true, true));
        finite_up_to(2048.0, StepCondition::of_step(1024.0, 32752.0, true, true));
        finite_up_to(512.0, StepCondition::of_step(1024.0, 1.0, false, true));
        assert_eq!(StepCondition::of_step(1024.0, 1.0, false, false), StepCondition::Broken);
        let visits = vec![StepCondition::Largest(65504.0 / 20000.0); 6];
        let overflows = GradientTrace { first: 1, visits, tokens_per_step: 1024, ..GradientTrace::none(0) };
        let comparison = compare(&["growth_interval=2", "growth_interval=2,on_overflow=retry"], &overflows);
        let scales: Vec<_> = comparison.trajectories[0].attempts.iter().map(|attempt| attempt.scale).collect();
        assert_eq!(scales, [32768.0, 16384.0, 16384.0, 32768.0, 16384.0, 16384.0]);
        assert_eq!(comparison.trajectories[0].lost, 2);
        assert!(comparison.page(80).text().contains("tokens never trained on: 2048, 0"));
    }

    /// Regression: the gradients of a BF16 run were shown as those that would overflow FP16.
    #[test]
    fn gradients_are_those_of_the_run_in_every_format() {
        let visits = vec![StepCondition::of_step(1.0, 0.5, true, true)];
        let overflows = GradientTrace { visits, max: FloatFormat::BF16.max(), ..GradientTrace::none(0) };
        let comparison = compare(&["init_scale=131072"], &overflows);
        let attempt = comparison.trajectories[0].attempts[0];
        assert_eq!((attempt.largest, attempt.finite), (Some(0.5), true));
    }

    /// The gradients fluctuate as in real runs.
    #[test]
    fn the_predictive_rule_overflows_far_less_often_than_the_dynamic_one() {
        let stream = Stream::new(3, Domain::Bench);
        let noise = |step| stream.block(0, step, 0).iter().map(|&word| word as f32 / 2f32.powi(31)).sum::<f32>();
        let visits = (0..4000).map(|step| StepCondition::Largest(65504.0 / 2f32.powf(18.3 - noise(step)))).collect();
        let overflows = GradientTrace { first: 1, visits, ..GradientTrace::none(0) };
        let base = "init_scale=16777216,growth_interval=100";
        let comparison = compare(&[base, &format!("{base},mode=predictive")], &overflows);
        let [trying, measuring] = &comparison.trajectories[..] else { panic!("two settings") };
        assert!(trying.overflows > 30 && measuring.overflows * 8 <= trying.overflows, "{}", comparison.page(80).text());
        assert!(measuring.mean_log2 > trying.mean_log2 - 0.5, "{}", comparison.page(80).text());
        assert!(comparison.page(80).text().contains("overflows"));
    }

    #[test]
    fn a_broken_batch_ends_at_the_floor_even_with_retry() {
        let visits = vec![StepCondition::Broken, StepCondition::Clean];
        let overflows = GradientTrace { visits, ..GradientTrace::none(0) };
        let comparison = compare(&["on_overflow=retry"], &overflows);
        let t = &comparison.trajectories[0];
        assert_eq!((t.overflows, t.lost, t.at_min_scale), (16, 1, 2));
    }

    #[test]
    fn settings_are_read_from_a_flag() {
        let apply = |text| apply_setting(GradScalerConfig::default(), "--base", text);
        let config = apply("growth_factor=4, consecutive_hysteresis=true, enabled=false").unwrap();
        assert!(config.growth_factor == 4.0 && !config.enabled);
        // As in training's settings.
        let config = apply("init_scale=2^24, backoff_factor=1/4, growth_interval=1e3").unwrap();
        assert_eq!((config.init_scale, config.backoff_factor, config.growth_interval), (16_777_216.0, 0.25, 1000));
    }

    #[test]
    fn an_empty_simulation_does_not_panic() {
        assert!(!compare(&["", ""], &GradientTrace::none(0)).page(80).text().is_empty());
        assert!(!compare(&[], &GradientTrace::none(3)).page(10).text().is_empty());
    }
}
