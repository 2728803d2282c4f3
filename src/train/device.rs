//! The step of [`Engine::step`] on a device: the same recipe as launches, of which none waits for the host.
//!
//! The device holds weights, masters and moments. The CPU engine beside it has the counters and the scaler of every step,
//! and the tensors where [`Accelerator::fetch`] brings them: for checkpoints, samples, and closer looks at a step.

use crate::data::Batch;
use crate::kernels::cross_entropy::IGNORE;
use crate::kernels::cuda::adamw::{self, AdamWTensor};
use crate::kernels::cuda::cross_entropy::Seed;
use crate::kernels::cuda::elementwise::{accumulate, copy};
use crate::kernels::cuda::embedding;
use crate::kernels::cuda::launch::{Buffer, Memory, bytes_of};
use crate::kernels::cuda::product::Multiply;
use crate::kernels::cuda::step::{self, Decay, Rules, StepRecord, StepState, VerdictBuffers};
use crate::kernels::cuda::survey::{self, BINS, CHUNK_STATS_BYTES, RawStats, SurveyBuffers};
use crate::kernels::view;
use crate::model::{DeviceGradients, DevicePass, Entry, Gpt2, Mode, Parameters, Workspace, candle_dtype};
use crate::optim::{AdamWConfig, LrSchedule, ScheduleKind, Survey};
use crate::precision::{FloatFormat, GradScaler, PrecisionPolicy};
use crate::train::accelerator::Accelerator;
use crate::train::state::{Counters, TrainState};
use crate::train::step::{Engine, Outcome, PartTimes, StepReport};
use crate::{Error, Result};
use candle_core::{DType, bail};

/// Elements that each tensor of an [`Arena`] begins at a multiple of.
const ALIGNMENT: usize = 64;

/// Keys of launches that are the same each time.
const FIRST_PASSES: u32 = 0;
const FURTHER_PASSES: u32 = 1;
const UPDATE: u32 = 2;
const UPDATE_WITH_EXPONENTS: u32 = 3;
const EVALUATION: u32 = 4;

/// The tensors of one layout in one stretch of memory, so that what is done to every element is one launch. Tensor `i` has
/// the same place in every arena.
struct Arena {
    whole: Buffer,
    tensors: Vec<Buffer>,
}

impl Arena {
    fn new(device: &impl Memory, lens: &[usize], dtype: DType) -> Result<Self> {
        let total = lens.iter().map(|len| len.next_multiple_of(ALIGNMENT)).sum();
        let whole = device.allocate(dtype, total)?;
        device.zero(whole)?;
        let mut first = 0;
        let mut next = |&len: &usize| {
            let tensor = whole.part(first, len);
            first += len.next_multiple_of(ALIGNMENT);
            tensor
        };
        Ok(Self { whole, tensors: lens.iter().map(&mut next).collect::<candle_core::Result<_>>()? })
    }

    /// The tensors without the padding of the head's.
    fn logical(&self, layout: &[Entry]) -> Result<Vec<Buffer>> {
        let tensors = self.tensors.iter().zip(layout);
        Ok(tensors.map(|(tensor, entry)| tensor.part(0, elements(entry))).collect::<candle_core::Result<_>>()?)
    }

    fn send(&self, device: &impl Memory, from: &Parameters) -> Result<()> {
        for (buffer, tensor) in self.tensors.iter().zip(from.tensors()) {
            device.upload(view::read(tensor)?.view().bytes(), *buffer)?;
        }
        Ok(())
    }

    fn fetch(&self, device: &impl Memory, to: &Parameters) -> Result<()> {
        for (buffer, tensor) in self.tensors.iter().zip(to.tensors()) {
            view::write(tensor, |mut tensor| device.download(*buffer, tensor.bytes_mut()))??;
        }
        Ok(())
    }
}

fn elements(entry: &Entry) -> usize {
    entry.shape.iter().product()
}

/// A micro-batch's words on the device, and the same on their way there.
struct TokenBuffers {
    staging: Vec<u32>,
    whole: Buffer,
    tokens: embedding::Tokens,
    targets: Buffer,
}

impl TokenBuffers {
    /// For micro-batches of `rows` tokens.
    fn new(device: &impl Memory, rows: usize) -> Result<Self> {
        let mut first = 0;
        let spans = [rows, rows, rows + 1, rows, 2].map(|len| {
            let span = (first, len);
            first += len.next_multiple_of(ALIGNMENT);
            span
        });
        let whole = device.allocate(DType::U32, first)?;
        let [ids, order, starts, targets, draw] = spans.map(|(first, len)| whole.part(first, len));
        let tokens = embedding::Tokens { ids: ids?, order: order?, starts: starts?, draw: draw? };
        Ok(Self { staging: vec![0; first], whole, tokens, targets: targets? })
    }

