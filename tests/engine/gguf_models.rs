//! A GGUF file is a model like any other: trained, resumed, used and exported by the program.

use crate::common::cli_fixture::CliFixture;
use finetune::data::Tokenizer;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

const TEMPLATE: &str =
    "{% for m in messages %}{{ m.role }}> {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}me> {% endif %}";

/// A working folder with a text and the shape of a Llama over bytes, without weights.
fn fixture() -> CliFixture {
    let fixture = CliFixture::empty();
    fixture.write("text.txt", "some words to learn from ".repeat(60));
    let config = json!({
        "model_type": "llama", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": true,
        "bos_token_id": null, "eos_token_id": [256, 35], "rope_theta": 1e5, "rms_norm_eps": 1e-5,
    });
    fixture.write("shape/config.json", config.to_string());
    fixture.write("shape/tokenizer.json", Tokenizer::byte().json());
    fixture.write("shape/generation_config.json", r#"{"eos_token_id": [256, 36]}"#);
    fixture.write("shape/chat_template.jinja", TEMPLATE);
    fixture
}

fn train(fixture: &CliFixture, line: &str) {
    fixture.said(&format!("--plain --data text.txt --seq-len 16 --batch-size 2 --set train.sample_tokens=4 {line}"));
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn a_run_from_a_gguf_file_needs_it_no_more_and_carries_what_a_chat_needs() {
    let fixture = fixture();
    // Random initialization reads no weights from the folder.
    train(&fixture, "--model shape --init random --steps 2 --run first --dtype fp32");
    let first = fixture.path("checkpoints/first/step-000002");
    assert_eq!(fs::read_to_string(first.join("chat_template.jinja")).unwrap(), TEMPLATE);
    assert_eq!(json_of(&first.join("config.json"))["eos_token_id"], json!([256, 35]));
    let stored = candle_core::safetensors::load(first.join("model.safetensors"), &candle_core::Device::Cpu).unwrap();
    assert!(stored.contains_key("model.layers.1.self_attn.k_proj.weight"), "{:?}", stored.keys());
    fixture.said("export first model.gguf --dtype q8_0");

    for line in [
        "generate model.gguf --prompt some -n 4 --temperature 0",
        "eval model.gguf --data text.txt --seq-len 16",
        "export model.gguf folder",
        "bench --model model.gguf --batch-size 1 --seq-len 8 --steps 1 --warmup 0",
        "bench --model model.gguf --lora 4 --batch-size 1 --seq-len 8 --steps 1 --warmup 0",
    ] {
        assert!(!fixture.said(line).is_empty(), "{line}");
    }
    let (code, _, complaint) = fixture.output("fp16-check model.gguf --data text.txt --seq-len 16 --batches 1");
    assert!(matches!(code, Some(0 | 4 | 5)), "{complaint}");
    // The exported folder computes the same as the file, and has its files.
    let loss = |model: &str| fixture.json(&format!("eval {model} --data text.txt --seq-len 16 --json"))["loss"].clone();
    assert_eq!(loss("model.gguf"), loss("folder"));
    assert_eq!(fs::read_to_string(fixture.path("folder/chat_template.jinja")).unwrap(), TEMPLATE);
    assert_eq!(json_of(&fixture.path("folder/generation_config.json"))["eos_token_id"], json!([256, 35, 36]));

    train(&fixture, "--model model.gguf --steps 4 --run second --dtype fp16 --save-every 2");
    fs::remove_file(fixture.path("model.gguf")).unwrap();
    let last = fixture.path("checkpoints/second/step-000004");
    assert_eq!(fs::read_to_string(last.join("chat_template.jinja")).unwrap(), TEMPLATE);
    let masters = fs::read(last.join("master.safetensors")).unwrap();
    fs::remove_dir_all(&last).unwrap();
    fixture.said("--resume second --plain");
    assert!(fs::read(last.join("master.safetensors")).unwrap() == masters, "the resumed run has other bits");
    assert_eq!(fs::read_to_string(last.join("chat_template.jinja")).unwrap(), TEMPLATE);
}

#[test]
fn what_is_no_model_of_the_hub_is_refused() {
    let fixture = fixture();
    for (line, expected) in [
        ("generate hf://owner/name", "a GGUF file on it as `hf://owner/name/file.gguf`"),
        ("generate hf://owner/name/config.json", "a GGUF file on it as `hf://owner/name/file.gguf`"),
        ("generate hf://owner/name/model.gguf", "owner/name at"),
        ("--model text.txt", "use a `.gguf` file, or the folder"),
        ("export shape x.gguf --int8", "--int8: is for ONNX"),
    ] {
        let complaint = fixture.refused(line);
        assert!(complaint.contains(expected), "finetune {line}\n{complaint}");
    }
}
