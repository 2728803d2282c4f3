//! `finetune mismatch`: training's and generation's probabilities of the same tokens, against values computed
//! otherwise.

use crate::common::cli_fixture::CliFixture;
use crate::common::engine::POLICIES;
use crate::common::golden::{Case, names};
use finetune::data::{IGNORE_INDEX, TokenSource};
use finetune::engine::device::DeviceContext;
use finetune::engine::kernels::isa::Isa;
use finetune::engine::kernels::{CandleKernels, Fused, Kernels};
use finetune::engine::model::{Decoder, ForwardMode, InputIds, KvCache, Parameters, Workspace, differing_choices};
use finetune::inference::ModelView;
use finetune::inference::evaluate::{SlidingWindow, evaluate};
use finetune::inference::generate::{Completion, GenerationRequest, Sampling, generate_batch};
use finetune::inference::mismatch::{Mismatch, Sequences, chosen_experts, log_probs};
use finetune::inference::trained::TrainedModel;
use finetune::precision::PrecisionPolicy;
use std::sync::Arc;

const TOKENS: usize = 40;

/// A folder with the run `r`: `tiny`, trained for a moment.
fn trained() -> CliFixture {
    let fixture = CliFixture::empty();
    fixture.said("--run r --steps 40 --plain --seq-len 64 --set train.eval_batches=1");
    fixture
}

fn measured(
    model: &TrainedModel,
    policy: PrecisionPolicy,
    sequences: &Sequences,
    kernels: Arc<dyn Kernels>,
) -> Mismatch {
    let loaded = model.load(policy, &DeviceContext { kernels, ..DeviceContext::cpu() }).unwrap();
    let probs = log_probs(ModelView::new(&loaded, policy), sequences, |_| ()).unwrap();
    Mismatch::new(&probs, sequences.ids[0].len() - 4)
}

#[test]
fn choices_of_experts_that_differ_are_counted() {
    let case = Case::own("families/olmoe");
    let batch = &case.whole_batch(0)[0];
    let ids: Vec<Vec<u32>> = batch.inputs.chunks(batch.seq_len).map(<[u32]>::to_vec).collect();
    let policy = PrecisionPolicy::FP32;
    let engine = case.engine(policy, case.rows());
    let model = ModelView { decoder: &engine.model, weights: &engine.state.weights, policy };
    let chosen = |ids| chosen_experts(model, &Sequences { prompt: 1, ids }).unwrap();
    let turned = ids.iter().map(|ids| ids.iter().rev().copied().collect()).collect();
    let [exact, other] = [ids, turned].map(chosen);
    assert_eq!(exact.len(), 2 * batch.inputs.len());
    assert!(exact.iter().all(|experts| matches!(experts[..], [a, b, c] if a < b && b < c && c < 16)), "{exact:?}");
    let differences = (0..exact.len()).filter(|i| exact[*i] != other[*i]).count();
    assert!(differences > 0, "the order of tokens decides nothing");
    assert_eq!(differing_choices(&exact, &other), Some(differences as f64 / exact.len() as f64));
    assert_eq!(differing_choices(&[vec![0, 1], vec![2, 3]], &[vec![0, 1], vec![2, 4]]), Some(0.5));
    assert_eq!(differing_choices(&[], &[]), None);
}

/// log p of `id` after `past`, from a forward pass over nothing but `past`, in FP64 from its logits.
fn after(model: &Decoder, weights: &Parameters, past: &[u32], id: u32) -> f64 {
    let device = candle_core::Device::Cpu;
    let shape = (1, past.len());
    let mut workspace = Workspace::for_evaluation(model.spec(), PrecisionPolicy::FP32, shape, &device).unwrap();
    let tokens = InputIds::new(past, past.len());
    model.forward(weights, tokens, ForwardMode::Eval, &mut workspace, &mut ()).unwrap();
    let last = workspace.hidden().narrow(0, past.len() - 1, 1).unwrap();
    let logits: Vec<f32> = model.logits(weights, &last).unwrap().to_vec2().unwrap().remove(0);
    let sum: f64 = logits.iter().map(|x| f64::from(*x).exp()).sum();
    f64::from(logits[id as usize]) - sum.ln()
}

