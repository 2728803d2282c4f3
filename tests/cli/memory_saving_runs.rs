//! Runs that save memory: adapters, 8-bit moments, BF16 without masters. Killed and resumed bit for bit, exported to
//! PEFT's format, merged, and refused if they make no sense.

use super::evaluate::with_tokenizer;
use crate::common::cli_fixture::CliFixture;
use crate::common::compare::{furthest, values};
use crate::common::python::{python_with, run_script};
use crate::common::transcript::assert_refused;
use candle_core::Device;
use finetune::engine::device::DeviceContext;
use finetune::engine::kernels::KernelBackend;
use finetune::engine::model::{ForwardMode, InputIds, Workspace};
use finetune::inference::trained::TrainedModel;
use finetune::precision::PrecisionPolicy;
use finetune::random::{Domain, Stream};
use finetune::store::checkpoint::{compare, latest_valid};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::time::Duration;

/// The ways to save memory that a resumed run must not show. `model.gguf` is [`quantized`].
const WAYS: [(&str, &str); 6] = [
    ("qlora", "--model model.gguf --lora r=4,alpha=8,dropout=0.1,use_dora --dtype bf16 --lr 3e-3"),
    ("lora", "--lora r=4,alpha=8,dropout=0.1 --dtype fp16"),
    (
        "dora",
        "--lora r=2,alpha=8,target_modules=c_attn+mlp.c_proj,use_rslora,use_dora,modules_to_save=ln_f --dtype bf16",
    ),
    ("adamw8bit", "--optimizer adamw8bit --dtype fp16 --lr 1e-3"),
    ("no-masters", "--dtype p=bf16,c=bf16,g=bf16,r=f32"),
    (
        "all",
        "--lora r=64,alpha=8,dropout=0.1 --optimizer adamw8bit --dtype p=bf16,c=bf16,g=bf16,r=bf16 \
         --gradient-checkpointing",
    ),
];

/// A line that trains a little in the run called `run`.
fn small(run: &str, steps: u32, more: &str) -> String {
    format!(
        "--run {run} --plain --steps {steps} --batch-size 2 --seq-len 16 --save-every 5 --set train.sample_tokens=0 \
         --set train.eval_batches=2 --threads 1 --set telemetry.probe_every=7 {more}"
    )
}

/// A folder with `model.gguf`: the default model in blocks of `Q8_0`, untrained, so that there is something to learn.
fn quantized() -> CliFixture {
    let fixture = CliFixture::empty();
    fixture.said(&small("first", 1, "--init-scale 1024 --lr 1e-9"));
    fixture.said("export first model.gguf --dtype q8_0");
    fixture
}

/// Starts the run `run` from its beginning and kills it after its save at step 10. `false` if it ended before.
fn kill(fixture: &CliFixture, run: &str, flags: &str) -> bool {
    let path = fixture.run(run);
    fs::remove_dir_all(&path).ok();
    let mut child = fixture.command(&small(run, 30, flags)).stdout(Stdio::null()).spawn().unwrap();
    while !path.join("step-000010").exists() && child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    let status = child.wait().unwrap();
    assert!(status.signal() == Some(libc::SIGKILL) || status.success(), "{run}: {status}");
    status.signal().is_some() && latest_valid(&path).unwrap().checkpoint.state().step < 30
}

#[test]
fn killed_runs_resume_bit_for_bit() {
    let fixture = quantized();
    for (way, flags) in WAYS {
        let (undisturbed, killed) = (format!("{way}-undisturbed"), format!("{way}-killed"));
        fixture.said(&small(&undisturbed, 30, flags));
        // A run may come to its end before it is killed.
        assert!((0..10).any(|_| kill(&fixture, &killed, flags)), "{way}: no run was killed");
        fixture.said(&format!("--resume {killed} --plain --threads 1"));
        let losses = |run: &str| -> BTreeMap<u64, u32> {
            fixture.steps(run).iter().map(|step| (step.step, step.loss.to_bits())).collect()
        };
        let (expected, found) = (losses(&undisturbed), losses(&killed));
        assert_eq!(expected.len(), 30, "{way}");
        assert_eq!(found, expected, "{way}");
        assert_eq!(compare(&fixture.newest(&undisturbed), &fixture.newest(&killed)).unwrap(), [], "{way}");
        let losses: Vec<f32> = expected.values().map(|bits| f32::from_bits(*bits)).collect();
        assert!(losses.iter().all(|loss| loss.is_finite()), "{way}: {losses:?}");
        // Losses of two batches differ by a tenth or two.
        assert!(losses[29] < losses[0] - 0.3, "{way} learns nothing: {losses:?}");
    }
}

