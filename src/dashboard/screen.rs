//! The terminal: taken for the dashboard, and given back whatever happens.
//!
//! Restoring is one function that works once, called by whoever comes first: the guard's `Drop`, or the panic hook of
//! any thread, before the panic's message is printed. A frame is drawn under a lock that restoring takes too, so
//! nothing is drawn on a terminal that has been given back.

use super::theme::Theme;
use super::{state::ViewModel, view};
use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode};
use std::io::{self, Write, stdout};
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, Once};
use std::thread::sleep;
use std::time::Duration;

/// Whether the terminal is ours.
static TAKEN: AtomicBool = AtomicBool::new(false);
/// Held while a frame is drawn.
static DRAWING: Mutex<()> = Mutex::new(());
/// How long restoring waits for a frame in progress; longer only if it was the frame that panicked.
const PATIENCE: Duration = Duration::from_millis(100);

/// The terminal while it shows the dashboard.
pub(super) struct Screen<W: Write> {
    /// Never dropped: ratatui's `Drop` would show the cursor, which is done already, and panic where a terminal that has
    /// hung up takes neither that nor the complaint about it.
    terminal: ManuallyDrop<Terminal<CrosstermBackend<W>>>,
}

impl<W: Write> Screen<W> {
    /// Takes the terminal behind `writer`, which must be standard output's.
    pub(super) fn take(mut writer: W) -> io::Result<Self> {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let report = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |info| {
                give_back();
                report(info);
            }));
        });
        enable_raw_mode()?;
        TAKEN.store(true, Ordering::SeqCst);
        // From here on the guard restores, even if the rest fails.
        execute!(writer, EnterAlternateScreen).inspect_err(|_| give_back())?;
        let terminal = Terminal::new(CrosstermBackend::new(writer)).inspect_err(|_| give_back())?;
        Ok(Self { terminal: ManuallyDrop::new(terminal) })
    }

    /// Draws a frame. `false` if the terminal has been given back meanwhile.
    pub(super) fn draw(&mut self, state: &ViewModel, theme: Theme) -> io::Result<bool> {
        let _drawing = DRAWING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if !TAKEN.load(Ordering::SeqCst) {
            return Ok(false);
        }
        self.terminal.draw(|frame| view::draw(state, theme, frame.buffer_mut()))?;
        Ok(true)
    }
}

impl<W: Write> Drop for Screen<W> {
    fn drop(&mut self) {
        give_back();
    }
}

/// Leaves the terminal as it was found, once.
fn give_back() {
    if !TAKEN.swap(false, Ordering::SeqCst) {
        return;
    }
    let mut waited = Duration::ZERO;
    let _drawing = loop {
        match DRAWING.try_lock() {
            Ok(lock) => break Some(lock),
            Err(std::sync::TryLockError::Poisoned(lock)) => break Some(lock.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) if waited < PATIENCE => {
                waited += Duration::from_millis(5);
                sleep(Duration::from_millis(5));
            }
            Err(std::sync::TryLockError::WouldBlock) => break None,
        }
    };
    // A terminal that has hung up cannot be restored and need not be.
    let _ = execute!(stdout(), LeaveAlternateScreen, Show);
    let _ = disable_raw_mode();
}
