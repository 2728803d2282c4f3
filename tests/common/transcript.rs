//! Transcripts of refused command lines and configurations, with their messages: `tests/transcripts`.
//!
//! A transcript is the list of its cases. To add one, write its line, `$ finetune …`, into the file and store the
//! message with `INSTA_UPDATE=always`.

use super::cli_fixture::CliFixture;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Messages of a slow preparation.
const PHASES: [&str; 8] =
    ["drawing", "reading", "tokenizing", "preparing", "verifying", "computing", "measuring", "exporting"];

/// Asserts that `answer` returns the stored message for each line of the transcript that starts with `prompt`.
pub(crate) fn assert_transcript(transcript: &str, prompt: &str, answer: impl Fn(&str) -> String) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/transcripts/{transcript}.snap"));
    let stored = fs::read_to_string(path).unwrap();
    let lines: Vec<&str> = stored.lines().filter_map(|line| line.strip_prefix(prompt)).collect();
    assert!(!lines.is_empty(), "{transcript} contains no case");
    let said = lines.iter().map(|line| format!("{prompt}{line}\n{}\n\n", answer(line))).collect::<Vec<_>>().concat();
    insta::with_settings!({snapshot_path => "../transcripts", prepend_module_to_snapshot => false}, {
        insta::assert_snapshot!(transcript, said);
    });
}

/// Asserts that every command line of a transcript is refused with its message, exit code 2, and nothing written.
pub(crate) fn assert_refused(fixture: &CliFixture, transcript: &str) {
    let before = tree(fixture);
    assert_transcript(transcript, "$ finetune ", |line| refusal(fixture, line, &before));
}

/// The message for a command line.
fn refusal(fixture: &CliFixture, line: &str, before: &BTreeMap<PathBuf, Vec<u8>>) -> String {
    let complaint = fixture.refused(line);
    // On a slow machine, slow phases before the error have been reported.
    let is_phase = |line: &&str| PHASES.iter().any(|phase| line.starts_with(phase));
    let complaint: String = complaint.lines().skip_while(is_phase).map(|line| line.to_owned() + "\n").collect();
    assert_eq!(
        complaint.lines().filter(|line| line.starts_with("error: ")).count(),
        1,
        "finetune {line}: one message\n{complaint}"
    );
    assert!(complaint.starts_with("error: "), "finetune {line}\n{complaint}");
    assert!(!complaint.contains("panicked"), "finetune {line}\n{complaint}");
    let after = tree(fixture);
    let changed: Vec<_> = after.iter().filter(|(path, bytes)| before.get(*path) != Some(bytes)).collect();
    assert!(changed.is_empty() && before.len() == after.len(), "finetune {line} changed the folder: {changed:?}");
    let folder = fixture.folder().display().to_string();
    complaint.trim_end().replace(&folder, "[FOLDER]")
}

/// Every file with its contents, except token caches, which depend only on the text, and lock files, which contain the
/// last process's id.
pub(crate) fn tree(fixture: &CliFixture) -> BTreeMap<PathBuf, Vec<u8>> {
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
    walk(fixture.folder(), &mut found);
    found.retain(|path, _| !path.starts_with(fixture.path("data")) && !path.ends_with(".lock"));
    found
}
