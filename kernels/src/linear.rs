//! The fully connected layer, on weights `[in, out]` or `[out, in]` as they are stored: the product transposes operands
//! while it packs them.

use crate::columns::{Columns, Factor, Store};
use crate::convert::Element;
use crate::matmul::{Epilogue, Operand, Term, matmul, matmul_with};
use crate::rows::{Rows, STRIPE, column_sums, for_each_stripe, with_scratch};
use crate::view::{Read, ViewMut, read, with_element, write};
use crate::{LowRank, WeightLayout};
use candle_core::{Error, Result, Tensor, bail};

/// A layer's weight.
#[derive(Clone, Copy, Debug)]
pub struct Weight<'a> {
    /// A matrix of the compute type.
    pub tensor: &'a Tensor,
    /// Which of its dimensions is which.
    pub layout: WeightLayout,
}

impl<'a> Weight<'a> {
    /// A weight `[in, out]`.
    pub fn in_out(tensor: &'a Tensor) -> Self {
        Self { tensor, layout: WeightLayout::InOut }
    }

    /// A weight `[out, in]`.
    pub fn out_in(tensor: &'a Tensor) -> Self {
        Self { tensor, layout: WeightLayout::OutIn }
    }

    /// Inputs and outputs.
    fn dims(&self) -> Result<[usize; 2]> {
        let (rows, columns) = self.tensor.dims2()?;
        Ok(match self.layout {
            WeightLayout::InOut => [rows, columns],
            WeightLayout::OutIn => [columns, rows],
        })
    }
}

/// The `inputs` × `outputs` matrix of a weight, of either layout.
fn operand<T>(data: &[T], layout: WeightLayout, [inputs, outputs]: [usize; 2]) -> Operand<'_, T> {
    match layout {
        WeightLayout::InOut => Operand::new(data, inputs, outputs),
        WeightLayout::OutIn => Operand::new(data, outputs, inputs).transposed(),
    }
}

/// `y = x · weight + bias + alpha · low · factor` for `x [N, I]`, `bias [O]` and `y [N, O]`, all of the compute type; everything
/// is summed in FP32 and rounded once.
pub fn forward(
    x: &Tensor,
    weight: Weight<'_>,
    bias: Option<&Tensor>,
    low_rank: Option<LowRank<'_>>,
    y: &Tensor,
) -> Result<()> {
    let ((rows, inner), dims) = (x.dims2()?, weight.dims()?);
    let (x, opened, bias) = (read(x)?, read(weight.tensor)?, bias.map(read).transpose()?);
    let low = low_rank.map(|low_rank| Ok::<_, Error>([read(low_rank.low)?, read(low_rank.factor.columns.tensor())?]));
    let low = low.transpose()?;
    with_scratch(
        dims[1],
        #[inline(always)]
        |scratch| {
            let bias = bias.as_ref().map(|bias| bias.view().widened(0, scratch));
            let epilogue = Epilogue { bias, ..Epilogue::default() };
            with_element!(y.dtype(), T => {
                let a = Operand::new(x.typed::<T>()?, rows, inner);
                let b = operand(opened.typed::<T>()?, weight.layout, dims);
                let second = low_rank.zip(low.as_ref()).map(|(low_rank, opened)| term(low_rank, opened)).transpose()?;
                product(a, b, second, y, epilogue)
            })
        },
    )
}

/// A thin product as a term of the layer's, with its operands open.
fn term<'a, T: Element>(low_rank: LowRank<'a>, [low, opened]: &'a [Read<'_>; 2]) -> Result<Term<'a, T>> {
    let LowRank { low: x, factor: b, alpha, shares } = low_rank;
    let (rows, columns) = x.dims2()?;
    let a = Operand::new(low.typed::<T>()?, rows, columns);
    Ok(Term { a, b: factor(b, opened.typed::<T>()?), alpha, shares })
}

/// `dweight = xᵀ · dy` in the weight's layout and, for a layer with a bias, `dbias = Σ_rows dy`, in the gradients' type.
pub fn backward_weight(x: &Tensor, dy: &Tensor, dweight: Weight<'_>, dbias: Option<&Tensor>) -> Result<()> {
    let ((rows, inner), (_, columns)) = (x.dims2()?, dy.dims2()?);
    let (x, dy_storage) = (read(x)?, read(dy)?);
    with_element!(dy.dtype(), T => {
        let x = Operand::new(x.typed::<T>()?, rows, inner);
        let dy = Operand::new(dy_storage.typed::<T>()?, rows, columns);
        let (a, b) = match dweight.layout {
            WeightLayout::InOut => (x, dy),
            WeightLayout::OutIn => (dy, x),
        };
        product(a.transposed(), b, None, dweight.tensor, Epilogue::default())?;
    });
    let Some(dbias) = dbias else { return Ok(()) };
    let dy = dy_storage.view();
    write(dbias, |dbias| {
        for_each_stripe(
            Rows { view: dbias, width: 1 },
            columns,
            rows,
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

/// `c = alpha · a · b`, or added to `c`.
pub fn product_of_columns(a: Factor<'_>, b: Factor<'_>, alpha: f32, c: Columns<'_>, store: Store) -> Result<()> {
    let dims = |factor: Factor<'_>| {
        let [rows, columns] = [factor.columns.rows(), factor.columns.count()];
        if factor.transposed { [columns, rows] } else { [rows, columns] }
    };
    let ([m, k], [depth, n]) = (dims(a), dims(b));
    if k != depth || [m, n] != [c.rows(), c.count()] {
        bail!("a product of {m} × {k} and {depth} × {n} for {} × {}", c.rows(), c.count());
    }
    let epilogue = Epilogue { alpha, accumulate: store == Store::Add, ..Epilogue::default() };
    let (a_storage, b_storage) = (read(a.columns.tensor())?, read(b.columns.tensor())?);
    with_element!(a.columns.tensor().dtype(), T => {
        let (a, b) = (factor(a, a_storage.typed::<T>()?), factor(b, b_storage.typed::<T>()?));
        write(c.tensor(), |view| {
            let (first, ldc) = (c.first(), c.stride());
            match view {
                ViewMut::F32(c) => matmul(a, b, &mut c[first..], ldc, epilogue),
                ViewMut::F16(c) => matmul(a, b, &mut c[first..], ldc, epilogue),
                ViewMut::BF16(c) => matmul(a, b, &mut c[first..], ldc, epilogue),
            }
        })?;
    });
    Ok(())
}

fn factor<'a, T>(factor: Factor<'_>, data: &'a [T]) -> Operand<'a, T> {
    let columns = factor.columns;
    let operand = Operand::with_strides(&data[columns.first()..], columns.rows(), columns.count(), columns.stride(), 1);
    if factor.transposed { operand.transposed() } else { operand }
}

/// `c = a · b`, and the `second` term, whatever type `c` is stored in.
pub(crate) fn product<T: Element>(
    a: Operand<'_, T>,
    b: Operand<'_, T>,
    second: Option<Term<'_, T>>,
    c: &Tensor,
    epilogue: Epilogue<'_>,
) -> Result<()> {
    let ldc = c.dims().last().copied().unwrap_or(1);
    write(c, |c| match c {
        ViewMut::F32(c) => matmul_with(a, b, second, c, ldc, epilogue),
        ViewMut::F16(c) => matmul_with(a, b, second, c, ldc, epilogue),
        ViewMut::BF16(c) => matmul_with(a, b, second, c, ldc, epilogue),
    })
}
