//! The matrix product C = α A·B (+ bias) (+ C): inputs FP32, FP16 or BF16, every sum in FP32, one rounding at the end.
//!
//! The scheme follows Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008), with loops
//! arranged for streaming: a micro-kernel keeps a small tile of C in registers and runs along the whole depth of two
//! packed panels. All threads pack the smaller operand once and share it; each task packs pieces of the larger one,
//! small enough for the L2 cache, and multiplies them with the shared operand.
//!
//! FP32, and FP16 widened, are multiplied and added in FP32. BF16 has FP32 sums of:
//!
//! | `amx` | `avx512bf16` | `neonbf16` | others |
//! |---|---|---|---|
//! | products of tiles | dot products of pairs | products of 2 × 4 matrices | values widened while packing |
//!
//! The first three take subnormal values, inputs as well as sums, for zero.
//!
//! A row's bits do not depend on the number of rows.

use self::buffer::{GemmWorkspace, PackBuffer, with_thread_buffer, with_workspace};
use self::epilogue::{OutputMatrix, Scratch, TileRect};
use self::micro::{MAX_TILE, MicroKernel, PrefetchQueue, PreparedKernel, Tile};
use self::pack::{PackUnit, PanelLayout, Prefetch, pack};
pub use self::prepacked::with_packed;
use self::prepacked::with_panels;
use super::convert::Element;
use super::isa::{Isa, vectorize};
use super::machine::spin::for_each_task;
use super::rows::{Rows, for_each_part};
use super::view::with_element;
use bytemuck::{cast_slice, cast_slice_mut};
use candle_core::{DType, Result};
use rayon::prelude::*;
use std::any::TypeId;
use std::ops::Range;

mod buffer;
mod epilogue;
mod micro;
mod pack;
mod prepacked;
#[cfg(test)]
mod tests;

/// Words per line of the depth multiplied at a time. A panel of B of this depth fills a third of a 1 MB L2 cache.
const DEPTH_WORDS: usize = 1536;
/// Lines of the shared operand that are packed at a time.
const SHARED_LINES: usize = 2016;
/// Words a task packs for itself: half of a 1 MB L2 cache.
const PRIVATE_WORDS: usize = 128 << 10;
/// Floats for partial sums, where C cannot hold them.
const PARTIAL_FLOATS: usize = 4 << 20;
/// With fewer multiply-adds than this, waking other threads costs more than it saves.
const SERIAL_WORK: usize = 1 << 18;
/// Words that a thread packs as fast as it shares the packing out.
const SERIAL_WORDS: usize = 16 << 10;
/// Tasks per thread, so that one slow thread does not delay the others for long.
const TASKS_PER_THREAD: usize = 8;

/// A matrix in a slice, read at any row and column stride, so that a transpose costs nothing.
#[derive(Debug)]
pub struct Operand<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<T> Clone for Operand<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Operand<'_, T> {}

impl<'a, T> Operand<'a, T> {
    /// The row-major `rows` × `cols` matrix in `data`.
    ///
    /// # Panics
    /// If `data` is too short.
    pub fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        Self::with_strides(data, rows, cols, cols, 1)
    }

    /// The `rows` × `cols` matrix with element (i, j) at `data[i * row_stride + j * col_stride]`.
    ///
    /// # Panics
    /// If `data` is too short.
    pub fn with_strides(data: &'a [T], rows: usize, cols: usize, row_stride: usize, col_stride: usize) -> Self {
        let needed = if rows == 0 || cols == 0 { 0 } else { (rows - 1) * row_stride + (cols - 1) * col_stride + 1 };
        assert!(data.len() >= needed, "a {rows} × {cols} operand needs {needed} elements, not {}", data.len());
        Self { data, rows, cols, row_stride, col_stride }
    }

    /// The transpose, of the same data.
    #[must_use]
    pub fn transposed(self) -> Self {
        Self { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }

    /// The elements that are in these rows and columns; some of them, or all, may not exist.
    #[inline]
    fn part(self, rows: Range<usize>, cols: Range<usize>) -> Self {
        let present = |range: &Range<usize>, len: usize| range.end.min(len).saturating_sub(range.start);
        let (first_row, first_col) = (rows.start * self.row_stride, cols.start * self.col_stride);
        Self {
            data: self.data.get(first_row + first_col..).unwrap_or_default(),
            rows: present(&rows, self.rows),
            cols: present(&cols, self.cols),
            ..self
        }
    }
}

