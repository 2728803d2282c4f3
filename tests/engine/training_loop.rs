//! The invariants of the loop around the step, gradient checkpointing, which must change no bit, and the choice of
//! kernels.

use crate::common::compare;
use crate::common::of_kind;
use crate::distributed::train;
use crate::run::{self, attach, steps};
use candle_core::Device;
use finetune::data::Batch;
use finetune::engine::collective::SingleProcess;
use finetune::engine::device::DeviceContext;
use finetune::engine::kernels::KernelBackend;
use finetune::engine::model::{Checkpointing, ModelSpec, Parameters, Workspace};
use finetune::engine::optim::MasterWeights;
use finetune::precision::{OnOverflow, PrecisionPolicy, PrecisionUnit};
use finetune::store::checkpoint::{Run, latest_valid};
use finetune::telemetry::{Activity, Command, Event, FinishReason, FlushedTensor, StepRecord, StepStatus};
use finetune::train::{Config, DataSets, Interval, SetupEvent, Trainer, engine, verify_resume};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc;

fn config(policy: PrecisionPolicy, steps: u64) -> Config {
    let mut config = run::config(policy, (2, 32));
    config.train.steps = Some(steps);
    config.train.grad_accum = 2;
    config
}

/// A run's trainer and events.
fn run(config: &Config, command: Option<Command>) -> (Trainer, Vec<Event>, FinishReason) {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = run::trainer(config);
    let records = attach(&mut trainer, Run::open(folder.path().join("run")).unwrap());
    let (commands, receiver) = mpsc::channel();
    for command in command.into_iter().flat_map(|command| [command; 20]) {
        commands.send(command).unwrap();
    }
    trainer.commands = Some(receiver);
    let reason = trainer.run().unwrap();
    (trainer, run::events(&records), reason)
}

/// Prompts of a few letters with answers of one, in a file.
fn prompts(folder: &Path, prompt: &str) -> String {
    let line = format!("{{\"prompt\": \"{prompt}\", \"completion\": \"y\"}}\n");
    let path = folder.join("prompts.jsonl");
    std::fs::write(&path, line.repeat(400)).unwrap();
    path.display().to_string()
}

/// Regression: repeated steps counted as steps of the epoch, whose last batches were not read. A resumed run has the
/// same learning rates, also with other batches.
#[test]
fn an_epoch_ends_with_its_data_if_steps_are_repeated() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = run::config(PrecisionPolicy::FP16, (1, 32));
    let rows = (0..9).map(|row| format!("{{\"prompt\": \"{row}\", \"completion\": \"y\"}}\n"));
    std::fs::write(folder.path().join("rows.jsonl"), rows.collect::<String>()).unwrap();
    config.data = DataSets::One(folder.path().join("rows.jsonl").display().to_string());
    config.val = Some("none".into());
    (config.train.epochs, config.train.steps) = (Some(1.0), None);
    (config.checkpoint.save_every, config.checkpoint.keep_last) = (Interval::Steps(1), 99);
    config.scaler.on_overflow = OnOverflow::Retry;
    let trained = |name: &str, config: &Config, from: u64| {
        let checkpoint = folder.path().join(format!("whole/step-{from:06}"));
        let events = train(1, config, &folder.path().join(name), (from > 0).then_some(&*checkpoint));
        steps(&events).cloned().collect::<Vec<_>>()
    };
    let rates = |steps: &[StepRecord]| {
        let applied = steps.iter().filter(|step| step.outcome == StepStatus::Applied);
        applied.map(|step| step.lr).collect::<Vec<_>>()
    };
    config.scaler.init_scale = 1024.0;
    let expected = trained("without overflows", &config, 0);
    assert_eq!(expected.len(), 9);
    config.scaler.init_scale = 2f32.powi(23);
    let whole = trained("whole", &config, 0);
    let last = whole.last().unwrap();
    assert!(last.skipped > 1 && last.updates == 9 && last.epoch == 1.0, "{last:?}");
    assert_eq!(rates(&whole), rates(&expected));
    for from in [1, last.step - 4] {
        // Some figures are NaN.
        let resumed = trained(&format!("from {from}"), &config, from);
        assert_eq!(format!("{resumed:?}"), format!("{:?}", &whole[from as usize..]));
    }
    config.train.batch_size = 3;
    let sixth = whole.iter().find(|step| step.updates == 6).unwrap().step;
    let wider = trained("wider", &config, sixth);
    let last = wider.last().unwrap();
    assert_eq!((last.updates, last.epoch), (7, 1.0), "{last:?}");
}

