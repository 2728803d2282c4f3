//! The cached forward pass equals the training one, and generation is reproducible and stops as specified.

use crate::common::cli_fixture::CliFixture;
use crate::common::compare::{distance, values};
use crate::common::golden::{names, path as golden_path};
use crate::common::python::{python, run_script};
use candle_core::{DType, Device, Tensor};
use finetune::data::Tokenizer;
use finetune::engine::kernels::{CandleKernels, Fused, Kernels};
use finetune::engine::model::{
    Decoder, ForwardMode, InputIds, KvCache, ModelSpec, Parameters, Workspace, candle_dtype,
};
use finetune::inference::ModelView;
use finetune::inference::generate::{GenerationRequest, Sampling, StopReason, generate, generate_batch};
use finetune::precision::PrecisionPolicy;
use finetune::store::{StoredModel, WeightSource};
use finetune::train::{Config, Sampler};
use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A golden model with its weights in the policy's compute type.
fn golden(name: &str, policy: PrecisionPolicy) -> (Decoder, Parameters) {
    let model = StoredModel::open(&golden_path(name)).unwrap();
    let spec = model.spec().clone();
    let masters = Parameters::zeros(&spec.parameters(), DType::F32, &Device::Cpu).unwrap();
    WeightSource::Stored(model).read(&masters).unwrap();
    rounded(&spec, &masters, policy)
}

fn rounded(spec: &ModelSpec, masters: &Parameters, policy: PrecisionPolicy) -> (Decoder, Parameters) {
    let weights = masters.zeros_like(candle_dtype(policy.compute)).unwrap();
    for (weight, master) in weights.tensors().iter().zip(masters.tensors()) {
        finetune::engine::kernels::view::copy(master, weight).unwrap();
    }
    (Decoder::new(spec, &weights, Arc::new(Fused)).unwrap(), weights)
}

/// `tiny` with random weights, wide enough that it prefers different tokens at different places.
fn tiny(policy: PrecisionPolicy) -> (Decoder, Parameters) {
    let spec = ModelSpec { initializer_range: 0.3, ..ModelSpec::named("tiny").unwrap() };
    let masters = Parameters::random(&spec.parameters(), 5, &Device::Cpu).unwrap();
    rounded(&spec, &masters, policy)
}

/// Logits of every position by the training pass over the whole sequence.
fn full_logits(model: &Decoder, weights: &Parameters, policy: PrecisionPolicy, ids: &[u32]) -> Tensor {
    let mut workspace = Workspace::for_evaluation(model.spec(), policy, (1, ids.len()), &Device::Cpu).unwrap();
    model.forward(weights, InputIds::new(ids, ids.len()), ForwardMode::Eval, &mut workspace, &mut ()).unwrap();
    model.logits(weights, workspace.hidden()).unwrap()
}

/// Logits of every position by the cached pass, fed in pieces of these lengths.
fn cached_logits(cache: &mut KvCache, model: &Decoder, weights: &Parameters, ids: &[u32], pieces: &[usize]) -> Tensor {
    cache.truncate(0);
    let mut rest = ids;
    let logits: Vec<Tensor> = pieces
        .iter()
        .map(|&length| {
            let (piece, after) = rest.split_at(length);
            rest = after;
            let hidden = model.decode(weights, piece, cache).unwrap();
            model.logits(weights, hidden).unwrap()
        })
        .collect();
    assert!(rest.is_empty());
    assert_eq!(cache.reusable(model.spec(), 0, ids.len()), ids.len());
    Tensor::cat(&logits, 0).unwrap()
}

#[test]
fn a_prompt_without_tokens_is_an_error() {
    let policy = PrecisionPolicy::FP32;
    let sampling = Sampling::default();
    let (model, weights) = tiny(policy);
    let request = GenerationRequest { prompt: &[], max_tokens: 3, stop_token_ids: &[], sampling: &sampling };
    let mut cache = KvCache::new(model.spec(), policy, 8, &Device::Cpu).unwrap();
    let one = generate(&model, &weights, &mut cache, request, |_| Ok(true)).unwrap_err();
    let several =
        generate_batch(ModelView { decoder: &model, weights: &weights, policy }, &[request], 2, |_, _| Ok(()))
            .unwrap_err();
    for error in [one, several] {
        assert!(error.to_string().contains("has no tokens"), "{error}");
    }
}

