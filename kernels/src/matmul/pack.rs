//! Packing: copies of operands in the order in which the micro-kernels read them.
//!
//! A's rows and B's columns play the same part and are called lines here: elements that are multiplied with those of
//! the other operand's lines. Operands come with lines as their rows, B transposed; their columns are the depth. A
//! panel holds `width` lines interleaved: the first unit of each line, then the second unit of each, and so on. A unit
//! is one FP32 value, two adjacent BF16 values for the BF16 dot product, four for the product of small BF16 matrices,
//! or as many as a row of an AMX tile has. Missing lines and units are zeros.

use super::super::convert::Element;
use super::super::isa::vectorize;
use super::super::machine::allocator::CACHE_LINE;
use super::Operand;
use super::micro::PrefetchQueue;
use half::bf16;

/// How elements are grouped in a panel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PackUnit {
    /// One value, widened to FP32.
    Float,
    /// Two neighboring BF16 values, the first in the low half.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "other processors have no kernel for it"))]
    Bf16Pair,
    /// Four neighboring BF16 values.
    #[cfg_attr(not(target_arch = "aarch64"), allow(dead_code, reason = "as above"))]
    Bf16Quad,
    /// 16 pairs of a line of A: a tile's row.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "as above"))]
    TileRow,
    /// 16 pairs of a line of B: a tile's column, so that the panel holds the first pair of each line, then the second,
    /// as if pairs were its units.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "as above"))]
    TileColumn,
}

impl PackUnit {
    pub(super) fn elements(self) -> usize {
        match self {
            Self::Float => 1,
            Self::Bf16Pair => 2,
            Self::Bf16Quad => 4,
            Self::TileRow | Self::TileColumn => 2 * TILE_PAIRS,
        }
    }

    /// 32-bit words of a unit.
    pub(super) fn words(self) -> usize {
        match self {
            Self::Float | Self::Bf16Pair => 1,
            Self::Bf16Quad => 2,
            Self::TileRow | Self::TileColumn => TILE_PAIRS,
        }
    }

    /// Words of the units that hold `elements` elements.
    pub(super) fn words_of(self, elements: usize) -> usize {
        elements.div_ceil(self.elements()) * self.words()
    }
}

/// Pairs in a row of a tile.
const TILE_PAIRS: usize = super::super::amx::COLUMNS;

#[derive(Clone, Copy, Debug)]
pub(super) struct PanelLayout {
    /// Lines in a panel.
    pub(super) width: usize,
    pub(super) unit: PackUnit,
}

/// Units that are gathered at a time while transposing.
const BLOCK: usize = 64;
/// Lines that are read at a time if they are neighbors in memory: whole cache lines, yet few panels, whose distance
/// may make them compete for the same place in the L1 cache.
const SPAN: usize = 64;

/// Rows prefetched ahead of their use; the hardware prefetcher does not predict the next row.
const AHEAD: usize = 24;

/// Packs as many panels as fill `panels`.
pub(super) fn pack<T: Element>(lines: Operand<'_, T>, PanelLayout { width, unit }: PanelLayout, panels: &mut [u32]) {
    // The compiler needs the width as a constant: panels are filled in pieces of it.
    match width {
        4 => pack_panels::<T, 4>(lines, unit, panels),
        6 => pack_panels::<T, 6>(lines, unit, panels),
        8 => pack_panels::<T, 8>(lines, unit, panels),
        12 => pack_panels::<T, 12>(lines, unit, panels),
        16 => pack_panels::<T, 16>(lines, unit, panels),
        32 => pack_panels::<T, 32>(lines, unit, panels),
        48 => pack_panels::<T, 48>(lines, unit, panels),
        _ => unreachable!("no micro-kernel has panels of {width} lines"),
    }
}

