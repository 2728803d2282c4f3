//! The sizes of named architectures, and keys that decide on each layer.

use super::*;
use crate::engine::model::rope::Rope;
use proptest::prelude::*;
use serde_json::json;

fn read(json: &Value) -> ModelSpec {
    ModelSpec::from_json(json.to_string().as_bytes(), "config.json").unwrap()
}

#[test]
fn missing_keys_take_the_defaults_of_transformers() {
    assert_eq!(read(&json!({"model_type": "gpt2"})), gpt2::default());
    let narrow = read(&json!({"model_type": "gpt2", "n_embd": 24, "n_inner": null, "eos_token_id": null}));
    assert_eq!((narrow.intermediate_size, narrow.eos_token_ids, narrow.bos_token_id), (96, Vec::new(), Some(50256)));
}

#[test]
fn all_names_of_the_tanh_gelu_are_known() {
    for name in ["gelu_new", "gelu_pytorch_tanh", "gelu_fast"] {
        assert_eq!(read(&json!({"model_type": "gpt2", "activation_function": name})), gpt2::default(), "{name}");
    }
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
        if let Ok(config) = ModelSpec::from_json(json.to_string().as_bytes(), "x") {
            prop_assert!(config.parameter_count() > 0 && config.hidden_size % config.heads == 0);
        }
    }
}

/// Counts of parameters by transformers (`model.num_parameters()`) and the Hub, a tied head counted once.
const SIZES: [(&str, u64); 12] = [
    ("tiny", 842_624),
    ("distilgpt2", 81_912_576),
    ("gpt2", 124_439_808),
    ("gpt2-medium", 354_823_168),
    ("gpt2-large", 774_030_080),
    ("gpt2-xl", 1_557_611_200),
    ("smollm2-135m", 134_515_008),
    ("smollm2-360m", 361_821_120),
    ("llama3.2-1b", 1_235_814_400),
    ("qwen2.5-0.5b", 494_032_768),
    ("qwen3-0.6b", 596_049_920),
    ("gemma3-270m", 268_098_176),
];

#[test]
fn named_architectures_have_their_known_sizes() {
    assert_eq!(ModelSpec::names(), SIZES.map(|(name, _)| name));
    assert_eq!(ModelSpec::named("bert"), None);
    for (name, count) in SIZES {
        let spec = ModelSpec::named(name).unwrap();
        assert_eq!(spec.parameter_count(), count, "{name}");
        for tied in [true, false] {
            let spec = ModelSpec { tie_word_embeddings: tied, ..spec.clone() };
            let parameters = spec.parameters();
            let sum: usize = parameters.iter().map(|entry| entry.shape.iter().product::<usize>()).sum();
            assert_eq!(sum as u64, spec.parameter_count(), "{name}");
            assert!(parameters.is_sorted_by_key(|entry| &entry.name), "{name}");
            let gpt2 = 12 * spec.num_layers + 4 + usize::from(!tied);
            assert!(spec.family != &gpt2::GPT2 || parameters.len() == gpt2, "{name}");
            assert_eq!(ModelSpec::from_json(spec.to_json("bfloat16").as_bytes(), "x").unwrap(), spec, "{name}");
        }
    }
}

#[test]
fn gemmas_sixth_layer_has_no_window() {
    let spec = ModelSpec::named("gemma3-270m").unwrap();
    let full: Vec<usize> = (0..spec.num_layers).filter(|block| !spec.is_sliding(*block)).collect();
    assert_eq!(full, [5, 11, 17]);
}

#[test]
fn gemma_3_caps_logits_but_no_scores() {
    let caps = |model_type: &str| {
        let spec = read(&json!({"model_type": model_type, "num_hidden_layers": 2, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0}));
        (spec.attention_softcap, spec.logits_softcap)
    };
    assert_eq!(caps("gemma2"), (Some(50.0), Some(30.0)));
    assert_eq!(caps("gemma3_text"), (None, Some(30.0)));
}

#[test]
fn olmos_fourth_layer_has_no_window() {
    let spec = read(&json!({"model_type": "olmo3", "num_hidden_layers": 5}));
    assert_eq!(spec.sliding.unwrap().layers, [true, true, true, false, true]);
}

#[test]
fn exaones_layers_are_rotated_unless_others_have_a_window() {
    let config = |window: Value| json!({"model_type": "exaone4", "num_hidden_layers": 5, "sliding_window": window});
    let spec = read(&config(json!(16)));
    assert_eq!(spec.sliding.unwrap().layers, [true, true, true, false, true]);
    assert_eq!(spec.unrotated, [false, false, false, true, false]);
    let spec = read(&config(Value::Null));
    assert_eq!((spec.sliding, spec.unrotated), (None, vec![]));
}

