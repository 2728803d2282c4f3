//! Drawing shared by every screen, page and report: roles and their colors, charts, formats of numbers.
//!
//! The functions receive figures, series and text; their meaning is the caller's.

mod ascii;
mod canvas;
pub(crate) mod format;
pub(crate) mod html;
mod page;
mod palette;
mod plot;
mod ruler;
mod theme;

pub(crate) use ascii::to_ascii;
pub(crate) use canvas::Canvas;
#[cfg(test)]
pub(crate) use canvas::{folded, text_of};
pub(crate) use page::{Column, Line, Page, column_cell, plain};
#[cfg(test)]
pub(crate) use palette::Palette;
pub(crate) use palette::may_color;
pub(crate) use plot::{Axes, DOTS, Plot, extent, power_range};
pub(crate) use ruler::Ruler;
pub(crate) use theme::Role;
pub use theme::{ColorScheme, Theme};
