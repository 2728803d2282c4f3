//! Several processes as threads of one: their joint result has the bits of a single process, for any number of
//! processes.

use crate::common::processes::together;
use crate::run::{self, attach};
use candle_core::{DType, Tensor};
use finetune::Result;
use finetune::data::Tokenizer;
use finetune::engine::collective::{ProcessGroup, SingleProcess, TensorExchange};
use finetune::engine::kernels::view::{View, read, write};
use finetune::engine::kernels::{Fused, op};
use finetune::engine::model::ModelSpec;
use finetune::engine::optim::{Collector, Gradients, OptimizerKind, Sharding};
use finetune::precision::{Fp8Config, ScalerMode};
use finetune::store::checkpoint::{Checkpoint, Disk, FsOp, Run, compare};
use finetune::telemetry::Event;
use finetune::train::{Config, ConfigLayers, Trainer, WeightInit};
use serde_json::json;
use std::collections::{BTreeSet, VecDeque};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Seven micro-batches of `tiny` with dropout, from a scale that overflows at first.
pub(crate) fn config(dtype: &str) -> Config {
    let overrides = [
        ("train.steps", "4"),
        ("train.batch_size", "1"),
        ("train.seq_len", "16"),
        ("train.grad_accum", "7"),
        ("train.eval_every", "3"),
        ("train.eval_batches", "5"),
        ("train.sample_tokens", "0"),
        ("dropout.residual", "0.1"),
        ("scaler.init_scale", "1048576.0"),
        ("scaler.backoff_factor", "0.25"),
        ("telemetry.grad_stats_every", "1"),
        ("telemetry.grad_histogram_every", "1"),
        ("telemetry.probe_every", "2"),
        ("telemetry.grad_variance_every", "2"),
        ("checkpoint.save_every", "2"),
        ("checkpoint.keep_last", "10"),
    ];
    let value = |text: &str| format!("x = {text}").parse::<toml::Table>().unwrap().remove("x").unwrap();
    let mut overrides: Vec<_> = overrides.iter().map(|(key, text)| ((*key).to_owned(), value(text))).collect();
    overrides.push(("dtype".into(), toml::Value::String(dtype.into())));
    overrides.push(("precision.masters".into(), (dtype != NEAREST).into()));
    let mut config = Config::resolve(&ConfigLayers { overrides, ..ConfigLayers::default() }).unwrap();
    config.telemetry.lost_updates_every = 2;
    config
}

/// The policy of FP16 weights without masters.
const NEAREST: &str = "p=f16,c=f16,g=f16,r=f32";

/// The policy of BF16 weights without FP32 masters.
const STOCHASTIC: &str = "p=bf16,c=bf16,g=bf16,r=f32";

/// Writes a model into `folder` whose shards are cut inside of matrices.
fn cut_model(folder: &Path) -> String {
    let tiny = ModelSpec::named("tiny").unwrap().resized(2, 64, 2);
    // Matrices of 2.1 blocks of 65,536 elements. Many shards have no part of a matrix that ends inside of a block of
    // 8-bit moments, or of a bias that ends inside of a block of random numbers.
    let spec = ModelSpec { intermediate_size: 2201, ..tiny };
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(folder.join("config.json"), spec.to_json("float32")).unwrap();
    std::fs::write(folder.join("tokenizer.json"), Tokenizer::byte().json()).unwrap();
    folder.to_str().unwrap().to_owned()
}

/// Trains in `world` processes, in `folder`, and returns the logged events without times.
pub(crate) fn train(world: usize, config: &Config, folder: &Path, checkpoint: Option<&Path>) -> Vec<Event> {
    train_with(&|process| process, world, config, folder, checkpoint)
}

