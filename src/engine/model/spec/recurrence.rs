//! Layers that mix tokens by a recurrence instead of attention.

use super::{LinearRole, ModelSpec, ModuleOp, NormRole, ParamInit, ParamRole, ProductSpec};
use crate::engine::kernels::gated_delta::DeltaHeads;

/// An operation that mixes tokens with a state of constant size. A convolution in it reads `taps` tokens, the current
/// one included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are described above and by their types")]
pub enum Recurrence {
    /// A gated convolution of a few tokens.
    ShortConv { taps: usize },
    /// The gated delta rule.
    GatedDelta { heads: DeltaHeads, taps: usize },
}

/// Recurrences instead of attention, in some layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecurrentLayers {
    /// The operation.
    pub recurrence: Recurrence,
    /// Which layers have it.
    pub layers: Vec<bool>,
}

impl ModelSpec {
    /// The recurrence of layer `block`, if it has one instead of attention.
    pub fn recurrence(&self, block: usize) -> Option<Recurrence> {
        let recurrent = self.recurrent.as_ref()?;
        (recurrent.layers.get(block) == Some(&true)).then_some(recurrent.recurrence)
    }

    /// The number of layers with attention.
    pub fn attention_layers(&self) -> usize {
        (0..self.num_layers).filter(|block| self.recurrence(*block).is_none()).count()
    }

    /// Columns of the input and of the output of the recurrence.
    fn recurrence_widths(&self, recurrence: Recurrence) -> [usize; 2] {
        match recurrence {
            Recurrence::ShortConv { .. } => [3 * self.hidden_size, self.hidden_size],
            Recurrence::GatedDelta { heads, .. } => [heads.input_width(), heads.values()],
        }
    }

    /// Columns of the input and of the output of attention, or of the recurrence, in layer `block`; the maximum for
    /// `None`.
    pub(in crate::engine::model) fn mixer_widths(&self, block: Option<usize>) -> [usize; 2] {
        let attention = [self.qkv_width(), self.attn_out_size()];
        match (block, &self.recurrent) {
            (None, Some(recurrent)) => {
                let [input, output] = self.recurrence_widths(recurrent.recurrence);
                [input.max(attention[0]), output.max(attention[1])]
            }
            (block, _) => {
                let recurrence = block.and_then(|block| self.recurrence(block));
                recurrence.map_or(attention, |recurrence| self.recurrence_widths(recurrence))
            }
        }
    }

    /// The linear layers around the recurrence as files have them.
    pub(super) fn recurrence_linears(&self, recurrence: Recurrence) -> Vec<ProductSpec> {
        let d = self.hidden_size;
        let linear = |role, inputs, outputs| ProductSpec { op: ModuleOp::Linear(role), inputs, outputs, bias: false };
        match recurrence {
            Recurrence::ShortConv { .. } => {
                vec![linear(LinearRole::ConvIn, d, 3 * d), linear(LinearRole::ConvOut, d, d)]
            }
            Recurrence::GatedDelta { heads, .. } => vec![
                linear(LinearRole::DeltaQkv, d, heads.channels()),
                linear(LinearRole::DeltaGate, d, heads.values()),
                linear(LinearRole::DeltaBeta, d, heads.value_heads),
                linear(LinearRole::DeltaDecay, d, heads.value_heads),
                linear(LinearRole::DeltaOut, heads.values(), d),
            ],
        }
    }

    /// The parameters of a block with this recurrence that are no products and no norms of the engine.
    pub(super) fn recurrence_parameters(
        &self,
        recurrence: Recurrence,
    ) -> Vec<(ModuleOp, ParamRole, Vec<usize>, ParamInit)> {
        let drawn = ParamInit::Normal(self.initializer_range);
        match recurrence {
            Recurrence::ShortConv { taps } => {
                vec![(ModuleOp::ShortConv, ParamRole::Weight, vec![self.hidden_size, 1, taps], drawn)]
            }
            Recurrence::GatedDelta { heads, taps } => vec![
                (ModuleOp::ShortConv, ParamRole::Weight, vec![heads.channels(), 1, taps], drawn),
                (ModuleOp::GatedDelta, ParamRole::Weight, vec![heads.value_heads], ParamInit::Zeros),
                (ModuleOp::GatedDelta, ParamRole::Bias, vec![heads.value_heads], ParamInit::Ones),
                (ModuleOp::Norm(NormRole::Delta), ParamRole::Weight, vec![heads.value_dim], ParamInit::Ones),
            ],
        }
    }
}
