//! The interactive laboratory: one tab a view, its parameters to move, its page below.
//!
//! What a tab shows is what `finetune lab VIEW` prints for the same parameters: the screen only assembles them and asks.
//! State (`model`), keys (`keys`) and picture (`view`) are apart, so that tests drive all but the terminal.

mod keys;
mod model;
mod view;

use std::io::{self, stdout};
use std::time::Duration;

use ratatui::crossterm::event::{Event, KeyEventKind};

use super::Page;
use crate::screen::terminal::{Ending, Screen};
use crate::{Error, Result};

use model::Model;
pub use model::{Adjust, Field, Instrument, Scenario, ViewKey};
pub use view::Theme;

/// How long to wait for a key before looking whether the process is to end.
const TICK: Duration = Duration::from_millis(200);
/// How long a frame of a view that plays lasts.
const FRAME: Duration = Duration::from_millis(80);

/// Shows `instruments` until the user leaves or the process is told to end; `evaluate` makes the page of a view, by name,
/// from the flags and values of its fields, that wide. The terminal is given back in any case.
pub fn run(
    instruments: Vec<Instrument>,
    theme: Theme,
    evaluate: impl FnMut(&str, &[(&str, &str)], usize) -> Result<Page>,
) -> Result<()> {
    show(Model::new(instruments), theme, evaluate).map_err(Error::io("draw on", "this terminal"))
}

/// The screen of `width` × `height` with the tab of that index in view, as text.
#[cfg(test)]
pub(crate) fn picture(
    instruments: Vec<Instrument>,
    tab: usize,
    (width, height): (u16, u16),
    mut evaluate: impl FnMut(&str, &[(&str, &str)], usize) -> Result<Page>,
) -> String {
    let mut model = Model::new(instruments);
    model.tab = tab;
    model.evaluate(width.into(), &mut evaluate);
    view::picture(&mut model, Theme::MONOCHROME, width, height)
}

/// Draws when something has changed, and waits.
fn show(
    mut model: Model,
    theme: Theme,
    mut evaluate: impl FnMut(&str, &[(&str, &str)], usize) -> Result<Page>,
) -> io::Result<()> {
    let ending = Ending::listen()?;
    let mut screen = Screen::take(stdout(), false)?;
    let mut changed = true;
    while !ending.arrived() {
        if changed {
            screen.draw(|frame| {
                model.evaluate(frame.area().width.into(), &mut evaluate);
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
