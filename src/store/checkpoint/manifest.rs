//! `manifest.json`: the exact contents of a step directory.

use super::state::{FORMAT_VERSION, check_version, format_version};
use crate::digest::{Digest, read_at_most};
use crate::store::adapter::{ADAPTER_CONFIG, ADAPTER_WEIGHTS};
use crate::store::aux_files::AuxFiles;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

pub(super) const MANIFEST: &str = "manifest.json";
/// The training figures.
pub(super) const STATE: &str = "state.json";
/// The model's shape.
pub(super) const CONFIG: &str = "config.json";
pub(super) const TOKENIZER: &str = "tokenizer.json";
/// The compute-dtype weights.
pub(super) const WEIGHTS: &str = "model.safetensors";
/// The FP32 weights.
pub(super) const MASTERS: &str = "master.safetensors";
/// Adam's moments.
pub(super) const OPTIMIZER: &str = "optimizer.safetensors";
/// The common prefix of both moments' names.
pub(super) const MOMENTS: [&str; 2] = ["exp_avg", "exp_avg_sq"];

/// Larger indices are rejected as forged, because incrementing them could overflow.
pub(super) const MAX_SAVE_INDEX: u64 = u64::MAX / 2;

const MAX_BYTES: u64 = 1 << 20;

/// The kind of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckpointKind {
    /// Everything needed to resume a run.
    Full,
    /// Only a model folder, a fifth of the size.
    Weights,
}

impl CheckpointKind {
    /// Both kinds.
    pub const ALL: [Self; 2] = [Self::Full, Self::Weights];

