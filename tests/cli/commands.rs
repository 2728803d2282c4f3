//! End-to-end tests of the commands on valid input.

use crate::common::checkpoint::names;
use crate::common::cli_fixture::CliFixture;
use crate::common::{launch, of_kind};
use candle_core::Device;
use candle_core::quantized::gguf_file;
use finetune::data::grammar;
use finetune::store::checkpoint::{CheckpointKind, by_loss, list};
use finetune::telemetry::Event;
use serde_json::Value;
use std::ffi::OsStr;
use std::fs;
use std::io::Write as _;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

fn text(output: Output, line: &str) -> String {
    assert!(output.status.success(), "finetune {line}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the standard output of `finetune LINE`, which reads `input` from standard input.
fn said_of(fixture: &CliFixture, line: &str, input: &str) -> String {
    let mut child = fixture.command(line).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    text(child.wait_with_output().unwrap(), line)
}

/// A line that trains `model` a little in the run called `name`.
fn training(name: &str, more: &str) -> String {
    format!(
        "--model model --data text.txt --run {name} --seq-len 8 --batch-size 2 --threads 1 --plain \
         --set train.sample_tokens=0 --set train.eval_batches=1 {more}"
    )
}

#[test]
fn processes_that_tokenize_the_same_text_at_once_share_one_cache() {
    let fixture = CliFixture::new();
    fs::write(fixture.path("text.txt"), grammar::text(3, 2_000_000)).unwrap();
    let children: Vec<Child> =
        (0..6).map(|index| fixture.command(&training(&format!("r{index}"), "--steps 2")).spawn().unwrap()).collect();
    for child in children {
        text(child.wait_with_output().unwrap(), "of six at once");
    }
    let caches = names(fixture.path("data"));
    assert_eq!(caches.len(), 1, "{caches:?}");
    assert!(caches[0].ends_with(".tokens"), "{caches:?}");
    let losses = |run: &str| fixture.steps(run).iter().map(|step| step.loss.to_bits()).collect::<Vec<_>>();
    assert_eq!(losses("r0").len(), 2);
    assert!((1..6).all(|index| losses(&format!("r{index}")) == losses("r0")));
}

#[test]
fn paths_may_have_any_bytes() {
    let fixture = CliFixture::new();
    let name = OsStr::from_bytes(b"caf\xE9");
    fs::rename(fixture.path("model"), fixture.path(name)).unwrap();
    let run = fixture.path("checkpoints").join(name);
    fs::create_dir_all(&run).unwrap();
    fs::write(run.join("config.toml"), "").unwrap();
    for line in ["eval --data text.txt", "runs delete --yes"] {
        text(fixture.command(line).arg(name).output().unwrap(), line);
    }
    assert!(!run.exists());
}

/// `--help` and `--version` are printed before any command is parsed.
#[test]
fn a_full_disk_is_a_failure() {
    for line in ["--help", "--version", "man", "config"] {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let output = CliFixture::empty().command(line).stdout(full).output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{line}: {message}");
        assert!(message.contains("cannot write to `standard output`: No space left"), "{line}: {message}");
    }
}

#[test]
fn standard_input_is_a_text_like_any_other() {
    let fixture = CliFixture::new();
    let input = fs::read_to_string(fixture.path("text.txt")).unwrap();
    let file = fixture.json("eval model --data text.txt --json");
    let piped: Value = serde_json::from_str(&said_of(&fixture, "eval model --data - --json", &input)).unwrap();
    assert_eq!((&piped["loss"], &piped["tokens"], &piped["data"]), (&file["loss"], &file["tokens"], &"-".into()));

    fixture.said(&training("file", "--steps 3"));
    said_of(&fixture, &training("piped", "--steps 3").replace("text.txt", "-"), &input);
    let weights = |run: &str| fs::read(fixture.path(format!("checkpoints/{run}/step-000003/master.safetensors")));
    assert_eq!(weights("piped").unwrap(), weights("file").unwrap());
    // It resumes only if the text is given again.
    let resume = "--resume checkpoints/piped --steps 4 --plain";
    said_of(&fixture, resume, &input);
    fixture.refused(resume);
}

/// The run saves only at its end, so no later save is of an earlier step.
#[test]
fn a_run_that_is_resumed_from_an_older_step_abandons_the_later_ones_at_once() {
    let fixture = CliFixture::in_memory();
    fixture.said("--run r --steps 4 --save-every 2 --eval-every 2 --batch-size 2 --seq-len 16 --plain");
    let older = fixture.run("r").join("step-000002");
    let more = "--steps 6 --save-every 0 --eval-every 0 --keep-last 5 --lr 0.1 --plain";
    fixture.said(&format!("--resume {} {more}", older.display()));
    let listed = list(&fixture.run("r")).unwrap();
    assert_eq!((listed.len(), by_loss(&listed).filter(|one| one.step == 4).count()), (3, 0));
}

/// By the number of steps alone, a run with larger batches would end within the epoch. Rows are sorted by length.
#[test]
fn a_run_with_another_batch_size_reads_the_rest_of_its_epochs() {
    let fixture = CliFixture::new();
    let row = |i: usize| format!("{{\"prompt\": \"{}\", \"completion\": \"{}\"}}\n", "p".repeat(i % 3), i * i % 1013);
    fixture.write("text.txt", (0..60).map(row).collect::<String>());
    fixture.said(&training("r", "--format jsonl --epochs 1 --save-every 3 --keep-last 9"));
    let last = || fixture.steps("r").pop().unwrap();
    let (whole, tokens) = (last().step, last().tokens);
    assert_eq!(fixture.steps("r")[0].epoch, 1.0 / whole as f64);
    for resume in ["step-000009 --batch-size 4", "step-000012"] {
        fixture.said(&format!("--resume checkpoints/r/{resume} --plain"));
        assert_eq!((last().step, last().epoch, last().tokens), (9 + (whole - 9).div_ceil(2), 1.0, tokens));
        let rates: Vec<f64> = fixture.steps("r").iter().rev().take(2).map(|step| step.lr).collect();
        assert!(rates[0] < rates[1], "the schedule ends with the run: {rates:?}");
    }
    let first = last().step;
    for epochs in 2..=3 {
        fixture.said(&format!("--resume checkpoints/r --epochs {epochs} --plain"));
        let expected = first + (epochs - 1) * whole.div_ceil(2);
        assert_eq!((last().step, last().epoch, last().tokens), (expected, epochs as f64, epochs * tokens));
    }
}

#[test]
fn weights_alone_are_saved_thinned_out_on_their_own_and_never_resumed_from() {
    let fixture = CliFixture::new();
    let weights =
        "--set checkpoint.save_weights_every=2 --set checkpoint.keep_last_weights=3 --set checkpoint.keep_best=false";
    fixture.said(&training("r", &format!("--steps 9 --save-every 4 {weights}")));
    let run = fixture.path("checkpoints/r");
    let folders = || names(run.clone()).into_iter().filter(|name| name.contains("-0000")).collect::<Vec<_>>();
    assert_eq!(folders(), ["step-000008", "step-000009", "weights-000004", "weights-000006", "weights-000008"]);
    assert_eq!(
        names(run.join("weights-000008")),
        ["config.json", "manifest.json", "model.safetensors", "tokenizer.json"]
    );
    let listing = fixture.said("checkpoint list checkpoints/r");
    assert_eq!(listing.lines().filter(|line| line.contains("weights-")).count(), 3, "{listing}");
    assert_eq!(fs::read_to_string(run.join("latest")).unwrap(), "step-000009\n");
    for name in ["step-000008", "weights-000008"] {
        let model = |name: &str| fs::read(run.join(name).join("model.safetensors")).unwrap();
        assert_eq!(model(name), model("step-000008"));
    }

    // The newest checkpoint has only weights: it can be used, but not resumed.
    fixture.said(&format!("--resume checkpoints/r --steps 12 --plain {}", weights.replace("every=2", "every=5")));
    assert_eq!(folders(), ["step-000009", "step-000012", "weights-000006", "weights-000008", "weights-000010"]);
    // Only the end of a run was evaluated.
    let evaluated = list(&run).unwrap().into_iter().map(|one| (one.step, one.validation_loss().is_some()));
    assert_eq!(evaluated.collect::<Vec<_>>(), [(6, false), (8, false), (9, true), (10, false), (12, true)]);
    fs::remove_dir_all(run.join("step-000012")).unwrap();
    assert_eq!(list(&run).unwrap().last().unwrap().kind, CheckpointKind::Weights);
    fixture.said("--resume --steps 12 --plain");
    let resumed = of_kind!(fixture.events("r"), Event::Started).map(|started| started.resumed_from);
    assert_eq!(resumed.collect::<Vec<_>>(), [None, Some(9), Some(9)]);
    assert!(fixture.refused("--resume checkpoints/r/weights-000010").contains("it contains only weights"));

    let generated = fixture.said("generate checkpoints/r/weights-000010 --prompt so -n 8 --temperature 0");
    assert!(!generated.is_empty());
    fixture.said("export checkpoints/r/weights-000010 exported --dtype fp16");
    let loss = |model: &str| fixture.json(&format!("eval {model} --data text.txt --json"))["loss"].as_f64().unwrap();
    assert_eq!(loss("exported"), loss("checkpoints/r/weights-000010"));
    assert_eq!(loss("r"), loss("checkpoints/r"), "a run is also found by its name");
    fs::remove_dir_all(run.join("step-000009")).unwrap();
    fs::remove_dir_all(run.join("step-000012")).unwrap();
    let refused = fixture.refused("generate checkpoints/r --prompt so");
    assert!(refused.contains("its newest weights are `checkpoints/r/weights-000010`"), "{refused}");
}

#[test]
fn a_model_is_exported_in_every_format_and_read_back() {
    let fixture = CliFixture::new();
    let generate = |model: &str| fixture.said(&format!("generate {model} --prompt so -n 20 --temperature 0"));
    let original = generate("model");
    for dtype in ["fp32", "fp16", "bf16"] {
        let folder = format!("out/{dtype}");
        assert_eq!(fixture.said(&format!("export model {folder} --dtype {dtype}")), format!("{folder}\n"));
        assert!(dtype != "fp32" || generate(&folder) == original);
        let gguf = format!("out/{dtype}.gguf");
        assert_eq!(fixture.said(&format!("export model {gguf} --dtype {dtype}")), format!("{gguf}\n"));
        let content = gguf_file::Content::read(&mut fs::File::open(fixture.path(&gguf)).unwrap()).unwrap();
        assert!(content.tensor_infos.contains_key("token_embd.weight"));
        let onnx = format!("out/{dtype}.onnx");
        assert_eq!(fixture.said(&format!("export model {onnx} --dtype {dtype}")), format!("{onnx}.data\n{onnx}\n"));
        assert!(fs::metadata(fixture.path(&onnx)).unwrap().len() > 1000);
    }
    assert_eq!(fixture.said("export model out/named --format gguf"), "out/named\n");
    assert!(fs::read(fixture.path("out/named")).unwrap().starts_with(b"GGUF"));
    assert_eq!(names(fixture.path("out")).len(), 3 * 4 + 1, "nothing else is left behind");
}

#[test]
fn the_doctor_answers_in_json() {
    let fixture = CliFixture::new();
    let report = fixture.json("doctor --json");
    assert_eq!(report["version"], env!("CARGO_PKG_VERSION"));
    assert!(report["cpu"]["threads"].as_u64().unwrap() > 0 && report["cpu"]["isa"].is_string());
    assert!(report["cpu"]["tiles"].is_string());
    assert!(report["memory_bytes"].as_u64() > report["memory_available_bytes"].as_u64());
    assert_eq!(report["hub"]["reachable"], Value::Null, "offline, no server is asked");
    let purposes: Vec<&Value> = report["folders"].as_array().unwrap().iter().map(|folder| &folder["purpose"]).collect();
    assert_eq!(&purposes[..2], ["runs", "token caches"]);
    assert!(fixture.said("doctor").lines().count() >= 8);
}

#[test]
fn each_type_has_a_row_with_its_ratios_to_fp32() {
    let fixture = CliFixture::empty();
    let line = "bench --device cpu --model tiny --layers 1 --batch-size 1 --seq-len 8 --steps 1 --warmup 0 --threads 1";
    let rows = |types: &str| -> Vec<Vec<String>> {
        let table = fixture.said(&format!("{line} --dtype {types}"));
        let rows = table.lines().skip(1).take_while(|line| !line.is_empty());
        rows.map(|row| row.split_whitespace().map(str::to_owned).collect()).collect()
    };
    let compared = rows("bf16,fp32");
    assert_eq!(compared.iter().map(|row| &row[0]).collect::<Vec<_>>(), ["bf16", "fp32"]);
    for row in &compared {
        let figures: Vec<f64> = row[1..].iter().map(|cell| cell.parse().unwrap()).collect();
        let [rate, share, memory, memory_share, first, _, last, _, skipped] = figures[..] else { panic!("{row:?}") };
        assert!([rate, share, memory, memory_share, first, last].iter().all(|figure| *figure > 0.0), "{row:?}");
        assert_eq!(skipped, 0.0);
    }
    assert_eq!([2, 4, 6, 8].map(|ratio| compared[1][ratio].as_str()), ["1.00", "1.00", "+0.0e0", "+0.0e0"]);
    let without = rows("bf16,fp16");
    assert!(without.len() == 2 && without.iter().all(|row| [2, 4, 6, 8].iter().all(|ratio| row[*ratio] == "-")));
}

#[test]
fn completions_and_the_manual_have_every_command() {
    let fixture = CliFixture::new();
    let definition = finetune::cli::definition();
    let commands: Vec<&str> = definition.get_subcommands().map(clap::Command::get_name).collect();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = fixture.said(&format!("completions {shell}"));
        assert!(commands.iter().all(|command| script.contains(command)), "{shell}");
    }
    if Path::new("/bin/bash").exists() {
        let script = fixture.path("finetune.bash");
        fs::write(&script, fixture.said("completions bash")).unwrap();
        fs::create_dir_all(fixture.path("checkpoints/gates")).unwrap();
        let load = "source finetune.bash && complete -p finetune && COMP_WORDS=(finetune chat ga) && COMP_CWORD=2 && \
                    _finetune_runs finetune ga chat && [[ ${COMPREPLY[*]} == gates ]]";
        launch::succeed(launch::command("/bin/bash").args(["-c", load]).current_dir(fixture.folder()));
    }
    if Path::new("/usr/bin/fish").exists() {
        fs::write(fixture.path("finetune.fish"), fixture.said("completions fish")).unwrap();
        let load = "source finetune.fish; and complete -C 'finetune chat ga'; and complete -C 'finetune --resume ga'";
        let mut fish = launch::command("/usr/bin/fish");
        fish.args(["--no-config", "-c", load]).current_dir(fixture.folder());
        assert_eq!(launch::succeed(&mut fish), "gates\ngates\n");
    }
    let zsh = fixture.said("completions zsh");
    assert!(zsh.starts_with("#compdef finetune\n") && zsh.matches(":_finetune_runs'").count() > 20, "{zsh}");
    let page = fixture.said("man");
    assert!(page.contains(".TH finetune"), "{page}");
    let sections: Vec<&str> = page.lines().filter(|line| line.starts_with(".SH")).collect();
    for command in commands {
        let section = format!(".SH \"FINETUNE {}\"", command.to_uppercase());
        assert!(sections.contains(&section.as_str()), "{section}");
    }
    assert!(sections.contains(&".SH \"FINETUNE CHECKPOINT PRUNE\""), "{sections:?}");
}

#[test]
fn samples_are_shown_trained_on_and_measured_and_their_template_is_kept() {
    let fixture = CliFixture::new();
    let template = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}|{% endgeneration %}\
                    {% else %}{{ m.content }}>{% endif %}{% endfor %}";
    let config = serde_json::json!({"chat_template": template, "eos_token": "|"}).to_string();
    fs::write(fixture.path("model/tokenizer_config.json"), &config).unwrap();
    let row = |i: u32| {
        format!(
            "{{\"messages\": [{{\"role\": \"user\", \"content\": \"{i}\"}}, {{\"role\": \"assistant\", \"content\": \"{}\"}}]}}\n",
            i * i
        )
    };
    fs::write(fixture.path("chats.jsonl"), (0..20).map(row).collect::<String>()).unwrap();
    let what = "--model model --data chats.jsonl --seq-len 16 --batch-size 2";
    assert_eq!(
        fixture.said(&format!("data show {what} --sample 13")),
        "18 samples in 18 rows, 102 tokens, 58 of them in the loss; answers are located by the template's generation blocks\n\
         sample 13, with its loss tokens in [brackets]:\n  12>[144|]\n\
         validation: 2 samples with 8 loss tokens (the end of the text, held out)\n"
    );
    let stats = |more: &str| fixture.json(&format!("data stats {what} --json {more}"));
    let (alone, packed) = (stats(""), stats("--packing"));
    assert_eq!((&alone["rows"], &alone["steps_per_epoch"], &alone["loss_tokens"]), (&18.into(), &9.into(), &58.into()));
    assert_eq!((&packed["rows"], &packed["loss_tokens"]), (&6.into(), &58.into()), "{packed}");
    assert_eq!(stats("--loss-on all")["loss_tokens"], 84);

    fs::write(fixture.path("pairs.csv"), "prompt; completion\n".to_owned() + &"1;2\n".repeat(9)).unwrap();
    let shown = fixture.said("data show --model model --data pairs.csv --seq-len 16");
    let plain = "read as plain text: a chat template applies to messages, and to `instruction` with `output`\n";
    assert!(shown.contains(plain) && shown.contains("\n  1[2<|endoftext|>]\n"), "{shown}");

    let run = format!("{what} --packing --run r --steps 4 --threads 1 --plain --set train.sample_tokens=0");
    let (code, _, told) = fixture.output(&run);
    assert!(code == Some(0) && told.contains("18 samples in 6 rows") && told.contains("  0>[0|]\n"), "{told}");
    let step = fixture.path("checkpoints/r/step-000004");
    assert_eq!(fs::read_to_string(step.join("chat_template.jinja")).unwrap(), template);
    assert_eq!(fs::read_to_string(step.join("tokenizer_config.json")).unwrap(), config);
    // The run no longer needs the model's folder.
    fs::remove_dir_all(fixture.path("model")).unwrap();
    fixture.said("--resume r --steps 6 --plain");
    let exact = fixture.said("eval r --data chats.jsonl --exact-match");
    assert!(exact.starts_with("exact answers   ") && exact.contains(" of 20 ("), "{exact}");
    let loss = fixture.json("eval r --data chats.jsonl --json");
    assert_eq!((&loss["windows"], &loss["tokens"]), (&20.into(), &66.into()));
    fixture.said("export r out");
    assert_eq!(fs::read_to_string(fixture.path("out/chat_template.jinja")).unwrap(), template);
    let out = "--model out --data chats.jsonl --seq-len 16 --batch-size 2 --packing --steps 6";
    assert!(fixture.said(&format!("verify {out}")).starts_with("bit-identical"));
}

