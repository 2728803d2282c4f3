//! Statistics of a gradient for the scaler, the log and the dashboard in one pass.
//!
//! Values are processed in blocks that stay in the L1 cache: widened to FP32 patterns, reduced, and counted by
//! exponent. The loops are branch-free over fixed lanes, so that they vectorize for the caller's instruction set;
//! everything is `#[inline(always)]` so that a caller can be a `#[target_feature]` function.

#![expect(clippy::inline_always, reason = "a loop only vectorizes for the caller if it is inlined")]

use super::{ExponentHistogram, FloatFormat};
use half::{bf16, f16};

/// Elements per block: 8 kB of FP32 patterns.
const BLOCK: usize = 2048;
/// Independent accumulators of a reduction: two 512-bit vectors.
const LANES: usize = 32;
/// FP32's pattern of infinity.
const INF: u32 = 0x7f80_0000;

/// A storage type that widens exactly to FP32.
pub trait ExactFloat: Copy {
    /// The FP32 pattern of `|self|`, including infinities and NaNs.
    fn magnitude_bits(self) -> u32;
}

impl ExactFloat for f32 {
    #[inline(always)]
    fn magnitude_bits(self) -> u32 {
        self.to_bits() & 0x7fff_ffff
    }
}

impl ExactFloat for bf16 {
    #[inline(always)]
    fn magnitude_bits(self) -> u32 {
        u32::from(self.to_bits() & 0x7fff) << 16
    }
}

impl ExactFloat for f16 {
    /// Branch-free, and without FP32 subnormals, which would be slow.
    #[inline(always)]
    fn magnitude_bits(self) -> u32 {
        // The difference of the exponent biases: 127 - 15.
        const REBIAS: u32 = 112 << 23;
        // 2^-14, FP16's smallest normal value, with its FP32 pattern.
        const MIN_NORMAL: f32 = 1.0 / 16384.0;
        const MIN_NORMAL_BITS: u32 = 113 << 23;
        let magnitude = u32::from(self.to_bits() & 0x7fff);
        let shifted = magnitude << 13;
        // A subnormal is its mantissa times 2^-24: add 2^-14 for the leading one, then subtract it.
        let subnormal = (f32::from_bits(shifted | MIN_NORMAL_BITS) - MIN_NORMAL).to_bits();
        let normal = shifted + REBIAS;
        let top = if magnitude >= 0x7c00 { REBIAS } else { 0 };
        if magnitude < 0x0400 { subnormal } else { normal + top }
    }
}

/// Counts, extreme magnitudes and sum of squares of one or more tensors.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct TensorStats {
    /// Number of values.
    pub count: u64,
    /// Zeros of either sign.
    pub zero: u64,
    /// Non-zero values below the format's smallest normal number, representable or not.
    pub subnormal: u64,
    /// Infinities of either sign.
    pub inf: u64,
    /// NaNs.
    pub nan: u64,
    /// The smallest finite magnitude above zero, if any.
    pub min_nonzero: Option<f32>,
    /// The largest finite magnitude; 0 if there is none.
    pub max_abs: f32,
    /// Sum of the squares of the finite values. Squares are exact, their sum is in f64.
    pub sum_squares: f64,
}

impl TensorStats {
    /// Summarizes `values`; `format`, usually that of the storage, defines which values are subnormal.
    #[inline(always)]
    pub fn of<T: ExactFloat>(values: &[T], format: FloatFormat) -> Self {
        scan(values, format, |_, _, _| {})
    }

    /// Like [`of`](Self::of), and adds the values to `histogram`.
    #[inline(always)]
    pub fn with_histogram<T: ExactFloat>(values: &[T], format: FloatFormat, histogram: &mut ExponentHistogram) -> Self {
        let mut counters = ExponentCounters([0; 256]);
        let stats = scan(
            values,
            format,
            #[inline(always)]
            |block, largest, nonzero| counters.count(block, largest, nonzero),
        );
        counters.add_to(histogram, &stats);
        stats
    }

    /// Adds the statistics of other values. Associative and commutative, except for the f64 rounding of `sum_squares`.
    pub fn merge(&mut self, other: &Self) {
        self.count += other.count;
        self.zero += other.zero;
        self.subnormal += other.subnormal;
        self.inf += other.inf;
        self.nan += other.nan;
        self.min_nonzero = match (self.min_nonzero, other.min_nonzero) {
            (Some(ours), Some(theirs)) => Some(ours.min(theirs)),
            (ours, theirs) => ours.or(theirs),
        };
        self.max_abs = self.max_abs.max(other.max_abs);
        self.sum_squares += other.sum_squares;
    }

