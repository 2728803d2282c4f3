//! Invalid input: one clear message, exit code 2, and nothing written.
//!
//! Each test runs the program in a folder with broken files and stores the command lines and messages in a snapshot.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use crate::common::cli_fixture::CliFixture;
use serde_json::{Value, json};

/// Messages of a slow preparation.
const PHASES: [&str; 8] =
    ["drawing", "reading", "tokenizing", "preparing", "verifying", "computing", "measuring", "exporting"];

/// A working folder with broken files, a model and a text, and the messages so far.
struct Refusals {
    fixture: CliFixture,
    said: String,
}

impl Refusals {
    fn new() -> Self {
        let fixture = CliFixture::new();
        fixture.write("text.txt", "some words to learn from ".repeat(40));
        fixture.write("short.txt", "abc");
        fixture.write("empty.txt", "");
        fixture.write("blank.txt", " \n\t\n");
        fixture.write("latin1.txt", b"one\ntwo caf\xE9\n");
        fixture.write("not-json.jsonl", "{\"text\": \"fine\"}\nnot json\n");
        fixture.write("no-text.jsonl", "{\"title\": \"no text here\"}\n");
        fixture.write("no.parquet", "not parquet");
        Self { fixture, said: String::new() }
    }

    /// A run of one step in `checkpoints/NAME`.
    fn run(&self, name: &str) {
        self.fixture.said(&format!(
            "--model model --data text.txt --run {name} --steps 1 --seq-len 8 --batch-size 2 --set train.sample_tokens=0"
        ));
    }

    /// Every file with its contents, except token caches, which depend only on the text, and lock files, which contain the last
    /// process's id.
    fn tree(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        fn walk(folder: &Path, found: &mut BTreeMap<PathBuf, Vec<u8>>) {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    found.insert(path.clone(), Vec::new());
                    walk(&path, found);
                } else {
                    found.insert(path.clone(), fs::read(&path).unwrap());
                }
            }
        }
        let mut found = BTreeMap::new();
        walk(self.fixture.folder(), &mut found);
        found.retain(|path, _| !path.starts_with(self.fixture.path("data")) && !path.ends_with(".lock"));
        found
    }

    /// Runs a command line that must fail, and records its message.
    fn refuse(&mut self, line: &str) {
        let before = self.tree();
        let (code, said, complaint) = self.fixture.output(line);
        // On a slow machine, slow phases before the error have been reported.
        let is_phase = |line: &&str| PHASES.iter().any(|phase| line.starts_with(phase));
        let complaint: String = complaint.lines().skip_while(is_phase).map(|line| line.to_owned() + "\n").collect();
        assert_eq!(code, Some(2), "finetune {line}\n{said}{complaint}");
        assert!(said.is_empty(), "finetune {line} wrote to standard output: {said}");
        assert_eq!(
            complaint.lines().filter(|line| line.starts_with("error: ")).count(),
            1,
            "finetune {line}: one message\n{complaint}"
        );
        assert!(complaint.starts_with("error: "), "finetune {line}\n{complaint}");
        assert!(!complaint.contains("panicked"), "finetune {line}\n{complaint}");
        let after = self.tree();
        let changed: Vec<_> = after.iter().filter(|(path, bytes)| before.get(*path) != Some(bytes)).collect();
        assert!(changed.is_empty() && before.len() == after.len(), "finetune {line} changed the folder: {changed:?}");
        let folder = self.fixture.folder().display().to_string();
        writeln!(self.said, "$ finetune {line}\n{}\n", complaint.trim_end().replace(&folder, "[FOLDER]")).unwrap();
    }

    fn refuse_all(&mut self, lines: &[&str]) {
        for line in lines {
            self.refuse(line);
        }
    }
}

#[test]
fn invalid_flags() {
    let mut refusals = Refusals::new();
    refusals.refuse_all(&[
        "--no-such-flag",
        "--bach-size 4",
        "no-such-command",
        "--batch-size many",
        "--batch-size 0",
        "--batch-size=-3",
        "--seq-len 0",
        "--seq-len 1e3",
        "--grad-accum 0",
        "--epochs=-1",
        "--epochs forever",
        "--epochs nan",
        "--steps=-5",
        "--lr=-0.1",
        "--lr fast",
        "--lr inf",
        "--weight-decay=-1",
        "--max-grad-norm=-1",
        "--dtype fp8",
        "--dtype p=f32,c=f16",
        "--schedule sometimes",
        "--warmup-steps=-1",
        "--init-scale 0",
        "--init-scale=-2",
        "--growth-interval 0",
        "--seed=-1",
        "--threads 0",
        "--threads all",
        "--threads 9999",
        "--threads 99999999",
        "--batch-size 9999999999",
        "--device tpu",
        "--device cuda",
        "--log-every 0",
        "--save-every=-1",
        "--run ../elsewhere",
        "--run ''",
        "--init sometimes",
        "--plain --progress",
    ]);
    insta::assert_snapshot!("flags", refusals.said);
}

