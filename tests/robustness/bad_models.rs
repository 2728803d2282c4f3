//! Models that cannot be used: GGUF files and configurations with one thing wrong each, and the message for it.

use crate::common::launch;
use crate::common::transcript::assert_transcript;
use candle_core::quantized::gguf_file::{self, Content, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use finetune::data::Tokenizer;
use finetune::engine::model::{ModelSpec, ParamSpec};
use finetune::inference::export::{self, ExportFormat, export};
use finetune::inference::trained::TrainedModel;
use finetune::precision::Dtype;
use finetune::store::tensor_file::Header;
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A GGUF file in parts.
#[derive(Clone)]
struct Parts {
    metadata: BTreeMap<String, Value>,
    tensors: BTreeMap<String, Tensor>,
}

impl Parts {
    fn set(&mut self, key: &str, value: Value) {
        self.metadata.insert(key.into(), value);
    }

    fn zeros(&mut self, name: &str, shape: &[usize]) {
        self.tensors.insert(name.into(), Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap());
    }

    fn bytes(&self) -> Vec<u8> {
        let metadata: Vec<_> = self.metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
        let quantized =
            |(name, tensor): (&String, &Tensor)| (name.clone(), QTensor::quantize(tensor, GgmlDType::F32).unwrap());
        let tensors: Vec<_> = self.tensors.iter().map(quantized).collect();
        let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let mut bytes = std::io::Cursor::new(Vec::new());
        gguf_file::write(&mut bytes, &metadata, &tensors).unwrap();
        bytes.into_inner()
    }
}

/// A small Llama over bytes.
fn llama() -> serde_json::Value {
    json!({
        "model_type": "llama", "vocab_size": 257, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "tie_word_embeddings": true,
    })
}

/// A folder with that Llama, its configuration changed, and weights of zeros.
fn folder(at: &Path, changes: &serde_json::Value) -> PathBuf {
    let mut config = llama();
    let text = config.to_string();
    let spec = ModelSpec::from_json(text.as_bytes(), "config.json").unwrap();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    let zeros = |entry: ParamSpec| {
        (format!("model.{}", entry.name), Tensor::zeros(entry.shape, DType::F32, &Device::Cpu).unwrap())
    };
    let tensors: std::collections::HashMap<String, Tensor> = spec.parameters().into_iter().map(zeros).collect();
    fs::create_dir_all(at).unwrap();
    candle_core::safetensors::save(&tensors, at.join("model.safetensors")).unwrap();
    fs::write(at.join("config.json"), config.to_string()).unwrap();
    fs::write(at.join("tokenizer.json"), Tokenizer::byte().json()).unwrap();
    at.to_owned()
}

fn good(scratch: &Path) -> Parts {
    let trained = TrainedModel::open(&folder(&scratch.join("llama"), &json!({})), None).unwrap();
    let out = scratch.join("good.gguf");
    export(&trained, Dtype::F32, ExportFormat::Gguf, export::ExportScope::Merged, &out).unwrap();
    let mut file = fs::File::open(out).unwrap();
    let content = Content::read(&mut file).unwrap();
    let read = |name: &String| content.tensor(&mut file.try_clone().unwrap(), name, &Device::Cpu).unwrap();
    let tensors = content.tensor_infos.keys();
    let tensors = tensors.map(|name| (name.clone(), read(name).dequantize(&Device::Cpu).unwrap())).collect();
    Parts { metadata: content.metadata.into_iter().collect(), tensors }
}

type Change = fn(&mut Parts);

fn text(text: &str) -> Value {
    Value::String(text.into())
}

fn texts(count: usize) -> Value {
    Value::Array((0..count).map(|id| Value::String(format!("t{id}"))).collect())
}

const FILES: [(&str, Change); 43] = [
    ("no architecture", |parts| drop(parts.metadata.remove("general.architecture"))),
    ("an unknown architecture", |parts| parts.set("general.architecture", text("mamba"))),
    ("an architecture that steers the terminal", |parts| parts.set("general.architecture", text("\u{1b}[2J"))),
    ("an architecture that is a number", |parts| parts.set("general.architecture", Value::U32(3))),
    ("no depth", |parts| drop(parts.metadata.remove("llama.block_count"))),
    ("no epsilon", |parts| drop(parts.metadata.remove("llama.attention.layer_norm_rms_epsilon"))),
    ("a depth beyond all models", |parts| parts.set("llama.block_count", Value::U32(1 << 20))),
    ("more blocks than tensors", |parts| parts.set("llama.block_count", Value::U32(1 << 12))),
    ("a depth that is negative", |parts| parts.set("llama.block_count", Value::I32(-1))),
    ("a deeper model than there are tensors for", |parts| parts.set("llama.block_count", Value::U32(3))),
    ("a shallower model than there are tensors for", |parts| parts.set("llama.block_count", Value::U32(1))),
    ("no heads", |parts| parts.set("llama.attention.head_count", Value::U32(0))),
    ("heads of keys that do not divide", |parts| parts.set("llama.attention.head_count_kv", Value::U32(3))),
    ("heads by layer", |parts| parts.set("llama.attention.head_count", Value::Array(vec![Value::U32(4); 2]))),
    ("another width", |parts| parts.set("llama.embedding_length", Value::U32(20))),
    ("heads of an odd width", |parts| parts.set("llama.attention.key_length", Value::U32(5))),
    ("a context that is a text", |parts| parts.set("llama.context_length", text("long"))),
    ("an epsilon of 0", |parts| parts.set("llama.attention.layer_norm_rms_epsilon", Value::F32(0.0))),
    ("an unknown rope type", |parts| parts.set("llama.rope.scaling.type", text("longrope"))),
    ("a rope type that is a number", |parts| parts.set("llama.rope.scaling.type", Value::U32(2))),
    ("a rope type without its factor", |parts| parts.set("llama.rope.scaling.type", text("linear"))),
    ("a base below 1", |parts| parts.set("llama.rope.freq_base", Value::F32(0.5))),
    ("heads rotated in part", |parts| parts.set("llama.rope.dimension_count", Value::U32(2))),
    ("heads of values of a different width", |parts| parts.set("llama.attention.value_length", Value::U32(2))),
    ("a rope factor of 0", |parts| {
        let factors = Tensor::new(&[3.0_f32, 0.0], &Device::Cpu).unwrap();
        parts.tensors.insert("rope_freqs.weight".into(), factors);
    }),
    ("rope factors for long texts only", |parts| {
        let factors = Tensor::new(&[3.0_f32, 7.0], &Device::Cpu).unwrap();
        parts.tensors.insert("rope_factors_long.weight".into(), factors);
    }),
    ("experts", |parts| parts.set("llama.expert_count", Value::U32(8))),
    ("an unknown key", |parts| parts.set("llama.logit_scale", Value::F32(0.5))),
    ("a vocabulary that differs from the embedding's", |parts| parts.set("llama.vocab_size", Value::U32(300))),
    ("no embedding", |parts| drop(parts.tensors.remove("token_embd.weight"))),
    ("a missing tensor", |parts| drop(parts.tensors.remove("blk.1.attn_k.weight"))),
    ("a tensor too many", |parts| parts.zeros("blk.0.attn_sinks.weight", &[4])),
    ("a tensor with a name that steers the terminal", |parts| parts.zeros("\u{1b}[31m", &[4])),
    ("a tensor the wrong way round", |parts| parts.zeros("blk.0.ffn_down.weight", &[8, 16])),
    ("a norm that is too long", |parts| parts.zeros("output_norm.weight", &[17])),
    ("a head of another vocabulary", |parts| parts.zeros("output.weight", &[200, 16])),
    ("no tokens", |parts| drop(parts.metadata.remove("tokenizer.ggml.tokens"))),
    ("fewer types than tokens", |parts| {
        parts.set("tokenizer.ggml.token_type", Value::Array(vec![Value::I32(1); 9]));
    }),
    ("more tokens than rows of the embedding", |parts| {
        parts.set("tokenizer.ggml.tokens", texts(300));
        parts.set("tokenizer.ggml.token_type", Value::Array(vec![Value::I32(1); 300]));
    }),
    ("merges of missing tokens", |parts| {
        parts.set("tokenizer.ggml.merges", Value::Array(vec![text("never there")]));
    }),
    ("an unknown kind of tokenizer", |parts| parts.set("tokenizer.ggml.model", text("rwkv"))),
    ("unknown words", |parts| parts.set("tokenizer.ggml.pre", text("viking"))),
    ("an end that is a text", |parts| parts.set("tokenizer.ggml.eos_token_id", text("</s>"))),
];

/// Files with damage in the bytes themselves.
fn damaged(good: &[u8]) -> Vec<(&'static str, Vec<u8>)> {
    let huge = (1_u64 << 60).to_le_bytes();
    let header = |tensors: &[u8; 8], metadata: &[u8; 8], rest: &[&[u8]]| {
        [b"GGUF", &3_u32.to_le_bytes()[..], tensors, metadata, &rest.concat(), &[0; 64]].concat()
    };
    let none = [0; 8];
    let one = 1_u64.to_le_bytes();
    let key = [&1_u64.to_le_bytes()[..], b"k"].concat();
    let list_of_texts = [&key[..], &9_u32.to_le_bytes(), &8_u32.to_le_bytes()].concat();
    vec![
        ("an empty file", Vec::new()),
        ("a file of something else", b"PK\x03\x04 a zip archive that was renamed to model.gguf".to_vec()),
        ("truncated in its metadata", good[..300].to_vec()),
        ("truncated in its tensors", good[..good.len() - 40].to_vec()),
        ("2^60 entries of metadata", header(&none, &huge, &[])),
        ("2^60 tensors", header(&huge, &none, &[])),
        ("a key of 2^60 bytes", header(&none, &one, &[&huge])),
        ("a list of 2^60 texts", header(&none, &one, &[&list_of_texts, &huge])),
    ]
}

/// Wrong values of a configuration.
fn configurations() -> [(&'static str, serde_json::Value); 24] {
    let wide = ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim"];
    let full = "full_attention";
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0});
    [
        ("more parameters than can be counted", wide.map(|key| (key, 1 << 20)).into_iter().collect()),
        ("a mixture of experts", json!({"model_type": "mixtral"})),
        ("no model type", json!({"model_type": null})),
        ("an activation", json!({"hidden_act": "gelu"})),
        ("heads that do not divide", json!({"num_attention_heads": 3})),
        ("heads of keys that do not divide", json!({"num_key_value_heads": 3})),
        ("heads of an odd width", json!({"head_dim": 3})),
        ("a vocabulary that is a text", json!({"vocab_size": "many"})),
        ("an unknown rope type", json!({"rope_scaling": {"rope_type": "proportional", "factor": 2.0}})),
        ("rotary embeddings without a factor", json!({"rope_scaling": {"type": "linear"}})),
        ("rotary embeddings that are a number", json!({"rope_parameters": 7})),
        ("rotary embeddings with an unknown key", json!({"rope_parameters": {"rope_type": "yarn", "z": 1}})),
        ("rotary embeddings by type of layer", json!({"rope_parameters": {"full_attention": {}}})),
        ("heads rotated in part", json!({"partial_rotary_factor": 0.5})),
        ("frequency factors the wrong way round", json!({"rope_scaling": llama3})),
        ("ends that are texts", json!({"eos_token_id": ["</s>"]})),
        ("a window of 0", json!({"model_type": "mistral", "sliding_window": 0})),
        ("windows that are switched off", json!({"model_type": "qwen2", "layer_types": [full, "sliding_attention"]})),
        ("types of too few layers", json!({"model_type": "qwen3", "layer_types": [full]})),
        ("an unknown type of layer", json!({"model_type": "qwen3", "layer_types": ["linear_attention", full]})),
        ("a cap of 0", json!({"model_type": "gemma3_text", "final_logit_softcapping": 0})),
        ("attention in both directions", json!({"model_type": "gemma3_text", "use_bidirectional_attention": true})),
        ("a positive number below 0", json!({"rms_norm_eps": -1e-5})),
        ("fewer rows than tokens", json!({"vocab_size": 200})),
    ]
}

