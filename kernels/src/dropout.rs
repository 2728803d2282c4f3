//! Dropout masks, recomputed from a counter-based generator wherever they are needed instead of stored.

use crate::random::{Domain, Stream};

/// One dropout layer's mask for one micro-batch.
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    stream: Stream,
    site: u32,
    draw: u64,
    threshold: u32,
    keep_scale: f32,
}

impl Dropout {
    /// The mask of the layer at `site` for micro-batch `draw`: elements are zeroed with probability `rate`, the others
    /// multiplied by `1 / (1 - rate)`. `None` at rate 0.
    pub fn new(rate: f32, seed: u64, site: u32, draw: u64) -> Option<Self> {
        (rate > 0.0).then(|| Self {
            stream: Stream::new(seed, Domain::Dropout),
            site,
            draw,
            threshold: (f64::from(rate) * 4_294_967_296.0) as u32,
            keep_scale: 1.0 / (1.0 - rate),
        })
    }

    /// Draw, key, site, threshold and the scale of kept elements, for the CUDA kernels.
    #[cfg(any(feature = "cuda", test))]
    pub(crate) fn numbers(&self) -> (u64, [u32; 2], u32, u32, f32) {
        (self.draw, self.stream.key(), self.site, self.threshold, self.keep_scale)
    }

    /// Multiplies `values`, the elements starting at index `first`, by the mask.
    #[inline(always)]
    pub fn apply(&self, first: usize, values: &mut [f32]) {
        let mut index = first;
        let mut rest = values;
        while !rest.is_empty() {
            let within = index % 4;
            let (head, tail) = rest.split_at_mut((4 - within).min(rest.len()));
            let draws = self.stream.block(self.site, self.draw, (index / 4) as u32);
            for (value, draw) in head.iter_mut().zip(&draws[within..]) {
                *value *= if *draw < self.threshold { 0.0 } else { self.keep_scale };
            }
            index += head.len();
            rest = tail;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drops_at_its_rate_and_keeps_the_mean() {
        let dropout = Dropout::new(0.3, 1, 2, 3).expect("a rate above 0");
        let mut values = vec![1.0f32; 100_000];
        dropout.apply(0, &mut values);
        let dropped = values.iter().filter(|&&x| x == 0.0).count() as f64 / 1e5;
        let mean = values.iter().map(|&x| f64::from(x)).sum::<f64>() / 1e5;
        assert!((dropped - 0.3).abs() < 0.01 && (mean - 1.0).abs() < 0.01, "{dropped} {mean}");
    }

    #[test]
    fn a_part_has_the_whole_mask() {
        let dropout = Dropout::new(0.5, 1, 2, 3).expect("a rate above 0");
        let mut whole = vec![1.0f32; 97];
        dropout.apply(0, &mut whole);
        for (start, end) in [(0, 1), (1, 9), (9, 50), (50, 97)] {
            let mut part = vec![1.0f32; end - start];
            dropout.apply(start, &mut part);
            assert_eq!(part, whole[start..end]);
        }
    }

    #[test]
    fn rate_zero_is_none() {
        assert!(Dropout::new(0.0, 1, 2, 3).is_none());
    }
}
