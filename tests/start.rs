//! Start-up time: commands that print or draw without training start in under a tenth of a second.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test; the time is its result")]

use std::process::Command;
use std::time::{Duration, Instant};

/// Unoptimised tests wait longer.
const LIMIT: Duration = Duration::from_millis(if cfg!(debug_assertions) { 400 } else { 100 });

/// The shortest of ten, because other load can only make it longer.
#[test]
fn it_starts_in_a_tenth_of_a_second() {
    for arguments in [&["--help"][..], &["lab", "bits", "1"], &["lab", "memory", "--model", "gpt2-xl"]] {
        let once = |_| {
            let began = Instant::now();
            let output = Command::new(env!("CARGO_BIN_EXE_finetune")).args(arguments).output().unwrap();
            assert!(output.status.success());
            began.elapsed()
        };
        let shortest = (0..10).map(once).min().unwrap();
        println!("finetune {}: {:.1} ms", arguments.join(" "), shortest.as_secs_f64() * 1e3);
        assert!(shortest < LIMIT, "{arguments:?} took {shortest:?}");
    }
}
