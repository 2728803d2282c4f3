//! Shared by the program's screens: the key table, the colours, and taking over and restoring the terminal. Nothing here
//! knows what a screen shows.

pub(crate) mod keys;
mod palette;
mod screen;
mod signals;

pub(crate) use keys::Binding;
pub(crate) use palette::Palette;
pub(crate) use screen::Screen;
pub(crate) use signals::Ending;
pub use signals::{Interruption, hold_signals, outlive_file_size_limit};
