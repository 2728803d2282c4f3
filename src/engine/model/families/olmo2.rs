//! OLMo 2 (OLMo Team, 2024): Llama with norms after attention and MLP instead of before them, and norms over all heads
//! of queries and of keys.

use super::llama;
use crate::engine::model::family::{Family, GgufFormat};
use crate::engine::model::spec::{ModelSpec, ModuleId, ModuleOp, NormRole, QkNorm};

/// The family, from which its successor takes the fields that they share.
pub(super) static OLMO2: Family = BASE;

/// [`OLMO2`] as a constant.
pub(super) const BASE: Family = Family {
    model_type: "olmo2",
    class: "Olmo2ForCausalLM",
    bias_keys: &["attention_bias"],
    named: &[],
    read: |keys| llama::read_uniform(keys, default(), [None, None]),
    layer_name,
    gguf: GgufFormat { architecture: "olmo2", tied_head: Some(false), ..llama::OTHER_GGUF },
    ..llama::BASE
};

/// The defaults of transformers for missing keys.
pub(super) fn default() -> ModelSpec {
    ModelSpec {
        family: &OLMO2,
        vocab_size: 50_304,
        norm_eps: 1e-5,
        qk_norm: Some(QkNorm::Whole),
        pre_norms: false,
        post_norms: true,
        bos_token_id: None,
        eos_token_ids: vec![50_279],
        ..llama::default()
    }
}

fn layer_name(layer: ModuleId) -> String {
    let name = match layer.op {
        ModuleOp::Norm(NormRole::PostAttention) => "post_attention_layernorm",
        ModuleOp::Norm(NormRole::Mlp) => "mlp.input",
        ModuleOp::Norm(NormRole::PostMlp) => "post_feedforward_layernorm",
        _ => return llama::layer_name(layer),
    };
    llama::in_block(layer.block, name)
}
