//! A thread that exchanges bytes with other processes while this process computes.

use super::ProcessGroup;
use crate::{Error, Result};
use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// Exchanges that may be under way, which bounds the memory of their bytes.
const DEPTH: usize = 2;

/// The bytes to and from each process.
#[derive(Debug)]
struct Letters {
    out: Vec<Vec<u8>>,
    into: Vec<Vec<u8>>,
    took: Duration,
}

/// Exchanges bytes in the order of its calls. `T` describes an exchange. Meanwhile nothing else may use the group.
#[derive(Debug)]
pub(crate) struct Courier<T> {
    orders: Sender<Letters>,
    done: Receiver<Result<Letters>>,
    under_way: VecDeque<T>,
    busy: Duration,
    waited: Duration,
}

impl<T> Courier<T> {
    /// Sends `out[r]` to each rank `r`, and receives bytes for each of `into`. Returns earlier exchanges that have ended, and waits
    /// for one if too many have not.
    pub(crate) fn exchange(
        &mut self,
        what: T,
        out: Vec<Vec<u8>>,
        into: Vec<Vec<u8>>,
    ) -> Result<Vec<(T, Vec<Vec<u8>>)>> {
        let mut ended = Vec::new();
        while self.under_way.len() >= DEPTH {
            ended.extend(self.wait()?);
        }
        self.orders.send(Letters { out, into, took: Duration::ZERO }).map_err(|_| stopped())?;
        self.under_way.push_back(what);
        while let Ok(letters) = self.done.try_recv() {
            ended.extend(self.end_of(letters)?);
        }
        Ok(ended)
    }

    /// Waits for the first exchange that is under way; `None` if there is none.
    pub(crate) fn wait(&mut self) -> Result<Option<(T, Vec<Vec<u8>>)>> {
        if self.under_way.is_empty() {
            return Ok(None);
        }
        let clock = Instant::now();
        let letters = self.done.recv().map_err(|_| stopped())?;
        self.waited += clock.elapsed();
        self.end_of(letters)
    }

    fn end_of(&mut self, letters: Result<Letters>) -> Result<Option<(T, Vec<Vec<u8>>)>> {
        let Letters { into, took, .. } = letters?;
        self.busy += took;
        Ok(self.under_way.pop_front().map(|what| (what, into)))
    }

    /// The time that this process has waited for exchanges.
    pub(crate) fn waited(&self) -> Duration {
        self.waited
    }

    /// The time of exchanges during which this process computed.
    pub(crate) fn hidden(&self) -> Duration {
        self.busy.saturating_sub(self.waited)
    }
}

fn stopped() -> Error {
    Error::Collective("the thread that exchanges bytes has stopped".into())
}

/// Runs `body` with a thread for its exchanges; a single process has none.
pub(crate) fn with_courier<T, R>(group: &dyn ProcessGroup, body: impl FnOnce(Courier<T>) -> R) -> R {
    let ((orders, ordered), (finished, done)) = (channel::<Letters>(), channel());
    let courier = Courier { orders, done, under_way: VecDeque::new(), busy: Duration::ZERO, waited: Duration::ZERO };
    if group.world_size() == 1 {
        return body(courier);
    }
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for mut letters in ordered {
                let clock = Instant::now();
                let out: Vec<&[u8]> = letters.out.iter().map(Vec::as_slice).collect();
                let mut into: Vec<&mut [u8]> = letters.into.iter_mut().map(Vec::as_mut_slice).collect();
                let result = group.all_to_all(&out, &mut into);
                letters.took = clock.elapsed();
                let failed = result.is_err();
                if finished.send(result.map(|()| letters)).is_err() || failed {
                    return;
                }
            }
        });
        body(courier)
    })
}
