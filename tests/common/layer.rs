//! One layer's forward and backward pass, by every set of kernels, against candle's autograd on plain operations, and against
//! finite differences.
//!
//! A layer is compared three ways on the same inputs: with the plain operation's value, with its gradients by autograd
//! in FP32, and with central differences of it in FP64. In FP16 and BF16 it is compared with the plain operation in
//! FP32 on the same rounded inputs: the remaining difference is the rounding of the values that the layer stores.

use super::compare::{relative, values};
use candle_core::{DType, Device, Result, Tensor, Var};
use finetune::engine::kernels::view::zeros;
use finetune::engine::kernels::{CandleKernels, Fused, Kernels};

/// Every set of kernels that computes on a CPU.
pub(crate) const KERNELS: [&dyn Kernels; 2] = [&Fused, &CandleKernels];

/// A layer's forward value, and its inputs' gradients in the order of the inputs.
pub(crate) type Outcome = (Tensor, Vec<Tensor>);

/// The engine's layer as a function of the kernels, its inputs and the gradient of its output.
type EngineLayer<'a> = dyn Fn(&dyn Kernels, &[Tensor], &Tensor) -> Result<Outcome> + 'a;

/// One layer at one shape.
pub(crate) struct Layer<'a> {
    pub(crate) name: &'a str,
    pub(crate) inputs: Vec<Tensor>,
    /// The layer in plain differentiable operations.
    pub(crate) plain: &'a dyn Fn(&[Tensor]) -> Result<Tensor>,
    pub(crate) engine: &'a EngineLayer<'a>,
}

/// How far stored results may be from exact ones, relatively: rounding each value once gives 2e-4 in FP16 and 1.7e-3 in
/// BF16; the head rounds its logits' gradient as well.
pub(crate) fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 1e-6,
        DType::F16 => 6e-4,
        _ => 5e-3,
    }
}

impl Layer<'_> {
    /// Runs all comparisons, in all types the engine stores.
    pub(crate) fn check(self) {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            // What both sides start from: values that the type can hold.
            let stored: Vec<Tensor> = self.inputs.iter().map(|input| input.to_dtype(dtype).unwrap()).collect();
            let rounded: Vec<Tensor> = stored.iter().map(|input| input.to_dtype(DType::F32).unwrap()).collect();
            let shape = (self.plain)(&rounded).unwrap().shape().clone();
            let seed = pattern(shape.dims(), 77).to_dtype(dtype).unwrap();
            let wide_seed = seed.to_dtype(DType::F32).unwrap();
            let (plain_value, plain_gradients) = self.autograd(&rounded, &wide_seed);
            for kernels in KERNELS {
                let (value, gradients) = (self.engine)(kernels, &stored, &seed).unwrap();
                let what = |part: String| format!("{}: {part}", kernels.name());
                self.compare(dtype, &what("value".into()), &value, &plain_value);
                assert_eq!(gradients.len(), plain_gradients.len());
                for (index, (gradient, plain)) in gradients.iter().zip(&plain_gradients).enumerate() {
                    self.compare(dtype, &what(format!("gradient {index}")), gradient, plain);
                }
                if dtype == DType::F32 {
                    self.compare_with_differences(&gradients, &wide_seed);
                }
            }
        }
    }

    fn autograd(&self, inputs: &[Tensor], seed: &Tensor) -> Outcome {
        let variables: Vec<Var> = inputs.iter().map(|input| Var::from_tensor(input).unwrap()).collect();
        let inputs: Vec<Tensor> = variables.iter().map(|variable| variable.as_tensor().clone()).collect();
        let value = (self.plain)(&inputs).unwrap();
        let mut store = (&value * seed).unwrap().sum_all().unwrap().backward().unwrap();
        let gradients = variables.iter().map(|variable| store.remove(variable).unwrap()).collect();
        (value.detach(), gradients)
    }

    fn compare(&self, dtype: DType, what: &str, value: &Tensor, truth: &Tensor) {
        let error = relative(&value.reshape(truth.shape()).unwrap(), truth);
        let tolerance = tolerance(dtype);
        assert!(
            error <= tolerance,
            "{} in {dtype:?}: {what} is {error:.1e} away, more than {tolerance:.0e}",
            self.name
        );
    }

    /// Slopes of the plain operation in FP64 along a few directions of each input.
    fn compare_with_differences(&self, gradients: &[Tensor], seed: &Tensor) {
        const STEP: f64 = 1e-4;
        let double = |tensor: &Tensor| tensor.to_dtype(DType::F64).unwrap();
        let seed = double(seed);
        let inputs: Vec<Tensor> = self.inputs.iter().map(double).collect();
        for (index, gradient) in gradients.iter().enumerate() {
            let size = values(gradient).iter().map(|g| g * g).sum::<f64>().sqrt();
            for salt in 0..3 {
                let direction = double(&pattern(inputs[index].dims(), salt));
                let length = values(&direction).iter().map(|d| d * d).sum::<f64>().sqrt();
                let direction = (direction / length).unwrap();
                let value_at = |step: f64| {
                    let mut inputs = inputs.clone();
                    inputs[index] = (&inputs[index] + (&direction * step).unwrap()).unwrap();
                    let value = ((self.plain)(&inputs).unwrap() * &seed).unwrap();
                    value.sum_all().unwrap().to_scalar::<f64>().unwrap()
                };
                let measured = (value_at(STEP) - value_at(-STEP)) / (2.0 * STEP);
                let gradient = gradient.reshape(direction.shape()).unwrap();
                let slope = (double(&gradient) * &direction).unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap();
                let error = (measured - slope).abs() / size;
                assert!(error < 1e-5, "{}: slope {slope} of input {index}, measured {measured}", self.name);
            }
        }
    }
}

/// Values between -1 and 1 in no order, the same in every run.
pub(crate) fn pattern(shape: &[usize], salt: u64) -> Tensor {
    let count: usize = shape.iter().product();
    let entry = |i: u64| {
        // The finaliser of SplitMix64: neighbours get unrelated values, so that no sum cancels by its pattern.
        let mut bits = (i + 1 + (salt << 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((bits >> 40) as f32 / (1 << 23) as f32) - 1.0
    };
    Tensor::from_vec((0..count as u64).map(entry).collect(), shape, &Device::Cpu).unwrap()
}

pub(crate) fn like(tensor: &Tensor) -> Result<Tensor> {
    zeros(tensor.dims(), tensor.dtype(), &Device::Cpu)
}

pub(crate) fn allocate(shape: &[usize], dtype: DType) -> Result<Tensor> {
    zeros(shape, dtype, &Device::Cpu)
}

pub(crate) fn flat(tensor: &Tensor) -> Result<Tensor> {
    tensor.reshape(((), tensor.dims().last().copied().unwrap_or(1)))?.contiguous()
}
