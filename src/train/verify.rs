//! Proves that a checkpoint resumes: `n` steps equal `k` steps, save, load, and `n - k` steps, bit for bit.

use crate::engine::collective::SingleProcess;
use crate::engine::kernels::view::{View, read, to_host};
use crate::engine::model::Parameters;
use crate::store::checkpoint::{Checkpoint, Run};
use crate::telemetry::{Activity, Emitter, PhaseProgress};
use crate::train::config::Config;
use crate::train::fp8::Fp8Block;
use crate::train::state::TrainState;
use crate::train::trainer::Trainer;
use crate::{Error, Result};
use candle_core::Tensor;
use std::path::Path;
use std::sync::Arc;

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

pub(super) fn compare(a: &Trainer, b: &Trainer) -> Result<ResumeCheck> {
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
    let fp8 = |state: &TrainState| format!("{:?}", state.fp8.as_ref().map(Fp8Block::state));
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
