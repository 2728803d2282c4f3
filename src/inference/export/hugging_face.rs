//! A Hugging Face folder, in any dtype: of a whole model, or of adapters in PEFT's format.

use super::write_file;
use crate::engine::model::{ModelSpec, Parameters, candle_dtype};
use crate::inference::trained::{TrainedModel, converted};
use crate::precision::Dtype;
use crate::store::adapter::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_config, write_adapter};
use crate::store::aux_files::{TOKENIZER_CONFIG, tokenizer_config};
use crate::store::base::check_range;
use crate::store::tensor_file::write_tensors;
use crate::{Error, Result};
use candle_core::Device;
use std::path::Path;

/// Fills `folder` with the whole model.
pub(super) fn write(trained: &TrainedModel, weights: &Parameters, dtype: Dtype, folder: &Path) -> Result<()> {
    let torch_dtype = match dtype {
        Dtype::F32 => "float32",
        Dtype::F16 => "float16",
        Dtype::BF16 => "bfloat16",
    };
    save(folder, "config.json", trained.spec.to_json(torch_dtype).as_bytes())?;
    write_tokenizer(trained, folder)?;
    let tensors = trained.spec.family.stored_tensors(weights.iter())?;
    let path = folder.join("model.safetensors");
    write_file(&path, |file| write_tensors(file, &path, &tensors))
}

/// Fills `folder` with the adapters, the tokenizer and the chat template.
pub(super) fn write_adapters(
    trained: &TrainedModel,
    spec: &ModelSpec,
    adapters: &Parameters,
    dtype: Dtype,
    folder: &Path,
) -> Result<()> {
    check_range(adapters, &trained.path.display().to_string(), dtype)?;
    let rounded = converted(adapters, candle_dtype(dtype), &Device::Cpu)?;
    save(folder, ADAPTER_CONFIG, adapter_config(spec, trained.base().as_ref()).as_bytes())?;
    write_tokenizer(trained, folder)?;
    let path = folder.join(ADAPTER_WEIGHTS);
    write_file(&path, |file| write_adapter(file, &path, spec, &rounded))
}

/// Writes the tokenizer and the small files of a model.
fn write_tokenizer(trained: &TrainedModel, folder: &Path) -> Result<()> {
    save(folder, "tokenizer.json", &trained.tokenizer.exported_json())?;
    let mut aux_files = trained.aux_files.clone();
    if aux_files.get(TOKENIZER_CONFIG).is_none() {
        let mut config = tokenizer_config(&trained.tokenizer);
        config["model_max_length"] = trained.spec.max_position_embeddings.into();
        aux_files.insert(TOKENIZER_CONFIG, format!("{config:#}\n"));
    }
    aux_files.iter().try_for_each(|(name, text)| save(folder, name, text))
}

fn save(folder: &Path, name: &str, text: &[u8]) -> Result<()> {
    let path = folder.join(name);
    std::fs::write(&path, text).map_err(Error::io("write", path))
}
