//! Llama and its relatives: sizes and rejected configurations.
use super::*;

fn read(json: &Value) -> Result<ModelSpec, String> {
    ModelSpec::from_json(json.to_string().as_bytes(), "config.json").map_err(|error| error.to_string())
}

/// The Hub's counts of parameters, a tied head counted once.
#[test]
fn named_architectures_have_their_known_sizes() {
    for (name, count) in [
        ("smollm2-135m", 134_515_008),
        ("smollm2-360m", 361_821_120),
        ("llama3.2-1b", 1_235_814_400),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen3-0.6b", 596_049_920),
        ("gemma3-270m", 268_098_176),
    ] {
        let spec = ModelSpec::named(name).unwrap();
        assert_eq!(spec.parameter_count(), count, "{name}");
        let sum: usize = spec.parameters().iter().map(|entry| entry.shape.iter().product::<usize>()).sum();
        assert_eq!(sum as u64, count, "{name}");
        assert_eq!(ModelSpec::from_json(spec.to_json("bfloat16").as_bytes(), "x").unwrap(), spec, "{name}");
        assert!(ModelSpec::names().contains(&name));
    }
}

#[test]
fn gemmas_sixth_layer_has_no_window() {
    let spec = ModelSpec::named("gemma3-270m").unwrap();
    let full: Vec<usize> = (0..spec.num_layers).filter(|block| !spec.is_sliding(*block)).collect();
    assert_eq!(full, [5, 11, 17]);
}

#[test]
fn qwens_windows_begin_where_its_configuration_says() {
    let mut config =
        json!({"model_type": "qwen2", "num_hidden_layers": 3, "sliding_window": 7, "max_window_layers": 2});
    assert_eq!(read(&config).unwrap().sliding, None);
    config["use_sliding_window"] = true.into();
    assert_eq!(read(&config).unwrap().sliding.unwrap().layers, [false, false, true]);
    config["sliding_window"] = Value::Null;
    assert_eq!(read(&config).unwrap().sliding, None);
}

#[test]
fn a_list_of_ends_is_kept() {
    let config = json!({"model_type": "llama", "eos_token_id": [7, 9]});
    let spec = read(&config).unwrap();
    assert_eq!(spec.eos_token_ids, [7, 9]);
    assert_eq!(ModelSpec::from_json(spec.to_json("float32").as_bytes(), "written").unwrap(), spec);
}

#[test]
fn what_the_engine_has_not_is_refused_by_name() {
    for (model_type, key, value, expected) in [
        ("llama", "hidden_act", json!("gelu"), "`hidden_act` is `gelu`; the engine has `silu` only"),
        ("llama", "num_key_value_heads", json!(5), "`num_key_value_heads` = 5 does not divide"),
        ("llama", "head_dim", json!(7), "`head_dim` is 7; rotary position embeddings need an even number"),
        ("llama", "hidden_size", json!(100), "`num_attention_heads` = 32 does not divide `hidden_size` = 100"),
        ("llama", "rope_scaling", json!({"type": "su"}), "`rope_scaling`: `rope_type` is `su`; supported:"),
        ("llama", "rope_parameters", json!({"rope_type": "default", "x": 1}), "`x` is not supported"),
        ("llama", "eos_token_id", json!([1, "a"]), "it must be a token id or a list of token ids"),
        ("llama", "eos_token_id", json!([]), "it must be a token id or a list of token ids"),
        ("mistral", "sliding_window", json!(0), "`sliding_window` is 0; it must be a whole number from 1"),
        ("qwen2", "layer_types", json!(["full_attention"]), "`layer_types` has 1 entries for `num_hidden_layers` = 32"),
        (
            "qwen3",
            "layer_types",
            json!(vec!["linear_attention"; 32]),
            "`layer_types` has \"linear_attention\"; supported:",
        ),
        ("qwen3", "layer_types", json!(vec!["sliding_attention"; 32]), "`use_sliding_window` is false"),
        ("gemma3_text", "final_logit_softcapping", json!(30.0), "`final_logit_softcapping` is 30"),
        ("gemma3_text", "attn_logit_softcapping", json!(50.0), "`attn_logit_softcapping` is 50"),
        ("gemma3_text", "use_bidirectional_attention", json!(true), "supports false only"),
        ("gemma3_text", "hidden_activation", json!("gelu"), "the engine has `gelu_pytorch_tanh` only"),
        ("olmo2", "hidden_act", json!("gelu"), "`hidden_act` is `gelu`; the engine has `silu` only"),
        ("granite", "hidden_act", json!("gelu"), "`hidden_act` is `gelu`; the engine has `silu` only"),
        ("granite", "residual_multiplier", json!(0), "`residual_multiplier` is 0; it must be positive"),
        ("granite", "rope_scaling", json!({"type": "su"}), "`rope_type` is `su`; supported:"),
        ("phi3", "hidden_act", json!("gelu"), "`hidden_act` is `gelu`; the engine has `silu` only"),
        ("phi3", "partial_rotary_factor", json!(0.01), "rotary position embeddings of 0 elements of a head of 96"),
        ("phi3", "rope_scaling", json!({"type": "linear", "factor": 0}), "`factor` is 0; it must be positive"),
        (
            "phi3",
            "rope_scaling",
            json!({"type": "su", "short_factor": [1], "long_factor": [2]}),
            "`short_factor` has 1 numbers; the rotated part of a head has 48 pairs",
        ),
        ("gemma3_text", "query_pre_attn_scalar", json!(0), "`query_pre_attn_scalar` is 0; it must be positive"),
        (
            "mamba",
            "x",
            json!(0),
            "`model_type` is `mamba`; supported: `gpt2`, `llama`, `mistral`, `qwen2`, `qwen3`, `gemma3_text`",
        ),
    ] {
        let mut config = json!({"model_type": model_type});
        config[key] = value;
        let message = read(&config).unwrap_err();
        assert!(message.starts_with("config.json: ") && message.contains(expected), "{message}");
    }
}
