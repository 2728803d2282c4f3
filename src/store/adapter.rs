//! Adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! The tensors determine which layers have an adapter, the configuration determines its scale. A key that the engine
//! does not implement is rejected by name.

use super::checkpoint::Base;
use super::tensor_file::{TensorFile, write_tensors};
use crate::digest::{MAX_SMALL_FILE, read_at_most};
use crate::engine::kernels::{WeightLayout, view};
use crate::engine::model::{
    ALL_LINEAR, Lora, ModelSpec, ModuleId, ParamRole, ParamSpec, Parameters, is_parameter, stacked_experts,
};
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use regex::Regex;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};

/// The configuration's name.
pub const ADAPTER_CONFIG: &str = "adapter_config.json";
/// The tensors'.
pub const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";
/// PEFT's prefix of every name.
const PREFIX: &str = "base_model.model.";

/// Keys about an adapter's origin or training, which are ignored; the tensors determine the layers.
const IGNORED_KEYS: [&str; 23] = [
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "modules_to_save",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "target_modules",
    "target_parameters",
    "use_dora",
    "use_rslora",
];

/// An adapter on disk.
#[derive(Debug)]
pub struct AdapterFolder {
    path: PathBuf,
    config: AdapterConfig,
    file: TensorFile,
}

#[derive(Clone, Debug)]
struct AdapterConfig {
    r: usize,
    alpha: f64,
    /// Ranks of modules whose names match. The first match counts.
    ranks: Vec<(Regex, f64)>,
    /// Alphas of modules whose names match, likewise.
    alphas: Vec<(Regex, f64)>,
    dropout: f64,
    rslora: bool,
    dora: bool,
    /// The routers' and experts' parameters with adapters.
    target_parameters: Vec<String>,
    /// The base's name and the commit of its files.
    base: Option<Base>,
}

impl AdapterFolder {
    /// Whether `path` holds an adapter.
    pub fn exists(path: &Path) -> bool {
        path.join(ADAPTER_CONFIG).is_file()
    }

