//! Qwen 3 (Yang et al., 2025): Llama with a norm on each head of queries and keys, and heads of 128 at every width.

use super::{llama, qwen2};
use crate::engine::model::family::{Family, GgufFormat};
use crate::engine::model::rope::Rope;
use crate::engine::model::spec::{ModelSpec, QkNorm};

pub(super) static QWEN3: Family = Family {
    model_type: "qwen3",
    class: "Qwen3ForCausalLM",
    bias_keys: &["attention_bias"],
    named: &[("qwen3-0.6b", || ModelSpec {
        max_position_embeddings: 40_960,
        num_layers: 28,
        hidden_size: 1024,
        heads: 16,
        kv_heads: 8,
        head_dim: 128,
        intermediate_size: 3072,
        norm_eps: 1e-6,
        rope: Some(Rope::plain(1e6)),
        tie_word_embeddings: true,
        bos_token_id: Some(151_643),
        eos_token_ids: vec![151_645],
        ..default()
    })],
    read: |keys| qwen2::read(keys, default(), Some(128)),
    write: qwen2::write,
    gguf: GgufFormat { architecture: "qwen3", ..llama::OTHER_GGUF },
    ..llama::BASE
};

/// The defaults of transformers for missing keys.
fn default() -> ModelSpec {
    ModelSpec { qk_norm: Some(QkNorm::PerHead), ..qwen2::default(&QWEN3) }
}
