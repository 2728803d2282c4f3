//! `state.json`: everything besides tensors that a run needs to resume bit for bit.

use crate::data::DataPosition;
use crate::precision::{Fp8State, PrecisionUnit, ScalerState, UnitRecord};
use crate::telemetry::float;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The version of the layout and of [`State`] and [`Manifest`](super::Manifest) that this program writes, the only one
/// that it reads.
pub const FORMAT_VERSION: u32 = 3;

/// Maximum size of the file. Completions for later steps, about 100 bytes per token, are its largest part.
pub(super) const MAX_BYTES: u64 = 128 << 20;

/// The figures of a run after a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// [`FORMAT_VERSION`] of the program that wrote it.
    pub format_version: u32,
    /// Steps attempted.
    pub step: u64,
    /// Steps applied, counted by Adam's bias correction and the schedule.
    pub updates: u64,
    /// Target tokens seen.
    pub tokens: u64,
    /// The seed of every random stream.
    pub seed: u64,
    /// The settings that must not change when a run is resumed.
    pub fingerprint: Fingerprint,
    /// The base that adapters were trained over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<Base>,
    /// The loss scaler's state.
    pub scaler: ScalerState,
    /// The layers that overflowed recently or compute in a wider type.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub fallback: BTreeMap<PrecisionUnit, UnitRecord>,
    /// The states of blocks in simulated FP8.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fp8: Vec<Fp8State>,
    /// The parameters whose gradients have contained FP16's smallest magnitude, 2^-24, so that each is logged once.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub underflowed_params: BTreeSet<String>,
    /// SHA-256 of the weights of the objective's reference.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<String>,
    /// Sampled completions that the next steps use too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollouts: Option<Value>,
    /// The start of the next training batch.
    pub data_position: DataPosition,
    /// The schedule's settings that the run has used so far.
    pub schedule: Value,
    /// Validation loss at this step, if it was measured, in nats per token.
    #[serde(default, with = "float::optional")]
    pub validation_loss: Option<f64>,
    /// The best validation so far.
    pub best: Option<Best>,
    /// Validations since then, counted for early stopping.
    pub early_stopping_counter: u64,
}

/// The best validation of a run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Best {
    /// The step it was measured after.
    pub step: u64,
    /// In nats per token.
    pub loss: f64,
}

/// The frozen base of adapters, which a checkpoint does not contain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Base {
    /// The model as the user named it.
    pub name: String,
    /// The commit of the Hub's files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    /// SHA-256 of its values in FP32, in the order of their names.
    pub sha256: String,
}

/// Properties that must not change between a run and its resumption.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fingerprint {
    /// The model's name, with its revision if it has one.
    pub model: String,
    /// The precision policy in its text form.
    pub policy: String,
    /// A hash of tokenizer and text.
    pub data: String,
}

impl State {
    /// Rejects a `wanted` fingerprint that differs from the saved one. Fails with [`Error::Checkpoint`] about `path`
    /// that names the field with both values.
    pub fn check_fingerprint(&self, wanted: &Fingerprint, path: &Path) -> Result<()> {
        let saved = &self.fingerprint;
        if saved.data != wanted.data {
            let message = "the training text or the tokenizer has changed since this run began; restore the old files, or start a \
                           new run";
            return Err(Error::checkpoint(path, message));
        }
        for (field, saved, wanted) in
            [("model", &saved.model, &wanted.model), ("policy", &saved.policy, &wanted.policy)]
        {
            if saved != wanted {
                return Err(Error::checkpoint(
                    path,
                    format!(
                        "`{field}` was `{saved}` and is now `{wanted}`; resume with the old value, or start a new run"
                    ),
                ));
            }
        }
        Ok(())
    }

    /// Reads the text of a `state.json`.
    pub(super) fn from_json(text: &[u8]) -> Result<Self, String> {
        check_version(text)?;
        serde_json::from_slice(text).map_err(|error| error.to_string())
    }
}

