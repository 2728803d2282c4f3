//! Files to documents: plain text, JSON lines and Parquet, read in pieces so that memory does not grow with the file.
//!
//! A row of the last two holds `text`, or `prompt` and `completion`, or `messages` (each with `role` and `content`).
//! Only answers are trained on: the completion, and what the role `assistant` says. A chat is written as one line a
//! message, `role: content`.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::parquet_rows;
use crate::{Error, Result, untrusted};

/// Bytes of text that are tokenised at a time, where they end with a seam.
const PIECE_BYTES: usize = 256 << 10;

/// Text without a seam is tokenised as a whole up to this length.
const MAX_PIECE_BYTES: usize = 1 << 20;

/// A longer row means that the file is not JSON Lines.
const MAX_LINE_BYTES: u64 = 64 << 20;

/// How a file is read; decided by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    Text,
    JsonLines,
    Parquet,
}

impl Format {
    /// The format that a file's extension names, if it names one.
    pub(super) fn of(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()?.to_ascii_lowercase().as_str() {
            "txt" => Some(Self::Text),
            "jsonl" | "ndjson" => Some(Self::JsonLines),
            "parquet" => Some(Self::Parquet),
            _ => None,
        }
    }
}

/// A file of a corpus.
#[derive(Clone, Debug)]
pub(super) struct Document {
    pub(super) path: PathBuf,
    /// Its name in messages, which for standard input is not the path.
    pub(super) origin: String,
    pub(super) format: Format,
}

/// A stretch of text that is tokenised on its own.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) text: String,
    /// Whether its tokens count in the loss.
    pub(super) trained: bool,
    /// Whether the end-of-text token goes in front, unless this is the corpus' first piece.
    pub(super) starts_document: bool,
}

/// Receives the pieces as they are read; an error stops the reading.
pub(super) type Sink<'a> = dyn FnMut(Piece) -> Result<()> + 'a;

impl Document {
    pub(super) fn open(&self) -> Result<File> {
        untrusted::open(&self.path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => self.error("there is no such file"),
            _ => Error::io("read", &self.path)(error),
        })
    }

    /// Reads the whole file into `sink`.
    pub(super) fn read(&self, sink: &mut Sink) -> Result<()> {
        match self.format {
            Format::Text => self.read_text(sink),
            Format::JsonLines => self.read_lines(sink),
            Format::Parquet => self.read_parquet(sink),
        }
    }

    fn read_text(&self, sink: &mut Sink) -> Result<()> {
        let mut file = self.open()?;
        let mut buffer = Vec::with_capacity(2 * PIECE_BYTES);
        let (mut position, mut line) = (0, 1);
        let mut blank = true;
        loop {
            let read = (&mut file).take(PIECE_BYTES as u64).read_to_end(&mut buffer);
            let ended = read.map_err(Error::io("read", &self.path))? == 0;
            let text = match std::str::from_utf8(&buffer) {
                Ok(text) => text,
                // The buffer ends within a character; the rest comes with the next read.
                Err(error) if !ended && error.error_len().is_none() => {
                    std::str::from_utf8(&buffer[..error.valid_up_to()]).unwrap_or_default()
                }
                Err(error) => {
                    let at = error.valid_up_to();
                    let line = line + line_feeds(&buffer[..at]);
                    let (byte, position) = (buffer[at], position + at);
                    return Err(self.error(format!(
                        "not UTF-8: byte {position} (line {line}) is 0x{byte:02X}; convert the file first"
                    )));
                }
            };
            let cut = if ended { text.len() } else { seam(text).unwrap_or(0) };
            let cut = if cut == 0 && text.len() >= MAX_PIECE_BYTES { text.len() } else { cut };
            blank &= text[..cut].trim().is_empty();
            if cut > 0 {
                sink(Piece { text: text[..cut].to_owned(), trained: true, starts_document: position == 0 })?;
            }
            position += cut;
            line += line_feeds(&buffer[..cut]);
            buffer.drain(..cut);
            if ended {
                return if blank { Err(self.error("holds no text")) } else { Ok(()) };
            }
        }
    }

    fn read_lines(&self, sink: &mut Sink) -> Result<()> {
        let mut reader = BufReader::with_capacity(PIECE_BYTES, self.open()?);
        let mut buffer = Vec::new();
        let mut rows = 0;
        for line in 1.. {
            buffer.clear();
            let read = (&mut reader).take(MAX_LINE_BYTES).read_until(b'\n', &mut buffer);
            let read = read.map_err(Error::io("read", &self.path))?;
            if read == 0 {
                break;
            }
            if read as u64 == MAX_LINE_BYTES && buffer.last() != Some(&b'\n') {
                return Err(self.error(format!("line {line} is longer than 64 MiB; one JSON object a line is needed")));
            }
            if !buffer.trim_ascii().is_empty() {
                let row = serde_json::from_slice::<Row>(&buffer).map_err(|error| self.row_error(line, &error))?;
                row.pieces(sink).map_err(|problem| self.sink_error(line, problem))?;
                rows += 1;
            }
        }
        if rows == 0 { Err(self.error("holds no text")) } else { Ok(()) }
    }

    fn read_parquet(&self, sink: &mut Sink) -> Result<()> {
        let mut rows = 0;
        let mut row = |value| {
            rows += 1;
            let row = serde_json::from_value::<Row>(value).map_err(|error| self.row_error(rows, &error))?;
            row.pieces(sink).map_err(|problem| self.sink_error(rows, problem))
        };
        parquet_rows::read(&self.path, &mut row).map_err(|error| match error {
            parquet_rows::Failure::File(message) => self.error(message),
            parquet_rows::Failure::Row(error) => error,
        })?;
        if rows == 0 { Err(self.error("holds no rows")) } else { Ok(()) }
    }

    fn error(&self, message: impl Into<String>) -> Error {
        Error::data(&self.origin, message)
    }

    fn row_error(&self, row: u64, error: &serde_json::Error) -> Error {
        // The parser sees one line at a time, so its own line number says nothing.
        let text = error.to_string();
        let message = text.split(" at line ").next().unwrap_or(&text);
        let place = if error.column() > 0 { format!(", column {}", error.column()) } else { String::new() };
        self.error(format!("row {row}{place}: {message}"))
    }

    fn sink_error(&self, row: u64, problem: Problem) -> Error {
        match problem {
            Problem::Shape => self.error(format!("row {row}: {}", Row::EXPECTED)),
            Problem::Sink(error) => error,
        }
    }
}

