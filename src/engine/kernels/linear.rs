//! The fully connected layer on `Conv1D` weights `[in, out]`, as GPT-2 stores them.

use crate::engine::kernels::convert::Element;
use crate::engine::kernels::matmul::{Epilogue, Operand, matmul};
use crate::engine::kernels::rows::{Rows, STRIPE, column_sums, for_each_part, with_scratch};
use crate::engine::kernels::view::{ViewMut, read, with_element, write};
use candle_core::{Result, Tensor};

/// `y = x · weight + bias` for `x [N, I]`, `weight [I, O]`, `bias [O]`, `y [N, O]`, all of the compute type; the product
/// and the bias are summed in FP32 and rounded once.
pub fn forward(x: &Tensor, weight: &Tensor, bias: &Tensor, y: &Tensor) -> Result<()> {
    let ((rows, inner), (_, columns)) = (x.dims2()?, weight.dims2()?);
    let (x, weight, bias) = (read(x)?, read(weight)?, read(bias)?);
    with_scratch(
        columns,
        #[inline(always)]
        |scratch| {
            let epilogue = Epilogue { bias: Some(bias.view().widened(0, scratch)), ..Epilogue::default() };
            with_element!(y.dtype(), T => {
                let a = Operand::new(x.typed::<T>()?, rows, inner);
                let b = Operand::new(weight.typed::<T>()?, inner, columns);
                product(a, b, y, epilogue)
            })
        },
    )
}

/// `dx = dy · weightᵀ`.
pub fn backward_input(dy: &Tensor, weight: &Tensor, dx: &Tensor) -> Result<()> {
    let ((rows, columns), (inner, _)) = (dy.dims2()?, weight.dims2()?);
    let (dy, weight) = (read(dy)?, read(weight)?);
    with_element!(dx.dtype(), T => {
        let a = Operand::new(dy.typed::<T>()?, rows, columns);
        let b = Operand::new(weight.typed::<T>()?, inner, columns).transposed();
        product(a, b, dx, Epilogue::default())
    })
}

/// `dweight = xᵀ · dy` and `dbias = Σ_rows dy`, in the gradients' type.
pub fn backward_weight(x: &Tensor, dy: &Tensor, dweight: &Tensor, dbias: &Tensor) -> Result<()> {
    let ((rows, inner), (_, columns)) = (x.dims2()?, dy.dims2()?);
    let (x, dy_storage) = (read(x)?, read(dy)?);
    with_element!(dy.dtype(), T => {
        let a = Operand::new(x.typed::<T>()?, rows, inner).transposed();
        let b = Operand::new(dy_storage.typed::<T>()?, rows, columns);
        product(a, b, dweight, Epilogue::default())?;
    });
    let dy = dy_storage.view();
    write(dbias, |dbias| {
        for_each_part(
            Rows { view: dbias, width: 1 },
            columns,
            STRIPE,
            #[inline(always)]
            |first, width, mut dbias| {
                let [sums] = column_sums(
                    rows,
                    first,
                    width,
                    #[inline(always)]
                    |row, first, [sums]| {
                        let mut scratch = [0.0; STRIPE];
                        let dy = dy.widened(row * columns + first, &mut scratch[..width]);
                        for (sum, dy) in sums.iter_mut().zip(dy) {
                            *sum += dy;
                        }
                    },
                );
                dbias.view.store(0, &sums[..width]);
            },
        );
    })
}

/// `c = a · b`, whatever type `c` is stored in.
pub(crate) fn product<T: Element>(
    a: Operand<'_, T>,
    b: Operand<'_, T>,
    c: &Tensor,
    epilogue: Epilogue<'_>,
) -> Result<()> {
    let ldc = c.dims().last().copied().unwrap_or(1);
    write(c, |c| match c {
        ViewMut::F32(c) => matmul(a, b, c, ldc, epilogue),
        ViewMut::F16(c) => matmul(a, b, c, ldc, epilogue),
        ViewMut::BF16(c) => matmul(a, b, c, ldc, epilogue),
    })
}
