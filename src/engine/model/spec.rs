//! A decoder described as data: its dimensions, the operations of a block, and every parameter with its role.
//!
//! A family (a file in `families`) reads a `config.json` into a [`ModelSpec`]; all other code uses the spec.

mod module;
mod recurrence;

pub use module::{LinearRole, ModuleId, ModuleOp, NormRole};
pub use recurrence::{Recurrence, RecurrentLayers};

use super::families;
use super::family::{ConfigReader, Family};
use super::lora::Lora;
use super::mixture::Experts;
use super::rope::{QueryScale, Rope};
use crate::engine::kernels::{Activation, NormKind, WeightLayout};
use crate::settings::settings;
use crate::{Error, Result};
use candle_core::quantized::GgmlDType;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};

/// A product of a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProductSpec {
    pub(super) op: ModuleOp,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    pub(super) bias: bool,
}

/// A layer that can have an adapter.
#[derive(Clone, Copy, Debug)]
pub(super) struct AdaptableLayer {
    pub(super) layer: ModuleId,
    /// The layer that computes its product, perhaps with others.
    pub(super) fused_into: ModuleId,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
}

/// A product that computes one layer or several together.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FusedProduct {
    /// The number of its layers that have an adapter.
    pub(super) members: usize,
    /// The number of its layers.
    pub(super) parts: usize,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
}

/// Which linear layers have a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Biases {
    /// Queries, keys and values.
    pub qkv: bool,
    /// The projection after attention.
    pub out: bool,
    /// The MLP's products; in a mixture also the router.
    pub mlp: bool,
}

settings! {
    /// Dropout rates in training.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct DropoutRates {
        /// After the embeddings.
        embedding: f64 = 0.0, within(0.0, 0.99);
        /// Before attention and MLP are added to the residual stream.
        residual: f64 = 0.0, within(0.0, 0.99);
        /// On the attention weights.
        attention: f64 = 0.0, within(0.0, 0.99);
    }
}

/// The norms of queries and keys, before they are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// One per head.
    PerHead,
    /// One over all heads.
    Whole,
}

/// The factor of the tokens' embeddings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum EmbeddingScale {
    /// This number.
    Factor(f64),
    /// `√hidden_size`, rounded to the type of the embedding.
    RootOfWidth,
}

/// Attention with a window, in some layers.
#[derive(Clone, Debug, PartialEq)]
pub struct Sliding {
    /// The maximum number of tokens that a query attends to, itself included.
    pub window: usize,
    /// Which layers have it.
    pub layers: Vec<bool>,
    /// Their rotary position embeddings.
    pub rope: Rope,
}

