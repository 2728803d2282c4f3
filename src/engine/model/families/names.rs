//! Names of layers that Llama-like families share.

use crate::engine::model::spec::{LinearRole, ModuleId, ModuleOp, NormRole};

/// Names of layers that all Llama-like families share. The norm after attention has the name of other families' MLP
/// norm.
pub(super) fn layer_name(ModuleId { block, op }: ModuleId) -> String {
    let name = match op {
        ModuleOp::Expert(expert, role) => {
            let name = layer_name(ModuleId::global(ModuleOp::Linear(role)));
            let part = name.rsplit('.').next().unwrap_or_default();
            return in_block(block, &format!("mlp.experts.{expert}.{part}"));
        }
        ModuleOp::Router => "mlp.gate",
        ModuleOp::Embedding => "embed_tokens",
        ModuleOp::Positions => "embed_positions",
        ModuleOp::Norm(NormRole::Attention) => "input_layernorm",
        ModuleOp::Norm(NormRole::Query) => "self_attn.q_norm",
        ModuleOp::Norm(NormRole::Key) => "self_attn.k_norm",
        ModuleOp::Norm(NormRole::PostAttention) => "self_attn.branch_norm",
        ModuleOp::Norm(NormRole::Mlp) => "post_attention_layernorm",
        ModuleOp::Norm(NormRole::PostMlp) => "mlp.branch_norm",
        ModuleOp::Norm(NormRole::Final) => "norm",
        ModuleOp::Linear(LinearRole::Qkv) => "self_attn.qkv",
        ModuleOp::Linear(LinearRole::Query) => "self_attn.q_proj",
        ModuleOp::Linear(LinearRole::Key) => "self_attn.k_proj",
        ModuleOp::Linear(LinearRole::Value) => "self_attn.v_proj",
        ModuleOp::Linear(LinearRole::Out) => "self_attn.o_proj",
        ModuleOp::Linear(LinearRole::ConvIn) => "conv.in_proj",
        ModuleOp::Linear(LinearRole::ConvOut) => "conv.out_proj",
        ModuleOp::Linear(LinearRole::GateUp) => "mlp.gate_up",
        ModuleOp::Linear(LinearRole::Gate) => "mlp.gate_proj",
        ModuleOp::Linear(LinearRole::Up) => "mlp.up_proj",
        ModuleOp::Linear(LinearRole::Down) => "mlp.down_proj",
        ModuleOp::Attention => "self_attn",
        ModuleOp::ShortConv => "conv.conv",
        ModuleOp::Linear(LinearRole::DeltaIn) => "linear_attn.in_proj",
        ModuleOp::Linear(LinearRole::DeltaQkv) => "linear_attn.in_proj_qkv",
        ModuleOp::Linear(LinearRole::DeltaGate) => "linear_attn.in_proj_z",
        ModuleOp::Linear(LinearRole::DeltaBeta) => "linear_attn.in_proj_b",
        ModuleOp::Linear(LinearRole::DeltaDecay) => "linear_attn.in_proj_a",
        ModuleOp::Linear(LinearRole::DeltaOut) => "linear_attn.out_proj",
        ModuleOp::Norm(NormRole::Delta) => "linear_attn.norm",
        ModuleOp::GatedDelta => "linear_attn",
        ModuleOp::AttnResidual => "self_attn.residual",
        ModuleOp::Activation => "mlp.act",
        ModuleOp::MlpResidual => "mlp.residual",
        ModuleOp::Head => "lm_head",
    };
    in_block(block, name)
}

/// The name of a layer of `block`, or outside the blocks.
pub(super) fn in_block(block: Option<usize>, name: &str) -> String {
    block.map_or_else(|| name.to_owned(), |block| format!("layers.{block}.{name}"))
}

/// Older versions of transformers saved the frequencies of rotary embeddings with every layer.
pub(super) fn parameter_name(tensor: &str) -> Option<&str> {
    let name = tensor.strip_prefix("model.").unwrap_or(tensor);
    (!name.ends_with("rotary_emb.inv_freq")).then_some(name)
}
