//! Draws the dashboard of a run as SVG, as in the README: `cargo run --example picture -- RUN/events.jsonl KEYS WIDTH HEIGHT`.
//!
//! KEYS are pressed before the picture is taken: `1` for the overview, `2u` for the second tab with true magnitudes.

#![allow(clippy::print_stdout, reason = "the picture goes to standard output")]

use finetune::screen::dashboard;
use finetune::{Error, Result, telemetry};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [log, keys, width, height] = &arguments[..] else {
        return Err(Error::config("arguments", "write `EVENTS_FILE KEYS WIDTH HEIGHT`"));
    };
    let size =
        |text: &String| text.parse().map_err(|_| Error::config("size", format!("`{text}` is not a number of cells")));
    print!("{}", dashboard::picture(telemetry::read(log)?, keys, size(width)?, size(height)?));
    Ok(())
}
