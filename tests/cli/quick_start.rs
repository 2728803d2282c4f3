//! The run of README's first command behaves as README describes.

use crate::common::of_kind;
use finetune::data::grammar::entropy_per_token;
use finetune::telemetry::{Event, read};
use std::path::Path;

/// `FINETUNE_QUICK_START` is the run's folder, such as `checkpoints/tiny-f16-0001`.
#[test]
#[ignore = "needs a run that takes a minute; .ci/run starts it after that run"]
fn the_default_run_overflows_at_first_and_ends_within_a_tenth_of_the_entropy() {
    let run = std::env::var_os("FINETUNE_QUICK_START").expect("`FINETUNE_QUICK_START` is the folder of a default run");
    let events = read(Path::new(&run).join("events.jsonl")).unwrap();
    let overflows = events.iter().filter(|record| matches!(record.event, Event::Overflow(_))).count();
    assert!((2..30).contains(&overflows), "{overflows} overflows");
    assert!(matches!(events.last().unwrap().event, Event::Finished(_)), "the run has not finished");
    let last = of_kind!(events.iter().map(|record| &record.event), Event::Eval).map(|eval| eval.loss).next_back();
    let last = last.unwrap();
    let entropy = entropy_per_token();
    println!("validation loss {last:.4}, entropy {entropy:.4}: {:+.1} %", (last / entropy - 1.0) * 100.0);
    assert!((0.99..1.1).contains(&(last / entropy)), "validation loss {last}, entropy {entropy}");
}
