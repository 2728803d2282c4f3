//! The compared figures, each with its JSON key, name and format, in one table for text, JSON and HTML.

use super::run::RunMetrics;
use super::statistics::Estimate;
use crate::telemetry::ObjectiveMetric;
use crate::ui::format;

#[derive(Debug)]
pub(crate) struct Metric {
    /// Its key in JSON.
    pub(crate) key: &'static str,
    pub(crate) name: &'static str,
    pub(crate) of: fn(&RunMetrics) -> Option<f64>,
    unit: MetricUnit,
}

/// The unit of a figure, which determines its format.
#[derive(Debug, Clone, Copy)]
enum MetricUnit {
    /// Nats or a reward, with four decimals.
    Nats,
    /// A perplexity, with three decimals.
    Perplexity,
    /// log2 of a loss scale.
    Log2,
    Count,
    Share,
    Rate,
    Seconds,
    Bytes,
}

const fn metric(key: &'static str, name: &'static str, unit: MetricUnit, of: fn(&RunMetrics) -> Option<f64>) -> Metric {
    Metric { key, name, of, unit }
}

fn log2(scale: f32) -> f64 {
    f64::from(scale).log2()
}

/// Every figure, in display order.
pub(crate) const METRICS: &[Metric] = &[
    metric("steps", "steps", MetricUnit::Count, |f| Some(f.steps as f64)),
    metric("updates", "updates", MetricUnit::Count, |f| Some(f.updates as f64)),
    metric("loss", "loss, last 10 steps", MetricUnit::Nats, |f| f.loss),
    metric("best_loss", "loss, best 10 steps", MetricUnit::Nats, |f| f.best_loss),
    metric("validation_loss", "validation loss", MetricUnit::Nats, |f| Some(f.validation?.0)),
    metric("best_validation_loss", "validation loss, best", MetricUnit::Nats, |f| Some(f.validation?.1)),
    metric("perplexity", "perplexity", MetricUnit::Perplexity, |f| Some(f.perplexity?.0)),
    metric("best_perplexity", "perplexity, best", MetricUnit::Perplexity, |f| Some(f.perplexity?.1)),
    metric("reward_margin", "reward margin", MetricUnit::Nats, |f| f.objective?.get(ObjectiveMetric::RewardsMargins)),
    metric("reward_accuracy", "reward accuracy", MetricUnit::Share, |f| {
        f.objective?.get(ObjectiveMetric::RewardsAccuracies)
    }),
    metric("reward", "reward", MetricUnit::Nats, |f| f.objective?.get(ObjectiveMetric::Reward)),
    metric("scale_start_log2", "loss scale at start", MetricUnit::Log2, |f| Some(log2(f.scale?.0))),
    metric("scale_end_log2", "loss scale at end", MetricUnit::Log2, |f| Some(log2(f.scale?.1))),
    metric("scale_min_log2", "loss scale, lowest", MetricUnit::Log2, |f| Some(log2(f.scale_range?.0))),
    metric("scale_max_log2", "loss scale, highest", MetricUnit::Log2, |f| Some(log2(f.scale_range?.1))),
    metric("growths", "growths", MetricUnit::Count, |f| Some(f.growths as f64)),
    metric("overflows", "overflows", MetricUnit::Count, |f| Some(f.overflows as f64)),
    metric("skipped", "skipped steps", MetricUnit::Count, |f| Some(f.skipped as f64)),
    metric("longest_streak", "skipped in a row", MetricUnit::Count, |f| Some(f.longest_streak as f64)),
    metric("in_fallback", "layers in fallback", MetricUnit::Count, |f| f.in_fallback.map(|layers| layers as f64)),
    metric("repeated", "repeated steps", MetricUnit::Count, |f| Some(f.repeated as f64)),
    metric("tokens_lost", "tokens lost", MetricUnit::Count, |f| Some(f.tokens_lost as f64)),
    metric("flushed", "flushed to zero", MetricUnit::Share, |f| f.flushed),
    metric("subnormal", "subnormal gradients", MetricUnit::Share, |f| f.subnormal),
    metric("tokens_per_s", "tokens/s", MetricUnit::Rate, |f| f.tokens_per_s),
    metric("seconds", "time", MetricUnit::Seconds, |f| Some(f.seconds)),
    metric("peak_rss_bytes", "peak memory", MetricUnit::Bytes, |f| f.peak_rss.map(|bytes| bytes as f64)),
];

/// The text for a missing figure.
pub(super) const NONE: &str = "–";

