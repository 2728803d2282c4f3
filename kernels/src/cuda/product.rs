//! Products by cuBLAS straight into their destination; candle's would be a separate tensor that is copied there.

use super::launch::Queue;
use super::queue::CudaQueue;
use crate::columns::{MatmulOperand, WriteMode};
use crate::op;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::cublas::{result, sys};
use candle_core::{DType, Result, bail};
use std::ops::Range;

/// cuBLAS' name for a type.
fn data_type(dtype: DType) -> Option<sys::cudaDataType_t> {
    match dtype {
        DType::F32 => Some(sys::cudaDataType_t::CUDA_R_32F),
        DType::F16 => Some(sys::cudaDataType_t::CUDA_R_16F),
        DType::BF16 => Some(sys::cudaDataType_t::CUDA_R_16BF),
        _ => None,
    }
}

/// A matrix as cuBLAS takes it: by columns, so that ours, by rows, is its transpose.
#[derive(Clone, Copy)]
struct Matrix {
    address: u64,
    dtype: DType,
    /// Elements from one of our rows to the next.
    stride: usize,
    /// Whether the product takes the transpose.
    transposed: bool,
}

impl Matrix {
    fn new(queue: &CudaQueue, MatmulOperand { columns, transposed }: MatmulOperand<'_>) -> Result<Option<Self>> {
        let Some(address) = queue.address(columns.tensor())? else { return Ok(None) };
        let dtype = columns.tensor().dtype();
        let address = address + (columns.first() * dtype.size_in_bytes()) as u64;
        Ok(Some(Self { address, dtype, stride: columns.stride(), transposed }))
    }

    /// The address of the element at this row and column of the factor.
    fn at(self, row: usize, column: usize) -> u64 {
        let (row, column) = if self.transposed { (column, row) } else { (row, column) };
        self.address + ((row * self.stride + column) * self.dtype.size_in_bytes()) as u64
    }

    fn operation(self) -> sys::cublasOperation_t {
        if self.transposed { sys::cublasOperation_t::CUBLAS_OP_T } else { sys::cublasOperation_t::CUBLAS_OP_N }
    }
}

/// The parts of a side of a product. cuBLAS is several times as slow if the length of rows is no multiple of 16 bytes,
/// even if their distance is one: GPT-2's vocabulary of 50,257 is such a length. So the remainder is a separate
/// product.
fn parts(len: usize, along_rows: bool, dtype: DType) -> impl Iterator<Item = Range<usize>> {
    /// Shorter sides are not worth a second launch.
    const LEAST: usize = 4096;
    const MULTIPLE: usize = 8;
    let over = if along_rows && len >= LEAST && dtype != DType::F32 { len % MULTIPLE } else { 0 };
    [len - over..len, 0..len - over].into_iter().skip(usize::from(over == 0))
}

fn size(n: usize) -> Result<i32> {
    match i32::try_from(n) {
        Ok(n) => Ok(n),
        Err(_) => bail!("{n} does not fit cuBLAS' 32-bit sizes: use a smaller batch"),
    }
}

/// `c = alpha · a · b`, or added to it, summed in FP32 and rounded once; `false` if cuBLAS has no such product.
pub(crate) fn product(queue: &CudaQueue, op: &op::Matmul<'_>) -> Result<bool> {
    let &op::Matmul { a, b, alpha, c, mode } = op;
    let (m, n, k) = (c.rows(), c.count(), if a.transposed { a.columns.rows() } else { a.columns.count() });
    let [a, b, c] = [Matrix::new(queue, a)?, Matrix::new(queue, b)?, Matrix::new(queue, MatmulOperand::plain(c))?];
    let [Some(a), Some(b), Some(c)] = [a, b, c] else { return Ok(false) };
    let [Some(of_factors), Some(of_c)] = [data_type(a.dtype), data_type(c.dtype)] else { return Ok(false) };
    if b.dtype != a.dtype || ![a.dtype, DType::F32].contains(&c.dtype) || m * n * k == 0 {
        return Ok(false);
    }
    let blas = queue.device().cublas_handle();
    for rows in parts(m, a.transposed, a.dtype) {
        for columns in parts(n, true, a.dtype) {
            // The short part of the depth first: so the sum is rounded once, except for the addition of that part.
            for depth in parts(k, !a.transposed || b.transposed, a.dtype) {
                let adds = mode == WriteMode::Accumulate || depth.end < k;
                let beta = if adds { 1.0f32 } else { 0.0 };
                // By columns, c's transpose is b's transpose times a's.
                // SAFETY: the matrices are in this device's memory, which their tensors hold until the GEMM is in the
                // stream.
                unsafe {
                    result::gemm_strided_batched_ex(
                        *blas.handle(),
                        b.operation(),
                        a.operation(),
                        size(columns.len())?,
                        size(rows.len())?,
                        size(depth.len())?,
                        (&raw const alpha).cast(),
                        b.at(depth.start, columns.start) as *const _,
                        of_factors,
                        size(b.stride)?,
                        0,
                        a.at(rows.start, depth.start) as *const _,
                        of_factors,
                        size(a.stride)?,
                        0,
                        (&raw const beta).cast(),
                        c.at(rows.start, columns.start) as *mut _,
                        of_c,
                        size(c.stride)?,
                        0,
                        1,
                        sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                        sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT_TENSOR_OP,
                    )
                }
                .w()?;
            }
        }
    }
    Ok(true)
}