#[test]
fn invalid_configurations() {
    let mut refusals = Refusals::new();
    let fixture = &refusals.fixture;
    fixture.write("unknown-key.toml", "[train]\nseqlen = 8\n");
    fixture.write("unknown-section.toml", "[trainer]\nsteps = 8\n");
    fixture.write("wrong-type.toml", "[train]\nsteps = \"ten\"\n");
    fixture.write("not.toml", "steps: 8\n");
    fixture.write("long.toml", "# ".repeat(600_000));
    fixture.write("latin1.toml", b"model = \"caf\xE9\"\n");
    refusals.refuse_all(&[
        "--config missing.toml",
        "--config model",
        "--config not.toml",
        "--config long.toml",
        "--config latin1.toml",
        "--config unknown-key.toml",
        "--config unknown-section.toml",
        "--config wrong-type.toml",
        "--set steps",
        "--set =4",
        "--set train.step=4",
        "--set train=4",
        "--set train.steps=many",
        "--set train.steps=[1,2]",
        "--set scaler.backoff_factor=2",
        "--set scaler.growth_factor=0.5",
        "--set optimizer.betas=[0.9]",
        "--set optimizer.betas=[0.9,1.0]",
        "--set optimizer.eps=-1",
        "--set dropout.residual=1.5",
        "--set checkpoint.keep_last=0",
        "--set checkpoint.keep_weights=0",
        "--set checkpoint.weights_every=often",
        "--set telemetry.tensors_every=0",
        "--set schedule.warmup_ratio=2",
        "config --set scaler.on_overflow=panic",
        "config --set scaler.mode=clever",
    ]);
    insta::assert_snapshot!("configuration", refusals.said);
}

#[test]
fn a_model_that_is_none() {
    let mut refusals = Refusals::new();
    let fixture = &refusals.fixture;
    fixture.write("no-config/model.safetensors", "");
    fixture.write("bad-config/config.json", "{\"model_type\": ");
    fixture.model("mamba", |config| config["model_type"] = json!("mamba"));
    fixture.model("odd-heads", |config| config["n_head"] = json!(5));
    fixture.model("wider", |config| config["n_embd"] = json!(64));
    fixture.model("deeper", |config| config["n_layer"] = json!(4));
    fixture.model("shallower", |config| config["n_layer"] = json!(2));
    fixture.model("deepest", |config| config["n_layer"] = json!(1 << 12));
    fixture.model("relu", |config| config["activation_function"] = json!("relu"));
    fixture.model("no-tokenizer", |_| {});
    fs::remove_file(fixture.path("no-tokenizer/tokenizer.json")).unwrap();
    fixture.model("bad-tokenizer", |_| {});
    fixture.write("bad-tokenizer/tokenizer.json", "{}");
    fixture.model("truncated", |_| {});
    let weights = fs::read(fixture.path("model/model.safetensors")).unwrap();
    fixture.write("truncated/model.safetensors", &weights[..weights.len() / 2]);
    fixture.model("garbage", |_| {});
    fixture.write("garbage/model.safetensors", "this is no model");
    fixture.model("no-weights", |_| {});
    fs::remove_file(fixture.path("no-weights/model.safetensors")).unwrap();
    fixture.model("pickled", |_| {});
    fs::rename(fixture.path("pickled/model.safetensors"), fixture.path("pickled/pytorch_model.bin")).unwrap();
    // A tokenizer of 300 words does not fit a model of 257 rows.
    let vocab: serde_json::Map<String, Value> = (0..300).map(|id| (format!("w{id}"), id.into())).collect();
    let model = json!({"type": "WordLevel", "vocab": vocab, "unk_token": "w0"});
    let large = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": null, "model": model});
    fixture.write("large.json", large.to_string());
    refusals.refuse_all(&[
        "--model no-config",
        "--model bad-config",
        "--model mamba",
        "--model odd-heads",
        "--model wider",
        "--model deeper",
        "--model shallower",
        "--model deepest",
        "--model relu",
        "--model no-tokenizer",
        "--model bad-tokenizer",
        "--model truncated",
        "--model garbage",
        "--model no-weights",
        "--model pickled",
        "--model text.txt",
        "--model model/missing",
        "--model a/b/c",
        "--model owner/name",
        "--model model --revision main",
        "--model such-a-name --init random",
        "--model gpt2 --init random",
        "--model model --tokenizer missing.json",
        "--model model --tokenizer text.txt",
        "--model model --tokenizer large.json",
        "--model model --data text.txt --seq-len 41",
        "--seq-len 129",
    ]);
    insta::assert_snapshot!("models", refusals.said);
}