    /// Opens the folder and checks its configuration. Fails with [`Error::Model`] naming the file and the key or
    /// tensor.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let file = path.join(ADAPTER_CONFIG);
        let text = read_at_most(&file, MAX_SMALL_FILE).map_err(|error| match error {
            Error::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
                Error::model(path.display(), format!("there is no `{ADAPTER_CONFIG}`: not an adapter in PEFT's format"))
            }
            other => other,
        })?;
        let config = AdapterConfig::read(&text).map_err(|message| Error::model(file.display(), message))?;
        if !path.join(ADAPTER_WEIGHTS).is_file() && path.join("adapter_model.bin").is_file() {
            let message = "its weights are pickled (`adapter_model.bin`), and loading a pickle can run arbitrary code; \
                           save it again with PEFT's `save_pretrained`, which writes safetensors";
            return Err(Error::model(path.display(), message));
        }
        let file = TensorFile::open(path.join(ADAPTER_WEIGHTS))?;
        Ok(Self { path, config, file })
    }

    /// The path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The base model that the configuration names, without a digest.
    pub fn base(&self) -> Option<&Base> {
        self.config.base.as_ref()
    }

    /// `base` with these adapters. Fails with [`Error::Model`] naming a tensor that does not fit, because the adapter
    /// belongs to a different base.
    pub fn spec(&self, base: &ModelSpec) -> Result<ModelSpec> {
        let AdapterConfig { r, alpha, dropout, rslora, dora, ref target_parameters, .. } = self.config;
        let layers: BTreeMap<String, ModuleId> =
            base.base_parameters().into_iter().map(|entry| (base.layer_name(entry.layer), entry.layer)).collect();
        let in_config = |error: Error| Error::model(self.path.display(), error.to_string());
        let targets = Lora::targets(base, target_parameters).map_err(in_config)?;
        let linears = Lora::targets(base, &[ALL_LINEAR]).map_err(in_config)?;
        let mut lora = Lora { r, alpha, dropout, rslora, dora, targets, modules_to_save: BTreeSet::new() };
        lora.check_experts().map_err(in_config)?;
        let with_lora = |lora: &Lora| ModelSpec { lora: Some(lora.clone()), ..base.clone() };
        // The name of a tensor of all experts does not determine the parameter.
        let of_parameters = stored_names(&with_lora(&lora));
        for tensor in self.file.tensors().filter(|tensor| !of_parameters.contains(tensor.name)) {
            let foreign = || {
                tensor.error(format!(
                    "the engine adapts no such layer of `{}`, or the adapter belongs to a different base model",
                    base.family.model_type
                ))
            };
            let name = tensor.name.strip_prefix(PREFIX).and_then(|name| base.family.parameter(name));
            let name = name.ok_or_else(foreign)?;
            let part = [".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"]
                .into_iter()
                .find_map(|part| name.strip_suffix(part));
            let layer = part.or_else(|| name.rsplit_once('.').map(|(layer, _)| layer));
            let layer = layer.and_then(|layer| layers.get(layer));
            let layer = *layer.filter(|layer| part.is_none() || linears.contains(layer)).ok_or_else(foreign)?;
            if part.is_some() { &mut lora.targets } else { &mut lora.modules_to_save }.insert(layer);
        }
        if lora.targets.is_empty() {
            return Err(Error::model(
                self.file.path().display(),
                "it contains no adapter: no tensor name ends in `lora_A.weight`",
            ));
        }
        let ranks = lora.targets.iter().map(|layer| self.config.rank(base, *layer));
        lora.r = ranks.max().unwrap_or(r);
        lora.alpha *= self.config.divisor(lora.r) / self.config.divisor(r);
        let saved = Lora::names(base, &lora.modules_to_save, false);
        let checked = Lora::modules_to_save(base, &saved).map_err(in_config)?;
        let spec = with_lora(&Lora { modules_to_save: checked, ..lora });
        self.check(&spec)?;
        Ok(spec)
    }

    /// Checks that exactly the expected parameters exist, with their shapes.
    fn check(&self, spec: &ModelSpec) -> Result<()> {
        for entry in spec.parameters() {
            let stored = self.file.require(&stored_name(spec, &entry.name))?;
            let shape = self.stored_shape(spec, &entry);
            if stored.shape != shape {
                let message = format!(
                    "shape {:?}, but the base model and `r` = {} require {shape:?}",
                    stored.shape,
                    self.config.rank(spec, entry.layer)
                );
                return Err(stored.error(message));
            }
        }
        let known = stored_names(spec);
        match self.file.tensors().find(|tensor| !known.contains(tensor.name)) {
            Some(extra) => Err(extra.error("the configuration does not define this tensor")),
            None => Ok(()),
        }
    }

    /// The shape of a parameter in the file. A module's rank may be lower than the rank in `spec`.
    fn stored_shape(&self, spec: &ModelSpec, entry: &ParamSpec) -> Vec<usize> {
        let rank = self.config.rank(spec, entry.layer);
        match (stacked_factors(spec, entry), entry.role, &entry.shape[..]) {
            (Some([experts, outputs, r]), ..) => vec![outputs, r * experts],
            (_, ParamRole::LoraA, [_, inputs]) => vec![stacked_experts(spec, entry.layer) * rank, *inputs],
            (_, ParamRole::LoraB, [outputs, _]) => vec![*outputs, rank],
            (.., shape) => shape.to_vec(),
        }
    }

    /// Reads every trained parameter of [`AdapterFolder::spec`] into FP32 tensors. Factors of a lower rank are padded
    /// with zeros, and B is multiplied by the ratio of its module's scale to the scale in `spec`.
    pub fn read_parameters(&self, spec: &ModelSpec, into: &Parameters) -> Result<()> {
        let common_scale = spec.lora.as_ref().map_or(1.0, Lora::scale);
        for (entry, tensor) in into.layout().iter().zip(into.tensors()) {
            let stored = self.file.require(&stored_name(spec, &entry.name))?;
            let scale = self.config.scale(spec, entry.layer);
            let factor = if entry.role == ParamRole::LoraB { scale / common_scale } else { 1.0 };
            match stacked_factors(spec, entry) {
                Some([experts, outputs, r]) => {
                    let factors = Tensor::from_vec(stored.to_f32()?, (outputs, r, experts), &Device::Cpu)?;
                    tensor.slice_set(&factors.permute((2, 0, 1))?.contiguous()?.flatten(0, 1)?, 0, 0)?;
                }
                None if stored.shape == entry.shape && factor == 1.0 => {
                    view::write_f32(tensor, |out| stored.read_f32(out))??;
                }
                None => {
                    let factors = Tensor::from_vec(stored.to_f32()?, stored.shape, &Device::Cpu)?;
                    let missing = |axis: usize| entry.shape[axis] - stored.shape[axis];
                    let padded = factors.pad_with_zeros(0, 0, missing(0))?.pad_with_zeros(1, 0, missing(1))?;
                    tensor.slice_set(&(padded * factor)?, 0, 0)?;
                }
            }
        }
        Ok(())
    }
}

