//! The layers of Llama-like models in plain differentiable candle operations: simple and slow.

use super::reference_model::softmax;
use candle_core::{D, Device, Result, Tensor};

/// Which keys a query attends to, and how.
#[derive(Clone, Debug, Default)]
pub(crate) struct Attention {
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_size: usize,
    pub(crate) scale: f64,
    pub(crate) window: Option<usize>,
    pub(crate) softcap: Option<f64>,
    /// The start of each row's document, in its sequence.
    pub(crate) documents: Option<Vec<u32>>,
}

impl Attention {
    /// Attention of queries `[B,T,H·head_size]`, keys and values `[B,T,kv_heads·head_size]`.
    pub(crate) fn attend(&self, query: &Tensor, key: &Tensor, value: &Tensor) -> Result<Tensor> {
        let (batch, seq, _) = query.dims3()?;
        let by_head =
            |x: &Tensor, heads: usize| x.reshape((batch, seq, heads, self.head_size))?.transpose(1, 2)?.contiguous();
        // Each head of keys is repeated for the heads of queries that share it.
        let index: Vec<u32> = (0..self.heads).map(|head| (head / (self.heads / self.kv_heads)) as u32).collect();
        let index = Tensor::new(index, &Device::Cpu)?;
        let query = by_head(query, self.heads)?;
        let key = by_head(key, self.kv_heads)?.index_select(&index, 1)?;
        let value = by_head(value, self.kv_heads)?.index_select(&index, 1)?;
        let mut scores = (query.matmul(&key.t()?.contiguous()?)? * self.scale)?;
        if let Some(cap) = self.softcap {
            scores = ((scores / cap)?.tanh()? * cap)?;
        }
        let visible = |b: usize, i: usize, j: usize| {
            let start = self.documents.as_ref().map_or(0, |starts| starts[b * seq + i] as usize);
            j <= i && j >= start && self.window.is_none_or(|window| i - j < window)
        };
        let mask: Vec<f64> = (0..batch * seq * seq)
            .map(|at| if visible(at / seq / seq, at / seq % seq, at % seq) { 0.0 } else { f64::NEG_INFINITY })
            .collect();
        let mask = Tensor::from_vec(mask, (batch, 1, seq, seq), &Device::Cpu)?.to_dtype(query.dtype())?;
        let mixed = softmax(&scores.broadcast_add(&mask)?)?.matmul(&value)?;
        mixed.transpose(1, 2)?.contiguous()?.reshape((batch, seq, self.heads * self.head_size))
    }
}

/// RMS norm over the last dimension, in groups of the weight's width.
pub(crate) fn rms_norm(x: &Tensor, weight: &Tensor, offset: f64, epsilon: f64) -> Result<Tensor> {
    let width = weight.dim(0)?;
    let grouped = x.reshape(((), width))?;
    let deviation = (grouped.sqr()?.mean_keepdim(D::Minus1)? + epsilon)?.sqrt()?;
    grouped.broadcast_div(&deviation)?.broadcast_mul(&(weight + offset)?)?.reshape(x.shape())
}

/// `x [N, heads·size]` rotated: `cos` and `sin` hold a row for each row of `x`, of half a head's width.
pub(crate) fn rotate(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let (rows, half) = cos.dims2()?;
    let shape = (rows, 1, half);
    let (cos, sin) = (cos.to_dtype(x.dtype())?.reshape(shape)?, sin.to_dtype(x.dtype())?.reshape(shape)?);
    let heads = x.reshape((rows, (), 2 * half))?;
    let (low, high) = (heads.narrow(2, 0, half)?, heads.narrow(2, half, half)?);
    let turned_low = (low.broadcast_mul(&cos)? - high.broadcast_mul(&sin)?)?;
    let turned_high = (high.broadcast_mul(&cos)? + low.broadcast_mul(&sin)?)?;
    Tensor::cat(&[turned_low, turned_high], 2)?.reshape(x.shape())
}

/// x / (1 + exp(-x)).
pub(crate) fn silu(x: &Tensor) -> Result<Tensor> {
    x / (x.neg()?.exp()? + 1.0)?
}

/// `x · weightᵀ` for a weight of shape `[out, in]`, and a bias.
pub(crate) fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let y = x.matmul(&weight.t()?)?;
    match bias {
        Some(bias) => y.broadcast_add(bias),
        None => Ok(y),
    }
}

/// Rows of the table, times `scale`.
pub(crate) fn embed(tokens: &[u32], table: &Tensor, scale: f64) -> Result<Tensor> {
    let tokens = Tensor::new(tokens, &Device::Cpu)?;
    table.index_select(&tokens, 0)?.affine(scale, 0.0)
}
