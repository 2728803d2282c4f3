//! Untrusted bytes: every parser accepts or rejects them, without a panic and in bounded memory.
//!
//! Each parser is given any bytes, and good ones that were changed: bytes overwritten, parts removed or repeated, JSON
//! values replaced. The inputs are short, so memory beyond [`LIMIT`] means that a number in them was believed. The long
//! form is in `docs/faults.md`.

use crate::common::allocator::Counting;
use crate::common::checkpoint;
use crate::common::mutations::{any_bytes, changed, changes, replaced, replacement};
use finetune::Error;
use finetune::data::{Conversation, DataSource, DatasetBuilder, TemplateSandbox, TemplateTokens, Tokenizer};
use finetune::engine::model::ModelSpec;
use finetune::store::tensor_file::Header;
use finetune::telemetry::{Diagnostic, Event, EventLog, Record, VERSION, read};
use finetune::train::{Config, ConfigLayers};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Value, json};
use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use tempfile::TempDir;

/// Bytes that a parser may hold at a time. The buffers of files take a few megabytes regardless of the content, and the
/// expressions of a tokenizer some tens, where the crate that compiles them has its own limit.
const LIMIT: isize = 128 << 20;

thread_local! {
    /// The bytes that this thread holds now, and their maximum since a measurement began.
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn note(change: isize) {
    let held = HELD.get() + change;
    HELD.set(held);
    PEAK.set(PEAK.get().max(held));
}

#[global_allocator]
static ALLOCATOR: Counting = Counting(note);

/// Returns the result of `parse`, which must not have taken more memory than [`LIMIT`].
fn bounded<T>(parse: impl FnOnce() -> T) -> T {
    PEAK.set(HELD.get());
    let before = HELD.get();
    let result = parse();
    let taken = PEAK.get() - before;
    assert!(taken < LIMIT, "{taken} bytes of memory");
    result
}

/// A folder for this thread, in memory if the system has such a file system.
fn folder() -> PathBuf {
    thread_local! {
        static FOLDER: LazyLock<TempDir> = LazyLock::new(checkpoint::folder);
    }
    FOLDER.with(|folder| folder.path().to_path_buf())
}

fn resolve(text: String) -> finetune::Result<Config> {
    Config::resolve(&ConfigLayers { file: Some(("a.toml".into(), text)), ..ConfigLayers::default() })
}

fn config(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes).into_owned();
    match bounded(|| resolve(text)) {
        Ok(config) => assert_eq!(resolve(config.to_toml().unwrap()).unwrap(), config),
        Err(error) => assert_eq!(error.exit_code(), 2, "{error}"),
    }
}

/// Reads a log, then appends to it: the new line is readable after any content.
fn events(bytes: &[u8]) {
    let path = folder().join("events.jsonl");
    fs::write(&path, bytes).unwrap();
    let before = bounded(|| read(&path)).unwrap();
    let mut log = bounded(|| EventLog::open(&path)).unwrap();
    let event = Event::Warning(Diagnostic { step: 0, message: "the last".into() });
    log.append(&Record { v: VERSION, t: 0, s: log.last_seconds(), event: event.clone() }).unwrap();
    let after = read(&path).unwrap();
    assert_eq!(after.last().unwrap().event, event);
    assert!(after.len() <= before.len() + 2, "an unfinished last line may have been whole");
}

fn tokenizer(json: Vec<u8>) {
    let text = "The 12 cats' naïve\u{301} 語🙂 \n\n\tend <|endoftext|>  x";
    let tokenizer = match bounded(|| Tokenizer::from_json(json, "tokenizer.json")) {
        Ok(tokenizer) => tokenizer,
        Err(error) => return assert!(matches!(error, Error::Model { .. }), "{error}"),
    };
    match bounded(|| tokenizer.encode(text)) {
        Ok(ids) => assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size())),
        Err(error) => assert!(matches!(error, Error::Data { .. }), "{error}"),
    }
    for ids in [&[0, 1, 2, 3][..], &[7, 7, u32::MAX], &[]] {
        let _ = bounded(|| tokenizer.decode(ids));
    }
    let _ = (tokenizer.eos_id(), tokenizer.token(0), tokenizer.token(u32::MAX));
}

