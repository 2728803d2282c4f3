//! Invalid input: one clear message, exit code 2, and nothing written.
//!
//! Each test writes a folder with broken files. The command lines and their messages are in `tests/transcripts`.

use crate::common::cli_fixture::CliFixture;
use crate::common::launch;
use crate::common::transcript::assert_refused;
#[cfg(not(feature = "mpi"))]
use crate::common::transcript::tree;
use serde_json::{Value, json};
use std::fs;

/// A working folder with broken files, a model and a text.
fn folder() -> CliFixture {
    let fixture = CliFixture::new();
    fixture.write("text.txt", "some words to learn from ".repeat(40));
    fixture.write("short.txt", "abc");
    fixture.write("empty.txt", "");
    fixture.write("blank.txt", " \n\t\n");
    fixture.write("latin1.txt", b"one\ntwo caf\xE9\n");
    fixture.write("not-json.jsonl", "{\"text\": \"fine\"}\nnot json\n");
    fixture.write("no-text.jsonl", "{\"title\": \"no text here\"}\n");
    fixture.write("no.parquet", "not parquet");
    fixture
}

/// A run of one step in `checkpoints/NAME`.
fn train(fixture: &CliFixture, name: &str) {
    fixture.said(&format!(
        "--model model --data text.txt --run {name} --steps 1 --seq-len 8 --batch-size 2 --set train.sample_tokens=0"
    ));
}

#[test]
fn invalid_flags() {
    assert_refused(&folder(), "flags");
}

#[test]
fn invalid_numbers_in_the_laboratory_and_benchmarks() {
    assert_refused(&CliFixture::empty(), "lab");
}

#[test]
fn invalid_configurations() {
    let fixture = folder();
    fixture.write("unknown-key.toml", "[train]\nseqlen = 8\n");
    fixture.write("unknown-section.toml", "[trainer]\nsteps = 8\n");
    fixture.write("no-section.toml", "batch_size = 4\n");
    fixture.write("a-section.toml", "[[train]]\nsteps = 8\n");
    fixture.write("long-line.toml", format!("data = \"{}", "a".repeat(20_000)));
    fixture.write("both.toml", "[train]\nepochs = 2.0\nsteps = 7\n");
    fixture.write("wrong-type.toml", "[train]\nsteps = \"ten\"\n");
    fixture.write("not.toml", "steps: 8\n");
    fixture.write("model-table.toml", "model = {}\n");
    fixture.write("huge-steps.toml", "[train]\nsteps = 99999999999999999999\n");
    fixture.write("negative-steps.toml", "[train]\nsteps = -9999999999999999999\n");
    fixture.write("long.toml", "# ".repeat(600_000));
    fixture.write("latin1.toml", b"model = \"caf\xE9\"\n");
    assert_refused(&fixture, "configuration");
}

#[test]
fn a_model_that_is_none() {
    let fixture = folder();
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
    fixture.model("bad-chat", |_| {});
    fixture.write("bad-chat/tokenizer_config.json", "{");
    fixture.model("bad-template", |_| {});
    fixture.write("bad-template/chat_template.jinja", b"\xFF");
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
    assert_refused(&fixture, "models");
}

#[test]
fn invalid_texts() {
    let fixture = folder();
    fs::create_dir(fixture.path("nothing")).unwrap();
    fixture.write("middling.txt", "a tenth of this is too short ".repeat(10));
    assert_refused(&fixture, "texts");
}

