//! Our own kernels for a GPU.

use super::attention::KeyRangeCache;
use super::graph::Graphs;
use super::inputs::Resident;
use super::launch::{ALIGNMENT, Queue};
use crate::columns::{ColumnSlice, MatmulOperand, WriteMode};
use crate::op::{self, Op};
use crate::pass::{PassFn, PassInputs};
use crate::{Kernels, Ran};
use candle_core::{DType, Device, Error, Result, Tensor};
use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, PoisonError};
use strum::{IntoStaticStr, VariantArray};

/// Tables that stay on the device; tensors move rarely.
const MAX_TABLES: usize = 4096;

/// Kernels that are compiled and tried together, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
#[allow(missing_docs, reason = "each variant is named like its file of kernels")]
pub enum KernelFamily {
    #[strum(serialize = "adamw")]
    AdamW,
    Attention,
    /// Attention with the products of compute capability 9.0, used with `Attention`.
    AttentionWgmma,
    CrossEntropy,
    Elementwise,
    Embedding,
    Norm,
    Product,
    Rope,
    Summary,
    /// Passes recorded as CUDA graphs. It changes no bits, so checkpoints do not name it.
    Graph,
}

impl KernelFamily {
    /// The name used in logs, checkpoints and error texts.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// The kernels of some families, on one device. Each file of launches adds the operations of its kernels.
#[derive(Debug)]
pub(crate) struct CudaKernels<Q: Queue> {
    pub(super) queue: Q,
    pub(super) families: BTreeSet<KernelFamily>,
    name: String,
    pub(super) bounded: Mutex<Option<KeyRangeCache>>,
    /// The inputs of the pass in progress.
    pub(super) resident: Mutex<Option<Resident>>,
    pub(super) graphs: Mutex<Graphs<Q>>,
    /// Tables of tensors that kernels read, on the device, by their words.
    tables: Mutex<HashMap<Vec<u32>, Tensor>>,
}

impl<Q: Queue> CudaKernels<Q> {
    pub(crate) fn new(queue: Q, families: BTreeSet<KernelFamily>) -> Self {
        let named = families.iter().filter(|family| **family != KernelFamily::Graph);
        let names: Vec<&str> = named.map(|family| family.name()).collect();
        let name = format!("fused:{}", names.join(","));
        let (bounded, resident, graphs, tables) = Default::default();
        Self { queue, families, name, bounded, resident, graphs, tables }
    }

    /// The address of a tensor that holds `len` elements of type `dtype`.
    pub(super) fn address(&self, tensor: &Tensor, dtype: DType, len: usize) -> Attempt<u64> {
        require(tensor.dtype() == dtype && tensor.elem_count() >= len)?;
        self.queue.address(tensor)?.ok_or(Stop::Unsupported)
    }

    /// Numbers on the device, uploaded once.
    pub(super) fn table(&self, words: Vec<u32>, device: &Device) -> Result<Tensor> {
        let mut tables = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        if tables.len() == MAX_TABLES {
            tables.clear();
        }
        Ok(match tables.entry(words) {
            Entry::Occupied(table) => table.get().clone(),
            Entry::Vacant(place) => {
                let table = Tensor::new(place.key().as_slice(), device)?;
                place.insert(table).clone()
            }
        })
    }

    /// [`Self::address`], or 0 if there is no tensor.
    pub(super) fn optional(&self, tensor: Option<&Tensor>, dtype: DType, len: usize) -> Attempt<u64> {
        tensor.map_or(Ok(0), |tensor| self.address(tensor, dtype, len))
    }

    /// The address of the first element of columns.
    pub(super) fn columns(&self, columns: ColumnSlice<'_>, dtype: DType) -> Attempt<u64> {
        let start = self.address(columns.tensor(), dtype, columns.rows() * columns.stride())?;
        Ok(start + (columns.first() * dtype.size_in_bytes()) as u64)
    }

    fn linear(&self, op: &op::Linear<'_>) -> Attempt {
        require(op.low_rank.is_none())?;
        let (a, b) = (MatmulOperand::all(op.x)?, MatmulOperand::of_weight(op.weight, op.layout)?);
        let product = op::Matmul { a, b, alpha: 1.0, c: ColumnSlice::all(op.y)?, mode: WriteMode::Overwrite };
        require(self.queue.product(&product, op.bias)?)
    }