fn documents(name: &str, bytes: &[u8]) {
    // On this thread, which waits for no other thread, because only its memory is measured.
    thread_local! {
        static ALONE: rayon::ThreadPool = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build().unwrap();
    }
    let data = folder().join("data");
    let path = folder().join(name);
    fs::write(&path, bytes).unwrap();
    let source = DataSource::Path(path);
    let load = || DatasetBuilder::new(&data).load_unsplit(&source, &Tokenizer::byte());
    match ALONE.with(|pool| pool.install(|| bounded(load))) {
        Ok((tokens, bytes_per_token)) => {
            assert!(!tokens.is_empty() && bytes_per_token.is_finite());
            let mut ids = vec![0; tokens.len()];
            tokens.read(0, &mut ids);
            assert!(ids.iter().all(|&id| id <= 256));
        }
        Err(error) => assert!(matches!(error, Error::Data { .. }), "{error}"),
    }
    fs::remove_dir_all(&data).unwrap();
}

const GOOD_CONFIG: &str = include_str!("../../configs/distilgpt2-shakespeare.toml");

static GOOD_EVENTS: LazyLock<String> = LazyLock::new(|| {
    let stats =
        json!({"count": 9, "min_abs": 6e-8, "max_abs": 2.0, "inf": 1, "norm": "NaN", "exponents": [[-24, 3], [2, 5]]});
    let mut tensor = stats.clone();
    tensor["name"] = "wte.weight".into();
    [
        json!({"event": "started", "program": "finetune 0.1.0", "parameters": 100, "config": {"model": "tiny"}}),
        json!({"event": "step", "step": 1, "loss": 3.5, "loss_scale": 65536.0, "outcome": "skipped", "grad_norm": "inf",
            "tokens": 1024, "tokens_per_s": 10.5, "updates": 0, "skipped": 1, "grads": stats, "tensors": [tensor]}),
        json!({"event": "overflow", "step": 1, "scale": {"cause": "backed_off", "from": 65536.0, "to": 32768.0}}),
        json!({"event": "eval", "step": 1, "loss": 3.0, "perplexity": 20.1, "tokens": 99}),
        json!({"event": "started", "resumed_from": 1}),
        json!({"event": "finished", "reason": "done", "step": 1, "val_loss": null}),
        json!({"event": "phase", "step": 1, "what": "saving"}),
    ]
    .map(|mut event| {
        for (key, value) in [("v", json!(1)), ("t", json!(1_700_000_000_000_u64)), ("s", json!(0.5))] {
            event[key] = value;
        }
        format!("{event}\n")
    })
    .concat()
});

