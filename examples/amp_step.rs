//! Training steps of a `Linear(512, 512)` under a mean squared error, all in FP16, with and without a loss scale,
//! then in FP32, FP16 and BF16.
//!
//! The model starts close to its target, as in fine-tuning, so its gradients underflow in FP16.
//!
//! `cargo run --example amp_step`

#![expect(clippy::print_stdout, reason = "the example prints its results")]

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Linear, Module, ParamsAdamW, loss::mse};
use finetune::amp::{AdamW, GradScaler};
use finetune::precision::GradScalerConfig;

type Result<T = ()> = std::result::Result<T, finetune::Error>;

const WIDTH: usize = 512;
const BATCH: usize = 256;
const STEPS: usize = 10;

/// The results of a run.
struct Outcome {
    first_loss: f32,
    last_loss: f32,
    /// Share of the weight's gradient that is zero in the first step.
    zeros: f32,
    applied: usize,
}

fn main() -> Result {
    let without = run(DType::F16, GradScalerConfig::disabled())?;
    let with = run(DType::F16, GradScalerConfig::default())?;
    for (name, outcome) in [("no scale", &without), ("scale 65536", &with)] {
        let Outcome { first_loss, last_loss, zeros, applied } = outcome;
        let percent = 100.0 * zeros;
        println!("{name:>11}: loss {first_loss:.3e} → {last_loss:.3e}, {applied} updates, {percent:.1} % of dW zero");
    }
    assert_eq!(with.first_loss, without.first_loss);
    assert!(without.zeros > 0.5, "FP16 flushes most of an unscaled gradient to zero");
    assert!(with.zeros < 0.01, "scaled, hardly any");
    assert_eq!((without.applied, with.applied), (STEPS, STEPS));
    assert!(with.last_loss < 0.5 * with.first_loss, "the scaled run learns");
    assert!(with.last_loss < 0.5 * without.last_loss, "the other one lags behind");
    // The same loop in each type; only FP16 needs the scale.
    for (dtype, enabled) in [(DType::F32, false), (DType::F16, true), (DType::BF16, false)] {
        let outcome = run(dtype, GradScalerConfig { enabled, ..GradScalerConfig::default() })?;
        let first = outcome.first_loss;
        let last = outcome.last_loss;
        let zeros = 100.0 * outcome.zeros;
        println!("{dtype:>4?}: scale {enabled:>5}, loss {first:.3e} → {last:.3e}, {zeros:.1} % of dW zero");
        assert_eq!(outcome.applied, STEPS);
        assert!(outcome.zeros < 0.01);
    }
    Ok(())
}

fn run(dtype: DType, config: GradScalerConfig) -> Result<Outcome> {
    let x = wave(0.37, &[BATCH, WIDTH])?.to_dtype(dtype)?;
    let weight = (wave(0.61, &[WIDTH, WIDTH])? * 0.05)?;
    let difference = (wave(0.23, &[WIDTH, WIDTH])? * 5e-5)?;
    let target = x.to_dtype(DType::F32)?.matmul(&(&weight + difference)?.t()?)?;

    let weight = Var::from_tensor(&weight.to_dtype(dtype)?)?;
    let bias = Var::zeros(WIDTH, dtype, &Device::Cpu)?;
    let model = Linear::new(weight.as_tensor().clone(), Some(bias.as_tensor().clone()));
    let params = ParamsAdamW { lr: 5e-6, ..ParamsAdamW::default() };
    let mut optimizer = AdamW::with_decay_on_matrices(vec![weight.clone(), bias], params)?;
    let mut scaler = GradScaler::new(config)?;

    let mut losses = vec![];
    let mut zeros = vec![];
    let mut applied = 0;
    for _ in 0..STEPS {
        let loss = mse(&model.forward(&x)?.to_dtype(DType::F32)?, &target)?;
        let mut grads = scaler.scale(&loss)?.backward()?;
        zeros.push(share_of_zeros(grads.get(&weight).expect("the loss depends on it"))?);
        applied += usize::from(scaler.step(&mut optimizer, &mut grads)?);
        scaler.update()?;
        losses.push(loss.to_scalar()?);
    }
    Ok(Outcome { first_loss: losses[0], last_loss: losses[STEPS - 1], zeros: zeros[0], applied })
}

fn share_of_zeros(tensor: &Tensor) -> Result<f32> {
    Ok(tensor.eq(0.0)?.to_dtype(DType::F32)?.mean_all()?.to_scalar()?)
}

/// Reproducible values in [-1, 1] without a pattern that a layer could memorize.
fn wave(frequency: f64, shape: &[usize]) -> Result<Tensor> {
    let count = shape.iter().product::<usize>() as u32;
    let phase = (Tensor::arange(0, count, &Device::Cpu)?.to_dtype(DType::F64)? * frequency)?;
    Ok((phase.sqr()? * 0.01)?.sin()?.to_dtype(DType::F32)?.reshape(shape)?)
}
