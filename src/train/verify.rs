//! Proves that a checkpoint resumes: `n` steps equal `k` steps, save, load, and `n - k` steps, bit for bit. Repeats a
//! recorded run, and compares each step and each checkpoint with the record.

use crate::engine::collective::SingleProcess;
use crate::engine::kernels::view::{View, read, to_host};
use crate::engine::model::Parameters;
use crate::store::checkpoint::{self, Checkpoint, CheckpointKind, Run, differing_parts};
use crate::telemetry::{Activity, CheckpointSaved, Emitter, Event, PhaseProgress, StepRecord, for_each};
use crate::train::config::Config;
use crate::train::state::TrainState;
use crate::train::trainer::Trainer;
use crate::{Error, Result};
use candle_core::Tensor;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// The steps and full checkpoints of a recorded run, by step.
#[derive(Debug, Default)]
pub struct RecordedRun {
    /// Its steps, without those that a resume made void.
    pub steps: BTreeMap<u64, StepRecord>,
    /// Its checkpoints.
    pub checkpoints: BTreeMap<u64, CheckpointSaved>,
    /// The configurations that it was trained with, each with the step that it was valid after.
    pub configs: Vec<(u64, Value)>,
}

impl RecordedRun {
    /// Reads a log.
    pub fn read(log: &Path) -> Result<Self> {
        let mut recorded = Self::default();
        for_each(log, |record| {
            match record.event {
                Event::Started(started) => recorded.configs.push((started.resumed_from.unwrap_or(0), started.config)),
                Event::Step(step) => drop(recorded.steps.insert(step.step, *step)),
                Event::CheckpointSaved(saved) if !saved.weights_only => {
                    recorded.checkpoints.insert(saved.step, saved);
                }
                _ => {}
            }
            Ok(())
        })?;
        Ok(recorded)
    }

    /// The text of the configuration of the steps after `step`; `None` if the log lacks it or an earlier version wrote it.
    pub fn config_after(&self, step: u64) -> Option<String> {
        let (_, config) = self.configs.iter().rfind(|(first, _)| *first <= step)?;
        serde_json::from_value::<Config>(config.clone()).ok()?.to_toml().ok()
    }

    /// Repeats the steps with `trainer` up to step `to`, and writes its checkpoints into `folder`. Returns a description of
    /// the first difference. `run` has those checkpoints of the recorded run that still exist.
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
        for step in trainer.engine().state.counters.step + 1..=to {
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
/// compares masters, weights, moments, scaler and counters bit for bit. `activity` shows how far it is.
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
    activity.begin("preparing");
    let mut straight = Trainer::new(Arc::new(SingleProcess), config.clone(), None, &mut |_| ())?;
    advance(&mut straight, 0, steps, "training without interruption")?;

    activity.begin("preparing");
    let mut first = Trainer::new(Arc::new(SingleProcess), config.clone(), None, &mut |_| ())?;
    first.attach(Run::open(folder.join("verify-resume"))?, Emitter::new(None));
    advance(&mut first, 0, at, "training up to the save")?;
    activity.begin("saving");
    first.save()?;
    let saved = first.checkpoint().map(Path::to_path_buf);
    drop(first);
    let Some(saved) = saved else { return Err(Error::checkpoint(folder, "no checkpoint was written")) };
    activity.begin("loading");
    let mut second = Trainer::new(Arc::new(SingleProcess), config, Some(&Checkpoint::open(&saved)?), &mut |_| ())?;
    advance(&mut second, at, steps, "training, resumed")?;
    activity.begin("comparing");
    compare(&straight, &second)
}

fn compare(a: &Trainer, b: &Trainer) -> Result<ResumeCheck> {
    let (a, b) = (&a.engine().state, &b.engine().state);
    let mut proof = ResumeCheck { tensors: 0, elements: 0, skipped: a.counters.skipped(), differences: Vec::new() };
    compare_all("weights", &a.weights, &b.weights, &mut proof)?;
    compare_all("masters", a.masters.parameters(), b.masters.parameters(), &mut proof)?;
    compare_all("exp_avg", &a.adamw.exp_avg, &b.adamw.exp_avg, &mut proof)?;
    compare_all("exp_avg_sq", &a.adamw.exp_avg_sq, &b.adamw.exp_avg_sq, &mut proof)?;
    for (a, b) in a.adamw.quantized_moments().iter().zip(b.adamw.quantized_moments()) {
        proof.tensors += 2;
        proof.elements += 2 * a.moments[0].len() as u64;
        if a.moments != b.moments {
            proof.differences.push(format!("8-bit moments of `{}` differ", a.name));
        }
    }
    let mut field = |what: &str, a: String, b: String| {
        if a != b {
            proof.differences.push(format!("{what}: {a} uninterrupted, {b} resumed"));
        }
    };
    field("scaler", format!("{:?}", a.scaler.state()), format!("{:?}", b.scaler.state()));
    field("layers in fallback", format!("{:?}", a.fallback.units()), format!("{:?}", b.fallback.units()));
    let fp8 = |state: &TrainState| format!("{:?}", state.fp8.states());
    field("FP8", fp8(a), fp8(b));
    field("counters", format!("{:?}", a.counters), format!("{:?}", b.counters));
    Ok(proof)
}

fn compare_all(kind: &str, a: &Parameters, b: &Parameters, proof: &mut ResumeCheck) -> Result<()> {
    for ((name, a), (_, b)) in a.iter().zip(b.iter()) {
        proof.tensors += 1;
        proof.elements += a.elem_count() as u64;
        if let Some((count, first)) = differing(a, b)? {
            let of = a.elem_count();
            proof.differences.push(format!("{kind} `{name}`: {count} of {of} elements differ, the first at {first}"));
        }
    }
    Ok(())
}

/// How many elements differ in their bits, and the index of the first; `None` if none does.
fn differing(a: &Tensor, b: &Tensor) -> Result<Option<(usize, usize)>> {
    fn count<T: Copy>(a: &[T], b: &[T], bits: impl Fn(T) -> u32) -> Option<(usize, usize)> {
        let mut differing = a.iter().zip(b).enumerate().filter(|(_, (a, b))| bits(**a) != bits(**b));
        let (first, _) = differing.next()?;
        Some((1 + differing.count(), first))
    }
    let (a, b) = (to_host(a)?, to_host(b)?);
    let (a, b) = (read(&a)?, read(&b)?);
    Ok(match (a.view(), b.view()) {
        (View::F32(a), View::F32(b)) => count(a, b, f32::to_bits),
        (View::F16(a), View::F16(b)) => count(a, b, |x| x.to_bits().into()),
        (View::BF16(a), View::BF16(b)) => count(a, b, |x| x.to_bits().into()),
        (a, _) => Some((a.len(), 0)),
    })
}
