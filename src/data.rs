//! From text to batches: corpora, tokenizers, and a loader that shows every token of an epoch once.
//!
//! A [`Loader`] turns a [`Source`] (what `--data` names) into a training and a validation [`TokenSource`];
//! [`BatchLoader`] cuts those into windows, in an order that is a pure function of seed, epoch and position, so that
//! a [`Cursor`] of two numbers in a checkpoint is enough to go on exactly where a run stopped.

pub mod batch_loader;
mod bos;
mod bpe;
mod cache;
mod chat_format;
pub mod chats;
mod contain;
pub mod corpus;
mod document;
mod format;
pub mod grammar;
mod growth;
mod jinja_python;
pub mod parquet_rows;
mod preview;
mod row;
mod rows;
mod sequence_index;
pub mod shuffle;
pub mod source;
mod template;
pub mod template_process;
mod tokenize;
pub mod tokenizer;
pub mod tokens;

pub use batch_loader::{Batch, BatchLoader, Cursor, EvalBatches, IGNORE_INDEX};
pub use bos::Bos;
pub use cache::Documents;
pub use chat_format::{ChatFormat, ChatSettings, named_template, text_file};
pub(crate) use contain::contained;
pub use corpus::{Dataset, Loader};
pub use format::Format;
pub use preview::DatasetPreview;
pub use row::{DatasetOptions, Fields, LossOn};
pub use sequence_index::{DatasetStats, SequenceIndex};
pub use source::{Fetch, LoadEvent, Remote, Source};
pub(crate) use source::{names_in, nearest};
pub use template::{Conversation, Dialogue, Rendered, Template, TemplateTokens};
pub use tokenizer::Tokenizer;
pub use tokens::TokenSource;
