//! `amp`, the scaler for any candle program: PyTorch's own tests of its scaler, the lines of the project's list that
//! need tensors, and AdamW over masters. `tests/engine/gradscaler.rs` has the scale's state machine.
//!
//! If PyTorch compares with a tolerance, these tests compare bits: scales are powers of two, which FP32 multiplies and
//! divides without rounding.

mod adamw;
mod pytorch;
mod rules;

use crate::common::checkpoint::values;
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW, SGD, loss::mse};
use finetune::amp::{AdamW, GradScaler, ScaledOptimizer, WithVars, clip_grad_norm};
use finetune::precision::{GradScalerConfig, ScaleChange, StateDict};
use half::f16;
use std::collections::HashMap;

const CPU: Device = Device::Cpu;
const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

fn scaler(init_scale: f32, growth_interval: u32) -> GradScaler {
    GradScaler::new(GradScalerConfig { init_scale, growth_interval, ..GradScalerConfig::default() }).unwrap()
}

fn disabled() -> GradScaler {
    GradScaler::new(GradScalerConfig::disabled()).unwrap()
}

fn tracker(scaler: &GradScaler) -> u32 {
    scaler.state_dict().unwrap().growth_tracker
}

fn wave(frequency: f32, shape: (usize, usize)) -> Tensor {
    let values: Vec<f32> = (0..shape.0 * shape.1).map(|i| (i as f32 * frequency).sin()).collect();
    Tensor::from_vec(values, shape, &CPU).unwrap()
}

/// The bits of any floating tensor, in row-major order.
fn bits(tensor: &Tensor) -> Vec<u64> {
    let wide = tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap();
    wide.to_vec1::<f64>().unwrap().into_iter().map(f64::to_bits).collect()
}

fn all_bits<'a>(tensors: impl IntoIterator<Item = &'a Var>) -> Vec<Vec<u64>> {
    tensors.into_iter().map(|var| bits(var)).collect()
}

/// Everything an optimizer over masters will remember.
fn state_bits(optimizer: &AdamW) -> Vec<(String, Vec<u64>)> {
    let mut state: Vec<_> = optimizer.state_dict().unwrap().into_iter().map(|(key, t)| (key, bits(&t))).collect();
    state.sort();
    state
}

fn full(value: f32, like: &Tensor) -> Tensor {
    Tensor::full(value, like.shape(), &CPU).unwrap().to_dtype(like.dtype()).unwrap()
}

/// A store with `grads`, pairs of a variable and its gradient.
fn store<'a>(grads: impl IntoIterator<Item = (&'a Var, Tensor)>) -> GradStore {
    let mut store = GradStore::default();
    for (var, grad) in grads {
        store.insert(var, grad);
    }
    store
}

/// A variable of one element, 1, and an optimizer for it.
fn single(dtype: DType) -> (Var, AdamW) {
    let var = Var::ones(1, dtype, &CPU).unwrap();
    (var.clone(), adamw(vec![var]))
}

fn adamw(vars: Vec<Var>) -> AdamW {
    AdamW::new(vars, ParamsAdamW { lr: 0.1, ..ParamsAdamW::default() }).unwrap()
}

fn sgd(vars: Vec<Var>) -> WithVars<SGD> {
    WithVars::new(vars, 1.0).unwrap()
}

/// Two layers of 8 to 8.
struct Model {
    vars: Vec<Var>,
}

impl Model {
    fn new() -> Self {
        let tensors = [wave(0.7, (8, 8)), wave(1.1, (1, 8)), wave(1.9, (8, 8)), wave(2.3, (1, 8))];
        Self { vars: tensors.map(|tensor| Var::from_tensor(&(tensor * 0.3).unwrap()).unwrap()).into() }
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        let [w1, b1, w2, b2] = [0, 1, 2, 3].map(|i| &self.vars[i]);
        let hidden = x.matmul(w1).unwrap().broadcast_add(b1).unwrap();
        hidden.matmul(w2).unwrap().broadcast_add(b2).unwrap()
    }

    fn loss(&self, (x, y): &(Tensor, Tensor)) -> Tensor {
        mse(&self.forward(x), y).unwrap()
    }

    fn break_weight(&self, grads: &mut GradStore) {
        grads.insert(&self.vars[2], full(f32::INFINITY, &self.vars[2]));
    }
}

fn batches() -> Vec<(Tensor, Tensor)> {
    (0..4u8).map(|i| (wave(0.31 + f32::from(i), (8, 8)), wave(0.57 + f32::from(i), (8, 8)))).collect()
}
