//! The dashboard's state machine: [`update`] handles a message and may return a command for training. It does not draw, wait
//! or read a clock.

use super::event_text;
use super::keys::{Action, KEYS};
use super::mouse;
use super::panels::chart::first_step;
use crate::screen::terminal::keys::{action, is_ctrl_c};
use crate::telemetry::{
    Command, EventRow, FinishReason, Phase, Record, RunState, SMOOTHING, SampleRow, TensorRow, smoothing_for,
};
use crate::ui::Look;
use ratatui::crossterm::event::{KeyCode, KeyEvent, MouseEvent};

/// The tabs' names, in order.
pub(super) const TABS: [&str; 5] = ["Overview", "Precision", "Tensors", "Events", "Samples"];
pub(super) const TENSORS: usize = 2;
pub(super) const EVENTS: usize = 3;
pub(super) const SAMPLES: usize = 4;
/// Milliseconds within which repeated presses of Ctrl-C count as one.
const CTRL_C_REPEAT: u64 = 1000;
/// Rows moved by a page key.
const PAGE: usize = 10;

/// An input of the state machine.
#[derive(Debug)]
pub(super) enum Msg {
    /// A record of the run.
    Record(Box<Record>),
    /// A key was pressed.
    Key(KeyEvent),
    /// SIGINT, SIGTERM, or the terminal hung up.
    Terminate,
    /// There will be no more records.
    Closed,
    /// The watched process has ended.
    Gone,
    /// A record of an overlaid run.
    Other(usize, Box<Record>),
    /// A mouse event.
    Mouse(MouseEvent),
    /// The terminal's columns and rows.
    Size(u16, u16),
    /// A replay starts over, so discard the state.
    Rewind,
    /// The wall clock, in milliseconds.
    Clock(u64),
}

/// How the dashboard relates to the run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Mode {
    /// This process trains, so keys can command training.
    Attached,
    /// Another process trains or trained, so only display.
    Watching,
}

/// The playback of a replay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Playback {
    /// Speed relative to the run's.
    pub(super) speed: f64,
    pub(super) paused: bool,
    /// Position to seek to, as a share of the run; the replay takes it.
    pub(super) seek: Option<f64>,
    /// Current position, as a share of the run.
    pub(super) at: f64,
}

/// An overlaid run.
#[derive(Debug, Default)]
pub(super) struct Other {
    pub(super) run: RunState,
}

/// The curve in the second chart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SecondChart {
    Scale,
    /// The learning rate.
    Rate,
    /// The gradient norm.
    Norm,
    /// Tokens a second.
    Speed,
    Memory,
}

impl SecondChart {
    fn next(self) -> Self {
        match self {
            Self::Scale => Self::Rate,
            Self::Rate => Self::Norm,
            Self::Norm => Self::Speed,
            Self::Speed => Self::Memory,
            Self::Memory => Self::Scale,
        }
    }

    /// The title of the chart.
    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Scale => "Loss scale (log2)",
            Self::Rate => "Learning rate",
            Self::Norm => "Gradient norm, unscaled",
            Self::Speed => "Tokens a second",
            Self::Memory => "Resident memory",
        }
    }
}

/// The ranges of the charts, in last steps, besides the whole run.
const RANGES: [u64; 3] = [1000, 300, 100];

/// How the dashboard ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// The run is over, or was only watched.
    Ended,
    /// The user left, and training continues.
    Detached,
    /// After a signal or a lost terminal, training was told to save and stop.
    Terminated,
    /// The user does not want to wait: the process should end at once.
    Aborted,
    /// Training panicked.
    Lost,
    /// The dashboard itself panicked; training continues.
    Crashed,
}

/// A dialog over the tabs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialog {
    Help,
    Quit,
    /// Whether to stop without saving.
    Discard,
    /// The totals of a run that has ended.
    Summary,
}

/// The panels of the first tab, in the order that zooming visits them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Panel {
    Loss,
    Scale,
    Ruler,
    Overflows,
    Tensors,
}

