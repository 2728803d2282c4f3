//! The program as its users have it: commands, messages, files, the terminal. One program, because each links
//! everything once more.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test stops at the first failure and prints its measurements"
)]

#[path = "../common/mod.rs"]
mod common;

mod bisect;
mod bos;
mod chat;
mod checkpoint_command;
mod commands;
mod compare;
mod data_sources;
mod evaluate;
mod export;
mod fp16_check;
mod generate;
mod interface;
mod lab;
mod log_memory;
mod memory;
mod memory_saving_runs;
mod metrics_export;
mod preferences;
mod processes;
mod quick_start;
mod regressions;
mod templates;
mod terminal;
mod validation;
mod verify;