#[test]
fn cached_logits_are_those_of_the_training_pass_however_the_tokens_come() {
    for name in ["narrow", "head64", "untied", "deep"] {
        for (policy, tolerance) in
            [(PrecisionPolicy::FP32, 1e-5), (PrecisionPolicy::FP16, 4e-3), (PrecisionPolicy::BF16, 3e-2)]
        {
            let (model, weights) = golden(name, policy);
            let length = model.spec().max_position_embeddings;
            let ids: Vec<u32> = (0..length).map(|i| (7 * i as u32 + 3) % model.spec().vocab_size as u32).collect();
            let truth = full_logits(&model, &weights, policy, &ids);
            for kernels in [Arc::new(Fused) as Arc<dyn Kernels>, Arc::new(CandleKernels)] {
                let by = kernels.name().to_owned();
                let model = Decoder::new(model.spec(), &weights, kernels).unwrap();
                let mut cache = KvCache::new(model.spec(), policy, length, &Device::Cpu).unwrap();
                for pieces in [vec![length], vec![1; length], vec![3, length - 5, 1, 1], vec![length - 1, 1]] {
                    let logits = cached_logits(&mut cache, &model, &weights, &ids, &pieces);
                    let distance = distance(&values(&logits), &values(&truth));
                    assert!(distance < tolerance, "{name}, {policy}, {by}, pieces of {pieces:?}: {distance}");
                }
            }
        }
    }
}

#[test]
fn a_truncated_cache_goes_on_from_there() {
    let (model, weights) = golden("deep", PrecisionPolicy::FP32);
    let mut cache = KvCache::new(model.spec(), PrecisionPolicy::FP32, 12, &Device::Cpu).unwrap();
    model.decode(&weights, &[1, 2, 3, 4, 5, 6], &mut cache).unwrap();
    cache.truncate(3);
    let after = model.decode(&weights, &[9, 8], &mut cache).unwrap().copy().unwrap();
    cache.truncate(0);
    let whole = model.decode(&weights, &[1, 2, 3, 9, 8], &mut cache).unwrap().narrow(0, 3, 2).unwrap();
    assert!(distance(&values(&after), &values(&whole)) < 1e-6);
}

/// Prepares a cache for each prompt and capacity in turn, and decodes the tokens after those that it must keep.
fn check_prepared(
    (model, weights): &(Decoder, Parameters),
    policy: PrecisionPolicy,
    prompts: &[(Vec<u32>, usize, usize)],
) {
    let mut cache = KvCache::empty(policy, &Device::Cpu);
    for (prompt, capacity, kept) in prompts {
        cache.prepare(model.spec(), prompt, *capacity).unwrap();
        assert_eq!(cache.reusable(model.spec(), 0, prompt.len()), *kept, "{policy}: {prompt:?}");
        assert!(cache.capacity() >= *capacity);
        let hidden = model.decode(weights, &prompt[*kept..], &mut cache).unwrap();
        let logits = model.logits(weights, hidden).unwrap();
        let all = full_logits(model, weights, policy, prompt).narrow(0, *kept, prompt.len() - kept).unwrap();
        assert_eq!(values(&logits), values(&all), "{policy}: {prompt:?}");
    }
}

#[test]
fn a_prepared_cache_keeps_the_tokens_that_the_prompt_begins_with() {
    let prompts =
        [(vec![1, 2, 3], 8, 0), (vec![1, 2, 3, 9, 8], 20, 3), (vec![1, 2, 3, 9, 8], 10, 4), (vec![2; 30], 30, 0)];
    for policy in [PrecisionPolicy::FP32, PrecisionPolicy::FP16, PrecisionPolicy::BF16] {
        check_prepared(&tiny(policy), policy, &prompts);
    }
}

