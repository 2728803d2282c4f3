//! The launches of `elementwise.cu`.

use super::dispatch::{Attempt, CudaKernels, Stop, is_pair, require};
use super::launch::{DropoutArgs, KernelLaunch, PACK, Queue, arguments, kernel_symbol, to_u32};
use crate::dropout::Dropout;
use crate::{Activation, op};
use candle_core::{DType, Result, Tensor};

/// Sums that one kernel adds, besides its result: those of 512 micro-batches.
const INNER: usize = 8;

arguments! {
    struct Activate {
        x: u64,
        dy: u64,
        y: u64,
        dx: u64,
        len: u64,
        width: u32,
        activation: u32,
    }

    struct Residual {
        stream: u64,
        branch: u64,
        out: u64,
        len: u64,
        inner: [u64; INNER],
        dropout: DropoutArgs,
    }
}

/// Whether the kernels that look at rows can take rows of this width.
pub(super) fn serves(width: usize) -> bool {
    width > 0 && width.is_multiple_of(PACK)
}

fn launch(kernel: &str, dtypes: &[DType], len: usize) -> Result<KernelLaunch> {
    KernelLaunch::for_packs("elementwise", kernel_symbol(kernel, dtypes)?, len.div_ceil(PACK))
}

impl<Q: Queue> CudaKernels<Q> {
    pub(super) fn activate(&self, op: &op::Activate<'_>) -> Attempt {
        self.activation("activate", op.activation, [op.x, op.y], [None; 2])
    }

    pub(super) fn activate_backward(&self, op: &op::ActivateBackward<'_>) -> Attempt {
        self.activation("activate_backward", op.activation, [op.x, op.y], [Some(op.dy), Some(op.dx)])
    }

    fn activation(
        &self,
        kernel: &str,
        activation: Activation,
        [x, y]: [&Tensor; 2],
        [dy, dx]: [Option<&Tensor>; 2],
    ) -> Attempt {
        let dtype = y.dtype();
        let len = y.elem_count();
        let width = y.dim(1)?;
        let len_of_x = if activation.is_gated() { 2 * len } else { len };
        require(serves(width))?;
        let arguments = Activate {
            x: self.address(x, dtype, len_of_x)?,
            dy: self.optional(dy, dtype, len)?,
            y: self.address(y, dtype, len)?,
            dx: self.optional(dx, dtype, len_of_x)?,
            len: len as u64,
            width: to_u32(width)?,
            activation: match activation {
                Activation::Gelu => 0,
                Activation::SwiGlu => 1,
                Activation::GeGlu => 2,
                Activation::ClampedSwiGlu => return Err(Stop::Unsupported),
            },
        };
        // SAFETY: every buffer was found large enough.
        Ok(unsafe { self.queue.launch(&launch(kernel, &[dtype], len)?, &arguments) }?)
    }

    pub(super) fn residual_add(&self, op: &op::AddBranch<'_>) -> Attempt {
        self.residual("residual_add", op.branch, [Some(op.stream), Some(op.out)], &[], op.dropout)
    }

    pub(super) fn copy(&self, op: &op::Copy<'_>) -> Attempt {
        if is_pair([op.x.dtype(), op.out.dtype()]) {
            return self.residual("residual_backward", op.out, [Some(op.x), None], &[], op.dropout);
        }
        self.residual("residual_add", op.x, [None, Some(op.out)], &[], op.dropout)
    }

    pub(super) fn accumulate(&self, op: &op::Accumulate<'_>) -> Attempt {
        self.residual("residual_add", op.x, [Some(op.out); 2], op.inner, None)
    }

    /// `out = stream + (dropout(branch) + inner[0] + …)`, or without `out`, `branch = dropout(stream)`.
    fn residual(
        &self,
        kernel: &str,
        branch: &Tensor,
        [stream, out]: [Option<&Tensor>; 2],
        inner: &[&Tensor],
        dropout: Option<Dropout>,
    ) -> Attempt {
        let wide = stream.or(out).unwrap_or(branch).dtype();
        let len = branch.elem_count();
        let types = [wide, branch.dtype()];
        require(is_pair(types) && inner.len() <= INNER)?;
        let (dropout, _owner) = self.dropout(dropout, branch.device())?;
        let mut sums = [0; INNER];
        for (address, sum) in sums.iter_mut().zip(inner) {
            *address = self.address(sum, DType::F32, len)?;
        }
        let arguments = Residual {
            stream: self.optional(stream, wide, len)?,
            branch: self.address(branch, branch.dtype(), len)?,
            out: self.optional(out, wide, len)?,
            len: len as u64,
            inner: sums,
            dropout,
        };
        // SAFETY: every buffer was found large enough.
        Ok(unsafe { self.queue.launch(&launch(kernel, &types, len)?, &arguments) }?)
    }
}
