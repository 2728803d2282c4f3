//! Regressions from daily use, named by their number in a list.

use crate::common::cli_fixture::CliFixture;
use crate::common::{launch, of_kind};
use finetune::telemetry::{Event, ProcessId, Record, StepRecord, StepStatus, VERSION, read};
use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

/// A line that trains `model` a little in the run called `name`.
fn training(name: &str, more: &str) -> String {
    format!(
        "--model model --run {name} --seq-len 8 --batch-size 2 --threads 1 --plain --set train.sample_tokens=0 \
         --set train.eval_batches=4 {more}"
    )
}

#[test]
fn n1_a_model_without_a_text_learns_shakespeare_without_a_network() {
    let fixture = CliFixture::new();
    let lines = fixture.said(&training("r", "--steps 1 --log-every 1"));
    assert!(lines.contains("tiny_shakespeare: "), "{lines}");
    assert!(fixture.said("config --model distilgpt2").contains("data = \"tiny_shakespeare\""));
    assert!(fixture.said("config").contains("data = \"grammar\""));
}

#[test]
fn adapters_over_a_relative_base_are_used_from_other_folders() {
    let fixture = CliFixture::new();
    fixture.said(&training("base", "--data grammar --steps 1"));
    let over =
        training("adapted", "--data grammar --steps 1 --lora r=2").replace("model", "checkpoints/base/step-000001");
    fixture.said(&over.replacen("--checkpoints/base/step-000001", "--model", 1));
    fs::create_dir(fixture.path("elsewhere")).unwrap();
    let run = fixture.run("adapted");
    for line in ["generate RUN -n 2", "generate RUN/step-000001 -n 2", "eval RUN"] {
        let mut command = fixture.command(&line.replace("RUN", &run.display().to_string()));
        launch::succeed(command.current_dir(fixture.path("elsewhere")));
    }
}

#[test]
fn n3_no_network_is_found_out_in_two_seconds() {
    let fixture = CliFixture::new();
    let (_listener, _waiting, silent) = silent_endpoint();
    // An address that never answers, and a port without a listener.
    for endpoint in [silent.as_str(), "http://127.0.0.1:9"] {
        for line in ["generate owner/name", "--model owner/name", "--data hf://datasets/o/n/f.txt"] {
            let time = |offline: bool| {
                let began = Instant::now();
                let mut command = fixture.command(line);
                command.env("HF_ENDPOINT", endpoint).env("HF_HOME", fixture.folder());
                for variable in ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"] {
                    command.env_remove(variable);
                }
                if !offline {
                    command.env_remove("HF_HUB_OFFLINE");
                }
                let (code, _, complaint) = launch::finish(&mut command);
                let (expected, why) = if offline { (2, "`HF_HUB_OFFLINE` forbids") } else { (1, "unreachable") };
                assert_eq!(code, Some(expected), "{complaint}");
                assert!(complaint.contains(why) && complaint.contains("not in the cache"), "{complaint}");
                began.elapsed()
            };
            // The rest of the time is the program's start. The machine may be busy during one trial.
            let mut waits = (0..5).map(|_| time(false).saturating_sub(time(true)));
            let least = Duration::from_secs(u64::from(endpoint == silent));
            let fits = waits.any(|wait| (least..Duration::from_millis(2200)).contains(&wait));
            assert!(fits, "{endpoint}: {line}: less than {least:?}, or more than two seconds");
        }
    }
    // A proxy may reach hosts that this machine cannot, so the request is made.
    let mut command = fixture.command("generate owner/name");
    command.env("HF_ENDPOINT", "http://127.0.0.1:9").env("HTTPS_PROXY", "http://127.0.0.1:9");
    command.env("HF_HOME", fixture.folder()).env_remove("HF_HUB_OFFLINE");
    let (code, _, complaint) = launch::finish(&mut command);
    assert!(code == Some(1) && complaint.contains("no usable connection"), "{complaint}");
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
    let fixture = CliFixture::new();
    for name in ["~/model", "https://huggingface.co/distilgpt2", "my:model", "model.gguf"] {
        let mut command = fixture.command(&format!("generate {name}"));
        command.env("HF_ENDPOINT", "http://127.0.0.1:9").env_remove("HF_HUB_OFFLINE").env("HF_HOME", fixture.folder());
        let (code, _, complaint) = launch::finish(&mut command);
        assert!(code == Some(2) && !complaint.contains("cache"), "{complaint}");
    }
}

