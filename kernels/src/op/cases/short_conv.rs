//! Short convolutions, their gradients, and the same rows a few tokens at a time.

use super::{Documents, Outputs, Trial, pieces, starts};
use crate::op::{DecodeShortConv, ShortConv, ShortConvBackward};
use crate::rope::PositionIds;
use crate::short_conv::{ConvCache, ConvSequence};
use candle_core::DType;

pub(super) fn short_conv(
    t: &Trial<'_>,
    [seq_len, width, taps]: [usize; 3],
    documents: Documents,
    dtype: DType,
) -> Outputs {
    let rows = 2 * seq_len;
    let starts = starts(seq_len, documents);
    let positions = PositionIds { seq_len, past: 0, documents: (!documents.is_empty()).then_some(&starts[..]) };
    let input = &t.numbers("input", &[rows, 3 * width], dtype)?;
    let weight = &t.numbers("weight", &[width, 1, taps], dtype)?;
    let dy = &t.numbers("dy", &[rows, width], dtype)?;
    let [out, decoded] = &t.two_poisoned(&[rows, width], dtype)?;
    let dinput = &t.poisoned(&[rows, 3 * width], dtype)?;
    let dweight = &t.poisoned(&[width, 1, taps], dtype)?;
    t.run(ShortConv { input, weight, positions, out })?;
    t.run(ShortConvBackward { input, weight, positions, dy, dinput, dweight: Some(dweight) })?;
    // Two sequences side by side, as many new tokens of each.
    let caches = [(); 2].map(|()| t.poisoned(&[taps, width], DType::F32).map(|products| ConvCache { products }));
    let caches = caches.into_iter().collect::<Result<Vec<_>, _>>()?;
    for (past, new) in pieces(seq_len) {
        for (i, cache) in caches.iter().enumerate() {
            let first = i * seq_len + past;
            let (input, out) = (input.narrow(0, first, new)?, decoded.narrow(0, first, new)?);
            let sequences = &[ConvSequence { cache, past, new }];
            t.run(DecodeShortConv { input: &input, weight, sequences, out: &out })?;
        }
    }
    let mut outputs = t.outputs([("out", out), ("the decoded rows", decoded), ("dinput", dinput)], dtype);
    outputs.push(t.output("dweight", dweight, dtype));
    Ok(outputs)
}
