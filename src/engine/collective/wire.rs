//! The elements of tensors as bytes for another process of the same program on the same kind of machine.

use crate::Result;
use crate::engine::kernels::view::{View, ViewMut, host_range, read, write};
use candle_core::{Device, Tensor};
use half::slice::HalfFloatSliceExt;
use std::ops::Range;

/// Appends elements `range` of a tensor, in row-major order, to `out`.
pub(crate) fn range_bytes(tensor: &Tensor, range: Range<usize>, out: &mut Vec<u8>) -> Result<()> {
    let part = host_range(tensor, range)?;
    out.extend_from_slice(match read(&part)?.view() {
        View::F32(x) => bytemuck::cast_slice(x),
        View::F16(x) => bytemuck::cast_slice(x.reinterpret_cast()),
        View::BF16(x) => bytemuck::cast_slice(x.reinterpret_cast()),
    });
    Ok(())
}

/// Writes the start of `bytes` into elements `range` of a tensor of the same type, and returns the rest.
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