#[test]
fn every_command_takes_numbers_with_powers_and_fractions() {
    let fixture = CliFixture::new();
    let generate = |more: &str| fixture.said(&format!("generate model --prompt so --seed 7 {more}"));
    assert_eq!(generate("-n 2^3 --temperature 1/2"), generate("-n 8 --temperature 0.5"));
    assert_eq!(generate("--max-tokens=8e0 --top-p 5e-1"), generate("--max-tokens=8 --top-p 0.5"));
    let scaler = |steps: &str| fixture.said(&format!("lab scaler --steps {steps} --rate 1/100 --ascii --width 80"));
    assert_eq!(scaler("2^9"), scaler("512"));
    for (line, typed) in [
        ("generate model -n 1/3", "'1/3'"),
        ("generate model --temperature 1e300", "`1e300`"),
        ("lab scaler --steps 2^-1", "'2^-1'"),
        ("lab bits --cursor 2^5", "'2^5'"),
    ] {
        let err = fixture.refused(line);
        assert!(err.contains(typed), "{line}: {err}");
    }
}

/// Regression: they were 0 without a word.
#[test]
fn numbers_too_small_for_a_float_are_refused() {
    let fixture = CliFixture::empty();
    fs::write(fixture.path("small.toml"), "optimizer.eps = 1e-400").unwrap();
    for line in [
        "config --config small.toml",
        "config --set optimizer.weight_decay=1e-400",
        "config --set optimizer.betas=[0.9,1e-400]",
        "config --lr 1e-400",
        "generate tiny --temperature 1e-400",
        "chat tiny --top-p 1e-400",
        "bisect --tolerance 1e-400",
        "lab scaler --drift 1e-400",
    ] {
        fixture.assert_refused(line, &["1e-400", "4.94e-324"]);
    }
    assert!(fixture.said("config --set optimizer.weight_decay=0.0_0").contains("weight_decay = 0.0"));
}

