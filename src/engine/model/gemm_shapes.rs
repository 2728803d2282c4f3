//! The matrix products of a training step, whose operands the kernels pack.

use super::spec::{FusedProduct, ModelSpec, ModuleId, ParamRole};
use super::workspace::candle_dtype;
use crate::engine::kernels::WeightLayout;
use crate::engine::kernels::cross_entropy::CrossEntropyWorkspace;
use crate::engine::kernels::matmul::GemmShape;
use crate::precision::PrecisionPolicy;
use candle_core::{DType, Result};
use std::collections::BTreeSet;

impl ModelSpec {
    /// The products of a forward and backward pass over `tokens` tokens, of the head and all blocks. If layers share a
    /// product, the products with their adapters' second factors are given as if one layer had all outputs.
    pub(crate) fn gemm_shapes(&self, policy: PrecisionPolicy, tokens: usize) -> Result<Vec<GemmShape>> {
        let (compute, grads) = (candle_dtype(policy.compute), candle_dtype(policy.grads));
        let product = |sizes, second, c| GemmShape { sizes, second, operands: compute, c };
        let (vocab, width) = (self.vocab_size, self.hidden_size);
        let head_grads = self.trains_head().then_some(grads);
        let head =
            CrossEntropyWorkspace::alloc([tokens, vocab, width], compute, head_grads, false, &|shape, _| Ok(shape[0]))?;
        let rows = head.logits;
        let mut products = vec![product([rows, width, vocab], 0, compute), product([rows, vocab, width], 0, compute)];
        if let Some(grads) = head_grads {
            let sum = if head.weight_sum.is_some() { DType::F32 } else { grads };
            products.push(product([vocab, rows, width], 0, sum));
        }
        let weights = self.parameters().into_iter().filter(|entry| entry.role == ParamRole::Weight);
        let trained: BTreeSet<ModuleId> = weights.map(|entry| entry.fused_into).collect();
        let r = self.lora.as_ref().map_or(0, |lora| lora.r);
        // A token chooses an expert at most once.
        for (fused_into, FusedProduct { inputs, outputs, members, .. }) in self.fused_products() {
            let low = members * r;
            products.push(product([tokens, inputs, outputs], low, compute));
            products.push(product([tokens, outputs, inputs], low, compute));
            if trained.contains(&fused_into) {
                let [rows, columns] = match self.layout_of(fused_into.op) {
                    WeightLayout::InOut => [inputs, outputs],
                    WeightLayout::OutIn => [outputs, inputs],
                };
                products.push(product([rows, tokens, columns], 0, grads));
            }
            if low > 0 {
                products.push(product([tokens, inputs, low], 0, compute));
                products.push(product([tokens, outputs, r], 0, compute));
                products.push(product([outputs, tokens, r], 0, grads));
                products.push(product([low, tokens, inputs], 0, grads));
            }
        }
        Ok(products)
    }
}
