//! Low-rank adapters (Hu et al., 2021): the layers that have one, and their parameters.
//!
//! An adapted product is `x · W + scale · (x · Aᵀ) · Bᵀ`, with W frozen, A `[r, in]` and B `[out, r]`. rsLoRA
//! (Kalajdzievski, 2023) divides by √r instead of r. DoRA (Liu et al., 2024) gives every output of `W + scale · B · A`
//! a trained length.

use super::dora;
use super::parameters::Parameters;
use super::spec::{LinearRole, ModelSpec, ModuleId, ModuleOp, ParamInit, ParamRole, ParamSpec};
use crate::engine::kernels::WeightLayout;
use crate::{Error, Result};
use candle_core::Tensor;
use std::collections::{BTreeMap, BTreeSet};

/// The `targets` value that selects all linear layers of the blocks.
pub const ALL_LINEAR: &str = "all-linear";

/// The adapters of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Lora {
    /// The rank.
    pub r: usize,
    /// The factor of the adapters' output, before it is divided by the rank.
    pub alpha: f64,
    /// Dropout of the adapters' input.
    pub dropout: f64,
    /// Whether the factor is divided by √r.
    pub rslora: bool,
    /// Whether the magnitudes of the outputs are trained (DoRA).
    pub dora: bool,
    /// The layers with an adapter: linear ones within blocks.
    pub targets: BTreeSet<ModuleId>,
    /// The layers that are trained in full.
    pub modules_to_save: BTreeSet<ModuleId>,
}

impl Lora {
    /// The scale of the adapters' output.
    pub fn scale(&self) -> f64 {
        let r = self.r as f64;
        self.alpha / if self.rslora { r.sqrt() } else { r }
    }

    /// The linear layers that `targets` name, as PEFT matches them: by a whole name, or by the end of one.
    ///
    /// # Errors
    /// [`Error::Config`] for `lora.targets` naming one that matches no linear layer.
    pub fn targets(spec: &ModelSpec, targets: &[impl AsRef<str>]) -> Result<BTreeSet<ModuleId>> {
        let linears: Vec<ModuleId> = spec.base_parameters().iter().map(|entry| entry.layer).collect();
        let linears = linears.into_iter().filter(|layer| matches!(layer.op, ModuleOp::Linear(_)));
        find(spec, &linears.collect(), "lora.targets", "linear layer of a block", targets)
    }

    /// The layers that `modules` name; all have parameters.
    ///
    /// # Errors
    /// [`Error::Config`] if a name matches no layer, a tied table, or a part of a fused tensor.
    pub fn modules_to_save(spec: &ModelSpec, modules: &[impl AsRef<str>]) -> Result<BTreeSet<ModuleId>> {
        const KEY: &str = "lora.modules_to_save";
        let base = spec.base_parameters();
        let saved = find(spec, &base.iter().map(|entry| entry.layer).collect(), KEY, "layer with parameters", modules)?;
        if spec.tie_word_embeddings && saved.contains(&ModuleId::global(ModuleOp::Embedding)) {
            let name = spec.layer_name(ModuleId::global(ModuleOp::Embedding));
            let message = format!(
                "`{name}` is also the matrix of the head, and PEFT would train a copy of one of them; remove it"
            );
            return Err(Error::config(KEY, message));
        }
        if saved.contains(&ModuleId::global(ModuleOp::Positions))
            && !saved.contains(&ModuleId::global(ModuleOp::Embedding))
        {
            let message = "train the position embedding together with the token embedding, or neither";
            return Err(Error::config(KEY, message));
        }
        spec.check_whole_products(KEY, &saved)?;
        Ok(saved)
    }

    /// The shortest names that match these layers and no other of `spec`: the value of PEFT's `target_modules` and
    /// `modules_to_save`. PEFT compares the former by whole parts of names, the latter by letters.
    pub fn names(spec: &ModelSpec, layers: &BTreeSet<ModuleId>, by_letters: bool) -> Vec<String> {
        let stored = |layer: ModuleId| spec.family.stored_name(&spec.layer_name(layer));
        let all: BTreeMap<String, ModuleId> =
            spec.base_parameters().iter().map(|entry| (stored(entry.layer), entry.layer)).collect();
        let mut names = BTreeSet::new();
        for layer in layers {
            let whole = stored(*layer);
            let starts = whole.rmatch_indices('.').map(|(at, _)| at + 1).chain([0]);
            let means = |other: &str, name: &str| {
                other.strip_suffix(name).is_some_and(|rest| by_letters || rest.is_empty() || rest.ends_with('.'))
            };
            let fits = |start: &usize| {
                all.iter().all(|(name, other)| layers.contains(other) || !means(name, &whole[*start..]))
            };
            let start = starts.into_iter().find(fits).unwrap_or(0);
            names.insert(whole[start..].to_owned());
        }
        names.into_iter().collect()
    }

