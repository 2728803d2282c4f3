//! Training: the recipe, the state it moves, and the loop around it.

mod attribution;
mod beside;
mod config;
mod fallback;
mod fp8;
mod headroom;
mod memory;
mod observer;
mod passes;
mod probe;
mod records;
mod sample;
mod setup;
mod state;
mod step;
mod trainer;
mod verify;

pub use beside::{Learned, Reader};
pub use config::{Config, Init, Layers, Place, check_threads};
pub use fp8::Fp8Layer;
pub use memory::{EngineBytes, largest_batch, packed_bytes, probe_bytes, sample_bytes};
pub use sample::Sampler;
pub(crate) use setup::refuse_misspelling;
pub use setup::{Located, ModelSource, Preparing, Report, dataset, dialogues, engine, locate, reading, whole_text};
pub use state::{Counters, TrainState};
pub use step::{Engine, Outcome, PartTimes, StepReport};
pub use trainer::{Beginning, StillHere, Trainer};
pub use verify::{ResumeProof, verify_resume};
