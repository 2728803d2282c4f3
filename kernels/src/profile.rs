//! A profile of the operations that a set of kernels computes, by kind.

use crate::attention::AttentionShape;
use crate::columns::{ColumnSlice, WriteMode};
use crate::decode_attention::CachedSequence;
use crate::gated_delta::DeltaHeads;
use crate::matmul::GemmShape;
use crate::op::{Access, Op};
use crate::pass::{PassFn, PassInputs};
use crate::{Kernels, Ran};
use candle_core::{Device, Result, Tensor, TensorId};
use std::collections::{BTreeMap, HashSet};
use std::mem::take;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The cost of the calls of one kind of operation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Number of calls.
    pub calls: u64,
    /// The time in which at least one call ran.
    pub time: Duration,
    /// Bytes of memory that the operands take: each one read or written once, or both if it is updated.
    pub bytes: f64,
    /// Floating-point operations of products, attention and the gated delta rule. Other operations are not counted.
    pub flops: f64,
}

/// Another set of kernels, measured.
#[derive(Debug)]
pub struct Profile {
    kernels: Arc<dyn Kernels>,
    clock: Clock,
    measured: Mutex<BTreeMap<&'static str, Measured>>,
}

#[derive(Debug, Default)]
struct Measured {
    cost: Cost,
    /// Calls in progress, and the start of the first of them.
    running: Option<(u64, Instant)>,
    /// The start and end of calls on a GPU.
    #[cfg(feature = "cuda")]
    events: Vec<[cudarc::CudaEvent; 2]>,
}

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::cudarc::driver as cudarc;

/// The clock that measures operations.
#[derive(Debug)]
enum Clock {
    /// The host's, because calls return when they are done.
    Host,
    /// Events in the stream of a GPU, which computes after a call has returned.
    #[cfg(feature = "cuda")]
    Stream(Arc<cudarc::CudaStream>),
}

impl Profile {
    /// Measures `kernels`, which compute on `device`.
    pub fn new(kernels: Arc<dyn Kernels>, device: &Device) -> Self {
        #[cfg(feature = "cuda")]
        let clock = device.as_cuda_device().map_or(Clock::Host, |device| Clock::Stream(device.cuda_stream()));
        #[cfg(not(feature = "cuda"))]
        let clock = {
            let _ = device;
            Clock::Host
        };
        Self { kernels, clock, measured: Mutex::default() }
    }

