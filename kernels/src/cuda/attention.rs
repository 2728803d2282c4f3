//! Launches of `attention.cu`, for FP32, and `attention_mma.cu`, for types that tensor cores multiply.

use super::launch::{Arguments, DeviceSlice, DropoutArgs, KernelLaunch, Queue, kernel_symbol, to_u32};
use crate::attention::AttentionShape;
use crate::dropout::Dropout;
use candle_core::{DType, Result, bail};

/// The head sizes there are kernels for; others run in the next larger one.
const SIZES: [usize; 4] = [32, 64, 96, 128];

#[repr(C)]
#[derive(Clone, Copy)]
struct ShapeArgs {
    bounds: u64,
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
    shape: ShapeArgs,
    dropout: DropoutArgs,
}
// SAFETY: mirrors `AttentionForward`.
unsafe impl Arguments for Forward {}

#[repr(C)]
#[derive(Clone, Copy)]
struct RowProducts {
    dout: u64,
    out: u64,
    delta: u64,
    shape: ShapeArgs,
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
    shape: ShapeArgs,
    dropout: DropoutArgs,
}
// SAFETY: mirrors `AttentionBackward`.
unsafe impl Arguments for Backward {}

/// Kernels that a call consists of.
#[derive(Clone, Copy)]
enum Pass {
    Forward,
    BackwardKeysAndValues,
    BackwardQueries,
}

/// Whether there are kernels for attention of this shape: no grouped queries or soft caps, and no large heads.
pub(crate) fn serves(shape: &AttentionShape) -> bool {
    let AttentionShape { heads, kv_heads, head_size, softcap, .. } = *shape;
    kv_heads == heads && head_size <= SIZES[3] && softcap.is_none()
}

/// The first key that each query attends to, then the end of the queries that attend to each key, `[2, B·T]`; `None` where each
/// query attends to all keys up to its own.
pub(crate) fn bounds(shape: &AttentionShape, documents: Option<&[u32]>) -> Result<Option<Vec<u32>>> {
    let (rows, seq_len) = (shape.batch * shape.seq_len, shape.seq_len);
    if documents.is_none() && !is_windowed(shape) {
        return Ok(None);
    }
    let first_key = |row: usize| {
        let in_window = to_u32(shape.first_in_window(row % seq_len))?;
        Ok(documents.map_or(0, |starts| starts[row]).max(in_window))
    };
    let mut bounds = (0..rows).map(first_key).collect::<Result<Vec<u32>>>()?;
    for row in 0..rows {
        let (key, first) = (row % seq_len, row - row % seq_len);
        let queries = bounds[first..first + seq_len].partition_point(|bound| *bound as usize <= key);
        bounds.push(to_u32(queries)?);
    }
    Ok(Some(bounds))
}

fn is_windowed(shape: &AttentionShape) -> bool {
    shape.window.is_some_and(|window| window < shape.seq_len)
}

/// One call's sizes, and the kernels that serve them.
#[derive(Clone, Copy)]
struct Plan {
    shape: AttentionShape,
    dtype: DType,
    /// The kernels' head size.
    size: usize,
    /// The address of [`bounds`] on the device.
    bounds: u64,
}

impl Plan {
    fn new(shape: AttentionShape, bounds: Option<DeviceSlice>, dtype: DType) -> Result<Self> {
        let rows = shape.batch * shape.seq_len;
        let bounds = match bounds {
            Some(bounds) => bounds.expect("bounds", DType::U32, 2 * rows)?,
            None if is_windowed(&shape) => bail!("attention in a window without its bounds"),
            None => 0,
        };
        match SIZES.into_iter().find(|&size| size >= shape.head_size) {
            Some(size) if serves(&shape) => Ok(Self { shape, dtype, size, bounds }),
            _ => bail!("there is no CUDA kernel for attention of {shape:?}"),
        }
    }

    fn elements(self) -> usize {
        self.shape.batch * self.shape.seq_len * self.shape.heads * self.shape.head_size
    }

    fn stat_len(self) -> usize {
        self.shape.batch * self.shape.seq_len * self.shape.heads
    }

    fn arguments(self) -> Result<ShapeArgs> {
        let AttentionShape { batch, seq_len, heads, head_size, scale, .. } = self.shape;
        Ok(ShapeArgs {
            bounds: self.bounds,
            batch: to_u32(batch)?,
            seq_len: to_u32(seq_len)?,
            heads: to_u32(heads)?,
            head_size: to_u32(head_size)?,
            softmax_scale: scale,
            unused: 0,
        })
    }

