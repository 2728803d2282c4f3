//! Completions of the prompts in a step's batches, and their log, `rollouts.jsonl` in the run's folder.

use super::{Trainer, batches_in_step};
use crate::data::DataPosition;
use crate::train::rollout::RolloutRecord;
use crate::{Error, Result, untrusted};
use serde_json::Value;
use std::fs::{File, OpenOptions};
use std::io::{BufRead as _, BufReader, Seek as _, SeekFrom, Write as _};
use std::path::Path;

/// The file in the run's folder.
const FILE: &str = "rollouts.jsonl";

/// The open file, and the reason why the last completions are not in it.
#[derive(Debug, Default)]
pub(super) struct RolloutLog {
    file: Option<File>,
    failure: Option<String>,
}

impl Trainer {
    /// Replaces the prompts of the step that begins at `position` by completions, if the objective samples them.
    pub(super) fn sample_completions(&mut self, position: DataPosition) -> Result<()> {
        let Some(rollouts) = &mut self.rollouts else { return Ok(()) };
        if rollouts.has_kept() {
            rollouts.reuse(&mut self.micro_batches);
            return Ok(());
        }
        let count = batches_in_step(&self.micro_batches).len();
        let batches = &mut self.micro_batches[..count];
        self.activity.begin("sampling completions");
        let sampled = rollouts.sample(&mut self.engine, batches);
        self.activity.end();
        match sampled {
            Ok(records) => {
                let failure = self.log_rollouts(&records).err().map(|error| error.to_string());
                if let Some(error) = failure.as_ref().filter(|error| self.rollout_log.failure.as_ref() != Some(error)) {
                    self.warn(format!("completions are missing in `{FILE}`, starting at this step: {error}"));
                }
                self.rollout_log.failure = failure;
                Ok(())
            }
            Err(error) => {
                // The step has not begun, so a resumed run repeats it.
                self.loader.seek(position)?;
                Err(error)
            }
        }
    }

    /// Continues with the completions that a checkpoint stores, unless the batches have changed.
    pub(super) fn restore_rollouts(&mut self, stored: Option<&Value>, origin: &Path) -> Result<()> {
        let kept = stored.map(|stored| serde_json::from_value(stored.clone())).transpose();
        let kept = kept.map_err(|error| Error::checkpoint(origin, format!("its completions are damaged: {error}")))?;
        self.rollouts.iter_mut().for_each(|rollouts| rollouts.restore(kept.clone()));
        match self.progress.changes.first().filter(|_| self.has_kept_completions()) {
            None => Ok(()),
            Some(change) => {
                let message =
                    format!("{change}, but its next step uses completions of the old batches; change it later");
                Err(Error::checkpoint(origin, message))
            }
        }
    }

    fn log_rollouts(&mut self, records: &[RolloutRecord]) -> Result<()> {
        let Some(run) = self.run.as_ref().filter(|_| self.engine.group.is_leader()) else { return Ok(()) };
        let path = run.path().join(FILE);
        let failed = || Error::io("write", &path);
        let mut file = match self.rollout_log.file.take() {
            Some(file) => file,
            None => open(&path, self.engine.state.counters.step).map_err(failed())?,
        };
        let mut lines = String::new();
        for record in records {
            lines += &serde_json::to_string(record).map_err(candle_core::Error::wrap)?;
            lines.push('\n');
        }
        file.write_all(lines.as_bytes()).map_err(failed())?;
        self.rollout_log.file = Some(file);
        Ok(())
    }
}

/// Opens the log to append, without the completions of steps after `step`, which a resumed run samples again.
fn open(path: &Path, step: u64) -> std::io::Result<File> {
    let mut file = untrusted::open_run_file(path, OpenOptions::new().create(true).read(true).write(true))?;
    let mut reader = BufReader::new(&file);
    let mut line = Vec::new();
    let mut end = 0;
    loop {
        line.clear();
        let read = reader.read_until(b'\n', &mut line)?;
        let record: Option<RolloutRecord> = serde_json::from_slice(&line).ok();
        if !line.ends_with(b"\n") || record.is_some_and(|record| record.step > step) {
            break;
        }
        end += read as u64;
    }
    file.set_len(end)?;
    file.seek(SeekFrom::Start(end))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_line_costs_no_other_one() {
        let line = |step| {
            let (prompt, completion) = ("p".to_owned(), "c".to_owned());
            let record = RolloutRecord { step, prompt, completion, reward: None, advantage: 0.0, seed: 1 };
            serde_json::to_string(&record).unwrap() + "\n"
        };
        let file = tempfile::NamedTempFile::new().unwrap();
        let kept = line(1) + "damaged\n" + &line(2);
        for rest in [line(3) + &line(4), "{\"step\":".to_owned(), String::new()] {
            std::fs::write(file.path(), format!("{kept}{rest}")).unwrap();
            open(file.path(), 2).unwrap();
            assert_eq!(std::fs::read_to_string(file.path()).unwrap(), kept);
        }
    }
}