#[test]
fn gradient_checkpointing_changes_no_bit_and_saves_memory() {
    for policy in [PrecisionPolicy::FP32, PrecisionPolicy::FP16, PrecisionPolicy::BF16] {
        let [kept, recomputed] = [false, true].map(|per_block| {
            let mut config = config(policy, 8);
            config.train.gradient_checkpointing = per_block;
            config.dropout.residual = 0.1;
            config.dropout.attention = 0.1;
            config.scaler.init_scale = 2f32.powi(20);
            run(&config, None).0
        });
        for (a, b) in [
            (kept.engine.state.masters.parameters(), recomputed.engine.state.masters.parameters()),
            (&kept.engine.state.adamw.exp_avg_sq, &recomputed.engine.state.adamw.exp_avg_sq),
        ] {
            for ((name, a), (_, b)) in a.iter().zip(b.iter()) {
                let bits = |x: &candle_core::Tensor| -> Vec<u32> {
                    x.flatten_all().unwrap().to_vec1::<f32>().unwrap().iter().map(|x| x.to_bits()).collect()
                };
                assert_eq!(bits(a), bits(b), "{policy} {name}");
            }
        }
        let spec = ModelSpec::named("gpt2-medium").unwrap();
        let bytes = |keep| {
            let bytes = Workspace::bytes(&spec, policy, [8, 512], keep, false).unwrap();
            bytes.activations + bytes.scratch
        };
        assert!(bytes(Checkpointing::PerBlock) < bytes(Checkpointing::None) / 2, "{policy}");
    }
}

#[test]
fn asking_for_an_evaluation_moves_neither_the_best_nor_early_stopping() {
    let mut settings = config(PrecisionPolicy::FP32, 6);
    settings.train.early_stopping = 2;
    // The loss rises, so each of 20 looks would count as one without a new best.
    settings.optimizer.lr = 1.0;
    let (_, events, reason) = run(&settings, Some(Command::EvalNow));
    assert!(events.iter().filter(|event| matches!(event, Event::Eval(_))).count() > 20);
    assert_eq!((reason, steps(&events).count()), (FinishReason::Done, 6));
}

/// Regression: the dashboard waited for the sample forever.
#[test]
fn asking_for_a_sample_of_a_run_without_samples_is_answered() {
    let mut settings = config(PrecisionPolicy::FP32, 1);
    settings.train.sample_tokens = 0;
    let (_, events, _) = run(&settings, Some(Command::SampleNow));
    let is_answer =
        |event: &&Event| matches!(event, Event::Warning(warning) if warning.message.contains("train.sample_tokens"));
    assert_eq!(events.iter().filter(is_answer).count(), 20);
}

#[test]
fn an_epoch_is_counted_in_samples() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = config(PrecisionPolicy::FP32, 40);
    settings.data = DataSets::One(prompts(folder.path(), "abc"));
    let (_, events, _) = run(&settings, None);
    let last = steps(&events).last().unwrap();
    // Nine tenths of 400 samples train, 4 a step.
    let expected = 40.0 * 4.0 / 360.0;
    assert!((last.epoch / expected - 1.0).abs() < 0.1, "{} instead of about {expected}", last.epoch);
}

