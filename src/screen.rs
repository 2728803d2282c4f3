//! Shows a run in the terminal: as the dashboard, as one status line, or as plain lines.
//!
//! Everything here reads [`telemetry`](crate::telemetry) records and does not depend on training.

mod dashboard;
mod output;
mod picture;
mod plain;
mod progress;
mod renderer;
pub mod terminal;
mod watch;
mod words;

pub(crate) use output::{DisplayMode, Terminal};
pub(crate) use picture::{ImageFormat, picture};
pub(crate) use plain::PlainPrinter;
pub(crate) use progress::{StatusLine, status_line};
pub use renderer::{Exit, LiveSource, follow};
pub(crate) use watch::{watch, watch_plain};
