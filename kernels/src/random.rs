//! Counter-based random numbers: Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
//! 2011).
//!
//! A number is a pure function of seed, domain, site, draw and index. There is no state, so threads need no order, a
//! backward pass regenerates its forward pass's dropout mask, and a resumed run continues with the same numbers.

#![expect(clippy::inline_always, reason = "dropout masks are generated inside vectorized loops")]

use rayon::prelude::*;

/// The purpose of a stream; different domains of a seed share no numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Domain {
    /// Initial weights; the site is a hash of the parameter's name.
    Init = 1,
    /// Dropout masks; the site is the place in the model, the draw the micro-batch.
    Dropout = 2,
    /// The order of training windows; the draw is the epoch.
    Shuffle = 3,
    /// Sampling of generated text; the draw is the step.
    Sample = 4,
    /// The built-in corpus.
    Corpus = 5,
    /// Random tokens of a benchmark.
    Bench = 6,
    /// Stochastic rounding; the site is a hash of the parameter's name, the draw the update.
    Rounding = 7,
}

/// One domain's numbers for one seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    key: [u32; 2],
}

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

#[inline(always)]
fn philox([mut a, mut b, mut c, mut d]: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let left = u64::from(MULTIPLIERS[0]) * u64::from(a);
        let right = u64::from(MULTIPLIERS[1]) * u64::from(c);
        a = (right >> 32) as u32 ^ b ^ key[0];
        b = right as u32;
        c = (left >> 32) as u32 ^ d ^ key[1];
        d = left as u32;
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    [a, b, c, d]
}

impl Stream {
    /// The numbers of `domain` under `seed`.
    pub fn new(seed: u64, domain: Domain) -> Self {
        let [a, b, ..] = philox([domain as u32, 0, 0, 0], [seed as u32, (seed >> 32) as u32]);
        Self { key: [a, b] }
    }

    #[cfg(any(feature = "cuda", test))]
    pub(crate) fn key(self) -> [u32; 2] {
        self.key
    }

    /// Four independent uniform 32-bit numbers: those with indices `4 * block ..= 4 * block + 3`.
    #[inline(always)]
    pub fn block(&self, site: u32, draw: u64, block: u32) -> [u32; 4] {
        philox([block, site, draw as u32, (draw >> 32) as u32], self.key)
    }

    /// Fills `out` with the uniform numbers between -1 and 1, starting at the group of four with index `first`.
    pub fn fill_uniform(&self, site: u32, draw: u64, first: u32, out: &mut [f32]) {
        out.par_chunks_mut(4).with_min_len(1 << 12).enumerate().for_each(|(block, out)| {
            for (out, number) in out.iter_mut().zip(self.block(site, draw, first + block as u32)) {
                *out = ((f64::from(number) + 0.5) / f64::from(1u32 << 31) - 1.0) as f32;
            }
        });
    }

    /// Fills `out` with the standard normal numbers, starting at pair `first` (Box and Muller's transform in f64,
    /// rounded once).
    ///
    /// Plain loops over short arrays, which `vectorize` compiles for each instruction set.
    #[inline(always)]
    pub fn fill_normal(&self, site: u32, draw: u64, first: u32, out: &mut [f32]) {
        const PAIRS: usize = 64;
        let (mut radii, mut turns) = ([0.0; PAIRS], [0.0; PAIRS]);
        let mut pairs = [[0.0f32; 2]; PAIRS];
        for (start, out) in (first..).step_by(PAIRS).zip(out.chunks_mut(2 * PAIRS)) {
            for ((block, radius), turn) in (start..).zip(&mut radii).zip(&mut turns) {
                let [a, b, c, d] = self.block(site, draw, block);
                *radius = unit(a, b);
                *turn = unit(c, d);
            }
            for ((pair, radius), turn) in pairs.iter_mut().zip(&radii).zip(&turns) {
                let radius = (-2.0 * ln(*radius)).sqrt();
                let (sin, cos) = sin_cos_of_turns(*turn);
                *pair = [(radius * cos) as f32, (radius * sin) as f32];
            }
            out.copy_from_slice(&pairs.as_flattened()[..out.len()]);
        }
    }
}

/// A number strictly between 0 and 1 from 52 of 64 random bits.
#[inline(always)]
fn unit(high: u32, low: u32) -> f64 {
    let bits = (u64::from(high) << 32 | u64::from(low)) >> 12;
    f64::from_bits(1.0f64.to_bits() | bits) - (1.0 - f64::EPSILON / 2.0)
}