    fn launch(self, pass: Pass) -> Result<KernelLaunch> {
        let kernel = match pass {
            Pass::Forward => "attention_forward",
            Pass::BackwardKeysAndValues => "attention_backward_kv",
            Pass::BackwardQueries => "attention_backward_q",
        };
        let (module, rows, threads, shared_bytes) = match self.dtype {
            DType::F32 => self.in_fp32(pass),
            _ => self.on_tensor_cores(pass),
        };
        Ok(KernelLaunch {
            module,
            kernel: format!("{}_{}", kernel_symbol(kernel, &[self.dtype])?, self.size),
            grid: [to_u32(self.shape.seq_len.div_ceil(rows))?, to_u32(self.shape.batch * self.shape.heads)?, 1],
            threads,
            shared_bytes: to_u32(shared_bytes)?,
        })
    }

    /// Module, a block's rows, its threads and its shared memory: tiles of operands and of scores.
    fn in_fp32(self, pass: Pass) -> (&'static str, usize, u32, usize) {
        let rows = if self.size <= 64 { 64 } else { 32 };
        let (tiles, squares) = match pass {
            Pass::Forward => (2, 1),
            Pass::BackwardKeysAndValues => (4, 2),
            Pass::BackwardQueries => (4, 1),
        };
        let floats = tiles * rows * (self.size + 1) + squares * rows * (rows + 1);
        ("attention", rows, 256, floats * size_of::<f32>())
    }

    /// The module, rows, threads and shared bytes of a block on tensor cores. Shared memory holds the rows of two
    /// stages of two tiles, of two resident tiles if these stay, and the statistics of two stages.
    fn on_tensor_cores(self, pass: Pass) -> (&'static str, usize, u32, usize) {
        const ROWS: usize = 64;
        let (tile, at_rest) = match pass {
            Pass::BackwardKeysAndValues | Pass::BackwardQueries if self.size > 64 => (32, 2 * ROWS),
            _ => (ROWS, 0),
        };
        let stats = if matches!(pass, Pass::BackwardKeysAndValues) { 2 * 2 * tile } else { 0 };
        let halves = (4 * tile + at_rest) * (self.size + 8);
        ("attention_mma", ROWS, 128, 2 * halves + stats * size_of::<f32>())
    }
}

/// See [`attention::forward`](crate::attention::forward); the device has the shape's [`bounds`].
pub(crate) fn forward(
    queue: &impl Queue,
    (shape, bounds): (AttentionShape, Option<DeviceSlice>),
    qkv: DeviceSlice,
    dropout: Option<Dropout>,
    out: DeviceSlice,
    lse: DeviceSlice,
) -> Result<()> {
    let plan = Plan::new(shape, bounds, qkv.dtype)?;
    let arguments = Forward {
        qkv: qkv.of("qkv", 3 * plan.elements())?,
        out: out.expect("out", qkv.dtype, plan.elements())?,
        lse: lse.expect("lse", DType::F32, plan.stat_len())?,
        shape: plan.arguments()?,
        dropout: DropoutArgs::new(dropout),
    };
    // SAFETY: every buffer was found large enough.
    unsafe { queue.launch(&plan.launch(Pass::Forward)?, &arguments) }
}

/// See [`attention::backward`](crate::attention::backward); the device has the shape's [`bounds`].
pub(crate) fn backward(
    queue: &impl Queue,
    (shape, bounds): (AttentionShape, Option<DeviceSlice>),
    [dout, qkv, out, lse]: [DeviceSlice; 4],
    dropout: Option<Dropout>,
    dqkv: DeviceSlice,
) -> Result<()> {
    let plan = Plan::new(shape, bounds, qkv.dtype)?;
    let (delta, _owner) = queue.scratch(plan.stat_len())?;
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
        dropout: DropoutArgs::new(dropout),
    };
    let by_rows =
        KernelLaunch::warp_per_row("attention", kernel_symbol("attention_delta", &[qkv.dtype])?, plan.stat_len())?;
    // SAFETY: every buffer was found large enough.
    unsafe {
        queue.launch(&by_rows, &products)?;
        queue.launch(&plan.launch(Pass::BackwardKeysAndValues)?, &arguments)?;
        queue.launch(&plan.launch(Pass::BackwardQueries)?, &arguments)
    }
}