/// Regression: the last one counted.
#[test]
fn a_setting_of_adapters_is_given_once() {
    let fixture = CliFixture::empty();
    fixture.assert_refused("config --lora 16,r=8", &["--lora: `r=8` sets `lora.r` again"]);
    fixture.assert_refused("config --lora 16,alpha=1,alpha=2", &["`alpha=2` sets `lora.alpha` again"]);
}

/// Regression: such a model was looked up on the Hub.
#[test]
fn a_broken_link_is_named_as_one() {
    let fixture = CliFixture::empty();
    for (target, name) in [("nowhere", "broken"), ("loop", "loop")] {
        symlink(target, fixture.path(name)).unwrap();
        for line in [format!("generate {name}"), format!("--model ./{name}")] {
            fixture.assert_refused(&line, &[name, "the symbolic link leads to no file or folder"]);
        }
    }
}

/// Regression: the messages were those of the operating system about other problems, and some exit codes were 1.
#[test]
fn a_path_to_something_else_than_a_file_is_refused() {
    let fixture = CliFixture::empty();
    assert!(Command::new("mkfifo").arg(fixture.path("pipe")).status().unwrap().success());
    let _socket = UnixListener::bind(fixture.path("socket")).unwrap();
    symlink("loop", fixture.path("loop")).unwrap();
    for name in ["pipe", "socket", "/dev/zero"] {
        fixture.assert_refused(&format!("lab memory --model {name}"), &[name, "this is not a GGUF file"]);
    }
    fixture.assert_refused("config --config socket", &["`socket`: it is a pipe, a device or a socket"]);
    fixture.assert_refused("config --config loop", &["`loop`"]);
    fixture.assert_refused(&format!("config --config {}", "x".repeat(300)), &["too long"]);
}