#[test]
fn samples_without_an_answer_in_their_row_are_left_out_and_counted() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = config(PrecisionPolicy::FP16, 12);
    settings.train.batch_size = 1;
    settings.train.grad_accum = 1;
    settings.train.seq_len = 8;
    settings.data = DataSets::One(prompts(folder.path(), &"long ".repeat(8)));
    let message =
        Trainer::new(Arc::new(SingleProcess), settings.clone(), None, &mut |_| ()).map(drop).unwrap_err().to_string();
    assert!(message.contains("no loss tokens: 360 of 360 samples are longer"), "{message}");
    let path = &settings.data.names()[0];
    let text = std::fs::read_to_string(path).unwrap();
    std::fs::write(path, text + &"{\"prompt\": \"a\", \"completion\": \"b\"}\n".repeat(400)).unwrap();
    let mut told = Vec::new();
    Trainer::new(Arc::new(SingleProcess), settings.clone(), None, &mut |event| {
        if let SetupEvent::Preview(preview) = event {
            told.push(preview);
        }
    })
    .unwrap();
    assert_eq!((told.len(), told[0].stats.skipped, told[0].rows), (1, 400, 320));
    let (_, events, _) = run(&settings, None);
    assert!(steps(&events).count() == 12 && steps(&events).all(|step| step.loss > 0.0));

    let spec = ModelSpec::named("tiny").unwrap();
    let masters = Parameters::random(&spec.parameters(), 1, &Device::Cpu).unwrap();
    let kernels = DeviceContext::cpu().kernels;
    let weights = MasterWeights::new(masters, settings.dtype, &*kernels).unwrap();
    let mut engine = engine(Arc::new(SingleProcess), &settings, &spec, weights, kernels, 1).unwrap();
    let message = engine.step(&[Batch::new(1, 8)]).unwrap_err().to_string();
    assert!(message.contains("no loss tokens"), "{message}");
    assert_eq!(engine.state.counters.step, 0);
}

/// Overflows at first, dropout, accumulation, probes, variances, attribution and a block in FP8: all that looks at
/// tensors.
fn everything_on(kernels: KernelBackend) -> Config {
    let mut config = Config { kernels, ..config(PrecisionPolicy::FP16, 8) };
    config.train.batch_size = 1;
    config.train.seq_len = 16;
    config.train.sample_tokens = 4;
    config.dropout.embedding = 0.1;
    config.dropout.residual = 0.1;
    config.dropout.attention = 0.1;
    config.scaler.init_scale = 2f32.powi(24);
    config.telemetry.probe_every = 2;
    config.telemetry.grad_variance_every = 1;
    config.precision.fp8.block = Some(1.into());
    config
}

#[test]
fn whatever_looks_at_a_step_works_with_every_set_of_kernels() {
    let [fused, plain] =
        [KernelBackend::Fused, KernelBackend::Candle].map(|kernels| run(&everything_on(kernels), None).1);
    let losses = |events: &[Event]| steps(events).map(|step| step.loss).collect::<Vec<_>>();
    assert_eq!(losses(&fused).len(), 8);
    for (fused, plain) in losses(&fused).iter().zip(losses(&plain)) {
        assert!((plain / fused - 1.0).abs() < 1e-2, "{plain} and {fused}");
    }
    // Overflows with their origins, probes with the flushed values, variances.
    let told = |events: &[Event]| -> Vec<String> {
        let brief = |event: &Event| match event {
            Event::Overflow(overflow) => {
                let origin = overflow.first_nonfinite.as_ref().unwrap();
                Some(format!("overflow at {}, {} {}", overflow.step, origin.layer, origin.tensor))
            }
            Event::Fp32Probe(probe) => {
                // Which of the smallest gradients are exactly zero depends on the order of sums.
                let sum = |of: fn(&FlushedTensor) -> u64| probe.tensors.iter().map(of).sum::<u64>() as f64;
                let share = sum(|tensor| tensor.nonzero) / sum(|tensor| tensor.count);
                Some(format!("fp32_probe at {} of {} tensors, {share:.3}", probe.step, probe.tensors.len()))
            }
            Event::GradVariance(variances) => {
                Some(format!("grad_variance at {}: {}", variances.step, variances.layers.len()))
            }
            Event::Sample(_) => Some("a sample".into()),
            _ => None,
        };
        events.iter().filter_map(brief).collect()
    };
    assert_eq!(told(&plain), told(&fused));
    for kind in ["overflow", "fp32_probe", "grad_variance", "a sample"] {
        assert!(told(&fused).iter().any(|told| told.starts_with(kind)), "no {kind}");
    }
}

