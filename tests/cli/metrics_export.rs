//! Item 16 of daily use: a run's figures out of the terminal, as tables, for TensorBoard and Prometheus, and as a page.
//!
//! TensorBoard itself reads its event files back. Without a Python that has `tensorboard` (`.ci/python-env`, named by
//! `FINETUNE_PYTHON`) that test prints a message and passes; under CI it fails.

use crate::common::cli_fixture::CliFixture;
use crate::common::launch;
use crate::common::markup::{assert_stands_alone, assert_well_formed};
use crate::common::python::{python_with, run_script};
use finetune::telemetry::{Event, read};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};

/// A short run called `t`, whose first loss scale is too high.
const RUN: &str = "--run t --batch-size 2 --seq-len 8 --threads 1 --plain --save-every 10 --eval-every 10 --sample-every 10 \
                   --prompt <&\"> --set train.eval_batches=1 --set train.sample_tokens=8 --set telemetry.probe_every=8 \
                   --init-scale 16777216";

#[test]
fn item_16_figures_are_exported_as_tables() {
    let fixture = CliFixture::empty();
    fixture.said(&format!("{RUN} --steps 20"));
    fixture.said("--resume t/step-000010 --plain");
    let steps = fixture.steps("t");
    let csv = fixture.said("export-metrics t --format csv");
    let rows: Vec<Vec<&str>> = csv.lines().map(|line| line.split(',').collect()).collect();
    assert_eq!(rows.len(), 21, "a heading, and each step once");
    let column = |name: &str| rows[0].iter().position(|column| *column == name).unwrap();
    for (row, step) in rows[1..].iter().zip(&steps) {
        assert_eq!(row.len(), rows[0].len());
        assert_eq!(row[column("step")], step.step.to_string());
        assert_eq!(row[column("loss")].parse::<f32>().unwrap(), step.loss);
        assert_eq!(row[column("outcome")], if step.updates == 0 { "skipped" } else { row[column("outcome")] });
        assert_eq!(row[column("loss_scale")].parse::<f32>().unwrap(), step.loss_scale);
        let number = |name: &str| row[column(name)].parse::<f64>().ok();
        assert!(
            number("grad_log2_p1").unwrap() >= f64::from(step.grads.min_abs.unwrap() / step.loss_scale).log2().floor()
        );
        assert_eq!(number("probe_log2_min").is_some(), step.step.is_multiple_of(8));
        assert_eq!(number("probe_flushed").is_some(), step.step.is_multiple_of(8));
        assert_eq!(row[column("val_loss")].is_empty(), !step.step.is_multiple_of(10));
    }
    fixture.said("export-metrics t --format jsonl --output t.jsonl");
    let text = std::fs::read_to_string(fixture.path("t.jsonl")).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 20);
    assert!(lines[9]["val_loss"].is_number() && lines[8]["val_loss"].is_null());
    fixture.refused("export-metrics nowhere");

    // No output replaces a file of a run, or the log that is read.
    std::fs::copy(fixture.path("checkpoints/t/events.jsonl"), fixture.path("copy")).unwrap();
    std::os::unix::fs::symlink("checkpoints/t/events.jsonl", fixture.path("link")).unwrap();
    for line in [
        "export-metrics t --output checkpoints/t/events.jsonl",
        "export-metrics copy --output copy",
        "report t --output checkpoints/t/config.toml",
        "report t --output link",
        "watch t --svg checkpoints/t/events.jsonl",
        "watch t --png checkpoints/t/latest",
        "compare t --html checkpoints/t/step-000020/state.json",
        "verify t --claim checkpoints/t/.lock",
        "generate t --input t.jsonl --output checkpoints/t/events.jsonl",
    ] {
        let flag = line.split(' ').nth_back(1).unwrap();
        fixture.assert_refused(line, &[flag, "run's own file, which would be lost"]);
    }
    assert_eq!(fixture.steps("t").len(), steps.len());

    // Regression: an output that did not fit replaced the earlier one.
    for line in [
        "export-metrics t --output earlier",
        "report t --output earlier",
        "watch t --svg earlier",
        "compare t copy --html earlier",
    ] {
        fixture.write("earlier", "complete");
        let mut limited = Command::new("sh");
        let program = fixture.command(line);
        limited.args(["-c", "trap '' XFSZ; ulimit -f 1; exec \"$@\"", "sh"]).arg(program.get_program());
        limited.args(program.get_args()).current_dir(fixture.folder());
        let (code, _, err) = launch::finish(limited.stdout(Stdio::piped()).stderr(Stdio::piped()));
        assert!(code == Some(1) && err.contains("cannot write"), "{line}: {code:?}, {err}");
        assert_eq!(std::fs::read_to_string(fixture.path("earlier")).unwrap(), "complete", "{line}");
    }
}