/// Anyone who watches from another terminal can read the run's current phase in the log.
#[test]
fn n3_phases_are_in_the_log_and_shown_to_those_who_watch() {
    let fixture = CliFixture::new();
    fixture
        .said(&training("r", "--data text.txt --steps 4 --eval-every 2 --set train.sample_tokens=2 --sample-every 4"));
    let log = fixture.path("checkpoints/r/events.jsonl");
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

    // Regression: a run that was killed before its end was logged sampled its last text again.
    let lines = fs::read_to_string(&log).unwrap();
    let finished = lines.trim_end().rfind('\n').unwrap() + 1;
    fs::write(&log, &lines[..finished]).unwrap();
    fixture.said("--resume r --plain");
    assert_eq!(of_kind!(fixture.events("r"), Event::Sample).map(|sample| sample.step).collect::<Vec<_>>(), [4]);

    // As if the run were saving now: its process is this test.
    let saving = records.iter().rposition(|record| begun(record).is_some_and(|(_, what)| what == "saving")).unwrap();
    let mut records = records[..=saving].to_vec();
    if let Event::Started(started) = &mut records[0].event {
        started.process = ProcessId::own();
    }
    fs::write(&log, records.iter().map(|record| serde_json::to_string(record).unwrap() + "\n").collect::<String>())
        .unwrap();
    let mut watching = fixture.command("watch r --plain").spawn().unwrap();
    let mut lines = BufReader::new(watching.stdout.take().unwrap()).lines();
    let shown = lines.find(|line| line.as_ref().unwrap().starts_with("saving for "));
    watching.kill().unwrap();
    watching.wait().unwrap();
    assert!(shown.is_some());
}

#[test]
fn n3_a_misspelt_name_is_suggested_before_the_hub_is_asked() {
    let fixture = CliFixture::new();
    let hub = TcpListener::bind("127.0.0.1:0").unwrap();
    hub.set_nonblocking(true).unwrap();
    let endpoint = format!("http://{}", hub.local_addr().unwrap());
    for line in ["eval mdoel --data text.txt", "generate modle", "--model mdoel", "--model distilgtp2"] {
        let mut command = fixture.command(line);
        let (code, _, complaint) = launch::finish(command.env("HF_ENDPOINT", &endpoint).env_remove("HF_HUB_OFFLINE"));
        assert!(code == Some(2) && complaint.contains("did you mean `"), "{complaint}");
        assert!(hub.accept().is_err(), "finetune {line} asked the Hub");
    }
}

#[test]
fn n4_help_is_grouped_and_has_defaults_and_examples() {
    let fixture = CliFixture::new();
    let help = fixture.said("--help");
    for part in ["Model and text:", "Training:", "Loss scale:", "Examples:", "[default: 5e-5; 0.003 for `tiny`]"] {
        assert!(help.contains(part), "{part} is missing:\n{help}");
    }
    assert_eq!(help.lines().filter(|line| line.starts_with("  finetune ")).count(), 3);
    let explained = fixture.said("config --explain");
    assert!(explained.contains("# The highest learning rate.\nlr = 0.003\n"), "{explained}");
    assert!(fixture.said("config --dtype half").contains("dtype = \"p=f32,c=f16,g=f16,r=f32\""));
}

#[test]
fn n6_the_best_checkpoint_is_kept_and_used() {
    let fixture = CliFixture::new();
    // At this high rate the loss rises after the first steps.
    let worse = "--data text.txt --steps 40 --eval-every 2 --lr 0.3 --schedule constant --warmup-steps 4 --keep-last 1";
    let lines = fixture.said(&training("r", &format!("{worse} --early-stopping 3 --save-every 1000")));
    assert!(lines.contains("finished reason=early_stopped"), "{lines}");
    // Regression: a run that was resumed after it had stopped trained further.
    let log = fixture.run("r").join("events.jsonl");
    let before = std::fs::read_to_string(&log).unwrap();
    let (_, _, said) = fixture.output("--resume r --plain");
    assert!(said.contains("the run stopped early at step 22; continue it with `--early-stopping 0`"), "{said}");
    assert_eq!(std::fs::read_to_string(&log).unwrap(), before);
    let killed = before.trim_end().rfind('\n').unwrap() + 1;
    std::fs::write(&log, &before[..killed]).unwrap();
    let lines = fixture.said("--resume r --plain");
    assert!(lines.contains("finished reason=early_stopped step=22 ") && !lines.contains("step=23/"), "{lines}");
    let evals = of_kind!(fixture.events("r"), Event::Eval).map(|eval| (eval.step, eval.loss));
    let (best, loss) = evals.min_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
    let listed = fixture.said("checkpoint list r");
    let marked: Vec<_> = listed.lines().filter(|line| line.contains("the best")).collect();
    assert_eq!(marked.len(), 1, "{listed}");
    assert!(marked[0].contains(&format!("step-{best:06}")), "{listed}");
    assert_eq!(listed.lines().count(), 3, "the run, the best and the last:\n{listed}");
    let shown = fixture.said("checkpoint show r");
    assert!(shown.contains(&format!("best         validation loss {loss:.4} at step {best}\n")), "{shown}");
    let evaluated =
        |more: &str| -> String { fixture.json(&format!("eval r --json {more}"))["model"].as_str().unwrap().to_owned() };
    assert!(
        evaluated("--best").ends_with(&format!("step-{best:06}"))
            && !evaluated("").ends_with(&format!("step-{best:06}"))
    );
    fixture.said("export r out --best");
    assert!(!fixture.said("generate r --best -n 4 --prompt so").is_empty());
}