    /// Sends a micro-batch whose masks are number `draw`.
    fn send(&mut self, device: &impl Memory, batch: &Batch, vocab: usize, draw: u64) -> candle_core::Result<()> {
        let rows = self.targets.len;
        if batch.inputs.len() != rows || batch.targets.len() != rows {
            bail!("{} tokens for buffers of {rows}", batch.inputs.len());
        }
        if let Some(target) = batch.targets.iter().find(|&&t| t != IGNORE && t as usize >= vocab) {
            bail!("target {target} is outside the model's vocabulary of {vocab}");
        }
        let at = |buffer: Buffer| (buffer.address - self.whole.address) as usize / size_of::<u32>();
        let (order, starts, targets, draws) =
            (at(self.tokens.order), at(self.tokens.starts), at(self.targets), at(self.tokens.draw));
        self.staging[..rows].copy_from_slice(&batch.inputs);
        let (before, after) = self.staging[order..].split_at_mut(starts - order);
        embedding::group(&batch.inputs, vocab, &mut before[..rows], &mut after[..=rows])?;
        self.staging[targets..targets + rows].copy_from_slice(&batch.targets);
        self.staging[draws..draws + 2].copy_from_slice(&[draw as u32, (draw >> 32) as u32]);
        device.upload(bytes_of(&self.staging), self.whole)
    }
}

/// Everything a step needs on a device.
pub(crate) struct DeviceEngine<D> {
    device: D,
    masters: Arena,
    exp_avg: Arena,
    exp_avg_sq: Arena,
    /// The working copies; in FP32 the masters themselves.
    weights: Option<Arena>,
    born: Arena,
    sum: Option<Arena>,
    workspace: Workspace<Buffer>,
    batch: TokenBuffers,
    updated: Buffer,
    chunks: Buffer,
    survey: SurveyBuffers,
    exponents: Buffer,
    loss: Buffer,
    targets: Buffer,
    state: Buffer,
    record: Buffer,
    format: FloatFormat,
    /// Whether the device has gone on since the host's tensors were read.
    ahead: bool,
}

impl<D: Multiply + Memory> DeviceEngine<D> {
    /// Takes over where `engine` is, which trains under `policy` on batches of this shape.
    pub(crate) fn new(
        device: D,
        engine: &Engine,
        policy: PrecisionPolicy,
        [batch_size, seq_len, grad_accum]: [usize; 3],
    ) -> Result<Self> {
        let (config, layout) = (engine.model.config(), engine.state.weights.layout());
        let mut lens: Vec<usize> = layout.iter().map(elements).collect();
        lens[engine.model.head_weight()] = config.padded_vocab() * config.n_embd;
        let arena = |dtype| Arena::new(&device, &lens, dtype);
        let (compute, grads) = (candle_dtype(policy.compute), candle_dtype(policy.grads));
        let [masters, exp_avg, exp_avg_sq] = [arena(DType::F32)?, arena(DType::F32)?, arena(DType::F32)?];
        let weights = (compute != DType::F32).then(|| arena(compute)).transpose()?;
        let (born, sum) = (arena(grads)?, (grad_accum > 1).then(|| arena(DType::F32)).transpose()?);

        let surveyed = sum.as_ref().unwrap_or(&born).logical(layout)?;
        let copies = weights.as_ref().map(|weights| weights.logical(layout)).transpose()?;
        let adamw = engine.state.adamw.config();
        let updated: Vec<AdamWTensor> = layout
            .iter()
            .enumerate()
            .map(|(i, entry)| {
                let state = [&masters, &exp_avg, &exp_avg_sq].map(|arena| arena.tensors[i]);
                AdamWTensor::new(surveyed[i], state, copies.as_ref().map(|c| c[i]), adamw.decay_of(entry))
            })
            .collect::<candle_core::Result<_>>()?;
        let chunks = survey::chunks(layout.iter().map(elements));
        let survey = SurveyBuffers {
            tensors: device.keep(&survey::tensors(&surveyed)?)?,
            chunks: device.keep(&chunks)?,
            partial: device.allocate(DType::U8, chunks.len() * CHUNK_STATS_BYTES)?,
            stats: device.allocate(DType::U8, layout.len() * size_of::<RawStats>())?,
            exponents: None,
        };
        let this = Self {
            workspace: Workspace::on(&device, config, policy, batch_size, seq_len)?,
            batch: TokenBuffers::new(&device, batch_size * seq_len)?,
            updated: device.keep(&updated)?,
            chunks: survey.chunks,
            exponents: device.allocate(DType::U32, layout.len() * BINS)?,
            loss: device.allocate(DType::F64, 1)?,
            targets: device.allocate(DType::U32, 1)?,
            state: device.allocate(DType::U8, size_of::<StepState>())?,
            record: device.allocate(DType::U8, size_of::<StepRecord>())?,
            format: policy.grads.format(),
            ahead: false,
            masters,
            exp_avg,
            exp_avg_sq,
            weights,
            born,
            sum,
            survey,
            device,
        };
        this.send_state(&engine.state)?;
        Ok(this)
    }

