//! Figures from `/proc`: this process's resources, whether another process is alive, the machine's memory.

use serde::{Deserialize, Serialize};
use std::fs;

/// Clock ticks per second in `/proc/self/stat`: fixed at 100 for user space on every Linux architecture we build for.
const TICKS_PER_SECOND: f64 = 100.0;

/// Memory and processor time of this process; `None` on systems without `/proc`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ProcessStats {
    /// Resident memory, in bytes.
    pub rss_bytes: Option<u64>,
    /// Largest resident memory so far, in bytes.
    pub peak_rss_bytes: Option<u64>,
    /// Processor time of all threads, user and system, in seconds.
    pub cpu_seconds: Option<f64>,
}

impl ProcessStats {
    /// The current figures. Takes about ten microseconds.
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

/// Bytes of memory that this process can still allocate: the machine's available memory, within the limits of its
/// control groups and its own (`ulimit -v`). `None` if the system does not report it.
pub fn available_bytes() -> Option<u64> {
    let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let machine = MachineMemory::now().available;
    let own = address_space_left(&text("/proc/self/limits"), &text("/proc/self/status"));
    let group = text("/proc/self/cgroup").lines().find_map(|line| line.strip_prefix("0::").map(str::to_owned));
    let root = std::path::Path::new("/sys/fs/cgroup");
    let folder = root.join(group.unwrap_or_default().trim_start_matches('/'));
    let groups = folder.ancestors().take_while(|folder| folder.starts_with(root)).filter_map(|folder| {
        let file = |name: &str| fs::read_to_string(folder.join(name)).unwrap_or_default();
        group_left(&file("memory.max"), &file("memory.current"), &file("memory.stat"))
    });
    machine.into_iter().chain(own).chain(groups).min()
}

/// Bytes of address space left below the limit in `/proc/self/limits`.
fn address_space_left(limits: &str, status: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    let limit: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(limit.saturating_sub(kibibytes(status, "VmSize:")?))
}

/// Bytes left below a control group's limit; reclaimable file cache does not count as used.
fn group_left(max: &str, current: &str, stat: &str) -> Option<u64> {
    let number = |text: &str| text.trim().parse::<u64>().ok();
    let cache = stat.lines().find_map(|line| number(line.strip_prefix("inactive_file ")?)).unwrap_or(0);
    Some(number(max)?.saturating_sub(number(current)?.saturating_sub(cache)))
}

/// Identifies a process; unlike a process id alone, it is never reused.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    /// The process id.
    pub pid: u32,
    /// When it started, in clock ticks since boot.
    pub start: u64,
    /// The machine's boot id.
    pub boot: String,
}

impl ProcessId {
    /// This process; `None` on systems without `/proc`.
    pub fn own() -> Option<Self> {
        let pid = std::process::id();
        Some(Self { pid, start: start_ticks(pid)?, boot: boot_id()? })
    }

    /// Whether the process runs; `None` if it belongs to another machine or boot.
    pub fn is_alive(&self) -> Option<bool> {
        (boot_id()? == self.boot).then(|| start_ticks(self.pid) == Some(self.start))
    }
}

/// The processor's model name.
pub fn cpu_name() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(": ")?.1.to_owned())
}

/// The machine's memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MachineMemory {
    /// Total, in bytes.
    pub total: Option<u64>,
    /// Available without swapping, in bytes.
    pub available: Option<u64>,
}

impl MachineMemory {
    /// The current figures.
    pub fn now() -> Self {
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        Self { total: kibibytes(&meminfo, "MemTotal:"), available: kibibytes(&meminfo, "MemAvailable:") }
    }
}

/// Whether this process was started with `signal` ignored.
pub fn is_ignored(signal: i32) -> bool {
    let mask = own_status("SigIgn:").and_then(|mask| u64::from_str_radix(&mask, 16).ok()).unwrap_or(0);
    mask & (1 << (signal - 1)) != 0
}

fn boot_id() -> Option<String> {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").ok().map(|id| id.trim().to_owned())
}

/// Field 22 of `/proc/PID/stat`; `None` for a process that has ended, including a zombie.
fn start_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") { None } else { fields.nth(18)?.parse().ok() }
}

/// The value of a line such as `VmRSS:     1234 kB`, in bytes.
fn kibibytes(status: &str, key: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(key))?;
    let figure: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(figure * 1024)
}

/// Fields 14 and 15 of `/proc/self/stat`. Field 2, the program's name in parentheses, may contain anything, so fields
/// are counted from its closing parenthesis.
fn cpu_seconds(stat: &str) -> Option<f64> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut ticks = rest.split_whitespace().skip(11).map(str::parse::<f64>);
    Some((ticks.next()?.ok()? + ticks.next()?.ok()?) / TICKS_PER_SECOND)
}

/// The processors that this process may use, such as `0-3,8`.
pub fn allowed_cpus() -> Option<String> {
    own_status("Cpus_allowed_list:")
}

/// The value of a line of `/proc/self/status`.
fn own_status(key: &str) -> Option<String> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    status.lines().find_map(|line| Some(line.strip_prefix(key)?.trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_respects_limits() {
        let limits = "Max data size             unlimited            unlimited            bytes\n\
                      Max address space         4194304000           unlimited            bytes\n";
        assert_eq!(address_space_left(limits, "VmSize:\t 1000000 kB\n"), Some(4_194_304_000 - 1_024_000_000));
        assert_eq!(address_space_left(&limits.replace("4194304000", "unlimited "), "VmSize:\t 1 kB\n"), None);
        assert_eq!(group_left("1000\n", "700\n", "anon 3\ninactive_file 200\n"), Some(500));
        assert_eq!(group_left("max\n", "700\n", ""), None);
        assert!(available_bytes().is_none_or(|bytes| bytes > 0));
    }

    #[test]
    fn figures_are_found_after_a_name_with_spaces_and_parentheses() {
        let stat = "42 (a) b) c) S 1 2 3 4 5 6 7 8 9 10 250 50 0 0";
        assert_eq!(cpu_seconds(stat), Some(3.0));
        assert_eq!(kibibytes("VmPeak:\t 9 kB\nVmRSS:\t    12 kB\n", "VmRSS:"), Some(12 * 1024));
        assert_eq!(kibibytes("HugePages_Total:       0\nMemTotal: 16384 kB", "MemTotal:"), Some(16 << 20));
        assert_eq!(kibibytes("", "VmRSS:"), None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn processes_with_equal_ids_are_distinguished() {
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
