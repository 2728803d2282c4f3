//! The launches of `heads.cu`.

use super::launch::{Arguments, DeviceSlice, KernelLaunch, Queue, Rows, kernel_symbol, to_u32};
use crate::attention::AttentionShape;
use crate::rope::{Direction, PositionIds};
use candle_core::{DType, Result, bail};

/// Elements a thread takes at a time.
const PACK: usize = 8;

#[repr(C)]
#[derive(Clone, Copy)]
struct Rotate {
    x: u64,
    cos: u64,
    sin: u64,
    starts: u64,
    rows: u32,
    stride: u32,
    heads: u32,
    half: u32,
    seq_len: u32,
    past: u32,
    sign: f32,
    unused: u32,
}
// SAFETY: mirrors `Rotate`.
unsafe impl Arguments for Rotate {}

#[repr(C)]
#[derive(Clone, Copy)]
struct GqaArgs {
    parts: [u64; 3],
    wide: u64,
    strides: [u32; 3],
    rows: u32,
    heads: u32,
    kv_heads: u32,
    head_size: u32,
    unused: u32,
}
// SAFETY: mirrors `GqaArgs`.
unsafe impl Arguments for GqaArgs {}

fn launch(kernel: &str, dtype: DType, packs: usize) -> Result<KernelLaunch> {
    KernelLaunch::for_packs("heads", kernel_symbol(kernel, &[dtype])?, packs)
}

/// Whether there is a kernel that rotates heads with halves of this width.
pub(crate) fn supports_rope(x: Rows, half: usize) -> bool {
    half > 0 && half.is_multiple_of(PACK) && x.aligns(half) && x.count.is_multiple_of(2 * half)
}

/// See [`rope::apply_rope`](crate::rope::apply_rope). `starts` holds the documents of `positions`; `angles` are cosines
/// and sines for every position.
pub(crate) fn apply_rope(
    queue: &impl Queue,
    x: Rows,
    angles: [DeviceSlice; 2],
    half: usize,
    positions: PositionIds<'_>,
    starts: Option<DeviceSlice>,
    direction: Direction,
) -> Result<()> {
    let Rows { buffer, len: rows, stride, count, .. } = x;
    let longest = positions.past + positions.seq_len.min(rows);
    if !supports_rope(x, half) || positions.seq_len == 0 {
        bail!("rotation of {rows} × {count} by heads of {}", 2 * half);
    }
    let [cos, sin] = angles;
    let arguments = Rotate {
        x: x.address("x")?,
        cos: cos.expect("cosines", DType::F32, longest * half)?,
        sin: sin.expect("sines", DType::F32, longest * half)?,
        starts: starts.map_or(Ok(0), |starts| starts.expect("starts", DType::U32, rows))?,
        rows: to_u32(rows)?,
        stride: to_u32(stride)?,
        heads: to_u32(count / (2 * half))?,
        half: to_u32(half)?,
        seq_len: to_u32(positions.seq_len)?,
        past: to_u32(positions.past)?,
        sign: if direction == Direction::Forward { 1.0 } else { -1.0 },
        unused: 0,
    };
    // The kernel counts packs in 32 bits.
    let packs = to_u32(rows * count / 2 / PACK)?;
    // SAFETY: every buffer was found large enough.
    unsafe { queue.launch(&launch("apply_rope", buffer.dtype, packs as usize)?, &arguments) }
}

/// Whether queries, keys and values can be put side by side.
pub(crate) fn supports_repeat_kv(shape: &AttentionShape, parts: [Rows; 3]) -> bool {
    shape.head_size.is_multiple_of(PACK) && parts.iter().all(|part| part.aligns(shape.head_size))
}

fn shared(shape: &AttentionShape, parts: [Rows; 3], wide: DeviceSlice) -> Result<GqaArgs> {
    let (rows, widths) = (shape.batch * shape.seq_len, shape.widths());
    let sized = |(part, width): (&Rows, usize)| (part.len, part.count, part.buffer.dtype) == (rows, width, wide.dtype);
    if !supports_repeat_kv(shape, parts) || !parts.iter().zip(widths).all(sized) {
        bail!("there is no CUDA kernel for heads of {shape:?} in {parts:?}");
    }
    let [queries, keys, values] = parts;
    Ok(GqaArgs {
        parts: [queries.address("queries")?, keys.address("keys")?, values.address("values")?],
        wide: wide.of("wide", rows * 3 * widths[0])?,
        strides: [to_u32(queries.stride)?, to_u32(keys.stride)?, to_u32(values.stride)?],
        rows: to_u32(rows)?,
        heads: to_u32(shape.heads)?,
        kv_heads: to_u32(shape.kv_heads)?,
        head_size: to_u32(shape.head_size)?,
        unused: 0,
    })
}

/// Queries, keys and values of `shape` side by side, with keys and values for each head: `wide [B·T, 3·H·head_size]`.
pub(crate) fn spread(queue: &impl Queue, shape: &AttentionShape, parts: [Rows; 3], wide: DeviceSlice) -> Result<()> {
    let (arguments, len) = (shared(shape, parts, wide)?, shape.batch * shape.seq_len * 3 * shape.widths()[0]);
    // SAFETY: all buffers were found large enough.
    unsafe { queue.launch(&launch("spread_heads", wide.dtype, len / PACK)?, &arguments) }
}

/// Computes the gradient of [`spread`]'s inputs from the gradient of its output; sums are FP32, rounded once.
pub(crate) fn gather(queue: &impl Queue, shape: &AttentionShape, wide: DeviceSlice, parts: [Rows; 3]) -> Result<()> {
    let arguments = shared(shape, parts, wide)?;
    let len = shape.batch * shape.seq_len * shape.widths().iter().sum::<usize>();
    // SAFETY: all buffers were found large enough.
    unsafe { queue.launch(&launch("gather_heads", wide.dtype, len / PACK)?, &arguments) }
}