/// [`train`] in processes that `group` changes.
fn train_with(
    group: &(dyn Fn(Arc<dyn ProcessGroup>) -> Arc<dyn ProcessGroup> + Sync),
    world: usize,
    config: &Config,
    folder: &Path,
    checkpoint: Option<&Path>,
) -> Vec<Event> {
    let told = together(world, |process: Arc<dyn ProcessGroup>| {
        let process = group(process);
        let checkpoint = checkpoint.map(|path| Checkpoint::open(path).unwrap());
        let mut trainer = Trainer::new(process.clone(), config.clone(), checkpoint.as_ref(), &mut |_| ()).unwrap();
        trainer.check_consistency(checkpoint.as_ref()).unwrap();
        if !process.is_leader() {
            trainer.run_worker().unwrap();
            return Vec::new();
        }
        let records = attach(&mut trainer, Run::open(folder).unwrap());
        trainer.run().unwrap();
        run::events(&records)
    });
    let mut events = told.into_iter().next().unwrap();
    events.retain(|event| {
        !matches!(event, Event::Started(_) | Event::CheckpointSaved(_) | Event::Finished(_) | Event::Throughput(_))
    });
    for event in &mut events {
        if let Event::Step(step) = event {
            **step = step.clone().without_measurements();
        }
    }
    events
}

/// Asserts that each number of processes, with either sharding, gives the log and the last checkpoint of one process,
/// and returns this log. A run of n processes is in `folder/n`.
pub(crate) fn assert_same_bits(config: &Config, folder: &Path, worlds: &[usize]) -> Vec<Event> {
    let run = |world: usize, config: &Config, name: &str| train(world, config, &folder.join(name), None);
    let one = run(1, config, "1");
    let mut shared = config.clone();
    shared.train.shard = Sharding::Gradients;
    for world in worlds {
        for (config, name) in [(config, world.to_string()), (&shared, format!("{world}-gradients"))] {
            // As text, where NaN equals itself.
            assert_eq!(
                format!("{:#?}", run(*world, config, &name)),
                format!("{one:#?}"),
                "{name} in {}",
                folder.display()
            );
            assert_same_end(folder, &name);
        }
    }
    one
}

/// Asserts that a run in `folder` ended in the checkpoint of one process.
pub(crate) fn assert_same_end(folder: &Path, run: &str) {
    let last = |run: &str| folder.join(run).join("step-000004");
    assert_eq!(compare(&last("1"), &last(run)).unwrap(), [], "{run} in {}", folder.display());
}

fn overflows(events: &[Event]) -> usize {
    events.iter().filter(|event| matches!(event, Event::Overflow(_))).count()
}

#[test]
fn any_number_of_processes_gives_the_same_log_and_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    for (dtype, worlds) in [("fp16", &[2, 3, 4, 9][..]), ("fp32", &[3]), ("bf16", &[3])] {
        let mut config = config(dtype);
        if dtype == "bf16" {
            config.precision.keep = String::from("h.1,head").try_into().unwrap();
        }
        let one = assert_same_bits(&config, &folder.path().join(dtype), worlds);
        assert_eq!(overflows(&one) > 0, dtype == "fp16", "{} overflows", overflows(&one));
    }
}

/// Each process sees only its own micro-batches.
#[test]
fn any_number_of_processes_measures_the_same_maxima() {
    let folder = tempfile::tempdir().unwrap();
    let mut predictive = config("fp16");
    predictive.scaler.mode = ScalerMode::Predictive;
    let mut fp8 = config("fp16");
    fp8.precision.fp8 = Fp8Config { block: Some(1.into()), ..Fp8Config::default() };
    for (name, config) in [("predictive", predictive), ("fp8", fp8)] {
        assert_same_bits(&config, &folder.path().join(name), &[3]);
    }
}

/// Most micro-batches leave some of the experts without tokens.
#[test]
fn any_number_of_processes_trains_a_mixture_of_experts_with_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    let spec = json!({
        "model_type": "qwen3_moe", "vocab_size": 257, "hidden_size": 40, "moe_intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "num_experts": 8, "num_experts_per_tok": 2,
        "output_router_logits": true,
    });
    std::fs::create_dir(&model).unwrap();
    std::fs::write(model.join("config.json"), spec.to_string()).unwrap();
    std::fs::write(model.join("tokenizer.json"), Tokenizer::byte().json()).unwrap();
    let mut config = config("fp16");
    config.model = model.to_str().unwrap().to_owned();
    config.init = WeightInit::Random;
    config.dropout.residual = 0.0;
    assert!(overflows(&assert_same_bits(&config, folder.path(), &[2, 3])) > 0);
}

