//! Processes of a run as threads: bytes go between them through channels.

use finetune::Result;
use finetune::engine::collective::{ProcessGroup, SingleProcess};
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

#[derive(Debug)]
struct Thread {
    rank: usize,
    to: Vec<Sender<Vec<u8>>>,
    from: Vec<Mutex<Receiver<Vec<u8>>>>,
}

impl ProcessGroup for Thread {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.to.len()
    }

    fn all_to_all(&self, out: &[&[u8]], into: &mut [&mut [u8]]) -> Result<()> {
        for (to, bytes) in self.to.iter().zip(out).filter(|(_, bytes)| !bytes.is_empty()) {
            to.send(bytes.to_vec()).unwrap();
        }
        for (from, bytes) in self.from.iter().zip(into).filter(|(_, bytes)| !bytes.is_empty()) {
            // Both sides know the lengths.
            bytes.copy_from_slice(&from.lock().unwrap().recv().unwrap());
        }
        Ok(())
    }
}

/// Lets this thread compute without others. The threads of a pool wait actively during a step, which slows down other
/// tests. Results do not depend on the number of threads: `consistency` and `layers` test that.
pub(crate) fn compute_alone() {
    thread_local! {
        static POOL: ThreadPool = ThreadPoolBuilder::new().num_threads(1).use_current_thread().build().unwrap();
    }
    if rayon::current_thread_index().is_none() {
        POOL.with(|_| ());
    }
}

/// Runs `f` as each of `world` processes and returns their results, by rank.
pub(crate) fn together<R: Send>(world: usize, f: impl Fn(Arc<dyn ProcessGroup>) -> R + Sync) -> Vec<R> {
    if world == 1 {
        compute_alone();
        return vec![f(Arc::new(SingleProcess))];
    }
    let mut channels: Vec<Vec<_>> = (0..world).map(|_| (0..world).map(|_| Some(channel())).collect()).collect();
    let mut threads: Vec<Thread> = (0..world).map(|rank| Thread { rank, to: Vec::new(), from: Vec::new() }).collect();
    for from in 0..world {
        for to in 0..world {
            let (sender, receiver) = channels[from][to].take().unwrap();
            threads[from].to.push(sender);
            threads[to].from.push(Mutex::new(receiver));
        }
    }
    std::thread::scope(|scope| {
        let run = |thread| {
            scope.spawn(|| {
                compute_alone();
                f(Arc::new(thread))
            })
        };
        let running: Vec<_> = threads.into_iter().map(run).collect();
        running.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