/// Reads only `format_version`, because another format may have different fields.
pub(super) fn format_version(text: &[u8]) -> Result<u32, String> {
    #[derive(Deserialize)]
    struct Version {
        format_version: u32,
    }
    match serde_json::from_slice(text).map_err(|error| format!("damaged: {error}"))? {
        Version { format_version: 0 } => Err("damaged: format version 0 does not exist".into()),
        Version { format_version } => Ok(format_version),
    }
}

/// Fails unless the text is of the format that this program reads.
pub(super) fn check_version(text: &[u8]) -> Result<(), String> {
    match format_version(text)? {
        FORMAT_VERSION => Ok(()),
        older if older < FORMAT_VERSION => Err(format!(
            "format version {older} is older than {FORMAT_VERSION}, the only one this program reads; start a new \
             run, whose `--model` may be this checkpoint"
        )),
        newer => Err(format!(
            "format version {newer} is newer than {FORMAT_VERSION}, the only one this program reads; update the program"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn state(validation_loss: f64) -> State {
        let fingerprint = Fingerprint { model: "tiny".into(), policy: "p=f32".into(), data: "abc".into() };
        State {
            format_version: FORMAT_VERSION,
            step: 128,
            updates: 127,
            tokens: 1 << 40,
            seed: u64::MAX,
            fingerprint,
            scaler: ScalerState {
                scale: 65536.0,
                growth_tracker: 7,
                hysteresis_left: 1,
                min_scale_streak: 0,
                headroom: None,
            },
            fallback: BTreeMap::from([(
                PrecisionUnit::Block(1),
                UnitRecord { since: Some(9), ..UnitRecord::default() },
            )]),
            fp8: Vec::new(),
            underflowed_params: BTreeSet::new(),
            base: None,
            reference: None,
            rollouts: None,
            data_position: DataPosition { epoch: 1, row: 2, sorted_for: 8 },
            schedule: Value::Null,
            validation_loss: Some(validation_loss),
            best: Some(Best { step: 64, loss: validation_loss }),
            early_stopping_counter: 3,
        }
    }

    #[test]
    fn a_changed_fingerprint_names_the_field() {
        let state = state(1.0);
        state.check_fingerprint(&state.fingerprint, Path::new("x")).unwrap();
        let wanted = Fingerprint { policy: "p=f32,c=bf16".into(), ..state.fingerprint.clone() };
        let message = state.check_fingerprint(&wanted, Path::new("x")).unwrap_err().to_string();
        assert!(message.contains("`policy` was `p=f32` and is now `p=f32,c=bf16`"), "{message}");
    }

    #[test]
    fn another_format_is_rejected_before_its_fields_are_read() {
        let message = State::from_json(br#"{"format_version": 1, "qubits": 7}"#).unwrap_err();
        assert!(message.contains("format version 1 is older than 3"), "{message}");
        let message = State::from_json(br#"{"format_version": 4, "qubits": 7}"#).unwrap_err();
        assert!(message.contains("format version 4 is newer than 3"), "{message}");
        let message = State::from_json(br#"{"format_version": 3, "qubits": 7}"#).unwrap_err();
        assert!(message.contains("unknown field `qubits`"), "{message}");
    }

    #[test]
    fn a_validation_loss_that_is_no_number_comes_back() {
        let stored = State { validation_loss: Some(f64::NAN), ..state(2.5) };
        let json = serde_json::to_vec(&stored).unwrap();
        assert!(State::from_json(&json).unwrap().validation_loss.unwrap().is_nan());
        let without = State { validation_loss: None, ..stored };
        assert_eq!(State::from_json(&serde_json::to_vec(&without).unwrap()).unwrap(), without);
    }

    proptest! {
        #[test]
        fn every_number_comes_back_bit_for_bit(bits in any::<u64>()) {
            let loss = f64::from_bits(bits);
            prop_assume!(loss.is_finite());
            let json = serde_json::to_vec(&state(loss)).unwrap();
            let read = State::from_json(&json).unwrap();
            prop_assert_eq!(read.validation_loss.unwrap().to_bits(), bits);
            prop_assert_eq!(read, state(loss));
        }

        #[test]
        fn any_text_is_parsed_or_rejected(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = State::from_json(&bytes);
        }
    }
}