/// Minus the training pass's loss of each text's tokens after its prompt: one row per text, or all in one row as
/// documents.
fn by_training(
    (model, weights, policy): (&Decoder, &Parameters, PrecisionPolicy),
    texts: &[(Vec<u32>, usize)],
    packed: bool,
) -> Vec<Vec<u32>> {
    let lengths: Vec<usize> = texts.iter().map(|(ids, _)| ids.len() - 1).collect();
    let seq_len = if packed { lengths.iter().sum() } else { lengths.iter().copied().max().unwrap() };
    let (mut inputs, mut targets, mut starts, mut places) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for ((ids, prompt), length) in texts.iter().zip(lengths) {
        let first = inputs.len();
        places.push(first + prompt - 1..first + length);
        inputs.extend(&ids[..length]);
        targets.extend(&ids[1..]);
        starts.extend(vec![first as u32; length]);
        if !packed {
            inputs.resize(first + seq_len, 0);
            targets.resize(first + seq_len, IGNORE_INDEX);
        }
    }
    let rows = inputs.len() / seq_len;
    let device = candle_core::Device::Cpu;
    let mut workspace = Workspace::for_evaluation(model.spec(), policy, (rows, seq_len), &device).unwrap();
    let ids = InputIds { ids: &inputs, seq_len, documents: packed.then_some(&starts) };
    model.forward(weights, ids, ForwardMode::Eval, &mut workspace, &mut ()).unwrap();
    model.loss(weights, &targets, &workspace).unwrap();
    let losses = workspace.losses().to_vec1::<f32>().unwrap();
    places.into_iter().map(|place| losses[place].iter().map(|loss| (-loss).to_bits()).collect()).collect()
}

/// Fails unless generation in batches of 1, 2 and 3 and training compute the same bits for each sampled token.
pub(crate) fn assert_exact(what: &str, (model, weights, policy): (&Decoder, &Parameters, PrecisionPolicy)) {
    let (vocab, context) = (model.spec().vocab_size, model.spec().max_position_embeddings);
    let prompt = |len: usize| (0..len).map(|i| ((i * i * 7 + len * 5 + 3) % vocab) as u32).collect::<Vec<u32>>();
    let prompts = [1, 4, 9].map(prompt);
    let samplings = [0, 1, 2].map(|index| Sampling::default().of_completion(3, index, 1));
    let requests: Vec<GenerationRequest<'_>> = prompts
        .iter()
        .zip(&samplings)
        .zip([context.min(21) - 1, 6, 4])
        .map(|((prompt, sampling), max_tokens)| GenerationRequest {
            prompt,
            max_tokens,
            stop_token_ids: &[7],
            sampling,
        })
        .collect();
    let generated = |batch_size| {
        let mut all: Vec<Option<Completion>> = vec![None; requests.len()];
        let keep = |number: usize, completion| {
            all[number] = Some(completion);
            Ok(())
        };
        generate_batch(ModelView { decoder: model, weights, policy }, &requests, batch_size, keep).unwrap();
        all.into_iter().map(Option::unwrap).collect::<Vec<Completion>>()
    };
    let alone = generated(1);
    for batch_size in [2, 3] {
        assert_eq!(generated(batch_size), alone, "{what}, {policy}: {batch_size} at a time");
    }
    let bits = |completion: &Completion| completion.log_probs.iter().map(|x| x.to_bits()).collect();
    let generation: Vec<Vec<u32>> = alone.iter().map(bits).collect();
    assert!(generation.iter().flatten().count() > 8, "{what}: {generation:?}");
    let text = |(prompt, completion): (&Vec<u32>, &Completion)| ([&prompt[..], &completion.ids].concat(), prompt.len());
    let texts: Vec<(Vec<u32>, usize)> = prompts.iter().zip(&alone).map(text).collect();
    // As many documents as the context has room for.
    let mut room = context;
    let fits = |(ids, _): &&(Vec<u32>, usize)| {
        room = room.saturating_sub(ids.len() - 1);
        room > 0
    };
    let documents = texts.iter().take_while(fits).count();
    for (packed, count) in [(false, texts.len()), (true, documents)] {
        // Without vector instructions, attention's sums depend on where in its row a document begins.
        if !packed || Isa::current() != Isa::Portable {
            let training = by_training((model, weights, policy), &texts[..count], packed);
            assert_eq!(generation[..count], training, "{what}, {policy}, packed {packed}");
        }
    }
}

