//! The guarantees listed in `docs/faults.md`, under failures of a run's log, disk, terminal and sibling processes.
//!
//! Each test runs the program like a user. Limits and signals come from the shell that starts it.

use crate::common::cli_fixture::CliFixture;
use crate::common::{launch, of_kind};
use finetune::store::checkpoint::{CheckpointKind, latest_valid, list, verify};
use finetune::telemetry::Event;
use parquet::basic::{Compression, GzipLevel, ZstdLevel};
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant, SystemTime};

/// A run of the built-in model in which little is computed.
const SMALL: &str = "--init-scale 16384 --batch-size 2 --seq-len 16 --threads 1 --plain --set train.sample_tokens=0 \
                     --set train.eval_batches=1 --eval-every 1000 --log-every 1";

/// The program after `before`, a line of shell such as `ulimit -f 100`.
fn shell(fixture: &CliFixture, before: &str, arguments: &str) -> Command {
    let mut command = launch::command("bash");
    let program = env!("CARGO_BIN_EXE_finetune");
    command.current_dir(fixture.folder()).args(["-c", &format!("{before}\nexec '{program}' {arguments}")]);
    command.env("HF_HUB_OFFLINE", "1").env_remove("FINETUNE_ISA");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// The exit code, and the program's text on both outputs.
fn finished(output: &Output) -> (Option<i32>, String) {
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout) + &text(&output.stderr))
}

/// The program's text on both outputs; it must end with `expected`.
fn finetune(fixture: &CliFixture, before: &str, arguments: &str, expected: i32) -> String {
    let (code, said) = finished(&shell(fixture, before, arguments).output().unwrap());
    assert_eq!(code, Some(expected), "{before}; {arguments}: {said}");
    said
}

fn warnings(events: Vec<Event>) -> Vec<String> {
    of_kind!(events, Event::Warning).map(|trouble| trouble.message).collect()
}

