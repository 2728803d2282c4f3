//! Attention, its gradients, and the same rows a few tokens at a time.

use super::{Bounds, Documents, Output, Outputs, Trial, pieces, starts};
use crate::attention::{AttentionInputs, AttentionShape};
use crate::columns::ColumnSlice;
use crate::decode_attention::{CachedSequence, LayerKvCache};
use crate::op;
use candle_core::{DType, Result};

pub(super) fn attention(
    t: &Trial<'_>,
    shape: AttentionShape,
    documents: Documents,
    dtype: DType,
    [drops, packed, has_sinks]: [bool; 3],
) -> Outputs {
    let tokens = shape.batch * shape.seq_len;
    let [width, _, values] = shape.widths();
    let columns = [tokens, shape.widths().iter().sum::<usize>()];
    let starts = (!documents.is_empty()).then(|| starts(shape.seq_len, documents));
    let qkv = t.numbers("qkv", &columns, dtype)?;
    let apart = t.numbers("values", &[tokens, values], dtype)?;
    let dqkv = t.numbers("dqkv", &columns, dtype)?;
    let dv = t.numbers("dv", &[tokens, values], dtype)?;
    let out = &t.poisoned(&[tokens, width], dtype)?;
    let lse = &t.poisoned(&[tokens * shape.heads], DType::F32)?;
    let parts = |all, values| -> Result<_> {
        let mut parts = ColumnSlice::split(all, shape.widths())?;
        if !packed {
            parts[2] = ColumnSlice::all(values)?;
        }
        Ok(parts)
    };
    let sinks = has_sinks.then(|| t.sinks(shape.heads, dtype)).transpose()?;
    let dsinks = has_sinks.then(|| t.poisoned(&[shape.heads], dtype)).transpose()?;
    let qkv = parts(&qkv, &apart)?;
    let documents = starts.as_deref();
    let operands = AttentionInputs { qkv, documents, dropout: t.dropout(drops), sinks: sinks.as_ref() };
    let dout = &t.numbers("dout", &[tokens, width], dtype)?;
    let gradients = parts(&dqkv, &dv)?;
    t.run(op::Attention { shape, operands, out, lse })?;
    t.run(op::AttentionBackward { shape, operands, dout, out, lse, gradients, dsinks: dsinks.as_ref() })?;
    let mut outputs = t.outputs([("out", out), ("dqkv", &dqkv), ("dv", &dv)], dtype);
    for [each, all] in outputs[1..].iter_mut().map(|output| &mut output.bounds) {
        *each *= 3.0;
        if t.bounds != Bounds::Cpu {
            // Tensor cores take scores and their gradients rounded.
            *all *= 3.0;
        }
    }
    outputs.push(t.output("the log-sum-exp", lse, DType::F32));
    // Sums over all rows of products with the rounded output, whose signs differ.
    outputs.extend(dsinks.as_ref().map(|dsinks| {
        let output = t.output("dsinks", dsinks, dtype);
        Output { bounds: output.bounds.map(|bound| 3.0 * bound), ..output }
    }));
    Ok(outputs)
}

pub(super) fn decode(t: &Trial<'_>, shape: AttentionShape, dtype: DType, has_sinks: bool) -> Outputs {
    let AttentionShape { seq_len, kv_heads, head_size, .. } = shape;
    let widths = shape.widths();
    let qkv = t.numbers("qkv", &[seq_len, widths.iter().sum()], dtype)?;
    let out = t.poisoned(&[seq_len, widths[0]], dtype)?;
    let sinks = has_sinks.then(|| t.sinks(shape.heads, dtype)).transpose()?;
    let sinks = sinks.as_ref();
    if t.kernels.is_none() {
        let lse = &t.poisoned(&[shape.heads * seq_len], DType::F32)?;
        let operands = AttentionInputs { sinks, ..AttentionInputs::packed(&shape, &qkv, None)? };
        t.run(op::Attention { shape, operands, out: &out, lse })?;
        return Ok(vec![t.output("out", &out, dtype)]);
    }
    let cache = LayerKvCache::new(kv_heads, seq_len + 3, head_size, dtype, t.device)?;
    for (past, new) in pieces(seq_len) {
        let (qkv, out) = (qkv.narrow(0, past, new)?, out.narrow(0, past, new)?);
        let shape = AttentionShape { seq_len: new, ..shape };
        let sequences = &[CachedSequence { cache: &cache, past, new }];
        t.run(op::DecodeAttention { shape, sequences, qkv: ColumnSlice::split(&qkv, widths)?, sinks, out: &out })?;
    }
    Ok(vec![t.output("out", &out, dtype)])
}
