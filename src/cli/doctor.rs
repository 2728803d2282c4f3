//! `finetune doctor`: reports the capabilities of this machine.

use crate::doctor::{Diagnosis, diagnose};
use crate::telemetry::bytes;
use crate::{Error, Result, untrusted};
use clap::Args;
use std::fmt::Write as _;
use std::io::Write;

#[derive(Args, Debug)]
pub(super) struct DoctorArgs {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &DoctorArgs, out: &mut dyn Write) -> Result<()> {
    let found = diagnose();
    let text = if args.json {
        serde_json::to_string_pretty(&found).map_err(|error| Error::config("--json", error.to_string()))? + "\n"
    } else {
        as_text(&found)
    };
    out.write_all(text.as_bytes()).map_err(Error::stdout)
}

fn as_text(found: &Diagnosis) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let mut line = |key: &str, value: &str| _ = writeln!(text, "{key:<18}{}", untrusted::sanitize_line(value));
    let (has, lacks): (Vec<_>, Vec<_>) = found.cpu.features.iter().partition(|(_, there)| *there);
    let names = |features: &[&(&str, bool)]| features.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(" ");
    let unknown = || "unknown".to_owned();
    line("finetune", found.version);
    line("processor", found.cpu.name.as_deref().unwrap_or("unknown"));
    line("threads", &found.cpu.threads.to_string());
    line("instructions", &format!("{} (set FINETUNE_ISA to use another)", found.cpu.isa));
    if cfg!(target_arch = "x86_64") {
        line("AMX", &found.cpu.tiles);
    }
    line("features", &names(&has));
    if !lacks.is_empty() {
        line("  missing", &names(&lacks));
    }
    let size = |size: Option<u64>| size.map_or_else(unknown, bytes);
    line("memory", &format!("{}, {} available", size(found.memory_bytes), size(found.memory_available_bytes)));
    line("GPU", &found.gpu.note);
    for folder in &found.folders {
        let held = if folder.exists { size(folder.bytes) } else { "not created yet".into() };
        let path = folder.path.display();
        let free = size(folder.free_bytes);
        line(folder.purpose, &format!("{path}: {held}, {free} free"));
    }
    line("Hub", &format!("{}: {}", found.hub.endpoint, found.hub.note));
    text
}
