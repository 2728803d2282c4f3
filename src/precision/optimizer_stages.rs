//! The stage of each optimizer since the last update, for several that share one [`GradScaler`].
//!
//! An optimizer goes `Ready → Unscaled → Stepped`; anything else is a mistake in the training loop and an error here. The
//! overflow checks of all optimizers are combined into the one that [`GradScaler::update`] takes:
//! `scaler.update(!stages.finish()?)`.
//!
//! [`GradScaler`]: super::GradScaler
//! [`GradScaler::update`]: super::GradScaler::update

use std::collections::BTreeMap;

use crate::{Error, Result};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Unscaled,
    Stepped,
}

/// Stage and overflow of every optimizer that is not `Ready`, by an `Id` that the caller chooses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OptimizerStages<Id = usize> {
    checked: BTreeMap<Id, (Stage, bool)>,
}

impl<Id> Default for OptimizerStages<Id> {
    fn default() -> Self {
        Self { checked: BTreeMap::new() }
    }
}

impl<Id: Ord> OptimizerStages<Id> {
    /// Every optimizer is `Ready`.
    pub fn new() -> Self {
        Self::default()
    }

    /// `Ready → Unscaled`: the gradients of `optimizer` were unscaled; `found_inf` if any was not finite. A second call before
    /// the next update is an error, because it would divide by the scale twice.
    pub fn record_unscale(&mut self, optimizer: Id, found_inf: bool) -> Result<()> {
        match self.checked.get(&optimizer) {
            None => {
                self.checked.insert(optimizer, (Stage::Unscaled, found_inf));
                Ok(())
            }
            Some((Stage::Unscaled, _)) => {
                misuse("`unscale` was already called on this optimizer since the last `update`")
            }
            Some((Stage::Stepped, _)) => misuse("`unscale` comes after `step`; call it before, or call `update` first"),
        }
    }

    /// Whether `step` still has to unscale this optimizer's gradients.
    pub fn is_ready(&self, optimizer: &Id) -> bool {
        !self.checked.contains_key(optimizer)
    }

    /// `Unscaled → Stepped`: returns whether the optimizer may run because no overflow was found. An error if its gradients were
    /// not checked, or it has stepped since the last update.
    pub fn record_step(&mut self, optimizer: &Id) -> Result<bool> {
        match self.checked.get_mut(optimizer) {
            None => misuse("no gradient of this optimizer was checked; none of its parameters has one"),
            Some((Stage::Stepped, _)) => misuse("`step` was already called on this optimizer since the last `update`"),
            Some((stage, found_inf)) => {
                *stage = Stage::Stepped;
                Ok(!*found_inf)
            }
        }
    }

    /// Returns whether any optimizer found an overflow, and makes every optimizer `Ready` again. An error if nothing was checked
    /// since the last call.
    pub fn finish(&mut self) -> Result<bool> {
        if self.checked.is_empty() {
            return misuse("`update` without any gradient checked since the last one; call `step` or `unscale` before");
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
