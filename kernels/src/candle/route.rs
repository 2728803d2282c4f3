//! The router of a mixture of experts. The host chooses the experts.

use super::tensors::{rows_at, store, upcast};
use crate::route::{Route, RouteBackward, RouterSettings, ScaleRows};
use crate::view;
use candle_core::{D, DType, Result, Tensor};

fn softmax(x: &Tensor) -> Result<Tensor> {
    let powers = x.broadcast_sub(&x.max_keepdim(D::Minus1)?)?.exp()?;
    powers.broadcast_div(&powers.sum_keepdim(D::Minus1)?)
}

pub(super) fn forward(op: &mut Route<'_>) -> Result<()> {
    let (tokens, experts) = op.logits.dims2()?;
    let RouterSettings { top_k, normalized } = op.settings;
    let host: Vec<f32> = view::to_host(op.logits)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
    op.routes.choose(&host, experts, top_k);
    // By row: the place of its logit.
    let mut places = vec![0; tokens * top_k];
    let mut pairs = places.clone();
    for (pair, (expert, row)) in op.routes.experts.iter().zip(&op.routes.rows).enumerate() {
        places[pair] = (pair / top_k * experts) as u32 + expert;
        pairs[*row as usize] = pair as u32;
    }
    let logits = upcast(op.logits)?;
    let weights = if normalized {
        softmax(&rows_at(&logits.flatten_all()?, &places)?.reshape((tokens, top_k))?)?.flatten_all()?
    } else {
        rows_at(&softmax(&logits)?.flatten_all()?, &places)?
    };
    store(&rows_at(&weights, &pairs)?, op.weights)
}

pub(super) fn backward(op: &RouteBackward<'_>) -> Result<()> {
    let (tokens, experts) = op.logits.dims2()?;
    let RouterSettings { top_k, normalized } = op.settings;
    let by_token = |rows: &Tensor| rows_at(rows, &op.routes.rows)?.reshape((tokens, top_k));
    let shares = by_token(&(upcast(op.x)? * upcast(op.dx)?)?.sum(1)?)?;
    let total = shares.sum_keepdim(1)?;
    // An expert that was not chosen takes the zero after all shares.
    let mut source = vec![(tokens * top_k) as u32; tokens * experts];
    for (pair, expert) in op.routes.experts.iter().enumerate() {
        source[pair / top_k * experts + *expert as usize] = pair as u32;
    }
    let spread = |x: &Tensor| {
        let zero = Tensor::zeros(1, x.dtype(), x.device())?;
        rows_at(&Tensor::cat(&[&x.flatten_all()?, &zero], 0)?, &source)?.reshape((tokens, experts))
    };
    let gradient = if normalized {
        spread(&(shares - by_token(&upcast(op.weights)?)?.broadcast_mul(&total)?)?)?
    } else {
        (spread(&shares)? - softmax(&upcast(op.logits)?)?.broadcast_mul(&total)?)?
    };
    store(&gradient, op.dlogits)
}

pub(super) fn scale_rows(op: &ScaleRows<'_>) -> Result<()> {
    store(&upcast(op.x)?.broadcast_mul(&upcast(op.weights)?.unsqueeze(1)?)?, op.x)
}
