//! `finetune compare` on synthetic logs, and on a small version of the experiment in `configs/experiments`.

use crate::common::cli_fixture::CliFixture;
use crate::common::markup::{assert_stands_alone, assert_well_formed};
use finetune::telemetry::{
    Event, EventLog, FinishReason, Finished, FlushedTensor, Fp32Probe, GradStats, Overflow, Record, ScaleCause,
    ScaleUpdate, Started, StepRecord, StepStatus, StepTime, VERSION, Validation,
};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// A folder of runs.
struct Runs(CliFixture);

/// An invented run.
struct Invented {
    name: &'static str,
    interval: u32,
    seed: u64,
    /// Added to every loss.
    worse: f64,
    /// The validation loss at the end.
    validation: f64,
    retries: bool,
    /// Steps that each overflow skips in a row.
    streak: u64,
}

const RUN: Invented =
    Invented { name: "one", interval: 20, seed: 1, worse: 0.0, validation: 0.6, retries: false, streak: 1 };

impl Runs {
    fn new() -> Self {
        Self(CliFixture::empty())
    }

    fn log(&self, name: &str) -> PathBuf {
        self.0.path(name).join("events.jsonl")
    }

    /// Sixty steps: the loss falls, the scale grows every `interval` clean steps and overflows above 2^17.
    fn invent(&self, run: &Invented) {
        let path = self.log(run.name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let mut log = EventLog::open(&path).unwrap();
        let mut second = 0.0;
        let mut append = |event| {
            second += 0.5;
            log.append(&Record { v: VERSION, t: 0, s: second, event }).unwrap();
        };
        append(Event::Started(Box::new(Started {
            run: run.name.into(),
            model: "tiny".into(),
            // More than a step's loss tokens.
            tokens_per_step: 160,
            total_steps: 60,
            seed: run.seed,
            config: json!({
                "model": "tiny",
                "seed": run.seed,
                "scaler": {
                    "growth_interval": run.interval,
                    "on_overflow": if run.retries { "retry" } else { "skip" },
                },
                "checkpoint": { "run": run.name },
            }),
            ..Started::default()
        })));
        let (mut scale, mut clean, mut updates, mut left) = (65536.0f32, 0, 0, 0);
        for step in 1..=60 {
            left = if scale > 131_072.0 && left == 0 { run.streak } else { left };
            let overflow = left > 0;
            left = left.saturating_sub(1);
            let from = scale;
            clean = if overflow { 0 } else { clean + 1 };
            updates += u64::from(!overflow);
            let cause = match () {
                () if overflow => ScaleCause::BackedOff,
                () if clean % run.interval == 0 => ScaleCause::Grew,
                () => ScaleCause::Held,
            };
            scale *= match cause {
                ScaleCause::BackedOff => 0.5,
                ScaleCause::Grew => 2.0,
                _ => 1.0,
            };
            let moved = ScaleUpdate { cause, from, to: scale };
            append(Event::Step(Box::new(StepRecord {
                step,
                updates,
                loss: (5.0 / step as f64 + 0.5 + run.worse) as f32,
                loss_scale: from,
                outcome: if overflow { StepStatus::Skipped } else { StepStatus::Applied },
                tokens: step * 128,
                scale: moved,
                time: StepTime { step_ms: 64.0, ..StepTime::default() },
                grads: GradStats { count: 1000, subnormal: 5, ..GradStats::default() },
                rss_bytes: Some(64 << 20),
                ..StepRecord::default()
            })));
            if overflow {
                append(Event::Overflow(Overflow { step, scale: moved, ..Overflow::default() }));
            }
            if step % 30 == 0 {
                let loss = run.validation + if step == 30 { 0.1 } else { 0.0 };
                append(Event::Eval(Validation { step, loss, perplexity: loss.exp(), tokens: 640, objective: None }));
            }
        }
        let tensors = vec![FlushedTensor { name: "wte.weight".into(), count: 4000, nonzero: 2000, flushed: 1 }];
        append(Event::Fp32Probe(Box::new(Fp32Probe { step: 60, tensors, ..Fp32Probe::default() })));
        append(Event::Finished(Finished { reason: FinishReason::Done, step: 60, ..Finished::default() }));
    }

    fn text(&self, line: &str) -> String {
        self.0.said(&format!("compare --checkpoint-dir . {line}"))
    }

    fn json(&self, line: &str) -> Value {
        self.0.json(&format!("compare --checkpoint-dir . {line} --json"))
    }

    /// The program's error message.
    fn complaint(&self, line: &str) -> String {
        self.0.refused(&format!("compare --checkpoint-dir . {line}"))
    }
}

/// Two groups of three seeds whose perplexities are e^0.6 and e^`validation`, give or take.
fn two_groups(validation: f64) -> Runs {
    let runs = Runs::new();
    for (seed, name) in [(1, "a-1"), (2, "a-2"), (3, "a-3")] {
        runs.invent(&Invented { name, seed, validation: 0.6 + seed as f64 / 1e3, retries: true, ..RUN });
    }
    for (seed, name) in [(1, "b-1"), (2, "b-2"), (3, "b-3")] {
        let validation = validation - seed as f64 / 2e3;
        runs.invent(&Invented { name, interval: 40, seed, validation, retries: true, ..RUN });
    }
    runs
}

const SIX: &str = "a-1 a-2 a-3 b-1 b-2 b-3";

#[test]
fn two_runs_side_by_side() {
    let runs = Runs::new();
    runs.invent(&RUN);
    runs.invent(&Invented { name: "other", interval: 40, worse: 0.25, validation: 0.7, ..RUN });
    insta::assert_snapshot!("two_runs", runs.text("one other --width 80"));
    let ascii = runs.text("one other --ascii --width 80");
    assert!(ascii.is_ascii() && ascii.lines().all(|line| line.len() <= 80), "{ascii}");
}

/// A policy's loss may be negative.
#[test]
fn losses_that_are_not_positive_are_drawn() {
    let runs = Runs::new();
    runs.invent(&Invented { worse: -9.0, ..RUN });
    runs.invent(&Invented { name: "other", worse: -9.0, ..RUN });
    let text = runs.text("one other --width 80");
    assert!(text.contains("-5.96│") && text.contains("2^17│"), "{text}");
}

/// Losses over different data are shown and not subtracted.
#[test]
fn losses_over_different_data_are_not_subtracted() {
    let runs = Runs::new();
    runs.invent(&RUN);
    runs.invent(&Invented { name: "other", validation: 0.7, ..RUN });
    let log = std::fs::read_to_string(runs.log("other")).unwrap();
    std::fs::write(runs.log("other"), log.replacen("\"config\":{", "\"config\":{\"val\":\"other.txt\",", 1)).unwrap();
    let text = runs.text("one other --width 120");
    assert!(text.contains("over different data and not comparable: val is – and other.txt"), "{text}");
    let json = runs.json("one other");
    let differences = &json["second_minus_first"];
    assert!(differences["perplexity"].is_null() && differences["loss"].is_null(), "{differences}");
    assert_eq!(differences["skipped"]["mean"], 0.0);
    assert!(runs.complaint("one other --margin 2").contains("over different data are not comparable: `val` differs"));
}

#[test]
fn seeds_of_two_configurations() {
    let runs = two_groups(0.61);
    insta::assert_snapshot!("two_groups", runs.text(&format!("{SIX} --margin 2.0 --width 100")));
}

/// They have the same numbers, but separate speeds.
#[test]
fn runs_with_one_seed_are_one_sample() {
    let runs = Runs::new();
    for (name, interval) in [("a", 20), ("b", 20), ("c", 40), ("d", 40)] {
        runs.invent(&Invented { name, interval, ..RUN });
    }
    let json = runs.json("a b c d --margin 0.001");
    let differences = &json["second_minus_first"];
    assert!(differences["perplexity"]["half"].is_null() && differences["skipped"]["half"].is_null(), "{differences}");
    assert!(differences["tokens_per_s"]["half"].is_number(), "{differences}");
    assert_eq!(json["margin"]["verdict"], "undecided");
}

#[test]
fn runs_on_other_data_are_another_configuration() {
    let runs = Runs::new();
    for name in ["one", "two"] {
        runs.invent(&Invented { name, ..RUN });
    }
    let log = std::fs::read_to_string(runs.log("two")).unwrap();
    std::fs::write(runs.log("two"), log.replacen("\"data\":\"\"", "\"data\":\"900 tokens\"", 1)).unwrap();
    let json = runs.json("one two");
    assert_eq!(json["differences"], json!([{ "key": "run.data", "values": ["", "900 tokens"] }]));
    assert!(json["second_minus_first"]["perplexity"].is_null() && json["groups"][1]["label"] == "B", "{json}");
}

#[test]
fn settings_that_a_resume_changes_have_their_step() {
    let runs = Runs::new();
    runs.invent(&RUN);
    runs.invent(&Invented { name: "two", ..RUN });
    let log = std::fs::read_to_string(runs.log("two")).unwrap();
    let mut started: Value = serde_json::from_str(log.lines().next().unwrap()).unwrap();
    started["resumed_from"] = json!(60);
    started["config"]["epochs"] = json!(2);
    started["config"]["scaler"] = json!({ "growth_interval": 40 });
    std::fs::write(runs.log("two"), format!("{log}{started}\n")).unwrap();
    let expected = json!([
        { "key": "epochs", "values": ["–", "–; from step 60 2"] },
        { "key": "scaler.growth_interval", "values": ["20", "20; from step 60 40"] },
        { "key": "scaler.on_overflow", "values": ["skip", "skip; from step 60 –"] },
    ]);
    assert_eq!(runs.json("one two")["differences"], expected);
}

#[test]
fn many_runs_fit_a_narrow_page() {
    let runs = Runs::new();
    for (i, name) in ["r0", "r1", "r2", "r3", "r4", "r5", "r6"].into_iter().enumerate() {
        runs.invent(&Invented { name, interval: 10 + i as u32, ..RUN });
    }
    let text = runs.text("r0 r1 r2 r3 r4 r5 r6 --width 60");
    assert!(text.lines().all(|line| line.chars().count() <= 60), "{text}");
    assert!(text.contains("r6") && text.matches("tokens lost").count() > 1, "{text}");
}

/// The figures of a run, counted by hand: the scale grows at steps 20 and 40, overflows at 41, grows at 61 at the
/// earliest.
#[test]
fn figures_are_counted() {
    let runs = Runs::new();
    runs.invent(&RUN);
    runs.invent(&Invented { name: "retry", retries: true, ..RUN });
    let json = runs.json("one retry");
    let figures = &json["groups"][0]["runs"][0]["figures"];
    for (key, expected) in [
        ("steps", 60.0),
        ("updates", 59.0),
        ("overflows", 1.0),
        ("skipped", 1.0),
        ("repeated", 0.0),
        ("tokens_lost", 128.0),
        ("growths", 2.0),
        ("scale_start_log2", 16.0),
        ("scale_end_log2", 17.0),
        ("scale_min_log2", 16.0),
        ("scale_max_log2", 18.0),
        ("validation_loss", 0.6),
        ("best_validation_loss", 0.6),
        ("flushed", 1.0 / 2000.0),
        ("subnormal", 5.0 / 1000.0),
        ("tokens_per_s", 2000.0),
        ("peak_rss_bytes", f64::from(64 << 20)),
    ] {
        let value = figures[key].as_f64().unwrap_or(f64::NAN);
        assert!((value - expected).abs() < 1e-9, "{key}: {value}, expected {expected}");
    }
    let mean = (51..=60).map(|step| f64::from(5.0 / step as f32 + 0.5)).sum::<f64>() / 10.0;
    assert!((figures["loss"].as_f64().unwrap() - mean).abs() < 1e-6);
    assert_eq!(figures["best_loss"], figures["loss"]);
    let retried = &json["groups"][1]["runs"][0]["figures"];
    assert_eq!((&retried["repeated"], &retried["tokens_lost"]), (&json!(1.0), &json!(0.0)));
    assert_eq!(json["differences"], json!([{ "key": "scaler.on_overflow", "values": ["skip", "retry"] }]));
}

/// Seeds make groups; names and folders do not distinguish them.
#[test]
fn the_verdict_needs_the_whole_interval() {
    let verdict = |validation, margin: &str| {
        let runs = two_groups(validation);
        let json = runs.json(&format!("{SIX} --margin {margin}"));
        assert_eq!(json["groups"][0]["runs"].as_array().unwrap().len(), 3);
        let estimate = &json["second_minus_first"]["perplexity"];
        (estimate["mean"].as_f64().unwrap(), json["margin"]["verdict"].as_str().unwrap().to_owned())
    };
    let (difference, close) = verdict(0.61, "2.0");
    assert!(difference > 0.0 && difference < 0.02, "{difference}");
    assert_eq!(close, "not exceeded");
    assert_eq!(verdict(1.61, "2.0").1, "exceeded");
    let (difference, _) = verdict(0.7, "2.0");
    assert_eq!(verdict(0.7, &difference.to_string()).1, "undecided");
    let text = two_groups(0.61).text("a-1 b-1 --margin 2.0");
    assert!(text.contains("each group needs") && text.contains("undecided"), "{text}");
}

/// The second margin, in the experiment's words: the switch adds more than three consecutive skips, or it does not.
#[test]
fn more_than_three_consecutive_skips_falsify_the_claim() {
    let verdict = |streaks: [u64; 3]| {
        let runs = Runs::new();
        let group = |names: [&'static str; 3], interval, streaks: [u64; 3]| {
            for ((seed, name), streak) in (1..).zip(names).zip(streaks) {
                runs.invent(&Invented { name, interval, seed, streak, ..RUN });
            }
        };
        group(["a-1", "a-2", "a-3"], 20, [1, 1, 2]);
        group(["b-1", "b-2", "b-3"], 19, streaks);
        let line = format!("{SIX} --skip-margin 3");
        let json = runs.json(&line);
        let text = runs.text(&format!("{line} --width 200 --html page.html"));
        let said = text.lines().find(|line| line.starts_with("skipped in a row:")).unwrap().to_owned();
        assert!(std::fs::read_to_string(runs.0.path("page.html")).unwrap().contains(&said));
        (json["skip_margin"]["verdict"].as_str().unwrap().to_owned(), said)
    };
    let (found, said) = verdict([6, 7, 7]);
    assert_eq!(found, "exceeded");
    assert_eq!(said, "skipped in a row: +5.3 on average; `B adds at most 3 consecutive skips`: falsified");
    let (found, said) = verdict([2, 2, 3]);
    assert!(found == "not exceeded" && said.ends_with("`B adds at most 3 consecutive skips`: not falsified"), "{said}");
    let (found, said) = verdict([4, 4, 6]);
    assert!(found == "undecided" && said.ends_with("undecided; run more seeds"), "{said}");
    let runs = two_groups(0.6);
    runs.invent(&Invented { name: "c", interval: 50, ..RUN });
    assert!(runs.complaint("a-1 b-1 c --skip-margin 3").contains("--skip-margin: requires two"));
}

#[test]
fn a_diverged_run_is_compared() {
    let runs = Runs::new();
    runs.invent(&Invented { validation: f64::NAN, ..RUN });
    runs.invent(&Invented { name: "other", interval: 40, worse: f64::NAN, ..RUN });
    let text = runs.text("one other --margin 2.0");
    let row = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
    assert!(row("perplexity ").contains("NaN") && row("loss, last 10 steps").contains("NaN"), "{text}");
    assert!(text.contains("undecided"), "{text}");
    let json = runs.json("one other");
    assert_eq!(json["groups"][0]["runs"][0]["figures"]["perplexity"], "NaN");
}

#[test]
fn a_truncated_log_is_compared_as_far_as_it_goes() {
    let runs = Runs::new();
    runs.invent(&RUN);
    runs.invent(&Invented { name: "cut", interval: 40, ..RUN });
    let whole = std::fs::read_to_string(runs.log("cut")).unwrap();
    let lines: Vec<&str> = whole.lines().collect();
    // A damaged line in the middle, and a torn last one.
    let kept = [lines[..10].join("\n"), "{\"v\":1,\"t\"".into(), lines[11..26].join("\n"), lines[26][..40].into()];
    std::fs::write(runs.log("cut"), kept.join("\n")).unwrap();
    let text = runs.text("one cut");
    assert!(text.contains("log ends at step 25 of 60, 1 line unreadable"), "{text}");
    let json = runs.json("one cut");
    assert_eq!(json["groups"][1]["runs"][0]["finished"], Value::Null);
    assert_eq!(json["groups"][1]["runs"][0]["unreadable_lines"], 1);
    assert_eq!(json["groups"][0]["runs"][0]["finished"], "done");
}

#[test]
fn invalid_input_is_one_clear_error() {
    let runs = Runs::new();
    runs.invent(&RUN);
    runs.invent(&Invented { name: "same", seed: 2, ..RUN });
    std::fs::create_dir(runs.0.path("empty")).unwrap();
    std::fs::write(runs.0.path("text.txt"), "some words\n").unwrap();
    std::fs::write(runs.0.path("line.txt"), "no whole line").unwrap();
    let begun = std::fs::read_to_string(runs.log("one")).unwrap();
    std::fs::write(runs.0.path("begun.jsonl"), begun.lines().next().unwrap().to_owned() + "\n").unwrap();
    for (line, part) in [
        ("one", "a comparison needs at least two runs"),
        ("one nowhere", "`nowhere`: is neither an events file"),
        ("one empty", "`empty`: is neither an events file"),
        ("one text.txt", "text.txt: this is not a run's log"),
        ("one line.txt", "line.txt: this is not a run's log"),
        ("one begun.jsonl", "begun.jsonl: the log has no step yet"),
        ("one one/events.jsonl", "is named twice"),
        ("one same --margin 2.0", "--margin: requires two configurations, but these runs have 1"),
        ("one same --margin 0", "must be above 0"),
        ("one same --html nowhere/page.html", "cannot write `nowhere/page.html`"),
    ] {
        let complaint = runs.complaint(line);
        assert!(complaint.contains(part), "{line}: {complaint}");
    }
}

/// Well-formed, self-contained, and safe for any run name.
#[test]
fn the_html_page_stands_alone() {
    let runs = two_groups(0.61);
    runs.invent(&Invented { name: "<script>alert('x')", interval: 3, ..RUN });
    runs.text("a-1 a-2 b-1 <script>alert('x') --html page.html");
    let html = std::fs::read_to_string(runs.0.path("page.html")).unwrap();
    assert_well_formed(&html);
    assert_stands_alone(&html);
    assert_eq!(html.matches("<svg role=\"img\"").count(), 3);
    assert_eq!(html.matches("<title id=").count(), 3);
    assert_eq!(html.matches("<desc id=").count(), 3);
    assert!(html.contains("prefers-color-scheme: dark") && html.contains("&lt;script&gt;"));
    assert!(html.contains("class=\"mark\""), "no overflow is marked");
    assert!(!html.contains("NaN") && !html.contains("inf\""), "a coordinate is not a number");
}

/// The experiment that is ready to run, in small: both configurations, two seeds, and the verdict.
#[test]
fn the_growth_interval_experiment_runs_from_beginning_to_end() {
    let runs = Runs::new();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/experiments/growth-interval");
    let mut named = Vec::new();
    for (group, interval) in [("standard", "4"), ("doubled", "8")] {
        for seed in ["1", "2"] {
            let name = format!("growth-{group}-{seed}");
            let config = folder.join(format!("{group}.toml")).display().to_string();
            runs.0.said(&format!(
                "--config {config} --seed {seed} --run {name} --plain --checkpoint-dir . --steps 24 --batch-size 2 --seq-len 16 \
                 --growth-interval {interval} --set train.eval_batches=4 --set telemetry.probe_every=12"
            ));
            named.push(name);
        }
    }
    let json = runs.json(&format!("{} --margin 2.0 --html page.html", named.join(" ")));
    assert_eq!(json["differences"], json!([{ "key": "scaler.growth_interval", "values": ["4", "8"] }]));
    let of_group = |group: usize, key: &str| json["groups"][group]["means"][key]["mean"].as_f64().unwrap();
    assert!(of_group(0, "growths") > of_group(1, "growths"), "the interval has no effect");
    assert!(of_group(0, "flushed") >= 0.0 && of_group(0, "perplexity") > 1.0);
    assert!(json["second_minus_first"]["perplexity"]["half"].as_f64().unwrap() > 0.0);
    assert!(json["margin"]["verdict"].is_string());
    assert_well_formed(&std::fs::read_to_string(runs.0.path("page.html")).unwrap());
}

/// The table in the documentation matches the results of the growth-interval runs.
#[test]
fn the_documented_figures_of_the_growth_interval_are_the_results() {
    let results: Value =
        serde_json::from_str(include_str!("../../configs/experiments/growth-interval/results.json")).unwrap();
    let documentation = include_str!("../../docs/numerics.md");
    let rows = [
        ("repeated steps", "repeated", 1),
        ("updates", "updates", 1),
        ("loss, last 10 steps", "loss", 4),
        ("perplexity", "perplexity", 3),
    ];
    for (title, key, digits) in rows {
        let figures = |group: &str| {
            let figure = |part: &str| results[group][key][part].as_f64().unwrap();
            (figure("mean"), figure("half"))
        };
        let [(a, a_half), (b, b_half), (difference, half)] = ["standard", "doubled", "difference"].map(figures);
        assert!((b - a - difference).abs() < 1e-9, "{key}: {b} less {a} is not {difference}");
        let row = format!(
            "| {title} | {a:.digits$} ± {a_half:.digits$} | {b:.digits$} ± {b_half:.digits$} | {difference:+.digits$} ± {half:.digits$} |"
        );
        assert!(documentation.contains(&row), "the documentation lacks: {row}");
    }
    assert_eq!(results["verdict"], "not exceeded");
    assert!(documentation.contains("A difference of 2.0 in perplexity is not exceeded"));
}
