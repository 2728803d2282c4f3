//! Exported models compute the same as ours: the Hugging Face folder and the GGUF file read back, the ONNX graph in
//! onnxruntime.
//!
//! onnxruntime and the `gguf` package are looked for in the Python of `FINETUNE_PYTHON`. Without them a test prints a
//! message and passes, except in CI, where it fails.

use crate::common::compare::{distance, values};
use crate::common::python::{python_with, run_script};
use crate::common::{golden, launch};
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Tensor};
use finetune::data::Tokenizer;
use finetune::engine::kernels::Fused;
use finetune::engine::model::{ForwardMode, InputIds, Parameters, Workspace};
use finetune::inference::export::{ExportFormat, ExportScope, OnnxOptions, WeightDtype, export, loss_of_format};
use finetune::inference::trained::TrainedModel;
use finetune::precision::{Dtype, PrecisionPolicy};
use finetune::store::ModelFolder;
use finetune::store::tensor_file::write_tensors;
use half::f16;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A golden model of 257 rows or fewer with the byte tokenizer where it fits, else with the letters.
fn model(name: &str, folder: &Path) -> TrainedModel {
    changed_model(name, folder, &[])
}

/// Such a model with other values of some keys of its configuration.
fn changed_model(name: &str, folder: &Path, keys: &[(&str, serde_json::Value)]) -> TrainedModel {
    let path = with_config(name, folder, keys);
    std::fs::copy(golden::path(name).join("model.safetensors"), path.join("model.safetensors")).unwrap();
    if name != "deep" {
        return with_letters(&path);
    }
    std::fs::write(path.join("tokenizer.json"), Tokenizer::byte().json()).unwrap();
    TrainedModel::open(&path, None).unwrap()
}

/// A model's folder with a golden configuration and other values of some keys.
fn with_config(name: &str, folder: &Path, keys: &[(&str, serde_json::Value)]) -> PathBuf {
    let path = folder.join(name);
    std::fs::create_dir_all(&path).unwrap();
    let mut config = golden::config(name);
    for (key, value) in keys {
        config[*key] = value.clone();
    }
    std::fs::write(path.join("config.json"), config.to_string()).unwrap();
    path
}

/// Exports the merged model in the format of the path's name.
fn exported(trained: &TrainedModel, dtype: impl Into<WeightDtype>, out: &Path) -> Vec<PathBuf> {
    export(trained, dtype, ExportFormat::from_path(out), ExportScope::Merged, out).unwrap()
}

/// The message of an export in FP32 that is refused and leaves no file.
fn refused(trained: &TrainedModel, out: &Path) -> String {
    let error = export(trained, Dtype::F32, ExportFormat::from_path(out), ExportScope::Merged, out).unwrap_err();
    assert!(!out.exists());
    error.to_string()
}

/// Writes ids as rows of `length` for a script.
fn write_ids(folder: &Path, ids: &[u32], length: usize) -> PathBuf {
    let file = folder.join("ids.json");
    std::fs::write(&file, serde_json::to_string(&ids.chunks(length).collect::<Vec<_>>()).unwrap()).unwrap();
    file
}

/// The model in `path` with a tokenizer of letters.
fn with_letters(path: &Path) -> TrainedModel {
    let vocab: serde_json::Map<String, serde_json::Value> =
        ('a'..='z').enumerate().map(|(id, letter)| (letter.to_string(), id.into())).collect();
    let byte_level = serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true});
    let letters = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": [{"id": 27, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}],
        "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": {"ab": 26}, "merges": [["a", "b"]]},
    });
    let mut letters = letters;
    letters["model"]["vocab"].as_object_mut().unwrap().extend(vocab);
    std::fs::write(path.join("tokenizer.json"), letters.to_string()).unwrap();
    TrainedModel::open(path, None).unwrap()
}

/// FP32 logits `[rows * length, V]` of `trained` with its weights rounded to `dtype`.
fn logits(trained: &TrainedModel, dtype: Dtype, ids: &[u32], length: usize) -> Tensor {
    let rounded = trained.weights(dtype).unwrap();
    let weights = rounded.zeros_like(DType::F32).unwrap();
    for (from, to) in rounded.tensors().iter().zip(weights.tensors()) {
        finetune::engine::kernels::view::copy(from, to).unwrap();
    }
    logits_of(trained, &weights, ids, length)
}

fn logits_of(trained: &TrainedModel, weights: &Parameters, ids: &[u32], length: usize) -> Tensor {
    let model = finetune::engine::model::Decoder::new(&trained.spec, weights, Arc::new(Fused)).unwrap();
    let policy = PrecisionPolicy::FP32;
    let rows = ids.len() / length;
    let mut workspace = Workspace::for_evaluation(&trained.spec, policy, (rows, length), &Device::Cpu).unwrap();
    model.forward(weights, InputIds::new(ids, length), ForwardMode::Eval, &mut workspace, &mut ()).unwrap();
    model.logits(weights, workspace.hidden()).unwrap()
}