fn pack_panels<T: Element, const WIDTH: usize>(lines: Operand<'_, T>, unit: PackUnit, panels: &mut [u32]) {
    let panel_words = WIDTH * unit.words_of(lines.cols);
    if panel_words == 0 {
        return;
    }
    let is_ragged = unit.words() > 1 && !lines.cols.is_multiple_of(unit.elements());
    // Beyond its padding, such a panel is one of pairs.
    let unit = if unit == PackUnit::TileColumn { PackUnit::Bf16Pair } else { unit };
    let span = (SPAN / WIDTH).max(1);
    for (panels, first) in panels.chunks_mut(span * panel_words).zip((0..).step_by(span * WIDTH)) {
        let end = first + panels.len() / panel_words * WIDTH;
        if lines.rows < end || is_ragged {
            panels.fill(0);
        }
        if lines.row_stride == 1 {
            pack_side_by_side::<T, WIDTH>(lines.part(first..end, 0..lines.cols), unit, panels, panel_words);
        } else {
            for (panel, first) in panels.chunks_mut(panel_words).zip((first..).step_by(WIDTH)) {
                let lines = lines.part(first..first + WIDTH, 0..lines.cols);
                if unit.words() > 1 {
                    pack_lines::<T, WIDTH>(lines, unit, panel);
                } else {
                    pack_by_transposing::<T, WIDTH>(lines, unit, panel);
                }
            }
        }
    }
}

/// Packs at most `SPAN` lines that are neighbors in memory.
fn pack_side_by_side<T: Element, const WIDTH: usize>(
    lines: Operand<'_, T>,
    unit: PackUnit,
    panels: &mut [u32],
    panel_words: usize,
) {
    vectorize!(match unit {
        PackUnit::Float => spread_rows::<T, WIDTH>(lines, panels, panel_words),
        PackUnit::Bf16Pair | PackUnit::TileColumn => pair_rows::<WIDTH>(as_bf16(lines), panels, panel_words),
        PackUnit::Bf16Quad => transpose_rows::<WIDTH, 2>(as_bf16(lines), panels, panel_words),
        PackUnit::TileRow => transpose_rows::<WIDTH, TILE_PAIRS>(as_bf16(lines), panels, panel_words),
    });
}

/// Spreads one row of FP32 values after another over the panels.
#[inline(always)]
fn spread_rows<T: Element, const WIDTH: usize>(lines: Operand<'_, T>, panels: &mut [u32], panel_words: usize) {
    let mut words = [0u32; SPAN];
    let words = &mut words[..lines.rows];
    for k in 0..lines.cols {
        prefetch(lines.data, (k + AHEAD) * lines.col_stride, lines.rows);
        let panels = &mut panels[k * WIDTH..];
        let row = &lines.data[k * lines.col_stride..][..lines.rows];
        if let Some(floats) = as_float_patterns(row) {
            spread::<WIDTH>(floats, panels, panel_words);
        } else {
            T::load(row, as_floats(words));
            spread::<WIDTH>(words, panels, panel_words);
        }
    }
}

/// Packs pairs of rows, one panel after another: a panel is written in order, while the rows stay in the L1 cache.
#[inline(always)]
fn pair_rows<const WIDTH: usize>(lines: Operand<'_, bf16>, panels: &mut [u32], panel_words: usize) {
    static ZEROS: [bf16; SPAN] = [bf16::ZERO; SPAN];
    let Operand { data, rows: count, cols: depth, col_stride: stride, .. } = lines;
    for (block, start) in (0..depth).step_by(2 * BLOCK).enumerate() {
        let rows = start..depth.min(start + 2 * BLOCK);
        for (index, panel) in panels.chunks_mut(panel_words).enumerate() {
            let first = index * WIDTH;
            let width = WIDTH.min(count.saturating_sub(first));
            let (targets, _) = panel[block * BLOCK * WIDTH..].as_chunks_mut::<WIDTH>();
            for (k, target) in rows.clone().step_by(2).zip(targets) {
                if index == 0 {
                    for k in [k + AHEAD, k + 1 + AHEAD] {
                        prefetch(data, k * stride, count);
                    }
                }
                let low = &data[k * stride + first..][..width];
                let high = if k + 1 < depth { &data[(k + 1) * stride + first..][..width] } else { &ZEROS[..width] };
                match (low.first_chunk::<WIDTH>(), high.first_chunk::<WIDTH>()) {
                    (Some(low), Some(high)) => *target = std::array::from_fn(|i| pair(low[i], high[i])),
                    _ => target.iter_mut().zip(low).zip(high).for_each(|((to, low), high)| *to = pair(*low, *high)),
                }
            }
        }
    }
}