/// Moments in 8 bits are cut between blocks, and stochastic rounding draws by the element of the whole parameter.
#[test]
fn any_number_of_processes_saves_memory_with_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let model = cut_model(&folder.path().join("model"));
    for (dtype, optimizer, worlds) in [
        ("fp16", OptimizerKind::AdamW8bit, &[2, 3, 4, 9][..]),
        (STOCHASTIC, OptimizerKind::AdamW, &[2, 3, 4, 9]),
        (NEAREST, OptimizerKind::AdamW, &[3]),
        (STOCHASTIC, OptimizerKind::AdamW8bit, &[3]),
    ] {
        let mut config = config(dtype);
        config.model = model.clone();
        config.init = WeightInit::Random;
        config.train.optimizer = optimizer;
        let runs = folder.path().join(format!("{dtype}-{optimizer:?}"));
        assert_same_bits(&config, &runs, worlds);
        for (before, after) in [(3, 1), (1, 4), (3, 2)] {
            resume(&config, &runs, before, after);
        }
    }
}

/// Resumes a run in `folder` with another number of processes, which ends in the checkpoint of one process.
pub(crate) fn resume(config: &Config, folder: &Path, before: usize, after: usize) {
    let name = format!("{before} and then {after} {:?}", config.train.shard);
    train(after, config, &folder.join(&name), Some(&folder.join(before.to_string()).join("step-000002")));
    assert_same_end(folder, &name);
}

/// Adapters are shared out like any other parameters.
#[test]
fn any_number_of_processes_trains_the_same_adapters() {
    let folder = tempfile::tempdir().unwrap();
    for dora in [false, true] {
        let mut config = config("fp16");
        config.lora.r = Some(3);
        config.lora.alpha = Some(6.0);
        config.lora.dropout = 0.1;
        if dora {
            config.lora.use_dora = true;
            config.lora.modules_to_save = vec!["ln_f".into()];
        }
        assert_same_bits(&config, &folder.path().join(dora.to_string()), &[2, 3, 4]);
    }
}

#[test]
fn a_run_resumes_with_another_number_of_processes() {
    let folder = tempfile::tempdir().unwrap();
    let config = config("fp16");
    assert_same_bits(&config, folder.path(), &[3]);
    let mut shared = config.clone();
    shared.train.shard = Sharding::Gradients;
    for (world, config) in [(1, &config), (2, &config), (4, &config), (2, &shared)] {
        resume(config, folder.path(), 3, world);
    }
}

/// The sum of the micro-batches is the sum along the tree, for one process as well.
#[test]
fn a_step_sums_its_micro_batches_along_the_tree() {
    let mut config = config("fp32");
    config.dropout.residual = 0.0;
    let gradients = |trainer: &Trainer| -> Vec<f32> {
        let mut all = Vec::new();
        for tensor in trainer.engine.grads.total().tensors() {
            let tensor = read(tensor).unwrap();
            let View::F32(values) = tensor.view() else { panic!("not FP32") };
            all.extend_from_slice(values);
        }
        all
    };
    config.train.grad_accum = 4;
    let mut whole = run::trainer(&config);
    whole.advance(1).unwrap();
    // Each micro-batch alone: the same windows, since four of one make a step of four. Its gradient is four times as
    // large.
    config.train.grad_accum = 1;
    config.optimizer.lr = 0.0;
    config.optimizer.weight_decay = 0.0;
    let mut single = run::trainer(&config);
    let parts: Vec<Vec<f32>> = (0..4)
        .map(|_| {
            single.advance(1).unwrap();
            gradients(&single)
        })
        .collect();
    let sums = |i: usize| (parts[0][i] / 4.0 + parts[1][i] / 4.0) + (parts[2][i] / 4.0 + parts[3][i] / 4.0);
    let serial = |i: usize| parts[0][i] / 4.0 + parts[1][i] / 4.0 + parts[2][i] / 4.0 + parts[3][i] / 4.0;
    let found = gradients(&whole);
    assert!((0..found.len()).all(|i| found[i].to_bits() == sums(i).to_bits()), "not the tree's sum");
    assert!((0..found.len()).any(|i| found[i].to_bits() != serial(i).to_bits()), "the two cannot be told apart");
}