fn ids(trained: &TrainedModel, count: usize) -> Vec<u32> {
    (0..count).map(|i| (11 * i as u32 + 5) % trained.spec.vocab_size as u32).collect()
}

const DTYPES: [(Dtype, f64); 3] = [(Dtype::F32, 1e-6), (Dtype::F16, 4e-3), (Dtype::BF16, 3e-2)];

#[test]
fn a_hugging_face_folder_computes_the_same_in_every_dtype() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["deep", "untied", "families/olmoe", "families/granitemoe", "families/gpt-oss"] {
        let trained = model(name, folder.path());
        let ids = ids(&trained, 20);
        let exact = values(&logits(&trained, Dtype::F32, &ids, 10));
        for (dtype, tolerance) in DTYPES {
            let out = folder.path().join(format!("out/{name}-{dtype}"));
            assert_eq!(exported(&trained, dtype, &out), std::slice::from_ref(&out));
            let again = TrainedModel::open(&out, None).unwrap();
            assert_eq!(again.spec, trained.spec);
            assert_eq!(again.tokenizer.json(), trained.tokenizer.json());
            let ours = values(&logits(&again, Dtype::F32, &ids, 10));
            assert_eq!(ours, values(&logits(&trained, dtype, &ids, 10)), "{name}, {dtype}: weights differ");
            assert!(distance(&ours, &exact) < tolerance, "{name}, {dtype}: {}", distance(&ours, &exact));
        }
    }
}

#[test]
fn what_is_there_is_not_overwritten_and_nothing_half_done_stays() {
    let folder = tempfile::tempdir().unwrap();
    let trained = model("deep", folder.path());
    let out = folder.path().join("x.gguf");
    std::fs::write(&out, "precious").unwrap();
    let message = export(&trained, Dtype::F32, ExportFormat::Gguf, ExportScope::Merged, &out).unwrap_err().to_string();
    assert!(message.contains("exists"), "{message}");
    assert_eq!(std::fs::read(&out).unwrap(), b"precious");
    let data = folder.path().join("y.onnx.data");
    std::fs::write(&data, "precious").unwrap();
    refused(&trained, &folder.path().join("y.onnx"));
    let mut names: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["deep", "x.gguf", "y.onnx.data"]);
}

#[test]
fn weights_that_a_type_cannot_hold_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let masters = model("deep", folder.path()).weights(Dtype::F32).unwrap();
    let bias = masters.get("h.1.mlp.c_fc.bias").unwrap();
    let file = folder.path().join("deep/model.safetensors");
    for (value, dtype, names, expected) in [
        (1e5, Dtype::F16, &["x", "x.gguf"][..], "`h.1.mlp.c_fc.bias` reaches 100000"),
        (f32::NAN, Dtype::F32, &["x", "x.gguf", "x.onnx"], "`h.1.mlp.c_fc.bias` contains infinities or NaNs"),
        (1e5, Dtype::BF16, &["y"], ""),
    ] {
        finetune::engine::kernels::view::write_f32(bias, |values| values[3] = value).unwrap();
        let tensors: Vec<_> = masters.iter().map(|(name, tensor)| (name.to_owned(), tensor.clone())).collect();
        write_tensors(&mut File::create(&file).unwrap(), &file, &tensors).unwrap();
        let trained = TrainedModel::open(&folder.path().join("deep"), None).unwrap();
        for name in names {
            let out = folder.path().join(name);
            match export(&trained, dtype, ExportFormat::from_path(&out), ExportScope::Merged, &out) {
                Ok(_) => assert!(expected.is_empty() && out.exists(), "{name}, {dtype}"),
                Err(error) => {
                    let is_expected = !expected.is_empty() && error.to_string().contains(expected);
                    assert!(is_expected && !out.exists(), "{name}, {dtype}: {error}");
                }
            }
        }
    }
}

