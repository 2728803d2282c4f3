//! Reusable, aligned memory for packed operands and partial sums.
//!
//! Buffers only grow and are kept, so a product of a shape seen before allocates nothing. They use huge pages if the
//! system grants them: packed operands are streamed, and with small pages address translation would limit the speed.

use crate::machine::allocator::{Allocator, CACHE_LINE, HUGE_PAGE};
use std::alloc::{GlobalAlloc, Layout, handle_alloc_error};
use std::cell::RefCell;
use std::sync::{Mutex, PoisonError};

/// Memory for plain 32-bit values that grows on demand and forgets its content when it does. It starts at a cache line
/// or, if it fills one, at a huge page.
#[derive(Debug)]
pub(super) struct PackBuffer {
    start: *mut u32,
    layout: Layout,
}

// SAFETY: a buffer owns its memory, and plain integers may move between threads.
unsafe impl Send for PackBuffer {}

impl PackBuffer {
    /// A buffer that owns no memory yet.
    pub(super) const fn new() -> Self {
        Self { start: std::ptr::null_mut(), layout: Layout::new::<()>() }
    }

    /// The first `len` values, aligned to a cache line: the last user's values, or zeros.
    pub(super) fn words(&mut self, len: usize) -> &mut [u32] {
        if len == 0 {
            return &mut [];
        }
        self.reserve(len * size_of::<u32>());
        // SAFETY: `reserve` made room for `len` initialized values, and the borrow of `self` keeps them ours.
        unsafe { std::slice::from_raw_parts_mut(self.start, len) }
    }

    /// The first `len` values, which a call of [`PackBuffer::words`] has made.
    pub(super) fn filled(&self, len: usize) -> &[u32] {
        assert!(len * size_of::<u32>() <= self.layout.size(), "the buffer has fewer than {len} words");
        // SAFETY: these values are initialized, and unchanged while `self` is borrowed.
        if len == 0 { &[] } else { unsafe { std::slice::from_raw_parts(self.start, len) } }
    }

    /// As [`PackBuffer::words`], as floats.
    pub(super) fn floats(&mut self, len: usize) -> &mut [f32] {
        bytemuck::cast_slice_mut(self.words(len))
    }

    /// The bytes that a buffer takes after a request for `len` words.
    pub(super) fn bytes_of(len: usize) -> usize {
        rounded(len * size_of::<u32>())
    }

    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        self.layout.size()
    }

    fn reserve(&mut self, bytes: usize) {
        if bytes <= self.layout.size() {
            return;
        }
        let bytes = rounded(bytes);
        *self = Self::new();
        let layout = Layout::from_size_align(bytes, CACHE_LINE).expect("a matrix in memory has a valid size");
        // SAFETY: the layout is not empty.
        self.start = unsafe { Allocator.alloc_zeroed(layout) }.cast();
        if self.start.is_null() {
            handle_alloc_error(layout);
        }
        self.layout = layout;
    }
}

/// Whole huge pages, or cache lines.
fn rounded(bytes: usize) -> usize {
    bytes.next_multiple_of(if bytes >= HUGE_PAGE { HUGE_PAGE } else { CACHE_LINE })
}

impl Drop for PackBuffer {
    fn drop(&mut self) {
        if self.layout.size() > 0 {
            // SAFETY: this is the block that `reserve` allocated, with its layout.
            unsafe { Allocator.dealloc(self.start.cast(), self.layout) };
        }
    }
}

/// The memory that one product needs in addition to its tasks' own memory.
#[derive(Debug)]
pub(super) struct GemmWorkspace {
    /// The operand that tasks share.
    pub(super) shared: PackBuffer,
    pub(super) partial: PackBuffer,
    /// The operands of the second term.
    pub(super) second: [PackBuffer; 2],
}

impl GemmWorkspace {
    pub(super) const fn new() -> Self {
        Self { shared: PackBuffer::new(), partial: PackBuffer::new(), second: [const { PackBuffer::new() }; 2] }
    }
}

/// Passes a workspace to `body`. Concurrent products get different ones.
pub(super) fn with_workspace<R>(body: impl FnOnce(&mut GemmWorkspace) -> R) -> R {
    static IDLE: Mutex<Vec<GemmWorkspace>> = Mutex::new(Vec::new());
    let idle = || IDLE.lock().unwrap_or_else(PoisonError::into_inner);
    let recycled = idle().pop();
    let mut workspace = recycled.unwrap_or(const { GemmWorkspace::new() });
    let result = body(&mut workspace);
    idle().push(workspace);
    result
}

/// Passes this thread's buffer to `body`, which must not request it again.
pub(super) fn with_thread_buffer<R>(body: impl FnOnce(&mut PackBuffer) -> R) -> R {
    thread_local! {
        static OWN: RefCell<PackBuffer> = const { RefCell::new(PackBuffer::new()) };
    }
    OWN.with_borrow_mut(body)
}
