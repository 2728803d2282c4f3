//! The fully connected layer, on weights `[in, out]` or `[out, in]` as they are stored: the product transposes operands
//! while it packs them.

use crate::columns::{ColumnSlice, MatmulOperand, WriteMode};
use crate::convert::Element;
use crate::matmul::{Epilogue, Gemm, LowRankTerm, Operand};
use crate::op;
use crate::rows::{
    LANES, Rows, STRIPE, WORK, column_sums, dot, for_each_part_with_scratch, lane_total, par_columns, with_scratch,
};
use crate::view::{ReadGuard, ViewMut, read, with_element, with_elements, write, write_f32, zeros};
use crate::{LoraTerm, WeightLayout};
use candle_core::{DType, Error, Result, Tensor};

/// Computes [`op::Linear`], with one rounding.
pub fn forward(op: &op::Linear<'_>) -> Result<()> {
    let &op::Linear { layout, x, weight, bias, low_rank, y } = op;
    let (rows, inner) = x.dims2()?;
    let (_, outer) = y.dims2()?;
    let x = read(x)?;
    let opened = read(weight)?;
    let bias = bias.map(read).transpose()?;
    let low = low_rank.map(|low_rank| Ok::<_, Error>([read(low_rank.low)?, read(low_rank.factor.columns.tensor())?]));
    let low = low.transpose()?;
    with_scratch(
        outer,
        #[inline(always)]
        |scratch| {
            let bias = bias.as_ref().map(|bias| bias.view().as_f32(0, scratch));
            let epilogue = Epilogue { bias, ..Epilogue::default() };
            with_element!(op.x.dtype(), T => {
                let a = Operand::new(x.typed::<T>()?, rows, inner);
                let b = factor(MatmulOperand::of_weight(weight, layout)?, opened.typed::<T>()?);
                let second = low_rank.zip(low.as_ref()).map(|(low_rank, opened)| term(low_rank, opened)).transpose()?;
                write_product(Gemm { a, b, second, epilogue }, ColumnSlice::all(y)?)
            })
        },
    )
}

/// A low-rank product as a term of the layer's product, with its operands open.
fn term<'a, T: Element>(low_rank: LoraTerm<'a>, [low, opened]: &'a [ReadGuard<'_>; 2]) -> Result<LowRankTerm<'a, T>> {
    let LoraTerm { low: x, factor: b, alpha, shares } = low_rank;
    let (rows, columns) = x.dims2()?;
    let a = Operand::new(low.typed::<T>()?, rows, columns);
    Ok(LowRankTerm { a, b: factor(b, opened.typed::<T>()?), alpha, shares })
}

/// Computes [`op::SumRows`].
pub fn sum_rows(op: &op::SumRows<'_>) -> Result<()> {
    let (rows, columns) = op.x.dims2()?;
    let x = read(op.x)?;
    let x = x.view();
    write(op.out, |out| {
        par_columns(
            Rows { view: out, width: 1 },
            columns,
            rows,
            #[inline(always)]
            |first, width, mut out| {
                let [sums] = column_sums(
                    rows,
                    first,
                    width,
                    #[inline(always)]
                    |row, first, [sums]| {
                        let mut scratch = [0.0; STRIPE];
                        let x = x.as_f32(row * columns + first, &mut scratch[..width]);
                        for (sum, x) in sums.iter_mut().zip(x) {
                            *sum += x;
                        }
                    },
                );
                out.view.store(0, &sums[..width]);
            },
        );
    })
}

/// The sum of the squares of each output's weights, `[out]`, FP32.
pub fn squared_norms(weight: &Tensor, layout: WeightLayout) -> Result<Tensor> {
    let axis = usize::from(layout == WeightLayout::OutIn);
    if !weight.device().is_cpu() {
        return weight.to_dtype(DType::F32)?.sqr()?.sum(axis);
    }
    let (rows, columns) = weight.dims2()?;
    let opened = read(weight)?;
    let x = opened.view();
    let squares = zeros(&[weight.dim(1 - axis)?], DType::F32, weight.device())?;
    write_f32(&squares, |out| match layout {
        WeightLayout::OutIn => for_each_part_with_scratch(
            Rows { view: out, width: 1 },
            rows,
            [WORK / columns + 1, columns],
            #[inline(always)]
            |first, _, out, [scratch]| {
                for (row, out) in (first..).zip(out.view) {
                    let weights = x.as_f32(row * columns, scratch);
                    *out = dot(weights, weights);
                }
            },
        ),
        WeightLayout::InOut => par_columns(
            Rows { view: out, width: 1 },
            columns,
            rows,
            #[inline(always)]
            |first, width, out| {
                // In the order of `dot`, so that both layouts have the same bits.
                let mut sums = [[0.0f32; STRIPE]; LANES];
                let mut scratch = [0.0; STRIPE];
                for row in 0..rows {
                    let x = x.as_f32(row * columns + first, &mut scratch[..width]);
                    for (sum, x) in sums[row % LANES].iter_mut().zip(x) {
                        *sum += x * x;
                    }
                }
                for (column, out) in out.view.iter_mut().enumerate() {
                    *out = lane_total(std::array::from_fn(|lane| sums[lane][column]));
                }
            },
        ),
    })?;
    Ok(squares)
}

/// Computes [`op::Matmul`].
pub fn product_of_columns(op: &op::Matmul<'_>) -> Result<()> {
    let &op::Matmul { a, b, alpha, c, mode } = op;
    let epilogue = Epilogue { alpha, accumulate: mode == WriteMode::Accumulate, ..Epilogue::default() };
    let (a_storage, b_storage) = (read(a.columns.tensor())?, read(b.columns.tensor())?);
    with_element!(a.columns.tensor().dtype(), T => {
        let (a, b) = (factor(a, a_storage.typed::<T>()?), factor(b, b_storage.typed::<T>()?));
        write_product(Gemm { a, b, second: None, epilogue }, c)
    })
}

fn factor<'a, T>(factor: MatmulOperand<'_>, data: &'a [T]) -> Operand<'a, T> {
    let columns = factor.columns;
    let operand = Operand::with_strides(&data[columns.first()..], columns.rows(), columns.count(), columns.stride(), 1);
    if factor.transposed { operand.transposed() } else { operand }
}

/// Computes `product` into columns of any type.
fn write_product<T: Element>(product: Gemm<'_, T>, c: ColumnSlice<'_>) -> Result<()> {
    let (first, ldc) = (c.first(), c.stride());
    write(c.tensor(), |c| with_elements!(c, ViewMut, c => product.run(&mut c[first..], ldc)))
}