/// The parameters of a GGUF file, under our names and the right way round.
fn from_gguf(path: &Path, trained: &TrainedModel) -> (Content, Parameters) {
    let mut file = File::open(path).unwrap();
    let content = Content::read(&mut file).unwrap();
    let weights = Parameters::zeros(&trained.spec.parameters(), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(content.tensor_infos.len(), weights.tensors().len());
    let pairs = [
        ("attn_norm", "ln_1"),
        ("attn_qkv", "attn.c_attn"),
        ("attn_output", "attn.c_proj"),
        ("ffn_norm", "ln_2"),
        ("ffn_up", "mlp.c_fc"),
        ("ffn_down", "mlp.c_proj"),
        ("token_embd", "wte"),
        ("position_embd", "wpe"),
        ("output_norm", "ln_f"),
        ("output", "lm_head"),
        ("blk", "h"),
    ];
    for name in content.tensor_infos.keys() {
        let ours = name.split('.').map(|part| pairs.iter().find(|(theirs, _)| *theirs == part).map_or(part, |p| p.1));
        let ours = ours.collect::<Vec<_>>().join(".");
        let stored = content.tensor(&mut file, name, &Device::Cpu).unwrap().dequantize(&Device::Cpu).unwrap();
        let linear = ours.starts_with("h.") && stored.rank() == 2;
        let stored = if linear { stored.t().unwrap().contiguous().unwrap() } else { stored };
        let target = weights.get(&ours).unwrap_or_else(|| panic!("{name} is no parameter"));
        assert_eq!(target.dims(), stored.dims(), "{name}");
        finetune::engine::kernels::view::copy(&stored, target).unwrap();
    }
    (content, weights)
}

#[test]
fn a_gguf_file_read_back_computes_the_same() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["deep", "untied"] {
        let trained = model(name, folder.path());
        let ids = ids(&trained, 20);
        let exact = values(&logits(&trained, Dtype::F32, &ids, 10));
        for (dtype, tolerance) in DTYPES {
            let out = folder.path().join(format!("{name}-{dtype}.gguf"));
            exported(&trained, dtype, &out);
            let (content, weights) = from_gguf(&out, &trained);
            let distance = distance(&values(&logits_of(&trained, &weights, &ids, 10)), &exact);
            assert!(distance < tolerance, "{name}, {dtype}: {distance}");

            let size = |key: &str| content.metadata[key].to_u32().unwrap() as usize;
            assert_eq!(content.metadata["general.architecture"].to_string().unwrap(), "gpt2");
            assert_eq!(size("gpt2.block_count"), trained.spec.num_layers);
            assert_eq!(size("gpt2.attention.head_count"), trained.spec.heads);
            assert_eq!(size("gpt2.context_length"), trained.spec.max_position_embeddings);
            assert_eq!(Some(size("tokenizer.ggml.eos_token_id") as u32), trained.tokenizer.eos_id());
            let tokens = content.metadata["tokenizer.ggml.tokens"].to_vec().unwrap();
            assert_eq!(tokens.len(), trained.spec.vocab_size);
            assert_eq!(tokens[0].to_string().ok(), trained.tokenizer.token(0).as_ref());
            let merges = content.metadata["tokenizer.ggml.merges"].to_vec().unwrap();
            assert_eq!(merges.len(), usize::from(name == "untied"));
        }
    }
}

/// Llama 3's instruct models have three end tokens, and name some only in `generation_config.json`. The tokenizer's ends
/// an answer. GGUF has keys for three.
#[test]
fn a_gguf_file_keeps_the_tokenizers_end_of_text() {
    let folder = tempfile::tempdir().unwrap();
    let trained = changed_model("untied", folder.path(), &[("eos_token_id", serde_json::json!([3, 27]))]);
    for (ends, omitted) in [("[5, 3]", None), ("[5, 7, 27]", Some("so `h` do not end"))] {
        std::fs::write(trained.path.join("generation_config.json"), format!("{{\"eos_token_id\": {ends}}}")).unwrap();
        let trained = TrainedModel::open(&trained.path, None).unwrap();
        let out = folder.path().join(format!("{}.gguf", ends.len()));
        exported(&trained, Dtype::F32, &out);
        let again = TrainedModel::open(&out, None).unwrap();
        assert_eq!((trained.tokenizer.eos_id(), again.spec.eos_token_ids), (Some(27), vec![27, 3, 5]));
        let loss = loss_of_format(&trained, ExportFormat::Gguf).unwrap();
        assert_eq!(loss.is_some(), omitted.is_some(), "{loss:?}");
        assert!(omitted.is_none_or(|part| loss.unwrap().contains(part)));
    }
}

#[test]
fn a_special_token_for_unknown_text_stays_special_in_a_gguf_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = model("untied", folder.path()).path;
    let mut tokenizer: serde_json::Value =
        serde_json::from_slice(&std::fs::read(path.join("tokenizer.json")).unwrap()).unwrap();
    tokenizer["model"]["unk_token"] = "</s>".into();
    tokenizer["model"]["vocab"]["</s>"] = 27.into();
    std::fs::write(path.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let trained = TrainedModel::open(&path, None).unwrap();
    let out = folder.path().join("x.gguf");
    exported(&trained, Dtype::F32, &out);
    for tokenizer in [&trained.tokenizer, &TrainedModel::open(&out, None).unwrap().tokenizer] {
        assert_eq!(tokenizer.encode("a</s>").unwrap(), [0, 27]);
        assert_eq!(tokenizer.decode(&[0, 27]).unwrap(), "a");
    }
}

/// llama.cpp and Python's Jinja do not have the tags.
#[test]
fn a_gguf_file_has_no_generation_tags() {
    let folder = tempfile::tempdir().unwrap();
    let path = model("untied", folder.path()).path;
    let template = "{% for m in messages %}{%- generation %}{{ m.content }}{% endgeneration -%} {% endfor %}";
    std::fs::write(path.join("chat_template.jinja"), template).unwrap();
    let out = folder.path().join("x.gguf");
    exported(&TrainedModel::open(&path, None).unwrap(), Dtype::F32, &out);
    let template = TrainedModel::open(&out, None).unwrap().chat.template.unwrap();
    assert_eq!(template, "{% for m in messages %}{{- '' }}{{ m.content }}{{ '' -}} {% endfor %}");
}

