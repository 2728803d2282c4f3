//! The device's step against the CPU engine's, in the emulator or on a GPU.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use super::*;
use crate::engine::kernels::cuda::emulator::Emulator;
use crate::engine::kernels::cuda::testbed::Testbed;
use crate::engine::kernels::view::{View, read};
use crate::engine::model::Gpt2Config;
use crate::precision::{Dtype, GradScalerConfig, OnOverflow, ScaleChange};
use crate::store::checkpoint::{Checkpoint, Run};
use crate::telemetry::{Command, Emitter, Event, Record};
use crate::train::setup::{self, ModelSource};
use crate::train::{Config, Trainer, verify};
use candle_core::{Device, Tensor};
use std::sync::mpsc::Receiver;

const ROWS: usize = 3;
const SEQ_LEN: usize = 9;

fn shape() -> Gpt2Config {
    let tiny = Gpt2Config::named("tiny").unwrap();
    Gpt2Config { n_layer: 2, n_embd: 24, n_head: 3, n_inner: 40, vocab_size: 67, n_positions: 12, ..tiny }
}

/// A run with dropout everywhere and accumulation.
fn config(policy: &str) -> Config {
    let mut config = Config { dtype: policy.parse().unwrap(), seed: 7, device: "cpu".into(), ..Config::default() };
    (config.train.batch_size, config.train.seq_len, config.train.grad_accum) = (ROWS, SEQ_LEN, 2);
    (config.dropout.embedding, config.dropout.residual, config.dropout.attention) = (0.1, 0.2, 0.1);
    (config.optimizer.lr, config.optimizer.weight_decay) = (1e-3, 0.1);
    config.scaler = GradScalerConfig { init_scale: 1024.0, ..GradScalerConfig::default() };
    config
}

fn engine(config: &Config) -> Engine {
    let shape = Gpt2Config {
        embd_pdrop: config.dropout.embedding,
        resid_pdrop: config.dropout.residual,
        attn_pdrop: config.dropout.attention,
        ..shape()
    };
    let masters = TrainState::random_masters(&shape, config.seed, &Device::Cpu).unwrap();
    setup::engine(config, &shape, masters, 20).unwrap()
}

fn on_device(engine: &Engine, config: &Config) -> DeviceEngine<Testbed> {
    let train = &config.train;
    let shape = [train.batch_size, train.seq_len, train.grad_accum];
    DeviceEngine::new(Testbed::new(0), engine, config.dtype, shape).unwrap()
}

/// Micro-batch `number` of the run: some tokens occur twice, some targets do not count.
fn batch(number: usize) -> Batch {
    let mut batch = Batch::new(ROWS, SEQ_LEN);
    let word = |i: usize| ((i + 31 * number).wrapping_mul(2_654_435_761) >> 7) as u32 % 67;
    batch.inputs = (0..ROWS * SEQ_LEN).map(word).collect();
    batch.targets = (0..ROWS * SEQ_LEN).map(|i| if i % 11 == 4 { IGNORE } else { word(i + 1) }).collect();
    batch.target_count = batch.targets.iter().filter(|&&t| t != IGNORE).count();
    batch
}

fn numbers(tensor: &Tensor) -> Vec<f32> {
    let opened = read(tensor).unwrap();
    let mut values = vec![0.0; tensor.elem_count()];
    match opened.view() {
        View::F32(from) => values.copy_from_slice(from),
        other => other.load(0, &mut values),
    }
    values
}

/// The root of the mean squared difference.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let sum: f64 = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    (sum / a.len() as f64).sqrt()
}

fn typical(a: &[f32]) -> f64 {
    distance(a, &vec![0.0; a.len()])
}

/// What two roundings of nearly the same may differ by, relatively, after a few layers.
fn tolerance(config: &Config) -> f64 {
    match config.dtype.compute {
        Dtype::F32 => 1e-5,
        Dtype::F16 => 4e-3,
        Dtype::BF16 => 3e-2,
    }
}

