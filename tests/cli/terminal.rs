//! The dashboard and the lab in a real terminal (tmux), which must be restored after every kind of exit.
//!
//! The programs under test are `examples/dashboard_demo`, the dashboard over a synthetic run, and `finetune watch`.
//! Without tmux these tests are skipped with a message, except in CI, where they fail.

use crate::common::cli_fixture::CliFixture;
use crate::common::compare::skip;
use crate::common::{golden, launch, of_kind};
use finetune::store::checkpoint::latest_valid;
use finetune::telemetry::{Event, Record, StepRecord, VERSION, read};
use std::ffi::OsString;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::ptr::null_mut;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long anything may take on a busy machine.
const PATIENCE: Duration = Duration::from_mins(1);

/// After this time, a signal is a second request to stop.
const SECOND_REQUEST: Duration = Duration::from_millis(1100);

/// The demonstration, rebuilt first, because running a single test does not build it.
static DEMO: LazyLock<PathBuf> = LazyLock::new(|| {
    let mut build = launch::command(env!("CARGO"));
    build.args(["build", "--quiet", "--example", "dashboard_demo"]);
    // Cargo sets variables for a test that it does not have itself. ring's build script would run again for their sake,
    // here and at the next build, and the compiler for all that depends on it.
    let of_test = |name: &OsString| {
        let name = name.to_string_lossy();
        name == "OUT_DIR" || name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")
    };
    std::env::vars_os().map(|(name, _)| name).filter(of_test).for_each(|name| {
        build.env_remove(name);
    });
    if !cfg!(debug_assertions) {
        build.arg("--release");
    }
    assert!(build.status().unwrap().success());
    Path::new(env!("CARGO_BIN_EXE_finetune")).parent().unwrap().join("examples/dashboard_demo")
});

/// A shell in a separate tmux server.
struct Terminal {
    server: String,
    folder: tempfile::TempDir,
}

