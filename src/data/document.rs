//! Reads a file in chunks: text, so that memory does not grow with the file, or rows, which [`rows`](super::rows)
//! reads.

use super::chunk::{CHUNK_BYTES, ChunkEnd, ChunkSink, LossMask, MAX_CHUNK_BYTES, TextChunk, last_split_point};
use super::format::{CONVERT, DataFormat};
use super::row::{RowReader, RowSchema};
use super::rows::BOM;
use super::source::Document;
use crate::{Error, Result};
use std::io::Read;

impl Document {
    /// Reads the whole file into `sink`; converts its rows with `rows`.
    pub(super) fn read(&self, rows: &mut RowReader<'_>, sink: &mut ChunkSink) -> Result<()> {
        if self.format == DataFormat::Text {
            self.check_encoding()?;
            return self.read_text(rows, sink);
        }
        let fields = rows.fields();
        self.read_rows(&fields, &mut |location, row| rows.read(&self.origin, location, &row, sink))
    }

    fn read_text(&self, rows: &mut RowReader<'_>, sink: &mut ChunkSink) -> Result<()> {
        let mut file = self.open()?;
        let mut buffer = Vec::with_capacity(2 * CHUNK_BYTES);
        let (mut position, mut line) = (0, 1);
        let mut first = true;
        let mut blank = true;
        loop {
            let read = (&mut file).take(CHUNK_BYTES as u64).read_to_end(&mut buffer);
            let ended = read.map_err(Error::io("read", &self.path))? == 0;
            if position == 0 && buffer.starts_with(BOM) {
                buffer.drain(..BOM.len());
                position = BOM.len();
            }
            let text = match std::str::from_utf8(&buffer) {
                Ok(text) => text,
                // The buffer ends within a character; the next read continues it.
                Err(error) if !ended && error.error_len().is_none() => {
                    std::str::from_utf8(&buffer[..error.valid_up_to()]).unwrap_or_default()
                }
                Err(error) => {
                    let at = error.valid_up_to();
                    let line = line + line_feeds(&buffer[..at]);
                    let byte = buffer[at];
                    let position = position + at;
                    return Err(
                        self.error(format!("not UTF-8: byte {position} (line {line}) is 0x{byte:02X}; {CONVERT}"))
                    );
                }
            };
            if first {
                if !self.asked {
                    self.refuse_rows(text, &rows.fields())?;
                }
                let checked = rows.check_schema(RowSchema::Text, || format!("`{}`", self.origin));
                checked.map_err(|message| self.error(message))?;
            }
            if let Some(at) = text.find('\0') {
                let line = line + line_feeds(&buffer[..at]);
                let position = position + at;
                return Err(
                    self.error(format!("byte {position} (line {line}) is zero: this is a binary file, not text"))
                );
            }
            let cut = if ended { text.len() } else { last_split_point(text).unwrap_or(0) };
            let cut = if cut == 0 && text.len() >= MAX_CHUNK_BYTES { text.len() } else { cut };
            blank &= text[..cut].trim().is_empty();
            if cut > 0 {
                let text = text[..cut].to_owned();
                sink(TextChunk { text, loss_mask: LossMask::All, starts_document: first, end: ChunkEnd::Continues })?;
                first = false;
            }
            position += cut;
            line += line_feeds(&buffer[..cut]);
            buffer.drain(..cut);
            if ended {
                return if blank { Err(self.error("contains no text")) } else { Ok(()) };
            }
        }
    }

    /// Rejects rows that would be trained on as text, including braces and quotes.
    fn refuse_rows(&self, text: &str, fields: &[&str]) -> Result<()> {
        let Some(format) = DataFormat::looks_like(text, fields) else { return Ok(()) };
        let format = format.name();
        Err(self.error(format!(
            "looks like {format} but would be read as plain text; use `--format {format}` to parse its rows, or \
             `--format text` to train on it verbatim"
        )))
    }
}