    /// Whether all values are finite.
    pub const fn is_finite(&self) -> bool {
        self.inf == 0 && self.nan == 0
    }

    /// The L2 norm of the finite values.
    pub fn norm(&self) -> f64 {
        self.sum_squares.sqrt()
    }
}

/// Calls `visit` with each block of `values` as FP32 magnitudes, with non-finite values replaced by zero, and with the
/// largest of them and the number of those above zero. The last block is padded with zeros.
#[inline(always)]
fn scan<T: ExactFloat>(
    values: &[T],
    format: FloatFormat,
    mut visit: impl FnMut(&[u32; BLOCK], u32, u32),
) -> TensorStats {
    let mut stats = TensorStats { count: values.len() as u64, ..TensorStats::default() };
    let threshold = (format.min_normal() as f32).to_bits();
    let mut reduction = Reduction::new();
    let mut block = [0; BLOCK];
    let mut filled_up = 0;
    for chunk in values.chunks(BLOCK) {
        let mut largest = if let Ok(full) = <&[T; BLOCK]>::try_from(chunk) {
            upcast(full, &mut block)
        } else {
            block.fill(0);
            for (bits, value) in block.iter_mut().zip(chunk) {
                *bits = value.magnitude_bits();
            }
            filled_up = (BLOCK - chunk.len()) as u64;
            block.into_iter().fold(0, u32::max)
        };
        if largest >= INF {
            let (inf, nan) = remove_non_finite(&mut block);
            stats.inf += inf;
            stats.nan += nan;
            largest = block.into_iter().fold(0, u32::max);
        }
        let (zero, below) = reduction.add(&block, largest, threshold);
        stats.zero += zero;
        stats.subnormal += below - zero;
        visit(&block, largest, BLOCK as u32 - zero as u32);
    }
    stats.zero -= filled_up + stats.inf + stats.nan;
    reduction.finish(&mut stats);
    stats
}

/// Fills a block with the values' patterns and returns the largest.
#[inline(always)]
fn upcast<T: ExactFloat>(values: &[T; BLOCK], block: &mut [u32; BLOCK]) -> u32 {
    let mut max = [0; LANES];
    for (lanes, values) in block.as_chunks_mut::<LANES>().0.iter_mut().zip(values.as_chunks::<LANES>().0) {
        for i in 0..LANES {
            lanes[i] = values[i].magnitude_bits();
            max[i] = max[i].max(lanes[i]);
        }
    }
    max.into_iter().fold(0, u32::max)
}

/// Counts infinities and NaNs, and replaces them by zero.
#[cold]
fn remove_non_finite(block: &mut [u32; BLOCK]) -> (u64, u64) {
    let (mut inf, mut nan) = (0, 0);
    for bits in block {
        if *bits >= INF {
            inf += u64::from(*bits == INF);
            nan += u64::from(*bits > INF);
            *bits = 0;
        }
    }
    (inf, nan)
}

/// The largest pattern, and lane by lane the smallest one and the sum of squares, over all blocks.
struct Reduction {
    max: u32,
    /// Minus one, so that zero wraps to the largest.
    min: [u32; LANES],
    sum_squares: [f64; LANES],
}

impl Reduction {
    #[inline(always)]
    fn new() -> Self {
        Self { max: 0, min: [u32::MAX; LANES], sum_squares: [0.0; LANES] }
    }

    /// Adds a block with its largest pattern; returns its number of zeros and of patterns below `threshold`.
    #[inline(always)]
    fn add(&mut self, block: &[u32; BLOCK], largest: u32, threshold: u32) -> (u64, u64) {
        self.max = self.max.max(largest);
        let (mut zero, mut below) = ([0u32; LANES], [0u32; LANES]);
        for lanes in block.as_chunks::<LANES>().0 {
            for i in 0..LANES {
                // Patterns have no sign, so the highest bit of a difference tells which is smaller. Comparisons are
                // slower.
                let less = lanes[i].wrapping_sub(1);
                self.min[i] = self.min[i].min(less);
                zero[i] += less >> 31;
                below[i] += lanes[i].wrapping_sub(threshold) >> 31;
            }
            for (sum, bits) in self.sum_squares.iter_mut().zip(lanes) {
                let x = f64::from(f32::from_bits(*bits));
                *sum += x * x;
            }
        }
        (u64::from(zero.iter().sum::<u32>()), u64::from(below.iter().sum::<u32>()))
    }

