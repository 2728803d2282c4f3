//! Exports every family as GGUF, as llama.cpp reads it. `store::gguf` translates the model and the tokenizer.

use super::{WeightDtype, write_file};
use crate::engine::model::{ModuleOp, ParamSpec, Parameters};
use crate::inference::trained::TrainedModel;
use crate::precision::Dtype;
use crate::store::gguf::{END_KEYS, GgufMetadata, vocabulary};
use crate::{Error, Result};
use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::path::Path;

/// The version of the block types' layouts.
const QUANTIZATION_VERSION: u32 = 2;

/// Writes the file `path`; `name` is the model's name in the metadata.
pub(super) fn write(
    trained: &TrainedModel,
    weights: Parameters,
    encoding: WeightDtype,
    name: &str,
    path: &Path,
) -> Result<()> {
    let header = trained.spec.to_gguf()?;
    let mut metadata = vec![
        ("general.architecture".to_owned(), Value::String(header.architecture.to_owned())),
        ("general.name".to_owned(), Value::String(name.strip_suffix(".gguf").unwrap_or(name).to_owned())),
        ("general.file_type".to_owned(), Value::U32(file_type(encoding))),
    ];
    if matches!(encoding, WeightDtype::Q8_0 | WeightDtype::Q4K) {
        metadata.push(("general.quantization_version".to_owned(), Value::U32(QUANTIZATION_VERSION)));
    }
    let GgufMetadata { architecture, keys, rope_factors } = header;
    metadata.extend(keys.iter().filter_map(|(key, value)| Some((format!("{architecture}.{key}"), value_of(value)?))));
    let ends = end_tokens(trained)?;
    metadata.extend(vocabulary(&trained.tokenizer, &trained.spec, &ends, trained.chat.template.as_deref())?);

    let mut tensors = Vec::new();
    // The matrices of the experts, by the name of the tensor that has all of them.
    let mut experts = BTreeMap::<String, (GgmlDType, BTreeMap<u16, Tensor>)>::new();
    // Each tensor is dropped once it is converted.
    for (entry, tensor) in weights.into_each() {
        let parts = trained.spec.gguf_parts(&entry);
        let values = trained.spec.gguf_values(&entry, &tensor.to_dtype(DType::F32)?)?;
        for (entry, values) in parts.into_iter().zip(values) {
            // candle quantizes a tensor's whole storage, and a parameter may be a view of a part of it.
            let values = trained.spec.to_gguf_layout(&entry, &values)?.force_contiguous()?;
            let columns = values.dims().last().copied().unwrap_or_default();
            let name = trained.spec.gguf_name(&entry);
            let dtype = block_type(&entry, columns, encoding);
            if let ModuleOp::Expert(expert, _) = entry.layer.op {
                experts.entry(name).or_insert((dtype, BTreeMap::new())).1.insert(expert, values);
            } else {
                tensors.push((name, quantize(&values, dtype)?));
            }
        }
    }
    for (name, (dtype, matrices)) in experts {
        let matrices: Vec<Tensor> = matrices.into_values().collect();
        tensors.push((name, quantize(&Tensor::stack(&matrices, 0)?, dtype)?));
    }
    for (name, factors) in rope_factors {
        let factors = Tensor::new(factors, &Device::Cpu)?;
        tensors.push((name.to_owned(), QTensor::quantize(&factors, GgmlDType::F32)?));
    }
    let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
    let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    write_file(path, |file| {
        gguf_file::write(file, &metadata, &tensors).map_err(|error| match error {
            candle_core::Error::Io(source) => Error::io("write", path)(source),
            other => other.into(),
        })
    })
}

/// Converts to `dtype`; to `Q8_0` instead of `Q4_K` if a group of weights is constant, which candle stores as zeros.
fn quantize(values: &Tensor, dtype: GgmlDType) -> candle_core::Result<QTensor> {
    let is_lost = |group: &[f32]| group[0] != 0.0 && group.iter().all(|value| *value == group[0]);
    let dtype = match dtype {
        GgmlDType::Q4K if values.flatten_all()?.to_vec1()?.chunks(32).any(is_lost) => GgmlDType::Q8_0,
        dtype => dtype,
    };
    QTensor::quantize(values, dtype)
}

/// The tokens that end a text, the tokenizer's own first, as in llama.cpp's converter.
fn end_tokens(trained: &TrainedModel) -> Result<Vec<u32>> {
    let mut ends = trained.stop_token_ids()?;
    ends.retain(|id| (*id as usize) < trained.tokenizer.vocab_size());
    Ok(ends)
}

/// The tokens that end a text beyond those that the file has keys for.
pub(super) fn omitted_ends(trained: &TrainedModel) -> Result<Vec<u32>> {
    Ok(end_tokens(trained)?.into_iter().skip(END_KEYS.len()).collect())
}

/// llama.cpp's number for the type of most weights.
fn file_type(encoding: WeightDtype) -> u32 {
    match encoding {
        WeightDtype::Plain(Dtype::F32) => 0,
        WeightDtype::Plain(Dtype::F16) => 1,
        WeightDtype::Plain(Dtype::BF16) => 32,
        WeightDtype::Q8_0 => 7,
        WeightDtype::Q4K => 14,
    }
}

/// The type a parameter is stored in: vectors, positions, routers and convolutions in FP32, embedding and head in more
/// bits than the rest. If rows do not divide into whole blocks, the same fallback types as in llama.cpp.
fn block_type(entry: &ParamSpec, columns: usize, encoding: WeightDtype) -> GgmlDType {
    let table = matches!(entry.layer.op, ModuleOp::Embedding | ModuleOp::Head);
    let whole = |block: usize| columns.is_multiple_of(block);
    match encoding {
        _ if entry.shape.len() == 1 => GgmlDType::F32,
        _ if matches!(entry.layer.op, ModuleOp::Positions | ModuleOp::Router | ModuleOp::ShortConv) => GgmlDType::F32,
        WeightDtype::Plain(Dtype::F32) => GgmlDType::F32,
        WeightDtype::Plain(Dtype::F16) => GgmlDType::F16,
        WeightDtype::Plain(Dtype::BF16) => GgmlDType::BF16,
        WeightDtype::Q8_0 | WeightDtype::Q4K if !whole(32) => GgmlDType::F16,
        WeightDtype::Q8_0 => GgmlDType::Q8_0,
        WeightDtype::Q4K if whole(256) => [GgmlDType::Q4K, GgmlDType::Q6K][usize::from(table)],
        WeightDtype::Q4K => [GgmlDType::Q5_0, GgmlDType::Q8_0][usize::from(table)],
    }
}

/// A metadata value; counts and numbers have 32 bits.
fn value_of(value: &Json) -> Option<Value> {
    match value {
        Json::Bool(flag) => Some(Value::Bool(*flag)),
        Json::String(text) => Some(Value::String(text.clone())),
        Json::Number(number) => match number.as_u64() {
            Some(count) => Some(Value::U32(u32::try_from(count).ok()?)),
            None => Some(Value::F32(number.as_f64()? as f32)),
        },
        Json::Array(items) => Some(Value::Array(items.iter().map(value_of).collect::<Option<_>>()?)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_weights_keep_their_value() {
        let values = Tensor::full(-0.25_f32, (1, 256), &Device::Cpu).unwrap();
        let stored = quantize(&values, GgmlDType::Q4K).unwrap().dequantize(&Device::Cpu).unwrap();
        let stored: Vec<f32> = stored.flatten_all().unwrap().to_vec1().unwrap();
        assert!(stored.iter().all(|value| (value + 0.25).abs() < 0.002), "{stored:?}");
    }
}
