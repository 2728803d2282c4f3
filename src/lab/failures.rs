//! The three ways FP16 training fails, each with its cause and remedy: gradients that underflow, activations that
//! overflow, updates too small for the weight.

use super::number::{exact, percent, relative_error, serialize, short};
use crate::Result;
use crate::precision::{FloatFormat, GradScaler, GradScalerConfig};
use crate::ui::{Line, Page, Role};
use serde::Serialize;

/// The inputs and outcomes of the three failures.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct FailureDemo {
    pub(crate) small: f64,
    pub(crate) large: f64,
    pub(crate) scale: f64,
    pub(crate) activation: f64,
    pub(crate) weight: f64,
    /// The update per step, which is subtracted.
    pub(crate) update: f64,
    pub(crate) steps: u64,
    #[serde(flatten)]
    pub(crate) outcome: FailureResult,
}

/// Gradients, activations and a weight in FP16, without and with the remedies.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct FailureResult {
    /// The small gradient as FP16 stores it.
    #[serde(serialize_with = "serialize")]
    pub(crate) unscaled: f64,
    /// The small gradient after scaling, storage in FP16 and unscaling in FP32.
    #[serde(serialize_with = "serialize")]
    pub(crate) rescued: f64,
    /// The scaled large gradient as FP16 stores it.
    #[serde(serialize_with = "serialize")]
    pub(crate) scaled: f64,
    /// Steps skipped until the scale fits it.
    pub(crate) skipped: u32,
    /// That scale.
    #[serde(serialize_with = "serialize")]
    pub(crate) fitting: f64,
    /// The square of the activation in FP16. The score of a query with a key is as large: `HEAD` products of an eighth
    /// of the activation with itself.
    #[serde(serialize_with = "serialize")]
    pub(crate) square: f64,
    /// The activation divided by the root of that square, which is 1 in exact arithmetic.
    #[serde(serialize_with = "serialize")]
    pub(crate) normalized: f64,
    /// Like the case above, with the square computed in FP32 and stored in FP16.
    #[serde(serialize_with = "serialize")]
    pub(crate) normalized_wide: f64,
    /// The score from a sum in FP32, divided by the root of the head's size and stored in FP16.
    #[serde(serialize_with = "serialize")]
    pub(crate) score: f64,
    /// The FP16 weight after all steps.
    #[serde(serialize_with = "serialize")]
    pub(crate) stuck: f64,
    /// Its FP32 master.
    #[serde(serialize_with = "serialize")]
    pub(crate) master: f64,
    /// The FP16 copy of the master.
    #[serde(serialize_with = "serialize")]
    pub(crate) working: f64,
}

/// The size of the attention head.
const HEAD: f64 = 64.0;
/// The relative error up to which a value counts as kept.
const TOLERANCE: f64 = 0.01;

impl FailureDemo {
    pub(crate) const MAX_STEPS: u64 = 1_000_000;

    /// Applies a loss scale to the gradients `[small, large]`, squares an activation, and updates a weight.
    pub(crate) fn new(
        [small, large]: [f64; 2],
        scale: f64,
        activation: f64,
        [weight, update]: [f64; 2],
        steps: u64,
    ) -> Result<Self> {
        let steps = steps.min(Self::MAX_STEPS);
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
        let square = fp16.round(activation * activation);
        let wide = f64::from((activation * activation) as f32);
        let mut stuck = fp16.round(weight);
        let mut master = weight as f32;
        for _ in 0..steps {
            stuck = fp16.round(stuck - fp16.round(update));
            master -= update as f32;
        }
        let outcome = FailureResult {
            unscaled: fp16.round(small),
            rescued,
            scaled,
            skipped,
            fitting: f64::from(scaler.scale()),
            square,
            normalized: fp16.round(activation / square.sqrt()),
            normalized_wide: fp16.round(activation / wide.sqrt()),
            score: fp16.round(wide / HEAD.sqrt()),
            stuck,
            master: f64::from(master),
            working: fp16.round(f64::from(master)),
        };
        Ok(Self { small, large, scale, activation, weight, update, steps, outcome })
    }