    /// The costs since the last call, by name of operation.
    pub fn take(&self) -> Result<BTreeMap<&'static str, Cost>> {
        take(&mut *self.measured()).into_iter().map(|(name, measured)| Ok((name, measured.total()?))).collect()
    }

    fn measured(&self) -> MutexGuard<'_, BTreeMap<&'static str, Measured>> {
        self.measured.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Measured {
    fn begin(&mut self) {
        let (count, since) = self.running.unwrap_or((0, Instant::now()));
        self.running = Some((count + 1, since));
    }

    fn end(&mut self) {
        self.running = match self.running.take() {
            Some((1, since)) => {
                self.cost.time += since.elapsed();
                None
            }
            running => running.map(|(count, since)| (count - 1, since)),
        };
    }

    #[cfg_attr(not(feature = "cuda"), expect(clippy::unnecessary_wraps, reason = "events can fail"))]
    fn total(self) -> Result<Cost> {
        #[cfg(feature = "cuda")]
        let time = {
            let millis = |[start, end]: &[cudarc::CudaEvent; 2]| {
                Ok::<_, candle_core::Error>(f64::from(start.elapsed_ms(end).map_err(candle_core::Error::wrap)?))
            };
            self.cost.time + Duration::from_secs_f64(self.events.iter().map(millis).sum::<Result<f64>>()? / 1e3)
        };
        #[cfg(not(feature = "cuda"))]
        let time = self.cost.time;
        Ok(Cost { time, ..self.cost })
    }
}

impl Kernels for Profile {
    fn name(&self) -> &str {
        self.kernels.name()
    }

    fn run(&self, op: &mut Op<'_>) -> Result<Ran> {
        let name = op.name();
        let bytes = bytes(op);
        let flops = flops(op);
        let ran = match &self.clock {
            Clock::Host => {
                self.measured().entry(name).or_default().begin();
                let ran = self.kernels.run(op);
                self.measured().entry(name).or_default().end();
                ran?
            }
            #[cfg(feature = "cuda")]
            Clock::Stream(stream) => {
                let event = || {
                    let flags = cudarc::sys::CUevent_flags::CU_EVENT_DEFAULT;
                    stream.record_event(Some(flags)).map_err(candle_core::Error::wrap)
                };
                let start = event()?;
                let ran = self.kernels.run(op)?;
                self.measured().entry(name).or_default().events.push([start, event()?]);
                ran
            }
        };
        let mut measured = self.measured();
        let cost = &mut measured.entry(name).or_default().cost;
        cost.calls += 1;
        cost.bytes += bytes;
        cost.flops += flops;
        Ok(ran)
    }

    fn packing_bytes(&self, products: &[GemmShape], threads: usize) -> Result<u64> {
        self.kernels.packing_bytes(products, threads)
    }

    fn score_bytes(&self, shape: &AttentionShape) -> Result<u64> {
        self.kernels.score_bytes(shape)
    }

    /// Records nothing, because a replayed pass has no single operations.
    fn pass(&self, inputs: &PassInputs<'_>, pass: PassFn<'_>) -> Result<()> {
        self.kernels.pass(&PassInputs { buffers: None, ..*inputs }, pass)
    }

    fn pads_logits(&self) -> bool {
        self.kernels.pads_logits()
    }

    /// Otherwise the times of operations would add up to more than the step's.
    fn allows_overlap(&self) -> bool {
        false
    }
}

/// Multiplications and additions of an operation's products.
pub(super) fn flops(op: &Op<'_>) -> f64 {
    let product = |m: usize, n: usize, k: usize| 2.0 * m as f64 * n as f64 * k as f64;
    let rows_by = |x: ColumnSlice<'_>, inner: usize| product(x.rows(), x.count(), inner);
    let states = |tokens: &Tensor, heads: DeltaHeads| (tokens.dims()[0] * heads.state_elements()) as f64;
    match op {
        Op::Linear(op) => {
            let (rows, outputs) = (op.x.dims()[0], op.y.dims()[1]);
            let rank = op.low_rank.map_or(0, |low_rank| low_rank.low.dims()[1]);
            product(rows, outputs, op.x.dims()[1] + rank)
        }
        Op::Matmul(op) => {
            let [_, inner] = op.a.dims();
            rows_by(op.c, inner)
        }
        Op::Attention(op) => 4.0 * score_elements(&op.shape, op.operands.documents, 0),
        Op::AttentionBackward(op) => 10.0 * score_elements(&op.shape, op.operands.documents, 0),
        Op::DecodeAttention(op) => {
            let scores = |sequence: &CachedSequence<'_>| {
                score_elements(&AttentionShape { seq_len: sequence.new, ..op.shape }, None, sequence.past)
            };
            4.0 * op.sequences.iter().map(scores).sum::<f64>()
        }
        // A token reads its state twice and changes it once; the backward pass repeats the first read and the change.
        Op::GatedDelta(op) => 6.0 * states(op.input, op.heads),
        Op::GatedDeltaBackward(op) => 16.0 * states(op.input, op.heads),
        Op::DecodeGatedDelta(op) => 6.0 * states(op.input, op.heads),
        _ => 0.0,
    }
}

/// The number of scores that are not masked, times the width of a head. `past` tokens of a cache come before each
/// sequence.
fn score_elements(shape: &AttentionShape, documents: Option<&[u32]>, past: usize) -> f64 {
    let keys = |row: usize| {
        let place = row % shape.seq_len;
        let start = documents.map_or(0, |starts| starts[row] as usize);
        past + place + 1 - shape.first_in_window(past + place).max(start)
    };
    let scores: usize = (0..shape.batch * shape.seq_len).map(keys).sum();
    (scores * shape.heads * shape.head_size) as f64
}

