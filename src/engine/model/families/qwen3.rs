//! Qwen 3 (Yang et al., 2025): Llama with a norm on each head of queries and keys, and heads of 128 at every width.

use super::{llama, qwen2};
use crate::engine::model::family::{ConfigReader, GgufFormat, ModelFamily};
use crate::engine::model::rope::Rope;
use crate::engine::model::spec::{FamilyRef, ModelSpec, QkNorm};
use serde_json::Value;

/// The family.
pub(super) struct Qwen3;

impl ModelFamily for Qwen3 {
    fn model_type(&self) -> &'static str {
        "qwen3"
    }

    fn names(&self) -> &'static [&'static str] {
        &["qwen3-0.6b"]
    }

    fn named(&self, name: &str) -> Option<ModelSpec> {
        (name == "qwen3-0.6b").then(|| ModelSpec {
            max_position_embeddings: 40_960,
            num_layers: 28,
            hidden_size: 1024,
            heads: 16,
            kv_heads: 8,
            head_dim: 128,
            intermediate_size: 3072,
            norm_eps: 1e-6,
            qk_norm: Some(QkNorm::PerHead),
            rope: Some(Rope::plain(1e6)),
            tie_word_embeddings: true,
            bos_token_id: Some(151_643),
            eos_token_ids: vec![151_645],
            ..qwen2::default(FamilyRef(&Qwen3))
        })
    }

    fn read(&self, keys: &ConfigReader<'_>) -> Result<ModelSpec, String> {
        let biases = llama::attention_biases(keys)?;
        Ok(ModelSpec { qk_norm: Some(QkNorm::PerHead), ..qwen2::read(keys, FamilyRef(&Qwen3), Some(128), biases)? })
    }

    fn write(&self, spec: &ModelSpec) -> Value {
        let mut json = llama::write(spec, "Qwen3ForCausalLM");
        json["attention_bias"] = spec.biases.qkv.into();
        qwen2::write_windows(&mut json, spec);
        json
    }

    fn gguf(&self) -> GgufFormat {
        GgufFormat { architecture: "qwen3", keys: &llama::GGUF_KEYS, interleaved: false }
    }
}
