//! Launches of `attention.cu`, for FP32, and of `attention_mma.cu` and `attention_wgmma.cu`, for types that tensor
//! cores multiply.

use super::dispatch::{Attempt, CudaKernels, KernelFamily, Stop, aligns, require};
use super::launch::{DropoutArgs, KernelLaunch, Queue, arguments, kernel_symbol, to_u32};
use crate::attention::{AttentionInputs, AttentionShape};
use crate::columns::ColumnSlice;
use crate::op;
use candle_core::{DType, Device, Result, Tensor};
use std::sync::PoisonError;

/// The head sizes there are kernels for; others run in the next larger one.
const SIZES: [usize; 5] = [32, 64, 96, 128, 256];
/// The head sizes of kernels with products of four warps.
const WGMMA_SIZES: [usize; 2] = [64, 128];
/// Heads and sequences of a launch, at most: blocks in the second and third direction of a grid.
const MAX_BLOCKS: usize = 65_535;

arguments! {
    struct RowsArg {
        first: u64,
        stride: u32,
        unused: u32,
    }

    struct ShapeArgs {
        bounds: u64,
        batch: u32,
        seq_len: u32,
        heads: u32,
        group: u32,
        head_size: u32,
        whole: u32,
        softmax_scale: f32,
        softcap: f32,
    }

    struct AttentionForward {
        qkv: [RowsArg; 3],
        out: RowsArg,
        lse: u64,
        shape: ShapeArgs,
        dropout: DropoutArgs,
    }

    struct AttentionDelta {
        dout: u64,
        out: u64,
        delta: u64,
        shape: ShapeArgs,
    }

    struct AttentionBackward {
        qkv: [RowsArg; 3],
        dout: RowsArg,
        out: RowsArg,
        lse: u64,
        delta: u64,
        gradients: [RowsArg; 3],
        shape: ShapeArgs,
        dropout: DropoutArgs,
    }
}

/// Kernels that a call consists of.
#[derive(Clone, Copy)]
enum AttentionPass {
    Forward,
    BackwardKeysAndValues,
    BackwardQueries,
}

/// The blocks of a kernel on the device.
struct BlockPlan {
    module: &'static str,
    /// Queries, or keys, of a block.
    rows: usize,
    threads: usize,
    shared_bytes: usize,
}

/// Attention's bounds on the device, with the sizes and documents that they belong to. All layers of a pass have the
/// same.
#[derive(Debug)]
pub(super) struct KeyRangeCache {
    sizes: (usize, usize, Option<usize>),
    documents: Option<Vec<u32>>,
    tensor: Tensor,
}

/// The first key that each query attends to, then the end of the queries that attend to each key, `[2, B·T]`; `None`
/// where each query attends to all keys up to its own.
pub(super) fn key_ranges(shape: &AttentionShape, documents: Option<&[u32]>) -> Result<Option<Vec<u32>>> {
    let rows = shape.batch * shape.seq_len;
    let seq_len = shape.seq_len;
    if documents.is_none() && shape.window.is_none_or(|window| window >= seq_len) {
        return Ok(None);
    }
    let first_key = |row: usize| {
        let in_window = to_u32(shape.first_in_window(row % seq_len))?;
        Ok(documents.map_or(0, |starts| starts[row]).max(in_window))
    };
    let mut bounds = (0..rows).map(first_key).collect::<Result<Vec<u32>>>()?;
    for row in 0..rows {
        let key = row % seq_len;
        let first = row - row % seq_len;
        let queries = bounds[first..first + seq_len].partition_point(|bound| *bound as usize <= key);
        bounds.push(to_u32(queries)?);
    }
    Ok(Some(bounds))
}

/// One call's sizes, and the kernels that serve them.
#[derive(Clone, Copy)]
struct AttentionLaunch {
    shape: AttentionShape,
    dtype: DType,
    size: usize,
    by_four_warps: bool,
}

impl AttentionLaunch {
    /// There are no kernels for larger heads, for more sequences and heads than a grid has blocks, and for sinks.
    fn new(shape: AttentionShape, operands: &AttentionInputs<'_>, dtype: DType, has_wgmma: bool) -> Attempt<Self> {
        require(operands.sinks.is_none() && shape.heads.max(shape.batch) <= MAX_BLOCKS)?;
        let fits = |size: &usize| *size >= shape.head_size;
        let size = SIZES.into_iter().find(fits).ok_or(Stop::Unsupported)?;
        let wide = WGMMA_SIZES.into_iter().find(fits).filter(|_| has_wgmma && dtype != DType::F32 && size > SIZES[0]);
        Ok(Self { shape, dtype, size: wide.unwrap_or(size), by_four_warps: wide.is_some() })
    }