#[test]
fn item_16_a_report_is_one_page_that_stands_alone() {
    let fixture = CliFixture::empty();
    fixture.said(&format!("{RUN} --steps 20"));
    assert!(fixture.said("report t").contains("report.html"));
    let html = std::fs::read_to_string(fixture.path("checkpoints/t/report.html")).unwrap();
    assert_well_formed(&html);
    assert_stands_alone(&html);
    for part in [
        "<title>Run t</title>",
        "Loss, by step",
        "Loss scale, log2, by step",
        "Gradients by exponent",
        "Learning rate, by step",
        "Gradients, unscaled: first percentile, by step",
        "Smallest gradient in FP32 probes, by step",
        "where it began",
        " pass, ",
        "p=f32,c=f16,g=f16,r=f32",
        "flushed to zero (FP32 probes)",
        "<strong>&lt;&amp;&quot;&gt;</strong>",
        "optimizer.lr",
        "2^24 → 2^23",
    ] {
        assert!(html.contains(part), "`{part}` is not in the page");
    }
    assert!(html.contains("color-scheme: light dark") && html.contains("prefers-color-scheme: dark"));
    fixture.said("report t --output elsewhere.html");
    assert_eq!(std::fs::read_to_string(fixture.path("elsewhere.html")).unwrap(), html);
}

#[test]
fn item_16_prometheus_reads_a_running_run() {
    let fixture = CliFixture::empty();
    // The system gives a free port; that another process takes it before the run does is as good as impossible.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let line = format!("{RUN} --steps 100000 --log-every 1 --metrics-port {port}");
    let mut run = fixture.command(&line).spawn().unwrap();
    let lines = BufReader::new(run.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.skip_while(|line| !line.starts_with("step=3/")).take(1).count() == 1);
    let mut client = TcpStream::connect(("127.0.0.1", port)).unwrap();
    client.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut text = String::new();
    client.read_to_string(&mut text).unwrap();
    run.kill().unwrap();
    run.wait().unwrap();
    let figure = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(&format!("{name}{{run=\"t\"}} ")));
        line.unwrap_or_else(|| panic!("no {name} in {text}")).split(' ').nth(1).unwrap().parse::<f64>().unwrap()
    };
    assert!(figure("finetune_step") >= 3.0 && figure("finetune_overflows_total") >= 1.0);
    assert!(figure("finetune_loss") > 0.0 && figure("finetune_loss_scale") >= 1.0);
    assert!(figure("finetune_tokens_per_second") > 0.0 && figure("finetune_last_step_timestamp_seconds") > 1.7e9);
    // A port that is taken, and two that are none.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let none = "must be a port such as 9464";
    for (port, part) in [(port.as_str(), "cannot listen on 127.0.0.1"), ("many", none), ("0", none)] {
        fixture.assert_refused(&format!("--run u --metrics-port {port}"), &[part]);
        assert!(!fixture.path("checkpoints/u").exists());
    }
}

#[test]
fn item_16_tensorboard_reads_what_a_run_wrote_live_and_afterwards() {
    let Some(python) = python_with("tensorboard") else { return };
    let fixture = CliFixture::empty();
    fixture.said(&format!("{RUN} --steps 20 --set telemetry.tensorboard=true"));
    // A second process repeats the steps after the tenth, and must not leave two of each.
    fixture.said("--resume t/step-000010 --plain");
    // The second export replaces the first.
    for _ in 0..2 {
        fixture.said("export-metrics t --format tensorboard --output afterwards");
    }

    let records = read(fixture.path("checkpoints/t/events.jsonl")).unwrap();
    let steps: Vec<_> = records
        .iter()
        .filter_map(|record| if let Event::Step(step) = &record.event { Some((record.t, step)) } else { None })
        .collect();
    assert_eq!(steps.len(), 20);
    for folder in ["checkpoints/t/tensorboard", "afterwards"] {
        let board = run_script(&python, "tensorboard_read.py", &[fixture.path(folder).as_os_str()]);
        let scalar =
            |tag: &str| board["scalars"][tag].as_array().unwrap_or_else(|| panic!("{folder}: no {tag}")).clone();
        let losses = scalar("loss/train");
        assert_eq!(losses.len(), 20, "{folder}");
        for (found, (t, step)) in losses.iter().zip(&steps) {
            assert_eq!(found[0], step.step, "{folder}");
            assert_eq!(found[1].as_str().unwrap().parse::<f64>().unwrap() as f32, step.loss, "{folder}");
            assert!((found[2].as_f64().unwrap() - *t as f64 / 1000.0).abs() < 1e-3, "{folder}");
        }
        assert_eq!(scalar("loss/validation").len(), 2, "{folder}");
        assert_eq!(scalar("gradients/log2_p1_unscaled").len(), 20, "{folder}");
        assert_eq!((scalar("probe/log2_min").len(), scalar("probe/flushed_share").len()), (2, 2), "{folder}");
        let scale = scalar("loss_scale/log2");
        assert_eq!(scale[0][1].as_str().unwrap().parse::<f32>().unwrap(), steps[0].1.loss_scale.log2());
        let histograms = board["histograms"]["gradients/log2_abs_scaled"].as_array().unwrap();
        assert_eq!(histograms.len(), 20, "{folder}");
        for (found, (_, step)) in histograms.iter().zip(&steps) {
            let exponents = &step.grads.exponents;
            assert_eq!(found[0], step.step);
            assert_eq!(found[1], f64::from(exponents[0].0), "the lowest binade");
            assert_eq!(found[2], f64::from(exponents[exponents.len() - 1].0) + 1.0, "above the highest");
            assert_eq!(found[3].as_f64().unwrap(), exponents.iter().map(|(_, count)| *count as f64).sum::<f64>());
            for (exponent, count) in exponents {
                let limits = found[4].as_array().unwrap();
                let at = limits.iter().position(|limit| *limit == f64::from(*exponent) + 1.0).unwrap();
                assert_eq!(found[5][at], *count as f64, "2^{exponent}");
            }
        }
    }
}
