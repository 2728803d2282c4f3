//! Threads that stay awake through a step.
//!
//! A pool's threads go to sleep a few microseconds after their last task, and waking one takes longer than a kernel
//! over a few thousand elements. A step of a small model is hundreds of such kernels.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Polls between two that let other programs run.
const POLLS: u32 = 64;
/// How long `body` waits for threads to wake up.
const WAKE_TIMEOUT: Duration = Duration::from_micros(100);
/// A sentinel number of threads: no thread is waited for any longer.
const CLOSED: usize = usize::MAX / 2;

/// Clears a flag at the end of its scope, also after a panic.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Runs `body` on this thread while the others of its pool look for its tasks without pause. Outside of a pool it only
/// runs it.
pub fn with_spinning_workers<R>(body: impl FnOnce() -> R) -> R {
    let Some(own) = rayon::current_thread_index() else { return body() };
    let awake = AtomicUsize::new(0);
    let running = AtomicBool::new(true);
    rayon::in_place_scope(|scope| {
        let (awake, running) = (&awake, &running);
        scope.spawn_broadcast(move |_, place| {
            // Once `body` runs, a thread may get here while it waits within a task, to which it has to return.
            if place.index() == own || awake.fetch_add(1, Ordering::AcqRel) >= CLOSED {
                return;
            }
            while running.load(Ordering::Acquire) {
                help(|| !running.load(Ordering::Acquire));
            }
        });
        let others = rayon::current_num_threads() - 1;
        let began = Instant::now();
        while awake.load(Ordering::Acquire) < others && began.elapsed() < WAKE_TIMEOUT {
            std::hint::spin_loop();
        }
        awake.fetch_add(CLOSED, Ordering::AcqRel);
        let _end = End(running);
        body()
    })
}

/// Looks for tasks some times until it finds one or `done`, and yields the core once if there are none.
fn help(done: impl Fn() -> bool) {
    for _ in 0..POLLS {
        if rayon::yield_now() == Some(rayon::Yield::Executed) || done() {
            return;
        }
        std::hint::spin_loop();
    }
    std::thread::yield_now();
}

/// Runs both, in parallel. A thread that waits for the other one stays awake: rayon's would go to sleep after
/// microseconds.
pub fn join(a: impl FnOnce() + Send, b: impl FnOnce() + Send) {
    let busy = &AtomicBool::new(false);
    let awake = || {
        a();
        while busy.load(Ordering::Acquire) {
            help(|| !busy.load(Ordering::Acquire));
        }
    };
    let other = || {
        busy.store(true, Ordering::Release);
        let _end = End(busy);
        b();
    };
    rayon::join(awake, other);
}

/// Calls `task` with each number of a range, in parallel.
pub fn for_each_task(range: Range<usize>, task: &(impl Fn(usize) + Sync)) {
    let middle = usize::midpoint(range.start, range.end);
    match range.len() {
        0 => {}
        1 => task(range.start),
        _ => join(|| for_each_task(range.start..middle, task), || for_each_task(middle..range.end, task)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::AssertUnwindSafe;

    fn sum(range: std::ops::Range<u64>) -> u64 {
        if range.end - range.start < 4 {
            return range.sum();
        }
        let middle = u64::midpoint(range.start, range.end);
        let (mut a, mut b) = (0, 0);
        join(|| a = sum(range.start..middle), || b = sum(middle..range.end));
        a + b
    }

    #[test]
    fn nested_tasks_end_for_any_number_of_threads() {
        for threads in [1, 2, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            for _ in 0..100 {
                assert_eq!(pool.install(|| with_spinning_workers(|| sum(0..1000))), 499_500);
            }
        }
        assert_eq!(with_spinning_workers(|| sum(0..1000)), 499_500, "outside of a pool");
    }

    #[test]
    fn a_panic_ends_the_others_too() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        let caught = std::panic::catch_unwind(AssertUnwindSafe(|| {
            pool.install(|| with_spinning_workers::<()>(|| panic!("in a step")));
        }));
        assert!(caught.is_err());
        let caught = std::panic::catch_unwind(AssertUnwindSafe(|| {
            pool.install(|| join(|| std::thread::sleep(WAKE_TIMEOUT), || panic!("on another thread")));
        }));
        assert!(caught.is_err());
        assert_eq!(pool.install(|| sum(0..100)), 4950);
    }
}
