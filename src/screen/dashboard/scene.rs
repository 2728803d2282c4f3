//! The data that every tab reads: the runs, and the settings that several tabs share.

use super::charts::Charts;
use super::tensors::Selection;
use crate::screen::renderer::Playback;
use crate::telemetry::RunState;

/// How the dashboard relates to the run.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) enum DashboardMode {
    /// This process trains, so keys can command training.
    #[default]
    Attached,
    /// Another process trains or trained, so only display.
    Watching,
}

#[derive(Debug, Default)]
pub(crate) struct Scene {
    pub(super) mode: DashboardMode,
    pub(crate) live: RunState,
    /// The run at the moment when the view was frozen.
    pub(super) frozen: Option<Box<RunState>>,
    pub(crate) others: Vec<RunState>,
    pub(crate) playback: Option<Playback>,
    /// Wall clock, milliseconds.
    pub(crate) now: u64,
    pub(super) charts: Charts,
    pub(super) tensors: Selection,
    /// Whether magnitudes are divided by the loss scale.
    pub(super) true_magnitudes: bool,
}

impl Scene {
    /// The run to show: frozen or live.
    pub(crate) fn run(&self) -> &RunState {
        self.frozen.as_deref().unwrap_or(&self.live)
    }

    /// The run to show and the overlaid ones.
    pub(super) fn runs(&self) -> impl Iterator<Item = &RunState> {
        std::iter::once(self.run()).chain(&self.others)
    }

    /// The step at which the view was frozen.
    pub(super) fn frozen_at(&self) -> Option<u64> {
        self.frozen.as_ref().map(|run| run.step.step)
    }

    /// Whether keys pressed here can command training.
    pub(super) fn can_command(&self) -> bool {
        self.mode == DashboardMode::Attached && !self.live.is_over()
    }
}
