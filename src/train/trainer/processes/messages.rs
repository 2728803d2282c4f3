//! Messages from the leader to the workers.

use crate::Result;
use crate::engine::collective::ProcessGroup;
use crate::store::checkpoint::StateTensor;
use crate::train::config::Config;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::ops::Range;

/// A message from the leader to the workers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::train::trainer) enum LeaderMessage {
    /// The leader is still busy.
    Heartbeat,
    /// Opens the device of a run with this configuration.
    Open(Box<Config>),
    /// Starts a run.
    Start(Box<RunStart>),
    /// Take the next step, after a probe if `probe`.
    Step { probe: bool },
    /// Compute the validation loss.
    Evaluate,
    /// Send values `range` of the tensor of this kind and index to the leader.
    Read { tensor: StateTensor, index: usize, range: Range<usize> },
    /// The leader needs no more values.
    ReadsDone,
    /// The run is over.
    Stop,
}

impl LeaderMessage {
    /// Waits for the leader's next message.
    pub(super) fn receive(group: &dyn ProcessGroup) -> Result<Self> {
        group.receive_message(0)
    }

    /// Waits for a message that `pick` takes; `None` if there will be no run.
    fn wait<T>(group: &dyn ProcessGroup, pick: impl Fn(Self) -> Option<T>) -> Result<Option<T>> {
        loop {
            let message = Self::receive(group)?;
            let stops = matches!(message, Self::Stop);
            let found = pick(message);
            if stops || found.is_some() {
                return Ok(found);
            }
        }
    }
}

/// The information that a worker needs to take part in a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunStart {
    /// The configuration, as the leader has resolved it.
    pub config: Config,
    /// The path, which may not be UTF-8, of the checkpoint that the run continues from. The leader has verified it.
    pub checkpoint: Option<OsString>,
}

impl RunStart {
    /// Sends it to the workers, which wait for it.
    pub fn broadcast(self, group: &dyn ProcessGroup) -> Result<()> {
        group.broadcast(&LeaderMessage::Start(Box::new(self)))
    }

    /// Waits for the configuration that the leader opens its device with; `None` if there will be no run.
    pub fn receive_config(group: &dyn ProcessGroup) -> Result<Option<Config>> {
        LeaderMessage::wait(group, |it| if let LeaderMessage::Open(config) = it { Some(*config) } else { None })
    }

    /// Ends the workers before a run.
    pub fn cancel(group: &dyn ProcessGroup) -> Result<()> {
        group.broadcast(&LeaderMessage::Stop)
    }

    /// Waits for it; `None` if there will be no run.
    pub fn receive(group: &dyn ProcessGroup) -> Result<Option<Self>> {
        LeaderMessage::wait(group, |it| if let LeaderMessage::Start(start) = it { Some(*start) } else { None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStringExt as _;

    #[test]
    fn messages_round_trip() {
        let checkpoint = OsString::from_vec(b"runs/\xFF/step-000004".to_vec());
        let start = RunStart { config: Config::default(), checkpoint: Some(checkpoint) };
        for message in [
            LeaderMessage::Heartbeat,
            LeaderMessage::Open(Box::default()),
            LeaderMessage::Start(Box::new(start)),
            LeaderMessage::Step { probe: true },
            LeaderMessage::Step { probe: false },
            LeaderMessage::Evaluate,
            LeaderMessage::Read { tensor: StateTensor::ExpAvgSqAbsmax, index: 3, range: 5..1 << 40 },
            LeaderMessage::ReadsDone,
            LeaderMessage::Stop,
        ] {
            let bytes = serde_json::to_vec(&message).unwrap();
            assert_eq!(serde_json::from_slice::<LeaderMessage>(&bytes).unwrap(), message);
        }
    }
}
