//! A Hugging Face folder, in any dtype.

use crate::engine::model::Parameters;
use crate::inference::trained::TrainedModel;
use crate::precision::Dtype;
use crate::store::aux_files::{TOKENIZER_CONFIG, tokenizer_config};
use crate::store::tensor_file::write_tensors;
use crate::{Error, Result};
use candle_core::Tensor;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// Fills `folder`.
pub(super) fn write(trained: &TrainedModel, weights: &Parameters, dtype: Dtype, folder: &Path) -> Result<()> {
    let torch_dtype = match dtype {
        Dtype::F32 => "float32",
        Dtype::F16 => "float16",
        Dtype::BF16 => "bfloat16",
    };
    let save = |name: &str, text: &[u8]| {
        let path = folder.join(name);
        std::fs::write(&path, text).map_err(Error::io("write", path))
    };
    save("config.json", trained.config.to_json(torch_dtype).as_bytes())?;
    save("tokenizer.json", trained.tokenizer.json())?;
    let mut aux_files = trained.aux_files.clone();
    if aux_files.get(TOKENIZER_CONFIG).is_none() {
        let mut config = tokenizer_config(&trained.tokenizer);
        config["model_max_length"] = trained.config.max_position_embeddings.into();
        aux_files.insert(TOKENIZER_CONFIG, format!("{config:#}\n"));
    }
    aux_files.iter().try_for_each(|(name, text)| save(name, text))?;
    let named = |(name, tensor): (&str, &Tensor)| (trained.config.family.stored_name(name), tensor.clone());
    let tensors: Vec<(String, Tensor)> = weights.iter().map(named).collect();
    let path = folder.join("model.safetensors");
    let mut file = BufWriter::new(File::create(&path).map_err(Error::io("create", &path))?);
    write_tensors(&mut file, &path, &tensors)?;
    file.flush().map_err(Error::io("write", &path))
}
