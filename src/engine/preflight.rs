//! The preflight of our CUDA kernels, and of passes that are recorded.
//!
//! An illegal access poisons a CUDA context and a wrong barrier hangs, so the program starts itself again for each
//! operation ([`worker_main`]), with a time limit. If an operation differs, crashes or hangs, candle's is used, by all
//! processes of a run.

use super::collective::ProcessGroup;
use super::device::DeviceContext;
use super::gpu;
use super::kernels::cuda::{KernelFamily, before_candle, check};
use super::kernels::pass::PassInputs;
use super::kernels::{CandleKernels, Kernels};
use super::model::{Checkpointing, Decoder, DropoutRates, ForwardMode, InputIds, ModelSpec, Parameters, Workspace};
use super::optim::{Gradients, MasterWeights};
use crate::precision::PrecisionPolicy;
use crate::random::{Domain, Stream};
use crate::untrusted::subprocess;
use candle_core::{DType, Device, DeviceLocation, bail};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::{Read, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::thread::ScopedJoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use strum::VariantArray;

/// The first argument that makes the program call [`worker_main`].
pub(crate) const ARGUMENT: &str = "__preflight";
/// For one operation: opening the device, compiling its kernels for the GPU, and all checks.
const TIMEOUT: Duration = Duration::from_mins(1);

/// The operations whose kernels pass on `device`, and recorded passes if `records`; `notice` receives one message about
/// the operations that fail, or one about recorded passes.
pub(crate) fn passing_families(
    device: &Device,
    records: bool,
    notice: &mut dyn FnMut(String),
) -> BTreeSet<KernelFamily> {
    let (Some(_), DeviceLocation::Cuda { gpu_id }) = (subprocess::worker_command(ARGUMENT), device.location()) else {
        notice("using candle's kernels, because only the program `finetune` can test the custom ones".into());
        return BTreeSet::new();
    };
    // A trial mostly waits for the device to open, so trials run concurrently.
    let tried = std::thread::scope(|scope| {
        let can_be_tried = |family: &KernelFamily| match family {
            KernelFamily::Graph => records,
            KernelFamily::AttentionWgmma => gpu::has_wgmma(device),
            _ => true,
        };
        let families = KernelFamily::VARIANTS.iter().copied().filter(can_be_tried);
        let trials: Vec<_> = families.map(|family| (family, scope.spawn(move || run(gpu_id, family)))).collect();
        let result =
            |trial: ScopedJoinHandle<'_, _>| trial.join().unwrap_or_else(|_| Err("could not be tested".into()));
        trials.into_iter().map(|(family, trial)| (family, result(trial))).collect::<Vec<_>>()
    });
    let mut passing = BTreeSet::new();
    let mut failed = Vec::new();
    let mut unrecorded = None;
    for (family, result) in tried {
        match result {
            Ok(()) => drop(passing.insert(family)),
            Err(why) if family == KernelFamily::Graph => unrecorded = Some(why),
            Err(why) => failed.push(format!("{} {why}", family.name())),
        }
    }
    if !failed.is_empty() {
        // A pass with candle's operations cannot be recorded.
        passing.remove(&KernelFamily::Graph);
        notice(format!("using candle's kernels instead of those that failed their preflight: {}", failed.join("; ")));
    } else if let Some(why) = unrecorded {
        notice(format!("passes run without a CUDA graph, which failed its preflight: {why}"));
    }
    passing
}

/// The operations in the name of some kernels; `None` for a CPU's.
fn families_in(name: &str) -> Option<BTreeSet<KernelFamily>> {
    let names = if name == CandleKernels.name() { "" } else { name.strip_prefix("fused:")? };
    let named = |family: &KernelFamily| names.split(',').any(|name| name == family.name());
    Some(KernelFamily::VARIANTS.iter().copied().filter(named).collect())
}

/// Restricts a GPU's kernels to those that passed in every process, because a trial may reach its time limit in one
/// alone. If another process has fewer, adds a notice. All processes call it together.
pub(crate) fn agree(
    group: &dyn ProcessGroup,
    open: &mut DeviceContext,
    notices: &mut Vec<String>,
) -> crate::Result<()> {
    let all = group.all_gather_messages(&(open.kernels.name().to_owned(), notices.clone()))?;
    let families: Option<Vec<_>> = all.iter().map(|(name, _)| families_in(name)).collect();
    let Some(families) = families else { return Ok(()) };
    let own = &families[group.rank()];
    let common = families.iter().fold(own.clone(), |common, other| &common & other);
    if common == *own {
        return Ok(());
    }
    let lacking = all.iter().zip(&families).enumerate().filter(|(_, (_, other))| !own.is_subset(other));
    let lacking = lacking.map(|(rank, ((_, said), _))| format!("{}: {}", group.name(rank), said.join("; ")));
    notices.push(format!("the kernels of all processes are restricted by {}", lacking.collect::<Vec<_>>().join("; ")));
    open.kernels = before_candle(common, &open.device)?;
    Ok(())
}

/// Fails unless the passes of a small model have the same bits if they are recorded and replayed with new inputs.
fn check_graph(device: &Device) -> candle_core::Result<()> {
    let seed = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
    let Some(spec) = ModelSpec::named("tiny") else { bail!("there is no model `tiny`") };
    let dropout = DropoutRates { embedding: 0.1, attention: 0.1, residual: 0.1 };
    let spec = ModelSpec { dropout, ..spec.resized(1, 64, 2) };
    let with = |records: bool| {
        let families = KernelFamily::VARIANTS.iter().filter(|family| records || **family != KernelFamily::Graph);
        before_candle(families.copied().collect(), device)
    };
    let masters = Parameters::random(&spec.parameters(), seed, device)?;
    let (_, weights) = MasterWeights::new(masters, PrecisionPolicy::FP16, &*with(false)?)?;
    if passes(&spec, &weights, with(true)?, seed)? != passes(&spec, &weights, with(false)?, seed)? {
        bail!("it differs from passes without one");
    }
    Ok(())
}

/// The bits of all gradients and losses of some FP16 passes over random tokens.
fn passes(
    spec: &ModelSpec,
    weights: &Parameters,
    kernels: Arc<dyn Kernels>,
    seed: u64,
) -> candle_core::Result<Vec<Vec<u32>>> {
    const BATCH: usize = 2;
    const SEQ_LEN: usize = 16;
    let policy = PrecisionPolicy::FP16;
    let model = Decoder::new(spec, weights, kernels)?;
    let mut workspace =
        Workspace::for_training(spec, policy, (BATCH, SEQ_LEN), Checkpointing::None, &weights.device())?;
    let grads = Gradients::new(weights, policy, 1)?;
    let grads = grads.micro_batch_grads();
    let random = Stream::new(seed, Domain::Bench);
    let mut found = Vec::new();
    // The first pass compiles the kernels, the second is recorded, and the graph is replayed from then on.
    for micro_batch in 0..4 {
        let id = |token| random.block(0, micro_batch, token)[0] % spec.vocab_size as u32;
        let ids: Vec<u32> = (0..(BATCH * SEQ_LEN) as u32).map(id).collect();
        let tokens = InputIds::new(&ids, SEQ_LEN);
        let mode = ForwardMode::Train { seed, micro_batch };
        let scale = (micro_batch + 1) as f32;
        let buffers = Some(workspace.pass_identity([weights, grads], tokens));
        let inputs = PassInputs { seed: Some(scale), buffers, ..model.pass_inputs(tokens, &ids, mode) };
        model.kernels().pass(&inputs, &mut || {
            model.forward(weights, tokens, mode, &mut workspace, &mut ())?;
            model.loss_and_head_gradient(weights, &ids, (scale, None), &workspace, grads, &mut ())?;
            model.backward(weights, tokens, mode, &mut workspace, grads, &mut ())
        })?;
        if let Some(why) = model.kernels().take_notice() {
            bail!("{why}");
        }
        for tensor in grads.tensors().iter().chain([workspace.losses()]) {
            let values = tensor.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
            found.push(values.into_iter().map(f32::to_bits).collect());
        }
    }
    Ok(found)
}

/// Tries one operation in another process.
fn run(ordinal: usize, family: KernelFamily) -> std::result::Result<(), String> {
    let untried = |error: std::io::Error| format!("could not be tested: {error}");
    let mut command =
        subprocess::worker_command(ARGUMENT).ok_or_else(|| untried(std::io::ErrorKind::NotFound.into()))?;
    let mut child = command.args([ordinal.to_string().as_str(), family.name()]).spawn().map_err(untried)?;
    let Some(status) = subprocess::wait(&mut child, TIMEOUT).map_err(untried)? else {
        return Err(format!("did not end within {} s", TIMEOUT.as_secs()));
    };
    let mut said = String::new();
    if let Some(out) = &mut child.stdout {
        let _ = out.read_to_string(&mut said);
    }
    match (status.code(), said.lines().next()) {
        (Some(0), _) => Ok(()),
        (Some(_), Some(said)) => Err(said.to_owned()),
        _ => Err(format!("crashed ({status})")),
    }
}

/// Checks one operation in this process: `arguments` are the GPU's number and the operation's name. Prints a failure to
/// standard output.
pub(crate) fn worker_main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    // A kernel may hang after the waiting program has ended. The waiting program itself reports the timeout first.
    std::thread::spawn(|| {
        std::thread::sleep(2 * TIMEOUT);
        std::process::exit(1);
    });
    let arguments: Vec<OsString> = arguments.collect();
    let texts: Vec<&str> = arguments.iter().filter_map(|argument| argument.to_str()).collect();
    let [ordinal, name] = texts[..] else { return ExitCode::from(2) };
    let family = KernelFamily::VARIANTS.iter().copied().find(|family| family.name() == name);
    let (Ok(ordinal), Some(family)) = (ordinal.parse(), family) else { return ExitCode::from(2) };
    let tried = gpu::open(ordinal, PrecisionPolicy::FP32).and_then(|(device, _)| {
        let checked = if family == KernelFamily::Graph { check_graph(&device) } else { check(family, &device) };
        checked.map_err(|error| error.to_string())
    });
    let Err(error) = tried else { return ExitCode::SUCCESS };
    let _ = writeln!(std::io::stdout(), "{}", error.lines().next().unwrap_or_default());
    ExitCode::FAILURE
}