#[test]
fn a_run_whose_forward_pass_overflows_from_the_start_ends_after_four_steps() {
    let fixture = CliFixture::new();
    let path = fixture.path("model/model.safetensors");
    let mut tensors = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
    let (_, weight) = tensors.iter_mut().find(|(name, _)| name.ends_with("h.0.mlp.c_fc.weight")).unwrap();
    // FP16 holds each of them, but not a product with a normalized row.
    *weight = (weight.sign().unwrap() * 60_000.0).unwrap();
    candle_core::safetensors::save(&tensors, &path).unwrap();
    let (code, _, err) = fixture.output(&training("r", "--dtype fp16 --steps 40"));
    assert_eq!((code, fixture.steps("r").len()), (Some(3), 4), "{err}");
    assert!(err.contains("the forward pass overflows") && err.contains("--dtype bf16"), "{err}");
}

#[test]
fn a_run_whose_last_validation_is_not_finite_fails() {
    let fixture = CliFixture::new();
    let (code, _, err) = fixture.output(&training("r", "--dtype fp16 --lr 10 --steps 3 --set schedule.kind=constant"));
    assert_eq!((code, fixture.steps("r").len()), (Some(3), 3), "{err}");
    assert!(err.contains("the validation loss is NaN") && err.contains("lower the learning rate"), "{err}");
    assert!(!fixture.said("checkpoint show r").contains("best"), "NaN is not the best loss");
    // Regression: a resumed run trained on after it had stopped at such a loss.
    let stops = "--dtype fp16 --lr 10 --steps 20 --eval-every 1 --early-stopping 1 --set schedule.kind=constant";
    fixture.output(&training("early", stops));
    let steps = fixture.steps("early").len();
    let (code, _, err) = fixture.output("--resume early --plain");
    assert!(code == Some(3) && fixture.steps("early").len() == steps && steps < 20, "{steps}: {err}");
    assert!(err.contains("the run stopped early") && err.contains("the validation loss is NaN"), "{err}");
}

#[test]
fn a_range_test_suggests_a_learning_rate_and_leaves_no_run() {
    let fixture = CliFixture::new();
    let out = fixture
        .said(&training("r", "--find-lr --dtype fp32").replace("--seq-len 8 --batch-size 2", "--seq-len 32 -b 8"));
    let rate = out.split("--lr ").nth(1).unwrap_or_else(|| panic!("{out}")).trim().parse::<f64>().unwrap();
    assert!((1e-6..0.1).contains(&rate), "{out}");
    assert!(out.contains("loss by learning rate"), "{out}");
    assert!(!fixture.path("checkpoints").exists());
    assert!(fixture.refused("--find-lr --resume").contains("--resume"));
    fixture
        .assert_refused("--find-lr --data sums --objective grpo --reward exact", &["--find-lr: the loss of sampled"]);
}
