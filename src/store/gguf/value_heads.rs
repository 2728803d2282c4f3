//! The order of value heads in GGUF: llama.cpp's converter stores the first value heads of all key heads, then all
//! second ones. Ours and transformers' are the value heads of the first key head, then those of the second one.

use crate::engine::model::{LinearRole, ModelSpec, ModuleOp, ParamSpec, Recurrence};
use candle_core::{Result, Tensor};

/// The direction of a conversion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HeadOrder {
    Ours,
    Gguf,
}

impl ModelSpec {
    /// Brings the value heads of a parameter's `values`, whose first dimension has its outputs, into `order` from the
    /// other one.
    pub(super) fn order_value_heads(&self, entry: &ParamSpec, values: &Tensor, order: HeadOrder) -> Result<Tensor> {
        let recurrence = entry.layer.block.and_then(|block| self.recurrence(block));
        let Some(Recurrence::GatedDelta { heads, .. }) = recurrence else { return Ok(values.clone()) };
        let group = heads.group();
        let shape = if order == HeadOrder::Gguf { [heads.key_heads, group] } else { [group, heads.key_heads] };
        let swapped = |values: &Tensor| swap_pairs(values, 1, shape);
        match entry.layer.op {
            _ if group == 1 => Ok(values.clone()),
            ModuleOp::Linear(LinearRole::DeltaQkv) | ModuleOp::ShortConv => {
                let keys = 2 * heads.keys();
                let parts = [values.narrow(0, 0, keys)?, swapped(&values.narrow(0, keys, heads.values())?)?];
                Tensor::cat(&parts, 0)
            }
            ModuleOp::Linear(LinearRole::DeltaGate | LinearRole::DeltaBeta | LinearRole::DeltaDecay)
            | ModuleOp::GatedDelta => swapped(values),
            ModuleOp::Linear(LinearRole::DeltaOut) => swap_pairs(values, values.dim(0)?, shape),
            _ => Ok(values.clone()),
        }
    }

    /// Whether the columns of a parameter's matrix have another order in GGUF.
    pub(super) fn reorders_columns(&self, entry: &ParamSpec) -> bool {
        let is_out = entry.layer.op == ModuleOp::Linear(LinearRole::DeltaOut);
        let recurrence = entry.layer.block.filter(|_| is_out).and_then(|block| self.recurrence(block));
        matches!(recurrence, Some(Recurrence::GatedDelta { heads, .. }) if heads.group() > 1)
    }
}

/// Swaps the two dimensions that make up the rows of each head.
pub(super) fn swap_pairs(values: &Tensor, heads: usize, [outer, inner]: [usize; 2]) -> Result<Tensor> {
    let rest = values.elem_count() / (heads * outer * inner);
    let swapped = values.reshape((heads, outer, inner, rest))?.transpose(1, 2)?.contiguous()?;
    swapped.reshape(values.dims())
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use serde_json::json;

    /// Two key heads of one element with three value heads of one element each.
    #[test]
    fn the_first_value_heads_of_all_key_heads_come_first_in_gguf() {
        let config = json!({"model_type": "qwen3_5_text", "num_hidden_layers": 1, "linear_num_key_heads": 2,
            "linear_num_value_heads": 6, "linear_key_head_dim": 1, "linear_value_head_dim": 1});
        let spec = ModelSpec::from_json(config.to_string().as_bytes(), "x").unwrap();
        let entries = spec.base_parameters();
        let order = |name: &str, len: u32| {
            let entry = entries.iter().find(|entry| entry.name.ends_with(name)).unwrap();
            let ours = Tensor::arange(0, len, &Device::Cpu).unwrap();
            let gguf = spec.order_value_heads(entry, &ours, HeadOrder::Gguf).unwrap();
            let back = spec.order_value_heads(entry, &gguf, HeadOrder::Ours).unwrap();
            assert_eq!(back.to_vec1::<u32>().unwrap(), ours.to_vec1::<u32>().unwrap());
            gguf.to_vec1::<u32>().unwrap()
        };
        assert_eq!(order("A_log", 6), [0, 3, 1, 4, 2, 5]);
        assert_eq!(order("in_proj_qkv.weight", 10), [0, 1, 2, 3, 4, 7, 5, 8, 6, 9]);
        assert_eq!(order("in_proj_a.weight", 6), [0, 3, 1, 4, 2, 5]);
        assert_eq!(order("mlp.up_proj.weight", 6), [0, 1, 2, 3, 4, 5]);
    }
}
