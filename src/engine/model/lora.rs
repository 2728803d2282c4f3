//! Low-rank adapters (Hu et al., 2021): the layers that have one, and their parameters.
//!
//! An adapted product is `x · W + scale · (x · Aᵀ) · Bᵀ`, with W frozen, A `[r, in]` and B `[out, r]`. rsLoRA
//! (Kalajdzievski, 2023) divides by √r instead of r. DoRA (Liu et al., 2024) gives every output of `W + scale · B · A`
//! a trained magnitude.
//!
//! The factors of all experts are stacked: A `[experts · r, in]` and B `[experts · out, r]`. PEFT, whose names they
//! have, adapts transformers' tensors of all experts (`target_parameters`).

use super::dora;
use super::parameters::Parameters;
use super::spec::{AdaptableLayer, LinearRole, ModelSpec, ModuleId, ModuleOp, ParamInit, ParamRole, ParamSpec};
use crate::engine::kernels::WeightLayout;
use crate::{Error, Result};
use candle_core::Tensor;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

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

    /// The layers that `targets` name, as PEFT matches them: by a whole name, or by the end of one. Routers and experts
    /// have the names of transformers' parameters. Fails with [`Error::Config`] for `lora.target_modules` naming one
    /// that matches no layer.
    pub fn targets(spec: &ModelSpec, targets: &[impl AsRef<str>]) -> Result<BTreeSet<ModuleId>> {
        let linears = spec.adaptable_layers().into_iter().map(|adaptable| adaptable.layer).collect();
        find(spec, &linears, "lora.target_modules", "linear layer of a block", targets)
    }

    /// The layers that `modules` name; all have parameters. Fails with [`Error::Config`] if a name matches no layer, a
    /// tied table, or a part of a fused tensor.
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
        for layer in &saved {
            let name = format!("{}.", spec.layer_name(*layer));
            if let Some(inner) = base.iter().find(|entry| spec.layer_name(entry.layer).starts_with(&name)) {
                let (name, inner) = (spec.layer_name(*layer), spec.layer_name(inner.layer));
                let message = format!("`{name}` contains `{inner}`, which PEFT would save too; leave out `{name}`");
                return Err(Error::config(KEY, message));
            }
        }
        Ok(saved)
    }

    /// The shortest names that match these layers and no other of `spec`: the value of PEFT's `target_modules` and
    /// `modules_to_save`. PEFT compares the former by whole parts of names, the latter by letters.
    pub fn names(spec: &ModelSpec, layers: &BTreeSet<ModuleId>, by_letters: bool) -> Vec<String> {
        let stored = |layer: ModuleId| spec.family.stored_name(&spec.layer_name(layer));
        let all = spec.base_parameters().iter().map(|entry| (stored(entry.layer), entry.layer)).collect();
        shortest_names(&all, layers, by_letters)
    }

    /// The shortest names that match the parameters of these routers and experts and no other: PEFT's
    /// `target_parameters`.
    pub fn parameter_names(spec: &ModelSpec, layers: &BTreeSet<ModuleId>) -> Vec<String> {
        let others = spec.base_parameters().into_iter().map(|entry| (entry.name, entry.layer));
        let mut all: Vec<_> = others.filter(|(_, layer)| !is_parameter(layer.op)).collect();
        let adaptable = spec.adaptable_layers().into_iter().map(|adaptable| adaptable.layer);
        all.extend(adaptable.filter(|layer| is_parameter(layer.op)).map(|layer| (target_name(spec, layer), layer)));
        let stored = |(name, layer): (String, ModuleId)| (spec.family.stored_name(&name), layer);
        shortest_names(&all.into_iter().map(stored).collect(), layers, false)
    }

    /// Rejects what PEFT has for linear layers only: dropout and DoRA. Fails with [`Error::Config`] naming the key.
    pub fn check_experts(&self) -> Result<()> {
        let key = if self.dora { "lora.use_dora" } else { "lora.dropout" };
        if (self.dora || self.dropout > 0.0) && self.targets.iter().any(|layer| is_parameter(layer.op)) {
            return Err(Error::config(
                key,
                "is for linear layers only, but `lora.target_modules` names routers or experts",
            ));
        }
        Ok(())
    }

    /// The name of an adapter's factors without `.lora_A.weight`. PEFT wraps the second of the experts' tensors around
    /// the first.
    fn factor_name(&self, spec: &ModelSpec, layer: ModuleId) -> String {
        let name = target_name(spec, layer);
        let Some((module, _)) = name.rsplit_once('.').filter(|_| is_parameter(layer.op)) else { return name };
        let down = ModuleId { op: ModuleOp::Expert(0, LinearRole::Down), ..layer };
        let is_inner = matches!(layer.op, ModuleOp::Expert(..)) && layer != down && self.targets.contains(&down);
        if is_inner { format!("{module}.base_layer") } else { module.to_owned() }
    }

    /// The trained parameters: the adapters, and the parameters `saved` of modules that are trained in full.
    pub(super) fn with_adapters(&self, spec: &ModelSpec, saved: Vec<ParamSpec>) -> Vec<ParamSpec> {
        let adapters = spec.adaptable_layers().into_iter().filter(|it| self.targets.contains(&it.layer));
        let adapters = adapters.flat_map(|AdaptableLayer { layer, fused_into, inputs, outputs }| {
            let count = stacked_experts(spec, layer);
            let entry = |suffix: &str, shape: Vec<usize>, role, init, fused_into| {
                let name = format!("{}.{suffix}", self.factor_name(spec, layer));
                ParamSpec { name, decay: shape.len() >= 2, shape, layer, role, init, fused_into }
            };
            let a = ParamInit::Uniform(1.0 / (inputs as f64).sqrt());
            let magnitude =
                || entry("lora_magnitude_vector", vec![outputs], ParamRole::Magnitude, ParamInit::WeightNorm, layer);
            let products = [
                entry("lora_A.weight", vec![count * self.r, inputs], ParamRole::LoraA, a, fused_into),
                entry("lora_B.weight", vec![count * outputs, self.r], ParamRole::LoraB, ParamInit::Zeros, layer),
            ];
            products.into_iter().chain(self.dora.then(magnitude))
        });
        let mut all: Vec<_> = saved.into_iter().chain(adapters).collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }
}

