//! `manifest.json`: what a step directory must hold, byte for byte.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::state::{FORMAT_VERSION, check_version};
use crate::digest::{Digest, read_at_most};
use crate::{Error, Result};

/// The manifest's own name.
pub(super) const MANIFEST: &str = "manifest.json";
/// The training figures.
pub(super) const STATE: &str = "state.json";
/// The model's shape.
pub(super) const CONFIG: &str = "config.json";
/// The tokenizer.
pub(super) const TOKENIZER: &str = "tokenizer.json";
/// The compute-dtype weights.
pub(super) const WEIGHTS: &str = "model.safetensors";
/// The FP32 weights.
pub(super) const MASTERS: &str = "master.safetensors";
/// Adam's moments.
pub(super) const OPTIMIZER: &str = "optimizer.safetensors";

/// No run saves this often. A larger sequence is forged, and counting on from it could wrap.
pub(super) const MAX_SEQUENCE: u64 = u64::MAX / 2;

/// Manifests are small; a larger file is refused unread.
const MAX_BYTES: u64 = 1 << 20;

/// What a checkpoint contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A run can be resumed from it.
    Full,
    /// A model folder alone, a fifth of the size.
    Weights,
}

impl Kind {
    /// Both kinds.
    pub const ALL: [Self; 2] = [Self::Full, Self::Weights];

    /// The files of such a checkpoint, in the order they are written; the manifest comes after them.
    pub fn files(self) -> &'static [&'static str] {
        match self {
            Self::Full => &[CONFIG, TOKENIZER, WEIGHTS, MASTERS, OPTIMIZER, STATE],
            Self::Weights => &[CONFIG, TOKENIZER, WEIGHTS],
        }
    }

    /// The name of the directory after `step`.
    pub fn directory(self, step: u64) -> String {
        format!("{}-{step:06}", self.prefix())
    }

    /// What a directory's name says: the inverse of [`Kind::directory`].
    pub fn parse_directory(name: &str) -> Option<(Self, u64)> {
        Self::ALL.into_iter().find_map(|kind| {
            let step = name.strip_prefix(kind.prefix())?.strip_prefix('-')?.parse().ok()?;
            // Only the canonical spelling: `step-7` or `step-+00007` are not ours.
            (kind.directory(step) == name).then_some((kind, step))
        })
    }

    fn prefix(self) -> &'static str {
        match self {
            Self::Full => "step",
            Self::Weights => "weights",
        }
    }
}

/// What a checkpoint is, and the size and SHA-256 of each of its files.
///
/// On disk it carries a SHA-256 of its own JSON without spaces, so that damage to the manifest shows too.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Full, or weights only.
    pub kind: Kind,
    /// Steps attempted when it was written.
    pub step: u64,
    /// Larger than that of any checkpoint in this or a neighbouring run when the run was opened, and than any that the run
    /// has written since: the order of saves, independent of the clock.
    pub sequence: u64,
    /// Validation loss of these weights, if it was measured: nats a token.
    pub validation_loss: Option<f64>,
    /// Every other file of the directory.
    pub files: BTreeMap<String, Digest>,
}

impl Manifest {
    /// Reads the manifest of a step directory, and checks that it is about this directory and names the files that a
    /// checkpoint of its kind has, no more and no fewer.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] naming the manifest and what is wrong with it.
    pub fn read(directory: &Path) -> Result<Self> {
        let path = directory.join(MANIFEST);
        let fail = |message: String| Error::checkpoint(&path, message);
        let text = read_at_most(&path, MAX_BYTES).map_err(|error| match error {
            Error::Io { source, .. } => fail(missing_or(&source)),
            other => other,
        })?;
        let manifest = Self::from_json(&text).map_err(fail)?;
        let name = directory.file_name().unwrap_or_default().to_string_lossy();
        // A copy may have any other name, but not the name of another step.
        match Kind::parse_directory(&name) {
            Some(said) if said != (manifest.kind, manifest.step) => {
                Err(fail(format!("it is that of `{}`", manifest.kind.directory(manifest.step))))
            }
            _ => Ok(manifest),
        }
    }

    /// The text of the file.
    pub(super) fn to_json(&self) -> serde_json::Result<Vec<u8>> {
        let sealed = Sealed { format_version: FORMAT_VERSION, manifest: self.clone(), seal: self.seal()? };
        let mut text = serde_json::to_vec_pretty(&sealed)?;
        text.push(b'\n');
        Ok(text)
    }

    fn seal(&self) -> serde_json::Result<String> {
        Ok(Digest::of(&serde_json::to_vec(self)?).sha256)
    }

