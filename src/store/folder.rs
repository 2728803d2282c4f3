//! A Hugging Face model folder: `config.json` and safetensors, in one file or in shards, checked against each other.

use crate::digest::{MAX_SMALL_FILE, read_at_most};
use crate::engine::model::{ModelSpec, ModuleId, ModuleOp};
use crate::store::mxfp4;
use crate::store::tensor_file::{Dtype, TensorFile, TensorView};
use crate::{Error, Result};
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

const CONFIG: &str = "config.json";
pub(super) const SINGLE_FILE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";
const HEAD: &str = "lm_head.weight";
/// Maximum number of shards; the largest models have about two hundred.
const MAX_SHARDS: usize = 4096;
/// The ends of the names of a tensor's blocks and exponents.
const MXFP4: [&str; 2] = ["_blocks", "_scales"];

/// A model on disk that has every tensor with the right shape and a dtype that can be widened to f32.
#[derive(Debug)]
pub struct ModelFolder {
    path: PathBuf,
    spec: ModelSpec,
    files: Vec<TensorFile>,
    /// The file and the name there of each parameter.
    tensor_index: BTreeMap<String, (usize, String)>,
}

impl ModelFolder {
    /// Opens the folder and checks it without reading values, except of a tied head that is stored anyway.
    ///
    /// Tensors may have the prefix `transformer.`; buffers of the attention mask are skipped. Fails with
    /// [`Error::Model`] with the folder or file and the first problem: a key of the configuration; only pickled
    /// weights; a shard outside the folder; a missing or extra tensor, or one of the wrong shape.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let spec = Self::read_config(&path)?;
        let files = weight_files(&path)?;
        check_depth(&spec, files.iter().map(|file| file.tensors().len()).sum(), &path.join(CONFIG))?;
        let tensor_index = tensor_index(&files, &spec)?;
        let mut folder = Self { path, spec, files, tensor_index };
        folder.resolve_tied_head();
        let Err(error) = folder.check_parameters() else { return Ok(folder) };
        let Some(method) = folder.quantization() else { return Err(error) };
        let supported = "use the model with weights in 16 or 32 bits, or as a GGUF file";
        Err(folder.error(format!("its weights are quantized by `{method}`, which is not supported; {supported}")))
    }

    /// The shape in the folder's configuration; the weights may be missing.
    pub fn read_config(folder: &Path) -> Result<ModelSpec> {
        let file = folder.join(CONFIG);
        let text = read_at_most(&file, MAX_SMALL_FILE).map_err(|error| match error {
            Error::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
                Error::model(folder.display(), "there is no `config.json`: not a model folder")
            }
            other => other,
        })?;
        ModelSpec::from_json(&text, &file.display().to_string())
    }

    /// The folder's tokenizer, if there is one.
    pub fn tokenizer_in(folder: &Path) -> Option<PathBuf> {
        Some(folder.join("tokenizer.json")).filter(|path| path.is_file())
    }

    /// The folder's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The model's shape. `tied` follows the tensors.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// The tensor of a parameter, named as in [`ModelSpec::parameters`].
    pub fn get(&self, name: &str) -> Option<TensorView<'_>> {
        matrix_of(&self.spec, name, |name| {
            let (file, stored) = self.tensor_index.get(name)?;
            self.files[*file].get(stored)
        })
    }

    /// Fills `out` with values of a parameter, widened to f32, starting at value `first`; an expert's are read whole.
    pub fn read_part(&self, name: &str, first: usize, out: &mut [f32]) -> Result<()> {
        let Some(parts) = self.mxfp4(name) else { return self.require(name)?.read_part(first, out) };
        mxfp4::read_transposed(parts, out);
        Ok(())
    }

    /// The blocks and exponents of a weight of an expert in MXFP4.
    fn mxfp4(&self, name: &str) -> Option<[TensorView<'_>; 2]> {
        let part = |suffix: &str| {
            matrix_of(&self.spec, name, |stack| {
                let (file, stored) = self.tensor_index.get(&format!("{stack}{suffix}"))?;
                self.files[*file].get(stored)
            })
        };
        Some([part(MXFP4[0])?, part(MXFP4[1])?])
    }

    fn require(&self, name: &str) -> Result<TensorView<'_>> {
        self.get(name).ok_or_else(|| self.error(format!("tensor `{name}` is missing")))
    }

    /// Decides whether the head is tied: as in transformers, a stored head that differs from the embedding is not.
    fn resolve_tied_head(&mut self) {
        if !self.spec.tie_word_embeddings {
            return;
        }
        let table = format!("{}.weight", self.spec.layer_name(ModuleId::global(ModuleOp::Embedding)));
        let (Some(head), Some(embedding)) = (self.get(HEAD), self.get(&table)) else { return };
        if head.shape != embedding.shape || head.dtype != embedding.dtype || head.bytes != embedding.bytes {
            self.spec.tie_word_embeddings = false;
        } else {
            self.tensor_index.remove(HEAD);
        }
    }

    /// The quantization method of the weights, if it is not MXFP4. Such weights have different tensors.
    fn quantization(&self) -> Option<String> {
        let text = read_at_most(&self.path.join(CONFIG), MAX_SMALL_FILE).ok()?;
        let config: Value = serde_json::from_slice(&text).ok()?;
        let method = config["quantization_config"]["quant_method"].as_str()?;
        Some(method.to_owned()).filter(|method| method != "mxfp4")
    }

    fn check_parameters(&self) -> Result<()> {
        let parameters = self.spec.parameters().into_iter();
        let shapes: BTreeMap<String, Vec<usize>> = parameters.map(|entry| (entry.name, entry.shape)).collect();
        for (name, expected) in &shapes {
            if let (Some(parts), &[inputs, outputs]) = (self.mxfp4(name), &expected[..]) {
                mxfp4::check(parts, [inputs, outputs])?;
                continue;
            }
            let Some(view) = self.get(name) else {
                return Err(self.error(format!("tensor `{name}` of shape {expected:?} is missing")));
            };
            if view.shape != expected {
                return Err(view.error(format!("shape {:?}, but `config.json` requires {expected:?}", view.shape)));
            }
            if !matches!(view.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
                return Err(view.error(format!("dtype {} is not one of F32, F16, BF16", view.dtype)));
            }
        }
        let tensor = |name: &String| self.spec.family.stack_of(name).map_or_else(|| name.clone(), |(stack, _)| stack);
        let known: BTreeSet<String> = shapes.keys().map(tensor).collect();
        let is_known = |name: &str| {
            known.contains(name)
                || MXFP4.iter().any(|part| name.strip_suffix(part).is_some_and(|name| known.contains(name)))
        };
        match self.tensor_index.keys().find(|name| !is_known(name)) {
            None => Ok(()),
            Some(extra) => Err(self.error(format!("tensor `{extra}` does not belong to this model"))),
        }
    }

    fn error(&self, message: String) -> Error {
        Error::model(self.path.display(), message)
    }
}