/// The device's copy of every parameter's gradient.
fn device_gradients(device: &DeviceEngine<Testbed>, layout: &[Entry]) -> Vec<Vec<f32>> {
    let total = device.sum.as_ref().unwrap_or(&device.born);
    total.logical(layout).unwrap().into_iter().map(|buffer| device.device.read(buffer)).collect()
}

/// Three steps of both engines, looked at one by one.
fn compare_steps(policy: &str) {
    let config = config(policy);
    let (mut cpu, mut host) = (engine(&config), engine(&config));
    let mut device = on_device(&host, &config);
    let tolerance = tolerance(&config);
    for step in 0..3 {
        // The last step has one micro-batch only, as at an epoch's end.
        let batches: Vec<Batch> = (0..if step == 2 { 1 } else { 2 }).map(|i| batch(2 * step + i)).collect();
        (cpu.exponents, host.exponents) = (step != 1, step != 1);
        let expected = cpu.step(&batches).unwrap();
        let found = device.step(&mut host, &batches).unwrap();
        assert!((found.loss - expected.loss).abs() < tolerance * expected.loss, "{policy}: {found:?} {expected:?}");
        assert_eq!((found.targets, found.scale, found.change), (expected.targets, expected.scale, expected.change));
        let (Outcome::Applied { grad_norm, clip, lr }, Outcome::Applied { grad_norm: norm, clip: factor, lr: rate }) =
            (found.outcome, expected.outcome)
        else {
            panic!("{policy}: {found:?} {expected:?}");
        };
        assert!((grad_norm - norm).abs() < tolerance * norm && (clip - factor).abs() < tolerance, "{policy}");
        assert!((lr - rate).abs() < 1e-15);
        let PartTimes { forward, backward, survey, optimizer } = found.time;
        assert!([forward, backward, survey, optimizer].iter().all(|part| !part.is_zero()), "{:?}", found.time);
        assert_eq!(host.state.counters, cpu.state.counters);
        let layout = cpu.state.weights.layout();
        let gradients = device_gradients(&device, layout);
        for ((entry, found), expected) in layout.iter().zip(&gradients).zip(cpu.grads.total().tensors()) {
            let expected = numbers(expected);
            let error = distance(found, &expected) / typical(&expected);
            assert!(error < 3.0 * tolerance, "{policy}, step {step}: gradient of {}: {error}", entry.name);
        }
        for (found, expected) in host.survey.tensors.iter().zip(&cpu.survey.tensors) {
            assert_eq!(found.stats.count, expected.stats.count);
            assert!((found.stats.norm() / expected.stats.norm() - 1.0).abs() < 3.0 * tolerance);
            assert_eq!(found.exponents.iter().count() > 0, step != 1);
        }
    }
    device.fetch(&mut host.state).unwrap();
    compare_states(&config, &host.state, &cpu.state);
    // The device's own working copy is what the host rounds from the masters.
    let weights = &host.state.weights;
    for (buffer, weight) in device.weights().logical(weights.layout()).unwrap().iter().zip(weights.tensors()) {
        assert_eq!(device.device.read(*buffer), numbers(weight), "{policy}");
    }
}

