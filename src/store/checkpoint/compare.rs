//! Where two checkpoints differ, tensor by tensor and figure by figure.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

use serde_json::Value;

use super::manifest::{CONFIG, MASTERS, OPTIMIZER, STATE, TOKENIZER, WEIGHTS};
use crate::digest::read_at_most;
use crate::store::tensor_file::{TensorFile, TensorView};
use crate::{Error, Result};

/// One difference.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// The file it is in.
    pub file: String,
    /// The tensor or the JSON path; empty if it is the file as a whole.
    pub name: String,
    /// How they differ.
    pub message: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, name, message } = self;
        if name.is_empty() { write!(f, "{file}: {message}") } else { write!(f, "{file}: `{name}`: {message}") }
    }
}

/// Compares two step directories bit for bit; empty means that they are the same in everything that matters to a run.
///
/// # Errors
/// [`Error::Io`] or [`Error::Model`] where a file cannot be read; checksums are not
/// checked, see [`verify`](super::verify).
pub fn compare(a: &Path, b: &Path) -> Result<Vec<Difference>> {
    let mut differences = Vec::new();
    for file in [CONFIG, STATE] {
        each_side(a, b, file, &mut differences, |a, b, found| {
            json(&read_json(a)?, &read_json(b)?, "", found);
            Ok(())
        })?;
    }
    each_side(a, b, TOKENIZER, &mut differences, |a, b, found| {
        if read(a)? != read(b)? {
            found.push((String::new(), "the contents differ".into()));
        }
        Ok(())
    })?;
    for file in [WEIGHTS, MASTERS, OPTIMIZER] {
        each_side(a, b, file, &mut differences, |a, b, found| {
            tensors(&TensorFile::open(a)?, &TensorFile::open(b)?, found)
        })?;
    }
    Ok(differences)
}

/// A name within a file and how it differs.
type Findings = Vec<(String, String)>;

/// Runs `inspect` on a file that both have; a file that only one has is itself a difference.
fn each_side(
    a: &Path,
    b: &Path,
    file: &str,
    differences: &mut Vec<Difference>,
    inspect: impl FnOnce(&Path, &Path, &mut Findings) -> Result<()>,
) -> Result<()> {
    let (a, b) = (a.join(file), b.join(file));
    let mut found = Findings::new();
    match (a.exists(), b.exists()) {
        (true, true) => inspect(&a, &b, &mut found)?,
        (false, false) => {}
        (true, false) => found.push((String::new(), "only the first has it".into())),
        (false, true) => found.push((String::new(), "only the second has it".into())),
    }
    let named = |(name, message)| Difference { file: file.to_owned(), name, message };
    differences.extend(found.into_iter().map(named));
    Ok(())
}

/// The limit on a tokenizer's file, the largest of those that are read whole.
const MAX_BYTES: u64 = 128 << 20;

fn read(path: &Path) -> Result<Vec<u8>> {
    read_at_most(path, MAX_BYTES)
}

fn read_json(path: &Path) -> Result<Value> {
    serde_json::from_slice(&read(path)?).map_err(|error| Error::checkpoint(path, error.to_string()))
}

/// Walks two JSON values and reports leaves that differ, by their dotted path.
fn json(a: &Value, b: &Value, path: &str, found: &mut Findings) {
    if let (Value::Object(left), Value::Object(right)) = (a, b) {
        for key in left.keys().chain(right.keys()).collect::<BTreeSet<_>>() {
            let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            json(left.get(key).unwrap_or(&Value::Null), right.get(key).unwrap_or(&Value::Null), &path, found);
        }
    } else if a != b {
        found.push((path.to_owned(), format!("{a} and {b}")));
    }
}

fn tensors(a: &TensorFile, b: &TensorFile, found: &mut Findings) -> Result<()> {
    let names: BTreeSet<_> = a.tensors().chain(b.tensors()).map(|view| view.name.to_owned()).collect();
    for name in names {
        let message = match (a.get(&name), b.get(&name)) {
            (Some(a), Some(b)) => values(&a, &b)?,
            (Some(_), None) => Some("only the first has it".into()),
            (None, _) => Some("only the second has it".into()),
        };
        found.extend(message.map(|message| (name, message)));
    }
    Ok(())
}

/// How two tensors differ: in type, in shape, or in how many values, where first and by how much at most.
fn values(a: &TensorView<'_>, b: &TensorView<'_>) -> Result<Option<String>> {
    if (a.dtype, a.shape) != (b.dtype, b.shape) {
        return Ok(Some(format!("{} {:?} and {} {:?}", a.dtype, a.shape, b.dtype, b.shape)));
    }
    if a.bytes == b.bytes {
        return Ok(None);
    }
    // Bits are compared, so that equal NaNs are equal and 0 and -0 are not.
    let (left, right) = (a.to_f32()?, b.to_f32()?);
    let pairs = || left.iter().zip(&right).enumerate().filter(|(_, (x, y))| x.to_bits() != y.to_bits());
    let largest = pairs().map(|(_, (x, y))| (x - y).abs()).fold(0.0, f32::max);
    Ok(pairs().next().map(|(index, (x, y))| {
        let count = pairs().count();
        format!(
            "{count} of {} values differ, the first at {index}: {x:e} and {y:e}, at most by {largest:e}",
            left.len()
        )
    }))
}
