//! The step of [`Engine::step`] on a device: the same recipe as launches, of which none waits for the host.
//!
//! Several steps may be on their way at a time; their figures arrive in pinned memory, one step after the other. The device
//! judges each step by itself. After an overflow it halts: steps launched in the meantime change nothing, so that the host
//! finds everything as the overflow has left it, and launches them anew.
//!
//! The device holds weights, masters and moments. The CPU engine beside it has the counters and the scaler of every step,
//! and the tensors where [`Accelerator::fetch`] brings them: for checkpoints, samples, and closer looks at a step.

use crate::data::Batch;
use crate::engine::kernels::cross_entropy::IGNORE;
use crate::engine::kernels::cuda::adamw::{self, AdamWTensor};
use crate::engine::kernels::cuda::cross_entropy::Seed;
use crate::engine::kernels::cuda::elementwise::{accumulate, copy};
use crate::engine::kernels::cuda::embedding;
use crate::engine::kernels::cuda::launch::{Buffer, Memory, bytes_of, values_of};
use crate::engine::kernels::cuda::product::Multiply;
use crate::engine::kernels::cuda::step::{self, Decay, Part, Rules, StepRecord, StepState, StepTimes, VerdictBuffers};
use crate::engine::kernels::cuda::survey::{self, BINS, CHUNK_STATS_BYTES, RawStats, SurveyBuffers};
use crate::engine::kernels::view;
use crate::engine::model::{DeviceGradients, DevicePass, Entry, Gpt2, Mode, Parameters, Workspace, candle_dtype};
use crate::engine::optim::{AdamWConfig, LrSchedule, ScheduleKind, Survey};
use crate::precision::{FloatFormat, GradScaler, PrecisionPolicy};
use crate::train::accelerator::{Accelerator, STEPS_ON_THEIR_WAY};
use crate::train::state::{Counters, TrainState};
use crate::train::step::{Engine, Outcome, PartTimes, StepReport};
use crate::{Error, Result};
use candle_core::{DType, bail};
use std::collections::VecDeque;
use std::time::Duration;

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

/// Room for parts of these lengths, one behind the other: all of it, and the parts.
fn lay_out<const N: usize>(
    device: &impl Memory,
    dtype: DType,
    lens: [usize; N],
) -> candle_core::Result<(Buffer, [Buffer; N])> {
    let mut end = 0;
    let firsts = lens.map(|len| {
        let first = end;
        end += len.next_multiple_of(ALIGNMENT);
        first
    });
    let whole = device.allocate(dtype, end)?;
    let mut parts = [whole; N];
    for (part, (first, len)) in parts.iter_mut().zip(firsts.into_iter().zip(lens)) {
        *part = whole.part(first, len)?;
    }
    Ok((whole, parts))
}

/// A micro-batch's words on the device, and those on their way there.
struct TokenBuffers<D: Memory> {
    staging: Vec<u32>,
    /// The one whose turn comes first is in front.
    pinned: VecDeque<D::Pinned>,
    whole: Buffer,
    tokens: embedding::Tokens,
    targets: Buffer,
    /// The step's number of targets.
    target_count: Buffer,
}

impl<D: Memory> TokenBuffers<D> {
    /// For `grad_accum` micro-batches a step, of `rows` tokens each.
    fn new(device: &D, rows: usize, grad_accum: usize) -> Result<Self> {
        let (whole, [ids, order, starts, targets, draw, target_count]) =
            lay_out(device, DType::U32, [rows, rows, rows + 1, rows, 2, 1])?;
        let tokens = embedding::Tokens { ids, order, starts, draw };
        let pinned = (0..STEPS_ON_THEIR_WAY * grad_accum).map(|_| device.pin(whole.bytes()));
        let pinned = pinned.collect::<candle_core::Result<_>>()?;
        Ok(Self { staging: vec![0; whole.len], pinned, whole, tokens, targets, target_count })
    }

