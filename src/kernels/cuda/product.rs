//! Matrix products as the GPU's library takes them, and the layers made of them: linear, and the head with its loss.
//!
//! The library counts by columns. A row-major matrix `[r, c]` is to it the transpose, `c` × `r`, so each product here is
//! written down transposed: `y = x · w` becomes `yᵀ = wᵀ · xᵀ`, and nothing is moved.

use super::cross_entropy::{self, Seed};
use super::launch::{Buffer, Queue};
use super::sums::column_sums;
use candle_core::{DType, Result, bail};

/// One operand: a column-major matrix, read as it stands or transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Operand {
    /// Elements between two columns.
    pub(crate) stride: usize,
    /// Whether its rows take the place of its columns.
    pub(crate) transposed: bool,
}

/// The shape of `d = a · b (+ bias) (+ d)` for column-major `d` of `rows` × `columns`; what plans are cached by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Product {
    /// Rows of `d`.
    pub(crate) rows: usize,
    /// Columns of `d`.
    pub(crate) columns: usize,
    /// Columns of `a`, rows of `b`.
    pub(crate) inner: usize,
    /// The left operand.
    pub(crate) a: Operand,
    /// The right operand.
    pub(crate) b: Operand,
    /// The type of `a` and `b`.
    pub(crate) dtype: DType,
    /// The type of `d`.
    pub(crate) out: DType,
    /// Whether a vector of `rows` elements, of the operands' type, is added to each column before the rounding.
    pub(crate) bias: bool,
    /// Whether the product is added to `d`.
    pub(crate) accumulate: bool,
}

/// What a product reads and writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operands {
    /// The left matrix.
    pub(crate) a: Buffer,
    /// The right matrix.
    pub(crate) b: Buffer,
    /// The result.
    pub(crate) d: Buffer,
    /// See [`Product::bias`].
    pub(crate) bias: Option<Buffer>,
}

/// Takes products in the order of launches. Sums are FP32, and a result is rounded once.
pub(crate) trait Multiply: Queue {
    /// # Safety
    /// The buffers are of this device, and as large as the product says.
    unsafe fn multiply(&self, product: Product, operands: Operands) -> Result<()>;
}

/// A row-major matrix: its elements with its rows and columns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    buffer: Buffer,
    rows: usize,
    columns: usize,
    transposed: bool,
}

impl Matrix {
    /// `buffer` as `[rows, columns]`.
    pub(crate) fn new(buffer: Buffer, rows: usize, columns: usize) -> Result<Self> {
        buffer.of("matrix", rows * columns)?;
        Ok(Self { buffer, rows, columns, transposed: false })
    }

    /// The transpose, in place.
    fn t(self) -> Self {
        Self { transposed: !self.transposed, ..self }
    }

    /// Rows and columns as a product sees them.
    fn shape(self) -> (usize, usize) {
        if self.transposed { (self.columns, self.rows) } else { (self.rows, self.columns) }
    }

    fn operand(self) -> Operand {
        Operand { stride: self.columns, transposed: self.transposed }
    }
}

/// `d = a · b`, with the options of [`Product`].
fn product(
    device: &impl Multiply,
    a: Matrix,
    b: Matrix,
    d: Matrix,
    bias: Option<Buffer>,
    accumulate: bool,
) -> Result<()> {
    let ((rows, inner), (inner_b, columns)) = (a.shape(), b.shape());
    if inner != inner_b || d.shape() != (rows, columns) || d.transposed || a.buffer.dtype != b.buffer.dtype {
        bail!("a product of {:?} and {:?} into {:?}", a, b, d);
    }
    if let Some(bias) = bias {
        bias.expect("bias", a.buffer.dtype, columns)?;
    }
    // Transposed: see above.
    let product = Product {
        rows: columns,
        columns: rows,
        inner,
        a: b.operand(),
        b: a.operand(),
        dtype: a.buffer.dtype,
        out: d.buffer.dtype,
        bias: bias.is_some(),
        accumulate,
    };
    // SAFETY: `Matrix::new` has found every buffer large enough.
    unsafe { device.multiply(product, Operands { a: b.buffer, b: a.buffer, d: d.buffer, bias }) }
}

