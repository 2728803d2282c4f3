//! What takes training's steps in the CPU engine's place.

use crate::Result;
use crate::data::Batch;
use crate::train::state::TrainState;
use crate::train::step::{Engine, StepReport};

/// A device with a copy of the engine's tensors, on which it trains and evaluates. Counters, scaler and survey of the engine
/// are those of the last step; its tensors are what [`Accelerator::fetch`] last brought.
pub(crate) trait Accelerator: Send {
    /// [`Engine::step`].
    fn step(&mut self, engine: &mut Engine, micro_batches: &[Batch]) -> Result<StepReport>;

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
