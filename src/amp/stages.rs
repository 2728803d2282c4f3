//! The stage of each optimizer since the last update, for several optimizers that share a scaler.
//!
//! The stages are PyTorch's: `Ready → Unscaled → Stepped`. Any other order is a mistake in the training loop and an
//! error.

use super::OptimizerId;
use crate::{Error, Result};
use std::collections::BTreeMap;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Unscaled,
    Stepped,
}

/// Stage and overflow of every optimizer that is not `Ready`.
#[derive(Debug, Clone, Default)]
pub(super) struct Stages(BTreeMap<OptimizerId, (Stage, bool)>);

impl Stages {
    /// `Ready → Unscaled`: the gradients of `optimizer` were unscaled; `found_inf` if any was not finite. A second call
    /// before the next update is an error, because it would divide by the scale twice.
    pub(super) fn record_unscale(&mut self, optimizer: OptimizerId, found_inf: bool) -> Result<()> {
        match self.0.get(&optimizer) {
            None => {
                self.0.insert(optimizer, (Stage::Unscaled, found_inf));
                Ok(())
            }
            Some((Stage::Unscaled, _)) => {
                misuse("`unscale` was already called on this optimizer since the last `update`")
            }
            Some((Stage::Stepped, _)) => {
                misuse("`unscale` was called after `step`; call it before `step`, or call `update` first")
            }
        }
    }

    /// Whether `step` still has to unscale this optimizer's gradients.
    pub(super) fn is_ready(&self, optimizer: OptimizerId) -> bool {
        !self.0.contains_key(&optimizer)
    }

    /// `Unscaled → Stepped`: returns whether the optimizer may run, which is if no overflow was found.
    pub(super) fn record_step(&mut self, optimizer: OptimizerId) -> Result<bool> {
        match self.0.get_mut(&optimizer) {
            None => misuse("no gradient of this optimizer was checked, because none of its parameters has a gradient"),
            Some((Stage::Stepped, _)) => misuse("`step` was already called on this optimizer since the last `update`"),
            Some((stage, found_inf)) => {
                *stage = Stage::Stepped;
                Ok(!*found_inf)
            }
        }
    }

    /// Returns whether any optimizer found an overflow, and makes every optimizer `Ready` again.
    pub(super) fn finish(&mut self) -> Result<bool> {
        if self.0.is_empty() {
            return misuse(
                "`update` was called without any gradient checked since the last one; call `step` or `unscale` first",
            );
        }
        Ok(std::mem::take(&mut self.0).into_values().any(|(_, found_inf)| found_inf))
    }

    /// Makes every optimizer `Ready` again regardless of overflows, for `update(new_scale)`.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

fn misuse<T>(what: &str) -> Result<T> {
    Err(Error::Scaler(what.into()))
}