/// A run in progress, whose lines are read as they come.
struct Running {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Running {
    fn start(fixture: &CliFixture, before: &str, arguments: &str) -> Self {
        let mut child = shell(fixture, before, arguments).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// Reads lines until one contains `text`.
    fn until(&mut self, text: &str) -> String {
        let found = self.lines.by_ref().map(Result::unwrap).find(|line| line.contains(text));
        found.unwrap_or_else(|| {
            let mut error = String::new();
            self.child.stderr.take().unwrap().read_to_string(&mut error).unwrap();
            panic!("the run has never said `{text}`: {error}")
        })
    }

    fn signal(&self, signal: &str) {
        assert!(Command::new("kill").args(["-s", signal, &self.child.id().to_string()]).status().unwrap().success());
    }

    /// The exit code once it has ended, which takes seconds at most.
    fn code(mut self) -> Option<i32> {
        // A full pipe would hold it up.
        self.lines.by_ref().for_each(drop);
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(began.elapsed() < Duration::from_mins(1), "it does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

#[test]
fn promise_1_a_log_that_may_not_grow_costs_its_lines_only() {
    let fixture = CliFixture::in_memory();
    // The checkpoint's largest file has 6.5 MB, so the limit that the log meets has to be lifted for it: `ulimit` is
    // for each file, and padding makes the log begin near it.
    let arguments = format!("--run r --steps 40 {SMALL}");
    let run = fixture.run("r");
    finetune(&fixture, "", &format!("--run r --steps 1 {SMALL}"), 0);
    let limit = 16 << 20;
    let log = run.join("events.jsonl");
    let mut text = fs::read(&log).unwrap();
    let padding = limit - 60_000 - text.len();
    text.splice(0..0, std::iter::repeat_n(b'\n', padding));
    fs::write(&log, text).unwrap();
    let said = finetune(&fixture, &format!("ulimit -f {}", limit >> 10), &format!("--resume {arguments}"), 0);
    assert!(said.contains("File too large"), "{said}");
    assert!(said.contains("step=40/40"), "{said}");
    assert_eq!(fs::metadata(&log).unwrap().len(), limit as u64);
    assert_eq!(latest_valid(&run).unwrap().checkpoint.state().step, 40);
    assert!(finetune(&fixture, "", "runs", 0).contains("  done"), "the log has no end");
}

#[test]
fn promise_2_a_new_run_never_touches_a_folder_that_has_checkpoints() {
    let fixture = CliFixture::in_memory();
    let line = format!("--run r --steps 4 --save-every 2 {SMALL}");
    finetune(&fixture, "", &line, 0);
    let run = fixture.run("r");
    fs::remove_file(run.join("config.toml")).unwrap();
    let before = fs::read(run.join("events.jsonl")).unwrap();
    let said = finetune(&fixture, "", &format!("{line} --seed 9"), 2);
    assert!(said.contains("already contains a run"), "{said}");
    assert_eq!(list(&run).unwrap().len(), 2);
    assert_eq!(fs::read(run.join("events.jsonl")).unwrap(), before);
}

#[test]
fn promise_2_eight_runs_started_at_once_take_eight_numbers() {
    let fixture = CliFixture::in_memory();
    let start = || shell(&fixture, "", &format!("--steps 1 {SMALL}")).spawn().unwrap();
    let children: Vec<Child> = (0..8).map(|_| start()).collect();
    for child in children {
        let (code, said) = finished(&child.wait_with_output().unwrap());
        assert_eq!(code, Some(0), "{said}");
    }
    let runs = fs::read_dir(fixture.path("checkpoints")).unwrap().map(|run| run.unwrap().path());
    let runs: Vec<PathBuf> = runs.collect();
    assert_eq!(runs.len(), 8);
    for run in runs {
        assert_eq!(latest_valid(&run).unwrap().checkpoint.state().step, 1);
    }
}

#[test]
fn promise_4_a_resumed_run_checks_the_seed_and_names_every_setting_that_changed() {
    let fixture = CliFixture::in_memory();
    for (run, seed) in [("one", 1), ("two", 2)] {
        finetune(&fixture, "", &format!("--run {run} --steps 4 --seed {seed} {SMALL}"), 0);
    }
    // A step folder that came from another run.
    let [one, two] = ["one", "two"].map(|run| fixture.run(run).join("step-000004"));
    fs::remove_dir_all(&one).unwrap();
    fs::rename(two, &one).unwrap();
    let said = finetune(&fixture, "", "--resume one --steps 6 --plain", 2);
    assert!(said.contains("`seed` was 2 and is now 1: the checkpoint belongs to a different run"), "{said}");

    finetune(&fixture, "", &format!("--run three --steps 4 {SMALL}"), 0);
    let said = finetune(&fixture, "", "--resume three --steps 6 --lr 0.0001 --batch-size 4 --plain", 0);
    let warnings = warnings(fixture.events("three")).join("\n");
    for setting in ["`train.steps` was 4 and is now 6", "`optimizer.lr` was", "`train.batch_size` was 2 and is now 4"] {
        assert!(warnings.contains(setting) && said.contains(setting), "{warnings}");
    }
    // Regression: the configuration and the checkpoint had a warning each.
    assert_eq!(warnings.matches("batch_size` was 2 and is now 4").count(), 1, "{warnings}");
    let file = fixture.run("three").join("config.toml");
    let text = fs::read_to_string(&file).unwrap();
    for (edited, code, expected) in [
        (text.replace("init_scale = 16384.0", "init_scale = 1024.0"), 2, "init_scale: was 16384.0 and is now 1024.0"),
        (text.replace("lr = 0.0001", "lr = 0.0002"), 0, "`optimizer.lr` was 0.0001 and is now 0.0002"),
    ] {
        fs::write(&file, &edited).unwrap();
        let said = finetune(&fixture, "", "--resume three --steps 7 --plain", code);
        assert!(said.contains(expected) && edited != text, "{said}");
        fs::write(&file, &text).unwrap();
    }
    // The checkpoint has the scale.
    let said = finetune(&fixture, "", "--resume three --steps 8 --init-scale 2^10 --plain", 2);
    assert!(said.contains("scaler.init_scale: was 16384.0 and is now 1024.0; resume without changing it"), "{said}");

    fixture.write("text.txt", "a text that is long enough for a few windows\n".repeat(100));
    finetune(&fixture, "", &format!("--run four --steps 4 --data text.txt {SMALL}"), 0);
    fixture.write("text.txt", "another text, long enough for a few windows\n".repeat(100));
    let said = finetune(&fixture, "", "--resume four --steps 8 --plain", 2);
    assert!(said.contains("the training text or the tokenizer has changed since this run began; restore"), "{said}");
}

#[test]
fn promise_5_the_last_save_is_tried_again_until_the_disk_takes_it() {
    let fixture = CliFixture::in_memory();
    let mut run = Running::start(&fixture, "", &format!("--run r --steps 3 {SMALL}"));
    run.until("step=1/3");
    // As if another process had taken the folder over.
    let lock = fixture.run("r").join(".lock");
    fs::rename(&lock, lock.with_extension("away")).unwrap();
    fs::write(&lock, "").unwrap();
    run.until("trying again for");
    fs::rename(lock.with_extension("away"), &lock).unwrap();
    assert_eq!(run.code(), Some(0));
    assert_eq!(latest_valid(&fixture.run("r")).unwrap().checkpoint.state().step, 3);
}

#[test]
fn promise_5_where_the_whole_does_not_fit_the_weights_alone_are_saved_and_the_loss_is_told() {
    let fixture = CliFixture::in_memory();
    // The weights in FP16 have 1.6 MB, Adam's moments 6.5.
    let line = format!("--run r --steps 3 --save-every 2 --set checkpoint.final_save_retry_s=1 {SMALL}");
    let said = finetune(&fixture, "ulimit -f 4000", &line, 1);
    let run = fixture.run("r");
    let listed = list(&run).unwrap();
    assert_eq!(listed.iter().map(|one| (one.kind, one.step)).collect::<Vec<_>>(), [(CheckpointKind::Weights, 3)]);
    assert_eq!(verify(&listed[0].path), []);
    for text in [
        "no checkpoint at step 2: cannot write",
        "File too large (os error 27); training continues",
        "trying again for 1 s",
        "could not be written within 1 s; only its weights were saved, in",
        "once the folder can be written, continue with `--resume`",
    ] {
        assert!(said.contains(text), "{text}: {said}");
    }
    // Regression: it was listed as killed.
    assert!(finetune(&fixture, "", "runs", 0).contains("  failed"));
}

/// Regression: the message named the file twice.
#[test]
fn text_that_does_not_fit_into_the_temporary_folder_is_reported() {
    let said = finetune(&CliFixture::in_memory(), "ulimit -f 1", "data stats --data sums", 1);
    assert!(said.contains("error: cannot copy the text to `") && said.contains("`: File too large"), "{said}");
    assert_eq!(said.matches(".finetune-text-").count(), 1, "{said}");
    let fixture = CliFixture::in_memory();
    fixture.write("text.txt", "a text that takes more than one block\n".repeat(100));
    let said = finetune(&fixture, "ulimit -f 1", "data stats --data text.txt", 1);
    assert!(said.contains("error: cannot write `") && said.contains("`: File too large"), "{said}");
    assert_eq!(said.matches("/.tokens-").count(), 1, "{said}");
}

/// Starts a long run, and sends it `signal` once it trains.
fn interrupted_by(before: &str, signal: &str) -> (CliFixture, Option<i32>) {
    let fixture = CliFixture::in_memory();
    let mut run = Running::start(&fixture, before, &format!("--run r --steps 1000000 {SMALL}"));
    run.until("step=3/");
    run.signal(signal);
    let code = run.code();
    (fixture, code)
}

#[test]
fn promise_8_hangup_and_the_processor_limit_save_and_stop_like_termination() {
    for signal in ["INT", "TERM", "HUP", "XCPU"] {
        let (fixture, code) = interrupted_by("", signal);
        assert_eq!(code, Some(130), "SIG{signal}");
        let found = latest_valid(&fixture.run("r")).unwrap();
        let last = fixture.steps("r").last().map(|step| step.step);
        assert_eq!(Some(found.checkpoint.state().step), last, "SIG{signal}");
    }
}

/// The test above, started as `nohup` starts it.
#[test]
fn promise_8_is_tested_under_nohup_too() {
    let name = "durability::promise_8_hangup_and_the_processor_limit_save_and_stop_like_termination";
    let test = std::env::current_exe().unwrap();
    let mut nohup = launch::command("bash");
    nohup.args(["-c", &format!("trap '' HUP; exec '{}' --exact {name}", test.display())]);
    let (code, said) = finished(&nohup.env(launch::LIMIT_VARIABLE, "120").output().unwrap());
    assert!(code == Some(0) && said.contains("1 passed"), "{said}");
}

#[test]
#[ignore = "started by the test below"]
fn waits_for_a_process_without_end() {
    assert!(!launch::command("sleep").arg("1000").status().unwrap().success());
}

#[test]
fn a_test_waits_for_no_process_without_end() {
    let mut test = launch::command(std::env::current_exe().unwrap());
    test.args(["--exact", "durability::waits_for_a_process_without_end", "--ignored", "--nocapture"]);
    let (code, said) = finished(&test.env(launch::LIMIT_VARIABLE, "1").output().unwrap());
    assert!(code == Some(0) && said.contains("1 passed"), "{said}");
    assert!(said.contains("has taken more than 1 s: killed"), "{said}");
}

#[test]
fn temporary_files_of_a_killed_process_go_when_the_run_is_resumed() {
    let fixture = CliFixture::in_memory();
    finetune(&fixture, "", &format!("--run r --steps 2 {SMALL}"), 0);
    let run = fixture.run("r");
    let hour_ago = SystemTime::now() - Duration::from_hours(1);
    let files =
        [(".tmpa1B2c3", hour_ago), (".tmpD4e5F6", SystemTime::now()), (".tmp-notes", hour_ago), ("notes", hour_ago)];
    for (name, time) in files {
        let file = fs::File::create(run.join(name)).unwrap();
        file.set_modified(time).unwrap();
    }
    finetune(&fixture, "", &format!("--resume --run r --steps 4 {SMALL}"), 0);
    // A young one may be in use; others are not this program's.
    assert_eq!(files.map(|(name, _)| run.join(name).exists()), [false, true, true, true]);
}

#[test]
fn promise_8_hangup_under_nohup_stops_nothing() {
    let fixture = CliFixture::in_memory();
    let mut run = Running::start(&fixture, "trap '' HUP", &format!("--run r --steps 40 {SMALL}"));
    run.until("step=3/");
    run.signal("HUP");
    assert_eq!(run.code(), Some(0));
}

#[test]
fn promise_8_sigusr1_saves_and_goes_on() {
    let fixture = CliFixture::in_memory();
    let mut run = Running::start(&fixture, "", &format!("--run r --steps 1000000 {SMALL}"));
    run.until("step=3/");
    run.signal("USR1");
    run.until("saved ");
    run.until("step=");
    let first = latest_valid(&fixture.run("r")).unwrap().checkpoint.state().step;
    run.signal("TERM");
    assert_eq!(run.code(), Some(130));
    assert!(latest_valid(&fixture.run("r")).unwrap().checkpoint.state().step > first);
}

#[test]
fn promise_8_an_interrupt_while_a_run_is_prepared_ends_it_with_130() {
    let fixture = CliFixture::in_memory();
    let pipe = fixture.path("never.txt");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    // A writer that never writes keeps the preparation waiting.
    let _writer = fs::File::options().read(true).write(true).open(&pipe).unwrap();
    let mut run = Running::start(&fixture, "", &format!("--run r --data never.txt {SMALL}"));
    let files = format!("/proc/{}/fd", run.child.id());
    let reads =
        || fs::read_dir(&files).unwrap().flatten().any(|file| fs::read_link(file.path()).is_ok_and(|it| it == pipe));
    while !reads() {
        assert_eq!(run.child.try_wait().unwrap(), None);
        std::thread::sleep(Duration::from_millis(5));
    }
    run.signal("TERM");
    assert_eq!(run.code(), Some(130));
    assert!(!fixture.run("r").exists());
}

/// Regression: the run computed the reference of all pairs first.
#[test]
fn promise_8_an_interrupt_keeps_the_reference_that_is_computed() {
    let fixture = CliFixture::in_memory();
    let row = |n: usize| format!("{{\"prompt\": \"{n}\", \"chosen\": \"a\", \"rejected\": \"b\"}}\n");
    fixture.write("pairs.jsonl", (0..6000).map(row).collect::<String>());
    let line = format!("--run r --data pairs.jsonl --val none --objective dpo --epochs 1 {SMALL}");
    let mut run = Running::start(&fixture, "", &line);
    let log = fixture.run("r").join("events.jsonl");
    while !fs::read_to_string(&log).is_ok_and(|log| log.contains("computing reference")) {
        assert_eq!(run.child.try_wait().unwrap(), None);
        std::thread::sleep(Duration::from_millis(5));
    }
    run.signal("TERM");
    assert_eq!(run.code(), Some(130));
    let stored = fs::read(fixture.run("r").join("reference.json")).unwrap();
    let stored: serde_json::Value = serde_json::from_slice(&stored).unwrap();
    assert!(stored["logps"].to_string().matches(':').count() < 12_000);
    finetune(&fixture, "", "--resume r --steps 2 --plain", 0);
}

#[test]
fn a_pipe_instead_of_a_log_does_not_stop_the_list_of_runs() {
    let fixture = CliFixture::in_memory();
    finetune(&fixture, "", &format!("--run r --steps 1 {SMALL}"), 0);
    fs::remove_file(fixture.run("r").join("events.jsonl")).unwrap();
    assert!(Command::new("mkfifo").arg(fixture.run("r").join("events.jsonl")).status().unwrap().success());
    assert!(fixture.said("runs").contains("  done"));
}

#[test]
fn a_loss_far_above_chance_is_a_divergence() {
    let fixture = CliFixture::in_memory();
    for dtype in ["fp32", "bf16"] {
        let line =
            format!("--run {dtype} --steps 400 --lr 10 --warmup-steps 0 --max-grad-norm 0 --dtype {dtype} {SMALL}");
        let said = finetune(&fixture, "", &line, 3);
        assert!(said.contains("lower the learning rate, or clip gradients"), "{said}");
        assert!(!said.contains("use bf16"), "{said}");
    }
}

#[test]
fn promise_7_a_batch_that_does_not_fit_is_refused_with_the_one_that_does() {
    let fixture = CliFixture::in_memory();
    for (before, arguments) in [
        ("", "--batch-size 1048576".to_owned()),
        ("ulimit -v 2000000", "--batch-size 8192".to_owned()),
        ("ulimit -v 2000000", "--model gpt2 --init random --tokenizer tokenizer.json".to_owned()),
    ] {
        fs::write(fixture.path("tokenizer.json"), finetune::data::Tokenizer::byte().json()).unwrap();
        let line = format!("{SMALL} {arguments}").replacen("--batch-size 2 --seq-len 16", "--seq-len 64", 1);
        let said = finetune(&fixture, before, &line, 2);
        let fits = "the largest batch that fits is";
        let none = "not even a batch of 1 fits";
        assert!(said.contains(fits) || said.contains(none), "{said}");
        assert!(!fixture.path("checkpoints").exists());
    }
}

#[test]
fn promise_7_a_process_of_its_own_reads_parquet_files_within_a_limit() {
    let fixture = CliFixture::in_memory();
    let path = fixture.path("a.parquet");
    let rows = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        let mut command = launch::program();
        command.arg(finetune::data::parquet_rows::ARGUMENT).arg(&path).arg("text");
        command.stdin(Stdio::null()).output().unwrap()
    };
    // Some writers give texts no type.
    let gzip = Compression::GZIP(GzipLevel::default());
    let zstd = Compression::ZSTD(ZstdLevel::default());
    let codecs = [gzip, zstd, Compression::LZ4_RAW].map(|codec| ("text", codec));
    for (column, compression) in codecs.into_iter().chain([("text (UTF8)", Compression::SNAPPY)]) {
        write_parquet(&path, column, compression);
        let output = rows(&fs::read(&path).unwrap());
        assert!(output.status.success());
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.starts_with("{\"row\":{\"text\":\"some words\"}}\n") && text.ends_with("\"end\"\n"), "{text}");
    }
    let good = fs::read(&path).unwrap();
    // The codec after the column's name: Brotli instead of Snappy.
    let codec = good.windows(6).rposition(|window| window == b"text\x15\x02").unwrap() + 5;
    let brotli: Vec<u8> = good.iter().enumerate().map(|(at, byte)| if at == codec { 8 } else { *byte }).collect();
    assert!(String::from_utf8(rows(&brotli).stdout).unwrap().contains("its compression is not supported"));
    // In the long form, which is ignored, every byte; here some.
    let every = std::env::var("PROMISES_PARQUET").map_or(29, |every| every.parse().unwrap());
    let mut aborted = Vec::new();
    for at in (0..good.len()).step_by(every) {
        for value in [0x7F, 0xFF, good[at] ^ 0x80, good[at] ^ 1] {
            let mut bad = good.clone();
            bad[at] = value;
            let status = rows(&bad).status;
            if std::os::unix::process::ExitStatusExt::signal(&status) == Some(libc::SIGABRT) {
                aborted.push((at, value));
            } else {
                assert_eq!(status.code(), Some(0), "byte {at} = {value}");
            }
        }
    }
    // A reader that requests more memory than allowed becomes an error of the program that requested the rows.
    if let Some((at, value)) = aborted.first() {
        let mut bad = good.clone();
        bad[*at] = *value;
        fs::write(&path, bad).unwrap();
        let said = finetune(&fixture, "", &format!("--data a.parquet {SMALL}"), 2);
        assert!(said.contains("takes more than 2 GiB of memory"), "{said}");
    }
}

/// The footer's unknown fields are skipped: 200 lists of 2^31 booleans, which take no bytes each in the Parquet crate.
#[test]
fn promise_7_a_parquet_file_that_takes_for_ever_is_refused_and_ends_with_its_reader() {
    let fixture = CliFixture::in_memory();
    let mut footer = [0xF9, 0xF1, 0xFF, 0xFF, 0xFF, 0xFF, 0x07].repeat(200);
    footer.push(0);
    let length = u32::try_from(footer.len()).unwrap().to_le_bytes();
    fs::write(fixture.path("a.parquet"), [&b"PAR1"[..], &footer, &length, b"PAR1"].concat()).unwrap();
    let reader = |parent: u32| {
        let children = format!("/proc/{parent}/task");
        (0..2000).find_map(|_| {
            std::thread::sleep(Duration::from_millis(5));
            let of = |task: fs::DirEntry| fs::read_to_string(task.path().join("children")).ok();
            let all: String = fs::read_dir(&children).ok()?.flatten().filter_map(of).collect();
            let id = all.split_whitespace().next()?.to_owned();
            let limits = fs::read_to_string(format!("/proc/{id}/limits")).ok()?;
            let seconds = limits.lines().find(|line| line.starts_with("Max cpu time"))?.split_whitespace().nth(3)?;
            (seconds == "30").then_some(id)
        })
    };
    let signal = |name: &str, id: &str| assert!(Command::new("kill").args([name, id]).status().unwrap().success());
    let start = || shell(&fixture, "", &format!("--data a.parquet {SMALL}")).spawn().unwrap();

    let program = start();
    signal("-XCPU", &reader(program.id()).expect("a reader with 30 s"));
    let (code, said) = finished(&program.wait_with_output().unwrap());
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("a row takes more than 30 s of processor time"), "{said}");

    let program = start();
    let reader = reader(program.id()).expect("a reader");
    signal("-KILL", &program.id().to_string());
    program.wait_with_output().unwrap();
    let gone = || !fs::read_to_string(format!("/proc/{reader}/stat")).is_ok_and(|stat| !stat.contains(") Z "));
    let began = Instant::now();
    while !gone() {
        assert!(began.elapsed() < Duration::from_secs(10), "it computes on");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn write_parquet(path: &Path, column: &str, compression: Compression) {
    use parquet::data_type::{ByteArray, ByteArrayType};
    use parquet::file::{properties::WriterProperties, writer::SerializedFileWriter};
    let schema = format!("message rows {{ required binary {column}; }}");
    let schema = parquet::schema::parser::parse_message_type(&schema).unwrap();
    let properties = WriterProperties::builder().set_compression(compression).build();
    let mut writer =
        SerializedFileWriter::new(fs::File::create(path).unwrap(), schema.into(), properties.into()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    let values: Vec<ByteArray> = ["some words", "and some more", "some words"].map(ByteArray::from).to_vec();
    column.typed::<ByteArrayType>().write_batch(&values, None, None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
}