/// A convolution's cache has the last tokens only, and a state has all of them in one.
#[test]
fn a_cache_of_recurrences_goes_back_one_token_or_to_the_start() {
    let policy = PrecisionPolicy::FP32;
    let prompts = [(vec![1, 2, 3, 4, 5, 6], 12, 0), (vec![1, 2, 3, 4, 5, 7, 8], 12, 5), (vec![1, 2, 3, 9], 12, 0)];
    check_prepared(&golden("families/lfm2", policy), policy, &prompts);
    let prompts = [(vec![1, 2, 3], 12, 0), (vec![1, 2, 3, 4, 5], 12, 3), (vec![1, 2, 3, 4, 7, 8], 12, 0)];
    check_prepared(&golden("families/qwen3_5", policy), policy, &prompts);
}

#[test]
fn a_cache_refuses_what_does_not_fit() {
    let (model, weights) = golden("narrow", PrecisionPolicy::FP32);
    let context = model.spec().max_position_embeddings;
    assert!(KvCache::new(model.spec(), PrecisionPolicy::FP32, context + 1, &Device::Cpu).is_err());
    let mut cache = KvCache::new(model.spec(), PrecisionPolicy::FP32, 4, &Device::Cpu).unwrap();
    assert!(model.decode(&weights, &[0; 5], &mut cache).is_err());
    assert!(model.decode(&weights, &[], &mut cache).is_err());
    assert!(model.decode(&weights, &[u32::MAX], &mut cache).is_err(), "an id outside the vocabulary");
    assert_eq!(cache.reusable(model.spec(), 0, 4), 0);
}

/// Tokens that `model` generates after `prompt`, and why it stopped.
fn tokens(
    (model, weights): &(Decoder, Parameters),
    capacity: usize,
    prompt: &[u32],
    max_tokens: usize,
    stop_token_ids: &[u32],
    sampling: &Sampling,
) -> (Vec<u32>, StopReason) {
    let mut cache = KvCache::new(model.spec(), PrecisionPolicy::FP32, capacity, &Device::Cpu).unwrap();
    let mut ids = Vec::new();
    let request = GenerationRequest { prompt, max_tokens, stop_token_ids, sampling };
    let receive = |id| {
        ids.push(id);
        Ok(true)
    };
    let stop = generate(model, weights, &mut cache, request, receive).unwrap();
    (ids, stop)
}

const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: None, top_p: None, repetition_penalty: 1.0, seed: 0 };

#[test]
fn the_likeliest_tokens_are_those_of_recomputing_everything() {
    let model = tiny(PrecisionPolicy::FP32);
    let mut ids = vec![116, 104, 101];
    for _ in 0..40 {
        let logits = full_logits(&model.0, &model.1, PrecisionPolicy::FP32, &ids);
        let last = logits.get(ids.len() - 1).unwrap();
        ids.push(last.argmax(0).unwrap().to_scalar::<u32>().unwrap());
    }
    let (cached, stop) = tokens(&model, 128, &ids[..3], 40, &[], &GREEDY);
    assert_eq!((cached.as_slice(), stop), (&ids[3..], StopReason::Length));

    // Training's samples are the same text.
    let tokenizer = Tokenizer::byte();
    let mut config = Config { dtype: PrecisionPolicy::FP32, ..Config::default() };
    config.train.prompt = "the".into();
    config.train.sample_tokens = 40;
    config.train.temperature = 0.0;
    let mut sampler = Sampler::new(&model.0, &config, &tokenizer, vec![256], &Device::Cpu).unwrap();
    let text = sampler.as_mut().unwrap().generate(&model.0, &model.1, 9).unwrap();
    let until_eos = ids[3..].split(|&id| id == 256).next().unwrap();
    assert_eq!(text, tokenizer.decode(until_eos).unwrap());
}