    /// Sends a micro-batch of a step with `count` targets, whose masks are number `draw`.
    fn send(&mut self, device: &D, batch: &Batch, vocab: usize, [count, draw]: [u64; 2]) -> candle_core::Result<()> {
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
        self.staging[at(self.target_count)] = count as u32;
        self.staging[..rows].copy_from_slice(&batch.inputs);
        let (before, after) = self.staging[order..].split_at_mut(starts - order);
        embedding::group(&batch.inputs, vocab, &mut before[..rows], &mut after[..=rows])?;
        self.staging[targets..targets + rows].copy_from_slice(&batch.targets);
        self.staging[draws..draws + 2].copy_from_slice(&[draw as u32, (draw >> 32) as u32]);
        let Some(mut pinned) = self.pinned.pop_front() else { bail!("no memory was pinned for batches") };
        // Waits only where more batches are on their way than there is memory for.
        device.settled(&mut pinned)?.copy_from_slice(bytes_of(&self.staging));
        device.send(&mut pinned, self.whole)?;
        self.pinned.push_back(pinned);
        Ok(())
    }
}

/// A step's figures as they lie in device memory, one behind the other, for one copy.
#[derive(Clone, Copy)]
struct ReportBuffers {
    record: Buffer,
    times: Buffer,
    stats: Buffer,
    /// Counted in some steps only, and last for that reason.
    exponents: Buffer,
    whole: Buffer,
}

impl ReportBuffers {
    /// For this many tensors.
    fn new(device: &impl Memory, tensors: usize) -> Result<Self> {
        let lens = [
            size_of::<StepRecord>(),
            size_of::<StepTimes>(),
            tensors * size_of::<RawStats>(),
            tensors * BINS * size_of::<u32>(),
        ];
        let (whole, [record, times, stats, exponents]) = lay_out(device, DType::U8, lens)?;
        Ok(Self { record, times, stats, exponents: exponents.cast(DType::U32, tensors * BINS)?, whole })
    }

    /// What is to be copied.
    fn wanted(&self, exponents: bool) -> candle_core::Result<Buffer> {
        if exponents { Ok(self.whole) } else { self.whole.part(0, self.at(self.exponents)) }
    }

    /// Bytes in front of one of the buffers.
    fn at(&self, buffer: Buffer) -> usize {
        (buffer.address - self.whole.address) as usize
    }
}

/// A step on its way.
struct Launched<P> {
    /// Where its figures arrive.
    report: P,
    targets: usize,
    exponents: bool,
}

