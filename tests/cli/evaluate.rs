//! Evaluation agrees with transformers on the same windows, and with itself for any batches of the windows.
//!
//! The comparison needs a Python with PyTorch and transformers in `FINETUNE_PYTHON`, as `.ci/python-env` makes one.
//! Without it the test prints a message and passes, except in CI, where it fails.

use crate::common::cli_fixture::CliFixture;
use crate::common::compare::gpt2_tokenizer;
use crate::common::golden;
use crate::common::python::{python, run_script};
use candle_core::Device;
use finetune::data::{DataSource, DatasetBuilder, TokenSource};
use finetune::engine::device::DeviceContext;
use finetune::engine::model::{ModelSpec, Parameters};
use finetune::inference::ModelView;
use finetune::inference::evaluate::{Evaluation, SlidingWindow, evaluate};
use finetune::inference::trained::TrainedModel;
use finetune::precision::PrecisionPolicy;
use finetune::store::tensor_file::write_tensors;
use finetune::telemetry::Event;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// A folder with the golden model `name` and a tokenizer of one-letter words that fits it.
pub(crate) fn with_tokenizer(name: &str) -> CliFixture {
    let fixture = CliFixture::empty();
    for file in ["config.json", "model.safetensors"] {
        fixture.write(file, std::fs::read(golden::path(name).join(file)).unwrap());
    }
    let vocab: serde_json::Map<String, Value> =
        ('a'..='z').enumerate().map(|(id, letter)| (letter.to_string(), id.into())).collect();
    let tokenizer = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "a"},
    });
    fixture.write("tokenizer.json", tokenizer.to_string());
    fixture.write("text.txt", text());
    fixture
}

/// 300 letters in no simple order.
pub(crate) fn text() -> String {
    let mut state = 7_u32;
    (0..300)
        .flat_map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            [char::from(b'a' + (state >> 24) as u8 % 26), ' ']
        })
        .collect()
}

fn tokens(fixture: &CliFixture, trained: &TrainedModel) -> TokenSource {
    let source = DataSource::Path(fixture.path("text.txt"));
    DatasetBuilder::new(fixture.folder()).load_unsplit(&source, &trained.tokenizer).unwrap().0
}

fn measure(
    trained: &TrainedModel,
    policy: PrecisionPolicy,
    tokens: &TokenSource,
    windows: SlidingWindow,
) -> Evaluation {
    let loaded = trained.load(policy, &DeviceContext::cpu()).unwrap();
    evaluate(ModelView::new(&loaded, policy), tokens, 2.0, windows, |_| {}).unwrap()
}

/// A model folder, a text, the length of windows, and strides.
pub(super) type WindowCase = (PathBuf, PathBuf, usize, Vec<usize>);

/// The losses by transformers for each stride of each case. One process computes all, because it takes seconds to
/// start.
pub(super) fn ask_transformers(python: &Path, cases: &[WindowCase]) -> serde_json::Value {
    let file = tempfile::NamedTempFile::new().unwrap();
    serde_json::to_writer(&file, cases).unwrap();
    run_script(python, "transformers_windows.py", &[file.path().as_os_str()])
}