impl ModelSpec {
    /// The layer of the adapter that changes `layer`: the first expert's product has the adapters of all experts.
    pub fn adapter_layer(&self, layer: ModuleId) -> ModuleId {
        match layer.op {
            ModuleOp::Expert(_, role) => ModuleId { op: ModuleOp::Expert(0, role.fused(self.activation)), ..layer },
            _ => layer,
        }
    }
}

/// The layers of a product, each with its part of the outputs.
pub(super) fn parts(spec: &ModelSpec, fused_into: ModuleId) -> Vec<(ModuleId, Range<usize>)> {
    let mut layers: Vec<_> = spec.adaptable_layers().into_iter().filter(|it| it.fused_into == fused_into).collect();
    layers.sort_by_key(|it| it.layer);
    let mut first = 0;
    let mut part = |AdaptableLayer { layer, outputs, .. }| {
        first += outputs;
        (layer, first - outputs..first)
    };
    layers.into_iter().map(&mut part).collect()
}

/// The columns between the factors of the adapter of `layer`, for each token.
pub(super) fn columns(spec: &ModelSpec, lora: &Lora, layer: ModuleId) -> usize {
    if matches!(layer.op, ModuleOp::Expert(..)) { spec.mlp_rows() * lora.r } else { lora.r }
}

