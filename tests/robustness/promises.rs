//! The guarantees listed in `docs/faults.md`, under failures of a run's log, disk, terminal and sibling processes.
//!
//! Each test runs the program like a user. Limits and signals come from the shell that starts it.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant, SystemTime};

use crate::common::checkpoint::folder;
use crate::common::launch;
use finetune::store::checkpoint::{Kind, list, newest_good, verify};
use finetune::telemetry::{Event, Record, read};

/// A run of the built-in model in which little is computed.
const SMALL: &str = "--init-scale 16384 --batch-size 2 --seq-len 16 --threads 1 --plain --set train.sample_tokens=0 \
                     --set train.eval_batches=1 --eval-every 1000 --log-every 1";

/// The program after `before`, a line of shell such as `ulimit -f 100`.
fn shell(folder: &Path, before: &str, arguments: &str) -> Command {
    let mut command = launch::command("bash");
    let program = env!("CARGO_BIN_EXE_finetune");
    command.current_dir(folder).args(["-c", &format!("{before}\nexec '{program}' {arguments}")]);
    command.env("HF_HUB_OFFLINE", "1").env_remove("FINETUNE_ISA");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn finetune(folder: &Path, arguments: &str) -> Output {
    shell(folder, "", arguments).output().unwrap()
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn run_folder(folder: &Path, run: &str) -> PathBuf {
    folder.join("checkpoints").join(run)
}

fn events(folder: &Path, run: &str) -> Vec<Record> {
    read(run_folder(folder, run).join("events.jsonl")).unwrap()
}

/// The steps that a log tells of.
fn steps(records: &[Record]) -> Vec<u64> {
    let step = |record: &Record| matches!(record.event, Event::Step(_)).then(|| record.event.step()).flatten();
    records.iter().filter_map(step).collect()
}

fn warnings(records: &[Record]) -> Vec<String> {
    let warning = |record: &Record| match &record.event {
        Event::Warning(trouble) => Some(trouble.message.clone()),
        _ => None,
    };
    records.iter().filter_map(warning).collect()
}

/// A run in progress, whose lines are read as they come.
struct Running {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Running {
    fn start(folder: &Path, before: &str, arguments: &str) -> Self {
        let mut child = shell(folder, before, arguments).spawn().unwrap();
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
    let folder = folder();
    // The checkpoint's largest file has 6.5 MB, so the limit that the log meets has to be lifted for it: `ulimit` is for each
    // file, and padding makes the log begin near it.
    let arguments = format!("--run r --steps 40 {SMALL}");
    let run = run_folder(folder.path(), "r");
    let output = finetune(folder.path(), &format!("--run r --steps 1 {SMALL}"));
    assert!(output.status.success(), "{}", said(&output));
    let limit = 16 << 20;
    let log = run.join("events.jsonl");
    let mut text = fs::read(&log).unwrap();
    let padding = limit - 60_000 - text.len();
    text.splice(0..0, std::iter::repeat_n(b'\n', padding));
    fs::write(&log, text).unwrap();
    let output = shell(folder.path(), &format!("ulimit -f {}", limit >> 10), &format!("--resume {arguments}")).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("File too large"), "{}", said(&output));
    assert!(said(&output).contains("step=40/40"), "{}", said(&output));
    assert_eq!(fs::metadata(&log).unwrap().len(), limit as u64);
    assert_eq!(newest_good(&run).unwrap().checkpoint.state().step, 40);
}

#[test]
fn promise_2_a_new_run_never_touches_a_folder_that_has_checkpoints() {
    let folder = folder();
    let line = format!("--run r --steps 4 --save-every 2 {SMALL}");
    assert!(finetune(folder.path(), &line).status.success());
    let run = run_folder(folder.path(), "r");
    fs::remove_file(run.join("config.toml")).unwrap();
    let before = fs::read(run.join("events.jsonl")).unwrap();
    let output = finetune(folder.path(), &format!("{line} --seed 9"));
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("already contains a run"), "{}", said(&output));
    assert_eq!(list(&run).unwrap().len(), 2);
    assert_eq!(fs::read(run.join("events.jsonl")).unwrap(), before);
}

#[test]
fn promise_2_eight_runs_started_at_once_take_eight_numbers() {
    let folder = folder();
    let start = || shell(folder.path(), "", &format!("--steps 1 {SMALL}")).spawn().unwrap();
    let children: Vec<Child> = (0..8).map(|_| start()).collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
    }
    let runs = fs::read_dir(folder.path().join("checkpoints")).unwrap().map(|run| run.unwrap().path());
    let runs: Vec<PathBuf> = runs.collect();
    assert_eq!(runs.len(), 8);
    for run in runs {
        assert_eq!(newest_good(&run).unwrap().checkpoint.state().step, 1);
    }
}

#[test]
fn promise_4_a_resumed_run_checks_the_seed_and_names_every_setting_that_changed() {
    let folder = folder();
    for (run, seed) in [("one", 1), ("two", 2)] {
        let output = finetune(folder.path(), &format!("--run {run} --steps 4 --seed {seed} {SMALL}"));
        assert!(output.status.success(), "{}", said(&output));
    }
    // A step folder that came from another run.
    let [one, two] = ["one", "two"].map(|run| run_folder(folder.path(), run).join("step-000004"));
    fs::remove_dir_all(&one).unwrap();
    fs::rename(two, &one).unwrap();
    let output = finetune(folder.path(), "--resume one --steps 6 --plain");
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("`seed` was 2 and is now 1: the checkpoint is of another run"), "{}", said(&output));

    let output = finetune(folder.path(), &format!("--run three --steps 4 {SMALL}"));
    assert!(output.status.success(), "{}", said(&output));
    let output = finetune(folder.path(), "--resume three --steps 6 --lr 0.0001 --batch-size 4 --plain");
    assert!(output.status.success(), "{}", said(&output));
    let warnings = warnings(&events(folder.path(), "three")).join("\n");
    for setting in ["`train.steps` was 4 and is now 6", "`optimizer.lr` was", "`train.batch_size` was 2 and is now 4"] {
        assert!(warnings.contains(setting) && said(&output).contains(setting), "{warnings}");
    }
    assert!(warnings.contains("`batch_size` was 2 and is now 4"), "{warnings}");
}