#[test]
fn a_gguf_file_does_not_take_a_tokenizer_that_it_cannot_hold() {
    let folder = tempfile::tempdir().unwrap();
    let trained = model("deep", folder.path());
    let file = folder.path().join("words.json");
    let words = r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,
        "pre_tokenizer":null,"post_processor":null,"decoder":null,
        "model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"}}"#;
    std::fs::write(&file, words).unwrap();
    let trained = TrainedModel::open(&trained.path, Some(&file)).unwrap();
    let out = folder.path().join("x.gguf");
    let message = refused(&trained, &out);
    assert!(message.contains("it is not a BPE, so"), "{message}");
    let mut lower: serde_json::Value = serde_json::from_slice(Tokenizer::byte().json()).unwrap();
    lower["normalizer"] = serde_json::json!({"type": "Lowercase"});
    std::fs::write(&file, lower.to_string()).unwrap();
    let message = refused(&TrainedModel::open(&trained.path, Some(&file)).unwrap(), &out);
    assert!(message.contains("GGUF cannot express its normalizer, so"), "{message}");
}

/// Gemma's runs of spaces are added tokens. llama.cpp finds added tokens before it replaces spaces.
#[test]
fn runs_of_spaces_are_the_same_tokens_in_a_gguf_file() {
    let folder = tempfile::tempdir().unwrap();
    let replace =
        |from: &str, to: &str| serde_json::json!({"type": "Replace", "pattern": {"String": from}, "content": to});
    let added = |id: u32, content: &str| {
        serde_json::json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": id == 0})
    };
    let tokenizer = serde_json::json!({
        "version": "1.0", "added_tokens": [added(0, "<unk>"), added(3, "▁▁")], "normalizer": replace(" ", "▁"),
        "decoder": replace("▁", " "),
        "model": {"type": "BPE", "unk_token": "<unk>", "byte_fallback": true, "fuse_unk": true, "merges": [["▁", "▁"]],
            "vocab": {"<unk>": 0, "▁": 1, "a": 2, "▁▁": 3}},
    });
    let file = folder.path().join("spaces.json");
    std::fs::write(&file, tokenizer.to_string()).unwrap();
    let trained = TrainedModel::open(&model("deep", folder.path()).path, Some(&file)).unwrap();
    let out = folder.path().join("x.gguf");
    exported(&trained, Dtype::F32, &out);
    for tokenizer in [&trained.tokenizer, &TrainedModel::open(&out, None).unwrap().tokenizer] {
        assert_eq!(tokenizer.encode("a  a a").unwrap(), [2, 3, 2, 1, 2]);
        assert_eq!(tokenizer.decode(&[2, 3, 2]).unwrap(), "a  a");
    }
    let content = Content::read(&mut File::open(&out).unwrap()).unwrap();
    assert_eq!(content.metadata["tokenizer.ggml.tokens"].to_vec().unwrap()[3].to_string().unwrap(), "  ");
}

/// The golden families that GGUF can represent; Gemma's scores have the scale, and OLMo 3's layers the windows, that
/// llama.cpp supports.
fn families(folder: &Path) -> Vec<TrainedModel> {
    let names = [
        "llama",
        "llama-biases",
        "llama-linear",
        "llama-llama3",
        "llama-yarn",
        "mistral",
        "ministral3",
        "qwen2",
        "qwen3",
        "smollm3",
        "olmo2",
        "lfm2",
        "qwen3_5",
        "granite",
        "granite4",
        "granite4-nope",
        "phi3",
        "qwen3-moe",
        "olmoe",
        "granitemoe",
        "gpt-oss",
    ];
    let ends = ("eos_token_id", serde_json::json!([27, 3]));
    let with_ends = |name: &str| changed_model(&format!("families/{name}"), folder, std::slice::from_ref(&ends));
    let mut models: Vec<TrainedModel> = names.into_iter().map(with_ends).collect();
    let windows = ("layer_types", serde_json::json!(["sliding_attention", "sliding_attention"]));
    models.push(changed_model("families/olmo3", folder, &[windows, ends.clone()]));
    let no_windows = ("sliding_window", serde_json::Value::Null);
    models.push(changed_model("families/exaone4", folder, &[no_windows, ends.clone()]));
    // Factors that FP32 holds.
    let factors = serde_json::json!({"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
        "attention_factor": 1.125, "short_factor": [1.0, 1.125, 1.25], "long_factor": [1.25, 2.5, 4.0]});
    models.push(changed_model("families/phi3-longrope", folder, &[("rope_parameters", factors), ends.clone()]));
    for name in ["gemma2", "gemma3"] {
        let scale = ("query_pre_attn_scalar", serde_json::json!(6));
        models.push(changed_model(&format!("families/{name}"), folder, &[scale, ends.clone()]));
    }
    models
}

