//! Converts a [`DataSource`] to training and validation tokens, through the token cache.

use super::cache::{IdWidth, TokenFile, TokenWriter};
use super::format::DataFormat;
use super::grammar;
use super::preference::{PromptRow, Sample};
use super::row::{DatasetOptions, Example, RowReader};
use super::rows::RowLocation;
use super::samples::SampleKind;
use super::source::{DataSource, Document, Downloader, Files, LoadEvent};
use super::template::EvalExample;
use super::tokenize::tokenize;
use super::tokenizer::Tokenizer;
use super::tokens::{IGNORE_INDEX, TokenSource};
use crate::digest::Digest;
use crate::{Error, Result, untrusted};
use minijinja::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The share of a corpus, its contiguous tail, that validates.
pub const HELD_OUT: f64 = 0.1;

/// The grammar's sentences do not depend on the run's seed, so that runs with different seeds can be compared.
const GRAMMAR_SEED: u64 = 0;

/// The number of files that a notice names.
const LISTED: usize = 8;

/// Training and validation tokens.
#[derive(Clone, Debug)]
pub struct Dataset {
    /// Training tokens.
    pub train: TokenSource,
    /// Validation tokens; no token is in both.
    pub validation: TokenSource,
    /// Average bytes of text per predicted validation token; converts nats per token to bits per byte. It is exact if
    /// tokens are bytes, as in byte-level BPE; otherwise it is the average of the whole text.
    pub validation_bytes_per_token: f64,
    /// The rows of the training data and of the validation data as JSON, each before the split and only if
    /// [`DatasetOptions::keeps_rows`]; a sequence has the number of its row.
    pub rows: [Vec<Arc<str>>; 2],
    /// The minimum attainable loss in nats per token, if known.
    pub entropy_per_token: Option<f64>,
    /// SHA-256 of tokenizer and text in hexadecimal, which a resumed run must match.
    pub fingerprint: String,
}

/// Loads data sets, keeping tokens and downloads in a folder.
pub struct DatasetBuilder<'a> {
    /// The folder of token files.
    pub folder: PathBuf,
    /// How files are read.
    pub options: DatasetOptions,
    /// The share of a corpus that validates without validation data.
    pub held_out: f64,
    /// Downloads missing files.
    pub downloader: Option<&'a mut dyn Downloader>,
    /// Receives progress and notices.
    pub report: Option<&'a mut dyn FnMut(LoadEvent)>,
}

/// One tokenized source.
struct Corpus {
    tokens: TokenSource,
    /// Bytes of text in the loss, without prompts.
    bytes_per_token: f64,
    /// SHA-256 of tokenizer and content.
    key: String,
    /// See [`Dataset::rows`].
    rows: Vec<Arc<str>>,
}

/// Average bytes of text per token that an evaluation predicts; `None` if tokens are not bytes of the text.
fn bytes_per_predicted(tokens: &TokenSource, tokenizer: &Tokenizer) -> Option<f64> {
    const CHUNK: usize = 1 << 16;
    // The first token of a text or sample is not predicted.
    let firsts: BTreeSet<usize> =
        if tokens.is_samples() { tokens.documents().map(|sample| sample.start).collect() } else { [0].into() };
    let mut counts = vec![0_u64; tokenizer.vocab_size()];
    for start in (0..tokens.len()).step_by(CHUNK) {
        let mut ids = vec![0; CHUNK.min(tokens.len() - start)];
        tokens.read_labels(start, &mut ids);
        for (_, id) in ids.iter().enumerate().filter(|(at, id)| **id != IGNORE_INDEX && !firsts.contains(&(start + at)))
        {
            *counts.get_mut(*id as usize)? += 1;
        }
    }
    let (mut bytes, mut count) = (0, 0);
    for (id, times) in (0..).zip(counts).filter(|(_, times)| *times > 0) {
        bytes += times * tokenizer.token_bytes(id)? as u64;
        count += times;
    }
    (count > 0 && bytes > 0).then(|| bytes as f64 / count as f64)
}