/// How a sum is stored in C: C = α sum (+ bias) (+ C), all in FP32, then one rounding.
#[derive(Clone, Copy, Debug)]
pub struct Epilogue<'a> {
    /// The factor α of the product.
    pub alpha: f32,
    /// One value a column, added to every row.
    pub bias: Option<&'a [f32]>,
    /// Whether C's old value is added or overwritten.
    pub accumulate: bool,
}

impl Default for Epilogue<'_> {
    fn default() -> Self {
        Self { alpha: 1.0, bias: None, accumulate: false }
    }
}

/// A product that is added to another, in FP32, before that is stored: α A·B.
#[derive(Clone, Copy, Debug)]
pub struct LowRankTerm<'a, T> {
    /// As many rows as C.
    pub a: Operand<'a, T>,
    /// As many columns as C.
    pub b: Operand<'a, T>,
    /// The factor α.
    pub alpha: f32,
    /// The columns of C that each of equal shares of the depth adds to, in order: B has zeros elsewhere. Empty if there
    /// is one share.
    pub shares: &'a [Range<usize>],
}

/// C = α A·B (+ bias) (+ C), for A of m × k, B of k × n and C of m × n.
#[derive(Clone, Copy, Debug)]
pub struct Gemm<'a, T> {
    /// A.
    pub a: Operand<'a, T>,
    /// B.
    pub b: Operand<'a, T>,
    /// A product that is added to A·B. Its operands are packed whole, so its depth should be small.
    pub second: Option<LowRankTerm<'a, T>>,
    /// α, the bias, and whether C is added.
    pub epilogue: Epilogue<'a>,
}

impl<'a, T: Element> Gemm<'a, T> {
    /// A·B.
    pub fn new(a: Operand<'a, T>, b: Operand<'a, T>) -> Self {
        Self { a, b, second: None, epilogue: Epilogue::default() }
    }

    /// Computes C, with row i at `c[i * ldc..][..n]`.
    ///
    /// A sum is rounded to C's type once, for any k. Its bits do not depend on the number of threads: rows and columns
    /// of C are shared out over the rayon pool, k never is. NaN and infinities propagate as in plain arithmetic.
    ///
    /// A call for shapes seen before allocates nothing.
    ///
    /// # Panics
    /// If the shapes do not fit together.
    pub fn run<C: Element>(self, c: &mut [C], ldc: usize) {
        self.run_on(MicroKernel::of::<T>(Isa::current()), c, ldc);
    }

    fn run_on<C: Element>(self, kernel: MicroKernel, c: &mut [C], ldc: usize) {
        let Self { a, b, second, epilogue } = self;
        let (m, k, n) = (a.rows, a.cols, b.cols);
        assert_eq!(k, b.rows, "A has {k} columns, B {} rows", b.rows);
        assert!(m == 0 || n == 0 || ldc >= n && c.len() >= (m - 1) * ldc + n, "C is too small for {m} × {n}");
        assert!(epilogue.bias.is_none_or(|bias| bias.len() == n), "the bias must have {n} elements");
        if let Some(LowRankTerm { a, b, .. }) = second {
            assert!([a.rows, a.cols, b.cols] == [m, b.rows, n], "{} × {} and {} × {}", a.rows, a.cols, b.rows, b.cols);
        }
        with_workspace(|workspace| self.run_in(workspace, kernel, OutputMatrix::new(c, ldc)));
    }

    /// [`Self::run_on`] of operands that fit together, with these buffers.
    fn run_in<C: Element>(self, buffers: &mut GemmWorkspace, kernel: MicroKernel, c: OutputMatrix<C>) {
        let Self { a, b: right, second, epilogue } = self;
        let GemmWorkspace { shared, partial, second: term_buffers } = buffers;
        let (m, k, n) = (a.rows, a.cols, right.cols);
        let swapped = swaps_operands(kernel, m, n);
        let [a, b] = if swapped { [right.transposed(), a] } else { [a, right.transposed()] };
        let kernel = kernel.for_lines(a.rows);
        let serial = m * n * k < SERIAL_WORK;
        let second = second.map(|term| Packed::new(kernel, term, swapped, serial, term_buffers));
        let product = Product { kernel, a, b, panels: None, swapped, second, c, epilogue, serial };
        if swapped || m > n {
            return product.run(shared, partial);
        }
        let words = product.kept_words(n.next_multiple_of(kernel.cols) * kernel.words(k));
        let pack = |panels: &mut [u32]| product.pack_streamed(panels);
        with_panels(right, words, pack, |panels| Product { panels, ..product }.run(shared, partial));
    }
}

