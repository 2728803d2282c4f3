//! A random permutation of `0..n` that needs no memory: any element can be asked for at any time.
//!
//! A Feistel network permutes the next even power of two; values outside `0..n` are permuted again until they fall
//! inside (cycle walking), on average fewer than four times. A shuffled epoch is then a function of (seed, epoch),
//! and the position in it is the only state in a checkpoint.

/// Rounds of the Feistel network; four make the permutation statistically indistinguishable from random.
const ROUNDS: u64 = 4;

/// A pseudo-random permutation of `0..len`, chosen by a key.
#[derive(Clone, Copy, Debug)]
pub struct Permutation {
    len: u64,
    /// Bits in each half of the network.
    half_bits: u32,
    key: u64,
}

impl Permutation {
    /// The permutation of `0..len` for `seed` and `epoch`. `len` must not exceed 2^62.
    pub fn new(len: u64, seed: u64, epoch: u64) -> Self {
        debug_assert!(len <= 1 << 62, "the network is at most 62 bits wide");
        let bits = u64::BITS - len.saturating_sub(1).leading_zeros();
        Self { len, half_bits: bits.div_ceil(2).max(1), key: mix(mix(seed) ^ epoch) }
    }

    /// The image of `index`, which must be below `len`.
    pub fn at(&self, index: u64) -> u64 {
        debug_assert!(index < self.len, "index {index} of a permutation of {}", self.len);
        let mut value = self.network(index);
        while value >= self.len {
            value = self.network(value);
        }
        value
    }

    fn network(&self, value: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let mut left = value >> self.half_bits;
        let mut right = value & mask;
        for round in 0..ROUNDS {
            (left, right) = (right, left ^ (mix(self.key ^ (round << 62) ^ right) & mask));
        }
        left << self.half_bits | right
    }
}

/// The finalizer of `SplitMix64` (Steele, Lea and Flood, 2014) after one step of its sequence: a bijection of 64 bits
/// whose every output bit depends on every input bit.
pub(crate) fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_index_appears_exactly_once(len in 1u64..3000, seed: u64, epoch in 0u64..1000) {
            let permutation = Permutation::new(len, seed, epoch);
            let mut seen = vec![false; len as usize];
            for index in 0..len {
                let image = permutation.at(index) as usize;
                prop_assert!(!std::mem::replace(&mut seen[image], true), "{image} appears twice");
            }
        }
    }

    #[test]
    fn epochs_and_seeds_give_different_orders() {
        let order = |seed, epoch| (0..100).map(|i| Permutation::new(100, seed, epoch).at(i)).collect::<Vec<_>>();
        assert_ne!(order(1, 0), order(1, 1));
        assert_ne!(order(1, 0), order(2, 0));
        assert_eq!(order(1, 0), order(1, 0));
    }

    /// Over many keys, each index is mapped to each position equally often: chi-squared with 63 degrees of freedom.
    #[test]
    fn images_are_uniform_over_keys() {
        let (len, keys) = (64u64, 16_384u64);
        for index in [0, 1, 37, 63] {
            let mut counts = vec![0f64; len as usize];
            for epoch in 0..keys {
                counts[Permutation::new(len, 7, epoch).at(index) as usize] += 1.0;
            }
            let expected = keys as f64 / len as f64;
            let chi2: f64 = counts.iter().map(|c| (c - expected).powi(2) / expected).sum();
            assert!(chi2 < 120.0, "index {index}: chi-squared {chi2} (99.998 % quantile is about 116)");
        }
    }
}