    fn attempt(&self, op: &mut Op<'_>) -> Attempt {
        let family = match op {
            Op::AdamW(_) => KernelFamily::AdamW,
            Op::Attention(_) | Op::AttentionBackward(_) => KernelFamily::Attention,
            Op::CrossEntropy(_) => KernelFamily::CrossEntropy,
            Op::Embed(_) | Op::EmbedBackward(_) => KernelFamily::Embedding,
            Op::Norm(_) | Op::NormBackward(_) => KernelFamily::Norm,
            Op::Linear(_) | Op::Matmul(_) | Op::SumRows(_) => KernelFamily::Product,
            Op::Rotate(_) => KernelFamily::Rope,
            Op::Summarize(_) => KernelFamily::Summary,
            _ => KernelFamily::Elementwise,
        };
        require(self.families.contains(&family))?;
        match op {
            Op::Zero(op) => require(self.queue.zero(op.x)?),
            Op::Copy(op) => self.copy(op),
            Op::Accumulate(op) => self.accumulate(op),
            Op::Embed(op) => self.embed(op),
            Op::EmbedBackward(op) => self.embed_backward(op),
            Op::Norm(op) => self.norm(op),
            Op::NormBackward(op) => self.norm_backward(op),
            Op::Rotate(op) => self.apply_rope(op),
            Op::Linear(op) => self.linear(op),
            Op::Matmul(op) => require(self.queue.product(op, None)?),
            Op::SumRows(op) => self.sum_rows(op),
            Op::Attention(op) => self.attention(op),
            Op::AttentionBackward(op) => self.attention_backward(op),
            Op::Activate(op) => self.activate(op),
            Op::ActivateBackward(op) => self.activate_backward(op),
            Op::AddBranch(op) => self.residual_add(op),
            Op::CrossEntropy(op) => self.cross_entropy(op),
            Op::Summarize(op) => self.summarize(op),
            Op::AdamW(op) => self.adamw(op),
            _ => Err(Stop::Unsupported),
        }
    }
}

impl<Q: Queue> Kernels for CudaKernels<Q> {
    fn name(&self) -> &str {
        &self.name
    }

    fn run(&self, op: &mut Op<'_>) -> Result<Ran> {
        self.queue.begin(op);
        match self.attempt(op) {
            Ok(()) => Ok(Ran::Done),
            Err(Stop::Unsupported) => {
                self.refuse_in_capture(&format!("candle's `{}`", op.name()))?;
                Ok(Ran::Unsupported)
            }
            Err(Stop::Failed(error)) => Err(error),
        }
    }

    fn pads_logits(&self) -> bool {
        [KernelFamily::CrossEntropy, KernelFamily::Product].iter().all(|family| self.families.contains(family))
    }

    fn pass(&self, inputs: &PassInputs<'_>, pass: PassFn<'_>) -> Result<()> {
        self.run_or_replay(inputs, pass)
    }

    fn take_notice(&self) -> Option<String> {
        self.graphs.lock().unwrap_or_else(PoisonError::into_inner).notice.take()
    }
}

/// The reason why an operation is not computed.
#[derive(Debug)]
pub(super) enum Stop {
    /// There is no kernel for it.
    Unsupported,
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

pub(super) type Attempt<T = ()> = std::result::Result<T, Stop>;

/// Stops unless there is a kernel for the operands.
pub(super) fn require(supported: bool) -> Attempt {
    if supported { Ok(()) } else { Err(Stop::Unsupported) }
}

/// Whether there are kernels for this pair of types: the first is equal to the second or FP32.
pub(super) fn is_pair([wide, narrow]: [DType; 2]) -> bool {
    let is_stored = |dtype| matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    (wide == DType::F32 || wide == narrow) && is_stored(narrow)
}

/// Whether heads of `width` elements begin where the widest accesses can.
pub(super) fn aligns(columns: ColumnSlice<'_>, width: usize) -> bool {
    let bytes = |elements: usize| (elements * columns.tensor().dtype().size_in_bytes()) as u64;
    [columns.first(), columns.stride(), width].into_iter().all(|elements| bytes(elements).is_multiple_of(ALIGNMENT))
}