/// A checkpoint of adapters has no base, and is small.
#[test]
fn a_checkpoint_of_adapters_is_small_and_in_pefts_format() {
    let fixture = CliFixture::empty();
    fixture.said(&small("lora", 5, "--lora r=4,alpha=8 --init-scale 1024"));
    fixture.said(&small("whole", 5, "--init-scale 1024"));
    let files = |run: &str| -> BTreeMap<String, u64> {
        let files = fs::read_dir(fixture.run(run).join("step-000005")).unwrap();
        files
            .map(|file| file.unwrap())
            .map(|file| (file.file_name().into_string().unwrap(), file.metadata().unwrap().len()))
            .collect()
    };
    let (lora, whole) = (files("lora"), files("whole"));
    assert!(lora.contains_key("adapter_config.json") && lora.contains_key("adapter_model.safetensors"));
    assert!(!lora.contains_key("model.safetensors"), "{lora:?}");
    let total = |files: &BTreeMap<String, u64>| files.values().sum::<u64>();
    assert!(total(&lora) * 5 < total(&whole), "{} {}", total(&lora), total(&whole));
    let state: Value =
        serde_json::from_slice(&fs::read(fixture.run("lora").join("step-000005/state.json")).unwrap()).unwrap();
    assert_eq!(state["base"]["name"], "tiny");
    assert_eq!(state["base"]["sha256"].as_str().unwrap().len(), 64);
}

/// The checkpoint has the tokenizer and the chat template.
#[test]
fn adapters_resume_without_the_files_that_their_checkpoint_has() {
    let fixture = CliFixture::new();
    fs::copy(fixture.path("model/tokenizer.json"), fixture.path("own.json")).unwrap();
    fixture.write("own.jinja", "{% for message in messages %}{{ message.content }}{% endfor %}");
    let files = "--model model --tokenizer own.json --chat-template own.jinja --data text.txt";
    fixture.said(&small("run", 5, &format!("{files} --lora r=3")));
    fs::remove_file(fixture.path("own.json")).unwrap();
    fs::remove_file(fixture.path("own.jinja")).unwrap();
    fixture.said("--resume run --plain --threads 1 --steps 6");
}

