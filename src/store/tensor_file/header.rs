//! The header of a safetensors file, parsed and checked by the `safetensors` crate with a tighter limit on its length.

use safetensors::{Dtype, SafeTensorError, SafeTensors};
use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use std::collections::{HashMap, HashSet};

/// Maximum header length. The largest GPT-2's is 60 kB; parsing a header at the limit takes under 200 MB.
pub const MAX_HEADER_BYTES: u64 = 16 << 20;

/// Offset of the JSON, after the header's length.
const PREFIX: usize = 8;

/// A tensor's metadata and its position in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its name, unique in the file.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its dimensions; none for a scalar.
    pub shape: Vec<usize>,
    /// The first byte of its values, counted from the start of the file.
    pub begin: usize,
    /// The end of its values (exclusive).
    pub end: usize,
}

/// All tensors of a file, in the order of their values.
#[derive(Debug, Clone, Default)]
pub struct Header {
    entries: Vec<Entry>,
    by_name: HashMap<String, usize>,
}

impl Header {
    /// Reads the header of `file`, the bytes of a whole file. Returns the problem: a header that is too long or
    /// truncated; invalid JSON; an unknown dtype; a shape whose size overflows or does not match its bytes; values that
    /// overlap, leave a gap, or do not end at the end of the file.
    pub fn parse(file: &[u8]) -> Result<Self, String> {
        let length = file.first_chunk::<PREFIX>().map_or(0, |length| u64::from_le_bytes(*length));
        if length > MAX_HEADER_BYTES {
            return Err(format!(
                "its header claims {length} bytes, over the limit of {MAX_HEADER_BYTES}: not safetensors"
            ));
        }
        let (length, metadata) = SafeTensors::read_metadata(file).map_err(|error| explain(&error, file.len()))?;
        let start = PREFIX + length;
        serde_json::from_slice::<UniqueNames>(&file[PREFIX..start]).map_err(|error| error.to_string())?;
        let entry = |name: String| {
            let info = metadata.info(&name)?;
            let (begin, end) = (start + info.data_offsets.0, start + info.data_offsets.1);
            Some(Entry { name, dtype: info.dtype, shape: info.shape.clone(), begin, end })
        };
        let entries: Vec<Entry> = metadata.offset_keys().into_iter().filter_map(entry).collect();
        let by_name = entries.iter().enumerate().map(|(index, entry)| (entry.name.clone(), index)).collect();
        Ok(Self { entries, by_name })
    }

    /// All tensors in the order of their values.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The tensor called `name`.
    pub fn get(&self, name: &str) -> Option<&Entry> {
        self.by_name.get(name).map(|&index| &self.entries[index])
    }
}

/// Accepts a header without repeated names: the crate keeps only the last tensor of a name.
struct UniqueNames;

impl<'de> Deserialize<'de> for UniqueNames {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Self)
    }
}

impl<'de> Visitor<'de> for UniqueNames {
    type Value = Self;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("names of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self, A::Error> {
        let mut names = HashSet::new();
        while let Some((name, IgnoredAny)) = map.next_entry::<String, _>()? {
            if let Some(name) = names.replace(name) {
                return Err(A::Error::custom(format!("it has two tensors called `{name}`")));
            }
        }
        Ok(self)
    }
}

/// Explains the crate's errors in terms of the file.
fn explain(error: &SafeTensorError, bytes: usize) -> String {
    match error {
        SafeTensorError::HeaderTooSmall | SafeTensorError::InvalidHeaderLength => {
            format!("its header does not fit in its {bytes} bytes: truncated, or not safetensors")
        }
        SafeTensorError::MetadataIncompleteBuffer => {
            format!(
                "its size of {bytes} bytes does not match its tensors: it is truncated or has extra data; download or copy it again"
            )
        }
        SafeTensorError::InvalidOffset(name) => {
            format!("the values of tensor `{name}` overlap others, leave a gap before them or end before they begin")
        }
        SafeTensorError::TensorInvalidInfo => "a tensor's shape does not match its byte range".to_owned(),
        error => format!("its header is damaged: {error}"),
    }
}

#[cfg(test)]
mod tests {

    use super::*;

    fn file(json: &str, data: usize) -> Vec<u8> {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(json.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    const TWO: &str = r#"{"__metadata__":{"format":"pt"},
        "b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"BF16","shape":[1,3],"data_offsets":[8,14]}}  "#;

    #[test]
    fn tensors_come_in_the_order_of_their_values() {
        let header = Header::parse(&file(TWO, 14)).unwrap();
        let names: Vec<_> = header.entries().iter().map(|entry| entry.name.as_str()).collect();
        assert_eq!(names, ["b", "a"]);
        let start = PREFIX + TWO.len();
        let a = Entry { name: "a".into(), dtype: Dtype::BF16, shape: vec![1, 3], begin: start + 8, end: start + 14 };
        assert_eq!(header.get("a"), Some(&a));
        assert_eq!(header.get("c"), None);
    }

    #[test]
    fn a_scalar_and_an_empty_tensor_are_accepted() {
        let json = r#"{"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"e":{"dtype":"F32","shape":[0,7],"data_offsets":[4,4]}}"#;
        assert_eq!(Header::parse(&file(json, 4)).unwrap().entries().len(), 2);
        assert_eq!(Header::parse(&file("{}", 0)).unwrap().entries().len(), 0);
    }

    #[test]
    fn lengths_are_checked_before_anything_is_read() {
        assert!(Header::parse(b"short").unwrap_err().contains("does not fit in its 5 bytes"));
        assert!(Header::parse(&u64::MAX.to_le_bytes()).unwrap_err().contains("over the limit"));
        assert!(Header::parse(&100_u64.to_le_bytes()).unwrap_err().contains("does not fit in its 8 bytes"));
    }
}
