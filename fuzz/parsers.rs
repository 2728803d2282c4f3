//! One parser of outside bytes for each binary of this package, by the binary's name. A parser reads or refuses; a
//! panic, an abort or a gigabyte of memory is a finding.
#![no_main]

use std::cell::OnceCell;
use std::fs;
use std::path::PathBuf;
use candle_core::{DType, Device};
use finetune::data::{Conversation, Loader, Source, Template, TemplateTokens, Tokenizer};
use finetune::engine::model::{ModelSpec, Parameters};
use finetune::store::adapter::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, AdapterFolder};
use finetune::store::gguf::Gguf;
use finetune::store::tensor_file::Header;
use finetune::telemetry::read;
use finetune::train::{Config, Layers};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| match env!("CARGO_BIN_NAME") {
    "adapter" => adapter(bytes),
    "chat_template" => chat_template(bytes),
    "config" => config(bytes),
    "csv" => rows("rows.csv", bytes),
    "events" => drop(read(&file("events.jsonl", bytes))),
    "gguf" => gguf(bytes),
    "json" => rows("rows.json", bytes),
    "model_config" => drop(ModelSpec::from_json(bytes, "config.json")),
    "parquet" => rows("rows.parquet", bytes),
    "rows" => rows("rows.jsonl", bytes),
    "safetensors" => drop(Header::parse(bytes)),
    "tokenizer" => tokenizer(bytes),
    other => unreachable!("no parser is called {other}"),
});

/// A file of this process with these bytes.
fn file(name: &str, bytes: &[u8]) -> PathBuf {
    thread_local!(static FOLDER: OnceCell<PathBuf> = const { OnceCell::new() });
    let folder = FOLDER.with(|folder| folder.get_or_init(|| tempfile::tempdir().expect("a folder").keep()).clone());
    let path = folder.join(name);
    fs::write(&path, bytes).expect("a file");
    path
}

/// A configuration up to the first zero byte, which JSON does not have, and tensors behind it.
fn adapter(bytes: &[u8]) {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    let folder = file(ADAPTER_CONFIG, &bytes[..end]).with_file_name("");
    file(ADAPTER_WEIGHTS, bytes.get(end + 1..).unwrap_or_default());
    let base = include_bytes!("../tests/golden/narrow/config.json");
    let base = ModelSpec::from_json(base, "config.json").expect("a base");
    let Ok(adapter) = AdapterFolder::open(folder) else { return };
    let Ok(spec) = adapter.spec(&base) else { return };
    let parameters = Parameters::zeros(&spec.parameters(), DType::F32, &Device::Cpu).expect("memory");
    let _ = adapter.read_parameters(&spec, &parameters);
}

/// Parses every source, and renders those that cannot make a text much longer: a chain of sums or of some filters takes
/// any amount of memory, which is why the program renders a model's template in a separate process with limits.
fn chat_template(bytes: &[u8]) {
    const LENGTHENS: [&str; 14] = [
        "+", "~", "*", "batch", "endset", "format", "indent", "join", "macro", "range", "recursive", "replace", "slice", "tojson",
    ];
    let source = String::from_utf8_lossy(bytes);
    let Ok(template) = Template::new(&source, "template", TemplateTokens::default()) else { return };
    if LENGTHENS.iter().any(|word| source.contains(word)) || source.matches("for").count() > 6 {
        return;
    }
    let mut conversation = Conversation::default();
    conversation.push("system", "Be brief.");
    conversation.push("user", "1 + 1?\n");
    conversation.push("assistant", "2");
    let _ = template.render(&conversation, None, true);
}

fn config(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes).into_owned();
    let _ = Config::resolve(&Layers { file: Some(("config.toml".into(), text)), ..Layers::default() });
}

fn gguf(bytes: &[u8]) {
    let Ok(gguf) = Gguf::open(file("model.gguf", bytes)) else { return };
    let names: Vec<String> = gguf.tensors().map(|(name, ..)| name.to_owned()).collect();
    for name in names {
        let _ = gguf.tensor(&name);
    }
    let _ = (gguf.architecture().map(drop), gguf.eos_ids(), gguf.tokenizer());
}

fn rows(name: &str, bytes: &[u8]) {
    let path = file(name, bytes);
    let cache = path.with_file_name("cache");
    let _ = Loader::new(&cache).load_whole(&Source::Path(path), &Tokenizer::byte());
    let _ = fs::remove_dir_all(cache);
}

fn tokenizer(bytes: &[u8]) {
    let Ok(tokenizer) = Tokenizer::from_json(bytes.to_vec(), "tokenizer.json") else { return };
    let _ = tokenizer.encode("The 12 cats' naïve\u{301} 語🙂 \n\n\tend <|endoftext|>  x");
    let _ = tokenizer.decode(&[0, 1, 2, 7, u32::MAX]);
}
