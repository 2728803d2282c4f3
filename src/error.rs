//! The one error type of the library.
//!
//! A variant says what failed and where; its message ends with what to do next, unless that is obvious.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use candle_core::Error as CandleError;

/// The library's result type.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// All errors, in terms of what the user can inspect: a flag, a key, a file, a tensor, a step.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A flag, a key of a configuration file or their combination is invalid.
    #[error("{key}: {message}")]
    Config {
        /// The flag (`--seq-len`) or dotted key (`scaler.init_scale`).
        key: String,
        /// What is wrong and what to write instead.
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
        /// What is wrong, with the position if there is one.
        message: String,
    },
    /// A model folder, its configuration or one of its tensors is invalid.
    #[error("{origin}: {message}")]
    Model {
        /// The folder, file or model name.
        origin: String,
        /// What is wrong; tensors with their names, dtypes and shapes.
        message: String,
    },
    /// A file could not be downloaded from the Hugging Face Hub or another server.
    #[error("{origin}: {message}")]
    Hub {
        /// The repository, with the file if it concerns one, or the URL.
        origin: String,
        /// What happened and what to do next.
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
    /// The processes of a run cannot go on together.
    #[error("{0}")]
    Collective(String),
    /// An operation of the engine or of candle failed.
    #[error("{}", message(.0))]
    Kernel(#[from] CandleError),
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

    /// The stack frames of an [`Error::Kernel`], which candle captures under `RUST_BACKTRACE=1`; `None` if they have no symbols.
    pub fn backtrace(&self) -> Option<String> {
        let Self::Kernel(error) = self else { return None };
        frames(error).filter(|text| has_symbols(text))
    }

    /// The process's exit code: 2 for wrong input from the user, 3 for a diverged run, else 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Config { .. } | Self::Data { .. } | Self::Model { .. } | Self::Checkpoint { .. } => 2,
            Self::Diverged { .. } => 3,
            Self::Io { source, .. } if is_wrong_path(source.kind()) => 2,
            Self::Io { .. } | Self::Hub { .. } | Self::Scaler(_) | Self::Collective(_) | Self::Kernel(_) => 1,
        }
    }
}

/// Whether the error means that the user's path is wrong, and not that the machine failed.
fn is_wrong_path(kind: ErrorKind) -> bool {
    use ErrorKind::{
        InvalidData, InvalidInput, IsADirectory, NotADirectory, NotFound, PermissionDenied, ReadOnlyFilesystem,
    };
    matches!(
        kind,
        InvalidData | InvalidInput | IsADirectory | NotADirectory | NotFound | PermissionDenied | ReadOnlyFilesystem
    )
}

/// The text of `error` without the backtraces that candle prints among it.
fn message(error: &CandleError) -> String {
    match error {
        CandleError::WithBacktrace { inner, .. } => message(inner),
        CandleError::WithPath { inner, path } => format!("`{}`: {}", path.display(), message(inner)),
        CandleError::Context { inner, context } => format!("{context}: {}", message(inner)),
        CandleError::WrappedContext { wrapped, context } => match wrapped.downcast_ref() {
            Some(inner) => format!("{context}: {}", message(inner)),
            None => format!("{context}: {wrapped}"),
        },
        other => other.to_string(),
    }
}

/// The innermost backtrace in `error`.
fn frames(error: &CandleError) -> Option<String> {
    match error {
        CandleError::WithBacktrace { inner, backtrace } => frames(inner).or_else(|| Some(backtrace.to_string())),
        CandleError::WithPath { inner, .. } | CandleError::Context { inner, .. } => frames(inner),
        CandleError::WrappedContext { wrapped, .. } => wrapped.downcast_ref().and_then(frames),
        _ => None,
    }
}

/// Whether a backtrace names a function. In a program without symbols, such as a release build, it only counts frames.
fn has_symbols(frames: &str) -> bool {
    frames.lines().any(|frame| !frame.ends_with(": <unknown>"))
}

#[cfg(test)]
mod tests {
    use std::backtrace::Backtrace;

    use super::*;

    #[test]
    fn an_internal_error_keeps_its_backtrace_out_of_its_message() {
        let backtrace = || Box::new(Backtrace::force_capture());
        let traced = |inner| CandleError::WithBacktrace { inner: Box::new(inner), backtrace: backtrace() };
        let inner = traced(traced(CandleError::Msg("no buffers".into())).with_path("a.gguf"));
        let wrapped = CandleError::WrappedContext { wrapped: Box::new(inner), context: "block 3".into() };
        let error = Error::from(traced(wrapped).context("step 7"));
        assert_eq!(error.to_string(), "step 7: block 3: `a.gguf`: no buffers");
        assert!(
            error.backtrace().is_some_and(|frames| frames.contains("out_of_its_message")),
            "{:?}",
            error.backtrace()
        );
        assert_eq!(Error::from(CandleError::Msg("no buffers".into())).backtrace(), None);
    }

    #[test]
    fn frames_without_symbols_are_not_printed() {
        assert!(!has_symbols("   0: <unknown>\n   1: <unknown>\n"));
        assert!(has_symbols("   0: <unknown>\n   1: finetune::main\n"));
    }
}
