//! Micro-kernels: one small tile of C, held in registers, from one panel of A and one of B.

use super::super::convert::Element;
use super::super::isa::Isa;
use super::pack::{CACHE_LINE, Unit};

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

/// The most floats a tile has.
pub(super) const MAX_TILE: usize = 8 * 48;

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

/// The most addresses of [`Ahead`].
const MAX_AHEAD: usize = 160;

/// Addresses to prefetch while a tile is computed: its place in C, whose cache lines a store would otherwise wait for, and what
/// is packed next. They are spread out, because a burst of prefetches would stall the kernel.
#[derive(Clone, Debug)]
pub(super) struct Ahead {
    addresses: [*const i8; MAX_AHEAD],
    len: usize,
}

/// Units multiplied between two prefetches.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, Debug)]
struct Span {
    address: *const i8,
    units: usize,
}

impl Ahead {
    /// No addresses.
    pub(super) fn new() -> Self {
        Self { addresses: [std::ptr::null(); MAX_AHEAD], len: 0 }
    }

    /// Forgets all addresses.
    pub(super) fn clear(&mut self) {
        self.len = 0;
    }

    /// Adds the cache lines from `first` on, of memory that need not exist; those above the number that fits are dropped.
    #[inline(always)]
    pub(super) fn push_lines<T>(&mut self, first: *const T, count: usize) {
        let free = &mut self.addresses[self.len.min(MAX_AHEAD)..];
        let count = count.min(free.len());
        for (i, free) in free[..count].iter_mut().enumerate() {
            *free = first.cast::<i8>().wrapping_add(i * CACHE_LINE);
        }
        self.len += count;
    }

    /// The addresses, evenly spread over `units`. There is always at least one, possibly of nothing.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn spread_over(&self, units: usize) -> impl Iterator<Item = Span> {
        let count = self.len.clamp(1, MAX_AHEAD);
        let each = units / count;
        let last = count - 1;
        (0..count).map(
            #[inline(always)]
            move |i| Span { address: self.addresses[i], units: if i == last { units - each * last } else { each } },
        )
    }
}

/// A micro-kernel and the shape of its panels.
#[derive(Clone, Copy, Debug)]
pub(super) struct MicroKernel {
    /// Lines in a panel of A: the tile's rows.
    pub(super) rows: usize,
    /// Lines in a panel of B: the tile's columns.
    pub(super) cols: usize,
    /// What panels are made of.
    pub(super) unit: Unit,
    /// `tile = A·B` over this number of units.
    run: unsafe fn(usize, *const u32, *const u32, &Ahead, &mut Tile),
}

impl MicroKernel {
    /// The fastest micro-kernel for elements of type `T` on `isa`, which this CPU must have.
    pub(super) fn of<T: Element>(isa: Isa) -> Self {
        assert!(isa.is_supported());
        match isa {
            Isa::Portable => Self { rows: 4, cols: 8, unit: Unit::Float, run: portable },
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Self { rows: 6, cols: 16, unit: Unit::Float, run: avx2::float },
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 if T::DTYPE == candle_core::DType::BF16 => {
                Self { rows: 8, cols: 48, unit: Unit::Bf16Pair, run: avx512::bf16_pair }
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Bf16 => Self { rows: 8, cols: 48, unit: Unit::Float, run: avx512::float },
            #[cfg(not(target_arch = "x86_64"))]
            _ => unreachable!("no other instruction set is supported here"),
        }
    }

    /// `tile = A·B` for one panel of each, of the same number of units; fetches what is `ahead` meanwhile.
    #[inline]
    pub(super) fn run(&self, a: &[u32], b: &[u32], ahead: &Ahead, tile: &mut Tile) {
        let units = a.len() / self.rows;
        assert!(a.len() == units * self.rows && b.len() == units * self.cols);
        // SAFETY: `of` checked that the CPU has the instructions; the panels have the sizes the kernel reads.
        unsafe { (self.run)(units, a.as_ptr(), b.as_ptr(), ahead, tile) }
    }
}

/// 4 × 8 floats, for the compiler to vectorise as its target allows.
///
/// # Safety
/// `a` must have 4 floats a unit and `b` 8.
unsafe fn portable(units: usize, a: *const u32, b: *const u32, _: &Ahead, tile: &mut Tile) {
    // SAFETY: the caller's promise.
    let (a, b) = unsafe {
        (
            std::slice::from_raw_parts(a.cast::<[f32; 4]>(), units),
            std::slice::from_raw_parts(b.cast::<[f32; 8]>(), units),
        )
    };
    let mut sums = [[0f32; 8]; 4];
    for (a, b) in a.iter().zip(b) {
        for (sums, a) in sums.iter_mut().zip(a) {
            for (sum, b) in sums.iter_mut().zip(b) {
                *sum += a * b;
            }
        }
    }
    tile.0[..32].copy_from_slice(sums.as_flattened());
}
