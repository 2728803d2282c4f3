//! Files of rows, read one row at a time: JSON Lines, a JSON array, CSV, TSV and Parquet.
//!
//! A row is an object whose keys keep the file's order, because tools are written into prompts in that order. A row may
//! have at most 64 MiB, a file any size.

use super::exact_json::read_json;
use super::format::{CONVERT, DataFormat};
use super::parquet_rows;
use super::source::Document;
use crate::{Error, Result};
use minijinja::Value;
use serde::de::{Deserializer, SeqAccess, Visitor};
use serde_json::value::RawValue;
use std::cell::Cell;
use std::collections::HashSet;
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::rc::Rc;

/// The longest row in bytes; a longer one means that the file has a different format.
const MAX_ROW_BYTES: u64 = 64 << 20;
/// The parser's message about a text that is not UTF-8.
const NOT_UTF8: &str = "invalid unicode code point";
/// The end of a table, which shows whether its last quote is closed; a Unicode noncharacter.
const TABLE_END: &str = "\n\u{FDD3}";
const BUFFER_BYTES: usize = 256 << 10;

#[derive(Clone, Copy, Debug, strum::Display)]
pub(super) enum RowLocation {
    #[strum(to_string = "line {0}")]
    Line(u64),
    #[strum(to_string = "row {0}")]
    Row(u64),
}

/// Takes a row; an error stops the reading.
pub(super) type RowCallback<'a> = dyn FnMut(RowLocation, Value) -> Result<()> + 'a;

impl Document {
    /// Passes every row to `on_row`; of a Parquet file only the columns `fields`, or all if there are none.
    pub(super) fn read_rows(&self, fields: &[&str], on_row: &mut RowCallback<'_>) -> Result<()> {
        let mut rows = 0;
        let on_row = &mut |location, row| {
            rows += 1;
            on_row(location, row)
        };
        if self.format != DataFormat::Parquet {
            self.check_encoding()?;
        }
        match self.format {
            DataFormat::Json if self.begins_with(b'{')? => self.read_lines(on_row)?,
            DataFormat::Json => self.read_array(on_row)?,
            DataFormat::Csv => self.read_table(b',', on_row)?,
            DataFormat::Tsv => self.read_table(b'\t', on_row)?,
            DataFormat::Parquet => self.read_parquet(fields, on_row)?,
            DataFormat::Jsonl | DataFormat::Text => self.read_lines(on_row)?,
        }
        if rows == 0 { Err(self.error("contains no rows")) } else { Ok(()) }
    }

    /// Whether the file begins with `byte` after white space: a `.json` file may contain one object per line.
    fn begins_with(&self, byte: u8) -> Result<bool> {
        Ok(strip_bom(&self.start()?).trim_ascii_start().first() == Some(&byte))
    }

    fn read_lines(&self, on_row: &mut RowCallback<'_>) -> Result<()> {
        let mut reader = BufReader::with_capacity(BUFFER_BYTES, self.open()?);
        let mut buffer = Vec::new();
        for line in 1.. {
            buffer.clear();
            let read = (&mut reader).take(MAX_ROW_BYTES).read_until(b'\n', &mut buffer);
            let read = read.map_err(Error::io("read", &self.path))?;
            if read == 0 {
                break;
            }
            if read as u64 == MAX_ROW_BYTES && buffer.last() != Some(&b'\n') {
                return Err(self.error(format!("line {line} is longer than 64 MiB; write one JSON object per line")));
            }
            let text = if line == 1 { strip_bom(&buffer) } else { &buffer };
            if !text.trim_ascii().is_empty() {
                let row = std::str::from_utf8(text).map_err(|error| {
                    let at = error.valid_up_to();
                    self.error(format!("line {line}: not UTF-8: byte {at} is 0x{:02X}; {CONVERT}", text[at]))
                })?;
                let row = read_json(row).map_err(|error| self.line_error(line, text, &error))?;
                on_row(RowLocation::Line(line), row)?;
            }
        }
        Ok(())
    }

