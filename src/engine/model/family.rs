//! The interface of a model family.

use super::families::llama;
use super::spec::{ModelSpec, ModuleId};
use serde_json::{Map, Value};

/// A metadata key of GGUF, the key of `config.json` that means the same, and whether it is required.
pub(crate) type GgufKey = (&'static str, &'static str, bool);

/// How GGUF files describe a family. Names and row orders follow llama.cpp's converter.
pub(crate) struct GgufFormat {
    /// `general.architecture`.
    pub(crate) architecture: &'static str,
    /// Its keys, without the architecture's name in front.
    pub(crate) keys: &'static [GgufKey],
    /// Whether the rows of the two halves of each query and key head are interleaved.
    pub(crate) interleaved: bool,
}

/// A family: its `config.json`, its names and its GGUF files. One file each, listed in `families.rs`; names default to
/// those of Llama.
pub(super) trait ModelFamily: Sync {
    /// `model_type` in `config.json`.
    fn model_type(&self) -> &'static str;

    /// Reads a `config.json`, or returns an error that names a key.
    fn read(&self, keys: &ConfigReader<'_>) -> Result<ModelSpec, String>;

    /// The `config.json` of a spec, without the type of the weights.
    fn write(&self, spec: &ModelSpec) -> Value;

    /// A layer's name, its parameters' without `.weight` and `.bias`.
    fn layer_name(&self, layer: ModuleId) -> String {
        llama::layer_name(layer)
    }

    /// A stored tensor's name as a parameter's; `None` for a buffer that is no parameter.
    fn parameter_name<'a>(&self, tensor: &'a str) -> Option<&'a str> {
        llama::parameter_name(tensor)
    }

    /// The prefix that transformers gives every parameter except the head's.
    fn prefix(&self) -> &'static str {
        "model."
    }

    /// Built-in architectures with a name.
    fn names(&self) -> &'static [&'static str] {
        &[]
    }

    /// The architecture of one of those names, with dropout off.
    fn named(&self, _name: &str) -> Option<ModelSpec> {
        None
    }

    /// Its GGUF files.
    fn gguf(&self) -> GgufFormat;

    /// Whether a GGUF file with these metadata keys is of this family and not of another with the same architecture.
    fn claims_gguf(&self, _keys: &Map<String, Value>) -> bool {
        true
    }

    /// Moves metadata that only this family has from `keys` to the `config.json`.
    fn read_gguf(&self, _keys: &mut Map<String, Value>, _json: &mut Map<String, Value>) -> Result<(), String> {
        Ok(())
    }

    /// Adds metadata that only this family has; rejects what llama.cpp would compute differently.
    fn write_gguf(&self, spec: &ModelSpec, _keys: &mut Vec<(&'static str, Value)>) -> Result<(), String> {
        let family = self.model_type();
        let refused = format!("GGUF has no key for the windows of `{family}`; export it as a folder");
        if spec.sliding.is_some() { Err(refused) } else { Ok(()) }
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