    fn weights(&self) -> &Arena {
        self.weights.as_ref().unwrap_or(&self.masters)
    }

    fn send_state(&self, state: &TrainState) -> Result<()> {
        self.masters.send(&self.device, state.masters.parameters())?;
        self.exp_avg.send(&self.device, &state.adamw.exp_avg)?;
        self.exp_avg_sq.send(&self.device, &state.adamw.exp_avg_sq)?;
        if let Some(weights) = &self.weights {
            copy(&self.device, self.masters.whole, weights.whole)?;
        }
        let Counters { step, updates, .. } = state.counters;
        Ok(self.device.upload(bytes_of(&[StepState::new(&state.scaler, step, updates)]), self.state)?)
    }

    fn pass<'a>(&'a self, model: &'a Gpt2, mode: Mode) -> DevicePass<'a, D> {
        DevicePass {
            device: &self.device,
            model,
            weights: &self.weights().tensors,
            workspace: &self.workspace,
            tokens: self.batch.tokens,
            targets: self.batch.targets,
            mode,
        }
    }

    /// Launches the passes of a micro-batch.
    fn passes(&mut self, model: &Gpt2, batch: &Batch, seed: u64, draw: u64, first: bool) -> Result<()> {
        self.batch.send(&self.device, batch, model.config().vocab_size, draw)?;
        // The draw is the one that was just sent.
        let pass = self.pass(model, Mode::Train { seed, draw: 0 });
        let grads = &self.born.tensors;
        let scale = self.state.part(StepState::SCALE_AT, size_of::<f32>())?.cast(DType::F32, 1)?;
        let seed = Seed { scale, targets: self.targets };
        let launches = || {
            pass.forward()?;
            pass.loss(self.loss, Some(DeviceGradients { seed, grads }))?;
            pass.backward(grads)?;
            match &self.sum {
                None => Ok(()),
                Some(sum) if first => copy(&self.device, self.born.whole, sum.whole),
                Some(sum) => accumulate(&self.device, self.born.whole, sum.whole),
            }
        };
        let key = if first { FIRST_PASSES } else { FURTHER_PASSES };
        Ok(self.device.recorded(key, launches)?)
    }

    /// Launches what follows the passes: survey, verdict, update.
    fn update(&self, engine: &Engine) -> Result<()> {
        let Self { device, survey, .. } = self;
        let total = self.sum.as_ref().unwrap_or(&self.born).whole.dtype;
        let exponents = engine.exponents.then_some(self.exponents);
        let AdamWConfig { betas, eps, .. } = engine.state.adamw.config();
        let rules = Rules {
            scaler: engine.state.scaler.config(),
            schedule: engine.schedule.into(),
            max_grad_norm: engine.max_grad_norm,
            betas,
        };
        let (loss, targets, state, record) = (self.loss, self.targets, self.state, self.record);
        let launches = || {
            if let Some(exponents) = exponents {
                device.zero(exponents)?;
            }
            survey::survey(device, total, self.format, SurveyBuffers { exponents, ..*survey })?;
            step::verdict(device, rules, VerdictBuffers { stats: survey.stats, loss, targets, state, record })?;
            let dtypes = [total, self.weights().whole.dtype];
            let betas = betas.map(|beta| beta as f32);
            adamw::step(device, dtypes, self.updated, self.chunks, state, betas, eps as f32)
        };
        Ok(device.recorded(if exponents.is_some() { UPDATE_WITH_EXPONENTS } else { UPDATE }, launches)?)
    }