/// The sort key of the table of tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sort {
    /// Share flushed to zero in the newest probe, then share of subnormals: worst first.
    Underflow,
    /// Parameter order.
    Order,
    Min,
    Max,
    Zero,
    Overflows,
}

impl Sort {
    const ALL: [Self; 6] = [Self::Underflow, Self::Order, Self::Min, Self::Max, Self::Zero, Self::Overflows];

    fn next(self) -> Self {
        let at = Self::ALL.iter().position(|sort| *sort == self).unwrap_or(0);
        Self::ALL[(at + 1) % Self::ALL.len()]
    }

    /// The description for a title.
    pub(super) fn title(self, probed: bool) -> &'static str {
        match self {
            Self::Underflow if probed => "worst underflow first",
            Self::Underflow => "most subnormal first",
            Self::Order => "in parameter order",
            Self::Min => "smallest min|g| first",
            Self::Max => "largest max|g| first",
            Self::Zero => "most zeros first",
            Self::Overflows => "most overflows first",
        }
    }
}

/// All state that a frame is drawn from.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch that has its own key")]
pub(super) struct ViewModel {
    pub(super) mode: Mode,
    live: RunState,
    frozen: Option<Box<RunState>>,
    pub(super) tab: usize,
    pub(super) dialog: Option<Dialog>,
    pub(super) zoom: Option<Panel>,
    pub(super) time_axis: bool,
    pub(super) log_loss: bool,
    /// The selected index in `SMOOTHING`; its length means no smoothing.
    smoothing: Option<usize>,
    pub(super) true_magnitudes: bool,
    pub(super) sort: Sort,
    /// The text that rows must contain, by tab.
    pub(super) filters: [String; TABS.len()],
    /// Whether keys go into the filter.
    pub(super) typing: bool,
    /// The selected row, by tab; counted from the newest in events and samples.
    pub(super) cursors: [usize; TABS.len()],
    /// Whether the third tab shows layers.
    pub(super) layers: bool,
    /// The tensor whose history is open.
    pub(super) detail: Option<String>,
    /// The event that is open.
    pub(super) event: Option<Box<EventRow>>,
    pub(super) event_top: u16,
    /// The first visible row of the help.
    pub(super) help_top: u16,
    /// The number of last steps that charts show; `None` for all.
    pub(super) range: Option<u64>,
    /// The step that the charts are read at.
    pub(super) cursor: Option<u64>,
    /// The curve in the second chart.
    pub(super) second_chart: SecondChart,
    /// The look that the screen started with.
    pub(super) first_look: Look,
    /// The look selected with a key.
    pub(super) look: Option<Look>,
    /// Overlaid runs.
    pub(super) others: Vec<Other>,
    pub(super) playback: Option<Playback>,
    /// The terminal's columns and rows.
    pub(super) size: (u16, u16),
    /// A message about the last command, until training answers it.
    pub(super) notice: Option<&'static str>,
    /// The slow work training does between two steps, if any.
    pub(super) activity: Option<String>,
    /// Whether the run has been told to stop.
    stopping: bool,
    /// Since when, in wall-clock milliseconds.
    stopping_since: u64,
    /// Wall clock, milliseconds.
    pub(super) now: u64,
    /// Set when the dashboard should close.
    pub(super) exit: Option<Exit>,
}

impl ViewModel {
    pub(super) fn new(mode: Mode) -> Self {
        Self::after(mode, RunState::default())
    }

    /// A dashboard of a run with an existing history.
    pub(super) fn after(mode: Mode, history: RunState) -> Self {
        Self {
            mode,
            live: history,
            frozen: None,
            tab: 0,
            dialog: None,
            zoom: None,
            time_axis: false,
            log_loss: false,
            smoothing: None,
            true_magnitudes: false,
            sort: Sort::Underflow,
            filters: Default::default(),
            typing: false,
            cursors: [0; TABS.len()],
            layers: false,
            detail: None,
            event: None,
            event_top: 0,
            help_top: 0,
            range: None,
            cursor: None,
            second_chart: SecondChart::Scale,
            first_look: Look::Dark,
            look: None,
            others: Vec::new(),
            playback: None,
            size: (0, 0),
            notice: None,
            activity: None,
            stopping: false,
            stopping_since: 0,
            now: 0,
            exit: None,
        }
    }

