//! The dashboard's keys.

use crate::screen::terminal::Binding;
use ratatui::crossterm::event::KeyCode::{self, Char};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// Shows a tab, by its index.
    Tab(usize),
    NextTab,
    PreviousTab,
    Pause,
    Freeze,
    Save,
    Evaluate,
    Sample,
    Probe,
    Zoom,
    TimeAxis,
    LogAxis,
    TrueMagnitudes,
    Sort,
    Filter,
    Down,
    Up,
    PageDown,
    PageUp,
    Details,
    /// Shows layers instead of tensors.
    Layers,
    /// Moves the charts' cursor by this many 200ths of the x axis.
    Cursor(i32),
    Range,
    Smoothing,
    Curve,
    ColorScheme,
    /// Moves a replay by this many 20ths of the run.
    Seek(i32),
    Slower,
    Faster,
    Help,
    Close,
    Quit,
}

impl Action {
    /// Whether it is a command to training.
    pub(super) fn commands(self) -> bool {
        matches!(self, Self::Pause | Self::Save | Self::Evaluate | Self::Sample | Self::Probe)
    }

    /// Whether it is for a replay.
    pub(super) fn plays(self) -> bool {
        matches!(self, Self::Seek(_) | Self::Slower | Self::Faster)
    }
}

/// Every key. The footer shows those that fit in this order, and always help and quit.
pub(super) const KEYS: &[Binding<Action>] = &[
    Binding::new(
        "1-5",
        &[
            (Char('1'), Action::Tab(0)),
            (Char('2'), Action::Tab(1)),
            (Char('3'), Action::Tab(2)),
            (Char('4'), Action::Tab(3)),
            (Char('5'), Action::Tab(4)),
            (KeyCode::Tab, Action::NextTab),
            (KeyCode::Right, Action::NextTab),
            (KeyCode::BackTab, Action::PreviousTab),
            (KeyCode::Left, Action::PreviousTab),
        ],
        "show a tab; Tab and the arrows cycle",
    )
    .footer("tab", "tab"),
    Binding::new("space", &[(Char(' '), Action::Pause)], "pause or continue training, at the next step")
        .footer("pause", "pause"),
    Binding::new("f", &[(Char('f'), Action::Freeze)], "freeze the view; training continues")
        .footer("freeze", "freeze view"),
    Binding::new("[ ]", &[(Char('['), Action::Seek(-1)), (Char(']'), Action::Seek(1))], "replay: back or ahead by 5%")
        .footer("seek", "seek"),
    Binding::new(
        "- +",
        &[(Char('-'), Action::Slower), (Char('+'), Action::Faster)],
        "replay: halve or double the speed",
    )
    .footer("speed", "speed"),
    Binding::new("s", &[(Char('s'), Action::Save)], "write a checkpoint now").footer("save", "save"),
    Binding::new("z", &[(Char('z'), Action::Zoom)], "show one panel on the whole screen, then the next, then all")
        .footer("zoom", "zoom")
        .tabs(&[0]),
    Binding::new(
        ", .",
        &[
            (Char(','), Action::Cursor(-1)),
            (Char('.'), Action::Cursor(1)),
            (Char('<'), Action::Cursor(-10)),
            (Char('>'), Action::Cursor(10)),
        ],
        "read the charts at a step; < > move faster, Esc ends it",
    )
    .footer("cursor", "cursor")
    .tabs(&[0]),
    Binding::new("n", &[(Char('n'), Action::Range)], "charts over the last 1000, 300, 100 or all steps")
        .footer("range", "range")
        .tabs(&[0, 2]),
    Binding::new(
        "c",
        &[(Char('c'), Action::Curve)],
        "second chart: loss scale, lr, |g|, shares of gradients and others",
    )
    .footer("curve", "curve")
    .tabs(&[0]),
    Binding::new("w", &[(Char('w'), Action::Smoothing)], "smooth the loss over 5, 20, 50 or 200 steps, or not at all")
        .footer("smooth", "smoothing")
        .tabs(&[0]),
    Binding::new("x", &[(Char('x'), Action::TimeAxis)], "charts over steps or over time")
        .footer("step/time", "step/time")
        .tabs(&[0, 2]),
    Binding::new("y", &[(Char('y'), Action::LogAxis)], "loss on a logarithmic or a linear axis")
        .footer("log y", "log y")
        .tabs(&[0]),
    Binding::new("u", &[(Char('u'), Action::TrueMagnitudes)], "magnitudes as stored, or divided by the loss scale")
        .footer("scaled/true", "scaled/true")
        .tabs(&[0, 1, 2]),
    Binding::new("v", &[(Char('v'), Action::Layers)], "show layers instead of tensors: dtypes and gradient variances")
        .footer("layers", "layers")
        .tabs(&[2]),
    Binding::new("p", &[(Char('p'), Action::Probe)], "repeat the next batch's backward pass in FP32")
        .footer("probe", "FP32 probe"),
    Binding::new("o", &[(Char('o'), Action::Sort)], "sort the tensors by the next column")
        .footer("sort", "sort")
        .tabs(&[2]),
    Binding::new(
        "/",
        &[(Char('/'), Action::Filter)],
        "show only rows that contain a text; Enter keeps it, Esc clears it",
    )
    .footer("filter", "filter")
    .tabs(&[2, 3]),
    Binding::new("Enter", &[(KeyCode::Enter, Action::Details)], "details of the selected tensor or event")
        .footer("details", "details")
        .tabs(&[2, 3]),
    Binding::new(
        "j k",
        &[
            (Char('j'), Action::Down),
            (Char('k'), Action::Up),
            (KeyCode::Down, Action::Down),
            (KeyCode::Up, Action::Up),
            (KeyCode::PageDown, Action::PageDown),
            (KeyCode::PageUp, Action::PageUp),
        ],
        "scroll; arrows and PgUp, PgDn too",
    )
    .footer("scroll", "scroll")
    .tabs(&[2, 3, 4]),
    Binding::new("e", &[(Char('e'), Action::Evaluate)], "compute the validation loss now").footer("eval", "evaluate"),
    Binding::new("g", &[(Char('g'), Action::Sample)], "generate text now").footer("sample", "sample"),
    Binding::new("t", &[(Char('t'), Action::ColorScheme)], "colors for a dark or light background, or high contrast")
        .footer("theme", "theme"),
    Binding::new("Esc", &[(KeyCode::Esc, Action::Close)], "close the dialog or detail view"),
    Binding::new("?", &[(Char('?'), Action::Help), (Char('h'), Action::Help)], "this list").footer("help", "help"),
    Binding::new("q", &[(Char('q'), Action::Quit)], "quit: save and stop, detach, or stop").footer("quit", "quit"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::screen::terminal::keys::{check, footer};

    #[test]
    fn the_table_is_consistent() {
        check(KEYS, super::super::app::TABS.len());
        assert!(footer(KEYS, 400, |_| true).contains(&("f", "freeze view")));
        assert!(footer(KEYS, 78, |_| true).contains(&("f", "freeze")));
        assert!(!footer(KEYS, 250, |binding| !binding.does(Action::commands)).contains(&("s", "save")));
    }
}
