//! The interactive laboratory: one tab a view, its parameters to move, its page below.
//!
//! What a tab shows is what `finetune lab VIEW` prints for the same parameters: the screen only assembles them and asks.
//! State (`model`), keys (`keys`) and picture (`view`) are apart, so that tests drive all but the terminal.

mod keys;
mod model;
mod view;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ratatui::crossterm::event::{self, Event, KeyEventKind};

use super::Page;
use crate::{Error, Result};

use model::Model;
pub use model::{Adjust, Field, Instrument};
pub use view::Theme;

/// How long to wait for a key before looking whether the process is to end.
const TICK: Duration = Duration::from_millis(200);

/// Shows `instruments` until the user leaves or the process is told to end; `evaluate` makes the page of a view, by name,
/// from the flags and values of its fields, that wide. The terminal is given back in any case.
pub fn run(
    instruments: Vec<Instrument>,
    theme: Theme,
    evaluate: impl FnMut(&str, &[(&str, &str)], usize) -> Result<Page>,
) -> Result<()> {
    let ended = Arc::new(AtomicBool::new(false));
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&ended))
            .map_err(Error::io("watch signals of", "this process"))?;
    }
    // Sets a panic hook, too, that gives the terminal back.
    let terminal = ratatui::try_init().map_err(Error::io("open a screen on", "this terminal"));
    let result = terminal.and_then(|mut terminal| {
        show(&mut terminal, Model::new(instruments), theme, evaluate, &ended)
            .map_err(Error::io("draw on", "this terminal"))
    });
    let restored = ratatui::try_restore().map_err(Error::io("give back", "this terminal"));
    result.and(restored)
}

/// Draws when something has changed, and waits.
fn show(
    terminal: &mut ratatui::DefaultTerminal,
    mut model: Model,
    theme: Theme,
    mut evaluate: impl FnMut(&str, &[(&str, &str)], usize) -> Result<Page>,
    ended: &AtomicBool,
) -> io::Result<()> {
    let mut changed = true;
    while !ended.load(Ordering::Relaxed) {
        if changed {
            let size = terminal.size()?;
            model.evaluate(usize::from(size.width), &mut evaluate);
            terminal.draw(|frame| view::draw(&mut model, theme, frame))?;
        }
        changed = event::poll(TICK)?;
        if changed {
            match event::read()? {
                Event::Key(key) if key.kind != KeyEventKind::Release && model.press(key).is_break() => break,
                Event::Resize(..) => model.stale = true,
                _ => {}
            }
        }
    }
    Ok(())
}
