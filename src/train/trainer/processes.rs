//! One run in several processes: process 0 decides what happens next, and the others do their part of it when they are told.

use super::Trainer;
use crate::engine::collective::{Collective, Shards, range_bytes};
use crate::engine::model::Parameters;
use crate::engine::optim::Blockwise;
use crate::store::checkpoint::{Held, Spread};
use crate::telemetry::{Event, ProcessRate, Throughput};
use crate::train::config::Config;
use crate::train::state::TrainState;
use crate::{Error, Result};
use candle_core::DType;
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Elements that process 0 asks for at a time.
const CHUNK: usize = 1 << 20;
/// Bytes of an order.
const BYTES: usize = 40;
/// Steps whose times make a line about the processes.
const RATE_STEPS: u64 = 50;
/// A process is slow if its passes take so many times those of the middle one.
const SLOW: f64 = 1.5;

/// What process 0 tells the others.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Order {
    /// It is still there.
    Wait,
    /// The beginning of a run, of which so many bytes of JSON follow.
    Begin(usize),
    /// The next step, with a probe before it or not.
    Step { probe: bool },
    /// The validation loss.
    Evaluate,
    /// Values for it alone.
    Read { held: Held, index: usize, range: Range<usize> },
    /// It has read what it wanted.
    Done,
    /// The run is over.
    Finish,
}

impl Order {
    fn to_bytes(&self) -> [u8; BYTES] {
        let numbers = match self {
            Self::Wait => [0; 5],
            Self::Begin(bytes) => [1, *bytes as u64, 0, 0, 0],
            Self::Step { probe } => [2, u64::from(*probe), 0, 0, 0],
            Self::Evaluate => [3, 0, 0, 0, 0],
            Self::Read { held, index, range } => [4, *held as u64, *index as u64, range.start as u64, range.end as u64],
            Self::Done => [5, 0, 0, 0, 0],
            Self::Finish => [6, 0, 0, 0, 0],
        };
        let mut bytes = [0; BYTES];
        for (bytes, number) in bytes.chunks_exact_mut(8).zip(numbers) {
            bytes.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    fn from_bytes(bytes: &[u8; BYTES]) -> Result<Self> {
        let mut numbers = [0; 5];
        for (number, bytes) in numbers.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *number = u64::from_le_bytes(*bytes);
        }
        Ok(match numbers {
            [0, ..] => Self::Wait,
            [1, bytes, ..] => Self::Begin(bytes as usize),
            [2, probe, ..] => Self::Step { probe: probe != 0 },
            [3, ..] => Self::Evaluate,
            [4, held, index, start, end] => {
                let held = Held::ALL.into_iter().find(|known| *known as u64 == held).unwrap_or(Held::Masters);
                Self::Read { held, index: index as usize, range: start as usize..end as usize }
            }
            [5, ..] => Self::Done,
            [6, ..] => Self::Finish,
            _ => return Err(Error::Collective("process 0 gave an unknown order; all must be of one build".into())),
        })
    }

    fn give(&self, world: &dyn Collective) -> Result<()> {
        if world.world() == 1 || !world.leads() {
            return Ok(());
        }
        world.broadcast(&mut self.to_bytes())
    }

    fn take(world: &dyn Collective) -> Result<Self> {
        let mut bytes = [0; BYTES];
        world.receive(0, &mut bytes)?;
        Self::from_bytes(&bytes)
    }
}

/// What a process that does not lead has to know of a run to take part in it.
#[derive(Debug, Serialize, Deserialize)]
pub struct Beginning {
    /// The configuration, as process 0 has resolved it.
    pub config: Config,
    /// The checkpoint that the run goes on from, which process 0 has verified.
    pub checkpoint: Option<PathBuf>,
}

impl Beginning {
    /// Tells the others, who have waited for it.
    pub fn tell(&self, world: &dyn Collective) -> Result<()> {
        if world.world() == 1 {
            return Ok(());
        }
        let mut text = serde_json::to_vec(self).map_err(candle_core::Error::wrap)?;
        Order::Begin(text.len()).give(world)?;
        world.broadcast(&mut text)
    }

