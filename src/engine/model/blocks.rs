//! Matrices of a frozen base that stay in the blocks of a GGUF file (QLoRA; Dettmers et al., 2023).
//!
//! A matrix is dequantised as a whole into a buffer that all share, each time that it is multiplied: the results have
//! the same bits as with a base that was dequantised when it was read. The embedding dequantises only the rows that are
//! looked up.

use crate::engine::kernels::WeightLayout;
use crate::engine::kernels::quantised::Quantised;
use crate::engine::kernels::view;
use candle_core::{DType, Device, Result, Tensor};
use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The matrices in blocks of a set of parameters, by the index of their pack.
#[derive(Debug)]
pub(super) struct Blocks {
    matrices: Arc<BTreeMap<usize, Quantised>>,
    dtype: DType,
    buffer: Mutex<Buffer>,
}

/// Buffers that grow to the largest matrix in use, and to the largest number of embedding rows.
#[derive(Debug)]
pub(crate) struct Buffer {
    elements: Tensor,
    /// 0, 1, 2, …: the places of rows that were looked up.
    places: Vec<u32>,
}

/// A matrix to compute with.
#[derive(Debug)]
pub(crate) enum Operand<'a> {
    /// One that is held as it is.
    Held(&'a Tensor),
    /// One that was dequantised into the buffer.
    Dequantised {
        /// A view of the buffer.
        matrix: Tensor,
        /// Keeps the buffer from being overwritten.
        buffer: MutexGuard<'a, Buffer>,
    },
}

impl Deref for Operand<'_> {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        match self {
            Self::Held(tensor) => tensor,
            Self::Dequantised { matrix, .. } => matrix,
        }
    }
}

impl Operand<'_> {
    /// The layout of a quantized weight: GGUF has `[out, in]` for every family, regardless of `layout`.
    pub(crate) fn layout(&self, layout: WeightLayout) -> WeightLayout {
        match self {
            Self::Held(_) => layout,
            Self::Dequantised { .. } => WeightLayout::OutIn,
        }
    }

    /// The places of rows that were looked up, in order.
    pub(crate) fn places(&self) -> &[u32] {
        match self {
            Self::Held(_) => &[],
            Self::Dequantised { buffer, .. } => &buffer.places,
        }
    }
}

impl Blocks {
    /// Blocks that are dequantised to `dtype`.
    pub(super) fn new(matrices: BTreeMap<usize, Quantised>, dtype: DType) -> Result<Self> {
        Self::over(Arc::new(matrices), dtype)
    }

    /// The same blocks, dequantised to `dtype`.
    pub(super) fn converted(&self, dtype: DType) -> Result<Self> {
        Self::over(self.matrices.clone(), dtype)
    }

    fn over(matrices: Arc<BTreeMap<usize, Quantised>>, dtype: DType) -> Result<Self> {
        let buffer = Buffer { elements: Tensor::zeros(0, dtype, &Device::Cpu)?, places: Vec::new() };
        Ok(Self { matrices, dtype, buffer: Mutex::new(buffer) })
    }

    /// Whether pack `index` is in blocks.
    pub(super) fn has(&self, index: usize) -> bool {
        self.matrices.contains_key(&index)
    }

    /// Bytes of the blocks.
    pub(super) fn bytes(&self) -> u64 {
        self.matrices.values().map(Quantised::bytes).sum()
    }

    /// Bytes of the buffer.
    pub(super) fn buffer_bytes(&self) -> u64 {
        let buffer = self.buffer.lock().unwrap_or_else(PoisonError::into_inner);
        (buffer.elements.elem_count() * self.dtype.size_in_bytes()) as u64
    }

    /// The whole of pack `index`, which is in blocks.
    pub(super) fn dequantise(&self, index: usize) -> Result<Operand<'_>> {
        let quantised = &self.matrices[&index];
        let dequantised = self.matrix(quantised.dims())?;
        quantised.dequantise(&dequantised)?;
        Ok(dequantised)
    }

    /// Rows `ids` of pack `index`, which is in blocks.
    pub(super) fn gather(&self, index: usize, ids: &[u32]) -> Result<Operand<'_>> {
        let quantised = &self.matrices[&index];
        let mut rows = self.matrix([ids.len(), quantised.dims()[1]])?;
        if let Operand::Dequantised { buffer, .. } = &mut rows {
            let known = buffer.places.len() as u32;
            buffer.places.extend(known..ids.len() as u32);
            buffer.places.truncate(ids.len());
        }
        quantised.gather(ids, &rows)?;
        Ok(rows)
    }

    /// The buffer as a matrix.
    fn matrix(&self, [rows, columns]: [usize; 2]) -> Result<Operand<'_>> {
        let mut buffer = self.buffer.lock().unwrap_or_else(PoisonError::into_inner);
        if buffer.elements.elem_count() < rows * columns {
            buffer.elements = view::zeros(&[rows * columns], self.dtype, &Device::Cpu)?;
        }
        let matrix = buffer.elements.narrow(0, 0, rows * columns)?.reshape((rows, columns))?;
        Ok(Operand::Dequantised { matrix, buffer })
    }
}
