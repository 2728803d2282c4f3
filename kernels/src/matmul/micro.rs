//! Micro-kernels: one small tile of C, held in registers, from one panel of A and one of B.

use super::super::convert::Element;
use super::super::isa::Isa;
use super::super::machine::allocator::CACHE_LINE;
use super::pack::{PackUnit, PanelLayout};
use std::marker::PhantomData;
use std::ops::Range;

#[cfg(any(target_arch = "x86_64", test))]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;

/// The most floats a tile has.
pub(super) const MAX_TILE: usize = 32 * 32;

/// A tile of C: row-major, as wide as the micro-kernel's panels of B.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub(super) struct Tile(pub(super) [f32; MAX_TILE]);

impl Tile {
    /// This tile of `rows` × `cols` as one of `cols` × `rows`.
    pub(super) fn transposed(&self, rows: usize, cols: usize) -> Self {
        let mut out = Self([0.0; MAX_TILE]);
        for (col, out) in out.0.chunks_exact_mut(rows).enumerate().take(cols) {
            for (row, out) in out.iter_mut().enumerate() {
                *out = self.0[row * cols + col];
            }
        }
        out
    }
}

/// The most addresses of [`PrefetchQueue`].
const MAX_AHEAD: usize = 160;

/// Addresses to prefetch while a tile is computed: its place in C, whose cache lines a store would otherwise wait for,
/// and what is packed next. They are spread out, because a burst of prefetches would stall the kernel.
#[derive(Clone, Debug)]
pub(super) struct PrefetchQueue {
    addresses: [*const i8; MAX_AHEAD],
    len: usize,
}

/// Units multiplied between two prefetches.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[derive(Clone, Copy, Debug)]
struct PrefetchSpan {
    address: *const i8,
    units: usize,
}

impl PrefetchQueue {
    /// No addresses.
    pub(super) fn new() -> Self {
        Self { addresses: [std::ptr::null(); MAX_AHEAD], len: 0 }
    }

    pub(super) fn clear(&mut self) {
        self.len = 0;
    }

    /// Adds `lines` cache lines, at least one, from the start of each of `rows` rows, `stride` elements apart. The
    /// memory need not exist; lines above the number that fits are dropped.
    #[inline(always)]
    pub(super) fn push_rows<T>(&mut self, first: *const T, stride: usize, rows: usize, lines: usize) {
        for (row, free) in self.addresses[self.len..].chunks_mut(lines).enumerate().take(rows) {
            for (line, free) in free.iter_mut().enumerate() {
                *free = first.wrapping_add(row * stride).cast::<i8>().wrapping_add(line * CACHE_LINE);
            }
            self.len += free.len();
        }
    }

    /// The address at `index`; the last one, if there are fewer.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn address(&self, index: usize) -> *const i8 {
        self.addresses[index.min(self.len.saturating_sub(1))]
    }

    /// Splits the addresses evenly into `steps` parts; the last ones may be empty.
    #[cfg(any(target_arch = "x86_64", test))]
    #[inline(always)]
    fn in_parts(&self, steps: usize) -> impl Iterator<Item = &[*const i8]> {
        let addresses = &self.addresses[..self.len.min(MAX_AHEAD)];
        let each = addresses.len().div_ceil(steps.max(1)).max(1);
        let mut parts = addresses.chunks(each);
        (0..steps).map(
            #[inline(always)]
            move |_| parts.next().unwrap_or_default(),
        )
    }

    /// The addresses, evenly spread over `units`. There is always at least one, possibly of nothing.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    #[inline(always)]
    fn spread_over(&self, units: usize) -> impl Iterator<Item = PrefetchSpan> {
        let count = self.len.clamp(1, MAX_AHEAD);
        let each = units / count;
        let last = count - 1;
        (0..count).map(
            #[inline(always)]
            move |i| PrefetchSpan {
                address: self.addresses[i],
                units: if i == last { units - each * last } else { each },
            },
        )
    }
}

