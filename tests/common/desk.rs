//! What a user has at hand.

use std::fs;
use std::path::Path;

use finetune::data::Tokenizer;
use tempfile::TempDir;

/// A working folder with a model folder, `model`, and a text, `text.txt`.
pub(crate) fn desk() -> TempDir {
    let desk = tempfile::tempdir().unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/deep");
    let model = desk.path().join("model");
    fs::create_dir(&model).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(golden.join(name), model.join(name)).unwrap();
    }
    fs::write(model.join("tokenizer.json"), Tokenizer::byte().json()).unwrap();
    fs::write(desk.path().join("text.txt"), "some words to learn from, and a few more; ".repeat(20)).unwrap();
    desk
}
