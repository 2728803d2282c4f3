//! The interactive lab: one tab per view, with adjustable parameters and the view's page below.
//!
//! A tab shows what `finetune lab VIEW` prints for the same parameters. State (`model`), keys (`keys`) and drawing (`view`) are
//! separate, so that tests can drive everything except the terminal.

mod keys;
mod model;
#[cfg(test)]
pub(crate) mod pressed;
mod view;

use std::io::{self, stdout};
use std::time::Duration;

use ratatui::crossterm::event::{Event, KeyEventKind};

use crate::screen::terminal::{Ending, Screen};
use crate::ui::{Page, Theme};
use crate::{Error, Result};

use model::Model;
pub(crate) use model::typed;
pub use model::{Adjust, Control, Controls, Field, Instrument, Scenario, ViewKey};

/// How long to wait for a key before checking for signals.
const TICK: Duration = Duration::from_millis(200);
/// Time per frame of a playing view.
const FRAME: Duration = Duration::from_millis(80);

/// Renders a view's page from its name, the flags and values of its fields, and a width.
pub type Evaluate<'a> = dyn FnMut(&str, &[(&str, &str)], usize) -> Result<Page> + 'a;

/// Shows `instruments` until the user quits or a signal arrives, and restores the terminal.
pub fn run(instruments: Vec<Instrument>, theme: Theme, evaluate: &mut Evaluate) -> Result<()> {
    show(Model::new(instruments), theme, evaluate).map_err(Error::io("draw on", "this terminal"))
}

/// The screen of `width` × `height` with the tab `tab`, as text.
#[cfg(test)]
pub(crate) fn picture(
    instruments: Vec<Instrument>,
    tab: usize,
    (width, height): (u16, u16),
    evaluate: &mut Evaluate,
) -> String {
    let mut model = Model::new(instruments);
    model.tab = tab;
    model.evaluate(width.into(), evaluate);
    view::picture(&mut model, Theme::monochrome(), width, height)
}

/// Runs the loop: redraws after changes and waits for keys.
fn show(mut model: Model, theme: Theme, evaluate: &mut Evaluate) -> io::Result<()> {
    let ending = Ending::listen()?;
    let mut screen = Screen::take(stdout(), false)?;
    let mut changed = true;
    while !ending.arrived() {
        if changed {
            screen.draw(|frame| {
                model.evaluate(frame.area().width.into(), evaluate);
                view::draw(&mut model, theme, frame);
            })?;
        }
        let event = screen.next_event(if model.playing { FRAME } else { TICK })?;
        changed = event.is_some() || model.tick();
        match event {
            Some(Event::Key(key)) if key.kind != KeyEventKind::Release && model.press(key).is_break() => break,
            Some(Event::Resize(..)) => model.stale = true,
            _ => {}
        }
    }
    Ok(())
}
