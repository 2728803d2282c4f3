//! GPT-2 (Radford et al., 2019): learned positions, layer norms with biases, packed queries, keys and values in `[in, out]`
//! weights, GELU in its tanh form.

use crate::engine::kernels::{Activation, Norm, WeightLayout};
use crate::engine::model::family::{ConfigReader, GgufFormat, GgufKey, ModelFamily, one_or_more};
use crate::engine::model::spec::{
    Biases, DropoutRates, FamilyRef, LinearRole, ModelSpec, ModuleId, ModuleOp, NormRole,
};
use serde_json::{Value, json};

/// The family.
pub(super) struct Gpt2;

/// The metadata keys of its GGUF files.
const GGUF_KEYS: [GgufKey; 6] = [
    ("context_length", "n_positions", true),
    ("embedding_length", "n_embd", true),
    ("feed_forward_length", "n_inner", true),
    ("block_count", "n_layer", true),
    ("attention.head_count", "n_head", true),
    ("attention.layer_norm_epsilon", "layer_norm_epsilon", true),
];

/// The smallest of `OpenAI`'s, which is also what transformers puts in for a missing key.
fn default() -> ModelSpec {
    ModelSpec {
        family: FamilyRef(&Gpt2),
        vocab_size: 50257,
        max_position_embeddings: 1024,
        hidden_size: 768,
        num_layers: 12,
        heads: 12,
        kv_heads: 12,
        head_dim: 64,
        intermediate_size: 4 * 768,
        norm: Norm::Layer,
        norm_eps: 1e-5,
        activation: Activation::Gelu,
        weight_layout: WeightLayout::InOut,
        fused_qkv: true,
        biases: Biases { qkv: true, out: true, mlp: true },
        learned_positions: true,
        rope: None,
        tie_word_embeddings: true,
        dropout: DropoutRates { embedding: 0.1, residual: 0.1, attention: 0.1 },
        bos_token_id: Some(50256),
        eos_token_ids: vec![50256],
        ..super::llama::default()
    }
}

