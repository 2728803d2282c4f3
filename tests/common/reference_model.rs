//! A slow GPT-2 of plain differentiable candle operations, the reference for the engine's forward and backward passes.
//!
//! Nothing here is fused, because candle's fused layer norm and softmax cut the autograd graph without a word. It runs in
//! FP32 to compare with, and in FP64 for finite differences. `tests/engine/oracle.rs` checks it against PyTorch.

use std::collections::{BTreeMap, HashMap};

use candle_core::{D, DType, Device, Result, Tensor, Var};

/// A target that contributes neither to the loss nor to the count it is divided by.
pub(crate) const IGNORED: i64 = -100;

/// The settings that the parameters' shapes do not determine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) layers: usize,
    pub(crate) heads: usize,
    pub(crate) epsilon: f64,
}

/// A model: parameters by name (`wte.weight`, `h.0.ln_1.weight`, …; `lm_head.weight` only if the head is separate).
pub(crate) struct ReferenceModel {
    shape: Shape,
    parameters: BTreeMap<String, Var>,
}

impl ReferenceModel {
    /// A model that computes in `dtype` from a copy of `parameters`.
    pub(crate) fn new(shape: Shape, parameters: &HashMap<String, Tensor>, dtype: DType) -> Result<Self> {
        let variable = |(name, tensor): (&String, &Tensor)| {
            // `copy`, because a variable made of a tensor of the same type would share its storage.
            Ok((name.clone(), Var::from_tensor(&tensor.to_dtype(dtype)?.copy()?)?))
        };
        Ok(Self { shape, parameters: parameters.iter().map(variable).collect::<Result<_>>()? })
    }

    /// The parameters, ordered by name.
    pub(crate) fn parameters(&self) -> &BTreeMap<String, Var> {
        &self.parameters
    }

    fn parameter(&self, name: &str) -> &Tensor {
        self.parameters.get(name).unwrap_or_else(|| panic!("the oracle has no parameter `{name}`")).as_tensor()
    }

    fn norm(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let [weight, bias] = ["weight", "bias"].map(|part| self.parameter(&format!("{name}.{part}")));
        layer_norm(x, weight, bias, self.shape.epsilon)
    }

    fn linear(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let [weight, bias] = ["weight", "bias"].map(|part| self.parameter(&format!("{name}.{part}")));
        linear(x, weight, bias)
    }

    /// Logits `[B,T,V]` of tokens `[B,T]`.
    pub(crate) fn logits(&self, tokens: &Tensor) -> Result<Tensor> {
        let mut x = embed(tokens, self.parameter("wte.weight"), self.parameter("wpe.weight"))?;
        for layer in 0..self.shape.layers {
            let qkv = self.linear(&self.norm(&x, &format!("h.{layer}.ln_1"))?, &format!("h.{layer}.attn.c_attn"))?;
            x = (x + self.linear(&attention(&qkv, self.shape.heads)?, &format!("h.{layer}.attn.c_proj"))?)?;
            let up = self.linear(&self.norm(&x, &format!("h.{layer}.ln_2"))?, &format!("h.{layer}.mlp.c_fc"))?;
            x = (x + self.linear(&gelu(&up)?, &format!("h.{layer}.mlp.c_proj"))?)?;
        }
        let tied = !self.parameters.contains_key("lm_head.weight");
        let head = self.parameter(if tied { "wte.weight" } else { "lm_head.weight" });
        project(&self.norm(&x, "ln_f")?, &head.t()?)
    }

    /// Mean cross-entropy, a scalar, of targets `[B,T]` that may be [`IGNORED`].
    pub(crate) fn loss(&self, tokens: &Tensor, targets: &Tensor) -> Result<Tensor> {
        cross_entropy(&self.logits(tokens)?, targets)
    }

    /// The gradient of [`ReferenceModel::loss`] for every parameter. Panics if one receives none: autograd lost it.
    pub(crate) fn gradients(&self, tokens: &Tensor, targets: &Tensor) -> Result<BTreeMap<String, Tensor>> {
        let mut store = self.loss(tokens, targets)?.backward()?;
        let gradient = |(name, variable): (&String, &Var)| {
            let gradient = store.remove(variable).unwrap_or_else(|| panic!("`{name}` received no gradient"));
            (name.clone(), gradient)
        };
        Ok(self.parameters.iter().map(gradient).collect())
    }
}

/// Token and position embeddings `[B,T,D]` of tokens `[B,T]`.
pub(crate) fn embed(tokens: &Tensor, tokens_table: &Tensor, positions_table: &Tensor) -> Result<Tensor> {
    let (batch, seq) = tokens.dims2()?;
    let width = tokens_table.dim(1)?;
    let token = tokens_table.index_select(&tokens.flatten_all()?, 0)?.reshape((batch, seq, width))?;
    token.broadcast_add(&positions_table.narrow(0, 0, seq)?)
}

/// Layer norm over the last dimension, with the biased variance.
pub(crate) fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, epsilon: f64) -> Result<Tensor> {
    let centred = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
    let deviation = (centred.sqr()?.mean_keepdim(D::Minus1)? + epsilon)?.sqrt()?;
    centred.broadcast_div(&deviation)?.broadcast_mul(weight)?.broadcast_add(bias)
}

/// `x · weight` over the last dimension, for a weight of shape `[in, out]`.
pub(crate) fn project(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let (mut shape, width) = (x.dims().to_vec(), x.dim(D::Minus1)?);
    *shape.last_mut().expect("a tensor of at least one dimension") = weight.dim(1)?;
    x.reshape(((), width))?.matmul(weight)?.reshape(shape)
}

/// [`project`] and a bias, as GPT-2's `Conv1D`.
pub(crate) fn linear(x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    project(x, weight)?.broadcast_add(bias)
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

/// Causal self-attention of packed queries, keys and values `[B,T,3D]`; the result is `[B,T,D]`.
pub(crate) fn attention(qkv: &Tensor, heads: usize) -> Result<Tensor> {
    let (batch, seq, packed) = qkv.dims3()?;
    let width = packed / 3;
    let part = |index| {
        let part = qkv.narrow(2, index * width, width)?.reshape((batch, seq, heads, width / heads))?;
        part.transpose(1, 2)?.contiguous()
    };
    let (query, key, value) = (part(0)?, part(1)?, part(2)?);
    let scores = (query.matmul(&key.t()?.contiguous()?)? / ((width / heads) as f64).sqrt())?;
    let future = |row: usize, column: usize| if column > row { f64::NEG_INFINITY } else { 0.0 };
    let mask: Vec<f64> = (0..seq * seq).map(|at| future(at / seq, at % seq)).collect();
    let mask = Tensor::from_vec(mask, (seq, seq), &Device::Cpu)?.to_dtype(qkv.dtype())?;
    let mixed = softmax(&scores.broadcast_add(&mask)?)?.matmul(&value)?;
    mixed.transpose(1, 2)?.contiguous()?.reshape((batch, seq, width))
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
