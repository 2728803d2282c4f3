//! Preference pairs, labelled answers and weighted samples: from files to batches.

use crate::common::cli_fixture::CliFixture;
use crate::common::python::{python_with, run_script};
use crate::common::{launch, of_kind};
use finetune::data::{
    BatchLoader, DataSource, Dataset, DatasetBuilder, DatasetKind, DatasetOptions, IGNORE_INDEX, SampleKind,
    SequenceRole, Tokenizer,
};
use finetune::telemetry::{Event, ObjectiveMetric};
use finetune::train::{ObjectiveKind, ObjectiveSection};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Loads `content` as file `name`; without validation data.
fn load(folder: &Path, name: &str, content: &str, samples: SampleKind) -> finetune::Result<Dataset> {
    let path = folder.join(name);
    fs::write(&path, content).unwrap();
    let options = DatasetOptions { samples, ..DatasetOptions::default() };
    DatasetBuilder { options, ..DatasetBuilder::new(folder) }.load(&DataSource::Path(path), None, &Tokenizer::byte())
}

fn refusal(name: &str, content: &str, samples: SampleKind) -> String {
    let folder = tempfile::tempdir().unwrap();
    load(folder.path(), name, content, samples).unwrap_err().to_string()
}

/// The sequences of the training and validation data: text, the text in the loss, and role.
fn sequences(data: &Dataset) -> Vec<(String, String, SequenceRole)> {
    let mut found = Vec::new();
    for tokens in [&data.train, &data.validation] {
        let mut loader = BatchLoader::new(tokens.clone(), 1, 256, 0).unwrap();
        let mut batch = loader.batch();
        while loader.position().epoch == 0 {
            loader.next_batch(&mut batch);
            for sequence in &batch.sequences {
                let text = |ids: &[u32]| -> String {
                    let ids = ids.iter().filter(|&&id| id != IGNORE_INDEX);
                    ids.map(|&id| if id < 256 { char::from(id as u8) } else { '$' }).collect()
                };
                let row = sequence.labels.clone();
                found.push((sequence.index, text(&batch.inputs[row.clone()]), text(&batch.labels[row]), sequence.role));
            }
        }
    }
    found.sort_by_key(|(index, ..)| *index);
    let numbers: Vec<u64> = found.iter().map(|(index, ..)| *index).collect();
    assert_eq!(numbers, (0..found.len() as u64).collect::<Vec<_>>(), "every sequence has its number");
    found.into_iter().map(|(_, text, in_loss, role)| (text, in_loss, role)).collect()
}

fn owned(expected: &[(&str, &str, SequenceRole)]) -> Vec<(String, String, SequenceRole)> {
    expected.iter().map(|&(text, in_loss, role)| (text.to_owned(), in_loss.to_owned(), role)).collect()
}