/// Whether A and B change places for C of m × n.
fn swaps_operands(kernel: MicroKernel, m: usize, n: usize) -> bool {
    let padded = |rows: usize, cols: usize| rows.next_multiple_of(kernel.rows) * cols.next_multiple_of(kernel.cols);
    5 * padded(n, m) < 4 * padded(m, n)
}

/// The properties of a product that determine its buffers.
#[derive(Clone, Copy, Debug)]
pub struct GemmShape {
    /// m, k and n, for A of m × k and B of k × n.
    pub sizes: [usize; 3],
    /// The depth of the second term; 0 without one.
    pub second: usize,
    /// The type of A and B.
    pub operands: DType,
    /// The type of C.
    pub c: DType,
}

/// Bytes that products of these shapes, one after the other, leave in their buffers on this CPU: a buffer only grows.
/// Each of the `threads` has its own buffer. Fails if there is no kernel for a type.
pub fn buffer_bytes(products: &[GemmShape], threads: usize) -> Result<u64> {
    let mut largest = [0; 5];
    for product in products {
        let kernel = with_element!(product.operands, T => MicroKernel::of::<T>(Isa::current()));
        for (largest, words) in largest.iter_mut().zip(words(kernel, *product, threads)) {
            *largest = words.max(*largest);
        }
    }
    let [own, shared @ ..] = largest.map(PackBuffer::bytes_of);
    Ok((own * threads + shared.iter().sum::<usize>()) as u64)
}

/// The words that a product asks its buffers for: a thread's own, then the fields of [`GemmWorkspace`].
fn words(kernel: MicroKernel, GemmShape { sizes: [m, k, n], second, c, .. }: GemmShape, threads: usize) -> [usize; 5] {
    let [a, b] = if swaps_operands(kernel, m, n) { [n, m] } else { [m, n] };
    let [a, b] = [(a, kernel.a().width), (b, kernel.b().width)];
    let [second_a, second_b] = [a, b].map(|(lines, width)| lines.next_multiple_of(width) * kernel.words(second));
    let [(shared, shared_width), (streamed, width)] = if a.0 <= b.0 { [a, b] } else { [b, a] };
    let depth = k.min(kernel.elements(DEPTH_WORDS));
    let partial = k > depth && c != DType::F32;
    // The first part is the largest.
    let shared = shared.min(SHARED_LINES.next_multiple_of(shared_width));
    let streamed = streamed.min(strip(shared, streamed, width, partial));
    let (panels, words) = (shared.div_ceil(shared_width), kernel.words(depth));
    let threads = if m.saturating_mul(n * k) < SERIAL_WORK { 1 } else { threads };
    let plan =
        TilingPlan::new(panels, streamed.div_ceil(width), width * words, tasks(shared * streamed * depth, threads));
    let partial = if partial { shared * streamed } else { 0 };
    [plan.group * width * words, panels * shared_width * words, partial, second_a, second_b]
}

/// The number of lines of the other operand in a part with `shared` lines of the shared operand. The other operand has
/// `streamed` lines, in panels of `width`. Partial sums are bounded.
fn strip(shared: usize, streamed: usize, width: usize, partial: bool) -> usize {
    if partial { (PARTIAL_FLOATS / shared.max(1)).next_multiple_of(width) } else { streamed.max(1) }
}

/// The approximate number of tasks for a part of `work` multiply-adds.
fn tasks(work: usize, threads: usize) -> usize {
    if threads == 1 { 1 } else { (work / SERIAL_WORK).clamp(threads, threads * TASKS_PER_THREAD) }
}

/// A second term's operands, packed for a micro-kernel.
#[derive(Clone, Copy)]
struct Packed<'a> {
    a: &'a [u32],
    b: &'a [u32],
    swapped: bool,
    depth: usize,
    alpha: f32,
    shares: &'a [Range<usize>],
}

