//! Shows a run in the terminal while another thread trains.

use crate::screen::{self, DisplayMode, Exit, LiveSource, PlainPrinter, StatusLine, Terminal};
use crate::telemetry::{Command, RunState};
use crate::ui::{ColorScheme, Theme};
use clap::Args;
use std::io::{Write, stderr, stdout};
use std::sync::mpsc::Sender;

/// Flags for the look and mouse of the dashboard.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct ThemeArgs {
    /// Draw with ASCII characters only [default: if the locale is not UTF-8]
    #[arg(long)]
    ascii: bool,
    /// Color theme: dark, light or high-contrast [default: the terminal's, else dark]
    #[arg(long, value_name = "THEME")]
    theme: Option<ColorScheme>,
    /// Leave the mouse to the terminal, for selecting text
    #[arg(long)]
    pub(crate) no_mouse: bool,
}

impl ThemeArgs {
    pub(crate) fn theme(&self) -> Theme {
        Theme::from_env(self.ascii, self.theme)
    }
}

/// How to show a run; by default the dashboard, if standard output is a terminal of at least 40×12.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Screen")]
pub(crate) struct ShowArgs {
    /// Show the dashboard, however small the terminal
    #[arg(long, conflicts_with_all = ["plain", "progress"])]
    pub(crate) dashboard: bool,
    /// Print a line of key=value pairs every `log_every` steps
    #[arg(long, conflicts_with = "progress")]
    pub(crate) plain: bool,
    /// Show a status line with a progress bar
    #[arg(long)]
    pub(crate) progress: bool,
    #[command(flatten)]
    pub(crate) scheme: ThemeArgs,
}

impl ShowArgs {
    fn asked(&self) -> Option<DisplayMode> {
        match self {
            Self { dashboard: true, .. } => Some(DisplayMode::Dashboard),
            Self { plain: true, .. } => Some(DisplayMode::Plain),
            Self { progress: true, .. } => Some(DisplayMode::Progress),
            _ => None,
        }
    }
}

/// Shows records and slow phases until training drops its end of the channel. `history` is the state of a resumed run.
pub(crate) fn show(
    mut source: LiveSource<'_>,
    commands: &Sender<Command>,
    args: &ShowArgs,
    log_every: u64,
    history: RunState,
) {
    match Terminal::current().output(args.asked()) {
        DisplayMode::Dashboard => {
            let (theme, mouse) = (args.scheme.theme(), !args.scheme.no_mouse);
            let exit = screen::follow(stdout(), source, commands, theme, mouse, log_every, history);
            if exit == Exit::Killed {
                writeln!(stderr(), "stopped without saving the steps after the last checkpoint").ok();
                std::process::exit(130);
            }
        }
        DisplayMode::Progress => source.follow(&mut StatusLine::new(stderr(), args.scheme.theme().ascii)),
        DisplayMode::Plain => source.follow(&mut PlainPrinter::new(stdout(), log_every)),
    }
}
