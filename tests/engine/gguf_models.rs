//! A GGUF file is a model like any other: trained, resumed, used and exported by the program.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use crate::common::launch;
use finetune::data::Tokenizer;
use serde_json::{Value, json};

const TEMPLATE: &str =
    "{% for m in messages %}{{ m.role }}> {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}me> {% endif %}";

/// A working folder with a text and the shape of a Llama over bytes, without weights.
struct Desk(tempfile::TempDir);

impl Desk {
    fn new() -> Self {
        let desk = Self(tempfile::tempdir().unwrap());
        fs::write(desk.path("text.txt"), "some words to learn from ".repeat(60)).unwrap();
        fs::create_dir(desk.path("shape")).unwrap();
        let config = json!({
            "model_type": "llama", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": true,
            "bos_token_id": null, "eos_token_id": [256, 35], "rope_theta": 1e5, "rms_norm_eps": 1e-5,
        });
        fs::write(desk.path("shape/config.json"), config.to_string()).unwrap();
        fs::write(desk.path("shape/tokenizer.json"), Tokenizer::byte().json()).unwrap();
        fs::write(desk.path("shape/generation_config.json"), r#"{"eos_token_id": [256, 36]}"#).unwrap();
        fs::write(desk.path("shape/chat_template.jinja"), TEMPLATE).unwrap();
        desk
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn run(&self, line: &str) -> Output {
        let mut command = launch::program();
        command.current_dir(self.0.path()).args(line.split(' ')).env("HF_HUB_OFFLINE", "1").stdin(Stdio::null());
        command.output().unwrap()
    }

    /// What a line that succeeds prints.
    fn say(&self, line: &str) -> String {
        let output = self.run(line);
        assert!(output.status.success(), "finetune {line}\n{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    fn train(&self, line: &str) {
        let fixed = "--plain --data text.txt --seq-len 16 --batch-size 2 --set train.sample_tokens=4";
        self.say(&format!("{fixed} {line}"));
    }
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn a_run_from_a_gguf_file_needs_it_no_more_and_carries_what_a_chat_needs() {
    let desk = Desk::new();
    // Random weights want no weights of the folder.
    desk.train("--model shape --init random --steps 2 --run first --dtype fp32");
    let first = desk.path("checkpoints/first/step-000002");
    assert_eq!(fs::read_to_string(first.join("chat_template.jinja")).unwrap(), TEMPLATE);
    assert_eq!(json_of(&first.join("config.json"))["eos_token_id"], json!([256, 35]));
    let stored = candle_core::safetensors::load(first.join("model.safetensors"), &candle_core::Device::Cpu).unwrap();
    assert!(stored.contains_key("model.layers.1.self_attn.k_proj.weight"), "{:?}", stored.keys());
    desk.say("export first model.gguf --dtype q8_0");

    for line in [
        "generate model.gguf --prompt some -n 4 --temperature 0",
        "eval model.gguf --data text.txt --seq-len 16",
        "export model.gguf folder",
        "bench --model model.gguf --batch-size 1 --seq-len 8 --steps 1 --warmup 0",
        "bench --model model.gguf --lora 4 --batch-size 1 --seq-len 8 --steps 1 --warmup 0",
    ] {
        assert!(!desk.say(line).is_empty(), "{line}");
    }
    let check = desk.run("fp16-check model.gguf --data text.txt --seq-len 16 --batches 1");
    assert!(matches!(check.status.code(), Some(0 | 4 | 5)), "{}", String::from_utf8_lossy(&check.stderr));
    // The exported folder computes what the file does, and has its files.
    let loss = |model: &str| desk.say(&format!("eval {model} --data text.txt --seq-len 16 --json"));
    let loss = |model: &str| serde_json::from_str::<Value>(&loss(model)).unwrap()["loss"].clone();
    assert_eq!(loss("model.gguf"), loss("folder"));
    assert_eq!(fs::read_to_string(desk.path("folder/chat_template.jinja")).unwrap(), TEMPLATE);
    assert_eq!(json_of(&desk.path("folder/generation_config.json"))["eos_token_id"], json!([256, 35]));

    desk.train("--model model.gguf --steps 4 --run second --dtype fp16 --save-every 2");
    fs::remove_file(desk.path("model.gguf")).unwrap();
    let last = desk.path("checkpoints/second/step-000004");
    assert_eq!(fs::read_to_string(last.join("chat_template.jinja")).unwrap(), TEMPLATE);
    let masters = fs::read(last.join("master.safetensors")).unwrap();
    fs::remove_dir_all(&last).unwrap();
    desk.say("--resume second --plain");
    assert!(fs::read(last.join("master.safetensors")).unwrap() == masters, "the resumed run has other bits");
    assert_eq!(fs::read_to_string(last.join("chat_template.jinja")).unwrap(), TEMPLATE);
}

#[test]
fn what_is_no_model_of_the_hub_is_refused() {
    let desk = Desk::new();
    for (line, expected) in [
        ("generate hf://owner/name", "a GGUF file there `hf://owner/name/file.gguf`"),
        ("generate hf://owner/name/config.json", "a GGUF file there `hf://owner/name/file.gguf`"),
        ("generate hf://owner/name/model.gguf", "owner/name at"),
        ("--model text.txt", "give a `.gguf` file, or the folder"),
        ("export shape x.gguf --int8", "--int8: is for ONNX"),
    ] {
        let output = desk.run(line);
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "finetune {line}\n{complaint}");
        assert!(complaint.contains(expected), "finetune {line}\n{complaint}");
    }
}
