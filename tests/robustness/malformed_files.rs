//! Malicious files: every kind of file that the program reads, changed at random from a seed, given to the real program
//! with 4 GiB of address space and 30 seconds. It reads or refuses each; it never panics, aborts, hangs, or controls
//! the terminal. `MALFORMED_FILES` sets the number of files of each kind, `MALICIOUS_FIRST` the number of the first,
//! for files that were never tried; the long form is in `docs/faults.md`.

use crate::common::launch;
use crate::common::mutations::{any_bytes, changed, changes, replaced, replacement};
use finetune::untrusted::is_unsafe_char;
use proptest::collection::vec;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Output, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The size of the part of a large file that holds its headers; the values after it have no meaning.
const HEADER: usize = 4096;
const EVAL: &str = "eval model --data text.txt --seq-len 8";
const RESUME: &str = "--resume r --steps 1 --plain";

/// The files, and what reads each. `r` is a run of one step; `model`, `model.gguf` and `adapter` are exported.
const KINDS: [(&str, &str); 30] = [
    ("settings.toml", "config --config settings.toml"),
    ("checkpoints/r/config.toml", RESUME),
    ("checkpoints/r/events.jsonl", RESUME),
    ("checkpoints/r/events.jsonl", "watch r --svg picture.svg"),
    ("checkpoints/r/events.jsonl", "report r -o page.html"),
    ("checkpoints/r/events.jsonl", "export-metrics r"),
    ("checkpoints/r/events.jsonl", "lab memory --run checkpoints/r/events.jsonl"),
    ("checkpoints/r/latest", "checkpoint list"),
    ("checkpoints/r/step-000001/manifest.json", "checkpoint verify"),
    ("checkpoints/r/step-000001/manifest.json", RESUME),
    ("checkpoints/r/step-000001/state.json", RESUME),
    ("checkpoints/r/step-000001/model.safetensors", "checkpoint verify"),
    ("model/config.json", EVAL),
    ("model/config.json", "export model out.gguf"),
    ("model/generation_config.json", "generate model --prompt a --max-tokens 1"),
    ("model/model.safetensors", EVAL),
    ("model/tokenizer.json", EVAL),
    ("model/tokenizer_config.json", "data show --model model --data chats.jsonl"),
    ("model/chat_template.jinja", "data show --model model --data chats.jsonl"),
    ("sharded/model.safetensors.index.json", "eval sharded --data text.txt --seq-len 8"),
    ("model.gguf", "eval model.gguf --data text.txt --seq-len 8"),
    ("adapter/adapter_config.json", "eval model --adapter adapter --data text.txt --seq-len 8"),
    ("adapter/adapter_model.safetensors", "eval model --adapter adapter --data text.txt --seq-len 8"),
    ("text.txt", "data stats --data text.txt"),
    ("chats.jsonl", "data stats --data chats.jsonl"),
    ("rows.json", "data stats --data rows.json"),
    ("rows.csv", "data stats --data rows.csv"),
    ("rows.tsv", "data stats --data rows.tsv"),
    ("rows.parquet", "data stats --data rows.parquet --seq-len 1"),
    ("chats.jsonl", "data show --data chats.jsonl"),
];

/// Runs the program within its limits.
fn execute(folder: &Path, words: &str) -> Output {
    launch::command("sh")
        .args(["-c", r#"ulimit -v 4194304; exec timeout 30 "$0" "$@""#, env!("CARGO_BIN_EXE_finetune")])
        .args(words.split(' '))
        .current_dir(folder)
        .stdin(Stdio::null())
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .unwrap()
}

/// One valid file of each kind.
fn valid(folder: &Path) {
    let run = |words: &str| {
        let output = execute(folder, words);
        assert!(output.status.success(), "{words}: {}", String::from_utf8_lossy(&output.stderr));
    };
    let write = |name: &str, contents: &[u8]| fs::write(folder.join(name), contents).unwrap();
    let train = "--steps 1 --batch-size 1 --seq-len 8 --data grammar --dtype fp32 --plain";
    let quiet = "--set train.sample_tokens=0 --set train.eval_batches=1 --threads 1";
    run(&format!("{train} {quiet} --run r"));
    run("export r model");
    run("export r model.gguf");
    run(&format!("{train} {quiet} --model model --lora r=1,alpha=2 --run l"));
    fs::create_dir(folder.join("adapter")).unwrap();
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        fs::copy(folder.join("checkpoints/l/step-000001").join(name), folder.join("adapter").join(name)).unwrap();
    }
    fs::create_dir(folder.join("sharded")).unwrap();
    for name in ["config.json", "tokenizer.json"] {
        fs::copy(folder.join("model").join(name), folder.join("sharded").join(name)).unwrap();
    }
    fs::copy(folder.join("model/model.safetensors"), folder.join("sharded/a.safetensors")).unwrap();
    write("settings.toml", include_bytes!("../../configs/distilgpt2-shakespeare.toml"));
    write("text.txt", "some naïve words to learn from\n".repeat(40).as_bytes());
    let chat = concat!(
        r#"{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho\n"}]}"#,
        "\n",
        r#"{"messages": [{"role": "system", "content": ""}, {"role": "assistant", "content": "naïve"}]}"#,
        "\n"
    );
    write("chats.jsonl", chat.repeat(20).as_bytes());
    write(
        "rows.json",
        br#"[{"prompt": "1+1=", "completion": "2"}, {"id": [1, {"a": null}], "prompt": "b", "completion": "c"}]"#,
    );
    write("rows.csv", b"id,prompt,completion\r\n1,\"a, \"\"b\"\"\",c\r\n2,\"two\nlines\",d\r\n");
    write("rows.tsv", b"prompt\tcompletion\na\tb\n\"c\"\t\"d\"\n");
    write("rows.parquet", include_bytes!("../golden/rows.parquet"));
    write("model/chat_template.jinja", include_bytes!("../../src/data/templates/qwen.jinja"));
    write(
        "model/tokenizer_config.json",
        br#"{"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}", "eos_token": "a"}"#,
    );
    write("model/generation_config.json", br#"{"eos_token_id": [0, 1], "temperature": 1.0}"#);
    let index = index(&folder.join("model/model.safetensors"));
    write("sharded/model.safetensors.index.json", index.as_bytes());
}

/// The index of a model whose tensors are all in one shard.
fn index(model: &Path) -> String {
    let bytes = fs::read(model).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Map<String, Value> = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let names = header.keys().filter(|key| *key != "__metadata__");
    let map: serde_json::Map<String, Value> = names.map(|name| (name.clone(), "a.safetensors".into())).collect();
    serde_json::json!({ "weight_map": map }).to_string()
}

/// `good`, changed in one of four ways.
fn malicious(good: &[u8], runner: &mut TestRunner) -> Vec<u8> {
    let (header, rest) = good.split_at(good.len().min(HEADER));
    let json = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).ok();
    let with_other_values = |value: Value, runner: &mut TestRunner| {
        let new = vec(replacement(), 1..4).new_tree(runner).unwrap().current();
        replaced(value, &new).to_string().into_bytes()
    };
    match (0..8_u8).new_tree(runner).unwrap().current() {
        0 => any_bytes().new_tree(runner).unwrap().current(),
        1 => good[..(0..good.len().max(1)).new_tree(runner).unwrap().current()].to_vec(),
        way => match json(good) {
            Some(value) if way > 3 => with_other_values(value, runner),
            _ => [changed(header, &changes().new_tree(runner).unwrap().current()), rest.to_vec()].concat(),
        },
    }
}

/// A copy of a folder that shares its files, which nothing overwrites in place.
fn linked(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let copy = to.join(entry.file_name());
        match entry.path() {
            path if path.is_dir() => linked(&path, &copy),
            // These are appended to or locked.
            path if path.ends_with("events.jsonl") || path.ends_with(".lock") => drop(fs::copy(path, copy).unwrap()),
            path => fs::hard_link(path, copy).unwrap(),
        }
    }
}

