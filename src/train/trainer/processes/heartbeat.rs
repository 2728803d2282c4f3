//! The heartbeat of the leader, which keeps workers from reporting it as lost.

use super::messages::LeaderMessage;
use crate::Result;
use crate::engine::collective::ProcessGroup;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Limits heartbeats to one per second.
#[derive(Debug)]
pub struct Heartbeat(Mutex<Instant>);

impl Default for Heartbeat {
    fn default() -> Self {
        Self(Mutex::new(Instant::now()))
    }
}

impl Heartbeat {
    const INTERVAL: Duration = Duration::from_secs(1);

    /// Sends a heartbeat if one is due. The leader calls it often while the workers wait for a message.
    pub fn beat(&self, group: &dyn ProcessGroup) -> Result<()> {
        let Ok(mut last) = self.0.lock() else { return Ok(()) };
        if last.elapsed() < Self::INTERVAL {
            return Ok(());
        }
        *last = Instant::now();
        group.broadcast(&LeaderMessage::Heartbeat)
    }
}