/// On a GPU a count copies all gradients to the host, so that between two counts there must be none.
#[test]
fn exponents_are_counted_only_every_so_many_steps() {
    for kernels in [KernelBackend::Fused, KernelBackend::Candle] {
        let mut settings = config(PrecisionPolicy::BF16, 7);
        settings.kernels = kernels;
        settings.telemetry.grad_histogram_every = 3;
        let (_, events, _) = run(&settings, None);
        let counted: Vec<u64> =
            steps(&events).filter(|step| !step.grads.exponents.is_empty()).map(|step| step.step).collect();
        assert_eq!(counted, [3, 6]);
    }
}

#[test]
fn a_run_resumes_bit_for_bit_by_candles_kernels_and_by_no_others() {
    let folder = tempfile::tempdir().unwrap();
    let proof =
        verify_resume(&everything_on(KernelBackend::Candle), 6, 4, folder.path(), &Activity::default()).unwrap();
    assert_eq!(proof.differences, [""; 0]);
    assert!(proof.skipped > 0);
    let saved = latest_valid(&folder.path().join("verify-resume")).unwrap().checkpoint;
    let error = Trainer::new(Arc::new(SingleProcess), everything_on(KernelBackend::Auto), Some(&saved), &mut |_| ())
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("`kernels` changed from `candle` to `fused`"), "{error}");
}

/// The first step in which each tensor's gradient held 2^-24 is logged once in a run, even if the run is resumed.
#[test]
fn a_tensor_that_reaches_the_least_magnitude_of_fp16_is_named_once() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(PrecisionPolicy::FP16, 12);
    config.telemetry.grad_stats_every = 1;
    config.scaler.init_scale = 256.0;
    let train = |mut trainer: Trainer, steps: u64| {
        let records = attach(&mut trainer, Run::open(folder.path().join("run")).unwrap());
        trainer.advance(steps).unwrap();
        trainer.save().unwrap();
        run::events(&records)
    };
    let mut events = train(run::trainer(&config), 5);
    let saved = latest_valid(&folder.path().join("run")).unwrap().checkpoint;
    events.extend(train(Trainer::new(Arc::new(SingleProcess), config.clone(), Some(&saved), &mut |_| ()).unwrap(), 7));
    let mut told = BTreeMap::new();
    for touched in of_kind!(&events, Event::UnderflowOnset) {
        for name in &touched.tensors {
            assert_eq!(told.insert(name.clone(), touched.step), None, "{name} is named twice");
        }
    }
    // The tables of all tensors, which every step has here, agree.
    let mut seen = BTreeMap::new();
    for step in steps(&events) {
        for tensor in step.tensors.iter().filter(|tensor| tensor.stats.min_abs == Some(2f32.powi(-24))) {
            seen.entry(tensor.name.clone()).or_insert(step.step);
        }
    }
    assert_eq!(told, seen);
    assert!(told.values().any(|step| *step == 1) && told.values().any(|step| *step > 5), "{told:?}");
    config.dtype = PrecisionPolicy::BF16;
    let (_, events, _) = run(&config, None);
    assert_eq!(of_kind!(&events, Event::UnderflowOnset).count(), 0, "BF16's gradients have room");
}

#[test]
fn the_largest_gradient_of_each_layer_is_recorded() {
    let mut config = config(PrecisionPolicy::FP16, 6);
    config.telemetry.grad_max_every = 3;
    config.telemetry.grad_stats_every = 1;
    config.scaler.init_scale = 65536.0;
    let (trainer, events, _) = run(&config, None);
    let maxima: Vec<_> = of_kind!(&events, Event::GradMax).collect();
    assert_eq!(maxima.iter().map(|maxima| maxima.step).collect::<Vec<_>>(), [3, 6]);
    for maxima in maxima {
        let step = steps(&events).find(|step| step.step == maxima.step).unwrap();
        assert_eq!(maxima.loss_scale.to_bits(), step.loss_scale.to_bits());
        assert_eq!(maxima.layers.len(), trainer.engine.model.spec().num_layers + 1);
        for (layer, largest) in &maxima.layers {
            let of_module = step.tensors.iter().filter(|tensor| PrecisionUnit::of(&tensor.name).to_string() == *layer);
            let expected = compare::largest(&of_module.map(|tensor| tensor.stats.max_abs).collect::<Vec<_>>());
            assert_eq!(f64::from(*largest).to_bits(), expected.to_bits(), "{layer}");
        }
    }
}