#[test]
fn each_mistake_has_its_message() {
    let scratch = tempfile::tempdir().unwrap();
    let good = good(scratch.path());
    let path = scratch.path().join("model.gguf");
    let mut said = String::new();
    let mut refuse = |name: &str, path: &Path| {
        let message = TrainedModel::open(path, None).map(drop).expect_err(name).to_string();
        assert!(!message.contains(|c: char| c.is_control()), "{name}: {message:?}");
        let message = message.replace(&scratch.path().display().to_string(), "[FOLDER]");
        writeln!(said, "{name}\n    {message}").unwrap();
    };
    fs::write(&path, good.bytes()).unwrap();
    TrainedModel::open(&path, None).unwrap();
    for (name, change) in FILES {
        let mut parts = good.clone();
        change(&mut parts);
        fs::write(&path, parts.bytes()).unwrap();
        refuse(name, &path);
    }
    for (name, bytes) in damaged(&good.bytes()) {
        fs::write(&path, bytes).unwrap();
        refuse(name, &path);
    }
    for (name, changes) in configurations() {
        refuse(name, &folder(&scratch.path().join("folder"), &changes));
    }
    insta::assert_snapshot!("bad_models", said);
}

#[test]
fn each_unsupported_configuration_has_its_message() {
    assert_transcript("configurations", "$ ", |json| {
        ModelSpec::from_json(json.as_bytes(), "config.json").expect_err(json).to_string()
    });
}

