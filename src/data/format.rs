//! How a file is read: what its name says, what `--format` says, and whether its content looks like something else.

use std::path::Path;

use serde::{Deserialize, Serialize};

/// The formats of training data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// Text as it stands.
    Text,
    /// One JSON object a line.
    Jsonl,
    /// A JSON array of objects.
    Json,
    /// Comma-separated values below a line of names (RFC 4180).
    Csv,
    /// The same, separated by tabs.
    Tsv,
    /// Apache Parquet.
    Parquet,
}

impl Format {
    /// The extensions of files that a folder is searched for.
    pub(super) const KNOWN: &str = "`.txt`, `.md`, `.jsonl`, `.json`, `.csv`, `.tsv` or `.parquet`";

    /// The format that a file's extension names, if it names one.
    pub(super) fn of(path: &Path) -> Option<Self> {
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

    /// The flag's value that means this format.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Jsonl => "jsonl",
            Self::Json => "json",
            Self::Csv => "csv",
            Self::Tsv => "tsv",
            Self::Parquet => "parquet",
        }
    }

    /// The format of rows that a text which nobody called text looks like, judged by its first line.
    ///
    /// JSON is an object or array there that begins as one. A table is a line of names, one of which is among `fields`.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_looks_like_rows_by_its_first_line() {
        let fields = ["prompt", "completion", "text"];
        for (text, format) in [
            ("{\"text\": \"a\"}\n{", Some(Format::Jsonl)),
            ("\u{feff}\n {\"text\":\n \"a\"}", Some(Format::Json)),
            ("[\n  {", Some(Format::Json)),
            ("[{\"a\": 1}]", Some(Format::Json)),
            ("prompt,completion\n1,2", Some(Format::Csv)),
            ("\"id\"\t\"text\"\n", Some(Format::Tsv)),
            ("Once upon a time, there was text\n", None),
            ("[1] A footnote", None),
            ("{% raw %}", None),
            ("text\nof one column", None),
            ("", None),
        ] {
            assert_eq!(Format::looks_like(text, &fields), format, "{text:?}");
        }
    }
}