#[test]
fn transformers_finds_the_same_loss_on_the_same_windows() {
    let Some(python) = python() else { return };
    let names = ["narrow", "deep", "untied", "families/phi3-longrope"];
    let fixtures = names.map(with_tokenizer);
    let models = fixtures.each_ref().map(|fixture| TrainedModel::open(fixture.folder(), None).unwrap());
    let case = |(fixture, trained): (&CliFixture, &TrainedModel)| {
        let tokens = tokens(fixture, trained);
        let mut ids = vec![0; tokens.len()];
        tokens.read(0, &mut ids);
        fixture.write("ids.json", serde_json::to_string(&ids).unwrap());
        let context = trained.spec.max_position_embeddings;
        (fixture.folder().to_owned(), fixture.path("ids.json"), context, vec![context, context / 2, 3])
    };
    let cases: Vec<WindowCase> = fixtures.iter().zip(&models).map(case).collect();
    let theirs = ask_transformers(&python, &cases);
    for (number, (trained, (.., context, strides))) in models.iter().zip(&cases).enumerate() {
        let name = names[number];
        let tokens = tokens(&fixtures[number], trained);
        for (at, stride) in strides.iter().enumerate() {
            let windows = SlidingWindow::new(*context, None, Some(*stride), Some(5)).unwrap();
            let theirs = &theirs[number][at];
            let ours = measure(trained, PrecisionPolicy::FP32, &tokens, windows);
            assert_eq!(theirs["tokens"], ours.tokens);
            let loss = theirs["loss"].as_f64().unwrap();
            assert!((ours.loss - loss).abs() < 1e-4, "{name}, stride {stride}: {} here, {loss} there", ours.loss);
            for policy in [PrecisionPolicy::FP16, PrecisionPolicy::BF16] {
                let rounded = measure(trained, policy, &tokens, windows).loss;
                assert!((rounded - loss).abs() < 2e-2 * loss, "{name}, {policy}: {rounded} here, {loss} there");
            }
        }
    }
}

/// On Tiny Shakespeare itself, by the command and with GPT-2's tokenizer, which both sides run themselves.
///
/// On 20 November 2026 a stride of 256 gave 11.966221510 here and 11.966221512 there; 128 was not waited for.
#[test]
#[ignore = "minutes; .ci/full runs it"]
fn transformers_finds_the_same_loss_on_tiny_shakespeare() {
    let (Some(python), Some(tokenizer)) = (python(), gpt2_tokenizer()) else { return };
    let fixture = CliFixture::empty();
    let text = zstd::decode_all(&include_bytes!("../../src/data/tiny_shakespeare.txt.zst")[..]).unwrap();
    fixture.write("text.txt", text);
    std::fs::copy(tokenizer, fixture.path("tokenizer.json")).unwrap();
    let gpt2 = ModelSpec::named("gpt2").unwrap();
    // Weights this wide make a model that is sure of itself, and wrong: its loss is far from a uniform guess.
    let small = ModelSpec { max_position_embeddings: 256, ..gpt2.resized(2, 64, 4) };
    let config = ModelSpec { initializer_range: 0.2, ..small };
    let masters = Parameters::random(&config.parameters(), 1, &Device::Cpu).unwrap();
    let tensors: Vec<_> = masters.iter().map(|(name, tensor)| (name.to_owned(), tensor.clone())).collect();
    let weights = fixture.path("model.safetensors");
    write_tensors(&mut std::fs::File::create(&weights).unwrap(), &weights, &tensors).unwrap();
    fixture.write("config.json", config.to_json("float32"));
    let strides = [256, 128];
    let case = (fixture.folder().to_owned(), fixture.path("text.txt"), 256, strides.to_vec());
    let theirs = ask_transformers(&python, &[case]);
    for (at, stride) in strides.into_iter().enumerate() {
        let ours = fixture.json(&format!("eval . --data text.txt --stride {stride} --json"));
        let theirs = &theirs[0][at];
        assert_eq!(theirs["tokens"], ours["tokens"]);
        let [ours, theirs] = [&ours["loss"], &theirs["loss"]].map(|loss| loss.as_f64().unwrap());
        println!("stride {stride}: {ours} here, {theirs} there");
        assert!((ours - theirs).abs() < 1e-4, "stride {stride}: {ours} here, {theirs} there");
    }
}