#[test]
fn promise_5_the_last_save_is_tried_again_until_the_disk_takes_it() {
    let folder = folder();
    let mut run = Running::start(folder.path(), "", &format!("--run r --steps 3 {SMALL}"));
    run.until("step=1/3");
    // As if another process had taken the folder over.
    let lock = run_folder(folder.path(), "r").join(".lock");
    fs::rename(&lock, lock.with_extension("away")).unwrap();
    fs::write(&lock, "").unwrap();
    run.until("trying again for");
    fs::rename(lock.with_extension("away"), &lock).unwrap();
    assert_eq!(run.code(), Some(0));
    assert_eq!(newest_good(&run_folder(folder.path(), "r")).unwrap().checkpoint.state().step, 3);
}

#[test]
fn promise_5_where_the_whole_does_not_fit_the_weights_alone_are_saved_and_the_loss_is_told() {
    let folder = folder();
    // The weights in FP16 have 1.6 MB, Adam's moments 6.5.
    let line = format!("--run r --steps 3 --save-every 2 --set checkpoint.retry_s=1 {SMALL}");
    let output = shell(folder.path(), "ulimit -f 4000", &line).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let run = run_folder(folder.path(), "r");
    let listed = list(&run).unwrap();
    assert_eq!(listed.iter().map(|one| (one.kind, one.step)).collect::<Vec<_>>(), [(Kind::Weights, 3)]);
    assert_eq!(verify(&listed[0].path), []);
    for text in [
        "no checkpoint at step 2: cannot write",
        "File too large (os error 27); training continues",
        "trying again for 1 s",
        "could not be written within 1 s; its weights alone are in",
    ] {
        assert!(said(&output).contains(text), "{text}: {}", said(&output));
    }
}

/// Starts a long run, and sends it `signal` once it trains.
fn interrupted_by(before: &str, signal: &str) -> (tempfile::TempDir, Option<i32>) {
    let folder = folder();
    let mut run = Running::start(folder.path(), before, &format!("--run r --steps 1000000 {SMALL}"));
    run.until("step=3/");
    run.signal(signal);
    let code = run.code();
    (folder, code)
}