/// The stored values of a parameter: a tensor, or a matrix of a tensor of all experts. `find` returns a tensor by its
/// name.
pub(super) fn matrix_of<'a>(
    spec: &ModelSpec,
    parameter: &str,
    find: impl FnOnce(&str) -> Option<TensorView<'a>>,
) -> Option<TensorView<'a>> {
    match spec.family.stack_of(parameter).zip(spec.experts) {
        Some(((stack, place), experts)) => Some(find(&stack)?.matrix(place, experts.count)),
        None => find(parameter),
    }
}

/// Maps the one file or all shards.
fn weight_files(folder: &Path) -> Result<Vec<TensorFile>> {
    if folder.join(SINGLE_FILE).exists() {
        return Ok(vec![TensorFile::open(folder.join(SINGLE_FILE))?]);
    }
    let index = folder.join(INDEX);
    if index.exists() {
        let text = read_at_most(&index, MAX_SMALL_FILE)?;
        let shards = shards(&text).map_err(|message| Error::model(index.display(), message))?;
        return shards.into_iter().map(|shard| TensorFile::open(folder.join(shard))).collect();
    }
    let pickled = ["pytorch_model.bin", "pytorch_model.bin.index.json"].iter().any(|name| folder.join(name).exists());
    let message = if pickled {
        "its weights are pickled (`pytorch_model.bin`), and loading a pickle can run arbitrary code; \
         save the model as `model.safetensors` first (in Python: `model.save_pretrained(folder)`)"
    } else {
        "there is neither `model.safetensors` nor `model.safetensors.index.json`"
    };
    Err(Error::model(folder.display(), message))
}

/// The files listed in an untrusted index of weights, each a safetensors file in its folder.
pub(super) fn shards(index: &[u8]) -> Result<BTreeSet<String>, String> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let index: Index = serde_json::from_slice(index).map_err(|error| format!("not an index of weights: {error}"))?;
    for (tensor, file) in &index.weight_map {
        let is_here = Path::new(file).file_name() == Some(OsStr::new(file)) && !file.contains(char::is_control);
        if !is_here || !file.ends_with(".safetensors") {
            let file = file.escape_debug();
            return Err(format!(
                "tensor `{tensor}` is listed in `{file}`, which is not a safetensors file of this folder"
            ));
        }
    }
    let files: BTreeSet<String> = index.weight_map.into_values().collect();
    match files.len() {
        0 => Err("it names no tensors".into()),
        1..=MAX_SHARDS => Ok(files),
        more => Err(format!("lists {more} files; the maximum is {MAX_SHARDS}")),
    }
}