    /// Waits for it; `None` if there will be no run.
    pub fn hear(world: &dyn Collective) -> Result<Option<Self>> {
        loop {
            match Order::take(world)? {
                Order::Begin(bytes) => {
                    let mut text = vec![0; bytes];
                    world.broadcast(&mut text)?;
                    return Ok(Some(serde_json::from_slice(&text).map_err(candle_core::Error::wrap)?));
                }
                Order::Finish => return Ok(None),
                _ => {}
            }
        }
    }
}

/// Says now and then that process 0 is still busy, so that others do not take it for lost.
#[derive(Debug)]
pub struct StillHere(Mutex<Instant>);

impl Default for StillHere {
    fn default() -> Self {
        Self(Mutex::new(Instant::now()))
    }
}

impl StillHere {
    const EVERY: Duration = Duration::from_secs(1);

    /// To be called often while the others wait for an order.
    pub fn say(&self, world: &dyn Collective) -> Result<()> {
        let Ok(mut said) = self.0.lock() else { return Ok(()) };
        if said.elapsed() < Self::EVERY {
            return Ok(());
        }
        *said = Instant::now();
        Order::Wait.give(world)
    }
}

/// Where values are that every process holds a part of.
enum Values<'a> {
    Tensors(&'a Parameters),
    Codes(&'a Blockwise),
    Absmax(&'a Blockwise),
}

/// A tensor's values in a process of several.
struct Part<'a> {
    values: Values<'a>,
    index: usize,
    shards: &'a Shards,
    /// The index in the shards.
    parameter: usize,
}

impl<'a> Part<'a> {
    fn of(state: &'a TrainState, held: Held, index: usize) -> Option<Self> {
        let masters = state.masters.parameters();
        let tensors = |parameters: &'a Parameters| {
            let shards = parameters.shards()?;
            Some(Self { values: Values::Tensors(parameters), index, shards, parameter: index })
        };
        let moment = |which: usize, values: fn(&'a Blockwise) -> Values<'a>| {
            let tensor = &state.adamw.quantised()[index];
            let parameter = masters.position(&tensor.name)?;
            Some(Self { values: values(&tensor.moments[which]), index, shards: masters.shards()?, parameter })
        };
        match held {
            Held::Masters => tensors(masters),
            Held::ExpAvg => tensors(&state.adamw.exp_avg),
            Held::ExpAvgSq => tensors(&state.adamw.exp_avg_sq),
            Held::ExpAvgCodes => moment(0, Values::Codes),
            Held::ExpAvgAbsmax => moment(0, Values::Absmax),
            Held::ExpAvgSqCodes => moment(1, Values::Codes),
            Held::ExpAvgSqAbsmax => moment(1, Values::Absmax),
        }
    }

    /// The values that a process holds.
    fn of_process(&self, rank: usize) -> Range<usize> {
        let elements = self.shards.of(rank, self.parameter);
        if matches!(self.values, Values::Absmax(_)) { Blockwise::blocks(&elements) } else { elements }
    }

    fn bytes_of_one(&self) -> usize {
        match self.values {
            Values::Tensors(parameters) => parameters[self.index].dtype().size_in_bytes(),
            Values::Codes(_) => 1,
            Values::Absmax(_) => DType::F32.size_in_bytes(),
        }
    }

    /// Values of process `rank`, which is this one, as bytes.
    fn bytes(&self, rank: usize, range: &Range<usize>) -> Result<Vec<u8>> {
        let first = self.of_process(rank).start;
        let range = range.start - first..range.end - first;
        let mut bytes = Vec::new();
        match self.values {
            Values::Tensors(parameters) => range_bytes(&parameters[self.index], range, &mut bytes)?,
            Values::Codes(moment) => bytes.extend(&moment.stored().0[range]),
            Values::Absmax(moment) => bytes.extend(moment.stored().1[range].iter().flat_map(|x| x.to_le_bytes())),
        }
        Ok(bytes)
    }
}

/// All shards, as process 0 reads them.
pub(super) struct Shared<'a> {
    pub(super) world: &'a dyn Collective,
    pub(super) state: &'a TrainState,
}

impl Shared<'_> {
    /// Hands the values of a tensor, in order, to `take`, some at a time.
    fn read(&self, held: Held, index: usize, mut take: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let Some(part) = Part::of(self.state, held, index) else { return Ok(()) };
        for owner in 0..self.world.world() {
            let range = part.of_process(owner);
            for start in range.clone().step_by(CHUNK) {
                let range = start..range.end.min(start + CHUNK);
                if owner == 0 {
                    take(&part.bytes(0, &range)?)?;
                    continue;
                }
                let mut bytes = vec![0; range.len() * part.bytes_of_one()];
                self.world.send(owner, &Order::Read { held, index, range }.to_bytes())?;
                self.world.receive(owner, &mut bytes)?;
                take(&bytes)?;
            }
        }
        Ok(())
    }
}