fn line_feeds(bytes: &[u8]) -> usize {
    bytes.split(|&byte| byte == b'\n').count() - 1
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::chat_format::ChatFormat;
    use super::super::row::{DatasetOptions, LossOn};
    use super::super::samples::SampleKind;
    use super::super::template::TemplateTokens;
    use super::super::tokenizer::{Tokenizer, tests::byte_level_bpe};
    use super::*;
    use proptest::prelude::*;
    use std::path::Path;
    use std::sync::LazyLock;

    fn read(name: &str, content: &[u8]) -> Result<Vec<TextChunk>> {
        read_with(name, content, &DatasetOptions::default())
    }

    fn read_with(name: &str, content: &[u8], options: &DatasetOptions) -> Result<Vec<TextChunk>> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        let document =
            Document { format: DataFormat::from_path(&path).unwrap(), path, origin: name.to_owned(), asked: false };
        let mut chunks = Vec::new();
        document.read(&mut RowReader::new(options), &mut |chunk| {
            chunks.push(chunk);
            Ok(())
        })?;
        Ok(chunks)
    }

    fn refusal(name: &str, content: &[u8]) -> String {
        read(name, content).unwrap_err().to_string()
    }

    /// (text, trained, starts a document) of each chunk.
    fn shape(chunks: &[TextChunk]) -> Vec<(&str, bool, bool)> {
        let trained = |chunk: &TextChunk| chunk.loss_mask != LossMask::None;
        chunks.iter().map(|chunk| (chunk.text.as_str(), trained(chunk), chunk.starts_document)).collect()
    }

    #[test]
    fn a_long_text_comes_in_pieces_and_whole() {
        // Three bytes per character, so that the buffer's end splits one.
        let text = "語 語語\n".repeat(100_000);
        let chunks = read("a.txt", text.as_bytes()).unwrap();
        assert!(chunks.len() > 3 && chunks.iter().all(|chunk| chunk.text.len() <= 2 * CHUNK_BYTES));
        assert_eq!(chunks.iter().map(|chunk| chunk.text.as_str()).collect::<String>(), text);
        assert_eq!(chunks.iter().filter(|chunk| chunk.starts_document).count(), 1);
    }

    #[test]
    fn text_that_cannot_be_used_is_refused_with_the_position() {
        assert!(refusal("a.txt", b"one\ntwo \xFF three").contains("byte 8 (line 2) is 0xFF"));
        assert!(refusal("a.txt", b"cut short \xE2\x82").contains("byte 10 (line 1) is 0xE2"));
        assert!(refusal("a.txt", b"\xEF\xBB\xBFa\xFF").contains("byte 4 (line 1) is 0xFF"));
        let mut late = "line\n".repeat(200_000).into_bytes();
        late.push(0x80);
        assert!(refusal("a.txt", &late).contains("byte 1000000 (line 200001) is 0x80"));
    }

    #[test]
    fn rows_of_every_format_are_the_same_rows() {
        let shapes = |name: &str, content: &str| -> Vec<(String, bool, bool)> {
            let chunks = read(name, content.as_bytes()).unwrap();
            shape(&chunks).into_iter().map(|(text, trained, starts)| (text.to_owned(), trained, starts)).collect()
        };
        let expected = [
            ("1+1=", false, true),
            ("2", true, false),
            ("", true, false),
            ("a \"b\",\nc", false, true),
            ("é", true, false),
            ("", true, false),
        ];
        let expected = expected.map(|(text, trained, starts)| (text.to_owned(), trained, starts));
        let rows = [
            (
                "a.jsonl",
                "\u{feff}{\"prompt\": \"1+1=\", \"completion\": \"2\"}\n\n\r\n{\"completion\": \"é\", \"prompt\": \"a \\\"b\\\",\\nc\"}",
            ),
            (
                "a.json",
                "\u{feff} [{\"prompt\": \"1+1=\", \"completion\": \"2\"},\n {\"id\": 7, \"prompt\": \"a \\\"b\\\",\\nc\", \"completion\": \"é\"}]\n",
            ),
            (
                "b.json",
                "{\"prompt\": \"1+1=\", \"completion\": \"2\"}\n{\"prompt\": \"a \\\"b\\\",\\nc\", \"completion\": \"é\"}\n",
            ),
            ("a.csv", "\u{feff}prompt,completion\r\n1+1=,2\r\n\"a \"\"b\"\",\nc\",é\r\n"),
            ("a.csv", "prompt; completion\n1+1=;2\n\"a \"\"b\"\",\nc\";é\n"),
            ("a.csv", "prompt;completion\r1+1=;2\r\"a \"\"b\"\",\nc\";é\r"),
            ("a.tsv", "id\tcompletion\tprompt\n1\t2\t1+1=\n2\té\t\"a \"\"b\"\",\nc\""),
        ];
        for (name, content) in rows {
            assert_eq!(shapes(name, content), expected, "{name}");
        }
    }

    #[test]
    fn a_conversation_is_one_piece_with_its_answers_marked() {
        let said = "user: hi\nassistant: ho<|endoftext|>\n";
        for row in [
            r#"{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}"#,
            r#"{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}"#,
            r#"{"conversations": [{"role": null, "from": "human", "value": "hi"}, {"from": "gpt", "value": "ho", "content": null}]}"#,
            r#"{"conversations": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}], "system": ""}"#,
            r#"{"prompt": [{"from": "human", "value": "hi"}], "completion": [{"from": "gpt", "value": "ho"}]}"#,
            r#"{"instruction": "hi", "input": "", "output": "ho"}"#,
            r#"{"messages": "[{\"role\": \"user\", \"content\": \"hi\"}, {\"role\": \"assistant\", \"content\": \"ho\"}]"}"#,
        ] {
            let chunks = read("a.jsonl", row.as_bytes()).unwrap();
            let [chunk] = &chunks[..] else { panic!("{chunks:?}") };
            let LossMask::Ranges(parts) = &chunk.loss_mask else { panic!("{chunk:?}") };
            assert_eq!((chunk.text.as_str(), &chunk.text[parts[0].clone()]), (said, " ho<|endoftext|>"));
            assert_eq!((parts.len(), chunk.end), (1, ChunkEnd::Templated));
        }
        let question = r#"{"role": "user", "content": "do\n\nit"}"#;
        let answer = r#"{"role": "assistant", "content": "done"}"#;
        for row in [
            r#"{"instruction": "do", "input": "it", "output": "done", "system": "be"}"#,
            &format!(r#"{{"messages": [{question}, {answer}], "system": "be"}}"#),
            &format!(
                r#"{{"messages": [{{"from": "system", "value": "be"}}, {question}, {answer}], "system": "else"}}"#
            ),
            &format!(r#"{{"prompt": [{question}], "completion": [{answer}], "system": "be"}}"#),
        ] {
            let text = &read("a.jsonl", row.as_bytes()).unwrap()[0].text;
            assert_eq!(text, "system: be\nuser: do\n\nit\nassistant: done<|endoftext|>\n");
        }
    }

    #[test]
    fn large_integers_of_an_array_stay_exact() {
        let template = "{{ messages[0].n }}{% generation %}{{ messages[0].content }}{% endgeneration %}";
        let chat = ChatFormat::new(template, "model", &TemplateTokens::default());
        let options = DatasetOptions { chat, ..DatasetOptions::default() };
        let row = r#"[{"messages": [{"role": "assistant", "content": "a", "n": 1234567890123456789012}]}]"#;
        assert_eq!(read_with("a.json", row.as_bytes(), &options).unwrap()[0].text, "1234567890123456789012a");
        assert!(refusal("a.json", br#"[{"text": "a"}, {"text": "\ud800"}]"#).contains("row 2: "));
    }

    #[test]
    fn a_table_with_many_columns_is_read_in_linear_time() {
        let names = (0..200_000).map(|number| format!("c{number}")).collect::<Vec<_>>().join(",");
        let began = std::time::Instant::now();
        assert!(refusal("a.csv", format!("{names},c7\n").as_bytes()).contains("two columns are named `c7`"));
        assert!(began.elapsed().as_secs() < 20, "{:?}", began.elapsed());
    }

    #[test]
    fn an_empty_cell_of_a_table_has_neither_tools_nor_a_weight() {
        let table = "instruction,output,tools,weight\nhi,ho,,\n";
        assert_eq!(read("a.csv", table.as_bytes()).unwrap()[0].text, "user: hi\nassistant: ho<|endoftext|>\n");
    }

    #[test]
    fn a_rows_variables_reach_its_chat_template() {
        let template = "{{ tools is none }} {{ thinking is defined }} {{ thinking is sameas false }} {{ eos_token }}";
        let tokens = TemplateTokens { bos: None, eos: Some("</s>".into()) };
        let chat = ChatFormat::new(&format!("{template}{{% generation %}}a{{% endgeneration %}}"), "model", &tokens);
        let options = DatasetOptions { chat, ..DatasetOptions::default() };
        let text = |fields: &str| {
            let row = format!(r#"{{"messages": [{{"role": "assistant", "content": "a"}}]{fields}}}"#);
            read_with("a.jsonl", row.as_bytes(), &options).map(|chunks| chunks[0].text.clone())
        };
        for (fields, expected) in [
            ("", "True False False </s>a"),
            (r#", "tools": [], "chat_template_kwargs": null"#, "True False False </s>a"),
            (r#", "tools": "[]", "chat_template_kwargs": """#, "True False False </s>a"),
            (r#", "tools": [{"name": "f"}], "chat_template_kwargs": {"thinking": false}"#, "False True True </s>a"),
            (r#", "chat_template_kwargs": "{\"thinking\": true, \"eos_token\": \"x\"}""#, "True True False xa"),
            (r#", "chat_template_kwargs": {"messages": [], "tools": [1]}"#, "False False False </s>a"),
        ] {
            assert_eq!(text(fields).unwrap(), expected, "{fields}");
        }
    }

    #[test]
    fn weight_and_train_leave_answers_out_of_the_loss() {
        let parts = |answer: &str, loss_on: LossOn| -> Vec<String> {
            let row = format!(
                r#"{{"messages": [{{"role": "user", "content": "a"}}, {{"role": "assistant", "content": "b", {answer}}},
                {{"role": "user", "content": "c", "weight": 0}}, {{"role": "assistant", "content": "d"}}]}}"#
            );
            let options = DatasetOptions { loss_on, ..DatasetOptions::default() };
            let chunks = read_with("a.jsonl", row.replace('\n', " ").as_bytes(), &options).unwrap();
            let LossMask::Ranges(parts) = &chunks[0].loss_mask else { panic!("{chunks:?}") };
            parts.iter().map(|part| chunks[0].text[part.clone()].to_owned()).collect()
        };
        for left_out in [r#""weight": 0"#, r#""train": false"#] {
            assert_eq!(parts(left_out, LossOn::Answers), [" d<|endoftext|>"]);
            assert_eq!(parts(left_out, LossOn::All), ["user: a\nassistant:", "\nuser: c\nassistant: d<|endoftext|>\n"]);
        }
        assert_eq!(parts(r#""weight": 1.0"#, LossOn::Answers).len(), 2);
        let shared = r#"{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 0},
            {"from": "gpt", "value": "c", "weight": null}]}"#;
        let chunks = read("a.jsonl", shared.replace('\n', " ").as_bytes()).unwrap();
        let LossMask::Ranges(parts) = &chunks[0].loss_mask else { panic!("{chunks:?}") };
        assert_eq!(parts.iter().map(|part| &chunks[0].text[part.clone()]).collect::<Vec<_>>(), [" c<|endoftext|>"]);
    }

    #[test]
    fn a_weight_without_effect_is_refused() {
        for (samples, row) in [
            (SampleKind::Plain, r#"{"text": "a", "weight": 2}"#),
            (SampleKind::Preference, r#"{"prompt": "a", "chosen": "b", "rejected": "c", "weight": 2}"#),
            (SampleKind::UnpairedPreference, r#"{"prompt": "a", "completion": "b", "label": true, "weight": 2}"#),
            (SampleKind::Prompt, r#"{"prompt": "a", "weight": 2}"#),
            (SampleKind::Prompt, r#"{"prompt": "a", "completion": "b", "weight": 2}"#),
        ] {
            let options = DatasetOptions { samples, ..DatasetOptions::default() };
            let message = read_with("a.jsonl", row.as_bytes(), &options).unwrap_err().to_string();
            assert!(message.contains("line 1: `weight` applies to"), "{row}: {message}");
            read_with("a.jsonl", row.replace('2', "1").as_bytes(), &options).unwrap();
        }
        read("a.jsonl", br#"{"prompt": "a", "completion": "b", "weight": 2}"#).unwrap();
    }

    #[test]
    fn parquet_rows_are_rows() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.parquet");
        write_parquet(&path, &["id", "text"], &[&["1", "2"], &["first", "second"]]);
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(shape(&read("a.parquet", &bytes).unwrap()), [("first", true, true), ("second", true, true)]);
        write_parquet(&path, &["prompt", "completion"], &[&["q"], &["a"]]);
        let chunks = read("a.parquet", &std::fs::read(&path).unwrap()).unwrap();
        assert_eq!(shape(&chunks), [("q", false, true), ("a", true, false), ("", true, false)]);

        write_parquet(&path, &["sentence"], &[&["q"]]);
        let message = refusal("a.parquet", &std::fs::read(&path).unwrap());
        assert!(message.contains("its columns are `sentence`; a row needs `text`"), "{message}");
        assert!(refusal("a.parquet", &bytes[..bytes.len() - 9]).contains("not a readable Parquet file"));
        assert!(refusal("a.parquet", b"text").contains("not a readable Parquet file"));
    }

    #[test]
    fn a_text_without_a_split_point_is_tokenized_as_a_whole() {
        for unit in ["<|endoftext|>", "word", "7", "漢"] {
            let text = unit.repeat(3 * CHUNK_BYTES / unit.len());
            assert_eq!(read("a.txt", text.as_bytes()).unwrap().len(), 1, "{unit}");
            let row = serde_json::json!({ "text": text }).to_string();
            assert_eq!(read("a.jsonl", row.as_bytes()).unwrap().len(), 1, "{unit}");
            let long = unit.repeat(2 * MAX_CHUNK_BYTES / unit.len());
            let chunks = read("a.txt", long.as_bytes()).unwrap();
            assert!(chunks.iter().all(|chunk| chunk.text.len() <= MAX_CHUNK_BYTES + CHUNK_BYTES), "{unit}");
            assert_eq!(chunks.into_iter().map(|chunk| chunk.text).collect::<String>(), long);
        }
        // Parts are cut before a space.
        let lines = "a line of words\n".repeat(CHUNK_BYTES / 8);
        assert!(read("a.txt", lines.as_bytes()).unwrap()[1..].iter().all(|chunk| chunk.text.starts_with(' ')));
    }

    pub(in crate::data) fn write_parquet(path: &Path, names: &[&str], columns: &[&[&str]]) {
        use parquet::data_type::{ByteArray, ByteArrayType};
        let fields = names.iter().map(|name| format!("required binary {name} (UTF8);")).collect::<Vec<_>>().join(" ");
        let schema = parquet::schema::parser::parse_message_type(&format!("message rows {{ {fields} }}")).unwrap();
        let file = std::fs::File::create(path).unwrap();
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
        /// Tokens do not depend on the positions at which a text is split.
        #[test]
        fn both_sides_of_a_seam_give_the_tokens_of_the_whole(text in "([a-z]{1,5}|[ \\n]{1,3}|'s|[0-9é.,!]{1,2}){2,30}") {
            static TOKENIZER: LazyLock<Tokenizer> =
                LazyLock::new(|| Tokenizer::from_json(byte_level_bpe(), "test").unwrap());
            let cut = last_split_point(&text).unwrap_or(text.len());
            let mut ids = TOKENIZER.encode(&text[..cut]).unwrap();
            ids.extend(TOKENIZER.encode(&text[cut..]).unwrap());
            prop_assert_eq!(ids, TOKENIZER.encode(&text).unwrap());
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
