//! The gradient of each of the model's tensors, now and over time, and their totals by layer.

use crate::precision::PrecisionUnit;
use crate::telemetry::{Fp32Probe, GradStats, GradVariance, Overflow, Series, TensorRecord, UnderflowOnset};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Total number of buckets in all tensors' histories.
const HISTORIES: usize = 1 << 16;

/// The model's tensors in the order that records first named them.
#[derive(Debug, Clone, Default)]
pub struct Tensors {
    /// One for each tensor.
    pub rows: Vec<TensorRow>,
    /// The step of the newest table; 0 before the first.
    pub step: u64,
    /// The loss scale of that step.
    pub loss_scale: f32,
    by_name: HashMap<String, usize>,
    /// The tensors of the newest overflow.
    pub last_overflow: BTreeSet<String>,
    /// The first step in which a tensor's gradient contained FP16's smallest magnitude, 2^-24.
    pub underflow_onsets: BTreeMap<String, u64>,
    /// The variance of each unit's unscaled gradient: the newest, and log2 of all of them.
    pub variances: BTreeMap<PrecisionUnit, (f64, Series)>,
}

/// A tensor's gradient, now and over time.
#[derive(Debug, Clone)]
pub struct TensorRow {
    /// The parameter's name.
    pub name: String,
    /// The newest statistics of its gradient; of no elements before its first table.
    pub stats: GradStats,
    /// Steps in which it overflowed.
    pub overflows: u64,
    /// From the newest probe: elements flushed to zero, and elements that are not zero in FP32.
    pub flushed: Option<(u64, u64)>,
    /// log2 of the smallest and of the largest magnitude.
    pub history: (Series, Series),
}

impl Tensors {
    pub(super) fn update(&mut self, step: u64, s: f64, loss_scale: f32, records: Vec<TensorRecord>) {
        if records.is_empty() {
            return;
        }
        self.step = step;
        self.loss_scale = loss_scale;
        let capacity = (HISTORIES / records.len()).clamp(32, 512);
        for record in records {
            let row = self.row(record.name, capacity);
            if let Some(min) = record.stats.min_abs {
                row.history.0.push(step, s, f64::from(min).log2());
                row.history.1.push(step, s, f64::from(record.stats.max_abs).log2());
            }
            row.stats = record.stats;
        }
    }

    pub(super) fn overflowed(&mut self, overflow: &Overflow) {
        self.last_overflow = overflow.tensors.iter().map(|tensor| tensor.name.clone()).collect();
        for tensor in &overflow.tensors {
            self.row(tensor.name.clone(), 128).overflows += 1;
        }
    }

    pub(super) fn flushed(&mut self, probe: &Fp32Probe) {
        for tensor in &probe.tensors {
            self.row(tensor.name.clone(), 128).flushed = Some((tensor.flushed, tensor.nonzero));
        }
    }

    pub(super) fn record_variances(&mut self, variances: GradVariance, s: f64) {
        let capacity = (HISTORIES / variances.layers.len().max(1)).clamp(32, 512);
        for (layer, variance) in variances.layers {
            // Only a damaged log has a name that is not a layer's.
            let Ok(unit) = layer.parse::<PrecisionUnit>() else { continue };
            let (newest, history) = self.variances.entry(unit).or_insert_with(|| (0.0, Series::new(capacity)));
            *newest = variance;
            if variance > 0.0 {
                history.push(variances.step, s, variance.log2());
            }
        }
    }

    pub(super) fn record_underflow_onset(&mut self, touched: UnderflowOnset) {
        for name in touched.tensors {
            self.underflow_onsets.entry(name).or_insert(touched.step);
        }
    }

    fn row(&mut self, name: String, capacity: usize) -> &mut TensorRow {
        let next = self.rows.len();
        let at = *self.by_name.entry(name.clone()).or_insert(next);
        if at == next {
            let history = (Series::new(capacity), Series::new(capacity));
            self.rows.push(TensorRow { name, stats: GradStats::default(), overflows: 0, flushed: None, history });
        }
        &mut self.rows[at]
    }

    pub(super) fn truncate_after(&mut self, step: u64) {
        for row in &mut self.rows {
            row.history.0.truncate_after(step);
            row.history.1.truncate_after(step);
        }
        self.underflow_onsets.retain(|_, first| *first <= step);
        self.variances.values_mut().for_each(|(_, history)| history.truncate_after(step));
    }

