//! Converts one row to text with its loss part: which fields it has, and which of their text are answers.
//!
//! | fields | becomes |
//! |---|---|
//! | `text` | running text, all of it in the loss |
//! | `prompt`, `completion` | both unchanged, and the end of text; the completion in the loss |
//! | `prompt`, `completion`, `label` | the same, labelled good or bad |
//! | `prompt`, `chosen`, `rejected` | two such samples, which form a pair |
//! | `prompt` | for objectives that sample: the same with an empty completion |
//! | `instruction`, `input`, `output` (and `system`) | a conversation of one question |
//! | `messages` or `conversations` (and `system`, `tools`, `chat_template_kwargs`) | a conversation |
//!
//! A conversation becomes its chat template's text, with the assistant's turns in the loss.
//! `prompt` and its answers may also be lists of messages. The `weight` of a sample multiplies its loss.

use super::cache::{DatasetContents, DatasetKind};
use super::chat_format::ChatFormat;
use super::chunk::{ChunkEnd, ChunkSink, LossMask, TextChunk, emit};
use super::exact_json::entries;
use super::fields::{self, field, json_type};
use super::format::{DataFormat, EXPECTED_FIELDS};
use super::preference::{self, Prompt, Sample};
use super::rows::RowLocation;
use super::samples::SampleKind;
use super::template::{Conversation, Rendered, is_answer};
use crate::settings::Heading::Text;
use crate::settings::settings;
use crate::{Error, Result};
use minijinja::Value;
use minijinja::value::ValueKind;
use serde::{Deserialize, Serialize};
use std::ops::Range;

settings! {
    /// Fields of a row that do not go by their usual names.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct FieldNames {
        /// The field that holds running text, instead of `text`.
        text: Option<String> = None, fixed(), flag("text-field", Text, 0, "NAME"),
            help("The field of rows that holds running text [default: text]");
        /// The field that holds a prompt, instead of `prompt`.
        prompt: Option<String> = None, fixed(), flag("prompt-field", Text, 0, "NAME"),
            help("The field of rows that holds a prompt [default: prompt]");
        /// The field that holds its answer, instead of `completion`.
        completion: Option<String> = None, fixed(), flag("completion-field", Text, 0, "NAME"),
            help("The field of rows that holds a prompt's answer [default: completion]");
    }
}

/// The part of a conversation, or of a prompt with its answer, that counts in the loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossOn {
    /// Every answer, with the token that ends it.
    #[default]
    Answers,
    /// The last answer alone.
    LastAnswer,
    /// Every token.
    All,
}

/// How files become training text.
#[derive(Debug, Default)]
pub struct DatasetOptions {
    /// The format of files without a known extension, or of every file.
    pub format: Option<DataFormat>,
    /// Names of fields.
    pub fields: FieldNames,
    /// The samples that the objective needs.
    pub samples: SampleKind,
    /// The part that counts in the loss.
    pub loss_on: LossOn,
    /// Whether a data set keeps its rows besides its tokens.
    pub keeps_rows: bool,
    /// How conversations are written.
    pub chat: ChatFormat,
}

const CONVENTIONAL: [&str; 15] = [
    "text",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "system",
    "messages",
    "conversations",
    "tools",
    "chat_template_kwargs",
    "chosen",
    "rejected",
    "label",
    "weight",
];

impl DatasetOptions {
    /// The kind of samples in rows of `schema`: an answered prompt is also a prompt.
    fn samples_of(&self, schema: RowSchema) -> SampleKind {
        match schema.samples() {
            SampleKind::Plain if self.samples == SampleKind::Prompt && schema != RowSchema::Text => SampleKind::Prompt,
            samples => samples,
        }
    }

    /// A key of everything except the files that determines the text and its mask.
    pub(super) fn key(&self) -> String {
        let FieldNames { text, prompt, completion } = &self.fields;
        // Rows may have the fields of several kinds of samples.
        let samples = if self.samples == SampleKind::Plain { String::new() } else { format!("{:?} ", self.samples) };
        format!("{samples}{:?} {text:?} {prompt:?} {completion:?} {}", self.loss_on, self.chat.key())
    }
}

