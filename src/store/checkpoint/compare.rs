//! Compares two checkpoints, tensor by tensor and figure by figure.

use super::manifest::{CONFIG, MASTERS, OPTIMIZER, STATE, TOKENIZER, WEIGHTS};
use crate::digest::read_at_most;
use crate::store::adapter::{ADAPTER_CONFIG, ADAPTER_WEIGHTS};
use crate::store::tensor_file::{Dtype, TensorFile, TensorView};
use crate::{Error, Result};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

/// One difference.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckpointDifference {
    /// The file that differs.
    pub file: String,
    /// The tensor or the JSON path; empty for the file as a whole.
    pub name: String,
    /// The kind of difference, for counts: `with other values`.
    pub kind: &'static str,
    /// How they differ.
    pub message: String,
}

impl fmt::Display for CheckpointDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, name, message, .. } = self;
        if name.is_empty() { write!(f, "{file}: {message}") } else { write!(f, "{file}: `{name}`: {message}") }
    }
}

/// Compares two step directories bit for bit; empty if everything that matters to a run is equal. Fails with
/// [`Error::Io`] or [`Error::Model`] if a file cannot be read. Does not check checksums; see [`verify`](super::verify).
pub fn compare(a: &Path, b: &Path) -> Result<Vec<CheckpointDifference>> {
    let mut differences = Vec::new();
    for file in [CONFIG, ADAPTER_CONFIG, STATE] {
        each_side(a, b, file, &mut differences, |a, b, found| {
            json(&read_json(a)?, &read_json(b)?, "", found);
            Ok(())
        })?;
    }
    each_side(a, b, TOKENIZER, &mut differences, |a, b, found| {
        if read(a)? != read(b)? {
            found.push((String::new(), OTHER, "the contents differ".into()));
        }
        Ok(())
    })?;
    for file in [WEIGHTS, ADAPTER_WEIGHTS, MASTERS, OPTIMIZER] {
        each_side(a, b, file, &mut differences, |a, b, found| {
            tensors(&TensorFile::open(a)?, &TensorFile::open(b)?, found)
        })?;
    }
    Ok(differences)
}

const OTHER: &str = "with other values";
const RESHAPED: &str = "with another shape or type";
const ONLY_IN_FIRST: &str = "only in the first";
const ONLY_IN_SECOND: &str = "only in the second";

/// A name within a file, and the kind and description of the difference.
type Findings = Vec<(String, &'static str, String)>;

/// Runs `inspect` on a file that exists in both; a file in only one is a difference.
fn each_side(
    a: &Path,
    b: &Path,
    file: &str,
    differences: &mut Vec<CheckpointDifference>,
    inspect: impl FnOnce(&Path, &Path, &mut Findings) -> Result<()>,
) -> Result<()> {
    let (a, b) = (a.join(file), b.join(file));
    let mut found = Findings::new();
    match (a.exists(), b.exists()) {
        (true, true) => inspect(&a, &b, &mut found)?,
        (false, false) => {}
        (true, false) => found.push((String::new(), ONLY_IN_FIRST, ONLY_IN_FIRST.into())),
        (false, true) => found.push((String::new(), ONLY_IN_SECOND, ONLY_IN_SECOND.into())),
    }
    let named = |(name, kind, message)| CheckpointDifference { file: file.to_owned(), name, kind, message };
    differences.extend(found.into_iter().map(named));
    Ok(())
}

/// Limit on the files that are read whole; a tokenizer is the largest.
const MAX_BYTES: u64 = 128 << 20;

fn read(path: &Path) -> Result<Vec<u8>> {
    read_at_most(path, MAX_BYTES)
}

fn read_json(path: &Path) -> Result<Value> {
    serde_json::from_slice(&read(path)?).map_err(|error| Error::checkpoint(path, error.to_string()))
}

/// Reports the leaves that differ between two JSON values, by dotted path.
fn json(a: &Value, b: &Value, path: &str, found: &mut Findings) {
    if let (Value::Object(left), Value::Object(right)) = (a, b) {
        for key in left.keys().chain(right.keys()).collect::<BTreeSet<_>>() {
            let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            json(left.get(key).unwrap_or(&Value::Null), right.get(key).unwrap_or(&Value::Null), &path, found);
        }
    } else if a != b {
        found.push((path.to_owned(), OTHER, format!("{a} and {b}")));
    }
}

fn tensors(a: &TensorFile, b: &TensorFile, found: &mut Findings) -> Result<()> {
    let names: BTreeSet<_> = a.tensors().chain(b.tensors()).map(|view| view.name.to_owned()).collect();
    for name in names {
        let difference = match (a.get(&name), b.get(&name)) {
            (Some(a), Some(b)) if (a.dtype, a.shape) != (b.dtype, b.shape) => {
                Some((RESHAPED, format!("{} {:?} and {} {:?}", a.dtype, a.shape, b.dtype, b.shape)))
            }
            (Some(a), Some(b)) => values(&a, &b)?.map(|message| (OTHER, message)),
            (Some(_), None) => Some((ONLY_IN_FIRST, ONLY_IN_FIRST.into())),
            (None, _) => Some((ONLY_IN_SECOND, ONLY_IN_SECOND.into())),
        };
        found.extend(difference.map(|(kind, message)| (name, kind, message)));
    }
    Ok(())
}

/// How the values of two tensors of one type and shape differ: how many, the first, the largest difference.
fn values(a: &TensorView<'_>, b: &TensorView<'_>) -> Result<Option<String>> {
    if a.bytes == b.bytes {
        return Ok(None);
    }
    if a.dtype == Dtype::U8 {
        let count = a.bytes.iter().zip(b.bytes).filter(|(a, b)| a != b).count();
        return Ok(Some(format!("{count} of {} codes differ", a.bytes.len())));
    }
    // Compare bits, so that identical NaNs are equal and 0 and -0 are not.
    let (left, right) = (a.to_f32()?, b.to_f32()?);
    let pairs = || left.iter().zip(&right).enumerate().filter(|(_, (x, y))| x.to_bits() != y.to_bits());
    let largest = pairs().map(|(_, (x, y))| (x - y).abs()).fold(0.0, f32::max);
    Ok(pairs().next().map(|(index, (x, y))| {
        let count = pairs().count();
        format!(
            "{count} of {} values differ, the first at {index}: {x:e} and {y:e}, the largest difference {largest:e}",
            left.len()
        )
    }))
}