/// Masters and moments after a few steps.
fn compare_states(config: &Config, found: &TrainState, expected: &TrainState) {
    let tolerance = tolerance(config);
    // Adam's first updates are about as long as the learning rate wherever there is any gradient at all.
    let moved = 3.0 * config.optimizer.lr;
    let pairs = |a: &Parameters, b: &Parameters| -> Vec<(String, Vec<f32>, Vec<f32>)> {
        a.iter().zip(b.tensors()).map(|((name, a), b)| (name.to_owned(), numbers(a), numbers(b))).collect()
    };
    for (name, mut found, mut expected) in pairs(found.masters.parameters(), expected.masters.parameters()) {
        if name.ends_with("c_attn.bias") {
            // A shift of all keys changes no softmax: the gradient of their bias is rounding noise, which Adam makes as long
            // as any other.
            let width = found.len() / 3;
            for bias in [&mut found, &mut expected] {
                bias[width..2 * width].fill(0.0);
            }
        }
        let error = distance(&found, &expected) / moved;
        assert!(error < 10.0 * tolerance, "{name}: {error}");
    }
    let moments =
        [(&found.adamw.exp_avg, &expected.adamw.exp_avg), (&found.adamw.exp_avg_sq, &expected.adamw.exp_avg_sq)];
    for (name, found, expected) in moments.into_iter().flat_map(|(found, expected)| pairs(found, expected)) {
        let error = distance(&found, &expected) / typical(&expected);
        assert!(error < 6.0 * tolerance, "moment of {name}: {error}");
    }
}

#[test]
fn steps_in_fp32() {
    compare_steps("fp32");
}

#[test]
fn steps_in_fp16() {
    compare_steps("fp16");
}

#[test]
fn steps_in_bf16() {
    compare_steps("bf16");
}

#[test]
fn steps_with_fp32_gradients() {
    compare_steps("p=f32,c=f16,g=f32,r=f16");
}

#[test]
fn steps_with_a_bf16_stream() {
    compare_steps("p=f32,c=bf16,g=bf16,r=bf16");
}

/// The scale begins where nothing is finite and comes down the same way, with the same steps skipped; nothing else moves
/// until a step is applied.
#[test]
fn a_scale_that_is_too_high_falls_as_on_the_cpu() {
    let mut config = config("fp16");
    config.train.grad_accum = 1;
    config.scaler = GradScalerConfig { init_scale: 2f32.powi(20), growth_interval: 2, ..GradScalerConfig::default() };
    let (mut cpu, mut host) = (engine(&config), engine(&config));
    let mut device = on_device(&host, &config);
    let before = numbers(&host.state.masters.parameters()[0]);
    let (mut skipped, mut grew) = (0, 0);
    for step in 0..12 {
        let batches = [batch(step)];
        let (expected, found) = (cpu.step(&batches).unwrap(), device.step(&mut host, &batches).unwrap());
        assert_eq!((found.scale, found.change), (expected.scale, expected.change), "step {step}");
        assert_eq!(found.outcome == Outcome::Skipped, expected.outcome == Outcome::Skipped, "step {step}");
        assert_eq!((host.state.scaler.state(), host.state.counters), (cpu.state.scaler.state(), cpu.state.counters));
        skipped += u64::from(found.outcome == Outcome::Skipped);
        grew += u32::from(matches!(found.change, ScaleChange::Grew { .. }));
        if host.state.counters.updates == 0 {
            device.fetch(&mut host.state).unwrap();
            assert_eq!(numbers(&host.state.masters.parameters()[0]), before);
        }
    }
    assert!(skipped >= 3 && grew >= 1 && host.state.counters.updates >= 4, "{skipped} skipped, grown {grew} times");
    assert_eq!(host.state.counters.skipped(), skipped);
}

#[test]
fn repeated_steps_have_the_same_bits() {
    let config = config("fp16");
    let run = |order| {
        let mut host = engine(&config);
        let shape = [ROWS, SEQ_LEN, 2];
        let mut device = DeviceEngine::new(Testbed::new(order), &host, config.dtype, shape).unwrap();
        let report = device.step(&mut host, &[batch(0), batch(1)]).unwrap();
        device.fetch(&mut host.state).unwrap();
        let bits: Vec<u32> =
            host.state.masters.parameters().tensors().iter().flat_map(numbers).map(f32::to_bits).collect();
        (report.loss.to_bits(), bits)
    };
    let first = run(0);
    assert!(Testbed::ORDERS.iter().all(|&order| run(order) == first), "the bits depend on the order of threads");
}