    fn stat_len(self) -> usize {
        self.shape.batch * self.shape.seq_len * self.shape.heads
    }

    fn launch(self, pass: AttentionPass) -> Result<KernelLaunch> {
        let kernel = match pass {
            AttentionPass::Forward => "attention_forward",
            AttentionPass::BackwardKeysAndValues => "attention_backward_kv",
            AttentionPass::BackwardQueries => "attention_backward_q",
        };
        let BlockPlan { module, rows, threads, shared_bytes } = match self.dtype {
            DType::F32 => self.in_fp32(pass),
            _ if self.by_four_warps => self.in_products_of_four_warps(pass),
            _ => self.on_tensor_cores(pass),
        };
        let kernel = if self.by_four_warps { format!("{kernel}_wgmma") } else { kernel.to_owned() };
        let AttentionShape { batch, seq_len, heads, kv_heads, .. } = self.shape;
        // Blocks of keys serve all heads that share them, and a half of a large head each.
        let (heads, parts) = match (pass, self.dtype) {
            (AttentionPass::BackwardKeysAndValues, DType::F32) => (kv_heads, 1),
            (AttentionPass::BackwardKeysAndValues, _) => (kv_heads, self.size.div_ceil(128)),
            _ => (heads, 1),
        };
        let kernel = format!("{}_{}", kernel_symbol(&kernel, &[self.dtype])?, self.size);
        KernelLaunch::new(module, kernel, [seq_len.div_ceil(rows) * parts, heads, batch], [threads, shared_bytes])
    }

    /// Shared memory holds tiles of operands and of scores.
    fn in_fp32(self, pass: AttentionPass) -> BlockPlan {
        let rows = (4096 / self.size.next_power_of_two()).min(64);
        let (tiles, squares) = match pass {
            AttentionPass::Forward => (2, 1),
            AttentionPass::BackwardKeysAndValues => (4, 2),
            AttentionPass::BackwardQueries => (4, 1),
        };
        let floats = tiles * rows * (self.size + 1) + squares * rows * (rows + 1);
        BlockPlan { module: "attention", rows, threads: 256, shared_bytes: floats * size_of::<f32>() }
    }

    /// Shared memory holds the rows of two stages of two tiles, and of the resident tiles if these stay.
    fn on_tensor_cores(self, pass: AttentionPass) -> BlockPlan {
        const ROWS: usize = 64;
        let (tile, at_rest) = match (pass, self.size) {
            (AttentionPass::Forward, 256) => (32, ROWS),
            (AttentionPass::Forward, _) | (_, ..=64) => (ROWS, 0),
            (_, ..=128) => (32, 2 * ROWS),
            _ => (16, 2 * ROWS),
        };
        let shared_bytes = 2 * (4 * tile + at_rest) * (self.size + 8);
        BlockPlan { module: "attention_mma", rows: ROWS, threads: 128, shared_bytes }
    }

    /// Like [`Self::on_tensor_cores`], with two FP32 statistics for each query of two stages.
    fn in_products_of_four_warps(self, pass: AttentionPass) -> BlockPlan {
        const ROWS: usize = 64;
        let at_rest = if matches!(pass, AttentionPass::Forward) || self.size == 64 { 0 } else { 2 * ROWS };
        let shared_bytes = 2 * (4 * ROWS + at_rest) * self.size + 16 * ROWS;
        BlockPlan { module: "attention_wgmma", rows: ROWS, threads: 128, shared_bytes }
    }
}