    /// The run to show: frozen or live.
    pub(super) fn run(&self) -> &RunState {
        self.frozen.as_deref().unwrap_or(&self.live)
    }

    /// The live run.
    pub(super) fn live(&self) -> &RunState {
        &self.live
    }

    /// The index in `SMOOTHING` that the loss is smoothed over: the selected one, or the one that suits the run. Its length
    /// means no smoothing.
    pub(super) fn window(&self) -> usize {
        self.smoothing.unwrap_or_else(|| smoothing_for(self.run().total_steps()))
    }

    /// The step at which the view was frozen.
    pub(super) fn frozen_at(&self) -> Option<u64> {
        self.frozen.as_ref().map(|run| run.step.step)
    }

    /// Whether keys pressed here can command training.
    pub(super) fn can_command(&self) -> bool {
        self.mode == Mode::Attached && !self.live.is_over()
    }

    /// The table of tensors, filtered and sorted.
    pub(super) fn tensors(&self) -> Vec<&TensorRow> {
        let filter = &self.filters[TENSORS];
        let mut rows: Vec<_> =
            self.run().tensors.rows.iter().filter(|row| row.name.contains(filter.as_str())).collect();
        let share = |part: u64, whole: u64| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
        // Sorting is stable: equal rows stay in parameter order.
        let mut by = |key: &dyn Fn(&TensorRow) -> f64| rows.sort_by(|a, b| key(b).total_cmp(&key(a)));
        match self.sort {
            Sort::Order => {}
            Sort::Underflow => {
                by(&|row| share(row.stats.subnormal, row.stats.count));
                by(&|row| row.flushed.map_or(-1.0, |(flushed, nonzero)| share(flushed, nonzero)));
            }
            Sort::Min => by(&|row| -f64::from(row.stats.min_abs.unwrap_or(f32::INFINITY))),
            Sort::Max => by(&|row| f64::from(row.stats.max_abs)),
            Sort::Zero => by(&|row| share(row.stats.zero, row.stats.count)),
            Sort::Overflows => by(&|row| row.overflows as f64),
        }
        rows
    }

    /// The filter for a tab's title, with a cursor while it is typed.
    pub(super) fn filter_label(&self, tab: usize) -> String {
        match (self.filters[tab].as_str(), self.typing) {
            ("", false) => String::new(),
            (filter, typing) => format!("   /{filter}{}", if typing { "█" } else { "" }),
        }
    }

    /// The filtered events, newest first.
    pub(super) fn events(&self) -> Vec<&EventRow> {
        let filter = &self.filters[EVENTS];
        let rows = self.run().events.iter().rev();
        rows.filter(|row| filter.is_empty() || event_text::text(row).contains(filter.as_str())).collect()
    }

    /// The samples, newest first.
    pub(super) fn samples(&self) -> impl Iterator<Item = &SampleRow> {
        self.run().samples.iter().rev()
    }

    /// The row whose history is open, or the row under the cursor.
    pub(super) fn chosen_tensor(&self) -> Option<&TensorRow> {
        match &self.detail {
            Some(name) => self.run().tensors.rows.iter().find(|row| row.name == *name),
            None => self.tensors().get(self.cursors[TENSORS]).copied(),
        }
    }

    fn rows(&self) -> usize {
        match self.tab {
            TENSORS => self.tensors().len(),
            EVENTS => self.events().len(),
            SAMPLES => self.run().samples.len(),
            _ => 0,
        }
    }
}