#[test]
fn n8_a_setting_that_changes_on_resume_is_an_event_and_compare_tells_both() {
    let fixture = CliFixture::new();
    fixture.said(&training("a", "--data text.txt --steps 2 --lr 0.001"));
    fixture.said(&training("b", "--data text.txt --steps 4 --lr 0.001"));
    fixture.said("--resume a --steps 4 --lr 0.002 --plain");
    let told = |event: &Event| matches!(event, Event::Warning(told) if told.message.contains("optimizer.lr"));
    assert!(fixture.events("a").iter().any(told));
    let report = fixture.said("compare a b --width 200");
    assert!(report.contains("0.001; from step 2 0.002"), "{report}");
    fixture.assert_refused("--resume a --steps 3", &["the run has already completed 4 of 3 steps"]);
}

#[test]
fn n9_a_run_that_applies_no_step_says_so_and_fails() {
    let fixture = CliFixture::new();
    let line = training("r", "--data text.txt --steps 2 --init-scale 1e30");
    let (code, _, complaint) = fixture.output(&line);
    assert_eq!(code, Some(3), "{complaint}");
    assert!(complaint.contains("its 2 steps overflowed") && complaint.contains("--init-scale 2^"), "{complaint}");
    assert_eq!(fixture.steps("r").last().unwrap().tokens, 2 * 2 * 8, "tokens of skipped steps count");
    // Regression: resuming it ended with the code of success.
    let (code, _, again) = fixture.output("--resume r --plain");
    assert!(code == Some(3) && again.contains("nothing is left to do") && again.contains("its 2 steps"), "{again}");
    // The scale that it names works.
    let scale = complaint.split("--init-scale ").nth(1).unwrap().split('`').next().unwrap();
    fixture.said(&line.replace("1e30", scale).replace("--run r", "--run again"));
    assert!(fixture.steps("again").iter().all(|step| step.outcome == StepStatus::Applied));
}

#[test]
fn a_run_whose_gradients_overflow_at_the_lowest_scale_ends() {
    let fixture = CliFixture::new();
    let scaler = "--init-scale 1e30 --set scaler.min_scale=1e30 --set scaler.max_overflows_at_min_scale=3 \
                  --set scaler.on_overflow=retry";
    let (code, _, err) = fixture.output(&training("r", &format!("--data text.txt --steps 9 {scaler}")));
    let steps = fixture.steps("r");
    assert_eq!((code, steps.len()), (Some(3), 3), "{err}");
    assert!(steps.windows(2).all(|pair| pair[0].epoch < pair[1].epoch), "a retry has no lower scale");
    for part in [
        "3 consecutive steps overflowed at scale 1e30: the loss is finite, but `ln_f",
        " tensors in total (first in the ",
    ] {
        assert!(err.contains(part), "{part}: {err}");
    }
}

#[test]
fn w1_a_short_run_measures_its_first_scale_and_does_not_stop_early_before_an_update() {
    let fixture = CliFixture::new();
    let tiny = "--batch-size 2 --seq-len 16 --threads 1 --plain --set train.sample_tokens=0 --set train.eval_batches=1";
    fixture.said(&format!("{tiny} --steps 5 --run short"));
    fixture.said(&format!("{tiny} --data text.txt --epochs 0.1 --run other"));
    for run in ["short", "other"] {
        let steps = fixture.steps(run);
        assert!(steps.iter().all(|step| step.outcome == StepStatus::Applied && step.loss_scale > 1024.0), "{run}");
    }
    let eager = "--init-scale 2^24 --steps 12 --eval-every 2 --early-stopping 1 --run eager";
    fixture.said(&format!("{tiny} {eager}"));
    let steps = fixture.steps("eager");
    assert!(steps[0].outcome == StepStatus::Skipped && steps.last().unwrap().updates > 0);
}

