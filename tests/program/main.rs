//! The program as its users have it: commands, messages, files. One program, because each links everything once more; tests
//! that watch a clock have their own, where nothing else runs beside them.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test stops at the first thing that is not as it should be, and prints what it has measured"
)]

#[path = "../common"]
mod common {
    pub(crate) mod compare;
    pub(crate) mod desk;
    pub(crate) mod launch;
    pub(crate) mod markup;
    pub(crate) mod python;
}
#[path = "../support/changes.rs"]
mod changes;
#[path = "../support/checkpoint.rs"]
mod support;

mod bad_input;
mod bad_models;
mod bos;
mod channels;
mod chat;
mod checkpoint_command;
mod commands;
mod compare;
mod daily;
mod data_sources;
mod evaluate;
mod export;
mod fp16_check;
mod generate;
mod lab;
mod lora_runs;
mod malicious;
mod out_of_the_terminal;
mod quick_start;
mod templates;
