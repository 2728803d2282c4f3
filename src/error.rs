//! The one error type of the library.
//!
//! A variant says what failed and where; its message ends with what to do next where that is not obvious.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The library's result type.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong, in terms of what the user can look at: a flag, a key, a file, a tensor, a step.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A flag, a key of a configuration file or their combination makes no sense.
    #[error("{key}: {message}")]
    Config {
        /// The flag (`--seq-len`) or dotted key (`scaler.init_scale`).
        key: String,
        /// What is wrong and what to write instead.
        message: String,
    },
    /// The operating system refused an operation on a path.
    #[error("cannot {action} `{}`: {source}", path.display())]
    Io {
        /// What was tried: "read", "create", "rename", ….
        action: &'static str,
        /// On which file or folder.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// Training text or tokens that cannot be used.
    #[error("{origin}: {message}")]
    Data {
        /// The file or built-in corpus.
        origin: String,
        /// What is wrong, with the position where there is one.
        message: String,
    },
    /// A model folder, its configuration or one of its tensors does not fit.
    #[error("{origin}: {message}")]
    Model {
        /// The folder, file or model name.
        origin: String,
        /// What is wrong; tensors with their names, dtypes and shapes.
        message: String,
    },
    /// A file could not be had from the Hugging Face Hub or another server.
    #[error("{origin}: {message}")]
    Hub {
        /// The repository, with the file where it concerns one, or the URL.
        origin: String,
        /// What the server did and what to do next.
        message: String,
    },
    /// A checkpoint is damaged, incomplete, of a newer format, or does not fit the run.
    #[error("checkpoint `{}`: {message}", path.display())]
    Checkpoint {
        /// The step directory, or the file in it.
        path: PathBuf,
        /// What is wrong and what to do.
        message: String,
    },
    /// A gradient scaler was used out of order or built from values it cannot work with.
    #[error("grad scaler: {0}")]
    Scaler(String),
    /// The run's numbers cannot be saved by a lower loss scale.
    #[error("step {step}: {message}")]
    Diverged {
        /// The attempted step, counted from 1.
        step: u64,
        /// Which pass and tensor were not finite, and which checkpoint is the last good one.
        message: String,
    },
    /// An operation of the engine or of candle failed.
    #[error(transparent)]
    Kernel(#[from] candle_core::Error),
}

impl Error {
    /// A [`Error::Config`] about `key`.
    pub fn config(key: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Config { key: key.into(), message: message.into() }
    }

    /// A closure for `map_err` that says what was tried on which path.
    pub fn io(action: &'static str, path: impl AsRef<Path>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.as_ref().to_path_buf();
        move |source| Self::Io { action, path, source }
    }

    /// A [`Error::Data`] about `origin`.
    pub fn data(origin: impl std::fmt::Display, message: impl Into<String>) -> Self {
        Self::Data { origin: origin.to_string(), message: message.into() }
    }

    /// A [`Error::Model`] about `origin`.
    pub fn model(origin: impl std::fmt::Display, message: impl Into<String>) -> Self {
        Self::Model { origin: origin.to_string(), message: message.into() }
    }

    /// A [`Error::Hub`] about `origin`.
    pub fn hub(origin: impl std::fmt::Display, message: impl Into<String>) -> Self {
        Self::Hub { origin: origin.to_string(), message: message.into() }
    }

    /// A [`Error::Checkpoint`] about `path`.
    pub fn checkpoint(path: impl AsRef<Path>, message: impl Into<String>) -> Self {
        Self::Checkpoint { path: path.as_ref().to_path_buf(), message: message.into() }
    }

    /// The process's exit code: 2 for what the user typed or pointed at, 3 for a run whose numbers broke, else 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Config { .. } | Self::Data { .. } | Self::Model { .. } | Self::Checkpoint { .. } => 2,
            Self::Diverged { .. } => 3,
            Self::Io { source, .. } if is_wrong_path(source.kind()) => 2,
            Self::Io { .. } | Self::Hub { .. } | Self::Scaler(_) | Self::Kernel(_) => 1,
        }
    }
}

/// Whether the path is at fault, which the user gave, and not the machine.
fn is_wrong_path(kind: ErrorKind) -> bool {
    use ErrorKind::{
        InvalidData, InvalidInput, IsADirectory, NotADirectory, NotFound, PermissionDenied, ReadOnlyFilesystem,
    };
    matches!(
        kind,
        InvalidData | InvalidInput | IsADirectory | NotADirectory | NotFound | PermissionDenied | ReadOnlyFilesystem
    )
}