/// Tensors to or from ranks.
type Tensors = Vec<(usize, Tensor)>;

/// Exchanges tensors as the GPUs of several processes do, with the tensors of CPUs, as late as possible.
#[derive(Debug)]
struct Direct {
    group: Arc<dyn ProcessGroup>,
    pending: Mutex<VecDeque<(Tensors, Tensors)>>,
    /// The maximum length of `pending` in all processes.
    most: Arc<AtomicU64>,
}

impl ProcessGroup for Direct {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn world_size(&self) -> usize {
        self.group.world_size()
    }

    fn all_to_all(&self, out: &[&[u8]], into: &mut [&mut [u8]]) -> Result<()> {
        self.group.all_to_all(out, into)
    }

    fn gpus(&self) -> Option<&dyn TensorExchange> {
        Some(self)
    }
}

impl TensorExchange for Direct {
    fn start(&self, out: Tensors, into: Tensors) -> Result<()> {
        let mut pending = self.pending.lock().unwrap();
        pending.push_back((out, into));
        self.most.fetch_max(pending.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    fn wait(&self) -> Result<Duration> {
        let (out, into) = self.pending.lock().unwrap().pop_front().unwrap();
        let (mut sent, mut received) = (vec![Vec::new(); self.world_size()], vec![Vec::new(); self.world_size()]);
        for (rank, tensor) in &out {
            sent[*rank].extend_from_slice(read(tensor)?.view().bytes());
        }
        for (rank, tensor) in &into {
            received[*rank].extend(vec![0; tensor.elem_count() * tensor.dtype().size_in_bytes()]);
        }
        let sent: Vec<&[u8]> = sent.iter().map(Vec::as_slice).collect();
        self.all_to_all(&sent, &mut received.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>())?;
        for (rank, tensor) in &into {
            let rest = received[*rank].split_off(tensor.elem_count() * tensor.dtype().size_in_bytes());
            let bytes = std::mem::replace(&mut received[*rank], rest);
            write(tensor, |mut view| view.bytes_mut().copy_from_slice(&bytes))?;
        }
        Ok(Duration::ZERO)
    }
}

/// Without clipping, because a GPU's statistics have another order of summation.
#[test]
fn processes_that_exchange_tensors_have_the_bits_of_one() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config("fp16");
    config.optimizer.max_grad_norm = 0.0;
    assert!(overflows(&train(1, &config, &folder.path().join("1"), None)) > 0);
    let mut logs = Vec::new();
    for (world, sharding) in
        [(2, Sharding::Optimizer), (3, Sharding::Optimizer), (3, Sharding::Gradients), (4, Sharding::Gradients)]
    {
        config.train.shard = sharding;
        let name = format!("{world}-{sharding:?}");
        let most = Arc::new(AtomicU64::new(0));
        let direct = |group| Arc::new(Direct { group, pending: Mutex::default(), most: most.clone() }) as Arc<_>;
        let log = train_with(&direct, world, &config, &folder.path().join(&name), None);
        assert_eq!(most.load(Ordering::Relaxed), 2, "exchanges wait for the end of the backward pass");
        assert_same_end(folder.path(), &name);
        logs.push((name, format!("{log:#?}")));
    }
    for (name, log) in &logs {
        assert_eq!(log, &logs[0].1, "{name}");
    }
}

/// Counts the bytes that a process sends.
#[derive(Debug)]
struct Counted {
    process: Arc<dyn ProcessGroup>,
    sent: AtomicU64,
}

impl ProcessGroup for Counted {
    fn rank(&self) -> usize {
        self.process.rank()
    }

    fn world_size(&self) -> usize {
        self.process.world_size()
    }