/// A folder with a model, a text and a run of adapters over it.
fn fixture() -> CliFixture {
    let fixture = CliFixture::new();
    fixture.model("other", |_| {});
    let path = fixture.path("other/model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let last = bytes.len() - 1;
    bytes[last - 2] ^= 1;
    fs::write(&path, bytes).unwrap();
    fixture.said(&small(
        "run",
        10,
        "--model model --data text.txt --lora r=3,alpha=6,target_modules=c_attn+c_fc --lr 1e-2",
    ));
    fixture
}

#[test]
fn another_base_is_refused_by_its_hash() {
    let fixture = fixture();
    fs::rename(fixture.path("model"), fixture.path("was")).unwrap();
    fs::rename(fixture.path("other"), fixture.path("model")).unwrap();
    for line in ["--resume run --steps 12", "generate run --prompt a"] {
        let (code, _, said) = fixture.output(line);
        assert!(code != Some(0) && said.contains("a different base model"), "{line}: {said}");
    }
}

fn logits(trained: &TrainedModel, ids: &[u32]) -> Vec<f64> {
    let open = cpu();
    let (model, weights) = trained.load(PrecisionPolicy::FP32, &open).unwrap();
    let shape = (1, ids.len());
    let mut workspace = Workspace::for_evaluation(model.spec(), PrecisionPolicy::FP32, shape, &Device::Cpu).unwrap();
    let tokens = InputIds { ids, seq_len: ids.len(), documents: None };
    model.forward(&weights, tokens, ForwardMode::Eval, &mut workspace, &mut ()).unwrap();
    values(&model.logits(&weights, workspace.hidden()).unwrap())
}

fn cpu() -> DeviceContext {
    let place: finetune::engine::device::DeviceSpec = "cpu".parse().unwrap();
    place.open(PrecisionPolicy::FP32, KernelBackend::Auto, &mut |_| ()).unwrap()
}

/// Asserts that `merge` printed the largest difference between the logits of `run` and of `written`, and returns it.
fn assert_printed(said: &str, run: &TrainedModel, written: &TrainedModel) -> f64 {
    let number = said.split("largest logit error: ").nth(1).and_then(|rest| rest.split(' ').next());
    let printed: f64 = number.unwrap_or_else(|| panic!("{said}")).parse().unwrap();
    let stream = Stream::new(0, Domain::Bench);
    let tokens = 64.min(run.spec.max_position_embeddings) as u32;
    let ids: Vec<u32> = (0..tokens).map(|at| stream.block(0, 0, at)[0] % run.spec.vocab_size as u32).collect();
    let expected = furthest(&logits(run, &ids), &logits(written, &ids));
    assert!((printed - expected).abs() <= 0.05 * expected, "printed {printed:e}, measured {expected:e}");
    expected
}

/// Logits that are not finite are an error: a maximum that ignores them would print no difference, and a loss would be
/// `NaN`.
#[test]
fn logits_that_are_not_finite_are_an_error() {
    let fixture = fixture();
    fixture.said("export run adapter");
    let file = fixture.path("adapter/adapter_model.safetensors");
    let mut tensors = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
    for (name, tensor) in &mut tensors {
        if name.contains("lora_B") {
            *tensor = (&*tensor * 1e30).unwrap();
        }
    }
    candle_core::safetensors::save(&tensors, &file).unwrap();
    for command in ["merge model merged --adapter adapter", "eval model --adapter adapter --data grammar --seq-len 8"] {
        let (code, said, complaint) = fixture.output(command);
        assert!(code != Some(0) && complaint.contains("logits are not finite"), "{complaint}");
        assert!(!said.contains("largest difference") && !said.contains("NaN"));
    }
}

const IDS: [u32; 12] = [1, 7, 33, 2, 39, 20, 13, 13, 24, 5, 28, 9];

/// Opens a model or run of a fixture. The name of its base is relative to the fixture, where the run was started.
fn open(fixture: &CliFixture, path: &str) -> TrainedModel {
    TrainedModel::open_with(&fixture.path(path), None, &mut |name, _| Ok(fixture.path(name))).unwrap()
}

/// The run, its export and the merged model give the same answers; `generate` and `eval` take each of them.
#[test]
fn exported_and_merged_adapters_have_the_logits_of_the_run() {
    let fixture = fixture();
    fixture.said("export run adapter");
    let merged = fixture.said("merge model merged --adapter adapter");
    let printed = [merged, fixture.said("merge run merged16 --dtype bf16")];
    fixture.said("export run exported --merge");
    let open = |path: &str| open(&fixture, path);
    let whole = logits(&open("model"), &IDS);
    let run = logits(&open("checkpoints/run"), &IDS);
    assert!(furthest(&whole, &run) > 1e-2, "the adapters do nothing");
    for (path, bound) in [("adapter", 0.0), ("merged", 1e-4), ("exported", 1e-4), ("merged16", 0.3)] {
        let difference = furthest(&run, &logits(&open(path), &IDS));
        assert!(difference <= bound, "{path}: {difference:.1e}");
    }
    for (path, printed) in ["merged", "merged16"].into_iter().zip(printed) {
        assert_printed(&printed, &open("checkpoints/run"), &open(path));
    }
    let with = open("model").with_adapters(&fixture.path("adapter")).unwrap();
    assert_eq!(furthest(&run, &logits(&with, &IDS)), 0.0);
    let generated =
        |model: &str| fixture.said(&format!("generate {model} --prompt some --temperature 0 --max-tokens 8"));
    assert_eq!(generated("run"), generated("model --adapter adapter"));
    fixture.said("eval model --adapter adapter --data text.txt --seq-len 16");
    // Whether FP16 is enough is measured on all layers, although adapters leave most layers frozen.
    let checked = |model: &str| {
        let (code, said, complaint) =
            fixture.output(&format!("fp16-check {model} --data text.txt --seq-len 16 --batches 1 --json"));
        assert!(matches!(code, Some(0 | 4 | 5)), "{complaint}");
        serde_json::from_str::<Value>(&said).unwrap()
    };
    let merged = checked("merged");
    for model in ["run", "model --adapter adapter"] {
        let report = checked(model);
        assert_eq!(report["best_scale"], merged["best_scale"]);
        assert_eq!(report["units"].as_array().unwrap().len(), merged["units"].as_array().unwrap().len());
    }
}

/// Adapters are used with the template that they were trained with, not with the base's.
#[test]
fn adapters_keep_their_chat_template() {
    let fixture = CliFixture::new();
    let chats = "--model model --data chats --lora r=1,alpha=2 --chat-template chatml --loss-on all";
    fixture.said(&small("run", 1, chats));
    fixture.said("export run adapter");
    let open = |path: &str| open(&fixture, path);
    let template = open("checkpoints/run").chat.template;
    assert!(template.as_ref().is_some_and(|template| template.contains("<|im_start|>")));
    assert_eq!(open("adapter").chat.template, template);
    assert_eq!(open("model").with_adapters(&fixture.path("adapter")).unwrap().chat.template, template);
    assert_ne!(open("model").chat.template, template);
}

/// Adapters over a quantized base behave like adapters over any base: used, exported and merged.
#[test]
fn a_quantized_base_stays_in_blocks_and_its_adapters_are_used_and_merged() {
    let fixture = quantized();
    let (code, out, err) =
        fixture.output(&small("run", 10, "--model model.gguf --lora r=3,alpha=6 --lr 1e-2 --dtype bf16"));
    let said = out + &err;
    assert!(code == Some(0) && said.contains("stays quantized (QLoRA)"), "{said}");
    let state = fs::read(fixture.run("run").join("step-000010/state.json")).unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&state).unwrap()["base"]["name"], "model.gguf");
    fixture.said("export run adapter");
    let open = |path: &str| open(&fixture, path);
    let mut differences = Vec::new();
    for (out, dtype) in
        [("merged", "fp32"), ("merged16.gguf", "fp16"), ("merged8.gguf", "q8_0"), ("merged4.gguf", "q4_k")]
    {
        let printed = fixture.said(&format!("merge model.gguf {out} --adapter adapter --dtype {dtype}"));
        differences.push(assert_printed(&printed, &open("checkpoints/run"), &open(out)));
    }
    assert!(differences.is_sorted() && differences[2] > 100.0 * differences[0], "{differences:?}");
    let (base, run) = (logits(&open("model.gguf"), &IDS), logits(&open("checkpoints/run"), &IDS));
    assert!(furthest(&base, &run) > 1e-2, "the adapters do nothing");
    let with = open("model.gguf").with_adapters(&fixture.path("adapter")).unwrap();
    assert_eq!(furthest(&run, &logits(&with, &IDS)), 0.0);
    let difference = furthest(&run, &logits(&open("merged"), &IDS));
    assert!(difference <= 1e-4, "merged: {difference:.1e}");
    let generated =
        |model: &str| fixture.said(&format!("generate {model} --prompt the --temperature 0 --max-tokens 8"));
    assert_eq!(generated("run"), generated("model.gguf --adapter adapter"));
    fixture.said("eval model.gguf --adapter adapter --data grammar --seq-len 64 --dtype bf16");
    let memory = fixture.said("lab memory --model model.gguf --seq 16 --batch 2");
    assert!(memory.contains("LoRA (ours)") && memory.contains("QLoRA (ours)"), "{memory}");
    let (code, out, err) = fixture.output("--resume run --plain --threads 1 --steps 12");
    let said = out + &err;
    assert!(code == Some(0) && said.contains("stays quantized (QLoRA)"), "a resumed run: {said}");
}

