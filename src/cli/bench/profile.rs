//! `finetune bench --profile`: the cost of a step by kind of operation.

use super::table::figure;
use crate::Result;
use crate::engine::kernels::columns::{ColumnSlice, MatmulOperand, WriteMode};
use crate::engine::kernels::machine::peak::{measure_read_bandwidth, measure_update_bandwidth};
use crate::engine::kernels::op;
use crate::engine::kernels::profile::{Cost, Profile};
use crate::ui::{Column, Page, plain};
use candle_core::{DType, Device, Tensor};
use serde_json::{Value, json};
use std::time::Duration;

/// The most that the machine reaches.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    /// Floating-point operations per second.
    pub(super) flops: f64,
    /// Bytes per second.
    pub(super) bytes: f64,
}

impl Limits {
    /// The limits of a CPU with this peak in GFLOP/s.
    pub(super) fn of_cpu(gflops: f64) -> Self {
        let bandwidth = measure_read_bandwidth().sustained.max(measure_update_bandwidth().sustained);
        Self { flops: gflops * 1e9, bytes: bandwidth * 1e9 }
    }

    /// The limits of a GPU, from a large product and a large copy.
    pub(super) fn of_gpu(profile: &Profile, dtype: DType, device: &Device) -> Result<Self> {
        const WIDTH: usize = 8192;
        let [x, y] = [1, 2].map(|_| Tensor::zeros((WIDTH, WIDTH), dtype, device));
        let (x, y) = (x?, y?);
        let (x, y) = (&x, &y);
        let mut measured = Vec::new();
        // The first time is a warm-up.
        for _ in 0..2 {
            profile.take()?;
            let [a, b] = [MatmulOperand::plain(ColumnSlice::all(x)?); 2];
            op::Matmul { a, b, alpha: 1.0, c: ColumnSlice::all(y)?, mode: WriteMode::Overwrite }.run(profile)?;
            op::Copy { x, dropout: None, out: y }.run(profile)?;
            measured = profile.take()?.into_values().collect();
        }
        let best = |amount: fn(&Cost) -> f64| {
            measured.iter().map(|cost| amount(cost) / cost.time.as_secs_f64()).fold(0.0, f64::max)
        };
        Ok(Self { flops: best(|cost| cost.flops), bytes: best(|cost| cost.bytes) })
    }
}

/// The costs of one of `steps` steps as JSON, the longest first. Each took `step` on average.
pub(super) fn report<'a>(
    costs: impl IntoIterator<Item = (&'a str, Cost)>,
    steps: usize,
    step: Duration,
    limits: Limits,
) -> Value {
    let per_step = |x: f64| x / steps as f64;
    let mut costs: Vec<(&str, Cost)> = costs.into_iter().collect();
    costs.sort_by_key(|(_, cost)| std::cmp::Reverse(cost.time));
    let line = |(name, cost): (&str, Cost)| {
        let seconds = cost.time.as_secs_f64();
        let share = |amount: f64, limit: fn(Limits) -> f64| amount / seconds / limit(limits);
        json!({
            "operation": name,
            "calls": per_step(cost.calls as f64),
            "ms": per_step(seconds * 1e3),
            "share": per_step(seconds) / step.as_secs_f64(),
            "mb": per_step(cost.bytes / 1e6),
            "gflop": per_step(cost.flops / 1e9),
            "share_of_bandwidth": share(cost.bytes, |limits| limits.bytes),
            "share_of_peak": share(cost.flops, |limits| limits.flops),
        })
    };
    costs.into_iter().map(line).collect()
}

/// The profile in a report of `bench` as a table.
pub(super) fn table(report: &Value) -> String {
    let percent = |share: Option<f64>| share.map_or_else(|| "-".into(), |share| format!("{:.1}%", 100.0 * share));
    let lines = report["profile"].as_array().map_or(&[][..], Vec::as_slice);
    let columns: &[Column<Value>] = &[
        ("operation", -18, &|it| plain(it["operation"].as_str().unwrap_or_default())),
        ("calls", 8, &|it| plain(format!("{:.0}", figure(it, "calls")))),
        ("ms", 11, &|it| plain(format!("{:.3}", figure(it, "ms")))),
        ("share", 8, &|it| plain(percent(it["share"].as_f64()))),
        ("MB", 11, &|it| plain(format!("{:.2}", figure(it, "mb")))),
        ("GFLOP", 11, &|it| plain(format!("{:.3}", figure(it, "gflop")))),
        ("bandwidth", 11, &|it| plain(percent(it["share_of_bandwidth"].as_f64()))),
        ("peak", 8, &|it| plain(percent(it["share_of_peak"].as_f64().filter(|share| *share > 0.0)))),
    ];
    let mut page = Page::new();
    page.table(lines, columns);
    let rest = 1.0 - lines.iter().map(|it| figure(it, "share")).sum::<f64>();
    let step = figure(report, "profiled_step_ms");
    let outside = format!("{:<18} {:>7} {:>10.3} {:>7}", "outside operations", "", rest * step, percent(Some(rest)));
    format!(
        "{}{outside}\n\nMean of the measured steps: {step:.3} ms. MB counts operands, GFLOP products, \
         attention and the gated delta rule.",
        page.text()
    )
}