/// Bytes of the operands of an operation.
fn bytes(op: &Op<'_>) -> f64 {
    let size = |x: &Tensor| x.dtype().size_in_bytes();
    let of = |x: &Tensor| (x.elem_count() * size(x)) as f64;
    let matrix = |x: ColumnSlice<'_>| (x.rows() * x.count() * size(x.tensor())) as f64;
    match op {
        // Only the rows of the tokens.
        Op::Embed(op) => (2 + usize::from(op.input.positions.is_some())) as f64 * of(op.out),
        Op::EmbedBackward(op) => (3 + 2 * usize::from(op.dpositions.is_some())) as f64 * of(op.dx),
        Op::Summarize(op) => op.tensors.iter().map(|(tensor, _)| of(tensor)).sum(),
        Op::Rotate(op) => 2.0 * matrix(op.x),
        Op::Norm(op) => matrix(op.x) + matrix(op.y),
        Op::NormBackward(op) => {
            let updates = f64::from(1 + u8::from(op.mode == WriteMode::Accumulate));
            matrix(op.x) + matrix(op.dy) + updates * matrix(op.dx)
        }
        Op::Matmul(op) => {
            let updates = f64::from(1 + u8::from(op.mode == WriteMode::Accumulate));
            matrix(op.a.columns) + matrix(op.b.columns) + updates * matrix(op.c)
        }
        Op::CrossEntropy(op) => f64::from(1 + u8::from(op.seed.is_some())) * matrix(op.logits),
        op => {
            let mut seen: HashSet<(TensorId, Access)> = HashSet::new();
            let mut sum: f64 = 0.0;
            // Views of packed queries, keys and values are one tensor.
            op.for_each_tensor(&mut |x, access| {
                if seen.insert((x.id(), access)) {
                    sum += of(x);
                }
            });
            sum
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
    use super::*;
    use crate::adamw::{AdamWStep, AdamWTensor};
    use crate::columns::MatmulOperand;
    use crate::{Fused, op};
    use candle_core::DType;

    #[test]
    fn costs_add_up_by_kind_until_they_are_taken() {
        let profile = Profile::new(Arc::new(Fused), &Device::Cpu);
        let matrix = |rows, columns| Tensor::zeros((rows, columns), DType::F32, &Device::Cpu).unwrap();
        let (a, b, c) = (matrix(4, 8), matrix(8, 2), matrix(4, 2));
        for mode in [WriteMode::Overwrite, WriteMode::Accumulate] {
            let [a, b] = [&a, &b].map(|x| MatmulOperand::all(x).unwrap());
            op::Matmul { a, b, alpha: 1.0, c: ColumnSlice::all(&c).unwrap(), mode }.run(&profile).unwrap();
        }
        op::Zero { x: &c }.run(&profile).unwrap();
        let costs = profile.take().unwrap();
        assert_eq!(costs.keys().copied().collect::<Vec<_>>(), ["Matmul", "Zero"]);
        let product = costs["Matmul"];
        assert_eq!((product.calls, product.flops), (2, 2.0 * 2.0 * f64::from(4 * 8 * 2)));
        assert_eq!(product.bytes, 4.0 * (2.0 * f64::from(4 * 8 + 8 * 2) + 3.0 * f64::from(4 * 2)));
        assert!(product.time > Duration::ZERO);
        assert_eq!((costs["Zero"].bytes, costs["Zero"].flops), (4.0 * 8.0, 0.0));
        assert!(profile.take().unwrap().is_empty());
    }

    /// AdamW updates FP32 masters and moments and only writes the working copy.
    #[test]
    fn operands_count_once_for_reading_and_once_for_writing() {
        let profile = Profile::new(Arc::new(Fused), &Device::Cpu);
        let vector = |dtype| Tensor::zeros(10, dtype, &Device::Cpu).unwrap();
        let [grad, master, exp_avg, exp_avg_sq] = &[DType::F32; 4].map(vector);
        let step = AdamWStep { lr: 0.1, betas: [0.9; 2], eps: 1e-8, bias_corrections: [0.1; 2], grad_factor: 1.0 };
        let copy = vector(DType::F16);
        let scales = None;
        let weight_decay = 0.0;
        let counts = None;
        let weight = Some(&copy);
        let tensor = AdamWTensor { grad, master, exp_avg, exp_avg_sq, scales, weight, weight_decay, counts };
        op::AdamW { step, tensors: vec![tensor] }.run(&profile).unwrap();
        let x = Tensor::zeros((10, 3), DType::F16, &Device::Cpu).unwrap();
        op::ScaleRows { x: &x, weights: grad }.run(&profile).unwrap();
        let costs = profile.take().unwrap();
        assert_eq!(costs["AdamW"].bytes, 10.0 * (4.0 + 3.0 * 8.0 + 2.0));
        assert_eq!(costs["ScaleRows"].bytes, 10.0 * (3.0 * 4.0 + 4.0));
    }

    #[test]
    fn masked_scores_are_not_counted() {
        let shape = AttentionShape::new(2, 4, 3, 5);
        let width = f64::from(3 * 5);
        assert_eq!(score_elements(&shape, None, 0), 2.0 * 10.0 * width);
        assert_eq!(score_elements(&shape, Some(&[0, 0, 2, 2, 0, 0, 0, 3]), 0), (6.0 + 7.0) * width);
        let windowed = AttentionShape { window: Some(2), ..shape };
        assert_eq!(score_elements(&windowed, None, 0), 2.0 * 7.0 * width);
        assert_eq!(score_elements(&AttentionShape { batch: 1, seq_len: 1, ..windowed }, None, 9), 2.0 * width);
        assert_eq!(score_elements(&AttentionShape { batch: 1, seq_len: 1, ..shape }, None, 9), 10.0 * width);
    }

    #[test]
    fn the_time_of_simultaneous_calls_counts_once() {
        let mut measured = Measured::default();
        let began = Instant::now();
        measured.begin();
        measured.begin();
        std::thread::sleep(Duration::from_millis(20));
        measured.end();
        measured.end();
        let time = measured.total().unwrap().time;
        assert!(time >= Duration::from_millis(20) && time <= began.elapsed(), "{time:?}");
    }
}
