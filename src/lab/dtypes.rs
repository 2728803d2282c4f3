//! The types of a policy: the type inside each operation, measured, and those in which a step of the engine stores its
//! tensors.

mod operations;

use candle_core::{Device, Tensor};
use serde::Serialize;
use std::sync::Arc;

pub(crate) use operations::MeasuredOp;

use super::number::percent;
use crate::amp::{AutocastOp, CastRule};
use crate::engine::kernels::Fused;
use crate::engine::model::{
    Checkpointing, Decoder, ForwardMode, Hook, HookPoint, InputIds, ModelSpec, Parameters, TensorKind, Workspace,
};
use crate::engine::optim::{Gradients, MasterWeights};
use crate::precision::PrecisionPolicy;
use crate::ui::{Column, Line, Page, Role, plain};
use crate::{Error, Result};

/// The stored types of a step under a policy.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct DtypeReport {
    pub(crate) policy: String,
    /// Whether the policy needs loss scaling.
    pub(crate) loss_scale: bool,
    /// Types of the masters, the working copy and the optimizer's gradients.
    pub(crate) state: [(&'static str, &'static str); 3],
    pub(crate) operations: Vec<MeasuredOp>,
    /// Layers of the first block and outside the blocks, in order of computation.
    pub(crate) layers: Vec<LayerDtypes>,
}

/// A layer's stored types; `None` for tensors it does not have.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct LayerDtypes {
    /// The layer's name, as in its parameters.
    pub(crate) layer: String,
    pub(crate) output: Option<&'static str>,
    /// The type of its output's or input's gradient.
    pub(crate) activation_gradient: Option<&'static str>,
    pub(crate) weight_gradient: Option<&'static str>,
}

/// Records the type of every tensor in the passes.
struct Types<'a> {
    spec: &'a ModelSpec,
    layers: Vec<LayerDtypes>,
}

impl Hook for Types<'_> {
    fn record(&mut self, point: HookPoint, tensor: &Tensor) -> candle_core::Result<()> {
        let layer = self.spec.layer_name(point.layer);
        let dtype = Some(tensor.dtype().as_str());
        let at = self.layers.iter().position(|cast| cast.layer == layer).unwrap_or_else(|| {
            self.layers.push(LayerDtypes { layer, output: None, activation_gradient: None, weight_gradient: None });
            self.layers.len() - 1
        });
        let cast = &mut self.layers[at];
        match point.kind {
            TensorKind::Output | TensorKind::LoraTerm => cast.output = dtype,
            TensorKind::OutputGradient | TensorKind::InputGradient | TensorKind::LowRankGradient => {
                cast.activation_gradient = dtype;
            }
            TensorKind::WeightGradient | TensorKind::BiasGradient => cast.weight_gradient = dtype,
        }
        Ok(())
    }
}

impl DtypeReport {
    /// Runs a step of the built-in model under `policy` on the CPU and records the types of its tensors.
    pub(crate) fn of(policy: PrecisionPolicy) -> Result<Self> {
        const TOKENS: usize = 4;
        let spec = ModelSpec::named("tiny").ok_or_else(|| Error::config("model", "there is no `tiny`"))?;
        let masters = Parameters::random(&spec.parameters(), 0, &Device::Cpu)?;
        let (masters, weights) = MasterWeights::new(masters, policy, &Fused)?;
        let model = Decoder::new(&spec, &weights, Arc::new(Fused))?;
        let mut workspace = Workspace::for_training(&spec, policy, (1, TOKENS), Checkpointing::None, &Device::Cpu)?;
        let grads = Gradients::new(&weights, policy, 1)?;
        let ids: Vec<u32> = (0..TOKENS as u32).collect();
        let tokens = InputIds::new(&ids, TOKENS);
        let mode = ForwardMode::Train { seed: 0, micro_batch: 0 };
        let mut types = Types { spec: &spec, layers: Vec::new() };
        model.forward(&weights, tokens, mode, &mut workspace, &mut types)?;
        model.loss_and_head_gradient(&weights, &ids, (1.0, None), &workspace, grads.micro_batch_grads(), &mut types)?;
        model.backward(&weights, tokens, mode, &mut workspace, grads.micro_batch_grads(), &mut types)?;
        let name = |parameters: &Parameters| parameters.tensors().first().map_or("", |tensor| tensor.dtype().as_str());
        // The blocks are alike, so show only the first.
        let layers =
            types.layers.into_iter().filter(|cast| !cast.layer.starts_with("h.") || cast.layer.starts_with("h.0."));
        Ok(Self {
            policy: policy.to_string(),
            loss_scale: policy.needs_loss_scale(),
            state: [
                ("masters and Adam's moments", name(masters.parameters())),
                ("working copy of the weights", name(&weights)),
                ("gradients for the optimizer", name(grads.total())),
            ],
            operations: operations::measured(policy)?,
            layers: layers.collect(),
        })
    }

