//! Takes over the terminal for a screen, and restores it in every case.
//!
//! Restoring happens once, at the first of: the guard's `Drop`, the panic hook of any thread (before it prints the
//! message), and a signal that ends the process at once. Drawing and restoring take the same lock, so nothing is drawn
//! on a restored terminal.

use super::signals::{ShutdownFlag, leave};
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
use std::sync::{Arc, Mutex, Once, TryLockError};
use std::thread::{self, JoinHandle, sleep};
use std::time::{Duration, Instant};

/// Whether a screen has taken over the terminal.
static TAKEN: AtomicBool = AtomicBool::new(false);
/// Whether the terminal reports the mouse.
static MOUSE: AtomicBool = AtomicBool::new(false);
/// Held while a frame is drawn.
static DRAWING: Mutex<()> = Mutex::new(());
/// How long restoring waits for a frame in progress; longer only if it was the frame that panicked.
const FRAME_TIMEOUT: Duration = Duration::from_millis(100);
/// How long the end of the process waits for a terminal that accepts no output.
const STUCK: Duration = Duration::from_secs(2);
/// Time between two polls of the keyboard.
pub(super) const KEYS: Duration = Duration::from_millis(20);

/// The terminal while it shows a screen.
pub(crate) struct Screen<W: Write> {
    /// Never dropped: ratatui's `Drop` would show the cursor again, and panic if the terminal has hung up.
    terminal: ManuallyDrop<Terminal<CrosstermBackend<W>>>,
    keyboard: Keyboard,
}

impl<W: Write> Screen<W> {
    /// Takes over the terminal of `writer`, which must be standard output's, and its mouse if `mouse`. After the signal
    /// of `ending` the process ends although the terminal accepts no output.
    pub(crate) fn enter(mut writer: W, mouse: bool, ending: &ShutdownFlag) -> io::Result<Self> {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let report = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |info| {
                restore();
                report(info);
            }));
        });
        take(&mut writer, mouse).inspect_err(|_| restore())?;
        let terminal = Terminal::new(CrosstermBackend::new(writer)).inspect_err(|_| restore())?;
        let keyboard = Keyboard::open(ending.watch()).inspect_err(|_| restore())?;
        Ok(Self { terminal: ManuallyDrop::new(terminal), keyboard })
    }

    /// Draws a frame. `false` if the terminal has been restored meanwhile.
    pub(crate) fn draw(&mut self, render: impl FnOnce(&mut Frame)) -> io::Result<bool> {
        let _drawing = DRAWING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if !TAKEN.load(Ordering::SeqCst) {
            return Ok(false);
        }
        self.terminal.draw(render)?;
        Ok(true)
    }

    /// Restores the terminal, suspends the process, and takes the terminal over again when the process continues.
    pub(crate) fn suspend(&mut self) -> io::Result<()> {
        let mouse = MOUSE.load(Ordering::SeqCst);
        restore();
        raise(SIGTSTP)?;
        take(&mut stdout(), mouse)?;
        self.terminal.clear()
    }

    /// The next key, click or new size, if there is one within `wait`. An error means that the terminal has hung up.
    pub(crate) fn next_event(&self, wait: Duration) -> io::Result<Option<Event>> {
        self.keyboard.next(wait)
    }
}

impl<W: Write> Drop for Screen<W> {
    fn drop(&mut self) {
        self.keyboard.close();
        restore();
    }
}

/// Reads keys, mouse events and new sizes on a separate thread, because crossterm's reader never returns if the
/// terminal hangs up while it reads.
struct Keyboard {
    events: Receiver<Event>,
    closed: Arc<AtomicBool>,
    reader: JoinHandle<()>,
}

impl Keyboard {
    fn open(is_ending: impl Fn() -> bool + Send + 'static) -> io::Result<Self> {
        let (sender, events) = channel();
        let closed = Arc::new(AtomicBool::new(false));
        let asked = Arc::clone(&closed);
        let read = move || {
            let mut stuck = None;
            while !asked.load(Ordering::SeqCst) && stdout().is_terminal() {
                // Never block: a hang-up would not wake the reader.
                while let Ok(true) = event::poll(Duration::ZERO) {
                    let Ok(event) = event::read() else { return };
                    if sender.send(event).is_err() {
                        return;
                    }
                }
                sleep(KEYS);
                let is_stuck = is_ending() && matches!(DRAWING.try_lock(), Err(TryLockError::WouldBlock));
                stuck = is_stuck.then(|| stuck.unwrap_or_else(Instant::now));
                if stuck.is_some_and(|since| since.elapsed() > STUCK) {
                    leave();
                }
            }
        };
        let reader = thread::Builder::new().name("keyboard".into()).spawn(read)?;
        Ok(Self { events, closed, reader })
    }

    /// The next event, if there is one within `wait`. An error means that the terminal has hung up.
    fn next(&self, wait: Duration) -> io::Result<Option<Event>> {
        match self.events.recv_timeout(wait) {
            Ok(event) => Ok(Some(event)),
            Err(RecvTimeoutError::Timeout) if stdout().is_terminal() => Ok(None),
            Err(_) => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    /// Stops reading, so that later input goes to another program.
    fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        // A reader that does not return has lost its terminal.
        wait(FRAME_TIMEOUT, || self.reader.is_finished().then_some(()));
    }
}

/// Waits until `done` has a result, but at most this long.
pub(super) fn wait<T>(patience: Duration, done: impl Fn() -> Option<T>) -> Option<T> {
    let began = Instant::now();
    loop {
        let result = done();
        if result.is_some() || began.elapsed() >= patience {
            return result;
        }
        sleep(Duration::from_millis(1));
    }
}

pub(super) fn is_active() -> bool {
    TAKEN.load(Ordering::SeqCst)
}

/// Takes over the terminal, and its mouse if `mouse`.
fn take(writer: &mut impl Write, mouse: bool) -> io::Result<()> {
    enable_raw_mode()?;
    // From here on the guard restores the terminal, even if the rest fails.
    TAKEN.store(true, Ordering::SeqCst);
    execute!(writer, EnterAlternateScreen)?;
    if mouse {
        MOUSE.store(true, Ordering::SeqCst);
        execute!(writer, EnableMouseCapture)?;
    }
    Ok(())
}

/// Restores the terminal, once.
pub(super) fn restore() {
    if !TAKEN.swap(false, Ordering::SeqCst) {
        return;
    }
    let _drawing = wait(FRAME_TIMEOUT, || match DRAWING.try_lock() {
        Ok(lock) => Some(lock),
        Err(TryLockError::Poisoned(lock)) => Some(lock.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    });
    // A terminal that has hung up cannot be restored and need not be.
    if MOUSE.swap(false, Ordering::SeqCst) {
        let _ = execute!(stdout(), DisableMouseCapture);
    }
    let _ = execute!(stdout(), LeaveAlternateScreen, Show);
    let _ = disable_raw_mode();
}
