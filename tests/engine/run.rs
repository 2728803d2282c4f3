//! Runs in this process: a small configuration, a trainer, and its events.

use crate::common::of_kind;
use crate::common::processes::compute_alone;
use finetune::engine::collective::SingleProcess;
use finetune::engine::model::ModelSpec;
use finetune::precision::PrecisionPolicy;
use finetune::store::checkpoint::Run;
use finetune::telemetry::{Emitter, Event, Record, StepRecord};
use finetune::train::{Config, ConfigLayers, ModelSource, Trainer, WeightInit};
use std::sync::Arc;
use std::sync::mpsc::Receiver;

/// The default run with micro-batches of `rows` × `seq_len`, one batch per evaluation, and no samples.
pub(crate) fn config(policy: PrecisionPolicy, (rows, seq_len): (usize, usize)) -> Config {
    let mut config = Config::resolve(&ConfigLayers::default()).unwrap();
    config.dtype = policy;
    config.train.batch_size = rows;
    config.train.seq_len = seq_len;
    config.train.eval_batches = 1;
    config.train.sample_tokens = 0;
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
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = trainer(config);
    let records = attach(&mut trainer, Run::open(folder.path().join("run")).unwrap());
    trainer.advance(steps).unwrap();
    let events = events(&records);
    (trainer, events)
}

pub(crate) fn steps(events: &[Event]) -> impl Iterator<Item = &StepRecord> {
    of_kind!(events, Event::Step).map(|step| &**step)
}

/// As a resumed run does that was started in another folder.
#[test]
fn a_model_of_random_weights_is_found_in_the_folder_of_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let spec = ModelSpec::named("tiny").unwrap();
    std::fs::create_dir(folder.path().join("shape")).unwrap();
    std::fs::write(folder.path().join("shape/config.json"), spec.to_json("float32")).unwrap();
    let mut config = config(PrecisionPolicy::FP32, (1, 8));
    config.model = "shape".into();
    config.init = WeightInit::Random;
    config.tokenizer = Some("bytes".into());
    assert!(ModelSource::open(&config, &mut |_| ()).is_err());
    config.folder = Some(folder.path().to_path_buf());
    let found = ModelSource::open(&config, &mut |_| ()).unwrap();
    assert_eq!(found.spec.parameters(), spec.parameters());
}