/// Handles a message; returns a command for training, if any.
pub(super) fn update(view: &mut ViewModel, msg: Msg) -> Option<Command> {
    match msg {
        Msg::Record(record) => {
            record_arrived(view, *record);
            None
        }
        Msg::Other(at, record) => {
            if let Some(other) = view.others.get_mut(at) {
                other.run.apply(*record);
            }
            None
        }
        Msg::Size(columns, rows) => {
            view.size = (columns, rows);
            None
        }
        Msg::Mouse(mouse) => mouse::used(view, mouse),
        Msg::Rewind => {
            (view.live, view.frozen) = (RunState::default(), None);
            None
        }
        Msg::Key(key) => key_pressed(view, key),
        Msg::Terminate => {
            view.exit = Some(Exit::Terminated);
            attached(view, Command::Interrupt)
        }
        Msg::Closed => {
            if !view.live.is_over() {
                view.live.phase = Phase::Lost;
                view.exit = Some(Exit::Lost);
            } else if view.stopping {
                view.exit = Some(Exit::Ended);
            }
            None
        }
        Msg::Gone => {
            view.live.phase = Phase::Lost;
            None
        }
        Msg::Clock(now) => {
            view.now = now;
            None
        }
    }
}

fn record_arrived(view: &mut ViewModel, record: Record) {
    use crate::telemetry::Event;
    let answers = match &record.event {
        Event::CheckpointSaved(_) => Some("saving"),
        Event::Eval(_) => Some("evaluating"),
        Event::Sample(_) => Some("sampling"),
        Event::Fp32Probe(_) => Some("probing"),
        Event::Paused { .. } => Some("pausing"),
        Event::Resumed { .. } => Some("resuming"),
        _ => None,
    };
    if answers.is_some() && view.notice == answers {
        view.notice = None;
    }
    let reason = if let Event::Finished(finished) = &record.event { Some(finished.reason) } else { None };
    view.live.apply(record);
    let Some(reason) = reason else { return };
    view.notice = None;
    if view.mode == Mode::Attached && (view.stopping || reason == FinishReason::Interrupted) {
        view.exit = Some(Exit::Ended);
    } else if view.mode == Mode::Attached {
        view.dialog = Some(Dialog::Summary);
    }
}

fn key_pressed(view: &mut ViewModel, key: KeyEvent) -> Option<Command> {
    if is_ctrl_c(key) {
        return interrupted(view);
    }
    if view.typing {
        type_filter(view, key.code);
        return None;
    }
    match view.dialog {
        Some(Dialog::Quit) => return answer_quit(view, key.code),
        Some(Dialog::Discard) => return answer_discard(view, key.code),
        Some(Dialog::Help) => {
            match action(KEYS, key) {
                Some(Action::Down) => view.help_top = (view.help_top + 1).min(KEYS.len() as u16),
                Some(Action::Up) => view.help_top = view.help_top.saturating_sub(1),
                _ => view.dialog = None,
            }
            return None;
        }
        Some(Dialog::Summary) | None => {}
    }
    action(KEYS, key).and_then(|action| act(view, action))
}