impl ModelFamily for Gpt2 {
    fn model_type(&self) -> &'static str {
        "gpt2"
    }

    fn names(&self) -> &'static [&'static str] {
        &["tiny", "distilgpt2", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"]
    }

    /// `tiny` is ours: 0.8 million parameters over 256 bytes and one end-of-text token.
    fn named(&self, name: &str) -> Option<ModelSpec> {
        let (layers, width, heads) = match name {
            "tiny" => (4, 128, 4),
            "distilgpt2" => (6, 768, 12),
            "gpt2" => (12, 768, 12),
            "gpt2-medium" => (24, 1024, 16),
            "gpt2-large" => (36, 1280, 20),
            "gpt2-xl" => (48, 1600, 25),
            _ => return None,
        };
        let spec = ModelSpec { dropout: DropoutRates::default(), ..default().resized(layers, width, heads) };
        Some(if name == "tiny" {
            ModelSpec {
                vocab_size: 257,
                max_position_embeddings: 128,
                bos_token_id: Some(256),
                eos_token_ids: vec![256],
                ..spec
            }
        } else {
            spec
        })
    }

    fn read(&self, keys: &ConfigReader<'_>) -> Result<ModelSpec, String> {
        // Three names of one function.
        const TANH_GELU: [&str; 3] = ["gelu_new", "gelu_pytorch_tanh", "gelu_fast"];
        let activation = keys.str("activation_function", TANH_GELU[0])?;
        if !TANH_GELU.contains(&activation) {
            return Err(format!(
                "`activation_function` is `{activation}`; the engine has `gelu_new` only (GELU, tanh form)"
            ));
        }
        keys.require_value("scale_attn_weights", true)?;
        for key in ["scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"] {
            keys.require_value(key, false)?;
        }
        let default = default();
        let (width, heads) =
            (keys.positive_usize("n_embd", default.hidden_size)?, keys.positive_usize("n_head", default.heads)?);
        if !width.is_multiple_of(heads) {
            return Err(format!("`n_head` = {heads} does not divide `n_embd` = {width}"));
        }
        let rates = default.dropout;
        Ok(ModelSpec {
            vocab_size: keys.positive_usize("vocab_size", default.vocab_size)?,
            max_position_embeddings: keys.positive_usize("n_positions", default.max_position_embeddings)?,
            intermediate_size: keys.positive_usize("n_inner", 4 * width)?,
            norm_eps: keys.positive("layer_norm_epsilon", default.norm_eps)?,
            initializer_range: keys.positive("initializer_range", default.initializer_range)?,
            dropout: DropoutRates {
                embedding: keys.dropout("embd_pdrop", rates.embedding)?,
                residual: keys.dropout("resid_pdrop", rates.residual)?,
                attention: keys.dropout("attn_pdrop", rates.attention)?,
            },
            tie_word_embeddings: keys.bool("tie_word_embeddings", default.tie_word_embeddings)?,
            bos_token_id: keys.token("bos_token_id", default.bos_token_id)?,
            eos_token_ids: keys.tokens("eos_token_id", &default.eos_token_ids)?,
            ..default.clone().resized(keys.depth("n_layer", default.num_layers)?, width, heads)
        })
    }

    fn write(&self, spec: &ModelSpec) -> Value {
        json!({
            "activation_function": "gelu_new",
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": spec.dropout.attention,
            "bos_token_id": spec.bos_token_id,
            "embd_pdrop": spec.dropout.embedding,
            "eos_token_id": one_or_more(&spec.eos_token_ids),
            "initializer_range": spec.initializer_range,
            "layer_norm_epsilon": spec.norm_eps,
            "model_type": self.model_type(),
            "n_ctx": spec.max_position_embeddings,
            "n_embd": spec.hidden_size,
            "n_head": spec.heads,
            "n_inner": spec.intermediate_size,
            "n_layer": spec.num_layers,
            "n_positions": spec.max_position_embeddings,
            "resid_pdrop": spec.dropout.residual,
            "tie_word_embeddings": spec.tie_word_embeddings,
            "vocab_size": spec.vocab_size,
        })
    }

    fn layer_name(&self, ModuleId { block, op }: ModuleId) -> String {
        let name = match op {
            ModuleOp::Embedding => "wte",
            ModuleOp::Positions => "wpe",
            ModuleOp::Norm(NormRole::Attention) => "ln_1",
            ModuleOp::Norm(NormRole::Mlp) => "ln_2",
            ModuleOp::Norm(NormRole::Final) => "ln_f",
            ModuleOp::Norm(NormRole::Query) => "attn.query_norm",
            ModuleOp::Norm(NormRole::Key) => "attn.key_norm",
            ModuleOp::Norm(NormRole::PostAttention) => "attn.branch_norm",
            ModuleOp::Norm(NormRole::PostMlp) => "mlp.branch_norm",
            ModuleOp::Linear(LinearRole::Qkv) => "attn.c_attn",
            ModuleOp::Linear(LinearRole::Query) => "attn.query",
            ModuleOp::Linear(LinearRole::Key) => "attn.key",
            ModuleOp::Linear(LinearRole::Value) => "attn.value",
            ModuleOp::Linear(LinearRole::Out) => "attn.c_proj",
            ModuleOp::Linear(LinearRole::Up) => "mlp.c_fc",
            ModuleOp::Linear(LinearRole::Gate | LinearRole::GateUp) => "mlp.gate",
            ModuleOp::Linear(LinearRole::Down) => "mlp.c_proj",
            ModuleOp::Attention => "attn",
            ModuleOp::AttnResidual => "attn.residual",
            ModuleOp::Activation => "mlp.gelu",
            ModuleOp::MlpResidual => "mlp.residual",
            ModuleOp::Head => "lm_head",
        };
        block.map_or_else(|| name.to_owned(), |block| format!("h.{block}.{name}"))
    }

    fn gguf(&self) -> GgufFormat {
        GgufFormat { architecture: "gpt2", keys: &GGUF_KEYS, interleaved: false }
    }

    fn prefix(&self) -> &'static str {
        "transformer."
    }

    /// Older versions of transformers saved the causal mask with every layer: `h.0.attn.bias`, `h.0.attn.masked_bias`.
    fn parameter_name<'a>(&self, tensor: &'a str) -> Option<&'a str> {
        let name = tensor.strip_prefix("transformer.").unwrap_or(tensor);
        let inner = name.strip_prefix("h.").and_then(|rest| rest.split_once('.'));
        let mask = inner.is_some_and(|(layer, rest)| {
            layer.parse::<usize>().is_ok() && matches!(rest, "attn.bias" | "attn.masked_bias")
        });
        (!mask).then_some(name)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(json: &Value) -> Result<ModelSpec, String> {
        ModelSpec::from_json(json.to_string().as_bytes(), "config.json").map_err(|error| error.to_string())
    }

    /// Parameter counts that transformers reports (`model.num_parameters()`).
    #[test]
    fn named_architectures_have_their_known_sizes() {
        for (name, count) in [
            ("distilgpt2", 81_912_576),
            ("gpt2", 124_439_808),
            ("gpt2-medium", 354_823_168),
            ("gpt2-large", 774_030_080),
            ("gpt2-xl", 1_557_611_200),
        ] {
            assert_eq!(ModelSpec::named(name).unwrap().parameter_count(), count, "{name}");
        }
        assert_eq!(ModelSpec::named("bert"), None);
    }

    #[test]
    fn counting_agrees_with_the_list_of_shapes() {
        for name in Gpt2.names() {
            for tied in [true, false] {
                let config = ModelSpec { tie_word_embeddings: tied, ..ModelSpec::named(name).unwrap() };
                let parameters = config.parameters();
                let sum: usize = parameters.iter().map(|entry| entry.shape.iter().product::<usize>()).sum();
                assert_eq!(sum as u64, config.parameter_count(), "{name}");
                assert!(
                    parameters.is_sorted_by_key(|entry| &entry.name)
                        && parameters.len() == 12 * config.num_layers + 4 + usize::from(!tied)
                );
            }
        }
    }

    #[test]
    fn what_is_written_reads_back() {
        for name in Gpt2.names() {
            let config = ModelSpec { tie_word_embeddings: *name == "tiny", ..ModelSpec::named(name).unwrap() };
            assert_eq!(ModelSpec::from_json(config.to_json("float16").as_bytes(), "x").unwrap(), config);
        }
    }

    #[test]
    fn missing_keys_take_the_defaults_of_transformers() {
        assert_eq!(read(&json!({"model_type": "gpt2"})).unwrap(), default());
        let narrow = read(&json!({"model_type": "gpt2", "n_embd": 24, "n_inner": null, "eos_token_id": null})).unwrap();
        assert_eq!(
            (narrow.intermediate_size, narrow.eos_token_ids, narrow.bos_token_id),
            (96, Vec::new(), Some(50256))
        );
    }

    #[test]
    fn all_names_of_the_tanh_gelu_are_known() {
        for name in ["gelu_new", "gelu_pytorch_tanh", "gelu_fast"] {
            assert_eq!(read(&json!({"model_type": "gpt2", "activation_function": name})).unwrap(), default(), "{name}");
        }
    }

    #[test]
    fn what_the_engine_has_not_is_refused_by_name() {
        for (key, value, expected) in [
            ("model_type", json!("bert"), "`model_type` is `bert`; supported: `gpt2`, `llama`"),
            ("model_type", json!(7), "`model_type` is 7; it must be a string"),
            ("activation_function", json!("relu"), "`activation_function` is `relu`"),
            ("scale_attn_by_inverse_layer_idx", json!(true), "`scale_attn_by_inverse_layer_idx` is true"),
            ("reorder_and_upcast_attn", json!(true), "supports false only"),
            ("add_cross_attention", json!(true), "supports false only"),
            ("scale_attn_weights", json!(false), "supports true only"),
            ("n_head", json!(7), "`n_head` = 7 does not divide `n_embd` = 768"),
            ("n_head", json!(0), "`n_head` is 0; it must be a whole number from 1"),
            ("n_layer", json!(-1), "`n_layer` is -1"),
            ("n_embd", json!(1.5), "`n_embd` is 1.5"),
            ("vocab_size", json!(1_u64 << 40), "`vocab_size` is 1099511627776"),
            ("resid_pdrop", json!(1.0), "`resid_pdrop` is 1"),
            ("layer_norm_epsilon", json!(0), "`layer_norm_epsilon` is 0; it must be positive"),
            ("eos_token_id", json!([1, -2]), "`eos_token_id` is [1,-2]; it must be a token id or a list of token ids"),
        ] {
            let mut config = json!({"model_type": "gpt2"});
            config[key] = value;
            let message = read(&config).unwrap_err();
            assert!(message.starts_with("config.json: ") && message.contains(expected), "{message}");
        }
        assert!(read(&json!({})).unwrap_err().contains("`model_type` is ``; supported"));
        assert!(read(&json!([])).unwrap_err().contains("not JSON: invalid type: sequence"));
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = ModelSpec::from_json(&bytes, "x");
        }

        #[test]
        fn an_accepted_config_can_be_counted(dims in proptest::array::uniform6(-1_i64..=1 << 21)) {
            let [v, c, d, l, h, i] = dims;
            let json = json!({"model_type": "gpt2", "vocab_size": v, "n_positions": c, "n_embd": d, "n_layer": l,
                "n_head": h.clamp(0, 2), "n_inner": i});
            if let Ok(config) = read(&json) {
                prop_assert!(config.parameter_count() > 0 && config.hidden_size % config.heads == 0);
            }
        }
    }
}
