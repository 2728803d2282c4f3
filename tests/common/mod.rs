//! Code that several test programs share.
#![allow(dead_code, reason = "each test program uses its part")]

pub(crate) mod changes;
pub(crate) mod checkpoint;
pub(crate) mod compare;
pub(crate) mod desk;
pub(crate) mod engine;
pub(crate) mod family_oracle;
pub(crate) mod gguf;
pub(crate) mod golden;
pub(crate) mod launch;
pub(crate) mod markup;
pub(crate) mod oracle;
pub(crate) mod processes;
pub(crate) mod python;
