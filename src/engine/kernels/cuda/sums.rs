//! Launches of `column_sums.cu`.

use super::launch::{Arguments, Buffer, Launch, Queue, entry, word};
use candle_core::{DType, Result};

const THREADS: u32 = 256;
/// Columns a block of the first stage takes, and of the second.
const COLUMNS: [usize; 2] = [128, 32];
const ROWS_PER_PART: usize = 64;
const MAX_PARTS: usize = 64;

#[repr(C)]
#[derive(Clone, Copy)]
struct ColumnSums {
    x: u64,
    partial: u64,
    rows: u32,
    columns: u32,
    rows_per_part: u32,
    unused: u32,
}
// SAFETY: mirrors `ColumnSums`.
unsafe impl Arguments for ColumnSums {}

#[repr(C)]
#[derive(Clone, Copy)]
struct SumParts {
    partial: u64,
    out: [u64; 2],
    parts: u32,
    columns: u32,
    outputs: u32,
    unused: u32,
}
// SAFETY: mirrors `SumParts`.
unsafe impl Arguments for SumParts {}

/// `out [columns] = Σ_rows x [rows, columns]`: a bias's gradient.
pub(crate) fn column_sums(queue: &impl Queue, [rows, columns]: [usize; 2], x: Buffer, out: Buffer) -> Result<()> {
    let rows_per_part = rows.div_ceil(MAX_PARTS).max(ROWS_PER_PART);
    let parts = rows.div_ceil(rows_per_part);
    let partial = queue.scratch(parts * columns)?;
    let arguments = ColumnSums {
        x: x.of("x", rows * columns)?,
        partial: partial.address,
        rows: word(rows)?,
        columns: word(columns)?,
        rows_per_part: word(rows_per_part)?,
        unused: 0,
    };
    let launch = Launch {
        module: "column_sums",
        kernel: entry("column_sums", &[x.dtype])?,
        grid: [word(columns.div_ceil(COLUMNS[0]))?, word(parts)?, 1],
        threads: THREADS,
        shared_bytes: THREADS * 4 * size_of::<f32>() as u32,
    };
    // SAFETY: every buffer was found large enough above.
    unsafe { queue.launch(&launch, &arguments)? };
    sum_parts(queue, partial, parts, columns, [out])
}

/// Adds up `partial [parts, outputs, columns]` over its parts into one or two tensors `[columns]` of one type.
pub(crate) fn sum_parts<const OUTPUTS: usize>(
    queue: &impl Queue,
    partial: Buffer,
    parts: usize,
    columns: usize,
    outputs: [Buffer; OUTPUTS],
) -> Result<()> {
    const { assert!(OUTPUTS == 1 || OUTPUTS == 2) };
    let (first, last) = (outputs[0], outputs[OUTPUTS - 1]);
    let arguments = SumParts {
        partial: partial.expect("partial", DType::F32, parts * OUTPUTS * columns)?,
        out: [first.of("out", columns)?, last.expect("out", first.dtype, columns)?],
        parts: word(parts)?,
        columns: word(columns)?,
        outputs: word(OUTPUTS)?,
        unused: 0,
    };
    let launch = Launch {
        module: "column_sums",
        kernel: entry("sum_parts", &[first.dtype])?,
        grid: [word((OUTPUTS * columns).div_ceil(COLUMNS[1]))?, 1, 1],
        threads: THREADS,
        shared_bytes: THREADS * size_of::<f32>() as u32,
    };
    // SAFETY: every buffer was found large enough above.
    unsafe { queue.launch(&launch, &arguments) }
}
