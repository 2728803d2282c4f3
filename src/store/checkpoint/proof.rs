//! Proofs: hashes that bind each full checkpoint of a run to its log, its configuration and the checkpoint before it.
//!
//! The manifest's digests are computed while files are written, so a proof costs only the hash of the log's new part.

use super::manifest::{MASTERS, Manifest, OPTIMIZER};
use super::read::{Checkpoint, verified};
use super::run::CONFIG as RUN_CONFIG;
use super::state::State;
use crate::digest::Digest;
use crate::telemetry::{CheckpointProof, CheckpointSaved, Detail, Event, Tail};
use crate::{Error, Result, untrusted};
use std::io::{BufRead, BufReader, Seek, SeekFrom};
use std::path::Path;

/// Computes the proof of a checkpoint, given the text of the run's configuration and the run's `log`, which may not
/// exist.
pub fn prove(
    manifest: &Manifest,
    state: &State,
    config: &str,
    log: &Path,
    previous: Option<&CheckpointProof>,
) -> Result<CheckpointProof> {
    let hash = |name: &str| manifest.files.get(name).map_or_else(String::new, |digest| digest.sha256.clone());
    let first = previous.map_or(0, |previous| previous.log_bytes);
    let new = if log.exists() { Digest::of_range(log, first..u64::MAX)? } else { Digest::of(&[]) };
    let mut proof = CheckpointProof {
        masters: hash(MASTERS),
        moments: hash(OPTIMIZER),
        state: state_hash(state),
        config: Digest::of(config.as_bytes()).sha256,
        data: Digest::of(state.fingerprint.data.as_bytes()).sha256,
        log: new.sha256,
        log_bytes: first + new.bytes,
        chain: String::new(),
    };
    proof.chain = chain(manifest.step, &proof, previous);
    Ok(proof)
}

/// The hash of the figures that determine later steps; validation results do not.
fn state_hash(state: &State) -> String {
    let figures = State { validation_loss: None, best: None, early_stopping_counter: 0, ..state.clone() };
    Digest::of(&serde_json::to_vec(&figures).unwrap_or_default()).sha256
}

fn chain(step: u64, proof: &CheckpointProof, previous: Option<&CheckpointProof>) -> String {
    let CheckpointProof { masters, moments, state, config, data, log, log_bytes, .. } = proof;
    let before = previous.map_or("", |previous| &previous.chain);
    let links = [before, masters, moments, state, config, data, log].join(" ");
    Digest::of(format!("{step} {log_bytes} {links}").as_bytes()).sha256
}

/// The full checkpoints in a log, in the order they were written; none if it does not exist.
pub fn logged_checkpoints(log: &Path) -> Result<Vec<CheckpointSaved>> {
    let mut found = Vec::new();
    Tail::new(log).with(Detail::Kind("checkpoint_saved")).drain(&mut |record| {
        if let Event::CheckpointSaved(saved) = record.event {
            found.push(saved);
        }
        Ok(true)
    })?;
    found.retain(|saved| !saved.weights_only);
    Ok(found)
}

/// Checks the chain of proofs in a run's log, and the files of the checkpoints that still exist; returns the
/// differences.
pub fn check_proofs(run: &Path, log: &Path, checkpoints: &[CheckpointSaved]) -> Result<Vec<String>> {
    let mut differences = Vec::new();
    let mut previous = None::<&CheckpointProof>;
    let config = run.join(RUN_CONFIG);
    let last = checkpoints.last().and_then(|saved| saved.proof.as_ref());
    if let Some(last) = last
        && Digest::of_file(&config)?.sha256 != last.config
        && !was_resumed_after(log, last.log_bytes)?
    {
        differences.push(format!("{RUN_CONFIG}: changed after the last checkpoint"));
    }
    for (index, saved) in checkpoints.iter().enumerate() {
        let Some(proof) = &saved.proof else { continue };
        let step = saved.step;
        if proof.chain != chain(step, proof, previous) {
            differences.push(format!("log: the hashes of step {step} do not continue the chain"));
        }
        let first = previous.map_or(0, |previous| previous.log_bytes);
        if Digest::of_range(log, first..proof.log_bytes)?.sha256 != proof.log {
            differences.push(format!("log: bytes {first} to {} changed after step {step}", proof.log_bytes));
        }
        previous = Some(proof);
        // A resumed run may have written the step again.
        let newest = checkpoints[index + 1..].iter().all(|later| later.step != step);
        let folder = run.join(super::CheckpointKind::Full.directory(step));
        if newest && folder.exists() {
            differences.extend(check_files(&folder, proof)?);
        }
    }
    Ok(differences)
}

/// Whether a process continued the run after its last checkpoint, perhaps with other settings.
fn was_resumed_after(log: &Path, first: u64) -> Result<bool> {
    const EVENT: &[u8] = b"\"event\":\"started\"";
    let mut file = untrusted::open(log).map_err(Error::io("read", log))?;
    file.seek(SeekFrom::Start(first)).map_err(Error::io("read", log))?;
    for line in BufReader::new(file).split(b'\n') {
        if line.map_err(Error::io("read", log))?.windows(EVENT.len()).any(|window| window == EVENT) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The damaged files of a checkpoint, or else the parts that `proof` has other hashes of.
fn check_files(folder: &Path, proof: &CheckpointProof) -> Result<Vec<String>> {
    let manifest = match verified(folder) {
        Ok(manifest) => manifest,
        Err(corrupt) => {
            return Ok(corrupt.into_iter().map(|it| format!("{}: {}", it.path.display(), it.message)).collect());
        }
    };
    let checkpoint = Checkpoint::read(folder.to_path_buf(), manifest)?;
    let found = prove(checkpoint.manifest(), checkpoint.state(), "", Path::new(""), None)?;
    let differs = |part: &str| format!("{}: its {part} differ from the hash in the log", folder.display());
    Ok(differing_parts(&found, proof).into_iter().map(differs).collect())
}

/// The names of the tensors and figures whose hashes differ.
pub fn differing_parts(a: &CheckpointProof, b: &CheckpointProof) -> Vec<&'static str> {
    let parts =
        [("masters", &a.masters, &b.masters), ("moments", &a.moments, &b.moments), ("figures", &a.state, &b.state)];
    parts.into_iter().filter(|(_, a, b)| a != b).map(|(name, ..)| name).collect()
}
