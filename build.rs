//! Compiles the CUDA kernels with nvcc where the feature `cuda` is on, and does nothing elsewhere.
//!
//! Each `src/engine/kernels/*.cu` becomes a fat binary: machine code for `CUDA_COMPUTE_CAP` (90 if it is not set), and PTX that a
//! driver translates for any other GPU from compute capability 8.0 on.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Mutex;
use std::thread;

const KERNELS: &str = "src/engine/kernels";
const DEFAULT_CAPABILITY: &str = "90";

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return ExitCode::SUCCESS;
    }
    match compile_all() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            println!("cargo::error={}", message.replace('\n', " / "));
            ExitCode::FAILURE
        }
    }
}

fn compile_all() -> Result<(), String> {
    for variable in ["NVCC", "CUDA_HOME", "CUDA_COMPUTE_CAP"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    println!("cargo::rerun-if-changed={KERNELS}/cuda");
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    let mut sources: Vec<PathBuf> = fs::read_dir(KERNELS)
        .map_err(|error| format!("{KERNELS}: {error}"))?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "cu"))
        .collect();
    sources.sort();
    let mut modules = String::from("[\n");
    for source in &sources {
        println!("cargo::rerun-if-changed={}", source.display());
        let path = binary(&out, source).display().to_string();
        let _ = writeln!(modules, "({:?}, include_bytes!({path:?})),", name(source));
    }
    let queue = Mutex::new(sources.iter());
    let work = || {
        while let Some(source) = queue.lock().ok().and_then(|mut queue| queue.next()) {
            compile(source, &binary(&out, source))?;
        }
        Ok::<(), String>(())
    };
    let workers = env::var("NUM_JOBS").ok().and_then(|jobs| jobs.parse().ok()).unwrap_or(1);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|t| t.join().unwrap_or_else(|_| Err("a compiling thread panicked".into())))
    })?;
    fs::write(out.join("cuda_modules.rs"), modules + "]").map_err(|error| format!("{}: {error}", out.display()))
}

fn name(source: &Path) -> String {
    source.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

fn binary(out: &Path, source: &Path) -> PathBuf {
    out.join(name(source)).with_extension("fatbin")
}

/// The kernels are cut to this GPU's registers, where a value that does not fit them is an error; others have to live with it.
fn watched(capability: &str) -> &'static [&'static str] {
    if capability == DEFAULT_CAPABILITY { &["-Xptxas", "--warn-on-spills,--warn-on-local-memory-usage"] } else { &[] }
}

fn compile(source: &Path, target: &Path) -> Result<(), String> {
    let nvcc = env::var_os("NVCC").map(PathBuf::from);
    let nvcc = nvcc.or_else(|| env::var_os("CUDA_HOME").map(|home| Path::new(&home).join("bin/nvcc")));
    let nvcc = nvcc.unwrap_or_else(|| "nvcc".into());
    let capability = env::var("CUDA_COMPUTE_CAP").unwrap_or_else(|_| DEFAULT_CAPABILITY.into());
    let output = Command::new(&nvcc)
        .args(["--fatbin", "-std=c++17", "-O3", "-Werror", "all-warnings"])
        .args(watched(&capability))
        .args(["-gencode", "arch=compute_80,code=compute_80"])
        .args(["-gencode", &format!("arch=compute_{capability},code=sm_{capability}")])
        .arg(source)
        .arg("-o")
        .arg(target)
        .output()
        .map_err(|error| format!("the feature `cuda` needs CUDA's compiler; {}: {error}", nvcc.display()))?;
    if output.status.success() {
        Ok(())
    } else {
        Err(format!("{}: {}", source.display(), String::from_utf8_lossy(&output.stderr)))
    }
}