    /// The error for a line that is not JSON, with advice for common mistakes such as a pretty-printed file.
    fn line_error(&self, line: u64, text: &[u8], error: &serde_json::Error) -> Error {
        let at_fault = text.get(error.column().saturating_sub(1)..).unwrap_or_default();
        let advice = match text.trim_ascii() {
            [b'[', ..] => "; a JSON array is read with `--format json`",
            [b'{', .., b','] => "; remove the comma, or make the file an array and read it with `--format json`",
            [b'{', b'\'', ..] => "; JSON has double quotes, as Python's `json.dumps` writes them",
            [b'{'] => "; write one object per line, or an array of objects",
            _ if error_text(error) == "trailing characters" => "; write one object per line, each with a line feed",
            _ if at_fault.starts_with(b"NaN") || at_fault.starts_with(b"Infinity") => {
                "; JSON has no such number; write null"
            }
            _ if error_text(error).ends_with("hex escape") => {
                "; remove this half of a pair of escapes, as of a cut emoji"
            }
            _ => "",
        };
        // The parser sees one line at a time, so its own line number has no meaning.
        self.error(format!("line {line}{}: {}{advice}", column(error), error_text(error)))
    }

    fn read_array(&self, on_row: &mut RowCallback<'_>) -> Result<()> {
        let limit = RowBytes::default();
        let mut reader =
            BufReader::with_capacity(BUFFER_BYTES, LimitedFile { file: self.open()?, limit: limit.clone() });
        if reader.fill_buf().map_err(Error::io("read", &self.path))?.starts_with(BOM) {
            reader.consume(BOM.len());
        }
        let on_row = &mut |number, text: &str| {
            let row = read_json(text).map_err(|error| self.error(format!("row {number}: {}", error_text(&error))))?;
            on_row(RowLocation::Row(number), row)
        };
        let mut failure = None;
        let mut deserializer = serde_json::Deserializer::from_reader(reader);
        let read = deserializer.deserialize_any(ArrayVisitor { on_row, limit: &limit, failure: &mut failure });
        let read = read.and_then(|()| deserializer.end());
        match (failure, read) {
            (Some(error), _) => Err(error),
            (None, Ok(())) => Ok(()),
            (None, Err(error)) if error.is_io() => Err(self.error(error.to_string())),
            (None, Err(error)) => {
                let line = error.line();
                let text = error_text(&error);
                // Every byte of JSON's own syntax is ASCII, so only a text's bytes can be wrong.
                let text = if text == NOT_UTF8 { format!("not UTF-8; {CONVERT}") } else { text };
                Err(self.error(format!("line {line}{}: {text}", column(&error))))
            }
        }
    }