/// The number of experts in the factors of the adapter of `layer`.
pub(crate) fn stacked_experts(spec: &ModelSpec, layer: ModuleId) -> usize {
    let experts = spec.experts.filter(|_| matches!(layer.op, ModuleOp::Expert(..)));
    experts.map_or(1, |experts| experts.count)
}

/// Whether transformers has a parameter instead of a linear layer.
pub(crate) const fn is_parameter(op: ModuleOp) -> bool {
    matches!(op, ModuleOp::Router | ModuleOp::Expert(..))
}

/// The name of a layer that can have an adapter; of routers and experts that of transformers' parameter.
fn target_name(spec: &ModelSpec, layer: ModuleId) -> String {
    if !is_parameter(layer.op) {
        return spec.layer_name(layer);
    }
    let router = spec.layer_name(ModuleId { op: ModuleOp::Router, ..layer });
    // Some files have the router's matrix in another layer, which transformers 5 does not have.
    let router = router.strip_suffix(".layer").unwrap_or(&router);
    let block = router.rsplit_once('.').map_or("", |(block, _)| block);
    match layer.op {
        ModuleOp::Expert(_, LinearRole::Down) => format!("{block}.experts.down_proj"),
        ModuleOp::Expert(..) => format!("{block}.experts.gate_up_proj"),
        _ => format!("{router}.weight"),
    }
}

/// The shortest ends of names in `all` that match these layers and no other, and no block of layers, by whole parts or
/// `by_letters`.
fn shortest_names(all: &BTreeMap<String, ModuleId>, layers: &BTreeSet<ModuleId>, by_letters: bool) -> Vec<String> {
    let blocks: BTreeSet<&str> =
        all.keys().flat_map(|name| name.match_indices('.').map(|(end, _)| &name[..end])).collect();
    let others = all.iter().filter(|(_, layer)| !layers.contains(layer)).map(|(name, _)| name.as_str());
    let others: Vec<&str> = others.chain(blocks).collect();
    let mut names = BTreeSet::new();
    for whole in all.iter().filter(|(_, layer)| layers.contains(layer)).map(|(name, _)| name) {
        let starts = whole.rmatch_indices('.').map(|(at, _)| at + 1).chain([0]);
        let means = |other: &str, name: &str| {
            other.strip_suffix(name).is_some_and(|rest| by_letters || rest.is_empty() || rest.ends_with('.'))
        };
        let fits = |start: &usize| !others.iter().any(|other| means(other, &whole[*start..]));
        let start = starts.into_iter().find(fits).unwrap_or(0);
        names.insert(whole[start..].to_owned());
    }
    names.into_iter().collect()
}

