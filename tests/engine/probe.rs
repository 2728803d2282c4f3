//! Instruments have no side effects: a run is bit for bit the same with all of them and with none.

use crate::run::trainer;
use finetune::precision::OnOverflow;
use finetune::store::checkpoint::{Run, compare, latest_valid};
use finetune::telemetry::{Emitter, Event, EventLog, Fp32Probe, StepRecord, StepStatus, read};
use finetune::train::Config;
use std::path::Path;

const STEPS: u64 = 12;

/// Trains a run called `name` with everything switched on that an instrument might disturb, and with all instruments or
/// none; gives its steps without times and measurements, and its probes.
fn train(folder: &Path, name: &str, instruments: bool) -> (Vec<StepRecord>, Vec<Fp32Probe>) {
    let mut config = Config::default();
    config.train.steps = Some(STEPS);
    config.train.batch_size = 2;
    config.train.seq_len = 16;
    config.train.grad_accum = 2;
    config.train.eval_batches = 1;
    config.train.sample_tokens = 4;
    config.dropout.embedding = 0.1;
    config.dropout.residual = 0.1;
    config.dropout.attention = 0.1;
    config.scaler.init_scale = 2f32.powi(24);
    config.scaler.on_overflow = OnOverflow::Retry;
    let telemetry = &mut config.telemetry;
    telemetry.trace_overflows = instruments;
    if instruments {
        telemetry.probe_every = 3;
        telemetry.lost_updates_every = 1;
        telemetry.grad_variance_every = 1;
        telemetry.grad_max_every = 1;
        telemetry.grad_stats_every = 1;
    } else {
        telemetry.grad_stats_every = STEPS + 1;
        telemetry.grad_histogram_every = STEPS + 1;
    }
    let mut trainer = trainer(&config);
    let path = folder.join(name);
    let run = Run::open(&path).unwrap();
    trainer.attach(run, Emitter::new(Some(EventLog::open(path.join("events.jsonl")).unwrap())));
    trainer.run().unwrap();
    let mut steps = Vec::new();
    let mut probes = Vec::new();
    let mut overflows = 0;
    for record in read(path.join("events.jsonl")).unwrap() {
        match record.event {
            Event::Step(step) => {
                let mut step = step.without_measurements();
                assert_eq!(step.lost_updates.is_some(), instruments && step.outcome == StepStatus::Applied);
                step.lost_updates = None;
                step.tensors = Vec::new();
                step.grads.exponents.clear();
                steps.push(step);
            }
            Event::Fp32Probe(probe) => probes.push(*probe),
            Event::Overflow(overflow) => {
                assert_eq!(overflow.first_nonfinite.is_some(), instruments);
                overflows += 1;
            }
            _ => {}
        }
    }
    let skipped = steps.iter().filter(|step| step.outcome == StepStatus::Skipped).count();
    assert!(skipped >= 3 && overflows == skipped, "{overflows} overflows in {skipped} skipped steps");
    (steps, probes)
}

#[test]
fn a_run_is_the_same_with_and_without_instruments() {
    let folder = tempfile::tempdir().unwrap();
    let (alone, none) = train(folder.path(), "alone", false);
    let (probed, probes) = train(folder.path(), "probed", true);
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
