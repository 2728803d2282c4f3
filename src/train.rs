//! Training: the recipe, the state it moves, and the loop around it.

mod bisect;
mod callbacks;
mod config;
mod engine;
mod fallback;
mod fp8;
mod headroom;
mod memory;
mod objective;
mod overflow_trace;
mod probe;
mod records;
mod reward;
mod rollout;
mod sample;
mod setup;
mod state;
mod step;
mod trainer;
mod verify;

pub use bisect::{Bisection, GradientError, KeptLayers, KeptSites, RoundingCost, Site, SiteKind};
pub use config::{Config, ConfigLayers, DataSets, DeviceSpec, Interval, ObjectiveSection, WeightInit, check_threads};
pub(crate) use config::{check_floats, settings_at};
pub use engine::{EvalReport, RankTiming, StepOutcome, StepReport, StepTimings, TrainEngine};
pub use fp8::Fp8Blocks;
pub use memory::{DistributedLayout, MemoryEstimate, MemoryExtras, MemoryInputs, largest_batch, sample_bytes};
pub use objective::{
    CompletionLogp, CompletionLoss, LossSums, Objective, ObjectiveKind, PairLoss, Reference, ReferenceLogps,
    ReferenceModel, SampledToken, Split, TokenLoss, advantages, completion_loss, pair_loss, token_loss,
};
pub use reward::OnRewardError;
pub use rollout::RolloutRecord;
pub use sample::Sampler;
pub(crate) use setup::check_misspelling;
pub use setup::{
    ModelSource, SetupCallback, SetupEvent, dataset_options, datasets, engine, locate, open_device, rows, with_loader,
};
pub use state::{Counters, TrainState};
pub use trainer::{LrRangeTest, RunEnd, RunStart, Trainer, with_heartbeat};
pub use verify::{RecordedRun, ResumeCheck, verify_resume};
