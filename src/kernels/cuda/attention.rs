//! Launches of `attention.cu`.

use super::elementwise::Mask;
use super::launch::{Arguments, Buffer, Launch, Queue, entry, word};
use crate::kernels::attention::Shape;
use crate::kernels::dropout::Dropout;
use candle_core::{DType, Result, bail};

const THREADS: u32 = 256;
/// The head sizes there are kernels for; others run in the next larger one.
const SIZES: [usize; 4] = [32, 64, 96, 128];

#[repr(C)]
#[derive(Clone, Copy)]
struct AttentionShape {
    batch: u32,
    seq_len: u32,
    heads: u32,
    head_size: u32,
    softmax_scale: f32,
    unused: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Forward {
    qkv: u64,
    out: u64,
    lse: u64,
    shape: AttentionShape,
    dropout: Mask,
}
// SAFETY: mirrors `AttentionForward`.
unsafe impl Arguments for Forward {}

#[repr(C)]
#[derive(Clone, Copy)]
struct RowProducts {
    dout: u64,
    out: u64,
    delta: u64,
    shape: AttentionShape,
}
// SAFETY: mirrors `AttentionDelta`.
unsafe impl Arguments for RowProducts {}

#[repr(C)]
#[derive(Clone, Copy)]
struct Backward {
    qkv: u64,
    dout: u64,
    lse: u64,
    delta: u64,
    dqkv: u64,
    shape: AttentionShape,
    dropout: Mask,
}
// SAFETY: mirrors `AttentionBackward`.
unsafe impl Arguments for Backward {}

/// One call's sizes, and the kernel that serves them.
#[derive(Clone, Copy)]
struct Plan {
    shape: Shape,
    /// The kernel's head size.
    size: usize,
    /// Rows of a tile.
    rows: usize,
}

impl Plan {
    fn new(shape: Shape) -> Result<Self> {
        let Some(&size) = SIZES.iter().find(|&&size| size >= shape.head_size) else {
            bail!("the GPU's attention has heads of at most {} elements, not {}", SIZES[3], shape.head_size);
        };
        Ok(Self { shape, size, rows: if size <= 64 { 64 } else { 32 } })
    }

    fn elements(self) -> usize {
        self.shape.batch * self.shape.seq_len * self.shape.heads * self.shape.head_size
    }

    fn stat_len(self) -> usize {
        self.shape.batch * self.shape.seq_len * self.shape.heads
    }

    fn arguments(self) -> Result<AttentionShape> {
        let Shape { batch, seq_len, heads, head_size } = self.shape;
        Ok(AttentionShape {
            batch: word(batch)?,
            seq_len: word(seq_len)?,
            heads: word(heads)?,
            head_size: word(head_size)?,
            softmax_scale: self.shape.softmax_scale(),
            unused: 0,
        })
    }

    /// A launch over tiles of `tiles` operands and `squares` tiles of scores in shared memory.
    fn launch(self, kernel: &str, dtype: DType, tiles: usize, squares: usize) -> Result<Launch> {
        let floats = tiles * self.rows * (self.size + 1) + squares * self.rows * (self.rows + 1);
        Ok(Launch {
            module: "attention",
            kernel: format!("{}_{}", entry(kernel, &[dtype])?, self.size),
            grid: [word(self.shape.seq_len.div_ceil(self.rows))?, word(self.shape.batch * self.shape.heads)?, 1],
            threads: THREADS,
            shared_bytes: word(floats * size_of::<f32>())?,
        })
    }
}

/// See [`attention::forward`](crate::kernels::attention::forward).
pub(crate) fn forward(
    queue: &impl Queue,
    shape: Shape,
    qkv: Buffer,
    dropout: Option<Dropout>,
    draw: Buffer,
    out: Buffer,
    lse: Buffer,
) -> Result<()> {
    let plan = Plan::new(shape)?;
    let arguments = Forward {
        qkv: qkv.of("qkv", 3 * plan.elements())?,
        out: out.expect("out", qkv.dtype, plan.elements())?,
        lse: lse.expect("lse", DType::F32, plan.stat_len())?,
        shape: plan.arguments()?,
        dropout: Mask::new(dropout, draw)?,
    };
    // SAFETY: every buffer was found large enough.
    unsafe { queue.launch(&plan.launch("attention_forward", qkv.dtype, 2, 1)?, &arguments) }
}

/// See [`attention::backward`](crate::kernels::attention::backward).
pub(crate) fn backward(
    queue: &impl Queue,
    shape: Shape,
    [dout, qkv, out, lse]: [Buffer; 4],
    dropout: Option<Dropout>,
    draw: Buffer,
    dqkv: Buffer,
) -> Result<()> {
    let plan = Plan::new(shape)?;
    let delta = queue.scratch(plan.stat_len())?;
    let products = RowProducts {
        dout: dout.expect("dout", qkv.dtype, plan.elements())?,
        out: out.expect("out", qkv.dtype, plan.elements())?,
        delta: delta.address,
        shape: plan.arguments()?,
    };
    let arguments = Backward {
        qkv: qkv.of("qkv", 3 * plan.elements())?,
        dout: products.dout,
        lse: lse.expect("lse", DType::F32, plan.stat_len())?,
        delta: delta.address,
        dqkv: dqkv.expect("dqkv", qkv.dtype, 3 * plan.elements())?,
        shape: products.shape,
        dropout: Mask::new(dropout, draw)?,
    };
    let by_rows = Launch::warp_a_row("attention", entry("attention_delta", &[qkv.dtype])?, plan.stat_len())?;
    // SAFETY: every buffer was found large enough.
    unsafe {
        queue.launch(&by_rows, &products)?;
        queue.launch(&plan.launch("attention_backward_kv", qkv.dtype, 4, 2)?, &arguments)?;
        queue.launch(&plan.launch("attention_backward_q", qkv.dtype, 4, 1)?, &arguments)
    }
}
