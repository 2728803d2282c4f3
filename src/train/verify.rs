//! Proves that a checkpoint resumes: `n` steps equal `k` steps, save, load, and `n - k` steps, bit for bit. Repeats a
//! recorded run, and compares each step and each checkpoint with the record.

use crate::engine::collective::SingleProcess;
use crate::store::checkpoint::{self, Checkpoint, CheckpointKind, Run, differing_parts};
use crate::telemetry::{Activity, CheckpointSaved, Detail, Emitter, Event, PhaseProgress, StepRecord, for_each};
use crate::train::config::Config;
use crate::train::trainer::Trainer;
use crate::{Error, Result};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::Arc;

/// The steps and full checkpoints of a recorded run, by step.
#[derive(Debug, Default)]
pub struct RecordedRun {
    /// The numbers of its steps, without those that a resume made void.
    pub numbers: BTreeSet<u64>,
    /// The steps that [`Self::read_steps`] has read.
    pub steps: BTreeMap<u64, StepRecord>,
    /// Its checkpoints.
    pub checkpoints: BTreeMap<u64, CheckpointSaved>,
    /// The configurations that it was trained with, each with the step that it was valid after.
    pub configs: Vec<(u64, Value)>,
    /// The number of lines of its log that cannot be read.
    pub unreadable: usize,
}

impl RecordedRun {
    /// Reads a log without its steps.
    pub fn read(log: &Path) -> Result<Self> {
        let mut recorded = Self::default();
        let unreadable = for_each(log, Detail::FewTables, |record| {
            match record.event {
                Event::Started(started) => recorded.configs.push((started.resumed_from.unwrap_or(0), started.config)),
                Event::Step(step) => drop(recorded.numbers.insert(step.step)),
                Event::CheckpointSaved(saved) if !saved.weights_only => {
                    recorded.checkpoints.insert(saved.step, saved);
                }
                _ => {}
            }
            Ok(())
        })?;
        Ok(Self { unreadable, ..recorded })
    }

    /// Reads a part of the steps, for [`Self::repeat`].
    pub fn read_steps(&mut self, log: &Path, steps: RangeInclusive<u64>) -> Result<()> {
        for_each(log, Detail::Steps(steps), |record| {
            if let Event::Step(step) = record.event {
                self.steps.insert(step.step, *step);
            }
            Ok(())
        })
        .map(drop)
    }

    /// The text of the configuration of the steps after `step`; `None` if the log lacks it.
    pub fn config_after(&self, step: u64) -> Option<String> {
        let (_, config) = self.configs.iter().rfind(|(first, _)| *first <= step)?;
        serde_json::from_value::<Config>(config.clone()).ok()?.to_toml().ok()
    }

    /// The first step between these that the run continued after with other settings.
    pub fn changed_between(&self, from: u64, to: u64) -> Option<u64> {
        let resumed = self.configs.iter().map(|(first, _)| *first).filter(|first| (from + 1..to).contains(first));
        resumed.filter(|first| self.config_after(*first) != self.config_after(from)).min()
    }

    /// Repeats the steps with `trainer` up to step `to`, compares them with those that were read, and writes its
    /// checkpoints into `folder`. Returns a description of the first difference. `run` has those checkpoints of the
    /// recorded run that still exist. Fails with [`Error::Config`] if the settings changed before the difference.
    pub fn repeat(
        &self,
        trainer: &mut Trainer,
        run: &Path,
        to: u64,
        folder: &Path,
        activity: &Activity,
    ) -> Result<Option<String>> {
        let mut emitter = Emitter::new(None);
        let records = emitter.connect();
        trainer.attach(Run::open(folder)?, emitter);
        let from = trainer.engine.state.counters.step;
        for step in from + 1..=to {
            activity.advance("repeating steps", PhaseProgress::Items(step, to));
            trainer.advance(1)?;
            if self.checkpoints.contains_key(&step) {
                trainer.save()?;
            }
            for record in records.try_iter() {
                let difference = match &record.event {
                    Event::Step(found) => self.steps.get(&step).map_or(Ok(None), |was| differing_figure(was, found))?,
                    Event::CheckpointSaved(found) => self.differing_checkpoint(found, run)?,
                    _ => None,
                };
                if let Some(difference) = difference {
                    if let Some(change) = self.changed_between(from, step) {
                        let message = format!(
                            "the settings changed after step {change}; repeat up to it, and the rest with `--from {change}`"
                        );
                        return Err(Error::config("--to", message));
                    }
                    return Ok(Some(format!("step {step}: {difference}")));
                }
            }
        }
        Ok(None)
    }

