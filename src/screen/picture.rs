//! Renders a frame as a picture, for documents and reports.

mod png;
mod svg;

use super::dashboard::App;
use super::renderer::MessageSource;
use super::watch::LogSource;
use crate::Result;
use crate::ui::{ColorScheme, Theme};
use ratatui::buffer::{Buffer, Cell};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier};
use std::path::PathBuf;
use std::time::Duration;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ImageFormat {
    /// Vector shapes and text.
    Svg,
    /// Pixels, eight by sixteen per cell.
    Png,
}

type Rgb = (u8, u8, u8);

/// The colors of a cell: ink and paper.
fn colors(cell: &Cell, scheme: ColorScheme) -> (Rgb, Rgb) {
    let rgb = |color, default| if let Color::Rgb(r, g, b) = color { (r, g, b) } else { default };
    let (ink, paper) = scheme.page();
    let (ink, paper) = (rgb(cell.fg, ink), rgb(cell.bg, paper));
    if cell.modifier.contains(Modifier::REVERSED) { (paper, ink) } else { (ink, paper) }
}

/// Renders the dashboard with `columns` × `rows` cells after these keys (a line break is Enter). Shows the run of the
/// first log, with the others overlaid.
pub(crate) fn picture(
    logs: &[PathBuf],
    keys: &str,
    (columns, rows): (u16, u16),
    scheme: ColorScheme,
    format: ImageFormat,
) -> Result<Vec<u8>> {
    let mut app = App::watching(logs);
    let mut source = LogSource::new(logs, None);
    while source.poll(Duration::ZERO, &mut |message| app.receive(message))? {}
    app.scene.now = app.scene.run().last_t;
    app.size = (columns, rows);
    for key in keys.chars() {
        // A dialog ignores keys that come too soon.
        app.uptime += 1000;
        let code = if key == '\n' { KeyCode::Enter } else { KeyCode::Char(key) };
        app.key(KeyEvent::new(code, KeyModifiers::NONE));
    }
    let mut buffer = Buffer::empty(Rect::new(0, 0, columns, rows));
    app.draw(Theme::truecolor(scheme), &mut buffer);
    let scheme = app.scheme.unwrap_or(scheme);
    match format {
        ImageFormat::Svg => Ok(svg::svg(&buffer, scheme).into_bytes()),
        ImageFormat::Png => png::png(&buffer, scheme),
    }
}
