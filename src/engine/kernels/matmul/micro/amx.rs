//! AMX: 32 × 32 sums in four tiles, from two tiles of A and two of B.
//!
//! A step is 32 elements of depth: four loads of about 8 cycles each, hidden behind four products of 16 cycles.

use super::{Ahead, Tile};
use crate::engine::kernels::matmul::pack::fetch;
use crate::engine::kernels::tiles::{COLUMNS, ROWS, Tiles};

/// Lines in a panel, of A and of B.
pub(super) const LINES: usize = 2 * ROWS;
/// Bytes of 32-bit words.
const WORD: usize = size_of::<u32>();
/// Words of a line in a step.
const STEP: usize = COLUMNS;

/// A's units are rows of tiles, B's columns of tiles.
///
/// # Safety
/// `T`'s tiles must be configured on this thread; `a` and `b` must have 32 lines of `words` words.
pub(super) unsafe fn bf16<T: Tiles>(words: usize, a: *const u32, b: *const u32, ahead: &Ahead, tile: &mut Tile) {
    let (mut a, mut b) = (a, b);
    let steps = words / STEP;
    let mut tiles = T::new();
    // SAFETY: the caller's promise.
    unsafe {
        tiles.zero::<0>();
        tiles.zero::<1>();
        tiles.zero::<2>();
        tiles.zero::<3>();
    }
    for addresses in ahead.in_parts(steps) {
        for address in addresses {
            fetch(*address);
        }
        // SAFETY: the caller promised this many steps. A tile of A is 16 whole rows; those of B lie side by side.
        unsafe {
            tiles.load::<4>(a, STEP * WORD);
            tiles.load::<6>(b, LINES * WORD);
            tiles.multiply::<0, 4, 6>();
            tiles.load::<7>(b.add(COLUMNS), LINES * WORD);
            tiles.multiply::<1, 4, 7>();
            tiles.load::<5>(a.add(ROWS * STEP), STEP * WORD);
            tiles.multiply::<2, 5, 6>();
            tiles.multiply::<3, 5, 7>();
            a = a.add(LINES * STEP);
            b = b.add(LINES * STEP);
        }
    }
    let sums = tile.0[..LINES * LINES].as_mut_ptr();
    // SAFETY: the tile has room for 32 × 32 floats.
    unsafe {
        tiles.store::<0>(sums, LINES * WORD);
        tiles.store::<1>(sums.add(COLUMNS), LINES * WORD);
        tiles.store::<2>(sums.add(ROWS * LINES), LINES * WORD);
        tiles.store::<3>(sums.add(ROWS * LINES + COLUMNS), LINES * WORD);
    }
}
