//! The dashboard on a terminal: draws at most ten times per second, and waits for keys.

use super::app::App;
use super::header::BLINK;
use crate::screen::renderer::{Exit, MessageSource, Renderer, ScreenMessage, drive};
use crate::screen::terminal::keys::is_ctrl_z;
use crate::screen::terminal::{Screen, ShutdownFlag};
use crate::telemetry::Command;
use crate::ui::Theme;
use crate::{Error, Result};
use ratatui::crossterm::event::{Event, KeyEventKind, MouseEventKind};
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

/// Minimum time between two frames.
const FRAME: Duration = Duration::from_millis(100);
/// How long the loop waits for a key when nothing happens.
const IDLE: Duration = Duration::from_millis(40);

struct Live<'a, W: Write> {
    app: &'a mut App,
    screen: Screen<W>,
    commands: Option<&'a Sender<Command>>,
    ending: ShutdownFlag,
    theme: Theme,
    began: Instant,
    /// When the last frame was drawn, and whether anything has changed since.
    drawn: Option<Instant>,
    changed: bool,
}

impl App {
    /// Takes over the terminal and shows the dashboard on it.
    pub(crate) fn run<W: Write>(
        &mut self,
        writer: W,
        source: &mut dyn MessageSource,
        commands: Option<&Sender<Command>>,
        theme: Theme,
        mouse: bool,
    ) -> Result<Exit> {
        let ending = ShutdownFlag::listen().map_err(Error::io("watch for signals on", "terminal"))?;
        let screen = Screen::enter(writer, mouse, &ending).map_err(Error::io("take over", "terminal"))?;
        self.first_look = theme.scheme;
        let began = Instant::now();
        let mut live = Live { app: self, screen, commands, ending, theme, began, drawn: None, changed: true };
        let driven = catch_unwind(AssertUnwindSafe(|| drive(source, &mut live)));
        drop(live);
        driven.unwrap_or_else(|_| Err(Error::engine("the dashboard panicked")))
    }
}

impl<W: Write> Live<'_, W> {
    fn send(&self, command: Option<Command>) {
        if let (Some(command), Some(commands)) = (command, self.commands) {
            // Training that has ended has dropped the receiver; the screen already shows its end.
            let _ = commands.send(command);
        }
    }

    fn terminate(&mut self) {
        let command = self.app.terminate();
        self.send(command);
    }

    /// Draws a frame; `false` if the terminal has been restored meanwhile.
    fn draw(&mut self) -> io::Result<bool> {
        let app = &*self.app;
        let theme = self.theme;
        let mut size = (0, 0);
        let drawn = self.screen.draw(|frame| {
            size = (frame.area().width, frame.area().height);
            app.draw(theme, frame.buffer_mut());
        });
        self.app.size = size;
        drawn
    }

    fn input(&mut self, event: &Event) {
        match *event {
            Event::Key(key) if is_ctrl_z(key) && key.kind == KeyEventKind::Press => {
                if self.screen.suspend().is_err() {
                    self.terminate();
                }
                self.app.scene.live.suspended();
            }
            Event::Key(key) if key.kind != KeyEventKind::Release => {
                let command = self.app.key(key);
                self.send(command);
            }
            Event::Mouse(mouse) if mouse.kind != MouseEventKind::Moved => self.app.mouse(mouse),
            Event::Resize(..) => {}
            _ => return,
        }
        self.changed = true;
    }
}

impl<W: Write> Renderer for Live<'_, W> {
    /// It waits for keys instead.
    const POLL_INTERVAL: Duration = Duration::ZERO;

    fn show(&mut self, message: ScreenMessage) -> io::Result<()> {
        self.changed = true;
        self.app.receive(message);
        Ok(())
    }

    fn idle(&mut self, source: &mut dyn MessageSource, _quiet: bool, more: bool) -> io::Result<Option<Exit>> {
        source.play(&mut self.app.scene.playback);
        self.app.uptime = self.began.elapsed().as_millis() as u64;
        if self.ending.is_set() {
            self.terminate();
        }
        let (now, activity) = (source.clock(), source.activity());
        self.changed |= now / BLINK != self.app.scene.now / BLINK || activity != self.app.activity;
        self.app.scene.now = now;
        self.app.activity = activity;
        if self.app.exit.is_some() {
            return Ok(self.app.exit);
        }
        if self.changed && self.drawn.is_none_or(|drawn| drawn.elapsed() >= FRAME) {
            match self.draw() {
                Ok(true) => {
                    self.drawn = Some(Instant::now());
                    self.changed = false;
                }
                // A thread panicked, and its message is on the terminal.
                Ok(false) => return Ok(Some(Exit::TrainerPanicked)),
                Err(_) => {
                    self.terminate();
                    return Ok(None);
                }
            }
        }
        match self.screen.next_event(if more { Duration::ZERO } else { IDLE }) {
            Ok(Some(event)) => self.input(&event),
            Ok(None) => {}
            // The terminal has hung up.
            Err(_) => self.terminate(),
        }
        Ok(None)
    }
}
