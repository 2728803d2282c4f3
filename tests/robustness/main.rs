//! Robustness and error messages of the program: bad input, faults of disks and of the network, kills. `docs/faults.md`
//! is about the same. It trains and runs the program as `tests/program` does.
#![cfg(unix)]
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test stops at the first failure and prints its measurements"
)]

#[path = "../common/mod.rs"]
mod common;

mod bad_input;
mod bad_models;
mod crash_recovery;
mod durability;
mod fault_injection;
mod hub;
mod malformed_files;
mod output_escaping;
mod parser_robustness;
mod push;
