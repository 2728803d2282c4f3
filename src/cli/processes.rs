//! The life cycle of several processes for the command line: their start, their errors and their common end.

#[cfg(feature = "mpi")]
use crate::engine::collective::mpi::Mpi;
use crate::engine::collective::{JOB_VARIABLE, LOST, LaunchEnv, Master, ProcessGroup, SingleProcess, Tcp};
use crate::engine::device::DeviceSpec;
use crate::engine::gpu;
use crate::screen::terminal::restore_before_exit;
use crate::store::checkpoint::Checkpoint;
use crate::train::{Config, RunStart, Trainer};
use crate::untrusted::{sanitize_block, subprocess};
use crate::{Error, Result};
use clap::Args;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::{Read, Seek, Write, stderr};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

static RANK: OnceLock<usize> = OnceLock::new();
/// The processes that this one has started, and their output.
static STARTED: Mutex<Vec<(Child, File)>> = Mutex::new(Vec::new());
/// The time that a failed process leaves the leader, which usually has failed as well, to print the error.
const RANK0_ERROR_GRACE: Duration = Duration::from_secs(2);
/// The time between two looks at the processes that have not connected.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// The time that a process has to end after the last message.
const END_LIMIT: Duration = Duration::from_secs(10);

/// Flags that start several processes.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct ProcessArgs {
    /// Start this number of processes on this machine; on CPUs they compute the bits of one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024), help_heading = "Machine")]
    processes: Option<u16>,
    /// Start a process for each of this number of GPUs
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024), conflicts_with = "processes",
          help_heading = "Machine")]
    gpus: Option<u16>,
}

impl ProcessArgs {
    /// The flag that was given.
    pub(crate) fn flag(&self) -> Option<&'static str> {
        self.processes.map(|_| "--processes").or(self.gpus.map(|_| "--gpus"))
    }

    /// Starts the processes for a run with this configuration. Without a flag, returns `group`.
    pub(crate) fn start(&self, group: &Arc<dyn ProcessGroup>, config: &Config) -> Result<Arc<dyn ProcessGroup>> {
        if let Some(gpus) = self.gpus {
            let count = gpu::count();
            let is_cpu = config.device_spec()? == DeviceSpec::Cpu;
            if is_cpu || count < usize::from(gpus) {
                let message =
                    if is_cpu { "the device is `cpu`".into() } else { format!("this program can use {count}") };
                return Err(Error::config(
                    "--gpus",
                    format!("{message}; use `--processes {gpus}`, or see docs/gpu.md"),
                ));
            }
        }
        let world_size = self.processes.or(self.gpus).map_or(1, usize::from);
        match group.world_size() {
            1 if world_size > 1 => start(world_size),
            launched if launched > 1 && world_size > 1 => {
                let message = format!("a launcher has already started {launched} processes; remove one of both");
                Err(Error::config("--processes", message))
            }
            _ => Ok(group.clone()),
        }
    }
}

/// Starts the other processes of a job on this machine, and connects to them.
fn start(world_size: usize) -> Result<Arc<dyn ProcessGroup>> {
    let job = format!("{:016x}{:016x}", RandomState::new().hash_one(0), RandomState::new().hash_one(1));
    let mut master = Master { host: "127.0.0.1".into(), port: 0, job };
    let listener = Tcp::listen(&master)?;
    master.port = listener.local_addr().map_err(Error::io("listen at", "127.0.0.1"))?.port();
    let program = std::env::current_exe().map_err(Error::io("find", "this program"))?;
    for rank in 1..world_size {
        let printed = tempfile::tempfile().map_err(Error::io("create", "a temporary file"))?;
        let for_child = printed.try_clone().map_err(Error::io("open", "a temporary file"))?;
        let mut command = Command::new(&program);
        command
            .envs([("MASTER_ADDR", &master.host), (JOB_VARIABLE, &master.job)])
            .env("MASTER_PORT", master.port.to_string())
            .env("WORLD_SIZE", world_size.to_string())
            .env("RANK", rank.to_string())
            .env_remove("TORCHELASTIC_USE_AGENT_STORE")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(for_child)
            // An interrupt on the terminal is for the leader.
            .process_group(0);
        let child = command.spawn().map_err(Error::io("start", &program))?;
        STARTED.lock().unwrap_or_else(PoisonError::into_inner).push((child, printed));
    }
    let launch = LaunchEnv { variable: "--processes", world_size, rank: 0, master: None };
    // A process that ends before it connects would only be noticed at the time limit.
    let (connects, connected) = channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while connected.recv_timeout(CHECK_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                let has_ended = |(child, _): &mut (Child, _)| matches!(child.try_wait(), Ok(Some(_)));
                if STARTED.lock().unwrap_or_else(PoisonError::into_inner).iter_mut().any(has_ended) {
                    fail("a process ended before it connected", 1);
                }
            }
        });
        let group = connect(&launch, &master, Some(listener));
        drop(connects);
        group
    })
}

