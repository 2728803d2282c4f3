//! The launch of `embedding.cu`.

use super::elementwise::serves;
use super::launch::{Arguments, DeviceSlice, DropoutArgs, KernelLaunch, Queue, kernel_symbol, to_u32};
use crate::dropout::Dropout;
use candle_core::{DType, Result, bail};

const THREADS: u32 = 128;

#[repr(C)]
#[derive(Clone, Copy)]
struct EmbeddingBackward {
    dx: u64,
    dtable: u64,
    order: u64,
    groups: u64,
    width: u32,
    count: u32,
    scale: f32,
    unused: u32,
    dropout: DropoutArgs,
}
// SAFETY: mirrors `EmbeddingBackward`.
unsafe impl Arguments for EmbeddingBackward {}

/// Rows in groups: which row of a table each group's sum is for.
#[derive(Debug)]
pub(crate) struct Groups {
    /// The rows, group by group.
    pub(crate) order: Vec<u32>,
    /// For each group its row of the table, and where it ends in `order`.
    pub(crate) ends: Vec<u32>,
}

/// Groups the rows `0..count` by key, the rows of a group in their order.
pub(crate) fn grouped(count: usize, key: impl Fn(usize) -> usize) -> Result<Groups> {
    let mut order: Vec<u32> = (0..to_u32(count)?).collect();
    order.sort_by_key(|&row| key(row as usize));
    let (mut ends, mut end) = (Vec::new(), 0);
    for group in order.chunk_by(|&a, &b| key(a as usize) == key(b as usize)) {
        end += group.len();
        ends.extend([to_u32(key(group[0] as usize))?, to_u32(end)?]);
    }
    Ok(Groups { order, ends })
}

/// Adds `scale` times the sum of each group's rows of `dropout(dx) [N, D]` to its row of `dtable [V, D]`, in FP32 with one
/// rounding. The groups' rows have been checked against V, and no two groups share one.
pub(crate) fn backward(
    queue: &impl Queue,
    [dx, dtable]: [DeviceSlice; 2],
    [order, ends]: [DeviceSlice; 2],
    width: usize,
    scale: f32,
    dropout: Option<Dropout>,
) -> Result<()> {
    let (rows, groups) = (order.len, ends.len / 2);
    if !serves(width) || dx.len != rows * width {
        bail!("{} elements in {rows} rows of {width}", dx.len);
    }
    let arguments = EmbeddingBackward {
        dx: dx.of("dx", rows * width)?,
        dtable: dtable.of("dtable", width)?,
        order: order.expect("order", DType::U32, rows)?,
        groups: ends.expect("groups", DType::U32, 2 * groups)?,
        width: to_u32(width)?,
        count: to_u32(groups)?,
        scale,
        unused: 0,
        dropout: DropoutArgs::new(dropout),
    };
    let launch = KernelLaunch {
        module: "embedding",
        kernel: kernel_symbol("embedding_backward", &[dx.dtype, dtable.dtype])?,
        grid: [to_u32(groups)?, 1, 1],
        threads: THREADS,
        shared_bytes: 0,
    };
    // SAFETY: every buffer was found large enough; the caller has checked the groups.
    unsafe { queue.launch(&launch, &arguments) }
}