/// A configuration that llama.cpp would compute differently is not written.
#[test]
fn each_configuration_that_gguf_cannot_express_has_its_message() {
    assert_transcript("gguf", "$ ", |json| {
        let spec = ModelSpec::from_json(json.as_bytes(), "config.json").unwrap();
        spec.to_gguf().map_or_else(|error| error.to_string(), |_| "written".to_owned())
    });
}

/// A case is the number of bytes after the header, and the header.
#[test]
fn each_inconsistent_header_of_tensors_has_its_message() {
    assert_transcript("tensor_headers", "$ ", |case| {
        let (values, json) = case.split_once(' ').unwrap();
        let values = vec![0; values.parse().unwrap()];
        Header::parse(&[&(json.len() as u64).to_le_bytes(), json.as_bytes(), &values].concat()).expect_err(case)
    });
}

/// Within two seconds of processor time and 2 GB of address space: sizes are checked before anything is built per
/// block.
#[cfg(unix)]
#[test]
fn huge_sizes_are_refused_before_anything_is_built() {
    let scratch = tempfile::tempdir().unwrap();
    let model = scratch.path().join("model");
    fs::create_dir(&model).unwrap();
    fs::write(model.join("tokenizer.json"), Tokenizer::byte().json()).unwrap();
    let refuse = |config: serde_json::Value, reason: &str| {
        fs::write(model.join("config.json"), config.to_string()).unwrap();
        let limited = "ulimit -t 2; ulimit -v 2000000; exec \"$0\" --model model --init random --data grammar --plain";
        let mut command = Command::new("sh");
        command.args(["-c", limited, env!("CARGO_BIN_EXE_finetune")]).current_dir(scratch.path());
        let (code, _, said) = launch::finish(command.stdin(Stdio::null()));
        assert_eq!(code, Some(2), "{config}: {said}");
        assert!(said.contains(reason), "{config}: {said}");
    };
    for family in ["gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma3_text"] {
        let gpt2 = family == "gpt2";
        let [depth, width, heads] = if gpt2 {
            ["n_layer", "n_embd", "n_head"]
        } else {
            ["num_hidden_layers", "hidden_size", "num_attention_heads"]
        };
        let change = |changes: &[(&str, u64)]| {
            let mut config = json!({"model_type": family, heads: 16, "num_key_value_heads": 16});
            if !gpt2 {
                config["head_dim"] = 256.into();
            }
            for (key, value) in changes {
                config[key] = (*value).into();
            }
            config
        };
        refuse(change(&[(depth, 1 << 20)]), "it must be a whole number from 1 to 4096");
        let too_large = "use a smaller model";
        refuse(change(&[(depth, 1 << 12), (width, 4096)]), too_large);
        refuse(change(&[(width, 1 << 20)]), too_large);
        refuse(change(&[("vocab_size", 1 << 20), (width, 4096)]), too_large);
        if !gpt2 {
            let most = [(heads, 1 << 20), ("num_key_value_heads", 1 << 20)];
            refuse(change(&most), too_large);
        }
    }
}
