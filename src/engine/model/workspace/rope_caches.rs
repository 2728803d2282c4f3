//! Cosines and sines of the positions of a batch.

use crate::engine::kernels::rope::CosSinCache;
use crate::engine::model::rope::{QueryScale, Rope};
use crate::engine::model::spec::ModelSpec;
use candle_core::{Device, Result, Tensor};
use std::ops::Range;

/// Cosines and sines of rotary position embeddings.
#[derive(Clone, Debug, Default)]
pub(in crate::engine::model) struct RopeCaches {
    pub(super) full: Option<CosSinCache>,
    sliding: Option<CosSinCache>,
    /// The full table times the factors of queries, if the model scales them by their position.
    queries: Option<CosSinCache>,
}

impl RopeCaches {
    /// The tables of `positions` in a sequence of `len` tokens.
    pub(in crate::engine::model) fn new(
        spec: &ModelSpec,
        positions: Range<usize>,
        len: usize,
        device: &Device,
    ) -> Result<Self> {
        let table = |rope: &Rope| {
            let frequencies = rope.frequencies(spec.rotary_dim(), len);
            CosSinCache::new(&frequencies, rope.attention_factor(), positions.clone(), device)
        };
        let sliding = spec.sliding.as_ref().map(|sliding| &sliding.rope);
        let full = spec.rope.as_ref().map(table).transpose()?;
        let scaled = |(table, scale): (&CosSinCache, QueryScale)| -> Result<CosSinCache> {
            let factors: Vec<f32> = positions.clone().map(|position| scale.at(position) as f32).collect();
            let factors = Tensor::from_vec(factors, (positions.len(), 1), device)?;
            Ok(CosSinCache { cos: table.cos.broadcast_mul(&factors)?, sin: table.sin.broadcast_mul(&factors)? })
        };
        let queries = full.as_ref().zip(spec.query_scale).map(scaled).transpose()?;
        Ok(Self { full, sliding: sliding.map(table).transpose()?, queries })
    }

    /// The tables of `positions` alone.
    pub(in crate::engine::model) fn narrow(&self, positions: Range<usize>) -> Result<Self> {
        let rows = |x: &Tensor| x.narrow(0, positions.start, positions.len());
        let narrow =
            |table: &CosSinCache| -> Result<_> { Ok(CosSinCache { cos: rows(&table.cos)?, sin: rows(&table.sin)? }) };
        let [full, sliding, queries] =
            [&self.full, &self.sliding, &self.queries].map(|table| table.as_ref().map(narrow).transpose());
        Ok(Self { full: full?, sliding: sliding?, queries: queries? })
    }

    /// The rows of all `tables`, one after the other.
    pub(in crate::engine::model) fn concat(tables: &[Self]) -> Result<Self> {
        let join = |table: fn(&Self) -> Option<&CosSinCache>| -> Result<Option<CosSinCache>> {
            let (cos, sin): (Vec<_>, Vec<_>) = tables.iter().filter_map(table).map(|it| (&it.cos, &it.sin)).unzip();
            if cos.is_empty() {
                return Ok(None);
            }
            Ok(Some(CosSinCache { cos: Tensor::cat(&cos, 0)?, sin: Tensor::cat(&sin, 0)? }))
        };
        Ok(Self {
            full: join(|tables| tables.full.as_ref())?,
            sliding: join(|tables| tables.sliding.as_ref())?,
            queries: join(|tables| tables.queries.as_ref())?,
        })
    }

    /// The tables of a block's queries and of its keys.
    pub(in crate::engine::model) fn of(&self, spec: &ModelSpec, block: usize) -> Option<[&CosSinCache; 2]> {
        spec.rope_of(block)?;
        let keys = if spec.is_sliding(block) { self.sliding.as_ref() } else { self.full.as_ref() }?;
        Some([self.queries.as_ref().unwrap_or(keys), keys])
    }
}
