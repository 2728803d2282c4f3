//! Shows a run in the terminal: as the dashboard, as one status line, or as plain lines.
//!
//! Everything here reads [`telemetry`](crate::telemetry) records and knows nothing of training.

mod ascii;
mod event_loop;
mod event_text;
pub(crate) mod format;
mod keys;
mod layout;
mod mouse;
mod output;
mod pad;
mod panels;
mod picture;
mod plain;
mod plot;
mod progress;
mod ruler;

mod state;
mod theme;
mod view;
mod watch;

#[cfg(test)]
mod tests;

pub use event_loop::{follow, follow_plain};
pub use output::{Output, Terminal};
pub use picture::{Format, picture};
pub use plain::Plain;
pub(crate) use plot::{Axes, Plot};
pub use progress::Progress;
pub use state::Exit;
pub(crate) use theme::Role;
pub use theme::{Look, Theme};
pub use watch::{watch, watch_plain};
