//! Histogram of values by binade `[2^e, 2^(e+1))`, which shows what a number format loses.

use super::FloatFormat;
use serde::{Deserialize, Serialize};

/// Counts of a tensor's magnitudes by binade, with separate counts of zeros, infinities and NaNs.
///
/// The binade is the value's, not the stored exponent's: FP16's subnormals count at 2^-24 … 2^-15. Values below 2^-126,
/// which are subnormal even in FP32, share the binade -127.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Sparse", into = "Sparse")]
pub struct ExponentHistogram {
    /// Zeros of either sign.
    pub zero: u64,
    /// Infinities of either sign.
    pub inf: u64,
    /// NaNs.
    pub nan: u64,
    /// Indexed by FP32's exponent field.
    binades: [u64; Self::BINADES],
}

/// How a format represents a histogram's finite non-zero values, as shares of their number.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct RangeShares {
    /// Rounded to zero.
    pub flushed: f64,
    /// Stored as a subnormal, with fewer significant bits.
    pub subnormal: f64,
    /// Stored with full precision.
    pub normal: f64,
    /// Beyond the largest finite value.
    pub overflow: f64,
}

impl ExponentHistogram {
    /// The binade of everything below 2^-126.
    pub const LOWEST: i32 = -127;
    /// The highest binade of FP32 and BF16.
    pub const HIGHEST: i32 = 127;
    const BINADES: usize = 255;

    /// An empty histogram.
    pub const fn new() -> Self {
        Self { zero: 0, inf: 0, nan: 0, binades: [0; Self::BINADES] }
    }

    /// A histogram of (exponent, count) pairs; exponents out of range are clamped.
    pub fn from_counts(counts: impl IntoIterator<Item = (i32, u64)>) -> Self {
        let mut histogram = Self::new();
        for (exponent, count) in counts {
            histogram.add(exponent, count);
        }
        histogram
    }

    /// Adds `count` values to the binade `exponent`, clamped to the range.
    pub fn add(&mut self, exponent: i32, count: u64) {
        let binade = &mut self.binades[(exponent.clamp(Self::LOWEST, Self::HIGHEST) - Self::LOWEST) as usize];
        *binade = binade.saturating_add(count);
    }

    /// Replaces the counts of binades by those of FP32's exponent fields, from the lowest.
    #[cfg(any(test, feature = "cuda"))]
    pub(crate) fn set_binades(&mut self, counts: &[u32]) {
        self.binades.iter_mut().zip(counts).for_each(|(binade, &count)| *binade = u64::from(count));
    }

    /// Adds the counts of another histogram. A damaged log may have any counts.
    pub fn merge(&mut self, other: &Self) {
        let special = [(&mut self.zero, &other.zero), (&mut self.inf, &other.inf), (&mut self.nan, &other.nan)];
        for (ours, theirs) in self.binades.iter_mut().zip(&other.binades).chain(special) {
            *ours = ours.saturating_add(*theirs);
        }
    }

    /// Number of values in the binade `exponent`; 0 out of range.
    pub fn count(&self, exponent: i32) -> u64 {
        usize::try_from(exponent - Self::LOWEST).ok().and_then(|index| self.binades.get(index)).copied().unwrap_or(0)
    }

    /// The non-empty binades in ascending order, with their counts.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (i32, u64)> + '_ {
        let counts = self.binades.iter().copied().enumerate();
        counts.map(|(index, count)| (index as i32 + Self::LOWEST, count)).filter(|(_, count)| *count > 0)
    }

    /// The lowest non-empty binade.
    pub fn lowest(&self) -> Option<i32> {
        self.iter().next().map(|(exponent, _)| exponent)
    }

    /// The highest non-empty binade.
    pub fn highest(&self) -> Option<i32> {
        self.iter().next_back().map(|(exponent, _)| exponent)
    }

    /// Number of finite values other than zero.
    pub fn finite_nonzero(&self) -> u64 {
        self.binades.iter().copied().fold(0, u64::saturating_add)
    }

    /// Number of all values.
    pub fn total(&self) -> u64 {
        [self.zero, self.inf, self.nan].into_iter().fold(self.finite_nonzero(), u64::saturating_add)
    }

    /// log2 of the magnitude that `share` of the finite non-zero values are below, interpolated within a binade; `None`
    /// if there are none.
    pub fn log2_quantile(&self, share: f64) -> Option<f64> {
        let mut left = share * self.finite_nonzero() as f64;
        self.iter().find_map(|(exponent, count)| {
            let position = left;
            let count = count as f64;
            left -= count;
            (position <= count).then(|| f64::from(exponent) + position / count)
        })
    }

    /// How `format` would represent the finite non-zero values times `2^shift`; all zero if there are none.
    ///
    /// Binades count as a whole: one that rounds up to the smallest subnormal counts as subnormal, and the format's
    /// highest one as representable, although FP16 rounds values from 65520 to infinity, and E4M3 those from 464 to
    /// NaN.
    pub fn shares_at(&self, shift: i32, format: FloatFormat) -> RangeShares {
        let (least, normal, top) = (format.min_subnormal_exponent(), format.min_exponent(), format.max_exponent());
        RangeShares {
            flushed: self.share(|e| e + shift < least - 1),
            subnormal: self.share(|e| (least - 1..normal).contains(&(e + shift))),
            normal: self.share(|e| (normal..=top).contains(&(e + shift))),
            overflow: self.share(|e| e + shift > top),
        }
    }

    fn share(&self, belongs: impl Fn(i32) -> bool) -> f64 {
        let all = self.finite_nonzero();
        // A sum of no numbers is -0.
        let part = self.iter().filter(|(exponent, _)| belongs(*exponent)).fold(0.0, |sum, (_, n)| sum + n as f64);
        if all == 0 { 0.0 } else { part / all as f64 }
    }
}

