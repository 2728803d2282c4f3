//! The dashboard: its state, how records, keys and clicks change it, and how a frame is drawn. It does not wait, write
//! or read a clock.

use super::dialogs::Dialog;
use super::events::Events;
use super::keys::{Action, KEYS};
use super::layout::{Areas, Size};
use super::list::List;
use super::overview::Overview;
use super::precision::Precision;
use super::samples::Samples;
use super::scene::{DashboardMode, Scene};
use super::tensors::TensorsTab;
use super::{charts, header, status};
use crate::screen::renderer::{Exit, Playback, ScreenMessage};
use crate::screen::terminal::keys::{self, GAPS, action, is_ctrl_c};
use crate::screen::terminal::{Binding, CTRL_C_REPEAT};
use crate::telemetry::{Command, Event, FinishReason, Phase, Record, RunState};
use crate::ui::{Canvas, ColorScheme, Role, Theme, to_ascii};
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{KeyEvent, MouseButton, MouseEvent, MouseEventKind};
use ratatui::layout::{Position, Rect};
use ratatui::style::Color;
use std::cell::Cell;

pub(super) const TABS: [&str; 5] = ["Overview", "Precision", "Tensors", "Events", "Samples"];
pub(super) const TENSORS: usize = 2;
pub(super) const EVENTS: usize = 3;
/// How long a dialog ignores keys, in milliseconds: they were typed before it could be read.
const TOO_SOON: u64 = 300;
/// How long a watcher's key that only training obeys is explained, in milliseconds.
const EXPLAINED: u64 = 5000;
/// Rows moved by a page key, and by one notch of the mouse's wheel.
const PAGE: isize = 10;
const NOTCH: isize = 3;
/// The notice of a probe; a paused run continues first.
const PROBING: &str = "probing in the next step";

/// A tab: it has its state, handles its keys and clicks, and draws itself.
pub(super) trait Tab {
    /// Draws the tab over the whole canvas.
    fn draw(&self, scene: &Scene, canvas: &mut Canvas);

    /// Handles an action that is not the dashboard's own; keys may work while another tab is `shown`.
    fn act(&mut self, _scene: &mut Scene, _action: Action, _shown: bool) {}

    /// Handles a click on a cell of the tab, which has this width and height. Returns the row of a tensor that the
    /// third tab should open.
    fn clicked(&mut self, _scene: &mut Scene, _size: (u16, u16), _at: Position) -> Option<usize> {
        None
    }

    /// Moves the cursor.
    fn scroll(&mut self, scene: &mut Scene, by: isize) {
        if let Some((list, rows)) = self.list(scene) {
            list.scroll(by, rows);
        }
    }

    fn wheel(&mut self, scene: &mut Scene, by: isize) {
        self.scroll(scene, by);
    }

    /// Closes its topmost view; `false` if none is open.
    fn close(&mut self) -> bool {
        false
    }

    /// Closes the views that do not stay open when another tab is shown.
    fn leave(&mut self) {}

    /// The list that it shows and the number of its rows, if it shows one.
    fn list<'a>(&'a mut self, _scene: &'a mut Scene) -> Option<(&'a mut List, usize)> {
        None
    }
}

/// Everything that a frame is drawn from.
#[derive(Debug, Default)]
pub(crate) struct App {
    pub(crate) scene: Scene,
    pub(super) tab: usize,
    pub(super) overview: Overview,
    precision: Precision,
    pub(super) tensors: TensorsTab,
    pub(super) events: Events,
    samples: Samples,
    pub(super) dialog: Option<Dialog>,
    /// The first visible row of the help, which drawing limits.
    pub(super) help_top: Cell<usize>,
    /// Milliseconds since the dashboard opened. Unlike the scene's clock, it never stops or jumps, as in a replay.
    pub(crate) uptime: u64,
    /// When the dialog opened, as `uptime`.
    opened: u64,
    /// The look that the screen started with.
    pub(super) first_look: ColorScheme,
    /// The look selected with a key.
    pub(crate) scheme: Option<ColorScheme>,
    /// The terminal's columns and rows.
    pub(crate) size: (u16, u16),
    /// A message about the last command, until training answers it.
    pub(super) notice: Option<&'static str>,
    /// When a watcher pressed a key that only training obeys, as `uptime`.
    pub(super) refused: Option<u64>,
    /// The slow work training does between two steps, if any.
    pub(super) activity: Option<String>,
    /// When the user stopped the run, as `uptime`.
    pub(super) stopping: Option<u64>,
    /// Set when the dashboard should close.
    pub(super) exit: Option<Exit>,
}