impl<'a> Packed<'a> {
    fn new<T: Element>(
        kernel: MicroKernel,
        LowRankTerm { a, b, alpha, shares }: LowRankTerm<'a, T>,
        swapped: bool,
        serial: bool,
        [to_a, to_b]: &'a mut [PackBuffer; 2],
    ) -> Self {
        let depth = a.cols;
        let [a, b] = if swapped { [b.transposed(), a] } else { [a, b.transposed()] };
        let pack_all = |lines: Operand<'_, T>, layout: PanelLayout, packed: &'a mut PackBuffer| {
            let packed = packed.words(lines.rows.next_multiple_of(layout.width) * kernel.words(depth));
            pack_in_parallel(lines, layout, packed, serial);
            &*packed
        };
        let [a, b] = [pack_all(a, kernel.a(), to_a), pack_all(b, kernel.b(), to_b)];
        Self { a, b, swapped, depth, alpha, shares }
    }

    /// The part of the depth that adds to any of these columns of C.
    fn depth_of(self, columns: Range<usize>) -> Range<usize> {
        if self.shares.is_empty() {
            return 0..self.depth;
        }
        let share = self.depth / self.shares.len();
        let meets = |range: &Range<usize>| range.start < columns.end && columns.start < range.end;
        let first = self.shares.iter().position(meets).unwrap_or(0);
        let end = self.shares.iter().rposition(meets).map_or(0, |last| last + 1);
        first * share..end * share
    }

    /// Adds the tile at (row, col) to `tile`; `second` is scratch.
    fn add_to(
        self,
        ready: &PreparedKernel,
        (row, col): (usize, usize),
        tile: &mut Tile,
        second: &mut Tile,
        none: &PrefetchQueue,
    ) {
        let kernel = ready.kernel();
        let MicroKernel { rows, cols, .. } = kernel;
        let all = kernel.words(self.depth);
        let of_c = if self.swapped { row..row + rows } else { col..col + cols };
        let words = kernel.words_around(self.depth_of(of_c));
        if words.is_empty() {
            return;
        }
        let [a, b] = [(self.a, row, rows), (self.b, col, cols)]
            .map(|(packed, line, width)| &packed[line * all + words.start * width..line * all + words.end * width]);
        ready.run(a, b, none, second);
        vectorize!({
            for (sum, second) in tile.0[..rows * cols].iter_mut().zip(&second.0) {
                *sum += self.alpha * second;
            }
        });
    }
}

/// Packs whole panels on all threads unless the product is `serial` or there is little to pack.
fn pack_in_parallel<T: Element>(lines: Operand<'_, T>, layout: PanelLayout, packed: &mut [u32], serial: bool) {
    let panel = layout.width * layout.unit.words_of(lines.cols);
    if serial || packed.len() <= SERIAL_WORDS {
        return pack(lines, layout, packed);
    }
    let panels = packed.len() / panel;
    let share = panels.div_ceil(2 * rayon::current_num_threads());
    let packed = Rows { view: packed, width: panel };
    for_each_part(packed, panels, share, |first, _, packed| {
        pack(lines.part(first * layout.width..lines.rows, 0..lines.cols), layout, packed.view);
    });
}

/// A product, ready to be divided into tasks.
#[derive(Clone, Copy)]
struct Product<'a, A, C> {
    kernel: MicroKernel,
    a: Operand<'a, A>,
    /// Transposed, so that its rows are multiplied with A's; see [`pack`].
    b: Operand<'a, A>,
    /// All of B's panels, part by part of the depth, if they are kept: in B's type where they are widened.
    panels: Option<&'a [u32]>,
    /// Whether A's and B's lines have changed places, because C has too few columns for the micro-kernel's wide tiles.
    /// Tiles are then transposed before they are stored.
    swapped: bool,
    second: Option<Packed<'a>>,
    c: OutputMatrix<C>,
    epilogue: Epilogue<'a>,
    serial: bool,
}

/// A part of a product: these lines of the shared operand, those of the other, this part of the depth.
#[derive(Clone)]
struct TileRange {
    shared: Range<usize>,
    streamed: Range<usize>,
    depth: Range<usize>,
}

/// Packed panels of neighboring lines.
#[derive(Clone, Copy)]
struct Panels<'a> {
    first_line: usize,
    words: &'a [u32],
}

