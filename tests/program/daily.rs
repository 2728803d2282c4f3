//! Regressions from daily use, named by their number in a list.

use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::common::desk::desk;
use crate::common::launch;
use finetune::telemetry::{Event, ProcessId, Record, StepRecord, VERSION, read};
use tempfile::TempDir;

fn command(desk: &TempDir, line: &str) -> Command {
    let mut command = launch::program();
    command.current_dir(desk.path()).args(line.split_whitespace()).env("HF_HUB_OFFLINE", "1");
    command.env_remove("FINETUNE_ISA").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn output(desk: &TempDir, line: &str) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = command(desk, line).output().unwrap();
    (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

/// What `finetune LINE` writes to standard output.
fn said(desk: &TempDir, line: &str) -> String {
    let (code, stdout, stderr) = output(desk, line);
    assert_eq!(code, Some(0), "finetune {line}: {stderr}");
    stdout
}

/// A line that trains `model` a little in the run called `name`.
fn training(name: &str, more: &str) -> String {
    format!(
        "--model model --run {name} --seq-len 8 --batch-size 2 --threads 1 --plain --set train.sample_tokens=0 \
         --set train.eval_batches=4 {more}"
    )
}

#[test]
fn n1_a_model_without_a_text_learns_shakespeare_without_a_network() {
    let desk = desk();
    let lines = said(&desk, &training("r", "--steps 1 --log-every 1"));
    assert!(lines.contains("tiny_shakespeare: "), "{lines}");
    assert!(said(&desk, "config --model distilgpt2").contains("data = \"tiny_shakespeare\""));
    assert!(said(&desk, "config").contains("data = \"grammar\""));
}

#[test]
fn n3_no_network_is_found_out_in_two_seconds() {
    let desk = desk();
    let (_listener, _waiting, silent) = silent_endpoint();
    // An address that never answers, and a port without a listener.
    for endpoint in [silent.as_str(), "http://127.0.0.1:9"] {
        for line in ["generate owner/name", "--model owner/name", "--data hf://datasets/o/n/f.txt"] {
            let time = |offline: bool| {
                let began = Instant::now();
                let mut command = command(&desk, line);
                command.env("HF_ENDPOINT", endpoint).env("HF_HOME", desk.path());
                for variable in ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"] {
                    command.env_remove(variable);
                }
                if !offline {
                    command.env_remove("HF_HUB_OFFLINE");
                }
                let output = command.output().unwrap();
                let complaint = String::from_utf8(output.stderr).unwrap();
                let (code, why) = if offline { (2, "`HF_HUB_OFFLINE` forbids") } else { (1, "unreachable") };
                assert_eq!(output.status.code(), Some(code), "{complaint}");
                assert!(complaint.contains(why) && complaint.contains("not in the cache"), "{complaint}");
                began.elapsed()
            };
            // The rest of the time is the program's start. The machine may be busy during one trial.
            let mut waits = (0..5).map(|_| time(false).saturating_sub(time(true)));
            let waited = waits.find(|wait| *wait < Duration::from_millis(2200));
            let waited = waited.unwrap_or_else(|| panic!("{endpoint}: {line}: more than two seconds"));
            assert!(endpoint != silent || waited > Duration::from_secs(1), "{endpoint} is not silent: {waited:?}");
        }
    }
}

/// An endpoint that accepts no connection, because its queue is full, and the connections that fill it.
fn silent_endpoint() -> (TcpListener, Vec<TcpStream>, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let connect = || match TcpStream::connect_timeout(&address, Duration::from_millis(500)) {
        Err(error) if error.kind() == ErrorKind::TimedOut => None,
        connected => Some(connected.unwrap()),
    };
    let waiting = std::iter::from_fn(connect).collect();
    (listener, waiting, format!("http://{address}"))
}

#[test]
fn n3_a_name_that_cannot_be_on_the_hub_is_wrong_without_a_network_too() {
    let desk = desk();
    for name in ["~/model", "https://huggingface.co/distilgpt2", "my:model", "model.gguf"] {
        let mut command = command(&desk, &format!("generate {name}"));
        command.env("HF_ENDPOINT", "http://127.0.0.1:9").env_remove("HF_HUB_OFFLINE").env("HF_HOME", desk.path());
        let output = command.output().unwrap();
        let complaint = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{complaint}");
        assert!(!complaint.contains("cache"), "{complaint}");
    }
}

/// Whoever watches from another terminal reads in the log what the run is busy with.
#[test]
fn n3_phases_are_in_the_log_and_shown_to_those_who_watch() {
    let desk = desk();
    said(
        &desk,
        &training("r", "--data text.txt --steps 4 --eval-every 2 --set train.sample_tokens=2 --sample-every 4"),
    );
    let log = desk.path().join("checkpoints/r/events.jsonl");
    let records = read(&log).unwrap();
    let begun = |record: &Record| match &record.event {
        Event::Phase { step, what } => Some((*step, what.clone())),
        _ => None,
    };
    let phases: Vec<_> = records.iter().filter_map(begun).collect();
    let of = |step: u64, what: &str| (step, what.to_owned());
    assert!(phases.starts_with(&[of(2, "evaluating"), of(2, "saving")]), "{phases:?}");
    for what in ["evaluating", "saving", "sampling"] {
        assert!(phases.contains(&of(4, what)), "{phases:?}");
    }

    // As if the run were saving now: its process is this test.
    let saving = records.iter().rposition(|record| begun(record).is_some_and(|(_, what)| what == "saving")).unwrap();
    let mut records = records[..=saving].to_vec();
    if let Event::Started(started) = &mut records[0].event {
        started.process = ProcessId::own();
    }
    fs::write(&log, records.iter().map(|record| serde_json::to_string(record).unwrap() + "\n").collect::<String>())
        .unwrap();
    let mut watching = command(&desk, "watch r --plain").spawn().unwrap();
    let mut lines = BufReader::new(watching.stdout.take().unwrap()).lines();
    let shown = lines.find(|line| line.as_ref().unwrap().starts_with("saving for "));
    watching.kill().unwrap();
    watching.wait().unwrap();
    assert!(shown.is_some());
}

#[test]
fn n3_a_misspelt_name_is_suggested_before_the_hub_is_asked() {
    let desk = desk();
    let hub = TcpListener::bind("127.0.0.1:0").unwrap();
    hub.set_nonblocking(true).unwrap();
    let endpoint = format!("http://{}", hub.local_addr().unwrap());
    for line in ["eval mdoel --data text.txt", "generate modle", "--model mdoel", "--model distilgtp2"] {
        let output = command(&desk, line).env("HF_ENDPOINT", &endpoint).env_remove("HF_HUB_OFFLINE").output().unwrap();
        let complaint = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{complaint}");
        assert!(complaint.contains("did you mean `"), "{complaint}");
        assert!(hub.accept().is_err(), "finetune {line} asked the Hub");
    }
}

#[test]
fn n4_help_is_grouped_and_has_defaults_and_examples() {
    let desk = desk();
    let help = said(&desk, "--help");
    for part in ["Model and text:", "Training:", "Loss scale:", "Examples:", "[default: 5e-5]"] {
        assert!(help.contains(part), "{part} is missing:\n{help}");
    }
    assert_eq!(help.lines().filter(|line| line.starts_with("  finetune ")).count(), 3);
    let explained = said(&desk, "config --explain");
    assert!(explained.contains("# The highest learning rate.\nlr = 0.003\n"), "{explained}");
    assert!(said(&desk, "config --dtype half").contains("dtype = \"p=f32,c=f16,g=f16,r=f32\""));
    for (typed, tip) in [("train", "`finetune` without a command trains"), ("resume", "`finetune --resume`")] {
        let (code, _, complaint) = output(&desk, typed);
        assert_eq!(code, Some(2));
        assert!(complaint.contains(tip), "{complaint}");
    }
}

#[test]
fn n5_epochs_win_over_the_presets_steps() {
    let desk = desk();
    let config = said(&desk, "config --epochs 1");
    assert!(config.contains("epochs = 1.0") && !config.contains("\nsteps"), "{config}");
    let (code, _, complaint) = output(&desk, "--epochs 1 --steps 4");
    assert!(code == Some(2) && complaint.contains("both `epochs` and `steps`"), "{complaint}");
}

#[test]
fn n6_the_best_checkpoint_is_kept_and_used() {
    let desk = desk();
    // At this high rate the loss rises after the first steps.
    let worse = "--data text.txt --steps 40 --eval-every 2 --lr 0.3 --schedule constant --warmup-steps 4 --keep-last 1";
    let lines = said(&desk, &training("r", &format!("{worse} --early-stopping 3 --save-every 1000")));
    assert!(lines.contains("finished reason=early_stopped"), "{lines}");
    let records = read(desk.path().join("checkpoints/r/events.jsonl")).unwrap();
    let evals = records.iter().filter_map(|record| match &record.event {
        Event::Eval(eval) => Some((eval.step, eval.loss)),
        _ => None,
    });
    let (best, loss) = evals.min_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
    let listed = said(&desk, "checkpoint list r");
    let marked: Vec<_> = listed.lines().filter(|line| line.contains("the best")).collect();
    assert_eq!(marked.len(), 1, "{listed}");
    assert!(marked[0].contains(&format!("step-{best:06}")), "{listed}");
    assert_eq!(listed.lines().count(), 3, "the run, the best and the last:\n{listed}");
    let shown = said(&desk, "checkpoint show r");
    assert!(shown.contains(&format!("best         validation loss {loss:.4} at step {best}\n")), "{shown}");
    let evaluated = |more: &str| -> String {
        let report = said(&desk, &format!("eval r --json {more}"));
        serde_json::from_str::<serde_json::Value>(&report).unwrap()["model"].as_str().unwrap().to_owned()
    };
    assert!(
        evaluated("--best").ends_with(&format!("step-{best:06}"))
            && !evaluated("").ends_with(&format!("step-{best:06}"))
    );
    said(&desk, "export r out --best");
    assert!(!said(&desk, "generate r --best -n 4 --prompt so").is_empty());
}

#[test]
fn n8_a_setting_that_changes_on_resume_is_an_event_and_compare_tells_both() {
    let desk = desk();
    said(&desk, &training("a", "--data text.txt --steps 2 --lr 0.001"));
    said(&desk, &training("b", "--data text.txt --steps 4 --lr 0.001"));
    said(&desk, "--resume a --steps 4 --lr 0.002 --plain");
    let records = read(desk.path().join("checkpoints/a/events.jsonl")).unwrap();
    let told = |record: &Record| matches!(&record.event, Event::Warning(told) if told.message.contains("optimizer.lr"));
    assert!(records.iter().any(told));
    let report = said(&desk, "compare a b --width 200");
    assert!(report.contains("0.001; from step 2 0.002"), "{report}");
    let (code, _, complaint) = output(&desk, "--resume a --steps 3");
    assert!(code == Some(2) && complaint.contains("3 steps in all, of which the run has taken 4"), "{complaint}");
}

#[test]
fn n9_a_run_that_applies_no_step_says_so_and_fails() {
    let desk = desk();
    let line = training("r", "--data text.txt --steps 2 --init-scale 1e30");
    let (code, _, complaint) = output(&desk, &line);
    assert_eq!(code, Some(3), "{complaint}");
    assert!(complaint.contains("all 2 steps overflowed") && complaint.contains("--init-scale"), "{complaint}");
}

#[test]
fn n10_a_closed_pipe_is_not_an_error() {
    let desk = desk();
    let mut child = command(&desk, "man").spawn().unwrap();
    let mut line = String::new();
    BufReader::with_capacity(1, child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let mut complaint = String::new();
    child.stderr.take().unwrap().read_to_string(&mut complaint).unwrap();
    assert_eq!((child.wait().unwrap().code(), complaint.as_str()), (Some(0), ""));
}

#[test]
fn n9_every_step_records_the_peak_of_memory_that_the_end_reports() {
    let desk = desk();
    said(&desk, &training("r", "--data text.txt --steps 3"));
    let (mut during, mut at_end) = (0, 0);
    for record in read(desk.path().join("checkpoints/r/events.jsonl")).unwrap() {
        match record.event {
            Event::Step(step) => during = step.peak_rss_bytes.unwrap(),
            Event::Finished(finished) => at_end = finished.peak_rss_bytes.unwrap(),
            _ => {}
        }
    }
    assert!(during <= at_end && during as f64 > 0.9 * at_end as f64, "{during} during training, {at_end} at the end");
}

#[test]
fn n10_lines_are_replayed_at_the_speed_asked_for() {
    let desk = desk();
    let step = |step: u64, s: f64| Record {
        v: VERSION,
        t: 0,
        s,
        event: Event::Step(Box::new(StepRecord { step, ..StepRecord::default() })),
    };
    let lines: Vec<String> =
        [(128, 0.0), (256, 3.0)].map(|(at, s)| serde_json::to_string(&step(at, s)).unwrap() + "\n").into();
    fs::write(desk.path().join("events.jsonl"), lines.concat()).unwrap();
    let timed = |speed: &str| {
        let began = Instant::now();
        assert_eq!(said(&desk, &format!("watch events.jsonl --plain --speed {speed}")).lines().count(), 2);
        began.elapsed()
    };
    assert!(timed("2") >= Duration::from_millis(1500));
    assert!(timed("1000") < Duration::from_millis(1500));
}

#[test]
fn n11_runs_go_by_their_names_everywhere() {
    let desk = desk();
    said(&desk, &training("r", "--data text.txt --steps 4 --save-every 2"));
    for line in ["list r", "show r", "show r/step-000002", "verify r", "diff r r/step-000004", "prune r --dry-run"] {
        said(&desk, &format!("checkpoint {line}"));
    }
    said(&desk, "watch r --plain");
    assert!(said(&desk, "lab scaler --run r").contains("replayed from run r"));
    assert!(said(&desk, "lab memory --run checkpoints/r/events.jsonl").contains("model: "));
    assert!(said(&desk, "verify-resume r --steps 4").contains("bit-identical: 4 steps against 2 + save + load + 2"));
    said(&desk, "--resume r/step-000002 --plain");
    said(&desk, "eval r/step-000002");
    let (code, _, complaint) = output(&desk, "--resume r --run other");
    assert!(code == Some(2) && complaint.contains("leave `--run other` out"), "{complaint}");
    let (code, _, complaint) = output(&desk, "--lr -1");
    assert!(code == Some(2) && complaint.contains("optimizer.lr: `-1` is not between"), "{complaint}");
}

#[test]
fn n11_runs_are_listed_and_deleted_after_a_question() {
    let desk = desk();
    said(&desk, &training("first", "--data text.txt --steps 2"));
    said(&desk, &training("second", "--data text.txt --steps 3 --dtype bf16"));
    let listed = said(&desk, "runs");
    let rows: Vec<Vec<&str>> =
        listed.lines().map(|line| line.split("  ").filter(|cell| !cell.is_empty()).collect()).collect();
    assert_eq!(rows.len(), 3, "{listed}");
    let cells = |row: usize| -> Vec<&str> { rows[row].iter().map(|cell| cell.trim()).collect() };
    assert_eq!((cells(1)[0], cells(1)[2], cells(1)[3], cells(1)[6]), ("first", "model f16", "2/2", "done"), "{listed}");
    assert_eq!((cells(2)[0], cells(2)[2], cells(2)[3]), ("second", "model bf16", "3/3"), "{listed}");
    let (code, _, complaint) = output(&desk, "runs delete first");
    assert!(code == Some(2) && complaint.contains("add `--yes`"), "nobody is there to answer: {complaint}");
    assert!(desk.path().join("checkpoints/first").is_dir());
    said(&desk, "runs delete first --yes");
    assert!(!desk.path().join("checkpoints/first").exists());
    assert_eq!(said(&desk, "runs").lines().count(), 2);
}

#[test]
fn n12_three_quick_interrupts_save_and_say_so() {
    let desk = desk();
    let mut child = command(&desk, &training("r", "--data text.txt --steps 1000000 --log-every 1")).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.starts_with("step=2/") {
        line.clear();
        assert!(lines.read_line(&mut line).unwrap() > 0, "training ended");
    }
    for _ in 0..3 {
        Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
        std::thread::sleep(Duration::from_millis(30));
    }
    let mut rest = String::new();
    lines.read_to_string(&mut rest).unwrap();
    let mut complaint = String::new();
    child.stderr.take().unwrap().read_to_string(&mut complaint).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{complaint}");
    assert!(complaint.contains("interrupted: saving; Ctrl-C again stops without saving"), "{complaint}");
    assert!(rest.contains("saved step=") && rest.contains("finished reason=interrupted"), "{rest}");
}

#[test]
fn n17_a_program_is_run_at_the_best_and_at_the_end() {
    use std::os::unix::fs::PermissionsExt;
    let desk = desk();
    let script = desk.path().join("notify.sh");
    fs::write(&script, "#!/bin/sh\necho \"$1|$2|$3|$4\" >> told\n").unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = command(&desk, &training("r", "--data text.txt --steps 2"));
    assert!(command.args(["--notify", "./notify.sh $HOME"]).status().unwrap().success());
    let told = || fs::read_to_string(desk.path().join("told")).unwrap_or_default();
    let began = Instant::now();
    while told().lines().count() < 2 && began.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(20));
    }
    let mut told: Vec<String> = told().lines().map(str::to_owned).collect();
    told.sort();
    assert!(told[0].starts_with("$HOME|best|r|validation loss "), "no shell looks at the words: {told:?}");
    assert!(told[1].starts_with("$HOME|finished|r|step 2, loss "), "{told:?}");
}

/// Each process of a notifier that hangs would stay; training goes on, and says what is wrong with the program.
#[test]
fn n17_a_program_that_hangs_or_fails_is_told_and_bounded() {
    use std::os::unix::fs::PermissionsExt;
    let desk = desk();
    for (name, script, expected) in [
        ("hang", "echo $$ >> hang.ids; exec sleep 60", "still runs for 8 events"),
        ("fail", "exit 3", "has failed (exit status: 3)"),
    ] {
        let path = desk.path().join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let line = format!("--data text.txt --steps 20 --eval-every 1 --notify ./{name}");
        let output = command(&desk, &training(name, &line)).output().unwrap();
        assert!(output.status.success());
        let said = String::from_utf8(output.stdout).unwrap();
        assert_eq!(said.matches(expected).count(), 1, "{said}");
    }
    let ids = || fs::read_to_string(desk.path().join("hang.ids")).unwrap_or_default();
    let began = Instant::now();
    while ids().lines().count() < 8 && began.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(20));
    }
    let ids = ids();
    assert_eq!(ids.lines().count(), 8);
    Command::new("kill").args(ids.lines()).status().unwrap();
}
