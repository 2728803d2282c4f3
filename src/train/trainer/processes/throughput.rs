//! The speed of each process, its wait for others, and the processes that delay the rest.

use crate::engine::collective::ProcessGroup;
use crate::telemetry::{ProcessRate, Throughput};
use crate::train::engine::RankTiming;
use std::time::Instant;

/// Number of steps per event.
const STEPS: u64 = 50;
/// A process is a straggler if its passes take this many times the median.
const STRAGGLER_RATIO: f64 = 1.5;

/// Sums of the processes' timings since the last event.
#[derive(Debug, Default)]
pub(in crate::train::trainer) struct ThroughputMeter {
    steps: u64,
    start: Option<Instant>,
    targets: u64,
    ranks: Vec<RankTiming>,
    /// Communication time at the first of the steps, per rank.
    comm_start: Vec<f64>,
}

impl ThroughputMeter {
    /// Adds the timings of step `step` with `targets` targets; returns an event after every [`STEPS`] steps.
    pub(in crate::train::trainer) fn add(
        &mut self,
        group: &dyn ProcessGroup,
        step: u64,
        targets: usize,
        timings: &[RankTiming],
    ) -> Option<Throughput> {
        let start = *self.start.get_or_insert_with(Instant::now);
        if self.steps == 0 {
            self.comm_start = timings.iter().map(|timing| timing.comm).collect();
            self.ranks = vec![RankTiming::default(); timings.len()];
        }
        for ((sum, timing), comm_start) in self.ranks.iter_mut().zip(timings).zip(&self.comm_start) {
            sum.compute += timing.compute;
            sum.comm = timing.comm - comm_start;
            sum.micro_batches += timing.micro_batches;
        }
        self.steps += 1;
        self.targets += targets as u64;
        if self.steps < STEPS {
            return None;
        }
        let Self { targets, ranks, .. } = std::mem::take(self);
        let seconds = start.elapsed().as_secs_f64();
        let micro_batches: usize = ranks.iter().map(|rank| rank.micro_batches).sum();
        let targets_per_batch = targets as f64 / micro_batches.max(1) as f64;
        let rate = |(rank, timing): (usize, &RankTiming)| ProcessRate {
            name: group.name(rank),
            tokens_per_s: timing.micro_batches as f64 * targets_per_batch / timing.compute.max(1e-9),
            comm_fraction: timing.comm / seconds.max(1e-9),
        };
        let per_batch = |timing: &RankTiming| timing.compute / timing.micro_batches as f64;
        let busy = || ranks.iter().enumerate().filter(|(_, timing)| timing.micro_batches > 0);
        let mut sorted: Vec<f64> = busy().map(|(_, timing)| per_batch(timing)).collect();
        sorted.sort_by(f64::total_cmp);
        let median = sorted.get((sorted.len().max(1) - 1) / 2).copied().unwrap_or(0.0);
        let stragglers = busy().filter(|(_, timing)| per_batch(timing) > STRAGGLER_RATIO * median);
        let stragglers = stragglers.map(|(rank, _)| group.name(rank)).collect();
        Some(Throughput { step, processes: ranks.iter().enumerate().map(rate).collect(), stragglers })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::collective::SingleProcess;

    #[test]
    fn speed_waits_and_stragglers_are_those_since_the_last_event() {
        let mut meter = ThroughputMeter::default();
        for step in 1..=2 * STEPS {
            // Exchanges are counted from the start of the run.
            let timing = |compute, waits| RankTiming { compute, comm: 100.0 + waits * step as f64, micro_batches: 1 };
            let found = meter.add(&SingleProcess, step, 40, &[timing(1.0, 1.0), timing(2.0, 3.0)]);
            assert_eq!(found.is_some(), step.is_multiple_of(STEPS));
            let Some(Throughput { processes, stragglers, .. }) = found else { continue };
            assert_eq!(stragglers, ["process 1"]);
            let [fast, slow] = &processes[..] else { panic!("{processes:?}") };
            assert_eq!([fast.tokens_per_s, slow.tokens_per_s], [20.0, 10.0]);
            assert!((slow.comm_fraction / fast.comm_fraction - 3.0).abs() < 1e-9);
        }
    }
}
