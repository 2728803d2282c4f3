//! The signals that end a process or a screen.

use super::screen::give_back;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::{SigId, flag, low_level};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// Exit code of a process that a signal has ended.
const INTERRUPTED: i32 = 130;
/// How long a process that is to end at once waits for its terminal to take the way back.
const PATIENCE: Duration = Duration::from_millis(500);

/// From now on the first SIGINT or SIGTERM raises `interrupt`. A second one ends the process, whatever it is doing, with
/// exit code 130; a terminal that a screen has taken is given back first.
///
/// # Errors
/// If the system refuses.
pub fn end_on_signals(interrupt: &Arc<AtomicBool>) -> io::Result<()> {
    for signal in [SIGINT, SIGTERM] {
        flag::register(signal, Arc::clone(interrupt))?;
    }
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    let count = move || {
        if signals.forever().nth(1).is_some() {
            // On a thread of its own: a terminal that takes nothing any more must not keep the process alive.
            let restoring = thread::spawn(give_back);
            let mut waited = Duration::ZERO;
            while !restoring.is_finished() && waited < PATIENCE {
                thread::sleep(Duration::from_millis(1));
                waited += Duration::from_millis(1);
            }
            low_level::exit(INTERRUPTED);
        }
    };
    thread::Builder::new().name("signals".into()).spawn(count).map(drop)
}

/// Whether a screen has been told to end, by SIGINT, SIGTERM or SIGHUP. In raw mode Ctrl-C is a key and no signal.
pub(crate) struct Ending {
    told: Arc<AtomicBool>,
    registered: Vec<SigId>,
}

impl Ending {
    /// Listens until it is dropped.
    pub(crate) fn listen() -> io::Result<Self> {
        let mut ending = Self { told: Arc::default(), registered: Vec::new() };
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            ending.registered.push(flag::register(signal, Arc::clone(&ending.told))?);
        }
        Ok(ending)
    }

    /// Whether it has.
    pub(crate) fn told(&self) -> bool {
        self.told.load(Ordering::SeqCst)
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        for id in self.registered.drain(..) {
            low_level::unregister(id);
        }
    }
}