    fn all_to_all(&self, out: &[&[u8]], into: &mut [&mut [u8]]) -> Result<()> {
        self.sent.fetch_add(out.iter().map(|bytes| bytes.len() as u64).sum(), Ordering::Relaxed);
        self.process.all_to_all(out, into)
    }
}

/// The bytes of `docs/scale.md`: gradients to the owners of shards, in FP32 unless a share is one micro-batch or each
/// micro-batch is sent; new weights to all; statistics of blocks of 65,536 elements.
#[test]
fn a_step_sends_the_bytes_of_the_formula() {
    const STEPS: u64 = 2;
    for (dtype, width) in [("fp16", 2), ("fp32", 4)] {
        let cases =
            [(2, 2, 1), (4, 4, 1), (2, 4, 1), (3, 3, 1), (2, 7, 1), (3, 7, 2)].map(|it| (it, Sharding::Optimizer));
        let each = [(2, 2, 1), (4, 4, 1), (2, 4, 2), (2, 8, 4)].map(|it| (it, Sharding::Gradients));
        for ((world, micro_batches, nodes), sharding) in cases.into_iter().chain(each) {
            let mut config = config(dtype);
            config.train.grad_accum = micro_batches;
            config.scaler.init_scale = 1024.0;
            config.train.shard = sharding;
            let telemetry = &mut config.telemetry;
            telemetry.grad_histogram_every = 1000;
            telemetry.probe_every = 0;
            telemetry.grad_variance_every = 0;
            telemetry.lost_updates_every = 0;
            let sent = together(world, |process: Arc<dyn ProcessGroup>| {
                let counted = Arc::new(Counted { process, sent: AtomicU64::new(0) });
                let mut trainer = Trainer::new(counted.clone(), config.clone(), None, &mut |_| ()).unwrap();
                let before = counted.sent.load(Ordering::Relaxed);
                if counted.process.is_leader() {
                    trainer.advance(STEPS).unwrap();
                    trainer.stop_workers().unwrap();
                } else {
                    trainer.run_worker().unwrap();
                }
                let weights = trainer.engine.state.weights.tensors();
                let elements = weights.iter().map(|tensor| tensor.elem_count() as u64);
                let blocks = elements.clone().map(|elements| elements.div_ceil(65_536)).sum::<u64>();
                (counted.sent.load(Ordering::Relaxed) - before, elements.sum::<u64>(), blocks)
            });
            let (parameters, blocks) = (sent[0].1, sent[0].2);
            let others = world as u64 - 1;
            let gradient = if micro_batches == world || sharding == Sharding::Gradients { width } else { 4 } * nodes;
            let formula = STEPS * others * (parameters * (gradient + width) + 56 * blocks);
            let all: u64 = sent.iter().map(|(sent, _, _)| sent).sum();
            // Orders, losses and lengths take a few hundred bytes more.
            let more = STEPS * others * world as u64 * 200;
            let what = format!("{dtype}, {micro_batches} micro-batches in {world} processes");
            assert!((formula..formula + more).contains(&all), "{what}: {all} bytes, by the formula {formula}");
        }
    }
}

/// Regression: a leader that wrote or synced a file for longer than the time limit was reported as lost.
#[test]
fn a_leader_that_saves_slowly_sends_heartbeats() {
    let root = tempfile::tempdir().unwrap();
    let config = config("fp32");
    together(2, |process: Arc<dyn ProcessGroup>| {
        let group = Arc::new(Counted { process, sent: AtomicU64::new(0) });
        let mut trainer = Trainer::new(group.clone(), config.clone(), None, &mut |_| ()).unwrap();
        if !group.process.is_leader() {
            return trainer.run_worker().unwrap();
        }
        let sent_while_syncing = Arc::new(AtomicU64::new(0));
        let seen = sent_while_syncing.clone();
        let disk = Disk::with_hook(move |operation, path| {
            if operation == FsOp::SyncFile && path.ends_with("model.safetensors") {
                let before = group.sent.load(Ordering::Relaxed);
                let began = Instant::now();
                while seen.load(Ordering::Relaxed) == 0 && began.elapsed() < Duration::from_mins(1) {
                    std::thread::sleep(Duration::from_millis(100));
                    seen.store(group.sent.load(Ordering::Relaxed) - before, Ordering::Relaxed);
                }
            }
            Ok(())
        });
        attach(&mut trainer, Run::open_on(root.path(), disk).unwrap());
        trainer.save().unwrap();
        trainer.stop_workers().unwrap();
        assert!(sent_while_syncing.load(Ordering::Relaxed) > 0, "no heartbeat while a file was synced");
    });
}

/// Sums along the tree take at most 3 % of one process's step more than a running sum.
#[test]
#[ignore = "measures times; .ci/full runs it"]
fn the_tree_costs_one_process_little() {
    const ROUNDS: usize = 15;
    let mut config = config("fp16");
    config.train.batch_size = 4;
    config.train.seq_len = 64;
    config.scaler.init_scale = 1024.0;
    for micro_batches in [2, 3, 4, 7, 8] {
        config.train.grad_accum = micro_batches;
        let mut trainer = run::trainer(&config);
        let median = |mut times: Vec<f64>| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        };
        let timed = |work: &mut dyn FnMut()| {
            let clock = Instant::now();
            work();
            clock.elapsed().as_secs_f64() * 1e3
        };
        let step = median((0..5).map(|_| timed(&mut || trainer.advance(1).unwrap())).collect());
        let weights = &trainer.engine.state.weights;
        let mut along_tree = Gradients::new(weights, config.dtype, micro_batches).unwrap();
        let sum = weights.zeros_like(DType::F32).unwrap();
        let units: BTreeSet<_> = weights.layout().iter().map(|entry| entry.layer.unit()).collect();
        let mut times = [Vec::new(), Vec::new()];
        for _ in 0..ROUNDS {
            times[0].push(timed(&mut || {
                let turns = along_tree.begin_accumulation(micro_batches).unwrap();
                Collector::with(&SingleProcess, &Fused, false, |collector| {
                    for turn in turns {
                        along_tree.begin_turn(turn);
                        for unit in &units {
                            along_tree.collect(*unit, collector).unwrap();
                        }
                    }
                });
            }));
            times[1].push(timed(&mut || {
                for micro_batch in 0..micro_batches {
                    for (from, to) in along_tree.micro_batch_grads().tensors().iter().zip(sum.tensors()) {
                        if micro_batch == 0 {
                            op::Copy { x: from, dropout: None, out: to }.run(&Fused)
                        } else {
                            op::Accumulate { x: from, out: to, inner: &[] }.run(&Fused)
                        }
                        .unwrap();
                    }
                }
            }));
        }
        let [tree, running] = times.map(median);
        let cost = (tree - running) / step;
        println!(
            "{micro_batches} micro-batches: {step:.0} ms a step, running sum {running:.2} ms, tree {tree:.2} ms: {:+.2} % of a step",
            100.0 * cost
        );
        assert!(cost < 0.03, "{micro_batches} micro-batches: {:.1} % of a step", 100.0 * cost);
    }
}

/// Masters and moments of four processes are a quarter each.
#[test]
fn each_process_holds_its_shard_of_masters_and_moments() {
    let bytes = |world: usize| {
        together(world, |process: Arc<dyn ProcessGroup>| {
            let trainer = Trainer::new(process, config("fp16"), None, &mut |_| ()).unwrap();
            let state = &trainer.engine.state;
            [state.masters.parameters(), &state.adamw.exp_avg, &state.adamw.exp_avg_sq]
                .iter()
                .map(|parameters| parameters.bytes())
                .sum::<u64>()
        })
    };
    let whole = bytes(1)[0];
    let parts = bytes(4);
    assert_eq!(parts.iter().sum::<u64>(), whole);
    // As even as blocks of 65,536 elements allow.
    assert!(parts.iter().all(|part| part.abs_diff(whole / 4) <= 12 * 65_536), "{parts:?} of {whole}");
}