/// Rows whose length is no multiple of 32 stay in FP16 in a file of `Q8_0`: all rows except in `o_proj` of four
/// families and `w2` of LFM2, whose rounding moves logits by up to 1e-2.
#[test]
fn every_family_comes_back_from_a_gguf_file() {
    let folder = tempfile::tempdir().unwrap();
    for trained in families(folder.path()) {
        let ids = ids(&trained, 36);
        let exact = values(&logits(&trained, Dtype::F32, &ids, 12));
        let matrices = match trained.path.file_name().and_then(|name| name.to_str()) {
            Some("mistral" | "ministral3" | "qwen3-moe") => 2,
            Some("lfm2") => 3,
            Some("qwen3_5") => 1,
            _ => 0,
        };
        for (encoding, tolerance) in [
            (WeightDtype::Plain(Dtype::F32), 1e-6),
            (WeightDtype::Plain(Dtype::F16), 4e-3),
            (WeightDtype::Q8_0, if matrices > 0 { 1.2e-2 } else { 4e-3 }),
        ] {
            let out = trained.path.with_extension(format!("{encoding:?}.gguf"));
            exported(&trained, encoding, &out);
            let again = TrainedModel::open(&out, None).unwrap();
            let distance = distance(&values(&logits(&again, Dtype::F32, &ids, 12)), &exact);
            assert!(distance < tolerance, "{}: {distance:.1e}", out.display());
            let blocks = quantized(&out, GgmlDType::Q8_0).len();
            assert_eq!(blocks, if encoding == WeightDtype::Q8_0 { matrices } else { 0 }, "{}", out.display());
            assert_eq!(again.spec.rope, trained.spec.rope);
            assert_eq!(again.spec.eos_token_ids, trained.spec.eos_token_ids);
            assert_eq!(again.tokenizer.encode("abcab").unwrap(), trained.tokenizer.encode("abcab").unwrap());
        }
    }
}

/// transformers refuses a Llama of this width, which its four heads do not divide.
#[test]
fn a_llama_of_uneven_width_comes_back_from_a_gguf_file_as_a_mistral() {
    let folder = tempfile::tempdir().unwrap();
    let keys = [("hidden_size", 26.into()), ("sliding_window", serde_json::Value::Null)];
    let trained = wavy_model("families/mistral", folder.path(), &keys);
    let out = folder.path().join("x.gguf");
    exported(&trained, Dtype::F32, &out);
    let again = TrainedModel::open(&out, None).unwrap().spec;
    assert_eq!((again.family, again.sliding), (trained.spec.family, None));
}

/// Experts in MXFP4 are read from a folder and from a GGUF file with the numbers that transformers and the package
/// `gguf` give them.
#[test]
fn experts_in_mxfp4_are_read_as_transformers_reads_them() {
    let Some(python) = python_with("gguf") else { return };
    let folder = tempfile::tempdir().unwrap();
    run_script(&python, "mxfp4.py", &[folder.path().as_os_str()]);
    let [plain, blocks] = ["plain", "blocks"].map(|name| with_letters(&folder.path().join(name)));
    let ids = ids(&plain, 36);
    let exact = values(&logits(&plain, Dtype::F32, &ids, 12));
    assert_eq!(values(&logits(&blocks, Dtype::F32, &ids, 12)), exact);
    let [whole, packed] = ["whole.gguf", "mxfp4.gguf"].map(|name| folder.path().join(name));
    exported(&plain, Dtype::F32, &whole);
    run_script(&python, "mxfp4.py", &[whole.as_os_str(), packed.as_os_str()]);
    let packed = TrainedModel::open(&packed, None).unwrap();
    assert_eq!(packed.spec.quantized.len(), 0);
    assert_eq!(values(&logits(&packed, Dtype::F32, &ids, 12)), exact);
}

/// The names of the tensors of this type in a GGUF file.
fn quantized(path: &Path, dtype: GgmlDType) -> Vec<String> {
    let content = Content::read(&mut File::open(path).unwrap()).unwrap();
    content.tensor_infos.into_iter().filter(|(_, info)| info.ggml_dtype == dtype).map(|(name, _)| name).collect()
}

/// The weights with each matrix rounded to `Q8_0`: 32 values of a row are multiples of a 127th of the largest
/// magnitude, and this step is stored in FP16.
fn in_blocks_of_32(trained: &TrainedModel) -> Parameters {
    let weights = trained.weights(Dtype::F32).unwrap();
    for tensor in weights.tensors().iter().filter(|tensor| tensor.rank() == 2) {
        let mut rounded: Vec<f32> = tensor.flatten_all().unwrap().to_vec1().unwrap();
        for block in rounded.chunks_exact_mut(32) {
            let step = block.iter().fold(0_f32, |most, x| most.max(x.abs())) / 127.0;
            for x in block {
                *x = (*x / step).round() * f16::from_f32(step).to_f32();
            }
        }
        let rounded = Tensor::from_vec(rounded, tensor.shape(), &Device::Cpu).unwrap();
        finetune::engine::kernels::view::copy(&rounded, tensor).unwrap();
    }
    weights
}

