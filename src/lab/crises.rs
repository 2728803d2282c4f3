//! The three ways FP16 training fails, each with its cause and remedy: gradients that underflow, gradients that overflow,
//! updates too small for the weight.

use serde::Serialize;

use super::number::{exact, serialize, short};
use crate::Result;
use crate::precision::{FloatFormat, GradScaler, GradScalerConfig};
use crate::ui::{Line, Page, Role};

/// The inputs and outcomes of the three failures.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct FailureDemo {
    /// A small gradient.
    pub small: f64,
    /// A large gradient.
    pub large: f64,
    /// The initial loss scale.
    pub scale: f64,
    /// A weight.
    pub weight: f64,
    /// The update per step, which is subtracted.
    pub update: f64,
    /// Number of steps.
    pub steps: u64,
    /// The results.
    #[serde(flatten)]
    pub outcome: FailureResult,
}

/// The gradients and the weight in FP16, without and with the remedies.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct FailureResult {
    /// The small gradient as FP16 stores it.
    #[serde(serialize_with = "serialize")]
    pub unscaled: f64,
    /// The small gradient after scaling, storage in FP16 and unscaling in FP32.
    #[serde(serialize_with = "serialize")]
    pub rescued: f64,
    /// The scaled large gradient as FP16 stores it.
    #[serde(serialize_with = "serialize")]
    pub scaled: f64,
    /// Steps skipped until the scale fits it.
    pub skipped: u32,
    /// That scale.
    #[serde(serialize_with = "serialize")]
    pub fitting: f64,
    /// The FP16 weight after all steps.
    #[serde(serialize_with = "serialize")]
    pub stuck: f64,
    /// Its FP32 master.
    #[serde(serialize_with = "serialize")]
    pub master: f64,
    /// The FP16 copy of the master.
    #[serde(serialize_with = "serialize")]
    pub working: f64,
}

impl FailureDemo {
    /// Maximum number of steps.
    pub const MAX_STEPS: u64 = 1_000_000;

    /// Applies a loss scale to the gradients `[small, large]`, and updates to a weight.
    pub fn new([small, large]: [f64; 2], scale: f64, [weight, update]: [f64; 2], steps: u64) -> Result<Self> {
        let fp16 = FloatFormat::FP16;
        let config = GradScalerConfig { init_scale: scale as f32, ..GradScalerConfig::default() };
        let mut scaler = GradScaler::new(config)?;
        let stored = fp16.round(small * f64::from(scaler.scale()));
        let rescued = f64::from(stored as f32 * scaler.inverse());
        let scaled = fp16.round(large * f64::from(scaler.scale()));
        let mut skipped = 0;
        while !fp16.round(large * f64::from(scaler.scale())).is_finite() && f64::from(scaler.scale()) > 1.0 {
            scaler.update(false);
            skipped += 1;
        }
        let (mut stuck, mut master) = (fp16.round(weight), weight as f32);
        for _ in 0..steps.min(Self::MAX_STEPS) {
            stuck = fp16.round(stuck - fp16.round(update));
            master -= update as f32;
        }
        let outcome = FailureResult {
            unscaled: fp16.round(small),
            rescued,
            scaled,
            skipped,
            fitting: f64::from(scaler.scale()),
            stuck,
            master: f64::from(master),
            working: fp16.round(f64::from(master)),
        };
        Ok(Self { small, large, scale, weight, update, steps, outcome })
    }

    /// The report as text, `width` columns wide.
    pub fn page(&self, width: usize) -> Page {
        let mut page = Page::new();
        let FailureResult { unscaled, rescued, scaled, skipped, fitting, stuck, master, working } = self.outcome;
        let judged = |good: bool, text: String| {
            if good { (Role::Good, format!("✓ {text}")) } else { (Role::Bad, format!("✕ {text}")) }
        };
        let mut crisis = |title: &str, cause: &str, without: (Role, String), cure: &str, with: (Role, String)| {
            page.title(title);
            for (label, text, (role, result)) in [("cause", cause, without), ("cure", cure, with)] {
                page.wrapped(Role::Text, &format!("  {label}: {text}"), width);
                page.push(Line::new().plain("     ").with(role, result));
            }
            page.gap();
        };
        let error = (rescued / self.small - 1.0).abs();
        crisis(
            "1 Underflow",
            &format!("a gradient of {} is below half of FP16's smallest number, 2^-25", short(self.small)),
            judged(unscaled != 0.0, format!("stored as {}", short(unscaled))),
            &format!("scale the loss by {}, unscale the gradient in FP32", short(self.scale)),
            judged(rescued != 0.0 && rescued.is_finite(), format!("{}, off by {:.2} %", short(rescued), error * 100.0)),
        );
        crisis(
            "2 Overflow",
            &format!("a gradient of {} times the scale {} is beyond 65504", short(self.large), short(self.scale)),
            judged(scaled.is_finite(), format!("stored as {}", short(scaled))),
            "skip the step, which leaves the weight unchanged, and halve the scale",
            judged(
                (self.large * fitting).abs() < 65520.0,
                format!("{skipped} steps skipped, then {} at scale {}", short(self.large * fitting), short(fitting)),
            ),
        );
        let moved = FloatFormat::FP16.round(self.weight) != stuck;
        let half = FloatFormat::FP16.ulp(self.weight) / 4.0;
        crisis(
            "3 Vanishing update",
            &format!(
                "{} updates of {} to a weight of {}; below a power of two FP16 loses updates below {}",
                self.steps,
                short(self.update),
                short(self.weight),
                short(half)
            ),
            judged(moved || self.update == 0.0, format!("the FP16 weight is {}", exact(stuck))),
            "keep a master weight in FP32, and round it to the working copy",
            judged(master != self.weight, format!("master {master:.8}, its FP16 copy {}", exact(working))),
        );
        page
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The figures of `examples/three_crises.rs`, which trains with candle.
    #[test]
    fn the_figures_match_the_example() {
        let crises = FailureDemo::new([1e-8, 3.0], 65536.0, [1.0, 5e-5], 3).unwrap();
        let outcome = crises.outcome;
        assert_eq!((outcome.unscaled, format!("{:.3e}", outcome.rescued)), (0.0, "9.997e-9".to_owned()));
        assert_eq!((outcome.scaled, outcome.skipped, outcome.fitting), (f64::INFINITY, 2, 16384.0));
        assert_eq!((outcome.stuck, format!("{:.8}", outcome.master)), (1.0, "0.99984998".to_owned()));
        insta::assert_snapshot!("crises", crises.page(80).text());
    }

    #[test]
    fn an_invalid_scale_is_rejected() {
        assert!(FailureDemo::new([1e-8, 3.0], -1.0, [1.0, 5e-5], 3).is_err());
        let broken = FailureDemo::new([f64::NAN, f64::INFINITY], 65536.0, [0.0, 0.0], 0).unwrap();
        assert_eq!(broken.outcome.fitting, 1.0);
        assert!(!broken.page(40).text().is_empty());
    }
}
