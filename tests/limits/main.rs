//! Allocations of a step, and start-up time. One test runs at a time.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test stops at the first failure and prints its measurements"
)]

#[path = "../common/mod.rs"]
mod common;

mod allocation;
mod startup_time;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Waits until no other test of this program runs, because the counters of memory are for all of it.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