#[test]
fn promise_8_hangup_and_the_processor_limit_save_and_stop_like_termination() {
    for signal in ["INT", "TERM", "HUP", "XCPU"] {
        let (folder, code) = interrupted_by("", signal);
        assert_eq!(code, Some(130), "SIG{signal}");
        let found = newest_good(&run_folder(folder.path(), "r")).unwrap();
        let records = events(folder.path(), "r");
        assert_eq!(Some(&found.checkpoint.state().step), steps(&records).last(), "SIG{signal}");
    }
}

/// The test above, started as `nohup` starts it.
#[test]
fn promise_8_is_tested_under_nohup_too() {
    let name = "promises::promise_8_hangup_and_the_processor_limit_save_and_stop_like_termination";
    let test = std::env::current_exe().unwrap();
    let mut nohup = launch::command("bash");
    nohup.args(["-c", &format!("trap '' HUP; exec '{}' --exact {name}", test.display())]);
    let output = nohup.env(launch::LIMIT_VARIABLE, "120").output().unwrap();
    assert!(output.status.success() && said(&output).contains("1 passed"), "{}", said(&output));
}

#[test]
#[ignore = "started by the test below"]
fn waits_for_a_process_without_end() {
    assert!(!launch::command("sleep").arg("1000").status().unwrap().success());
}

#[test]
fn a_test_waits_for_no_process_without_end() {
    let mut test = launch::command(std::env::current_exe().unwrap());
    test.args(["--exact", "promises::waits_for_a_process_without_end", "--ignored", "--nocapture"]);
    let output = test.env(launch::LIMIT_VARIABLE, "1").output().unwrap();
    assert!(output.status.success() && said(&output).contains("1 passed"), "{}", said(&output));
    assert!(said(&output).contains("has taken more than 1 s: killed"), "{}", said(&output));
}

#[test]
fn temporary_files_of_a_killed_process_go_when_the_run_is_resumed() {
    let folder = folder();
    assert!(finetune(folder.path(), &format!("--run r --steps 2 {SMALL}")).status.success());
    let run = run_folder(folder.path(), "r");
    let hour_ago = SystemTime::now() - Duration::from_hours(1);
    let files =
        [(".tmpa1B2c3", hour_ago), (".tmpD4e5F6", SystemTime::now()), (".tmp-notes", hour_ago), ("notes", hour_ago)];
    for (name, time) in files {
        let file = fs::File::create(run.join(name)).unwrap();
        file.set_modified(time).unwrap();
    }
    let output = finetune(folder.path(), &format!("--resume --run r --steps 4 {SMALL}"));
    assert!(output.status.success(), "{}", said(&output));
    // A young one may be in use; others are not this program's.
    assert_eq!(files.map(|(name, _)| run.join(name).exists()), [false, true, true, true]);
}

#[test]
fn promise_8_hangup_under_nohup_stops_nothing() {
    let folder = folder();
    let mut run = Running::start(folder.path(), "trap '' HUP", &format!("--run r --steps 40 {SMALL}"));
    run.until("step=3/");
    run.signal("HUP");
    assert_eq!(run.code(), Some(0));
}

#[test]
fn promise_8_sigusr1_saves_and_goes_on() {
    let folder = folder();
    let mut run = Running::start(folder.path(), "", &format!("--run r --steps 1000000 {SMALL}"));
    run.until("step=3/");
    run.signal("USR1");
    run.until("saved ");
    run.until("step=");
    let first = newest_good(&run_folder(folder.path(), "r")).unwrap().checkpoint.state().step;
    run.signal("TERM");
    assert_eq!(run.code(), Some(130));
    assert!(newest_good(&run_folder(folder.path(), "r")).unwrap().checkpoint.state().step > first);
}

#[test]
fn promise_8_an_interrupt_while_a_run_is_prepared_ends_it_with_130() {
    let folder = folder();
    let pipe = folder.path().join("never.txt");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    // A writer that never says anything keeps the preparation waiting.
    let _writer = fs::File::options().read(true).write(true).open(&pipe).unwrap();
    let run = Running::start(folder.path(), "", &format!("--run r --data never.txt {SMALL}"));
    std::thread::sleep(Duration::from_millis(500));
    run.signal("TERM");
    assert_eq!(run.code(), Some(130));
    assert!(!run_folder(folder.path(), "r").exists());
}