/// The sets of fields that a row may have. A run trains on rows with one schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowSchema {
    Text,
    Completion,
    Instruction,
    Messages,
    Conversations,
    Pair,
    Labelled,
    Prompt,
}

impl RowSchema {
    fn samples(self) -> SampleKind {
        match self {
            Self::Pair => SampleKind::Preference,
            Self::Labelled => SampleKind::UnpairedPreference,
            Self::Prompt => SampleKind::Prompt,
            _ => SampleKind::Plain,
        }
    }

    fn description(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Completion => "prompts with completions",
            Self::Instruction => "instructions with outputs",
            Self::Messages => "`messages`",
            Self::Conversations => "`conversations`",
            Self::Pair => "pairs of `chosen` and `rejected` answers",
            Self::Labelled => "completions with a `label`",
            Self::Prompt => "prompts",
        }
    }
}

pub(super) enum Example {
    Text(String),
    Sample(Sample),
    /// A chosen and a rejected sample.
    Pair([Sample; 2]),
    /// A pair of identical answers.
    Identical,
}

/// Turns the rows of all files of a corpus into chunks.
pub(super) struct RowReader<'a> {
    options: &'a DatasetOptions,
    /// The schema of the rows so far, and the location of the first of them.
    schema: Option<(RowSchema, String)>,
    conversational: bool,
    /// The weights of the samples so far, or 1 for good and 0 for bad answers.
    values: Vec<f32>,
    /// Whether a row has a value.
    has_values: bool,
    /// The number of identical pairs, and the location of the first one.
    identical: Option<(u64, Error)>,
}

impl<'a> RowReader<'a> {
    pub(super) fn new(options: &'a DatasetOptions) -> Self {
        let schema = None;
        let values = Vec::new();
        let identical = None;
        Self { options, schema, conversational: false, values, has_values: false, identical }
    }