    pub(crate) fn page(&self, width: usize) -> Page {
        let mut page = Page::new();
        let scale = if self.loss_scale { "with a loss scale" } else { "without a loss scale" };
        page.push(Line::new().with(Role::Title, self.policy.clone()).dim(format!("   {scale}")));
        for (what, dtype) in self.state {
            let (role, dtype) = cell(Some(dtype), "");
            page.push(Line::new().plain(format!("{what:<30}")).with(role, dtype));
        }
        page.gap();
        let columns: &[Column<MeasuredOp>] = &[
            ("operation", -24, &|it| plain(it.name)),
            ("operands", 10, &|it| cell(Some(it.operands), "")),
            ("inside", 8, &|it| cell(Some(it.inside), "")),
            ("result", 8, &|it| cell(Some(it.result), "")),
            ("rounded once", 14, &|it| plain(format!("{} %", percent(it.rounded_once)))),
            ("autocast", 14, &|it| cell(it.autocast, "the operand's")),
        ];
        page.table(&self.operations, columns);
        for (rule, to) in [
            (CastRule::LowPrecision, "to the compute type"),
            (CastRule::Fp32, "to FP32"),
            (CastRule::Promote, "to the widest operand's type"),
            (CastRule::Keep, "nothing for"),
        ] {
            let operations = AutocastOp::ALL.iter().filter(|op| op.cast_rule() == rule);
            let names: Vec<_> = operations.map(|op| format!("{op:?}")).collect();
            page.wrapped(Role::Dim, &format!("autocast casts {to}: {}", names.join(", ")), width);
        }
        page.gap();
        let columns: &[Column<LayerDtypes>] = &[
            ("stored", -24, &|it| plain(&it.layer)),
            ("output", 10, &|it| cell(it.output, "–")),
            ("activation gradient", 24, &|it| cell(it.activation_gradient, "–")),
            ("weight gradient", 18, &|it| cell(it.weight_gradient, "–")),
        ];
        page.table(&self.layers, columns);
        page
    }
}

/// The cell of a type, or of its absence.
fn cell(dtype: Option<&'static str>, absent: &str) -> (Role, String) {
    let role = match dtype {
        Some("f16" | "bf16") => Role::Warn,
        Some(_) => Role::Good,
        None => Role::Dim,
    };
    (role, dtype.unwrap_or(absent).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_matches_the_engine() {
        let fp32 = DtypeReport::of(PrecisionPolicy::FP32).unwrap();
        assert!(fp32.layers.len() > 5 && fp32.layers.iter().all(|cast| cast.output.is_none_or(|dtype| dtype == "f32")));
        let fp16 = DtypeReport::of(PrecisionPolicy::FP16).unwrap();
        assert_eq!(fp16.state.map(|(_, dtype)| dtype), ["f32", "f16", "f16"]);
        assert!(fp16.layers.iter().any(|cast| cast.output == Some("f16")) && fp16.loss_scale);
        let wide = DtypeReport::of("p=f32,c=f16,g=f32,r=f32".parse().unwrap()).unwrap();
        assert_eq!(wide.state[2].1, "f32");
        assert!(wide.layers.iter().any(|cast| cast.output == Some("f32")), "the residual stream");
        insta::assert_snapshot!("dtypes", fp16.page(80).text());
    }
}
