//! Matrices in the block types of GGUF files, dequantized when they are used.

use crate::rows::{Rows, for_each_part};
use crate::view::write;
use candle_core::quantized::{GgmlDType, QStorage, QTensor, QuantizedType};
use candle_core::{CpuStorage, Device, Result, Tensor, bail};
use std::fmt;

/// Rows that a task dequantizes at a time.
const ROWS_PER_TASK: usize = 32;

/// A matrix whose rows are whole blocks. Matrices that one product takes together are stacked, each with its own block
/// type.
pub struct QuantizedMatrix {
    parts: Vec<RowBlock>,
    columns: usize,
}

struct RowBlock {
    blocks: Blocks,
    rows: usize,
}

enum Blocks {
    /// Our threads dequantize rows in parallel.
    Cpu(Box<dyn QuantizedType>),
    /// candle's kernels dequantize to FP32.
    Gpu(Box<QTensor>),
}

impl QuantizedMatrix {
    /// The `rows` × `columns` matrix in `bytes`, on `device`.
    pub fn new(dtype: GgmlDType, bytes: Vec<u8>, [rows, columns]: [usize; 2], device: &Device) -> Result<Self> {
        let (block, size) = (dtype.block_size(), dtype.type_size());
        if !columns.is_multiple_of(block) || bytes.len() != rows * columns / block * size {
            bail!("{} bytes are no {rows} × {columns} matrix in blocks of {dtype:?}", bytes.len());
        }
        let blocks = if device.is_cpu() {
            Blocks::Cpu(dtype.from_data(bytes.into()))
        } else {
            let storage = QStorage::from_data(bytes.into(), device, dtype)?;
            Blocks::Gpu(Box::new(QTensor::new(storage, (rows, columns))?))
        };
        Ok(Self { parts: vec![RowBlock { blocks, rows }], columns })
    }

    /// Matrices of equally many columns, one below the other.
    pub fn stack(matrices: Vec<Self>) -> Result<Self> {
        let columns = matrices.first().map_or(0, |first| first.columns);
        if matrices.iter().any(|matrix| matrix.columns != columns) {
            bail!("matrices of different widths cannot be stacked");
        }
        Ok(Self { parts: matrices.into_iter().flat_map(|matrix| matrix.parts).collect(), columns })
    }

    /// Rows and columns.
    pub fn dims(&self) -> [usize; 2] {
        [self.parts.iter().map(|part| part.rows).sum(), self.columns]
    }

    /// Bytes of the blocks.
    pub fn bytes(&self) -> u64 {
        let bytes = |part: &RowBlock| match &part.blocks {
            Blocks::Cpu(blocks) => blocks.storage_size_in_bytes(),
            Blocks::Gpu(blocks) => blocks.storage_size_in_bytes(),
        };
        self.parts.iter().map(|part| bytes(part) as u64).sum()
    }

    /// Writes the whole matrix to `out`, rounded to its type.
    pub fn dequantize(&self, out: &Tensor) -> Result<()> {
        let mut first = 0;
        for part in &self.parts {
            self.fill(part, None, &out.narrow(0, first, part.rows)?)?;
            first += part.rows;
        }
        Ok(())
    }

    /// Writes row `ids[n]` to row `n` of `out`, for a matrix that is not stacked. An id outside of it is an error.
    pub fn gather(&self, ids: &[u32], out: &Tensor) -> Result<()> {
        let [part] = &self.parts[..] else { bail!("rows of stacked matrices cannot be looked up") };
        if let Some(id) = ids.iter().find(|&&id| id as usize >= part.rows) {
            bail!("token id {id} is outside the model's vocabulary of {}", part.rows);
        }
        self.fill(part, Some(ids), out)
    }

    /// Writes rows `ids` of `part`, or all of them, to `out`.
    fn fill(&self, part: &RowBlock, ids: Option<&[u32]>, out: &Tensor) -> Result<()> {
        let (rows, width) = out.dims2()?;
        if width != self.columns {
            bail!("rows of {} numbers do not fit rows of {width}", self.columns);
        }
        let blocks = match &part.blocks {
            Blocks::Cpu(blocks) => blocks,
            Blocks::Gpu(blocks) => {
                let values = match ids {
                    Some(ids) => blocks.embedding(&Tensor::new(ids, out.device())?)?,
                    None => blocks.dequantize(out.device())?,
                };
                return out.slice_set(&values.to_dtype(out.dtype())?, 0, 0);
            }
        };
        write(out, |out| {
            for_each_part(Rows { view: out, width }, rows, ROWS_PER_TASK, |first, count, mut out| {
                let ids: Vec<u32> = (first..first + count).map(|row| ids.map_or(row as u32, |ids| ids[row])).collect();
                match blocks.embedding(&ids, part.rows, width) {
                    Ok(CpuStorage::F32(values)) => out.view.store(0, &values),
                    other => unreachable!("rows of whole blocks are dequantized to FP32: {other:?}"),
                }
            });
        })
    }
}

impl fmt::Debug for QuantizedMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dtype = |part: &RowBlock| match &part.blocks {
            Blocks::Cpu(blocks) => blocks.dtype(),
            Blocks::Gpu(blocks) => blocks.dtype(),
        };
        let types: Vec<_> = self.parts.iter().map(dtype).collect();
        write!(f, "QuantizedMatrix({:?}, {types:?})", self.dims())
    }
}