#[test]
fn w7_a_finished_run_says_so_and_a_run_finds_its_data_from_another_folder() {
    let fixture = CliFixture::new();
    let (_, _, said) = fixture.output(&training("r", "--data text.txt --steps 2"));
    assert!(said.contains("done after 00:00:"), "{said}");
    assert!(said.contains("try it:   finetune generate r\n"), "{said}");
    assert!(said.ends_with("continue: finetune --resume r --steps 4\n"), "{said}");
    let evaluations = || fixture.events("r").iter().filter(|event| matches!(event, Event::Eval(_))).count();
    let before = evaluations();
    let (code, _, said) = fixture.output("--resume r --plain");
    assert_eq!(code, Some(0), "{said}");
    assert!(
        said.contains("the run has completed its 2 steps; continue it with `--steps` and a number above 2"),
        "{said}"
    );
    assert_eq!(evaluations(), before);
    std::fs::create_dir(fixture.path("elsewhere")).unwrap();
    let resume = format!("--resume {} --steps 3 --plain", fixture.run("r").display());
    launch::succeed(fixture.command(&resume).current_dir(fixture.path("elsewhere")));
    assert_eq!(fixture.steps("r").last().unwrap().step, 3);
}

#[test]
fn w9_skipped_steps_that_leave_the_rate_high_are_a_warning() {
    let fixture = CliFixture::new();
    let told = |scale: &str| {
        fixture.said(&training(scale, &format!("--data text.txt --steps 12 --schedule linear --init-scale {scale}")));
        let is_warning =
            |event: &Event| matches!(event, Event::Warning(told) if told.message.contains("learning rate"));
        fixture.events(scale).iter().any(is_warning)
    };
    assert!(told("2^19") && !told("2^10"));
}

#[test]
fn w13_adapters_have_one_spelling_in_training_and_bench() {
    let fixture = CliFixture::new();
    for rank in ["4", "r=4", "rank=4"] {
        let config = fixture.said(&format!("config --lora {rank}"));
        assert!(config.contains("r = 4\n"), "{config}");
        let line = format!("bench --model tiny --batch-size 1 --seq-len 4 --steps 1 --warmup 0 --lora {rank}");
        assert_eq!(fixture.json(&line)["lora"], 4);
    }
}