impl Metric {
    pub(super) fn named(key: &str) -> Option<&'static Self> {
        METRICS.iter().find(|metric| metric.key == key)
    }

    /// Whether it is a loss or a perplexity, which only the same data makes comparable.
    pub(crate) fn depends_on_data(&self) -> bool {
        matches!(self.unit, MetricUnit::Nats | MetricUnit::Perplexity)
    }

    /// Whether it varies between runs with the same numbers.
    pub(crate) fn is_of_machine(&self) -> bool {
        matches!(self.unit, MetricUnit::Rate | MetricUnit::Seconds | MetricUnit::Bytes)
    }

    /// A run's figure as text.
    pub(crate) fn show(&self, value: Option<f64>) -> String {
        let Some(value) = value else { return NONE.into() };
        if !value.is_finite() {
            return format::short(value);
        }
        match self.unit {
            MetricUnit::Nats => format::decimals(value, 4),
            MetricUnit::Perplexity if value.abs() >= 1e5 => format::short(value),
            MetricUnit::Perplexity => format!("{value:.3}"),
            MetricUnit::Log2 => format!("2^{}", rounded(value, 2)),
            MetricUnit::Count => rounded(value, 1),
            MetricUnit::Share => format!("{} %", significant(value * 100.0)),
            MetricUnit::Rate => format!("{value:.0}"),
            MetricUnit::Seconds => format!("{value:.1} s"),
            MetricUnit::Bytes => format::bytes(value.max(0.0) as u64),
        }
    }

    /// A mean or a difference with its interval as text.
    pub(crate) fn show_estimate(&self, estimate: Option<Estimate>, difference: bool) -> String {
        let Some(Estimate { mean, half }) = estimate else { return NONE.into() };
        let plus = if difference && mean > 0.0 { "+" } else { "" };
        let figure = |value: f64| match self.unit {
            // A difference of logarithms is not a scale, and one of bytes may be negative.
            MetricUnit::Log2 if difference => format!("{} binades", rounded(value, 2)),
            MetricUnit::Bytes if difference && value < 0.0 => format!("-{}", format::bytes(-value as u64)),
            _ => self.show(Some(value)),
        };
        let spread = |half: f64| match self.unit {
            MetricUnit::Log2 => rounded(half, 2),
            _ => self.show(Some(half)),
        };
        match half {
            Some(half) => format!("{plus}{} ±{}", figure(mean), spread(half)),
            None => format!("{plus}{}", figure(mean)),
        }
    }
}

/// Formats with at most `decimals` decimals.
fn rounded(value: f64, decimals: usize) -> String {
    format::trimmed(&format::decimals(value, decimals)).to_owned()
}

/// Three significant digits of a percentage, which may be tiny.
fn significant(percent: f64) -> String {
    match percent.abs() {
        0.0 => "0".into(),
        magnitude if magnitude < 1e-3 => format!("{percent:.1e}"),
        magnitude => format!("{percent:.*}", (2 - magnitude.log10().floor() as i32).clamp(0, 5) as usize),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_as_text() {
        let show = |key: &str, value| Metric::named(key).unwrap().show(value);
        assert_eq!(show("loss", Some(1.234_56)), "1.2346");
        assert_eq!(show("loss", Some(f64::NAN)), "NaN");
        assert_eq!(show("perplexity", Some(f64::INFINITY)), "inf");
        assert_eq!(show("perplexity", Some(3.4e9)), "3.4e9");
        assert_eq!(show("scale_end_log2", Some(16.0)), "2^16");
        assert_eq!(show("skipped", Some(100.0)), "100");
        assert_eq!(show("flushed", Some(0.001_234)), "0.123 %");
        assert_eq!(show("flushed", Some(1e-8)), "1.0e-6 %");
        assert_eq!(show("flushed", None), NONE);
    }

    #[test]
    fn estimates_as_text() {
        let show = |key: &str, mean, half, difference| {
            Metric::named(key).unwrap().show_estimate(Some(Estimate { mean, half }), difference)
        };
        assert_eq!(show("perplexity", 1.8312, Some(0.0123), false), "1.831 ±0.012");
        assert_eq!(show("perplexity", 0.0312, Some(0.0123), true), "+0.031 ±0.012");
        assert_eq!(show("skipped", 2.0 / 3.0, None, false), "0.7");
        assert_eq!(show("scale_end_log2", 15.5, Some(0.25), false), "2^15.5 ±0.25");
        assert_eq!(show("scale_end_log2", -0.5, None, true), "-0.5 binades");
        assert_eq!(show("peak_rss_bytes", -1_048_576.0, None, true), "-1.0 MB");
    }

    #[test]
    fn keys_are_unique() {
        for (i, metric) in METRICS.iter().enumerate() {
            assert!(METRICS[..i].iter().all(|other| other.key != metric.key), "{}", metric.key);
        }
    }
}