/// Turns rows into units of `PAIRS`, at most those of a tile: the pairs of one unit of each line are gathered, then
/// transposed.
#[inline(always)]
fn transpose_rows<const WIDTH: usize, const PAIRS: usize>(
    lines: Operand<'_, bf16>,
    panels: &mut [u32],
    panel_words: usize,
) {
    let mut pairs = [0u32; TILE_PAIRS * SPAN];
    let pairs = &mut pairs[..PAIRS * WIDTH];
    for (block, start) in (0..lines.cols).step_by(2 * PAIRS).enumerate() {
        for (panel, first) in panels.chunks_mut(panel_words).zip((0..).step_by(WIDTH)) {
            let lines = lines.part(first..first + WIDTH, start..start + 2 * PAIRS);
            pair_rows::<WIDTH>(lines, pairs, PAIRS * WIDTH);
            pairs[lines.cols.div_ceil(2) * WIDTH..].fill(0);
            let target = &mut panel[block * PAIRS * WIDTH..][..PAIRS * WIDTH];
            transpose_pairs::<WIDTH, PAIRS>(pairs, lines.rows, target);
        }
    }
}

/// `target[line * PAIRS + pair] = pairs[pair * WIDTH + line]` for `PAIRS` pairs of the first `lines` lines.
#[inline(always)]
fn transpose_pairs<const WIDTH: usize, const PAIRS: usize>(pairs: &[u32], lines: usize, target: &mut [u32]) {
    assert!(pairs.len() == PAIRS * WIDTH && target.len() == PAIRS * WIDTH && lines <= WIDTH);
    #[cfg(target_arch = "x86_64")]
    if lines == WIDTH
        && WIDTH.is_multiple_of(8)
        && PAIRS.is_multiple_of(8)
        && super::super::isa::Isa::current() >= super::super::isa::Isa::Avx2
    {
        for pair in (0..PAIRS).step_by(8) {
            let source = pairs[pair * WIDTH..].as_ptr().cast::<f32>();
            // SAFETY: the CPU has AVX2; eight rows of `WIDTH` words are read, and eight words of `WIDTH` rows written.
            unsafe { transpose_avx2::<f32, PAIRS, false>(source, WIDTH, WIDTH, target[pair..].as_mut_ptr()) };
        }
        return;
    }
    for (line, target) in target.chunks_exact_mut(PAIRS).enumerate().take(lines) {
        for (pair, target) in target.iter_mut().enumerate() {
            *target = pairs[pair * WIDTH + line];
        }
    }
}

/// Packs one panel of units of several words from lines at any addresses: some neighboring units of one line after
/// another.
fn pack_lines<T: Element, const WIDTH: usize>(lines: Operand<'_, T>, unit: PackUnit, panel: &mut [u32]) {
    /// Elements copied at a time: the target stays in the L1 cache.
    const COPIED: usize = 256;
    let (step, words) = (unit.elements(), unit.words());
    for (start, panel) in (0..lines.cols).step_by(COPIED).zip(panel.chunks_mut(COPIED / 2 * WIDTH)) {
        for index in 0..lines.rows {
            let line = lines.part(index..index + 1, start..start + COPIED);
            line.prefetch_next(0);
            for (from, block) in (0..line.cols).step_by(step).zip(panel.chunks_mut(words * WIDTH)) {
                let target = &mut block[index * words..][..words];
                gather(line.part(0..1, from..from + step), PackUnit::Bf16Pair, target);
            }
        }
    }
}