/// The experts, outputs and rank of the second factors of all experts, which PEFT stores as `[outputs, r · experts]`
/// with the experts' columns interleaved; `None` for other parameters.
fn stacked_factors(spec: &ModelSpec, entry: &ParamSpec) -> Option<[usize; 3]> {
    let experts = stacked_experts(spec, entry.layer);
    let factors = entry.role == ParamRole::LoraB;
    (factors && experts > 1).then(|| [experts, entry.shape[0] / experts, entry.shape[1]])
}

/// The names of all tensors that PEFT stores for `spec`.
fn stored_names(spec: &ModelSpec) -> BTreeSet<String> {
    spec.parameters().iter().map(|entry| stored_name(spec, &entry.name)).collect()
}

/// The name under which PEFT stores a trained parameter.
fn stored_name(spec: &ModelSpec, name: &str) -> String {
    format!("{PREFIX}{}", spec.family.stored_name(name))
}

/// The text of `adapter_config.json` for the adapters of `spec` over `base`.
pub fn adapter_config(spec: &ModelSpec, base: Option<&Base>) -> String {
    let Some(lora) = &spec.lora else { return String::new() };
    let saved = Lora::names(spec, &lora.modules_to_save, true);
    let (parameters, modules) = lora.targets.iter().partition(|layer| is_parameter(layer.op));
    let parameters = Lora::parameter_names(spec, &parameters);
    let config = json!({
        "base_model_name_or_path": base.map_or("", |base| &base.name),
        "bias": "none",
        "fan_in_fan_out": spec.weight_layout == WeightLayout::InOut,
        "inference_mode": true,
        "init_lora_weights": true,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "modules_to_save": if saved.is_empty() { Value::Null } else { saved.into() },
        "peft_type": "LORA",
        "r": lora.r,
        "revision": base.and_then(|base| base.revision.as_ref()),
        "target_modules": Lora::names(spec, &modules, false),
        "target_parameters": if parameters.is_empty() { Value::Null } else { parameters.into() },
        "task_type": "CAUSAL_LM",
        "use_dora": lora.dora,
        "use_rslora": lora.rslora,
    });
    format!("{config:#}\n")
}

/// Writes the trained parameters of `spec` in PEFT's format to `out`; `path` is its name in error messages.
pub fn write_adapter(out: &mut dyn Write, path: &Path, spec: &ModelSpec, parameters: &Parameters) -> Result<()> {
    let stored = |(entry, tensor): (&ParamSpec, &Tensor)| {
        let tensor = match stacked_factors(spec, entry) {
            Some(sizes) => tensor.reshape(&sizes)?.permute((1, 2, 0))?.contiguous()?.flatten(1, 2)?,
            None => tensor.clone(),
        };
        Ok((stored_name(spec, &entry.name), tensor))
    };
    let tensors: Result<Vec<_>> = parameters.layout().iter().zip(parameters.tensors()).map(stored).collect();
    write_tensors(out, path, &tensors?)
}

impl AdapterConfig {
    fn rank(&self, spec: &ModelSpec, layer: ModuleId) -> usize {
        of_first_match(&self.ranks, spec, layer).map_or(self.r, |rank| rank as usize)
    }

    /// The scale of the output of a module's adapter.
    fn scale(&self, spec: &ModelSpec, layer: ModuleId) -> f64 {
        let alpha = of_first_match(&self.alphas, spec, layer).unwrap_or(self.alpha);
        alpha / self.divisor(self.rank(spec, layer))
    }

    fn divisor(&self, rank: usize) -> f64 {
        if self.rslora { (rank as f64).sqrt() } else { rank as f64 }
    }

