//! Work on rows in parallel, with the same result for any number of threads.
//!
//! Rows are independent, so their division among threads does not affect results. Sums over rows (a bias's gradient)
//! are divided by columns: each column is summed by one thread in row order, in blocks.

use crate::isa;
use crate::machine::spin::join;
use crate::view::{ViewMut, write};
use candle_core::{Result, Tensor};
use std::cell::RefCell;

/// Rows of a fixed width that can be cut in two, so that two threads may write them.
pub trait SplitRows: Sized + Send {
    /// The first `rows` rows and the rest.
    fn split_rows(self, rows: usize) -> (Self, Self);
}

/// A view cut into rows.
#[derive(Debug)]
pub struct Rows<V> {
    /// The elements.
    pub view: V,
    /// Elements in a row.
    pub width: usize,
}

impl SplitRows for Rows<ViewMut<'_>> {
    fn split_rows(self, rows: usize) -> (Self, Self) {
        let (a, b) = self.view.split_at(rows * self.width);
        (Rows { view: a, width: self.width }, Rows { view: b, width: self.width })
    }
}

impl<T: Send> SplitRows for Rows<&mut [T]> {
    fn split_rows(self, rows: usize) -> (Self, Self) {
        let (a, b) = self.view.split_at_mut(rows * self.width);
        (Rows { view: a, width: self.width }, Rows { view: b, width: self.width })
    }
}

/// Rows that the closure writes by other means.
impl SplitRows for () {
    fn split_rows(self, _: usize) -> (Self, Self) {
        ((), ())
    }
}

impl<A: SplitRows> SplitRows for Option<A> {
    fn split_rows(self, rows: usize) -> (Self, Self) {
        match self {
            None => (None, None),
            Some(a) => {
                let (a, b) = a.split_rows(rows);
                (Some(a), Some(b))
            }
        }
    }
}

impl<A: SplitRows, B: SplitRows> SplitRows for (A, B) {
    fn split_rows(self, rows: usize) -> (Self, Self) {
        let (a, b) = (self.0.split_rows(rows), self.1.split_rows(rows));
        ((a.0, b.0), (a.1, b.1))
    }
}

impl<A: SplitRows> SplitRows for [A; 2] {
    fn split_rows(self, rows: usize) -> (Self, Self) {
        let [(a, b), (c, d)] = self.map(|part| part.split_rows(rows));
        ([a, c], [b, d])
    }
}

/// Calls `f(first_row, rows, part)` for parts of `out` of at most `grain` rows each, on all threads. Mark `f`
/// `#[inline(always)]`: it is then compiled for each instruction set.
pub fn for_each_part<V: SplitRows>(out: V, rows: usize, grain: usize, f: impl Fn(usize, usize, V) + Sync) {
    if rows > 0 {
        descend(0, rows, [grain.max(1), 1], out, &f);
    }
}

/// [`for_each_part`] over `columns` columns in parts of at most [`STRIPE`]; each costs `rows` elements.
pub fn par_columns<V: SplitRows>(out: V, columns: usize, rows: usize, f: impl Fn(usize, usize, V) + Sync) {
    if columns > 0 {
        descend(0, columns, [STRIPE, WORK / rows.max(1)], out, &f);
    }
}

/// Cuts rows into parts of at most `grain`; other threads get none of `alone` rows or fewer.
fn descend<V: SplitRows>(
    first: usize,
    rows: usize,
    [grain, alone]: [usize; 2],
    out: V,
    f: &(impl Fn(usize, usize, V) + Sync),
) {
    if rows <= grain {
        return isa::vectorize!(f(first, rows, out));
    }
    let half = (rows / 2).next_multiple_of(grain);
    let (a, b) = out.split_rows(half);
    let low = || descend(first, half, [grain, alone], a, f);
    let high = || descend(first + half, rows - half, [grain, alone], b, f);
    if rows <= alone {
        low();
        high();
    } else {
        join(low, high);
    }
}

