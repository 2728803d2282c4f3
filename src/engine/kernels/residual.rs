//! The residual stream: adding a branch to it, and handing its gradient to the branch.

use crate::engine::kernels::dropout::Dropout;
use crate::engine::kernels::rows::{Rows, WORK, for_each_part, with_scratch};
use crate::engine::kernels::view::{read, write};
use candle_core::{Result, Tensor};

/// `out = stream + dropout(branch)`, all `[N, D]`; the sum is formed in FP32 and rounded to the residual type.
pub fn add(stream: &Tensor, branch: &Tensor, dropout: Option<Dropout>, out: &Tensor) -> Result<()> {
    let (rows, width) = out.dims2()?;
    let (stream, branch) = (read(stream)?, read(branch)?);
    let (stream, branch) = (stream.view(), branch.view());
    write(out, |out| {
        for_each_part(
            Rows { view: out, width },
            rows,
            WORK / width + 1,
            #[inline(always)]
            |first, rows, mut out| {
                with_scratch(
                    2 * width,
                    #[inline(always)]
                    |scratch| {
                        let (total, term) = scratch.split_at_mut(width);
                        for i in 0..rows {
                            let at = (first + i) * width;
                            stream.load(at, total);
                            branch.load(at, term);
                            if let Some(dropout) = dropout {
                                dropout.apply(at, term);
                            }
                            for (total, term) in total.iter_mut().zip(term.iter()) {
                                *total += term;
                            }
                            out.view.store(i * width, total);
                        }
                    },
                );
            },
        );
    })
}

/// `branch = dropout(stream)`: the residual stream's gradient (residual type) as the branch sees it (compute type).
pub fn branch_gradient(stream: &Tensor, dropout: Option<Dropout>, branch: &Tensor) -> Result<()> {
    let (rows, width) = stream.dims2()?;
    let stream = read(stream)?;
    let stream = stream.view();
    write(branch, |branch| {
        for_each_part(
            Rows { view: branch, width },
            rows,
            WORK / width + 1,
            #[inline(always)]
            |first, rows, mut branch| {
                with_scratch(
                    width,
                    #[inline(always)]
                    |row| {
                        for i in 0..rows {
                            let at = (first + i) * width;
                            stream.load(at, row);
                            if let Some(dropout) = dropout {
                                dropout.apply(at, row);
                            }
                            branch.view.store(i * width, row);
                        }
                    },
                );
            },
        );
    })
}