/// One of each kind of tokenizer, with most parts that one can have.
static GOOD_TOKENIZERS: LazyLock<Vec<Value>> = LazyLock::new(|| {
    let token = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": true})
    };
    let whole = |added: Value, normalizer: Value, pre: Value, post: Value, decoder: Value, model: Value| {
        json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": normalizer,
            "pre_tokenizer": pre, "post_processor": post, "decoder": decoder, "model": model})
    };
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let bpe = json!({"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
        "vocab": {"t": 0, "h": 1, "e": 2, "Ġ": 3, "c": 4, "a": 5, "s": 6, "he": 7, "Ġt": 8, "Ġthe": 9, "1": 10, "Ġc": 11},
        "merges": [["h", "e"], ["Ġ", "t"], ["Ġt", "he"], ["Ġ", "c"]]});
    let split = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}| ?\\p{L}+|\\s+(?!\\S)|\\s+"}, "behavior": "Isolated",
            "invert": false},
        {"type": "Digits", "individual_digits": true}, byte_level]});
    let unigram = json!({"type": "Unigram", "unk_id": 0, "byte_fallback": true,
        "vocab": [["<unk>", 0.0], ["▁", -2.0], ["▁the", -3.5], ["t", -4.0], ["h", -4.5], ["e", -4.0], ["<0x0A>", -9.0]]});
    let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    let wordpiece = json!({"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100, "vocab": {"[UNK]": 0, "the": 1, "cat": 2, "##s": 3, "[SEP]": 4}});
    let bert = json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null,
        "lowercase": true});
    let replace = json!({"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}, {"type": "Strip", "strip_left": true,
        "strip_right": false}, {"type": "Lowercase"}]});
    let template = json!({"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "[SEP]", "type_id": 0}}], "pair": [], "special_tokens":
        {"[SEP]": {"id": "[SEP]", "ids": [4], "tokens": ["[SEP]"]}}});
    let fallback = json!({"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]});
    vec![
        whole(
            json!([token(12, "<|endoftext|>")]),
            json!(null),
            byte_level.clone(),
            json!(null),
            byte_level.clone(),
            bpe.clone(),
        ),
        whole(json!([token(12, "</s>")]), json!({"type": "NFC"}), split, byte_level.clone(), byte_level, bpe),
        whole(json!([token(0, "<unk>")]), replace, metaspace.clone(), json!(null), fallback, unigram.clone()),
        whole(json!([]), json!(null), metaspace.clone(), json!(null), metaspace, unigram),
        whole(
            json!([token(4, "[SEP]")]),
            bert,
            json!({"type": "BertPreTokenizer"}),
            template,
            json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
            wordpiece,
        ),
        whole(
            json!([]),
            json!(null),
            json!({"type": "Whitespace"}),
            json!(null),
            json!(null),
            json!({"type": "WordLevel", "vocab": {"The": 0, "x": 1, "?": 2}, "unk_token": "?"}),
        ),
    ]
});

const GOOD_ROWS: &str = concat!(
    r#"{"text": "plain naïve text", "id": 7}"#,
    "\n\n",
    r#"{"text": "more", "prompt": "1+1=", "completion": "2"}"#,
    "\r\n",
    r#"{"text": "", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho\n"}]}"#,
    "\n",
);

const GOOD_CHATS: &str = concat!(
    r#"{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho\n"}], "tools": "[]"}"#,
    "\n",
    r#"{"messages": [{"role": "system", "content": ""}, {"role": "assistant", "content": "naïve"}]}"#,
    "\n",
);

const GOOD_ARRAY: &str =
    r#"[{"prompt": "1+1=", "completion": "2"}, {"id": [1, {"a": null}], "prompt": "é", "completion": "\u00e9"}]"#;

const GOOD_TABLE: &str = "id,prompt,completion\r\n1,\"a, \"\"b\"\"\",c\r\n2,\"two\nlines\",d\r\n";

const GOOD_TEMPLATE: &str = include_str!("../../src/data/templates/qwen.jinja");

/// A template that is accepted then writes conversations.
fn template(bytes: &[u8]) {
    finetune::untrusted::subprocess::register_executable(Path::new(env!("CARGO_BIN_EXE_finetune")));
    let Ok(source) = std::str::from_utf8(bytes) else { return };
    let template = match bounded(|| TemplateSandbox::new(source, "t", &TemplateTokens::default())) {
        Ok(template) => template,
        Err(error) => return assert!(matches!(error, Error::Model { .. }), "{error}"),
    };
    let chat = r#"[{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>b</think>c", "tool_calls": [{"name": "f", "arguments": {"x": [1]}}]}, {"role": "tool", "content": "d"}]"#;
    let chat = Conversation::from_json(chat).unwrap();
    let variables: minijinja::Value = serde_json::from_str(r#"{"tools": [{"name": "f"}]}"#).unwrap();
    match bounded(|| template.render(&chat, Some(&variables), true)) {
        Ok(rendered) => {
            assert!(rendered.assistant_ranges.iter().all(|range| rendered.text.get(range.clone()).is_some()));
        }
        Err(error) => assert!(matches!(error, Error::Model { .. }), "{error}"),
    }
}

const GOOD_HEADER: &str = r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
    "a":{"dtype":"BF16","shape":[1,3],"data_offsets":[8,14]}}"#;