thread_local! {
    static SCRATCH: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// Passes `f` an FP32 buffer of `len` elements with arbitrary contents. Each thread keeps one buffer per nesting depth,
/// so that nothing is allocated in steady state.
#[inline(always)]
pub fn with_scratch<R>(len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    let mut buffer = SCRATCH.with_borrow_mut(Vec::pop).unwrap_or_default();
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    let result = f(&mut buffer[..len]);
    SCRATCH.with_borrow_mut(|kept| kept.push(buffer));
    result
}

/// [`for_each_part`] with `N` FP32 rows of `width` elements as scratch for each part, with arbitrary contents.
#[inline(always)]
pub fn for_each_part_with_scratch<const N: usize, V: SplitRows>(
    out: V,
    rows: usize,
    [grain, width]: [usize; 2],
    f: impl Fn(usize, usize, V, [&mut [f32]; N]) + Sync,
) {
    for_each_part(
        out,
        rows,
        grain,
        #[inline(always)]
        |first, rows, out| {
            with_scratch(
                N * width,
                #[inline(always)]
                |mut rest| {
                    let scratch = std::array::from_fn(
                        #[inline(always)]
                        |_| rest.split_off_mut(..width).unwrap_or_default(),
                    );
                    f(first, rows, out, scratch);
                },
            );
        },
    );
}

/// Writes each row of `out [N, D]`, rounded to its type, as `fill` leaves it in FP32; `fill` gets the index of the
/// row's first element, the row and a second one as scratch, both with arbitrary contents.
#[inline(always)]
pub fn write_rows(out: &Tensor, fill: impl Fn(usize, &mut [f32], &mut [f32]) + Sync) -> Result<()> {
    let (rows, width) = out.dims2()?;
    write(out, |out| {
        for_each_part_with_scratch(
            Rows { view: out, width },
            rows,
            [WORK / width + 1, width],
            #[inline(always)]
            |first, rows, mut out, [row, second]| {
                for i in 0..rows {
                    fill((first + i) * width, row, second);
                    out.view.store(i * width, row);
                }
            },
        );
    })
}

/// Elements of a row kernel that take about as long as handing them to another thread.
pub const WORK: usize = 16 << 10;
/// Columns a thread sums at a time: a few cache lines of every row.
pub const STRIPE: usize = 128;
/// Rows summed in FP32 before the sum joins the total, which keeps the rounding error of long columns small.
pub const BLOCK: usize = 64;

/// Column sums: `out[c] = Σ_r term(r, c..)`, where `add(row, first_column, sums)` adds one row's terms to a stripe.
#[inline(always)]
pub fn column_sums<const N: usize>(
    rows: usize,
    first_column: usize,
    width: usize,
    add: impl Fn(usize, usize, &mut [[f32; STRIPE]; N]),
) -> [[f32; STRIPE]; N] {
    debug_assert!(width <= STRIPE);
    let mut total = [[0.0; STRIPE]; N];
    let mut row = 0;
    while row < rows {
        let end = (row + BLOCK).min(rows);
        let mut block = [[0.0; STRIPE]; N];
        for row in row..end {
            add(row, first_column, &mut block);
        }
        for (total, block) in total.iter_mut().zip(&block) {
            for (total, block) in total.iter_mut().zip(block) {
                *total += block;
            }
        }
        row = end;
    }
    total
}

/// Partial sums of a row's sum.
pub const LANES: usize = 16;

/// `Σ f(i)` over equally long slices in 16 lanes and a fixed order.
#[inline(always)]
fn lane_sum<const N: usize>(inputs: [&[f32]; N], f: impl Fn([f32; N]) -> f32) -> f32 {
    let len = inputs[0].len();
    let mut lanes = [0.0f32; LANES];
    let whole = len - len % LANES;
    for start in (0..whole).step_by(LANES) {
        let parts = inputs.map(|s| &s[start..start + LANES]);
        for lane in 0..LANES {
            lanes[lane] += f(parts.map(|s| s[lane]));
        }
    }
    for i in whole..len {
        lanes[i - whole] += f(inputs.map(|s| s[i]));
    }
    lane_total(lanes)
}

/// The sum of the lanes, in a fixed order.
#[inline(always)]
pub(crate) fn lane_total(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// `Σ x`.
#[inline(always)]
pub fn sum(x: &[f32]) -> f32 {
    lane_sum([x], |[x]| x)
}

/// `Σ (x - center)²`.
#[inline(always)]
pub fn sum_squared_distance(x: &[f32], center: f32) -> f32 {
    lane_sum([x], |[x]| (x - center) * (x - center))
}

/// `Σ x y`.
#[inline(always)]
pub fn dot(x: &[f32], y: &[f32]) -> f32 {
    lane_sum([x, y], |[x, y]| x * y)
}

/// The largest element; NaN if there is one.
#[inline(always)]
pub fn max(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let mut nan = [false; LANES];
    let mut chunks = x.chunks_exact(LANES);
    for chunk in &mut chunks {
        for lane in 0..LANES {
            lanes[lane] = if chunk[lane] > lanes[lane] { chunk[lane] } else { lanes[lane] };
            nan[lane] |= chunk[lane].is_nan();
        }
    }
    let tail = chunks.remainder();
    if nan.contains(&true) || tail.iter().any(|x| x.is_nan()) {
        return f32::NAN;
    }
    tail.iter().chain(&lanes).fold(f32::NEG_INFINITY, |max, &x| max.max(x))
}

/// `x *= factor`.
#[inline(always)]
pub fn scale(x: &mut [f32], factor: f32) {
    for x in x {
        *x *= factor;
    }
}

/// `y += a x`.
#[inline(always)]
pub fn axpy(a: f32, x: &[f32], y: &mut [f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * x;
    }
}
