//! Numbers and tensors as bytes on their way to another process of the same program on the same kind of machine.

use crate::engine::kernels::view::{View, ViewMut, host_range, read, write};
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use half::slice::HalfFloatSliceExt;
use std::ops::Range;

/// Collects numbers.
#[derive(Debug, Default)]
pub(crate) struct Writer(pub(crate) Vec<u8>);

impl Writer {
    pub(crate) fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    pub(crate) fn f64(&mut self, value: f64) {
        self.u64(value.to_bits());
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.u64(bytes.len() as u64);
        self.0.extend(bytes);
    }
}

/// Reads them back.
#[derive(Debug)]
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        let message = "a process of this run sent fewer bytes than it said; all must be of one build";
        let (taken, rest) = self.0.split_at_checked(count).ok_or_else(|| Error::Collective(message.into()))?;
        self.0 = rest;
        Ok(taken)
    }

    pub(crate) fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.take(8)?.try_into().unwrap_or_default()))
    }

    pub(crate) fn f64(&mut self) -> Result<f64> {
        self.u64().map(f64::from_bits)
    }

    pub(crate) fn bytes(&mut self) -> Result<&'a [u8]> {
        let count = self.u64()? as usize;
        self.take(count)
    }
}

/// Appends elements of a tensor, counted in row-major order, to `out`.
pub(crate) fn range_bytes(tensor: &Tensor, range: Range<usize>, out: &mut Vec<u8>) -> Result<()> {
    let part = host_range(tensor, range)?;
    out.extend_from_slice(match read(&part)?.view() {
        View::F32(x) => bytemuck::cast_slice(x),
        View::F16(x) => bytemuck::cast_slice(x.reinterpret_cast()),
        View::BF16(x) => bytemuck::cast_slice(x.reinterpret_cast()),
    });
    Ok(())
}

/// Writes such bytes over the elements of a tensor of the same type, and returns those that follow.
pub(crate) fn write_range<'a>(tensor: &Tensor, range: Range<usize>, bytes: &'a [u8]) -> Result<&'a [u8]> {
    let (bytes, rest) = bytes.split_at(range.len() * tensor.dtype().size_in_bytes());
    if !tensor.device().is_cpu() {
        let part = Tensor::from_raw_buffer(bytes, tensor.dtype(), &[range.len()], &Device::Cpu)?;
        tensor.flatten_all()?.slice_set(&part.to_device(tensor.device())?, 0, range.start)?;
        return Ok(rest);
    }
    write(tensor, |mut view| {
        let to: &mut [u8] = match view.reborrow() {
            ViewMut::F32(x) => bytemuck::cast_slice_mut(&mut x[range]),
            ViewMut::F16(x) => bytemuck::cast_slice_mut(x[range].reinterpret_cast_mut()),
            ViewMut::BF16(x) => bytemuck::cast_slice_mut(x[range].reinterpret_cast_mut()),
        };
        to.copy_from_slice(bytes);
    })?;
    Ok(rest)
}
