//! A user's working folder, and the program started in it.

use super::checkpoint::folder;
use super::{golden, launch, of_kind};
use finetune::data::Tokenizer;
use finetune::store::checkpoint::latest_valid;
use finetune::telemetry::{Event, StepRecord, read};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

pub(crate) struct CliFixture(TempDir);

impl CliFixture {
    /// An empty folder.
    pub(crate) fn empty() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// An empty folder, in memory if the system has such a file system.
    pub(crate) fn in_memory() -> Self {
        Self(folder())
    }

    /// A folder with a model folder, `model`, and a text, `text.txt`.
    pub(crate) fn new() -> Self {
        let fixture = Self::empty();
        fixture.model("model", |_| {});
        fixture.write("text.txt", "some words to learn from, and a few more; ".repeat(20));
        fixture
    }

    pub(crate) fn folder(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a file, and the folders that it is in.
    pub(crate) fn write(&self, name: &str, contents: impl AsRef<[u8]>) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, contents).unwrap();
    }

    /// A Hugging Face folder with the weights of `tests/golden/deep` and a tokenizer of bytes, its configuration
    /// changed.
    pub(crate) fn model(&self, name: &str, change: impl FnOnce(&mut Value)) {
        let (golden, mut config) = (golden::path("deep"), golden::config("deep"));
        change(&mut config);
        self.write(&format!("{name}/config.json"), config.to_string());
        self.write(&format!("{name}/model.safetensors"), fs::read(golden.join("model.safetensors")).unwrap());
        self.write(&format!("{name}/tokenizer.json"), Tokenizer::byte().json());
    }

    /// `finetune LINE`, offline. A word `''` is empty.
    pub(crate) fn command(&self, line: &str) -> Command {
        let words = line.split_whitespace().map(|word| if word == "''" { "" } else { word });
        self.command_of(&words.collect::<Vec<_>>())
    }

    /// Like `command`, but takes words that may contain spaces.
    pub(crate) fn command_of(&self, words: &[&str]) -> Command {
        let mut command = launch::program();
        command.current_dir(&self.0).args(words).env("HF_HUB_OFFLINE", "1").env("HF_HOME", self.folder());
        command.env_remove("FINETUNE_ISA").env("FINETUNE_CACHE", self.path("data"));
        command.env_remove("COLUMNS").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// The exit code, standard output and standard error of `finetune LINE`.
    pub(crate) fn output(&self, line: &str) -> (Option<i32>, String, String) {
        launch::finish(&mut self.command(line))
    }

    /// The standard output of `finetune LINE`, which must succeed.
    pub(crate) fn said(&self, line: &str) -> String {
        let (code, out, err) = self.output(line);
        assert_eq!(code, Some(0), "finetune {line}: {out}{err}");
        out
    }

    /// The standard error of `finetune LINE`, which must be refused.
    pub(crate) fn refused(&self, line: &str) -> String {
        let (code, out, err) = self.output(line);
        assert_eq!(code, Some(2), "finetune {line}: {out}{err}");
        err
    }

    /// Asserts that `finetune LINE` is refused with a message that has each of these parts.
    pub(crate) fn assert_refused(&self, line: &str, parts: &[&str]) {
        let message = self.refused(line);
        assert!(parts.iter().all(|part| message.contains(part)), "{parts:?}: {message}");
    }

    /// The JSON that `finetune LINE` prints.
    pub(crate) fn json(&self, line: &str) -> Value {
        serde_json::from_str(&self.said(line)).unwrap()
    }

    /// The folder of a run.
    pub(crate) fn run(&self, name: &str) -> PathBuf {
        self.path("checkpoints").join(name)
    }

    /// The folder of a run's newest checkpoint.
    pub(crate) fn newest(&self, run: &str) -> PathBuf {
        latest_valid(&self.run(run)).unwrap().checkpoint.path().to_path_buf()
    }

    /// The log of a run.
    pub(crate) fn events(&self, run: &str) -> Vec<Event> {
        read(self.run(run).join("events.jsonl")).unwrap().into_iter().map(|record| record.event).collect()
    }

    pub(crate) fn steps(&self, run: &str) -> Vec<StepRecord> {
        of_kind!(self.events(run), Event::Step).map(|step| *step).collect()
    }
}