#[test]
fn lfm2s_layers_are_convolutions_unless_listed() {
    let config = |key: &str, value: Value| {
        let mut config = json!({"model_type": "lfm2", "num_hidden_layers": 3});
        config[key] = value;
        config
    };
    let layers = |key, value| read(&config(key, value)).recurrent.map(|recurrent| recurrent.layers);
    assert_eq!(layers("full_attn_idxs", json!([2])), Some(vec![true, true, false]));
    assert_eq!(layers("layer_types", json!(["conv", "full_attention", "conv"])), Some(vec![true, false, true]));
    assert_eq!(layers("layer_types", Value::Null), None);
    let width = |key, value| read(&config(key, value)).intermediate_size;
    // Two thirds of 12,288, and of 10,240 in whole blocks of 256, as LFM2-1.2B and LFM2-700M have them.
    assert_eq!(width("block_ff_dim", json!(12_288)), 8192);
    assert_eq!(width("block_ff_dim", json!(10_240)), 6912);
    assert_eq!(width("block_auto_adjust_ff_dim", json!(false)), 12_288);
}

#[test]
fn qwen_3_5_has_attention_in_every_fourth_layer_unless_listed() {
    let config = |key: &str, value: Value| {
        let mut config = json!({"model_type": "qwen3_5_text", "num_hidden_layers": 5});
        config[key] = value;
        config
    };
    let layers = |key, value| read(&config(key, value)).recurrent.unwrap().layers;
    assert_eq!(layers("layer_types", Value::Null), [true, true, true, false, true]);
    assert_eq!(layers("full_attention_interval", json!(2)), [true, false, true, false, true]);
    let listed = json!(["linear_attention", "full_attention", "full_attention", "full_attention", "full_attention"]);
    assert_eq!(layers("layer_types", listed), [true, false, false, false, false]);
    let rope = json!({"rope_theta": 1e7, "partial_rotary_factor": 0.5, "mrope_section": [11, 11, 10]});
    let spec = read(&config("rope_parameters", rope));
    assert_eq!((spec.rope, spec.rotary_dim), (Some(Rope::plain(1e7)), Some(128)));
    assert_eq!(read(&config("head_dim", json!(64))).rotary_dim, Some(16));
    let name = |tensor| qwen3_5::QWEN3_5.parameter(tensor);
    assert_eq!(name("model.language_model.layers.0.linear_attn.A_log"), Some("layers.0.linear_attn.A_log"));
    assert_eq!((name("model.visual.blocks.0.norm1.weight"), name("mtp.norm.weight")), (None, None));
}

#[test]
fn granite_4_has_a_separate_key_for_the_width_of_its_mlps() {
    let config = json!({"model_type": "granitemoehybrid", "num_local_experts": 0, "position_embedding_type": "rope",
        "layer_types": ["attention", "attention"], "num_hidden_layers": 2, "shared_intermediate_size": 512});
    assert_eq!(read(&config).intermediate_size, 512);
}

#[test]
fn mixtures_have_their_experts_and_a_balance_on_request() {
    let small = |family: &str, key: &str, value: Value| {
        let mut config = json!({"model_type": family, "num_hidden_layers": 2, "num_experts_per_tok": 2});
        config[key] = value;
        ModelSpec::from_json(config.to_string().as_bytes(), "x")
    };
    let counts = [
        ("qwen3_moe", "num_experts", 0.001),
        ("olmoe", "num_experts", 0.01),
        ("granitemoe", "num_local_experts", 0.001),
        ("gpt_oss", "num_local_experts", 0.001),
    ];
    for (family, count, balance) in counts {
        let spec = small(family, count, json!(6)).unwrap();
        let experts = spec.experts.unwrap();
        assert_eq!((experts.count, experts.router.top_k), (6, 2), "{family}");
        assert_eq!(ModelSpec::from_json(spec.to_json("float32").as_bytes(), "written").unwrap(), spec, "{family}");
        let balanced = small(family, "output_router_logits", json!(true)).unwrap();
        assert_eq!((balanced.experts.unwrap().balance, experts.balance), (balance, 0.0), "{family}");
        assert_eq!(
            ModelSpec::from_json(balanced.to_json("float32").as_bytes(), "written").unwrap(),
            balanced,
            "{family}"
        );
    }
}