    /// The files of such a checkpoint in writing order, without the [`AuxFiles`] and the manifest, which come last.
    pub fn files(self, adapters: bool) -> &'static [&'static str] {
        match (self, adapters) {
            (Self::Full, false) => &[CONFIG, TOKENIZER, WEIGHTS, MASTERS, OPTIMIZER, STATE],
            (Self::Full, true) => &[CONFIG, TOKENIZER, ADAPTER_CONFIG, ADAPTER_WEIGHTS, MASTERS, OPTIMIZER, STATE],
            (Self::Weights, false) => &[CONFIG, TOKENIZER, WEIGHTS],
            (Self::Weights, true) => &[CONFIG, TOKENIZER, ADAPTER_CONFIG, ADAPTER_WEIGHTS],
        }
    }

    /// The name of the directory after `step`.
    pub fn directory(self, step: u64) -> String {
        format!("{}-{step:06}", self.prefix())
    }

    /// Parses a directory's name: the inverse of [`CheckpointKind::directory`].
    pub fn parse_directory(name: &str) -> Option<(Self, u64)> {
        Self::ALL.into_iter().find_map(|kind| {
            let step = name.strip_prefix(kind.prefix())?.strip_prefix('-')?.parse().ok()?;
            // Accept only the canonical spelling, not `step-7` or `step-+00007`.
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

/// A checkpoint's kind, step and validation loss, and the size and SHA-256 of each of its files.
///
/// On disk it includes a SHA-256 of its compact JSON, to detect damage to the manifest itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Full, or weights only.
    pub kind: CheckpointKind,
    /// Steps attempted when it was written.
    pub step: u64,
    /// The order of saves, independent of the clock: larger than the save index of every earlier checkpoint of this
    /// run, and of every checkpoint in a sibling run when this run was opened.
    pub save_index: u64,
    /// Validation loss of these weights in nats per token, if it was measured.
    pub validation_loss: Option<f64>,
    /// The other files of the directory.
    pub files: BTreeMap<String, Digest>,
}

impl Manifest {
    /// Reads the manifest of a step directory, and checks that it belongs to this directory and lists the files of its
    /// kind, and no others but [`AuxFiles`]. Fails with [`Error::Checkpoint`] naming the manifest and what is wrong
    /// with it.
    pub fn read(directory: &Path) -> Result<Self> {
        let path = directory.join(MANIFEST);
        let fail = |message: String| Error::checkpoint(&path, message);
        let text = read_at_most(&path, MAX_BYTES).map_err(|error| match error {
            Error::Io { source, .. } => fail(missing_or(&source)),
            other => other,
        })?;
        let manifest = Self::from_json(&text).map_err(fail)?;
        let name = directory.file_name().unwrap_or_default().to_string_lossy();
        // A copy may have any name except that of another step.
        match CheckpointKind::parse_directory(&name) {
            Some(said) if said != (manifest.kind, manifest.step) => {
                Err(fail(format!("it belongs to `{}`", manifest.kind.directory(manifest.step))))
            }
            _ => Ok(manifest),
        }
    }

    /// Whether another version of the program wrote the step directory in a format that this one does not read.
    pub fn has_other_format(directory: &Path) -> bool {
        let text = read_at_most(&directory.join(MANIFEST), MAX_BYTES).unwrap_or_default();
        format_version(&text).is_ok_and(|version| version != FORMAT_VERSION)
    }

    /// Whether it is of adapters, in PEFT's format, without their base.
    pub fn has_adapters(&self) -> bool {
        self.files.contains_key(ADAPTER_CONFIG)
    }

    pub(super) fn to_json(&self) -> serde_json::Result<Vec<u8>> {
        let file = ManifestFile { format_version: FORMAT_VERSION, manifest: self.clone(), checksum: self.checksum()? };
        let mut text = serde_json::to_vec_pretty(&file)?;
        text.push(b'\n');
        Ok(text)
    }

    fn checksum(&self) -> serde_json::Result<String> {
        Ok(Digest::of(&serde_json::to_vec(self)?).sha256)
    }

    pub(super) fn from_json(text: &[u8]) -> Result<Self, String> {
        check_version(text)?;
        Self::parse_verified(text).map_err(|message| format!("damaged: {message}"))
    }

    fn parse_verified(text: &[u8]) -> Result<Self, String> {
        let ManifestFile { manifest, checksum, .. } =
            serde_json::from_slice(text).map_err(|error| error.to_string())?;
        if manifest.checksum().map_err(|error| error.to_string())? != checksum {
            return Err("its contents changed since it was written (its checksum differs)".into());
        }
        if manifest.save_index > MAX_SAVE_INDEX {
            return Err(format!("the save index {} is too large", manifest.save_index));
        }
        let expected = manifest.kind.files(manifest.has_adapters());
        let known = |name: &str| expected.contains(&name) || AuxFiles::NAMES.contains(&name);
        if let Some(name) = expected.iter().find(|name| !manifest.files.contains_key(**name)) {
            return Err(format!("it does not list `{name}`"));
        }
        if let Some(name) = manifest.files.keys().find(|name| !known(name)) {
            return Err(format!("it lists `{name}`, which is not part of a checkpoint"));
        }
        Ok(manifest)
    }

    /// The size of the checkpoint without the manifest.
    pub fn bytes(&self) -> u64 {
        self.files.values().map(|digest| digest.bytes).fold(0, u64::saturating_add)
    }
}

/// The file's contents: a manifest and the hash of its compact JSON.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ManifestFile {
    format_version: u32,
    manifest: Manifest,
    checksum: String,
}

pub(super) fn missing_or(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::NotFound => "it is missing".into(),
        _ => format!("it cannot be read: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn manifest(kind: CheckpointKind) -> Manifest {
        let files = kind.files(false).iter().map(|name| ((*name).to_owned(), Digest::of(name.as_bytes()))).collect();
        Manifest { kind, step: 128, save_index: 3, validation_loss: Some(2.5), files }
    }

    #[test]
    fn directories_have_one_spelling() {
        assert_eq!(CheckpointKind::Full.directory(128), "step-000128");
        for (name, expected) in [
            ("step-000128", Some((CheckpointKind::Full, 128))),
            ("weights-12345678", Some((CheckpointKind::Weights, 12_345_678))),
            ("step-128", None),
            ("step-+00128", None),
            (".step-000128.tmp", None),
            ("step-000128.old", None),
            ("step-", None),
        ] {
            assert_eq!(CheckpointKind::parse_directory(name), expected, "{name}");
        }
    }

    #[test]
    fn a_forged_save_index_is_rejected() {
        for (save_index, fine) in [(MAX_SAVE_INDEX, true), (MAX_SAVE_INDEX + 1, false), (u64::MAX, false)] {
            let text = Manifest { save_index, ..manifest(CheckpointKind::Full) }.to_json().unwrap();
            assert_eq!(Manifest::from_json(&text).is_ok(), fine, "{save_index}");
        }
    }

    #[test]
    fn a_manifest_lists_exactly_the_files_of_its_kind() {
        for kind in CheckpointKind::ALL {
            let good = manifest(kind);
            assert_eq!(Manifest::from_json(&good.to_json().unwrap()).unwrap(), good);
            let mut short = good.clone();
            short.files.remove(WEIGHTS);
            assert!(Manifest::from_json(&short.to_json().unwrap()).unwrap_err().contains("does not list"));
            let mut long = good;
            long.files.insert("../../etc/passwd".into(), Digest::of(b""));
            assert!(Manifest::from_json(&long.to_json().unwrap()).unwrap_err().contains("not part of"));
        }
    }

    #[test]
    fn a_manifest_of_another_directory_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        for (name, message) in
            [("step-000128", None), ("copy", None), ("step-000129", Some("it belongs to `step-000128`"))]
        {
            let directory = folder.path().join(name);
            std::fs::create_dir(&directory).unwrap();
            std::fs::write(directory.join(MANIFEST), manifest(CheckpointKind::Full).to_json().unwrap()).unwrap();
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
        fn any_text_is_parsed_or_rejected(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Manifest::from_json(&bytes);
        }

        #[test]
        fn a_changed_byte_is_rejected_or_has_no_effect(at in any::<proptest::sample::Index>(), byte in any::<u8>()) {
            let mut text = manifest(CheckpointKind::Full).to_json().unwrap();
            let at = at.index(text.len());
            text[at] = byte;
            if let Ok(read) = Manifest::from_json(&text) {
                prop_assert_eq!(read, manifest(CheckpointKind::Full));
            }
        }
    }
}
