//! Weights whose panels are kept while they do not change: for a few rows, packing a matrix takes longer than the
//! product.

use super::super::view::read;
use super::Operand;
use super::buffer::PackBuffer;
use candle_core::Tensor;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// Address of the first element, then rows, columns and both strides.
type PackedKey = [usize; 5];

/// The matrices that may be kept, by address, and the panels of those that were multiplied.
#[derive(Debug, Default)]
struct Prepacked {
    addresses: BTreeSet<usize>,
    panels: BTreeMap<PackedKey, Rc<PackBuffer>>,
}

thread_local! {
    static PREPACKED: RefCell<Prepacked> = const {
        RefCell::new(Prepacked { addresses: BTreeSet::new(), panels: BTreeMap::new() })
    };
}

/// Runs `body`; until it ends, each product that this thread begins packs its right operand only once if that is one of
/// `weights`. Their values must not change meanwhile. Bits do not change. Panels take as much memory as the weights.
pub fn with_packed<'a, R>(weights: impl Iterator<Item = &'a Tensor>, body: impl FnOnce() -> R) -> R {
    /// Puts the outer scope's panels back.
    struct Outer(Prepacked);
    impl Drop for Outer {
        fn drop(&mut self) {
            PREPACKED.with_borrow_mut(|current| std::mem::swap(current, &mut self.0));
        }
    }
    let inner = Prepacked { addresses: weights.filter_map(address).collect(), panels: BTreeMap::new() };
    let _outer = Outer(PREPACKED.replace(inner));
    body()
}

/// The address of a tensor's first element in the CPU's memory.
fn address(tensor: &Tensor) -> Option<usize> {
    Some(read(tensor).ok()?.view().bytes().as_ptr() as usize)
}

/// Passes `body` the panels of `b`, of `words` words, if they are kept. `pack` writes them the first time.
pub(super) fn with_panels<T, R>(
    b: Operand<'_, T>,
    words: usize,
    pack: impl FnOnce(&mut [u32]),
    body: impl FnOnce(Option<&[u32]>) -> R,
) -> R {
    let key = [b.data.as_ptr() as usize, b.rows, b.cols, b.row_stride, b.col_stride];
    let found = PREPACKED.with_borrow(|all| all.addresses.contains(&key[0]).then(|| all.panels.get(&key).cloned()));
    let Some(kept) = found else { return body(None) };
    let panels = kept.unwrap_or_else(|| {
        let mut panels = PackBuffer::new();
        pack(panels.words(words));
        let panels = Rc::new(panels);
        PREPACKED.with_borrow_mut(|all| all.panels.insert(key, panels.clone()));
        panels
    });
    body(Some(panels.filled(words)))
}
