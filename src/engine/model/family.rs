//! A model family as data.

use super::spec::{ModelSpec, ModuleId};
use candle_core::Tensor;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fmt;

/// A metadata key of GGUF, the key of `config.json` that means the same, and whether it is required.
pub(crate) type GgufKey = (&'static str, &'static str, bool);

/// Metadata of a GGUF file: keys without the architecture's name in front, and values.
pub(crate) type GgufEntries = Vec<(&'static str, Value)>;

/// The name and the shape of a built-in architecture.
pub(crate) type NamedModel = (&'static str, fn() -> ModelSpec);

/// How GGUF files describe a family. Names and row orders follow llama.cpp's converter.
#[expect(clippy::struct_excessive_bools, reason = "families' files differ in these ways independently")]
pub(crate) struct GgufFormat {
    /// `general.architecture`.
    pub(crate) architecture: &'static str,
    /// Tables of its keys, without the architecture's name in front.
    pub(crate) keys: &'static [&'static [GgufKey]],
    /// Whether the rows of the two halves of each query and key head are interleaved.
    pub(crate) interleaved: bool,
    /// Whether gate and up are two tensors in a file although the family has one.
    pub(crate) splits_gate_up: bool,
    /// Whether there are biases of attention's output and of MLPs.
    pub(crate) biases: bool,
    /// The only `tie_word_embeddings` of files; `None` if both exist.
    pub(crate) tied_head: Option<bool>,
    /// The `rope_type` whose divisors of frequencies are tensors of files.
    pub(crate) frequency_factors: Option<&'static str>,
    /// Whether a key can change the factor of YaRN's cosines and sines.
    pub(crate) yarn_log_multiplier: bool,
    /// The `truncate` of YaRN in files, which have no key for it.
    pub(crate) yarn_truncates: bool,
    /// The name of the norm in front of the MLP.
    pub(crate) mlp_norm: &'static str,
    /// The name of the norm before the head.
    pub(crate) final_norm: &'static str,
    /// Whether a file with these metadata keys is of this family and not of another with the same architecture.
    pub(super) claims: fn(keys: &Map<String, Value>) -> bool,
    /// Moves metadata that only this family has from `keys` to the `config.json`.
    pub(crate) read: fn(keys: &mut Map<String, Value>, json: &mut Map<String, Value>),
    /// Adds metadata that only this family has; rejects what llama.cpp would compute differently.
    pub(crate) write: fn(spec: &ModelSpec, keys: &mut GgufEntries) -> Result<(), String>,
}

/// How files have the parameters of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExpertTensors {
    /// Each in a separate tensor.
    Separate,
    /// The parameters of all experts, stacked as those of a layer: `input_linear.weight`.
    OfLayer,
    /// The parameters of all experts, stacked: `down_proj` and `down_proj_bias`.
    Plain,
}

/// A model family: the keys of its `config.json`, its names and its GGUF files. One file each, listed in `families.rs`;
/// Llama's fields are the defaults.
pub struct Family {
    /// `model_type` in `config.json`.
    pub(crate) model_type: &'static str,
    /// The class in transformers.
    pub(super) class: &'static str,
    /// Keys of `config.json` that mean the same as other keys: transformers' `attribute_map`.
    pub(super) aliases: &'static [(&'static str, &'static str)],
    /// Keys of `config.json` that turn biases on: of attention, and of MLPs.
    pub(super) bias_keys: &'static [&'static str],
    /// Built-in architectures with a name, with dropout off.
    pub(super) named: &'static [NamedModel],
    /// Reads a `config.json`, or returns an error that names a key.
    pub(super) read: fn(keys: &ConfigReader<'_>) -> Result<ModelSpec, String>,
    /// Returns the `config.json` of a spec, without the type of the weights.
    pub(super) write: fn(spec: &ModelSpec) -> Value,
    /// Returns a layer's name, its parameters' without `.weight` and `.bias`.
    pub(super) layer_name: fn(layer: ModuleId) -> String,
    /// Returns a stored tensor's name without the prefix that some files use; `None` for a buffer that is not a
    /// parameter.
    pub(super) parameter_name: fn(tensor: &str) -> Option<&str>,
    /// The prefix that transformers gives every parameter except the head's.
    pub(super) prefix: &'static str,
    /// How files have the parameters of experts.
    pub(super) expert_tensors: ExpertTensors,
    /// Its GGUF files.
    pub(crate) gguf: GgufFormat,
}