/// With a dynamic base the angles depend on the tokens so far, and not on the tokens that are planned.
#[test]
fn a_dynamic_base_gives_the_text_that_transformers_gives() {
    let model = golden("families/llama-dynamic", PrecisionPolicy::FP32);
    let original = 12;
    let context = model.0.spec().max_position_embeddings;
    assert_eq!(context, 36);
    let prompt = |len: u32| (0..len).map(|i| (i * i * 7 + len * 5 + 3) % 38).collect::<Vec<u32>>();
    let mut cases: Vec<Text> = Vec::new();
    for len in [1, 4, 7, 11, 12, 13, 20, 30] {
        for n in [1, 5, 16, 35 - len as usize] {
            let prompt = prompt(len);
            let found = tokens(&model, context.min(prompt.len() + n), &prompt, n, &[], &GREEDY).0;
            cases.push((prompt, n, found));
        }
    }
    for (prompt, n, found) in &cases {
        let longer = cases.iter().filter(|(other, more, _)| other == prompt && more > n);
        for (_, more, longer) in longer {
            let same = found.len().min(longer.len());
            assert_eq!(found[..same], longer[..same], "{} tokens, {n} and {more} more", prompt.len());
        }
    }
    assert!(cases.iter().any(|(prompt, _, found)| prompt.len() < original && prompt.len() + found.len() > original));
    assert_transformers_generates(&[("families/llama-dynamic", cases)]);
}

/// A prompt, a number of tokens and the tokens that we generate.
type Text = (Vec<u32>, usize, Vec<u32>);

/// Asserts that transformers generates the same tokens with each golden model.
fn assert_transformers_generates(models: &[(&str, Vec<Text>)]) {
    let Some(python) = python() else { return };
    let cases = models.iter().map(|(name, texts)| {
        let asked = texts.iter().map(|(prompt, _, found)| serde_json::json!([prompt, found.len()]));
        (golden_path(name).display().to_string(), asked.collect())
    });
    let cases: serde_json::Map<String, serde_json::Value> = cases.collect();
    let fixture = tempfile::tempdir().unwrap();
    let file = fixture.path().join("cases.json");
    std::fs::write(&file, serde_json::to_string(&cases).unwrap()).unwrap();
    let theirs = run_script(&python, "transformers_generate.py", &[file.as_os_str()]);
    for (name, texts) in models {
        let theirs = theirs[golden_path(name).display().to_string()].as_array().unwrap();
        assert_eq!(theirs.len(), texts.len());
        for ((prompt, _, found), theirs) in texts.iter().zip(theirs) {
            assert_eq!(serde_json::json!(found), *theirs, "{name}: {} tokens, {} more", prompt.len(), found.len());
        }
    }
}

#[test]
fn every_family_gives_the_text_that_transformers_gives() {
    // The names of a family's other models have another suffix.
    let families = names("families").into_iter().filter(|name| !name.contains('-') || name.ends_with("-moe"));
    let families = families.map(|name| format!("families/{name}"));
    let names: Vec<String> = families.chain(["deep".to_owned()]).collect();
    let texts = |name: &String| -> Vec<Text> {
        let model = golden(name, PrecisionPolicy::FP32);
        let prompts = ragged_prompts(20, model.0.spec().vocab_size);
        prompts
            .into_iter()
            .map(|prompt| {
                let found = tokens(&model, prompt.len() + 8, &prompt, 8, &[], &GREEDY).0;
                (prompt, 8, found)
            })
            .collect()
    };
    assert_transformers_generates(&names.iter().map(|name| (&name[..], texts(name))).collect::<Vec<_>>());
}

/// LongRoPE has other frequencies for all tokens of a text beyond the original context.
#[test]
fn a_text_that_outgrows_its_rotary_embeddings_is_that_of_recomputing_everything() {
    let model = golden("families/phi3-longrope", PrecisionPolicy::FP32);
    let prompt: Vec<u32> = (3..16).collect();
    let request = GenerationRequest { prompt: &prompt, max_tokens: 8, stop_token_ids: &[], sampling: &GREEDY };
    generate_batch(ModelView::new(&model, PrecisionPolicy::FP32), &[request], 1, |_, found| {
        assert_eq!(tokens(&model, 21, &prompt, 8, &[], &GREEDY).0, found.ids);
        let mut ids = prompt.clone();
        for (id, log_prob) in found.ids.iter().zip(&found.log_probs) {
            let last = full_logits(&model.0, &model.1, PrecisionPolicy::FP32, &ids).narrow(0, ids.len() - 1, 1)?;
            let expected = model.0.log_probs(&last, &[*id])?[0];
            assert!((expected - log_prob).abs() < 1e-5, "{} tokens: {log_prob}, not {expected}", ids.len());
            ids.push(*id);
        }
        assert_eq!(ids.len(), 21);
        Ok(())
    })
    .unwrap();
}

