//! AdamW of one or two tensors, with the exact result of FP64 and the counts of visible updates.

use super::{Outputs, Trial, equal};
use crate::adamw::{AdamWStep, AdamWTensor};
use crate::blockwise::{BlockwiseQuantized, Moment, dequantized};
use crate::precision::UpdateCounts;
use crate::{op, view};
use candle_core::{DType, Device, Error, Result, Tensor};

/// Writes the values of a moment into `out`.
fn moment_values(out: &Tensor, quantized: &BlockwiseQuantized, moment: Moment, device: &Device) -> Result<()> {
    let values = Tensor::new(dequantized(moment, &quantized.codes, &quantized.absmax)?, device)?;
    out.slice_set(&values.to_dtype(out.dtype())?, 0, 0)
}

pub(super) fn adamw(t: &Trial<'_>, len: usize, [grads, copies]: [DType; 2], [counts, quantized]: [bool; 2]) -> Outputs {
    let step =
        AdamWStep { lr: 0.01, betas: [0.9, 0.999], eps: 1e-8, bias_corrections: [0.1, 0.001], grad_factor: 0.125 };
    let grad = &t.numbers("grad", &[len], grads)?;
    let [master, exp_avg] = &t.two_of_numbers(["master", "exp_avg"], &[len], DType::F32)?;
    let exp_avg_sq = &t.mapped("exp_avg_sq", &[len], DType::F32, |_, x| x * x)?;
    // Moments of the values that 8 bits hold.
    let moments: Vec<BlockwiseQuantized> = [(exp_avg, Moment::First), (exp_avg_sq, Moment::Second)]
        .into_iter()
        .filter(|_| quantized)
        .map(|(values, moment)| {
            let wide = view::to_host(values)?.to_dtype(DType::F32)?.to_vec1()?;
            let quantized = BlockwiseQuantized::from_values(&wide, moment, t.device)?;
            moment_values(values, &quantized, moment, t.device)?;
            Ok(quantized)
        })
        .collect::<Result<_>>()?;
    let copy = if counts { t.stored(&view::to_host(master)?, copies)? } else { t.poisoned(&[len], copies)? };
    let weight = (copies != DType::F32).then_some(&copy);
    let values = |x: &Tensor| view::to_host(x)?.to_dtype(DType::F32)?.to_vec1::<f32>();
    let before = [values(master)?, values(&copy)?];
    let mut counted = [UpdateCounts::default(); 2];
    // Two tensors, if there are enough elements.
    let cut = if quantized { len } else { (len / 2).next_multiple_of(8).min(len) };
    let mut update = |moments: [&Tensor; 2], scales| {
        let parts = |x: &Tensor| Ok::<_, Error>([x.narrow(0, 0, cut)?, x.narrow(0, cut, len - cut)?]);
        let grads = parts(grad)?;
        let masters = parts(master)?;
        let copies = parts(&copy)?;
        let [m, v] = [parts(moments[0])?, parts(moments[1])?];
        let tensors = counted.iter_mut().enumerate().filter(|(i, _)| grads[*i].elem_count() > 0).map(|(i, counted)| {
            let (grad, master, exp_avg, exp_avg_sq) = (&grads[i], &masters[i], &m[i], &v[i]);
            let weight = weight.map(|_| &copies[i]);
            let weight_decay = [0.1, 0.0][i];
            let counts = counts.then_some(counted);
            AdamWTensor { grad, master, exp_avg, exp_avg_sq, scales, weight, weight_decay, counts }
        });
        t.run(op::AdamW { step, tensors: tensors.collect() })
    };
    if let ([m, v], Some(_)) = (&*moments, t.kernels) {
        update([&m.codes, &v.codes], Some([m.scales(), v.scales()]))?;
        moment_values(exp_avg, m, Moment::First, t.device)?;
        moment_values(exp_avg_sq, v, Moment::Second, t.device)?;
    } else {
        update([exp_avg, exp_avg_sq], None)?;
    }
    let state = [("the master", master), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)];
    let mut outputs = t.outputs(state, DType::F32);
    if quantized {
        // Half of the distance of two codes, or all of it for a sign; the root mean square is of an even spread.
        outputs[1..].iter_mut().for_each(|output| output.bounds = [0.03, 0.012]);
    }
    outputs.extend(weight.map(|weight| t.output("the working copy", weight, copies)));
    if counts && t.kernels.is_some() {
        let mut expected = UpdateCounts::default();
        let after = [values(master)?, values(&copy)?];
        expected.count(view::float_format(copies), [&before[0], &after[0]], [&before[1], &after[1]]);
        let [mut counted, second] = counted;
        counted += second;
        let differs = u32::from(counted != expected || counted.moved == 0);
        outputs.push(equal("whether counts differ", &Tensor::new(&[differs], &Device::Cpu)?));
    } else if counts {
        outputs.push(equal("whether counts differ", &Tensor::new(&[0u32], &Device::Cpu)?));
    }
    Ok(outputs)
}
