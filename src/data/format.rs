//! The format of a file: from its name, from `--format`, and whether its content looks like a different format.

use serde::{Deserialize, Serialize};
use std::path::Path;
use strum::IntoStaticStr;

/// The formats of training data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, IntoStaticStr)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum DataFormat {
    /// Plain text, unchanged.
    Text,
    /// One JSON object per line.
    Jsonl,
    /// A JSON array of objects.
    Json,
    /// Comma-separated values after a line of column names (RFC 4180).
    Csv,
    /// Tab-separated values after a line of column names.
    Tsv,
    /// Apache Parquet.
    Parquet,
}

/// The fields that a row needs, and the flags that rename them.
pub(super) const EXPECTED_FIELDS: &str = "a row needs `text`, or `prompt` and `completion`, or `instruction` and `output`, or `messages`, or `conversations`, or `chosen` and `rejected`; name \
     other fields with `--text-field`, or `--prompt-field` and `--completion-field`";

impl DataFormat {
    /// The extensions of files that a folder is searched for.
    pub(super) const EXTENSIONS: &str = "`.txt`, `.md`, `.jsonl`, `.json`, `.csv`, `.tsv` or `.parquet`";

    /// The format of a file extension, if known.
    pub(super) fn from_path(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()?.to_ascii_lowercase().as_str() {
            "txt" | "md" => Some(Self::Text),
            "jsonl" | "ndjson" => Some(Self::Jsonl),
            "json" => Some(Self::Json),
            "csv" => Some(Self::Csv),
            "tsv" => Some(Self::Tsv),
            "parquet" => Some(Self::Parquet),
            _ => None,
        }
    }

    /// The value of `--format` for this format.
    pub(super) fn name(self) -> &'static str {
        self.into()
    }

    /// Guesses from its first line whether text of unspecified format contains rows.
    ///
    /// JSON begins with an object or an array. A table begins with column names, at least one of them in `fields`.
    pub(super) fn looks_like(text: &str, fields: &[&str]) -> Option<Self> {
        let line = text.trim_start_matches('\u{feff}').trim_start().lines().next()?.trim_end();
        let inside = |open: char| line.strip_prefix(open).map(str::trim_start);
        if let Some(rest) = inside('{') {
            return (rest.is_empty() || rest.starts_with('"')).then(|| {
                let whole = serde_json::from_str::<serde::de::IgnoredAny>(line).is_ok();
                if whole { Self::Jsonl } else { Self::Json }
            });
        }
        if let Some(rest) = inside('[') {
            return (rest.is_empty() || rest.starts_with('{')).then_some(Self::Json);
        }
        let names = |separator: char| -> Vec<&str> {
            line.split(separator).map(|name| name.trim().trim_matches('"')).collect()
        };
        [(Self::Tsv, '\t'), (Self::Csv, ',')].into_iter().find_map(|(format, separator)| {
            let names = names(separator);
            let known = names.iter().filter(|name| fields.contains(name)).count();
            (names.len() > 1 && known > 0 && names.iter().all(|name| !name.contains(' '))).then_some(format)
        })
    }
}

/// The advice for text with a byte that is not UTF-8.
pub(super) const CONVERT: &str = "convert the file first; if it is Latin-1, with `iconv -f LATIN1 -t UTF-8`";

/// The advice for Arrow files, which Python's `datasets` writes.
pub(super) const ARROW: &str =
    "is in the Arrow format; write it as Parquet first, with `to_parquet` of Python's `datasets`";

/// The advice for a file whose first bytes belong to no UTF-8 text, if they show its kind.
pub(super) fn conversion(start: &[u8]) -> Option<&'static str> {
    Some(match start {
        [0x1F, 0x8B, ..] => "is compressed with gzip; decompress it first, with `gunzip`",
        [0x28, 0xB5, 0x2F, 0xFD, ..] => "is compressed with zstd; decompress it first, with `unzstd`",
        [0xFD, b'7', b'z', b'X', b'Z', 0, ..] => "is compressed with xz; decompress it first, with `unxz`",
        [b'B', b'Z', b'h', b'1'..=b'9', b'1', b'A', b'Y', ..] => {
            "is compressed with bzip2; decompress it first, with `bunzip2`"
        }
        [b'P', b'K', 3, 4, ..] => "is a zip archive; unpack it first",
        [b'P', b'A', b'R', b'1', ..] => "is a Parquet file; read it with `--format parquet`",
        [0xFF, 0xFF, 0xFF, 0xFF, ..] | [b'A', b'R', b'R', b'O', b'W', b'1', ..] => ARROW,
        [0xFF, 0xFE, 0, 0, ..] => "is UTF-32; convert it first, with `iconv -f UTF-32 -t UTF-8`",
        [0xFF, 0xFE, ..] | [0xFE, 0xFF, ..] | [1..=255, 0, 1..=255, 0, ..] | [0, 1..=255, 0, 1..=255, ..] => {
            "is UTF-16; convert it first, with `iconv -f UTF-16 -t UTF-8`"
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_are_not_utf_8_are_known_by_their_first_bytes() {
        for (start, program) in [
            (&b"PAR1\x15\x04"[..], "`--format parquet`"),
            (&b"\x1F\x8B\x08"[..], "`gunzip`"),
            (b"\x28\xB5\x2F\xFD", "`unzstd`"),
            (b"\xFD7zXZ\0\0", "`unxz`"),
            (b"BZh91AY&SY", "`bunzip2`"),
            (b"\xFF\xFE\0\0{\0\0\0", "-f UTF-32"),
            (b"\xFF\xFE{\0", "-f UTF-16"),
        ] {
            assert!(conversion(start).is_some_and(|advice| advice.contains(program)), "{program}");
        }
        assert_eq!(conversion(b"BZhou is a name"), None);
    }

    #[test]
    fn a_text_looks_like_rows_by_its_first_line() {
        let fields = ["prompt", "completion", "text"];
        for (text, format) in [
            ("{\"text\": \"a\"}\n{", Some(DataFormat::Jsonl)),
            ("\u{feff}\n {\"text\":\n \"a\"}", Some(DataFormat::Json)),
            ("[\n  {", Some(DataFormat::Json)),
            ("[{\"a\": 1}]", Some(DataFormat::Json)),
            ("prompt,completion\n1,2", Some(DataFormat::Csv)),
            ("\"id\"\t\"text\"\n", Some(DataFormat::Tsv)),
            ("Once upon a time, there was text\n", None),
            ("[1] A footnote", None),
            ("{% raw %}", None),
            ("text\nof one column", None),
            ("", None),
        ] {
            assert_eq!(DataFormat::looks_like(text, &fields), format, "{text:?}");
        }
    }
}
