//! The three ways FP16 training fails, each with its remedy: gradients that underflow, gradients that overflow, and
//! updates too small for the weight.
//!
//! `cargo run --example three_crises`

#![expect(clippy::print_stdout, reason = "the example prints its results")]

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW, SGD};
use finetune::amp::{AdamW, GradScaler, WithVars};
use finetune::precision::{GradScalerConfig, ScaleChange};

type Result<T = ()> = std::result::Result<T, finetune::Error>;

fn main() -> Result {
    underflow()?;
    overflow()?;
    vanishing_update()
}

/// A weight of one element in FP16, and a loss in FP32 whose gradient by it is `gradient`.
fn weight_and_loss(gradient: f64) -> Result<(Var, Tensor)> {
    let weight = Var::ones(1, DType::F16, &Device::Cpu)?;
    let loss = (weight.to_dtype(DType::F32)? * gradient)?.sum_all()?;
    Ok((weight, loss))
}

fn single(tensor: &Tensor) -> Result<f32> {
    Ok(tensor.to_dtype(DType::F32)?.sum_all()?.to_scalar()?)
}

/// A gradient of 1e-8 is below FP16's smallest value, 6e-8. The remedy: scale the loss by 65536.
fn underflow() -> Result {
    let (weight, loss) = weight_and_loss(1e-8)?;
    let lost = single(&loss.backward()?.get(&weight).expect("the loss depends on it").clone())?;

    let mut scaler = GradScaler::new(GradScalerConfig::default())?;
    let optimizer = AdamW::new(vec![weight.clone()], ParamsAdamW::default())?;
    let mut grads = scaler.scale(&loss)?.backward()?;
    scaler.unscale(&optimizer, &mut grads)?;
    let saved = single(grads.get(&weight).expect("the loss depends on it"))?;

    println!("underflow: a gradient of 1e-8 is {lost} in FP16, and {saved:.3e} if scaled by 65536 on its way");
    assert_eq!(lost, 0.0);
    assert_eq!(format!("{saved:.3e}"), "9.997e-9");
    Ok(())
}

/// A gradient of 3 times 65536 is beyond FP16's largest value, 65504. The remedy: skip the step and halve the scale.
fn overflow() -> Result {
    let (weight, loss) = weight_and_loss(3.0)?;
    let mut optimizer = AdamW::new(vec![weight.clone()], ParamsAdamW { lr: 0.5, ..ParamsAdamW::default() })?;
    let mut scaler = GradScaler::new(GradScalerConfig::default())?;
    let mut skipped = vec![];
    loop {
        let mut grads = scaler.scale(&loss)?.backward()?;
        let applied = scaler.step(&mut optimizer, &mut grads)?;
        let change = scaler.update()?;
        if applied {
            break;
        }
        assert_eq!(single(&weight)?, 1.0);
        assert!(matches!(change, ScaleChange::BackedOff { .. }));
        skipped.push(change);
    }
    println!(
        "overflow: {} steps skipped, the weight untouched, then one at a scale of {}",
        skipped.len(),
        scaler.get_scale()
    );
    assert_eq!((skipped.len(), scaler.get_scale()), (2, 16384.0));
    assert!(single(&weight)? < 1.0);
    Ok(())
}

/// Three updates of 5e-5 to a weight of 1. FP16's next value below 1 is 1 - 4.9e-4, so each is rounded away. The
/// remedy: an FP32 master that accumulates the updates.
fn vanishing_update() -> Result {
    let weight = Var::ones(1, DType::F16, &Device::Cpu)?;
    let master = Var::ones(1, DType::F32, &Device::Cpu)?;
    let mut in_half = SGD::new(vec![weight.clone()], 5e-5)?;
    let mut in_single = WithVars::<SGD>::new(vec![master.clone()], 5e-5)?;
    for _ in 0..3 {
        in_half.backward_step(&weight.sum_all()?)?;
        in_single.backward_step(&master.to_dtype(DType::F16)?.sum_all()?)?;
    }
    let (stuck, moved) = (single(&weight)?, single(&master)?);
    println!("vanishing update: after 3 updates of 5e-5 the FP16 weight is {stuck:.1}, its FP32 master {moved:.8}");
    assert_eq!(stuck, 1.0);
    assert_eq!(format!("{moved:.8}"), "0.99984998");
    Ok(())
}