#[test]
fn invalid_resumes() {
    let fixture = folder();
    fixture.model("other", |_| {});
    fixture.write("other.txt", "some other words to learn from ".repeat(40));
    train(&fixture, "good");
    train(&fixture, "future");
    let manifest = fixture.path("checkpoints/future/step-000001/manifest.json");
    let newer = fs::read_to_string(&manifest).unwrap().replace("\"format_version\": 3", "\"format_version\": 99");
    fs::write(&manifest, newer.replace("\"format_version\":3", "\"format_version\":99")).unwrap();
    train(&fixture, "broken");
    let weights = fixture.path("checkpoints/broken/step-000001/master.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&weights, bytes).unwrap();
    fs::create_dir_all(fixture.path("checkpoints/none")).unwrap();
    assert_refused(&fixture, "resume");
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
    let fixture = folder();
    train(&fixture, "good");
    train(&fixture, "broken");
    fixture.write("checkpoints/broken/step-000001/model.safetensors", "damaged");
    assert_refused(&fixture, "use");
}

/// Mistakes of new and of daily users.
#[test]
fn mistakes_of_daily_use() {
    let fixture = folder();
    assert_refused(&fixture, "first_use");
    train(&fixture, "good");
    fixture.write("checkpoints/silent/events.jsonl", "no record\n");
    assert_refused(&fixture, "daily_use");
}

#[test]
fn invalid_environments() {
    let fixture = folder();
    let refused = |variable: &str, value: &str| {
        let (code, _, said) = launch::finish(fixture.command("").env(variable, value));
        assert_eq!(code, Some(2));
        said
    };
    insta::assert_snapshot!("environment", refused("FINETUNE_ISA", "mmx") + &refused("RAYON_NUM_THREADS", "99999"));
}

/// Rows that cannot be used for training: the location of the mistake, and its remedy.
#[test]
fn nonsense_in_rows() {
    let fixture = folder();
    let message = |role: &str, content: &str| format!("{{\"role\": \"{role}\", \"content\": \"{content}\"}}");
    let chat = |messages: &[String]| format!("{{\"messages\": [{}]}}\n", messages.join(", "));
    let good = chat(&[message("user", "a"), message("assistant", "b")]);
    let files: [(&str, String); 54] = [
        ("half.jsonl", "{\"prompt\": \"a\", \"completion\": \"b\"}\n{\"prompt\": \"a\", \"answer\": \"b\"}\n".into()),
        ("null.jsonl", "{\"text\": null}\n".into()),
        ("number.jsonl", "{\"text\": \"a\"}\n{\"text\": 7}\n".into()),
        ("list.jsonl", "[1, 2]\n".into()),
        ("odd-fields.jsonl", "{\"question\": \"a\", \"answer\": \"b\"}\n".into()),
        ("comma.jsonl", "{\"text\": \"a\"},\n{\"text\": \"b\"}\n".into()),
        ("python.jsonl", "{'text': 'a'}\n".into()),
        ("line-ends.jsonl", "{\"text\": \"a\"}\r{\"text\": \"b\"}\r".into()),
        ("nan.jsonl", r#"{"text": "a", "score": NaN}"#.into()),
        ("infinity.jsonl", r#"{"text": "a", "score": -Infinity}"#.into()),
        ("half-emoji.jsonl", r#"{"text": "a\ud83d"}"#.into()),
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
        ("open-quote.csv", "text\n\"a\nb\n".into()),
        ("open-quote-crlf.csv", "prompt,completion\r\n1,2\r\n3,\"4\r\n5,6\r\n".into()),
        ("last-quote.csv", "text\n\"".into()),
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
        ("kwargs.jsonl", good.replace("{\"messages\"", "{\"chat_template_kwargs\": [1], \"messages\"")),
        ("mark.jsonl", chat(&[message("user", "a\u{fdd0}"), message("assistant", "b")])),
        ("from.jsonl", "{\"conversations\": [{\"from\": \"somebody\", \"value\": \"a\"}]}\n".into()),
        ("value.jsonl", "{\"conversations\": [{\"from\": \"human\", \"content\": \"a\"}]}\n".into()),
        ("rows.txt", good.clone()),
        ("table.txt", "prompt,completion\na,b\n".into()),
        ("array.md", "[\n  {\"text\": \"a\"}\n]\n".into()),
        ("binary.txt", "text\0\u{1}\u{2}".into()),
        ("half-weight.jsonl", good.replace("\"b\"", "\"b\", \"weight\": 0.5")),
        ("pair-number.jsonl", "{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": 3}\n".into()),
        ("pair-kinds.jsonl", format!("{{\"chosen\": \"b\", \"rejected\": [{}]}}\n", message("user", "x"))),
        ("pair-prompt.jsonl", "{\"prompt\": [], \"chosen\": \"b\", \"rejected\": \"c\"}\n".into()),
        ("pair-empty.jsonl", "{\"prompt\": \"\", \"chosen\": \"\", \"rejected\": \"c\"}\n".into()),
        (
            "pair-unanswered.jsonl",
            format!("{{\"chosen\": [{}], \"rejected\": [{}]}}\n", message("user", "x"), message("user", "y")),
        ),
        ("call.jsonl", "{\"conversations\": [{\"from\": \"function_call\", \"value\": \"f()\"}]}\n".into()),
        ("image.jsonl", chat(&["{\"role\": \"user\", \"content\": [{\"type\": \"image_url\"}]}".into()])),
        ("calls.jsonl", good.replace("\"b\"", "null, \"tool_calls\": [{\"function\": {\"name\": \"add\"}}]")),
    ];
    for (name, content) in files {
        fixture.write(name, content);
    }
    fixture.write("latin1.csv", b"text\ncaf\xE9\n");
    fixture.write("latin1.jsonl", b"{\"text\": \"a\"}\n{\"text\": \"caf\xE9\"}\n");
    fixture.write("latin1.json", b"[{\"text\": \"caf\xE9\"}]\n");
    let utf16: Vec<u8> = "{\"text\": \"a\"}".encode_utf16().flat_map(u16::to_le_bytes).collect();
    fixture.write("utf16-without-mark.jsonl", &utf16);
    fixture.write("utf16.txt", [b"\xFF\xFE", &utf16[..]].concat());
    fixture.write("packed.jsonl", b"\x1F\x8B\x08\0\0");
    fixture
        .write("chats.jsonl", chat(&[message("user", "a"), message("user", "b"), message("assistant", "c")]) + &good);
    fixture.write("strict.jinja", "{% for m in messages %}\n{% if m.role == 'user' and loop.index0 % 2 == 1 %}{{ raise_exception('users must not follow users') }}{% endif %}\n{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}");
    fixture.write("broken.jinja", "{% for m in messages %}\n{{ m.content }\n");
    fixture.write("unmarked.jinja", "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}");
    assert_refused(&fixture, "rows");
}

/// As many runs of the same would begin, or wait for each other.
#[cfg(not(feature = "mpi"))]
#[test]
fn a_build_for_one_process_refuses_to_be_one_of_several() {
    let fixture = folder();
    let before = tree(&fixture);
    let line = "--model model --data text.txt --steps 1";
    for (size, rank) in [("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")] {
        for process in ["0", "1"] {
            let mut command = fixture.command(line);
            let (code, _, said) = launch::finish(command.env(size, "2").env(rank, process));
            assert_eq!(code, Some(2));
            match process {
                "0" => {
                    assert!(said.starts_with(&format!("error: {size}: ")) && said.contains("--features mpi"), "{said}");
                }
                _ => assert_eq!(said, "", "process 0 reports it for all"),
            }
        }
        let mut alone = fixture.command("config");
        assert!(alone.env(size, "2").env(rank, "0").output().unwrap().status.success(), "only training is refused");
    }
    let mut command = fixture.command(line);
    let (code, _, said) = launch::finish(command.env("OMPI_COMM_WORLD_SIZE", "ban\x1bana"));
    assert_eq!(code, Some(2), "a number of processes that is none is not one process");
    assert!(said.starts_with("error: OMPI_COMM_WORLD_SIZE: `ban\\u001bana` is not a whole number"), "{said}");
    assert_eq!(tree(&fixture), before);
}
