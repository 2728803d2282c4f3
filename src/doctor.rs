//! Diagnoses this machine: processor, memory, GPU support, caches, disk, and access to the Hub.

use crate::engine::kernels::amx;
use crate::engine::kernels::isa::Isa;
use crate::store::hub::{Settings, connect, free_bytes, without_password};
use crate::telemetry::{MachineMemory, cpu_name};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The diagnosis; facts that are not available are `None`.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Diagnosis {
    pub(crate) version: &'static str,
    pub(crate) cpu: CpuInfo,
    pub(crate) memory_bytes: Option<u64>,
    /// Bytes of memory available to a new process.
    pub(crate) memory_available_bytes: Option<u64>,
    pub(crate) gpu: GpuInfo,
    pub(crate) folders: Vec<FolderInfo>,
    pub(crate) hub: HubStatus,
}

/// The first driver that runs PTX of CUDA 13.0.
#[cfg(not(feature = "cuda"))]
const MIN_DRIVER: u32 = 580;

/// Timeout for name lookup and connection together.
const TIMEOUT: Duration = Duration::from_secs(3);

/// The processor as the kernels use it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct CpuInfo {
    pub(crate) name: Option<String>,
    /// Default number of compute threads.
    pub(crate) threads: usize,
    /// The instruction set used by the kernels.
    pub(crate) isa: String,
    /// Whether this process may use AMX's tiles, or why not.
    pub(crate) tiles: String,
    /// Features that the kernels can use, and whether they are available.
    pub(crate) features: Vec<(&'static str, bool)>,
}

/// Support for NVIDIA GPUs.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct GpuInfo {
    pub(crate) compiled: bool,
    /// Names of the driver's device files.
    pub(crate) devices: Vec<String>,
    pub(crate) note: String,
}

/// A folder that `finetune` writes into.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct FolderInfo {
    pub(crate) purpose: &'static str,
    pub(crate) path: PathBuf,
    /// Whether it exists; it is created when needed.
    pub(crate) exists: bool,
    /// Bytes of the files in it.
    pub(crate) bytes: Option<u64>,
    pub(crate) free_bytes: Option<u64>,
}

/// Whether the Hub is reachable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct HubStatus {
    /// `HF_ENDPOINT` without its password, or the public one.
    pub(crate) endpoint: String,
    /// `None` if it was not tried.
    pub(crate) reachable: Option<bool>,
    /// An explanation, and what to do.
    pub(crate) note: String,
}

/// Diagnoses the machine; takes at most 3 seconds, if the Hub does not answer.
pub(crate) fn diagnose() -> Diagnosis {
    let memory = MachineMemory::now();
    let hub = Settings::from_env();
    Diagnosis {
        version: env!("CARGO_PKG_VERSION"),
        cpu: CpuInfo {
            name: cpu_name(),
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            isa: Isa::current().to_string(),
            tiles: amx::support().to_string(),
            features: cpu_features(),
        },
        memory_bytes: memory.total,
        memory_available_bytes: memory.available,
        gpu: gpu(),
        hub: check_hub(&hub),
        folders: folders(hub.token_cache, hub.cache),
    }
}

/// Checks the Hub: connects to the endpoint and disconnects.
pub(crate) fn check_hub(settings: &Settings) -> HubStatus {
    let endpoint = without_password(&settings.endpoint);
    if settings.offline {
        let note = format!("not tried: `{}` is set, so only cached models are used", settings.offline_variable);
        return HubStatus { endpoint, reachable: None, note };
    }
    match connect(settings, TIMEOUT) {
        Ok(took) => {
            HubStatus { endpoint, reachable: Some(true), note: format!("answers within {} ms", took.as_millis()) }
        }
        Err(why) => {
            let note = format!("unreachable: {why}; use a local folder or a mirror (`HF_ENDPOINT=URL`)");
            HubStatus { endpoint, reachable: Some(false), note }
        }
    }
}