#[test]
fn batches_of_windows_do_not_show_in_the_loss() {
    let fixture = with_tokenizer("deep");
    let trained = TrainedModel::open(fixture.folder(), None).unwrap();
    let tokens = tokens(&fixture, &trained);
    let context = trained.spec.max_position_embeddings;
    let loss = |batch| {
        let windows = SlidingWindow::new(context, None, Some(context / 2), Some(batch)).unwrap();
        measure(&trained, PrecisionPolicy::FP32, &tokens, windows)
    };
    let one = loss(1);
    assert_eq!(one.tokens as usize, tokens.len() - 1);
    assert_eq!(one.perplexity, one.loss.exp());
    assert!((one.bits_per_byte - one.loss / std::f64::consts::LN_2 / 2.0).abs() < 1e-12);
    for batch in [2, 7, 1000] {
        assert!((loss(batch).loss - one.loss).abs() < 1e-6 * one.loss, "{batch} at a time");
    }
}

#[test]
fn overlapping_windows_have_more_context_and_predict_no_token_twice() {
    let fixture = with_tokenizer("narrow");
    let trained = TrainedModel::open(fixture.folder(), None).unwrap();
    let tokens = tokens(&fixture, &trained);
    let context = trained.spec.max_position_embeddings;
    let of = |stride| {
        measure(
            &trained,
            PrecisionPolicy::FP32,
            &tokens,
            SlidingWindow::new(context, None, Some(stride), None).unwrap(),
        )
    };
    let apart = of(context);
    let overlapping = of(1);
    assert_eq!(apart.tokens, overlapping.tokens);
    assert!(overlapping.windows > apart.windows);
    assert_ne!(apart.loss, overlapping.loss);
}

#[test]
fn the_command_prints_the_librarys_figures() {
    let fixture = with_tokenizer("narrow");
    let trained = TrainedModel::open(fixture.folder(), None).unwrap();
    let tokens = tokens(&fixture, &trained);
    let windows = SlidingWindow::new(trained.spec.max_position_embeddings, Some(8), Some(4), None).unwrap();
    let expected = measure(&trained, PrecisionPolicy::FP32, &tokens, windows);
    let report = fixture.json("eval . --data text.txt --seq-len 8 --stride 4 --json");
    assert_eq!(report["loss"].as_f64().unwrap(), expected.loss);
    assert_eq!(report["windows"], expected.windows);
    assert_eq!((&report["seq_len"], &report["stride"]), (&8.into(), &4.into()));
}

/// PEFT's adapters of one part of a fused product, in every layer or in one: `eval` finds the loss of the merged model,
/// and `generate` runs.
#[test]
fn an_adapter_of_one_projection_is_evaluated() {
    let fixture = with_tokenizer("families/llama");
    let loss = |model: &str| fixture.json(&format!("eval {model} --data text.txt --json"))["loss"].as_f64().unwrap();
    let base = loss(".");
    for (name, module, outputs, layers) in [("all", "q_proj", 24, &[0, 1][..]), ("one", "v_proj", 12, &[1])] {
        let wave = |shape: [usize; 2]| {
            let values = (0..shape[0] * shape[1]).map(|i| (i as f32).sin());
            candle_core::Tensor::from_iter(values, &Device::Cpu).unwrap().reshape(&shape).unwrap()
        };
        let factors = |layer: &usize| {
            let module = format!("base_model.model.model.layers.{layer}.self_attn.{module}");
            [("A", [2, 24]), ("B", [outputs, 2])].map(|(f, shape)| (format!("{module}.lora_{f}.weight"), wave(shape)))
        };
        let tensors: Vec<_> = layers.iter().flat_map(factors).collect();
        let adapter = fixture.path(name);
        std::fs::create_dir(&adapter).unwrap();
        let weights = adapter.join("adapter_model.safetensors");
        write_tensors(&mut std::fs::File::create(&weights).unwrap(), &weights, &tensors).unwrap();
        let config = serde_json::json!({
            "peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": [module], "layers_to_transform": layers,
        });
        std::fs::write(adapter.join("adapter_config.json"), config.to_string()).unwrap();
        fixture.said(&format!("merge . {name}-merged --adapter {name}"));
        let (expected, found) = (loss(&format!("{name}-merged")), loss(&format!(". --adapter {name}")));
        assert!((found - expected).abs() < 1e-5 * expected, "{name}: {found}, merged {expected}");
        assert!((found - base).abs() > 1e-3, "{name}: the adapter does nothing");
        fixture.said(&format!("generate . --adapter {name} --prompt a --max-tokens 4"));
    }
}