#[test]
fn invalid_texts() {
    let mut refusals = Refusals::new();
    let fixture = &refusals.fixture;
    fs::create_dir(fixture.path("nothing")).unwrap();
    fixture.write("middling.txt", "a tenth of this is too short ".repeat(10));
    refusals.refuse_all(&[
        "--data missing.txt",
        "--data ''",
        "--data empty.txt",
        "--data blank.txt",
        "--data latin1.txt",
        "--data short.txt",
        "--data not-json.jsonl",
        "--data no-text.jsonl",
        "--data no.parquet",
        "--data nothing",
        "--data *.md",
        "--data ftp://host/file",
        "--data hf://models/a/b",
        "--data text.txt --val missing.txt",
        "--data text.txt --val ftp://host/file",
        "--data /dev/zero",
        "--data text.txt --val short.txt",
        "--data middling.txt",
    ]);
    insta::assert_snapshot!("texts", refusals.said);
}

#[test]
fn invalid_resumes() {
    let mut refusals = Refusals::new();
    let fixture = &refusals.fixture;
    fixture.model("other", |_| {});
    fixture.write("other.txt", "some other words to learn from ".repeat(40));
    refusals.run("good");
    refusals.run("future");
    let manifest = fixture.path("checkpoints/future/step-000001/manifest.json");
    let newer = fs::read_to_string(&manifest).unwrap().replace("\"format_version\": 2", "\"format_version\": 99");
    fs::write(&manifest, newer.replace("\"format_version\":2", "\"format_version\":99")).unwrap();
    refusals.run("broken");
    let weights = fixture.path("checkpoints/broken/step-000001/master.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&weights, bytes).unwrap();
    fs::create_dir_all(fixture.path("checkpoints/none")).unwrap();
    refusals.refuse_all(&[
        "--resume missing",
        "--resume text.txt",
        "--resume model",
        "--resume checkpoints/none",
        "--resume checkpoints/good --model other",
        "--resume good --model other",
        "--resume checkpoints/good --dtype bf16",
        "--resume checkpoints/good --data other.txt",
        "--resume checkpoints/good --config missing.toml",
        "--resume checkpoints/good --set optimiser.lr=1",
        "--resume checkpoints/future",
        "--resume checkpoints/future/step-000001",
        "--resume checkpoints/broken",
        "--resume checkpoints/broken/step-000001",
        "--resume --run none",
        "--resume --checkpoint-dir nowhere",
        "--run good",
        "verify-resume --at 0",
        "verify-resume --steps 4 --at 4",
    ]);
    insta::assert_snapshot!("resume", refusals.said);
}

/// A path that cannot be read is not reported as missing. Links in a circle fail for root as well, unlike permissions.
#[cfg(unix)]
#[test]
fn a_run_or_folder_that_cannot_be_read_is_not_called_missing() {
    let fixture = CliFixture::new();
    let refused = |line: &str| {
        let (code, _, said) = fixture.output(line);
        assert!(matches!(code, Some(1 | 2)), "{line}");
        assert!(said.lines().any(|it| it.starts_with("error: ") && it.contains("symbolic links")), "{line}: {said}");
    };
    fs::create_dir_all(fixture.path("checkpoints/r")).unwrap();
    std::os::unix::fs::symlink("config.toml", fixture.path("checkpoints/r/config.toml")).unwrap();
    refused("--resume r");
    fs::remove_dir_all(fixture.path("checkpoints")).unwrap();
    std::os::unix::fs::symlink("checkpoints", fixture.path("checkpoints")).unwrap();
    ["--resume", "runs"].into_iter().for_each(refused);
}

#[test]
fn unusable_models() {
    let mut refusals = Refusals::new();
    let fixture = &refusals.fixture;
    refusals.run("good");
    refusals.run("broken");
    fixture.write("checkpoints/broken/step-000001/model.safetensors", "damaged");
    refusals.refuse_all(&[
        "generate",
        "generate missing",
        "generate model/missing",
        "generate tiny",
        "generate distilgpt2",
        "generate model --revision main",
        "eval distilgpt2 --data text.txt",
        "export owner/name out",
        "generate text.txt",
        "generate checkpoints/broken",
        "generate checkpoints/broken/step-000001",
        "generate checkpoints/good --dtype fp8",
        "generate checkpoints/good --temperature=-1",
        "generate checkpoints/good --temperature warm",
        "generate checkpoints/good --top-k 0",
        "generate checkpoints/good --top-p 1.5",
        "generate checkpoints/good --repetition-penalty 0",
        "generate checkpoints/good --max-tokens some",
        "generate checkpoints/good --threads 0",
        "generate checkpoints/good --prompt a-prompt-of-more-than-forty-tokens-does-not-fit-its-context",
        "generate model --tokenizer missing.json",
        "generate model --device tpu",
        "generate model --device cuda",
        "eval model --data text.txt --device cuda:1",
        "fp16-check model --data text.txt --device cuda",
        "eval model",
        "eval missing --data text.txt",
        "eval model --data missing.txt",
        "eval model --data text.txt --seq-len 41",
        "eval model --data text.txt --stride 0",
        "eval model --data text.txt --seq-len 8 --stride 9",
        "eval model --data text.txt --batch-size 0",
        "completions",
        "completions cmd.exe",
        "doctor --yaml",
    ]);
    insta::assert_snapshot!("use", refusals.said);
}

/// Mistakes of new and of daily users.
#[test]
fn mistakes_of_daily_use() {
    let mut refusals = Refusals::new();
    refusals.refuse_all(&[
        "train",
        "resume",
        "list",
        "runs",
        "checkpoint list",
        "checkpoint list missing",
        "checkpoint show missing",
        "checkpoint verify missing",
        "checkpoint prune missing",
        "checkpoint diff missing other",
        "watch",
        "delete good",
        "logs",
        "version",
        "--num_train_epochs 3",
        "--max-steps 9",
        "--output_dir out",
        "--per_device_train_batch_size 4",
        "--gradient_accumulation_steps 4",
        "--block-size 64",
        "--fp16",
        "--resume_from_checkpoint good",
        "--steps 1.5",
        "--batch-size 8k",
        "--model ~/model",
        "--model my:model",
        "--model https://huggingface.co/distilgpt2",
        "--model out.gguf",
    ]);
    refusals.run("good");
    refusals.refuse_all(&[
        "--lr -1",
        "--steps -5",
        "--epochs 0",
        "--steps 0",
        "--epochs 1 --steps 5",
        "--epochs 1 --set train.steps=5",
        "--early-stopping -1",
        "--keep-last 0",
        "--dtype fp15",
        "--dtype float8",
        "--init-scale 1e400",
        "--resume good --run other",
        "--resume good/step-000002",
        "--resume goood",
        "--plain --dashboard",
        "--notify no-such-program",
        "--data txet.txt",
        "--data tiny_shakespear",
        "--model modle",
        "--model distilgtp2",
        "--schedule cosin",
        "runs delete",
        "runs delete missing",
        "runs delete ../text.txt",
        "runs delete good",
        "watch missing",
        "watch good --speed 0",
        "watch good --speed -1",
        "watch good --speed fast",
        "compare",
        "compare missing",
        "checkpoint show good/step-000002",
        "checkpoint verify text.txt",
        "generate modle",
        "generate model --best",
        "generate good --temperature -1",
        "eval good --data txet.txt",
        "export good",
        "export good good.safetensors",
        "export out.gguf good",
        "merge good merged.bin",
        "eval good text.txt",
        "generate good --max_new_tokens 9",
        "--resume good/events.jsonl",
        "--run a/b",
        "bench --steps 0",
        "config --explain --steps many",
        "lab scaler --run goood",
        "lab memory --run nowhere/events.jsonl",
        "verify-resume goood",
        "verify-resume good --config missing.toml",
        "export-metrics goood",
        "report goood",
        "compare good goood",
    ]);
    insta::assert_snapshot!("daily_use", refusals.said);
}

#[test]
fn invalid_environments() {
    let mut refusals = Refusals::new();
    let fixture = &refusals.fixture;
    let output = fixture.command("").env("FINETUNE_ISA", "mmx").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    refusals.said = String::from_utf8(output.stderr).unwrap();
    insta::assert_snapshot!("environment", refusals.said);
}

/// Rows that cannot be used for training: the location of the mistake, and its remedy.
#[test]
fn nonsense_in_rows() {
    let mut refusals = Refusals::new();
    let message = |role: &str, content: &str| format!("{{\"role\": \"{role}\", \"content\": \"{content}\"}}");
    let chat = |messages: &[String]| format!("{{\"messages\": [{}]}}\n", messages.join(", "));
    let good = chat(&[message("user", "a"), message("assistant", "b")]);
    let files: Vec<(&str, String)> = vec![
        ("half.jsonl", "{\"prompt\": \"a\", \"completion\": \"b\"}\n{\"prompt\": \"a\", \"answer\": \"b\"}\n".into()),
        ("null.jsonl", "{\"text\": null}\n".into()),
        ("number.jsonl", "{\"text\": \"a\"}\n{\"text\": 7}\n".into()),
        ("list.jsonl", "[1, 2]\n".into()),
        ("odd-fields.jsonl", "{\"question\": \"a\", \"answer\": \"b\"}\n".into()),
        ("comma.jsonl", "{\"text\": \"a\"},\n{\"text\": \"b\"}\n".into()),
        ("pretty.jsonl", "{\n  \"text\": \"a\"\n}\n".into()),
        ("comma.json", "[\n  {\"text\": \"a\"},\n]\n".into()),
        ("cut.json", "[{\"text\": \"a\"}, {\"te".into()),
        ("number.json", "7\n".into()),
        ("inside.json", "[{\"text\": \"a\"}, 7]\n".into()),
        ("empty.json", "[]\n".into()),
        ("empty.csv", String::new()),
        ("names-only.csv", "prompt,completion\n".into()),
        ("ragged.csv", "prompt,completion\na,b\nc,d,e\n".into()),
        ("ragged-crlf.csv", "prompt,completion\r\na,b\r\nc\r\n".into()),
        ("twice.csv", "text,text\na,b\n".into()),
        ("no-answers.csv", "prompt,completion\na,\nb,\n".into()),
        ("spaces.tsv", "prompt completion\na b\n".into()),
        ("mixed.jsonl", format!("{{\"text\": \"a\"}}\n{good}")),
        ("no-role.jsonl", chat(&["{\"content\": \"a\"}".into()])),
        ("role.jsonl", chat(&[message("user", "a"), message("robot", "b")])),
        ("no-content.jsonl", chat(&[message("user", "a"), "{\"role\": \"assistant\"}".into()])),
        ("content.jsonl", chat(&["{\"role\": \"user\", \"content\": 7}".into()])),
        ("no-message.jsonl", chat(&[])),
        ("message.jsonl", chat(&["\"hello\"".into()])),
        ("messages.jsonl", "{\"messages\": \"hello\"}\n".into()),
        ("no-answer.jsonl", chat(&[message("user", "a")])),
        ("tools.jsonl", good.replace("{\"messages\"", "{\"tools\": \"add\", \"messages\"")),
        ("mark.jsonl", chat(&[message("user", "a\u{fdd0}"), message("assistant", "b")])),
        ("from.jsonl", "{\"conversations\": [{\"from\": \"somebody\", \"value\": \"a\"}]}\n".into()),
        ("value.jsonl", "{\"conversations\": [{\"from\": \"human\", \"content\": \"a\"}]}\n".into()),
        ("rows.txt", good.clone()),
        ("table.txt", "prompt,completion\na,b\n".into()),
        ("array.md", "[\n  {\"text\": \"a\"}\n]\n".into()),
        ("binary.txt", "text\0\u{1}\u{2}".into()),
        ("half-weight.jsonl", good.replace("\"b\"", "\"b\", \"weight\": 0.5")),
        ("calls.jsonl", good.replace("\"b\"", "null, \"tool_calls\": [{\"function\": {\"name\": \"add\"}}]")),
    ];
    for (name, content) in &files {
        refusals.fixture.write(name, content);
        refusals.refuse(&format!("data show --model model --seq-len 32 --data {name}"));
    }
    refusals.fixture.write("latin1.csv", b"text\ncaf\xE9\n");
    refusals.fixture.write("latin1.jsonl", b"{\"text\": \"a\"}\n{\"text\": \"caf\xE9\"}\n");
    refusals.fixture.write("latin1.json", b"[{\"text\": \"caf\xE9\"}]\n");
    let utf16: Vec<u8> = "{\"text\": \"a\"}".encode_utf16().flat_map(u16::to_le_bytes).collect();
    refusals.fixture.write("utf16-without-mark.jsonl", &utf16);
    refusals.fixture.write("utf16.txt", [b"\xFF\xFE", &utf16[..]].concat());
    refusals.fixture.write("packed.jsonl", b"\x1F\x8B\x08\0\0");
    refusals
        .fixture
        .write("chats.jsonl", chat(&[message("user", "a"), message("user", "b"), message("assistant", "c")]) + &good);
    refusals.fixture.write("strict.jinja", "{% for m in messages %}\n{% if m.role == 'user' and loop.index0 % 2 == 1 %}{{ raise_exception('users must not follow users') }}{% endif %}\n{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}");
    refusals.fixture.write("broken.jinja", "{% for m in messages %}\n{{ m.content }\n");
    refusals.fixture.write("unmarked.jinja", "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}");
    refusals.refuse_all(&[
        "data show --model model --seq-len 32 --data latin1.csv",
        "data show --model model --seq-len 32 --data latin1.jsonl",
        "data show --model model --seq-len 32 --data latin1.json",
        "data show --model model --seq-len 32 --data utf16-without-mark.jsonl",
        "data show --model model --seq-len 32 --data utf16.txt",
        "data show --model model --seq-len 32 --data packed.jsonl",
        "data show --model model --seq-len 32 --data chats.jsonl --chat-template strict.jinja",
        "data show --model model --seq-len 32 --data chats.jsonl --chat-template broken.jinja",
        "data show --model model --seq-len 32 --data chats.jsonl --chat-template unmarked.jinja",
        "data show --model model --seq-len 32 --data chats.jsonl --chat-template lama3",
        "data show --model model --seq-len 32 --data chats.jsonl --loss-on answer",
        "data show --model model --seq-len 32 --data chats.jsonl --format yaml",
        "data show --model model --seq-len 32 --data chats.jsonl --format csv",
        "data show --model model --seq-len 32 --data chats.jsonl --text-field body",
        "data show --model model --seq-len 32 --data chats.jsonl --prompt-field question",
        "data show --model model --seq-len 32 --data chats.jsonl --sample 9",
        "data stats --model model --data chats.jsonl --seq-len 5",
        "--model model --data chats.jsonl --seq-len 4 --packing",
        "eval model --answers",
        "eval model --data text.txt --answers",
    ]);
    insta::assert_snapshot!("rows", refusals.said);
}

/// As many runs of the same would begin, or wait for each other.
#[cfg(not(feature = "mpi"))]
#[test]
fn a_build_for_one_process_refuses_to_be_one_of_several() {
    let refusals = Refusals::new();
    let (fixture, before) = (&refusals.fixture, refusals.tree());
    let line = "--model model --data text.txt --steps 1";
    for (size, rank) in [("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")] {
        for process in ["0", "1"] {
            let mut command = fixture.command(line);
            let output = command.env(size, "2").env(rank, process).output().unwrap();
            assert_eq!(output.status.code(), Some(2));
            let said = String::from_utf8(output.stderr).unwrap();
            match process {
                "0" => {
                    assert!(said.starts_with(&format!("error: {size}: ")) && said.contains("--features mpi"), "{said}");
                }
                _ => assert_eq!(said, "", "process 0 says it for all"),
            }
        }
        let mut alone = fixture.command("config");
        assert!(alone.env(size, "2").env(rank, "0").output().unwrap().status.success(), "only training is refused");
    }
    let mut command = fixture.command(line);
    let output = command.env("OMPI_COMM_WORLD_SIZE", "ban\x1bana").output().unwrap();
    assert_eq!(output.status.code(), Some(2), "a number of processes that is none is not one process");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.starts_with("error: OMPI_COMM_WORLD_SIZE: `ban\\u001bana` is not a whole number"), "{said}");
    assert_eq!(refusals.tree(), before);
}
