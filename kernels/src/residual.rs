//! The residual stream: adds a branch to it, and passes its gradient to the branch.

use crate::op;
use crate::rows::{axpy, write_rows};
use crate::view::{BLOCK, map_blocks, read};
use candle_core::Result;

/// Computes [`op::AddBranch`].
pub fn add(op: &op::AddBranch<'_>) -> Result<()> {
    let (stream, branch) = (read(op.stream)?, read(op.branch)?);
    let (stream, branch) = (stream.view(), branch.view());
    write_rows(
        op.out,
        #[inline(always)]
        |at, total, term| {
            stream.load(at, total);
            branch.load(at, term);
            if let Some(dropout) = op.dropout {
                dropout.apply(at, term);
            }
            axpy(1.0, term, total);
        },
    )
}

/// Computes [`op::Copy`].
pub fn copy(op: &op::Copy<'_>) -> Result<()> {
    map_blocks(
        op.x,
        op.out,
        16 * BLOCK,
        #[inline(always)]
        |first, values, _| {
            if let Some(dropout) = op.dropout {
                dropout.apply(first, values);
            }
        },
    )
}
