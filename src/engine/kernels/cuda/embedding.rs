//! Launches of `embedding.cu`, and the order in which the gradient's rows are added.

use super::elementwise::Mask;
use super::launch::{Arguments, Buffer, Launch, Queue, entry, word};
use crate::engine::kernels::dropout::Dropout;
use candle_core::{DType, Result, bail};

const THREADS: u32 = 256;
/// Columns a block of the gradients takes.
const COLUMNS: usize = 256;

#[repr(C)]
#[derive(Clone, Copy)]
struct Forward {
    wte: u64,
    wpe: u64,
    ids: u64,
    out: u64,
    rows: u32,
    width: u32,
    seq_len: u32,
    unused: u32,
    dropout: Mask,
}
// SAFETY: mirrors `EmbeddingForward`.
unsafe impl Arguments for Forward {}

#[repr(C)]
#[derive(Clone, Copy)]
struct TokenGradient {
    dx: u64,
    ids: u64,
    order: u64,
    starts: u64,
    dwte: u64,
    rows: u32,
    width: u32,
    dropout: Mask,
}
// SAFETY: mirrors `TokenGradient`.
unsafe impl Arguments for TokenGradient {}

#[repr(C)]
#[derive(Clone, Copy)]
struct PositionGradient {
    dx: u64,
    dwpe: u64,
    rows: u32,
    width: u32,
    seq_len: u32,
    unused: u32,
    dropout: Mask,
}
// SAFETY: mirrors `PositionGradient`.
unsafe impl Arguments for PositionGradient {}

/// Token ids on the device, with their rows grouped by token, and the draw of the micro-batch's dropout masks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tokens {
    /// `[N]`.
    pub(crate) ids: Buffer,
    /// `[N]`: rows by token, in batch order within it.
    pub(crate) order: Buffer,
    /// `[N + 1]`: where in `order` each token's rows begin; N behind the last.
    pub(crate) starts: Buffer,
    /// Two words, the low one first.
    pub(crate) draw: Buffer,
}

/// Fills `order` and `starts` for `ids`; an error for an id outside the vocabulary.
pub(crate) fn group(ids: &[u32], vocab: usize, order: &mut [u32], starts: &mut [u32]) -> Result<()> {
    if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab) {
        bail!("token id {id} is outside the model's vocabulary of {vocab}");
    }
    for (n, slot) in order.iter_mut().enumerate() {
        *slot = n as u32;
    }
    order.sort_unstable_by_key(|&n| (ids[n as usize], n));
    starts.fill(ids.len() as u32);
    let mut begin = 0;
    for (start, group) in starts.iter_mut().zip(order.chunk_by(|&a, &b| ids[a as usize] == ids[b as usize])) {
        *start = begin;
        begin += group.len() as u32;
    }
    Ok(())
}

/// See [`embedding::forward`](crate::engine::kernels::embedding::forward).
pub(crate) fn forward(
    queue: &impl Queue,
    [rows, width, seq_len]: [usize; 3],
    [wte, wpe]: [Buffer; 2],
    tokens: Tokens,
    dropout: Option<Dropout>,
    out: Buffer,
) -> Result<()> {
    let arguments = Forward {
        wte: wte.of("wte", width)?,
        wpe: wpe.expect("wpe", wte.dtype, seq_len * width)?,
        ids: tokens.ids.expect("ids", DType::U32, rows)?,
        out: out.of("out", rows * width)?,
        rows: word(rows)?,
        width: word(width)?,
        seq_len: word(seq_len)?,
        unused: 0,
        dropout: Mask::new(dropout, tokens.draw)?,
    };
    let launch = Launch::warp_a_row("embedding", entry("embedding_forward", &[out.dtype, wte.dtype])?, rows)?;
    // SAFETY: every buffer was found large enough, and `group` has checked the ids.
    unsafe { queue.launch(&launch, &arguments) }
}

/// See [`embedding::backward`](crate::engine::kernels::embedding::backward).
pub(crate) fn backward(
    queue: &impl Queue,
    [rows, width, seq_len]: [usize; 3],
    dx: Buffer,
    tokens: Tokens,
    dropout: Option<Dropout>,
    [dwte, dwpe]: [Buffer; 2],
) -> Result<()> {
    let mask = Mask::new(dropout, tokens.draw)?;
    let positions = dwpe.len / width;
    let by_token = TokenGradient {
        dx: dx.of("dx", rows * width)?,
        ids: tokens.ids.expect("ids", DType::U32, rows)?,
        order: tokens.order.expect("order", DType::U32, rows)?,
        starts: tokens.starts.expect("starts", DType::U32, rows + 1)?,
        dwte: dwte.of("dwte", width)?,
        rows: word(rows)?,
        width: word(width)?,
        dropout: mask,
    };
    let launch = |kernel: &str, grid: usize, grads: DType| -> Result<Launch> {
        Ok(Launch {
            module: "embedding",
            kernel: entry(kernel, &[dx.dtype, grads])?,
            grid: [word(grid)?, word(width.div_ceil(COLUMNS))?, 1],
            threads: THREADS,
            shared_bytes: THREADS * 4 * size_of::<f32>() as u32,
        })
    };
    // One block for each group there can be; those behind the last group have nothing to do.
    // SAFETY: every buffer was found large enough, and `group` has checked the ids.
    unsafe { queue.launch(&launch("token_gradient", rows, dwte.dtype)?, &by_token)? };
    let by_position = PositionGradient {
        dx: by_token.dx,
        dwpe: dwpe.of("dwpe", seq_len * width)?,
        rows: word(rows)?,
        width: word(width)?,
        seq_len: word(seq_len)?,
        unused: 0,
        dropout: mask,
    };
    // SAFETY: as above.
    unsafe { queue.launch(&launch("position_gradient", positions, dwpe.dtype)?, &by_position) }
}
