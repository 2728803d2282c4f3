//! What the program's screens share: the table their keys stand in, their colours, and the terminal itself, taken and given
//! back whatever happens. Nothing here knows what a screen shows.

pub(crate) mod keys;
mod palette;
mod screen;
mod signals;

pub(crate) use keys::Binding;
pub(crate) use palette::Palette;
pub(crate) use screen::Screen;
pub(crate) use signals::Ending;
pub use signals::{Interruption, outlive_file_size_limit};
