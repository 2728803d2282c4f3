//! A log of many steps: its readers need little memory, for a log of any length.
#![cfg(target_os = "linux")]

use crate::common::cli_fixture::CliFixture;
use finetune::telemetry::{Event, Record, ScaleCause, ScaleUpdate, StepRecord, StepStatus, read};
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::process::Stdio;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Peak memory that every command stays below, in MiB; a program that has done nothing takes about 20.
const MOST_MIB: u64 = 100;

/// A run of two steps in `checkpoints/long`, whose log is then continued up to step `steps`.
fn long_run(fixture: &CliFixture, steps: u64) {
    fixture.said(
        "--model model --data text.txt --run long --steps 2 --seq-len 8 --batch-size 2 --plain \
         --set train.sample_tokens=0 --set telemetry.grad_histogram_every=1",
    );
    let log = fixture.run("long").join("events.jsonl");
    let mut records = read(&log).unwrap();
    let is_step = |record: &Record| matches!(&record.event, Event::Step(_));
    let Event::Step(step) = records.iter().rfind(|record| is_step(record)).unwrap().event.clone() else { panic!() };
    records.retain(|record| matches!(record.event, Event::Started(_)));
    let mut out = BufWriter::new(File::create(&log).unwrap());
    let mut write = |record: &Record| {
        serde_json::to_writer(&mut out, record).unwrap();
        out.write_all(b"\n").unwrap();
    };
    write(&records[0]);
    for at in 1..=steps {
        let skipped = at % 1000 == 500;
        let table = if at % 100 == 0 { step.tensors.clone() } else { Vec::new() };
        let record = StepRecord {
            step: at,
            loss: 2.0 + (at as f32).sin() / 4.0,
            outcome: if skipped { StepStatus::Skipped } else { StepStatus::Applied },
            scale: ScaleUpdate { cause: if skipped { ScaleCause::BackedOff } else { ScaleCause::Held }, ..step.scale },
            skipped: at.div_ceil(1000),
            updates: at - at.div_ceil(1000),
            tokens: at * 16,
            tensors: table,
            ..(*step).clone()
        };
        write(&Record {
            v: finetune::telemetry::VERSION,
            t: 1_800_000_000_000 + at * 100,
            s: at as f64 / 10.0,
            event: Event::Step(Box::new(record)),
        });
    }
    out.flush().unwrap();
}

/// Runs a command, and returns the seconds it took and its peak memory in MiB.
fn measured(fixture: &CliFixture, line: &str) -> (f64, u64) {
    let began = Instant::now();
    let stderr = fixture.path("stderr");
    let mut child = fixture.command(line).stdout(Stdio::null()).stderr(File::create(&stderr).unwrap()).spawn().unwrap();
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0;
    let code = loop {
        let text = fs::read_to_string(&status).unwrap_or_default();
        let kib = text.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse().ok());
        peak = kib.unwrap_or(0u64).max(peak);
        if let Some(code) = child.try_wait().unwrap() {
            break code;
        }
        sleep(Duration::from_millis(5));
    };
    assert!(code.success(), "finetune {line}: {}", fs::read_to_string(&stderr).unwrap());
    (began.elapsed().as_secs_f64(), peak >> 10)
}

fn open_a_log_of(steps: u64, most_seconds: f64) {
    let fixture = CliFixture::new();
    long_run(&fixture, steps);
    let runs = fixture.path("checkpoints");
    fs::create_dir(runs.join("other")).unwrap();
    fs::copy(runs.join("long/events.jsonl"), runs.join("other/events.jsonl")).unwrap();
    let bytes = fs::metadata(fixture.path("checkpoints/long/events.jsonl")).unwrap().len();
    println!("{steps} steps, {} MiB", bytes >> 20);
    assert!(bytes >> 20 > MOST_MIB / 2, "the log is too short to test the bound");
    for line in [
        "runs",
        "watch long --svg frame.svg --size 120x36",
        "watch long --svg tensors.svg --size 80x24 --keys 3",
        "compare long other",
        "report long",
        "export-metrics long --output table.csv",
        "export-metrics long --format tensorboard",
        "lab scaler --run long",
        "lab memory --run long",
    ] {
        let (seconds, mib) = measured(&fixture, line);
        println!("{seconds:6.1} s  {mib:4} MiB  finetune {line}");
        assert!(mib < MOST_MIB, "finetune {line} took {mib} MiB for a log of {} MiB", bytes >> 20);
        assert!(seconds < most_seconds, "finetune {line} took {seconds:.1} s");
    }
    // The lines of early steps have all of their figures.
    let lines = fixture.said("watch long --plain");
    let early = lines.lines().find(|line| line.starts_with("step=128/")).unwrap();
    assert!(!early.contains("lr=0 ") && !early.contains("step_ms=0 "), "{early}");
    let (seconds, mib) = measured(&fixture, "--resume long --steps 4 --plain");
    println!("{seconds:6.1} s  {mib:4} MiB  finetune --resume long");
    assert!(mib < MOST_MIB && seconds < most_seconds, "resuming took {mib} MiB and {seconds:.1} s");
    let table = fs::read_to_string(fixture.path("table.csv")).unwrap();
    assert_eq!(table.lines().count() as u64, steps + 1);
}

#[test]
fn n3_a_long_log_is_read_in_bounded_memory() {
    open_a_log_of(100_000, 60.0);
}
