//! Matrix products by cuBLASLt, with what it takes to describe one kept for the next of the same shape.
//!
//! The algorithm is the first that the library's heuristic names, which depends on the shape alone. Trying several and keeping
//! the fastest would make a run's bits depend on what else the machine did when it started, and a resumed run would differ.
//!
//! Of the epilogues, GELU is the tanh form (PyTorch takes it for nothing else, pull request 104061 there). What is not used:
//! `DGELU_BGRAD`. Its bias gradient is summed across the blocks of the result, in a type and an order that are written down
//! nowhere; `BGRADA` beside the weight's gradient sums the rounded gradient along the product's own sum, and costs no launch
//! either.

use super::failed;
use crate::engine::kernels::cuda::launch::Buffer;
use crate::engine::kernels::cuda::product::{Epilogue, Operand, Operands, Product};
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
/// What the distance between the columns of an epilogue's second matrix must be a multiple of, in elements.
const AUX_STRIDE: usize = 8;

pub(super) struct Blas {
    handle: cublasLtHandle_t,
    workspace: Cell<Option<Buffer>>,
    /// Nothing for a product that the library refuses.
    plans: RefCell<HashMap<Product, Option<Plan>>>,
}

/// The library's description of one shape, and its choice of an algorithm.
struct Plan {
    shape: Shape,
    algorithm: cublasLtMatmulAlgo_t,
}

/// The library's names for a product and its matrices.
struct Shape {
    product: cublasLtMatmulDesc_t,
    a: cublasLtMatrixLayout_t,
    b: cublasLtMatrixLayout_t,
    d: cublasLtMatrixLayout_t,
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
        self.plan(product)?;
        let plans = self.plans.borrow();
        let Some(Plan { shape, algorithm }) = plans.get(&product).and_then(Option::as_ref) else {
            bail!("CUDA could not plan {product:?}: cuBLASLt has no algorithm for it");
        };
        let Operands { a, b, d, bias, aux } = operands;
        let Some(workspace) = self.workspace.get() else { bail!("cuBLASLt has no workspace") };
        if let Some(bias) = bias {
            set(shape.product, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias.address)?;
        }
        if let Some(aux) = aux {
            set(shape.product, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &aux.address)?;
        }
        let (one, beta) = (1.0f32, if product.accumulate { 1.0f32 } else { 0.0 });
        let at = |buffer: Buffer| buffer.address as *mut std::ffi::c_void;
        // SAFETY: the caller's promise, and the plan describes these operands.
        let done = unsafe {
            result::matmul(
                self.handle,
                shape.product,
                from_ref(&one).cast(),
                from_ref(&beta).cast(),
                at(a),
                shape.a,
                at(b),
                shape.b,
                at(d),
                shape.d,
                at(d),
                shape.d,
                from_ref(algorithm),
                at(workspace),
                WORKSPACE_BYTES,
                stream,
            )
        };
        done.map_err(blas(&format!("multiply {product:?}")))
    }

    /// Whether the library has this product.
    pub(super) fn takes(&self, product: Product) -> Result<bool> {
        self.plan(product)?;
        Ok(self.plans.borrow().get(&product).is_some_and(Option::is_some))
    }

    /// Plans a product that is none yet. That there is no algorithm for an epilogue is an answer, and no error.
    fn plan(&self, product: Product) -> Result<()> {
        if self.plans.borrow().contains_key(&product) {
            return Ok(());
        }
        let unfit = has_aux(product.epilogue) && !product.rows.is_multiple_of(AUX_STRIDE);
        let plan = if unfit { None } else { self.ask(product).map_err(blas(&format!("plan {product:?}")))? };
        self.plans.borrow_mut().insert(product, plan);
        Ok(())
    }

    fn ask(&self, product: Product) -> std::result::Result<Option<Plan>, CublasError> {
        let shape = Shape::new(product)?;
        match shape.algorithm(self.handle) {
            Ok(algorithm) => Ok(Some(Plan { shape, algorithm })),
            Err(_) if !matches!(product.epilogue, Epilogue::None | Epilogue::Bias) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // Before the library is closed.
        self.plans.get_mut().clear();
        // SAFETY: the handle is used no more. Nobody is left to hear of a failure.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

impl Drop for Shape {
    fn drop(&mut self) {
        // SAFETY: what the library made is used no more.
        unsafe {
            let _ = result::destroy_matmul_desc(self.product);
            for layout in [self.a, self.b, self.d] {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}

impl Shape {
    fn new(product: Product) -> std::result::Result<Self, CublasError> {
        let Product { rows, columns, inner, a, b, dtype, out, epilogue, .. } = product;
        // Sums are FP32, and FP32 operands are not cut to TF32.
        let compute = cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let description = result::create_matmul_desc(compute, cudaDataType::CUDA_R_32F)?;
        // CUBLAS_OP_T is 1, CUBLAS_OP_N is 0.
        let turned = |operand: Operand| i32::from(operand.transposed);
        set_raw(description, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &turned(a))?;
        set_raw(description, Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &turned(b))?;
        set_raw(description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue_of(epilogue))?;
        // The library reads from these addresses how operands are aligned, and a plan is for all of its shape.
        let least_aligned = u64::from(ALIGNMENT);
        if !matches!(epilogue, Epilogue::None | Epilogue::GeluGradient) {
            set_raw(description, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &least_aligned)?;
        }
        if has_aux(epilogue) {
            set_raw(description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &least_aligned)?;
            set_raw(description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &(rows as i64))?;
        }
        let layout = |dtype: DType, rows: usize, columns: usize, operand: Operand| {
            let (rows, columns) = if operand.transposed { (columns, rows) } else { (rows, columns) };
            result::create_matrix_layout(name_of(dtype), rows as u64, columns as u64, operand.stride as i64)
        };
        let result_layout = Operand { stride: rows, transposed: false };
        Ok(Self {
            product: description,
            a: layout(dtype, rows, inner, a)?,
            b: layout(dtype, inner, columns, b)?,
            d: layout(out, rows, columns, result_layout)?,
        })
    }

    fn algorithm(&self, handle: cublasLtHandle_t) -> std::result::Result<cublasLtMatmulAlgo_t, CublasError> {
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
        let Self { product, a, b, d } = *self;
        // SAFETY: everything was made above and is still there.
        let found = unsafe { result::get_matmul_algo_heuristic(handle, product, a, b, d, d, preference) };
        // SAFETY: nothing refers to the preference any more.
        unsafe { result::destroy_matmul_pref(preference)? };
        Ok(found?.algo)
    }
}

/// Whether an epilogue has a matrix of the result's shape and type beside it.
fn has_aux(epilogue: Epilogue) -> bool {
    matches!(epilogue, Epilogue::BiasGelu | Epilogue::GeluGradient)
}

fn epilogue_of(epilogue: Epilogue) -> cublasLtEpilogue_t {
    match epilogue {
        Epilogue::None => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT,
        Epilogue::Bias => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
        Epilogue::BiasGelu => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
        Epilogue::GeluGradient => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DGELU,
        Epilogue::BiasGradient => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BGRADA,
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
