//! The interface of a model family, and the list of families.

use super::gemma3::Gemma3;
use super::gpt2::Gpt2;
use super::llama::Llama;
use super::mistral::Mistral;
use super::qwen2::Qwen2;
use super::qwen3::Qwen3;
use super::spec::{FamilyRef, ModelSpec, ModuleId};
use serde_json::{Map, Value};

/// A family: its `config.json` and its names. One file each, listed in [`FAMILIES`].
pub(super) trait ModelFamily: Sync {
    /// `model_type` in `config.json`.
    fn model_type(&self) -> &'static str;

    /// Reads a `config.json`, or returns an error that names a key.
    fn read(&self, keys: &ConfigReader<'_>) -> Result<ModelSpec, String>;

    /// The `config.json` of a spec, without the type of the weights.
    fn write(&self, spec: &ModelSpec) -> Value;

    /// A layer's name, its parameters' without `.weight` and `.bias`.
    fn layer_name(&self, layer: ModuleId) -> String;

    /// A stored tensor's name as a parameter's; `None` for a buffer that is no parameter.
    fn parameter_name<'a>(&self, tensor: &'a str) -> Option<&'a str>;

    /// The prefix that transformers gives every parameter except the head's.
    fn prefix(&self) -> &'static str;

    /// Built-in architectures with a name.
    fn names(&self) -> &'static [&'static str];

    /// The architecture of one of those names, with dropout off.
    fn named(&self, name: &str) -> Option<ModelSpec>;
}

const FAMILIES: [FamilyRef; 6] = [
    FamilyRef(&Gpt2),
    FamilyRef(&Llama),
    FamilyRef(&Mistral),
    FamilyRef(&Qwen2),
    FamilyRef(&Qwen3),
    FamilyRef(&Gemma3),
];

/// The largest dimension accepted; products of three stay within 64 bits.
const MAX_DIM: u64 = 1 << 20;
/// The maximum number of blocks. Each block's parameters are listed before their memory is known.
const MAX_BLOCKS: u64 = 1 << 12;
/// The maximum number of parameters; their bytes in any number of copies stay within 64 bits.
const MAX_PARAMETERS: u64 = 1 << 48;

/// The spec that a `config.json` describes, or an error that names the key.
pub(super) fn read(keys: &ConfigReader<'_>) -> Result<ModelSpec, String> {
    let spec = family_of(keys)?.0.read(keys)?;
    let count = spec.parameter_count();
    if count > MAX_PARAMETERS {
        return Err(format!("it describes {count} parameters, more than the maximum of {MAX_PARAMETERS}"));
    }
    Ok(spec)
}

/// The family that a `config.json` names.
fn family_of(keys: &ConfigReader<'_>) -> Result<FamilyRef, String> {
    let model_type = keys.str("model_type", "")?;
    FAMILIES.into_iter().find(|family| family.model_type() == model_type).ok_or_else(|| {
        let known = FAMILIES.map(FamilyRef::model_type).join("`, `");
        format!("`model_type` is `{model_type}`; supported: `{known}`")
    })
}

pub(super) fn named(name: &str) -> Option<ModelSpec> {
    FAMILIES.iter().find_map(|family| family.0.named(name))
}

pub(super) fn names() -> Vec<&'static str> {
    FAMILIES.iter().flat_map(|family| family.0.names()).copied().collect()
}

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