#[test]
fn qwens_windows_begin_where_its_configuration_says() {
    let mut config =
        json!({"model_type": "qwen2", "num_hidden_layers": 3, "sliding_window": 7, "max_window_layers": 2});
    assert_eq!(read(&config).sliding, None);
    config["use_sliding_window"] = true.into();
    assert_eq!(read(&config).sliding.unwrap().layers, [false, false, true]);
    config["sliding_window"] = Value::Null;
    assert_eq!(read(&config).sliding, None);
}

#[test]
fn a_list_of_ends_is_kept() {
    let config = json!({"model_type": "llama", "eos_token_id": [7, 9]});
    let spec = read(&config);
    assert_eq!(spec.eos_token_ids, [7, 9]);
    assert_eq!(ModelSpec::from_json(spec.to_json("float32").as_bytes(), "written").unwrap(), spec);
}

#[test]
fn older_versions_of_transformers_find_the_rotary_embeddings() {
    let without_rope_parameters = |spec: &ModelSpec| {
        let mut written: Value = serde_json::from_str(&spec.to_json("float32")).unwrap();
        written.as_object_mut().unwrap().remove("rope_parameters");
        written
    };
    let factors = vec![1.5; 4];
    let ropes = [
        json!({"rope_type": "default", "rope_theta": 5e4}),
        json!({"rope_type": "linear", "rope_theta": 5e4, "factor": 2.0}),
        json!({"rope_type": "dynamic", "rope_theta": 5e4, "factor": 2.0}),
        json!({"rope_type": "yarn", "rope_theta": 5e4, "factor": 2.0, "original_max_position_embeddings": 64}),
        json!({"rope_type": "longrope", "rope_theta": 5e4, "short_factor": factors, "long_factor": factors}),
    ];
    // Phi-3 has one type with factors. Without the key, the last two families have embeddings of the type `yarn`.
    let kinds = [("llama", 0), ("qwen2", 0), ("gemma2", 0), ("phi3", 4), ("ministral3", 1), ("gpt_oss", 1)];
    for (family, first) in kinds {
        for rope in &ropes[first..] {
            let config = json!({"model_type": family, "num_hidden_layers": 2, "hidden_size": 32, "head_dim": 8,
                "num_attention_heads": 4, "num_key_value_heads": 4, "rope_parameters": rope});
            let spec = read(&config);
            assert_eq!(spec.rope.as_ref().unwrap().theta, 5e4);
            assert_eq!(read(&without_rope_parameters(&spec)), spec, "{family} {rope}");
        }
    }
    for family in ["gemma3_text", "olmo3"] {
        let sliding = json!({"rope_type": "default", "rope_theta": if family == "olmo3" { 5e4 } else { 3e4 }});
        for full in &ropes[..4] {
            let config = json!({"model_type": family, "num_hidden_layers": 2,
                "rope_parameters": {"full_attention": full, "sliding_attention": sliding}});
            assert_eq!(read(&without_rope_parameters(&read(&config))), read(&config), "{family} {full}");
        }
    }
}

/// transformers would pad Phi-3 with token 32,000.
#[test]
fn a_padding_token_is_kept_if_the_vocabulary_has_it() {
    for (given, expected) in
        [(json!(8), json!(8)), (json!(9), Value::Null), (json!(-1), Value::Null), (Value::Null, Value::Null)]
    {
        let spec = read(&json!({"model_type": "phi3", "vocab_size": 9, "pad_token_id": given}));
        assert_eq!(spec.config().get("pad_token_id"), Some(&expected), "{given}");
    }
}

#[test]
fn layers_without_rotation_are_those_of_transformers() {
    let mut config = json!({"model_type": "smollm3", "num_hidden_layers": 5, "no_rope_layer_interval": 2});
    assert_eq!(read(&config).unrotated, [false, true, false, true, false]);
    config["no_rope_layers"] = json!([0, 1, 1, 0, 1, 0]);
    let spec = read(&config);
    assert_eq!(spec.unrotated, [true, false, false, true, false]);
    config["use_sliding_window"] = true.into();
    config["sliding_window"] = 7.into();
    assert_eq!(read(&config).sliding.unwrap().layers, spec.unrotated);
}

#[test]
fn queries_of_ministral_3_grow_from_one_context_to_the_next() {
    let spec = read(&json!({"model_type": "ministral3"}));
    assert_eq!(spec.rope.as_ref().unwrap().attention_factor(), 1.0);
    let scale = spec.query_scale.unwrap();
    let at = [0, 16_383, 16_384, 32_768].map(|position| scale.at(position));
    assert_eq!(at, [1.0, 1.0, 1.0 + 0.1 * 2.0f64.ln(), 1.0 + 0.1 * 3.0f64.ln()]);
    assert_eq!(ModelSpec::from_json(spec.to_json("bfloat16").as_bytes(), "x").unwrap(), spec);
}