/// Prefixes of the text part's parameters in files of models of images and text: transformers', before and since 4.52.
const TEXT_PREFIXES: [&str; 2] = ["language_model.", "model.language_model."];
/// Prefixes of the image part's parameters in such files.
const IMAGE_PREFIXES: [&str; 3] = ["vision_tower.", "multi_modal_projector.", "visual."];

impl Family {
    /// Returns the name of a stored tensor without prefixes; `None` for a buffer, and for the image part of a model of
    /// images and text.
    pub(crate) fn parameter<'a>(&self, tensor: &'a str) -> Option<&'a str> {
        let inner = tensor.strip_prefix("model.").unwrap_or(tensor);
        if IMAGE_PREFIXES.iter().any(|prefix| inner.starts_with(prefix)) {
            return None;
        }
        (self.parameter_name)(TEXT_PREFIXES.iter().find_map(|prefix| tensor.strip_prefix(prefix)).unwrap_or(tensor))
    }

    /// The name under which transformers stores a parameter, or the tensor that has it and others.
    pub fn stored_name(&self, parameter: &str) -> String {
        let name = self.stack_of(parameter).map_or_else(|| parameter.to_owned(), |(stack, _)| stack);
        if name.starts_with("lm_head.") { name } else { format!("{}{name}", self.prefix) }
    }

    /// The tensor that has a matrix of each expert, and the place of `parameter` in it: `input_linear.3.weight` is
    /// matrix 3 of `input_linear.weight`. `None` if it has a separate tensor.
    pub(crate) fn stack_of(&self, parameter: &str) -> Option<(String, usize)> {
        let (layer, last) = parameter.rsplit_once('.').filter(|(_, last)| matches!(*last, "weight" | "bias"))?;
        let (stack, expert) = layer.rsplit_once('.')?;
        let name = match (self.expert_tensors, last) {
            (ExpertTensors::Separate, _) => return None,
            (ExpertTensors::OfLayer, _) => format!("{stack}.{last}"),
            (ExpertTensors::Plain, "bias") => format!("{stack}_bias"),
            (ExpertTensors::Plain, _) => stack.to_owned(),
        };
        Some((name, expert.parse().ok()?))
    }

    /// The tensors of a file with these parameters.
    pub(crate) fn stored_tensors<'a>(
        &self,
        parameters: impl IntoIterator<Item = (&'a str, &'a Tensor)>,
    ) -> candle_core::Result<Vec<(String, Tensor)>> {
        let mut stacks = BTreeMap::<String, BTreeMap<usize, Tensor>>::new();
        let mut tensors = Vec::new();
        for (parameter, tensor) in parameters {
            let name = self.stored_name(parameter);
            let tensor = tensor.clone();
            match self.stack_of(parameter) {
                Some((_, place)) => drop(stacks.entry(name).or_default().insert(place, tensor)),
                None => tensors.push((name, tensor)),
            }
        }
        for (name, matrices) in stacks {
            let matrices: Vec<Tensor> = matrices.into_values().collect();
            tensors.push((name, Tensor::stack(&matrices, 0)?));
        }
        Ok(tensors)
    }
}

impl PartialEq for Family {
    fn eq(&self, other: &Self) -> bool {
        self.model_type == other.model_type
    }
}

impl fmt::Debug for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.model_type)
    }
}

/// The largest dimension accepted; products of three stay within 64 bits.
const MAX_DIM: u64 = 1 << 20;
/// The maximum number of blocks. Each block's parameters are listed before their memory is known.
const MAX_BLOCKS: u64 = 1 << 12;

/// Reads keys of one type each; a key that is missing or `null` takes its default.
pub(crate) struct ConfigReader<'a>(pub(crate) &'a Map<String, Value>);

