//! AMX: 32 × 32 sums in four tiles, from two tiles of A and two of B.
//!
//! A step is 32 elements of depth: four loads of about 8 cycles each, hidden by four tile products of 16 cycles. Both
//! tiles of A share one register: an Emerald Rapids takes 16.4 cycles per product with one or two registers, but
//! some of its cores are slow for seconds at a time, and then take 50 cycles with one register and 72 with two.

use super::{PrefetchQueue, Tile};
use crate::amx::{COLUMNS, ROWS, TileUnit};
use crate::matmul::pack::fetch;
use std::slice::from_raw_parts;

/// Lines in a panel, of A and of B.
pub(super) const LINES: usize = 2 * ROWS;
/// Words of a line in a step.
const STEP: usize = COLUMNS;

/// A's units are rows of tiles, B's columns of tiles. `HALF` omits the second half of the rows.
///
/// # Safety
/// `T`'s tiles must be configured on this thread; `a` and `b` must have 32 lines of `words` words.
pub(super) unsafe fn bf16<T: TileUnit, const HALF: bool>(
    words: usize,
    a: *const u32,
    b: *const u32,
    ahead: &PrefetchQueue,
    tile: &mut Tile,
) {
    // SAFETY: the caller's promise.
    let (a, b, mut tiles) = unsafe {
        (from_raw_parts(a, LINES * words).as_chunks(), from_raw_parts(b, LINES * words).as_chunks(), T::new())
    };
    let steps: (&[[u32; LINES * STEP]], &[[u32; LINES * STEP]]) = (a.0, b.0);
    tiles.zero::<0>();
    tiles.zero::<1>();
    tiles.zero::<2>();
    tiles.zero::<3>();
    for (addresses, (a, b)) in ahead.in_parts(steps.0.len()).zip(steps.0.iter().zip(steps.1)) {
        for address in addresses {
            fetch(*address);
        }
        // A tile of A is 16 whole rows; the rows of B are side by side.
        tiles.load::<4>(a, STEP);
        tiles.load::<6>(b, LINES);
        tiles.multiply::<0, 4, 6>();
        tiles.load::<7>(&b[COLUMNS..], LINES);
        tiles.multiply::<1, 4, 7>();
        if !HALF {
            tiles.load::<4>(&a[ROWS * STEP..], STEP);
            tiles.multiply::<2, 4, 6>();
            tiles.multiply::<3, 4, 7>();
        }
    }
    let sums = &mut tile.0[..LINES * LINES];
    tiles.store::<0>(sums, LINES);
    tiles.store::<1>(&mut sums[COLUMNS..], LINES);
    if HALF {
        return;
    }
    tiles.store::<2>(&mut sums[ROWS * LINES..], LINES);
    tiles.store::<3>(&mut sums[ROWS * LINES + COLUMNS..], LINES);
}
