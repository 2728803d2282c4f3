//! The FP32 probe has no side effects: a run is bit for bit the same with and without it.

use finetune::engine::collective::SingleProcess;
use finetune::precision::OnOverflow;
use finetune::store::checkpoint::{Run, compare, latest_valid};
use finetune::telemetry::{Emitter, Event, EventLog, Fp32Probe, StepRecord, read};
use finetune::train::{Config, Trainer};
use std::path::Path;
use std::sync::Arc;

const STEPS: u64 = 12;

/// Trains a run called `name` with everything switched on that a probe might disturb; gives its steps without their times,
/// and its probes.
fn train(folder: &Path, name: &str, probe_every: u64) -> (Vec<StepRecord>, Vec<Fp32Probe>) {
    let mut config = Config::default();
    config.train.steps = Some(STEPS);
    (config.train.batch_size, config.train.seq_len, config.train.grad_accum) = (2, 16, 2);
    (config.train.eval_batches, config.train.sample_tokens) = (1, 4);
    (config.dropout.embedding, config.dropout.residual, config.dropout.attention) = (0.1, 0.1, 0.1);
    (config.scaler.init_scale, config.scaler.on_overflow) = (2f32.powi(24), OnOverflow::Retry);
    config.telemetry.probe_every = probe_every;
    let mut trainer = Trainer::new(Arc::new(SingleProcess), config, None, &mut |_| ()).unwrap();
    let path = folder.join(name);
    let run = Run::open(&path).unwrap();
    trainer.attach(run, Emitter::new(Some(EventLog::open(path.join("events.jsonl")).unwrap())));
    trainer.run().unwrap();
    let (mut steps, mut probes) = (Vec::new(), Vec::new());
    for record in read(path.join("events.jsonl")).unwrap() {
        match record.event {
            Event::Step(step) => steps.push(StepRecord {
                tokens_per_s: 0.0,
                time: finetune::telemetry::StepTime::default(),
                rss_bytes: None,
                peak_rss_bytes: None,
                cpu_seconds: None,
                gpu: None,
                ..*step
            }),
            Event::Fp32Probe(probe) => probes.push(*probe),
            _ => {}
        }
    }
    (steps, probes)
}

#[test]
fn a_run_is_the_same_with_and_without_probes() {
    let folder = tempfile::tempdir().unwrap();
    let (alone, none) = train(folder.path(), "alone", 0);
    let (probed, probes) = train(folder.path(), "probed", 3);
    assert!(none.is_empty());
    assert_eq!(probes.iter().map(|probe| probe.step).collect::<Vec<_>>(), [3, 6, 9, 12]);
    assert!(probes.iter().all(|probe| probe.tensors.iter().any(|tensor| tensor.nonzero > 0)));

    // The texts, because a skipped step's norm is NaN; they hold every digit.
    let text = |steps: &[StepRecord]| steps.iter().map(|step| format!("{step:?}")).collect::<Vec<_>>().join("\n");
    assert_eq!(alone.len() as u64, STEPS);
    assert!(alone.iter().any(|step| step.grad_norm.is_nan()) && alone.iter().any(|step| step.grad_norm.is_finite()));
    assert_eq!(text(&probed), text(&alone));
    let last = |name| latest_valid(&folder.path().join(name)).unwrap().checkpoint.path().to_path_buf();
    assert_eq!(compare(&last("alone"), &last("probed")).unwrap(), []);
}