impl App {
    pub(crate) fn new(mode: DashboardMode, history: RunState) -> Self {
        Self { scene: Scene { mode, live: history, ..Scene::default() }, ..Self::default() }
    }

    fn tab(&mut self, tab: usize) -> (&mut dyn Tab, &mut Scene) {
        let tab: &mut dyn Tab = match tab {
            0 => &mut self.overview,
            1 => &mut self.precision,
            TENSORS => &mut self.tensors,
            EVENTS => &mut self.events,
            _ => &mut self.samples,
        };
        (tab, &mut self.scene)
    }

    pub(super) fn list(&mut self) -> Option<&mut List> {
        let (tab, scene) = self.tab(self.tab);
        tab.list(scene).map(|(list, _)| list)
    }

    /// Handles a message about the runs.
    pub(crate) fn receive(&mut self, message: ScreenMessage) {
        match message {
            ScreenMessage::Record(record) => self.record_arrived(*record),
            ScreenMessage::Other(at, record) => {
                if let Some(other) = self.scene.others.get_mut(at) {
                    other.apply(*record);
                }
            }
            ScreenMessage::Rewind => {
                self.scene.live = RunState::default();
                self.scene.frozen = None;
            }
            ScreenMessage::Closed if self.scene.live.is_over() => {
                self.exit = self.stopping.map(|_| Exit::Ended).or(self.exit);
            }
            ScreenMessage::Closed => {
                self.scene.live.phase = Phase::Lost;
                self.exit = Some(Exit::TrainerPanicked);
            }
            ScreenMessage::Gone => self.scene.live.phase = Phase::Lost,
        }
    }

    fn record_arrived(&mut self, record: Record) {
        let answers = match &record.event {
            Event::CheckpointSaved(_) => Some("saving"),
            Event::Eval(_) => Some("evaluating"),
            Event::Sample(_) => Some("sampling"),
            Event::Fp32Probe(_) => Some(PROBING),
            Event::Paused { .. } => Some("pausing"),
            Event::Resumed { .. } => Some("resuming"),
            Event::Warning(_) if self.stopping.is_none() => self.notice,
            Event::Finished(_) => self.notice,
            _ => None,
        };
        self.notice = self.notice.filter(|notice| answers != Some(notice));
        let reason = if let Event::Finished(finished) = &record.event { Some(finished.reason) } else { None };
        self.scene.live.apply(record);
        let Some(reason) = reason.filter(|_| self.scene.mode == DashboardMode::Attached) else { return };
        if self.stopping.is_some() || matches!(reason, FinishReason::Interrupted | FinishReason::Failed) {
            self.exit = Some(Exit::Ended);
        } else {
            self.open(Dialog::Summary);
        }
    }

    pub(super) fn open(&mut self, dialog: Dialog) {
        self.dialog = Some(dialog);
        self.opened = self.uptime;
    }

    /// Handles a key; returns a command for training, if any.
    pub(crate) fn key(&mut self, key: KeyEvent) -> Option<Command> {
        if is_ctrl_c(key) {
            return self.interrupted();
        }
        self.refused = None;
        if self.dialog.is_some() && self.uptime < self.opened + TOO_SOON {
            return None;
        }
        if let Some(list) = self.list().filter(|list| list.typing) {
            list.typed(key);
            return None;
        }
        match self.dialog {
            Some(dialog) if dialog != Dialog::Summary => self.answer(dialog, key),
            _ => action(KEYS, key).and_then(|action| self.act(action)),
        }
    }

