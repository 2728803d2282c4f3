//! Translates between GGUF and the model families: metadata keys, tensor names and the layout of values.
//!
//! Each metadata key maps to a key of `config.json`, in both directions, so each family still reads and writes its
//! configuration in its own file only. Names, row orders and offsets follow llama.cpp's converter.

use super::rotary::{ORIGINAL_CONTEXT, RopeFactors, scaling_from_factors, scaling_from_keys};
use super::value_heads::{HeadOrder, swap_pairs};
use crate::engine::kernels::{NormKind, WeightLayout};
use crate::engine::model::{
    Family, GgufFormat, LinearRole, ModelSpec, ModuleId, ModuleOp, NormRole, ParamRole, ParamSpec, Recurrence, of_gguf,
    one_or_more,
};
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use serde_json::{Map, Value, json};

/// The description of a model in a GGUF file, without tensor values.
pub struct GgufHeader<'a> {
    /// `general.architecture`.
    pub architecture: &'a str,
    /// The metadata keys that start with the architecture's name, without that prefix.
    pub keys: Map<String, Value>,
    /// The token that starts a text.
    pub bos: Option<u32>,
    /// The tokens that end a text or a turn.
    pub eos: Vec<u32>,
    /// The shape of a tensor, outermost dimension first.
    pub shape: &'a dyn Fn(&str) -> Option<Vec<usize>>,
    /// The values of those [`ROPE_FACTORS`](super::ROPE_FACTORS) that exist.
    pub rope_factors: RopeFactors,
}

/// The description of a model for an exported file.
#[derive(Debug)]
pub struct GgufMetadata {
    /// `general.architecture`.
    pub architecture: &'static str,
    /// Metadata, without the architecture's name in front of the keys.
    pub keys: Vec<(&'static str, Value)>,
    /// The values of [`ROPE_FACTORS`](super::ROPE_FACTORS) if each frequency has its own divisor.
    pub rope_factors: RopeFactors,
}

impl ModelSpec {
    /// Reads the model of a GGUF file; `origin` is its path in error messages. Fails with [`Error::Model`] naming the
    /// key: an unknown architecture, or a key that is missing, unknown or has the wrong type.
    pub fn from_gguf(header: &GgufHeader<'_>, origin: &str) -> Result<Self> {
        let fail = |message: String| Error::model(origin, message);
        let family = of_gguf(header.architecture, &header.keys).map_err(fail)?;
        let json = config(family, header).map_err(fail)?;
        let spec = Self::from_config(&json).map_err(|message| fail(rename_keys(&family.gguf, message)))?;
        check_heads(&spec, header).map_err(fail)?;
        Ok(spec)
    }

