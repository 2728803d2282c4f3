//! Matrices in the block types of GGUF files, dequantized when they are used.

use crate::rows::{Rows, for_each_part};
use crate::view::write;
use candle_core::quantized::{GgmlDType, QuantizedType};
use candle_core::{CpuStorage, Result, Tensor, bail};
use std::fmt;

/// Rows that a task dequantizes at a time.
const MIN_ROWS_PER_TASK: usize = 32;

/// A matrix whose rows are whole blocks. Matrices that one product takes together are stacked, each with its own block
/// type.
pub struct QuantizedMatrix {
    parts: Vec<RowBlock>,
    columns: usize,
}

struct RowBlock {
    blocks: Box<dyn QuantizedType>,
    rows: usize,
}

impl QuantizedMatrix {
    /// The `rows` × `columns` matrix in `bytes`.
    pub fn new(dtype: GgmlDType, bytes: Vec<u8>, [rows, columns]: [usize; 2]) -> Result<Self> {
        let (block, size) = (dtype.block_size(), dtype.type_size());
        if !columns.is_multiple_of(block) || bytes.len() != rows * columns / block * size {
            bail!("{} bytes are no {rows} × {columns} matrix in blocks of {dtype:?}", bytes.len());
        }
        Ok(Self { parts: vec![RowBlock { blocks: dtype.from_data(bytes.into()), rows }], columns })
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
        self.parts.iter().map(|part| part.blocks.storage_size_in_bytes() as u64).sum()
    }

    /// Writes the whole matrix to `out`, rounded to its type.
    pub fn dequantize(&self, out: &Tensor) -> Result<()> {
        let mut first = 0;
        for part in &self.parts {
            self.fill(part, |row| row as u32, &out.narrow(0, first, part.rows)?)?;
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
        self.fill(part, |row| ids[row], out)
    }

    /// Writes row `id_of(n)` of `part` to row `n` of `out`.
    fn fill(&self, part: &RowBlock, id_of: impl Fn(usize) -> u32 + Sync, out: &Tensor) -> Result<()> {
        let (rows, width) = out.dims2()?;
        if width != self.columns {
            bail!("rows of {} numbers do not fit rows of {width}", self.columns);
        }
        write(out, |out| {
            for_each_part(Rows { view: out, width }, rows, MIN_ROWS_PER_TASK, |first, count, mut out| {
                let ids: Vec<u32> = (first..first + count).map(&id_of).collect();
                match part.blocks.embedding(&ids, part.rows, width) {
                    Ok(CpuStorage::F32(values)) => out.view.store(0, &values),
                    other => unreachable!("rows of whole blocks are dequantized to FP32: {other:?}"),
                }
            });
        })
    }
}

impl fmt::Debug for QuantizedMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let types: Vec<_> = self.parts.iter().map(|part| part.blocks.dtype()).collect();
        write!(f, "QuantizedMatrix({:?}, {types:?})", self.dims())
    }
}