/// Whether `name` means the layer `whole`: by the whole name, with or without the family's prefix, or by the end of it.
fn matches(spec: &ModelSpec, whole: &str, name: &str) -> bool {
    let name = name.strip_prefix(spec.family.prefix).unwrap_or(name);
    whole.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

fn find(
    spec: &ModelSpec,
    among: &BTreeSet<ModuleId>,
    key: &str,
    kind: &str,
    names: &[impl AsRef<str>],
) -> Result<BTreeSet<ModuleId>> {
    let mut found = BTreeSet::new();
    let are_targets = key == "lora.target_modules";
    let name_of = |layer| if are_targets { target_name(spec, layer) } else { spec.layer_name(layer) };
    let among: Vec<(ModuleId, String)> = among.iter().map(|layer| (*layer, name_of(*layer))).collect();
    for name in names.iter().map(AsRef::as_ref) {
        let all = name == ALL_LINEAR && are_targets;
        let before = found.len();
        let chosen = |(layer, whole): &&(ModuleId, String)| {
            if all { !is_parameter(layer.op) } else { matches(spec, whole, name) }
        };
        found.extend(among.iter().filter(chosen).map(|(layer, _)| *layer));
        if found.len() == before && !among.iter().any(|layer| chosen(&layer)) {
            let known: BTreeSet<&str> = among.iter().filter_map(|(_, whole)| whole.rsplit('.').next()).collect();
            let known = known.into_iter().collect::<Vec<_>>().join("`, `");
            return Err(Error::config(key, format!("`{name}` matches no {kind}; available: `{known}`")));
        }
    }
    Ok(found)
}

/// The dropout site of an adapter of a linear layer, unique in the model; others have no dropout.
pub(super) fn dropout_site(layer: ModuleId) -> usize {
    const FIRST_LORA_SITE: usize = 1 << 24;
    // `Down` is the last role.
    const ROLES: usize = LinearRole::Down as usize + 1;
    match (layer.block, layer.op) {
        (Some(block), ModuleOp::Linear(role)) => FIRST_LORA_SITE + ROLES * block + role as usize,
        _ => FIRST_LORA_SITE,
    }
}

/// Sets DoRA's magnitudes in `parameters` to the weight norms of their base.
pub fn init_dora_magnitude(spec: &ModelSpec, parameters: &Parameters) -> candle_core::Result<()> {
    for AdaptableLayer { layer, fused_into, .. } in spec.adaptable_layers() {
        let Some(magnitude) = parameters.of_module(layer, ParamRole::Magnitude) else { continue };
        let Some(weight) = parameters.find_fused(fused_into, ParamRole::Weight) else { continue };
        let weight = parameters.weight(weight)?;
        let part = parts(spec, fused_into).into_iter().find(|(part, _)| *part == layer);
        if let Some((_, outputs)) = part {
            let layout = weight.layout(spec.layout_of(layer.op));
            magnitude.slice_set(&dora::initial(&weight, layout, outputs.start, outputs.len())?, 0, 0)?;
        }
    }
    Ok(())
}

/// Adds the adapters of `parameters` to the weights of their base in `into`, all FP32 on the CPU. Each weight is
/// computed in FP32 from the base's and the factors.
pub fn merge_adapters(spec: &ModelSpec, parameters: &Parameters, into: &Parameters) -> candle_core::Result<()> {
    let Some(lora) = &spec.lora else { return Ok(()) };
    for layer in &lora.targets {
        let name = lora.factor_name(spec, *layer);
        let tensor = |suffix: &str| parameters.get(&format!("{name}.{suffix}"));
        let (Some(a), Some(b)) = (tensor("lora_A.weight"), tensor("lora_B.weight")) else { continue };
        let experts = stacked_experts(spec, *layer);
        let transposed = |x: &Tensor| match spec.layout_of(layer.op) {
            WeightLayout::OutIn => Ok(x.clone()),
            WeightLayout::InOut => x.t()?.contiguous(),
        };
        for expert in 0..experts {
            let weight = match layer.op {
                ModuleOp::Expert(_, role) => {
                    into.of_module(ModuleId { op: ModuleOp::Expert(expert as u16, role), ..*layer }, ParamRole::Weight)
                }
                _ => into.get(&format!("{}.weight", spec.layer_name(*layer))),
            };
            let Some(weight) = weight else { continue };
            let part = |factor: &Tensor| {
                let rows = factor.dim(0)? / experts;
                factor.narrow(0, expert * rows, rows)
            };
            let mut sum = (transposed(weight)? + (part(b)?.matmul(&part(a)?)? * lora.scale())?)?;
            if let Some(magnitude) = tensor("lora_magnitude_vector") {
                let norms = sum.sqr()?.sum_keepdim(1)?.sqrt()?;
                sum = sum.broadcast_mul(&(magnitude.unsqueeze(1)? / norms)?)?;
            }
            weight.slice_set(&transposed(&sum)?, 0, 0)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_adapters_share_a_dropout_site() {
        let layers = ModelSpec::named("tiny").unwrap().adaptable_layers();
        let sites: BTreeSet<usize> = layers.iter().map(|it| dropout_site(it.layer)).collect();
        assert_eq!(sites.len(), layers.len());
    }
}