impl Terminal {
    /// Opens a shell of this size that has noted the terminal's settings; `None` if tmux is missing.
    fn open(columns: u32, rows: u32) -> Option<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        if launch::command("tmux").arg("-V").output().is_err() {
            skip("tmux", "tmux is not installed");
            return None;
        }
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let server = format!("finetune-test-{}-{number}", std::process::id());
        let terminal = Self { server, folder: tempfile::tempdir().unwrap() };
        let (columns, rows) = (columns.to_string(), rows.to_string());
        terminal.tmux(&["-f", "/dev/null", "new-session", "-d", "-x", &columns, "-y", &rows, "env PS1='$ ' sh -i"]);
        terminal.tmux(&["set", "-g", "remain-on-exit", "on"]);
        terminal.run("stty -a > before; echo ready");
        terminal.wait_for("ready\n");
        Some(terminal)
    }

    fn tmux(&self, arguments: &[&str]) -> Output {
        let mut command = launch::command("tmux");
        command.args(["-L", &self.server]).args(arguments).current_dir(self.folder.path());
        command.env_remove("NO_COLOR").env_remove("TMUX").env("LC_ALL", "C.UTF-8");
        let output = command.output().unwrap();
        assert!(output.status.success(), "tmux {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        output
    }

    /// Types a line into the shell.
    fn run(&self, line: &str) {
        self.tmux(&["send-keys", "-l", line]);
        self.keys(&["Enter"]);
    }

    /// Runs `finetune LINE` on an empty screen.
    fn finetune(&self, line: &str) {
        self.run(&format!("clear; {} {line}", env!("CARGO_BIN_EXE_finetune")));
    }

    /// Quits a screen without training, and checks the terminal. Keys typed before the prompt is back would go to the
    /// screen.
    fn quit(&self) {
        self.keys(&["q"]);
        self.wait_until("the prompt", |screen| screen.trim_end().ends_with('$'));
        self.assert_restored();
    }

    /// Quits the dashboard of a run, which saves and stops.
    fn stop(&self) {
        self.keys(&["q"]);
        self.wait_for("save and stop");
        self.answer("s");
    }

    fn keys(&self, keys: &[&str]) {
        self.tmux(&[&["send-keys"], keys].concat());
    }

    /// Answers a dialog that has just appeared, which ignores keys at first.
    fn answer(&self, key: &str) {
        sleep(Duration::from_millis(400));
        self.keys(&[key]);
    }

    fn text(&self) -> String {
        String::from_utf8(self.tmux(&["capture-pane", "-p"]).stdout).unwrap()
    }

    /// Waits until the screen shows a text; gives the screen.
    fn wait_for(&self, expected: &str) -> String {
        self.wait_until(expected, |screen| screen.contains(expected))
    }

    fn wait_until(&self, what: &str, holds: impl Fn(&str) -> bool) -> String {
        let began = Instant::now();
        loop {
            let screen = self.text();
            if holds(&screen) {
                return screen;
            }
            assert!(began.elapsed() < PATIENCE, "no `{what}` on the screen:\n{screen}");
            sleep(Duration::from_millis(50));
        }
    }

    /// Starts the demonstration and waits for its first picture.
    fn start_demo(&self, arguments: &str) {
        self.run(&format!("clear; {} {arguments}", DEMO.display()));
        self.wait_for("▶ running");
    }

    /// The process id of the shell.
    fn shell(&self) -> String {
        String::from_utf8(self.tmux(&["display", "-p", "#{pane_pid}"]).stdout).unwrap().trim().to_owned()
    }

    /// Sends signals, at once one after the other.
    fn signal(&self, signals: &[&str]) {
        let name = DEMO.file_name().unwrap().to_str().unwrap();
        let children = Command::new("pgrep").args(["-P", &self.shell(), "-f", name]).output().unwrap();
        let child = String::from_utf8(children.stdout).unwrap();
        let kills: Vec<_> = signals.iter().map(|signal| format!("kill -{signal} {}", child.trim())).collect();
        assert!(Command::new("sh").args(["-c", &kills.join("; ")]).status().unwrap().success());
    }

    /// That the terminal is as it was: settings, screen, cursor, and a shell that answers.
    fn assert_restored(&self) {
        self.run("stty -a > after; echo an\"swe\"r");
        self.wait_for("answer\n");
        let settings = |name: &str| std::fs::read_to_string(self.folder.path().join(name)).unwrap();
        assert_eq!(settings("after"), settings("before"));
        let state = self
            .tmux(&["display", "-p", "alternate=#{alternate_on} cursor=#{cursor_flag} mouse=#{mouse_any_flag}"])
            .stdout;
        assert_eq!(String::from_utf8(state).unwrap().trim(), "alternate=0 cursor=1 mouse=0");
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        launch::command("tmux").args(["-L", &self.server, "kill-server"]).output().ok();
    }
}

#[test]
fn quit_saves_stops_and_restores() {
    let Some(terminal) = Terminal::open(120, 36) else { return };
    terminal.start_demo("");
    terminal.stop();
    terminal.wait_for("finished reason=stopped");
    terminal.wait_for("exit: Ended");
    terminal.wait_for("told: Stop { save: true }");
    terminal.assert_restored();
}

#[test]
fn detach_goes_on_as_lines() {
    let Some(terminal) = Terminal::open(120, 36) else { return };
    terminal.start_demo("");
    terminal.keys(&["q"]);
    terminal.wait_for("detach");
    terminal.answer("d");
    terminal.wait_for("loss_avg=");
    // The terminal makes a signal of Ctrl-C again.
    terminal.keys(&["C-c"]);
    let screen = terminal.wait_for("told: ");
    assert!(screen.contains("exit: Detached") && screen.contains("told: Detach interrupt"), "{screen}");
    terminal.assert_restored();
}