    /// The names of the fields that rows may have.
    pub(super) fn fields(&self) -> Vec<&'a str> {
        let FieldNames { text, prompt, completion } = &self.options.fields;
        let named = [text, prompt, completion].into_iter().flatten().map(String::as_str);
        named.chain(CONVENTIONAL).collect()
    }

    /// A description of the documents so far. Fails with [`Error::Data`] naming the first pair of identical answers, if
    /// there are any.
    pub(super) fn contents(self) -> Result<DatasetContents> {
        if let Some((count, error)) = self.identical {
            let Error::Data { origin, message } = error else { return Err(error) };
            let (more, which) =
                if count > 1 { (format!(" ({count} such rows)"), "them") } else { (String::new(), "the row") };
            let advice = format!("a pair needs a better and a worse answer, so remove {which}");
            return Err(Error::data(origin, format!("{message}{more}; {advice}")));
        }
        let schema = self.schema.map_or(RowSchema::Text, |(schema, _)| schema);
        let kind = match schema {
            RowSchema::Text => DatasetKind::Text,
            _ if self.conversational => DatasetKind::Conversational,
            _ => DatasetKind::PromptCompletion,
        };
        let values = if self.has_values { self.values } else { Vec::new() };
        Ok(DatasetContents { kind, samples: self.options.samples_of(schema), values })
    }

    /// Records the schema of the row at `location`; an error if it differs from the schema of earlier rows, or if the
    /// objective needs other samples.
    pub(super) fn check_schema(&mut self, schema: RowSchema, location: impl FnOnce() -> String) -> Result<(), String> {
        match &self.schema {
            Some((before, _)) if *before == schema => Ok(()),
            Some((before, first)) => {
                let (now, before) = (schema.description(), before.description());
                Err(format!("contains {now}, but {first} contains {before}; use one kind of row per run"))
            }
            None => {
                self.options.samples.require(self.options.samples_of(schema), schema.description())?;
                self.schema = Some((schema, location()));
                Ok(())
            }
        }
    }

    /// Passes the chunks of `row` to `sink`; an error names its location in `origin`.
    pub(super) fn read(
        &mut self,
        origin: &str,
        location: RowLocation,
        row: &Value,
        sink: &mut ChunkSink,
    ) -> Result<()> {
        let wrong = |message: String| Error::data(origin, format!("{location}: {message}"));
        let example = self.example(row, || format!("`{origin}`, {location},")).map_err(wrong)?;
        let value = self.value(row).map_err(wrong)?;
        match example {
            Example::Text(text) => emit(&text, &LossMask::All, true, sink),
            Example::Sample(sample) => {
                self.has_values |= value.is_some();
                self.values.push(value.unwrap_or(1.0));
                self.emit(sample, &wrong, sink)
            }
            Example::Pair(pair) => pair.into_iter().try_for_each(|sample| self.emit(sample, &wrong, sink)),
            Example::Identical => {
                let first = || (0, wrong("`chosen` and `rejected` are identical".to_owned()));
                self.identical.get_or_insert_with(first).0 += 1;
                Ok(())
            }
        }
    }

    /// The value of the sample in `row`: its weight, or whether it is good. A weight without effect is an error.
    fn value(&self, row: &Value) -> Result<Option<f32>, String> {
        let Some((schema, _)) = self.schema else { return Ok(None) };
        let weight = preference::weight(row)?;
        if schema != RowSchema::Text && self.options.samples_of(schema) == SampleKind::Plain {
            return Ok(weight);
        }
        if weight.is_some_and(|weight| weight != 1.0) {
            let message = "`weight` applies to prompts with completions and to conversations, with `--objective sft`; \
                           remove it";
            return Err(message.to_owned());
        }
        (schema == RowSchema::Labelled).then(|| preference::label(row).map(f32::from)).transpose()
    }

    /// Passes the chunks of `sample` to `sink`. `wrong` turns a description into an error.
    fn emit(&mut self, sample: Sample, wrong: &dyn Fn(String) -> Error, sink: &mut ChunkSink) -> Result<()> {
        let DatasetOptions { chat, samples, loss_on, .. } = self.options;
        let (conversation, prompt, variables) = match sample {
            Sample::Completion(prompt, completion) => {
                let loss_mask = if *loss_on == LossOn::All { LossMask::All } else { LossMask::None };
                emit(&prompt, &loss_mask, true, sink)?;
                emit(&completion, &LossMask::All, prompt.is_empty(), sink)?;
                return sink(TextChunk::end(prompt.is_empty() && completion.is_empty()));
            }
            Sample::Conversation { conversation, prompt, variables } => (conversation, prompt, variables),
        };
        self.conversational = true;
        if *samples == SampleKind::Prompt {
            // Completions begin as in use: after the template's own start of an answer.
            let answer = conversation.last_answer().unwrap_or_default();
            let before = conversation.messages.len() - usize::from(conversation.messages.last().is_some_and(is_answer));
            let text = chat.prompt(&conversation.first(before), variables.as_ref());
            let text = text.map_err(|error| wrong(error.to_string()))?;
            sink(TextChunk { text, loss_mask: LossMask::None, starts_document: true, end: ChunkEnd::Templated })?;
            emit(&answer, &LossMask::All, false, sink)?;
            return sink(TextChunk::end(false));
        }
        let in_loss = answers_in_loss(&conversation).map_err(wrong)?;
        let leaves_out = in_loss.contains(&false);
        let all = *loss_on == LossOn::All && !leaves_out;
        let render = |conversation: &Conversation| {
            let rendered = chat.render(conversation, variables.as_ref(), all);
            rendered.map_err(|error| wrong(error.to_string()))
        };
        let Rendered { text, assistant_ranges } = render(&conversation)?;
        if leaves_out && in_loss.len() != assistant_ranges.len() {
            return Err(wrong(format!(
                "`weight` or `train` leaves answers out, but the chat template marks {} parts for {} answers; use \
                 another with `--chat-template`, or remove these fields",
                assistant_ranges.len(),
                in_loss.len()
            )));
        }
        // A template may mark another number of parts; without these fields, all of them count.
        let in_loss = in_loss.into_iter().chain(std::iter::repeat(true));
        let mut answers: Vec<(Range<usize>, bool)> = assistant_ranges.into_iter().zip(in_loss).collect();
        // Answers within the prompt are not in the loss.
        let before = conversation.first(prompt);
        if before.has_answer(0) {
            answers.drain(..render(&before)?.assistant_ranges.len().min(answers.len()));
        }
        let loss_mask =
            if all { LossMask::All } else { LossMask::Ranges(ranges_in_loss(*loss_on, &answers, text.len())) };
        sink(TextChunk { text, loss_mask, starts_document: true, end: ChunkEnd::Templated })
    }

    /// Reads `row`, which is at `location`; an error describes its fault.
    pub(super) fn example(&mut self, row: &Value, location: impl FnOnce() -> String) -> Result<Example, String> {
        if row.kind() != ValueKind::Map {
            return Err(format!("must be an object such as {{\"text\": \"…\"}}, but is {}", json_type(row)));
        }
        let schema = self.schema_of(row)?;
        self.check_schema(schema, location)?;
        let [text_name, prompt, completion] = self.names();
        let text = |name: &str| -> Result<String, String> {
            let value = field(row, name).ok_or_else(|| format!("`{name}` is missing or null"))?;
            let text = value.as_str().map(str::to_owned);
            text.ok_or_else(|| format!("`{name}` must be text, but is {}", json_type(&value)))
        };
        if schema == RowSchema::Text {
            return Ok(Example::Text(text(text_name)?));
        }
        let variables = fields::template_variables(row)?;
        let conversation = match schema {
            RowSchema::Pair => {
                return Ok(preference::pair(row, prompt, variables.as_ref())?.map_or(Example::Identical, Example::Pair));
            }
            RowSchema::Prompt => {
                return Ok(Example::Sample(match preference::prompt(row, prompt, variables)? {
                    Prompt::Text(text) => Sample::Completion(text, String::new()),
                    Prompt::Conversation(conversation, variables) => {
                        Sample::Conversation { conversation, prompt: 0, variables }
                    }
                }));
            }
            RowSchema::Instruction => {
                let given = |name: &str| -> Result<Option<String>, String> {
                    let text = field(row, name).map(|_| text(name)).transpose()?;
                    Ok(text.filter(|text| !text.is_empty()))
                };
                let mut conversation = Conversation::default();
                if let Some(system) = given("system")? {
                    conversation.push("system", &system);
                }
                let input = given("input")?.map_or_else(String::new, |input| format!("\n\n{input}"));
                conversation.push("user", &(text("instruction")? + &input));
                conversation.push("assistant", &text("output")?);
                conversation
            }
            RowSchema::Messages => messages(row, "messages")?,
            RowSchema::Conversations => messages(row, "conversations")?,
            RowSchema::Text | RowSchema::Completion | RowSchema::Labelled => {
                return preference::answered(row, prompt, completion, variables).map(Example::Sample);
            }
        };
        Ok(Example::Sample(Sample::Conversation { conversation, prompt: 0, variables }))
    }

    /// The prompt of `row`; an error describes its fault.
    pub(super) fn prompt(&self, row: &Value) -> Result<Prompt, String> {
        preference::prompt(row, self.names()[1], fields::template_variables(row)?)
    }

    /// The names of text, prompt and completion.
    fn names(&self) -> [&'a str; 3] {
        let FieldNames { text, prompt, completion } = &self.options.fields;
        [(text, "text"), (prompt, "prompt"), (completion, "completion")]
            .map(|(named, usual)| named.as_deref().unwrap_or(usual))
    }

    fn schema_of(&self, row: &Value) -> Result<RowSchema, String> {
        let [text, prompt, completion] = self.names();
        let has = |names: &[&str]| names.iter().all(|name| field(row, name).is_some());
        let fields = &self.options.fields;
        let wanted = self.options.samples;
        // Field names from the user determine the schema.
        if fields.prompt.is_some() || fields.completion.is_some() {
            if fields.text.is_some() {
                let message = "`--text-field` names running text, `--prompt-field` and `--completion-field` a prompt \
                               with its answer; use one of the two";
                return Err(message.to_owned());
            }
            return Ok(match wanted {
                SampleKind::Prompt if !has(&[completion]) => RowSchema::Prompt,
                SampleKind::Plain | SampleKind::Prompt => RowSchema::Completion,
                SampleKind::Preference => RowSchema::Pair,
                SampleKind::UnpairedPreference => RowSchema::Labelled,
            });
        }
        if fields.text.is_some() {
            return Ok(RowSchema::Text);
        }
        // Rows often have more fields than one schema needs. The schema of earlier rows is preferred, then those that
        // the objective needs.
        let schemas = [
            (RowSchema::Pair, &["chosen", "rejected"][..]),
            (RowSchema::Labelled, &[prompt, completion, "label"]),
            (RowSchema::Messages, &["messages"]),
            (RowSchema::Conversations, &["conversations"]),
            (RowSchema::Completion, &[prompt, completion]),
            (RowSchema::Instruction, &["instruction", "output"]),
            (RowSchema::Text, &[text]),
        ];
        let before = self.schema.as_ref().map(|(schema, _)| *schema);
        let complete = || schemas.iter().filter(|(_, names)| has(names)).map(|(schema, _)| *schema);
        let found = complete().find(|schema| before == Some(*schema));
        let found = found
            .or_else(|| complete().find(|schema| self.options.samples_of(*schema) == wanted))
            .or_else(|| (wanted == SampleKind::Prompt && has(&[prompt])).then_some(RowSchema::Prompt))
            .or_else(|| complete().next());
        found.ok_or_else(|| {
            let pairs = [["chosen", "rejected"], ["prompt", "completion"], ["instruction", "output"]];
            let half = pairs.into_iter().find(|pair| pair.iter().any(|name| has(&[name])));
            if let Some([first, second]) = half {
                let [there, missing] = if has(&[first]) { [first, second] } else { [second, first] };
                return format!("has `{there}`, but `{missing}` is missing or null");
            }
            let named = |(name, value): (Value, Value)| {
                format!("`{name}`{}", if value.is_none() { ", which is null" } else { "" })
            };
            let names: Vec<String> = entries(row).take(12).map(named).collect();
            let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            format!("its fields are {names}; {EXPECTED_FIELDS}")
        })
    }
}

