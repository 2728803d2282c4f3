//! The layers GPT-2 is made of. A layer knows which parameters are its own; its `forward` writes what its `backward`
//! needs into buffers that the caller keeps, and its `backward` writes its parameters' gradients.

use crate::engine::kernels::view::Allocate;
use crate::engine::kernels::{layer_norm, linear};
use crate::engine::model::parameters::Parameters;
use crate::engine::model::watch::{Layer, Part, Watch};
use candle_core::{DType, Result, Tensor, bail};

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
    layer: Layer,
    pub(crate) weight: usize,
    pub(crate) bias: usize,
    pub(crate) eps: f32,
}

/// A layer norm's output and the statistics its backward pass needs.
#[derive(Debug)]
pub(crate) struct Normed<T = Tensor> {
    /// `[N, D]`, compute type.
    pub(crate) out: T,
    pub(crate) mean: T,
    pub(crate) rstd: T,
}

impl<T> Normed<T> {
    /// Buffers for `tokens` rows of `width`.
    pub(crate) fn lay_out(tokens: usize, width: usize, compute: DType, allocate: Allocate<'_, T>) -> Result<Self> {
        Ok(Self {
            out: allocate(&[tokens, width], compute)?,
            mean: allocate(&[tokens], DType::F32)?,
            rstd: allocate(&[tokens], DType::F32)?,
        })
    }
}

impl LayerNorm {
    /// The layer norm whose parameters are `<layer>.weight` and `<layer>.bias`.
    pub(crate) fn new(parameters: &Parameters, layer: Layer, eps: f64) -> Result<Self> {
        let weight = position(parameters, &format!("{layer}.weight"))?;
        Ok(Self { layer, weight, bias: position(parameters, &format!("{layer}.bias"))?, eps: eps as f32 })
    }

    /// Normalises the rows of `x [N, D]` into `normed`.
    pub(crate) fn forward(
        &self,
        weights: &Parameters,
        x: &Tensor,
        normed: &Normed,
        watch: &mut impl Watch,
    ) -> Result<()> {
        let (weight, bias) = (&weights[self.weight], &weights[self.bias]);
        layer_norm::forward(x, weight, bias, self.eps, &normed.out, &normed.mean, &normed.rstd)?;
        watch.saw_part(self.layer, Part::Output, &normed.out)
    }

    /// Adds to `dx` the gradient with respect to `x`, given that of the output, `dy`.
    #[expect(clippy::too_many_arguments, reason = "the operands of the derivative, and who watches")]
    pub(crate) fn backward(
        &self,
        weights: &Parameters,
        x: &Tensor,
        normed: &Normed,
        dy: &Tensor,
        dx: &Tensor,
        grads: &Parameters,
        watch: &mut impl Watch,
    ) -> Result<()> {
        let (dweight, dbias) = (&grads[self.weight], &grads[self.bias]);
        layer_norm::backward(dy, x, &weights[self.weight], &normed.mean, &normed.rstd, dx, dweight, dbias)?;
        watch.saw_part(self.layer, Part::WeightGradient, dweight)?;
        watch.saw_part(self.layer, Part::BiasGradient, dbias)?;
        watch.saw_part(self.layer, Part::InputGradient, dx)
    }
}

/// A fully connected layer with `Conv1D` weights `[in, out]` and a bias.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Linear {
    layer: Layer,
    pub(crate) weight: usize,
    pub(crate) bias: usize,
}

impl Linear {
    /// The layer whose parameters are `<layer>.weight` and `<layer>.bias`.
    pub(crate) fn new(parameters: &Parameters, layer: Layer) -> Result<Self> {
        let weight = position(parameters, &format!("{layer}.weight"))?;
        Ok(Self { layer, weight, bias: position(parameters, &format!("{layer}.bias"))? })
    }

    /// The index of its weight among the parameters.
    pub(crate) const fn weight(&self) -> usize {
        self.weight
    }

    /// Its name.
    pub(crate) const fn layer(&self) -> Layer {
        self.layer
    }

    /// `y = x · weight + bias`.
    pub(crate) fn forward(&self, weights: &Parameters, x: &Tensor, y: &Tensor, watch: &mut impl Watch) -> Result<()> {
        linear::forward(x, &weights[self.weight], &weights[self.bias], y)?;
        watch.saw_part(self.layer, Part::Output, y)
    }

    /// Writes the gradients of weight, bias and `x`, given that of the output, `dy`.
    pub(crate) fn backward(
        &self,
        weights: &Parameters,
        x: &Tensor,
        dy: &Tensor,
        dx: &Tensor,
        grads: &Parameters,
        watch: &mut impl Watch,
    ) -> Result<()> {
        let (dweight, dbias) = (&grads[self.weight], &grads[self.bias]);
        linear::backward_weight(x, dy, dweight, dbias)?;
        watch.saw_part(self.layer, Part::WeightGradient, dweight)?;
        watch.saw_part(self.layer, Part::BiasGradient, dbias)?;
        linear::backward_input(dy, &weights[self.weight], dx)?;
        watch.saw_part(self.layer, Part::InputGradient, dx)
    }
}
