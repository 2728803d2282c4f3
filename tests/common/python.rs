//! A Python to compare with: the one in `FINETUNE_PYTHON`, as `.ci/python-env` makes it.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::compare::skip;
use super::launch;

/// The Python; `None` after printing that it is missing.
pub(crate) fn python() -> Option<PathBuf> {
    let python = std::env::var_os("FINETUNE_PYTHON").map(PathBuf::from).filter(|python| python.is_file());
    if python.is_none() {
        skip("python", "`FINETUNE_PYTHON` names no Python; `.ci/python-env DIR` makes one");
    }
    python
}

/// Returns whether `python` has `module`, without the seconds that an import takes; prints a message if it has not.
pub(crate) fn has_module(python: &Path, module: &str) -> bool {
    let find = format!("from importlib.util import find_spec; exit(find_spec('{module}') is None)");
    let found = launch::command(python).args(["-c", &find]).status().unwrap().success();
    if !found {
        skip("python", &format!("the Python in `FINETUNE_PYTHON` has no `{module}`"));
    }
    found
}

/// The JSON object that a script in `tests/python` prints on its last line.
pub(crate) fn run_script(python: &Path, script: &str, arguments: &[&OsStr]) -> Value {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python").join(script);
    let mut command = launch::command(python);
    command.arg(script).args(arguments).env("HF_HUB_OFFLINE", "1");
    // The models are small. A second thread would wait actively, and slow down other tests.
    let answer = launch::succeed(command.env("OMP_NUM_THREADS", "1"));
    serde_json::from_str(answer.lines().last().unwrap_or_default()).unwrap_or_else(|e| panic!("{e}: {answer}"))
}
