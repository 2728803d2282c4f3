//! The terminal: taken for a screen, and given back whatever happens.
//!
//! Restoring is one function that works once, called by whoever comes first: the guard's `Drop`, the panic hook of any
//! thread before the panic's message is printed, or a signal that ends the process at once. A frame is drawn under a lock
//! that restoring takes too, so nothing is drawn on a terminal that has been given back.

use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::event::{self, DisableMouseCapture, EnableMouseCapture, Event};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode};
use ratatui::{Frame, Terminal};
use signal_hook::consts::SIGTSTP;
use signal_hook::low_level::raise;
use std::io::{self, IsTerminal, Write, stdout};
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, Once};
use std::thread::{self, JoinHandle, sleep};
use std::time::Duration;

/// Whether the terminal is ours.
static TAKEN: AtomicBool = AtomicBool::new(false);
/// Whether the terminal reports the mouse.
static MOUSE: AtomicBool = AtomicBool::new(false);
/// Held while a frame is drawn.
static DRAWING: Mutex<()> = Mutex::new(());
/// How long restoring waits for a frame in progress; longer only if it was the frame that panicked.
const PATIENCE: Duration = Duration::from_millis(100);
/// Time between two looks for keys.
const KEYS: Duration = Duration::from_millis(20);

/// The terminal while it shows a screen.
pub(crate) struct Screen<W: Write> {
    /// Never dropped: ratatui's `Drop` would show the cursor, which is done already, and panic where a terminal that has
    /// hung up takes neither that nor the complaint about it.
    terminal: ManuallyDrop<Terminal<CrosstermBackend<W>>>,
    keyboard: Keyboard,
}

impl<W: Write> Screen<W> {
    /// Takes the terminal behind `writer`, which must be standard output's; with its mouse, if `mouse`.
    pub(crate) fn take(mut writer: W, mouse: bool) -> io::Result<Self> {
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
        if mouse {
            MOUSE.store(true, Ordering::SeqCst);
            execute!(writer, EnableMouseCapture).inspect_err(|_| give_back())?;
        }
        let terminal = Terminal::new(CrosstermBackend::new(writer)).inspect_err(|_| give_back())?;
        let keyboard = Keyboard::open().inspect_err(|_| give_back())?;
        Ok(Self { terminal: ManuallyDrop::new(terminal), keyboard })
    }

    /// Draws a frame. `false` if the terminal has been given back meanwhile.
    pub(crate) fn draw(&mut self, render: impl FnOnce(&mut Frame)) -> io::Result<bool> {
        let _drawing = DRAWING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if !TAKEN.load(Ordering::SeqCst) {
            return Ok(false);
        }
        self.terminal.draw(render)?;
        Ok(true)
    }

    /// Gives the terminal to the shell, and takes it again when the process is continued.
    pub(crate) fn suspend(&mut self) -> io::Result<()> {
        let mouse = MOUSE.load(Ordering::SeqCst);
        give_back();
        raise(SIGTSTP)?;
        enable_raw_mode()?;
        TAKEN.store(true, Ordering::SeqCst);
        execute!(stdout(), EnterAlternateScreen)?;
        if mouse {
            MOUSE.store(true, Ordering::SeqCst);
            execute!(stdout(), EnableMouseCapture)?;
        }
        self.terminal.clear()
    }

    /// The next key, click or new size, if there is one within `wait`. An error means that the terminal is gone.
    pub(crate) fn next_event(&self, wait: Duration) -> io::Result<Option<Event>> {
        self.keyboard.next(wait)
    }
}

impl<W: Write> Drop for Screen<W> {
    fn drop(&mut self) {
        self.keyboard.close();
        give_back();
    }
}

/// Keys, the mouse and new sizes, read on a thread of its own: crossterm's reader never returns from a terminal that hangs up while it
/// reads, and the screen must notice.
struct Keyboard {
    events: Receiver<Event>,
    closed: Arc<AtomicBool>,
    reader: JoinHandle<()>,
}

impl Keyboard {
    fn open() -> io::Result<Self> {
        let (sender, events) = channel();
        let closed = Arc::new(AtomicBool::new(false));
        let asked = Arc::clone(&closed);
        let read = move || {
            while !asked.load(Ordering::SeqCst) && stdout().is_terminal() {
                // Only what is there already: a hang-up would not wake a reader that waits.
                while let Ok(true) = event::poll(Duration::ZERO) {
                    let Ok(event) = event::read() else { return };
                    if sender.send(event).is_err() {
                        return;
                    }
                }
                sleep(KEYS);
            }
        };
        let reader = thread::Builder::new().name("keyboard".into()).spawn(read)?;
        Ok(Self { events, closed, reader })
    }

    /// The next key or new size, if there is one within `wait`. An error means that the terminal is gone.
    fn next(&self, wait: Duration) -> io::Result<Option<Event>> {
        match self.events.recv_timeout(wait) {
            Ok(event) => Ok(Some(event)),
            Err(RecvTimeoutError::Timeout) if stdout().is_terminal() => Ok(None),
            Err(_) => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    /// What is typed from here on is for somebody else.
    fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        // A reader that does not come back has lost its terminal.
        let mut waited = Duration::ZERO;
        while !self.reader.is_finished() && waited < PATIENCE {
            sleep(Duration::from_millis(1));
            waited += Duration::from_millis(1);
        }
    }
}

/// Whether a screen has the terminal.
pub(super) fn is_taken() -> bool {
    TAKEN.load(Ordering::SeqCst)
}

/// Leaves the terminal as it was found, once.
pub(super) fn give_back() {
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
    if MOUSE.swap(false, Ordering::SeqCst) {
        let _ = execute!(stdout(), DisableMouseCapture);
    }
    let _ = execute!(stdout(), LeaveAlternateScreen, Show);
    let _ = disable_raw_mode();
}