/// How often the GPU is told something in a step of one micro-batch: kernels, products, and memory set to zero. Each costs
/// microseconds, of which a step of few tokens is made.
#[test]
fn a_step_takes_few_launches() {
    let launches = |layers: usize, epilogues: bool| {
        let mut config = config("fp16");
        config.train.grad_accum = 1;
        let shape = Gpt2Config { n_layer: layers, ..shape() };
        let masters = TrainState::random_masters(&shape, config.seed, &Device::Cpu).unwrap();
        let mut engine = setup::engine(&config, &shape, masters, 20).unwrap();
        let mut emulator = Emulator::new(0);
        emulator.epilogues = epilogues;
        let mut device = DeviceEngine::new(emulator, &engine, config.dtype, [ROWS, SEQ_LEN, 1]).unwrap();
        device.device.launches.set(0);
        device.step(&mut engine, &[batch(0)]).unwrap();
        device.device.launches.get()
    };
    let [without, one, two] = [0, 1, 2].map(|layers| launches(layers, true));
    assert_eq!((without, one - without, two - one), (21, 22, 22));
    // A GELU forward and one back, and four biases' gradients in two kernels each.
    assert_eq!(launches(1, false) - launches(0, false), 32);
}

/// The head in several tiles, whose weight's gradient is summed in FP32; weights of its own.
#[test]
fn tiles_of_the_head_make_the_same_step() {
    for untied in [false, true] {
        let config = config("bf16");
        let shape = Gpt2Config { tie_word_embeddings: !untied, ..shape() };
        let masters = TrainState::random_masters(&shape, 3, &Device::Cpu).unwrap();
        let [mut cpu, mut host] = [(); 2].map(|()| setup::engine(&config, &shape, copy_of(&masters), 20).unwrap());
        let mut device = on_device(&host, &config);
        let padded = shape.padded_vocab();
        device.workspace.cut_head(&device.device, 18, padded, shape.n_embd);
        let batches = [batch(0), batch(1)];
        let (expected, found) = (cpu.step(&batches).unwrap(), device.step(&mut host, &batches).unwrap());
        assert!((found.loss - expected.loss).abs() < 1e-2 * expected.loss);
        let layout = cpu.state.weights.layout();
        let gradients = device_gradients(&device, layout);
        for ((entry, found), expected) in layout.iter().zip(&gradients).zip(cpu.grads.total().tensors()) {
            let expected = numbers(expected);
            let error = distance(found, &expected) / typical(&expected);
            assert!(error < 0.06, "gradient of {}: {error}", entry.name);
        }
    }
}

fn copy_of(masters: &Parameters) -> Parameters {
    let copy = masters.zeros_like(DType::F32).unwrap();
    for (from, to) in masters.tensors().iter().zip(copy.tensors()) {
        view::copy(from, to).unwrap();
    }
    copy
}

#[test]
fn evaluation_has_no_dropout_and_leaves_no_trace() {
    let config = config("fp32");
    let (mut cpu, mut host) = (engine(&config), engine(&config));
    let mut device = on_device(&host, &config);
    let batches = |left: &mut usize, out: &mut Batch| {
        *out = batch(*left);
        *left -= 1;
        *left > 0
    };
    let (mut left, mut also_left) = (4, 4);
    let expected = cpu.evaluate(&mut batch(0), |out| batches(&mut left, out)).unwrap();
    let found = device.evaluate(&host, &mut batch(0), &mut |out| batches(&mut also_left, out)).unwrap();
    assert!((found.0 - expected.0).abs() < 1e-5 && found.1 == expected.1, "{found:?} {expected:?}");
    let (a, b) = (cpu.step(&[batch(9)]).unwrap(), device.step(&mut host, &[batch(9)]).unwrap());
    assert!((a.loss - b.loss).abs() < 1e-5);
}

