//! Code that several test programs share.
#![allow(dead_code, reason = "each test program uses its part")]

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