/// The sizes; `parts` are all queries, keys, values and gradients.
fn shape_args(shape: &AttentionShape, parts: &[ColumnSlice<'_>], bounds: u64) -> Attempt<ShapeArgs> {
    let AttentionShape { batch, seq_len, heads, kv_heads, head_size, scale, softcap, .. } = *shape;
    Ok(ShapeArgs {
        bounds,
        batch: to_u32(batch)?,
        seq_len: to_u32(seq_len)?,
        heads: to_u32(heads)?,
        group: to_u32(heads / kv_heads)?,
        head_size: to_u32(head_size)?,
        whole: parts.iter().all(|part| aligns(*part, head_size)).into(),
        softmax_scale: scale,
        softcap: softcap.unwrap_or(0.0),
    })
}

impl<Q: Queue> CudaKernels<Q> {
    /// The address of [`key_ranges`] on the device, or 0, and their owner.
    fn bounds(
        &self,
        shape: &AttentionShape,
        documents: Option<&[u32]>,
        device: &Device,
    ) -> Attempt<(u64, Option<Tensor>)> {
        if let Some(address) = self.resident_key_ranges(shape, documents) {
            return Ok((address, None));
        }
        let tensor = self.cached_key_ranges(shape, documents, device)?;
        if tensor.is_some() {
            self.refuse_in_capture("numbers of the host")?;
        }
        Ok((self.optional(tensor.as_ref(), DType::U32, 2 * shape.batch * shape.seq_len)?, tensor))
    }

    fn cached_key_ranges(
        &self,
        shape: &AttentionShape,
        documents: Option<&[u32]>,
        device: &Device,
    ) -> Result<Option<Tensor>> {
        let sizes = (shape.batch, shape.seq_len, shape.window);
        let mut last = self.bounded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = last.as_ref().filter(|last| last.sizes == sizes && last.documents.as_deref() == documents) {
            return Ok(Some(last.tensor.clone()));
        }
        let Some(bounds) = key_ranges(shape, documents)? else { return Ok(None) };
        let bounds = Tensor::new(bounds, device)?;
        *last = Some(KeyRangeCache { sizes, documents: documents.map(<[u32]>::to_vec), tensor: bounds.clone() });
        Ok(Some(bounds))
    }

    fn has_wgmma(&self) -> bool {
        self.families.contains(&KernelFamily::AttentionWgmma)
    }

    /// The rows of `N` operands or gradients.
    fn rows<const N: usize>(&self, parts: [ColumnSlice<'_>; N], dtype: DType) -> Attempt<[RowsArg; N]> {
        let mut rows = [RowsArg { first: 0, stride: 0, unused: 0 }; N];
        for (rows, part) in rows.iter_mut().zip(parts) {
            *rows = RowsArg { first: self.columns(part, dtype)?, stride: to_u32(part.stride())?, unused: 0 };
        }
        Ok(rows)
    }

    pub(super) fn attention(&self, op: &op::Attention<'_>) -> Attempt {
        let shape = &op.shape;
        let operands = &op.operands;
        let dtype = op.out.dtype();
        let plan = AttentionLaunch::new(*shape, operands, dtype, self.has_wgmma())?;
        let (bounds, _ranges) = self.bounds(shape, operands.documents, op.out.device())?;
        let (dropout, _draw) = self.dropout(operands.dropout, op.out.device())?;
        let [out] = self.rows([ColumnSlice::all(op.out)?], dtype)?;
        let arguments = AttentionForward {
            qkv: self.rows(operands.qkv, dtype)?,
            out,
            lse: self.address(op.lse, DType::F32, plan.stat_len())?,
            shape: shape_args(shape, &operands.qkv, bounds)?,
            dropout,
        };
        // SAFETY: every buffer was found large enough, and `Op::check` has compared the operands with the shape.
        Ok(unsafe { self.queue.launch(&plan.launch(AttentionPass::Forward)?, &arguments) }?)
    }

    pub(super) fn attention_backward(&self, op: &op::AttentionBackward<'_>) -> Attempt {
        let shape = &op.shape;
        let operands = &op.operands;
        let dtype = op.out.dtype();
        let plan = AttentionLaunch::new(*shape, operands, dtype, self.has_wgmma())?;
        let (bounds, _ranges) = self.bounds(shape, operands.documents, op.out.device())?;
        let (dropout, _draw) = self.dropout(operands.dropout, op.out.device())?;
        let delta = self.queue.scratch(plan.stat_len())?;
        let [dout, out] = self.rows([ColumnSlice::all(op.dout)?, ColumnSlice::all(op.out)?], dtype)?;
        let shape = shape_args(shape, &[operands.qkv, op.gradients].concat(), bounds)?;
        let products = AttentionDelta { dout: dout.first, out: out.first, delta, shape };
        let arguments = AttentionBackward {
            qkv: self.rows(operands.qkv, dtype)?,
            dout,
            out,
            lse: self.address(op.lse, DType::F32, plan.stat_len())?,
            delta,
            gradients: self.rows(op.gradients, dtype)?,
            shape,
            dropout,
        };
        // SAFETY: as above.
        unsafe {
            // On tensor cores the kernel of queries computes these.
            if dtype == DType::F32 {
                let by_rows = KernelLaunch::warp_per_row("attention", "attention_delta".into(), plan.stat_len())?;
                self.queue.launch(&by_rows, &products)?;
            }
            self.queue.launch(&plan.launch(AttentionPass::BackwardQueries)?, &arguments)?;
            self.queue.launch(&plan.launch(AttentionPass::BackwardKeysAndValues)?, &arguments)?;
        }
        Ok(())
    }
}