/// Copies each `WIDTH` words to the start of the next panel.
#[inline(always)]
fn spread<const WIDTH: usize>(words: &[u32], panels: &mut [u32], panel_words: usize) {
    let (pieces, rest) = words.as_chunks::<WIDTH>();
    let mut targets = panels.chunks_mut(panel_words);
    for (piece, target) in pieces.iter().zip(&mut targets) {
        target[..WIDTH].copy_from_slice(piece);
    }
    if let (false, Some(target)) = (rest.is_empty(), targets.next()) {
        target[..rest.len()].copy_from_slice(rest);
    }
}

/// Packs lines at any addresses: gathers blocks of them line by line and then transposes the blocks.
fn pack_by_transposing<T: Element, const WIDTH: usize>(lines: Operand<'_, T>, unit: PackUnit, panel: &mut [u32]) {
    let mut block = [[0u32; BLOCK]; 8];
    let step = BLOCK * unit.elements();
    for (from, panel) in (0..lines.cols).step_by(step).zip(panel.chunks_mut(BLOCK * WIDTH)) {
        for first in (0..lines.rows).step_by(8) {
            let lines = lines.part(first..first + 8, from..from + step);
            let target = &mut panel[first..];
            let whole = lines.rows == transposed_lines(WIDTH);
            let done = if whole { transpose_vectors::<T, WIDTH>(lines, unit, target) } else { 0 };
            let rest = lines.part(0..8, done * unit.elements()..step);
            let units = rest.cols.div_ceil(unit.elements());
            if units > 0 {
                for (line, gathered) in block.iter_mut().take(rest.rows).enumerate() {
                    rest.prefetch_next(line);
                    gather(rest.part(line..line + 1, 0..step), unit, &mut gathered[..units]);
                }
                transpose(&block, rest.rows, units, &mut target[done * WIDTH..], WIDTH);
            }
        }
    }
}

/// Writes the units of a line.
#[inline]
fn gather<T: Element>(line: Operand<'_, T>, unit: PackUnit, units: &mut [u32]) {
    if line.col_stride == 1 {
        match unit {
            PackUnit::Float => T::load(&line.data[..line.cols], as_floats(units)),
            _ => gather_pairs(&as_bf16(line).data[..line.cols], units),
        }
    } else {
        let at = |k: usize| line.data[k * line.col_stride];
        for (k, target) in (0..line.cols).step_by(unit.elements()).zip(units) {
            *target = if unit == PackUnit::Float {
                at(k).to_f32().to_bits()
            } else {
                let high = if k + 1 < line.cols { bf16::from_f32(at(k + 1).to_f32()) } else { bf16::ZERO };
                pair(bf16::from_f32(at(k).to_f32()), high)
            };
        }
    }
}

/// Writes the pairs of neighboring elements; the last one may have a zero.
#[inline]
fn gather_pairs(elements: &[bf16], units: &mut [u32]) {
    let (pairs, odd) = elements.as_chunks::<2>();
    for (target, [low, high]) in units.iter_mut().zip(pairs) {
        *target = pair(*low, *high);
    }
    if let ([low], Some(target)) = (odd, units.get_mut(pairs.len())) {
        *target = pair(*low, bf16::ZERO);
    }
}

/// `target[u * stride + l] = block[l][u]` for the first `lines` lines and `units` units.
#[inline]
fn transpose(block: &[[u32; BLOCK]; 8], lines: usize, units: usize, target: &mut [u32], stride: usize) {
    for unit in 0..units {
        for (line, target) in target[unit * stride..][..lines].iter_mut().enumerate() {
            *target = block[line][unit];
        }
    }
}

/// Lines of a panel of `width` that are transposed together by vector instructions.
const fn transposed_lines(width: usize) -> usize {
    if width < 8 { width } else { 8 }
}

