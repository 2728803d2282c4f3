//! Checkpoints, written so that a kill, a full disk or a damaged file never costs more than the affected save.
//!
//! ```text
//! <run>/latest                 name of the newest complete step directory
//! <run>/step-000128/           a full checkpoint; `weights-000128/` holds the first three files and the manifest only
//!     config.json tokenizer.json model.safetensors   the compute-dtype weights: a Hugging Face model folder
//!     master.safetensors                             FP32 master weights
//!     optimizer.safetensors                          Adam's moments in FP32: `exp_avg.*`, `exp_avg_sq.*`
//!     state.json                                     [`State`]
//!     manifest.json                                  [`Manifest`]: size and SHA-256 of every file above; written last
//! ```
//!
//! A save writes into a hidden sibling, syncs files and folder, renames it to its final name, syncs the parent, then
//! updates `latest`; a deletion renames to a hidden name first. So a directory with a visible name is complete, and the
//! next [`Run::open`] removes hidden directories, which remain after a kill. Checkpoints are ordered by their
//! manifests' [`save_index`](Manifest::save_index), not by the clock.

mod compare;
mod disk;
mod find;
mod manifest;
mod proof;
mod read;
mod run;
mod save;
mod state;

pub use compare::{CheckpointDifference, compare};
pub use disk::{Disk, FsOp};
pub use find::{
    CheckpointEntry, ResumeCandidate, RetentionPolicy, best, by_loss, expired, latest_run, latest_valid, list,
};
pub use manifest::{CheckpointKind, Manifest};
pub use proof::{check_proofs, differing_parts, logged_checkpoints, prove};
pub use read::{Checkpoint, CorruptFile, verify};
pub use run::{Run, SaveResult, is_in_use, noted_end};
pub use save::{Contents, ShardedTensors, StateTensor, stored_bytes};
pub use state::{Base, Best, FORMAT_VERSION, Fingerprint, State};
