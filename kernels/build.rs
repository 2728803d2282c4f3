//! Compiles our own CUDA kernels for the feature `cuda`, with the nvcc that candle's need as well. Without the feature
//! there is nothing to do.

use std::env;
use std::path::PathBuf;
use std::process::Command;

const FOLDER: &str = "src";
const MODULES: [&str; 10] = [
    "adamw",
    "attention",
    "attention_mma",
    "attention_wgmma",
    "cross_entropy",
    "elementwise",
    "embedding",
    "norm",
    "rope",
    "summary",
];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    println!("cargo::rerun-if-changed={FOLDER}/cuda");
    println!("cargo::rerun-if-env-changed=CUDA_HOME");
    let nvcc =
        env::var_os("CUDA_HOME").map_or_else(|| PathBuf::from("nvcc"), |home| PathBuf::from(home).join("bin/nvcc"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let compile = |module: &str| {
        println!("cargo::rerun-if-changed={FOLDER}/{module}.cu");
        let mut command = Command::new(&nvcc);
        // PTX for every GPU with BF16 tensor cores; the driver compiles it for the GPU in use. Products of four warps
        // exist for one compute capability.
        let capability = if module.ends_with("_wgmma") { "-arch=compute_90a" } else { "-arch=compute_80" };
        command.args(["--ptx", "-std=c++17", "-O3", capability, "-o"]).arg(out.join(format!("{module}.ptx")));
        let child = command.arg(format!("{FOLDER}/{module}.cu")).spawn();
        child.unwrap_or_else(|error| panic!("{}: {error}; the feature `cuda` needs CUDA's toolkit", nvcc.display()))
    };
    for mut child in MODULES.map(compile) {
        let status = child.wait().expect("nvcc was started");
        assert!(status.success(), "nvcc: {status}");
    }
}