    #[inline(always)]
    fn finish(self, stats: &mut TensorStats) {
        let min = self.min.into_iter().fold(u32::MAX, u32::min);
        stats.min_nonzero = (min != u32::MAX).then(|| f32::from_bits(min + 1));
        stats.max_abs = f32::from_bits(self.max);
        stats.sum_squares = self.sum_squares.into_iter().sum();
    }
}

/// Exponent fields that are counted side by side, so that their counters stay in registers.
const FIELDS: usize = 8;
/// Counters of a field, each of one byte: a block adds at most `BLOCK / COUNTERS` to each.
const COUNTERS: usize = 32;

/// Counts by exponent field.
struct ExponentCounters([u64; 256]);

impl ExponentCounters {
    /// Counts the fields of a block's `nonzero` values. Compares all of its values with a few fields at a time, from
    /// the field of the `largest` value down: most blocks need two rounds, and a table's counters would wait for each
    /// other.
    #[inline(always)]
    fn count(&mut self, block: &[u32; BLOCK], largest: u32, nonzero: u32) {
        let mut fields = [0; BLOCK];
        for (field, bits) in fields.iter_mut().zip(block) {
            *field = (bits >> 23) as u8;
        }
        let mut left = nonzero;
        for top in (1..=(largest >> 23) as u8).rev().step_by(FIELDS) {
            if left == 0 {
                return;
            }
            let compared: [u8; FIELDS] = std::array::from_fn(|i| top.wrapping_sub(i as u8));
            let mut counts = [[0u8; COUNTERS]; FIELDS];
            for fields in fields.as_chunks::<COUNTERS>().0 {
                for (counts, field) in counts.iter_mut().zip(compared) {
                    for i in 0..COUNTERS {
                        counts[i] += u8::from(fields[i] == field);
                    }
                }
            }
            for (counts, field) in counts.into_iter().zip(compared) {
                let count: u32 = counts.into_iter().map(u32::from).sum();
                self.0[usize::from(field)] += u64::from(count);
                left = left.saturating_sub(count);
            }
        }
    }