    /// Reads the text of the file.
    pub(super) fn from_json(text: &[u8]) -> Result<Self, String> {
        check_version(text)?;
        Self::unseal(text).map_err(|message| format!("damaged: {message}"))
    }

    fn unseal(text: &[u8]) -> Result<Self, String> {
        let Sealed { manifest, seal, .. } = serde_json::from_slice(text).map_err(|error| error.to_string())?;
        if manifest.seal().map_err(|error| error.to_string())? != seal {
            return Err("its contents changed since it was written (its seal differs)".into());
        }
        if manifest.sequence > MAX_SEQUENCE {
            return Err(format!("no save has the sequence number {}", manifest.sequence));
        }
        let expected = manifest.kind.files();
        if let Some(name) = expected.iter().find(|name| !manifest.files.contains_key(**name)) {
            return Err(format!("it does not name `{name}`"));
        }
        if let Some(name) = manifest.files.keys().find(|name| !expected.contains(&name.as_str())) {
            return Err(format!("it names `{name}`, which is no part of a checkpoint"));
        }
        Ok(manifest)
    }

    /// The size of the whole checkpoint but for the manifest.
    pub fn bytes(&self) -> u64 {
        self.files.values().map(|digest| digest.bytes).fold(0, u64::saturating_add)
    }
}

/// The file: a manifest and what its JSON without spaces hashes to.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sealed {
    format_version: u32,
    manifest: Manifest,
    seal: String,
}

/// Describes why a file cannot be read.
pub(super) fn missing_or(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::NotFound => "it is missing".into(),
        _ => format!("it cannot be read: {error}"),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use proptest::prelude::*;

    use super::*;

    fn manifest(kind: Kind) -> Manifest {
        let files = kind.files().iter().map(|name| ((*name).to_owned(), Digest::of(name.as_bytes()))).collect();
        Manifest { kind, step: 128, sequence: 3, validation_loss: Some(2.5), files }
    }

    #[test]
    fn directories_have_one_spelling() {
        assert_eq!(Kind::Full.directory(128), "step-000128");
        for (name, expected) in [
            ("step-000128", Some((Kind::Full, 128))),
            ("weights-12345678", Some((Kind::Weights, 12_345_678))),
            ("step-128", None),
            ("step-+00128", None),
            (".step-000128.tmp", None),
            ("step-000128.old", None),
            ("step-", None),
        ] {
            assert_eq!(Kind::parse_directory(name), expected, "{name}");
        }
    }

    #[test]
    fn a_sequence_that_no_run_can_reach_is_refused() {
        for (sequence, fine) in [(MAX_SEQUENCE, true), (MAX_SEQUENCE + 1, false), (u64::MAX, false)] {
            let text = Manifest { sequence, ..manifest(Kind::Full) }.to_json().unwrap();
            assert_eq!(Manifest::from_json(&text).is_ok(), fine, "{sequence}");
        }
    }

    #[test]
    fn a_manifest_names_just_the_files_of_its_kind() {
        for kind in Kind::ALL {
            let good = manifest(kind);
            assert_eq!(Manifest::from_json(&good.to_json().unwrap()).unwrap(), good);
            let mut short = good.clone();
            short.files.remove(WEIGHTS);
            assert!(Manifest::from_json(&short.to_json().unwrap()).unwrap_err().contains("does not name"));
            let mut long = good;
            long.files.insert("../../etc/passwd".into(), Digest::of(b""));
            assert!(Manifest::from_json(&long.to_json().unwrap()).unwrap_err().contains("no part of"));
        }
    }

    #[test]
    fn a_manifest_of_another_directory_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        for (name, message) in
            [("step-000128", None), ("copy", None), ("step-000129", Some("it is that of `step-000128`"))]
        {
            let directory = folder.path().join(name);
            std::fs::create_dir(&directory).unwrap();
            std::fs::write(directory.join(MANIFEST), manifest(Kind::Full).to_json().unwrap()).unwrap();
            match (Manifest::read(&directory), message) {
                (Ok(_), None) => {}
                (Err(error), Some(message)) => assert!(error.to_string().contains(message), "{error}"),
                (result, _) => panic!("{name}: {result:?}"),
            }
        }
        let error = Manifest::read(folder.path()).unwrap_err().to_string();
        assert!(error.contains("manifest.json`: it is missing"), "{error}");
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Manifest::from_json(&bytes);
        }

        #[test]
        fn a_changed_byte_is_refused_or_changes_nothing(at in any::<proptest::sample::Index>(), byte in any::<u8>()) {
            let mut text = manifest(Kind::Full).to_json().unwrap();
            let at = at.index(text.len());
            text[at] = byte;
            if let Ok(read) = Manifest::from_json(&text) {
                prop_assert_eq!(read, manifest(Kind::Full));
            }
        }
    }
}