#[test]
fn batches_that_do_not_fit_are_refused() {
    let config = config("fp32");
    let mut host = engine(&config);
    let mut device = on_device(&host, &config);
    let mut refused = |batch: Batch, expected: &str| {
        let message = device.step(&mut host, &[batch]).unwrap_err().to_string();
        assert!(message.starts_with(expected), "{message}");
    };
    refused(Batch::new(ROWS, SEQ_LEN - 1), "24 tokens for buffers of 27");
    let mut wrong = batch(0);
    wrong.targets[3] = 67;
    refused(wrong, "target 67 is outside the model's vocabulary of 67");
    let mut wrong = batch(0);
    wrong.inputs[3] = 70;
    refused(wrong, "token id 70 is outside the model's vocabulary of 67");
}

/// A run over the built-in text in FP16 whose scale begins too high.
fn trainer(device: bool) -> Trainer {
    trainer_with(device, |_| ())
}

fn trainer_with(device: bool, change: impl FnOnce(&mut Config)) -> Trainer {
    let mut config = Config::resolve(&crate::train::Layers::default()).unwrap();
    config.device = "cpu".into();
    (config.train.batch_size, config.train.seq_len, config.train.steps) = (1, 8, Some(8));
    (config.train.grad_accum, config.train.sample_tokens) = (2, 4);
    config.train.eval_batches = 2;
    config.scaler.init_scale = 2f32.powi(19);
    (config.dropout.residual, config.dropout.attention) = (0.1, 0.1);
    change(&mut config);
    let mut source = ModelSource::open(&config, &mut |_| ()).unwrap();
    source.config = Gpt2Config { n_layer: 1, n_embd: 16, n_inner: 32, n_head: 2, n_positions: 16, ..source.config };
    let masters = source.masters(config.seed, &Device::Cpu).unwrap();
    let mut trainer = Trainer::with_parts(config, source, masters, &mut |_| ()).unwrap();
    if device {
        emulate(&mut trainer);
    }
    trainer
}

/// What a run tells of its steps, without times.
fn told(events: &Receiver<Record>) -> Vec<String> {
    let told = |record: Record| match &record.event {
        Event::Step(step) => Some(format!("{} {} {} {:?}", step.step, step.loss, step.grad_norm, step.scale)),
        Event::Overflow(overflow) => Some(format!("{} {:?}", overflow.step, overflow.origin)),
        _ => None,
    };
    events.try_iter().filter_map(told).collect()
}

/// Steps that are launched before the figures of the last one are there, and void behind an overflow, are the steps that are
/// waited for one by one.
#[test]
fn steps_launched_ahead_are_the_same_steps() {
    for on_overflow in [OnOverflow::Skip, OnOverflow::Retry] {
        let run = |at_a_time: u64| {
            let mut trainer = trainer_with(true, |config| config.scaler.on_overflow = on_overflow);
            let mut emitter = Emitter::new(None);
            let events = emitter.connect();
            trainer.attach(Run::open(tempfile::tempdir().unwrap().path().join("run")).unwrap(), emitter);
            for _ in 0..6 / at_a_time {
                trainer.advance(at_a_time).unwrap();
            }
            (told(&events), trainer)
        };
        let ((ahead, one), (waited, other)) = (run(6), run(1));
        assert_eq!(ahead, waited);
        assert!(ahead.len() > 6, "no overflow: {ahead:?}");
        assert_eq!(verify::compare(&one, &other).unwrap().differences, [""; 0]);
    }
}