impl<A: Element, C: Element> Product<'_, A, C> {
    /// Whether A is packed for all tasks, otherwise B: the smaller operand, because it has to stay in a cache longest.
    fn shares_a(&self) -> bool {
        self.a.rows <= self.b.rows
    }

    /// The shared operand and the other one, each with the layout of its panels.
    fn sides(&self) -> [(Operand<'_, A>, PanelLayout); 2] {
        let a = (self.a, self.kernel.a());
        let b = (self.b, self.kernel.b());
        if self.shares_a() { [a, b] } else { [b, a] }
    }

    /// Whether sums of less than the whole depth have to be kept outside of C.
    fn needs_partial_sums(&self) -> bool {
        self.a.cols > self.depth_step() && TypeId::of::<C>() != TypeId::of::<f32>()
    }

    /// Elements of depth that are multiplied at a time.
    fn depth_step(&self) -> usize {
        self.kernel.elements(DEPTH_WORDS)
    }

    fn run(&self, shared_memory: &mut PackBuffer, partial_memory: &mut PackBuffer) {
        let [(shared_lines, shared_layout), (streamed_lines, streamed_layout)] = self.sides();
        for shared in pieces(0..shared_lines.rows, SHARED_LINES.next_multiple_of(shared_layout.width)) {
            let strip = strip(shared.len(), streamed_lines.rows, streamed_layout.width, self.needs_partial_sums());
            for streamed in pieces(0..streamed_lines.rows, strip) {
                for start in (0..self.a.cols.max(1)).step_by(self.depth_step()) {
                    let depth = start..self.a.cols.min(start + self.depth_step());
                    let part = TileRange { shared: shared.clone(), streamed: streamed.clone(), depth };
                    self.run_part(&part, shared_memory, partial_memory);
                }
            }
        }
    }

    /// Whether B is widened while it is packed.
    fn widens(&self) -> bool {
        self.kernel.b().unit == PackUnit::Float && A::DTYPE != DType::F32
    }

    /// The words that [`Product::panels`] has for `words` of B's panels.
    fn kept_words(&self, words: usize) -> usize {
        if self.widens() { words * size_of::<A>() / size_of::<u32>() } else { words }
    }

    /// Packs all of B for [`Product::panels`].
    fn pack_streamed(&self, mut panels: &mut [u32]) {
        let layout = self.kernel.b();
        for depth in pieces(0..self.a.cols, self.depth_step()) {
            let panel = layout.width * self.kernel.words(depth.len());
            let group = (PRIVATE_WORDS / panel).max(1);
            let words = self.b.rows.div_ceil(layout.width) * panel;
            let (part, rest) = std::mem::take(&mut panels).split_at_mut(self.kept_words(words));
            part.par_chunks_mut(self.kept_words(group * panel)).enumerate().for_each(|(index, kept)| {
                let lines = self.b.part(index * group * layout.width..self.b.rows, depth.clone());
                if !self.widens() {
                    return pack(lines, layout, kept);
                }
                with_thread_buffer(|buffer| {
                    let wide = buffer.words(size_of_val(kept) / size_of::<A>());
                    pack(lines, layout, wide);
                    A::store(cast_slice(wide), cast_slice_mut(kept));
                });
            });
            panels = rest;
        }
    }

    /// Packs the shared operand, then runs the tasks.
    fn run_part(&self, part: &TileRange, shared_memory: &mut PackBuffer, partial_memory: &mut PackBuffer) {
        let [(lines, layout), (_, PanelLayout { width: streamed_width, .. })] = self.sides();
        let words = self.kernel.words(part.depth.len());
        let panels = part.shared.len().div_ceil(layout.width);
        let packed = shared_memory.words(panels * layout.width * words);
        let lines = lines.part(part.shared.clone(), part.depth.clone());
        pack_in_parallel(lines, layout, packed, self.serial);

        let partial = if self.needs_partial_sums() {
            let (_, cols) = self.area(part);
            let sums = partial_memory.floats(part.shared.len() * part.streamed.len());
            Some(OutputMatrix::new(sums, cols.len()))
        } else {
            None
        };
        let work = part.shared.len() * part.streamed.len() * part.depth.len();
        let tasks = tasks(work, if self.serial { 1 } else { rayon::current_num_threads() });
        let plan = TilingPlan::new(panels, part.streamed.len().div_ceil(streamed_width), streamed_width * words, tasks);
        let task = |index: usize| self.run_task(part, &plan, index, &*packed, partial);
        if self.serial {
            (0..plan.tasks()).for_each(task);
        } else {
            for_each_task(0..plan.tasks(), &task);
        }
    }

    /// The rows and columns of C of a part.
    fn area(&self, part: &TileRange) -> (Range<usize>, Range<usize>) {
        let (shared, streamed) = (part.shared.clone(), part.streamed.clone());
        if self.shares_a() { (shared, streamed) } else { (streamed, shared) }
    }

    /// Multiplies a group of the streamed operand's panels with a share of the packed ones.
    fn run_task(
        &self,
        part: &TileRange,
        plan: &TilingPlan,
        index: usize,
        packed: &[u32],
        partial: Option<OutputMatrix<f32>>,
    ) {
        let [(_, PanelLayout { width: shared_width, .. }), (lines, layout)] = self.sides();
        let words = self.kernel.words(part.depth.len());
        let (group, share) = plan.task(index);
        let shared = Panels {
            first_line: part.shared.start + share.start * shared_width,
            words: &packed[share.start * shared_width * words..share.end * shared_width * words],
        };
        let first_line = part.streamed.start + group.start * layout.width;
        let group_lines = group.len() * layout.width;
        let tiles = group.len() * share.len();
        with_thread_buffer(|buffer| {
            if let Some(kept) = self.panels {
                let all_lines = lines.rows.next_multiple_of(layout.width);
                let start = all_lines * self.kernel.words(part.depth.start) + first_line * words;
                let kept = &kept[self.kept_words(start)..][..self.kept_words(group_lines * words)];
                let nothing = Prefetch::new(lines.part(0..0, 0..0), tiles);
                return self.multiply_kept(part, shared, Panels { first_line, words: kept }, buffer, partial, nothing);
            }
            let streamed = buffer.words(group_lines * words);
            pack(lines.part(first_line..lines.rows, part.depth.clone()), layout, streamed);
            let streamed = Panels { first_line, words: streamed };
            let next = first_line + group_lines;
            let prefetch = Prefetch::new(lines.part(next..next + group_lines, part.depth.clone()), tiles);
            let [a, b] = if self.shares_a() { [shared, streamed] } else { [streamed, shared] };
            self.multiply(part, a, b, partial, prefetch);
        });
    }

    /// Multiplies packed panels of A with kept panels of B: as they are, if the micro-kernel reads them, or widened
    /// into `buffer`.
    fn multiply_kept(
        &self,
        part: &TileRange,
        a: Panels<'_>,
        kept: Panels<'_>,
        buffer: &mut PackBuffer,
        partial: Option<OutputMatrix<f32>>,
        prefetch: Prefetch<'_, A>,
    ) {
        // The second term's panels are not narrow.
        let narrow = self.kernel.narrow().filter(|_| self.second.is_none());
        if let Some(kernel) = narrow {
            return Product { kernel, ..*self }.multiply(part, a, kept, partial, prefetch);
        }
        if !self.widens() {
            return self.multiply(part, a, kept, partial, prefetch);
        }
        let narrow = cast_slice(kept.words);
        let wide = A::as_f32(narrow, buffer.floats(narrow.len()));
        self.multiply(part, a, Panels { words: cast_slice(wide), ..kept }, partial, prefetch);
    }

    /// Multiplies packed panels of A with packed panels of B.
    fn multiply(
        &self,
        part: &TileRange,
        a: Panels<'_>,
        b: Panels<'_>,
        partial: Option<OutputMatrix<f32>>,
        mut prefetch: Prefetch<'_, A>,
    ) {
        let MicroKernel { rows, cols, .. } = self.kernel;
        let (mut tile, mut second_tile) = (Tile([0.0; MAX_TILE]), Tile([0.0; MAX_TILE]));
        let (mut ahead, nothing) = (PrefetchQueue::new(), PrefetchQueue::new());
        let second = self.second.filter(|_| part.depth.end == self.a.cols);
        let (mut scratch, mut partial_scratch) = (Scratch::new(), Scratch::new());
        let (part_rows, part_cols) = self.area(part);
        let ready = self.kernel.ready();
        let mut multiply = |(a, row): (&[u32], usize), (b, col): (&[u32], usize)| {
            let area = TileRect { row, col, rows: rows.min(part_rows.end - row), cols: cols.min(part_cols.end - col) };
            ahead.clear();
            match partial {
                Some(partial) => partial.fetch(area.relative_to(&part_rows, &part_cols), &mut ahead),
                None => self.c.fetch(if self.swapped { area.transposed() } else { area }, &mut ahead),
            }
            prefetch.step(&mut ahead);
            ready.run(a, b, &ahead, &mut tile);
            if let Some(second) = second {
                second.add_to(&ready, (row, col), &mut tile, &mut second_tile, &nothing);
            }
            self.finish(&mut tile, area, part, partial, (&mut scratch, &mut partial_scratch));
        };
        let words = self.kernel.words(part.depth.len());
        let all_a = || panels(a.words, rows * words).zip((a.first_line..part_rows.end).step_by(rows));
        let all_b = || panels(b.words, self.kernel.b_words(words)).zip((b.first_line..part_cols.end).step_by(cols));
        // The inner loop reads the panels of this task, which fit in the L2 cache; the shared ones may not.
        if self.shares_a() {
            all_a().for_each(|a| all_b().for_each(|b| multiply(a, b)));
        } else {
            all_b().for_each(|b| all_a().for_each(|a| multiply(a, b)));
        }
    }

    /// Rounds a tile into C.
    ///
    /// # Safety
    /// As [`OutputMatrix::finish`].
    unsafe fn write(&self, tile: &mut Tile, area: TileRect, epilogue: Epilogue<'_>, scratch: &mut Scratch<C>) {
        let MicroKernel { rows, cols, .. } = self.kernel;
        // SAFETY: the caller's promise.
        unsafe {
            if self.swapped {
                self.c.finish(&mut tile.transposed(rows, cols), rows, area.transposed(), epilogue, scratch);
            } else {
                self.c.finish(tile, cols, area, epilogue, scratch);
            }
        }
    }

    /// Adds a tile to the sums of earlier parts of the depth and, after the last part, writes C.
    fn finish(
        &self,
        tile: &mut Tile,
        area: TileRect,
        part: &TileRange,
        partial: Option<OutputMatrix<f32>>,
        (scratch, partial_scratch): (&mut Scratch<C>, &mut Scratch<f32>),
    ) {
        let width = self.kernel.cols;
        let is_first = part.depth.start == 0;
        let is_last = part.depth.end == self.a.cols;
        let Some(partial) = partial else {
            let later = Epilogue { alpha: self.epilogue.alpha, bias: None, accumulate: true };
            let epilogue = if is_first { self.epilogue } else { later };
            // SAFETY: `Gemm::run_on` checked that C has all areas; each belongs to one task of a part, and parts run in
            // turn.
            return unsafe { self.write(tile, area, epilogue, scratch) };
        };
        let (rows, cols) = self.area(part);
        let inside = area.relative_to(&rows, &cols);
        // SAFETY: as above; the partial sums have the size of the part.
        unsafe {
            if !is_first {
                partial.add_to(tile, width, inside, partial_scratch);
            }
            if is_last {
                self.write(tile, area, self.epilogue, scratch);
            } else {
                partial.store(tile, width, inside, partial_scratch);
            }
        }
    }
}