/// One row, whichever of its columns it has.
#[derive(Deserialize)]
pub(super) struct Row {
    text: Option<String>,
    prompt: Option<String>,
    completion: Option<String>,
    messages: Option<Vec<Message>>,
}

#[derive(Deserialize)]
struct Message {
    role: String,
    content: String,
}

/// Why a row could not be used.
enum Problem {
    /// None of the known shapes.
    Shape,
    Sink(Error),
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        Self::Sink(error)
    }
}

impl Row {
    pub(super) const FIELDS: [&str; 4] = ["text", "prompt", "completion", "messages"];
    pub(super) const EXPECTED: &str = "a row needs `text`, or `prompt` and `completion`, or `messages`";

    fn pieces(self, sink: &mut Sink) -> Result<(), Problem> {
        match self {
            Self { messages: Some(messages), .. } if !messages.is_empty() => {
                for (index, Message { role, content }) in messages.into_iter().enumerate() {
                    emit(&format!("{role}:"), false, index == 0, sink)?;
                    // The space belongs to the word after it, as in running text.
                    emit(&format!(" {content}\n"), role == "assistant", false, sink)?;
                }
            }
            Self { prompt: Some(prompt), completion: Some(completion), .. } => {
                emit(&prompt, false, true, sink)?;
                emit(&completion, true, prompt.is_empty(), sink)?;
            }
            Self { text: Some(text), .. } => emit(&text, true, true, sink)?,
            _ => return Err(Problem::Shape),
        }
        Ok(())
    }
}

/// Passes a text of any length on in pieces.
fn emit(mut text: &str, trained: bool, mut starts_document: bool, sink: &mut Sink) -> Result<()> {
    while !text.is_empty() {
        let limit = text.floor_char_boundary(PIECE_BYTES);
        let cut =
            if limit == text.len() { limit } else { seam(&text[..limit]).unwrap_or_else(|| next_seam(text, limit)) };
        sink(Piece { text: text[..cut].to_owned(), trained, starts_document })?;
        text = &text[cut..];
        starts_document = false;
    }
    Ok(())
}

/// The last place where a text may be cut so that its parts give the tokens of the whole: between a letter or digit and a
/// space. There byte-level BPE always starts a new word, and a tokenizer that puts a space in front of a text finds one there.
fn seam(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    (1..bytes.len()).rev().find(|&at| is_seam(text, bytes, at))
}

