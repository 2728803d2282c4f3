//! A run in the terminal: the dashboard, and the plain lines where there is no screen.
//!
//! Everything here is a reader of [`telemetry`](crate::telemetry) records and knows nothing of training.

mod format;
mod pace;
mod plain;
mod progress;

pub use plain::Plain;
pub use progress::Progress;