/// How the panels of a part are shared out: a task takes a group of one operand's and a share of the other's.
struct TilingPlan {
    private_panels: usize,
    group: usize,
    shared_panels: usize,
    share: usize,
}

impl TilingPlan {
    /// About as many tasks as `wanted`; groups no larger than a task's memory, shares large enough to repay the packing
    /// of a group.
    fn new(shared_panels: usize, private_panels: usize, private_panel_words: usize, wanted: usize) -> Self {
        let fitting = (PRIVATE_WORDS / private_panel_words.max(1)).max(1);
        let group = private_panels.div_ceil(wanted).clamp(1, fitting);
        let groups = private_panels.div_ceil(group).max(1);
        let share = shared_panels.div_ceil(wanted.div_ceil(groups)).max(8);
        Self { private_panels, group, shared_panels, share }
    }

    fn shares(&self) -> usize {
        self.shared_panels.div_ceil(self.share)
    }

    fn tasks(&self) -> usize {
        self.private_panels.div_ceil(self.group) * self.shares()
    }

    /// The panels of the streamed and of the shared operand that belong to a task.
    fn task(&self, index: usize) -> (Range<usize>, Range<usize>) {
        let group = index / self.shares() * self.group;
        let share = index % self.shares() * self.share;
        (group..self.private_panels.min(group + self.group), share..self.shared_panels.min(share + self.share))
    }
}

/// A range cut into pieces of `length`; the last one may be shorter.
fn pieces(range: Range<usize>, length: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(length).map(move |start| start..end.min(start + length))
}

/// Panels of `words` words; endlessly many empty ones if that is zero.
fn panels(packed: &[u32], words: usize) -> impl Iterator<Item = &[u32]> {
    (0..).map_while(move |index| packed.get(index * words..(index + 1) * words))
}
