//! A trained model in the formats that other programs take: a Hugging Face folder, GGUF, ONNX.
//!
//! Everything is written under a temporary name in the target folder and then renamed, so that visible files are
//! complete.

mod gguf;
mod hugging_face;
mod onnx;

pub use onnx::OnnxOptions;

use crate::inference::trained::TrainedModel;
use crate::precision::Dtype;
use crate::{Error, Result, temporary};
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

/// A format to export to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportFormat {
    /// A folder with `config.json`, `tokenizer.json` and `model.safetensors`, as transformers reads it.
    HuggingFace,
    /// One file for llama.cpp and similar programs, including the tokenizer.
    Gguf,
    /// A graph with free batch and sequence axes, and its weights in a second file, `.data`.
    Onnx(OnnxOptions),
}

/// The part of a model with adapters to write. A model without adapters is always written as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportScope {
    /// The adapters alone, in PEFT's format.
    Adapters,
    /// The whole model, adapters merged into its weights in FP32.
    Merged,
}

impl ExportFormat {
    /// The format that the name of the result selects: `.gguf`, `.onnx`, else a folder.
    pub fn from_path(out: &Path) -> Self {
        match out.extension().and_then(|extension| extension.to_str()) {
            Some("gguf") => Self::Gguf,
            Some("onnx") => Self::Onnx(OnnxOptions::default()),
            _ => Self::HuggingFace,
        }
    }
}

/// A warning about the end tokens of `trained` that a file of `format` cannot have.
pub fn loss_of_format(trained: &TrainedModel, format: ExportFormat) -> Result<Option<String>> {
    let omitted = if format == ExportFormat::Gguf { gguf::omitted_ends(trained)? } else { Vec::new() };
    let name = |id: &u32| trained.tokenizer.token(*id).unwrap_or_else(|| id.to_string());
    let names: Vec<String> = omitted.iter().map(name).collect();
    Ok((!names.is_empty()).then(|| {
        format!("GGUF has no key for further end tokens, so `{}` do not end a text in it", names.join("`, `"))
    }))
}

/// The encoding of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightDtype {
    /// Plain numbers.
    Plain(Dtype),
    /// Blocks of 32 8-bit numbers with a scale; GGUF only.
    Q8_0,
    /// Mostly blocks of 256 4-bit numbers in 8 groups, each with a scale and a minimum; GGUF only.
    Q4K,
}

impl From<Dtype> for WeightDtype {
    fn from(dtype: Dtype) -> Self {
        Self::Plain(dtype)
    }
}

/// Writes `trained` with weights of dtype `encoding` to `out`, which must not exist. Returns the written files. Fails
/// with [`Error::Config`] if `out` exists or the format has no such encoding; [`Error::Model`] if the type cannot hold
/// the weights or the format cannot hold the tokenizer; [`Error::Io`].
pub fn export(
    trained: &TrainedModel,
    encoding: impl Into<WeightDtype>,
    format: ExportFormat,
    scope: ExportScope,
    out: &Path,
) -> Result<Vec<PathBuf>> {
    let encoding = encoding.into();
    let dtype = match encoding {
        WeightDtype::Plain(dtype) => dtype,
        WeightDtype::Q8_0 | WeightDtype::Q4K if format == ExportFormat::Gguf => Dtype::F32,
        WeightDtype::Q8_0 | WeightDtype::Q4K => {
            return Err(Error::config(
                "--dtype",
                "only GGUF files support quantized blocks; use a name for OUT that ends in `.gguf`",
            ));
        }
    };
    let name = out.file_name().and_then(|name| name.to_str());
    let name =
        name.ok_or_else(|| Error::config("OUT", format!("`{}` is not the name of a file or folder", out.display())))?;
    let files = match format {
        ExportFormat::HuggingFace | ExportFormat::Gguf => vec![out.to_path_buf()],
        // The file that names the other comes last.
        ExportFormat::Onnx(_) => vec![out.with_file_name(format!("{name}.data")), out.to_path_buf()],
    };
    if let Some(there) = files.iter().find(|file| file.exists()) {
        let message = format!("`{}` already exists; remove it, or use another name", there.display());
        return Err(Error::config("OUT", message));
    }
    let adapters = if scope == ExportScope::Adapters { trained.load_with_base()? } else { None };
    if adapters.is_some() && format != ExportFormat::HuggingFace {
        let message = "adapters can only be written as a folder; add `--merge` to write the whole model in this format";
        return Err(Error::config("OUT", message));
    }
    let parent = out.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(parent).map_err(Error::io("create", parent))?;
    let (work, _lock) = temporary::staging_folder(out, ".export-")?;
    match format {
        ExportFormat::HuggingFace => {
            let folder = work.path().join(name);
            std::fs::create_dir(&folder).map_err(Error::io("create", &folder))?;
            match &adapters {
                Some((spec, adapters)) => hugging_face::write_adapters(trained, spec, adapters, dtype, &folder)?,
                None => hugging_face::write(trained, &trained.weights(dtype)?, dtype, &folder)?,
            }
        }
        ExportFormat::Gguf => gguf::write(trained, trained.weights(dtype)?, encoding, name, &work.path().join(name))?,
        ExportFormat::Onnx(onnx) => {
            onnx::write(&trained.spec, &trained.weights(dtype)?, onnx, &work.path().join(name))?;
        }
    }
    temporary::publish(&work, &files)?;
    Ok(files)
}

fn write_file(path: &Path, fill: impl FnOnce(&mut BufWriter<File>) -> Result<()>) -> Result<()> {
    let mut file = BufWriter::new(File::create(path).map_err(Error::io("create", path))?);
    fill(&mut file)?;
    file.flush().map_err(Error::io("write", path))
}