/// Dimensions and constants of a decoder with a language-model head.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "families differ in these ways independently")]
pub struct ModelSpec {
    /// Its family.
    pub family: &'static Family,
    /// V: rows of the token embedding.
    pub vocab_size: usize,
    /// The longest context in tokens.
    pub max_position_embeddings: usize,
    /// D: the width of the residual stream.
    pub hidden_size: usize,
    /// The number of blocks.
    pub num_layers: usize,
    /// Query heads of a block.
    pub heads: usize,
    /// Key and value heads of a block; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// The width inside the MLP, or inside each expert.
    pub intermediate_size: usize,
    /// The experts of each block, if its MLP is a mixture.
    pub experts: Option<Experts>,
    /// The normalization.
    pub norm: NormKind,
    /// Added to its variance under the square root.
    pub norm_eps: f64,
    /// The MLP's activation.
    pub activation: Activation,
    /// The layout of weights outside of experts.
    pub weight_layout: WeightLayout,
    /// The layout of experts' weights.
    pub expert_layout: WeightLayout,
    /// Whether queries, keys and values are one tensor in files.
    pub fused_qkv: bool,
    /// Whether gate and up are one tensor in files.
    pub fused_gate_up: bool,
    /// Which layers have a bias.
    pub biases: Biases,
    /// Whether a learned position embedding is added to the token embedding.
    pub learned_positions: bool,
    /// Rotary position embeddings of layers with full attention.
    pub rope: Option<Rope>,
    /// The number of a head's first elements that are rotated, if not all are.
    pub rotary_dim: Option<usize>,
    /// For each layer, whether its queries and keys are not rotated; empty if all are.
    pub unrotated: Vec<bool>,
    /// The factor of queries, in models without windows.
    pub query_scale: Option<QueryScale>,
    /// Layers whose attention has a window.
    pub sliding: Option<Sliding>,
    /// Layers with a recurrence instead of attention.
    pub recurrent: Option<RecurrentLayers>,
    /// Whether attention's output is multiplied by a gate, which has the columns after each query head.
    pub attention_gate: bool,
    /// The scale of attention scores, if it differs from 1 / `√head_dim`.
    pub attention_scale: Option<f64>,
    /// Whether each head has a sink: a learned score in the softmax's denominator.
    pub attention_sinks: bool,
    /// Scores `s` of attention become `cap · tanh(s / cap)`.
    pub attention_softcap: Option<f64>,
    /// The norms of queries and keys.
    pub qk_norm: Option<QkNorm>,
    /// Whether the inputs of attention and MLP are normalized.
    pub pre_norms: bool,
    /// Whether the outputs of attention and MLP are normalized before they are added to the residual stream.
    pub post_norms: bool,
    /// The factor of the tokens' embeddings.
    pub embedding_scale: EmbeddingScale,
    /// The factor of the outputs of attention and MLP. The engine divides the residual stream by it instead, which
    /// [`Self::stream_norm_eps`] and the embedding's factor undo.
    pub residual_multiplier: f64,
    /// The divisor of logits.
    pub logits_scaling: f64,
    /// Logits `x` become `cap · tanh(x / cap)`.
    pub logits_softcap: Option<f64>,
    /// Whether the head's matrix is the token embedding.
    pub tie_word_embeddings: bool,
    /// Dropout probabilities.
    pub dropout: DropoutRates,
    /// Standard deviation of freshly drawn weights.
    pub initializer_range: f64,
    /// Starts a text.
    pub bos_token_id: Option<u32>,
    /// The tokens that end a text or a turn.
    pub eos_token_ids: Vec<u32>,
    /// Fills rows in other programs.
    pub pad_token_id: Option<u32>,
    /// The adapters that are trained instead of the parameters.
    pub lora: Option<Lora>,
    /// The modules whose parameters are not trained; none with adapters, which have a frozen base.
    pub frozen: BTreeSet<ModuleId>,
    /// The matrices that the model's file has in quantized blocks, by name. A frozen base keeps them so.
    pub quantized: BTreeMap<String, GgmlDType>,
}

/// A parameter's initial values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ParamInit {
    /// Zeros.
    Zeros,
    /// Ones.
    Ones,
    /// Normal values of this standard deviation.
    Normal(f64),
    /// Uniform values between this bound and its negative.
    Uniform(f64),
    /// The norm of the base's weights of each output.
    WeightNorm,
}

/// The role of a parameter in its layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParamRole {
    /// The weight.
    Weight,
    /// The bias.
    Bias,
    /// The first factor of an adapter, `[r, in]`.
    LoraA,
    /// The second factor, `[out, r]`.
    LoraB,
    /// DoRA's magnitudes, `[out]`.
    Magnitude,
}

/// A parameter: its name, shape, layer, initial values and weight decay.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// Hugging Face's name without a prefix such as `transformer.`.
    pub name: String,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// The layer that has it.
    pub layer: ModuleId,
    /// Its role in that layer.
    pub role: ParamRole,
    /// Its initial values.
    pub init: ParamInit,
    /// Whether weight decay acts on it.
    pub decay: bool,
    /// The layer whose fused tensor contains it, stacked along the first dimension in order of [`LinearRole`].
    pub fused_into: ModuleId,
}

