//! Counts of the updates that a 16-bit copy of FP32 weights shows.

use super::FloatFormat;
use serde::{Deserialize, Serialize};
use std::ops::AddAssign;

/// The elements of an update of FP32 weights, by its effect on their copies in a narrower format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct UpdateCounts {
    /// Elements.
    pub elements: u64,
    /// Elements whose FP32 value changed.
    pub moved: u64,
    /// Elements whose FP32 value changed and whose copy kept its bits.
    pub lost: u64,
    /// Sum of the distances of FP32 values from their copies, in 2^-16 units in the last place (ULP) of the copy.
    pub distance: u64,
}

/// Units of [`UpdateCounts::distance`] per ULP.
const ULP: f32 = 65536.0;
/// Elements whose distances, of one ULP each, fit 32 bits.
const BLOCK: usize = 1 << 15;

impl UpdateCounts {
    /// Counts elements, given `values` before and after the update, and their copies in `format` before and after it. A
    /// copy that is not finite is one ULP away.
    #[inline(always)]
    pub fn count(&mut self, format: FloatFormat, values: [&[f32]; 2], copies: [&[f32]; 2]) {
        let [least, offset] = Self::ulp_fields(format);
        self.elements += values[1].len() as u64;
        let [old, new, before, after] = [values[0], values[1], copies[0], copies[1]].map(|x| x.chunks(BLOCK));
        for (((old, new), before), after) in old.zip(new).zip(before).zip(after) {
            let (mut moved, mut lost, mut distance) = (0u32, 0u32, 0u32);
            for (((old, new), before), after) in old.iter().zip(new).zip(before).zip(after) {
                let changed = u32::from(old.to_bits() != new.to_bits());
                moved += changed;
                lost += changed & u32::from(before.to_bits() == after.to_bits());
                // A power of two, so the product is exact.
                let field = (after.to_bits() >> 23 & 0xff).max(least);
                let inverse_ulp = f32::from_bits((offset - field) << 23);
                let scaled = ((new - after).abs() * inverse_ulp * ULP).min(ULP);
                // Adding 2^23 leaves the nearest integer in the mantissa.
                distance += (scaled + 8_388_608.0).to_bits() & 0x7f_ffff;
            }
            self.moved += u64::from(moved);
            self.lost += u64::from(lost);
            self.distance += u64::from(distance);
        }
    }

    /// The smallest exponent field of an FP32 number whose ULP in `format` is computed, and the sum of the field and
    /// that of one over the ULP. Narrower BF16 numbers count as if they were 2^-119.
    pub fn ulp_fields(format: FloatFormat) -> [u32; 2] {
        let least = (127 + format.min_exponent()).max(8) as u32;
        [least, 254 + format.mantissa_bits]
    }

    /// The share of the changed elements whose copy changed; `None` if no element changed. A damaged log may have any
    /// counts.
    pub fn reach(&self) -> Option<f64> {
        (self.moved > 0).then(|| self.moved.saturating_sub(self.lost) as f64 / self.moved as f64)
    }

    /// The mean distance of an element from its copy in ULPs of the copy; `None` without elements.
    pub fn mean_ulps(&self) -> Option<f64> {
        (self.elements > 0).then(|| self.distance as f64 / f64::from(ULP) / self.elements as f64)
    }
}

impl AddAssign for UpdateCounts {
    fn add_assign(&mut self, other: Self) {
        self.elements += other.elements;
        self.moved += other.moved;
        self.lost += other.lost;
        self.distance += other.distance;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every binade of FP16 and the normal ones of BF16, against the formats' definitions.
    #[test]
    fn distances_are_those_of_the_format() {
        for (format, exponents) in [(FloatFormat::FP16, -26..16), (FloatFormat::BF16, -110..127)] {
            for exponent in exponents {
                let old = 1.3f32 * 2f32.powi(exponent);
                let new = old * 1.0002;
                let [before, after] = [old, new].map(|x| format.round(x.into()) as f32);
                let mut counts = UpdateCounts::default();
                counts.count(format, [&[old, old], &[new, old]], [&[before, before], &[after, before]]);
                let ulps = |x: f32, copy: f32| (f64::from(x) - f64::from(copy)).abs() / format.ulp(f64::from(copy));
                let expected = [ulps(new, after), ulps(old, before)].map(|x| (x * 65536.0).round_ties_even() as u64);
                let lost = u64::from(before == after);
                assert_eq!(counts, UpdateCounts { elements: 2, moved: 1, lost, distance: expected.iter().sum() });
            }
        }
    }

    #[test]
    fn a_copy_that_overflows_is_one_ulp_away() {
        let mut counts = UpdateCounts::default();
        counts.count(FloatFormat::FP16, [&[65504.0], &[65536.0]], [&[65504.0], &[f32::INFINITY]]);
        assert_eq!(counts, UpdateCounts { elements: 1, moved: 1, lost: 0, distance: 65536 });
        assert_eq!((counts.reach(), counts.mean_ulps()), (Some(1.0), Some(1.0)));
        assert_eq!(UpdateCounts::default().reach(), None);
        assert_eq!(UpdateCounts { moved: 1, lost: 2, ..counts }.reach(), Some(0.0));
    }
}
