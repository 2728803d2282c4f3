//! Products by cuBLASLt straight into their destination; candle's would be a separate tensor that is copied there.

use super::launch::Queue;
use super::queue::CudaQueue;
use crate::columns::{MatmulOperand, WriteMode};
use crate::op;
use candle_core::cuda_backend::cudarc::cublaslt::{result, sys};
use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use candle_core::{CudaDevice, DType, Error, Result, Tensor};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::ops::Range;
use std::rc::Rc;
use std::sync::PoisonError;

/// Memory for partial sums of long products.
const WORKSPACE_BYTES: usize = 32 << 20;

/// Everything that an algorithm depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Problem {
    /// cuBLASLt's m, n and k.
    sizes: [usize; 3],
    /// Whether each factor is the transpose of a stored matrix.
    transposed: [bool; 2],
    /// Of the factors and the result.
    strides: [usize; 3],
    alignments: [u32; 3],
    of_factors: sys::cudaDataType_t,
    of_result: sys::cudaDataType_t,
    has_bias: bool,
}

/// The descriptions of a problem and its algorithm.
struct CublasPlan {
    product: sys::cublasLtMatmulDesc_t,
    matrices: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Drop for CublasPlan {
    fn drop(&mut self) {
        // SAFETY: the descriptions exist, and no other copy of their addresses.
        unsafe {
            let _ = result::destroy_matmul_desc(self.product);
            for matrix in self.matrices {
                let _ = result::destroy_matrix_layout(matrix);
            }
        }
    }
}

/// cuBLASLt, with a plan for each problem so far; `None` if it has no algorithm.
pub(super) struct Products {
    library: sys::cublasLtHandle_t,
    workspace: CudaSlice<u8>,
    plans: HashMap<Problem, Option<Rc<CublasPlan>>>,
}

// SAFETY: cuBLASLt's handles and descriptions belong to no thread. `CudaQueue` uses them, and counts references to
// plans, under a lock.
unsafe impl Send for Products {}

impl fmt::Debug for Products {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Products")
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        // SAFETY: the handle is open, and no other copy of it exists.
        let _ = unsafe { result::destroy_handle(self.library) };
    }
}

impl Products {
    fn new(device: &CudaDevice) -> Result<Self> {
        let library = result::create_handle().map_err(Error::wrap)?;
        // SAFETY: products write the workspace before they read it.
        let workspace = unsafe { device.alloc(WORKSPACE_BYTES) }?;
        Ok(Self { library, workspace, plans: HashMap::new() })
    }
}

impl CublasPlan {
    /// The plan that cuBLASLt expects to be the fastest.
    fn new(
        library: sys::cublasLtHandle_t,
        problem: &Problem,
    ) -> std::result::Result<Option<Self>, result::CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
        let Problem { sizes: [m, n, k], transposed: [of_a, of_b], strides, alignments, .. } = *problem;
        let layout = |dtype, [rows, columns]: [usize; 2], transposed: bool, stride: usize| {
            let [rows, columns] = if transposed { [columns, rows] } else { [rows, columns] };
            result::create_matrix_layout(dtype, rows as u64, columns as u64, stride as i64)
        };
        let (compute, scale) = (sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType_t::CUDA_R_32F);
        let mut plan = Self {
            product: result::create_matmul_desc(compute, scale)?,
            matrices: [
                layout(problem.of_factors, [m, k], of_a, strides[0])?,
                layout(problem.of_factors, [k, n], of_b, strides[1])?,
                layout(problem.of_result, [m, n], false, strides[2])?,
            ],
            algorithm: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
        };
        let epilogue = if problem.has_bias {
            sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS
        } else {
            sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT
        };
        plan.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, i32::from(of_a))?;
        plan.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, i32::from(of_b))?;
        plan.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue)?;
        // Partial sums stay in FP32.
        let reduction = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        let [a, b, c] = alignments;
        let preference = result::create_matmul_pref()?;
        let prefer = |attribute, value: u64, bytes: usize| {
            // SAFETY: the preference exists. Attributes are little-endian numbers of 8 bytes or fewer.
            unsafe { result::set_matmul_pref_attribute(preference, attribute, (&raw const value).cast(), bytes) }
        };
        let preferences = [
            (Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, WORKSPACE_BYTES as u64, 8),
            (Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, u64::from(reduction), 4),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, u64::from(a), 4),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, u64::from(b), 4),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, u64::from(c), 4),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, u64::from(c), 4),
        ];
        let preferred =
            preferences.into_iter().try_for_each(|(attribute, value, bytes)| prefer(attribute, value, bytes));
        let [a, b, c] = plan.matrices;
        // SAFETY: the handle, descriptions and preference exist.
        let found = preferred
            .and_then(|()| unsafe { result::get_matmul_algo_heuristic(library, plan.product, a, b, c, c, preference) });
        // SAFETY: no other copy of the preference exists.
        unsafe { result::destroy_matmul_pref(preference) }?;
        match found {
            Ok(found) => plan.algorithm = found.algo,
            Err(result::CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)) => return Ok(None),
            Err(error) => return Err(error),
        }
        Ok(Some(plan))
    }

    fn set<T: Copy>(
        &self,
        attribute: sys::cublasLtMatmulDescAttributes_t,
        value: T,
    ) -> std::result::Result<(), result::CublasError> {
        // SAFETY: the description exists, and the attribute has this type.
        unsafe { result::set_matmul_desc_attribute(self.product, attribute, (&raw const value).cast(), size_of::<T>()) }
    }
}