#[test]
fn malicious_files_of_every_kind_are_read_or_refused() {
    let number = |name: &str, otherwise: u64| std::env::var(name).map_or(otherwise, |text| text.parse().unwrap());
    let (each, first) = (number("MALFORMED_FILES", 2), number("MALICIOUS_FIRST", 0));
    let scratch = tempfile::tempdir().unwrap();
    let good = scratch.path().join("good");
    fs::create_dir(&good).unwrap();
    valid(&good);
    for (name, words) in KINDS {
        let trial = scratch.path().join("unchanged");
        linked(&good, &trial);
        let output = execute(&trial, words);
        assert!(output.status.success(), "{words} refuses a good {name}: {}", String::from_utf8_lossy(&output.stderr));
        fs::remove_dir_all(trial).unwrap();
    }
    let attack = |kind: usize, number: u64| -> Result<bool, String> {
        let (name, words) = KINDS[kind];
        let mut seed = [0; 32];
        seed[..8].copy_from_slice(&(kind as u64).to_le_bytes());
        seed[8..16].copy_from_slice(&number.to_le_bytes());
        let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &seed);
        let bytes =
            malicious(&fs::read(good.join(name)).unwrap(), &mut TestRunner::new_with_rng(Config::default(), rng));
        let trial = scratch.path().join(format!("{kind}-{number}"));
        linked(&good, &trial);
        fs::remove_file(trial.join(name)).unwrap();
        fs::write(trial.join(name), &bytes).unwrap();
        let output = execute(&trial, words);
        fs::remove_dir_all(trial).unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        let messages = said.lines().filter(|line| line.starts_with("error: ")).count();
        // Generated text goes into a pipe unchanged.
        let out = if words.starts_with("generate") { &[] } else { output.stdout.as_slice() };
        let steers = |text: &[u8]| {
            std::str::from_utf8(text)
                .map_or(true, |text| text.contains(|c| is_unsafe_char(c) && !matches!(c, '\n' | '\t')))
        };
        let problem = match () {
            () if !matches!(output.status.code(), Some(0..=3)) => "does not end by itself",
            () if said.contains("panicked") => "panics",
            () if steers(out) || steers(&output.stderr) => "prints control characters",
            // It lists the damaged parts.
            () if words == "checkpoint verify" && !output.stdout.is_empty() => return Ok(!output.status.success()),
            () if messages != usize::from(!output.status.success()) => "does not print exactly one error",
            () => return Ok(messages > 0),
        };
        let status = output.status;
        Err(format!("`{words}` with {name} number {number}, {} bytes, {problem} ({status}):\n{said}", bytes.len()))
    };
    let kinds = AtomicUsize::new(0);
    let outcomes = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(kind) = Some(kinds.fetch_add(1, Ordering::Relaxed)).filter(|kind| *kind < KINDS.len()) {
                    for number in first..first + each {
                        let outcome = attack(kind, number);
                        outcomes.lock().unwrap().push(outcome);
                    }
                }
            });
        }
    });
    let outcomes = outcomes.into_inner().unwrap();
    let refused = outcomes.iter().filter(|outcome| matches!(outcome, Ok(true))).count();
    let failures: Vec<String> = outcomes.iter().filter_map(|outcome| outcome.clone().err()).collect();
    println!("{} files, {refused} of them refused, {} failures", outcomes.len(), failures.len());
    assert!(failures.is_empty() && refused > 0, "{}", failures.join("\n"));
}
