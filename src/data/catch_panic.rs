//! Contains panics of other crates' parsers: on damaged input some of them index out of bounds.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    static SILENT: Cell<bool> = const { Cell::new(false) };
}

/// Returns what `work` returns, or `None` if it panics, without a message on standard error. After `None`, do not use
/// anything that `work` has changed.
pub(crate) fn catch_panic<T>(work: impl FnOnce() -> T) -> Option<T> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let report = take_hook();
        set_hook(Box::new(move |panic| {
            if !SILENT.get() {
                report(panic);
            }
        }));
    });
    let outer = SILENT.replace(true);
    let result = catch_unwind(AssertUnwindSafe(work));
    SILENT.set(outer);
    result.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_nothing() {
        assert_eq!(catch_panic(|| 1), Some(1));
        assert_eq!(catch_panic(|| catch_panic(|| panic!("inside"))), Some(None::<()>));
    }

    /// Not a test: the next one runs it in a process whose standard error it reads.
    #[test]
    #[ignore = "started by the other test"]
    fn child() {
        assert_eq!(catch_panic(|| panic!("of no interest")), None::<()>);
        catch_unwind(|| panic!("worth a report")).unwrap_err();
    }

    #[test]
    fn nothing_is_said_of_it_and_everything_of_others() {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let arguments = ["--exact", "data::catch_panic::tests::child", "--ignored", "--nocapture"];
        let output = child.args(arguments).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{said}");
        assert!(said.contains("worth a report") && !said.contains("of no interest"), "{said}");
    }
}