/// Texts of a batch, by request.
fn batch(
    (model, weights): &(Decoder, Parameters),
    policy: PrecisionPolicy,
    prompts: &[Vec<u32>],
    samplings: &[Sampling],
    batch_size: usize,
) -> Vec<(Vec<u32>, StopReason)> {
    let requests = prompts.iter().zip(samplings).map(|(prompt, sampling)| {
        let max_tokens = prompt.len() % 3 * 4 + 3;
        GenerationRequest { prompt, max_tokens, stop_token_ids: &[7], sampling }
    });
    let requests: Vec<GenerationRequest<'_>> = requests.collect();
    let mut texts = vec![(Vec::new(), StopReason::Callback); prompts.len()];
    generate_batch(ModelView { decoder: model, weights, policy }, &requests, batch_size, |number, found| {
        texts[number] = (found.text_ids().to_vec(), found.reason);
        Ok(())
    })
    .unwrap();
    texts
}

/// Prompts of different lengths, the first of one token.
fn ragged_prompts(count: u32, vocab: usize) -> Vec<Vec<u32>> {
    (0..count).map(|n| (0..=(n * 5 % 11)).map(|i| (n * 31 + i * i * 7 + 3) % vocab as u32).collect()).collect()
}

#[test]
fn texts_of_a_batch_are_those_of_one_prompt_at_a_time() {
    for name in ["deep", "families/llama", "families/gemma3", "families/qwen3", "families/llama-dynamic"] {
        let (model, weights) = golden(name, PrecisionPolicy::FP32);
        let prompts = ragged_prompts(11, model.spec().vocab_size);
        let context = model.spec().max_position_embeddings;
        for kernels in [Arc::new(Fused) as Arc<dyn Kernels>, Arc::new(CandleKernels)] {
            let by = kernels.name().to_owned();
            let model = (Decoder::new(model.spec(), &weights, kernels).unwrap(), weights.clone());
            for temperature in [0.0, 1.5] {
                let sampling = |seed| Sampling { temperature, seed, ..Sampling::default() };
                let samplings: Vec<Sampling> = (0..prompts.len() as u64).map(sampling).collect();
                let alone = |(prompt, sampling): (&Vec<u32>, &Sampling)| {
                    let n = prompt.len() % 3 * 4 + 3;
                    tokens(&model, context.min(prompt.len() + n), prompt, n, &[7], sampling)
                };
                let expected: Vec<_> = prompts.iter().zip(&samplings).map(alone).collect();
                let lengths: std::collections::BTreeSet<usize> = expected.iter().map(|(ids, _)| ids.len()).collect();
                assert!(lengths.len() > 2, "texts end at different times: {lengths:?}");
                for batch_size in [4, 32] {
                    let found = batch(&model, PrecisionPolicy::FP32, &prompts, &samplings, batch_size);
                    assert_eq!(found, expected, "{name}, {by}, temperature {temperature}, {batch_size} at a time");
                }
            }
        }
    }
}

#[test]
fn a_text_does_not_depend_on_its_batch() {
    let model = tiny(PrecisionPolicy::BF16);
    let prompts = ragged_prompts(9, 200);
    let sampling = |seed| Sampling { temperature: 1.0, seed, ..Sampling::default() };
    let samplings: Vec<Sampling> = (0..9).map(sampling).collect();
    let expected = batch(&model, PrecisionPolicy::BF16, &prompts, &samplings, 1);
    for batch_size in [2, 5, 9] {
        assert_eq!(batch(&model, PrecisionPolicy::BF16, &prompts, &samplings, batch_size), expected, "{batch_size}");
    }
}

