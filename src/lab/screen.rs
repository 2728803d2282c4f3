//! The interactive lab: one tab per view, with adjustable parameters and the view's page below.
//!
//! A tab shows what `finetune lab VIEW` prints for the same parameters. Parameters (`parameters`), state (`state`),
//! keys (`keys`) and drawing (`view`) are separate, so that tests can drive everything except the terminal.

#[cfg(test)]
pub(crate) mod key_tests;
mod keys;
mod parameters;
mod state;
mod view;

use crate::screen::terminal::keys::is_ctrl_z;
use crate::screen::terminal::{Screen, ShutdownFlag};
use crate::ui::{Page, Theme};
use crate::{Error, Result};
pub(crate) use parameters::{Adjust, Control, Controls, Field, to_args};
use ratatui::crossterm::event::{Event, KeyEventKind};
use state::LabState;
pub(crate) use state::{LabTab, Scenario, ViewKey, choose};
use std::io::{self, stdout};
use std::time::Duration;

/// How long to wait for a key before checking for signals.
const TICK: Duration = Duration::from_millis(200);
/// Time per frame of a playing view.
const FRAME: Duration = Duration::from_millis(80);

/// Renders a view's page from its name, the flags and values of its fields, and a width.
pub(crate) type Evaluate<'a> = dyn FnMut(&str, &[(&str, &str)], usize) -> Result<Page> + 'a;

/// Shows `lab_tabs`, `tab` first, until the user quits or a signal arrives, and restores the terminal.
pub(crate) fn run(lab_tabs: Vec<LabTab>, tab: usize, theme: Theme, evaluate: &mut Evaluate) -> Result<()> {
    show(LabState::new(lab_tabs, tab), theme, evaluate).map_err(Error::io("draw on", "this terminal"))
}

/// The screen of `width` × `height` with the tab `tab`, as text.
#[cfg(test)]
pub(crate) fn picture(
    lab_tabs: Vec<LabTab>,
    tab: usize,
    (width, height): (u16, u16),
    evaluate: &mut Evaluate,
) -> String {
    let mut state = LabState::new(lab_tabs, tab);
    state.evaluate(width.into(), evaluate);
    view::picture(&mut state, Theme::of(crate::ui::Palette::Monochrome, false), width, height)
}

/// Runs the loop: redraws after changes and waits for keys.
fn show(mut state: LabState, theme: Theme, evaluate: &mut Evaluate) -> io::Result<()> {
    let ending = ShutdownFlag::listen()?;
    let mut screen = Screen::enter(stdout(), false, &ending)?;
    let mut changed = true;
    while !ending.is_set() {
        if changed {
            screen.draw(|frame| {
                state.evaluate(frame.area().width.into(), evaluate);
                view::draw(&mut state, theme, frame);
            })?;
        }
        let event = screen.next_event(if state.playing { FRAME } else { TICK })?;
        changed = event.is_some() || state.tick();
        match event {
            Some(Event::Key(key)) if is_ctrl_z(key) && key.kind == KeyEventKind::Press => screen.suspend()?,
            Some(Event::Key(key)) if key.kind != KeyEventKind::Release && state.press(key).is_break() => break,
            Some(Event::Resize(..)) => state.stale = true,
            _ => {}
        }
    }
    Ok(())
}