/// Packs [`transposed_lines`] straight from the operand: as many units as vector instructions take. Returns the number
/// of units.
#[inline]
fn transpose_vectors<T: Element, const WIDTH: usize>(
    lines: Operand<'_, T>,
    unit: PackUnit,
    target: &mut [u32],
) -> usize {
    #[cfg(target_arch = "x86_64")]
    if WIDTH >= 6 && lines.col_stride == 1 && super::super::isa::Isa::current() >= super::super::isa::Isa::Avx2 {
        let Operand { data, cols: depth, row_stride: stride, .. } = lines;
        let count = transposed_lines(WIDTH);
        let units = depth / unit.elements() / 8 * 8;
        assert!(units == 0 || target.len() >= (units - 1) * WIDTH + count);
        for line in 0..count {
            lines.prefetch_next(line);
        }
        let source = data[..(count - 1) * stride + depth].as_ptr();
        let target = target.as_mut_ptr();
        // SAFETY: the CPU has AVX2, the lines have `units` units, and the target has room for them.
        unsafe {
            match unit {
                PackUnit::Float => transpose_avx2::<T, WIDTH, false>(source, stride, units, target),
                _ => transpose_avx2::<T, WIDTH, true>(source, stride, units, target),
            }
        }
        return units;
    }
    let _ = (lines, unit, target);
    0
}

/// Transposes a multiple of eight units, pairs of BF16 or widened elements, of [`transposed_lines`] that are
/// `line_stride` elements apart.
///
/// # Safety
/// The lines must have these units, and the target room for them.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
unsafe fn transpose_avx2<T: Element, const WIDTH: usize, const PAIRS: bool>(
    source: *const T,
    line_stride: usize,
    units: usize,
    target: *mut u32,
) {
    use candle_core::DType;
    use std::arch::x86_64::{
        _mm_loadu_si128, _mm_storel_epi64, _mm_storeu_ps, _mm256_castps_si256, _mm256_castps256_ps128,
        _mm256_castsi256_ps, _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_extracti128_si256, _mm256_loadu_ps,
        _mm256_setzero_ps, _mm256_slli_epi32, _mm256_storeu_ps,
    };
    for start in (0..units).step_by(8) {
        let mut lines = [_mm256_setzero_ps(); 8];
        for (index, line) in lines.iter_mut().enumerate().take(transposed_lines(WIDTH)) {
            // SAFETY: the caller promised these units; a unit of a pair is two elements.
            *line = unsafe {
                let from = source.add(index * line_stride + if PAIRS { 2 * start } else { start });
                match T::DTYPE {
                    DType::F16 => _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
                    DType::BF16 if !PAIRS => {
                        let narrow = _mm_loadu_si128(from.cast());
                        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(narrow)))
                    }
                    _ => _mm256_loadu_ps(from.cast()),
                }
            };
        }
        for (unit, column) in (start..).zip(transpose_8x8(lines)) {
            // SAFETY: the caller made room for these lines of every unit below `units`.
            unsafe {
                let target = target.add(unit * WIDTH);
                if WIDTH < 8 {
                    _mm_storeu_ps(target.cast(), _mm256_castps256_ps128(column));
                    let last = _mm256_extracti128_si256::<1>(_mm256_castps_si256(column));
                    _mm_storel_epi64(target.add(4).cast(), last);
                } else {
                    _mm256_storeu_ps(target.cast(), column);
                }
            }
        }
    }
}

/// Interleaves pairs of rows, then pairs of pairs; the halves of 128 bits change places last.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2")]
fn transpose_8x8(rows: [std::arch::x86_64::__m256; 8]) -> [std::arch::x86_64::__m256; 8] {
    use std::arch::x86_64::{
        _mm256_permute2f128_ps as halves, _mm256_shuffle_ps as shuffle, _mm256_unpackhi_ps, _mm256_unpacklo_ps,
    };
    let mut columns = rows;
    for half in 0..2 {
        let pair = |i: usize| match half {
            0 => _mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1]),
            _ => _mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1]),
        };
        let [a, b, c, d] = [pair(0), pair(1), pair(2), pair(3)];
        let even = [shuffle::<0b01_00_01_00>(a, b), shuffle::<0b01_00_01_00>(c, d)];
        let odd = [shuffle::<0b11_10_11_10>(a, b), shuffle::<0b11_10_11_10>(c, d)];
        for (column, [a, b]) in [(2 * half, even), (2 * half + 1, odd)] {
            columns[column] = halves::<0x20>(a, b);
            columns[column + 4] = halves::<0x31>(a, b);
        }
    }
    columns
}