/// The CPU features that [`Isa`] uses.
#[cfg(target_arch = "x86_64")]
fn cpu_features() -> Vec<(&'static str, bool)> {
    vec![
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("f16c", is_x86_feature_detected!("f16c")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bw", is_x86_feature_detected!("avx512bw")),
        ("avx512dq", is_x86_feature_detected!("avx512dq")),
        ("avx512vl", is_x86_feature_detected!("avx512vl")),
        ("avx512bf16", is_x86_feature_detected!("avx512bf16")),
        ("amx-bf16", amx::support() != amx::AmxSupport::Missing),
    ]
}

/// The CPU features that [`Isa`] uses.
#[cfg(target_arch = "aarch64")]
fn cpu_features() -> Vec<(&'static str, bool)> {
    vec![("neon", true), ("bf16", std::arch::is_aarch64_feature_detected!("bf16"))]
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn cpu_features() -> Vec<(&'static str, bool)> {
    Vec::new()
}

fn gpu() -> GpuInfo {
    let compiled = cfg!(feature = "cuda");
    let is_card = |name: &String| name.strip_prefix("nvidia").is_some_and(|number| number.parse::<u32>().is_ok());
    let entries = std::fs::read_dir("/dev").into_iter().flatten().flatten();
    let mut devices: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).filter(is_card).collect();
    devices.sort();
    let note = describe(!devices.is_empty());
    GpuInfo { compiled, devices, note }
}

#[cfg(feature = "cuda")]
fn describe(_: bool) -> String {
    match crate::engine::gpu::all() {
        Ok(gpus) if gpus.is_empty() => {
            "this build supports GPUs, but the driver reports none; training runs on the CPU".into()
        }
        Ok(gpus) => gpus.join("; "),
        Err(why) => format!("this build supports GPUs, but none can be used ({why}); training runs on the CPU"),
    }
}

#[cfg(not(feature = "cuda"))]
fn describe(exists: bool) -> String {
    if !exists {
        return "this build supports only the CPU".into();
    }
    let there = "a GPU is present, but this build supports only the CPU; rebuild with `--features cuda`";
    let version = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    match driver_series(&version).filter(|series| *series < MIN_DRIVER) {
        Some(old) => format!("{there}; driver {old} is too old for CUDA 13.0; update it to {MIN_DRIVER} or later"),
        None => there.into(),
    }
}

/// The driver's series from `/proc/driver/nvidia/version`, such as 580 for `580.65.06`.
#[cfg(any(test, not(feature = "cuda")))]
fn driver_series(version: &str) -> Option<u32> {
    let line = version.lines().find(|line| line.starts_with("NVRM version"))?;
    let number = |word: &str| word.split_once('.').and_then(|(series, _)| series.parse().ok());
    line.split_whitespace().find_map(number)
}

fn folders(tokens: PathBuf, models: PathBuf) -> Vec<FolderInfo> {
    let folders = [("runs", "checkpoints".into()), ("token caches", tokens), ("models of the Hub", models)];
    let facts = |(purpose, path): (&'static str, PathBuf)| FolderInfo {
        purpose,
        exists: path.is_dir(),
        bytes: path.is_dir().then(|| size_of_folder(&path)),
        free_bytes: free_bytes(&path),
        path,
    };
    folders.into_iter().map(facts).collect()
}

/// Bytes of all files below a folder. Skips links, because the Hub's cache names every file twice.
pub(crate) fn size_of_folder(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let size = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => size_of_folder(&entry.path()),
        Ok(metadata) if metadata.is_file() => metadata.len(),
        _ => 0,
    };
    entries.map(size).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_series_is_parsed() {
        let version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build\nGCC version:  gcc 12.2.0\n";
        assert_eq!(driver_series(version), Some(570));
        assert_eq!(driver_series("GCC version: 12.2"), None);
        assert_eq!(driver_series(""), None);
    }

    #[test]
    fn a_folders_size_is_that_of_its_files_without_links() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("deeper")).unwrap();
        std::fs::write(folder.path().join("a"), [0; 100]).unwrap();
        std::fs::write(folder.path().join("deeper/b"), [0; 23]).unwrap();
        std::os::unix::fs::symlink(folder.path().join("a"), folder.path().join("deeper/link")).unwrap();
        assert_eq!(size_of_folder(folder.path()), 123);
        let free = free_bytes(&folder.path().join("not/there/yet")).unwrap();
        assert!(free > 0 && free.abs_diff(free_bytes(folder.path()).unwrap()) < 1 << 30);
    }
}
