//! What takes training's steps in the CPU engine's place.

#[cfg(any(test, feature = "cuda"))]
use crate::Error;
use crate::Result;
use crate::data::Batch;
#[cfg(any(test, feature = "cuda"))]
use crate::engine::kernels::cross_entropy::TileLimit;
#[cfg(any(test, feature = "cuda"))]
use crate::engine::model::Gpt2Config;
use crate::train::config::{Config, Place};
#[cfg(any(test, feature = "cuda"))]
use crate::train::memory::{EngineBytes, largest_batch};
#[cfg(feature = "cuda")]
use crate::train::setup::Preparing;
use crate::train::setup::Report;
use crate::train::state::TrainState;
use crate::train::step::{Engine, StepReport};

/// Steps that a device may have before it at a time: one that it works on, one behind it, and one whose figures the host is
/// about to read.
pub(crate) const STEPS_ON_THEIR_WAY: usize = 3;

/// A device with a copy of the engine's tensors, on which it trains and evaluates. Counters, scaler and survey of the engine
/// are those of the last step; its tensors are what [`Accelerator::fetch`] last brought.
pub(crate) trait Accelerator: Send {
    /// For example `cuda:0 NVIDIA H200`.
    fn name(&self) -> &str;

    /// Begins [`Engine::step`] over `micro_batches`, without waiting for the steps begun before it, of which there may be
    /// [`STEPS_ON_THEIR_WAY`] less one.
    fn launch(&mut self, engine: &Engine, micro_batches: &[Batch]) -> Result<()>;

    /// Waits for the oldest step on its way, and takes over its figures. If it was skipped, the ones launched behind it are
    /// void: nothing is on its way any more.
    fn finish(&mut self, engine: &mut Engine) -> Result<StepReport>;

    /// [`Engine::step`], where no other is on its way.
    #[cfg(test)]
    fn step(&mut self, engine: &mut Engine, micro_batches: &[Batch]) -> Result<StepReport> {
        self.launch(engine, micro_batches)?;
        self.finish(engine)
    }

    /// [`Engine::evaluate`].
    fn evaluate(
        &mut self,
        engine: &Engine,
        batch: &mut Batch,
        next: &mut dyn FnMut(&mut Batch) -> bool,
    ) -> Result<(f64, u64)>;

    /// Goes on from `state`.
    fn send(&mut self, state: &TrainState) -> Result<()>;

    /// Brings masters, weights and moments into `state`, whose counters and scaler are up to date already.
    fn fetch(&mut self, state: &mut TrainState) -> Result<()>;
}

/// The GPU that `config` asks for, ready to go on where `engine` is; `None` where the CPU is to train, for which the engine
/// then has the buffers.
pub(crate) fn accelerator(
    config: &Config,
    engine: &mut Engine,
    report: &mut Report<'_>,
) -> Result<Option<Box<dyn Accelerator>>> {
    config.check_device()?;
    let ordinal = match config.place()? {
        Place::Cpu => return Ok(None),
        Place::Auto => None,
        Place::Cuda(ordinal) => Some(ordinal),
    };
    #[cfg(feature = "cuda")]
    let device = gpu(config, ordinal, engine, report)?;
    #[cfg(not(feature = "cuda"))]
    let (device, _) = (None, (ordinal, report));
    if device.is_none() {
        engine.resize(config.dtype, config.train.batch_size, config.train.seq_len)?;
    }
    Ok(device)
}

/// GPU `ordinal`, or the first one if that can be used.
#[cfg(feature = "cuda")]
fn gpu(
    config: &Config,
    ordinal: Option<usize>,
    engine: &mut Engine,
    report: &mut Report<'_>,
) -> Result<Option<Box<dyn Accelerator>>> {
    use crate::engine::kernels::cuda::driver::Gpu;
    use crate::engine::kernels::cuda::launch::Memory as _;
    let open = || -> Result<Gpu> {
        config.check_fits_gpus()?;
        let named = ordinal.map_or("auto".into(), |ordinal| format!("cuda:{ordinal}"));
        let refused = |error: candle_core::Error| {
            // Without the backtrace that candle may add: whatever the driver says, another device has to be chosen.
            let message = error.to_string();
            let message = message.lines().next().unwrap_or_default();
            Error::config("device", format!("`{named}`: {message}; or use `cpu`"))
        };
        Gpu::open(ordinal.unwrap_or(0), config.cuda_graph).map_err(refused)
    };
    let gpu = match open() {
        Ok(gpu) => gpu,
        Err(error) if ordinal.is_none() => {
            report(Preparing::Notice(format!("training on the CPU: {error}")));
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    check_memory(config, engine.model.config(), gpu.name(), gpu.free_bytes()?)?;
    let train = &config.train;
    let shape = [train.batch_size, train.seq_len, train.grad_accum];
    Ok(Some(Box::new(super::device::DeviceEngine::new(gpu, engine, config.dtype, shape)?)))
}

/// An error if the run does not fit the device's `free` bytes, with the batch that would.
#[cfg(any(test, feature = "cuda"))]
fn check_memory(config: &Config, shape: &Gpt2Config, name: &str, free: u64) -> Result<()> {
    let padded = Gpt2Config { vocab_size: shape.padded_vocab(), ..shape.clone() };
    let train = &config.train;
    let bytes = |batch| {
        let bytes = EngineBytes::new(&padded, config.dtype, [batch, train.seq_len, train.grad_accum], TileLimit::Gpu);
        bytes.map_or(u64::MAX, |bytes| bytes.total())
    };
    let asked = bytes(train.batch_size);
    if asked <= free {
        return Ok(());
    }
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let fits = match largest_batch(free, bytes) {
        Some(batch) => format!("{batch} would fit"),
        None => "not even one would fit".into(),
    };
    let (batch, seq_len) = (train.batch_size, train.seq_len);
    let message = format!(
        "{batch} sequences of {seq_len} tokens take {:.1} GiB where {name} has {:.1} GiB free; {fits}",
        gib(asked),
        gib(free)
    );
    Err(Error::config("train.batch_size", message))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
    use super::*;

    #[test]
    fn what_does_not_fit_is_refused_with_what_would() {
        let mut config = Config::default();
        (config.train.batch_size, config.train.seq_len) = (64, 1024);
        let shape = Gpt2Config::named("distilgpt2").unwrap();
        let check = |config: &Config, gib: u64| check_memory(config, &shape, "cuda:0 Some GPU", gib << 30);
        check(&config, 80).unwrap();
        let message = check(&config, 8).unwrap_err().to_string();
        let (start, fits) = message.split_once("; ").unwrap();
        assert!(start.starts_with("train.batch_size: 64 sequences of 1024 tokens take "), "{message}");
        assert!(start.ends_with(" GiB where cuda:0 Some GPU has 8.0 GiB free"), "{message}");
        let largest: usize = fits.strip_suffix(" would fit").unwrap().parse().unwrap();
        config.train.batch_size = largest;
        check(&config, 8).unwrap();
        config.train.batch_size = largest + 1;
        check(&config, 8).unwrap_err();
        assert!(check(&config, 1).unwrap_err().to_string().ends_with("not even one would fit"));
    }
}
