//! The BOS and end-of-text tokens: which ones a model has, and that training, evaluation, generation, chat and export
//! agree on them.

use super::evaluate::{ask_transformers, with_tokenizer};
use crate::common::cli_fixture::CliFixture;
use crate::common::python::python;
use finetune::data::{Bos, DataSource, DatasetBuilder, IGNORE_INDEX, SequenceIndex, TokenSource, Tokenizer};
use finetune::inference::trained::TrainedModel;
use serde_json::{Value, json};
use std::fs;

const BOS: u32 = 26;

/// A model folder whose tokenizer of one-letter words has `<s>`. `added` is whether its post-processor adds it, and
/// `key` the value of `add_bos_token`.
fn model(added: bool, key: Option<bool>) -> CliFixture {
    let fixture = with_tokenizer("untied");
    let file = fixture.path("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    tokenizer["model"]["vocab"]["<s>"] = BOS.into();
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": true})
    };
    tokenizer["model"]["vocab"]["</s>"] = (BOS + 1).into();
    tokenizer["added_tokens"] = json!([special(BOS, "<s>"), special(BOS + 1, "</s>")]);
    if added {
        let template = json!([{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]);
        tokenizer["post_processor"] = json!({
            "type": "TemplateProcessing", "single": template, "pair": template,
            "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}},
        });
    }
    fs::write(file, tokenizer.to_string()).unwrap();
    let mut config = json!({"bos_token": {"content": "<s>"}, "eos_token": "</s>"});
    if let Some(key) = key {
        config["add_bos_token"] = key.into();
    }
    fixture.write("tokenizer_config.json", config.to_string());
    fixture
}

fn loss(fixture: &CliFixture, more: &str) -> f64 {
    fixture.json(&format!("eval . --data text.txt --json {more}"))["loss"].as_f64().unwrap()
}

fn ids(tokens: &TokenSource) -> Vec<u32> {
    let mut ids = vec![0; tokens.len()];
    tokens.read(0, &mut ids);
    ids
}

fn source(fixture: &CliFixture, name: &str, text: &str) -> DataSource {
    fixture.write(name, text);
    DataSource::Path(fixture.path(name))
}

/// `add_bos_token` has precedence over the post-processor, as in llama.cpp's converter.
#[test]
fn the_files_of_a_model_say_whether_it_has_a_bos_token() {
    for (added, key, expected) in [
        (false, None, false),
        (true, None, true),
        (false, Some(true), true),
        (true, Some(true), true),
        (false, Some(false), false),
        (true, Some(false), false),
    ] {
        let fixture = model(added, key);
        let open = |rule| TrainedModel::open(fixture.folder(), None).unwrap().with_bos(rule).unwrap().tokenizer.bos();
        let found = [Bos::Auto, Bos::Always, Bos::Never].map(open);
        assert_eq!(found, [expected.then_some(BOS), Some(BOS), None], "added {added}, key {key:?}");
    }
    let fixture = with_tokenizer("narrow");
    let error = TrainedModel::open(fixture.folder(), None).unwrap().with_bos(Bos::Always).unwrap_err().to_string();
    assert!(error.starts_with("bos: `always` needs a `bos_token`"), "{error}");
}

/// Every window begins with the token, which changes the loss; transformers finds the same one.
#[test]
fn transformers_finds_the_loss_of_windows_that_begin_with_the_token() {
    let fixture = model(true, None);
    let (with, without) = (loss(&fixture, ""), loss(&fixture, " --bos never"));
    assert!((with - without).abs() > 1e-3, "{with} with the token, {without} without");
    // How the model asks for it does not matter.
    assert_eq!(loss(&model(false, Some(true)), ""), with);
    assert_eq!(loss(&model(true, Some(false)), " --bos always"), with);
    assert_eq!(loss(&model(true, Some(false)), ""), without);
    let Some(python) = python() else { return };
    // The tokenizers of exports add it as well.
    let [whole, none] = [(false, "always"), (true, "never")].map(|(added, rule)| {
        let fixture = model(added, None);
        fixture.said(&format!("export . out --dtype fp32 --bos {rule}"));
        fixture
    });
    let context = TrainedModel::open(fixture.folder(), None).unwrap().spec.max_position_embeddings;
    let stride = context / 2;
    let case = |folder| (folder, fixture.path("text.txt"), context, vec![context, stride]);
    let theirs = ask_transformers(&python, &[fixture.path(""), whole.path("out"), none.path("out")].map(case));
    let strided = |more: &str| loss(&fixture, &format!(" --stride {stride}{more}"));
    for (theirs, ours) in [
        (&theirs[0][0], with),
        (&theirs[0][1], strided("")),
        (&theirs[1][0], with),
        (&theirs[2][0], without),
        (&theirs[2][1], strided(" --bos never")),
    ] {
        let theirs = theirs["loss"].as_f64().unwrap();
        assert!((theirs - ours).abs() < 1e-4, "{ours} here, {theirs} there");
    }
}

#[test]
fn documents_and_windows_begin_with_the_token_and_it_is_never_a_target() {
    let fixture = model(true, None);
    let bos = Tokenizer::from_file(fixture.path("tokenizer.json")).unwrap();
    let none = bos.clone().with_bos(Bos::Never, None, None, None).unwrap();
    let rows = source(&fixture, "rows.jsonl", "{\"text\": \"a b c\"}\n{\"text\": \"d e\"}\n{\"text\": \"<s> f\"}\n");
    let load = |source: &DataSource, tokenizer: &Tokenizer| {
        DatasetBuilder::new(fixture.folder()).load_unsplit(source, tokenizer).unwrap().0
    };
    let eos = BOS + 1;
    let tokens = load(&rows, &bos);
    assert_eq!(ids(&tokens), [BOS, 0, 1, 2, eos, BOS, 3, 4, eos, BOS, 5]);
    let mut targets = vec![0; tokens.len()];
    tokens.read_labels(0, &mut targets);
    assert_eq!((targets[0], targets[5]), (IGNORE_INDEX, IGNORE_INDEX));
    assert_eq!(
        ids(&load(&rows, &none)),
        [0, 1, 2, eos, 3, 4, eos, BOS, 5],
        "the tokens come from the other tokenizer's cache"
    );

    // A window starts with the token at every position of the text, and its targets are the text's tokens.
    let mut inputs = vec![0; 3];
    tokens.read_inputs(2, &mut inputs);
    assert_eq!(inputs, [BOS, 2, eos]);
    assert_eq!(SequenceIndex::new(tokens, 4, false, "rows").unwrap().stats.loss_tokens, 9);

    let prompts = source(&fixture, "prompts.jsonl", "{\"prompt\": \"a\", \"completion\": \"b\"}\n");
    assert_eq!(ids(&load(&prompts, &bos)), [BOS, 0, 1, eos]);
    let chat = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#;
    let chats = source(&fixture, "chats.jsonl", chat);
    let trained = TrainedModel::open(fixture.folder(), None).unwrap();
    let chat = |trained: &TrainedModel| {
        let mut loader = DatasetBuilder { options: trained.dataset_options(), ..DatasetBuilder::new(fixture.folder()) };
        ids(&loader.load_unsplit(&chats, &trained.tokenizer).unwrap().0)
    };
    // The model has no template, so the plain one begins with the token.
    assert_eq!(chat(&trained)[..2], [BOS, 0]);
    let mut templated = trained;
    templated.chat.template = Some(
        "{{ bos_token }}{% for m in messages %}{% generation %} {{ m.content }}{% endgeneration %}{% endfor %}".into(),
    );
    assert_eq!(chat(&templated), [BOS, 0, 1]);
    // Bits per byte are exact: the token stands for no byte.
    let text = source(&fixture, "text.txt", "a b c d");
    let (tokens, bytes) = DatasetBuilder::new(fixture.folder()).load_unsplit(&text, &bos).unwrap();
    assert_eq!((tokens.len(), bytes), (5, 7.0 / 4.0));
    let grammar = DatasetBuilder::new(fixture.folder()).load(&DataSource::Grammar, None, &Tokenizer::byte());
    assert_eq!(grammar.unwrap().train.len() % 2, 0);
}

/// transformers' tokenizer has this token as `eos_token`, and TRL appends it to completions.
#[test]
fn documents_end_with_the_eos_token_of_the_model() {
    let fixture = model(false, None);
    let rows = source(&fixture, "rows.jsonl", "{\"prompt\": \"a\", \"completion\": \"b\"}\n");
    for (config, expected) in [
        (json!({}), BOS + 1),
        (json!({"eos_token": {"content": "<s>"}}), BOS),
        (json!({"eos_token": "z"}), 25),
        (json!({"eos_token": "missing"}), BOS + 1),
        (json!({"eos_token": null}), BOS + 1),
    ] {
        fixture.write("tokenizer_config.json", config.to_string());
        let trained = TrainedModel::open(fixture.folder(), None).unwrap();
        assert_eq!(trained.tokenizer.eos_id(), Some(expected), "{config}");
        assert!(trained.stop_token_ids().unwrap().contains(&expected), "{config}");
        // Each has its own token cache.
        let loaded = DatasetBuilder::new(fixture.folder()).load_unsplit(&rows, &trained.tokenizer).unwrap().0;
        assert_eq!(ids(&loaded), [0, 1, expected], "{config}");
    }
}

/// A run keeps its setting.
#[test]
fn a_run_keeps_its_rule() {
    let fixture = model(true, None);
    let flags = "--data text.txt --seq-len 8 --batch-size 2 --threads 1 --plain --set train.sample_tokens=0";
    for (run, rule) in [("without", "never"), ("with", "auto")] {
        fixture.said(&format!("--model . --run {run} --steps 2 --bos {rule} {flags}"));
    }
    fixture.said("--resume without --steps 4 --plain");
    fixture.said("--resume with --steps 4 --plain");
    fixture.assert_refused("--resume without --steps 6 --bos auto", &["bos: was \"never\" and is now \"auto\""]);

    // The run's checkpoints and exports have the token that it was trained with.
    for (run, expected) in [("without", None), ("with", Some(BOS))] {
        let step = fixture.path(format!("checkpoints/{run}/step-000004"));
        assert_eq!(TrainedModel::open(&step, None).unwrap().tokenizer.bos(), expected, "{run}");
        fixture.said(&format!("export {run} out-{run}"));
        assert_eq!(
            TrainedModel::open(&fixture.path(format!("out-{run}")), None).unwrap().tokenizer.bos(),
            expected,
            "{run}"
        );
    }
    let shown = fixture.said("data show --model . --data text.txt --seq-len 8");
    assert!(shown.contains("<s>"), "{shown}");
}

/// Nothing can read a tokenizer with the configuration of a different one, not even transformers.
#[test]
fn another_tokenizer_does_not_get_the_configuration_of_the_models_own() {
    let fixture = model(true, None);
    let special = |content: &str| json!({"content": content, "special": true});
    let config = json!({
        "bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ eos_token }}",
        "added_tokens_decoder": {"26": special("<s>"), "27": special("</s>")},
    });
    fixture.write("tokenizer_config.json", config.to_string());
    fixture.write("special_tokens_map.json", r#"{"pad_token": "<s>"}"#);
    let mut other: Value = serde_json::from_slice(&fs::read(fixture.path("tokenizer.json")).unwrap()).unwrap();
    other["post_processor"] = Value::Null;
    other["added_tokens"] = json!([]);
    other["model"]["vocab"] = ('a'..='z').zip(1..).map(|(letter, id)| (letter.to_string(), Value::from(id))).collect();
    other["model"]["vocab"]["</s>"] = 0.into();
    fs::create_dir(fixture.path("other")).unwrap();
    fixture.write("other/tokenizer.json", other.to_string());
    let flags = "--tokenizer other/tokenizer.json --data text.txt --seq-len 8 --batch-size 2 --threads 1 --plain";
    for (run, more) in [("whole", ""), ("adapters", "--lora r=2")] {
        fixture.said(&format!("--model . --run {run} --steps 2 --set train.sample_tokens=0 {flags} {more}"));
        fixture.said(&format!("--resume {run} --steps 4 --plain"));
        fixture.said(&format!("generate {run} --prompt a --max-tokens 2"));
        fixture.said(&format!("export {run} {run}-out --merge"));
    }
    fixture.said("export . folder-out --tokenizer other/tokenizer.json");
    // The tokenizer's own configuration has precedence.
    fixture.write("other/tokenizer_config.json", r#"{"eos_token": "z", "chat_template": "{{ bos_token }}"}"#);
    fixture.said("export . beside-out --tokenizer other/tokenizer.json");
    fixture.said(&format!("--model tiny --run drawn --steps 2 --set train.sample_tokens=0 {flags}"));
    for (folder, eos, template) in [
        ("checkpoints/whole/step-000004", 0, "{{ eos_token }}"),
        ("checkpoints/adapters/step-000004", 0, "{{ eos_token }}"),
        ("whole-out", 0, "{{ eos_token }}"),
        ("adapters-out", 0, "{{ eos_token }}"),
        ("folder-out", 0, "{{ eos_token }}"),
        ("beside-out", 26, "{{ bos_token }}"),
        ("checkpoints/drawn/step-000002", 26, "{{ bos_token }}"),
    ] {
        let path = fixture.path(folder);
        // The adapters' base is named `.`.
        let trained = TrainedModel::open_with(&path, None, &mut |_, _| Ok(fixture.path(""))).unwrap();
        assert_eq!(serde_json::from_slice::<Value>(trained.tokenizer.json()).unwrap(), other, "{folder}");
        assert_eq!((trained.tokenizer.bos(), trained.tokenizer.eos_id()), (None, Some(eos)), "{folder}");
        assert_eq!(trained.chat.template.as_deref(), Some(template), "{folder}");
        assert!(!path.join("special_tokens_map.json").exists(), "{folder}");
        let config = fs::read_to_string(path.join("tokenizer_config.json")).unwrap();
        assert!(!config.contains("<s>"), "{folder}: {config}");
    }
}