/// The natural logarithm of a normal number, to a few units in the last place: of `m · 2^e` with `m` between √½ and √2,
/// by the series of `2 artanh((m - 1) / (m + 1))`.
#[inline(always)]
fn ln(x: f64) -> f64 {
    const ONE: u64 = 1.0f64.to_bits();
    /// Its last bits are an integer's.
    const INTEGER: f64 = (1u64 << 52) as f64;
    let exponent = (x.to_bits() + (ONE - std::f64::consts::FRAC_1_SQRT_2.to_bits())) >> 52;
    let m = f64::from_bits(x.to_bits() + ONE - (exponent << 52));
    let e = f64::from_bits(INTEGER.to_bits() | exponent) - (INTEGER + 1023.0);
    let s = (m - 1.0) / (m + 1.0);
    let square = s * s;
    let series = (1..=9).rev().fold(0.0, |sum, k| (sum + 1.0 / f64::from(2 * k + 1)) * square);
    e * std::f64::consts::LN_2 + 2.0 * s * (1.0 + series)
}

/// Sine and cosine of `x` turns between 0 and 1, to a few units in the last place: Taylor's series within an eighth of
/// a turn of the nearest quarter.
#[inline(always)]
fn sin_cos_of_turns(x: f64) -> (f64, f64) {
    /// Adding it rounds to an integer, which the last bits of the sum are.
    const ROUND: f64 = 1.5 * (1u64 << 52) as f64;
    let shifted = 4.0 * x + ROUND;
    let quarter = shifted.to_bits();
    let angle = std::f64::consts::FRAC_PI_2 * (4.0 * x - (shifted - ROUND));
    let square = angle * angle;
    let series = |odd: u32| {
        (0..8).rev().fold(1.0, |sum, k| {
            let factors = f64::from((2 * k + 1 + odd) * (2 * k + 2 + odd));
            1.0 - sum * square * (1.0 / factors)
        })
    };
    let sin = angle * series(1);
    let cos = series(0);
    let (a, b) = if quarter & 1 == 0 { (sin, cos) } else { (cos, sin) };
    let sign = |x: f64, quarters: u64| f64::from_bits(x.to_bits() ^ (quarters & 2) << 62);
    (sign(a, quarter), sign(b, quarter.wrapping_add(1)))
}

/// A stable 32-bit hash of a name (FNV-1a), to give each parameter its own site.
pub fn site_of(name: &str) -> u32 {
    name.bytes().fold(0x811C_9DC5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers published with the authors' Random123 library.
    #[test]
    fn philox_known_answers() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn domains_sites_and_draws_are_independent() {
        let stream = Stream::new(7, Domain::Init);
        let first = stream.block(1, 0, 0);
        assert_ne!(first, Stream::new(7, Domain::Dropout).block(1, 0, 0));
        assert_ne!(first, Stream::new(8, Domain::Init).block(1, 0, 0));
        assert_ne!(first, stream.block(2, 0, 0));
        assert_ne!(first, stream.block(1, 1, 0));
    }

    #[test]
    fn normal_numbers_have_their_moments() {
        let mut values = vec![0.0; 100_001];
        Stream::new(1, Domain::Init).fill_normal(3, 0, 0, &mut values);
        let n = values.len() as f64;
        let mean = values.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
        let moment = |k| values.iter().map(|&x| (f64::from(x) - mean).powi(k)).sum::<f64>() / n;
        assert!(mean.abs() < 0.01, "{mean}");
        assert!((moment(2) - 1.0).abs() < 0.02, "{}", moment(2));
        assert!((moment(4) - 3.0).abs() < 0.15, "{}", moment(4));
    }

    #[test]
    fn normal_numbers_are_those_of_the_library_functions() {
        let stream = Stream::new(1, Domain::Init);
        let mut values = vec![0.0; 20_000];
        stream.fill_normal(3, 0, 0, &mut values);
        for (block, pair) in (0..).zip(values.as_chunks::<2>().0) {
            let [a, b, c, d] = stream.block(3, 0, block);
            let radius = (-2.0 * unit(a, b).ln()).sqrt();
            let angle = std::f64::consts::TAU * unit(c, d);
            for (value, exact) in pair.iter().zip([radius * angle.cos(), radius * angle.sin()]) {
                let ulp = f64::from(f32::EPSILON) * exact.abs();
                assert!((f64::from(*value) - exact).abs() <= 0.5001 * ulp + 1e-15, "{value} for {exact}");
            }
        }
        let mut later = vec![0.0; 201];
        stream.fill_normal(3, 0, 100, &mut later);
        assert_eq!(later, values[200..401]);
    }

    #[test]
    fn logarithm_and_circle_at_their_ends() {
        let least = unit(0, 0);
        assert!(least > 0.0 && unit(u32::MAX, u32::MAX) < 1.0);
        for x in [least, 0.1, 0.5, 0.707, 0.708, 1.0 - f64::EPSILON, unit(u32::MAX, u32::MAX)] {
            assert!((ln(x) - x.ln()).abs() <= 1e-15 * x.ln().abs(), "{x}");
        }
        for eighths in 0..=8 {
            let x = f64::from(eighths) / 8.0;
            let (sin, cos) = sin_cos_of_turns(x);
            let angle = std::f64::consts::TAU * x;
            assert!((sin - angle.sin()).abs() < 1e-15 && (cos - angle.cos()).abs() < 1e-15, "{x}");
        }
    }
}
