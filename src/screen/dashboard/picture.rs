//! Renders a frame as a picture, for documents and reports.

mod png;
mod svg;

use super::event_loop::Source;
use super::state::{Mode, Msg, Other, ViewModel, update};
use super::view;
use super::watch::Watched;
use crate::Result;
use crate::ui::{Look, Theme};
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::layout::Rect;
use std::path::PathBuf;

/// The encoding of a picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Vector shapes and text.
    Svg,
    /// Pixels, eight by sixteen per cell.
    Png,
}

/// Renders the dashboard with `columns` × `rows` cells after these keys (a line break is Enter). Shows the run of the first
/// log, with the others overlaid.
///
/// # Errors
/// If a log cannot be read.
pub fn picture(
    logs: &[PathBuf],
    keys: &str,
    (columns, rows): (u16, u16),
    look: Look,
    format: Format,
) -> Result<Vec<u8>> {
    let mut state = ViewModel::new(Mode::Watching);
    state.others = logs.iter().skip(1).map(|_| Other::default()).collect();
    let mut source = Watched::new(logs, None);
    while source.poll(&mut |msg| _ = update(&mut state, msg))? {}
    let now = state.run().last_t;
    update(&mut state, Msg::Clock(now));
    update(&mut state, Msg::Size(columns, rows));
    for key in keys.chars() {
        let code = if key == '\n' { KeyCode::Enter } else { KeyCode::Char(key) };
        update(&mut state, Msg::Key(KeyEvent::new(code, KeyModifiers::NONE)));
    }
    let mut buffer = Buffer::empty(Rect::new(0, 0, columns, rows));
    view::draw(&state, Theme::truecolor(look), &mut buffer);
    let look = state.look.unwrap_or(look);
    match format {
        Format::Svg => Ok(svg::svg(&buffer, look).into_bytes()),
        Format::Png => png::png(&buffer, look),
    }
}
