//! Whether products in AMX's tiles are right on this CPU.
//!
//! No CPU with AMX has run them in development, only a model of the tiles in tests. So the program starts itself again before it
//! uses them ([`serve`]): a process of its own compares some products with sums in f64. If it fails, crashes or does not end, the
//! widest other instruction set is used.

use super::micro::MicroKernel;
use super::{Epilogue, Operand, matmul_on};
use crate::engine::kernels::isa::Isa;
use crate::random::{Domain, Stream};
use crate::untrusted::apart;
use half::bf16;
use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::Duration;

/// The first argument that makes the program call [`serve`].
pub(crate) const ARGUMENT: &str = "__tiles";
/// For the other process.
const LIMIT: Duration = Duration::from_secs(10);
/// Rows, depth and columns: within a tile, over its end, and deeper than sums stay in tiles.
const SHAPES: [[usize; 3]; 4] = [[33, 70, 40], [5, 31, 17], [64, 768, 96], [35, 3200, 33]];

/// Whether the products passed in another process. The first call starts it.
pub(crate) fn passed() -> bool {
    static PASSED: OnceLock<bool> = OnceLock::new();
    *PASSED.get_or_init(|| {
        let child = apart::command(ARGUMENT).and_then(|mut command| command.spawn().ok());
        let status = child.and_then(|mut child| apart::wait(&mut child, LIMIT).ok().flatten());
        status.is_some_and(|status| status.success())
    })
}

/// Compares products in tiles with sums in f64.
pub(crate) fn serve() -> ExitCode {
    let right = Isa::Amx.is_supported() && is_right(MicroKernel::of::<bf16>(Isa::Amx));
    if right { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn is_right(kernel: MicroKernel) -> bool {
    SHAPES.into_iter().enumerate().all(|(salt, [m, k, n])| {
        let (a, b) = (numbers(2 * salt, m * k), numbers(2 * salt + 1, k * n));
        // As in a forward pass, and as in a weight's gradient.
        [Operand::new(&a, m, k), Operand::new(&a, k, m).transposed()].into_iter().all(|left| {
            let right = Operand::new(&b, k, n);
            let mut c = vec![f32::NAN; m * n];
            matmul_on(kernel, left, right, None, &mut c, n, Epilogue::default());
            c.iter().enumerate().all(|(at, &found)| {
                let terms = || (0..k).map(|i| element(left, at / n, i) * element(right, i, at % n));
                let (exact, sizes) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
                (f64::from(found) - exact).abs() <= sizes * k as f64 * f64::from(f32::EPSILON)
            })
        })
    })
}

fn element(operand: Operand<'_, bf16>, row: usize, column: usize) -> f64 {
    operand.data[row * operand.row_stride + column * operand.col_stride].to_f64()
}

/// Numbers between -1 and 1.
fn numbers(salt: usize, len: usize) -> Vec<bf16> {
    let stream = Stream::new(1, Domain::Bench);
    let words = (0..len.div_ceil(4)).flat_map(|block| stream.block(2, salt as u64, block as u32));
    words.take(len).map(|word| bf16::from_f32(word as f32 / 2_147_483_648.0 - 1.0)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::super::tiles::model::Model;
    use super::*;

    #[test]
    fn the_model_of_the_tiles_passes_and_other_products_do_not() {
        assert!(is_right(MicroKernel::in_tiles::<Model>()));
        // This program cannot be started as a process that tries the tiles.
        assert!(!passed());
        assert_eq!(serve() == ExitCode::SUCCESS, Isa::Amx.is_supported());
    }
}
