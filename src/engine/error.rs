//! candle's errors as [`Error::Engine`].

use crate::Error;
use candle_core::Error as CandleError;

impl From<CandleError> for Error {
    fn from(error: CandleError) -> Self {
        Self::Engine { message: message(&error), backtrace: frames(&error).filter(|text| has_symbols(text)) }
    }
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

/// Whether a backtrace names a function of this program. Without symbols, as in a release build, it only counts frames.
fn has_symbols(frames: &str) -> bool {
    frames.contains(env!("CARGO_PKG_NAME"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::backtrace::Backtrace;

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
        assert!(!has_symbols(
            "   0: <unknown>\n   1: __libc_start_main_impl\n             at ./csu/libc-start.c:360:3\n"
        ));
        assert!(has_symbols("   0: <unknown>\n   1: finetune::main\n"));
    }
}
