//! Drawing shared by every screen, page and report: roles and their colours, charts, formats of numbers.
//!
//! Nothing here knows what it draws.

mod ascii;
pub(crate) mod format;
mod pad;
mod palette;
mod plot;
mod ruler;
mod theme;

pub(crate) use ascii::to_ascii;
pub(crate) use pad::Pad;
pub(crate) use palette::Palette;
pub(crate) use plot::{Axes, Plot};
pub(crate) use ruler::Ruler;
pub(crate) use theme::Role;
pub use theme::{Look, Theme};
