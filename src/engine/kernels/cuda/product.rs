//! Products by cuBLAS straight into their place, where candle's would be a tensor of their own that is copied there.

use super::queue::CudaQueue;
use crate::engine::kernels::columns::{Columns, Factor, Store};
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::cublas::{result, sys};
use candle_core::{DType, Result, bail};

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
struct Matrix {
    address: u64,
    dtype: sys::cudaDataType_t,
    /// Elements from one of our rows to the next.
    stride: i32,
}

fn matrix(queue: &CudaQueue, columns: Columns<'_>) -> Result<Option<Matrix>> {
    let (Some(buffer), Some(dtype)) = (queue.buffer(columns.tensor())?, data_type(columns.tensor().dtype())) else {
        return Ok(None);
    };
    let address = buffer.address + (columns.first() * buffer.dtype.size_in_bytes()) as u64;
    Ok(Some(Matrix { address, dtype, stride: size(columns.stride())? }))
}

fn size(n: usize) -> Result<i32> {
    match i32::try_from(n) {
        Ok(n) => Ok(n),
        Err(_) => bail!("{n} does not fit cuBLAS' 32-bit sizes: use a smaller batch"),
    }
}

/// `c = alpha · a · b`, or added to it, summed in FP32 and rounded once; `false` where cuBLAS has no such product.
pub(crate) fn product(
    queue: &CudaQueue,
    a: Factor<'_>,
    b: Factor<'_>,
    alpha: f32,
    c: Columns<'_>,
    how: Store,
) -> Result<bool> {
    let shape = |factor: Factor<'_>| {
        let (rows, columns) = (factor.columns.rows(), factor.columns.count());
        if factor.transposed { (columns, rows) } else { (rows, columns) }
    };
    let ((m, k), (inner, n)) = (shape(a), shape(b));
    if inner != k || (c.rows(), c.count()) != (m, n) {
        bail!("a product of {m} × {k} and {inner} × {n} for {} × {}", c.rows(), c.count());
    }
    let types = [a.columns, b.columns, c].map(|columns| columns.tensor().dtype());
    let exists = types[0] == types[1] && (types[2] == types[0] || types[2] == DType::F32);
    if !exists || m * n * k == 0 {
        return Ok(false);
    }
    let (Some(left), Some(right), Some(out)) =
        (matrix(queue, a.columns)?, matrix(queue, b.columns)?, matrix(queue, c)?)
    else {
        return Ok(false);
    };
    let operation = |factor: Factor<'_>| {
        if factor.transposed { sys::cublasOperation_t::CUBLAS_OP_T } else { sys::cublasOperation_t::CUBLAS_OP_N }
    };
    let beta = if how == Store::Add { 1.0f32 } else { 0.0 };
    let blas = queue.device().cublas_handle();
    // By columns, c's transpose is b's transpose times a's.
    // SAFETY: the matrices lie in memory of this device, which their tensors hold until the product is in the stream.
    unsafe {
        result::gemm_strided_batched_ex(
            *blas.handle(),
            operation(b),
            operation(a),
            size(n)?,
            size(m)?,
            size(k)?,
            (&raw const alpha).cast(),
            right.address as *const _,
            right.dtype,
            right.stride,
            0,
            left.address as *const _,
            left.dtype,
            left.stride,
            0,
            (&raw const beta).cast(),
            out.address as *mut _,
            out.dtype,
            out.stride,
            0,
            1,
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT_TENSOR_OP,
        )
    }
    .w()?;
    Ok(true)
}