/// The ranges of a text of `length` bytes that count in the loss. `answers` are the ranges of its answers, each with
/// whether it counts.
fn ranges_in_loss(loss_on: LossOn, answers: &[(Range<usize>, bool)], length: usize) -> Vec<Range<usize>> {
    let chosen =
        |in_loss: bool| answers.iter().filter(move |answer| answer.1 == in_loss).map(|answer| answer.0.clone());
    match loss_on {
        LossOn::Answers => chosen(true).collect(),
        LossOn::LastAnswer => {
            answers.last().filter(|answer| answer.1).map(|answer| answer.0.clone()).into_iter().collect()
        }
        LossOn::All => {
            let starts = std::iter::once(0).chain(chosen(false).map(|range| range.end));
            let ends = chosen(false).map(|range| range.start).chain([length]);
            starts.zip(ends).map(|(start, end)| start..end).filter(|range| !range.is_empty()).collect()
        }
    }
}

fn messages(row: &Value, name: &str) -> Result<Conversation, String> {
    let items = field(row, name).ok_or_else(|| format!("`{name}` is missing or null"))?;
    let messages = fields::messages(items, name)?;
    if messages.is_empty() {
        return Err(format!("`{name}` contains no message"));
    }
    Ok(Conversation { messages: fields::with_system(row, messages)? })
}

/// Whether a message counts in the loss by its `weight`, as in OpenAI's format, or `train`, as in axolotl's.
fn in_loss(message: &Value) -> Result<bool, String> {
    for name in ["weight", "train"] {
        let Some(value) = field(message, name) else { continue };
        match f64::try_from(value.clone()).ok().or_else(|| bool::try_from(value).ok().map(f64::from)) {
            Some(0.0) => return Ok(false),
            Some(1.0) => {}
            _ => return Err(format!("`{name}` must be 0 or 1, or false or true")),
        }
    }
    Ok(true)
}

/// Whether each answer of a conversation counts in the loss.
fn answers_in_loss(conversation: &Conversation) -> Result<Vec<bool>, String> {
    let answers = conversation.messages.iter().enumerate().filter(|(_, message)| is_answer(message));
    answers.map(|(at, message)| in_loss(message).map_err(|problem| format!("message {}: {problem}", at + 1))).collect()
}
