//! Writes a model as a GGUF file, its matrices in block types of the test's choice.

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{DType, Device, Tensor};
use finetune::engine::model::{ALL_LINEAR, Lora, ModelSpec, Parameters};
use finetune::store::gguf::gguf_offset;
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

/// Random weights of `spec` in a file without a tokenizer: matrices take their types in turn, everything else is FP32.
pub(crate) fn write_random(spec: &ModelSpec, types: &[GgmlDType], path: &Path) {
    let arch = spec.to_gguf().unwrap();
    let mut metadata = vec![("general.architecture".to_owned(), Value::String(arch.architecture.into()))];
    let number = |json: &Json| match json {
        Json::Bool(value) => Value::Bool(*value),
        Json::Number(value) => value
            .as_u64()
            .map_or_else(|| Value::F32(value.as_f64().unwrap() as f32), |value| Value::U32(value.try_into().unwrap())),
        other => Value::String(other.as_str().unwrap().into()),
    };
    metadata.extend(arch.keys.iter().map(|(key, value)| (format!("{}.{key}", arch.architecture), number(value))));
    let weights: Parameters = Parameters::random(&spec.parameters(), 7, &Device::Cpu).unwrap();
    let mut types = types.iter().cycle();
    // Matrices by their first value in the tensor, which has one of each expert.
    let mut parts: Vec<(String, BTreeMap<usize, Tensor>)> = Vec::new();
    for (entry, tensor) in weights.layout().iter().zip(weights.tensors()) {
        let values = spec.to_gguf_layout(entry, tensor).unwrap().to_dtype(DType::F32).unwrap();
        let name = spec.gguf_name(entry);
        let part = (gguf_offset(entry), values);
        match parts.iter_mut().find(|(other, _)| *other == name) {
            Some((_, all)) => drop(all.insert(part.0, part.1)),
            None => parts.push((name, [part].into())),
        }
    }
    let tensor = |(name, parts): (String, BTreeMap<usize, Tensor>)| {
        let parts: Vec<Tensor> = parts.into_values().collect();
        let values = if let [whole] = &parts[..] { whole.clone() } else { Tensor::stack(&parts, 0).unwrap() };
        let dtype = if values.rank() > 1 { *types.next().unwrap() } else { GgmlDType::F32 };
        (name, quantized(&values, dtype))
    };
    let tensors: Vec<_> = parts.into_iter().map(tensor).collect();
    let metadata: Vec<_> = metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    gguf_file::write(&mut File::create(path).unwrap(), &metadata, &tensors).unwrap();
}

fn quantized(values: &Tensor, dtype: GgmlDType) -> QTensor {
    if dtype != GgmlDType::F32 {
        return QTensor::quantize(values, dtype).unwrap();
    }
    // candle's own way fails for a large tensor.
    let flat = values.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let bytes: Vec<u8> = flat.iter().flat_map(|value| value.to_le_bytes()).collect();
    QTensor::new(QStorage::from_data(bytes.into(), &Device::Cpu, dtype).unwrap(), values.dims()).unwrap()
}

/// `base` with adapters of rank 4 at every linear layer; without DoRA also at routers and experts, which have no
/// dropout.
pub(crate) fn with_lora(base: &ModelSpec, dora: bool) -> ModelSpec {
    let mut targets = vec![ALL_LINEAR];
    let mut dropout = 0.1;
    if base.experts.is_some() && !dora {
        targets.extend(["experts.gate_up_proj", "experts.down_proj", "gate.weight"]);
        dropout = 0.0;
    }
    let targets = Lora::targets(base, &targets).unwrap();
    let lora = Lora { r: 4, alpha: 8.0, dropout, rslora: false, dora, targets, modules_to_save: [].into() };
    ModelSpec { lora: Some(lora), ..base.clone() }
}