/// PEFT reads what we export, and we read what PEFT saves, with the same logits.
#[test]
fn peft_and_we_read_each_others_adapters() {
    exchange_with_peft(&fixture());
    let fixture = mixture();
    fixture.said(&format!("{} --steps 4", of_experts("run")));
    exchange_with_peft(&fixture);
}

/// A folder with a mixture of experts and its tokenizer in `model`.
fn mixture() -> CliFixture {
    let fixture = with_tokenizer("families/olmoe");
    fs::create_dir(fixture.path("model")).unwrap();
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        fs::rename(fixture.path(file), fixture.path("model").join(file)).unwrap();
    }
    fixture
}

/// A line that trains adapters of [`mixture`]'s router and experts.
fn of_experts(run: &str) -> String {
    format!(
        "--model model --data text.txt --lora r=2,alpha=4,target_modules=q_proj+experts.gate_up_proj+experts.down_proj+gate.weight \
         --lr 0.01 --schedule constant --warmup-steps 0 --dtype fp32 --run {run} --plain --batch-size 2 --seq-len 16 --set train.sample_tokens=0"
    )
}

/// Resumed runs, recomputed blocks and merged adapters of routers and experts compute the same model.
#[test]
fn adapters_of_experts_are_resumed_recomputed_and_merged() {
    let fixture = mixture();
    let masters = |run: &str| fs::read(fixture.newest(run).join("master.safetensors")).unwrap();
    fixture.said(&format!("{} --steps 6", of_experts("whole")));
    fixture.said(&format!("{} --steps 3", of_experts("resumed")));
    fixture.said("--resume resumed --steps 6 --plain");
    fixture.said(&format!("{} --steps 6 --gradient-checkpointing", of_experts("recomputed")));
    for run in ["resumed", "recomputed"] {
        assert!(masters(run) == masters("whole"), "{run}");
    }
    fixture.said("merge whole merged");
    let [base, run, merged] = ["model", "checkpoints/whole", "merged"].map(|path| logits(&open(&fixture, path), &IDS));
    let (change, error) = (furthest(&base, &run), furthest(&merged, &run));
    assert!(
        change > 0.1 && error < 1e-5,
        "the adapters change logits by {change:.1e}, the merged ones differ by {error:.1e}"
    );
    for (setting, message) in [("dropout=0.1", "lora.dropout: is for"), ("use_dora", "lora.use_dora: is for")] {
        let line = of_experts("refused").replace("r=2,", &format!("r=2,{setting},"));
        assert!(fixture.refused(&line).contains(message), "{setting}");
    }
}