#[test]
fn keys_reach_training_and_the_screen() {
    let Some(terminal) = Terminal::open(120, 36) else { return };
    terminal.start_demo("");
    terminal.keys(&["Space"]);
    terminal.wait_for("‖ paused");
    terminal.keys(&["Space"]);
    terminal.wait_for("▶ running");
    terminal.keys(&["s"]);
    terminal.wait_for("last checkpoint");
    terminal.keys(&["f"]);
    terminal.wait_for("view frozen at");
    terminal.keys(&["4"]);
    terminal.wait_for("[4 Events]");
    terminal.keys(&["?"]);
    terminal.wait_for("any key closes");
    terminal.answer("x");
    terminal.keys(&["C-c"]);
    terminal.wait_for("told: Pause Resume SaveNow Interrupt");
    terminal.assert_restored();
}

#[test]
fn a_live_resize_keeps_everything() {
    let Some(terminal) = Terminal::open(120, 36) else { return };
    terminal.start_demo("");
    for (columns, rows, expected) in [
        ("80", "24", "Overflows"),
        ("50", "8", "scale 2^"),
        ("60", "40", "Loss scale (log2)"),
        ("100", "20", "Loss scale (log2)"),
        ("30", "4", "scale 2^"),
        ("120", "36", "Gradients as FP16 stores them"),
    ] {
        terminal.tmux(&["resize-window", "-x", columns, "-y", rows]);
        terminal.wait_for(expected);
    }
    terminal.keys(&["q"]);
    terminal.wait_for("save and stop");
    terminal.answer("D");
    terminal.wait_for("Discard?");
    terminal.answer("y");
    terminal.wait_for("told: Stop { save: false }");
    // The size is part of the settings: it is as before too.
    terminal.assert_restored();
}

#[test]
fn a_panic_in_training_shows_its_message_on_a_restored_terminal() {
    let Some(terminal) = Terminal::open(120, 36) else { return };
    terminal.run(&format!("clear; {} --panic training", DEMO.display()));
    let screen = terminal.wait_for("told: training panicked");
    assert!(screen.contains("an invented panic in training") && screen.contains("exit: TrainerPanicked"), "{screen}");
    terminal.assert_restored();
}

#[test]
fn a_panic_in_drawing_leaves_training_alone() {
    let Some(terminal) = Terminal::open(120, 36) else { return };
    terminal.run(&format!("clear; {} --panic screen", DEMO.display()));
    terminal.wait_for("warning: no dashboard: the dashboard panicked");
    terminal.wait_for("loss_avg=");
    terminal.keys(&["C-c"]);
    terminal.wait_for("told: interrupt");
    terminal.assert_restored();
}

#[test]
fn a_signal_makes_training_stop_and_restores() {
    for signal in ["TERM", "INT", "HUP"] {
        let Some(terminal) = Terminal::open(120, 36) else { return };
        terminal.start_demo("");
        terminal.signal(&[signal]);
        terminal.wait_for("exit: Terminated");
        // The flag and the screen's command mean the same; training serves the first one.
        terminal.wait_until("interrupted", |screen| screen.to_lowercase().contains("told: interrupt"));
        terminal.assert_restored();
    }
}

#[test]
fn a_second_signal_ends_everything_at_once_and_restores() {
    for [first, second] in [["TERM", "INT"], ["INT", "TERM"]] {
        let Some(terminal) = Terminal::open(120, 36) else { return };
        terminal.start_demo("--stubborn; echo code=$?");
        terminal.signal(&[first, second]);
        let screen = terminal.wait_for("interrupted: saving; Ctrl-C again stops without saving");
        assert!(!screen.contains("code="), "signals at once are one request: {screen}");
        sleep(SECOND_REQUEST);
        terminal.signal(&[second]);
        terminal.wait_for("code=130");
        terminal.assert_restored();
    }
}

