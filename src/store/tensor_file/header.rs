//! The header of a safetensors file, believed only after every number in it has been checked.

use std::collections::{BTreeMap, HashMap};

use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde::Deserialize;
use serde::de::{Error as _, MapAccess, Visitor};

/// The longest header accepted. That of the largest GPT-2 takes 60 kB; parsing one at the limit takes under 200 MB.
pub const MAX_HEADER_BYTES: u64 = 16 << 20;

/// Where the JSON starts: after the header's length.
const PREFIX: usize = 8;

/// One tensor: what it is, and where in the file.
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
    /// The byte after its last.
    pub end: usize,
}

/// All tensors of a file, ordered as their values lie.
#[derive(Debug, Clone, Default)]
pub struct Header {
    entries: Vec<Entry>,
    by_name: HashMap<String, usize>,
}

impl Header {
    /// Reads the header of `file`, the bytes of a whole file.
    ///
    /// # Errors
    /// What is wrong, with the tensor it is about: a header that is too long or runs over the end; JSON of another shape;
    /// a name given twice; a dtype that safetensors has not; a shape whose size overflows or is not that of its bytes;
    /// values that overlap, leave a hole, or end before or after the file does.
    pub fn parse(file: &[u8]) -> Result<Self, String> {
        let (length, rest) =
            file.split_first_chunk::<PREFIX>().ok_or_else(|| format!("only {} bytes: truncated", file.len()))?;
        let length = u64::from_le_bytes(*length);
        if length > MAX_HEADER_BYTES {
            return Err(format!(
                "its header claims {length} bytes, over the limit of {MAX_HEADER_BYTES}: not safetensors"
            ));
        }
        let json = rest
            .get(..length as usize)
            .ok_or_else(|| format!("its header claims {length} bytes, the file has {}: truncated", file.len()))?;
        let Tensors(infos) = serde_json::from_slice(json).map_err(|error| format!("its header is damaged: {error}"))?;
        let start = PREFIX + json.len();
        let entries = lay_out(infos, start, file.len())?;
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

/// Orders the tensors by offset and checks that their values fill `start..end` of the file exactly.
fn lay_out(infos: BTreeMap<String, TensorInfo>, start: usize, end: usize) -> Result<Vec<Entry>, String> {
    let mut infos: Vec<_> = infos.into_iter().collect();
    infos.sort_by_key(|(_, info)| info.data_offsets);
    let mut at = start;
    let mut entries = Vec::with_capacity(infos.len());
    for (name, TensorInfo { dtype, shape, data_offsets: (from, to) }) in infos {
        let fail = |what: &str| Err(format!("tensor `{name}` ({dtype} {shape:?}, bytes {from}..{to}): {what}"));
        let (Some(begin), Some(until)) = (start.checked_add(from), start.checked_add(to)) else {
            return fail("its offsets overflow");
        };
        if begin < at {
            return fail("its values overlap those of another tensor");
        } else if begin > at {
            return fail("there is a hole before its values");
        } else if until < begin {
            return fail("its values end before they begin");
        } else if until > end {
            return fail("its values run over the end of the file: truncated");
        }
        match size_in_bytes(dtype, &shape) {
            None => return fail("its size overflows"),
            Some(size) if size != until - begin => return fail(&format!("its shape takes {size} bytes")),
            Some(_) => {}
        }
        at = until;
        entries.push(Entry { name, dtype, shape, begin, end: until });
    }
    if at == end { Ok(entries) } else { Err(format!("{} bytes after the last tensor belong to none", end - at)) }
}

/// The bytes that `shape` takes; `None` if they overflow or are no whole number, as three 4-bit elements would.
fn size_in_bytes(dtype: Dtype, shape: &[usize]) -> Option<usize> {
    let bits = shape.iter().try_fold(dtype.bitsize(), |bits, &dim| bits.checked_mul(dim))?;
    bits.is_multiple_of(8).then_some(bits / 8)
}

/// The JSON object. Read by hand because serde's maps keep the last of two equal keys and say nothing.
struct Tensors(BTreeMap<String, TensorInfo>);

impl<'de> Deserialize<'de> for Tensors {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = Tensors;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Tensors, A::Error> {
                let mut tensors = BTreeMap::new();
                let mut metadata = None;
                while let Some(name) = map.next_key::<String>()? {
                    let twice = if name == "__metadata__" {
                        metadata.replace(map.next_value::<HashMap<String, String>>()?).is_some()
                    } else {
                        let info = map
                            .next_value::<TensorInfo>()
                            .map_err(|error| A::Error::custom(format_args!("tensor `{name}`: {error}")))?;
                        tensors.insert(name.clone(), info).is_some()
                    };
                    if twice {
                        return Err(A::Error::custom(format_args!("`{name}` is there twice")));
                    }
                }
                Ok(Tensors(tensors))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use proptest::prelude::*;

    use super::*;

    fn file(json: &str, data: usize) -> Vec<u8> {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(json.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    fn refused(json: &str, data: usize) -> String {
        Header::parse(&file(json, data)).unwrap_err()
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
    fn a_scalar_and_an_empty_tensor_are_fine() {
        let json = r#"{"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"e":{"dtype":"F32","shape":[0,7],"data_offsets":[4,4]}}"#;
        assert_eq!(Header::parse(&file(json, 4)).unwrap().entries().len(), 2);
        assert_eq!(Header::parse(&file("{}", 0)).unwrap().entries().len(), 0);
    }

    #[test]
    fn every_lie_is_named() {
        let one = |dtype: &str, shape: &str, offsets: &str| {
            format!(r#"{{"x":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
        };
        let huge = u64::MAX;
        for (json, data, expected) in [
            (
                one("F32", "[2]", "[0,8]"),
                4,
                "tensor `x` (F32 [2], bytes 0..8): its values run over the end of the file",
            ),
            (one("F32", "[2]", "[0,8]"), 9, "1 bytes after the last tensor"),
            (one("F32", "[2]", "[4,12]"), 12, "a hole before"),
            (one("F32", "[2]", "[0,4]"), 4, "its shape takes 8 bytes"),
            (one("F16", "[4294967296,4294967296]", "[0,8]"), 8, "its size overflows"),
            (one("F32", "[2]", &format!("[{huge},{huge}]")), 8, "its offsets overflow"),
            (one("F32", "[0]", "[0,0]"), 8, "8 bytes after"),
            (one("F4", "[3]", "[0,1]"), 1, "its size overflows"),
            (one("Q4", "[2]", "[0,8]"), 8, "tensor `x`: unknown variant `Q4`"),
            (one("F32", "[-2]", "[0,8]"), 8, "tensor `x`: invalid value: integer `-2`"),
            (one("F32", "[2]", "[0]"), 8, "tensor `x`: invalid length 1"),
            (TWO.replace("[8,14]", "[6,12]"), 12, "tensor `a` (BF16 [1, 3], bytes 6..12): its values overlap"),
            (TWO.replace("\"a\"", "\"b\""), 14, "`b` is there twice"),
            (r#"{"__metadata__":{},"__metadata__":{}}"#.into(), 0, "`__metadata__` is there twice"),
            ("[]".into(), 0, "expected an object of tensors"),
            ("{".into(), 0, "its header is damaged"),
        ] {
            let message = refused(&json, data);
            assert!(message.contains(expected), "{json}: {message}");
        }
        let backwards = TWO.replace("[0,8]", "[0,0]").replace("[2]", "[0]").replace("[8,14]", "[0,14]");
        assert!(refused(&backwards, 14).contains("its shape takes 6 bytes"));
    }

    #[test]
    fn lengths_are_checked_before_anything_is_read() {
        assert!(Header::parse(b"short").unwrap_err().contains("only 5 bytes"));
        assert!(Header::parse(&u64::MAX.to_le_bytes()).unwrap_err().contains("over the limit"));
        assert!(Header::parse(&100_u64.to_le_bytes()).unwrap_err().contains("the file has 8: truncated"));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = Header::parse(&bytes);
            let _ = Header::parse(&file(&String::from_utf8_lossy(&bytes), 8));
        }

        /// Whatever is changed in a good header, an accepted one describes bytes that exist.
        #[test]
        fn an_accepted_header_stays_within_the_file(at in 0..TWO.len(), byte in any::<u8>(), data in 0_usize..40) {
            let mut bytes = file(TWO, data);
            bytes[PREFIX + at] = byte;
            if let Ok(header) = Header::parse(&bytes) {
                for entry in header.entries() {
                    prop_assert!(entry.begin <= entry.end && entry.end <= bytes.len());
                    prop_assert_eq!(size_in_bytes(entry.dtype, &entry.shape), Some(entry.end - entry.begin));
                }
            }
        }
    }
}
