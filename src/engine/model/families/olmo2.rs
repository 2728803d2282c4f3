//! OLMo 2 (OLMo Team, 2024): Llama with norms after attention and MLP instead of before them, and norms over all heads of
//! queries and of keys.

use super::llama::{self, head_dim, only_silu, with_rope};
use crate::engine::model::family::{ConfigReader, GgufFormat, ModelFamily};
use crate::engine::model::spec::{FamilyRef, ModelSpec, ModuleId, ModuleOp, NormRole, QkNorm};
use serde_json::Value;

/// The family.
pub(super) struct Olmo2;

/// The defaults of transformers for missing keys.
fn default() -> ModelSpec {
    ModelSpec {
        family: FamilyRef(&Olmo2),
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

impl ModelFamily for Olmo2 {
    fn model_type(&self) -> &'static str {
        "olmo2"
    }

    fn read(&self, keys: &ConfigReader<'_>) -> Result<ModelSpec, String> {
        only_silu(keys)?;
        let spec = llama::read(keys, default(), None)?;
        let biases = llama::attention_biases(keys)?;
        with_rope(keys, ModelSpec { head_dim: head_dim(keys, &spec, None)?, biases, ..spec }, 1e4)
    }

    fn write(&self, spec: &ModelSpec) -> Value {
        let mut json = llama::write(spec, "Olmo2ForCausalLM");
        json["attention_bias"] = spec.biases.qkv.into();
        json
    }

    fn layer_name(&self, layer: ModuleId) -> String {
        let name = match layer.op {
            ModuleOp::Norm(NormRole::PostAttention) => "post_attention_layernorm",
            ModuleOp::Norm(NormRole::Mlp) => "mlp.input",
            ModuleOp::Norm(NormRole::PostMlp) => "post_feedforward_layernorm",
            _ => return llama::layer_name(layer),
        };
        llama::in_block(layer.block, name)
    }

    fn gguf(&self) -> GgufFormat {
        GgufFormat { architecture: "olmo2", keys: &llama::GGUF_KEYS, interleaved: false }
    }
}