impl<'a> ConfigReader<'a> {
    fn get<T>(&self, key: &str, default: T, wanted: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<T, String> {
        match self.0.get(key) {
            None | Some(Value::Null) => Ok(default),
            Some(value) => read(value).ok_or_else(|| format!("`{key}` is {value}; it must be {wanted}")),
        }
    }

    pub(crate) fn positive_usize(&self, key: &str, default: usize) -> Result<usize, String> {
        self.up_to(MAX_DIM, key, default)
    }

    /// The number of blocks.
    pub(super) fn depth(&self, key: &str, default: usize) -> Result<usize, String> {
        self.up_to(MAX_BLOCKS, key, default)
    }

    fn up_to(&self, largest: u64, key: &str, default: usize) -> Result<usize, String> {
        let read = |value: &Value| value.as_u64().filter(|n| (1..=largest).contains(n)).map(|n| n as usize);
        self.get(key, default, &format!("a whole number from 1 to {largest}"), read)
    }

    /// A whole number that may be 0.
    pub(super) fn usize(&self, key: &str, default: usize) -> Result<usize, String> {
        let read = |value: &Value| value.as_u64().filter(|n| *n <= MAX_DIM).map(|n| n as usize);
        self.get(key, default, &format!("a whole number up to {MAX_DIM}"), read)
    }

    pub(crate) fn f64(&self, key: &str, default: f64) -> Result<f64, String> {
        self.get(key, default, "a number", Value::as_f64)
    }

    pub(super) fn positive(&self, key: &str, default: f64) -> Result<f64, String> {
        let value = self.f64(key, default)?;
        if value > 0.0 { Ok(value) } else { Err(format!("`{key}` is {value}; it must be positive")) }
    }

    /// A dropout probability.
    pub(super) fn dropout(&self, key: &str, default: f64) -> Result<f64, String> {
        let value = self.f64(key, default)?;
        let fits = (0.0..1.0).contains(&value);
        if fits { Ok(value) } else { Err(format!("`{key}` is {value}; a dropout probability must be in [0, 1)")) }
    }

    pub(super) fn bool(&self, key: &str, default: bool) -> Result<bool, String> {
        self.get(key, default, "true or false", Value::as_bool)
    }

    pub(super) fn str(&self, key: &str, default: &'a str) -> Result<&'a str, String> {
        self.get(key, default, "a string", Value::as_str)
    }

    /// Rejects a flag whose value the engine does not support.
    pub(super) fn require_value(&self, key: &str, supported: bool) -> Result<(), String> {
        if self.bool(key, supported)? == supported {
            Ok(())
        } else {
            Err(format!("`{key}` is {}; the engine supports {supported} only", !supported))
        }
    }

    /// `null` means that the model has no such token, so only a missing key takes the default.
    pub(super) fn token(&self, key: &str, default: Option<u32>) -> Result<Option<u32>, String> {
        match self.0.get(key) {
            Some(Value::Null) => Ok(None),
            _ => self.get(key, default, "a token id", |value| Some(Some(u32::try_from(value.as_u64()?).ok()?))),
        }
    }

    /// A list of tokens, or the only one; `null` means that there is none.
    pub(super) fn tokens(&self, key: &str, default: &[u32]) -> Result<Vec<u32>, String> {
        let found = match self.0.get(key) {
            None => return Ok(default.to_vec()),
            Some(Value::Null) => return Ok(Vec::new()),
            Some(found) => found,
        };
        let ids = found.as_array().map_or(std::slice::from_ref(found), Vec::as_slice);
        let ids: Option<Vec<u32>> = ids.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect();
        ids.filter(|ids| !ids.is_empty())
            .ok_or_else(|| format!("`{key}` is {found}; it must be a token id or a list of token ids"))
    }
}

/// How configurations write a list of tokens: one as itself.
pub(crate) fn one_or_more(ids: &[u32]) -> Value {
    match ids {
        [] => Value::Null,
        [id] => (*id).into(),
        ids => ids.into(),
    }
}
