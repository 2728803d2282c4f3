//! Training: the recipe, the state it moves, and the loop around it.

mod attribution;
mod config;
mod engine;
mod fallback;
mod fp8;
mod headroom;
mod memory;
mod observer;
mod probe;
mod records;
mod sample;
mod setup;
mod state;
mod step;
mod trainer;
mod verify;

pub use config::{Config, Init, Layers, Place, check_threads};
pub use engine::{Engine, Outcome, RankTiming, StepReport, StepTimings};
pub use fp8::Fp8Block;
pub use memory::{DistributedLayout, EngineBytes, largest_batch, packed_bytes, probe_bytes, sample_bytes};
pub use sample::Sampler;
pub(crate) use setup::refuse_misspelling;
pub use setup::{Located, ModelSource, Preparing, Report, dataset, dialogues, engine, locate, reading, whole_text};
pub use state::{Counters, TrainState};
pub use trainer::{Heartbeat, RunStart, Trainer};
pub use verify::{ResumeProof, verify_resume};
