//! A Hugging Face folder, in any dtype.

use crate::engine::model::Parameters;
use crate::inference::trained::TrainedModel;
use crate::precision::Dtype;
use crate::store::companions::TOKENIZER_CONFIG;
use crate::store::tensor_file::write_tensors;
use crate::{Error, Result};
use candle_core::Tensor;
use serde_json::json;
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
    let mut companions = trained.companions.clone();
    if companions.get(TOKENIZER_CONFIG).is_none() {
        companions.insert(TOKENIZER_CONFIG, format!("{:#}\n", tokenizer_config(trained)));
    }
    companions.iter().try_for_each(|(name, text)| save(name, text))?;
    let named = |(name, tensor): (&str, &Tensor)| (trained.config.family.stored_name(name), tensor.clone());
    let tensors: Vec<(String, Tensor)> = weights.iter().map(named).collect();
    let path = folder.join("model.safetensors");
    let mut file = BufWriter::new(File::create(&path).map_err(Error::io("create", &path))?);
    write_tensors(&mut file, &path, &tensors)?;
    file.flush().map_err(Error::io("write", &path))
}

/// What `AutoTokenizer` wants to know beside `tokenizer.json`.
fn tokenizer_config(trained: &TrainedModel) -> serde_json::Value {
    let end = trained.tokenizer.eos_id().and_then(|id| trained.tokenizer.token(id));
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": trained.config.context,
        "clean_up_tokenization_spaces": false,
        "bos_token": end,
        "eos_token": end,
    })
}