#[inline(always)]
fn pair(low: bf16, high: bf16) -> u32 {
    u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16
}

#[inline(always)]
fn as_floats(words: &mut [u32]) -> &mut [f32] {
    bytemuck::cast_slice_mut(words)
}

/// The elements' patterns, if they are FP32.
#[inline(always)]
fn as_float_patterns<T: Element>(elements: &[T]) -> Option<&[u32]> {
    // SAFETY: `T` is `f32`, which has the size and alignment of `u32`.
    (T::DTYPE == candle_core::DType::F32)
        .then(|| unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), elements.len()) })
}

/// The lines, whose elements must be BF16.
#[inline(always)]
fn as_bf16<T: Element>(lines: Operand<'_, T>) -> Operand<'_, bf16> {
    assert!(T::DTYPE == candle_core::DType::BF16, "pairs are for BF16 alone");
    let Operand { data, rows, cols, row_stride, col_stride } = lines;
    // SAFETY: `T` is `bf16`.
    let data = unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), data.len()) };
    Operand { data, rows, cols, row_stride, col_stride }
}

/// Prefetches elements of an operand a little at a time, while something else is computed.
pub(super) struct Prefetch<'a, T> {
    /// The rest of the operand from the current run of neighboring elements on.
    data: &'a [T],
    /// Runs to come, their distance, and their length in elements; `done` counts the finished elements of a run.
    runs: usize,
    stride: usize,
    length: usize,
    done: usize,
    /// Cache lines in a step.
    per_step: usize,
}

impl<'a, T> Prefetch<'a, T> {
    /// Elements in a cache line.
    const LINE: usize = CACHE_LINE / size_of::<T>();

    /// A prefetch of an operand in this number of steps.
    pub(super) fn new(operand: Operand<'a, T>, steps: usize) -> Self {
        let Operand { data, rows, cols, row_stride, col_stride } = operand;
        let (runs, stride, length) = if row_stride == 1 { (cols, col_stride, rows) } else { (rows, row_stride, cols) };
        let runs = if length == 0 { 0 } else { runs };
        let per_step = (runs * length.div_ceil(Self::LINE)).div_ceil(steps.max(1));
        Self { data, runs, stride, length, done: 0, per_step }
    }

    /// Adds the next few cache lines to `ahead`.
    #[inline]
    pub(super) fn step(&mut self, ahead: &mut PrefetchQueue) {
        let mut wanted = self.per_step;
        while wanted > 0 && self.runs > 0 {
            let lines = wanted.min((self.length - self.done).div_ceil(Self::LINE));
            ahead.push_rows(self.data.as_ptr().wrapping_add(self.done), 0, 1, lines);
            wanted -= lines;
            self.done += lines * Self::LINE;
            if self.done >= self.length {
                self.done = 0;
                self.runs -= 1;
                self.data = self.data.get(self.stride..).unwrap_or_default();
            }
        }
    }
}

impl<T> Operand<'_, T> {
    /// Prefetches what follows a row's elements if they are neighbors: as much again.
    #[inline(always)]
    fn prefetch_next(self, row: usize) {
        if self.col_stride == 1 {
            prefetch(self.data, row * self.row_stride + self.cols, self.cols);
        }
    }
}

/// Prefetches `len` elements, starting at `start`, into the L1 cache; they need not exist.
#[inline(always)]
fn prefetch<T>(data: &[T], start: usize, len: usize) {
    for offset in (0..len * size_of::<T>()).step_by(CACHE_LINE) {
        fetch(data.as_ptr().wrapping_add(start).cast::<i8>().wrapping_add(offset));
    }
}

/// Prefetches a cache line into the L1 cache; it need not exist.
#[inline(always)]
pub(super) fn fetch(address: *const i8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch of any address does nothing but fill caches.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