/// A safetensors file with this header and room for its values.
fn tensors(json: &[u8]) -> Vec<u8> {
    [&(json.len() as u64).to_le_bytes(), json, &[0; 14]].concat()
}

const GOOD_MODEL: &str = include_str!("../golden/deep/config.json");

/// A property test for each line: its name, its inputs, and the parser that gets them.
macro_rules! parsers {
    ($($name:ident: $($input:ident in $strategy:expr),+ => $parse:expr;)+) => {
        proptest! {
            $(#[test]
            fn $name($($input in $strategy),+) {
                $parse;
            })+
        }
    };
}

parsers! {
    config_of_any_bytes: bytes in any_bytes() => config(&bytes);
    config_changed: changes in changes() => config(&changed(GOOD_CONFIG.as_bytes(), &changes));
    events_of_any_bytes: bytes in any_bytes() => events(&bytes);
    events_changed: changes in changes() => events(&changed(GOOD_EVENTS.as_bytes(), &changes));
    tokenizer_of_any_bytes: bytes in any_bytes() => tokenizer(bytes);
    tokenizer_changed: which in select(&GOOD_TOKENIZERS[..]), changes in changes()
        => tokenizer(changed(which.to_string().as_bytes(), &changes));
    tokenizer_with_other_values: which in select(&GOOD_TOKENIZERS[..]), new in vec(replacement(), 1..3)
        => tokenizer(replaced(which, &new).to_string().into_bytes());
    jsonl_of_any_bytes: bytes in any_bytes() => documents("a.jsonl", &bytes);
    jsonl_changed: good in select(&[GOOD_ROWS, GOOD_CHATS][..]), changes in changes()
        => documents("a.jsonl", &changed(good.as_bytes(), &changes));
    tables_and_arrays_of_any_bytes: bytes in any_bytes(), name in r"a\.(json|csv|tsv|parquet)" => documents(&name, &bytes);
    arrays_changed: changes in changes() => documents("a.json", &changed(GOOD_ARRAY.as_bytes(), &changes));
    tables_changed: changes in changes() => documents("a.csv", &changed(GOOD_TABLE.as_bytes(), &changes));
    text_of_any_bytes: bytes in any_bytes() => documents("a.txt", &bytes);
    templates_changed: changes in changes() => template(&changed(GOOD_TEMPLATE.as_bytes(), &changes));
    safetensors_of_any_bytes: bytes in any_bytes() => header(&bytes);
    safetensors_header_of_any_bytes: bytes in any_bytes() => header(&tensors(&bytes));
    safetensors_changed: changes in changes() => header(&changed(&tensors(GOOD_HEADER.as_bytes()), &changes));
    safetensors_header_changed: changes in changes()
        => header(&tensors(&changed(GOOD_HEADER.as_bytes(), &changes)));
    model_config_changed: changes in changes() => model(&changed(GOOD_MODEL.as_bytes(), &changes));
}

/// A header that is accepted describes bytes that exist.
fn header(bytes: &[u8]) {
    let Ok(header) = bounded(|| Header::parse(bytes)) else { return };
    for entry in header.entries() {
        assert!(entry.begin <= entry.end && entry.end <= bytes.len());
        let bits = entry.shape.iter().product::<usize>() * entry.dtype.bitsize();
        assert_eq!(bits, 8 * (entry.end - entry.begin));
    }
}

fn model(json: &[u8]) {
    let _ = bounded(|| ModelSpec::from_json(json, "config.json"));
}