    /// Waits for the step, and brings its figures.
    fn read_survey(&self, record: &StepRecord, exponents: bool, out: &mut Survey) -> Result<()> {
        let tensors = self.masters.tensors.len();
        let stats = self.device.fetch::<RawStats>(self.survey.stats, tensors)?;
        let counted = if exponents { self.device.fetch::<u32>(self.exponents, tensors * BINS)? } else { Vec::new() };
        let counters = |i: usize| counted.get(i * BINS..(i + 1) * BINS).unwrap_or_default();
        *out = Survey::default();
        out.tensors.extend(stats.iter().enumerate().map(|(i, raw)| raw.survey(counters(i))));
        for tensor in &out.tensors {
            out.total.merge(tensor);
        }
        // What the verdict was found by: a sum of squares depends on the order of its terms.
        out.total.stats = record.total.stats();
        out.largest = out.total.stats.max_abs;
        Ok(())
    }
}

impl<D: Multiply + Memory + Send> Accelerator for DeviceEngine<D> {
    fn name(&self) -> &str {
        self.device.name()
    }

    fn step(&mut self, engine: &mut Engine, micro_batches: &[Batch]) -> Result<StepReport> {
        let targets: usize = micro_batches.iter().map(|batch| batch.target_count).sum();
        self.ahead = true;
        self.device.upload(bytes_of(&[targets as u32]), self.targets)?;
        self.device.zero(self.loss)?;
        for (i, batch) in micro_batches.iter().enumerate() {
            self.passes(&engine.model, batch, engine.seed, engine.state.counters.draw(i), i == 0)?;
        }
        self.update(engine)?;

        let [record] = self.device.fetch::<StepRecord>(self.record, 1)?[..] else { return Err(no_record()) };
        self.read_survey(&record, engine.exponents, &mut engine.survey)?;
        let state = &mut engine.state;
        state.scaler = GradScaler::resume(*state.scaler.config(), record.after.scaler())?;
        let tokens = state.counters.tokens + targets as u64;
        state.counters = Counters { step: record.after.step, updates: record.after.updates, tokens };
        let StepRecord { loss, grad_norm, clip, lr, scale, .. } = record;
        let outcome = if record.applied() { Outcome::Applied { grad_norm, clip, lr } } else { Outcome::Skipped };
        Ok(StepReport { loss, targets, scale, outcome, change: record.change(), time: PartTimes::default() })
    }

    fn evaluate(
        &mut self,
        engine: &Engine,
        batch: &mut Batch,
        next: &mut dyn FnMut(&mut Batch) -> bool,
    ) -> Result<(f64, u64)> {
        let mut targets = 0;
        self.device.zero(self.loss)?;
        while next(batch) {
            self.batch.send(&self.device, batch, engine.model.config().vocab_size, 0)?;
            let pass = self.pass(&engine.model, Mode::Eval);
            self.device.recorded(EVALUATION, || {
                pass.forward()?;
                pass.loss(self.loss, None)
            })?;
            targets += batch.target_count as u64;
        }
        let loss: f64 = self.device.fetch(self.loss, 1)?.iter().sum();
        Ok((loss / targets.max(1) as f64, targets))
    }

    fn send(&mut self, state: &TrainState) -> Result<()> {
        self.ahead = false;
        self.send_state(state)
    }

    fn fetch(&mut self, state: &mut TrainState) -> Result<()> {
        if self.ahead {
            self.masters.fetch(&self.device, state.masters.parameters())?;
            self.exp_avg.fetch(&self.device, &state.adamw.exp_avg)?;
            self.exp_avg_sq.fetch(&self.device, &state.adamw.exp_avg_sq)?;
            state.masters.write_compute_copy(&state.weights)?;
            self.ahead = false;
        }
        Ok(())
    }
}

fn no_record() -> Error {
    Error::Kernel(candle_core::Error::Msg("the device has left no record of the step".into()))
}

impl From<LrSchedule> for step::Schedule {
    fn from(schedule: LrSchedule) -> Self {
        let LrSchedule { kind, peak_lr, warmup_updates, total_updates, min_lr_ratio } = schedule;
        let decay = match kind {
            ScheduleKind::Constant => Decay::Constant,
            ScheduleKind::Linear => Decay::Linear,
            ScheduleKind::Cosine => Decay::Cosine,
        };
        Self { peak_lr, min_lr_ratio, warmup_updates, total_updates, decay }
    }
}

#[cfg(test)]
mod tests;