/// A slow step would leave an empty terminal.
#[test]
fn a_signal_that_closes_the_screen_is_confirmed() {
    let Some(terminal) = Terminal::open(120, 36) else { return };
    terminal.start_demo("--stubborn; echo code=$?");
    terminal.signal(&["TERM"]);
    terminal.wait_for("interrupted: saving; Ctrl-C again stops without saving");
    sleep(SECOND_REQUEST);
    terminal.keys(&["C-c"]);
    terminal.wait_for("code=130");
    terminal.assert_restored();
}

#[test]
fn a_terminal_that_hangs_up_makes_training_save() {
    let Some(terminal) = Terminal::open(120, 36) else { return };
    terminal.start_demo("--log events.jsonl");
    terminal.tmux(&["kill-server"]);
    let began = Instant::now();
    let log = terminal.folder.path().join("events.jsonl");
    while !std::fs::read_to_string(&log).unwrap().contains(r#""event":"finished","reason":"interrupted""#) {
        assert!(began.elapsed() < PATIENCE, "training did not stop");
        sleep(Duration::from_millis(50));
    }
}

/// Regression: it waited for the terminal forever.
#[test]
fn a_signal_ends_a_screen_on_a_terminal_that_accepts_no_output() {
    let fixture = CliFixture::empty();
    let started = Event::Started(Box::default());
    let step = Event::Step(Box::new(StepRecord { step: 1, ..StepRecord::default() }));
    let line = |event| serde_json::to_string(&Record { v: VERSION, t: 0, s: 0.0, event }).unwrap() + "\n";
    fixture.write("run/events.jsonl", line(started) + &line(step));
    // A frame of this size fills the terminal's buffer.
    let mut size = libc::winsize { ws_row: 200, ws_col: 400, ws_xpixel: 0, ws_ypixel: 0 };
    let mut ends = [-1, -1];
    let [master, slave] = &mut ends;
    // SAFETY: the pointers are valid or null, and both descriptors have no other owner.
    let [master, slave] = unsafe {
        assert_eq!(libc::openpty(master, slave, null_mut(), null_mut(), &raw mut size), 0);
        ends.map(|end| OwnedFd::from_raw_fd(end))
    };
    let mut command = fixture.command("watch run");
    command.env("TERM", "xterm-256color").stdin(slave.try_clone().unwrap()).stdout(slave);
    let mut watching = command.spawn().unwrap();
    // Until the signal is handled, and the frame is written as far as possible.
    let mut first = libc::pollfd { fd: master.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: the pointer is to one entry.
    assert_eq!(unsafe { libc::poll(&raw mut first, 1, PATIENCE.as_millis() as i32) }, 1);
    sleep(Duration::from_secs(3));
    assert!(Command::new("kill").arg(watching.id().to_string()).status().unwrap().success());
    let began = Instant::now();
    while watching.try_wait().unwrap().is_none() {
        assert!(began.elapsed() < PATIENCE, "it does not end");
        sleep(Duration::from_millis(20));
    }
}

/// Regression: a signal saved the run, but the process waited for a reader for ever.
#[test]
fn a_signal_ends_training_although_nobody_reads_its_lines() {
    let fixture = CliFixture::new();
    let (_unread, mut lines) = std::io::pipe().unwrap();
    // A page of the pipe is free, which ten steps fill.
    lines.write_all(&vec![b'x'; 15 * 4096]).unwrap();
    let run = "--model model --data text.txt --run r --seq-len 8 --batch-size 2 --threads 1 --plain --log-every 1";
    let mut command = fixture.command(&format!("{run} --steps 1000000 --set train.sample_tokens=0"));
    let mut training = command.stdout(lines.try_clone().unwrap()).stderr(lines).spawn().unwrap();
    let began = Instant::now();
    let wait_until = |what: &str, is_done: &mut dyn FnMut() -> bool| {
        while !is_done() {
            assert!(began.elapsed() < 2 * PATIENCE, "{what}");
            sleep(Duration::from_millis(20));
        }
    };
    let log = fixture.run("r").join("events.jsonl");
    let steps = || std::fs::read_to_string(&log).unwrap_or_default().matches(r#""event":"step""#).count();
    wait_until("no step", &mut || steps() > 40);
    assert!(Command::new("kill").arg(training.id().to_string()).status().unwrap().success());
    wait_until("it does not end", &mut || training.try_wait().unwrap().is_some());
    assert_eq!(training.wait().unwrap().code(), Some(130));
    assert!(latest_valid(&fixture.run("r")).is_ok());
}

#[test]
fn a_process_that_stands_still_is_named_on_a_restored_terminal() {
    let Some(terminal) = Terminal::open(120, 36) else { return };
    let run = "--processes 2 --grad-accum 2 --batch-size 1 --seq-len 16 --steps 1000000 --threads 1";
    let program = env!("CARGO_BIN_EXE_finetune");
    terminal.run(&format!("clear; FINETUNE_MPI_TIMEOUT_S=10 {program} {run}; echo code $?"));
    terminal.wait_until("a step", |screen| screen.contains("▶ running") && screen.contains("tok/s"));
    let other = format!("kill -STOP $(pgrep -P $(pgrep -P {} finetune) finetune)", terminal.shell());
    assert!(Command::new("sh").args(["-c", &other]).status().unwrap().success());
    terminal.wait_for("code 1");
    assert!(terminal.text().contains("error: no message from process 1 "), "{}", terminal.text());
    terminal.assert_restored();
}

#[test]
fn no_color_means_no_color() {
    let Some(terminal) = Terminal::open(120, 36) else { return };
    terminal.run(&format!("clear; NO_COLOR=1 {}", DEMO.display()));
    terminal.wait_for("▶ running");
    let screen = String::from_utf8(terminal.tmux(&["capture-pane", "-p", "-e"]).stdout).unwrap();
    // Bold is allowed: 3x and 4x set colors, 9x and 10x bright ones.
    let colors = screen.split("\u{1b}[").skip(1).filter_map(|code| code.split('m').next());
    let colored = colors
        .flat_map(|code| code.split(';'))
        .any(|part| part.parse().is_ok_and(|code: u32| matches!(code, 30..=38 | 40..=48 | 90..=97 | 100..=107)));
    assert!(!colored, "{screen:?}");
    terminal.keys(&["C-c"]);
    terminal.wait_for("exit: Ended");
    terminal.assert_restored();
}

#[test]
fn watch_follows_another_process_and_sees_it_killed() {
    let Some(terminal) = Terminal::open(120, 36) else { return };
    let Some(watcher) = Terminal::open(120, 36) else { return };
    let log = terminal.folder.path().join("events.jsonl");
    terminal.start_demo("--log events.jsonl");
    watcher.finetune(&format!("watch {}", log.display()));
    watcher.wait_for("▶ running");
    terminal.signal(&["KILL"]);
    watcher.wait_for("✕ process gone");
    watcher.quit();
}

/// The log of a run that has ended.
const LOG: &str = r#"{"v":2,"t":1,"s":1.0,"event":"step","step":128,"loss":2.5,"loss_scale":65536.0}
{"v":2,"t":1,"s":9.0,"event":"finished","reason":"done","step":3}
"#;

/// Regression: dialogs ignored all keys, because they waited for the replay's clock.
#[test]
fn the_help_of_a_replay_that_has_ended_closes() {
    let Some(terminal) = Terminal::open(120, 36) else { return };
    std::fs::write(terminal.folder.path().join("events.jsonl"), LOG).unwrap();
    terminal.finetune("watch events.jsonl --speed 1000");
    terminal.wait_for("■ done");
    terminal.keys(&["?"]);
    terminal.wait_for("any key closes");
    terminal.answer("x");
    terminal.wait_until("closed help", |screen| !screen.contains("any key closes"));
    terminal.quit();
}

#[test]
fn piped_output_is_lines() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("events.jsonl");
    std::fs::write(&log, LOG).unwrap();
    let text = launch::succeed(launch::program().arg("watch").arg(&log));
    assert!(text.contains("step=128 ") && text.contains("finished reason=done"), "{text}");
    assert!(!text.contains('\u{1b}'), "{text:?}");
    let (code, _, text) = launch::finish(launch::program().arg("watch").args([&log, &log]));
    assert!(code == Some(2) && text.contains("plain lines show one run"), "{text}");
}

/// Arrow keys, history, lines, commands and Ctrl-C of a chat in a terminal.
#[test]
fn a_chat_is_edited_stopped_and_saved() {
    let Some(terminal) = Terminal::open(80, 24) else { return };
    let fixture = CliFixture::new();
    // So long a context that an answer lasts until it is stopped.
    let mut config = golden::config("families/llama");
    for (key, value) in
        [("max_position_embeddings", 16384), ("vocab_size", 257), ("eos_token_id", 256), ("bos_token_id", 256)]
    {
        config[key] = value.into();
    }
    fixture.write("model/config.json", config.to_string());
    let train = "--model model --init random --data text.txt --val text.txt --steps 1 --seq-len 16 --batch-size 1 --run m --plain";
    fixture.said(&format!("{train} --dtype fp32 --set train.sample_tokens=0"));
    fixture.write("ends.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}");
    let chat = format!(
        "chat {} --template {} -n 100000 --threads 1 --temperature 0",
        fixture.run("m").display(),
        fixture.path("ends.jinja").display()
    );
    terminal.finetune(&format!("{chat}; echo code $?"));
    terminal.wait_for("/help lists the commands");
    terminal.keys(&["h", "l", "o", "Left", "Left", "e", "l", "Enter"]);
    terminal.wait_for("> hello");
    sleep(Duration::from_millis(300));
    terminal.keys(&["C-c"]);
    // An answer may fill the screen, so only its last lines tell what happened last.
    let stopped =
        |screen: &str| screen.rsplit_once("(stopped)\n").is_some_and(|(_, end)| end.trim_end().lines().count() == 1);
    let saved = |screen: &str| {
        screen.rsplit_once("(stopped)\n").is_some_and(|(_, end)| end.contains("messages to `talk.jsonl`"))
    };
    terminal.wait_until("the first stop", stopped);
    terminal.run("/save talk.jsonl");
    terminal.wait_until("the first save", saved);
    terminal.run("/reset");
    terminal.wait_until("the editor", |screen| screen.trim_end().ends_with("ends the chat"));
    terminal.keys(&["Up", "Up", "Up", "End"]);
    terminal.run("\\");
    terminal.run("y");
    // No blank lines are left of the editor's rows.
    terminal.wait_for("> /reset\n> hello\n> y");
    sleep(Duration::from_millis(300));
    terminal.keys(&["C-c"]);
    terminal.wait_until("the second stop", stopped);
    terminal.run("/save talk.jsonl");
    terminal.wait_until("the second save", saved);
    terminal.run("/help");
    terminal.wait_for("/regenerate    replace the last answer");
    terminal.keys(&["C-d"]);
    terminal.wait_for("\ncode 0");
    terminal
        .run(&format!("clear; sh -c 'echo $$ > pid; exec {} {chat}'; echo code $?", env!("CARGO_BIN_EXE_finetune")));
    terminal.wait_for("/help lists the commands");
    let pid = std::fs::read_to_string(terminal.folder.path().join("pid")).unwrap();
    assert!(launch::command("kill").args(["-TERM", pid.trim()]).status().unwrap().success());
    terminal.wait_for("code 143");
    terminal.assert_restored();
    let saved = std::fs::read_to_string(terminal.folder.path().join("talk.jsonl")).unwrap();
    assert!(saved.lines().next().unwrap().contains(r#""content":"hello""#), "{saved}");
    assert!(saved.lines().last().unwrap().contains(r#""content":"hello\ny""#), "{saved}");
}

#[test]
fn real_training_shows_itself_and_stops_when_told() {
    let Some(terminal) = Terminal::open(120, 36) else { return };
    // Longer than anyone looks, and no growth: the scale only falls, however fast the machine is.
    let run = "--run t --batch-size 2 --seq-len 16 --steps 100000 --set scaler.growth_interval=100000";
    terminal.finetune(&format!("{run}; echo code $?"));
    terminal.wait_until("a step", |screen| screen.contains("▶ running") && screen.contains("tok/s"));
    terminal.keys(&["2"]);
    terminal.wait_for("If the loss scale were");
    terminal.keys(&["p"]);
    terminal.wait_for("FP32 probe at step");
    terminal.keys(&["1"]);
    // The default run's scale begins too high, on purpose.
    terminal.wait_until("an overflow", |screen| screen.contains("Overflows ") && screen.contains("→2^"));
    terminal.stop();
    terminal.wait_for("code 130");
    terminal.wait_until("the prompt", |screen| screen.ends_with("$\n") || screen.trim_end().ends_with('$'));
    terminal.assert_restored();
    let log = std::fs::read_to_string(terminal.folder.path().join("checkpoints/t/events.jsonl")).unwrap();
    assert!(log.contains(r#""event":"checkpoint_saved""#) && log.contains(r#""reason":"stopped""#), "{log}");

    // The overflowed tensors and the falling scale are visible afterwards.
    terminal.finetune("watch t");
    terminal.wait_for("■ stopped");
    terminal.keys(&["z", "z", "z", "z"]);
    let screen = terminal.wait_until("the overflows alone", |screen| {
        screen.lines().nth(1).is_some_and(|line| line.starts_with("┌ Overflows "))
    });
    let events = read(terminal.folder.path().join("checkpoints/t/events.jsonl")).unwrap();
    let overflows: Vec<_> = of_kind!(events.into_iter().map(|record| record.event), Event::Overflow).collect();
    assert!(overflows.len() > 2 && overflows.windows(2).all(|pair| pair[1].scale.to <= pair[0].scale.to));
    for overflow in overflows {
        let change = format!("{} 2^{}→2^{}", overflow.step, overflow.scale.from.log2(), overflow.scale.to.log2());
        let row = screen.lines().find_map(|line| line.split_once(&format!(" {change}  ")));
        let (_, names) = row.unwrap_or_else(|| panic!("no `{change}`:\n{screen}"));
        assert!(overflow.tensors.iter().any(|tensor| names.contains(&tensor.name)), "{names}");
        assert!(overflow.first_nonfinite.is_none_or(|origin| names.contains(&origin.layer)), "{names}");
    }
    terminal.quit();
}

/// Item 7 of daily use: what a resumed dashboard shows, from training itself.
#[test]
fn item_7_a_resumed_run_shows_all_of_itself_and_a_finished_one_its_end() {
    let Some(terminal) = Terminal::open(120, 36) else { return };
    let run = "--run t --batch-size 2 --seq-len 16 --steps 40 --save-every 20 --eval-every 20";
    terminal.finetune(&format!("{run} --plain > lines; echo do\"ne\""));
    terminal.wait_for("done\n");
    terminal.finetune("--resume t");
    terminal.wait_for("nothing is left to do: the run has completed its 40 steps");
    terminal.finetune("--resume t/step-000020 --plain | tail -1");
    terminal.wait_for("finished reason=done step=40");
    terminal.finetune("watch t");
    let is_drawn = |screen: &str| screen.contains("■ done") && screen.contains("step 40/40");
    let screen = terminal.wait_until("the finished run", is_drawn);
    assert!(screen.contains("│   0 ") && screen.contains("val ") && screen.contains("(best "), "{screen}");
    assert!(!screen.contains("NaN") && !screen.contains("no loss yet") && !screen.contains("step 0/"), "{screen}");
    terminal.quit();

    // Regression: a report's path reached the terminal as it was.
    let runs = terminal.folder.path().join("checkpoints");
    std::fs::rename(runs.join("t"), runs.join("\u{1b}[31mred")).unwrap();
    terminal.finetune("report");
    terminal.wait_for("wrote checkpoints/\\u001b[31mred/report.html");
    // Regression: a long name made the table wider than the terminal.
    std::fs::rename(runs.join("\u{1b}[31mred"), runs.join("long".repeat(40))).unwrap();
    terminal.finetune("runs");
    let is_row = |line: &str| line.starts_with("longlong") && line.contains("…  2") && line.ends_with("  done");
    terminal.wait_until("the run on one line", |screen| screen.lines().any(is_row));
}

/// Item 15 of daily use: mouse support, and the flag that leaves the mouse to the terminal.
#[test]
fn item_15_the_mouse_is_taken_and_given_back() {
    let Some(terminal) = Terminal::open(120, 36) else { return };
    let mouse = |terminal: &Terminal| {
        String::from_utf8(terminal.tmux(&["display", "-p", "#{mouse_any_flag}"]).stdout).unwrap().trim().to_owned()
    };
    terminal.start_demo("");
    assert_eq!(mouse(&terminal), "1");
    // A click on the fourth tab, as a terminal reports it.
    let header = terminal.text().lines().next().unwrap().to_owned();
    let column = header.split(" 4 ").next().unwrap().chars().count() + 2;
    terminal.tmux(&["send-keys", "-l", &format!("\u{1b}[<0;{column};1M")]);
    terminal.wait_for("[4 Events]");
    terminal.stop();
    terminal.wait_for("exit: Ended");
    terminal.assert_restored();
    std::fs::write(terminal.folder.path().join("events.jsonl"), "").unwrap();
    terminal.finetune("watch events.jsonl --no-mouse");
    terminal.wait_for("∙ waiting");
    assert_eq!(mouse(&terminal), "0");
    terminal.quit();
}

/// Regression: the laboratory's colors were those for a dark background.
#[test]
fn the_laboratory_suits_a_light_background() {
    let Some(terminal) = Terminal::open(120, 36) else { return };
    let program = env!("CARGO_BIN_EXE_finetune");
    terminal.run(&format!("clear; COLORTERM=truecolor COLORFGBG='0;15' {program} lab bits --screen"));
    terminal.wait_for("FP16");
    let screen = String::from_utf8(terminal.tmux(&["capture-pane", "-p", "-e"]).stdout).unwrap();
    // The blue for mantissas.
    assert!(screen.contains("38;2;0;114;178") && !screen.contains("38;2;86;180;233"), "{screen:?}");
    terminal.quit();
}

#[test]
fn the_laboratory_shows_its_views_and_moves_their_values() {
    for (columns, rows) in [(80, 24), (120, 36)] {
        let Some(terminal) = Terminal::open(columns, rows) else { return };
        terminal.finetune("lab");
        for (key, expected) in [
            ("F1", "0x4248"),
            ("F2", "held by"),
            ("F3", "half way, nearer is lost"),
            ("F4", "log2 max|g| ~ N(-1, 1)"),
            ("F5", "log-normal around 2^-22"),
            ("F6", "distilgpt2: 81.9 M parameters"),
        ] {
            terminal.keys(&[key]);
            terminal.wait_for(expected);
        }
        // An arrow takes the next model, typing any other.
        terminal.keys(&["l"]);
        terminal.wait_for("gpt2: 124.4 M parameters");
        terminal.keys(&["7", "b", "Enter"]);
        terminal.wait_for("7b: 6658.4 M parameters");
        terminal.keys(&["b"]);
        terminal.wait_for("KV cache FP32 21.5 GB");
        terminal.quit();
        terminal.finetune("lab scaler --screen --level 3");
        terminal.wait_for("log2 max|g| ~ N(3, 1)");
        terminal.quit();
        terminal.run(&format!("clear; TERM=dumb {} lab; echo code $?", env!("CARGO_BIN_EXE_finetune")));
        terminal.wait_for("\ncode 2");
    }
}
