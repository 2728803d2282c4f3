//! Code that several test programs share.
#![allow(dead_code, unused_imports, unused_macros, reason = "each test program uses its part")]

/// The contents of all events of a kind, such as `of_kind!(events, Event::Eval)`.
macro_rules! of_kind {
    ($events:expr, $kind:path) => {
        IntoIterator::into_iter($events).filter_map(|event| if let $kind(it) = event { Some(it) } else { None })
    };
}
pub(crate) use of_kind;

pub(crate) mod allocator;
pub(crate) mod checkpoint;
pub(crate) mod cli_fixture;
pub(crate) mod compare;
pub(crate) mod engine;
pub(crate) mod gguf;
pub(crate) mod golden;
pub(crate) mod launch;
pub(crate) mod markup;
pub(crate) mod mutations;
pub(crate) mod processes;
pub(crate) mod python;
pub(crate) mod reference;
pub(crate) mod transcript;