impl ModelSpec {
    /// Reads the text of a `config.json`; `origin` is its path in error messages. Ignores keys without effect, as
    /// transformers does. Fails with [`Error::Model`] naming the key: an unknown model type or activation, a variant of
    /// attention that the engine lacks, a number that is not positive, heads that do not divide the width.
    pub fn from_json(text: &[u8], origin: &str) -> Result<Self> {
        let fail = |message: String| Error::model(origin, message);
        let json: Map<String, Value> =
            serde_json::from_slice(text).map_err(|error| fail(format!("not JSON: {error}")))?;
        Self::from_config(&json).map_err(fail)
    }

    /// Like [`Self::from_json`], from a parsed `config.json`. Reads the text part of a model of images and text, whose
    /// outer keys have precedence, as in transformers.
    pub(crate) fn from_config(json: &Map<String, Value>) -> Result<Self, String> {
        let Some(text) = json.get("text_config").and_then(Value::as_object) else {
            return families::read(&ConfigReader(json));
        };
        let mut text = text.clone();
        for key in ["tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"] {
            if let Some(value) = json.get(key).filter(|value| !value.is_null()) {
                text.insert(key.to_owned(), value.clone());
            }
        }
        families::read(&ConfigReader(&text))
    }

    /// The `config.json`, without the type of the weights.
    pub(crate) fn config(&self) -> Value {
        let mut json = (self.family.write)(self);
        // Without the key, transformers takes the family's token, which a small vocabulary lacks.
        json["pad_token_id"] = self.pad_token_id.filter(|id| (*id as usize) < self.vocab_size).into();
        json
    }

    /// A `config.json` that transformers' `from_pretrained` takes; `dtype` is the type of the stored weights, as torch
    /// names it (`float32`, `float16`, `bfloat16`).
    pub fn to_json(&self, dtype: &str) -> String {
        let mut json = self.config();
        json["dtype"] = dtype.into();
        // Versions before 5 know neither `dtype` nor `rope_parameters`.
        json["torch_dtype"] = dtype.into();
        let rope = &json["rope_parameters"];
        let rope = rope.get("full_attention").unwrap_or(rope).clone();
        for key in ["rope_theta", "partial_rotary_factor"] {
            if let Some(value) = rope.get(key) {
                json[key] = value.clone();
            }
        }
        if json.get("rope_scaling").is_none() && rope.get("rope_type").is_some_and(|kind| kind != "default") {
            json["rope_scaling"] = rope;
        }
        format!("{json:#}\n")
    }

    /// The same family with other dimensions: as many key heads as query heads, and an MLP of four times the width.
    #[must_use]
    pub fn resized(self, layers: usize, width: usize, heads: usize) -> Self {
        Self {
            num_layers: layers,
            hidden_size: width,
            heads,
            kv_heads: heads,
            head_dim: width / heads,
            intermediate_size: 4 * width,
            ..self
        }
    }

    /// The layout of a product's weight.
    pub const fn layout_of(&self, op: ModuleOp) -> WeightLayout {
        if let ModuleOp::Expert(..) = op { self.expert_layout } else { self.weight_layout }
    }

    /// The display name of a layer: its parameters' name without `.weight`.
    pub fn layer_name(&self, layer: ModuleId) -> String {
        (self.family.layer_name)(layer)
    }

    /// The epsilon of norms whose input is the residual stream.
    pub fn stream_norm_eps(&self) -> f64 {
        self.norm_eps / self.residual_multiplier.powi(2)
    }

    /// Columns of the packed queries, with their gates, keys and values.
    pub fn qkv_width(&self) -> usize {
        self.qkv_product_widths().iter().sum()
    }

    /// Columns of the products of queries, with their gates, of keys and of values.
    pub(crate) fn qkv_product_widths(&self) -> [usize; 3] {
        let [queries, keys, values] = self.qkv_widths();
        [if self.attention_gate { 2 * queries } else { queries }, keys, values]
    }

