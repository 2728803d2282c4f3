//! Passes recorded as CUDA graphs: the first pass of a shape runs, the second is recorded, and later ones replay the
//! record.

use super::dispatch::{CudaKernels, KernelFamily};
use super::inputs::Resident;
use super::launch::Queue;
use crate::pass::{PassFn, PassInputs};
use candle_core::Result;
use std::sync::PoisonError;

/// Shapes that are recorded, at most.
const MAX_SHAPES: usize = 64;

#[derive(Debug)]
pub(super) struct Graphs<Q: Queue> {
    shapes: Vec<Shape<Q>>,
    /// Whether a pass could not be recorded; then no other is.
    refused: bool,
    pub(super) notice: Option<String>,
}

impl<Q: Queue> Default for Graphs<Q> {
    fn default() -> Self {
        Self { shapes: Vec::new(), refused: false, notice: None }
    }
}

/// Everything that decides about the operations of a pass and their memory.
#[derive(Clone, Debug, PartialEq, Eq)]
struct GraphKey {
    buffers: u64,
    tokens: usize,
    seq_len: usize,
    has_documents: bool,
    windows: Vec<Option<usize>>,
}

/// The passes of one shape.
#[derive(Debug)]
struct Shape<Q: Queue> {
    key: GraphKey,
    /// The block of inputs, and its address.
    block: (u64, Q::Block),
    graph: Option<Q::Graph>,
}

impl<Q: Queue> CudaKernels<Q> {
    /// Computes [`Kernels::pass`](crate::Kernels::pass).
    pub(super) fn run_or_replay(&self, inputs: &PassInputs<'_>, pass: PassFn<'_>) -> Result<()> {
        let block = Resident::new(inputs)?;
        let mut graphs = self.graphs.lock().unwrap_or_else(PoisonError::into_inner);
        let graphs = &mut *graphs;
        let key = inputs.buffers.filter(|_| !graphs.refused && self.families.contains(&KernelFamily::Graph));
        let key = key.map(|buffers| GraphKey {
            buffers,
            tokens: inputs.ids.len(),
            seq_len: inputs.seq_len,
            has_documents: inputs.documents.is_some(),
            windows: inputs.windows.to_vec(),
        });
        // Records of other buffers are of no use any more.
        graphs.shapes.retain(|shape| key.as_ref().is_none_or(|key| key.buffers == shape.key.buffers));
        let known = graphs.shapes.iter().position(|shape| Some(&shape.key) == key.as_ref());
        let Some(known) = known else {
            let (address, owner) = self.queue.block(&block.words)?;
            self.with_inputs(block, address, pass)?;
            if let Some(key) = key
                && graphs.shapes.len() < MAX_SHAPES
            {
                graphs.shapes.push(Shape { key, block: (address, owner), graph: None });
            }
            return Ok(());
        };
        let shape = &mut graphs.shapes[known];
        self.queue.overwrite(&mut shape.block.1, &block.words)?;
        let address = shape.block.0;
        if shape.graph.is_none() {
            let mut record = || self.queue.capture(pass).map(|graph| shape.graph = Some(graph));
            if let Err(error) = self.with_inputs(block.clone(), address, &mut record) {
                let why = error.to_string();
                graphs.notice = Some(why.lines().next().unwrap_or_default().to_owned());
                graphs.refused = true;
                let ran = self.with_inputs(block, address, pass);
                graphs.shapes.clear();
                return ran;
            }
        }
        shape.graph.as_ref().map_or(Ok(()), |graph| self.queue.replay(graph))
    }

    /// Runs `pass`, which finds its inputs at this address.
    fn with_inputs(&self, mut block: Resident, address: u64, pass: PassFn<'_>) -> Result<()> {
        block.address = address;
        let current = || self.resident.lock().unwrap_or_else(PoisonError::into_inner);
        *current() = Some(block);
        let ran = pass();
        *current() = None;
        ran
    }
}
