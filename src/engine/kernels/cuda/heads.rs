//! The launches of `heads.cu`.

use super::launch::{Arguments, Buffer, Launch, Queue, entry, word};
use crate::engine::kernels::attention::Shape;
use crate::engine::kernels::rope::{Direction, Positions};
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
    first: u32,
    heads: u32,
    half: u32,
    seq_len: u32,
    past: u32,
    sign: f32,
}
// SAFETY: mirrors `Rotate`.
unsafe impl Arguments for Rotate {}

#[repr(C)]
#[derive(Clone, Copy)]
struct SharedHeads {
    grouped: u64,
    wide: u64,
    rows: u32,
    heads: u32,
    kv_heads: u32,
    head_size: u32,
}
// SAFETY: mirrors `SharedHeads`.
unsafe impl Arguments for SharedHeads {}

fn launch(kernel: &str, dtype: DType, packs: usize) -> Result<Launch> {
    Launch::by_packs("heads", entry(kernel, &[dtype])?, packs)
}

/// Some columns of a buffer: rows, elements from one to the next, the first column, and how many there are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heads {
    pub(crate) rows: usize,
    pub(crate) stride: usize,
    pub(crate) first: usize,
    pub(crate) count: usize,
}

impl Heads {
    /// Whether there is a kernel that rotates heads with halves of this width.
    pub(crate) fn can_rotate(&self, half: usize) -> bool {
        let aligned = [self.stride, self.first, half].iter().all(|n| n.is_multiple_of(PACK));
        aligned && half > 0 && self.count.is_multiple_of(2 * half)
    }
}

/// See [`rope::rotate`](crate::engine::kernels::rope::rotate). `starts` holds the documents of `positions`; `angles` are cosines
/// and sines for every position.
pub(crate) fn rotate(
    queue: &impl Queue,
    x: (Buffer, Heads),
    angles: [Buffer; 2],
    half: usize,
    positions: Positions<'_>,
    starts: Option<Buffer>,
    direction: Direction,
) -> Result<()> {
    let (buffer, heads) = x;
    let Heads { rows, stride, first, count } = heads;
    let longest = positions.past + positions.seq_len.min(rows);
    if !heads.can_rotate(half) || positions.seq_len == 0 || first + count > stride {
        bail!("rotation of {rows} × {count} by heads of {}", 2 * half);
    }
    let [cos, sin] = angles;
    let arguments = Rotate {
        x: buffer.of("x", rows * stride)?,
        cos: cos.expect("cosines", DType::F32, longest * half)?,
        sin: sin.expect("sines", DType::F32, longest * half)?,
        starts: starts.map_or(Ok(0), |starts| starts.expect("starts", DType::U32, rows))?,
        rows: word(rows)?,
        stride: word(stride)?,
        first: word(first)?,
        heads: word(count / (2 * half))?,
        half: word(half)?,
        seq_len: word(positions.seq_len)?,
        past: word(positions.past)?,
        sign: if direction == Direction::Forward { 1.0 } else { -1.0 },
    };
    // The kernel counts packs in 32 bits.
    let packs = word(rows * count / 2 / PACK)?;
    // SAFETY: every buffer was found large enough.
    unsafe { queue.launch(&launch("rotate", buffer.dtype, packs as usize)?, &arguments) }
}

/// Whether keys and values of this shape can be repeated for each head of queries.
pub(crate) fn can_spread(shape: &Shape) -> bool {
    shape.head_size.is_multiple_of(PACK)
}

fn grouped(shape: &Shape, grouped: Buffer, wide: Buffer) -> Result<(SharedHeads, [usize; 2])> {
    let (rows, [queries, keys, _]) = (shape.batch * shape.seq_len, shape.widths());
    if !can_spread(shape) {
        bail!("there is no CUDA kernel for grouped heads of {}", shape.head_size);
    }
    let lens = [rows * (queries + 2 * keys), rows * 3 * queries];
    let arguments = SharedHeads {
        grouped: grouped.expect("grouped", wide.dtype, lens[0])?,
        wide: wide.of("wide", lens[1])?,
        rows: word(rows)?,
        heads: word(shape.heads)?,
        kv_heads: word(shape.kv_heads)?,
        head_size: word(shape.head_size)?,
    };
    Ok((arguments, lens))
}

/// Queries, keys and values of `shape` with keys and values for each head: `wide [B·T, 3·H·head_size]`.
pub(crate) fn spread(queue: &impl Queue, shape: &Shape, qkv: Buffer, wide: Buffer) -> Result<()> {
    let (arguments, [_, len]) = grouped(shape, qkv, wide)?;
    // SAFETY: both buffers were found large enough.
    unsafe { queue.launch(&launch("spread_heads", wide.dtype, len / PACK)?, &arguments) }
}

/// The gradient of what [`spread`] took from that of what it made; sums are FP32, rounded once.
pub(crate) fn gather(queue: &impl Queue, shape: &Shape, wide: Buffer, qkv: Buffer) -> Result<()> {
    let (arguments, [len, _]) = grouped(shape, qkv, wide)?;
    // SAFETY: both buffers were found large enough.
    unsafe { queue.launch(&launch("gather_heads", wide.dtype, len / PACK)?, &arguments) }
}
