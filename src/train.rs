//! Training: the recipe, the state it moves, and the loop around it.

mod state;
mod step;

pub use state::{Counters, TrainState};
pub use step::{Engine, Outcome, PartTimes, StepReport};
