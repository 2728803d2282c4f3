//! The one error type of the library.
//!
//! A variant contains the failure and its location; its message ends with the next step, unless that is obvious.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The library's result type.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// All errors. Each names something that the user can inspect: a flag, a key, a file, a tensor, a step.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A flag, a key of a configuration file or their combination is invalid.
    #[error("{key}: {message}")]
    Config {
        /// The flag (`--seq-len`) or dotted key (`scaler.init_scale`).
        key: String,
        /// The problem and the valid values.
        message: String,
    },
    /// An operation on a path failed.
    #[error("cannot {action} `{}`: {source}", path.display())]
    Io {
        /// The operation: "read", "create", "rename", ….
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// Training text or tokens that cannot be used.
    #[error("{origin}: {message}")]
    Data {
        /// The file or built-in corpus.
        origin: String,
        /// The problem, with its position if known.
        message: String,
    },
    /// The rewards of completions cannot be computed. All processes of a run have the same error.
    #[error("{origin}: {message}")]
    Reward {
        /// The program.
        origin: String,
        /// The problem and the next step.
        message: String,
    },
    /// A model folder, its configuration or one of its tensors is invalid.
    #[error("{origin}: {message}")]
    Model {
        /// The folder, file or model name.
        origin: String,
        /// The problem; tensors with their names, dtypes and shapes.
        message: String,
    },
    /// A file could not be downloaded from the Hugging Face Hub or another server.
    #[error("{origin}: {message}")]
    Hub {
        /// The repository, with the file if it concerns one, or the URL.
        origin: String,
        /// The problem and the next step.
        message: String,
    },
    /// A checkpoint is damaged, incomplete, of a newer format, or does not fit the run.
    #[error("checkpoint `{}`: {message}", path.display())]
    Checkpoint {
        /// The step directory, or the file in it.
        path: PathBuf,
        /// The problem and the next step.
        message: String,
    },
    /// A gradient scaler was used out of order or created with invalid values.
    #[error("grad scaler: {0}")]
    Scaler(String),
    /// Training diverged.
    #[error("step {step}: {message}")]
    Diverged {
        /// The attempted step, counted from 1.
        step: u64,
        /// The pass and tensor that were not finite, and the last checkpoint.
        message: String,
    },
    /// The processes of a run cannot continue together.
    #[error("{0}")]
    Collective(String),
    /// An operation of the engine failed.
    #[error("{message}")]
    Engine {
        /// The problem.
        message: String,
        /// The stack frames at that place, captured under `RUST_BACKTRACE=1`; `None` if they have no symbols.
        backtrace: Option<String>,
    },
}

impl Error {
    /// A [`Error::Config`] about `key`.
    pub fn config(key: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Config { key: key.into(), message: message.into() }
    }

    /// A closure for `map_err` that adds the operation and the path.
    pub fn io(action: &'static str, path: impl AsRef<Path>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.as_ref().to_path_buf();
        move |source| Self::Io { action, path, source }
    }

    /// For `map_err`: standard output cannot be written.
    pub fn stdout(source: std::io::Error) -> Self {
        Self::io("write to", "standard output")(source)
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

    /// An [`Error::Engine`] without stack frames.
    pub fn engine(message: impl std::fmt::Display) -> Self {
        Self::Engine { message: message.to_string(), backtrace: None }
    }

    /// Whether all processes of a run have this error, so that they can still act together.
    pub(crate) fn is_common(&self) -> bool {
        matches!(self, Self::Diverged { .. } | Self::Reward { .. })
    }

    /// The message without the origin, which the caller names.
    pub(crate) fn into_message(self) -> String {
        match self {
            Self::Data { message, .. } | Self::Model { message, .. } => message,
            error => error.to_string(),
        }
    }

    /// The stack frames of an [`Error::Engine`].
    pub fn backtrace(&self) -> Option<&str> {
        let Self::Engine { backtrace, .. } = self else { return None };
        backtrace.as_deref()
    }

    /// The process's exit code: 2 for wrong input from the user, 3 for a diverged run, else 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Config { .. }
            | Self::Data { .. }
            | Self::Reward { .. }
            | Self::Model { .. }
            | Self::Checkpoint { .. } => 2,
            Self::Diverged { .. } => 3,
            Self::Io { source, .. } if is_wrong_path(source) => 2,
            Self::Io { .. } | Self::Hub { .. } | Self::Scaler(_) | Self::Collective(_) | Self::Engine { .. } => 1,
        }
    }
}

/// Whether the error means that the user's path is wrong, and not that the machine failed.
fn is_wrong_path(error: &std::io::Error) -> bool {
    use ErrorKind::{
        InvalidData, InvalidFilename, InvalidInput, IsADirectory, NotADirectory, NotFound, PermissionDenied,
        ReadOnlyFilesystem,
    };
    let is_loop = error.raw_os_error() == Some(libc::ELOOP);
    let wrong = [InvalidData, InvalidFilename, InvalidInput, IsADirectory, NotADirectory, NotFound];
    is_loop || wrong.contains(&error.kind()) || [PermissionDenied, ReadOnlyFilesystem].contains(&error.kind())
}
