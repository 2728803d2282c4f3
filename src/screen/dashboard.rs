//! Shows a run in the terminal: as the dashboard, as one status line, or as plain lines.
//!
//! Everything here reads [`telemetry`](crate::telemetry) records and knows nothing of training.

mod event_loop;
mod event_text;
mod keys;
mod layout;
mod mouse;
mod output;
mod panels;
mod picture;
mod plain;
mod progress;
mod state;
mod view;
mod watch;

#[cfg(test)]
mod tests;

pub use event_loop::{follow, follow_plain};
pub use output::{Output, Terminal};
pub use picture::{Format, picture};
pub use plain::Plain;
pub use progress::Progress;
pub use state::Exit;
pub use watch::{watch, watch_plain};