/// A wish that comes while steps are on their way is heard when they have ended, with every step told once.
#[test]
fn wishes_are_heard_between_two_steps() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = trainer_with(true, |config| config.train.steps = Some(60));
    let mut emitter = Emitter::new(None);
    let events = emitter.connect();
    let (wishes, commands) = std::sync::mpsc::channel();
    trainer.attach(Run::open(folder.path().join("run")).unwrap(), emitter);
    trainer.listen(commands);
    let screen = std::thread::spawn(move || {
        let (mut steps, mut evals) = (Vec::new(), Vec::new());
        for record in &events {
            match &record.event {
                Event::Step(step) => {
                    steps.push(step.step);
                    match step.step {
                        4 => wishes.send(Command::EvalNow).unwrap(),
                        8 => wishes.send(Command::Stop { save: true }).unwrap(),
                        _ => {}
                    }
                }
                Event::Eval(validation) => evals.push((validation.step, steps.len() as u64)),
                Event::Finished(finished) => return (steps, evals, finished.step),
                _ => {}
            }
        }
        panic!("the run has not told of its end")
    });
    trainer.run().unwrap();
    let (steps, evals, last) = screen.join().unwrap();
    assert_eq!(steps, (1..=last).collect::<Vec<_>>());
    assert!((8..60).contains(&last), "{last}");
    assert_eq!(evals.len(), 1);
    assert!(evals[0].0 == evals[0].1 && (4..last).contains(&evals[0].0), "{evals:?}");
    let saved = Checkpoint::open(trainer.checkpoint().unwrap()).unwrap();
    assert_eq!(saved.state().step, last);
}

fn emulate(trainer: &mut Trainer) {
    let config = trainer.config().clone();
    trainer.run_on(|engine| Ok(Box::new(on_device(engine, &config)))).unwrap();
}

/// Steps, events, samples, validation, checkpoints: a whole run, then its end once more from the checkpoint in the middle,
/// on the device bit for bit, on the CPU nearly.
#[test]
fn a_run_resumes_on_the_device_and_on_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    let mut straight = trainer(true);
    let mut emitter = Emitter::new(None);
    let events = emitter.connect();
    straight.attach(Run::open(folder.path().join("run")).unwrap(), emitter);
    straight.advance(5).unwrap();
    straight.save().unwrap();
    let saved = straight.checkpoint().unwrap().to_path_buf();
    straight.run().unwrap();
    let skipped = straight.engine().state.counters.skipped();
    assert!((1..5).contains(&skipped), "{skipped} steps skipped");
    let (mut origins, mut losses, mut validations, mut samples) = (0, 0, 0, 0);
    for record in events.try_iter() {
        match record.event {
            Event::Overflow(overflow) => origins += u64::from(overflow.origin.is_some()),
            Event::Step(step) => losses += u32::from(step.loss.is_finite()),
            Event::Eval(validation) => validations += u32::from(validation.loss.is_finite()),
            Event::Sample(_) => samples += 1,
            _ => {}
        }
    }
    assert_eq!((origins, losses, validations, samples), (skipped, 8, 1, 1));

    let checkpoint = Checkpoint::open(&saved).unwrap();
    let resume = || Trainer::resume(straight.config().clone(), &checkpoint, &mut |_| ()).unwrap();
    let mut resumed = resume();
    emulate(&mut resumed);
    resumed.advance(3).unwrap();
    let proof = verify::compare(&straight, &resumed).unwrap();
    assert_eq!(proof.differences, [""; 0]);

    let mut on_cpu = resume();
    on_cpu.advance(3).unwrap();
    assert_eq!(on_cpu.engine().state.counters, straight.engine().state.counters);
    assert_eq!(on_cpu.engine().state.scaler.state(), straight.engine().state.scaler.state());
    compare_states(straight.config(), &straight.engine().state, &on_cpu.engine().state);

    // The other way round: what the CPU has written, the device goes on from.
    let mut begun = trainer(false);
    begun.attach(Run::open(folder.path().join("cpu")).unwrap(), Emitter::new(None));
    begun.advance(5).unwrap();
    begun.save().unwrap();
    let checkpoint = Checkpoint::open(begun.checkpoint().unwrap()).unwrap();
    let mut moved = Trainer::resume(begun.config().clone(), &checkpoint, &mut |_| ()).unwrap();
    emulate(&mut moved);
    moved.advance(3).unwrap();
    begun.advance(3).unwrap();
    assert_eq!(moved.engine().state.counters, begun.engine().state.counters);
    compare_states(begun.config(), &moved.engine().state, &begun.engine().state);
}