/// Regression: the first line came after the last text, which takes minutes here.
#[test]
fn lines_come_as_texts_end_and_a_closed_pipe_ends_the_rest() {
    let desk = CliFixture::new();
    desk.write("prompts.jsonl", "{\"prompt\": \"a\"}\n".repeat(30_000));
    let mut command = desk.command("generate model --threads 1 -n 60 --input prompts.jsonl --batch-size 1");
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let stdout = child.stdout.take().unwrap();
    let watch = std::thread::spawn(move || BufReader::new(stdout).lines().next().unwrap().unwrap());
    let began = Instant::now();
    while child.try_wait().unwrap().is_none() && began.elapsed() < Duration::from_mins(1) {
        std::thread::sleep(Duration::from_millis(50));
    }
    child.kill().unwrap();
    assert!(child.wait().unwrap().success(), "it continued for a minute");
    assert!(watch.join().unwrap().starts_with("{\"prompt\":\"a\",\"completion\":"));
}

#[test]
fn a_file_of_prompts_gives_a_line_for_each_in_order() {
    let desk = CliFixture::new();
    let prompts = ["the ", "some words", "", "a", "learn from it"];
    let row = |prompt: &&str| serde_json::json!({"id": prompt.len(), "prompt": prompt}).to_string() + "\n";
    desk.write("prompts.jsonl", prompts.iter().map(row).collect::<String>());
    let generate = "generate model --dtype fp32 --threads 1 -n 9 --temperature 0";
    let report = desk.said(&format!("{generate} --input prompts.jsonl --output out.jsonl --batch-size 3"));
    assert!(report.starts_with("out.jsonl: 5 texts, "), "{report}");
    let written = std::fs::read_to_string(desk.path("out.jsonl")).unwrap();
    for (prompt, line) in prompts.iter().zip(written.lines()) {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!((&line["prompt"], &line["id"]), (&(*prompt).into(), &prompt.len().into()));
        let finish = line["finish_reason"].as_str().unwrap();
        assert!(["stop", "length"].contains(&finish), "{line}");
        let mut words: Vec<&str> = generate.split(' ').collect();
        words.extend(["--prompt", prompt]);
        let alone = desk.command_of(&words).output().unwrap();
        assert_eq!(line["completion"].as_str().unwrap().to_owned() + "\n", String::from_utf8(alone.stdout).unwrap());
    }
    assert_eq!(written.lines().count(), prompts.len());
    assert_eq!(desk.said(&format!("{generate} --input prompts.jsonl")), written, "without a file");
    desk.write("tools.jsonl", "{\"tools\": [{\"name\": \"f\", \"about\": 1}], \"prompt\": \"a\"}\n");
    let line = desk.said(&format!("{generate} --input tools.jsonl"));
    assert!(line.starts_with("{\"tools\":[{\"name\":\"f\",\"about\":1}],\"prompt\":\"a\",\"completion\":"), "{line}");

    // Messages are written with the chat template; an error names the line and keeps the earlier file.
    desk.write("chats.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]}\n");
    assert_eq!(desk.said(&format!("{generate} --input chats.jsonl")).lines().count(), 1);
    let long = format!("{}{}\n", row(&"fine"), row(&"x".repeat(999).as_str()).trim_end());
    for (content, problem) in [
        (long.as_str(), "bad.jsonl: line 2: its 999 tokens exceed the context of"),
        ("{\"prompt\": \"a\"}\n{\"text\": \"b\"}\n", "bad.jsonl: line 2: `prompt` is missing or null"),
        ("{\"prompt\": 3}\n", "bad.jsonl: line 1: `prompt` must be text or a list of messages"),
    ] {
        desk.write("bad.jsonl", content);
        desk.assert_refused(&format!("{generate} --input bad.jsonl --output out.jsonl"), &[problem]);
    }
    desk.assert_refused(&format!("{generate} --input out.jsonl --output ./out.jsonl"), &["--output", "is an input"]);
    assert_eq!(std::fs::read_to_string(desk.path("out.jsonl")).unwrap(), written);
    let left = std::fs::read_dir(desk.folder()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert!(!left.into_iter().any(|name| name.starts_with(".output-")), "a folder was left");
}

#[test]
fn equal_seeds_give_equal_texts_and_others_do_not() {
    let model = tiny(PrecisionPolicy::FP32);
    for (top_k, top_p) in [(None, None), (Some(40), None), (None, Some(0.9)), (Some(40), Some(0.9))] {
        let of = |seed| {
            let sampling = Sampling { temperature: 2.0, top_k, top_p, seed, ..Sampling::default() };
            tokens(&model, 64, &[1], 30, &[], &sampling).0
        };
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2), "top-k {top_k:?}, top-p {top_p:?}");
    }
}

