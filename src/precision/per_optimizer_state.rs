//! The state of each optimizer since the last update, for several optimizers that share one [`GradScaler`].
//!
//! The states are PyTorch's: `Ready → Unscaled → Stepped`. Any other order is a mistake in the training loop and an
//! error. The overflow checks of all optimizers are combined for [`GradScaler::update`]:
//! `scaler.update(!states.finish()?)`.
//!
//! [`GradScaler`]: super::GradScaler
//! [`GradScaler::update`]: super::GradScaler::update

use std::collections::BTreeMap;

use crate::{Error, Result};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OptState {
    Unscaled,
    Stepped,
}

/// State and overflow of every optimizer that is not `Ready`, by an `Id` that the caller chooses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PerOptimizerState<Id = usize> {
    checked: BTreeMap<Id, (OptState, bool)>,
}

impl<Id> Default for PerOptimizerState<Id> {
    fn default() -> Self {
        Self { checked: BTreeMap::new() }
    }
}

impl<Id: Ord> PerOptimizerState<Id> {
    /// Makes every optimizer `Ready`.
    pub fn new() -> Self {
        Self::default()
    }

    /// `Ready → Unscaled`: the gradients of `optimizer` were unscaled; `found_inf` if any was not finite.
    ///
    /// # Errors
    /// A second call before the next update, which would divide by the scale twice.
    pub fn record_unscale(&mut self, optimizer: Id, found_inf: bool) -> Result<()> {
        match self.checked.get(&optimizer) {
            None => {
                self.checked.insert(optimizer, (OptState::Unscaled, found_inf));
                Ok(())
            }
            Some((OptState::Unscaled, _)) => {
                misuse("`unscale` was already called on this optimizer since the last `update`")
            }
            Some((OptState::Stepped, _)) => {
                misuse("`unscale` was called after `step`; call it before `step`, or call `update` first")
            }
        }
    }

    /// Whether `step` still has to unscale this optimizer's gradients.
    pub fn is_ready(&self, optimizer: &Id) -> bool {
        !self.checked.contains_key(optimizer)
    }

    /// `Unscaled → Stepped`: returns whether the optimizer may run, which is if no overflow was found.
    ///
    /// # Errors
    /// Its gradients were not checked, or it has stepped since the last update.
    pub fn record_step(&mut self, optimizer: &Id) -> Result<bool> {
        match self.checked.get_mut(optimizer) {
            None => misuse("no gradient of this optimizer was checked, because none of its parameters has a gradient"),
            Some((OptState::Stepped, _)) => {
                misuse("`step` was already called on this optimizer since the last `update`")
            }
            Some((state, found_inf)) => {
                *state = OptState::Stepped;
                Ok(!*found_inf)
            }
        }
    }

    /// Returns whether any optimizer found an overflow, and makes every optimizer `Ready` again.
    ///
    /// # Errors
    /// No gradient was checked since the last call.
    pub fn finish(&mut self) -> Result<bool> {
        if self.checked.is_empty() {
            return misuse(
                "`update` was called without any gradient checked since the last one; call `step` or `unscale` first",
            );
        }
        let found_inf = self.checked.values().any(|(_, found_inf)| *found_inf);
        self.checked.clear();
        Ok(found_inf)
    }

    /// Makes every optimizer `Ready` again regardless of overflows, for `update(new_scale)`.
    pub fn clear(&mut self) {
        self.checked.clear();
    }
}

fn misuse<T>(what: &str) -> Result<T> {
    Err(Error::Scaler(what.into()))
}
