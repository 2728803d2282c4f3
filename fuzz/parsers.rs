//! One parser of outside bytes for each binary of this package, by the binary's name. A parser reads or refuses; a panic, an
//! abort or a gigabyte of memory is a finding.
#![no_main]

use std::cell::OnceCell;
use std::fs;
use std::path::{Path, PathBuf};

use finetune::data::{Conversation, Loader, Source, Template, TemplateTokens, Tokenizer};
use finetune::engine::model::ModelSpec;
use finetune::store::gguf::Gguf;
use finetune::store::tensor_file::Header;
use finetune::telemetry::read;
use finetune::train::{Config, Layers};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| match env!("CARGO_BIN_NAME") {
    "chat_template" => chat_template(bytes),
    "config" => config(bytes),
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

/// A file of this process with these bytes, in memory where the system has such a place.
fn file(name: &str, bytes: &[u8]) -> PathBuf {
    thread_local!(static FOLDER: OnceCell<PathBuf> = const { OnceCell::new() });
    let folder = FOLDER.with(|folder| {
        let parent = if Path::new("/dev/shm").is_dir() { "/dev/shm".into() } else { std::env::temp_dir() };
        folder.get_or_init(|| tempfile::tempdir_in(parent).expect("a folder").keep()).clone()
    });
    let path = folder.join(name);
    fs::write(&path, bytes).expect("a file");
    path
}

fn chat_template(bytes: &[u8]) {
    let source = String::from_utf8_lossy(bytes);
    let Ok(template) = Template::new(&source, "template", TemplateTokens::default()) else { return };
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