/// `y = x · weight + bias` for `x [N, I]`, `weight [I, O]`, `y [N, O]`.
pub(crate) fn linear_forward(
    device: &impl Multiply,
    [rows, inner, columns]: [usize; 3],
    [x, weight, bias]: [Buffer; 3],
    y: Buffer,
) -> Result<()> {
    let (x, weight) = (Matrix::new(x, rows, inner)?, Matrix::new(weight, inner, columns)?);
    product(device, x, weight, Matrix::new(y, rows, columns)?, Some(bias), false)
}

/// `dx = dy · weightᵀ`.
pub(crate) fn linear_backward_input(
    device: &impl Multiply,
    [rows, inner, columns]: [usize; 3],
    [dy, weight]: [Buffer; 2],
    dx: Buffer,
) -> Result<()> {
    let (dy, weight) = (Matrix::new(dy, rows, columns)?, Matrix::new(weight, inner, columns)?);
    product(device, dy, weight.t(), Matrix::new(dx, rows, inner)?, None, false)
}

/// `dweight = xᵀ · dy` and `dbias = Σ_rows dy`.
pub(crate) fn linear_backward_weight(
    device: &impl Multiply,
    [rows, inner, columns]: [usize; 3],
    [x, dy]: [Buffer; 2],
    dweight: Buffer,
    dbias: Buffer,
) -> Result<()> {
    let (x, dy_matrix) = (Matrix::new(x, rows, inner)?, Matrix::new(dy, rows, columns)?);
    product(device, x.t(), dy_matrix, Matrix::new(dweight, inner, columns)?, None, false)?;
    column_sums(device, [rows, columns], dy, dbias)
}

/// Sizes of a head: rows of its input, their width, tokens of the vocabulary, and the same filled up to whole tiles of the
/// tensor cores. `weight` and `logits` have the padded number of rows and columns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadShape {
    /// Rows of the input.
    pub(crate) rows: usize,
    /// Elements of an input row.
    pub(crate) width: usize,
    /// Tokens that count.
    pub(crate) vocab: usize,
    /// A multiple of 64 that is no less.
    pub(crate) padded: usize,
}

/// Where the head's gradients go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadGradient {
    /// What a row's loss is weighted with.
    pub(crate) seed: Seed,
    /// `[N, D]`.
    pub(crate) dx: Buffer,
    /// `[padded, D]`.
    pub(crate) dweight: Buffer,
    /// Whether the gradient of the weight is added to what is there.
    pub(crate) accumulate: bool,
}

/// Each row's loss for `x [N, D]` and `weight [padded, D]`, and with `gradient` the products of the logits' gradient; see
/// [`head`](crate::kernels::cross_entropy::head). `logits` is room for `[N, padded]`.
pub(crate) fn head(
    device: &impl Multiply,
    shape: HeadShape,
    [x, weight, logits]: [Buffer; 3],
    targets: Buffer,
    losses: Buffer,
    gradient: Option<HeadGradient>,
) -> Result<()> {
    let HeadShape { rows, width, vocab, padded } = shape;
    let (x, weight) = (Matrix::new(x, rows, width)?, Matrix::new(weight, padded, width)?);
    let matrix = Matrix::new(logits, rows, padded)?;
    product(device, x, weight.t(), matrix, None, false)?;
    cross_entropy::rows(device, [rows, vocab, padded], logits, targets, losses, gradient.map(|g| g.seed))?;
    if let Some(gradient) = gradient {
        product(device, matrix, weight, Matrix::new(gradient.dx, rows, width)?, None, false)?;
        let dweight = Matrix::new(gradient.dweight, padded, width)?;
        product(device, matrix.t(), x, dweight, None, gradient.accumulate)?;
    }
    Ok(())
}