/// The first such place behind `from`, but not beyond [`MAX_PIECE_BYTES`].
fn next_seam(text: &str, from: usize) -> usize {
    let limit = text.floor_char_boundary(MAX_PIECE_BYTES);
    (from.max(1)..limit).find(|&at| is_seam(text, text.as_bytes(), at)).unwrap_or(limit)
}

fn is_seam(text: &str, bytes: &[u8], at: usize) -> bool {
    // What stands before a space is a whole character.
    bytes[at] == b' ' && text[..at].chars().next_back().is_some_and(char::is_alphanumeric)
}

fn line_feeds(bytes: &[u8]) -> usize {
    bytes.split(|&byte| byte == b'\n').count() - 1
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::super::tokenizer::{Tokenizer, tests::byte_level_bpe};
    use super::*;
    use proptest::prelude::*;
    use std::sync::LazyLock;

    fn read(name: &str, content: &[u8]) -> Result<Vec<Piece>> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        let document = Document { format: Format::of(&path).unwrap(), path, origin: name.to_owned() };
        let mut pieces = Vec::new();
        document.read(&mut |piece| {
            pieces.push(piece);
            Ok(())
        })?;
        Ok(pieces)
    }

    fn refusal(name: &str, content: &[u8]) -> String {
        read(name, content).unwrap_err().to_string()
    }

    /// (text, trained, starts a document) of each piece.
    fn shape(pieces: &[Piece]) -> Vec<(&str, bool, bool)> {
        pieces.iter().map(|piece| (piece.text.as_str(), piece.trained, piece.starts_document)).collect()
    }

    #[test]
    fn a_long_text_comes_in_pieces_and_whole() {
        // Three bytes a character, so that the buffer's end cuts one in two.
        let text = "語 語語\n".repeat(100_000);
        let pieces = read("a.txt", text.as_bytes()).unwrap();
        assert!(pieces.len() > 3 && pieces.iter().all(|piece| piece.text.len() <= 2 * PIECE_BYTES));
        assert_eq!(pieces.iter().map(|piece| piece.text.as_str()).collect::<String>(), text);
        assert_eq!(pieces.iter().filter(|piece| piece.starts_document).count(), 1);
    }

    #[test]
    fn text_that_cannot_be_used_is_refused_with_the_position() {
        assert_eq!(refusal("a.txt", b""), "a.txt: holds no text");
        assert_eq!(refusal("a.txt", b" \n\t "), "a.txt: holds no text");
        assert!(refusal("a.txt", b"one\ntwo \xFF three").contains("byte 8 (line 2) is 0xFF"));
        assert!(refusal("a.txt", b"cut short \xE2\x82").contains("byte 10 (line 1) is 0xE2"));
        let mut late = "line\n".repeat(200_000).into_bytes();
        late.push(0x80);
        assert!(refusal("a.txt", &late).contains("byte 1000000 (line 200001) is 0x80"));
    }

    #[test]
    fn rows_are_trained_on_where_they_answer() {
        let rows = concat!(
            r#"{"text": "plain", "id": 7}"#,
            "\n\n",
            r#"{"prompt": "1+1=", "completion": "2"}"#,
            "\r\n",
            r#"{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}"#,
        );
        let pieces = read("a.jsonl", rows.as_bytes()).unwrap();
        let expected = [
            ("plain", true, true),
            ("1+1=", false, true),
            ("2", true, false),
            ("user:", false, true),
            (" hi\n", false, false),
            ("assistant:", false, false),
            (" ho\n", true, false),
        ];
        assert_eq!(shape(&pieces), expected);
    }

    #[test]
    fn rows_of_other_shapes_are_refused_by_number() {
        assert_eq!(refusal("a.jsonl", b"\n \n"), "a.jsonl: holds no text");
        for row in ["{}", r#"{"prompt": "no completion"}"#, r#"{"messages": []}"#, r#"{"text": null}"#] {
            let message = refusal("a.jsonl", format!("{{\"text\": \"fine\"}}\n{row}").as_bytes());
            assert_eq!(message, format!("a.jsonl: row 2: {}", Row::EXPECTED), "{row}");
        }
        for row in [&b"[1]"[..], b"{\"text\": 3}", b"{\"text\": \"unclosed", b"{\"text\": \"\xFF\"}", b"\x00"] {
            let message = refusal("a.jsonl", row);
            assert!(message.starts_with("a.jsonl: row 1"), "{message}");
        }
    }

    #[test]
    fn parquet_rows_are_rows() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.parquet");
        write_parquet(&path, &["id", "text"], &[&["1", "2"], &["first", "second"]]);
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(shape(&read("a.parquet", &bytes).unwrap()), [("first", true, true), ("second", true, true)]);
        write_parquet(&path, &["prompt", "completion"], &[&["q"], &["a"]]);
        let pieces = read("a.parquet", &std::fs::read(&path).unwrap()).unwrap();
        assert_eq!(shape(&pieces), [("q", false, true), ("a", true, false)]);

        write_parquet(&path, &["sentence"], &[&["q"]]);
        let message = refusal("a.parquet", &std::fs::read(&path).unwrap());
        assert!(message.contains("its columns are `sentence`; a row needs `text`"), "{message}");
        assert!(refusal("a.parquet", &bytes[..bytes.len() - 9]).contains("not a readable Parquet file"));
        assert!(refusal("a.parquet", b"text").contains("not a readable Parquet file"));
    }

    #[test]
    fn a_text_without_a_seam_is_tokenised_as_a_whole() {
        for unit in ["<|endoftext|>", "word", "7", "漢"] {
            let text = unit.repeat(3 * PIECE_BYTES / unit.len());
            assert_eq!(read("a.txt", text.as_bytes()).unwrap().len(), 1, "{unit}");
            let row = serde_json::json!({ "text": text }).to_string();
            assert_eq!(read("a.jsonl", row.as_bytes()).unwrap().len(), 1, "{unit}");
            let long = unit.repeat(2 * MAX_PIECE_BYTES / unit.len());
            let pieces = read("a.txt", long.as_bytes()).unwrap();
            assert!(pieces.iter().all(|piece| piece.text.len() <= MAX_PIECE_BYTES + PIECE_BYTES), "{unit}");
            assert_eq!(pieces.into_iter().map(|piece| piece.text).collect::<String>(), long);
        }
        // A tokenizer that puts a space in front of every text finds one there.
        let lines = "a line of words\n".repeat(PIECE_BYTES / 8);
        assert!(read("a.txt", lines.as_bytes()).unwrap()[1..].iter().all(|piece| piece.text.starts_with(' ')));
    }

    fn write_parquet(path: &Path, names: &[&str], columns: &[&[&str]]) {
        use parquet::data_type::{ByteArray, ByteArrayType};
        let fields = names.iter().map(|name| format!("required binary {name} (UTF8);")).collect::<Vec<_>>().join(" ");
        let schema = parquet::schema::parser::parse_message_type(&format!("message rows {{ {fields} }}")).unwrap();
        let file = File::create(path).unwrap();
        let mut writer =
            parquet::file::writer::SerializedFileWriter::new(file, schema.into(), std::sync::Arc::default()).unwrap();
        let mut group = writer.next_row_group().unwrap();
        for values in columns {
            let mut column = group.next_column().unwrap().unwrap();
            let values: Vec<ByteArray> = values.iter().map(|&value| ByteArray::from(value)).collect();
            column.typed::<ByteArrayType>().write_batch(&values, None, None).unwrap();
            column.close().unwrap();
        }
        group.close().unwrap();
        writer.close().unwrap();
    }

    proptest! {
        /// Tokens do not depend on where a text was cut.
        #[test]
        fn both_sides_of_a_seam_give_the_tokens_of_the_whole(text in "([a-z]{1,5}|[ \\n]{1,3}|'s|[0-9é.,!]{1,2}){2,30}") {
            static TOKENIZER: LazyLock<Tokenizer> =
                LazyLock::new(|| Tokenizer::from_json(byte_level_bpe(), "test").unwrap());
            let cut = seam(&text).unwrap_or(text.len());
            let mut ids = TOKENIZER.encode(&text[..cut]).unwrap();
            ids.extend(TOKENIZER.encode(&text[cut..]).unwrap());
            prop_assert_eq!(ids, TOKENIZER.encode(&text).unwrap());
        }

        /// Outside bytes of any kind give pieces or an error, never a panic.
        #[test]
        fn no_bytes_make_a_reader_panic(bytes: Vec<u8>, name in r"a\.(txt|jsonl|parquet)") {
            let _ = read(&name, &bytes);
        }

        #[test]
        fn no_damage_makes_the_parquet_reader_panic(at: prop::sample::Index, byte: u8) {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("a.parquet");
            write_parquet(&path, &["text"], &[&["first", "second"]]);
            let mut bytes = std::fs::read(&path).unwrap();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            let _ = read("a.parquet", &bytes);
        }
    }
}