#[test]
fn generation_has_the_bits_of_training() {
    let families = names("families").into_iter().map(|name| Case::own(&format!("families/{name}")));
    let own = ["narrow", "head64", "untied", "deep"].iter().map(|name| Case::own(name));
    for case in own.chain(families).chain(names("lora").iter().map(|name| Case::lora_of(name))) {
        // Angles of these types depend on the length so far.
        if ["llama-dynamic", "longrope"].iter().any(|name| case.name.contains(name)) {
            continue;
        }
        for policy in POLICIES {
            let engine = case.engine(policy, case.rows());
            assert_exact(&case.name, (&engine.model, &engine.state.weights, policy));
        }
    }
}

#[test]
fn own_kernels_agree_exactly_and_candles_nearly() {
    let fixture = trained();
    let model = TrainedModel::open(&fixture.run("r"), None).unwrap();
    let loaded = model.load(PrecisionPolicy::FP32, &DeviceContext::cpu()).unwrap();
    let fp32 = ModelView::new(&loaded, PrecisionPolicy::FP32);
    let ModelView { decoder, weights, .. } = fp32;
    let prompt: Vec<u32> = "The ".bytes().map(u32::from).collect();
    let sequences = Sequences::sample(fp32, &prompt, (3, TOKENS), 7, |_| ()).unwrap();
    assert!(sequences.ids.iter().all(|ids| ids.len() == 4 + TOKENS && ids.starts_with(&prompt)));
    assert_ne!(sequences.ids[0], sequences.ids[1], "each sequence has its own seed");

    // Training's side is minus an evaluation's loss, generation's side comes from separate passes over each prefix.
    let found = log_probs(fp32, &sequences, |_| ()).unwrap();
    assert_eq!([&found.training, &found.generation, &found.kl].map(Vec::len), [3 * TOKENS; 3]);
    let ids = &sequences.ids[1];
    let windows = SlidingWindow { seq_len: ids.len() - 1, stride: ids.len() - 1, batch_size: 1 };
    let text = TokenSource::from_ids(ids.clone());
    let loss = evaluate(fp32, &text, 1.0, windows, |_| ()).unwrap().loss;
    let of_prompt: f64 = (1..4).map(|place| after(decoder, weights, &ids[..place], ids[place])).sum();
    let sum: f64 = found.training[TOKENS..2 * TOKENS].iter().sum();
    let expected = -loss * (ids.len() - 1) as f64 - of_prompt;
    assert!((sum - expected).abs() < 1e-4, "{sum} {expected}");
    for (at, found) in found.generation[TOKENS..2 * TOKENS].iter().enumerate() {
        let expected = after(decoder, weights, &ids[..4 + at], ids[4 + at]);
        assert!((found - expected).abs() < 1e-5, "token {at}: {found} {expected}");
    }

    // With candle's kernels both sides round nearly the same sums, so a half type differs seldom, where a sum lies
    // close to the middle of two numbers, and then by a unit of its last place.
    let sequences = Sequences::sample(fp32, &prompt, (12, 100), 8, |_| ()).unwrap();
    let of = |policy| measured(&model, policy, &sequences, Arc::new(CandleKernels));
    let (fp32, fp16, bf16) = (of(PrecisionPolicy::FP32), of(PrecisionPolicy::FP16), of(PrecisionPolicy::BF16));
    assert!(fp32.largest < 1e-5, "{fp32:?}");
    assert!(2.0 * fp32.mean < fp16.mean && 2.0 * fp32.mean < bf16.mean, "{fp32:?} {fp16:?} {bf16:?}");
    assert!(10.0 * fp32.largest < fp16.largest && 10.0 * fp32.largest < bf16.largest, "{fp32:?} {fp16:?} {bf16:?}");
    assert!(fp16.kl > 0.0 && fp16.kl < bf16.kl && bf16.kl < 1e-2, "{fp16:?} {bf16:?}");
    assert!(bf16.token_ratio.min < 1.0 && bf16.token_ratio.max > 1.0 && bf16.largest < 0.5, "{bf16:?}");
    for policy in POLICIES {
        let exact = measured(&model, policy, &sequences, Arc::new(Fused));
        assert_eq!([exact.mean, exact.largest, exact.kl], [0.0; 3], "{policy}");
        assert_eq!([exact.token_ratio.min, exact.token_ratio.max, exact.sequence_ratio.max], [1.0; 3], "{policy}");
    }
    // The same cache and the same pass twice give the same figures.
    assert_eq!(of(PrecisionPolicy::BF16), bf16);
    let mut cache = KvCache::new(decoder.spec(), PrecisionPolicy::FP32, 4, &candle_core::Device::Cpu).unwrap();
    assert_eq!(decoder.decode(weights, &prompt, &mut cache).unwrap().dims()[0], 4);
}