    fn act(&mut self, action: Action) -> Option<Command> {
        match action {
            Action::Tab(tab) => self.show(tab),
            Action::NextTab => self.show((self.tab + 1) % TABS.len()),
            Action::PreviousTab => self.show((self.tab + TABS.len() - 1) % TABS.len()),
            Action::Pause if self.scene.playback.is_some() => self.play(|playback| playback.paused = !playback.paused),
            Action::Pause if self.scene.live.phase == Phase::Paused => return self.ask(Command::Resume, "resuming"),
            Action::Pause => return self.ask(Command::Pause, "pausing"),
            Action::Save => return self.ask(Command::SaveNow, "saving"),
            Action::Evaluate => return self.ask(Command::EvalNow, "evaluating"),
            Action::Sample => return self.ask(Command::SampleNow, "sampling"),
            Action::Probe => return self.ask(Command::ProbeNow, PROBING),
            Action::Freeze => {
                let live = &self.scene.live;
                self.scene.frozen = self.scene.frozen.is_none().then(|| Box::new(live.clone()));
            }
            Action::ColorScheme => self.scheme = Some(self.scheme.unwrap_or(self.first_look).next()),
            Action::Seek(by) => self.play(|playback| {
                playback.seek = Some((playback.at + f64::from(by) / 20.0).clamp(0.0, 1.0));
            }),
            Action::Slower => self.play(|playback| playback.speed /= 2.0),
            Action::Faster => self.play(|playback| playback.speed *= 2.0),
            Action::TrueMagnitudes => self.scene.true_magnitudes = !self.scene.true_magnitudes,
            Action::Filter if matches!(self.tab, TENSORS | EVENTS) => {
                if let Some(list) = self.list() {
                    list.typing = true;
                }
            }
            Action::Down => self.scroll(1),
            Action::Up => self.scroll(-1),
            Action::PageDown => self.scroll(PAGE),
            Action::PageUp => self.scroll(-PAGE),
            Action::Help => {
                self.help_top.set(0);
                self.open(Dialog::Help);
            }
            Action::Close => self.close(),
            Action::Quit if self.scene.can_command() => self.open(Dialog::Quit),
            Action::Quit => self.exit = Some(Exit::Ended),
            _ => {
                let run = self.scene.frozen.as_deref().unwrap_or(&self.scene.live);
                self.scene.charts.act(run, action);
                for at in 0..TABS.len() {
                    let shown = at == self.tab;
                    let (tab, scene) = self.tab(at);
                    tab.act(scene, action, shown);
                }
            }
        }
        None
    }

    fn play(&mut self, change: impl Fn(&mut Playback)) {
        if let Some(playback) = &mut self.scene.playback {
            change(playback);
            playback.speed = playback.speed.clamp(1.0 / 1024.0, 1_048_576.0);
        }
    }

    fn scroll(&mut self, by: isize) {
        let (tab, scene) = self.tab(self.tab);
        tab.scroll(scene, by);
    }

    fn show(&mut self, tab: usize) {
        self.stop_typing();
        self.tab = tab;
        (0..TABS.len()).for_each(|at| self.tab(at).0.leave());
        self.dialog = self.dialog.filter(|dialog| *dialog != Dialog::Summary);
    }

    fn stop_typing(&mut self) {
        if let Some(list) = self.list() {
            list.typing = false;
        }
    }

    /// Closes the topmost dialog or detail view.
    fn close(&mut self) {
        if self.dialog.take().is_some()
            || self.tab == 0 && self.scene.charts.cursor.take().is_some()
            || self.tab(self.tab).0.close()
        {
            return;
        }
        if let Some(list) = self.list() {
            list.filter.clear();
        }
        self.notice = None;
    }

    /// Sends a command to training, unless this dashboard only watches or training has ended.
    fn ask(&mut self, command: Command, notice: &'static str) -> Option<Command> {
        if self.scene.mode != DashboardMode::Attached {
            self.refused = Some(self.uptime);
            return None;
        }
        if self.scene.live.is_over() {
            return None;
        }
        self.notice = Some(notice);
        Some(command)
    }

