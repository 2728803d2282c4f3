//! The program's allocator: the system's, with whole cache lines for long blocks, huge pages for large ones, and a
//! count of allocations.
//!
//! Each step streams through weights, gradients and moments, and with 4 kB pages address translation would limit its
//! speed. A program opts in with `#[global_allocator]`.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

/// The size and alignment of a huge page.
pub const HUGE_PAGE: usize = 2 << 20;
/// Bytes of a cache line, which is also the width of the widest vectors.
pub(crate) const CACHE_LINE: usize = 64;
/// Blocks of at least this size start on a cache line, because loading a vector that crosses one takes longer.
const ALIGNED: usize = 1 << 10;

static COUNT: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);

/// Asks the system for memory, in huge pages where a block fills one.
#[derive(Debug)]
pub struct Allocator;

/// Allocations since the program started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allocations {
    /// Blocks.
    pub count: u64,
    /// Bytes in them.
    pub bytes: u64,
}

impl Allocations {
    /// The figures now; zeros in a program without this allocator.
    pub fn now() -> Self {
        Self { count: COUNT.load(Ordering::Relaxed), bytes: BYTES.load(Ordering::Relaxed) }
    }

    /// The allocations since `earlier`.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self { count: self.count - earlier.count, bytes: self.bytes - earlier.bytes }
    }
}

fn count(bytes: usize) {
    COUNT.fetch_add(1, Ordering::Relaxed);
    BYTES.fetch_add(bytes as u64, Ordering::Relaxed);
}

/// The layout requested from the system: blocks that fill huge pages start on one, and other long ones on a cache line.
fn aligned(layout: Layout) -> Layout {
    let alignment = match layout.size() {
        HUGE_PAGE.. => HUGE_PAGE,
        ALIGNED.. => CACHE_LINE,
        _ => return layout,
    };
    layout.align_to(alignment).unwrap_or(layout)
}

/// Advises the system to back a block with huge pages; it may ignore this.
fn advise(start: *mut u8, bytes: usize) {
    #[cfg(target_os = "linux")]
    if bytes >= HUGE_PAGE && !start.is_null() {
        // SAFETY: the block belongs to the caller, and this advice changes no content.
        unsafe { libc::madvise(start.cast(), bytes, libc::MADV_HUGEPAGE) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (start, bytes);
}

// SAFETY: every call goes to the system's allocator, with a layout that depends on the caller's alone.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promise.
        let start = unsafe { System.alloc(aligned(layout)) };
        advise(start, layout.size());
        start
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.size() < HUGE_PAGE {
            count(layout.size());
            // SAFETY: the caller's promise.
            return unsafe { System.alloc_zeroed(aligned(layout)) };
        }
        // For this alignment the system's `alloc_zeroed` clears the memory itself, faulting in small pages; so clear it
        // here, after the advice. SAFETY: the caller's promise; the block has this size.
        unsafe {
            let start = self.alloc(layout);
            if !start.is_null() {
                start.write_bytes(0, layout.size());
            }
            start
        }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: `alloc` asked for this layout.
        unsafe { System.dealloc(start, aligned(layout)) };
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        if layout.size() < ALIGNED && new_size < ALIGNED {
            count(new_size);
            // SAFETY: the caller's promise.
            return unsafe { System.realloc(start, layout, new_size) };
        }
        // SAFETY: the caller promised that the new size is valid for this alignment; both blocks hold the copied bytes.
        unsafe {
            let new = self.alloc(Layout::from_size_align_unchecked(new_size, layout.align()));
            if !new.is_null() {
                start.copy_to_nonoverlapping(new, layout.size().min(new_size));
                self.dealloc(start, layout);
            }
            new
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Grows and shrinks a block across the size from which huge pages are used.
    #[test]
    fn blocks_keep_their_content_and_begin_on_a_cache_line_or_a_huge_page() {
        let before = Allocations::now();
        let sizes = [100, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 5, 200];
        let layout = |size| Layout::from_size_align(size, 8).expect("a small power of two is a valid alignment");
        // SAFETY: sizes are not zero, and each call names the layout of the block as it is.
        unsafe {
            let mut block = Allocator.alloc_zeroed(layout(sizes[0]));
            for i in 0..sizes[0] {
                assert_eq!(*block.add(i), 0);
                *block.add(i) = i as u8;
            }
            for sizes in sizes.windows(2) {
                block = Allocator.realloc(block, layout(sizes[0]), sizes[1]);
                assert!((0..100).all(|i| *block.add(i) == i as u8));
                assert!(sizes[1] < ALIGNED || block.addr().is_multiple_of(CACHE_LINE));
                assert!(sizes[1] < HUGE_PAGE || block.addr().is_multiple_of(HUGE_PAGE));
            }
            Allocator.dealloc(block, layout(sizes[4]));
        }
        let made = Allocations::now().since(before);
        assert!(made.count >= 5 && made.bytes >= sizes.iter().sum::<usize>() as u64);
    }
}
