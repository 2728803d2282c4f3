//! From gradients to updates: masters, AdamW, clipping, the learning-rate schedule.

mod adamw;
mod gradients;
mod schedule;
pub(crate) mod tree;

pub use crate::engine::kernels::blockwise::BlockwiseQuantized;
pub use adamw::{AdamW, AdamWConfig, MasterWeights, OptimizerConfig, OptimizerKind, QuantizedMoments, Update};
pub use gradients::{Collector, GradientStats, Gradients, Sharding, Turn};
pub use schedule::{LrSchedule, ScheduleKind};