    pub(super) fn stop(&mut self, save: bool) -> Command {
        self.stopping = Some(self.uptime);
        self.dialog = None;
        self.notice = Some(if save { "saving, then stopping; Ctrl-C again stops without saving" } else { "stopping" });
        Command::Stop { save }
    }

    /// Ctrl-C saves and stops, and then ends everything.
    fn interrupted(&mut self) -> Option<Command> {
        match self.stopping {
            _ if !self.scene.can_command() => {
                self.exit = Some(Exit::Ended);
                None
            }
            // Rapid presses do not confirm the abort.
            Some(since) if self.uptime < since + CTRL_C_REPEAT.as_millis() as u64 => None,
            Some(_) => {
                self.exit = Some(Exit::Killed);
                Some(Command::Abort)
            }
            None => {
                self.stop_typing();
                self.stop(true);
                Some(Command::Interrupt)
            }
        }
    }

    /// Handles SIGINT, SIGTERM, or a terminal that hung up.
    pub(crate) fn terminate(&mut self) -> Option<Command> {
        self.exit = Some(Exit::Terminated);
        (self.scene.mode == DashboardMode::Attached).then_some(Command::Interrupt)
    }

    /// Handles a mouse event: clicks select a tab, a point of a chart, a tensor or an event; the wheel scrolls. None of
    /// them sends a command to training, because a stray click must not cost anything.
    pub(crate) fn mouse(&mut self, mouse: MouseEvent) {
        match mouse.kind {
            MouseEventKind::ScrollDown => self.wheel(NOTCH),
            MouseEventKind::ScrollUp => self.wheel(-NOTCH),
            MouseEventKind::Down(MouseButton::Left) => self.clicked(Position::new(mouse.column, mouse.row)),
            // Dragging moves the cursor.
            MouseEventKind::Drag(MouseButton::Left) if self.scene.charts.cursor.is_some() => {
                self.clicked(Position::new(mouse.column, mouse.row));
            }
            _ => {}
        }
    }

    fn wheel(&mut self, by: isize) {
        match self.dialog {
            Some(Dialog::Help) => self.scroll_help(by.signum()),
            Some(_) => {}
            None => {
                let (tab, scene) = self.tab(self.tab);
                tab.wheel(scene, by);
            }
        }
    }

    fn clicked(&mut self, at: Position) {
        let area = Rect::new(0, 0, self.size.0, self.size.1);
        let Areas { header, body, .. } = Areas::of(area);
        match self.dialog {
            Some(Dialog::Help) => return self.dialog = None,
            Some(Dialog::Quit) => return,
            _ if matches!(Size::of(area), Size::Minimal | Size::Tiny) => return,
            _ => {}
        }
        if header.contains(at) {
            if let Some(tab) = header::tab_at(&self.scene, self.tab, header.width, at.x) {
                self.show(tab);
            }
        } else if body.contains(at) {
            let (tab, scene) = self.tab(self.tab);
            let at = Position::new(at.x - body.x, at.y - body.y);
            let Some(row) = tab.clicked(scene, (body.width, body.height), at) else { return };
            if row < self.scene.tensors.rows(self.scene.run()).len() {
                self.show(TENSORS);
                self.scene.tensors.list.cursor = row;
                self.tensors.layers = false;
                self.tensors.open(&self.scene);
            }
        }
    }

