//! From text to batches: corpora, tokenizers, and a loader that shows every token of an epoch once.
//!
//! A [`DatasetBuilder`] turns a [`DataSource`] (what `--data` names) into a training and a validation [`TokenSource`];
//! [`BatchLoader`] cuts those into windows, in an order that is a pure function of seed, epoch and position, so that
//! a [`DataPosition`] of a few numbers in a checkpoint is enough to resume exactly where a run stopped.

pub mod batch_loader;
mod bpe;
mod cache;
mod catch_panic;
mod chat_format;
pub mod chats;
mod chunk;
pub mod corpus;
mod document;
mod exact_json;
mod fields;
mod format;
pub mod grammar;
mod harmony;
mod jinja_python;
mod mixture;
pub mod parquet_rows;
mod post_processor;
mod preference;
mod preview;
mod row;
mod rows;
mod samples;
mod sequence_index;
pub mod shuffle;
pub mod source;
mod template;
pub mod template_sandbox;
mod tokenize;
pub mod tokenizer;
mod tokenizer_limits;
pub mod tokens;

pub use batch_loader::{Batch, BatchLoader, DataPosition, EvalLoader, SampledRow, Sequence};
pub use cache::DatasetKind;
pub(crate) use catch_panic::catch_panic;
pub use chat_format::{ChatFormat, ChatSettings, named_template};
pub use corpus::{Dataset, DatasetBuilder, HELD_OUT};
pub(crate) use exact_json::{entries, read_json};
pub use format::DataFormat;
pub use mixture::Mixture;
pub use preference::{Prompt, PromptRow};
pub use preview::DatasetPreview;
pub(crate) use preview::counted;
pub use row::{DatasetOptions, FieldNames, LossOn};
pub use samples::{SampleKind, SequenceRole};
pub(crate) use sequence_index::padded_len;
pub use sequence_index::{DatasetStats, PairStats, SequenceIndex};
pub use source::{DataSource, Downloader, HubFile, HubListing, LoadEvent};
pub(crate) use source::{closest_match, files_below, names_in};
pub(crate) use template::without_generation_tags;
pub use template::{Conversation, EvalExample, Rendered, Template, TemplateTokens};
pub use template_sandbox::TemplateSandbox;
pub use tokenizer::{Bos, Tokenizer};
pub use tokens::{IGNORE_INDEX, TokenSource};