    /// The rows by layer, in order: `wte`, `wpe`, `h.0`, …, `ln_f`; in Llama-like families `embed_tokens`, `h.0`, …,
    /// `norm`.
    pub(super) fn layers(&self) -> Vec<LayerStats> {
        let mut layers: Vec<LayerStats> = Vec::new();
        for row in &self.rows {
            let layer = LayerStats {
                name: layer_name(&row.name),
                min_abs: row.stats.min_abs,
                max_abs: row.stats.max_abs,
                sum_squares: row.stats.norm.powi(2),
                count: row.stats.count,
                overflowed: self.last_overflow.contains(&row.name),
                fallback_dtype: None,
            };
            match layers.iter_mut().find(|known| known.name == layer.name) {
                Some(known) => known.merge(&layer),
                None => layers.push(layer),
            }
        }
        layers.sort_by_key(|layer| layer_order(&layer.name));
        layers
    }
}

/// `h.3` of `h.3.mlp.c_fc.weight` and `layers.3.mlp.up_proj.weight`, `wte` of `wte.weight`.
fn layer_name(tensor: &str) -> String {
    match PrecisionUnit::of(tensor) {
        block @ PrecisionUnit::Block(_) => block.to_string(),
        PrecisionUnit::NonBlock => tensor.split('.').next().unwrap_or_default().to_owned(),
    }
}

/// Sort key: embeddings, blocks by number, then the rest.
pub(super) fn layer_order(layer: &str) -> (u8, u32) {
    match layer.strip_prefix("h.").and_then(|number| number.parse().ok()) {
        Some(number) => (1, number),
        None if layer == "wte" || layer == "embed_tokens" => (0, 0),
        None if layer == "wpe" => (0, 1),
        None => (2, 0),
    }
}

/// The gradients of one layer, or of several adjacent ones.
#[derive(Debug, Clone, Default)]
pub struct LayerStats {
    /// `h.3`, `wte`, or `h.2-3` for merged adjacent layers.
    pub name: String,
    /// Smallest magnitude above zero.
    pub min_abs: Option<f32>,
    /// Largest finite magnitude.
    pub max_abs: f32,
    /// Sum of squares of its elements.
    pub sum_squares: f64,
    /// Elements.
    pub count: u64,
    /// Whether the newest overflow was in this layer.
    pub overflowed: bool,
    /// Its compute dtype, if it differs from the policy's.
    pub fallback_dtype: Option<String>,
}

impl LayerStats {
    /// Merges the next layer into this one.
    pub fn join(&mut self, next: &Self) {
        let first = self.name.split('-').next().unwrap_or_default().to_owned();
        self.name = format!("{first}-{}", next.name.trim_start_matches("h."));
        self.merge(next);
    }

    /// Adds the elements of `other`.
    fn merge(&mut self, other: &Self) {
        self.min_abs = [self.min_abs, other.min_abs].into_iter().flatten().reduce(f32::min);
        self.max_abs = self.max_abs.max(other.max_abs);
        self.sum_squares += other.sum_squares;
        self.count = self.count.saturating_add(other.count);
        self.overflowed |= other.overflowed;
        if self.fallback_dtype.is_none() {
            self.fallback_dtype.clone_from(&other.fallback_dtype);
        }
    }

    /// Root mean square of its elements.
    pub fn rms(&self) -> f64 {
        if self.count == 0 { 0.0 } else { (self.sum_squares / self.count as f64).sqrt() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: all blocks of a Llama were one layer.
    #[test]
    fn every_block_of_every_family_is_a_layer() {
        let names = |tensors: &[&str]| -> Vec<String> {
            let mut found = Tensors::default();
            let record = |name: &&str| TensorRecord { name: (*name).to_owned(), ..TensorRecord::default() };
            found.update(1, 0.0, 1.0, tensors.iter().map(record).collect());
            found.layers().into_iter().map(|layer| layer.name).collect()
        };
        let gpt2 =
            ["ln_f.bias", "h.10.ln_1.weight", "h.2.mlp.c_fc.weight", "h.2.mlp.c_fc.bias", "wpe.weight", "wte.weight"];
        assert_eq!(names(&gpt2), ["wte", "wpe", "h.2", "h.10", "ln_f"]);
        let llama = [
            "norm.weight",
            "layers.10.mlp.up_proj.lora_A.weight",
            "layers.2.input_layernorm.weight",
            "embed_tokens.weight",
        ];
        assert_eq!(names(&llama), ["embed_tokens", "h.2", "h.10", "norm"]);
    }
}
