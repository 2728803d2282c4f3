//! GGUF of the architecture `gpt2`, as llama.cpp reads it; names and orientation of tensors are those of its converter.

use crate::engine::model::{ModelSpec, Parameters};
use crate::inference::trained::TrainedModel;
use crate::precision::Dtype;
use crate::{Error, Result};
use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Tensor};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// Kinds of tokens, by the numbers of llama.cpp.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

/// Writes the file `path`; `name` is what the model is called inside it.
pub(super) fn write(trained: &TrainedModel, weights: &Parameters, dtype: Dtype, name: &str, path: &Path) -> Result<()> {
    let mut metadata = shape(&trained.config, dtype, name);
    metadata.extend(vocabulary(trained)?);
    let tensors = weights.iter().map(|(name, tensor)| convert(name, tensor, dtype)).collect::<Result<Vec<_>>>()?;
    let mut file = BufWriter::new(File::create(path).map_err(Error::io("create", path))?);
    let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
    let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    gguf_file::write(&mut file, &metadata, &tensors)?;
    file.flush().map_err(Error::io("write", path))
}

fn shape(config: &ModelSpec, dtype: Dtype, name: &str) -> Vec<(String, Value)> {
    let file_type = match dtype {
        Dtype::F32 => 0,
        Dtype::F16 => 1,
        Dtype::BF16 => 32,
    };
    let size = |value: usize| Value::U32(value as u32);
    let text = |value: &str| Value::String(value.to_owned());
    [
        ("general.architecture", text("gpt2")),
        ("general.name", text(name.strip_suffix(".gguf").unwrap_or(name))),
        ("general.file_type", Value::U32(file_type)),
        ("gpt2.context_length", size(config.context)),
        ("gpt2.embedding_length", size(config.width)),
        ("gpt2.feed_forward_length", size(config.inner)),
        ("gpt2.block_count", size(config.layers)),
        ("gpt2.attention.head_count", size(config.heads)),
        ("gpt2.attention.layer_norm_epsilon", Value::F32(config.norm_eps as f32)),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into()
}

/// The tokenizer in llama.cpp's terms, which knows byte-level BPE with GPT-2's word pattern.
fn vocabulary(trained: &TrainedModel) -> Result<Vec<(String, Value)>> {
    let fail = |message: &str| Error::model("tokenizer.json", format!("{message}, so it cannot go into a GGUF file"));
    let json: serde_json::Value =
        serde_json::from_slice(trained.tokenizer.json()).map_err(|error| fail(&error.to_string()))?;
    let model = &json["model"];
    // Older files leave the type out where it is BPE.
    if !matches!(model["type"].as_str(), None | Some("BPE")) || !is_byte_level(&json) {
        return Err(fail("it is not a byte-level BPE"));
    }
    let mut tokens: BTreeMap<usize, (String, i32)> = BTreeMap::new();
    let mut put = |id: &serde_json::Value, text: &str, kind| {
        id.as_u64().map(|id| tokens.insert(id as usize, (text.to_owned(), kind)));
    };
    for (text, id) in model["vocab"].as_object().ok_or_else(|| fail("it has no vocabulary"))? {
        put(id, text, NORMAL);
    }
    for token in json["added_tokens"].as_array().into_iter().flatten() {
        let kind = if token["special"] == true { CONTROL } else { USER_DEFINED };
        put(&token["id"], token["content"].as_str().unwrap_or_default(), kind);
    }
    // A row of the embedding without a token still needs a name.
    let (texts, kinds): (Vec<_>, Vec<_>) = (0..trained.config.vocab_size)
        .map(|id| tokens.remove(&id).unwrap_or_else(|| (format!("[PAD{id}]"), UNUSED)))
        .map(|(text, kind)| (Value::String(text), Value::I32(kind)))
        .unzip();
    let merges = model["merges"].as_array().into_iter().flatten().filter_map(merge).map(Value::String).collect();
    let mut keys = vec![
        ("tokenizer.ggml.model".to_owned(), Value::String("gpt2".into())),
        ("tokenizer.ggml.pre".to_owned(), Value::String("gpt-2".into())),
        ("tokenizer.ggml.tokens".to_owned(), Value::Array(texts)),
        ("tokenizer.ggml.token_type".to_owned(), Value::Array(kinds)),
        ("tokenizer.ggml.merges".to_owned(), Value::Array(merges)),
    ];
    if let Some(end) = trained.tokenizer.eos_id() {
        keys.push(("tokenizer.ggml.bos_token_id".to_owned(), Value::U32(end)));
        keys.push(("tokenizer.ggml.eos_token_id".to_owned(), Value::U32(end)));
    }
    Ok(keys)
}

/// Whether the step before the merges writes bytes as printable characters, alone or as one of a sequence.
fn is_byte_level(json: &serde_json::Value) -> bool {
    let step = &json["pre_tokenizer"];
    let parts = step["pretokenizers"].as_array().into_iter().flatten();
    parts.chain([step]).any(|part| part["type"] == "ByteLevel")
}

/// `"a b"`, which newer files write as `["a", "b"]`.
fn merge(value: &serde_json::Value) -> Option<String> {
    match value {
        serde_json::Value::String(pair) => Some(pair.clone()),
        serde_json::Value::Array(pair) => Some(format!("{} {}", pair.first()?.as_str()?, pair.get(1)?.as_str()?)),
        _ => None,
    }
}

/// A parameter under its name in GGUF: `Conv1D` weights as `[out, in]`, vectors and positions in FP32.
fn convert(name: &str, tensor: &Tensor, dtype: Dtype) -> Result<(String, QTensor)> {
    let linear = name.starts_with("h.") && tensor.rank() == 2;
    let tensor = tensor.to_dtype(DType::F32)?;
    let tensor = if linear { tensor.t()?.contiguous()? } else { tensor };
    let kind = match dtype {
        _ if tensor.rank() == 1 || name == "wpe.weight" => GgmlDType::F32,
        Dtype::F32 => GgmlDType::F32,
        Dtype::F16 => GgmlDType::F16,
        Dtype::BF16 => GgmlDType::BF16,
    };
    Ok((gguf_name(name), QTensor::quantize(&tensor, kind)?))
}

fn gguf_name(name: &str) -> String {
    let renamed = |name: &str, pairs: &[(&str, &str)]| {
        let (stem, ending) = name.rsplit_once('.').unwrap_or((name, ""));
        let stem = pairs.iter().find(|(theirs, _)| *theirs == stem).map_or(stem, |(_, ours)| ours);
        format!("{stem}.{ending}")
    };
    let Some((layer, rest)) = name.strip_prefix("h.").and_then(|rest| rest.split_once('.')) else {
        let pairs = [("wte", "token_embd"), ("wpe", "position_embd"), ("ln_f", "output_norm"), ("lm_head", "output")];
        return renamed(name, &pairs);
    };
    let pairs = [
        ("ln_1", "attn_norm"),
        ("attn.c_attn", "attn_qkv"),
        ("attn.c_proj", "attn_output"),
        ("ln_2", "ffn_norm"),
        ("mlp.c_fc", "ffn_up"),
        ("mlp.c_proj", "ffn_down"),
    ];
    format!("blk.{layer}.{}", renamed(rest, &pairs))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_renamed_as_the_converter_does() {
        for (name, expected) in [
            ("wte.weight", "token_embd.weight"),
            ("wpe.weight", "position_embd.weight"),
            ("ln_f.bias", "output_norm.bias"),
            ("lm_head.weight", "output.weight"),
            ("h.11.ln_1.weight", "blk.11.attn_norm.weight"),
            ("h.0.attn.c_attn.bias", "blk.0.attn_qkv.bias"),
            ("h.0.attn.c_proj.weight", "blk.0.attn_output.weight"),
            ("h.0.mlp.c_fc.weight", "blk.0.ffn_up.weight"),
            ("h.0.mlp.c_proj.weight", "blk.0.ffn_down.weight"),
        ] {
            assert_eq!(gguf_name(name), expected);
        }
    }
}