    pub(crate) fn page(&self, width: usize) -> Page {
        let mut page = Page::new();
        for (title, lines) in [
            ("1 Underflow of a gradient", &self.underflow()[..]),
            ("2 Overflow of an activation", &self.overflow()[..]),
            ("3 Vanishing update", &self.vanishing()[..]),
        ] {
            page.title(title);
            for (label, text, (good, result)) in lines {
                page.wrapped(Role::Text, &format!("  {label}: {text}"), width);
                let (role, mark) = if *good { (Role::Good, '✓') } else { (Role::Bad, '✕') };
                page.push(Line::new().plain("     ").with(role, format!("{mark} {result}")));
            }
            page.gap();
        }
        page
    }

    /// The price of the loss scale is the overflow of large gradients.
    fn underflow(&self) -> [Finding; 3] {
        let FailureResult { unscaled, rescued, scaled, skipped, fitting, .. } = self.outcome;
        let scale = short(self.scale);
        let normal = FloatFormat::FP16.min_normal();
        let range = match self.small.abs() {
            _ if unscaled == 0.0 && self.small != 0.0 => "at most 2^-25, half of FP16's smallest number",
            magnitude if magnitude < normal && magnitude > 0.0 => "subnormal in FP16, which keeps few of its digits",
            _ if unscaled.is_finite() => "in FP16's normal range",
            _ => "beyond FP16's largest number",
        };
        let product = short(self.large * self.scale);
        let (price, effect) = if scaled.is_finite() {
            let price = format!("a gradient of {} times {scale} is {product}, which FP16 can store", short(self.large));
            (price, judged(scaled / self.scale, self.large))
        } else {
            let price = format!(
                "a gradient of {} times {scale} is {product}, which FP16 stores as {}: skip the step, halve the scale",
                short(self.large),
                short(scaled)
            );
            let fits = FloatFormat::FP16.round(self.large * fitting).is_finite();
            let then = if fits { short(self.large * fitting) } else { "still no finite gradient".to_owned() };
            (price, (fits, format!("{skipped} steps skipped, then {then} at scale {}", short(fitting))))
        };
        [
            ("cause", format!("a gradient of {} is {range}", short(self.small)), judged(unscaled, self.small)),
            ("cure", format!("scale the loss by {scale}, unscale the gradient in FP32"), judged(rescued, self.small)),
            ("price", price, effect),
        ]
    }

    fn overflow(&self) -> [Finding; 2] {
        let FailureResult { square, normalized, normalized_wide, score, .. } = self.outcome;
        let Self { activation, .. } = *self;
        let stored = if square.is_finite() { "which FP16 can store" } else { "beyond 65504" };
        let cause = format!(
            "{} squared in a norm, and the sum of {HEAD} products of {} with itself in a score q·k, are {}, {stored}",
            short(activation),
            short(activation / HEAD.sqrt()),
            short(activation * activation)
        );
        let kept = |norm: f64| (norm.abs() - 1.0).abs() <= TOLERANCE;
        let without = format!("stored as {}; the norm of one value is {}", short(square), short(normalized));
        let cure = "compute norms, softmax, sums and losses in FP32: autocast's FP32 list (see dtypes and softmax)";
        let with = format!("the norm of one value is {}, the scaled score {}", short(normalized_wide), short(score));
        [
            ("cause", cause, (square.is_finite() && kept(normalized), without)),
            ("cure", cure.to_owned(), (kept(normalized_wide) && score.is_finite(), with)),
        ]
    }

    fn vanishing(&self) -> [Finding; 2] {
        let FailureResult { stuck, master, working, .. } = self.outcome;
        let fp16 = FloatFormat::FP16;
        let bits = fp16.encode(self.weight);
        let next = if self.update > 0.0 { fp16.next_down(bits) } else { fp16.next_up(bits) };
        let half = next.map_or(f64::NAN, |next| (fp16.decode(next) - fp16.decode(bits)).abs() / 2.0);
        let way = |from: f64, to: f64| match self.update * self.steps as f64 {
            0.0 => (from == to, "nothing to move".to_owned()),
            distance => {
                let share = (from - to) / distance;
                ((share - 1.0).abs() <= TOLERANCE, format!("{:.1} % of the way", 100.0 * share))
            }
        };
        let (kept, share) = way(fp16.round(self.weight), stuck);
        let (moved, of_master) = way(self.weight, master);
        let cause = format!(
            "{} updates of {} to a weight of {}; FP16 loses updates below {}",
            self.steps,
            short(self.update),
            short(self.weight),
            short(half)
        );
        [
            ("cause", cause, (kept, format!("the FP16 weight is {}: {share}", exact(stuck)))),
            (
                "cure",
                "keep a master weight in FP32, and round it to the working copy".to_owned(),
                (moved, format!("master {master:.8}: {of_master}; its FP16 copy {}", exact(working))),
            ),
        ]
    }
}

