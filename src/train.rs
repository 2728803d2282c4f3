//! Training: the recipe, the state it moves, and the loop around it.

mod config;
mod state;
mod step;

pub use config::{Config, Init, Layers, known_keys};
pub use state::{Counters, TrainState};
pub use step::{Engine, Outcome, PartTimes, StepReport};