#[test]
fn mismatch_counts_the_choices_of_experts_that_differ() {
    let line = "mismatch . --prompt a --max-tokens 14 --sequences 64 --dtype fp32,bf16";
    let fixture = with_tokenizer("families/olmoe");
    let types = &fixture.json(&format!("{line} --json"))["types"];
    assert_eq!(types["fp32"]["experts"], 0.0);
    let share = 100.0 * types["bf16"]["experts"].as_f64().unwrap();
    assert!(share > 0.0, "{types}");
    let text = fixture.said(line);
    let expected = format!("Choices of experts that differ from FP32's: fp32 0.00 %, bf16 {share:.2} %");
    assert!(text.contains(&expected), "{text}");
    let dense = with_tokenizer("families/llama").said(&format!("{line} --json"));
    assert!(!dense.contains("experts"), "{dense}");
}

/// The FP32 probe of a mixture's run counts them too, and the dashboard shows them.
#[test]
fn probes_count_the_choices_of_experts_that_differ() {
    let fixture = with_tokenizer("families/olmoe");
    let settings = "--data text.txt --val none --seq-len 16 --batch-size 16 --plain --set train.sample_tokens=0";
    let shares = ["fp32", "bf16"].map(|dtype| {
        let more = "--set telemetry.probe_every=2 --gradient-checkpointing";
        fixture.said(&format!("--model . --run {dtype} --steps 12 --dtype {dtype} {settings} {more}"));
        let share = |event: Event| if let Event::Fp32Probe(probe) = event { probe.experts } else { None };
        fixture.events(dtype).into_iter().filter_map(share).collect::<Vec<f64>>()
    });
    assert_eq!(shares[0], [0.0; 6]);
    assert!(shares[1].iter().all(|share| (0.0..0.5).contains(share)) && shares[1].iter().any(|share| *share > 0.0));
    fixture.said("watch bf16 --svg precision.svg --keys 2");
    let shown = std::fs::read_to_string(fixture.path("precision.svg")).unwrap();
    assert!(shown.contains(&format!("{:.2} % of choices of experts differ", 100.0 * shares[1][5])), "{shown}");
}

/// Files of this family have one tensor of all experts. A resumed run reads frozen experts from it.
#[test]
fn a_mixture_with_frozen_stacked_experts_is_resumed_and_exported() {
    let fixture = with_tokenizer("families/granitemoe");
    let settings =
        "--data text.txt --seq-len 8 --batch-size 2 --dtype fp32 --lr 0.01 --plain --set train.eval_batches=1";
    fixture.said(&format!("--model . --run r --steps 4 --freeze block_sparse_moe {settings}"));
    fixture.said("--resume r --steps 8 --plain");
    fixture.said("export r out");
    let loss = |model: &str| {
        fixture.json(&format!("eval {model} --data text.txt --dtype fp32 --json"))["loss"].as_f64().unwrap()
    };
    let [before, trained, exported] = [".", "r", "out"].map(loss);
    assert!(trained < before && exported == trained, "{before}, {trained}, {exported}");
    for name in ["input_linear", "output_linear"] {
        let tensor = |path: &str| {
            let tensors = candle_core::safetensors::load(fixture.path(path), &Device::Cpu).unwrap();
            let name = format!("model.layers.1.block_sparse_moe.{name}.weight");
            tensors[&name].flatten_all().unwrap().to_vec1::<f32>().unwrap()
        };
        assert_eq!(tensor("model.safetensors"), tensor("out/model.safetensors"), "{name}");
    }
}
