//! The heartbeat of the leader, which keeps workers from reporting it as lost.

use super::messages::LeaderMessage;
use crate::Result;
use crate::engine::collective::ProcessGroup;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// The time between two heartbeats.
pub(super) const INTERVAL: Duration = Duration::from_secs(1);

/// Sends heartbeats while `work` runs on the leader, which holds `exchange` during each of its exchanges. The workers
/// wait for a message meanwhile.
pub fn with_heartbeat<R>(group: &dyn ProcessGroup, exchange: &Mutex<()>, work: impl FnOnce() -> R) -> R {
    with_messages(group, exchange, &LeaderMessage::Heartbeat, work)
}

/// The result of `work`, which runs on the leader alone. All processes call it together.
pub(in crate::train) fn on_leader<R>(group: &dyn ProcessGroup, work: impl FnOnce() -> R) -> Result<R>
where
    R: Serialize + DeserializeOwned,
{
    if group.is_leader() {
        let result = with_messages(group, &Mutex::new(()), &None::<()>, work);
        group.broadcast(&Some(&result))?;
        return Ok(result);
    }
    loop {
        if let Some(result) = group.receive_message(0)? {
            return Ok(result);
        }
    }
}

/// Sends `message` every second while `work` runs, and holds `exchange` meanwhile.
fn with_messages<R>(
    group: &dyn ProcessGroup,
    exchange: &Mutex<()>,
    message: &(impl Serialize + Sync),
    work: impl FnOnce() -> R,
) -> R {
    if group.world_size() == 1 {
        return work();
    }
    thread::scope(|threads| {
        let (_ends, ended) = channel::<()>();
        threads.spawn(move || {
            while ended.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                let _held = exchange.lock().unwrap_or_else(PoisonError::into_inner);
                // If it fails, the next broadcast fails too.
                group.broadcast(message).ok();
            }
        });
        work()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Instant;

    /// Counts the exchanges of the leader of two processes.
    #[derive(Debug, Default)]
    struct Leader(AtomicUsize);

    impl ProcessGroup for Leader {
        fn rank(&self) -> usize {
            0
        }

        fn world_size(&self) -> usize {
            2
        }

        fn all_to_all(&self, _: &[&[u8]], _: &mut [&mut [u8]]) -> Result<()> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
    }

    #[test]
    fn the_workers_get_messages_while_the_leader_works() {
        let leader = Leader::default();
        assert_eq!(with_heartbeat(&leader, &Mutex::default(), || 7), 7);
        assert_eq!(leader.0.load(Ordering::Relaxed), 0);
        let began = Instant::now();
        let sent = || leader.0.load(Ordering::Relaxed);
        with_heartbeat(&leader, &Mutex::default(), || {
            while sent() == 0 && began.elapsed() < 60 * INTERVAL {
                thread::sleep(INTERVAL / 10);
            }
        });
        // The length and the text of a message.
        let most = 2 * began.elapsed().as_secs() as usize;
        assert!((2..=most).contains(&sent()), "{} of at most {most}", sent());
    }
}
