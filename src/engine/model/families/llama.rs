//! Llama (Touvron et al., 2023), and what related families share with it: RMS norms, rotary positions, grouped queries,
//! a SiLU-gated MLP, `[out, in]` weights. SmolLM2, TinyLlama and Llama 3 belong to this family.

use crate::engine::kernels::{Activation, NormKind, WeightLayout};
use crate::engine::model::family::{ExpertTensors, Family, GgufFormat, GgufKey};
use crate::engine::model::rope::{Rope, RopeType};
use crate::engine::model::spec::{Biases, DropoutRates, EmbeddingScale, ModelSpec};
use std::collections::{BTreeMap, BTreeSet};

pub(super) use super::keys::{
    PARTIAL, head_dim, only_silu, read, read_partial_rope, read_uniform, with_partial_rope, with_rope, write,
};
pub(super) use super::names::{in_block, layer_name, parameter_name};
pub(super) use super::windows::{
    alternates, check_alternation, has_no_window, layer_types, layers_of_type, no_windows, sliding_layers, window,
    with_windows, write_windows,
};

/// The family, from which others take the fields that they share.
pub(super) static LLAMA: Family = BASE;

/// [`LLAMA`] as a constant.
pub(super) const BASE: Family = Family {
    model_type: "llama",
    class: "LlamaForCausalLM",
    aliases: &[],
    bias_keys: &["attention_bias", "mlp_bias"],
    named: &[
        ("smollm2-135m", || ModelSpec { initializer_range: 1.0 / 24.0, ..smollm2(30, 576, 9, 1536) }),
        ("smollm2-360m", || smollm2(32, 960, 15, 2560)),
        ("llama3.2-1b", llama3_2_1b),
    ],
    read: |keys| read_uniform(keys, default(), [None, None]),
    write,
    layer_name,
    parameter_name,
    prefix: "model.",
    expert_tensors: ExpertTensors::Separate,
    gguf: GgufFormat {
        architecture: "llama",
        keys: &[GGUF_KEYS, &[WIDTH_KEY, ("attention.sliding_window", "sliding_window", false)]],
        interleaved: true,
        splits_gate_up: false,
        biases: true,
        tied_head: None,
        frequency_factors: Some("llama3"),
        yarn_log_multiplier: false,
        yarn_truncates: true,
        mlp_norm: "ffn_norm",
        final_norm: "output_norm",
        claims: |_| true,
        read: |_, _| {},
        write: |spec, _| no_windows(spec),
    },
};

/// The GGUF files of families without Llama's interleaved rows, biases and divisors of frequencies.
pub(super) const OTHER_GGUF: GgufFormat =
    GgufFormat { interleaved: false, biases: false, frequency_factors: None, ..BASE.gguf };

/// The keys of all families with Llama's attention.
pub(super) const GGUF_KEYS: &[GgufKey] = &[
    ("context_length", "max_position_embeddings", true),
    ("embedding_length", "hidden_size", true),
    ("block_count", "num_hidden_layers", true),
    ("attention.head_count", "num_attention_heads", true),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps", true),
    ("attention.head_count_kv", "num_key_value_heads", false),
    ("attention.key_length", "head_dim", false),
    ("rope.freq_base", "rope_theta", false),
];
/// The key of the MLP's width.
pub(super) const WIDTH_KEY: GgufKey = ("feed_forward_length", "intermediate_size", true);

fn smollm2(layers: usize, width: usize, heads: usize, inner: usize) -> ModelSpec {
    ModelSpec {
        vocab_size: 49_152,
        max_position_embeddings: 8192,
        num_layers: layers,
        hidden_size: width,
        heads,
        kv_heads: heads / 3,
        head_dim: 64,
        intermediate_size: inner,
        norm_eps: 1e-5,
        rope: Some(Rope::plain(1e5)),
        tie_word_embeddings: true,
        bos_token_id: Some(0),
        eos_token_ids: vec![0],
        ..default()
    }
}

fn llama3_2_1b() -> ModelSpec {
    ModelSpec {
        vocab_size: 128_256,
        max_position_embeddings: 131_072,
        num_layers: 16,
        hidden_size: 2048,
        heads: 32,
        kv_heads: 8,
        head_dim: 64,
        intermediate_size: 8192,
        norm_eps: 1e-5,
        rope: Some(Rope {
            theta: 5e5,
            kind: RopeType::Llama3 {
                factor: 32.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position_embeddings: 8192,
            },
        }),
        tie_word_embeddings: true,
        bos_token_id: Some(128_000),
        eos_token_ids: vec![128_001],
        ..default()
    }
}

/// The defaults of transformers for missing keys.
pub(super) fn default() -> ModelSpec {
    ModelSpec {
        family: &LLAMA,
        vocab_size: 32_000,
        max_position_embeddings: 2048,
        hidden_size: 4096,
        num_layers: 32,
        heads: 32,
        kv_heads: 32,
        head_dim: 128,
        intermediate_size: 11_008,
        norm: NormKind::Rms { unit_offset: false },
        norm_eps: 1e-6,
        activation: Activation::SwiGlu,
        weight_layout: WeightLayout::OutIn,
        expert_layout: WeightLayout::OutIn,
        fused_qkv: false,
        fused_gate_up: false,
        experts: None,
        biases: Biases { qkv: false, out: false, mlp: false },
        learned_positions: false,
        rope: Some(Rope::plain(1e4)),
        rotary_dim: None,
        unrotated: Vec::new(),
        query_scale: None,
        sliding: None,
        recurrent: None,
        attention_gate: false,
        attention_scale: None,
        attention_sinks: false,
        attention_softcap: None,
        qk_norm: None,
        pre_norms: true,
        post_norms: false,
        embedding_scale: EmbeddingScale::Factor(1.0),
        residual_multiplier: 1.0,
        logits_scaling: 1.0,
        logits_softcap: None,
        tie_word_embeddings: false,
        dropout: DropoutRates::default(),
        initializer_range: 0.02,
        bos_token_id: Some(1),
        eos_token_ids: vec![2],
        pad_token_id: None,
        lora: None,
        frozen: BTreeSet::new(),
        quantized: BTreeMap::new(),
    }
}
