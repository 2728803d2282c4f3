//! From gradients to updates: masters, AdamW, clipping, the learning-rate schedule.

mod adamw;
mod blockwise;
mod gradients;
mod schedule;
pub(crate) mod tree;

pub use adamw::{AdamW, AdamWConfig, MasterWeights, OptimizerConfig, OptimizerKind, Quantised, Update};
pub use blockwise::Blockwise;
pub use gradients::{Gradients, Survey};
pub use schedule::{LrSchedule, ScheduleKind};
