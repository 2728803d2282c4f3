//! Guarantee 6: untrusted text reaches no terminal, log line or page with control characters. Six payloads are sent
//! through every channel by which a name or a value is printed.

use crate::common::checkpoint::Sample;
use crate::common::cli_fixture::CliFixture;
use finetune::store::checkpoint::Run;
use finetune::telemetry::{
    Diagnostic, Event, EventLog, Finished, Overflow, Record, SampleText, Started, StepRecord, TensorRecord, VERSION,
};
use finetune::untrusted::is_unsafe_char;
use serde_json::{Value, json};
use std::fs;

/// Payloads: set the title, clear the screen, a C1 sequence, a forged line, a bidirectional override, a deletion.
const PAYLOADS: [&str; 6] = [
    "x\u{1b}]0;OWNED\u{7}",
    "x\u{1b}[2J\u{1b}[Hgone",
    "x\u{9b}2J\u{85}",
    "x\r\nerror: forged\nstep=1 forged",
    "x\u{202e}txt.exe\u{2066}\u{200f}",
    "x\u{8}\u{8}\u{7f}\u{b}\u{c}y",
];

/// A folder with the payload in every possible name and value.
struct Trap<'a> {
    fixture: &'a CliFixture,
    payload: &'a str,
}

impl Trap<'_> {
    /// A safetensors file with one tensor of this name.
    fn tensor(&self, file: &str, name: &str) {
        let header = json!({ name: { "dtype": "F32", "shape": [1], "data_offsets": [0, 4] } }).to_string();
        self.fixture.write(file, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 4]].concat());
    }

    fn set(&self) {
        let p = self.payload;
        self.fixture.write("text.txt", "some words to learn from ".repeat(40));
        self.fixture.model("model", |_| {});
        self.fixture.model(&format!("named-{p}"), |config| config["n_head"] = 5.into());
        self.fixture.model("type", |config| config["model_type"] = p.into());
        self.fixture.model("activation", |config| config["activation_function"] = p.into());
        self.fixture.model("size", |config| config["n_embd"] = p.into());
        self.fixture.model("extra", |_| {});
        self.tensor("extra/model.safetensors", p);
        self.fixture.model("index", |_| {});
        fs::remove_file(self.fixture.path("index/model.safetensors")).unwrap();
        self.fixture.write("index/model.safetensors.index.json", json!({ "weight_map": { p: p } }).to_string());
        self.fixture.model("tokenizer", |_| {});
        self.fixture.write("tokenizer/tokenizer.json", json!({ "model": { "type": p } }).to_string());
        self.fixture.write(&format!("{p}.jsonl"), json!({ p: p }).to_string());
        self.fixture.write("row.jsonl", json!({ "messages": [{ "role": p, p: p }] }).to_string());
        self.fixture.write(&format!("{p}.txt"), b"\xff");
        self.fixture.write(&format!("readable-{p}.txt"), "some words to learn from ".repeat(40));
        self.fixture.write("key.toml", format!("[train]\n{} = 1\n", json!(p)));
        self.fixture.write("value.toml", format!("device = {}\n", json!(p)));
        self.fixture.write("broken.toml", format!("a = [ # {}\n", p.replace(['\r', '\n'], " ")));
        let runs = format!("runs-{p}");
        let mut run = Run::open(self.fixture.path(&runs).join(p)).unwrap();
        let mut sample = Sample::new(1);
        sample.state.fingerprint.model = p.into();
        sample.state.fingerprint.data = p.into();
        let saved = sample.save(&mut run).unwrap();
        Sample::new(2).save(&mut run).unwrap();
        fs::write(saved.path.parent().unwrap().join("config.toml"), format!("model = {}\n", json!(p))).unwrap();
        fs::write(saved.path.parent().unwrap().join("step-000002/state.json"), p).unwrap();
        self.log();
    }

    /// A log with the payload in every text, as another program may write it.
    fn log(&self) {
        let p = self.payload.to_owned();
        let tensor = TensorRecord { name: p.clone(), ..TensorRecord::default() };
        let started = Started {
            program: p.clone(),
            run: p.clone(),
            model: p.clone(),
            data: p.clone(),
            device: p.clone(),
            policy: p.clone(),
            optimizer: p.clone(),
            schedule: p.clone(),
            config: json!({ "model": p, "train": { &p: &p } }),
            total_steps: 1,
            ..Started::default()
        };
        let overflow = Overflow { tensors: vec![tensor.clone()], ..Overflow::default() };
        let events = [
            Event::Started(Box::new(started)),
            Event::Step(Box::new(StepRecord { step: 1, tensors: vec![tensor], ..StepRecord::default() })),
            Event::Overflow(overflow),
            Event::Warning(Diagnostic { step: 1, message: p.clone() }),
            Event::Sample(SampleText { step: 1, prompt: p.clone(), text: p.clone() }),
            Event::Diverged(Diagnostic { step: 1, message: p.clone() }),
            Event::Finished(Finished { checkpoint: Some(p), ..Finished::default() }),
        ];
        self.fixture.write("log/events.jsonl", "");
        let path = self.fixture.path("log/events.jsonl");
        let mut log = EventLog::open(&path).unwrap();
        for event in events {
            log.append(&Record { v: VERSION, t: 0, s: 0.0, event }).unwrap();
        }
        // Our own writer escapes; others may not.
        let text = fs::read_to_string(&path).unwrap();
        assert!(!text.replace('\n', "").contains(is_unsafe_char));
        let raw = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap().to_string() + "\n");
        let raw: String = raw.collect();
        self.fixture.write("second/events.jsonl", &raw);
        fs::write(&path, raw).unwrap();
    }

    /// The command lines that may print it.
    fn channels(&self) -> Vec<Vec<String>> {
        let p = self.payload;
        let run = format!("runs-{p}/{p}");
        let step = |step: u64| format!("runs-{p}/{p}/step-{step:06}");
        let train = |more: &[&str]| {
            let base = ["--model", "model", "--data", "text.txt", "--seq-len", "8", "--steps", "1"];
            base.iter().chain(more).map(|word| (*word).to_owned()).collect::<Vec<_>>()
        };
        let mixture = format!("data={}", json!([format!("readable-{p}.txt"), "text.txt"]));
        let line = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        vec![
            train(&["--data", p]),
            train(&["--data", &format!("{p}.jsonl")]),
            train(&["--data", "row.jsonl"]),
            train(&["--data", &format!("{p}.txt")]),
            train(&["--data", &format!("{p}*")]),
            train(&["--data", &format!("ftp://{p}")]),
            train(&["--val", p]),
            train(&["--model", p]),
            train(&["--model", &format!("named-{p}")]),
            train(&["--model", "type"]),
            train(&["--model", "activation"]),
            train(&["--model", "size"]),
            train(&["--model", "extra"]),
            train(&["--model", "index"]),
            train(&["--model", "tokenizer"]),
            train(&["--tokenizer", p]),
            train(&["--revision", p]),
            train(&["--init", p]),
            train(&["--dtype", p]),
            train(&["--device", p]),
            train(&["--schedule", p]),
            train(&["--run", &format!("{p}/")]),
            train(&["--set", p]),
            train(&["--set", &format!("{p}=1")]),
            train(&["--set", &format!("device={p}")]),
            line(&["--config", p]),
            line(&["--config", "key.toml"]),
            line(&["--config", "value.toml"]),
            line(&["--config", "broken.toml"]),
            line(&["--resume", p]),
            line(&["--resume", &run]),
            line(&["--resume", &step(2)]),
            line(&["checkpoint", "list", &format!("runs-{p}")]),
            line(&["checkpoint", "show", &step(1)]),
            line(&["checkpoint", "verify", &run]),
            line(&["checkpoint", "diff", &step(1), &step(2)]),
            line(&["checkpoint", "prune", &run, "--dry-run", "--keep-last", "1"]),
            line(&["generate", p]),
            line(&["generate", &run, "--max-tokens", "1"]),
            line(&["eval", "model", "--data", p]),
            line(&["eval", &step(1)]),
            line(&["export", p, "out"]),
            line(&["watch", "--plain", "log"]),
            line(&["watch", "--plain", p]),
            line(&["compare", "log", "second", "--html", "page.html"]),
            line(&["compare", "log", "second", "--json"]),
            line(&["report", "log", "--output", "report.html"]),
            line(&["export-metrics", "log", "--format", "csv"]),
            line(&["runs", "--checkpoint-dir", &format!("runs-{p}")]),
            line(&["chat", p]),
            line(&["fp16-check", p]),
            line(&["lab", "memory", "--run", "log"]),
            line(&["lab", "memory", "--run", "log", "--json"]),
            line(&["lab", "memory", "--model", p]),
            line(&["lab", "ranges", "--run", "log"]),
            line(&["doctor"]),
            line(&["doctor", "--json"]),
            line(&["config", "--set", &format!("train.prompt={p}")]),
            line(&["data", "stats", "--set", &mixture]),
            line(&["data", "stats", "--set", &mixture, "--json"]),
        ]
    }
}

