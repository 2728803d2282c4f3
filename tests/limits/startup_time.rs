//! Start-up time: commands that print or draw without training start in under a tenth of a second.

use crate::alone;
use crate::common::launch;

/// Seconds of processor time, which other load hardly changes.
const LIMIT: f64 = 0.1;

/// The least of ten.
#[test]
fn it_starts_in_a_tenth_of_a_second_of_processor_time() {
    let _alone = alone();
    for arguments in [&["--help"][..], &["lab", "bits", "1"], &["lab", "memory", "--model", "gpt2-xl"]] {
        let once = |_| {
            let mut shell = launch::command("bash");
            shell.args(["-c", r#"TIMEFORMAT='%3U %3S'; time "$0" "$@" > /dev/null"#]);
            let (code, _, text) =
                launch::finish(shell.arg(launch::program().get_program()).args(arguments).env("LC_ALL", "C"));
            assert_eq!(code, Some(0), "{text}");
            text.split_whitespace().map(|seconds| seconds.parse::<f64>().unwrap()).sum::<f64>()
        };
        let least = (0..10).map(once).fold(f64::INFINITY, f64::min);
        println!("finetune {}: {:.0} ms", arguments.join(" "), least * 1e3);
        assert!(least < LIMIT, "{arguments:?} took {least} s");
    }
}
