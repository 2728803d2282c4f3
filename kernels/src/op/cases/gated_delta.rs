//! Gated delta layers, their gradients, and the same rows a few tokens at a time.

use super::{Documents, Output, Outputs, Trial, equal, pieces, starts};
use crate::gated_delta::{DeltaCache, DeltaHeads, DeltaParams, DeltaSequence};
use crate::op::{DecodeGatedDelta, GatedDelta, GatedDeltaBackward};
use crate::rope::PositionIds;
use candle_core::DType;

pub(super) fn gated_delta(
    t: &Trial<'_>,
    heads: DeltaHeads,
    [seq_len, taps]: [usize; 2],
    documents: Documents,
    dtype: DType,
) -> Outputs {
    let DeltaHeads { value_heads, key_dim, value_dim, .. } = heads;
    let rows = 2 * seq_len;
    let starts = starts(seq_len, documents);
    let positions = PositionIds { seq_len, past: 0, documents: (!documents.is_empty()).then_some(&starts[..]) };
    let input = &t.numbers("input", &[rows, heads.input_width()], dtype)?;
    let (conv, vector) = ([heads.channels(), 1, taps], [value_heads]);
    let params = DeltaParams {
        conv: t.numbers("conv", &conv, dtype)?,
        a_log: t.numbers("a_log", &vector, dtype)?,
        dt_bias: t.numbers("dt_bias", &vector, dtype)?,
        norm: t.numbers("norm", &[value_dim], dtype)?,
    };
    let params = params.each();
    // Small outputs are not normalized, which would multiply their errors.
    let eps = 0.01;
    let dy = &t.numbers("dy", &[rows, heads.values()], dtype)?;
    let [out, decoded] = &t.two_poisoned(&[rows, heads.values()], dtype)?;
    let [dinput, of_frozen] = &t.two_poisoned(&[rows, heads.input_width()], dtype)?;
    let gradients = params.try_map(|x| t.poisoned(x.dims(), dtype))?;
    let gradients = gradients.each();
    t.run(GatedDelta { heads, input, params, eps, positions, out })?;
    let trained = gradients.try_map(|gradient| Ok(Some(gradient)))?;
    let frozen = gradients.try_map(|_| Ok(None))?;
    for (dinput, gradients) in [(dinput, trained), (of_frozen, frozen)] {
        t.run(GatedDeltaBackward { heads, input, params, eps, positions, dy, dinput, gradients })?;
    }
    // Two sequences side by side, as many new tokens of each.
    let cache = || {
        let states = t.poisoned(&[value_heads, key_dim, value_dim], DType::F32)?;
        Ok(DeltaCache { inputs: t.poisoned(&[taps, heads.channels()], DType::F32)?, states })
    };
    let caches = [(); 2].map(|()| cache()).into_iter().collect::<candle_core::Result<Vec<_>>>()?;
    for (past, new) in pieces(seq_len) {
        for (i, cache) in caches.iter().enumerate() {
            let first = i * seq_len + past;
            let (input, out) = (input.narrow(0, first, new)?, decoded.narrow(0, first, new)?);
            let sequences = &[DeltaSequence { cache, past, new }];
            t.run(DecodeGatedDelta { heads, input: &input, params, eps, sequences, out: &out })?;
        }
    }
    let mut outputs = t.outputs([("out", out), ("the decoded rows", decoded), ("dinput", dinput)], dtype);
    outputs.extend(t.outputs([("dconv", gradients.conv), ("dnorm", gradients.norm)], dtype));
    for (name, gradient) in [("da_log", gradients.a_log), ("ddt_bias", gradients.dt_bias)] {
        // Sums over all rows of products whose signs differ.
        let output = t.output(name, gradient, dtype);
        outputs.push(Output { bounds: output.bounds.map(|bound| 3.0 * bound), ..output });
    }
    outputs.push(equal("dinput minus that of a frozen layer", &(dinput - of_frozen)?));
    Ok(outputs)
}
