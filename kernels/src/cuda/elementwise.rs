//! The launches of `elementwise.cu`.

use super::launch::{Arguments, DeviceSlice, DropoutArgs, KernelLaunch, Queue, kernel_symbol, to_u32};
use crate::Activation;
use crate::dropout::Dropout;
use candle_core::{DType, Result, bail};

/// Elements a thread takes at a time.
const PACK: usize = 8;

#[repr(C)]
#[derive(Clone, Copy)]
struct Activate {
    x: u64,
    dy: u64,
    y: u64,
    dx: u64,
    len: u64,
    width: u32,
    activation: u32,
}
// SAFETY: mirrors `Activate`.
unsafe impl Arguments for Activate {}

#[repr(C)]
#[derive(Clone, Copy)]
struct Residual {
    stream: u64,
    branch: u64,
    out: u64,
    len: u64,
    dropout: DropoutArgs,
}
// SAFETY: mirrors `Residual`.
unsafe impl Arguments for Residual {}

#[repr(C)]
#[derive(Clone, Copy)]
struct Fill {
    row: u64,
    out: u64,
    len: u64,
    width: u32,
    unused: u32,
}
// SAFETY: mirrors `Fill`.
unsafe impl Arguments for Fill {}

/// Whether the kernels that look at rows can take rows of this width.
pub(crate) fn serves(width: usize) -> bool {
    width > 0 && width.is_multiple_of(PACK)
}

fn launch(kernel: &str, dtypes: &[DType], len: usize) -> Result<KernelLaunch> {
    KernelLaunch::for_packs("elementwise", kernel_symbol(kernel, dtypes)?, len.div_ceil(PACK))
}

/// Computes [`op::Activate`](crate::op::Activate), or with `gradient`, which is `dy` and `dx`, its backward pass.
pub(crate) fn activate(
    queue: &impl Queue,
    activation: Activation,
    width: usize,
    x: DeviceSlice,
    y: DeviceSlice,
    gradient: Option<[DeviceSlice; 2]>,
) -> Result<()> {
    let (dtype, len) = (y.dtype, y.len);
    let len_of_x = if activation.is_gated() { 2 * len } else { len };
    if !serves(width) || !len.is_multiple_of(width) {
        bail!("an activation of {len} elements in rows of {width}");
    }
    let arguments = Activate {
        x: x.expect("x", dtype, len_of_x)?,
        dy: gradient.map_or(Ok(0), |[dy, _]| dy.expect("dy", dtype, len))?,
        y: y.of("y", len)?,
        dx: gradient.map_or(Ok(0), |[_, dx]| dx.expect("dx", dtype, len_of_x))?,
        len: len as u64,
        width: to_u32(width)?,
        activation: match activation {
            Activation::Gelu => 0,
            Activation::SwiGlu => 1,
            Activation::GeGlu => 2,
        },
    };
    let kernel = if gradient.is_some() { "activate_backward" } else { "activate" };
    // SAFETY: every buffer was found large enough.
    unsafe { queue.launch(&launch(kernel, &[dtype], len)?, &arguments) }
}

/// `out = stream + dropout(branch)`.
pub(crate) fn residual_add(
    queue: &impl Queue,
    stream: DeviceSlice,
    branch: DeviceSlice,
    dropout: Option<Dropout>,
    out: DeviceSlice,
) -> Result<()> {
    let len = out.len;
    let arguments = Residual {
        stream: stream.expect("stream", out.dtype, len)?,
        branch: branch.of("branch", len)?,
        out: out.of("out", len)?,
        len: len as u64,
        dropout: DropoutArgs::new(dropout),
    };
    // SAFETY: every buffer was found large enough.
    unsafe { queue.launch(&launch("residual_add", &[out.dtype, branch.dtype], len)?, &arguments) }
}

/// `branch = dropout(stream)`.
pub(crate) fn residual_backward(
    queue: &impl Queue,
    stream: DeviceSlice,
    dropout: Option<Dropout>,
    branch: DeviceSlice,
) -> Result<()> {
    let len = branch.len;
    let arguments = Residual {
        stream: stream.of("stream", len)?,
        branch: branch.of("branch", len)?,
        out: 0,
        len: len as u64,
        dropout: DropoutArgs::new(dropout),
    };
    // SAFETY: every buffer was found large enough.
    unsafe { queue.launch(&launch("residual_backward", &[stream.dtype, branch.dtype], len)?, &arguments) }
}

/// Puts `row` into every row of `out`.
pub(crate) fn fill_rows(queue: &impl Queue, row: DeviceSlice, out: DeviceSlice) -> Result<()> {
    let (width, len) = (row.len, out.len);
    if !serves(width) || !len.is_multiple_of(width) {
        bail!("{len} elements in rows of {width}");
    }
    let arguments = Fill {
        row: row.expect("row", out.dtype, width)?,
        out: out.of("out", len)?,
        len: len as u64,
        width: to_u32(width)?,
        unused: 0,
    };
    // SAFETY: every buffer was found large enough.
    unsafe { queue.launch(&launch("fill_rows", &[out.dtype], len)?, &arguments) }
}