pub(super) fn act(view: &mut ViewModel, action: Action) -> Option<Command> {
    match action {
        Action::Tab(tab) => show_tab(view, tab),
        Action::NextTab => show_tab(view, (view.tab + 1) % TABS.len()),
        Action::PreviousTab => show_tab(view, (view.tab + TABS.len() - 1) % TABS.len()),
        Action::Pause if view.playback.is_some() => {
            view.playback = view.playback.map(|playback| Playback { paused: !playback.paused, ..playback });
        }
        Action::Pause if view.live.phase == Phase::Paused => return ask(view, Command::Resume, "resuming"),
        Action::Pause => return ask(view, Command::Pause, "pausing"),
        Action::Save => return ask(view, Command::SaveNow, "saving"),
        Action::Evaluate => return ask(view, Command::EvalNow, "evaluating"),
        Action::Sample => return ask(view, Command::SampleNow, "sampling"),
        Action::Probe => return ask(view, Command::ProbeNow, "probing"),
        Action::Freeze => {
            view.frozen = if view.frozen.is_some() { None } else { Some(Box::new(view.live.clone())) };
        }
        Action::Zoom => view.zoom = if view.tab == 0 { next_zoom(view.zoom) } else { None },
        Action::TimeAxis => view.time_axis = !view.time_axis,
        Action::LogAxis => view.log_loss = !view.log_loss,
        Action::Cursor(by) => move_cursor(view, by),
        Action::Range => {
            let next =
                view.range.map_or(Some(0), |range| RANGES.iter().position(|steps| *steps == range).map(|at| at + 1));
            view.range = next.and_then(|at| RANGES.get(at)).copied();
        }
        Action::Smoothing => view.smoothing = Some((view.window() + 1) % (SMOOTHING.len() + 1)),
        Action::Curve => view.second_chart = view.second_chart.next(),
        Action::Look => view.look = Some(view.look.unwrap_or(view.first_look).next()),
        Action::Seek(by) => {
            let target = |playback: &Playback| (playback.at + f64::from(by) / 20.0).clamp(0.0, 1.0);
            play(view, |playback| playback.seek = Some(target(playback)));
        }
        Action::Slower => play(view, |playback| playback.speed /= 2.0),
        Action::Faster => play(view, |playback| playback.speed *= 2.0),
        Action::TrueMagnitudes => view.true_magnitudes = !view.true_magnitudes,
        Action::Layers => (view.layers, view.detail) = (view.tab == TENSORS && !view.layers, None),
        Action::Sort => view.sort = view.sort.next(),
        Action::Filter => view.typing = matches!(view.tab, TENSORS | EVENTS),
        Action::Down | Action::PageDown if view.event.is_some() && view.tab == EVENTS => view.event_top += 1,
        Action::Up | Action::PageUp if view.event.is_some() && view.tab == EVENTS => {
            view.event_top = view.event_top.saturating_sub(1);
        }
        Action::Down => scroll(view, 1),
        Action::Up => scroll(view, -1),
        Action::PageDown => scroll(view, PAGE as isize),
        Action::PageUp => scroll(view, -(PAGE as isize)),
        Action::Details if view.tab == TENSORS && !view.layers => {
            view.detail = view.chosen_tensor().map(|row| row.name.clone());
        }
        Action::Details if view.tab == EVENTS => open_event(view),
        Action::Details => {}
        Action::Help => (view.dialog, view.help_top) = (Some(Dialog::Help), 0),
        Action::Close => close(view),
        Action::Quit if view.mode != Mode::Attached || view.live.is_over() => view.exit = Some(Exit::Ended),
        Action::Quit => view.dialog = Some(Dialog::Quit),
    }
    None
}

/// Opens the event under the cursor.
pub(super) fn open_event(view: &mut ViewModel) {
    let event = view.events().get(view.cursors[EVENTS]).map(|event| Box::new((*event).clone()));
    (view.event, view.event_top) = (event, 0);
}

/// Moves the charts' cursor, which starts at the last step.
fn move_cursor(view: &mut ViewModel, by: i32) {
    let last = view.run().step.step;
    let first = first_step(view).max(1);
    let stride = ((last.saturating_sub(first)) as f64 / 200.0).max(1.0) * f64::from(by);
    let moved = view.cursor.map_or(last as f64, |step| step as f64 + stride);
    view.cursor = (last > 0).then(|| (moved.round() as u64).clamp(first.min(last), last));
}

fn play(view: &mut ViewModel, change: impl Fn(&mut Playback)) {
    if let Some(playback) = &mut view.playback {
        change(playback);
        playback.speed = playback.speed.clamp(1.0 / 1024.0, 1_048_576.0);
    }
}

pub(super) fn show_tab(view: &mut ViewModel, tab: usize) {
    view.tab = tab;
    view.zoom = None;
    view.detail = None;
    view.event = None;
    if view.dialog == Some(Dialog::Summary) {
        view.dialog = None;
    }
}