fn data_type(dtype: DType) -> Option<sys::cudaDataType_t> {
    match dtype {
        DType::F32 => Some(sys::cudaDataType_t::CUDA_R_32F),
        DType::F16 => Some(sys::cudaDataType_t::CUDA_R_16F),
        DType::BF16 => Some(sys::cudaDataType_t::CUDA_R_16BF),
        _ => None,
    }
}

/// The largest power of two, up to 256, that an address is a multiple of.
fn alignment(address: u64) -> u32 {
    1 << address.trailing_zeros().min(8)
}

/// A matrix as cuBLASLt takes it: by columns, so that ours, by rows, is its transpose.
#[derive(Clone, Copy)]
struct CublasMatrix {
    address: u64,
    dtype: DType,
    /// Elements from one of our rows to the next.
    stride: usize,
    transposed: bool,
}

impl CublasMatrix {
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
}

/// The parts of a side of a product. cuBLASLt is several times as slow if the length of rows is no multiple of 16
/// bytes, even if their distance is one: GPT-2's vocabulary of 50,257 is such a length. So the remainder is a separate
/// product.
fn parts(len: usize, along_rows: bool, dtype: DType) -> impl Iterator<Item = Range<usize>> {
    /// Shorter sides are not worth a second launch.
    const MIN_SPLIT: usize = 4096;
    const MULTIPLE: usize = 8;
    let over = if along_rows && len >= MIN_SPLIT && dtype != DType::F32 { len % MULTIPLE } else { 0 };
    [len - over..len, 0..len - over].into_iter().skip(usize::from(over == 0))
}

/// `c = alpha · a · b + bias`, or added to `c`.
struct CublasProduct {
    a: CublasMatrix,
    b: CublasMatrix,
    c: CublasMatrix,
    of_factors: sys::cudaDataType_t,
    of_result: sys::cudaDataType_t,
    alpha: f32,
    /// Its address.
    bias: Option<u64>,
    accumulates: bool,
}

/// The product of a part of the rows, columns and depth.
struct SubProduct {
    problem: Problem,
    /// Of the factors and the result.
    addresses: [u64; 3],
    bias: Option<u64>,
    alpha: f32,
    /// The factor of the result's old values.
    beta: f32,
}

impl CublasProduct {
    /// The `first` part of its sums, or a later one.
    fn part(&self, [rows, columns, depth]: [Range<usize>; 3], first: bool) -> SubProduct {
        let &Self { a, b, c, of_factors, of_result, alpha, bias, accumulates } = self;
        // Part of the last sum, which starts at 0.
        let bias =
            bias.filter(|_| depth.start == 0).map(|bias| bias + (columns.start * c.dtype.size_in_bytes()) as u64);
        // By columns, c's transpose is b's transpose times a's.
        let addresses =
            [b.at(depth.start, columns.start), a.at(rows.start, depth.start), c.at(rows.start, columns.start)];
        let problem = Problem {
            sizes: [columns.len(), rows.len(), depth.len()],
            transposed: [b.transposed, a.transposed],
            strides: [b.stride, a.stride, c.stride],
            alignments: addresses.map(alignment),
            of_factors,
            of_result,
            has_bias: bias.is_some(),
        };
        SubProduct { problem, addresses, bias, alpha, beta: if accumulates || !first { 1.0 } else { 0.0 } }
    }
}