impl Default for ExponentHistogram {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for ExponentHistogram {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { zero, inf, nan, .. } = self;
        write!(f, "ExponentHistogram {{ zero: {zero}, inf: {inf}, nan: {nan}, binades: ")?;
        f.debug_map().entries(self.iter()).finish()?;
        f.write_str(" }")
    }
}

/// The serialized form: the counts from the lowest to the highest non-empty binade.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sparse {
    zero: u64,
    inf: u64,
    nan: u64,
    /// Exponent of the first count; 0 if there is none.
    lowest: i32,
    counts: Vec<u64>,
}

impl From<ExponentHistogram> for Sparse {
    fn from(histogram: ExponentHistogram) -> Self {
        let ExponentHistogram { zero, inf, nan, .. } = histogram;
        let range = histogram.lowest().zip(histogram.highest());
        let counts = range.map_or_else(Vec::new, |(low, high)| (low..=high).map(|e| histogram.count(e)).collect());
        Self { zero, inf, nan, lowest: range.map_or(0, |(low, _)| low), counts }
    }
}

impl TryFrom<Sparse> for ExponentHistogram {
    type Error = String;

    fn try_from(sparse: Sparse) -> Result<Self, String> {
        let Sparse { zero, inf, nan, lowest, counts } = sparse;
        let highest = i64::from(lowest) + counts.len() as i64 - 1;
        if lowest < Self::LOWEST || highest > i64::from(Self::HIGHEST) {
            return Err(format!("binades {lowest} to {highest} are not within {} to {}", Self::LOWEST, Self::HIGHEST));
        }
        Ok(Self { zero, inf, nan, ..Self::from_counts((lowest..).zip(counts)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_sparse_and_round_trips() {
        let mut histogram = ExponentHistogram::from_counts([(-24, 3), (-22, 1)]);
        histogram.zero = 7;
        let json = serde_json::to_string(&histogram).unwrap();
        assert_eq!(json, r#"{"zero":7,"inf":0,"nan":0,"lowest":-24,"counts":[3,0,1]}"#);
        assert_eq!(serde_json::from_str::<ExponentHistogram>(&json).unwrap(), histogram);
        let empty = serde_json::to_string(&ExponentHistogram::new()).unwrap();
        assert_eq!(serde_json::from_str::<ExponentHistogram>(&empty).unwrap(), ExponentHistogram::new());
        for bad in [r#""lowest":-128,"counts":[1]"#, r#""lowest":127,"counts":[1,1]"#] {
            let json = format!(r#"{{"zero":0,"inf":0,"nan":0,{bad}}}"#);
            assert!(serde_json::from_str::<ExponentHistogram>(&json).is_err(), "{json}");
        }
    }

    #[test]
    fn range_and_totals() {
        let histogram = ExponentHistogram::from_counts([(-300, 1), (0, 2), (300, 1)]);
        assert_eq!((histogram.lowest(), histogram.highest()), (Some(-127), Some(127)));
        assert_eq!((histogram.count(0), histogram.count(1), histogram.count(-128), histogram.count(128)), (2, 0, 0, 0));
        assert_eq!(histogram.iter().map(|(_, count)| count).sum::<u64>(), histogram.total());
    }

    /// 1 % of 1,000 values are 10, the first quarter of the binade with 40.
    #[test]
    fn a_quantile_is_a_position_within_a_binade() {
        let histogram = ExponentHistogram::from_counts([(-24, 40), (-20, 960)]);
        assert_eq!([0.01, 0.04, 1.0].map(|share| histogram.log2_quantile(share)), [-23.75, -23.0, -19.0].map(Some));
        assert_eq!(ExponentHistogram::new().log2_quantile(0.01), None);
    }

    /// 2^-26 is flushed, 2^-25 rounds up to the smallest subnormal (except its lower end), 2^16 overflows.
    #[test]
    fn shares_in_fp16_follow_the_shift() {
        let histogram = ExponentHistogram::from_counts([(-26, 1), (-25, 1), (-15, 1), (-14, 1), (15, 1), (16, 3)]);
        let share = |shift| {
            let s = histogram.shares_at(shift, FloatFormat::FP16);
            [s.flushed, s.subnormal, s.normal, s.overflow].map(|share| (share * 8.0) as u32)
        };
        assert_eq!(share(0), [1, 2, 2, 3]);
        assert_eq!(share(1), [0, 2, 2, 4]);
        assert_eq!(share(-1), [2, 2, 4, 0]);
        assert_eq!(format!("{:.2}", histogram.shares_at(-1, FloatFormat::FP16).overflow), "0.00");
    }

    #[test]
    fn merging_adds() {
        let mut a = ExponentHistogram::from_counts([(1, 1), (2, 2)]);
        let mut b = ExponentHistogram::from_counts([(2, 5)]);
        b.inf = 1;
        a.merge(&b);
        assert_eq!(format!("{a:?}"), "ExponentHistogram { zero: 0, inf: 1, nan: 0, binades: {1: 1, 2: 7} }");
    }
}
