//! Host memory that the GPU's copy engines read and write while the host goes on.
//!
//! A copy from or to ordinary memory makes the driver wait for everything before it. Locked pages need no such stop: the copy
//! takes its turn in the stream, and an event behind it says when it is over.

use super::driver;
use candle_core::{Result, bail};
use cudarc::driver::result::{event, free_host, malloc_host};
use cudarc::driver::sys::{CUevent, CUevent_flags, CUstream, cuEventCreate};
use cudarc::driver::{CudaContext, DriverError};
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// Locked bytes, and the event behind the last copy from or to them.
pub(crate) struct Pinned {
    bytes: NonNull<u8>,
    len: usize,
    event: CUevent,
    /// Whether a copy may still be on its way.
    busy: bool,
    context: Arc<CudaContext>,
}

// SAFETY: the bytes are this value's own, and the driver's handles belong to no thread.
unsafe impl Send for Pinned {}

impl Pinned {
    /// For a context that is current.
    pub(super) fn new(context: &Arc<CudaContext>, len: usize) -> Result<Self> {
        let lock = driver("lock host memory");
        // SAFETY: the bytes are set below, before anybody reads them.
        let address = unsafe { malloc_host(len.max(1), 0) }.map_err(lock)?;
        let Some(bytes) = NonNull::new(address.cast::<u8>()) else { bail!("CUDA has locked no host memory") };
        // SAFETY: this many bytes were allocated.
        unsafe { ptr::write_bytes(bytes.as_ptr(), 0, len) };
        let mut this = Self { bytes, len, event: ptr::null_mut(), busy: false, context: context.clone() };
        // A thread that waits for a step sleeps. The time is kept elsewhere.
        let flags = CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32 | CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: there is room for the handle.
        unsafe { cuEventCreate(&raw mut this.event, flags) }.result().map_err(driver("make an event"))?;
        Ok(this)
    }

    /// The bytes for a copy that is about to be put into the stream, after those before.
    pub(super) fn for_copy(&mut self, len: usize) -> Result<&mut [u8]> {
        if self.len < len {
            bail!("{len} bytes do not fit the {} that were locked", self.len);
        }
        // SAFETY: as many were allocated and initialised; copies in one stream come one after the other.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.bytes.as_ptr(), len) })
    }

    /// Marks the place in the stream behind the copy.
    pub(super) fn mark(&mut self, stream: CUstream) -> Result<()> {
        self.busy = true;
        // SAFETY: both are alive.
        unsafe { event::record(self.event, stream) }.map_err(driver("mark a copy"))
    }

    /// Waits for the last copy, in a context that is current.
    pub(super) fn settled(&mut self) -> Result<&mut [u8]> {
        self.wait().map_err(driver("finish what was launched"))?;
        self.for_copy(self.len)
    }

    fn wait(&mut self) -> std::result::Result<(), DriverError> {
        if std::mem::take(&mut self.busy) {
            // SAFETY: the event is alive.
            unsafe { event::synchronize(self.event)? };
        }
        Ok(())
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // Nobody is left to hear of a failure, but memory that may still be written must not be freed.
        if self.context.bind_to_thread().is_err() || self.wait().is_err() {
            return;
        }
        // SAFETY: no copy is on its way, and both are this value's own.
        unsafe {
            if !self.event.is_null() {
                let _ = event::destroy(self.event);
            }
            let _ = free_host(self.bytes.as_ptr().cast());
        }
    }
}
