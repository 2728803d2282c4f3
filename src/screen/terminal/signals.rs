//! Signals that stop a run or a screen.

use super::screen::{is_active, restore, wait};
use crate::telemetry::is_ignored;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGXCPU, SIGXFSZ};
use signal_hook::iterator::Signals;
use signal_hook::{SigId, flag, low_level};
use std::io::{self, IsTerminal, Write, stderr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

/// Exit code after a signal.
const INTERRUPTED: i32 = 130;
/// How long an exiting process waits for its terminal to be restored.
const RESTORE_TIMEOUT: Duration = Duration::from_millis(500);
/// How long an interrupted process waits for readers of its output after training has ended.
const STUCK: Duration = Duration::from_secs(3);

/// The effect of the first signal, as text.
pub(crate) const SAVING: &str = "interrupted: saving; Ctrl-C again stops without saving";

/// Requests to stop within this time count as one.
pub(crate) const CTRL_C_REPEAT: Duration = Duration::from_secs(1);

/// Whether this process is training.
static TRAINING: AtomicBool = AtomicBool::new(false);

/// Notes that training begins or has ended. A process that trains does not end because its terminal accepts no output.
pub fn set_training(is_running: bool) {
    TRAINING.store(is_running, Ordering::SeqCst);
}

/// Handles signals during a training run.
///
/// The first SIGINT, SIGTERM, SIGHUP or SIGXCPU ends the process at once while the run is being prepared, and makes a
/// run in progress save and stop. A SIGINT or SIGTERM that comes at least a second later ends the process at once; the
/// system may send the other two repeatedly. SIGUSR1 saves. The exit code is 130, and the terminal is restored first.
#[derive(Clone, Default)]
pub struct SignalHandler {
    run: Arc<OnceLock<Handlers>>,
}

struct Handlers {
    interrupt: Arc<AtomicBool>,
    save: Box<dyn Fn() + Send + Sync>,
}

/// Makes a worker ignore the signals that end a run. The leader handles them: it saves and ends all processes.
pub fn ignore_stop_signals() -> io::Result<()> {
    let heard = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP, SIGXCPU, SIGUSR1] {
        flag::register(signal, heard.clone())?;
    }
    Ok(())
}

impl SignalHandler {
    /// Starts listening.
    pub fn listen() -> io::Result<Self> {
        let interruption = Self::default();
        let mut handled = vec![SIGINT, SIGTERM, SIGXCPU, SIGUSR1];
        // Under `nohup`, survive a hangup.
        if !is_ignored(SIGHUP) {
            handled.push(SIGHUP);
        }
        let mut signals = Signals::new(handled)?;
        let run = Arc::clone(&interruption.run);
        let handle = move || {
            let mut interrupted: Option<Instant> = None;
            for signal in signals.forever() {
                match (signal, run.get(), interrupted) {
                    (SIGUSR1, run, _) => run.into_iter().for_each(|run| (run.save)()),
                    (_, None, _) => leave(),
                    (_, Some(run), None) => {
                        interrupted = Some(Instant::now());
                        run.interrupt.store(true, Ordering::SeqCst);
                        thread::spawn(leave_after_training);
                        say(SAVING);
                    }
                    // One soon after the first is no second request: the user cannot have read the message, and a
                    // launcher may pass on Ctrl-C, which the terminal sends to all of its processes, as SIGTERM.
                    (SIGINT | SIGTERM, Some(_), Some(first)) if first.elapsed() >= CTRL_C_REPEAT => {
                        say("stopped without saving the steps after the last checkpoint");
                        leave();
                    }
                    _ => {}
                }
            }
        };
        thread::Builder::new().name("signals".into()).spawn(handle)?;
        Ok(interruption)
    }

    /// Attaches a run in progress: a signal sets `interrupt` to make it save and stop, or calls `save` to make it save
    /// and continue.
    pub fn attach(&self, interrupt: Arc<AtomicBool>, save: impl Fn() + Send + Sync + 'static) {
        // A process has one run.
        let _ = self.run.set(Handlers { interrupt, save: Box::new(save) });
    }
}

/// Prints the effect of a signal on standard error, unless a screen has the terminal.
fn say(text: &'static str) {
    if !is_active() {
        // The cursor may be after `^C` or a status line.
        let new_line = if stderr().is_terminal() { "\n" } else { "" };
        try_shortly(move || drop(writeln!(stderr(), "{new_line}{text}")));
    }
}

/// Ends the process after training, also if its last lines find no reader.
fn leave_after_training() {
    while TRAINING.load(Ordering::SeqCst) {
        thread::sleep(RESTORE_TIMEOUT);
    }
    thread::sleep(STUCK);
    leave();
}

/// Restores the terminal if it accepts output, and ends the process.
pub(super) fn leave() {
    restore_before_exit();
    low_level::exit(INTERRUPTED);
}

/// Waits shortly for the terminal to be restored, before the process ends.
pub fn restore_before_exit() {
    try_shortly(restore);
}

/// Runs `work` on a separate thread, because a blocked terminal or pipe must not keep the process alive.
fn try_shortly(work: impl FnOnce() + Send + 'static) {
    let working = thread::spawn(work);
    wait(RESTORE_TIMEOUT, || working.is_finished().then_some(()));
}

/// Turns exceeding `ulimit -f` into a write error, like a full disk, instead of a fatal signal.
pub fn outlive_file_size_limit() -> io::Result<()> {
    // A handler, unlike an ignored signal, is not inherited by child processes.
    flag::register(SIGXFSZ, Arc::default()).map(drop)
}

/// A flag that SIGINT sets. Another SIGINT ends the process while it is set.
pub(crate) fn interrupt_flag() -> io::Result<Arc<AtomicBool>> {
    let interrupted = Arc::new(AtomicBool::new(false));
    flag::register_conditional_shutdown(SIGINT, INTERRUPTED, Arc::clone(&interrupted))?;
    flag::register(SIGINT, Arc::clone(&interrupted))?;
    Ok(interrupted)
}

/// Records SIGINT, SIGTERM and SIGHUP for a screen. In raw mode Ctrl-C is a key and not a signal.
pub(crate) struct ShutdownFlag {
    interrupted: Arc<AtomicBool>,
    registered: Vec<SigId>,
}

impl ShutdownFlag {
    /// Listens until it is dropped.
    pub(crate) fn listen() -> io::Result<Self> {
        let mut ending = Self { interrupted: Arc::default(), registered: Vec::new() };
        let hangup = (!is_ignored(SIGHUP)).then_some(SIGHUP);
        for signal in [SIGINT, SIGTERM].into_iter().chain(hangup) {
            ending.registered.push(flag::register(signal, Arc::clone(&ending.interrupted))?);
        }
        Ok(ending)
    }

    /// A function that returns whether a signal arrived and no training has to end first.
    pub(super) fn watch(&self) -> impl Fn() -> bool + Send + use<> {
        let interrupted = Arc::clone(&self.interrupted);
        move || interrupted.load(Ordering::SeqCst) && !TRAINING.load(Ordering::SeqCst)
    }

    /// Whether a signal arrived.
    pub(crate) fn is_set(&self) -> bool {
        self.interrupted.load(Ordering::SeqCst)
    }
}

impl Drop for ShutdownFlag {
    fn drop(&mut self) {
        for id in self.registered.drain(..) {
            low_level::unregister(id);
        }
    }
}