    /// Columns of queries, of keys and of values.
    pub fn qkv_widths(&self) -> [usize; 3] {
        [self.heads, self.kv_heads, self.kv_heads].map(|heads| heads * self.head_dim)
    }

    /// Whether the attention of layer `block` has a window.
    pub fn is_sliding(&self, block: usize) -> bool {
        self.sliding.as_ref().is_some_and(|sliding| sliding.layers.get(block) == Some(&true))
    }

    /// The number of a head's elements that are rotated.
    pub fn rotary_dim(&self) -> usize {
        self.rotary_dim.unwrap_or(self.head_dim)
    }

    /// The rotary position embeddings of layer `block`.
    pub fn rope_of(&self, block: usize) -> Option<&Rope> {
        let sliding = self.sliding.as_ref().filter(|_| self.is_sliding(block)).map(|sliding| &sliding.rope);
        sliding.or(self.rope.as_ref()).filter(|_| self.unrotated.get(block) != Some(&true))
    }

    /// The norms of a block with attention or this recurrence, and the columns of each.
    fn norms(&self, recurrence: Option<Recurrence>) -> Vec<(NormRole, usize)> {
        let mut norms = Vec::new();
        if self.pre_norms {
            norms.extend([(NormRole::Attention, self.hidden_size), (NormRole::Mlp, self.hidden_size)]);
        }
        if let Some(kind) = self.qk_norm.filter(|_| recurrence.is_none()) {
            let [query, key, _] = match kind {
                QkNorm::PerHead => [self.head_dim; 3],
                QkNorm::Whole => self.qkv_widths(),
            };
            norms.extend([(NormRole::Query, query), (NormRole::Key, key)]);
        }
        if self.post_norms {
            norms.extend([(NormRole::PostAttention, self.hidden_size), (NormRole::PostMlp, self.hidden_size)]);
        }
        norms
    }