#[test]
fn one_likeliest_token_is_greedy_and_a_penalty_ends_repetition() {
    let model = tiny(PrecisionPolicy::FP32);
    let greedy = tokens(&model, 128, &[5], 60, &[], &GREEDY).0;
    let narrow = Sampling { top_k: Some(1), ..Sampling::default() };
    assert_eq!(tokens(&model, 128, &[5], 60, &[], &narrow).0, greedy);
    let distinct = |ids: &[u32]| ids.iter().collect::<std::collections::BTreeSet<_>>().len();
    let with_repetition_penalty =
        tokens(&model, 128, &[5], 60, &[], &Sampling { repetition_penalty: 50.0, ..GREEDY }).0;
    assert!(distinct(&with_repetition_penalty) > distinct(&greedy), "{with_repetition_penalty:?} against {greedy:?}");
}

#[test]
fn the_end_of_text_token_ends_it_and_is_not_returned() {
    let model = tiny(PrecisionPolicy::FP32);
    let (ids, _) = tokens(&model, 64, &[1], 20, &[], &GREEDY);
    let eos = ids[7];
    let first = ids.iter().position(|&id| id == eos).unwrap();
    assert_eq!(tokens(&model, 64, &[1], 20, &[300, eos], &GREEDY), (ids[..first].to_vec(), StopReason::EndOfText));
}

#[test]
fn a_full_context_ends_it() {
    let model = tiny(PrecisionPolicy::FP32);
    // Ten places: three for the prompt, seven for tokens that are looked at, and one more token is chosen from them.
    let (ids, stop) = tokens(&model, 10, &[1, 2, 3], 100, &[], &GREEDY);
    assert_eq!((ids.len(), stop), (8, StopReason::ContextFull));
}

#[test]
fn the_receiver_can_stop_generation() {
    let (model, weights) = tiny(PrecisionPolicy::FP32);
    let mut cache = KvCache::new(model.spec(), PrecisionPolicy::FP32, 20, &Device::Cpu).unwrap();
    let request = GenerationRequest { prompt: &[1], max_tokens: 9, stop_token_ids: &[], sampling: &GREEDY };
    let mut count = 0;
    let stop = generate(&model, &weights, &mut cache, request, |_| {
        count += 1;
        Ok(count < 4)
    });
    assert_eq!((stop.unwrap(), count), (StopReason::Callback, 4));
}

#[test]
fn the_command_writes_the_same_text_for_the_same_seed_from_run_checkpoint_and_folder() {
    let fixture = CliFixture::empty();
    fixture.said(
        "--plain --run r --threads 1 --steps 2 --batch-size 2 --init-scale 65536 --set train.sample_tokens=0 \
         --set train.eval_batches=1",
    );
    let text = |model: &str, seed: u32| {
        fixture.said(&format!("generate {model} --prompt the -n 20 --seed {seed} --threads 1"))
    };
    let from_run = text("checkpoints/r", 3);
    assert_eq!(text("checkpoints/r/step-000002", 3), from_run);
    assert_eq!(text("checkpoints/r", 3), from_run);
    assert_ne!(text("checkpoints/r", 4), from_run);

    // The device and its kernels are chosen as for training.
    let greedy = |kernels: &str| {
        fixture.said(&format!("generate r --prompt the -n 20 --temperature 0 --device cpu --kernels {kernels}"))
    };
    assert_eq!(greedy("candle"), greedy("fused"));

    let (code, text, notice) = fixture.output("generate checkpoints/r -n 1000 --temperature 0 --dtype fp16");
    assert_eq!(code, Some(0), "{notice}");
    assert!(text.ends_with('\n'));
    let ended = notice.contains("the context of 128 tokens is full");
    assert!(ended || notice.is_empty(), "{notice}");
}