fn has_controls(text: &str) -> bool {
    text.contains(|c| is_unsafe_char(c) && !matches!(c, '\n' | '\t'))
}

/// Whether a text would control a terminal, or contains a forged line.
fn steers(text: &str) -> bool {
    has_controls(text)
        || text.lines().any(|line| line.starts_with("error: forged") || line.starts_with("step=1 forged"))
}

#[test]
fn promise_6_no_channel_passes_on_what_steers_a_terminal() {
    for payload in PAYLOADS {
        let fixture = CliFixture::empty();
        let trap = Trap { fixture: &fixture, payload };
        trap.set();
        // As the first character to escape appears.
        let escaped = payload.chars().find(|c| is_unsafe_char(*c)).map(|c| format!("\\u{:04x}", c as u32)).unwrap();
        let mut shown = 0;
        let channels = trap.channels();
        assert_eq!(channels.len(), 60);
        for words in channels {
            let listed: Vec<&str> = words.iter().map(String::as_str).collect();
            let output = fixture.command_of(&listed).env("HF_HOME", fixture.path(payload)).output().unwrap();
            // clap quotes the command line, which is not untrusted.
            let typed = words.iter().any(|word| word.contains(payload)) && output.status.code() == Some(2);
            let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
            shown += usize::from(out.contains(&escaped) || err.contains(&escaped));
            for (stream, text) in [("out", out), ("err", err)] {
                assert!(!text.contains("panicked"), "{words:?}:\n{text}");
                let by_clap = typed && text.contains("For more information, try");
                // `config` writes TOML, whose multi-line strings contain typed text.
                let steered = if words[0] == "config" { has_controls(&text) } else { steers(&text) };
                assert!(by_clap || !steered, "{words:?} lets it through on std{stream}:\n{text:?}");
            }
        }
        // The others show it in another form, or refuse earlier.
        assert!(shown >= 35, "only {shown} channels show {payload:?}");
        let in_pages = payload.replace(is_unsafe_char, " ");
        for page in ["page.html", "report.html"] {
            let text = fs::read_to_string(fixture.path(page)).unwrap();
            assert!(!steers(&text) && text.contains(&in_pages), "{page} lets {payload:?} through, or lacks it");
        }
    }
}