    fn read_table(&self, separator: u8, on_row: &mut RowCallback<'_>) -> Result<()> {
        let start = self.start()?;
        let header = start.split(|byte| matches!(byte, b'\r' | b'\n')).next().unwrap_or_default();
        // If lines end with CR LF, the reader counts a line's end with the next record.
        let lag = u64::from(start[header.len()..].starts_with(b"\r\n"));
        // Spreadsheets of languages with decimal commas write semicolons.
        let has_semicolons = separator == b',' && header.contains(&b';') && !header.contains(&b',');
        let separator = if has_semicolons { b';' } else { separator };
        let wrong = |error: csv::Error| self.table_error(&error, lag);
        let limit = RowBytes::default();
        let source = LimitedFile { file: self.open()?, limit: limit.clone() }.chain(TABLE_END.as_bytes());
        let mut builder = csv::ReaderBuilder::new();
        builder.delimiter(separator).flexible(true).trim(csv::Trim::Headers).buffer_capacity(BUFFER_BYTES);
        let mut reader = builder.from_reader(source);
        let names = reader.headers().map_err(wrong)?.clone();
        let mut seen = HashSet::new();
        if let Some(name) = names.iter().find(|name| !seen.insert(*name)) {
            return Err(self.error(format!("line 1: two columns are named `{name}`; rename one")));
        }
        let mut record = csv::StringRecord::new();
        loop {
            limit.set(0);
            if !reader.read_record(&mut record).map_err(wrong)? {
                return Ok(());
            }
            let line = record.position().map_or(0, csv::Position::line) + lag;
            match (record.len(), record.iter().next_back()) {
                (1, Some(last)) if last == TABLE_END.trim_start() => return Ok(()),
                (_, Some(last)) if last.ends_with(TABLE_END) => {
                    return Err(self.error(format!("line {line}: a quote is not closed by the end of the file")));
                }
                (fields, _) if fields != names.len() => {
                    let expected = names.len();
                    return Err(self.error(format!(
                        "line {line}: {fields} fields, but the header has {expected}; quote fields that contain commas, \
                         tabs or line breaks"
                    )));
                }
                _ => {}
            }
            let row = Value::from_pairs(names.iter().zip(&record).map(|(name, field)| (name, Value::from(field))));
            on_row(RowLocation::Line(line), row)?;
        }
    }

    fn table_error(&self, error: &csv::Error, lag: u64) -> Error {
        let line = error.position().map_or(1, |position| position.line() + lag);
        self.error(match error.kind() {
            csv::ErrorKind::Utf8 { err, .. } => {
                let field = err.field() + 1;
                format!("line {line}: field {field} is not UTF-8; {CONVERT}")
            }
            csv::ErrorKind::Io(error) => error.to_string(),
            _ => format!("line {line}: {error}"),
        })
    }

    fn read_parquet(&self, fields: &[&str], on_row: &mut RowCallback<'_>) -> Result<()> {
        let mut rows = 0;
        parquet_rows::read(self, fields, &mut |row| {
            rows += 1;
            on_row(RowLocation::Row(rows), row)
        })
    }
}

/// Removes the byte order mark that some editors write before UTF-8.
pub(super) const BOM: &[u8] = b"\xEF\xBB\xBF";

fn strip_bom(text: &[u8]) -> &[u8] {
    text.strip_prefix(BOM).unwrap_or(text)
}

/// The column of a parser's message, if it has one.
fn column(error: &serde_json::Error) -> String {
    if error.column() == 0 { String::new() } else { format!(", column {}", error.column()) }
}

/// A parser's message without its place.
fn error_text(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.split(" at line ").next().unwrap_or(&text).to_owned()
}

/// The number of bytes read of the current row.
type RowBytes = Rc<Cell<u64>>;

/// A reader that fails if a row is too long, because a bracket or quote is not closed.
struct LimitedFile {
    file: File,
    limit: RowBytes,
}

impl Read for LimitedFile {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let spent = self.limit.get();
        if spent > MAX_ROW_BYTES {
            return Err(io::Error::other("a row is longer than 64 MiB; a quote or bracket may not be closed"));
        }
        let read = self.file.read(buffer)?;
        self.limit.set(spent + read as u64);
        Ok(read)
    }
}

/// Visits an array's elements one after the other.
struct ArrayVisitor<'a> {
    /// Takes the number and the text of a row.
    on_row: &'a mut dyn FnMut(u64, &str) -> Result<()>,
    limit: &'a RowBytes,
    /// The error of `on_row`, which the parser cannot carry.
    failure: &'a mut Option<Error>,
}

impl<'de> Visitor<'de> for ArrayVisitor<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of objects; use `--format text` to read plain text")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<(), A::Error> {
        for number in 1.. {
            self.limit.set(0);
            let Some(row) = elements.next_element::<Box<RawValue>>()? else { break };
            if let Err(error) = (self.on_row)(number, row.get()) {
                *self.failure = Some(error);
                return Err(serde::de::Error::custom("the row cannot be used"));
            }
        }
        Ok(())
    }
}