    fn read(text: &[u8]) -> Result<Self, String> {
        let json: Map<String, Value> = serde_json::from_slice(text).map_err(|error| format!("not JSON: {error}"))?;
        let kind = json.get("peft_type").and_then(Value::as_str).unwrap_or_default();
        if kind != "LORA" {
            return Err(format!("`peft_type` is `{kind}`; supported: `LORA`"));
        }
        for (key, value) in &json {
            let supported = match key.as_str() {
                "peft_type" => true,
                "bias" => value.as_str().is_none_or(|bias| bias == "none"),
                "task_type" => value.as_str().is_none_or(|task| task == "CAUSAL_LM"),
                // Others take a part of the base's weights into the adapter.
                "init_lora_weights" => matches!(value.as_str(), None | Some("gaussian" | "eva" | "orthogonal")),
                key if IGNORED_KEYS.contains(&key) => true,
                _ => is_disabled(value),
            };
            if !supported {
                return Err(format!("`{key}` is {value}, which is not supported"));
            }
        }
        let number = |key: &str, default: f64, fits: &dyn Fn(f64) -> bool, wanted: &str| match json.get(key) {
            None | Some(Value::Null) => Ok(default),
            Some(value) => {
                let number = value.as_f64().filter(|number| fits(*number));
                number.ok_or_else(|| format!("`{key}` is {value}; it must be {wanted}"))
            }
        };
        let patterns = |key: &str, fits: &dyn Fn(f64) -> bool, wanted: &str| {
            let Some(value) = json.get(key).filter(|value| !is_disabled(value)) else { return Ok(Vec::new()) };
            if json.get("target_parameters").is_some_and(|value| !is_disabled(value)) {
                return Err(format!("`{key}` is {value}, which is not supported with `target_parameters`"));
            }
            let entry = |(name, value): (&String, &Value)| {
                // PEFT's: the end of a name, by whole parts.
                let name = Regex::new(&format!(r"^(.*\.)?({name})$")).ok()?;
                Some((name, value.as_f64().filter(|number| fits(*number))?))
            };
            let entries = value.as_object().and_then(|map| map.iter().map(entry).collect::<Option<Vec<_>>>());
            entries.ok_or_else(|| format!("`{key}` is {value}; it must map regular expressions to {wanted}"))
        };
        let flag = |key: &str| json.get(key).and_then(Value::as_bool).unwrap_or(false);
        let text = |key: &str| json.get(key).and_then(Value::as_str).map(ToOwned::to_owned);
        let rank = |r: f64| r.fract() == 0.0 && (1.0..=f64::from(1 << 20)).contains(&r);
        let positive = |alpha: f64| alpha.is_finite() && alpha > 0.0;
        let revision = text("revision");
        let sha256 = String::new();
        Ok(Self {
            r: number("r", 8.0, &rank, "a whole number from 1")? as usize,
            alpha: number("lora_alpha", 8.0, &positive, "a positive number")?,
            ranks: patterns("rank_pattern", &rank, "whole numbers from 1")?,
            alphas: patterns("alpha_pattern", &positive, "positive numbers")?,
            dropout: number("lora_dropout", 0.0, &|rate| (0.0..1.0).contains(&rate), "a number in [0, 1)")?,
            rslora: flag("use_rslora"),
            dora: flag("use_dora"),
            target_parameters: match json.get("target_parameters") {
                Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).map(ToOwned::to_owned).collect(),
                None | Some(Value::Null) => Vec::new(),
                Some(other) => return Err(format!("`target_parameters` is {other}; it must be a list")),
            },
            base: text("base_model_name_or_path").map(|name| Base { name, revision, sha256 }),
        })
    }
}

fn of_first_match(patterns: &[(Regex, f64)], spec: &ModelSpec, layer: ModuleId) -> Option<f64> {
    let name = spec.family.stored_name(&spec.layer_name(layer));
    patterns.iter().find(|(pattern, _)| pattern.is_match(&name)).map(|(_, number)| *number)
}

/// Whether a value means that a feature is not used.
fn is_disabled(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// PEFT writes the settings of EVA into every adapter that begins with it.
    #[test]
    fn settings_of_initial_values_are_ignored() {
        let read = |init: &str| {
            let config = json!({"peft_type": "LORA", "r": 4, "init_lora_weights": init, "eva_config": {"rho": 1.0}});
            AdapterConfig::read(config.to_string().as_bytes())
        };
        assert_eq!(read("eva").unwrap().r, 4);
        assert!(read("olora").unwrap_err().contains("`init_lora_weights` is \"olora\""));
    }
}