/// Sends a command to training, unless this dashboard only watches or training has ended.
fn ask(view: &mut ViewModel, command: Command, notice: &'static str) -> Option<Command> {
    if view.mode != Mode::Attached {
        view.notice = Some("watching only: commands work in the terminal that trains");
        return None;
    }
    if view.live.is_over() {
        return None;
    }
    view.notice = Some(notice);
    Some(command)
}

fn attached(view: &ViewModel, command: Command) -> Option<Command> {
    (view.mode == Mode::Attached).then_some(command)
}

fn next_zoom(zoom: Option<Panel>) -> Option<Panel> {
    match zoom {
        None => Some(Panel::Loss),
        Some(Panel::Loss) => Some(Panel::Scale),
        Some(Panel::Scale) => Some(Panel::Ruler),
        Some(Panel::Ruler) => Some(Panel::Overflows),
        Some(Panel::Overflows) => Some(Panel::Tensors),
        Some(Panel::Tensors) => None,
    }
}

pub(super) fn scroll(view: &mut ViewModel, by: isize) {
    let last = view.rows().saturating_sub(1);
    let cursor = &mut view.cursors[view.tab];
    *cursor = cursor.saturating_add_signed(by).min(last);
}

/// Closes the topmost dialog or detail view.
fn close(view: &mut ViewModel) {
    if view.dialog.take().is_some()
        || view.event.take().is_some()
        || view.detail.take().is_some()
        || std::mem::take(&mut view.layers)
        || view.cursor.take().is_some()
        || view.zoom.take().is_some()
    {
        return;
    }
    view.filters[view.tab].clear();
    view.notice = None;
}

fn type_filter(view: &mut ViewModel, key: KeyCode) {
    let filter = &mut view.filters[view.tab];
    match key {
        KeyCode::Char(c) => filter.push(c),
        KeyCode::Backspace => {
            filter.pop();
        }
        KeyCode::Enter => view.typing = false,
        KeyCode::Esc => {
            filter.clear();
            view.typing = false;
        }
        _ => return,
    }
    view.cursors[view.tab] = 0;
}

fn answer_quit(view: &mut ViewModel, key: KeyCode) -> Option<Command> {
    match key {
        KeyCode::Char('s') => Some(stop(view, true)),
        KeyCode::Char('D') => {
            view.dialog = Some(Dialog::Discard);
            None
        }
        KeyCode::Char('d') => {
            view.exit = Some(Exit::Detached);
            Some(Command::Detach)
        }
        KeyCode::Esc => {
            view.dialog = None;
            None
        }
        _ => None,
    }
}

fn stop(view: &mut ViewModel, save: bool) -> Command {
    view.stopping = true;
    view.stopping_since = view.now;
    view.dialog = None;
    view.notice = Some(if save { "saving, then stopping; Ctrl-C again stops without saving" } else { "stopping" });
    Command::Stop { save }
}

fn answer_discard(view: &mut ViewModel, key: KeyCode) -> Option<Command> {
    match key {
        KeyCode::Char('y') => Some(stop(view, false)),
        KeyCode::Esc | KeyCode::Char('n' | 'q') => {
            view.dialog = None;
            None
        }
        _ => None,
    }
}

/// Ctrl-C asks first, then saves and stops, then ends everything.
fn interrupted(view: &mut ViewModel) -> Option<Command> {
    if view.mode != Mode::Attached || view.live.is_over() {
        view.exit = Some(Exit::Ended);
        return None;
    }
    // Rapid presses do not confirm the abort.
    if view.stopping && view.now < view.stopping_since + CTRL_C_REPEAT {
        return None;
    }
    if view.stopping {
        view.exit = Some(Exit::Aborted);
        return Some(Command::Abort);
    }
    if view.dialog == Some(Dialog::Quit) {
        stop(view, true);
        return Some(Command::Interrupt);
    }
    view.typing = false;
    view.dialog = Some(Dialog::Quit);
    None
}