#[test]
fn a_loss_far_above_chance_is_a_divergence() {
    let folder = folder();
    for dtype in ["fp32", "bf16"] {
        let line =
            format!("--run {dtype} --steps 400 --lr 10 --warmup-steps 0 --max-grad-norm 0 --dtype {dtype} {SMALL}");
        let output = finetune(folder.path(), &line);
        assert_eq!(output.status.code(), Some(3), "{}", said(&output));
        assert!(said(&output).contains("lower the learning rate, or clip gradients"), "{}", said(&output));
        assert!(!said(&output).contains("use bf16"), "{}", said(&output));
    }
}

#[test]
fn promise_7_a_batch_that_does_not_fit_is_refused_with_the_one_that_does() {
    let folder = folder();
    for (before, arguments) in [
        ("", "--batch-size 1048576".to_owned()),
        ("ulimit -v 2000000", "--batch-size 8192".to_owned()),
        ("ulimit -v 2000000", "--model gpt2 --init random --tokenizer tokenizer.json".to_owned()),
    ] {
        fs::write(folder.path().join("tokenizer.json"), finetune::data::Tokenizer::byte().json()).unwrap();
        let line = format!("{SMALL} {arguments}").replacen("--batch-size 2 --seq-len 16", "--seq-len 64", 1);
        let output = shell(folder.path(), before, &line).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{before}; {arguments}: {}", said(&output));
        let fits = "the largest batch that fits is";
        let none = "not even a batch of 1 fits";
        assert!(said(&output).contains(fits) || said(&output).contains(none), "{}", said(&output));
        assert!(!folder.path().join("checkpoints").exists());
    }
}

#[test]
fn promise_7_a_process_of_its_own_reads_parquet_files_within_a_limit() {
    let folder = folder();
    let path = folder.path().join("a.parquet");
    write_parquet(&path);
    let good = fs::read(&path).unwrap();
    let rows = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        let mut command = launch::program();
        command.arg(finetune::data::parquet_rows::ARGUMENT).arg(&path).arg("text");
        command.stdin(Stdio::null()).output().unwrap()
    };
    let output = rows(&good);
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with("{\"row\":{\"text\":\"some words\"}}\n") && text.ends_with("\"end\"\n"), "{text}");
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
    // One that asks for more memory than there may be becomes an error of the program that wants the rows.
    if let Some((at, value)) = aborted.first() {
        let mut bad = good.clone();
        bad[*at] = *value;
        fs::write(&path, bad).unwrap();
        let output = finetune(folder.path(), &format!("--data a.parquet {SMALL}"));
        assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        assert!(said(&output).contains("takes more than 2 GiB of memory"), "{}", said(&output));
    }
}

/// The footer's unknown fields are passed over: 200 lists of 2^31 booleans, which take no bytes each in the Parquet crate.
#[test]
fn promise_7_a_parquet_file_that_takes_for_ever_is_refused_and_ends_with_its_reader() {
    let folder = folder();
    let mut footer = [0xF9, 0xF1, 0xFF, 0xFF, 0xFF, 0xFF, 0x07].repeat(200);
    footer.push(0);
    let length = u32::try_from(footer.len()).unwrap().to_le_bytes();
    fs::write(folder.path().join("a.parquet"), [&b"PAR1"[..], &footer, &length, b"PAR1"].concat()).unwrap();
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
    let start = || shell(folder.path(), "", &format!("--data a.parquet {SMALL}")).spawn().unwrap();

    let program = start();
    signal("-XCPU", &reader(program.id()).expect("a reader with 30 s"));
    let output = program.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("a row takes more than 30 s of processor time"), "{}", said(&output));

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

fn write_parquet(path: &Path) {
    use parquet::basic::Compression;
    use parquet::data_type::{ByteArray, ByteArrayType};
    use parquet::file::{properties::WriterProperties, writer::SerializedFileWriter};
    let schema = parquet::schema::parser::parse_message_type("message rows { required binary text (UTF8); }").unwrap();
    let properties = WriterProperties::builder().set_compression(Compression::SNAPPY).build();
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
