//! Validation data, its intervals, and runs of several data sets.

use crate::common::cli_fixture::CliFixture;
use finetune::telemetry::Event;
use serde_json::Value;
use std::fs;
use std::str::FromStr;

/// A line that trains on `data`: 840 tokens of `text.txt` are 24 rows, or three steps per epoch.
fn training(name: &str, data: &str) -> String {
    format!(
        "--model model {data} --run {name} --dtype fp32 --seq-len 32 --batch-size 8 --threads 1 --schedule constant --plain \
         --set train.sample_tokens=0 --set train.eval_batches=2"
    )
}

/// The steps of a run's validations, and the tokens of its data.
fn evaluated(fixture: &CliFixture, run: &str) -> (Vec<u64>, String) {
    let (mut steps, mut data) = (Vec::new(), String::new());
    for event in fixture.events(run) {
        match event {
            Event::Eval(eval) => steps.push(eval.step),
            Event::Started(started) => data = started.data,
            _ => {}
        }
    }
    (steps, data)
}

#[test]
fn validation_data_is_a_share_of_the_text_or_nothing() {
    let fixture = CliFixture::new();
    fixture.said(&training("share", "--data text.txt --val 5% --epochs 2 --eval-every epoch --save-every epoch"));
    let (steps, data) = evaluated(&fixture, "share");
    assert_eq!(steps, [4, 8]);
    assert!(data.ends_with("798 tokens to train on, 42 to validate"), "{data}");
    fixture.said(&training("none", "--data text.txt --val none --epochs 1 --eval-every 1"));
    let (steps, data) = evaluated(&fixture, "none");
    assert_eq!((steps, fixture.steps("none").len()), (vec![], 4));
    assert!(data.ends_with("840 tokens to train on, 0 to validate"), "{data}");
    let (_, _, err) = fixture.output("--resume checkpoints/none --plain");
    assert!(err.contains("nothing is left to do"), "{err}");
    // Regression: a run that was killed before its end was logged had none forever.
    let log = fixture.run("none").join("events.jsonl");
    let lines = std::fs::read_to_string(&log).unwrap();
    let finished = lines.lines().next_back().unwrap();
    std::fs::write(&log, lines.replace(&format!("{finished}\n"), "")).unwrap();
    fixture.said("--resume checkpoints/none --plain");
    let [before, after] = [&lines, &std::fs::read_to_string(&log).unwrap()].map(|log| {
        let end = Value::from_str(log.lines().next_back().unwrap()).unwrap();
        ["event", "reason", "step", "loss", "checkpoint"].map(|key| end[key].clone())
    });
    assert_eq!(before, after);
    assert!(
        fixture
            .said("data stats --model model --seq-len 32 --data text.txt --val none")
            .contains("validation        none")
    );
    assert!(fixture.refused("eval checkpoints/none").contains("has no validation text"));
    fixture.write("pairs.jsonl", "{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"c\"}\n".repeat(8));
    fixture.said(&training("pairs", "--data pairs.jsonl --val pairs.jsonl --objective dpo --steps 1"));
    assert!(fixture.refused("eval checkpoints/pairs").contains("validates on pairs"));
    for (wrong, expected) in [
        ("--val 0%", "is not between 0% and 100%"),
        ("--val 100%", "is not between 0% and 100%"),
        ("--val none --early-stopping 2", "needs validation"),
        ("--eval-every 0 --early-stopping 2", "needs validation between steps, but `train.eval_every` is 0"),
        ("--eval-every weekly", "use a number of steps, or `epoch`"),
    ] {
        let err = fixture.refused(&training("wrong", &format!("--data text.txt {wrong}")));
        assert!(err.contains(expected), "{wrong}: {err}");
    }
}