#[test]
fn pairs_of_every_format_are_the_same_sequences() {
    let expected = owned(&[
        ("1+1=2", "2$", SequenceRole::Chosen),
        ("1+1=3", "3$", SequenceRole::Rejected),
        ("2+2=4", "4$", SequenceRole::Chosen),
        ("2+2=22", "22$", SequenceRole::Rejected),
    ]);
    for (name, content) in [
        (
            "a.jsonl",
            "{\"prompt\": \"1+1=\", \"chosen\": \"2\", \"rejected\": \"3\"}\n{\"chosen\": \"4\", \"rejected\": \"22\", \"prompt\": \"2+2=\"}\n",
        ),
        (
            "a.json",
            "[{\"chosen\": \"1+1=2\", \"rejected\": \"1+1=3\"}, {\"chosen\": \"2+2=4\", \"rejected\": \"2+2=22\", \"id\": 7}]",
        ),
        ("a.csv", "prompt,chosen,rejected\n1+1=,2,3\n2+2=,4,22\n"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let data = load(folder.path(), name, content, SampleKind::Preference).unwrap();
        assert_eq!((data.train.kind(), data.train.samples()), (DatasetKind::PromptCompletion, SampleKind::Preference));
        assert_eq!(sequences(&data), expected, "{name}");
        let cached = load(folder.path(), name, content, SampleKind::Preference).unwrap();
        assert_eq!((sequences(&cached), cached.fingerprint), (expected.clone(), data.fingerprint), "{name}");
    }
}

#[test]
fn only_the_answers_after_the_prompt_of_a_conversation_are_in_the_loss() {
    let turn = |role: &str, content: &str| serde_json::json!({"role": role, "content": content});
    let prompt = [turn("user", "a"), turn("assistant", "b"), turn("user", "c")];
    let with = |answer: &str| [&prompt[..], &[turn("assistant", answer)]].concat();
    let row = serde_json::json!({"chosen": with("d"), "rejected": with("e")});
    let explicit = serde_json::json!({
        "prompt": prompt, "chosen": [turn("assistant", "d")], "rejected": [turn("assistant", "e")],
    });
    let folder = tempfile::tempdir().unwrap();
    let data = load(folder.path(), "a.jsonl", &format!("{row}\n{explicit}\n"), SampleKind::Preference).unwrap();
    let text = |answer: &str| format!("user: a\nassistant: b$\nuser: c\nassistant: {answer}$");
    let pair = [("d", SequenceRole::Chosen), ("e", SequenceRole::Rejected)];
    let expected: Vec<_> =
        pair.iter().cycle().take(4).map(|(answer, role)| (text(answer), format!(" {answer}$"), *role)).collect();
    assert_eq!(sequences(&data), expected);
    assert_eq!(data.train.kind(), DatasetKind::Conversational);
}

#[test]
fn labelled_answers_are_good_or_bad() {
    let rows = "{\"prompt\": \"p\", \"completion\": \"c\", \"label\": true}\n\
                {\"prompt\": [{\"role\": \"user\", \"content\": \"p\"}], \
                 \"completion\": [{\"role\": \"assistant\", \"content\": \"d\"}], \"label\": false}\n";
    let folder = tempfile::tempdir().unwrap();
    let data = load(folder.path(), "a.jsonl", rows, SampleKind::UnpairedPreference).unwrap();
    let expected =
        [("pc", "c$", SequenceRole::Desirable), ("user: p\nassistant: d$", " d$", SequenceRole::Undesirable)];
    assert_eq!(sequences(&data), owned(&expected));
    let table =
        load(folder.path(), "a.csv", "prompt,completion,label\np,c,True\np,d,false\n", SampleKind::UnpairedPreference);
    let expected = [("pc", "c$", SequenceRole::Desirable), ("pd", "d$", SequenceRole::Undesirable)];
    assert_eq!(sequences(&table.unwrap()), owned(&expected));
    let message =
        refusal("a.jsonl", "{\"prompt\": \"p\", \"completion\": \"c\", \"label\": 2}", SampleKind::UnpairedPreference);
    assert!(message.contains("a.jsonl: line 1: `label` must be true or false, but is 2"), "{message}");
    // The label has no meaning for plain fine-tuning.
    assert_eq!(load(folder.path(), "a.jsonl", rows, SampleKind::Plain).unwrap().train.samples(), SampleKind::Plain);
}

#[test]
fn a_weight_belongs_to_its_sample() {
    let rows = "{\"prompt\": \"p\", \"completion\": \"c\", \"weight\": 0.5}\n{\"prompt\": \"p\", \"completion\": \"d\"}\n\
                {\"prompt\": \"p\", \"completion\": \"e\", \"weight\": 3}\n";
    let folder = tempfile::tempdir().unwrap();
    let data = load(folder.path(), "a.jsonl", rows, SampleKind::Plain).unwrap();
    let expected = [
        ("pc", "c$", SequenceRole::Weighted(0.5)),
        ("pd", "d$", SequenceRole::Weighted(1.0)),
        ("pe", "e$", SequenceRole::Weighted(3.0)),
    ];
    assert_eq!(sequences(&data), owned(&expected));
    let message = refusal("a.csv", "prompt,completion,weight\np,c,1\np,d,heavy\n", SampleKind::Plain);
    assert!(message.contains("a.csv: line 3: `weight` must be a number of at least 0, but is heavy"), "{message}");
}

#[test]
fn data_that_does_not_fit_the_objective_is_refused_with_the_one_that_does() {
    let pair = "{\"prompt\": \"p\", \"chosen\": \"c\", \"rejected\": \"d\"}\n";
    let sample = "{\"prompt\": \"p\", \"completion\": \"c\"}\n";
    let labelled = "{\"prompt\": \"p\", \"completion\": \"c\", \"label\": true}\n";
    let pair_of_chats = pair.replace('}', ", \"messages\": [{\"role\": \"user\", \"content\": \"p\"}]}");
    for (name, content, samples, expected) in [
        ("a.jsonl", pair, SampleKind::Plain, ["line 1: contains pairs", "use `--objective dpo`"]),
        ("a.jsonl", pair, SampleKind::UnpairedPreference, ["line 1: contains pairs", "use `--objective dpo`"]),
        (
            "a.jsonl",
            sample,
            SampleKind::Preference,
            ["needs pairs, in rows with `prompt`, `chosen`", "`--objective sft`"],
        ),
        ("a.txt", "words", SampleKind::Preference, ["contains text, but needs pairs", "`--objective sft`"]),
        ("a.jsonl", labelled, SampleKind::Preference, ["contains completions with a `label`", "use `--objective kto`"]),
        ("a.jsonl", &pair_of_chats, SampleKind::UnpairedPreference, ["contains pairs", "use `--objective dpo`"]),
        (
            "a.jsonl",
            "{\"prompt\": \"p\", \"chosen\": \"c\"}",
            SampleKind::Preference,
            ["line 1: has `chosen`, but `rejected` is missing", ""],
        ),
    ] {
        let message = refusal(name, content, samples);
        assert!(message.starts_with("a.") || message.contains(name), "{message}");
        assert!(expected.iter().all(|part| message.contains(part)), "{content} {samples:?}: {message}");
    }
    let folder = tempfile::tempdir().unwrap();
    let options = DatasetOptions { samples: SampleKind::Preference, ..DatasetOptions::default() };
    let mut loader = DatasetBuilder { options, ..DatasetBuilder::new(folder.path()) };
    let message = loader.load(&DataSource::Grammar, None, &Tokenizer::byte()).unwrap_err().to_string();
    assert!(message.contains("grammar: contains text, but needs pairs"), "{message}");
    // Rows may have the fields of both.
    let both = "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": \"b\"}], \
                \"chosen\": \"ab\", \"rejected\": \"ac\"}\n";
    for samples in [SampleKind::Plain, SampleKind::Preference] {
        assert_eq!(load(folder.path(), "b.jsonl", &both.repeat(2), samples).unwrap().train.samples(), samples);
    }
}

#[test]
fn identical_answers_are_refused_with_their_number_and_the_first_line() {
    let row = |answer: &str| format!("{{\"prompt\": \"p\", \"chosen\": \"c\", \"rejected\": \"{answer}\"}}\n");
    let rows = [row("d"), row("c"), row("e"), row("c")].concat();
    let message = refusal("a.jsonl", &rows, SampleKind::Preference);
    let expected = "a.jsonl: line 2: `chosen` and `rejected` are identical (2 such rows); a pair needs a better and a \
                    worse answer, so remove them";
    assert!(message.contains(expected), "{message}");
}

#[test]
fn the_built_in_pairs_prefer_a_form() {
    let folder = tempfile::tempdir().unwrap();
    let sources: [DataSource; 2] = ["preferences", "preferences-held-out"].map(|name| name.parse().unwrap());
    let options = DatasetOptions { samples: SampleKind::Preference, ..DatasetOptions::default() };
    let mut loader = DatasetBuilder { options, ..DatasetBuilder::new(folder.path()) };
    let data = loader.load(&sources[0], Some(&sources[1]), &Tokenizer::byte()).unwrap();
    let chosen = |text: &str| text.starts_with(" The ") && text.contains(" is in drawer ");
    let (mut right, mut wrong) = (0, 0);
    for tokens in [&data.train, &data.validation] {
        let mut loader = BatchLoader::new(tokens.clone(), 4, 256, 0).unwrap();
        let mut batch = loader.batch();
        while loader.position().epoch == 0 {
            loader.next_batch(&mut batch);
            for sequence in &batch.sequences {
                let labels = batch.labels[sequence.labels.clone()].iter().filter(|&&id| id < 256);
                let answer: String = labels.map(|&id| char::from(id as u8)).collect();
                assert!(answer.contains("rawer ") && answer.ends_with('.'), "{answer}");
                match sequence.role {
                    SequenceRole::Chosen => right += usize::from(chosen(&answer)),
                    _ => wrong += usize::from(chosen(&answer)),
                }
            }
        }
    }
    assert!(right == 660 && wrong == 0, "{right} {wrong}");
}

#[test]
fn the_command_shows_both_sides_of_a_pair_and_counts_them() {
    let desk = CliFixture::empty();
    let rows = "{\"prompt\": \"1+1=\", \"chosen\": \"2\", \"rejected\": \"33\"}\n".repeat(10);
    desk.write("pairs.jsonl", rows);
    let flags = "--model tiny --data pairs.jsonl --objective dpo --seq-len 32";
    let shown = desk.said(&format!("data show {flags}"));
    let pair = "the first pair, with its loss tokens in [brackets]:\n  chosen:\n  1+1=[2<|endoftext|>]\n  rejected:\n  \
                1+1=[33<|endoftext|>]\n";
    assert!(shown.contains(pair) && shown.starts_with("9 pairs in 18 rows, "), "{shown}");
    let counted = desk.said(&format!("data stats {flags}"));
    for line in [
        "pairs             9\n",
        "chosen            2.0 loss tokens on average, at most 2\n",
        "longer            chosen in 0 pairs, rejected in 9, 0 ties\n",
        "identical         0 pairs after truncation, left out\n",
        "validation        1 pair with ",
    ] {
        assert!(counted.contains(line), "{counted}");
    }
    desk.assert_refused(
        "data show --model tiny --data pairs.jsonl --seq-len 32",
        &["pairs.jsonl: line 1: contains pairs", "`--objective dpo`"],
    );
}

/// TRL starts from the same adapters, exported by a run of one step with a negligible learning rate.
#[test]
fn ten_dpo_steps_agree_with_trl() {
    let Some(python) = python_with("trl") else { return };
    let desk = CliFixture::new();
    let pair = |prompt: &str, chosen: &str, rejected: &str| {
        serde_json::json!({ "prompt": prompt, "chosen": chosen, "rejected": rejected }).to_string() + "\n"
    };
    desk.write(
        "pairs.jsonl",
        pair("the sky is", " blue", " a red") + &pair("1+1=", "2", "11") + &pair("a", "b, c", " d"),
    );
    let train = |run: &str, steps: usize, lr: &str, more: &str| {
        desk.said(&format!(
            "--model model --data pairs.jsonl --val pairs.jsonl --objective dpo --batch-size 3 --seq-len 32 --dtype fp32 --steps \
             {steps} --lr {lr} --schedule constant --warmup-steps 0 --weight-decay 0 --set train.sample_tokens=0 --run {run} \
             --plain {more}"
        ))
    };
    let lora = "--lora r=4,alpha=8";
    let [full_lr, adapter_lr] = ["1e-3", "1e-2"];
    train("full", 10, full_lr, "");
    train("adapters", 10, adapter_lr, lora);
    train("begun", 1, "1e-30", lora);
    desk.said("export begun adapter");
    let paths = ["model", "pairs.jsonl", "adapter"].map(|name| desk.path(name));
    let [model, pairs, adapter] = paths.each_ref().map(|path| path.as_os_str());
    let arguments = [model, pairs, "10".as_ref(), full_lr.as_ref(), adapter, adapter_lr.as_ref()];
    let trl = run_script(&python, "trl_dpo.py", &arguments);
    for (run, trl) in ["full", "adapters"].into_iter().zip(trl.as_array().unwrap()) {
        let steps = desk.steps(run);
        assert_eq!(steps.len(), 10);
        for (at, step) in steps.iter().enumerate() {
            let metrics = step.objective.unwrap();
            let found = [
                ("loss", f64::from(step.loss)),
                ("chosen", metrics.get(ObjectiveMetric::RewardsChosen).unwrap()),
                ("rejected", metrics.get(ObjectiveMetric::RewardsRejected).unwrap()),
            ];
            for (name, found) in found {
                let expected = trl[name][at].as_f64().unwrap();
                assert!((found - expected).abs() <= 1e-4, "{run}, step {at}, {name}: {found}, TRL's is {expected}");
            }
        }
        assert!(steps[9].loss < 0.9 * steps[0].loss, "{run} learns nothing");
    }
    let [dpo, kto, grpo] = [ObjectiveKind::Dpo, ObjectiveKind::Kto, ObjectiveKind::Grpo]
        .map(|kind| ObjectiveSection { kind, ..ObjectiveSection::default() });
    let defaults = json!([
        {"beta": dpo.beta(), "label_smoothing": dpo.label_smoothing},
        {"beta": kto.beta(), "desirable_weight": kto.desirable_weight, "undesirable_weight": kto.undesirable_weight},
        {
            "beta": grpo.beta(),
            "epsilon": grpo.epsilon,
            "max_completion_length": grpo.max_completion_length,
            "num_generations": grpo.num_generations,
            "num_iterations": grpo.num_iterations,
        },
    ]);
    assert_eq!(trl[2], defaults);
}

/// A reward program that fails ends the run after it was saved, also in several processes; mended, the run continues.
#[test]
fn a_run_survives_a_reward_program_that_fails() {
    let desk = CliFixture::empty();
    // It fails after the step whose number is in a file.
    let program = r#"while read -r line; do
        if [ -e broken ] && grep -q "\"step\":$(cat broken)," checkpoints/sums/rollouts.jsonl; then echo oops; else echo 1; fi
    done"#;
    desk.write("score.sh", program);
    let base = "--data sums --objective grpo --num-generations 2 --max-completion-length 3 --batch-size 2 --seq-len 32 \
                --steps 4 --set train.sample_tokens=0 --set train.eval_batches=1 --plain --run sums";
    let with = |more: &str| {
        let words: Vec<&str> = base.split_whitespace().chain(more.split_whitespace()).collect();
        desk.command_of(&[&words[..], &["--reward", "sh score.sh"]].concat()).output().unwrap()
    };
    assert!(with("--set objective.reward_timeout_s=9").status.success());
    let shown = fs::read_to_string(desk.run("sums").join("rollouts.jsonl")).unwrap();
    assert_eq!(shown.lines().count(), 4 * 2 * 2);
    assert!(shown.lines().all(|line| line.contains("\"reward\":1.0,\"advantage\":0.0")), "{shown}");
    assert!(desk.steps("sums").iter().all(|step| step.objective.unwrap().get(ObjectiveMetric::Reward) == Some(1.0)));
    // During the second step, and during the last evaluation.
    for (step, steps, completions) in [(5, 6, 4), (6, 6, 2), (7, 8, 4), (8, 8, 2)] {
        desk.write("broken", step.to_string());
        let processes = if step < 7 { 1 } else { 2 };
        let (code, _, err) = desk.output(&format!("--resume sums --steps {steps} --processes {processes} --plain"));
        assert_eq!(code, Some(2), "{err}");
        let message = format!(
            "the reward program `sh score.sh`: it wrote `oops`, neither a finite number nor `none`, twice, for completion 1 of {completions}"
        );
        assert!(err.contains(&message) && err.contains("objective.on_reward_error=drop"), "{err}");
        assert!(desk.newest("sums").ends_with(format!("step-00000{step}")));
    }
    fs::remove_file(desk.path("broken")).unwrap();
    desk.said("--resume sums --steps 8 --plain");
    fs::create_dir(desk.path("elsewhere")).unwrap();
    let resume = format!("--resume {} --steps 9 --plain", desk.run("sums").display());
    launch::succeed(desk.command(&resume).current_dir(desk.path("elsewhere")));
    assert_eq!(desk.steps("sums").last().unwrap().step, 9);
    // A log that cannot be written costs a warning, not one per step.
    let log = desk.run("sums").join("rollouts.jsonl");
    fs::remove_file(&log).unwrap();
    fs::create_dir(&log).unwrap();
    desk.said("--resume sums --steps 12 --plain");
    let about_log = |event: &Event| matches!(event, Event::Warning(it) if it.message.contains("rollouts.jsonl"));
    assert_eq!(desk.events("sums").iter().filter(|event| about_log(event)).count(), 1);
    desk.assert_refused("--data sums --objective grpo --plain", &["objective.reward: is missing", "--reward exact"]);
    desk.assert_refused("--data sums --reward exact --plain", &["--objective grpo"]);
    // A run that ended at such a row could not be resumed with other data.
    desk.write(
        "half.jsonl",
        "{\"prompt\": \"a\", \"completion\": \"b\"}\n{\"prompt\": \"c\", \"completion\": \" \"}\n",
    );
    let line = "--objective grpo --reward exact --seq-len 32 --plain";
    for (data, split) in [("--data half.jsonl --val none", "training"), ("--data sums --val half.jsonl", "validation")]
    {
        let message = format!("the {split} data: row 2: `c` has no right answer, which `--reward exact` needs");
        desk.assert_refused(&format!("{data} {line}"), &[&message]);
    }
    desk.assert_refused(
        "--data sums --objective grpo --reward no-such-program --seq-len 32 --plain",
        &["program `no-such-program` was not found"],
    );
    // Regression: nothing was shown while completions were sampled and rewarded.
    desk.write("score.sh", program.replace("do\n", "do sleep 0.2\n"));
    let shown = desk.said("--resume sums --steps 13 --plain");
    assert!(shown.contains("sampling completions"), "{shown}");
}

/// As in TRL; the rows belong to their prompts in mixtures, in a held-out tail and in a validation text.
#[test]
fn a_reward_program_reads_all_fields_of_a_row() {
    let desk = CliFixture::empty();
    for set in ["a", "b", "v"] {
        let row = |n: usize| json!({"prompt": format!("{set}{n}"), "answer": n, "of": {"set": set}}).to_string() + "\n";
        desk.write(&format!("{set}.jsonl"), (0..20).map(row).collect::<String>());
    }
    desk.write("score.sh", "while read -r line; do printf '%s\\n' \"$line\" >> seen.jsonl; echo 1; done");
    for (flags, sets) in [("", vec!["a", "b"]), ("--val v.jsonl", vec!["a", "b", "v"])] {
        let line = format!(
            "--data a.jsonl=0.5 --data b.jsonl=0.5 {flags} --objective grpo --num-generations 2 --max-completion-length 3 --batch-size 4 \
             --seq-len 32 --steps 6 --set train.sample_tokens=0 --plain"
        );
        let words: Vec<&str> = line.split_whitespace().collect();
        launch::succeed(&mut desk.command_of(&[&words[..], &["--reward", "sh score.sh"]].concat()));
        let seen = fs::read_to_string(desk.path("seen.jsonl")).unwrap();
        let mut found = BTreeSet::new();
        for line in seen.lines() {
            let row: Value = serde_json::from_str(line).unwrap();
            let set = row["of"]["set"].as_str().unwrap().to_owned();
            assert_eq!(row["prompt"], format!("{set}{}", row["answer"]), "{line}");
            assert!(row["completion"].is_string(), "{line}");
            found.insert(set);
        }
        assert!(found.iter().eq(&sets), "{found:?}");
        fs::remove_file(desk.path("seen.jsonl")).unwrap();
    }
}

#[test]
fn a_model_that_cannot_sample_has_diverged() {
    let desk = CliFixture::empty();
    desk.model("model", |_| {});
    let path = desk.path("model/model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let header = 8 + usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
    // FP16 has these weights, but not their products.
    bytes[header..].chunks_exact_mut(4).for_each(|weight| weight.copy_from_slice(&6e4f32.to_le_bytes()));
    fs::write(&path, bytes).unwrap();
    let (code, _, err) = desk.output(
        "--model model --data sums --objective grpo --reward length:2 --num-generations 2 --max-completion-length 3 --batch-size 2 \
         --seq-len 40 --steps 2 --set train.sample_tokens=0 --val none --dtype fp16 --plain --run sums",
    );
    assert!(err.contains("the model cannot sample a completion: its logits are not finite"), "{err}");
    assert_eq!(code, Some(3), "{err}");
    assert!(desk.events("sums").iter().any(|event| matches!(event, Event::Diverged(_))));
}

/// Instruction-tuned models often list the token that ends a turn only there.
#[test]
fn a_sampled_completion_ends_at_a_token_that_ends_a_text_in_the_generation_config() {
    let desk = CliFixture::empty();
    desk.model("model", |_| {});
    let line = "--model model --data sums --objective grpo --reward length:1 --num-generations 2 --max-completion-length 3 \
                --batch-size 2 --seq-len 40 --steps 1 --set train.sample_tokens=0 --set train.eval_batches=1 --plain";
    let longest = |run: &str| {
        desk.said(&format!("{line} --run {run}"));
        let rollouts = fs::read_to_string(desk.run(run).join("rollouts.jsonl")).unwrap();
        let completion = |line| serde_json::from_str::<Value>(line).unwrap()["completion"].as_str().unwrap().len();
        rollouts.lines().map(completion).max().unwrap()
    };
    assert!(longest("before") >= 2);
    desk.write("model/generation_config.json", json!({"eos_token_id": (0..257).collect::<Vec<u32>>()}).to_string());
    assert_eq!(longest("after"), 0);
    let rollouts = fs::read_to_string(desk.run("after").join("rollouts.jsonl")).unwrap();
    assert!(rollouts.lines().all(|line| line.contains("\"reward\":0.0")), "the end adds no length: {rollouts}");
}

#[test]
fn prompts_may_have_answers_or_none() {
    let rows = "{\"prompt\": \"1+1=\", \"completion\": \"2\"}\n{\"prompt\": \"2+2=\", \"completion\": \"4\"}\n";
    let answered = owned(&[("1+1=2", "2$", SequenceRole::Prompt), ("2+2=4", "4$", SequenceRole::Prompt)]);
    let open = "{\"prompt\": \"1+1=\"}\n{\"prompt\": \"2+2=\"}\n";
    let alone = owned(&[("1+1=", "$", SequenceRole::Prompt), ("2+2=", "$", SequenceRole::Prompt)]);
    let chats = "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n{\"messages\": [{\"role\": \"user\", \"content\": \
                 \"a\"}, {\"role\": \"assistant\", \"content\": \"b\"}]}\n";
    let asked = owned(&[
        ("user: a\nassistant:", "$", SequenceRole::Prompt),
        ("user: a\nassistant:b", "b$", SequenceRole::Prompt),
    ]);
    for (content, expected) in [(rows, answered), (open, alone), (chats, asked)] {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(sequences(&load(folder.path(), "a.jsonl", content, SampleKind::Prompt).unwrap()), expected);
    }
    let message = refusal("a.jsonl", open, SampleKind::Plain);
    assert!(message.contains("has `prompt`, but `completion` is missing"), "{message}");
    let message = refusal("a.txt", "words", SampleKind::Prompt);
    assert!(message.contains("needs prompts") && message.contains("`--objective sft`"), "{message}");
    // Regression: the advice was to train on the text of rows without a known ending.
    let message = refusal("rows", open, SampleKind::Preference);
    assert!(message.contains("looks like jsonl"), "{message}");
}

/// Regressions: prompts were cut out of the whole conversation, and ends of lines were those of the template's file.
#[test]
fn a_prompt_ends_with_the_templates_own_start_of_an_answer() {
    let fixture = CliFixture::empty();
    let template = "{% for m in messages %}{{ m.role }}: {{ m.content }};\r\n{% endfor %}{% if add_generation_prompt %}\
                    assistant: {% if not thinks %}<think></think>{% endif %}{% endif %}";
    fixture.write("think.jinja", template);
    let answer = json!({"role": "assistant", "content": "4"});
    let row = json!({"messages": [{"role": "user", "content": "2+2"}, answer], "system": "Be brief"});
    fixture.write("answered.jsonl", row.to_string());
    let show = "data show --model tiny --val none --chat-template think.jinja";
    let shown = fixture.said(&format!("{show} --data answered.jsonl --objective grpo --reward exact"));
    assert!(shown.contains("system: Be brief;\n  user: 2+2;\n  assistant: <think></think>[4<|endoftext|>]"), "{shown}");
    let counts = "2 of them in right answers\nthe first sample, with its right answer in [brackets]:";
    assert!(shown.contains(counts), "{shown}");
    // Regression: instructions were left out before a prompt that is not a message, and if they are not text.
    let wrong = json!({"role": "assistant", "content": "5"});
    let row = json!({"system": "Be brief", "prompt": "2+2", "chosen": [answer], "rejected": [wrong]});
    fixture.write("pair.jsonl", row.to_string());
    let shown = fixture.said("data show --model tiny --val none --data pair.jsonl --objective dpo");
    assert!(shown.contains("system: Be brief\n  user: 2+2\n  assistant:[ 4<|endoftext|>]"), "{shown}");
    fixture.write("list.jsonl", json!({"messages": [answer], "system": ["Be brief"]}).to_string());
    fixture.assert_refused(&format!("{show} --data list.jsonl"), &["`system` must be text, but is a list"]);
}

/// The rewards are `beta` times the difference of both models' log-probabilities.
#[test]
fn a_run_compares_with_another_model() {
    let fixture = CliFixture::new();
    let row = |n: usize| format!("{{\"prompt\": \"{n}+1=\", \"chosen\": \"{}\", \"rejected\": \"no\"}}\n", n + 1);
    fixture.write("pairs.jsonl", (0..20).map(row).collect::<String>());
    fixture.said("--plain --model model --data text.txt --run sft --seq-len 32 --steps 4 --lr 1e-2");
    let first = |run: &str, model: &str| {
        let flags =
            "--plain --dtype fp32 --data pairs.jsonl --objective dpo --beta 0.5 --seq-len 32 --batch-size 1 --steps 1";
        fixture.said(&format!("{flags} --run {run} --model {model}"));
        fixture.steps(run).remove(0)
    };
    let digest = |run: &str| -> Value {
        let stored = fs::read(fixture.run(run).join("reference.json")).unwrap();
        serde_json::from_slice::<Value>(&stored).unwrap()["weights"].take()
    };
    let tuned = "checkpoints/sft/step-000004";
    let [before, after] = [first("before", "model"), first("after", tuned)].map(|step| step.objective.unwrap());
    let step = first("both", &format!("{tuned} --reference model"));
    let both = step.objective.unwrap();
    let sides = [
        (ObjectiveMetric::LogpsChosen, ObjectiveMetric::RewardsChosen),
        (ObjectiveMetric::LogpsRejected, ObjectiveMetric::RewardsRejected),
    ];
    let rewards = sides.map(|(logp, reward)| {
        let expected = 0.5 * (after.get(logp).unwrap() - before.get(logp).unwrap());
        let found = both.get(reward).unwrap();
        assert!(found != 0.0 && (found - expected).abs() < 1e-9, "{found}, not {expected}");
        found
    });
    let expected = (rewards[1] - rewards[0]).exp().ln_1p();
    assert!((f64::from(step.loss) - expected).abs() < 1e-6, "{}, not {expected}", step.loss);
    assert!(digest("both") == digest("before") && digest("both") != digest("after"));

    // Regression: a value that had changed on the disk was used.
    let path = fixture.run("both").join("reference.json");
    let text = fs::read_to_string(&path).unwrap();
    let last = text.rfind(|c: char| c.is_ascii_digit()).unwrap();
    let digit = if text[last..].starts_with('1') { "2" } else { "1" };
    fs::write(&path, format!("{}{digit}{}", &text[..last], &text[last + 1..])).unwrap();
    fixture.assert_refused("--resume both --steps 2 --plain", &["reference.json`", "it changed since it was written"]);

    fs::copy(fixture.path(tuned).join("model.safetensors"), fixture.path("model/model.safetensors")).unwrap();
    let message = fixture.refused("--plain --resume both --steps 2");
    assert!(message.contains("`model` has changed since the run began"), "{message}");
}

#[test]
fn the_best_checkpoint_may_follow_the_margin() {
    let fixture = CliFixture::empty();
    let margin = "--plain --steps 2 --eval-every 1 --seq-len 96 --set objective.validate_margin=true --run m";
    fixture.said(&format!("{margin} --data preferences --objective simpo --set train.eval_batches=2"));
    let margins: Vec<[f64; 2]> = of_kind!(fixture.events("m"), Event::Eval)
        .map(|eval| [eval.loss, eval.objective.unwrap().get(ObjectiveMetric::RewardsMargins).unwrap()])
        .collect();
    assert!(margins.len() == 2 && margins.iter().all(|[loss, margin]| *loss == -margin), "{margins:?}");
    let message = fixture.refused(&format!("{margin} --data chats"));
    assert!(message.contains("objective.validate_margin: has no use"), "{message}");
    // Regression: without a margin, the loss was that of the objective.
    let row = |good: bool| json!({"prompt": "p", "completion": "c", "label": good});
    fixture.write("both.jsonl", format!("{}\n{}\n", row(true), row(false)));
    fixture.write("good.jsonl", format!("{}\n{}\n", row(true), row(true)));
    let line = margin.replace("--run m", "--run k --objective kto --batch-size 2");
    fixture.said(&format!("{line} --data both.jsonl --val good.jsonl"));
    assert!(of_kind!(fixture.events("k"), Event::Eval).all(|eval| eval.loss.is_nan()));
}