/// Models whose rows all consist of whole blocks; only the order of a sum may differ from weights that are rounded
/// here.
#[test]
fn a_file_of_blocks_has_the_weights_that_its_type_says() {
    let folder = tempfile::tempdir().unwrap();
    let sizes = [("hidden_size", 64.into()), ("head_dim", 16.into()), ("intermediate_size", 96.into())];
    let gemma = [&sizes[..], &[("query_pre_attn_scalar", 16.into())]].concat();
    for (name, sizes) in [("llama", &sizes[..]), ("mistral", &sizes), ("qwen3", &sizes), ("gemma3", &gemma)] {
        let trained = wavy_model(&format!("families/{name}"), folder.path(), sizes);
        let ids = ids(&trained, 36);
        let expected = in_blocks_of_32(&trained);
        let matrices = expected.tensors().iter().filter(|tensor| tensor.rank() == 2).count();
        let expected = values(&logits_of(&trained, &expected, &ids, 12));
        let out = folder.path().join(format!("{name}.gguf"));
        exported(&trained, WeightDtype::Q8_0, &out);
        assert_eq!(quantized(&out, GgmlDType::Q8_0).len(), matrices, "{name}");
        let again = TrainedModel::open(&out, None).unwrap();
        let exact = distance(&values(&logits(&trained, Dtype::F32, &ids, 12)), &expected);
        let distance = distance(&values(&logits(&again, Dtype::F32, &ids, 12)), &expected);
        assert!(distance < 1e-6, "{name}: {distance:.1e}");
        assert!(exact > 1e-3, "{name}: rounding changes logits by {exact:.1e} only");
    }
}

#[test]
fn what_gguf_has_no_word_for_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    for (name, expected) in [
        ("llama-dynamic", "llama.cpp has no rotary embeddings of the type `dynamic`"),
        ("qwen2-window", "GGUF has no key for the windows of `qwen2`"),
        ("smollm3-window", "GGUF has no key for the windows of `smollm3`"),
        ("exaone4", "GGUF has no key for the windows of `exaone4`"),
        ("gemma3", "llama.cpp takes `query_pre_attn_scalar` to be 6"),
    ] {
        let trained = model(&format!("families/{name}"), folder.path());
        let out = folder.path().join(format!("{name}.gguf"));
        let message = refused(&trained, &out);
        assert!(message.contains(expected), "{message}");
    }
    let trained = model("deep", folder.path());
    let message = export(
        &trained,
        WeightDtype::Q4K,
        ExportFormat::from_path(Path::new("x.onnx")),
        ExportScope::Merged,
        Path::new("x.onnx"),
    )
    .unwrap_err()
    .to_string();
    assert!(message.contains("only GGUF files support quantized blocks"), "{message}");
}

/// A Mistral, a Qwen 3 and a Gemma 3 without what transformers takes from its defaults and not from a GGUF file:
/// windows of a Mistral, Qwen 3's heads of 128, and Gemma 3's scale of attention, bases, and pattern of windows, one
/// layer of six without.
fn readable_relatives(folder: &Path) -> [TrainedModel; 3] {
    let full = serde_json::json!({"rope_theta": 1e6, "rope_type": "default"});
    let sliding = serde_json::json!({"rope_theta": 1e4, "rope_type": "default"});
    let kinds: Vec<&str> =
        (1..=7).map(|block| if block % 6 == 0 { "full_attention" } else { "sliding_attention" }).collect();
    [
        changed_model("families/mistral", folder, &[("sliding_window", serde_json::Value::Null)]),
        wavy_model("families/qwen3", folder, &[("head_dim", 128.into())]),
        wavy_model(
            "families/gemma3",
            folder,
            &[
                ("head_dim", 256.into()),
                ("query_pre_attn_scalar", 256.into()),
                ("num_hidden_layers", 7.into()),
                ("layer_types", kinds.into()),
                ("rope_parameters", serde_json::json!({"full_attention": full, "sliding_attention": sliding})),
            ],
        ),
    ]
}

/// A model whose shape differs from the golden one. No two of its weights are equal, in norms either.
fn wavy_model(name: &str, folder: &Path, keys: &[(&str, serde_json::Value)]) -> TrainedModel {
    let path = with_config(name, folder, keys);
    let spec = ModelFolder::read_config(&path).unwrap();
    let weights = Parameters::random(&spec.parameters(), 7, &Device::Cpu).unwrap();
    let tensors: Vec<(String, Tensor)> = (0..)
        .zip(weights.iter())
        .map(|(index, (name, tensor))| {
            let count = tensor.elem_count() as f32;
            let wave = ((Tensor::arange(0.0, count, &Device::Cpu).unwrap() * 1.3).unwrap() + f64::from(index)).unwrap();
            let wave = (wave.sin().unwrap() * 0.2).unwrap().reshape(tensor.shape()).unwrap();
            (spec.family.stored_name(name), (tensor + wave).unwrap())
        })
        .collect();
    let file = path.join("model.safetensors");
    write_tensors(&mut File::create(&file).unwrap(), &file, &tensors).unwrap();
    with_letters(&path)
}