    /// Adds the counts of the fields between the extremes of `stats` to `histogram`. Field 0 contains FP32's
    /// subnormals, the zeros and the values that `scan` replaced by zero; `stats` has the number of the latter two.
    fn add_to(&self, histogram: &mut ExponentHistogram, stats: &TensorStats) {
        let field = |x: f32| (x.to_bits() >> 23) as usize;
        let mut counted = 0;
        for field in field(stats.min_nonzero.unwrap_or(f32::INFINITY)).max(1)..=field(stats.max_abs) {
            histogram.add(field as i32 + ExponentHistogram::LOWEST, self.0[field]);
            counted += self.0[field];
        }
        let tiny = stats.count - counted - stats.zero - stats.inf - stats.nan;
        histogram.add(ExponentHistogram::LOWEST, tiny);
        histogram.zero += stats.zero;
        histogram.inf += stats.inf;
        histogram.nan += stats.nan;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The reference implementation, one value at a time.
    fn reference(values: &[f32], format: FloatFormat) -> (TensorStats, ExponentHistogram) {
        let (mut stats, mut histogram) = (TensorStats::default(), ExponentHistogram::new());
        for x in values.iter().map(|x| x.abs()) {
            stats.count += 1;
            if x.is_nan() {
                stats.nan += 1;
                histogram.nan += 1;
            } else if x.is_infinite() {
                stats.inf += 1;
                histogram.inf += 1;
            } else if x == 0.0 {
                stats.zero += 1;
                histogram.zero += 1;
            } else {
                stats.subnormal += u64::from(f64::from(x) < format.min_normal());
                stats.min_nonzero = Some(stats.min_nonzero.map_or(x, |min| min.min(x)));
                stats.max_abs = stats.max_abs.max(x);
                stats.sum_squares += f64::from(x).powi(2);
                histogram.add(f64::from(x).log2().floor() as i32, 1);
            }
        }
        (stats, histogram)
    }

    fn assert_same(ours: &TensorStats, theirs: &TensorStats) {
        assert!((ours.sum_squares - theirs.sum_squares).abs() <= 1e-13 * theirs.sum_squares, "{ours:?} {theirs:?}");
        assert_eq!(TensorStats { sum_squares: theirs.sum_squares, ..*ours }, *theirs);
    }

    fn check<T: ExactFloat>(values: &[T], to_f32: impl Fn(T) -> f32, format: FloatFormat) {
        let (stats, histogram) = reference(&values.iter().map(|&x| to_f32(x)).collect::<Vec<_>>(), format);
        let mut counted = ExponentHistogram::new();
        assert_same(&TensorStats::with_histogram(values, format, &mut counted), &stats);
        assert_same(&TensorStats::of(values, format), &stats);
        assert_eq!(counted, histogram);
    }

    #[test]
    fn all_half_precision_patterns() {
        let halves: Vec<_> = (0..=u16::MAX).map(f16::from_bits).collect();
        let brains: Vec<_> = (0..=u16::MAX).map(bf16::from_bits).collect();
        for format in FloatFormat::ALL {
            check(&halves, f16::to_f32, format);
            check(&brains, bf16::to_f32, format);
        }
        for x in halves {
            let widened = x.to_f32().to_bits() & 0x7fff_ffff;
            // `half` sets the quiet bit of a NaN.
            assert!(x.magnitude_bits() == widened || x.is_nan() && x.magnitude_bits() > INF, "{:#x}", x.to_bits());
        }
    }

    #[test]
    fn figures_of_a_small_gradient() {
        let tiny = f16::from_bits(1);
        let values = [0.0, -0.0, 2.0, -4.0].map(f16::from_f32).into_iter().chain([tiny, f16::NEG_INFINITY, f16::NAN]);
        let stats = TensorStats::of(&values.collect::<Vec<_>>(), FloatFormat::FP16);
        let expected = TensorStats {
            count: 7,
            zero: 2,
            subnormal: 1,
            inf: 1,
            nan: 1,
            min_nonzero: Some(2f32.powi(-24)),
            max_abs: 4.0,
            sum_squares: 20.0 + 2f64.powi(-48),
        };
        assert_eq!(stats, expected);
        assert!(!stats.is_finite());
    }

    #[test]
    fn nothing_and_only_zeros_and_only_nan() {
        assert_eq!(TensorStats::of::<f32>(&[], FloatFormat::FP32), TensorStats::default());
        let zeros = TensorStats::of(&[0f32; 5], FloatFormat::FP32);
        assert_eq!(zeros, TensorStats { count: 5, zero: 5, ..TensorStats::default() });
        let nans = TensorStats::of(&[f32::NAN; 5], FloatFormat::FP32);
        assert_eq!(nans, TensorStats { count: 5, nan: 5, ..TensorStats::default() });
    }

    #[test]
    fn squares_neither_overflow_nor_vanish() {
        let norm = |x: f32| TensorStats::of(&[x; 4], FloatFormat::FP32).norm();
        assert_eq!(norm(f32::MAX), 2.0 * f64::from(f32::MAX));
        assert_eq!(norm(1e-30), 2.0 * f64::from(1e-30f32));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_f32_slice(bits in proptest::collection::vec(any::<u32>(), 0..5000)) {
            let values: Vec<_> = bits.into_iter().map(f32::from_bits).collect();
            check(&values, |x| x, FloatFormat::FP16);
            check(&values, |x| x, FloatFormat::FP32);
        }

        #[test]
        fn merging_is_associative(bits in proptest::collection::vec(any::<u16>(), 3..3000), cut in any::<[usize; 2]>()) {
            let values: Vec<_> = bits.into_iter().map(f16::from_bits).collect();
            let first = cut[0] % values.len();
            let second = first + cut[1] % (values.len() - first);
            let parts = [&values[..first], &values[first..second], &values[second..]];
            let [a, b, c] = parts.map(|part| TensorStats::of(part, FloatFormat::FP16));
            let (mut left, mut right) = (a, b);
            left.merge(&b);
            left.merge(&c);
            right.merge(&c);
            let mut total = a;
            total.merge(&right);
            assert_same(&left, &total);
            assert_same(&left, &TensorStats::of(&values, FloatFormat::FP16));
        }
    }
}
