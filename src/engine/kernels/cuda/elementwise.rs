//! Launches of `gelu.cu`, and dropout masks as kernels take them.

use super::launch::{Arguments, Buffer, Launch, Queue, entry, word};
use crate::engine::kernels::dropout::Dropout;
use candle_core::{DType, Result};

const THREADS: u32 = 256;
/// Elements a thread takes at a time.
const PACK: usize = 8;
/// Blocks, at most: what keeps the largest GPUs busy. The threads then go round.
const MAX_BLOCKS: usize = 132 * 16;

/// A mask as the kernels take it: without the draw, which lies in device memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Mask {
    draw: u64,
    key: [u32; 2],
    site: u32,
    threshold: u32,
    keep_scale: f32,
    unused: u32,
}

impl Mask {
    /// Drops nothing, and has no draw.
    pub(super) const NONE: Self = Self { draw: 0, key: [0; 2], site: 0, threshold: 0, keep_scale: 1.0, unused: 0 };

    /// The mask of `dropout`, whose draw is at `draw` (two words, the low one first); nothing is dropped by `None`.
    pub(super) fn new(dropout: Option<Dropout>, draw: Buffer) -> Result<Self> {
        let draw = draw.expect("draw", DType::U32, 2)?;
        Ok(match dropout {
            None => Self::NONE,
            Some(dropout) => {
                let (key, site, threshold, keep_scale) = dropout.numbers();
                Self { draw, key, site, threshold, keep_scale, unused: 0 }
            }
        })
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct TwoOperands {
    x: u64,
    y: u64,
    len: u64,
}
// SAFETY: mirrors `Gelu`.
unsafe impl Arguments for TwoOperands {}

fn elementwise(module: &'static str, kernel: &str, dtypes: &[DType], len: usize) -> Result<Launch> {
    let blocks = len.div_ceil(PACK * THREADS as usize).min(MAX_BLOCKS);
    Ok(Launch {
        module,
        kernel: entry(kernel, dtypes)?,
        grid: [word(blocks)?, 1, 1],
        threads: THREADS,
        shared_bytes: 0,
    })
}

fn two_operands(
    queue: &impl Queue,
    module: &'static str,
    kernel: &str,
    dtypes: &[DType],
    x: Buffer,
    y: Buffer,
) -> Result<()> {
    let arguments = TwoOperands { x: x.of("x", y.len)?, y: y.of("y", y.len)?, len: y.len as u64 };
    // SAFETY: both buffers were found large enough.
    unsafe { queue.launch(&elementwise(module, kernel, dtypes, y.len)?, &arguments) }
}

/// `y = gelu(x)`.
pub(crate) fn gelu_forward(queue: &impl Queue, x: Buffer, y: Buffer) -> Result<()> {
    x.expect("x", y.dtype, y.len)?;
    two_operands(queue, "gelu", "gelu_forward", &[y.dtype], x, y)
}

/// `dy *= gelu'(x)`.
pub(crate) fn gelu_backward(queue: &impl Queue, x: Buffer, dy: Buffer) -> Result<()> {
    x.expect("x", dy.dtype, dy.len)?;
    two_operands(queue, "gelu", "gelu_backward", &[dy.dtype], x, dy)
}
