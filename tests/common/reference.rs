//! Layers in plain differentiable candle operations: simple and slow.
//!
//! Nothing here is fused, because candle's fused layer norm and softmax cut the autograd graph without a word.

use candle_core::{D, DType, Device, Result, Tensor};

/// A target that contributes neither to the loss nor to the count it is divided by.
pub(crate) const IGNORED: i64 = -100;

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
    /// Attention of queries `[B,T,H·head_size]`, keys and values `[B,T,kv_heads·head_size]`, with a sink for each head.
    pub(crate) fn attend(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        sinks: Option<&Tensor>,
    ) -> Result<Tensor> {
        let (batch, seq, _) = query.dims3()?;
        let by_head =
            |x: &Tensor, heads: usize| x.reshape((batch, seq, heads, self.head_size))?.transpose(1, 2)?.contiguous();
        // Each head of keys is repeated for the heads of queries that share it.
        let index: Vec<u32> = (0..self.heads).map(|head| (head / (self.heads / self.kv_heads)) as u32).collect();
        let index = Tensor::new(index, &Device::Cpu)?;
        let query = by_head(query, self.heads)?;
        let key = by_head(key, self.kv_heads)?.index_select(&index, 1)?;
        let value = by_head(value, self.kv_heads)?.index_select(&index, 1)?;
        let scores = soft_cap((query.matmul(&key.t()?.contiguous()?)? * self.scale)?, self.softcap)?;
        let visible = |b: usize, i: usize, j: usize| {
            let start = self.documents.as_ref().map_or(0, |starts| starts[b * seq + i] as usize);
            j <= i && j >= start && self.window.is_none_or(|window| i - j < window)
        };
        let mask: Vec<f64> = (0..batch * seq * seq)
            .map(|at| if visible(at / seq / seq, at / seq % seq, at % seq) { 0.0 } else { f64::NEG_INFINITY })
            .collect();
        let mask = Tensor::from_vec(mask, (batch, 1, seq, seq), &Device::Cpu)?.to_dtype(query.dtype())?;
        let mut scores = scores.broadcast_add(&mask)?;
        if let Some(sinks) = sinks {
            let sinks = sinks.reshape((1, self.heads, 1, 1))?.broadcast_as((batch, self.heads, seq, 1))?;
            scores = Tensor::cat(&[scores, sinks.contiguous()?], 3)?;
        }
        let mixed = softmax(&scores)?.narrow(3, 0, seq)?.contiguous()?.matmul(&value)?;
        mixed.transpose(1, 2)?.contiguous()?.reshape((batch, seq, self.heads * self.head_size))
    }
}

pub(crate) fn soft_cap(x: Tensor, cap: Option<f64>) -> Result<Tensor> {
    match cap {
        Some(cap) => (x / cap)?.tanh()? * cap,
        None => Ok(x),
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
    let low = heads.narrow(2, 0, half)?;
    let high = heads.narrow(2, half, half)?;
    let turned_low = (low.broadcast_mul(&cos)? - high.broadcast_mul(&sin)?)?;
    let turned_high = (high.broadcast_mul(&cos)? + low.broadcast_mul(&sin)?)?;
    Tensor::cat(&[turned_low, turned_high], 2)?.reshape(x.shape())
}

/// `(up + 1) · gate · σ(1.702 · gate)` of pairs of gate and up in the last dimension, the gate up to 7 and up within
/// ±7.
pub(crate) fn clamped_swiglu(x: &Tensor) -> Result<Tensor> {
    let pairs = x.reshape((x.dim(0)?, (), 2))?;
    let [gate, up] = [0, 1].map(|i| pairs.narrow(2, i, 1)?.squeeze(2)?.minimum(7.0));
    let slope = f64::from(1.702_f32);
    let up = (up?.maximum(-7.0)? + 1.0)?;
    (silu(&(gate? * slope)?)? / slope)? * up
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

/// Layer norm over the last dimension, with the biased variance.
pub(crate) fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, epsilon: f64) -> Result<Tensor> {
    let centered = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
    let deviation = (centered.sqr()?.mean_keepdim(D::Minus1)? + epsilon)?.sqrt()?;
    centered.broadcast_div(&deviation)?.broadcast_mul(weight)?.broadcast_add(bias)
}

/// GELU in its tanh form.
pub(crate) fn gelu(x: &Tensor) -> Result<Tensor> {
    let cubic = (x + (x.sqr()? * x)?.affine(0.044_715, 0.0)?)?;
    let tanh = cubic.affine((2.0 / std::f64::consts::PI).sqrt(), 0.0)?.tanh()?;
    (x * (tanh + 1.0)?)?.affine(0.5, 0.0)
}

/// Softmax over the last dimension. The row's maximum is a constant to autograd: it cancels in the quotient.
pub(crate) fn softmax(x: &Tensor) -> Result<Tensor> {
    let exponential = x.broadcast_sub(&x.detach().max_keepdim(D::Minus1)?)?.exp()?;
    exponential.broadcast_div(&exponential.sum_keepdim(D::Minus1)?)
}

/// Mean cross-entropy of logits `[B,T,V]` against targets `[B,T]`, over the targets that are not [`IGNORED`].
pub(crate) fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let logits = logits.flatten(0, 1)?;
    let targets = targets.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
    let counts: Vec<f64> = targets.iter().map(|&target| f64::from(u8::from(target != IGNORED))).collect();
    let count = counts.iter().sum::<f64>();
    let counts = Tensor::new(counts, &Device::Cpu)?.to_dtype(logits.dtype())?;
    let index: Vec<i64> = targets.iter().map(|&target| target.max(0)).collect();
    let index = Tensor::new(index, &Device::Cpu)?.unsqueeze(1)?;
    let shifted = logits.broadcast_sub(&logits.detach().max_keepdim(D::Minus1)?)?;
    let log_sum = shifted.exp()?.sum_keepdim(D::Minus1)?.log()?;
    let losses = (log_sum - shifted.gather(&index, D::Minus1)?)?.squeeze(1)?;
    (losses * counts)?.sum_all()? / count
}
