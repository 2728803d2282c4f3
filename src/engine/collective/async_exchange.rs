//! Exchanges of bytes with other processes while this process computes, on a separate thread.

use super::ProcessGroup;
use crate::{Error, Result};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::Scope;
use std::time::{Duration, Instant};

/// Buffers with the bytes to or from each process.
type PeerBuffers = Vec<Vec<u8>>;

/// Exchanges bytes in the order of its requests. Meanwhile nothing else may use the group.
#[derive(Debug)]
pub(crate) struct AsyncExchange {
    requests: Sender<(PeerBuffers, PeerBuffers)>,
    completed: Receiver<Result<(PeerBuffers, Duration)>>,
    /// The time of all completed exchanges.
    pub(crate) total: Duration,
}

impl AsyncExchange {
    /// Starts the thread, which ends with this value.
    pub(crate) fn spawn<'scope>(scope: &'scope Scope<'scope, '_>, group: &'scope dyn ProcessGroup) -> Self {
        let (requests, requested) = channel::<(PeerBuffers, PeerBuffers)>();
        let (results, completed) = channel();
        scope.spawn(move || {
            for (out, mut into) in requested {
                let clock = Instant::now();
                let out: Vec<&[u8]> = out.iter().map(Vec::as_slice).collect();
                let exchanged = group.all_to_all(&out, &mut into.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>());
                let failed = exchanged.is_err();
                if results.send(exchanged.map(|()| (into, clock.elapsed()))).is_err() || failed {
                    return;
                }
            }
        });
        Self { requests, completed, total: Duration::ZERO }
    }

    /// Sends `out[r]` to each rank `r`, and receives bytes for each of `into`, after the earlier exchanges.
    pub(crate) fn start(&self, out: PeerBuffers, into: PeerBuffers) -> Result<()> {
        self.requests.send((out, into)).map_err(|_| self.failure())
    }

    /// Waits for the first exchange that has not been waited for, and returns the received bytes.
    pub(crate) fn wait(&mut self) -> Result<PeerBuffers> {
        let (into, time) = self.completed.recv().map_err(|_| self.failure())??;
        self.total += time;
        Ok(into)
    }

    /// The error after which the thread has ended.
    fn failure(&self) -> Error {
        let stopped = || Error::Collective("the thread that exchanges bytes has stopped".into());
        self.completed.iter().find_map(Result::err).unwrap_or_else(stopped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Lost;

    impl ProcessGroup for Lost {
        fn rank(&self) -> usize {
            0
        }

        fn world_size(&self) -> usize {
            2
        }

        fn all_to_all(&self, _: &[&[u8]], _: &mut [&mut [u8]]) -> Result<()> {
            Err(Error::Collective("lost connection to process 1".into()))
        }
    }

    #[test]
    fn a_request_after_a_failure_returns_its_cause() {
        std::thread::scope(|scope| {
            let exchange = AsyncExchange::spawn(scope, &Lost);
            // The thread may fail after several requests.
            let error = std::iter::repeat_with(|| exchange.start(Vec::new(), Vec::new())).find_map(Result::err);
            assert!(error.unwrap().to_string().contains("lost connection to process 1"));
        });
    }
}
