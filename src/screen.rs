//! Shows a run in the terminal: as the dashboard, as one status line, or as plain lines.
//!
//! Everything here reads [`telemetry`](crate::telemetry) records and knows nothing of training.

mod dashboard;
mod output;
mod picture;
mod plain;
mod progress;
mod renderer;
pub mod terminal;
mod watch;
mod words;

pub(crate) use output::{Output, Terminal};
pub(crate) use picture::{Format, picture};
pub(crate) use plain::Plain;
pub(crate) use progress::Progress;
pub(crate) use renderer::follow_with;
pub use renderer::{Exit, follow};
pub(crate) use watch::{watch, watch_plain};
