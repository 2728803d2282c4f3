//! Reads what is learned on a thread of its own, while the passes of a step read it too.
//!
//! The borrow checker keeps the two apart from the update: it needs `&mut` to what [`Learned`] borrows, and so does every change
//! of a layer's type, and the thread ends within [`beside`]. No tensor is copied.

use crate::engine::model::Parameters;
use crate::engine::optim::AdamW;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

/// What a step's passes leave as it is and its update changes.
#[derive(Clone, Copy, Debug)]
pub struct Learned<'a> {
    /// The working copy.
    pub weights: &'a Parameters,
    /// The master weights, or this process's part of them.
    pub masters: &'a Parameters,
    /// Adam's moments.
    pub adamw: &'a AdamW,
}

/// What reads it, such as the writer of a checkpoint.
pub type Reader<'a> = Box<dyn FnOnce(Learned<'_>) + Send + 'a>;

/// Runs `reader` and `passes` side by side and returns when both are done: what the passes return, and for how long there was
/// nothing but the reader. Where it has to be `alone`, or there is no thread for it, the reader comes first.
pub(super) fn beside<R>(
    reader: Option<Reader<'_>>,
    learned: Learned<'_>,
    alone: bool,
    passes: impl FnOnce() -> R,
) -> (R, Duration) {
    let Some(reader) = reader else { return (passes(), Duration::ZERO) };
    let (reader, began) = (Mutex::new(Some(reader)), Instant::now());
    let read = || {
        if let Some(reader) = reader.lock().ok().and_then(|mut reader| reader.take()) {
            reader(learned);
        }
    };
    let (result, passed) = thread::scope(|threads| {
        if alone || thread::Builder::new().name("saving".into()).spawn_scoped(threads, read).is_err() {
            read();
        }
        let clock = Instant::now();
        (passes(), clock.elapsed())
    });
    (result, began.elapsed().saturating_sub(passed))
}