impl Products {
    /// The plan of a problem; `None` if cuBLASLt has no algorithm.
    fn plan(&mut self, problem: Problem) -> Result<Option<Rc<CublasPlan>>> {
        let plan = match self.plans.entry(problem) {
            Entry::Occupied(plan) => plan.into_mut(),
            Entry::Vacant(empty) => {
                empty.insert(CublasPlan::new(self.library, &problem).map_err(Error::wrap)?.map(Rc::new))
            }
        };
        Ok(plan.clone())
    }

    fn launch(&self, queue: &CudaQueue, plan: &CublasPlan, part: &SubProduct) -> Result<()> {
        if let Some(bias) = part.bias {
            let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
            plan.set(attribute, bias).map_err(Error::wrap)?;
        }
        let [left, right, to] = part.addresses;
        let [of_left, of_right, of_to] = plan.matrices;
        // SAFETY: the matrices, the bias and the workspace are in this device's memory, which their owners hold until
        // the product is in the stream.
        unsafe {
            result::matmul(
                self.library,
                plan.product,
                (&raw const part.alpha).cast(),
                (&raw const part.beta).cast(),
                left as *const _,
                of_left,
                right as *const _,
                of_right,
                to as *const _,
                of_to,
                to as *mut _,
                of_to,
                &raw const plan.algorithm,
                queue.start(&self.workspace) as *mut _,
                WORKSPACE_BYTES,
                queue.device().cuda_stream().cu_stream() as sys::cudaStream_t,
            )
        }
        .map_err(Error::wrap)
    }
}

/// `c = alpha · a · b`, or added to it, summed in FP32 and rounded once, with `bias` added to each row; `false` if
/// cuBLASLt has no such product.
pub(crate) fn product(queue: &CudaQueue, op: &op::Matmul<'_>, bias: Option<&Tensor>) -> Result<bool> {
    let &op::Matmul { a, b, alpha, c, mode } = op;
    let [m, k] = a.dims();
    let n = c.count();
    let [a, b, c] = [
        CublasMatrix::new(queue, a)?,
        CublasMatrix::new(queue, b)?,
        CublasMatrix::new(queue, MatmulOperand::plain(c))?,
    ];
    let [Some(a), Some(b), Some(c)] = [a, b, c] else { return Ok(false) };
    let [Some(of_factors), Some(of_result)] = [data_type(a.dtype), data_type(c.dtype)] else { return Ok(false) };
    if b.dtype != a.dtype || ![a.dtype, DType::F32].contains(&c.dtype) || m * n * k == 0 {
        return Ok(false);
    }
    let bias = match bias {
        None => None,
        Some(bias) if bias.dtype() != c.dtype => return Ok(false),
        Some(bias) => match queue.address(bias)? {
            None => return Ok(false),
            address => address,
        },
    };
    let mut products = queue.products.lock().unwrap_or_else(PoisonError::into_inner);
    let products = match &mut *products {
        Some(products) => products,
        none => none.insert(Products::new(queue.device())?),
    };
    let accumulates = mode == WriteMode::Accumulate;
    let whole = CublasProduct { a, b, c, of_factors, of_result, alpha, bias, accumulates };
    // Every plan before the first launch: the caller computes the whole product if a part has none.
    let mut planned = Vec::new();
    for rows in parts(m, a.transposed, a.dtype) {
        for columns in parts(n, true, a.dtype) {
            // The short part of the depth first: so the sum is rounded once, except for the addition of that part.
            for (i, depth) in parts(k, !a.transposed || b.transposed, a.dtype).enumerate() {
                let part = whole.part([rows.clone(), columns.clone(), depth], i == 0);
                let Some(plan) = products.plan(part.problem)? else { return Ok(false) };
                planned.push((plan, part));
            }
        }
    }
    for (plan, part) in planned {
        products.launch(queue, &plan, &part)?;
    }
    Ok(true)
}
