//! The signals that end a process or a screen.

use super::screen::{give_back, is_taken};
use crate::telemetry::is_ignored;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGXCPU, SIGXFSZ};
use signal_hook::iterator::Signals;
use signal_hook::{SigId, flag, low_level};
use std::io::{self, IsTerminal, Write, stderr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

/// Exit code of a process that a signal has ended.
const INTERRUPTED: i32 = 130;
/// How long a process that ends at once waits for its terminal to be restored.
const PATIENCE: Duration = Duration::from_millis(500);

/// A Ctrl-C within so long of the one before is the same one.
const INSISTENCE: Duration = Duration::from_secs(1);

/// What signals ask of a training run.
///
/// The first SIGINT, SIGTERM, SIGHUP or SIGXCPU ends the process at once while the run is being prepared, and asks a run in
/// progress to save and stop. After that a SIGINT or SIGTERM ends the process whatever it is doing; the other two come
/// several times by themselves. SIGUSR1 asks for a save. The exit code is 130, and a terminal that a screen has taken is
/// given back first.
#[derive(Clone, Default)]
pub struct Interruption {
    run: Arc<OnceLock<Wishes>>,
}

struct Wishes {
    interrupt: Arc<AtomicBool>,
    save: Box<dyn Fn() + Send + Sync>,
}

impl Interruption {
    /// Listens from now on.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn listen() -> io::Result<Self> {
        let interruption = Self::default();
        let mut wanted = vec![SIGINT, SIGTERM, SIGXCPU, SIGUSR1];
        // `nohup` asks to survive a hangup.
        if !is_ignored(SIGHUP) {
            wanted.push(SIGHUP);
        }
        let mut signals = Signals::new(wanted)?;
        let run = Arc::clone(&interruption.run);
        let obey = move || {
            let mut told = false;
            let mut pressed: Option<Instant> = None;
            for signal in signals.forever() {
                match (signal, run.get()) {
                    (SIGUSR1, run) => run.into_iter().for_each(|run| (run.save)()),
                    // Whoever presses Ctrl-C three times at once has not read what the first one said.
                    (SIGINT, _) if pressed.is_some_and(|at| at.elapsed() < INSISTENCE) => {}
                    (SIGINT | SIGTERM, _) if told => {
                        say("stopped without saving what came after the last checkpoint");
                        leave();
                    }
                    (_, Some(run)) => {
                        told = true;
                        pressed = (signal == SIGINT).then(Instant::now);
                        run.interrupt.store(true, Ordering::SeqCst);
                        say("interrupted: saving; Ctrl-C again drops it");
                    }
                    (_, None) => leave(),
                }
            }
        };
        thread::Builder::new().name("signals".into()).spawn(obey)?;
        Ok(interruption)
    }

    /// From now on a run is in progress: `interrupt` is raised when it shall save and stop, and `save` called when it shall
    /// save and go on.
    pub fn attach(&self, interrupt: Arc<AtomicBool>, save: impl Fn() + Send + Sync + 'static) {
        // A process has one run.
        let _ = self.run.set(Wishes { interrupt, save: Box::new(save) });
    }
}

/// Tells on standard error what a signal does, where no screen has the terminal.
fn say(text: &str) {
    if !is_taken() {
        // A terminal shows `^C` or a status line where the cursor is.
        let new_line = if stderr().is_terminal() { "\n" } else { "" };
        let _ = writeln!(stderr(), "{new_line}{text}");
    }
}

/// Ends the process after a short wait for the terminal to be restored.
fn leave() {
    // On its own thread: a terminal that accepts no more output must not keep the process alive.
    let restoring = thread::spawn(give_back);
    let mut waited = Duration::ZERO;
    while !restoring.is_finished() && waited < PATIENCE {
        thread::sleep(Duration::from_millis(1));
        waited += Duration::from_millis(1);
    }
    low_level::exit(INTERRUPTED);
}

/// Turns exceeding `ulimit -f` into a write error, like a full disk, instead of a fatal signal.
///
/// # Errors
/// If the system refuses.
pub fn outlive_file_size_limit() -> io::Result<()> {
    // A handler, unlike an ignored signal, is not inherited by child processes.
    flag::register(SIGXFSZ, Arc::default()).map(drop)
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
        let hangup = (!is_ignored(SIGHUP)).then_some(SIGHUP);
        for signal in [SIGINT, SIGTERM].into_iter().chain(hangup) {
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