fn connect(
    launch: &LaunchEnv,
    master: &Master,
    listener: Option<std::net::TcpListener>,
) -> Result<Arc<dyn ProcessGroup>> {
    RANK.set(launch.rank).ok();
    Ok(Arc::new(Tcp::connect(launch, master, listener, |message| fail(message, 1))?))
}

/// The group of this process: the job of a launcher, or a single process.
pub(crate) fn init() -> Result<Arc<dyn ProcessGroup>> {
    let launch = LaunchEnv::detect()?;
    if let Some(launch @ LaunchEnv { master: Some(master), world_size, rank, .. }) = &launch {
        if std::env::var_os(JOB_VARIABLE).is_some() {
            subprocess::end_with_parent();
        } else if *rank == 0 {
            writeln!(stderr(), "waiting for {world_size} processes at {}", sanitize_block(&master.to_string())).ok();
        }
        let listener = (*rank == 0).then(|| Tcp::listen(master)).transpose()?;
        return connect(launch, master, listener);
    }
    #[cfg(feature = "mpi")]
    if launch.is_some()
        && let Some(group) = Mpi::init(|message| fail(message, 1))?
    {
        RANK.set(group.rank()).ok();
        return Ok(Arc::new(group));
    }
    Ok(Arc::new(SingleProcess))
}

/// Starts the workers of the run that `trainer` leads, from the checkpoint that it was opened with. All downloads and
/// tokens are in the cache by now.
pub(crate) fn start_workers(
    trainer: &Trainer,
    checkpoint: Option<&Checkpoint>,
    group: &dyn ProcessGroup,
) -> Result<()> {
    let path = checkpoint.map(|it| it.path().into());
    RunStart { config: trainer.config.clone(), checkpoint: path }.broadcast(group)?;
    trainer.check_consistency(checkpoint)
}

/// Rejects processes that a launcher has started and that are not connected, because each would train the same run. The
/// leader prints the error.
pub(crate) fn check_launch(group: &dyn ProcessGroup) -> Result<()> {
    let Some(LaunchEnv { variable, world_size, rank, .. }) = LaunchEnv::detect()? else { return Ok(()) };
    if group.world_size() > 1 {
        return Ok(());
    }
    if rank > 0 {
        std::thread::sleep(RANK0_ERROR_GRACE);
        std::process::exit(2);
    }
    let (cause, remedy) = if cfg!(feature = "mpi") {
        (
            "MPI connects none of them",
            "start them with the `mpirun` of this build's MPI library, or with `srun --mpi=pmix`",
        )
    } else {
        ("this build has no MPI support", "build with `--features mpi`")
    };
    let message = format!(
        "a launcher started {world_size} processes, but {cause}; {remedy}, or set MASTER_ADDR to the host of process 0, to \
         train with {world_size} processes, or remove the variable for {world_size} separate runs"
    );
    Err(Error::config(variable, message))
}

/// Prints the error, unless another process does, and ends the job.
fn fail(message: &str, code: u8) -> ! {
    let own = sanitize_block(message).into_owned();
    let mut message = own.clone();
    if let Some(rank @ 1..) = RANK.get() {
        // If the leader has started this process, it reads the message.
        if std::env::var_os(JOB_VARIABLE).is_none() {
            std::thread::sleep(RANK0_ERROR_GRACE + Duration::from_millis(50) * *rank as u32);
        }
        message = format!("process {rank}: {message}");
    }
    // All processes find some errors, in the same words.
    let is_new = |cause: &&String| !cause.contains(LOST) && !cause.contains(&own);
    for cause in end_started(RANK0_ERROR_GRACE).iter().filter(is_new) {
        message = format!("{message}\n{}", sanitize_block(cause));
    }
    // The time limit of an exchange may end the process while the dashboard is shown.
    restore_before_exit();
    writeln!(stderr(), "error: {message}").ok();
    #[cfg(feature = "mpi")]
    Mpi::abort(code);
    std::process::exit(code.into())
}

/// Ends the job with an error, if this process is one of several.
pub(crate) fn abort_with(message: &str, code: u8) {
    if RANK.get().is_some() {
        fail(message, code);
    }
}

/// Ends this process's part in the job.
pub(crate) fn finalize() {
    end_started(END_LIMIT);
    #[cfg(feature = "mpi")]
    Mpi::finalize();
}

/// Waits for the end of the started processes, and kills those that take longer than `limit`. Returns the output of the
/// failed ones, or how they ended.
fn end_started(limit: Duration) -> Vec<String> {
    let (mut causes, began) = (Vec::new(), Instant::now());
    let started = std::mem::take(&mut *STARTED.lock().unwrap_or_else(PoisonError::into_inner));
    for (rank, (mut child, mut printed)) in (1..).zip(started) {
        let Ok(Some(status)) = subprocess::wait(&mut child, limit.saturating_sub(began.elapsed())) else { continue };
        let mut text = String::new();
        printed.rewind().and_then(|()| printed.read_to_string(&mut text)).ok();
        if !status.success() {
            let ended = format!("process {rank} ended with {status}");
            causes.push(if text.is_empty() { ended } else { text.trim().to_owned() });
        }
    }
    causes
}