/// Everything a step needs on a device.
pub(crate) struct DeviceEngine<D: Memory> {
    device: D,
    masters: Arena,
    exp_avg: Arena,
    exp_avg_sq: Arena,
    /// The working copies; in FP32 the masters themselves.
    weights: Option<Arena>,
    born: Arena,
    sum: Option<Arena>,
    workspace: Workspace<Buffer>,
    batch: TokenBuffers<D>,
    updated: Buffer,
    chunks: Buffer,
    survey: SurveyBuffers,
    loss: Buffer,
    state: Buffer,
    report: ReportBuffers,
    format: FloatFormat,
    launched: VecDeque<Launched<D::Pinned>>,
    /// For the figures of the next steps.
    spare: Vec<D::Pinned>,
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
        let report = ReportBuffers::new(&device, layout.len())?;
        let survey = SurveyBuffers {
            tensors: device.keep(&survey::tensors(&surveyed)?)?,
            chunks: device.keep(&chunks)?,
            partial: device.allocate(DType::U8, chunks.len() * CHUNK_STATS_BYTES)?,
            stats: report.stats,
            exponents: None,
        };
        let spare = (0..STEPS_ON_THEIR_WAY).map(|_| device.pin(report.whole.bytes()));
        let this = Self {
            spare: spare.collect::<candle_core::Result<_>>()?,
            launched: VecDeque::with_capacity(STEPS_ON_THEIR_WAY),
            workspace: Workspace::on(&device, config, policy, batch_size, seq_len)?,
            batch: TokenBuffers::new(&device, batch_size * seq_len, grad_accum)?,
            updated: device.keep(&updated)?,
            chunks: survey.chunks,
            loss: device.allocate(DType::F64, 1)?,
            state: device.allocate(DType::U8, size_of::<StepState>())?,
            report,
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

    /// Launches the passes of a micro-batch of a step with `targets` targets.
    fn passes(&mut self, engine: &Engine, batch: &Batch, [targets, draw]: [u64; 2], first: bool) -> Result<()> {
        let model = &engine.model;
        self.batch.send(&self.device, batch, model.config().vocab_size, [targets, draw])?;
        // The draw is the one that was just sent.
        let pass = self.pass(model, Mode::Train { seed: engine.seed, draw: 0 });
        let grads = &self.born.tensors;
        let scale = self.state.part(StepState::SCALE_AT, size_of::<f32>())?.cast(DType::F32, 1)?;
        let seed = Seed { scale, targets: self.batch.target_count };
        let (device, times, loss) = (&self.device, self.report.times, self.loss);
        let launches = || {
            if first {
                step::begin(device, times, loss)?;
            }
            pass.forward()?;
            step::end_of(device, Part::Forward, times, loss)?;
            pass.loss(loss, Some(DeviceGradients { seed, grads }))?;
            pass.backward(grads)?;
            match &self.sum {
                None => {}
                Some(sum) if first => copy(device, self.born.whole, sum.whole)?,
                Some(sum) => accumulate(device, self.born.whole, sum.whole)?,
            }
            step::end_of(device, Part::Backward, times, loss)
        };
        let key = if first { FIRST_PASSES } else { FURTHER_PASSES };
        Ok(self.device.recorded(key, launches)?)
    }

    /// Launches what follows the passes: survey, verdict, update.
    fn update(&self, engine: &Engine) -> Result<()> {
        let Self { device, survey, .. } = self;
        let ReportBuffers { record, times, .. } = self.report;
        let total = self.sum.as_ref().unwrap_or(&self.born).whole.dtype;
        let exponents = engine.exponents.then_some(self.report.exponents);
        let AdamWConfig { betas, eps, .. } = engine.state.adamw.config();
        let rules = Rules {
            scaler: engine.state.scaler.config(),
            schedule: engine.schedule.into(),
            max_grad_norm: engine.max_grad_norm,
            betas,
        };
        let (loss, targets, state) = (self.loss, self.batch.target_count, self.state);
        let launches = || {
            if let Some(exponents) = exponents {
                device.zero(exponents)?;
            }
            survey::survey(device, total, self.format, SurveyBuffers { exponents, ..*survey })?;
            step::verdict(device, rules, VerdictBuffers { stats: survey.stats, loss, targets, state, record })?;
            step::end_of(device, Part::Survey, times, loss)?;
            let dtypes = [total, self.weights().whole.dtype];
            let betas = betas.map(|beta| beta as f32);
            adamw::step(device, dtypes, self.updated, self.chunks, state, betas, eps as f32)?;
            step::end_of(device, Part::Optimizer, times, loss)
        };
        Ok(device.recorded(if exponents.is_some() { UPDATE_WITH_EXPONENTS } else { UPDATE }, launches)?)
    }

    /// A step's figures from the `bytes` that were copied.
    fn read_survey(&self, record: &StepRecord, bytes: &[u8], exponents: bool, out: &mut Survey) -> Result<()> {
        let (tensors, report) = (self.masters.tensors.len(), &self.report);
        let stats: Vec<RawStats> = values_of(&bytes[report.at(report.stats)..], tensors)?;
        let counted = &bytes[report.at(report.exponents)..];
        let counted: Vec<u32> = if exponents { values_of(counted, tensors * BINS)? } else { Vec::new() };
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

    /// Ends the halt after an overflow: what was launched behind it is void.
    fn go_on_from(&mut self, after: StepState) -> Result<()> {
        for mut void in self.launched.drain(..) {
            self.device.settled(&mut void.report)?;
            self.spare.push(void.report);
        }
        Ok(self.device.upload(bytes_of(&[after.going_on()]), self.state)?)
    }

    /// An error while a step is on its way: the tensors are then those of some later step than the counters.
    fn check_calm(&self) -> Result<()> {
        if self.launched.is_empty() {
            return Ok(());
        }
        Err(Error::Kernel(candle_core::Error::Msg(
            "the device's tensors were asked for in the middle of a step".into(),
        )))
    }
}

impl<D: Multiply + Memory + Send> Accelerator for DeviceEngine<D> {
    fn name(&self) -> &str {
        self.device.name()
    }

    fn launch(&mut self, engine: &Engine, micro_batches: &[Batch]) -> Result<()> {
        let targets: usize = micro_batches.iter().map(|batch| batch.target_count).sum();
        let counters = engine.state.counters;
        let counters = Counters { step: counters.step + self.launched.len() as u64, ..counters };
        let exponents = engine.exponents;
        self.ahead = true;
        for (i, batch) in micro_batches.iter().enumerate() {
            self.passes(engine, batch, [targets as u64, counters.draw(i)], i == 0)?;
        }
        self.update(engine)?;
        let Some(mut pinned) = self.spare.pop() else {
            let message = format!("more than {STEPS_ON_THEIR_WAY} steps were launched at a time");
            return Err(Error::Kernel(candle_core::Error::Msg(message)));
        };
        self.device.post(self.report.wanted(exponents)?, &mut pinned)?;
        self.launched.push_back(Launched { report: pinned, targets, exponents });
        Ok(())
    }

    fn finish(&mut self, engine: &mut Engine) -> Result<StepReport> {
        let Some(Launched { report: mut pinned, targets, exponents }) = self.launched.pop_front() else {
            return Err(no_record());
        };
        let bytes = self.device.settled(&mut pinned)?;
        let record: Vec<StepRecord> = values_of(&bytes[self.report.at(self.report.record)..], 1)?;
        let times: Vec<StepTimes> = values_of(&bytes[self.report.at(self.report.times)..], 1)?;
        let (&[record], &[times]) = (&record[..], &times[..]) else { return Err(no_record()) };
        self.read_survey(&record, bytes, exponents, &mut engine.survey)?;
        self.spare.push(pinned);
        let state = &mut engine.state;
        if record.after.step != state.counters.step + 1 {
            return Err(no_record());
        }
        state.scaler = GradScaler::resume(*state.scaler.config(), record.after.scaler())?;
        let tokens = state.counters.tokens + targets as u64;
        state.counters = Counters { step: record.after.step, updates: record.after.updates, tokens };
        let StepRecord { loss, grad_norm, clip, lr, scale, .. } = record;
        let outcome = if record.applied() { Outcome::Applied { grad_norm, clip, lr } } else { Outcome::Skipped };
        if outcome == Outcome::Skipped {
            self.go_on_from(record.after)?;
        }
        let [forward, backward, survey, optimizer] = times.parts.map(Duration::from_nanos);
        let time = PartTimes { forward, backward, survey, optimizer };
        Ok(StepReport { loss, targets, scale, outcome, change: record.change(), time })
    }

    fn evaluate(
        &mut self,
        engine: &Engine,
        batch: &mut Batch,
        next: &mut dyn FnMut(&mut Batch) -> bool,
    ) -> Result<(f64, u64)> {
        self.check_calm()?;
        let mut targets = 0;
        self.device.zero(self.loss)?;
        while next(batch) {
            self.batch.send(&self.device, batch, engine.model.config().vocab_size, [0; 2])?;
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
        self.check_calm()?;
        self.ahead = false;
        self.send_state(state)
    }

    fn fetch(&mut self, state: &mut TrainState) -> Result<()> {
        self.check_calm()?;
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