impl Spread for Shared<'_> {
    fn write(&self, held: Held, index: usize, out: &mut dyn Write, path: &Path) -> Result<()> {
        self.read(held, index, |bytes| {
            // In the small pieces that a checkpoint is written in.
            bytes.chunks(1 << 16).try_for_each(|bytes| out.write_all(bytes)).map_err(Error::io("write", path))
        })
    }
}

/// Times of the processes since the last line about them.
#[derive(Debug, Default)]
pub(super) struct Rates {
    steps: u64,
    began: Option<Instant>,
    targets: u64,
    compute: Vec<f64>,
    waited: Vec<f64>,
    waited_before: Vec<f64>,
    micro_batches: Vec<u64>,
}

impl Trainer {
    fn world(&self) -> &dyn Collective {
        &*self.engine.world
    }

    /// Whether other processes have parts of the state.
    pub(super) fn is_shared(&self) -> bool {
        self.world().world() > 1
    }

    pub(super) fn order_step(&self, probe: bool) -> Result<()> {
        Order::Step { probe }.give(self.world())
    }

    pub(super) fn order_evaluation(&self) -> Result<()> {
        Order::Evaluate.give(self.world())
    }

    /// The others wait for the next order: this keeps them waiting.
    pub(super) fn still_here(&self) -> Result<()> {
        self.still_here.say(self.world())
    }

    /// Lets the other processes end.
    pub fn dismiss(&self) -> Result<()> {
        Order::Finish.give(self.world())
    }

    /// Checks that all processes have the same program, instruction set, kernels, model, data and settings, without which their
    /// results would differ by more than their number.
    pub fn agree(&self) -> Result<()> {
        let isa = crate::engine::kernels::isa::Isa::current();
        let facts = [
            ("program", format!("{} {}", env!("CARGO_PKG_VERSION"), std::env::consts::ARCH)),
            ("instruction set", format!("{isa}; set FINETUNE_ISA to the narrowest of all")),
            ("kernels", format!("`{}`; choose them by `--device` and `--kernels`", self.engine.model.kernels().name())),
            ("training text", self.identity.data.clone()),
            ("model", self.identity.model.clone()),
            ("step", self.engine.state.counters.step.to_string()),
        ];
        let text = serde_json::to_vec(&facts).map_err(candle_core::Error::wrap)?;
        let all = self.world().all_gather(&text)?;
        for (rank, theirs) in all.iter().enumerate() {
            let theirs: Vec<(String, String)> = serde_json::from_slice(theirs).map_err(candle_core::Error::wrap)?;
            for ((what, first), (_, other)) in facts.iter().zip(&theirs) {
                if first != other {
                    let (here, there) = (self.world().name(self.world().rank()), self.world().name(rank));
                    let message = format!("{there} has another {what} than {here}: {other}, here {first}");
                    return Err(Error::Collective(message));
                }
            }
        }
        Ok(())
    }

    /// Does what process 0 orders, until it has no more.
    pub fn follow(&mut self) -> Result<()> {
        loop {
            match Order::take(self.world())? {
                Order::Step { probe } => match self.step(probe) {
                    // Process 0 knows it as well, and says what follows from it.
                    Ok(()) | Err(Error::Diverged { .. }) => {}
                    Err(error) => return Err(error),
                },
                Order::Evaluate => drop(self.validate()?),
                order @ Order::Read { .. } => self.serve(&order)?,
                Order::Finish => return Ok(()),
                Order::Wait | Order::Begin(_) | Order::Done => {}
            }
        }
    }