#[test]
fn transformers_reads_every_familys_gguf_file_as_we_do() {
    let Some(python) = python_with("gguf") else { return };
    let folder = tempfile::tempdir().unwrap();
    // Without what transformers does not read in a GGUF file: GPT-2's number of positions, rope types, a Llama's biases
    // and windows.
    let models = ["families/llama", "families/qwen2"].map(|name| model(name, folder.path()));
    let models: Vec<TrainedModel> = models.into_iter().chain(readable_relatives(folder.path())).collect();
    let ids = ids(&models[0], 12);
    let file = folder.path().join("ids.json");
    std::fs::write(&file, serde_json::to_string(&ids).unwrap()).unwrap();
    let export = |(index, trained): (usize, &TrainedModel)| {
        // A Mistral is a Llama to GGUF; transformers fails on a Llama that has `mistral` in its name.
        let out = folder.path().join(format!("{index}.gguf"));
        exported(trained, Dtype::F32, &out);
        out
    };
    let files: Vec<PathBuf> = models.iter().enumerate().map(export).collect();
    let mut arguments = vec!["logits".as_ref(), file.as_os_str()];
    arguments.extend(files.iter().map(|file| file.as_os_str()));
    let theirs = run_script(&python, "real_weights.py", &arguments);
    for (at, trained) in models.iter().enumerate() {
        let theirs: Vec<f32> = serde_json::from_value(theirs["logits"][at].clone()).unwrap();
        let all = values(&logits(trained, Dtype::F32, &ids, 12));
        let ours = &all[all.len() - trained.spec.vocab_size..];
        let error = distance(&theirs, ours);
        assert!(error < 1e-5, "{}: {error:.1e}", trained.path.display());
    }
}

#[test]
fn the_gguf_package_reads_the_file() {
    let Some(python) = python_with("gguf") else { return };
    let folder = tempfile::tempdir().unwrap();
    let script = "import json, sys, gguf\nreader = gguf.GGUFReader(sys.argv[1])\n\
                  print(json.dumps([{t.name: [int(n) for n in t.shape] for t in reader.tensors}, \
                  {key: field.contents() for key, field in reader.fields.items() if 'attention' in key}]))";
    let read = |trained: &TrainedModel, out: &Path| -> [serde_json::Value; 2] {
        exported(trained, Dtype::F16, out);
        let found = launch::succeed(launch::command(&python).args(["-c", script]).arg(out));
        let [shapes, keys]: [serde_json::Value; 2] = serde_json::from_str(&found).unwrap();
        assert_eq!(shapes.as_object().unwrap().len(), trained.spec.parameters().len());
        [shapes, keys]
    };
    let trained = model("untied", folder.path());
    let [shapes, _] = read(&trained, &folder.path().join("x.gguf"));
    // GGUF counts dimensions from the innermost: [in, out] of a matrix stored as [out, in].
    let width = trained.spec.hidden_size;
    assert_eq!(shapes["blk.0.attn_qkv.weight"], serde_json::json!([width, 3 * width]));
    let windowed = model("families/mistral", folder.path());
    let [_, keys] = read(&windowed, &folder.path().join("windowed.gguf"));
    assert_eq!(keys["llama.attention.sliding_window"], 5, "{keys}");
    let [_, qwen3, gemma3] = readable_relatives(folder.path());
    let [shapes, keys] = read(&qwen3, &folder.path().join("qwen3.gguf"));
    assert_eq!((&keys["qwen3.attention.key_length"], &keys["qwen3.attention.head_count_kv"]), (&128.into(), &2.into()));
    assert_eq!(shapes["blk.1.attn_q_norm.weight"], serde_json::json!([128]));
    let [shapes, keys] = read(&gemma3, &folder.path().join("gemma3.gguf"));
    assert_eq!(
        (&keys["gemma3.attention.key_length"], &keys["gemma3.attention.sliding_window"]),
        (&256.into(), &5.into())
    );
    assert_eq!(shapes["blk.6.post_attention_norm.weight"], serde_json::json!([24]));
}

/// Models whose graphs are compared.
const ONNX: [&str; 22] = [
    "deep",
    "untied",
    "families/llama",
    "families/llama-biases",
    "families/llama-llama3",
    "families/llama-yarn",
    "families/mistral",
    "families/ministral3",
    "families/qwen2",
    "families/qwen2-window",
    "families/qwen3",
    "families/gemma2",
    "families/gemma3",
    "families/smollm3",
    "families/smollm3-window",
    "families/olmo2",
    "families/olmo3",
    "families/exaone4",
    "families/lfm2",
    "families/granite",
    "families/granite4-nope",
    "families/phi3",
];

/// The logits and warnings of onnxruntime for graphs and their rows of ids, from one process.
fn onnx_logits(python: &Path, cases: &[serde_json::Value]) -> Vec<(Vec<f32>, serde_json::Value)> {
    let file = tempfile::NamedTempFile::new().unwrap();
    serde_json::to_writer(&file, cases).unwrap();
    let reports = run_script(python, "onnx_logits.py", &[file.path().as_os_str()]);
    let of = |report: &serde_json::Value| (serde_json::from_value(report["logits"].clone()).unwrap(), report.clone());
    reports.as_array().unwrap().iter().map(of).collect()
}

