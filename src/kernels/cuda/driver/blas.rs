//! Matrix products by cuBLASLt, with what it takes to describe one kept for the next of the same shape.

use super::failed;
use crate::kernels::cuda::launch::Buffer;
use crate::kernels::cuda::product::{Operand, Operands, Product};
use candle_core::{DType, Result, bail};
use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtEpilogue_t, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t,
    cublasLtMatmulDescAttributes_t as Attribute, cublasLtMatmulPreferenceAttributes_t as Preference,
    cublasLtMatrixLayout_t, cublasLtReductionScheme_t, cudaDataType,
};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ptr::from_ref;

/// Room for products that are summed in parts.
pub(super) const WORKSPACE_BYTES: usize = 32 << 20;
/// What every operand's address is a multiple of; see [`Buffer::expect`].
const ALIGNMENT: u32 = 16;

pub(super) struct Blas {
    handle: cublasLtHandle_t,
    workspace: Cell<Option<Buffer>>,
    plans: RefCell<HashMap<Product, Plan>>,
}

/// The library's description of one shape, and its choice of an algorithm.
#[derive(Clone, Copy)]
struct Plan {
    product: cublasLtMatmulDesc_t,
    a: cublasLtMatrixLayout_t,
    b: cublasLtMatrixLayout_t,
    d: cublasLtMatrixLayout_t,
    algorithm: cublasLtMatmulAlgo_t,
}

impl Blas {
    /// Opens the library for the context that is current.
    pub(super) fn new() -> Result<Self> {
        // SAFETY: this loads the library and looks no further.
        if !unsafe { sys::is_culib_present() } {
            bail!("CUDA's libcublasLt (12 or 13) is not found: install it, or name its folder in LD_LIBRARY_PATH");
        }
        let handle = result::create_handle().map_err(blas("open cuBLASLt"))?;
        Ok(Self { handle, workspace: Cell::default(), plans: RefCell::default() })
    }

    pub(super) fn give_workspace(&self, workspace: Buffer) {
        self.workspace.set(Some(workspace));
    }

    /// # Safety
    /// The buffers are of the device whose context is current, and as large as the product says.
    pub(super) unsafe fn multiply(
        &self,
        product: Product,
        operands: Operands,
        stream: sys::cudaStream_t,
    ) -> Result<()> {
        let plan = self.plan(product)?;
        let Operands { a, b, d, bias } = operands;
        let Some(workspace) = self.workspace.get() else { bail!("cuBLASLt has no workspace") };
        if let Some(bias) = bias {
            set(plan.product, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias.address)?;
        }
        let (one, beta) = (1.0f32, if product.accumulate { 1.0f32 } else { 0.0 });
        let at = |buffer: Buffer| buffer.address as *mut std::ffi::c_void;
        // SAFETY: the caller's promise, and the plan describes these operands.
        let done = unsafe {
            result::matmul(
                self.handle,
                plan.product,
                from_ref(&one).cast(),
                from_ref(&beta).cast(),
                at(a),
                plan.a,
                at(b),
                plan.b,
                at(d),
                plan.d,
                at(d),
                plan.d,
                &raw const plan.algorithm,
                at(workspace),
                WORKSPACE_BYTES,
                stream,
            )
        };
        done.map_err(blas(&format!("multiply {product:?}")))
    }

    fn plan(&self, product: Product) -> Result<Plan> {
        if let Some(plan) = self.plans.borrow().get(&product) {
            return Ok(*plan);
        }
        let plan = Plan::new(self.handle, product).map_err(blas(&format!("plan {product:?}")))?;
        self.plans.borrow_mut().insert(product, plan);
        Ok(plan)
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        for plan in self.plans.borrow().values() {
            // SAFETY: the plan was made by the library and is used no more. Nobody is left to hear of a failure.
            unsafe {
                let _ = result::destroy_matmul_desc(plan.product);
                for layout in [plan.a, plan.b, plan.d] {
                    let _ = result::destroy_matrix_layout(layout);
                }
            }
        }
        // SAFETY: as above.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

impl Plan {
    fn new(handle: cublasLtHandle_t, product: Product) -> std::result::Result<Self, CublasError> {
        let Product { rows, columns, inner, a, b, dtype, out, bias, .. } = product;
        // Sums are FP32, and FP32 operands are not cut to TF32.
        let compute = cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let description = result::create_matmul_desc(compute, cudaDataType::CUDA_R_32F)?;
        // CUBLAS_OP_T is 1, CUBLAS_OP_N is 0.
        let turned = |operand: Operand| i32::from(operand.transposed);
        set_raw(description, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &turned(a))?;
        set_raw(description, Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &turned(b))?;
        if bias {
            let epilogue = cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
            set_raw(description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
        }
        let layout = |dtype: DType, rows: usize, columns: usize, operand: Operand| {
            let (rows, columns) = if operand.transposed { (columns, rows) } else { (rows, columns) };
            result::create_matrix_layout(name_of(dtype), rows as u64, columns as u64, operand.stride as i64)
        };
        let result_layout = Operand { stride: rows, transposed: false };
        let [a, b, d] = [
            layout(dtype, rows, inner, a)?,
            layout(dtype, inner, columns, b)?,
            layout(out, rows, columns, result_layout)?,
        ];
        let preference = result::create_matmul_pref()?;
        let prefer = |what, value: &u32| {
            // SAFETY: the preference is open, and the value is as large as this attribute.
            unsafe { result::set_matmul_pref_attribute(preference, what, from_ref(value).cast(), size_of::<u32>()) }
        };
        let (bytes, most) = (WORKSPACE_BYTES, Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
        // SAFETY: as above.
        unsafe { result::set_matmul_pref_attribute(preference, most, from_ref(&bytes).cast(), size_of::<usize>())? };
        for operand in [
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            prefer(operand, &ALIGNMENT)?;
        }
        // Parts of a sum may not be rounded to the result's type.
        let scheme = cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        prefer(Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &scheme)?;
        // SAFETY: everything was made above and is still there.
        let found = unsafe { result::get_matmul_algo_heuristic(handle, description, a, b, d, d, preference) };
        // SAFETY: nothing refers to the preference any more.
        unsafe { result::destroy_matmul_pref(preference)? };
        Ok(Self { product: description, a, b, d, algorithm: found?.algo })
    }
}

fn name_of(dtype: DType) -> cudaDataType {
    match dtype {
        DType::F16 => cudaDataType::CUDA_R_16F,
        DType::BF16 => cudaDataType::CUDA_R_16BF,
        _ => cudaDataType::CUDA_R_32F,
    }
}

fn set<T>(description: cublasLtMatmulDesc_t, what: Attribute, value: &T) -> Result<()> {
    set_raw(description, what, value).map_err(blas("describe a product"))
}

fn set_raw<T>(description: cublasLtMatmulDesc_t, what: Attribute, value: &T) -> std::result::Result<(), CublasError> {
    // SAFETY: the description is open, and the library checks the value's size.
    unsafe { result::set_matmul_desc_attribute(description, what, from_ref(value).cast(), size_of::<T>()) }
}

/// An error of the library as one of the engine's.
fn blas(what: &str) -> impl FnOnce(CublasError) -> candle_core::Error {
    move |error| failed(what, &error)
}
