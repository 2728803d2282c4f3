//! Panics of other people's parsers, contained: on damaged input some of them index out of bounds.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    static SILENT: Cell<bool> = const { Cell::new(false) };
}

/// What `work` returns, or `None` where it panics; nothing is said of that on standard error. Whatever `work` has changed must
/// not be used after a `None`.
pub(super) fn contained<T>(work: impl FnOnce() -> T) -> Option<T> {
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
    fn a_panic_becomes_nothing_and_silence_ends_with_it() {
        assert_eq!(contained(|| 1), Some(1));
        assert_eq!(contained(|| contained(|| [1, 2][..].iter().map(|i| 1 / (i - 1)).sum::<i32>())), Some(None));
        assert!(!SILENT.get());
    }
}
