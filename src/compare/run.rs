//! A run's figures and curves, from its log.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::metrics::NONE;
use crate::data::counted;
pub(crate) use crate::telemetry::RunMetrics;
use crate::telemetry::{Curves, FinishReason, RunState, Started};
use crate::{Error, Result};

/// Buckets of a curve; a chart has about twice as many columns.
const CURVE: usize = 360;

#[derive(Debug, Clone)]
pub(crate) struct RunSummary {
    /// The name of its folder.
    pub(crate) name: String,
    pub(crate) log: PathBuf,
    pub(crate) started: Started,
    pub(crate) figures: RunMetrics,
    /// The configuration of each process that trained it, with the step the process started from.
    configs: Vec<(u64, Value)>,
    /// Why it stopped; `None` if the log ends without a `Finished` event.
    pub(crate) finished: Option<FinishReason>,
    /// Lines of the log that could not be read.
    pub(crate) unreadable: usize,
    /// Its losses and loss scale.
    pub(super) curves: Curves,
}

impl RunSummary {
    /// Reads a run's log. A file that is not a run's log, or has no step yet, is an error.
    pub(crate) fn read(log: &Path) -> Result<Self> {
        let (state, unreadable) = RunState::new(CURVE).read(log)?;
        Self::of(log, state, unreadable)
    }

    pub(crate) fn of(log: &Path, state: RunState, unreadable: usize) -> Result<Self> {
        let (figures, finished) = (state.figures(), state.finished());
        let Some(started) = state.started else {
            return Err(Error::data(log.display(), "not a run's log: it has no start record"));
        };
        let name = if started.run.is_empty() { log.display().to_string() } else { started.run.clone() };
        Ok(Self {
            name,
            log: log.to_path_buf(),
            started,
            configs: state.configs,
            figures,
            finished,
            unreadable,
            curves: state.curves,
        })
    }

    /// How the run ended, as text.
    pub(crate) fn end(&self) -> String {
        let RunMetrics { steps, .. } = self.figures;
        let end = match self.finished {
            Some(FinishReason::Done) => "done".to_owned(),
            Some(reason) => format!("{reason} at step {steps}"),
            None => format!("log ends at step {steps} of {}", self.started.total_steps),
        };
        match self.unreadable {
            0 => end,
            lines => format!("{end}, {} unreadable", counted(lines, "line")),
        }
    }

    /// Every setting by its dotted key, and under `run.` other facts that affect numbers or speed.
    pub(crate) fn settings(&self) -> BTreeMap<String, String> {
        let mut settings = BTreeMap::<String, String>::new();
        let mut last = BTreeMap::<String, String>::new();
        for (index, (step, config)) in self.configs.iter().enumerate() {
            let mut now = BTreeMap::new();
            flatten(config, String::new(), &mut now);
            let keys: BTreeSet<&String> = now.keys().chain(last.keys()).collect();
            for key in keys.into_iter().filter(|key| now.get(*key) != last.get(*key)) {
                let value = now.get(key).map_or(NONE, String::as_str);
                let before = settings.get(key).map_or(NONE, String::as_str);
                let text = if index == 0 { value.to_owned() } else { format!("{before}; from step {step} {value}") };
                settings.insert(key.clone(), text);
            }
            last = now;
        }
        let Started { program, cpu, device, data, parameters, .. } = &self.started;
        for (key, value) in [
            ("run.program", program.clone()),
            ("run.cpu", cpu.name.clone()),
            ("run.isa", cpu.isa.clone()),
            ("run.threads", cpu.threads.to_string()),
            ("run.device", device.clone()),
            ("run.data", data.clone()),
            ("run.parameters", parameters.to_string()),
        ] {
            settings.insert(key.to_owned(), value);
        }
        settings
    }
}

/// The leaves of a JSON tree by their dotted paths.
fn flatten(value: &Value, path: String, leaves: &mut BTreeMap<String, String>) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                flatten(value, path, leaves);
            }
        }
        Value::Null => {}
        Value::String(text) => drop(leaves.insert(path, text.clone())),
        other => drop(leaves.insert(path, other.to_string())),
    }
}