    pub(crate) fn draw(&self, mut theme: Theme, buffer: &mut Buffer) {
        theme.scheme = self.scheme.unwrap_or(theme.scheme);
        let area = buffer.area;
        let Areas { header, body, status, footer } = Areas::of(area);
        match Size::of(area) {
            Size::Tiny => self.draw_tiny(&mut Canvas::new(buffer, area, theme)),
            Size::Minimal => {
                header::draw_state(&self.scene, &mut Canvas::new(buffer, header, theme));
                let lines = Rect { y: header.bottom(), height: 3, ..header };
                status::draw(&self.scene, &mut Canvas::new(buffer, lines, theme));
                self.draw_footer(&mut Canvas::new(buffer, footer, theme));
                if self.dialog == Some(Dialog::Quit) {
                    let mut canvas = Canvas::new(buffer, footer, theme);
                    let x = canvas.text(0, 0, "Leave?  s save+stop  d detach  D discard  Esc", Role::Title);
                    canvas.text(x, 0, &" ".repeat(footer.width.into()), Role::Text);
                } else {
                    self.draw_dialog(&mut Canvas::new(buffer, body.union(status), theme));
                }
            }
            Size::Full | Size::Compact | Size::Small => {
                header::draw(&self.scene, self.tab, &mut Canvas::new(buffer, header, theme));
                let tabs: [&dyn Tab; TABS.len()] =
                    [&self.overview, &self.precision, &self.tensors, &self.events, &self.samples];
                tabs[self.tab].draw(&self.scene, &mut Canvas::new(buffer, body, theme));
                status::draw(&self.scene, &mut Canvas::new(buffer, status, theme));
                self.draw_footer(&mut Canvas::new(buffer, footer, theme));
                self.draw_dialog(&mut Canvas::new(buffer, area, theme));
            }
        }
        if let (Some(ink), Some(paper)) = (theme.base().fg, theme.base().bg) {
            for cell in &mut buffer.content {
                cell.fg = if cell.fg == Color::Reset { ink } else { cell.fg };
                cell.bg = if cell.bg == Color::Reset { paper } else { cell.bg };
            }
        }
        if theme.ascii {
            for cell in &mut buffer.content {
                // A cell has a character and the ones that combine with it.
                let first = cell.symbol().chars().next().unwrap_or(' ');
                cell.set_char(to_ascii(first));
            }
        }
    }

    fn draw_footer(&self, canvas: &mut Canvas) {
        let refused = self.refused.filter(|since| self.uptime < since + EXPLAINED);
        if let (Some(step), 0, None, None) = (self.scene.charts.cursor, self.tab, refused, self.notice) {
            charts::draw_cursor_values(&self.scene, step, canvas);
            return;
        }
        let mut x = 1;
        if refused.is_some() {
            x = canvas.text(x, 0, "commands work only in the training terminal", Role::Subnormal) + 3;
        }
        for message in [self.activity.as_deref(), self.notice].into_iter().flatten() {
            x = canvas.text(x, 0, &format!("{message}…"), Role::Subnormal) + 3;
        }
        let room = usize::from(canvas.width().saturating_sub(x));
        for (key, word) in keys::footer(KEYS, room, |binding| binding.is_for(self.tab) && self.works(binding)) {
            x = canvas.text(x, 0, key, Role::Title) + GAPS.0;
            x = canvas.text(x, 0, word, Role::Dim) + GAPS.1;
        }
    }

    /// Whether a key does anything in this mode, in some tab: commands need training, and others a replay.
    pub(super) fn works(&self, binding: &Binding<Action>) -> bool {
        let replaying = self.scene.playback.is_some();
        let pauses = binding.does(|action| action == Action::Pause) && replaying;
        (self.scene.can_command() || pauses || !binding.does(Action::commands))
            && (replaying || !binding.does(Action::plays))
    }

    /// Draws the figures that matter most, as many as fit on each line.
    fn draw_tiny(&self, canvas: &mut Canvas) {
        let answers: &[&str] = match self.dialog {
            Some(Dialog::Quit) => &["s save+stop", "d detach", "D discard", "Esc back"],
            Some(Dialog::Discard) => &["y stop without saving", "Esc back"],
            _ => &[],
        };
        for (y, answer) in (0..).zip(answers) {
            canvas.text(0, y, answer, Role::Title);
        }
        if !answers.is_empty() {
            return;
        }
        let (mut x, mut y) = (0, 0);
        for (text, role) in status::essentials(&self.scene) {
            let columns = text.chars().count() as u16;
            if x > 0 && x + columns > canvas.width() {
                x = 0;
                y += 1;
            }
            x = canvas.text(x, y, &text, role) + 2;
        }
    }
}