/// Multiplies two panels.
type RunKernel = unsafe fn(usize, *const u32, *const u32, &PrefetchQueue, &mut Tile);

/// A micro-kernel and the shape of its panels.
#[derive(Clone, Copy, Debug)]
pub(super) struct MicroKernel {
    /// Lines in a panel of A: the tile's rows.
    pub(super) rows: usize,
    /// Lines in a panel of B: the tile's columns.
    pub(super) cols: usize,
    /// The units of the panels of A and of B, with the same numbers of elements and of words.
    units: [PackUnit; 2],
    /// `tile = A·B` over this number of words of each line.
    run: RunKernel,
    /// The same sums for A's first line alone; other rows of the tile are undefined.
    run_one: RunKernel,
    /// Both for panels of B that are kept in 16 bits.
    narrow: Option<[RunKernel; 2]>,
    /// The words of A's panels for one of B's.
    ratio: usize,
    /// Functions that a thread calls before and after it runs the kernel, if any.
    around: Option<[unsafe fn(); 2]>,
}

/// A micro-kernel that this thread is ready to run.
#[derive(Debug)]
pub(super) struct PreparedKernel {
    kernel: MicroKernel,
    /// It belongs to this thread.
    _thread: PhantomData<*const ()>,
}

impl MicroKernel {
    /// The fastest micro-kernel for elements of type `T` on `isa`, which this CPU must have.
    pub(super) fn of<T: Element>(isa: Isa) -> Self {
        assert!(isa.is_supported());
        match isa {
            Isa::Portable => Self::in_registers([4, 8], PackUnit::Float, [portable::<4>, portable::<1>]),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                let narrow: [RunKernel; 2] = [avx2::float::<T, 6>, avx2::float::<T, 1>];
                let run: [RunKernel; 2] = [avx2::float::<f32, 6>, avx2::float::<f32, 1>];
                let kernel = Self::in_registers([6, 16], PackUnit::Float, run);
                Self { narrow: (T::DTYPE != candle_core::DType::F32).then_some(narrow), ..kernel }
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Amx if T::DTYPE == candle_core::DType::BF16 => Self::in_tiles::<super::super::amx::AmxTiles>(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 if T::DTYPE == candle_core::DType::BF16 => {
                Self::in_registers([8, 48], PackUnit::Bf16Pair, [avx512::bf16_pair::<8>, avx512::bf16_pair::<1>])
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => {
                let narrow: Option<[RunKernel; 2]> = match T::DTYPE {
                    candle_core::DType::F16 => Some([avx512::half::<8>, avx512::half::<1>]),
                    candle_core::DType::BF16 => Some([avx512::bf16::<8>, avx512::bf16::<1>]),
                    _ => None,
                };
                let kernel = Self::in_registers([8, 48], PackUnit::Float, [avx512::float::<8>, avx512::float::<1>]);
                Self { narrow, ..kernel }
            }
            #[cfg(target_arch = "aarch64")]
            Isa::NeonBf16 if T::DTYPE == candle_core::DType::BF16 => {
                Self::in_registers([8, 12], PackUnit::Bf16Quad, [neon::bf16_quad; 2])
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon | Isa::NeonBf16 => Self::in_registers([8, 12], PackUnit::Float, [neon::float; 2]),
        }
    }

    fn in_registers([rows, cols]: [usize; 2], unit: PackUnit, [run, run_one]: [RunKernel; 2]) -> Self {
        Self { rows, cols, units: [unit; 2], run, run_one, narrow: None, ratio: 1, around: None }
    }

    /// The micro-kernel for AMX or a model of it.
    #[cfg(any(target_arch = "x86_64", test))]
    pub(super) fn in_tiles<T: super::super::amx::TileUnit>() -> Self {
        Self {
            rows: amx::LINES,
            cols: amx::LINES,
            units: [PackUnit::TileRow, PackUnit::TileColumn],
            run: amx::bf16::<T, false>,
            run_one: amx::bf16::<T, true>,
            narrow: None,
            ratio: 1,
            around: Some([T::configure, T::release]),
        }
    }

    /// This kernel for an A of `lines` lines, with the same bits.
    pub(super) fn for_lines(self, lines: usize) -> Self {
        if lines == 1 { Self { run: self.run_one, narrow: self.narrow.map(|[_, one]| [one; 2]), ..self } } else { self }
    }

    /// This kernel for panels of B that are kept in 16 bits, with the same bits, if the CPU has one.
    pub(super) fn narrow(self) -> Option<Self> {
        self.narrow.map(|[run, _]| Self { run, ratio: 2, ..self })
    }

    /// Words of a panel of B with `words` words per line of A.
    pub(super) fn b_words(&self, words: usize) -> usize {
        self.cols * words / self.ratio
    }

    /// The layout of A's panels.
    pub(super) fn a(&self) -> PanelLayout {
        PanelLayout { width: self.rows, unit: self.units[0] }
    }

    /// The layout of B's panels.
    pub(super) fn b(&self) -> PanelLayout {
        PanelLayout { width: self.cols, unit: self.units[1] }
    }

    /// Words that a line of `depth` elements takes in a panel.
    pub(super) fn words(&self, depth: usize) -> usize {
        self.units[0].words_of(depth)
    }

    /// The words of a line that hold these elements of it, and possibly some before and after them.
    pub(super) fn words_around(&self, depth: Range<usize>) -> Range<usize> {
        let unit = self.units[0];
        depth.start / unit.elements() * unit.words()..unit.words_of(depth.end)
    }

    /// Elements of depth in `words` words of a line.
    pub(super) fn elements(&self, words: usize) -> usize {
        words / self.units[0].words() * self.units[0].elements()
    }

    /// Makes this thread ready to run the kernel; it may not be so already.
    pub(super) fn ready(&self) -> PreparedKernel {
        if let Some([before, _]) = self.around {
            // SAFETY: `of` checked that the CPU has the instructions.
            unsafe { before() };
        }
        PreparedKernel { kernel: *self, _thread: PhantomData }
    }
}

impl PreparedKernel {
    pub(super) fn kernel(&self) -> MicroKernel {
        self.kernel
    }

    /// Computes `tile = A·B` for one panel of each, of the same number of words; fetches the lines of `ahead`
    /// meanwhile.
    #[inline]
    pub(super) fn run(&self, a: &[u32], b: &[u32], ahead: &PrefetchQueue, tile: &mut Tile) {
        let MicroKernel { rows, run, .. } = self.kernel;
        let words = a.len() / rows;
        assert!(a.len() == words * rows && b.len() == self.kernel.b_words(words));
        // SAFETY: `of` checked that the CPU has the instructions; the panels have the sizes the kernel reads.
        unsafe { run(words, a.as_ptr(), b.as_ptr(), ahead, tile) }
    }
}

impl Drop for PreparedKernel {
    fn drop(&mut self) {
        if let Some([_, after]) = self.kernel.around {
            // SAFETY: `ready` was called on this thread.
            unsafe { after() };
        }
    }
}

/// The first `ROWS` rows of 4 × 8 floats, for the compiler to vectorize as its target allows.
///
/// # Safety
/// `a` must have 4 floats a unit and `b` 8.
unsafe fn portable<const ROWS: usize>(units: usize, a: *const u32, b: *const u32, _: &PrefetchQueue, tile: &mut Tile) {
    // SAFETY: the caller's promise.
    let (a, b) = unsafe {
        (
            std::slice::from_raw_parts(a.cast::<[f32; 4]>(), units),
            std::slice::from_raw_parts(b.cast::<[f32; 8]>(), units),
        )
    };
    let mut sums = [[0f32; 8]; ROWS];
    for (a, b) in a.iter().zip(b) {
        for (sums, a) in sums.iter_mut().zip(a) {
            for (sum, b) in sums.iter_mut().zip(b) {
                *sum += a * b;
            }
        }
    }
    tile.0[..8 * ROWS].copy_from_slice(sums.as_flattened());
}