    fn serve(&self, order: &Order) -> Result<()> {
        let Order::Read { held, index, range } = order else { return Ok(()) };
        let Some(part) = Part::of(&self.engine.state, *held, *index) else { return Ok(()) };
        self.world().send(0, &part.bytes(self.world().rank(), range)?)
    }

    /// All masters, in process 0; the others serve it, and get none.
    pub(super) fn whole_masters(&self) -> Result<Option<Parameters>> {
        if !self.world().leads() {
            loop {
                match Order::take(self.world())? {
                    Order::Done => return Ok(None),
                    order => self.serve(&order)?,
                }
            }
        }
        let dtype = self.engine.state.masters.dtype();
        let masters = self.engine.state.weights.zeros_like(dtype)?;
        let shared = Shared { world: self.world(), state: &self.engine.state };
        for parameter in 0..masters.len() {
            let mut start = 0;
            shared.read(Held::Masters, parameter, |bytes| {
                let range = start..start + bytes.len() / dtype.size_in_bytes();
                start = range.end;
                crate::engine::collective::write_range(&masters[parameter], range, bytes).map(drop)
            })?;
        }
        Order::Done.give(self.world())?;
        Ok(Some(masters))
    }

    /// Every so many steps a line about the processes: how fast each is, how long it waits, and who keeps the others waiting.
    pub(super) fn log_processes(&mut self, targets: usize) {
        let world = self.engine.world.clone();
        if world.world() == 1 || !world.leads() {
            return;
        }
        let (step, times) = (self.engine.state.counters.step, &self.engine.times);
        let rates = &mut self.rates;
        let began = *rates.began.get_or_insert_with(Instant::now);
        for totals in [&mut rates.compute, &mut rates.waited, &mut rates.waited_before] {
            totals.resize(world.world(), 0.0);
        }
        rates.micro_batches.resize(world.world(), 0);
        for (rank, [compute, waited, micro_batches]) in times.iter().enumerate() {
            rates.compute[rank] += compute;
            rates.waited[rank] = waited - if rates.steps == 0 { 0.0 } else { rates.waited_before[rank] };
            if rates.steps == 0 {
                rates.waited_before[rank] = *waited;
                rates.waited[rank] = 0.0;
            }
            rates.micro_batches[rank] += *micro_batches as u64;
        }
        (rates.steps, rates.targets) = (rates.steps + 1, rates.targets + targets as u64);
        if rates.steps < RATE_STEPS {
            return;
        }
        let rates = std::mem::take(rates);
        let seconds = began.elapsed().as_secs_f64();
        let tokens_of_one = rates.targets as f64 / rates.micro_batches.iter().sum::<u64>().max(1) as f64;
        let rate = |rank: usize| ProcessRate {
            name: world.name(rank),
            tokens_per_s: rates.micro_batches[rank] as f64 * tokens_of_one / rates.compute[rank].max(1e-9),
            comm_fraction: rates.waited[rank] / seconds.max(1e-9),
        };
        let each = |rank: &usize| rates.compute[*rank] / rates.micro_batches[*rank] as f64;
        let busy: Vec<usize> = (0..world.world()).filter(|rank| rates.micro_batches[*rank] > 0).collect();
        let mut sorted: Vec<f64> = busy.iter().map(each).collect();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.get((sorted.len().max(1) - 1) / 2).copied().unwrap_or(0.0);
        let slow = busy.iter().filter(|rank| each(rank) > SLOW * middle).map(|rank| world.name(*rank)).collect();
        let processes = (0..world.world()).map(rate).collect();
        self.emitter.emit(Event::Throughput(Throughput { step, processes, stragglers: slow }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_round_trip() {
        for order in [
            Order::Wait,
            Order::Begin(77),
            Order::Step { probe: true },
            Order::Step { probe: false },
            Order::Evaluate,
            Order::Read { held: Held::ExpAvgSqAbsmax, index: 3, range: 5..1 << 40 },
            Order::Done,
            Order::Finish,
        ] {
            assert_eq!(Order::from_bytes(&order.to_bytes()).unwrap(), order);
        }
    }
}