#[test]
fn n10_a_closed_pipe_is_not_an_error() {
    let fixture = CliFixture::new();
    let mut child = fixture.command("man").spawn().unwrap();
    let mut line = String::new();
    BufReader::with_capacity(1, child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let mut complaint = String::new();
    child.stderr.take().unwrap().read_to_string(&mut complaint).unwrap();
    assert_eq!((child.wait().unwrap().code(), complaint.as_str()), (Some(0), ""));
}

#[test]
fn n9_every_step_records_the_peak_of_memory_that_the_end_reports() {
    let fixture = CliFixture::new();
    fixture.said(&training("r", "--data text.txt --steps 3"));
    let (mut during, mut at_end) = (0, 0);
    for event in fixture.events("r") {
        match event {
            Event::Step(step) => during = step.peak_rss_bytes.unwrap(),
            Event::Finished(finished) => at_end = finished.peak_rss_bytes.unwrap(),
            _ => {}
        }
    }
    assert!(during <= at_end && during as f64 > 0.9 * at_end as f64, "{during} during training, {at_end} at the end");
}

#[test]
fn n10_lines_are_replayed_at_the_speed_asked_for() {
    let fixture = CliFixture::new();
    let step = |step: u64, s: f64| Record {
        v: VERSION,
        t: 0,
        s,
        event: Event::Step(Box::new(StepRecord { step, ..StepRecord::default() })),
    };
    let lines: Vec<String> =
        [(128, 0.0), (256, 3.0)].map(|(at, s)| serde_json::to_string(&step(at, s)).unwrap() + "\n").into();
    fs::write(fixture.path("events.jsonl"), lines.concat()).unwrap();
    let timed = |speed: &str| {
        let began = Instant::now();
        assert_eq!(fixture.said(&format!("watch events.jsonl --plain --speed {speed}")).lines().count(), 2);
        began.elapsed()
    };
    assert!(timed("2") >= Duration::from_millis(1500));
    // The machine may be busy during one trial.
    assert!((0..5).any(|_| timed("1000") < Duration::from_millis(1500)));
}

#[test]
fn n11_runs_go_by_their_names_everywhere() {
    let fixture = CliFixture::new();
    fixture.said(&training("r", "--data text.txt --steps 4 --save-every 2"));
    for line in ["list r", "show r", "show r/step-000002", "verify r", "diff r r/step-000004", "prune r --dry-run"] {
        fixture.said(&format!("checkpoint {line}"));
    }
    fixture.said("watch r --plain");
    assert!(fixture.said("lab scaler --run r").contains("replayed from run r"));
    assert!(fixture.said("lab memory --run checkpoints/r/events.jsonl").contains("model: "));
    assert!(fixture.said("verify-resume r --steps 4").contains("bit-identical: 4 steps against 2 + save + load + 2"));
    fixture.said("--resume r/step-000002 --plain");
    fixture.said("eval r/step-000002");
    fs::remove_file(fixture.run("r").join("step-000002/manifest.json")).unwrap();
    fixture.assert_refused("--resume r/step-000002 --plain", &["step-000002/manifest.json`: it is missing"]);
}

/// Regression: a wide name shifted the cells after it.
#[test]
fn a_wide_name_keeps_the_columns_of_the_list() {
    let fixture = CliFixture::empty();
    for name in ["名前", "b"] {
        fixture.write(&format!("checkpoints/{name}/config.toml"), "");
    }
    let list = fixture.said("runs");
    assert!(list.contains("\n名前  -  ") && list.contains("\nb     -  "), "{list}");
}

#[test]
fn n11_runs_are_listed_and_deleted_after_a_question() {
    let fixture = CliFixture::new();
    fixture.said(&training("first", "--data text.txt --steps 2"));
    fixture.said(&training("again", "--data text.txt --steps 3 --dtype bf16"));
    let listed = fixture.said("runs");
    let rows: Vec<Vec<&str>> =
        listed.lines().map(|line| line.split("  ").filter(|cell| !cell.is_empty()).collect()).collect();
    assert_eq!(rows.len(), 3, "{listed}");
    let cells = |row: usize| -> Vec<&str> { rows[row].iter().map(|cell| cell.trim()).collect() };
    assert_eq!((cells(1)[0], cells(1)[2], cells(1)[3], cells(1)[6]), ("first", "model f16", "2/2", "done"), "{listed}");
    assert_eq!((cells(2)[0], cells(2)[2], cells(2)[3]), ("again", "model bf16", "3/3"), "{listed}");
    let json = fixture.json("runs --json");
    assert_eq!(json, fixture.json("runs list --json"));
    assert_eq!((&json[1]["run"], &json[1]["steps"], &json[1]["state"]), (&"again".into(), &3.into(), &"done".into()));
    assert!(json[1]["bytes"].as_u64() > Some(1000), "{json}");
    // Regression: a resumed run had no steps until the end of its first.
    let log = fixture.run("first").join("events.jsonl");
    let lines = fs::read_to_string(&log).unwrap();
    let started = lines.lines().next().unwrap().replacen("\"resumed_from\":null", "\"resumed_from\":2", 1);
    fs::write(&log, format!("{lines}{started}\n")).unwrap();
    let json = fixture.json("runs --json");
    assert!(json.as_array().unwrap().iter().any(|run| run["run"] == "first" && run["steps"] == 2), "{json}");
    let said = fixture.said("runs delete first first --yes");
    assert!(said.starts_with("deleted run `first`, 1 checkpoint, ") && said.lines().count() == 1, "{said}");
    assert!(!fixture.path("checkpoints/first").exists());
    assert_eq!(fixture.said("runs").lines().count(), 2);
    // Regression: the run that a link points to was reported as deleted.
    std::os::unix::fs::symlink("again", fixture.path("checkpoints/link")).unwrap();
    let said = fixture.said("runs delete link --yes");
    assert_eq!(said, "deleted the link `link`, but not the run that it points to\n");
    assert_eq!(fixture.steps("again").len(), 3);
    // Regression: a refusal made the run the newest one.
    fs::create_dir(fixture.path("checkpoints/begun")).unwrap();
    fs::copy(fixture.run("again").join("config.toml"), fixture.path("checkpoints/begun/config.toml")).unwrap();
    fixture.refused("runs delete begun");
    assert_eq!(fs::read_dir(fixture.path("checkpoints/begun")).unwrap().count(), 1);
    // Regression: the run of a checkpoint that is a link was not found.
    let step = fixture.run("again").join("step-000003");
    fs::rename(&step, fixture.path("elsewhere")).unwrap();
    std::os::unix::fs::symlink(fixture.path("elsewhere"), &step).unwrap();
    fixture.said("--resume checkpoints/again/step-000003 --steps 4 --plain");
    assert_eq!(fixture.steps("again").len(), 4);
}

/// Regression: a run's folder and name, and the steps of `verify`, were read from their flags only.
#[test]
fn set_gives_the_same_settings_as_flags() {
    let fixture = CliFixture::new();
    fixture.said(&training("r", "--data text.txt --steps 2 --set checkpoint.dir=runs"));
    let resume = "--resume --plain --set checkpoint.dir=runs";
    assert!(fixture.said(&format!("{resume} --steps 3")).contains("finished reason=done step=3"));
    let named = "--resume r --set checkpoint.dir=runs --set checkpoint.run=other";
    fixture.assert_refused(named, &["checkpoint.run: `--resume r` already selects the run"]);
    fixture.assert_refused("--resume --config a.toml", &["--config: a resumed run uses its own configuration"]);
    let proof = fixture.said("verify --model model --data text.txt --seq-len 8 --batch-size 1 --set train.steps=4");
    assert!(proof.starts_with("bit-identical: 4 steps against 2"), "{proof}");
}

#[test]
fn n12_three_quick_interrupts_save_and_say_so() {
    let fixture = CliFixture::new();
    let mut child = fixture.command(&training("r", "--data text.txt --steps 1000000 --log-every 1")).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.starts_with("step=2/") {
        line.clear();
        assert!(lines.read_line(&mut line).unwrap() > 0, "training ended");
    }
    // A launcher may pass on Ctrl-C as SIGTERM.
    for signal in ["-INT", "-TERM", "-INT"] {
        Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
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
    let fixture = CliFixture::new();
    let script = fixture.path("notify.sh");
    fs::write(&script, "#!/bin/sh\necho \"$1|$2|$3|$4\" >> told\n").unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    // The sorted events after a training.
    let told = |line: &str, count: usize| {
        launch::succeed(fixture.command(line).args(["--notify", "./notify.sh $HOME"]));
        let began = Instant::now();
        loop {
            let mut told: Vec<String> =
                fs::read_to_string(fixture.path("told")).unwrap_or_default().lines().map(str::to_owned).collect();
            if told.len() >= count || began.elapsed() > Duration::from_secs(10) {
                told.sort();
                return told;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    let lines = told(&training("r", "--data text.txt --steps 2"), 2);
    assert!(lines[0].starts_with("$HOME|best|r|validation loss "), "no shell looks at the words: {lines:?}");
    assert!(lines[1].starts_with("$HOME|finished|r|step 2, loss ") && lines[1].ends_with(", done"), "{lines:?}");
    // At this rate the loss rises, so the best one is that before the resume.
    let lines = told("--resume r --steps 3 --lr 10 --plain", 3);
    assert!(lines[1].starts_with("$HOME|finished|r|step 2,") && lines[2].contains("|step 3,"), "{lines:?}");
    let shown = fixture.said("checkpoint show r");
    assert!(shown.lines().any(|line| line.starts_with("best ") && line.contains("at step 2")), "{shown}");
}

/// Each process of a notifier that hangs would stay; training continues, and reports the program's fault.
#[test]
fn n17_a_program_that_hangs_or_fails_is_told_and_bounded() {
    use std::os::unix::fs::PermissionsExt;
    let fixture = CliFixture::new();
    for (name, script, expected) in [
        ("hang", "echo $$ >> hang.ids; exec sleep 60", "is still running for 8 events"),
        ("fail", "exit 3", "failed (exit status: 3)"),
    ] {
        let path = fixture.path(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let line = format!("--data text.txt --steps 20 --eval-every 1 --notify ./{name}");
        let said = fixture.said(&training(name, &line));
        assert_eq!(said.matches(expected).count(), 1, "{said}");
    }
    let ids = || fs::read_to_string(fixture.path("hang.ids")).unwrap_or_default();
    let began = Instant::now();
    while ids().lines().count() < 8 && began.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(20));
    }
    let ids = ids();
    assert_eq!(ids.lines().count(), 8);
    Command::new("kill").args(ids.lines()).status().unwrap();
}