#[test]
fn the_command_prints_a_table_and_an_object() {
    let fixture = trained();
    let line = "mismatch r --dtype fp16,bf16,fp32 -n 20 --sequences 2 --prompt The";
    let text = fixture.said(line);
    let names: Vec<_> = text.lines().skip(2).take(3).map(|line| line.split_whitespace().next().unwrap()).collect();
    assert_eq!(names, ["fp16", "bf16", "fp32"], "{text}");
    let json = fixture.json(&format!("{line} --json"));
    assert_eq!(json["types"]["bf16"]["tokens"], 40);
    for policy in ["fp16", "bf16", "fp32"] {
        let found = &json["types"][policy];
        assert_eq!([&found["mean"], &found["largest"], &found["kl"]], [0.0; 3], "{json}");
        assert_eq!([&found["token_ratio"]["min"], &found["sequence_ratio"]["max"]], [1.0; 2], "{json}");
    }
    for (wrong, said) in [
        ("r --dtype fp16,int8", "int8"),
        ("r --dtype fp16,fp16", "is listed twice"),
        ("r -n 128 --prompt a", "--max-tokens"),
        ("r -n 0", "--max-tokens: must be at least 1"),
        ("r --sequences 0", "--sequences: must be at least 1"),
    ] {
        let complaint = fixture.refused(&format!("mismatch {wrong}"));
        assert!(complaint.contains(said), "{wrong}: {complaint}");
    }
}

/// Each type is measured in a separate process and listed in one table; with `--latency`, so are percentiles.
#[test]
fn bench_compares_types_and_measures_latency() {
    let fixture = CliFixture::empty();
    let bench = "bench --device cpu --model tiny --layers 1 --batch-size 2 --seq-len 16";
    let text = fixture.said(&format!("{bench} --dtype fp32,fp16,bf16 --steps 2 --warmup 1"));
    let rows: Vec<Vec<&str>> = text.lines().take(4).map(|line| line.split_whitespace().collect()).collect();
    assert_eq!([rows[1][0], rows[2][0], rows[3][0]], ["fp32", "fp16", "bf16"], "{text}");
    assert_eq!([rows[1][2], rows[1][4], rows[1][6]], ["1.00", "1.00", "+0.0e0"], "{text}");
    let distance = |row: usize| rows[row][6].parse::<f64>().unwrap().abs();
    assert!(distance(2) < 1e-2 && distance(3) < 5e-2 && distance(2) + distance(3) > 0.0, "{text}");
    let json = fixture.json(&format!("{bench} --latency 20"));
    for what in ["forward_ms", "token_ms"] {
        let [p50, p95, p99] = ["p50", "p95", "p99"].map(|share| json[what][share].as_f64().unwrap());
        assert!(0.0 < p50 && p50 <= p95 && p95 <= p99, "{json}");
    }
    assert_eq!(json["passes"], 20);
    let text = fixture.said(&format!("{bench} --latency 5 --dtype fp32,bf16"));
    assert!(text.lines().nth(2).unwrap().starts_with("bf16 "), "{text}");
    let complaint = fixture.refused(&format!("{bench} --latency 0"));
    assert!(complaint.contains("--latency"), "{complaint}");
}
