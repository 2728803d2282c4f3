//! Matrices of a frozen base that stay quantized as in a GGUF file (QLoRA; Dettmers et al., 2023).
//!
//! Each multiplication dequantizes the whole matrix into a shared buffer: the results have the same bits as with a base
//! that was dequantized when it was read. The embedding dequantizes only the rows that are looked up.

use crate::engine::kernels::WeightLayout;
use crate::engine::kernels::quantized::QuantizedMatrix;
use crate::engine::kernels::view;
use candle_core::{DType, Device, Result, Tensor};
use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The quantized matrices of a set of parameters, by the index of their fused tensor.
#[derive(Debug)]
pub(super) struct QuantizedBase {
    matrices: Arc<BTreeMap<usize, QuantizedMatrix>>,
    dtype: DType,
    device: Device,
    buffer: Mutex<DequantBuffer>,
}

/// Buffers that grow to the largest matrix in use, and to the largest number of embedding rows.
#[derive(Debug)]
pub(crate) struct DequantBuffer {
    elements: Tensor,
    /// 0, 1, 2, …: the indices of the dequantized rows.
    places: Vec<u32>,
}

/// A matrix in a dtype that kernels multiply.
#[derive(Debug)]
pub(crate) enum WeightRef<'a> {
    /// A matrix that is not quantized.
    Dense(&'a Tensor),
    /// A matrix that was dequantized into the buffer.
    Dequantized {
        /// A view of the buffer.
        matrix: Tensor,
        /// Keeps the buffer from being overwritten.
        buffer: MutexGuard<'a, DequantBuffer>,
    },
}

impl Deref for WeightRef<'_> {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        match self {
            Self::Dense(tensor) => tensor,
            Self::Dequantized { matrix, .. } => matrix,
        }
    }
}

impl WeightRef<'_> {
    /// The layout of a quantized weight: GGUF has `[out, in]` for every family, regardless of `layout`.
    pub(crate) fn layout(&self, layout: WeightLayout) -> WeightLayout {
        match self {
            Self::Dense(_) => layout,
            Self::Dequantized { .. } => WeightLayout::OutIn,
        }
    }

    /// The indices of the dequantized rows, in order.
    pub(crate) fn places(&self) -> &[u32] {
        match self {
            Self::Dense(_) => &[],
            Self::Dequantized { buffer, .. } => &buffer.places,
        }
    }
}

impl QuantizedBase {
    /// Matrices on `device` that are dequantized to `dtype`.
    pub(super) fn new(matrices: BTreeMap<usize, QuantizedMatrix>, dtype: DType, device: &Device) -> Result<Self> {
        Self::over(Arc::new(matrices), dtype, device)
    }

    /// Shares the matrices, but dequantizes them to `dtype`.
    pub(super) fn to_dtype(&self, dtype: DType) -> Result<Self> {
        Self::over(self.matrices.clone(), dtype, &self.device)
    }

    fn over(matrices: Arc<BTreeMap<usize, QuantizedMatrix>>, dtype: DType, device: &Device) -> Result<Self> {
        let buffer = DequantBuffer { elements: Tensor::zeros(0, dtype, &Device::Cpu)?, places: Vec::new() };
        Ok(Self { matrices, dtype, device: device.clone(), buffer: Mutex::new(buffer) })
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// Whether fused tensor `index` is quantized.
    pub(super) fn has(&self, index: usize) -> bool {
        self.matrices.contains_key(&index)
    }

    /// Bytes of the quantized matrices.
    pub(super) fn bytes(&self) -> u64 {
        self.matrices.values().map(QuantizedMatrix::bytes).sum()
    }

    pub(super) fn buffer_bytes(&self) -> u64 {
        let buffer = self.buffer.lock().unwrap_or_else(PoisonError::into_inner);
        (buffer.elements.elem_count() * self.dtype.size_in_bytes()) as u64
    }

    /// Dequantizes fused tensor `index`.
    pub(super) fn dequantize(&self, index: usize) -> Result<WeightRef<'_>> {
        let quantized = &self.matrices[&index];
        let dequantized = self.matrix(quantized.dims())?;
        quantized.dequantize(&dequantized)?;
        Ok(dequantized)
    }

    /// Dequantizes rows `ids` of fused tensor `index`.
    pub(super) fn gather(&self, index: usize, ids: &[u32]) -> Result<WeightRef<'_>> {
        let quantized = &self.matrices[&index];
        let mut rows = self.matrix([ids.len(), quantized.dims()[1]])?;
        if let WeightRef::Dequantized { buffer, .. } = &mut rows {
            let known = buffer.places.len() as u32;
            buffer.places.extend(known..ids.len() as u32);
            buffer.places.truncate(ids.len());
        }
        quantized.gather(ids, &rows)?;
        Ok(rows)
    }

    /// The buffer as a matrix.
    fn matrix(&self, [rows, columns]: [usize; 2]) -> Result<WeightRef<'_>> {
        let mut buffer = self.buffer.lock().unwrap_or_else(PoisonError::into_inner);
        if buffer.elements.elem_count() < rows * columns {
            buffer.elements = view::zeros(&[rows * columns], self.dtype, &self.device)?;
        }
        let matrix = buffer.elements.narrow(0, 0, rows * columns)?.reshape((rows, columns))?;
        Ok(WeightRef::Dequantized { matrix, buffer })
    }
}
