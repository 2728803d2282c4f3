//! One run in several processes. The leader decides each next action and sends the workers a message to take part.

mod gather;
mod heartbeat;
mod messages;
mod throughput;

pub(super) use gather::GatheredState;
pub(in crate::train) use heartbeat::on_leader;
pub use heartbeat::with_heartbeat;
pub(super) use messages::LeaderMessage;
pub use messages::RunStart;
pub(super) use throughput::ThroughputMeter;

use super::Trainer;
use crate::engine::collective::ProcessGroup;
use crate::engine::kernels::isa::Isa;
use crate::telemetry::Event;
use crate::{Error, Result};
use std::time::Instant;

impl Trainer {
    fn group(&self) -> &dyn ProcessGroup {
        &*self.engine.group
    }

    /// Whether the state is sharded among several processes.
    pub(super) fn is_distributed(&self) -> bool {
        self.group().world_size() > 1
    }

    pub(super) fn gathered(&self) -> GatheredState<'_> {
        GatheredState::new(self.group(), &self.engine.state)
    }

    /// On the leader, sends a message to the workers.
    pub(super) fn broadcast(&self, message: &LeaderMessage) -> Result<()> {
        if self.group().is_leader() { self.group().broadcast(message) } else { Ok(()) }
    }

    /// Sends a heartbeat if one is due. The leader calls it often while the workers wait for a message.
    pub(super) fn beat(&mut self) -> Result<()> {
        if self.last_beat.elapsed() < heartbeat::INTERVAL {
            return Ok(());
        }
        self.last_beat = Instant::now();
        self.group().broadcast(&LeaderMessage::Heartbeat)
    }

    /// Ends the workers.
    pub fn stop_workers(&self) -> Result<()> {
        self.broadcast(&LeaderMessage::Stop)
    }

    /// Checks that all processes have the same program, instruction set, kernels, model, data and settings. Otherwise,
    /// results would depend on more than the number of processes.
    pub fn check_consistency(&self) -> Result<()> {
        let facts = [
            ("program", format!("{} {}", env!("CARGO_PKG_VERSION"), std::env::consts::ARCH)),
            ("instruction set", format!("{} (set FINETUNE_ISA to one that all processes support)", Isa::current())),
            (
                "kernels",
                format!("`{}` (choose them with `--device` and `--kernels`)", self.engine.model.kernels().name()),
            ),
            ("training text", self.fingerprint.data.clone()),
            ("model", self.fingerprint.model.clone()),
            ("step", self.engine.state.counters.step.to_string()),
        ];
        let facts = facts.map(|(what, value)| (what.to_owned(), value)).to_vec();
        for (rank, theirs) in self.group().all_gather_messages(&facts)?.iter().enumerate() {
            let differs = facts.iter().zip(theirs).find(|(own, other)| own != other);
            if let Some(((what, first), (_, other))) = differs {
                let here = self.group().name(self.group().rank());
                let there = self.group().name(rank);
                let message = format!("{what} differs between ranks: {other} on {there}, {first} on {here}");
                return Err(Error::Collective(message));
            }
        }
        Ok(())
    }

    /// Follows the leader's messages until the run is over.
    pub fn run_worker(&mut self) -> Result<()> {
        self.prepare_reference()?;
        loop {
            let done = match LeaderMessage::receive(self.group())? {
                LeaderMessage::Step { probe } => self.step(probe),
                LeaderMessage::Evaluate => self.validate().map(drop),
                message @ LeaderMessage::Read { .. } => self.gathered().serve(&message),
                LeaderMessage::Stop => return Ok(()),
                LeaderMessage::Heartbeat
                | LeaderMessage::Open(_)
                | LeaderMessage::Start(_)
                | LeaderMessage::ReadsDone => Ok(()),
            };
            match done {
                // The leader gets the same error, saves and ends the run.
                Err(error) if !error.is_common() => return Err(error),
                _ => {}
            }
        }
    }

    /// Logs the speed of each process every 50 steps.
    pub(super) fn log_throughput(&mut self, targets: usize) {
        if !self.is_distributed() || !self.group().is_leader() {
            return;
        }
        let Self { engine, throughput, emitter, .. } = self;
        let step = engine.state.counters.step;
        if let Some(event) = throughput.add(&*engine.group, step, targets, &engine.timings) {
            emitter.emit(Event::Throughput(event));
        }
    }
}