    /// The trained parameters: the adapters, and the parameters `saved` of modules that are trained in full.
    pub(super) fn with_adapters(&self, spec: &ModelSpec, saved: Vec<ParamSpec>) -> Vec<ParamSpec> {
        let adapters = spec.linear_layers().into_iter().filter(|(layer, ..)| self.targets.contains(layer));
        let adapters = adapters.flat_map(|(layer, fused_into, [inputs, outputs])| {
            let entry = |suffix: &str, shape: Vec<usize>, role, init, fused_into| {
                let name = format!("{}.{suffix}", spec.layer_name(layer));
                ParamSpec { name, decay: shape.len() >= 2, shape, layer, role, init, fused_into }
            };
            let a = ParamInit::Uniform(1.0 / (inputs as f64).sqrt());
            let magnitude =
                || entry("lora_magnitude_vector", vec![outputs], ParamRole::Magnitude, ParamInit::WeightNorm, layer);
            let products = [
                entry("lora_A.weight", vec![self.r, inputs], ParamRole::LoraA, a, fused_into),
                entry("lora_B.weight", vec![outputs, self.r], ParamRole::LoraB, ParamInit::Zeros, layer),
            ];
            products.into_iter().chain(self.dora.then(magnitude))
        });
        let mut all: Vec<_> = saved.into_iter().chain(adapters).collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }
}

/// The parts of a product's output: each layer of the product with its first output and their number.
pub(super) fn parts(spec: &ModelSpec, fused_into: ModuleId) -> Vec<(ModuleId, usize, usize)> {
    let mut first = 0;
    let mut parts: Vec<_> = spec.linear_layers().into_iter().filter(|(_, other, _)| *other == fused_into).collect();
    parts.sort_by_key(|(layer, ..)| *layer);
    let place = |(layer, _, [_, outputs]): (ModuleId, ModuleId, [usize; 2])| {
        first += outputs;
        (layer, first - outputs, outputs)
    };
    parts.into_iter().map(place).collect()
}

/// Whether `name` means `layer`: by the whole name, with or without the family's prefix, or by the end of it.
fn matches(spec: &ModelSpec, layer: ModuleId, name: &str) -> bool {
    let whole = spec.layer_name(layer);
    let name = name.strip_prefix(spec.family.prefix).unwrap_or(name);
    whole.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// The last part of a dotted name.
fn last_part(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}

fn find(
    spec: &ModelSpec,
    among: &BTreeSet<ModuleId>,
    key: &str,
    kind: &str,
    names: &[impl AsRef<str>],
) -> Result<BTreeSet<ModuleId>> {
    let mut found = BTreeSet::new();
    for name in names.iter().map(AsRef::as_ref) {
        let all = name == ALL_LINEAR && key == "lora.targets";
        let before = found.len();
        found.extend(among.iter().filter(|layer| all || matches(spec, **layer, name)));
        if found.len() == before && !among.iter().any(|layer| matches(spec, *layer, name)) {
            let known: BTreeSet<String> =
                among.iter().map(|layer| last_part(&spec.layer_name(*layer)).to_owned()).collect();
            let known = known.into_iter().collect::<Vec<_>>().join("`, `");
            return Err(Error::config(key, format!("`{name}` matches no {kind}; available: `{known}`")));
        }
    }
    Ok(found)
}

/// The dropout site of an adapter; unique within a block.
pub(super) fn dropout_site(block: usize, role: LinearRole) -> usize {
    const FIRST_LORA_SITE: usize = 1 << 24;
    FIRST_LORA_SITE + 16 * block + role as usize
}

/// Sets DoRA's magnitudes in `parameters` to the weight norms of their base.
pub fn init_dora_magnitude(spec: &ModelSpec, parameters: &Parameters) -> candle_core::Result<()> {
    for (layer, fused_into, _) in spec.linear_layers() {
        let Some(magnitude) = parameters.of_module(layer, ParamRole::Magnitude) else { continue };
        let Some(weight) = parameters.find_fused(fused_into, ParamRole::Weight) else { continue };
        let weight = parameters.weight(weight)?;
        let place = parts(spec, fused_into).into_iter().find(|(part, ..)| *part == layer);
        if let Some((_, first, count)) = place {
            let layout = weight.layout(spec.weight_layout);
            magnitude.slice_set(&dora::initial(&weight, layout, first, count)?, 0, 0)?;
        }
    }
    Ok(())
}

/// Adds the adapters of `parameters` to the weights of their base in `into`, all FP32 on the CPU. Each weight is
/// computed in FP32 from the base's and the factors.
pub fn merge_adapters(spec: &ModelSpec, parameters: &Parameters, into: &Parameters) -> candle_core::Result<()> {
    let Some(lora) = &spec.lora else { return Ok(()) };
    for layer in &lora.targets {
        let name = spec.layer_name(*layer);
        let tensor = |suffix: &str| parameters.get(&format!("{name}.{suffix}"));
        let (Some(a), Some(b)) = (tensor("lora_A.weight"), tensor("lora_B.weight")) else { continue };
        let Some(weight) = into.get(&format!("{name}.weight")) else { continue };
        let transposed = |x: &Tensor| match spec.weight_layout {
            WeightLayout::OutIn => Ok(x.clone()),
            WeightLayout::InOut => x.t()?.contiguous(),
        };
        let mut sum = (transposed(weight)? + (b.matmul(a)? * lora.scale())?)?;
        if let Some(magnitude) = tensor("lora_magnitude_vector") {
            let norms = sum.sqr()?.sum_keepdim(1)?.sqrt()?;
            sum = sum.broadcast_mul(&(magnitude.unsqueeze(1)? / norms)?)?;
        }
        weight.slice_set(&transposed(&sum)?, 0, 0)?;
    }
    Ok(())
}