/// A label, a sentence, and whether its result is good, with the result.
type Finding = (&'static str, String, (bool, String));

/// A value compared with the exact one: good if it is off by at most [`TOLERANCE`].
fn judged(value: f64, exact: f64) -> (bool, String) {
    let off = relative_error(value, exact);
    let how = if value.is_finite() { format!(", off by {} %", percent(off)) } else { String::new() };
    (off <= TOLERANCE, format!("{}{how}", short(value)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn demo(gradients: [f64; 2], scale: f64, activation: f64, weight: [f64; 2], steps: u64) -> FailureDemo {
        FailureDemo::new(gradients, scale, activation, weight, steps).unwrap()
    }

    /// The figures of `examples/three_crises.rs`, which trains with candle.
    #[test]
    fn the_figures_match_the_example() {
        let outcome = demo([1e-8, 3.0], 65536.0, 300.0, [1.0, 5e-5], 3).outcome;
        assert_eq!((outcome.unscaled, format!("{:.3e}", outcome.rescued)), (0.0, "9.997e-9".to_owned()));
        assert_eq!((outcome.scaled, outcome.skipped, outcome.fitting), (f64::INFINITY, 2, 16384.0));
        assert_eq!((outcome.square, outcome.normalized), (f64::INFINITY, 0.0));
        assert_eq!((outcome.normalized_wide, outcome.score), (1.0, 11248.0));
        assert_eq!((outcome.stuck, format!("{:.8}", outcome.master)), (1.0, "0.99984998".to_owned()));
    }

    /// The marks of the results, in their order: cause, cure and price; cause and cure; cause and cure.
    #[test]
    fn sentences_and_marks_follow_the_numbers() {
        let marks = |demo: &FailureDemo| -> String {
            demo.page(100).text().chars().filter(|c| matches!(c, '✓' | '✕')).collect()
        };
        assert_eq!(marks(&demo([1e-8, 3.0], 65536.0, 300.0, [1.0, 5e-5], 3)), "✕✓✓✕✓✕✓");
        // Nothing fails.
        let calm = demo([0.001, 3.0], 1.0, 200.0, [1.0, 0.0625], 3);
        assert_eq!(marks(&calm), "✓✓✓✓✓✓✓");
        let text = calm.page(200).text();
        assert!(text.contains("is in FP16's normal range") && text.contains("40000, which FP16 can store"), "{text}");
        // A value that is off by half, an update that is rounded up by 63 %, and scales that help nothing.
        let hard = demo([4e-8, 1e30], 1.0, 1e30, [1.0, 3e-4], 1);
        assert_eq!(marks(&hard), "✕✕✕✕✕✕✓");
        assert!(hard.page(200).text().contains("subnormal"), "{}", hard.page(200).text());
        assert_eq!(marks(&demo([1e-14, 3.0], 65536.0, 300.0, [1.0, 5e-5], 20)), "✕✕✓✕✓✕✓");
    }

    #[test]
    fn an_invalid_scale_is_rejected() {
        assert!(FailureDemo::new([1e-8, 3.0], -1.0, 300.0, [1.0, 5e-5], 3).is_err());
        let broken = demo([f64::NAN, f64::INFINITY], 65536.0, f64::NAN, [0.0, 0.0], 0);
        assert_eq!(broken.outcome.fitting, 1.0);
        assert!(!broken.page(40).text().is_empty());
        // Regression: more steps than are computed counted as lost updates of the master.
        let long = demo([1e-8, 3.0], 65536.0, 300.0, [1.0, 2f64.powi(-20)], 4_000_000);
        assert!(long.page(80).text().contains("1000000 updates"), "{}", long.page(80).text());
        assert!(long.page(80).text().contains("100.0 % of the way; its"), "{}", long.page(80).text());
    }
}
