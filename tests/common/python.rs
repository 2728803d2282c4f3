//! A Python to compare with: the one in `FINETUNE_PYTHON`, as `.ci/python-env` makes it.

use super::compare::skip;
use super::launch;
use serde_json::{Value, json};
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::iter;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::OnceLock;

/// The Python; `None` after printing that it is missing.
pub(crate) fn python() -> Option<PathBuf> {
    let python = std::env::var_os("FINETUNE_PYTHON").map(PathBuf::from).filter(|python| python.is_file());
    if python.is_none() {
        skip("python", "`FINETUNE_PYTHON` names no Python; `.ci/python-env DIR` makes one");
    }
    python
}

/// The Python, if it has `module`, found without the seconds that an import takes; prints a message if it has not.
pub(crate) fn python_with(module: &str) -> Option<PathBuf> {
    let python = python()?;
    let find = format!("from importlib.util import find_spec; exit(find_spec('{module}') is None)");
    if launch::command(&python).args(["-c", &find]).status().unwrap().success() {
        return Some(python);
    }
    skip("python", &format!("the Python in `FINETUNE_PYTHON` has no `{module}`"));
    None
}

/// The JSON value that a script in `tests/python` prints on its last line.
pub(crate) fn run_script(python: &Path, script: &str, arguments: &[&OsStr]) -> Value {
    static SERVER: OnceLock<(Child, String)> = OnceLock::new();
    let (_, socket) = SERVER.get_or_init(|| start_server(python));
    let path = scripts().join(script);
    let words: Vec<_> = iter::once(path.as_os_str()).chain(arguments.iter().copied()).map(OsStr::to_str).collect();
    let mut connection = UnixStream::connect(socket).unwrap();
    connection.set_read_timeout(Some(launch::LIMIT)).unwrap();
    writeln!(connection, "{}", json!(words)).unwrap();
    let mut answer = String::new();
    connection.read_to_string(&mut answer).unwrap();
    serde_json::from_str(answer.lines().last().unwrap_or_default()).unwrap_or_else(|e| panic!("{e}: {answer}"))
}

fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python")
}

/// Starts the process that runs the scripts of this test program, and returns its socket. It ends with its standard
/// input.
fn start_server(python: &Path) -> (Child, String) {
    let mut command = launch::command(python);
    command.arg(scripts().join("fork_server.py")).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    // The models are small. A second thread would wait actively, and slow down other tests.
    let mut server = command.env("HF_HUB_OFFLINE", "1").env("OMP_NUM_THREADS", "1").spawn().unwrap();
    let mut socket = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut socket).unwrap();
    (server, socket.trim_end().to_owned())
}