#[test]
fn onnxruntime_computes_the_same_for_every_batch_and_length() {
    let Some(python) = python_with("onnxruntime") else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut cases = Vec::new();
    let mut ours = Vec::new();
    for name in ONNX {
        let trained = model(name, folder.path());
        // One family in every type: the rest of the graph does not depend on the type.
        let dtypes = if name == "deep" { &DTYPES[..] } else { &DTYPES[..1] };
        for &(dtype, tolerance) in dtypes {
            let out = folder.path().join(format!("{name}-{dtype}.onnx"));
            assert_eq!(exported(&trained, dtype, &out).len(), 2);
            for (rows, length) in [(1, 1), (3, 12)] {
                let ids = ids(&trained, rows * length);
                cases.push(serde_json::json!([out, ids.chunks(length).collect::<Vec<_>>()]));
                // From the same rounded weights, and from the exact ones.
                let both = [dtype, Dtype::F32].map(|dtype| values(&logits(&trained, dtype, &ids, length)));
                ours.push((format!("{name}, {dtype}, {rows} × {length}"), tolerance, both));
            }
        }
    }
    for ((theirs, report), (what, tolerance, ours)) in onnx_logits(&python, &cases).iter().zip(&ours) {
        assert_eq!(report["axes"], serde_json::json!(["batch", "sequence"]));
        assert_eq!(report["unused"], serde_json::json!([]), "{what}");
        let [same, exact] = ours.each_ref().map(|ours| distance(theirs, ours));
        assert!(same < 1e-5 && exact < tolerance.max(1e-5), "{what}: {same}, {exact}");
    }
}

#[test]
fn onnxruntime_decodes_with_a_cache_and_in_int8() {
    let Some(python) = python_with("onnxruntime") else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut cases = Vec::new();
    let mut ours = Vec::new();
    for name in ["untied", "families/llama", "families/ministral3", "families/gemma2", "families/gemma3"] {
        let trained = model(name, folder.path());
        let ids = ids(&trained, 24);
        let exact = values(&logits(&trained, Dtype::F32, &ids, 12));
        for (kv_cache, int8, tolerance) in [(true, false, 1e-5), (false, true, 0.1), (true, true, 0.1)] {
            let out = trained.path.with_extension(format!("{kv_cache}-{int8}.onnx"));
            export(&trained, Dtype::F32, ExportFormat::Onnx(OnnxOptions { kv_cache, int8 }), ExportScope::Merged, &out)
                .unwrap();
            cases.push(serde_json::json!([out, ids.chunks(12).collect::<Vec<_>>()]));
            ours.push((format!("{name}, cache {kv_cache}, int8 {int8}"), int8, tolerance, exact.clone()));
        }
    }
    for ((theirs, report), (what, int8, tolerance, exact)) in onnx_logits(&python, &cases).iter().zip(&ours) {
        assert_eq!(report["unused"], serde_json::json!([]), "{what}");
        let error = distance(theirs, exact);
        assert!(error < *tolerance, "{what}: {error:.1e}");
        // Rounded to 8 bits, and not left as it was.
        assert_eq!(error > 1e-5, *int8, "{what}: {error:.1e}");
    }
}

#[test]
fn a_graph_cannot_change_its_base_with_the_length() {
    let folder = tempfile::tempdir().unwrap();
    let trained = model("families/llama-dynamic", folder.path());
    let out = folder.path().join("x.onnx");
    let message = refused(&trained, &out);
    assert!(message.contains("`dynamic` and `longrope` rotary embeddings"), "{message}");
}

/// An `Identity` before every weight once hid all products from the quantizer.
#[test]
fn onnxruntimes_dynamic_quantizer_takes_every_linear_layer() {
    // Its quantizer needs both.
    let Some(python) = python_with("onnxruntime").and_then(|_| python_with("onnx")) else { return };
    let folder = tempfile::tempdir().unwrap();
    // The linear layers of GPT-2 are: queries, keys and values together, the attention's output, and the two layers of
    // the MLP. Llama has all separate.
    for (name, linears) in [("deep", 4), ("families/llama", 7)] {
        let trained = model(name, folder.path());
        let out = trained.path.with_extension("onnx");
        exported(&trained, Dtype::F32, &out);
        let file = write_ids(folder.path(), &ids(&trained, 24), 24);
        let report = run_script(&python, "onnx_quantized.py", &[out.as_os_str(), file.as_os_str()]);
        let (products, quantized) = (report["products"].as_u64().unwrap(), report["quantized"].as_u64().unwrap());
        assert!(products >= linears * trained.spec.num_layers as u64 && quantized >= products, "{report}");
        assert!(report["distance"].as_f64().unwrap() < 0.1, "{report}");
    }
}
