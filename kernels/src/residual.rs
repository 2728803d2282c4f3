//! The residual stream: adding a branch to it, and handing its gradient to the branch.

use crate::dropout::Dropout;
use crate::rows::{axpy, write_rows};
use crate::view::read;
use candle_core::{Result, Tensor};

/// `out = stream + dropout(branch)`, all `[N, D]`; the sum is formed in FP32 and rounded to the residual type.
pub fn add(stream: &Tensor, branch: &Tensor, dropout: Option<Dropout>, out: &Tensor) -> Result<()> {
    let (stream, branch) = (read(stream)?, read(branch)?);
    let (stream, branch) = (stream.view(), branch.view());
    write_rows(
        out,
        #[inline(always)]
        |at, total, term| {
            stream.load(at, total);
            branch.load(at, term);
            if let Some(dropout) = dropout {
                dropout.apply(at, term);
            }
            axpy(1.0, term, total);
        },
    )
}

/// `branch = dropout(stream)`: the residual stream's gradient (residual type) as the branch sees it (compute type).
pub fn branch_gradient(stream: &Tensor, dropout: Option<Dropout>, branch: &Tensor) -> Result<()> {
    let stream = read(stream)?;
    let stream = stream.view();
    write_rows(
        branch,
        #[inline(always)]
        |at, row, _| {
            stream.load(at, row);
            if let Some(dropout) = dropout {
                dropout.apply(at, row);
            }
        },
    )
}