    /// The first difference of a repeated checkpoint: a tensor if the recorded checkpoint still exists.
    fn differing_checkpoint(&self, found: &CheckpointSaved, run: &Path) -> Result<Option<String>> {
        let was = self.checkpoints.get(&found.step).and_then(|was| was.proof.as_ref());
        let (Some(was), Some(proof)) = (was, &found.proof) else { return Ok(None) };
        let parts = differing_parts(was, proof);
        if parts.is_empty() {
            return Ok(None);
        }
        let folder = run.join(CheckpointKind::Full.directory(found.step));
        let differences =
            if folder.exists() { checkpoint::compare(&folder, Path::new(&found.path))? } else { Vec::new() };
        let tensor = differences.iter().find(|difference| difference.file.ends_with(".safetensors"));
        Ok(Some(match tensor {
            Some(difference) => difference.to_string(),
            None => format!("the checkpoint's {} differ", parts.join(", ")),
        }))
    }
}

/// The first figure of a step that differs, and the tensor that it belongs to. Times do not count.
fn differing_figure(was: &StepRecord, found: &StepRecord) -> Result<Option<String>> {
    let failed = |error: serde_json::Error| Error::data("a step's record", error.to_string());
    let value = |step: &StepRecord| -> serde_json::Result<Value> {
        // Text and back, as a log's record.
        let text = serde_json::to_string(&step.clone().without_measurements())?;
        serde_json::from_str(&text)
    };
    let [was, found] = [was, found].map(value);
    Ok(differing_value("", &was.map_err(failed)?, &found.map_err(failed)?))
}

fn differing_value(name: &str, was: &Value, found: &Value) -> Option<String> {
    let inner = |key: &str| if name.is_empty() { key.to_owned() } else { format!("{name}.{key}") };
    match (was, found) {
        (Value::Object(a), Value::Object(b)) if a.keys().eq(b.keys()) => {
            a.iter().zip(b.values()).find_map(|((key, a), b)| differing_value(&inner(key), a, b))
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            a.iter().zip(b).enumerate().find_map(|(at, (a, b))| {
                let tensor =
                    a.get("name").and_then(Value::as_str).map_or_else(|| at.to_string(), |it| format!("`{it}`"));
                differing_value(&inner(&tensor), a, b)
            })
        }
        _ => (was != found).then(|| format!("{name} was {was} and is now {found}")),
    }
}

/// The result of the comparison.
#[derive(Debug)]
pub struct ResumeCheck {
    /// Tensors compared.
    pub tensors: usize,
    /// Elements compared.
    pub elements: u64,
    /// Steps whose gradients overflowed, so that the scaler's state was tested.
    pub skipped: u64,
    /// A description of each difference.
    pub differences: Vec<String>,
}

/// Trains `steps` steps of `config` uninterrupted, and again with a save and a load in `folder` after `at` steps, and
/// compares the checkpoints of both bit for bit. `activity` shows how far it is.
pub fn verify_resume(config: &Config, steps: u64, at: u64, folder: &Path, activity: &Activity) -> Result<ResumeCheck> {
    if at == 0 || at >= steps {
        return Err(Error::config("--at", format!("{at} is not between 1 and {}", steps.saturating_sub(1))));
    }
    let mut config = config.clone();
    config.train.steps = Some(steps);
    let advance = |trainer: &mut Trainer, from: u64, to: u64, what: &str| {
        (from..to).try_for_each(|step| {
            activity.advance(what, PhaseProgress::Items(step, steps));
            trainer.advance(1)
        })
    };
    let saved = |trainer: &mut Trainer, name: &str| {
        trainer.attach(Run::open(folder.join(name))?, Emitter::new(None));
        trainer.save()?;
        let path = trainer.checkpoint().map(Path::to_path_buf);
        path.ok_or_else(|| Error::checkpoint(folder, "no checkpoint was written"))
    };
    activity.begin("preparing");
    let mut straight = Trainer::new(Arc::new(SingleProcess), config.clone(), None, &mut |_| ())?;
    advance(&mut straight, 0, steps, "training without interruption")?;

    activity.begin("preparing");
    let mut first = Trainer::new(Arc::new(SingleProcess), config.clone(), None, &mut |_| ())?;
    advance(&mut first, 0, at, "training up to the save")?;
    activity.begin("saving");
    let written = saved(&mut first, "verify-resume")?;
    drop(first);
    activity.begin("loading");
    let mut second = Trainer::new(Arc::new(SingleProcess), config, Some(&Checkpoint::open(&written)?), &mut |_| ())?;
    advance(&mut second, at, steps, "training, resumed")?;
    activity.begin("comparing");
    let compared = &straight.engine.state;
    let wide = [&compared.weights, compared.masters.parameters(), &compared.adamw.exp_avg, &compared.adamw.exp_avg_sq];
    let narrow = &compared.adamw.quantized_moments;
    let tensors = wide.iter().map(|kind| kind.tensors().len()).sum::<usize>() + 2 * narrow.len();
    let elements = wide.iter().map(|kind| kind.elements()).sum::<u64>();
    let elements = elements + narrow.iter().map(|moments| 2 * moments.elements as u64).sum::<u64>();
    let skipped = compared.counters.skipped();
    let [a, b] = [saved(&mut straight, "straight")?, saved(&mut second, "resumed")?];
    let differences = checkpoint::compare(&a, &b)?.iter().map(ToString::to_string).collect();
    Ok(ResumeCheck { tensors, elements, skipped, differences })
}