    /// Columns of the heads' outputs, side by side.
    pub fn attn_out_size(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Columns of the activation's input.
    pub fn up_width(&self) -> usize {
        if self.activation.is_gated() { 2 * self.intermediate_size } else { self.intermediate_size }
    }

    /// The linear layers of a block with attention or this recurrence as files have them.
    fn linears(&self, recurrence: Option<Recurrence>) -> Vec<ProductSpec> {
        let d = self.hidden_size;
        let [queries, keys, values] = self.qkv_product_widths();
        let Biases { qkv, out, mlp } = self.biases;
        let linear = |role, inputs, outputs, bias| ProductSpec { op: ModuleOp::Linear(role), inputs, outputs, bias };
        let attention_out = linear(LinearRole::Out, self.attn_out_size(), d, out);
        let mut linears = match recurrence {
            Some(recurrence) => self.recurrence_linears(recurrence),
            None if self.fused_qkv => vec![linear(LinearRole::Qkv, d, self.qkv_width(), qkv), attention_out],
            None => vec![
                linear(LinearRole::Query, d, queries, qkv),
                linear(LinearRole::Key, d, keys, qkv),
                linear(LinearRole::Value, d, values, qkv),
                attention_out,
            ],
        };
        if self.experts.is_none() {
            linears.extend(self.mlp_linears(ModuleOp::Linear, mlp));
        }
        linears
    }

    /// The linear layers of an MLP or of an expert as files have them.
    fn mlp_linears(&self, op: impl Fn(LinearRole) -> ModuleOp, bias: bool) -> Vec<ProductSpec> {
        let d = self.hidden_size;
        let inner = self.intermediate_size;
        let linear = |role, inputs, outputs| ProductSpec { op: op(role), inputs, outputs, bias };
        let mut linears = Vec::new();
        if self.fused_gate_up {
            linears.push(linear(LinearRole::GateUp, d, 2 * inner));
        } else {
            if self.activation.is_gated() {
                linears.push(linear(LinearRole::Gate, d, inner));
            }
            linears.push(linear(LinearRole::Up, d, inner));
        }
        linears.push(linear(LinearRole::Down, inner, d));
        linears
    }

    fn router(&self, experts: Experts) -> ProductSpec {
        let (inputs, outputs) = (self.hidden_size, experts.count);
        ProductSpec { op: ModuleOp::Router, inputs, outputs, bias: self.biases.mlp }
    }

    /// Whether a rate of dropout is above 0.
    pub fn has_dropout(&self) -> bool {
        let DropoutRates { embedding, residual, attention } = self.dropout;
        let adapters = self.lora.as_ref().map_or(0.0, |lora| lora.dropout);
        [embedding, residual, attention, adapters].into_iter().any(|rate| rate > 0.0)
    }

    /// All products of a block with attention or this recurrence as files have them.
    fn products(&self, recurrence: Option<Recurrence>) -> Vec<ProductSpec> {
        let mut products = self.linears(recurrence);
        if let Some(experts) = self.experts {
            products.push(self.router(experts));
            for i in 0..experts.count {
                products.extend(self.mlp_linears(|role| ModuleOp::Expert(i as u16, role), self.biases.mlp));
            }
        }
        products
    }

    /// The layers of all blocks that can have an adapter: linear layers as files have them, routers, and the products
    /// of the first expert, which represents all.
    pub(super) fn adaptable_layers(&self) -> Vec<AdaptableLayer> {
        let mut shared = Vec::new();
        if let Some(experts) = self.experts {
            let (d, bias) = (self.hidden_size, self.biases.mlp);
            let expert = |role, inputs, outputs| ProductSpec { op: ModuleOp::Expert(0, role), inputs, outputs, bias };
            shared.push(self.router(experts));
            shared.push(expert(self.up_role(), d, self.up_width()));
            shared.push(expert(LinearRole::Down, self.intermediate_size, d));
        }
        let in_block = |block| {
            let products = self.linears(self.recurrence(block)).into_iter().chain(shared.clone());
            products.map(move |ProductSpec { op, inputs, outputs, .. }| AdaptableLayer {
                layer: ModuleId::in_block(block, op),
                fused_into: ModuleId::in_block(block, op.fused(self.activation)),
                inputs,
                outputs,
            })
        };
        (0..self.num_layers).flat_map(in_block).collect()
    }

    /// The products of the layers that can have an adapter.
    pub(super) fn fused_products(&self) -> BTreeMap<ModuleId, FusedProduct> {
        let mut products = BTreeMap::<ModuleId, FusedProduct>::new();
        for AdaptableLayer { layer, fused_into, inputs, outputs } in self.adaptable_layers() {
            let product = products.entry(fused_into).or_default();
            product.members += usize::from(self.lora.as_ref().is_some_and(|lora| lora.targets.contains(&layer)));
            product.parts += 1;
            product.inputs = inputs;
            product.outputs += outputs;
        }
        products
    }

    /// Every parameter that is trained, ordered by name as strings are (`h.10.…` before `h.2.…`): all of the model
    /// except frozen modules, or its adapters and saved layers.
    pub fn parameters(&self) -> Vec<ParamSpec> {
        let mut trained = self.base_parameters();
        trained.retain(|entry| self.trains(entry.layer));
        match &self.lora {
            Some(lora) => lora.with_adapters(self, trained),
            None => trained,
        }
    }

    /// Every parameter that is not trained: the base of adapters, or frozen modules.
    pub fn frozen_parameters(&self) -> Vec<ParamSpec> {
        let all = if self.lora.is_none() && self.frozen.is_empty() { Vec::new() } else { self.base_parameters() };
        all.into_iter().filter(|entry| !self.trains(entry.layer)).collect()
    }

    /// Whether the parameters of a module are trained, in addition to its adapters.
    fn trains(&self, module: ModuleId) -> bool {
        match &self.lora {
            Some(lora) => lora.modules_to_save.contains(&module),
            None => !self.frozen.contains(&module),
        }
    }

    /// The lowest block that has to be in the backward pass, because it or a block below it is trained; the number of
    /// blocks if none has to.
    pub(crate) fn first_trained_block(&self) -> usize {
        if self.lora.is_none() && self.frozen.is_empty() {
            return 0;
        }
        let block = |entry: ParamSpec| match entry.layer {
            ModuleId { block: Some(block), .. } => block,
            ModuleId { op: ModuleOp::Embedding | ModuleOp::Positions, .. } => 0,
            _ => self.num_layers,
        };
        self.parameters().into_iter().map(block).min().unwrap_or(self.num_layers)
    }

    /// The frozen matrices that stay in quantized blocks: all parts of their product are quantized. Only a base of
    /// adapters has some, because a checkpoint has all other weights in the compute type.
    pub fn quantized_params(&self) -> BTreeMap<String, GgmlDType> {
        let frozen = if self.lora.is_some() { self.frozen_parameters() } else { Vec::new() };
        let quantized = |entry: &&ParamSpec| self.quantized.contains_key(&entry.name);
        let dense: BTreeSet<ModuleId> = frozen
            .iter()
            .filter(|entry| entry.role == ParamRole::Weight && !quantized(entry))
            .map(|entry| entry.fused_into)
            .collect();
        let whole = frozen.iter().filter(quantized).filter(|entry| !dense.contains(&entry.fused_into));
        whole.map(|entry| (entry.name.clone(), self.quantized[&entry.name])).collect()
    }

    /// The parameters of the model without adapters. Only an untied head has a matrix.
    pub fn base_parameters(&self) -> Vec<ParamSpec> {
        let d = self.hidden_size;
        let std = self.initializer_range;
        let mut parameters = Vec::new();
        let mut push = |layer: ModuleId, fused_into, role, shape: Vec<usize>, init| {
            let part = match (role, layer.op) {
                (ParamRole::Bias, ModuleOp::GatedDelta) => "dt_bias",
                (ParamRole::Bias, _) => "bias",
                (_, ModuleOp::GatedDelta) => "A_log",
                (_, ModuleOp::Attention) => "sinks",
                _ => "weight",
            };
            let name = format!("{}.{part}", self.layer_name(layer));
            parameters.push(ParamSpec { name, decay: shape.len() >= 2, shape, layer, role, init, fused_into });
        };
        let mut tables = vec![(ModuleOp::Embedding, self.vocab_size)];
        if self.learned_positions {
            tables.push((ModuleOp::Positions, self.max_position_embeddings));
        }
        if !self.tie_word_embeddings {
            tables.push((ModuleOp::Head, self.vocab_size));
        }
        for (op, rows) in tables {
            let layer = ModuleId::global(op);
            push(layer, layer, ParamRole::Weight, vec![rows, d], ParamInit::Normal(std));
        }
        let of_norm: &[(ParamRole, ParamInit)] = match self.norm {
            NormKind::Layer => &[(ParamRole::Weight, ParamInit::Ones), (ParamRole::Bias, ParamInit::Zeros)],
            NormKind::Rms { unit_offset: false } => &[(ParamRole::Weight, ParamInit::Ones)],
            NormKind::Rms { unit_offset: true } => &[(ParamRole::Weight, ParamInit::Zeros)],
        };
        let in_block = |block| {
            let norms = self.norms(self.recurrence(block)).into_iter();
            norms.map(move |(role, columns)| (Some(block), role, columns))
        };
        let norms = (0..self.num_layers).flat_map(in_block).chain([(None, NormRole::Final, d)]);
        for (block, role, columns) in norms {
            let layer = ModuleId { block, op: ModuleOp::Norm(role) };
            for &(role, init) in of_norm {
                push(layer, layer, role, vec![columns], init);
            }
        }
        // Layers that close a residual branch start narrower (Radford et al., 2019).
        let closing = std / (2.0 * self.num_layers as f64).sqrt();
        for block in 0..self.num_layers {
            let recurrence = self.recurrence(block);
            for (op, role, shape, init) in recurrence.into_iter().flat_map(|it| self.recurrence_parameters(it)) {
                let layer = ModuleId::in_block(block, op);
                push(layer, layer, role, shape, init);
            }
            if self.attention_sinks && recurrence.is_none() {
                let layer = ModuleId::in_block(block, ModuleOp::Attention);
                push(layer, layer, ParamRole::Weight, vec![self.heads], ParamInit::Normal(std));
            }
            for ProductSpec { op, inputs, outputs, bias } in self.products(recurrence) {
                let layer = ModuleId::in_block(block, op);
                let fused_into = ModuleId::in_block(block, op.fused(self.activation));
                let std = match op {
                    ModuleOp::Linear(
                        LinearRole::Out | LinearRole::ConvOut | LinearRole::DeltaOut | LinearRole::Down,
                    )
                    | ModuleOp::Expert(_, LinearRole::Down) => closing,
                    _ => std,
                };
                let shape = match self.layout_of(op) {
                    WeightLayout::InOut => vec![inputs, outputs],
                    WeightLayout::OutIn => vec![outputs, inputs],
                };
                push(layer, fused_into, ParamRole::Weight, shape, ParamInit::Normal(std));
                if bias {
                    push(layer, fused_into, ParamRole::Bias, vec![outputs], ParamInit::Zeros);
                }
            }
        }
        parameters.sort_by(|a, b| a.name.cmp(&b.name));
        parameters
    }

    /// Whether the head's matrix has a gradient.
    pub(super) fn trains_head(&self) -> bool {
        self.trains(ModuleId::global(if self.tie_word_embeddings { ModuleOp::Embedding } else { ModuleOp::Head }))
    }

    /// The number of trained parameters.
    pub fn trained_count(&self) -> u64 {
        self.parameters().iter().map(|entry| entry.shape.iter().product::<usize>() as u64).sum()
    }

    /// The number of parameters without adapters, a tied head counted once; at most `u64::MAX`.
    pub fn parameter_count(&self) -> u64 {
        let [v, c, d] = [self.vocab_size, self.max_position_embeddings, self.hidden_size].map(|dim| dim as u128);
        let norm = |columns: u128| if self.norm == NormKind::Layer { 2 * columns } else { columns };
        let elements = |ProductSpec { inputs, outputs, bias, .. }: ProductSpec| {
            inputs as u128 * outputs as u128 + if bias { outputs as u128 } else { 0 }
        };
        let positions = if self.learned_positions { c * d } else { 0 };
        let head = if self.tie_word_embeddings { 0 } else { v * d };
        let in_block = |recurrence: Option<Recurrence>| {
            let linears: u128 = self.products(recurrence).into_iter().map(elements).sum();
            let norms: u128 = self.norms(recurrence).into_iter().map(|(_, columns)| norm(columns as u128)).sum();
            let others = recurrence.into_iter().flat_map(|it| self.recurrence_parameters(it));
            linears + norms + others.map(|(_, _, shape, _)| shape.iter().product::<usize>() as u128).sum::<u128>()
        };
        let sinks = if self.attention_sinks { self.heads as u128 } else { 0 };
        let attention = self.attention_layers() as u128;
        let recurrence = self.recurrent.as_ref().map(|recurrent| recurrent.recurrence);
        let blocks =
            attention * (in_block(None) + sinks) + (self.num_layers as u128 - attention) * in_block(recurrence);
        let count = v * d + positions + head + norm(d) + blocks;
        u64::try_from(count).unwrap_or(u64::MAX)
    }
}
