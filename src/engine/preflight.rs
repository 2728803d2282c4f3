//! The preflight of our CUDA kernels.
//!
//! An illegal access poisons a CUDA context and a wrong barrier hangs, so the program starts itself again for each operation
//! ([`worker_main`]), with a time limit. If an operation differs, crashes or hangs, candle's is used, by all processes of a run.

use super::collective::ProcessGroup;
use super::device::DeviceContext;
use super::gpu;
use super::kernels::cuda::{KernelFamily, before_candle, check};
use super::kernels::{CandleKernels, Kernels};
use crate::precision::PrecisionPolicy;
use crate::untrusted::subprocess;
use candle_core::{Device, DeviceLocation};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::Read;
use std::process::{ExitCode, ExitStatus};
use std::thread::ScopedJoinHandle;
use std::time::Duration;
use strum::VariantArray;

/// The first argument that makes the program call [`worker_main`].
pub(crate) const ARGUMENT: &str = "__preflight";
/// For one operation: opening the device, compiling its kernels for the GPU, and all checks.
const TIMEOUT: Duration = Duration::from_mins(1);

/// The operations whose kernels pass on `device`; `notice` receives one message about those that fail.
pub(crate) fn passing_families(device: &Device, notice: &mut dyn FnMut(String)) -> BTreeSet<KernelFamily> {
    let (Some(_), DeviceLocation::Cuda { gpu_id }) = (subprocess::worker_command(ARGUMENT), device.location()) else {
        notice("using candle's kernels, because only the program `finetune` can test the custom ones".into());
        return BTreeSet::new();
    };
    // A trial mostly waits for the device to open, so trials run concurrently.
    let tried = std::thread::scope(|scope| {
        let trial = |&family: &KernelFamily| (family, scope.spawn(move || run(gpu_id, family)));
        let trials: Vec<_> = KernelFamily::VARIANTS.iter().map(trial).collect();
        let ended = |(family, trial): (_, ScopedJoinHandle<'_, _>)| {
            (family, trial.join().unwrap_or_else(|_| Err("could not be tested".into())))
        };
        trials.into_iter().map(ended).collect::<Vec<_>>()
    });
    let (mut passing, mut failed) = (BTreeSet::new(), Vec::new());
    for (family, result) in tried {
        match result {
            Ok(()) => drop(passing.insert(family)),
            Err(why) => failed.push(format!("{} {why}", family.name())),
        }
    }
    if !failed.is_empty() {
        notice(format!("using candle's kernels instead of those that failed their preflight: {}", failed.join("; ")));
    }
    passing
}

/// The operations in the name of some kernels; `None` for a CPU's.
fn families_in(name: &str) -> Option<BTreeSet<KernelFamily>> {
    let names = if name == CandleKernels.name() { "" } else { name.strip_prefix("fused:")? };
    let named = |family: &KernelFamily| names.split(',').any(|name| name == family.name());
    Some(KernelFamily::VARIANTS.iter().copied().filter(named).collect())
}

/// Restricts a GPU's kernels to those that passed in every process, because a trial may reach its time limit in one alone. If another
/// process has fewer, adds a notice. All processes call it together.
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
    exit_status_to_error(status, said.lines().next())
}

fn exit_status_to_error(status: ExitStatus, said: Option<&str>) -> std::result::Result<(), String> {
    match (status.code(), said) {
        (Some(0), _) => Ok(()),
        (Some(_), Some(said)) => Err(said.to_owned()),
        _ => Err(format!("crashed ({status})")),
    }
}

/// Checks one operation in this process: `arguments` are the GPU's number and the operation's name. Prints a failure to standard
/// output.
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
    let tried = gpu::open(ordinal, PrecisionPolicy::FP32)
        .and_then(|(device, _)| check(family, &device).map_err(|error| error.to_string()));
    match tried {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let mut out = std::io::stdout();
            let line = error.lines().next().unwrap_or_default();
            let _ = std::io::Write::write_all(&mut out, format!("{line}\n").as_bytes());
            ExitCode::FAILURE
        }
    }
}
