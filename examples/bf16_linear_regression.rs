//! Linear regression with a forward pass in BF16 over FP32 masters, under a loss scale of 128 that doubles after 50
//! clean steps. The same regression with only BF16 weights shows the purpose of the masters.
//!
//! `cargo run --example bf16_linear_regression`

#![expect(clippy::print_stdout, reason = "the example prints its results")]

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Optimizer, SGD, loss::mse};
use finetune::amp::{GradScaler, WithVars};
use finetune::precision::{GradScalerConfig, ScaleChange};
use finetune::random::{Domain, Stream};

type Result<T = ()> = std::result::Result<T, finetune::Error>;

const TRUTH: [f32; 3] = [1.7, -0.9, 0.35];
const LEARNING_RATE: f64 = 0.02;
const STEPS: usize = 400;

fn main() -> Result {
    let (x, y) = data()?;
    let master = Var::zeros((3, 1), DType::F32, &Device::Cpu)?;
    let mut optimizer = WithVars::<SGD>::new(vec![master.clone()], LEARNING_RATE)?;
    let config = GradScalerConfig { init_scale: 128.0, growth_interval: 50, ..GradScalerConfig::default() };
    let mut scaler = GradScaler::new(config)?;
    let mut growths = vec![];
    for step in 1..=STEPS {
        let loss = loss(&x, &y, &master.to_dtype(DType::BF16)?)?;
        let mut grads = scaler.scale(&loss)?.backward()?;
        assert!(scaler.step(&mut optimizer, &mut grads)?, "BF16 has FP32's range");
        if let ScaleChange::Grew { from, to } = scaler.update()? {
            growths.push((step, from, to));
        }
    }
    println!("scale: 128, after step {} {}, at the end {}", growths[0].0, growths[0].2, scaler.get_scale());
    assert_eq!(growths[0], (50, 128.0, 256.0));
    assert_eq!((growths.len(), scaler.get_scale()), (8, 32768.0));

    let weight = Var::zeros((3, 1), DType::BF16, &Device::Cpu)?;
    let mut without_masters = SGD::new(vec![weight.clone()], LEARNING_RATE)?;
    for _ in 0..STEPS {
        without_masters.backward_step(&loss(&x, &y, &weight)?)?;
    }
    of_the_texts_size()?;
    let (with, without) = (largest_error(&master)?, largest_error(&weight)?);
    println!("largest error of a weight: {with:.4} with FP32 masters, {without:.4} with BF16 weights only");
    assert!(with < 0.01 && without > 3.0 * with);
    Ok(())
}

/// The size used in tutorials: 16 features, 1,024 points, 200 epochs, a line every 20.
fn of_the_texts_size() -> Result {
    const FEATURES: usize = 16;
    const POINTS: usize = 1024;
    let stream = Stream::new(0, Domain::Bench);
    let draw = |site, shape: (usize, usize)| {
        let mut values = vec![0f32; shape.0 * shape.1];
        stream.fill_normal(site, 0, 0, &mut values);
        Tensor::from_vec(values, shape, &Device::Cpu)
    };
    let x = draw(0, (POINTS, FEATURES))?;
    let truth = draw(1, (FEATURES, 1))?;
    let y = x.matmul(&truth)?;
    let x = x.to_dtype(DType::BF16)?;
    let master = Var::zeros((FEATURES, 1), DType::F32, &Device::Cpu)?;
    let mut optimizer = WithVars::<SGD>::new(vec![master.clone()], 0.05)?;
    let config = GradScalerConfig { init_scale: 128.0, growth_interval: 50, ..GradScalerConfig::default() };
    let mut scaler = GradScaler::new(config)?;
    let mut errors = vec![];
    for epoch in 1..=200 {
        let loss = loss(&x, &y, &master.to_dtype(DType::BF16)?)?;
        let mut grads = scaler.scale(&loss)?.backward()?;
        scaler.step(&mut optimizer, &mut grads)?;
        scaler.update()?;
        if epoch % 20 == 0 {
            errors.push(loss.to_scalar::<f32>()?);
            println!("epoch {epoch:3}  MSE {:.6}  scale {}", errors[errors.len() - 1], scaler.get_scale());
        }
    }
    assert!(errors[9] < 1e-3 && errors[9] < errors[0] / 100.0);
    assert_eq!(scaler.get_scale(), 128.0 * 16.0);
    Ok(())
}

/// The mean squared error: product in BF16, mean in FP32.
fn loss(x: &Tensor, y: &Tensor, weight: &Tensor) -> Result<Tensor> {
    Ok(mse(&x.matmul(weight)?.to_dtype(DType::F32)?, y)?)
}

/// 64 points of y = x · TRUTH: inputs in BF16, outputs in FP32.
fn data() -> Result<(Tensor, Tensor)> {
    let x: Vec<f32> = (0..64 * 3).map(|i| (0.37 * (i * i) as f32).sin()).collect();
    let x = Tensor::from_vec(x, (64, 3), &Device::Cpu)?.to_dtype(DType::BF16)?;
    let y = x.to_dtype(DType::F32)?.matmul(&truth()?)?;
    Ok((x, y))
}

fn truth() -> Result<Tensor> {
    Ok(Tensor::new(&TRUTH, &Device::Cpu)?.reshape((3, 1))?)
}

fn largest_error(weight: &Tensor) -> Result<f32> {
    Ok((weight.to_dtype(DType::F32)? - truth()?)?.abs()?.max_all()?.to_scalar()?)
}
