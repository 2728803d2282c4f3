//! Chooses how a run is shown.

use super::dashboard::Size;
use ratatui::layout::Rect;
use std::io::IsTerminal;

/// How a run is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DisplayMode {
    /// The whole screen.
    Dashboard,
    /// One status line on standard error.
    Progress,
    /// Lines on standard output.
    Plain,
}

/// The properties of the terminal that the choice depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Terminal {
    /// Whether standard output is a terminal.
    pub(crate) stdout: bool,
    /// Whether standard error is one.
    pub(crate) stderr: bool,
    /// Whether it cannot move the cursor: `TERM=dumb`, or no `TERM`.
    pub(crate) dumb: bool,
    /// Columns and rows.
    pub(crate) size: (u16, u16),
}

impl Terminal {
    pub(crate) fn current() -> Self {
        let stdout = std::io::stdout().is_terminal();
        // Without a terminal crossterm would start `tput` to ask for a size.
        let size = if stdout { ratatui::crossterm::terminal::size().unwrap_or((0, 0)) } else { (0, 0) };
        Self {
            stdout,
            stderr: std::io::stderr().is_terminal(),
            dumb: std::env::var("TERM").map_or(true, |term| term.is_empty() || term == "dumb"),
            size,
        }
    }

    /// The output for this terminal: the one `asked` for, else the dashboard; plain lines if the terminal cannot show
    /// it.
    pub(crate) fn output(self, asked: Option<DisplayMode>) -> DisplayMode {
        let (width, height) = self.size;
        let fits = matches!(Size::of(Rect::new(0, 0, width, height)), Size::Full | Size::Compact | Size::Small);
        match asked {
            Some(DisplayMode::Dashboard) if self.stdout && !self.dumb => DisplayMode::Dashboard,
            None if self.stdout && !self.dumb && fits => DisplayMode::Dashboard,
            Some(DisplayMode::Progress) | None if self.stdout && self.stderr && !self.dumb => DisplayMode::Progress,
            Some(DisplayMode::Progress) if self.stderr && !self.dumb => DisplayMode::Progress,
            _ => DisplayMode::Plain,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: Terminal = Terminal { stdout: true, stderr: true, dumb: false, size: (120, 36) };

    #[test]
    fn the_dashboard_needs_a_terminal_with_room() {
        assert_eq!(Terminal { size: (60, 40), ..FULL }.output(None), DisplayMode::Dashboard);
        assert_eq!(Terminal { size: (100, 11), ..FULL }.output(None), DisplayMode::Progress);
        assert_eq!(FULL.output(None), DisplayMode::Dashboard);
        assert_eq!(Terminal { size: (39, 20), ..FULL }.output(None), DisplayMode::Progress);
        assert_eq!(Terminal { stdout: false, ..FULL }.output(None), DisplayMode::Plain);
        assert_eq!(Terminal { dumb: true, ..FULL }.output(None), DisplayMode::Plain);
    }

    #[test]
    fn a_requested_output_is_used_if_the_terminal_can_show_it() {
        assert_eq!(FULL.output(Some(DisplayMode::Plain)), DisplayMode::Plain);
        assert_eq!(FULL.output(Some(DisplayMode::Progress)), DisplayMode::Progress);
        assert_eq!(Terminal { size: (60, 20), ..FULL }.output(Some(DisplayMode::Dashboard)), DisplayMode::Dashboard);
        assert_eq!(Terminal { stdout: false, ..FULL }.output(Some(DisplayMode::Dashboard)), DisplayMode::Plain);
        assert_eq!(Terminal { stdout: false, ..FULL }.output(Some(DisplayMode::Progress)), DisplayMode::Progress);
        assert_eq!(Terminal { stderr: false, ..FULL }.output(Some(DisplayMode::Progress)), DisplayMode::Plain);
    }
}
