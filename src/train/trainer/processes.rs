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
use super::reference::digest;
use crate::digest::Digest;
use crate::engine::collective::ProcessGroup;
use crate::engine::kernels::isa::Isa;
use crate::store::checkpoint::Checkpoint;
use crate::telemetry::Event;
use crate::train::engine::TrainEngine;
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

    /// Checks that all processes have the same program, instruction set, kernels, data, and weights or `checkpoint`.
    /// Otherwise, results would depend on more than the number of processes.
    pub fn check_consistency(&self, checkpoint: Option<&Checkpoint>) -> Result<()> {
        if !self.is_distributed() {
            return Ok(());
        }
        let TrainEngine { group, model, state, .. } = &self.engine;
        let weights = if let Some(checkpoint) = checkpoint {
            Digest::of(&serde_json::to_vec(checkpoint.manifest()).map_err(candle_core::Error::wrap)?).sha256
        } else {
            // Setup exchanges nothing, so a process has only its shard of weights that are wide from the start.
            if state.fallback.active().next().is_some() {
                state.masters.copy_to_weights(&state.weights, model.kernels(), &**group)?;
            }
            digest(&state.weights, self.base.as_ref())?
        };
        self.require_equal(&[
            ("program", format!("{} {}", env!("CARGO_PKG_VERSION"), std::env::consts::ARCH)),
            ("instruction set", format!("{} (set FINETUNE_ISA to one that all processes support)", Isa::current())),
            ("kernels", format!("`{}` (choose them with `--device` and `--kernels`)", model.kernels().name())),
            ("training text", self.fingerprint.data.clone()),
            ("step", state.counters.step.to_string()),
            (if checkpoint.is_some() { "checkpoint" } else { "model" }, weights),
        ])
    }

    /// Checks that all processes have the same values of these facts.
    pub(super) fn require_equal(&self, facts: &[(&str, String)]) -> Result<()> {
        let own: Vec<String> = facts.iter().map(|(_, value)| value.clone()).collect();
        for (rank, theirs) in self.group().all_gather_messages(&own)?.iter().enumerate() {
            let differs = facts.iter().zip(theirs).find(|((_, own), other)| own != *other);
            if let Some(((what, first), other)) = differs {
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
