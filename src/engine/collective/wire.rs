//! The elements of tensors as bytes for another process of the same program on the same kind of machine.

use crate::Result;
use crate::engine::kernels::view::{host_range, read, write};
use candle_core::{DType, Device, Tensor};
use std::ops::Range;

/// Appends elements `range` of a tensor, in row-major order, to `out`.
pub(crate) fn range_bytes(tensor: &Tensor, range: Range<usize>, out: &mut Vec<u8>) -> Result<()> {
    let part = host_range(tensor, range)?;
    match part.dtype() {
        DType::U8 => out.extend(part.to_vec1::<u8>()?),
        _ => out.extend_from_slice(read(&part)?.view().bytes()),
    }
    Ok(())
}

/// Writes the start of `bytes` into elements `range` of a tensor of the same type, and returns the rest.
pub(crate) fn write_range<'a>(tensor: &Tensor, range: Range<usize>, bytes: &'a [u8]) -> Result<&'a [u8]> {
    let size = tensor.dtype().size_in_bytes();
    let (bytes, rest) = bytes.split_at(range.len() * size);
    if !tensor.device().is_cpu() {
        let part = Tensor::from_raw_buffer(bytes, tensor.dtype(), &[range.len()], &Device::Cpu)?;
        tensor.flatten_all()?.slice_set(&part.to_device(tensor.device())?, 0, range.start)?;
        return Ok(rest);
    }
    write(tensor, |mut view| view.bytes_mut()[range.start * size..range.end * size].copy_from_slice(bytes))?;
    Ok(rest)
}
