//! The layers GPT-2 is made of. A layer knows which parameters are its own; its `forward` writes what its `backward`
//! needs into buffers that the caller keeps, and its `backward` writes its parameters' gradients.

use crate::kernels::{layer_norm, linear, view};
use crate::model::parameters::Parameters;
use candle_core::{DType, Device, Result, Tensor, bail};

/// The index of `name` among the parameters.
pub(crate) fn position(parameters: &Parameters, name: &str) -> Result<usize> {
    match parameters.position(name) {
        Some(index) => Ok(index),
        None => bail!("the model has no parameter `{name}`"),
    }
}

/// Layer normalisation with weight and bias.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LayerNorm {
    weight: usize,
    bias: usize,
    eps: f32,
}

/// A layer norm's output and the statistics its backward pass needs.
#[derive(Debug)]
pub(crate) struct Normed {
    /// `[N, D]`, compute type.
    pub(crate) out: Tensor,
    mean: Tensor,
    rstd: Tensor,
}

impl Normed {
    /// Buffers for `tokens` rows of `width`.
    pub(crate) fn new(tokens: usize, width: usize, compute: DType, device: &Device) -> Result<Self> {
        Ok(Self {
            out: view::zeros(&[tokens, width], compute, device)?,
            mean: view::zeros(&[tokens], DType::F32, device)?,
            rstd: view::zeros(&[tokens], DType::F32, device)?,
        })
    }
}

impl LayerNorm {
    /// The layer norm whose parameters are `<name>.weight` and `<name>.bias`.
    pub(crate) fn new(parameters: &Parameters, name: &str, eps: f64) -> Result<Self> {
        let weight = position(parameters, &format!("{name}.weight"))?;
        Ok(Self { weight, bias: position(parameters, &format!("{name}.bias"))?, eps: eps as f32 })
    }

    /// Normalises the rows of `x [N, D]` into `normed`.
    pub(crate) fn forward(&self, weights: &Parameters, x: &Tensor, normed: &Normed) -> Result<()> {
        let (weight, bias) = (&weights[self.weight], &weights[self.bias]);
        layer_norm::forward(x, weight, bias, self.eps, &normed.out, &normed.mean, &normed.rstd)
    }

    /// Adds to `dx` the gradient with respect to `x`, given that of the output, `dy`.
    pub(crate) fn backward(
        &self,
        weights: &Parameters,
        x: &Tensor,
        normed: &Normed,
        dy: &Tensor,
        dx: &Tensor,
        grads: &Parameters,
    ) -> Result<()> {
        let (dweight, dbias) = (&grads[self.weight], &grads[self.bias]);
        layer_norm::backward(dy, x, &weights[self.weight], &normed.mean, &normed.rstd, dx, dweight, dbias)
    }
}

/// A fully connected layer with `Conv1D` weights `[in, out]` and a bias.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Linear {
    weight: usize,
    bias: usize,
}

impl Linear {
    /// The layer whose parameters are `<name>.weight` and `<name>.bias`.
    pub(crate) fn new(parameters: &Parameters, name: &str) -> Result<Self> {
        let weight = position(parameters, &format!("{name}.weight"))?;
        Ok(Self { weight, bias: position(parameters, &format!("{name}.bias"))? })
    }

    /// `y = x · weight + bias`.
    pub(crate) fn forward(&self, weights: &Parameters, x: &Tensor, y: &Tensor) -> Result<()> {
        linear::forward(x, &weights[self.weight], &weights[self.bias], y)
    }

    /// Writes the gradients of weight, bias and `x`, given that of the output, `dy`.
    pub(crate) fn backward(
        &self,
        weights: &Parameters,
        x: &Tensor,
        dy: &Tensor,
        dx: &Tensor,
        grads: &Parameters,
    ) -> Result<()> {
        linear::backward_weight(x, dy, &grads[self.weight], &grads[self.bias])?;
        linear::backward_input(dy, &weights[self.weight], dx)
    }
}
