//! `finetune bench --latency`: how long one answer takes, and how long in the worst cases.

use super::{BenchArgs, round};
use crate::Result;
use crate::cli::model::print_notice;
use crate::engine::kernels::isa::Isa;
use crate::engine::kernels::machine::peak::measure_read_bandwidth;
use crate::engine::kernels::view::to_host;
use crate::engine::model::{Decoder, ForwardMode, InputIds, KvCache, ModelSpec, ModuleOp, Parameters, Workspace};
use crate::engine::optim::MasterWeights;
use crate::random::{Domain, Stream};
use crate::telemetry::ProcessStats;
use crate::train::Config;
use candle_core::{DType, Tensor};
use serde_json::json;
use std::time::Instant;

/// Passes before those that are measured.
const WARM_UP: usize = 3;

/// Measures `count` forward passes over one sequence, with the logits of all its places, and `count` times the next
/// token after it from the KV cache.
pub(super) fn measure(args: &BenchArgs, config: &Config, count: usize) -> Result<serde_json::Value> {
    let spec = args.spec()?;
    let seq_len = args.seq_len;
    let policy = config.dtype;
    let open = config.device_spec()?.open(policy, config.kernels, &mut |notice| print_notice(&notice))?;
    let masters = Parameters::random(&spec.parameters(), config.seed, &open.device)?;
    let (masters, weights) = MasterWeights::new(masters, policy, &*open.kernels)?;
    drop(masters);
    let model = Decoder::new(&spec, &weights, open.kernels.clone())?;
    let stream = Stream::new(config.seed, Domain::Bench);
    let ids: Vec<u32> = (0..seq_len as u32).map(|at| stream.block(0, 0, at)[0] % spec.vocab_size as u32).collect();

    let mut workspace = Workspace::for_evaluation(&spec, policy, (1, seq_len), &open.device)?;
    let forward = timed(count, || {
        model.forward(&weights, InputIds::new(&ids, seq_len), ForwardMode::Eval, &mut workspace, &mut ())?;
        synchronize(&model.logits(&weights, workspace.hidden())?)
    })?;
    let mut cache = KvCache::new(&spec, policy, seq_len, &open.device)?;
    let past = seq_len - 1;
    if past > 0 {
        model.decode(&weights, &ids[..past], &mut cache)?;
    }
    let mut next_token = || {
        cache.truncate(past);
        let hidden = model.decode(&weights, &ids[past..], &mut cache)?;
        synchronize(&model.logits(&weights, hidden)?)
    };
    let token = weights.with_packed(|| timed(count, &mut next_token))?;
    // A token reads every weight once and computes little, so memory bandwidth limits its speed.
    let bytes = bytes_read_per_token(&spec, &weights, past);
    let bandwidth = open.device.is_cpu().then(measure_read_bandwidth);
    let token = percentiles(token);
    let rate = token["p50"].as_f64().map(|ms| bytes as f64 / ms / 1e6);
    Ok(json!({
        "who": "finetune",
        "version": env!("CARGO_PKG_VERSION"),
        "model": args.model,
        "layers": spec.num_layers,
        "dtype": policy.to_string(),
        "seq": seq_len,
        "device": open.name,
        "kernels": model.kernels().name(),
        "threads": rayon::current_num_threads(),
        "isa": Isa::current().to_string(),
        "passes": count,
        "forward_ms": percentiles(forward),
        "token_ms": token,
        "token_bytes": bytes,
        "token_gb_per_s": rate.map(round),
        "memory_gb_per_s": bandwidth.map(|peak| round(peak.sustained)),
        "share_of_bandwidth": rate.zip(bandwidth).map(|(rate, peak)| round(rate / peak.sustained)),
        "peak_rss_mib": ProcessStats::now().peak_rss_bytes.map(|bytes| bytes >> 20),
    }))
}

/// Bytes read for a token after `past` others: the KV cache, and the weights except tables that are read by rows.
fn bytes_read_per_token(spec: &ModelSpec, weights: &Parameters, past: usize) -> u64 {
    let is_read = |op: ModuleOp| match op {
        ModuleOp::Embedding => spec.tie_word_embeddings,
        op => op != ModuleOp::Positions,
    };
    let read = weights.layout().iter().zip(weights.tensors()).filter(|(entry, _)| is_read(entry.layer.op));
    let stored: usize = read.map(|(_, tensor)| tensor.elem_count() * tensor.dtype().size_in_bytes()).sum();
    let size = weights.tensors().first().map_or(0, |tensor| tensor.dtype().size_in_bytes());
    let attended = |block: usize| match &spec.sliding {
        Some(sliding) if spec.is_sliding(block) => past.min(sliding.window),
        _ => past,
    };
    let rows: usize = (0..spec.num_layers).filter(|block| spec.recurrence(*block).is_none()).map(attended).sum();
    (stored + 2 * rows * spec.kv_heads * spec.head_dim * size) as u64
}

/// Waits for the logits: a device computes asynchronously.
fn synchronize(logits: &Tensor) -> Result<()> {
    if !logits.device().is_cpu() {
        let last = logits.narrow(0, logits.dim(0)? - 1, 1)?;
        to_host(&last.to_dtype(DType::F32)?)?;
    }
    Ok(())
}

/// Milliseconds of each of `count` calls.
fn timed(count: usize, mut pass: impl FnMut() -> Result<()>) -> Result<Vec<f64>> {
    (0..WARM_UP).try_for_each(|_| pass())?;
    (0..count)
        .map(|_| {
            let clock = Instant::now();
            pass()?;
            Ok(clock.elapsed().as_secs_f64() * 1e3)
        })
        .collect()
}

/// The time within which half, 95 % and 99 % of the passes were done.
fn percentiles(mut times: Vec<f64>) -> serde_json::Value {
    times.sort_unstable_by(f64::total_cmp);
    let within = |percent: usize| {
        let rank = (times.len() * percent).div_ceil(100).max(1);
        (times[rank - 1] * 1e4).round() / 1e4
    };
    json!({ "p50": within(50), "p95": within(95), "p99": within(99) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_reads_the_weights_and_the_cache() {
        let spec = ModelSpec::named("tiny").unwrap_or_else(|| unreachable!());
        let weights = Parameters::zeros(&spec.parameters(), DType::BF16, &candle_core::Device::Cpu);
        let read = weights.map(|weights| bytes_read_per_token(&spec, &weights, 12)).unwrap_or_default();
        // All parameters but the positions, and keys and values of 4 heads of 32 in 4 blocks.
        assert_eq!(read, 2 * (spec.parameter_count() - 128 * 128) + 2 * 2 * 4 * 12 * 128);
    }

    #[test]
    fn a_percentile_is_the_time_within_which_so_many_were_done() {
        let times: Vec<f64> = (1..=200).rev().map(f64::from).collect();
        assert_eq!(percentiles(times), json!({ "p50": 100.0, "p95": 190.0, "p99": 198.0 }));
        assert_eq!(percentiles(vec![3.0]), json!({ "p50": 3.0, "p95": 3.0, "p99": 3.0 }));
    }
}