#[test]
fn several_data_sets_are_mixed_and_a_killed_run_resumes_with_the_same_bits() {
    let fixture = CliFixture::new();
    fixture.write("a=0.7", "other words, in a file whose name ends like a weight; ".repeat(30));
    fixture.write("rows.jsonl", "{\"prompt\": \"one\", \"completion\": \" and two\"}\n".repeat(30));
    let mixture = "--data text.txt=3 --data a=0.7=2 --data rows.jsonl=1";
    fixture.said(&training("whole", &format!("{mixture} --steps 9 --warmup-steps 0 --save-every 100")));
    fixture.said(&training("parts", &format!("{mixture} --steps 4 --warmup-steps 0 --save-every 100")));
    fixture.said("--resume checkpoints/parts --steps 9 --plain");
    let masters = |run: &str| fs::read(fixture.newest(run).join("master.safetensors")).unwrap();
    assert!(masters("whole") == masters("parts"));
    let (_, data) = evaluated(&fixture, "whole");
    assert!(data.starts_with("text.txt=3, a=0.7=2, rows.jsonl=1: "), "{data}");
    // Another mixture is other data.
    fixture.said(&training("other", "--data text.txt --data a=0.7 --data rows.jsonl --steps 9"));
    assert!(masters("whole") != masters("other"));
    fixture.assert_refused("--resume checkpoints/parts --data text.txt --steps 12 --plain", &["data: was"]);
}

#[test]
fn sets_of_preferences_are_mixed_and_a_stopped_run_resumes_with_the_same_bits() {
    let fixture = CliFixture::new();
    let row = |i: u32| format!("{{\"prompt\": \"{i}\", \"chosen\": \"{}\", \"rejected\": \"{}\"}}\n", i + 1, i * i);
    fixture.write("small.jsonl", (1..30).map(row).collect::<String>());
    fixture.write("large.jsonl", (50..90).map(row).collect::<String>());
    let mixture = "--data small.jsonl=0.7 --data large.jsonl=0.3 --objective dpo --warmup-steps 0 --save-every 100";
    fixture.said(&training("whole", &format!("{mixture} --steps 5")));
    fixture.said(&training("parts", &format!("{mixture} --steps 2")));
    fixture.said("--resume checkpoints/parts --steps 5 --plain");
    fixture.said(&training("one", "--data small.jsonl --objective dpo --warmup-steps 0 --save-every 100 --steps 5"));
    let masters = |run: &str| fs::read(fixture.newest(run).join("master.safetensors")).unwrap();
    assert!(masters("whole") == masters("parts") && masters("whole") != masters("one"));
}

#[test]
fn a_data_set_alone_is_not_changed_by_its_weight() {
    let fixture = CliFixture::new();
    fixture.said(&training("plain", "--data text.txt --steps 3"));
    fixture.said(&training("weight", "--data text.txt=0.3 --steps 3"));
    let masters = |run: &str| fs::read(fixture.newest(run).join("master.safetensors")).unwrap();
    assert!(masters("plain") == masters("weight"));
}

#[test]
fn the_data_commands_describe_every_set() {
    let fixture = CliFixture::new();
    fixture.write("rows.jsonl", "{\"prompt\": \"one\", \"completion\": \" and two\"}\n".repeat(30));
    let data = "--model model --seq-len 32 --data text.txt=1 --data rows.jsonl=3";
    let stats = fixture.said(&format!("data stats {data}"));
    assert!(stats.contains("text.txt: 25.0 % of the tokens\n") && stats.contains("rows.jsonl: 75.0 %"), "{stats}");
    assert_eq!(stats.matches("steps per epoch").count(), 1, "{stats}");
    assert_eq!(fixture.json(&format!("data stats {data} --json"))["sets"].as_array().unwrap().len(), 2);
    let shown = fixture.said(&format!("data show {data}"));
    assert!(shown.contains("rows.jsonl: 75.0 %") && shown.contains("one[ and two"), "{shown}");
}

#[test]
fn a_mixture_that_cannot_be_is_refused() {
    let fixture = CliFixture::new();
    fixture.write("pairs.jsonl", "{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"c\"}\n".repeat(9));
    for (data, expected) in [
        ("--data text.txt=0 --data text.txt=1", "`0`, the weight of `text.txt`, is not a number above 0"),
        ("--data text.txt=-1", "`-1`, the weight of `text.txt`, is not"),
        ("--data text.txt=much --data text.txt", "`much`, the weight of `text.txt`, is not"),
        ("--data text.txt=1 --data pairs.jsonl", "`pairs.jsonl` needs a weight"),
        ("--data pairs.jsonl --data text.txt --objective dpo", "text.txt"),
        ("--data text.txt --data pairs.jsonl", "pairs.jsonl"),
    ] {
        let err = fixture.refused(&training("wrong", data));
        assert!(err.contains(expected), "{data}: {err}");
    }
}