/// Finds every parameter by its name without prefix, and rejects duplicates.
fn tensor_index(files: &[TensorFile], spec: &ModelSpec) -> Result<BTreeMap<String, (usize, String)>> {
    let mut tensor_index = BTreeMap::new();
    for (index, file) in files.iter().enumerate() {
        for view in file.tensors() {
            let Some(name) = spec.family.parameter(view.name) else { continue };
            if let Some((other, _)) = tensor_index.insert(name.to_owned(), (index, view.name.to_owned())) {
                let other: &TensorFile = &files[other];
                return Err(view.error(format!("it is also in `{}`", other.path().display())));
            }
        }
    }
    Ok(tensor_index)
}

/// Rejects a model with more blocks than tensors before anything is allocated for each block.
pub(super) fn check_depth(spec: &ModelSpec, tensors: usize, file: &Path) -> Result<()> {
    if spec.num_layers <= tensors {
        return Ok(());
    }
    let message = format!("it has {} blocks, but the weights have {tensors} tensors", spec.num_layers);
    Err(Error::model(file.display(), message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::model::ParamSpec;
    use crate::store::tensor_file::write_tensors;
    use candle_core::{DType, Device, Tensor};
    use proptest::prelude::*;
    use tempfile::TempDir;

    type Tensors = Vec<(String, Tensor)>;

    fn spec() -> ModelSpec {
        ModelSpec {
            vocab_size: 11,
            max_position_embeddings: 5,
            intermediate_size: 12,
            ..ModelSpec::named("tiny").unwrap().resized(2, 4, 2)
        }
    }

    /// Every parameter, filled with distinct values.
    fn tensors(spec: &ModelSpec) -> Tensors {
        let make = |(index, ParamSpec { name, shape, .. }): (usize, ParamSpec)| {
            let count: usize = shape.iter().product();
            let values: Vec<f32> = (0..count).map(|i| (index * 100 + i) as f32).collect();
            (name, Tensor::from_vec(values, shape, &Device::Cpu).unwrap())
        };
        spec.parameters().into_iter().enumerate().map(make).collect()
    }

    fn save(folder: &TempDir, file: &str, tensors: &Tensors) {
        let path = folder.path().join(file);
        write_tensors(&mut std::fs::File::create(&path).unwrap(), &path, tensors).unwrap();
    }

    fn folder(spec: &ModelSpec, tensors: &Tensors) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), spec.to_json("float32")).unwrap();
        save(&folder, SINGLE_FILE, tensors);
        folder
    }

    fn refused(folder: &TempDir) -> String {
        ModelFolder::open(folder.path()).unwrap_err().to_string()
    }

    fn assert_reads(folder: &TempDir, expected: &Tensors) {
        let model = ModelFolder::open(folder.path()).unwrap();
        for (name, tensor) in expected {
            let mut values = vec![0.0; tensor.elem_count()];
            model.read_part(name, 0, &mut values).unwrap();
            let expected = tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(values, expected, "{name}");
        }
        let message = model.read_part("h.7.ln_1.bias", 0, &mut []).unwrap_err().to_string();
        assert!(message.contains("`h.7.ln_1.bias` is missing"), "{message}");
    }

    #[test]
    fn with_and_without_prefix_in_every_dtype() {
        for (prefix, dtype) in [("", DType::F32), ("transformer.", DType::F16), ("transformer.", DType::BF16)] {
            let plain: Tensors =
                tensors(&spec()).into_iter().map(|(name, t)| (name, t.to_dtype(dtype).unwrap())).collect();
            let stored = plain.iter().map(|(name, tensor)| (format!("{prefix}{name}"), tensor.clone())).collect();
            assert_reads(&folder(&spec(), &stored), &plain);
        }
    }

    #[test]
    fn mask_buffers_are_skipped() {
        let mut stored = tensors(&spec());
        for name in ["h.0.attn.bias", "transformer.h.1.attn.masked_bias"] {
            stored.push((name.into(), Tensor::zeros((1, 1, 5, 5), DType::F32, &Device::Cpu).unwrap()));
        }
        assert_reads(&folder(&spec(), &stored), &tensors(&spec()));
    }

    #[test]
    fn the_text_part_of_a_model_of_images_and_text_is_read() {
        let llama = ModelSpec { vocab_size: 11, ..ModelSpec::named("smollm2-135m").unwrap().resized(2, 4, 2) };
        let mut mistral = llama.config();
        mistral["model_type"] = "ministral3".into();
        let mistral = ModelSpec::from_json(mistral.to_string().as_bytes(), "x").unwrap();
        for (prefix, spec) in [("language_model.model.", llama), ("model.language_model.", mistral)] {
            let text = tensors(&spec);
            let mut stored: Tensors =
                text.iter().map(|(name, tensor)| (format!("{prefix}{name}"), tensor.clone())).collect();
            for image in ["vision_tower.patches.weight", "model.multi_modal_projector.weight"] {
                stored.push((image.into(), Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap()));
            }
            let folder = folder(&spec, &stored);
            let mut text_config = spec.config();
            text_config["tie_word_embeddings"] = false.into();
            let config =
                serde_json::json!({"model_type": "mistral3", "text_config": text_config, "tie_word_embeddings": true});
            std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
            assert_eq!(ModelFolder::read_config(folder.path()).unwrap(), spec);
            assert_reads(&folder, &text);
        }
    }

    #[test]
    fn a_head_is_tied_stored_twice_or_separate() {
        let tied = spec();
        let mut stored = tensors(&tied);
        let embedding = stored.iter().find(|(name, _)| name == "wte.weight").unwrap().1.clone();
        stored.push((HEAD.into(), embedding.clone()));
        assert_reads(&folder(&tied, &stored), &tensors(&tied));

        stored.last_mut().unwrap().1 = (embedding + 1.0).unwrap();
        assert_reads(&folder(&tied, &stored), &stored);

        let separate = ModelSpec { tie_word_embeddings: false, ..tied };
        assert_reads(&folder(&separate, &stored), &stored);
        stored.pop();
        assert!(refused(&folder(&separate, &stored)).contains("`lm_head.weight` of shape [11, 4] is missing"));
    }

    #[test]
    fn the_method_of_quantized_weights_is_named() {
        let mut stored = tensors(&spec());
        let folder = folder(&spec(), &stored);
        let mut config = spec().config();
        config["quantization_config"] = serde_json::json!({"quant_method": "bitsandbytes"});
        std::fs::write(folder.path().join(CONFIG), config.to_string()).unwrap();
        // A merged model may have kept the key.
        assert_reads(&folder, &stored);
        stored.pop();
        save(&folder, SINGLE_FILE, &stored);
        assert!(refused(&folder).contains("its weights are quantized by `bitsandbytes`"), "{}", refused(&folder));
    }

    #[test]
    fn one_tensor_misshapen_or_twice_is_named() {
        let good = tensors(&spec());
        let mut bad = good.clone();
        let weight = bad.iter_mut().find(|(name, _)| name == "h.0.attn.c_attn.weight").unwrap();
        weight.1 = weight.1.t().unwrap();
        let message = refused(&folder(&spec(), &bad));
        assert!(message.contains("tensor `h.0.attn.c_attn.weight`: shape [12, 4], but"), "{message}");
        assert!(message.contains("[4, 12]"), "{message}");

        bad.clone_from(&good);
        bad.push(("transformer.ln_f.bias".into(), good[0].1.clone()));
        assert!(refused(&folder(&spec(), &bad)).contains("`transformer.ln_f.bias`: it is also in"));
    }

    #[test]
    fn shards_are_read_and_must_be_in_the_folder() {
        let all = tensors(&spec());
        let whole = folder(&spec(), &Tensors::new());
        std::fs::remove_file(whole.path().join(SINGLE_FILE)).unwrap();
        let (first, second) = all.split_at(9);
        save(&whole, "model-1.safetensors", &first.to_vec());
        save(&whole, "model-2.safetensors", &second.to_vec());
        let index = |map: serde_json::Value| {
            let json = serde_json::json!({ "metadata": {"total_size": 1}, "weight_map": map });
            std::fs::write(whole.path().join(INDEX), json.to_string()).unwrap();
        };
        index(serde_json::json!({"a": "model-1.safetensors", "b": "model-2.safetensors"}));
        assert_reads(&whole, &all);
        index(serde_json::json!({"a": "model-1.safetensors"}));
        assert!(refused(&whole).contains(&format!("`{}` of shape", second[0].0)));
        for outside in ["../model-2.safetensors", "/x.safetensors", "a/b.safetensors", "..", ".", "pytorch_model-1.bin"]
        {
            index(serde_json::json!({"a": outside}));
            assert!(refused(&whole).contains("is not a safetensors file of this folder"), "{outside}");
        }
        index(serde_json::json!({}));
        assert!(refused(&whole).contains("it names no tensors"));
    }

    proptest! {
        #[test]
        fn any_index_is_parsed_or_rejected(bytes in proptest::collection::vec(any::<u8>(), 0..300), file in ".*") {
            let _ = shards(&bytes);
            let json = serde_json::json!({"weight_map": {"a": file}});
            if let Ok(files) = shards(json.to_string().as_bytes()) {
                prop_assert!(files.iter().all(|file| Path::new(file).file_name().is_some_and(|name| name == file.as_str())));
            }
        }
    }
}