#[test]
fn heads_that_are_null_follow_from_the_other_sizes_as_in_transformers() {
    let null = |model_type: &str| {
        let spec = read(&json!({"model_type": model_type, "hidden_size": 96, "num_attention_heads": 4,
            "num_key_value_heads": null, "head_dim": null}));
        (spec.kv_heads, spec.head_dim)
    };
    for model_type in ["llama", "mistral", "ministral3", "qwen2", "smollm3", "gpt_oss"] {
        assert_eq!(null(model_type), (4, 24), "{model_type}");
    }
}

#[test]
fn a_given_size_of_a_head_may_be_any() {
    let mut config =
        json!({"model_type": "mistral", "hidden_size": 20, "num_attention_heads": 3, "num_key_value_heads": 3});
    for head_dim in [4, 6, 8] {
        config["head_dim"] = head_dim.into();
        assert_eq!(read(&config).head_dim, head_dim);
    }
}

#[test]
fn the_original_context_outside_of_the_rotary_embeddings_has_precedence() {
    for model_type in ["llama", "qwen2", "ministral3"] {
        let mut rope = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32});
        if model_type == "ministral3" {
            rope["llama_4_scaling_beta"] = 0.1.into();
        }
        let mut config = json!({"model_type": model_type, "max_position_embeddings": 64, "rope_scaling": rope});
        let check = |config: &Value, original: usize| {
            let spec = read(config);
            assert_eq!(spec.rope.unwrap().to_json()["original_max_position_embeddings"], original);
            assert!(spec.query_scale.is_none_or(|scale| scale.context == original));
        };
        check(&config, 32);
        config["original_max_position_embeddings"] = 16.into();
        check(&config, 16);
    }
    // Phi-3's default counts as an outer value.
    let rope = json!({"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0],
        "original_max_position_embeddings": 32});
    let config = json!({"model_type": "phi3", "hidden_size": 8, "num_attention_heads": 2, "rope_scaling": rope});
    assert_eq!(read(&config).rope.unwrap().to_json()["original_max_position_embeddings"], 4096);
}

#[test]
fn other_names_of_keys_count_as_in_transformers() {
    for (alias, key, mut config) in [
        ("hidden_size", "n_embd", json!({"model_type": "gpt2", "n_embd": 48})),
        ("max_position_embeddings", "n_positions", json!({"model_type": "gpt2", "n_positions": 48})),
        ("num_attention_heads", "n_head", json!({"model_type": "gpt2", "n_head": 48})),
        ("num_hidden_layers", "n_layer", json!({"model_type": "gpt2", "n_layer": 48})),
        ("num_local_experts", "num_experts", json!({"model_type": "qwen3_moe", "num_experts": 48})),
        ("num_local_experts", "num_experts", json!({"model_type": "olmoe", "num_experts": 48})),
        ("num_experts", "num_local_experts", json!({"model_type": "gpt_oss", "num_local_experts": 48})),
    ] {
        let expected = read(&config);
        assert_ne!(read(&json!({"model_type": config["model_type"]})), expected);
        config[alias] = config[key].take();
        assert_eq!(read(&config), expected, "{alias}");
        let [model_type, value] = ["model_type", alias].map(|key| config[key].clone());
        assert_eq!(read(&json!({"model_type": model_type, alias: value})), expected, "{alias}");
    }
}

#[test]
fn only_gemma_3_has_a_key_for_the_base_of_layers_with_windows() {
    for (model_type, bases) in [("gemma3_text", [1e6, 3e4]), ("olmo3", [5e5; 2])] {
        let config = json!({"model_type": model_type, "num_hidden_layers": 2, "rope_local_base_freq": 3e4});
        let spec = read(&config);
        assert_eq!([spec.rope.unwrap(), spec.sliding.unwrap().rope], bases.map(Rope::plain), "{model_type}");
    }
}

#[test]
fn default_rotary_embeddings_replace_those_that_are_null_or_an_empty_scaling() {
    for model_type in ["ministral3", "gpt_oss"] {
        let rope = |key: &str, value: Value| read(&json!({"model_type": model_type, key: value})).rope.unwrap();
        let default = read(&json!({"model_type": model_type})).rope.unwrap();
        for (key, value) in
            [("rope_scaling", Value::Null), ("rope_scaling", json!({})), ("rope_parameters", Value::Null)]
        {
            assert_eq!(rope(key, value), default, "{model_type}: {key}");
        }
        assert_ne!(rope("rope_parameters", json!({})), default, "{model_type}");
    }
}