impl DatasetBuilder<'_> {
    /// A loader that keeps its files in `folder`.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        let options = DatasetOptions::default();
        Self { folder: folder.into(), options, held_out: HELD_OUT, downloader: None, report: None }
    }

    /// Reads and tokenizes `source`; validation is `validation`, or the share held out from tokens or samples without
    /// one.
    pub fn load(
        &mut self,
        source: &DataSource,
        validation: Option<&DataSource>,
        tokenizer: &Tokenizer,
    ) -> Result<Dataset> {
        let corpus = self.corpus(source, tokenizer)?;
        let mut keys = corpus.key;
        let (train, validation, average, rows) = if let Some(validation) = validation {
            let validation = self.corpus(validation, tokenizer)?;
            keys += &validation.key;
            (corpus.tokens, validation.tokens, validation.bytes_per_token, [corpus.rows, validation.rows])
        } else {
            let (train, tail) = corpus.tokens.hold_out(self.held_out);
            (train, tail, corpus.bytes_per_token, [corpus.rows.clone(), corpus.rows])
        };
        let validation_bytes_per_token = bytes_per_predicted(&validation, tokenizer).unwrap_or(average);
        let entropy_per_token =
            (*source == DataSource::Grammar && tokenizer.is_byte()).then(grammar::entropy_per_token);
        Ok(Dataset {
            train,
            validation,
            validation_bytes_per_token,
            rows,
            entropy_per_token,
            fingerprint: Digest::of(keys.as_bytes()).sha256,
        })
    }

    /// All tokens of `source`.
    pub fn load_tokens(&mut self, source: &DataSource, tokenizer: &Tokenizer) -> Result<TokenSource> {
        Ok(self.corpus(source, tokenizer)?.tokens)
    }

    /// All tokens of `source`, and their bytes of text as [`Dataset::validation_bytes_per_token`], which reads every
    /// token.
    pub fn load_unsplit(&mut self, source: &DataSource, tokenizer: &Tokenizer) -> Result<(TokenSource, f64)> {
        let Corpus { tokens, bytes_per_token, .. } = self.corpus(source, tokenizer)?;
        let bytes_per_token = bytes_per_predicted(&tokens, tokenizer).unwrap_or(bytes_per_token);
        Ok((tokens, bytes_per_token))
    }

    /// The conversations of `source`, each split into prompt and last answer; skips conversations that do not end with
    /// one. Fails like [`Self::load`], and with [`Error::Data`] if there is none.
    pub fn eval_examples(&mut self, source: &DataSource) -> Result<Vec<EvalExample>> {
        let mut examples = Vec::new();
        let advice = "contains text, not conversations; use a file with rows of `messages`";
        self.for_each_row(source, advice, false, |rows, document, location, row| {
            let example = rows.example(&row, || format!("`{}`, {location},", document.origin));
            let example = example.map_err(|message| document.error(format!("{location}: {message}")))?;
            if let Example::Sample(Sample::Conversation { conversation: mut prompt, variables, .. }) = example
                && let Some(answer) = prompt.last_answer()
            {
                prompt.messages.pop();
                examples.push(EvalExample { prompt, variables, answer });
            }
            Ok(())
        })?;
        if examples.is_empty() {
            return Err(Error::data(source, "contains no conversation that ends with an answer"));
        }
        Ok(examples)
    }

    /// The prompts in the rows of `source`. Fails with [`Error::Data`] naming the line of a row that has no prompt.
    pub fn prompts(&mut self, source: &DataSource) -> Result<Vec<PromptRow>> {
        let mut prompts = Vec::new();
        let advice = "contains text, not rows; use a file with rows of `prompt` or `messages`";
        self.for_each_row(source, advice, true, |rows, document, location, row| {
            let origin = document.origin.clone();
            let location = location.to_string();
            let found = rows.prompt(&row).map_err(|message| document.error(format!("{location}: {message}")))?;
            prompts.push(PromptRow { origin, location, row, prompt: found });
            Ok(())
        })?;
        Ok(prompts)
    }

    /// Passes the rows of `source` to `on_row`, with all columns of a Parquet file or only the known ones. `advice` is
    /// the error for a source of text.
    fn for_each_row(
        &mut self,
        source: &DataSource,
        advice: &str,
        every_column: bool,
        mut on_row: impl FnMut(&mut RowReader<'_>, &Document, RowLocation, Value) -> Result<()>,
    ) -> Result<()> {
        if *source == DataSource::Grammar {
            return Err(Error::data(source, advice));
        }
        let files = self.files(source)?;
        let mut rows = RowReader::new(&self.options);
        let fields = if every_column { Vec::new() } else { rows.fields() };
        for document in &files.documents {
            if document.format == DataFormat::Text {
                return Err(document.error(advice));
            }
            document.read_rows(&fields, &mut |location, row| on_row(&mut rows, document, location, row))?;
        }
        Ok(())
    }

    /// The files of `source`; reports those that are left out.
    fn files(&mut self, source: &DataSource) -> Result<Files> {
        let downloader = self.downloader.as_mut().map(|downloader| &mut **downloader as &mut dyn Downloader);
        let files = source.files(self.options.format, downloader)?;
        if let (Some(read), [_, ..]) = (files.documents.first(), &files.left_out[..]) {
            let more = files.left_out.len().saturating_sub(LISTED);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            let names: Vec<_> = files.left_out.iter().take(LISTED).map(|name| format!("`{name}`")).collect();
            let format = read.format.name();
            let names = names.join(", ");
            self.notice(format!("`{source}`: reading its {format} files; left out: {names}{more}"));
        }
        Ok(files)
    }

    fn corpus(&mut self, source: &DataSource, tokenizer: &Tokenizer) -> Result<Corpus> {
        if *source == DataSource::Grammar {
            let fits = self.options.samples.require(SampleKind::Plain, "text");
            fits.map_err(|message| Error::data(source, message))?;
            let text = grammar::text(GRAMMAR_SEED, grammar::CORPUS_BYTES);
            let key = Digest::of((tokenizer.fingerprint() + &text).as_bytes()).sha256;
            let tokens = TokenSource::from_ids(tokenizer.encode_document(&text)?).with_bos(tokenizer.bos());
            let bytes_per_token = text.len() as f64 / tokens.len().max(1) as f64;
            return Ok(Corpus { tokens, bytes_per_token, key, rows: Vec::new() });
        }
        let files = self.files(source)?;
        let key = self.key(&files.documents, tokenizer)?;
        // Runs record the key, which has no special tokens of templates.
        let name = Digest::of(format!("{key} {:?}", self.options.chat.tokens).as_bytes()).sha256;
        let path = self.folder.join(format!("{}.tokens", &name[..32]));
        let file = match self.cached(&path) {
            Some(file) => file,
            None => self.tokenize(&files.documents, tokenizer, &key, &path)?,
        };
        // The key of text has no objective, so the tokens may come from a run with another one.
        let fits = self.options.samples.require(file.contents.samples, "text");
        fits.map_err(|message| Error::data(source, message))?;
        let bytes_per_token = file.text_bytes as f64 / file.trained.max(1) as f64;
        let tokens = TokenSource::from_file(file).with_bos(tokenizer.bos());
        let mut rows = Vec::new();
        if self.options.keeps_rows {
            let mut keep = |_, row| {
                rows.push(serde_json::to_string(&row).map_err(candle_core::Error::wrap)?.into());
                Ok(())
            };
            files.documents.iter().try_for_each(|document| document.read_rows(&[], &mut keep))?;
            if rows.len() as u64 != tokens.sequences() {
                return Err(Error::data(source, "has a row without tokens; remove rows with an empty prompt"));
            }
        }
        Ok(Corpus { tokens, bytes_per_token, key, rows })
    }

    /// The token file at `path`, if it exists and is complete.
    fn cached(&mut self, path: &Path) -> Option<TokenFile> {
        let opened = TokenFile::open(untrusted::open(path).ok()?);
        opened.map_err(|why| self.notice(format!("`{}` is damaged ({why}); tokenizing again", path.display()))).ok()
    }

    fn tokenize(&mut self, documents: &[Document], tokenizer: &Tokenizer, key: &str, path: &Path) -> Result<TokenFile> {
        let rows = documents.iter().any(|document| document.format != DataFormat::Text);
        let flags = documents.len() > 1 || rows || tokenizer.bos().is_some();
        let width = if flags || tokenizer.vocab_size() > 1 << 16 { IdWidth::U32Flagged } else { IdWidth::U16 };
        let (writer, kept) = match TokenWriter::create(&self.folder, width) {
            Ok(writer) => (writer, Some(path)),
            Err(error) => {
                self.notice(format!("{error}; the tokens will not be cached for the next run"));
                (TokenWriter::create(&std::env::temp_dir(), width)?, None)
            }
        };
        let mut ignore = |_| {};
        let report = self.report.as_mut().map_or(&mut ignore as &mut dyn FnMut(LoadEvent), |report| &mut **report);
        let (writer, text_bytes) = tokenize(documents, tokenizer, &self.options, writer, report)?;
        // The cache keeps the tokens under this key forever, so they must come from the hashed text.
        if self.key(documents, tokenizer)? != key {
            let origin = documents.first().map_or("data", |document| &document.origin);
            return Err(Error::data(
                origin,
                "the text changed while it was being read; start again when it is complete",
            ));
        }
        writer.finish(text_bytes, kept)
    }

    /// SHA-256 of all inputs that determine the tokens: the tokenizer, the reading options, and format and content of
    /// every file.
    fn key(&self, documents: &[Document], tokenizer: &Tokenizer) -> Result<String> {
        let mut parts = vec![tokenizer.fingerprint()];
        for document in documents {
            document.open()?;
            parts.push(format!("{:?} {}", document.format, Digest::of_file(&document.path)?.sha256));
        }
        if documents.iter().any(|document| document.format != DataFormat::Text) {
            parts.push(self.options.key());
        }
        Ok(Digest::of(parts.join("\n").as_bytes()).sha256)
    }

    fn notice(&mut self, text: String) {
        if let Some(report) = &mut self.report {
            report(LoadEvent::Notice(text));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::document::tests::write_parquet;
    use crate::data::tokenizer::tests::{byte_level_bpe, prefixing, word_level};
    use crate::data::{ChatFormat, TemplateTokens};

    /// A source with this content.
    fn written(folder: &tempfile::TempDir, name: &str, content: &str) -> DataSource {
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        path.display().to_string().parse().unwrap()
    }

    /// The tail of a text has longer tokens than the rest; its first token is not predicted.
    #[test]
    fn bytes_of_a_validation_tail_are_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let source = written(&folder, "text.txt", &("x".repeat(900) + &" the".repeat(100)));
        let tokenizer = Tokenizer::from_json(byte_level_bpe(), "a test's").unwrap();
        let set = DatasetBuilder::new(folder.path()).load(&source, None, &tokenizer).unwrap();
        assert_eq!((set.train.len(), set.validation.len()), (900, 100));
        assert_eq!(set.validation_bytes_per_token, 4.0);
        let byte = DatasetBuilder::new(folder.path()).load(&source, None, &Tokenizer::byte()).unwrap();
        assert_eq!(byte.validation_bytes_per_token, 1.0);
        // Also those of a whole text, whose first token is the short one here.
        let source = written(&folder, "whole.txt", &("x".to_owned() + &" the".repeat(9)));
        let mut loader = DatasetBuilder::new(folder.path());
        assert_eq!(loader.load_unsplit(&source, &tokenizer).unwrap().1, 4.0);
        assert_eq!(loader.load(&source, Some(&source), &tokenizer).unwrap().validation_bytes_per_token, 4.0);
    }

    /// Llama 2's tokenizer writes a space before every text, but none between a prompt and its completion, nor between
    /// the parts of a long text.
    #[test]
    fn completions_and_later_parts_of_a_text_get_no_space() {
        let folder = tempfile::tempdir().unwrap();
        let ids = |name: &str, content: &str, tokenizer: &Tokenizer| {
            let source = written(&folder, name, content);
            let (tokens, _) = DatasetBuilder::new(folder.path()).load_unsplit(&source, tokenizer).unwrap();
            let mut ids = vec![0; tokens.len()];
            tokens.read(0, &mut ids);
            ids
        };
        for tokenizer in prefixing() {
            let row = "{\"prompt\": \"a\", \"completion\": \"b a\"}";
            assert_eq!(ids("rows.jsonl", row, &tokenizer), [3, 2, 3, 5]);
            let long = ids("long.txt", &"a ".repeat(1 << 18), &tokenizer);
            assert_eq!((long.len(), long.iter().filter(|id| **id == 3).count()), ((1 << 18) + 1, 1 << 18));
        }
    }

    #[test]
    fn prompts_keep_all_columns_of_their_rows() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.parquet");
        write_parquet(&path, &["id", "prompt"], &[&["7"], &["a"]]);
        let source = path.display().to_string().parse().unwrap();
        let prompts = DatasetBuilder::new(folder.path()).prompts(&source).unwrap();
        assert_eq!(serde_json::to_string(&prompts[0].row).unwrap(), r#"{"id":"7","prompt":"a"}"#);
    }

    /// Without the first sides of two pairs, the second sides would form a pair.
    #[test]
    fn a_side_of_a_pair_without_tokens_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let row = "{\"prompt\": \" \", \"chosen\": \"  \", \"rejected\": \"a\"}\n";
        let source = written(&folder, "rows.jsonl", &row.repeat(2));
        let tokenizer = word_level(&["a"], None, &serde_json::Value::Null);
        let options = DatasetOptions { samples: SampleKind::Preference, ..DatasetOptions::default() };
        let error = DatasetBuilder { options, ..DatasetBuilder::new(folder.path()) }
            .load(&source, None, &tokenizer)
            .unwrap_err();
        assert!(error.to_string().contains("has 2 samples without tokens"), "{error}");
    }

    #[test]
    fn cached_text_is_refused_by_an_objective_that_needs_pairs() {
        let folder = tempfile::tempdir().unwrap();
        let source = written(&folder, "text.txt", "some text");
        let tokenizer = Tokenizer::byte();
        let refused = || {
            let options = DatasetOptions { samples: SampleKind::Preference, ..DatasetOptions::default() };
            let set = DatasetBuilder { options, ..DatasetBuilder::new(folder.path()) }.load(&source, None, &tokenizer);
            set.unwrap_err().to_string().contains("contains text, but needs pairs")
        };
        assert!(refused());
        DatasetBuilder::new(folder.path()).load(&source, None, &tokenizer).unwrap();
        assert!(refused());
    }

    /// Two models may have the same tokenizer and template, and different special tokens.
    #[test]
    fn tokens_of_a_template_are_part_of_the_cache() {
        let folder = tempfile::tempdir().unwrap();
        let source = written(&folder, "rows.jsonl", r#"{"messages": [{"role": "assistant", "content": "b"}]}"#);
        let tokenizer = Tokenizer::byte();
        let first = |bos: &str| {
            let tokens = TemplateTokens { bos: Some(bos.to_owned()), eos: None };
            let template = "{{ bos_token }}{% generation %}{{ messages[0].content }}{% endgeneration %}";
            let options =
                DatasetOptions { chat: ChatFormat::new(template, "model", &tokens), ..DatasetOptions::default() };
            let loaded =
                DatasetBuilder { options, ..DatasetBuilder::new(folder.path()) }.load_unsplit(&source, &tokenizer);
            let mut ids = [0];
            loaded.unwrap().0.read(0, &mut ids);
            ids[0]
        };
        assert_eq!([first("<"), first("[")], ['<', '['].map(u32::from));
    }

    /// As in TRL: many data sets have the token in their texts.
    #[test]
    fn a_text_that_ends_with_the_end_of_text_gets_no_second_one() {
        let folder = tempfile::tempdir().unwrap();
        let tokenizer = Tokenizer::byte();
        let labels = |rows: &[&str]| {
            let source = written(&folder, "rows.jsonl", &rows.join("\n").replace('$', "<|endoftext|>"));
            let (tokens, _) = DatasetBuilder::new(folder.path()).load_unsplit(&source, &tokenizer).unwrap();
            let mut labels = vec![0; tokens.len()];
            tokens.read_labels(0, &mut labels);
            labels
        };
        let [a, b, eos] = [u32::from(b'a'), u32::from(b'b'), tokenizer.eos_id().unwrap()];
        let texts = [r#"{"text": "a$"}"#, r#"{"text": "b"}"#, r#"{"text": "a"}"#];
        assert_eq!(labels(&texts), [a, eos, b, eos, a]);
        let samples = [
            r#"{"prompt": "a", "completion": "b$"}"#,
            r#"{"prompt": "a$", "completion": ""}"#,
            r#"{"prompt": "a", "completion": "$$"}"#,
        ];
        let prompt = IGNORE_INDEX;
        assert_eq!(labels(&samples), [prompt, b, eos, prompt, prompt, eos, prompt, eos, eos]);
    }

    #[test]
    fn an_empty_row_is_a_sample_without_loss_tokens() {
        let folder = tempfile::tempdir().unwrap();
        let row = |prompt: &str, completion: &str| {
            serde_json::json!({ "prompt": prompt, "completion": completion }).to_string() + "\n"
        };
        let source = written(&folder, "rows.jsonl", &(row("a", "b") + &row("", "") + &row("c", "")));
        let tokenizer = Tokenizer::byte();
        let (tokens, _) = DatasetBuilder::new(folder.path()).load_unsplit(&source, &tokenizer).unwrap();
        let eos = tokenizer.eos_id().unwrap();
        let mut labels = vec![0; tokens.len()];
        tokens.read_labels(0, &mut labels);
        let prompt = IGNORE_INDEX;
        assert_eq!(labels, [prompt, u32::from(b'b'), eos, IGNORE_INDEX, prompt, eos]);
        assert_eq!(tokens.documents().map(|sample| sample.len()).collect::<Vec<_>>(), [3, 1, 2]);
    }
}
