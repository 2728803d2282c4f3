//! Matrix products as the GPU's library takes them, and the layers made of them: linear, and the head with its loss.
//!
//! The library counts by columns. A row-major matrix `[r, c]` is to it the transpose, `c` × `r`, so each product here is
//! written down transposed: `y = x · w` becomes `yᵀ = wᵀ · xᵀ`, and nothing is moved.

use super::cross_entropy::{self, Seed};
use super::elementwise::{gelu_backward, gelu_forward};
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

/// What happens to a product before it is rounded, or beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Epilogue {
    /// Nothing.
    None,
    /// `bias`, a vector of `rows` elements of `d`'s type, is added to each column.
    Bias,
    /// The same, and the sum goes to `aux`, its GELU in tanh form to `d`.
    BiasGelu,
    /// Each element is multiplied by GELU's derivative at the element of `aux`.
    GeluGradient,
    /// `bias` becomes the sum of each row of `a`: where `a` is the gradient of a layer's output, that of its bias.
    BiasGradient,
}

/// The shape of `d = epilogue(a · b (+ d))` for column-major `d` of `rows` × `columns`; what plans are cached by.
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
    /// What else is done.
    pub(crate) epilogue: Epilogue,
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
    /// See [`Epilogue`].
    pub(crate) bias: Option<Buffer>,
    /// See [`Epilogue`].
    pub(crate) aux: Option<Buffer>,
}

/// Takes products in the order of launches. Sums are FP32, and a result is rounded once.
pub(crate) trait Multiply: Queue {
    /// Whether this product, with its epilogue, is among those that the library has. The answer is always the same; it must
    /// not be asked for the first time while launches are recorded.
    fn takes(&self, product: Product) -> Result<bool>;

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

/// A product with its operands, found large enough.
#[derive(Clone, Copy)]
struct Task {
    product: Product,
    operands: Operands,
}

impl Task {
    /// `d = a · b`.
    fn new(a: Matrix, b: Matrix, d: Matrix) -> Result<Self> {
        let ((rows, inner), (inner_b, columns)) = (a.shape(), b.shape());
        if inner != inner_b || d.shape() != (rows, columns) || d.transposed || a.buffer.dtype != b.buffer.dtype {
            bail!("a product of {:?} and {:?} into {:?}", a, b, d);
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
            epilogue: Epilogue::None,
            accumulate: false,
        };
        let operands = Operands { a: b.buffer, b: a.buffer, d: d.buffer, bias: None, aux: None };
        Ok(Self { product, operands })
    }

    /// The same with an epilogue and what it reads or writes.
    fn with(self, epilogue: Epilogue, bias: Option<Buffer>, aux: Option<Buffer>) -> Result<Self> {
        let Product { rows, columns, out, .. } = self.product;
        if let Some(bias) = bias {
            bias.expect("bias", out, rows)?;
        }
        if let Some(aux) = aux {
            aux.expect("aux", out, rows * columns)?;
        }
        let operands = Operands { bias, aux, ..self.operands };
        Ok(Self { product: Product { epilogue, ..self.product }, operands })
    }

    fn run(self, device: &impl Multiply) -> Result<()> {
        // SAFETY: `Matrix::new` and `with` have found every buffer large enough.
        unsafe { device.multiply(self.product, self.operands) }
    }

    /// Runs it if the library can; whether it could.
    fn run_if_taken(self, device: &impl Multiply) -> Result<bool> {
        let taken = device.takes(self.product)?;
        if taken {
            self.run(device)?;
        }
        Ok(taken)
    }
}

/// `y = x · weight + bias` for `x [N, I]`, `weight [I, O]`, `y [N, O]`.
pub(crate) fn linear_forward(
    device: &impl Multiply,
    [rows, inner, columns]: [usize; 3],
    [x, weight, bias]: [Buffer; 3],
    y: Buffer,
) -> Result<()> {
    let (x, weight) = (Matrix::new(x, rows, inner)?, Matrix::new(weight, inner, columns)?);
    Task::new(x, weight, Matrix::new(y, rows, columns)?)?.with(Epilogue::Bias, Some(bias), None)?.run(device)
}

/// `y = x · weight + bias` as in [`linear_forward`], and `gelu = gelu(y)`.
pub(crate) fn linear_gelu_forward(
    device: &impl Multiply,
    sizes @ [rows, inner, columns]: [usize; 3],
    operands @ [x, weight, bias]: [Buffer; 3],
    y: Buffer,
    gelu: Buffer,
) -> Result<()> {
    let (x, weight) = (Matrix::new(x, rows, inner)?, Matrix::new(weight, inner, columns)?);
    let fused = Task::new(x, weight, Matrix::new(gelu, rows, columns)?)?;
    if !fused.with(Epilogue::BiasGelu, Some(bias), Some(y))?.run_if_taken(device)? {
        linear_forward(device, sizes, operands, y)?;
        gelu_forward(device, y, gelu)?;
    }
    Ok(())
}

/// `dx = dy · weightᵀ`.
pub(crate) fn linear_backward_input(
    device: &impl Multiply,
    [rows, inner, columns]: [usize; 3],
    [dy, weight]: [Buffer; 2],
    dx: Buffer,
) -> Result<()> {
    let (dy, weight) = (Matrix::new(dy, rows, columns)?, Matrix::new(weight, inner, columns)?);
    Task::new(dy, weight.t(), Matrix::new(dx, rows, inner)?)?.run(device)
}

/// `dx = dy · weightᵀ · gelu'(y)`, elementwise in `y [N, I]`, whose GELU was the layer's input.
pub(crate) fn linear_gelu_backward_input(
    device: &impl Multiply,
    sizes @ [rows, inner, columns]: [usize; 3],
    operands @ [dy, weight]: [Buffer; 2],
    y: Buffer,
    dx: Buffer,
) -> Result<()> {
    let (dy, weight) = (Matrix::new(dy, rows, columns)?, Matrix::new(weight, inner, columns)?);
    let fused = Task::new(dy, weight.t(), Matrix::new(dx, rows, inner)?)?;
    if !fused.with(Epilogue::GeluGradient, None, Some(y))?.run_if_taken(device)? {
        linear_backward_input(device, sizes, operands, dx)?;
        gelu_backward(device, y, dx)?;
    }
    Ok(())
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
    let plain = Task::new(x.t(), dy_matrix, Matrix::new(dweight, inner, columns)?)?;
    if !plain.with(Epilogue::BiasGradient, Some(dbias), None)?.run_if_taken(device)? {
        plain.run(device)?;
        column_sums(device, [rows, columns], dy, dbias)?;
    }
    Ok(())
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
/// [`head`](crate::engine::kernels::cross_entropy::head). `logits` is room for `[N, padded]`.
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
    Task::new(x, weight.t(), matrix)?.run(device)?;
    cross_entropy::rows(device, [rows, vocab, padded], logits, targets, losses, gradient.map(|g| g.seed))?;
    if let Some(gradient) = gradient {
        Task::new(matrix, weight, Matrix::new(gradient.dx, rows, width)?)?.run(device)?;
        let mut dweight = Task::new(matrix.t(), x, Matrix::new(gradient.dweight, padded, width)?)?;
        dweight.product.accumulate = gradient.accumulate;
        dweight.run(device)?;
    }
    Ok(())
}