    /// The model's GGUF description. Fails with [`Error::Model`] for features that GGUF cannot express, which llama.cpp
    /// would compute differently.
    pub fn to_gguf(&self) -> Result<GgufMetadata> {
        let fail = |message: String| Error::model(self.family.model_type, message);
        let format = &self.family.gguf;
        let json = self.config();
        let mut keys: Vec<(&'static str, Value)> = Vec::new();
        for (theirs, ours, _) in format.keys.iter().copied().flatten() {
            if !json[*ours].is_null() {
                keys.push((*theirs, json[*ours].clone()));
            }
        }
        let mut rope_factors = RopeFactors::new();
        if let Some(rope) = &self.rope {
            keys.retain(|(key, _)| *key != "rope.freq_base");
            keys.push(("rope.freq_base", json!(rope.theta)));
            keys.push(("rope.dimension_count", self.rotary_dim().into()));
            keys.push(("attention.value_length", self.head_dim.into()));
            rope_factors = self.write_rope(rope, &mut keys).map_err(fail)?;
        }
        (format.write)(self, &mut keys).and_then(|()| self.check_tensors()).map_err(fail)?;
        Ok(GgufMetadata { architecture: format.architecture, keys, rope_factors })
    }

    /// Rejects tensors that llama.cpp does not read, and the lack of those that it needs.
    fn check_tensors(&self) -> Result<(), String> {
        let GgufFormat { architecture, biases, tied_head, .. } = self.family.gguf;
        let missing = match self.tie_word_embeddings {
            _ if (self.biases.out || self.biases.mlp) && !biases => "biases",
            true if tied_head == Some(false) => "tied head",
            false if tied_head == Some(true) => "separate head",
            _ => return Ok(()),
        };
        Err(format!("llama.cpp has no {missing} in `{architecture}`; export this model as a folder"))
    }

    /// The tensors of a GGUF file that a parameter becomes: gate and up are two there.
    pub fn gguf_parts(&self, entry: &ParamSpec) -> Vec<ParamSpec> {
        if !self.family.gguf.splits_gate_up {
            return vec![entry.clone()];
        }
        let ops = match entry.layer.op {
            ModuleOp::Linear(LinearRole::GateUp) => [LinearRole::Gate, LinearRole::Up].map(ModuleOp::Linear),
            ModuleOp::Expert(expert, LinearRole::GateUp) => {
                [LinearRole::Gate, LinearRole::Up].map(|role| ModuleOp::Expert(expert, role))
            }
            _ => return vec![entry.clone()],
        };
        let part = |op| {
            let mut part = ParamSpec { layer: ModuleId { op, ..entry.layer }, ..entry.clone() };
            let outputs = if self.activation.is_interleaved() { entry.shape.len() - 1 } else { 0 };
            part.shape[outputs] /= 2;
            part
        };
        ops.map(part).into()
    }

    /// The values of a parameter's [`Self::gguf_parts`].
    pub fn gguf_values(&self, entry: &ParamSpec, values: &Tensor) -> candle_core::Result<Vec<Tensor>> {
        let count = self.gguf_parts(entry).len();
        if count == 1 || !self.activation.is_interleaved() {
            return values.chunk(count, 0);
        }
        let last = values.rank() - 1;
        let shape = [&values.dims()[..last], &[values.dims()[last] / count, count]].concat();
        let pairs = values.reshape(shape)?;
        (0..count).map(|i| pairs.narrow(last + 1, i, 1)?.squeeze(last + 1)?.contiguous()).collect()
    }

    /// Converts a parameter's values to GGUF's layout.
    pub fn to_gguf_layout(&self, entry: &ParamSpec, values: &Tensor) -> candle_core::Result<Tensor> {
        let values = &self.order_value_heads(entry, values, HeadOrder::Gguf)?;
        match self.transform(entry) {
            WeightTransform::Same => Ok(values.clone()),
            WeightTransform::Transposed => values.t()?.contiguous(),
            WeightTransform::PlusOne => values + 1.0,
            WeightTransform::NegativeExp => values.exp()?.neg(),
            WeightTransform::Squeezed => values.squeeze(1),
            WeightTransform::Interleaved { heads } => swap_pairs(values, heads, [2, self.head_dim / 2]),
        }
    }

    /// Converts values from GGUF's layout: the inverse of [`Self::to_gguf_layout`].
    pub fn from_gguf_layout(&self, entry: &ParamSpec, values: &Tensor) -> candle_core::Result<Tensor> {
        let values = match self.transform(entry) {
            WeightTransform::Same => values.clone(),
            WeightTransform::Transposed => values.t()?.contiguous()?,
            WeightTransform::PlusOne => (values - 1.0)?,
            WeightTransform::NegativeExp => values.neg()?.log()?,
            WeightTransform::Squeezed => values.unsqueeze(1)?,
            WeightTransform::Interleaved { heads } => swap_pairs(values, heads, [self.head_dim / 2, 2])?,
        };
        self.order_value_heads(entry, &values, HeadOrder::Ours)
    }

    /// The shape of a parameter's tensor in GGUF, outermost dimension first. One tensor has a matrix of each expert.
    pub fn gguf_shape(&self, entry: &ParamSpec) -> Vec<usize> {
        let mut shape = entry.shape.clone();
        match self.transform(entry) {
            WeightTransform::Transposed => shape.reverse(),
            WeightTransform::Squeezed => drop(shape.remove(1)),
            _ => {}
        }
        if let (ModuleOp::Expert(..), Some(experts)) = (entry.layer.op, self.experts) {
            shape.insert(0, experts.count);
        }
        shape
    }

    /// The name of a parameter's tensor in GGUF.
    pub fn gguf_name(&self, entry: &ParamSpec) -> String {
        let ModuleId { block, op } = entry.layer;
        let recurrence = block.and_then(|block| self.recurrence(block));
        let name = match op {
            ModuleOp::Norm(NormRole::Mlp) => self.family.gguf.mlp_norm,
            ModuleOp::Norm(NormRole::Final) => self.family.gguf.final_norm,
            ModuleOp::ShortConv if matches!(recurrence, Some(Recurrence::GatedDelta { .. })) => "ssm_conv1d",
            ModuleOp::GatedDelta if entry.role == ParamRole::Bias => "ssm_dt",
            op => module_name(op),
        };
        let ending = match (op, entry.role) {
            (_, ParamRole::Bias) => ".bias",
            (ModuleOp::GatedDelta, _) => "",
            _ => ".weight",
        };
        block.map_or_else(|| format!("{name}{ending}"), |block| format!("blk.{block}.{name}{ending}"))
    }

    /// The rows of a parameter's matrix in GGUF in our order.
    pub fn gguf_rows(&self, entry: &ParamSpec) -> candle_core::Result<Vec<u32>> {
        let shape = self.gguf_shape(entry);
        let rows = Tensor::arange(0, shape[shape.len() - 2] as u32, &Device::Cpu)?;
        if let WeightTransform::Interleaved { heads } = self.transform(entry) {
            return swap_pairs(&rows, heads, [self.head_dim / 2, 2])?.to_vec1();
        }
        self.order_value_heads(entry, &rows, HeadOrder::Ours)?.to_vec1()
    }

    fn transform(&self, entry: &ParamSpec) -> WeightTransform {
        let interleaved = self.family.gguf.interleaved;
        match entry.layer.op {
            ModuleOp::Linear(LinearRole::Query) if interleaved => WeightTransform::Interleaved { heads: self.heads },
            ModuleOp::Linear(LinearRole::Key) if interleaved => WeightTransform::Interleaved { heads: self.kv_heads },
            op @ (ModuleOp::Linear(_) | ModuleOp::Expert(..))
                if self.layout_of(op) == WeightLayout::InOut && entry.role == ParamRole::Weight =>
            {
                WeightTransform::Transposed
            }
            ModuleOp::ShortConv => WeightTransform::Squeezed,
            ModuleOp::GatedDelta if entry.role == ParamRole::Weight => WeightTransform::NegativeExp,
            ModuleOp::Norm(role) if role != NormRole::Delta && self.norm == (NormKind::Rms { unit_offset: true }) => {
                WeightTransform::PlusOne
            }
            _ => WeightTransform::Same,
        }
    }
}

/// How GGUF's layout of a parameter differs from ours.
enum WeightTransform {
    Same,
    /// `[out, in]` there, `[in, out]` here.
    Transposed,
    /// GGUF stores 1 + weight of a norm.
    PlusOne,
    /// GGUF stores `-exp(values)`.
    NegativeExp,
    /// `[channels, taps]` there, `[channels, 1, taps]` here.
    Squeezed,
    /// GGUF interleaves the rows of the two halves of each head.
    Interleaved {
        heads: usize,
    },
}

/// The first value of a parameter in its tensor.
pub fn gguf_offset(entry: &ParamSpec) -> usize {
    match entry.layer.op {
        ModuleOp::Expert(expert, _) => usize::from(expert) * entry.shape.iter().product::<usize>(),
        _ => 0,
    }
}

/// The name of most families' modules in GGUF.
const fn module_name(op: ModuleOp) -> &'static str {
    match op {
        ModuleOp::Embedding => "token_embd",
        ModuleOp::Positions => "position_embd",
        ModuleOp::Head => "output",
        ModuleOp::Norm(NormRole::Final) => "output_norm",
        ModuleOp::Norm(NormRole::Attention) => "attn_norm",
        ModuleOp::Norm(NormRole::Query) => "attn_q_norm",
        ModuleOp::Norm(NormRole::Key) => "attn_k_norm",
        ModuleOp::Norm(NormRole::PostAttention) => "post_attention_norm",
        ModuleOp::Norm(NormRole::Mlp) => "ffn_norm",
        ModuleOp::Norm(NormRole::PostMlp) => "post_ffw_norm",
        ModuleOp::Linear(LinearRole::Qkv | LinearRole::DeltaQkv) => "attn_qkv",
        ModuleOp::Linear(LinearRole::Query) => "attn_q",
        ModuleOp::Linear(LinearRole::Key) => "attn_k",
        ModuleOp::Linear(LinearRole::Value) => "attn_v",
        ModuleOp::Linear(LinearRole::Out) => "attn_output",
        ModuleOp::Linear(LinearRole::ConvIn) => "shortconv.in_proj",
        ModuleOp::Linear(LinearRole::ConvOut) => "shortconv.out_proj",
        ModuleOp::Router => "ffn_gate_inp",
        ModuleOp::Expert(_, LinearRole::Gate) => "ffn_gate_exps",
        ModuleOp::Expert(_, LinearRole::Down) => "ffn_down_exps",
        ModuleOp::Expert(..) => "ffn_up_exps",
        ModuleOp::Linear(LinearRole::Gate) => "ffn_gate",
        ModuleOp::Linear(LinearRole::Up | LinearRole::GateUp) => "ffn_up",
        ModuleOp::Linear(LinearRole::Down) => "ffn_down",
        ModuleOp::Attention => "attn_sinks",
        ModuleOp::ShortConv => "shortconv.conv",
        ModuleOp::Linear(LinearRole::DeltaGate) => "attn_gate",
        ModuleOp::Linear(LinearRole::DeltaBeta) => "ssm_beta",
        ModuleOp::Linear(LinearRole::DeltaDecay) => "ssm_alpha",
        ModuleOp::Linear(LinearRole::DeltaOut) => "ssm_out",
        ModuleOp::Norm(NormRole::Delta) => "ssm_norm",
        ModuleOp::GatedDelta => "ssm_a",
        ModuleOp::Linear(LinearRole::DeltaIn)
        | ModuleOp::AttnResidual
        | ModuleOp::Activation
        | ModuleOp::MlpResidual => "none",
    }
}

/// Replaces keys of `config.json` in a message by the metadata keys they come from.
fn rename_keys(GgufFormat { architecture, keys, .. }: &GgufFormat, message: String) -> String {
    let scaling = [("rope.scaling", "rope_scaling"), ("rope.scaling.factor", "factor")].map(|(a, b)| (a, b, false));
    keys.iter().copied().flatten().chain(&scaling).fold(message, |message, (theirs, ours, _)| {
        message.replace(&format!("`{ours}`"), &format!("`{architecture}.{theirs}`"))
    })
}

/// Translates the metadata to a `config.json`.
fn config(family: &Family, header: &GgufHeader<'_>) -> Result<Map<String, Value>, String> {
    let name = header.architecture;
    let format = &family.gguf;
    let mut keys = header.keys.clone();
    let mut json = Map::new();
    for (theirs, ours, required) in format.keys.iter().copied().flatten() {
        match keys.remove(*theirs) {
            Some(value) => drop(json.insert((*ours).to_owned(), value)),
            None if *required => return Err(format!("metadata `{name}.{theirs}` is missing")),
            None => {}
        }
    }
    let has = |tensor: &str| (header.shape)(tensor).is_some();
    let embedding = (header.shape)("token_embd.weight").ok_or("tensor `token_embd.weight` is missing")?;
    let rows = embedding.first().copied().unwrap_or_default();
    if let Some(said) = keys.remove("vocab_size").filter(|said| *said != json!(rows)) {
        return Err(format!("metadata `{name}.vocab_size` is {said}, but `token_embd.weight` has {rows} rows"));
    }
    json.insert("vocab_size".into(), rows.into());
    json.insert("tie_word_embeddings".into(), (!has("output.weight")).into());
    json.insert("bos_token_id".into(), header.bos.into());
    json.insert("eos_token_id".into(), one_or_more(&header.eos));
    json.insert("model_type".into(), family.model_type.into());
    if format.keys.iter().copied().flatten().any(|(theirs, ..)| *theirs == "rope.freq_base") {
        json.insert("attention_bias".into(), has("blk.0.attn_q.bias").into());
        json.insert("mlp_bias".into(), has("blk.0.ffn_gate.bias").into());
        let number = |json: &Map<String, Value>, key: &str| json.get(key).and_then(Value::as_u64);
        let (width, heads) = (number(&json, "hidden_size"), number(&json, "num_attention_heads"));
        if let (Some(width), Some(heads @ 1..)) = (width, heads) {
            json.entry("num_key_value_heads").or_insert_with(|| heads.into());
            json.entry("head_dim").or_insert_with(|| (width / heads).into());
        }
        if let Some(scaling) = scaling_from_keys(name, &mut keys)? {
            json.insert("rope_scaling".into(), scaling);
        }
        if !header.rope_factors.is_empty() {
            let scaling = scaling_from_factors(&header.rope_factors, &json, &mut keys)?;
            json.insert("rope_scaling".into(), scaling);
        }
    }
    (format.read)(&mut keys, &mut json);
    refuse_unknown(name, &keys)?;
    Ok(json)
}

/// Rejects unknown keys, which may change the computation. Values of 0 and `false` leave a feature off.
fn refuse_unknown(name: &str, keys: &Map<String, Value>) -> Result<(), String> {
    const IGNORED_KEYS: [&str; 4] =
        ["attention.value_length", "rope.dimension_count", "tensor_data_layout", ORIGINAL_CONTEXT];
    let off = |value: &Value| value == &Value::Bool(false) || value.as_f64() == Some(0.0);
    let on = |key: &str, value: &Value| match key {
        "attention.causal" => value == &Value::Bool(true),
        "rope.scaling.attn_factor" => value.as_f64() == Some(1.0),
        _ => IGNORED_KEYS.contains(&key),
    };
    match keys.iter().find(|(key, value)| !off(value) && !on(key, value)) {
        None => Ok(()),
        Some((key, value)) => {
            Err(format!("metadata `{name}.{}` is {value}, which is not supported", key.escape_debug()))
        }
    }
}

/// Rejects value heads whose size differs from key heads, and another part of heads that is rotated.
fn check_heads(spec: &ModelSpec, header: &GgufHeader<'_>) -> Result<(), String> {
    for (key, expected) in [("attention.value_length", spec.head_dim), ("rope.dimension_count", spec.rotary_dim())] {
        match header.keys.get(key) {
            Some(value) if spec.rope.is_some() && *value != json!(expected) => {
                let name = header.architecture;
                return Err(format!(
                    "metadata `{name}.{key}` is {value}; only the head's whole width, {expected}, is built"
                ));
            }
            _ => {}
        }
    }
    Ok(())
}
