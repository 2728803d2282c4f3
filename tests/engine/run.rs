//! Runs in this process: a small configuration, a trainer, and its events.

use std::sync::Arc;
use std::sync::mpsc::Receiver;

use crate::common::of_kind;
use crate::common::processes::compute_alone;
use finetune::engine::collective::SingleProcess;
use finetune::precision::PrecisionPolicy;
use finetune::store::checkpoint::Run;
use finetune::telemetry::{Emitter, Event, Record, StepRecord};
use finetune::train::{Config, ConfigLayers, Trainer};

/// The default run with micro-batches of `rows` × `seq_len`, one batch per evaluation, and no samples.
pub(crate) fn config(policy: PrecisionPolicy, (rows, seq_len): (usize, usize)) -> Config {
    let mut config = Config::resolve(&ConfigLayers::default()).unwrap();
    config.dtype = policy;
    (config.train.batch_size, config.train.seq_len) = (rows, seq_len);
    (config.train.eval_batches, config.train.sample_tokens) = (1, 0);
    config
}

/// A run of one process, before its first step.
pub(crate) fn trainer(config: &Config) -> Trainer {
    compute_alone();
    Trainer::new(Arc::new(SingleProcess), config.clone(), None, &mut |_| ()).unwrap()
}

/// Lets a trainer write checkpoints into `run`, and returns its records.
pub(crate) fn attach(trainer: &mut Trainer, run: Run) -> Receiver<Record> {
    let mut emitter = Emitter::new(None);
    let records = emitter.connect();
    trainer.attach(run, emitter);
    records
}

/// The events so far.
pub(crate) fn events(records: &Receiver<Record>) -> Vec<Event> {
    records.try_iter().map(|record| record.event).collect()
}

/// A run after `steps` steps, and its events.
pub(crate) fn advanced(config: &Config, steps: u64) -> (Trainer, Vec<Event>) {
    let (folder, mut trainer) = (tempfile::tempdir().unwrap(), trainer(config));
    let records = attach(&mut trainer, Run::open(folder.path().join("run")).unwrap());
    trainer.advance(steps).unwrap();
    let events = events(&records);
    (trainer, events)
}

pub(crate) fn steps(events: &[Event]) -> impl Iterator<Item = &StepRecord> {
    of_kind!(events, Event::Step).map(|step| &**step)
}