fn exchange_with_peft(fixture: &CliFixture) {
    let Some(python) = python_with("peft") else { return };
    fixture.said("export run adapter");
    let path = |name: &str| fixture.path(name);
    let ids = IDS.map(|id| id.to_string()).join(",");
    let theirs = run_script(
        &python,
        "peft_logits.py",
        &[path("model").as_os_str(), path("adapter").as_os_str(), path("again").as_os_str(), ids.as_ref()],
    );
    let numbers = |value: &Value| value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect::<Vec<_>>();
    let logits_with = |adapter| logits(&open(fixture, "model").with_adapters(&path(adapter)).unwrap(), &IDS);
    let ours = logits_with("adapter");
    let difference = furthest(&ours, &numbers(&theirs["logits"]));
    assert!(difference < 1e-4, "PEFT's logits differ by {difference:.1e}");
    assert_eq!(furthest(&ours, &logits_with("again")), 0.0, "what PEFT saved again is another adapter");
    let difference = furthest(&logits_with("again-fresh"), &numbers(&theirs["fresh"]));
    assert!(difference < 1e-4, "the logits of PEFT's own adapter differ by {difference:.1e}");
}

/// Every message for adapters that make no sense.
#[test]
fn nonsense_is_refused() {
    let fixture = fixture();
    fixture.said("export run adapter");
    let config: Value =
        serde_json::from_slice(&fs::read(fixture.path("adapter/adapter_config.json")).unwrap()).unwrap();
    let broken = |name: &str, change: &dyn Fn(&mut Value, &mut Vec<u8>)| {
        let mut config = config.clone();
        let mut bytes = fs::read(fixture.path("adapter/adapter_model.safetensors")).unwrap();
        change(&mut config, &mut bytes);
        fixture.write(&format!("{name}/adapter_config.json"), config.to_string());
        fixture.write(&format!("{name}/adapter_model.safetensors"), bytes);
    };
    let keys = [
        ("ia3", "peft_type", json!("IA3")),
        ("rank", "r", json!(4)),
        ("zero", "r", json!(0)),
        ("alpha", "lora_alpha", json!("many")),
        ("dropped", "lora_dropout", json!(1.0)),
        ("pattern", "rank_pattern", json!({"c_attn": 8})),
        ("expression", "alpha_pattern", json!({"(": 8})),
        ("bias", "bias", json!("all")),
        ("pissa", "init_lora_weights", json!("pissa")),
        ("unknown", "warp_factor", json!(9)),
        ("dora", "use_dora", json!(true)),
    ];
    for (name, key, value) in &keys {
        broken(name, &|config, _| config[*key] = value.clone());
    }
    broken("cut", &|_, bytes| bytes.truncate(bytes.len() - 9));
    broken("header", &|_, bytes| bytes.truncate(5));
    let text =
        String::from_utf8_lossy(&fs::read(fixture.path("adapter/adapter_model.safetensors")).unwrap()).into_owned();
    assert!(text.contains("h.0.attn.c_attn"));
    broken("foreign", &|_, bytes| {
        let at = bytes.windows(6).position(|window| window == b"c_attn").unwrap();
        bytes[at..at + 6].copy_from_slice(b"q_proj");
    });
    // The engine has this layer, but no adapters on it.
    broken("norm", &|_, _| ());
    let norm = fixture.path("norm/adapter_model.safetensors");
    let mut tensors = candle_core::safetensors::load(&norm, &Device::Cpu).unwrap();
    let factor = tensors["base_model.model.transformer.h.0.attn.c_attn.lora_A.weight"].clone();
    tensors.insert("base_model.model.transformer.ln_f.lora_A.weight".into(), factor);
    candle_core::safetensors::save(&tensors, &norm).unwrap();
    fixture.write("pickled/adapter_config.json", config.to_string());
    fixture.write("pickled/adapter_model.bin", "x");
    assert_refused(&fixture, "adapters");
}