/// The unmodified inputs must be valid.
#[test]
fn unchanged_ones_are_accepted() {
    for good in GOOD_TOKENIZERS.iter() {
        let tokenizer = Tokenizer::from_json(good.to_string().into_bytes(), "tokenizer.json").unwrap();
        assert!(!tokenizer.encode("the cats").unwrap().is_empty());
    }
    resolve(GOOD_CONFIG.to_owned()).unwrap();
    let path = folder().join("events.jsonl");
    fs::write(&path, GOOD_EVENTS.as_bytes()).unwrap();
    assert_eq!(read(&path).unwrap().len(), 7);
    for (name, rows) in [("b.jsonl", GOOD_ROWS), ("c.jsonl", GOOD_CHATS), ("d.json", GOOD_ARRAY), ("e.csv", GOOD_TABLE)]
    {
        let path = folder().join(name);
        fs::write(&path, rows).unwrap();
        DatasetBuilder::new(folder().join("good")).load_unsplit(&DataSource::Path(path), &Tokenizer::byte()).unwrap();
    }
    template(GOOD_TEMPLATE.as_bytes());
    assert_eq!(Header::parse(&tensors(GOOD_HEADER.as_bytes())).unwrap().entries().len(), 2);
    ModelSpec::from_json(GOOD_MODEL.as_bytes(), "config.json").unwrap();
}

/// A template must not exhaust memory or time either. Filters in a row each double the text; so do sums of a variable
/// with itself.
#[test]
fn a_template_that_asks_for_terabytes_or_hours_is_refused() {
    finetune::untrusted::subprocess::register_executable(Path::new(env!("CARGO_BIN_EXE_finetune")));
    let doubled = "{% set x = x + x %}".repeat(45);
    let cases = [
        (format!("{{{{ messages{} }}}}", " | tojson".repeat(99)), "more than 2 GiB of memory"),
        (format!("{{% set x = 'a' %}}{doubled}{{{{ x }}}}"), "more than 2 GiB of memory"),
        (
            "{% set x = 'a' * 90000000 %}{% for i in range(99999) %}{% set y = x + x %}{% endfor %}".into(),
            "more than 5 s of processor time",
        ),
    ];
    for (source, expected) in cases {
        let template = TemplateSandbox::new(&source, "t", &TemplateTokens::default()).unwrap();
        let chat = Conversation::from_json(r#"[{"role": "user", "content": "a"}]"#).unwrap();
        let error = bounded(|| template.render(&chat, None, true)).unwrap_err().to_string();
        // On a slow machine the time may end first.
        assert!(error.contains(expected) || error.contains("more than 5 s"), "{error}");
    }
}

/// A key of 100,000 parts would nest as many tables.
#[test]
fn a_key_without_end_is_refused() {
    let key = "a.".repeat(100_000) + "a";
    assert_eq!(resolve(format!("{key} = 1")).unwrap_err().exit_code(), 2);
    let layers = ConfigLayers { overrides: vec![(key, toml::Table::new().into())], ..ConfigLayers::default() };
    assert_eq!(Config::resolve(&layers).unwrap_err().exit_code(), 2);
}

/// A log without line ends is not read into memory as a whole, and the next lines are not lost.
#[test]
fn a_log_without_lines_is_passed_over() {
    let path = folder().join("endless.jsonl");
    fs::File::create(&path).unwrap().set_len(100 << 20).unwrap();
    let peak = |work: &dyn Fn()| {
        PEAK.set(HELD.get());
        let before = HELD.get();
        work();
        PEAK.get() - before
    };
    let open = || {
        let mut log = EventLog::open(&path).unwrap();
        log.append(&Record { v: VERSION, t: 0, s: 0.0, event: Event::Paused { step: 1 } }).unwrap();
    };
    assert!(peak(&open) < 64 << 20);
    assert!(peak(&|| assert_eq!(read(&path).unwrap().len(), 1)) < 64 << 20);
    assert!(fs::metadata(&path).unwrap().len() > 100 << 20, "nothing is cut off");
}

#[test]
fn a_tokenizer_that_would_take_gigabytes_is_refused_in_bounded_memory() {
    let model = json!({"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"});
    for normalizer in [
        json!({"type": "Replace", "pattern": {"String": "a"}, "content": "a".repeat(1000)}),
        json!({"type": "Precompiled", "precompiled_charsmap": "/////wAAAAA="}),
    ] {
        let json = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
            "normalizer": normalizer, "pre_tokenizer": null, "post_processor": null, "decoder": null, "model": model});
        assert!(bounded(|| Tokenizer::from_json(json.to_string().into_bytes(), "x")).is_err());
    }
}
