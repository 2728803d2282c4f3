//! Everything that is read from `/proc`: what this process uses, whether another one lives, what the machine has.

use serde::{Deserialize, Serialize};
use std::fs;

/// Clock ticks a second in `/proc/self/stat`: fixed at 100 for user space on every Linux architecture we build for.
const TICKS_PER_SECOND: f64 = 100.0;

/// Memory and processor time of this process; `None` where the system has no `/proc`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ProcessStats {
    /// Resident memory.
    pub rss_bytes: Option<u64>,
    /// Largest resident memory so far.
    pub peak_rss_bytes: Option<u64>,
    /// Processor time of all threads, user and system.
    pub cpu_seconds: Option<f64>,
}

impl ProcessStats {
    /// A look at this moment. Reads two small files of the kernel: some ten microseconds.
    pub fn now() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
        Self {
            rss_bytes: kibibytes(&status, "VmRSS:"),
            peak_rss_bytes: kibibytes(&status, "VmHWM:"),
            cpu_seconds: cpu_seconds(&stat),
        }
    }
}

/// Names a process for as long as the machine runs: a process id alone may be given again.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    /// The process id.
    pub pid: u32,
    /// When it started, in clock ticks since boot.
    pub start: u64,
    /// Which boot of which machine.
    pub boot: String,
}

impl ProcessId {
    /// This process; `None` where the system has no `/proc`.
    pub fn own() -> Option<Self> {
        let pid = std::process::id();
        Some(Self { pid, start: start_ticks(pid)?, boot: boot_id()? })
    }

    /// Whether the process runs; `None` if it is another machine's, of which nothing is known.
    pub fn is_alive(&self) -> Option<bool> {
        (boot_id()? == self.boot).then(|| start_ticks(self.pid) == Some(self.start))
    }
}

/// The processor's name as the system tells it.
pub fn cpu_name() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(": ")?.1.to_owned())
}

/// The machine's memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MachineMemory {
    /// All of it, in bytes.
    pub total: Option<u64>,
    /// What programs can still take without swapping, in bytes.
    pub available: Option<u64>,
}

impl MachineMemory {
    /// A look at this moment.
    pub fn now() -> Self {
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        Self { total: kibibytes(&meminfo, "MemTotal:"), available: kibibytes(&meminfo, "MemAvailable:") }
    }
}

/// Whether this process was started with `signal` ignored.
pub fn is_ignored(signal: i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask & (1 << (signal - 1)) != 0
}

fn boot_id() -> Option<String> {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").ok().map(|id| id.trim().to_owned())
}

/// Field 22 of `/proc/PID/stat`; `None` for a process that has ended, though nobody may have asked for its exit code yet.
fn start_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") { None } else { fields.nth(18)?.parse().ok() }
}

/// The figure of a line `VmRSS:     1234 kB`, in bytes.
fn kibibytes(status: &str, key: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(key))?;
    let figure: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(figure * 1024)
}

/// Fields 14 and 15 of `/proc/self/stat`. Field 2, the program's name in parentheses, may hold anything, so the count
/// starts behind its last parenthesis.
fn cpu_seconds(stat: &str) -> Option<f64> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut ticks = rest.split_whitespace().skip(11).map(str::parse::<f64>);
    Some((ticks.next()?.ok()? + ticks.next()?.ok()?) / TICKS_PER_SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_found_behind_a_name_with_spaces_and_parentheses() {
        let stat = "42 (a) b) c) S 1 2 3 4 5 6 7 8 9 10 250 50 0 0";
        assert_eq!(cpu_seconds(stat), Some(3.0));
        assert_eq!(kibibytes("VmPeak:\t 9 kB\nVmRSS:\t    12 kB\n", "VmRSS:"), Some(12 * 1024));
        assert_eq!(kibibytes("HugePages_Total:       0\nMemTotal: 16384 kB", "MemTotal:"), Some(16 << 20));
        assert_eq!(kibibytes("", "VmRSS:"), None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_process_is_told_from_another_with_its_number() {
        let own = ProcessId::own().expect("Linux has /proc");
        assert_eq!(own.is_alive(), Some(true));
        assert_eq!(ProcessId { start: own.start + 1, ..own.clone() }.is_alive(), Some(false));
        assert_eq!(ProcessId { boot: "another machine".into(), ..own }.is_alive(), None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_process_uses_memory() {
        let stats = ProcessStats::now();
        assert!(stats.rss_bytes.is_some_and(|bytes| bytes > 1 << 20), "{stats:?}");
        assert!(stats.peak_rss_bytes >= stats.rss_bytes && stats.cpu_seconds.is_some(), "{stats:?}");
    }
}
