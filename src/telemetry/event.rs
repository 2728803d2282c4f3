//! The events of a run: one [`Record`] is one line of `events.jsonl`.
//!
//! A line is a JSON object that begins `{"v":2,"t":…,"s":…,"event":"step",…}`. Within a version, fields are only added,
//! and missing fields read as their defaults, so old logs stay readable. Floats that are not finite are written as
//! strings (`"NaN"`, `"inf"`, `"-inf"`).
//!
//! Magnitudes and counts are taken from the *scaled* gradients, as the gradient dtype stores them, unless a field's
//! comment specifies another source.

mod gradients;
mod measurement;
mod objective;
mod outcome;
mod overflow;
mod started;
mod step;

pub use gradients::{GradMax, GradStats, GradVariance, TensorRecord, UnderflowOnset};
pub use measurement::{ActivationMax, FlushedTensor, Fp32Probe, SampleText, Validation};
pub use objective::{ObjectiveMetric, ObjectiveMetrics};
pub use outcome::{CheckpointProof, CheckpointSaved, Diagnostic, FinishReason, Finished, ProcessRate, Throughput};
pub use overflow::{DtypeChange, FirstNonFinite, Overflow, Pass};
pub use started::{Cpu, ModelShape, ScalerSettings, Started};
pub use step::{GpuStats, ScaleCause, ScaleUpdate, StepRecord, StepStatus, StepTime};

use serde::{Deserialize, Serialize};

/// The version of the log's format, written as `v` on every line.
pub const VERSION: u32 = 2;

/// An event with its time: one line of the log.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Format version, [`VERSION`].
    pub v: u32,
    /// Wall clock, milliseconds since 1970-01-01 UTC.
    pub t: u64,
    /// Seconds the run has taken; continues over a resume, so it never decreases within a log.
    pub s: f64,
    /// The event.
    #[serde(flatten)]
    pub event: Event,
}

/// Something that happened in a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// A process began to train, from scratch or from a checkpoint.
    Started(Box<Started>),
    /// A step was attempted.
    Step(Box<StepRecord>),
    /// A step was skipped because gradients were not finite. Follows its `Step`.
    Overflow(Overflow),
    /// A layer changes its compute dtype, starting with the next step. Follows the `Step` that caused it.
    DtypeChange(DtypeChange),
    /// The variance of each layer's gradient.
    GradVariance(GradVariance),
    /// The largest gradient of each layer.
    GradMax(GradMax),
    /// Gradients that reached FP16's smallest magnitude for the first time.
    UnderflowOnset(UnderflowOnset),
    /// The validation loss was computed.
    Eval(Validation),
    /// Text was generated.
    Sample(SampleText),
    /// A batch's backward pass was repeated in FP32.
    Fp32Probe(Box<Fp32Probe>),
    /// A checkpoint was written.
    CheckpointSaved(CheckpointSaved),
    /// The speed of each process of a distributed run.
    Throughput(Throughput),
    /// A phase between two steps began that may be slow. The next event ends it.
    Phase {
        /// Steps attempted so far.
        step: u64,
        /// The name of the phase, such as "evaluating".
        what: String,
    },
    /// Training paused on request.
    Paused {
        /// Steps attempted so far.
        step: u64,
    },
    /// Training continued after a pause.
    Resumed {
        /// Steps attempted so far.
        step: u64,
    },
    /// A problem that does not end the run.
    Warning(Diagnostic),
    /// Training diverged; a `Finished` follows.
    Diverged(Diagnostic),
    /// The process stopped training.
    Finished(Finished),
}

impl Event {
    /// The step it belongs to; `None` for `Started`.
    pub fn step(&self) -> Option<u64> {
        Some(match self {
            Self::Started(_) => return None,
            Self::Step(step) => step.step,
            Self::Overflow(overflow) => overflow.step,
            Self::DtypeChange(retyped) => retyped.step,
            Self::GradVariance(variances) => variances.step,
            Self::GradMax(maxima) => maxima.step,
            Self::UnderflowOnset(touched) => touched.step,
            Self::Eval(eval) => eval.step,
            Self::Sample(sample) => sample.step,
            Self::Fp32Probe(probe) => probe.step,
            Self::CheckpointSaved(saved) => saved.step,
            Self::Throughput(processes) => processes.step,
            Self::Phase { step, .. } | Self::Paused { step } | Self::Resumed { step } => *step,
            Self::Warning(diagnostic) | Self::Diverged(diagnostic) => diagnostic.step,
            Self::Finished(finished) => finished.step,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip(event: Event) -> (String, Record) {
        let line = serde_json::to_string(&Record { v: VERSION, t: 1, s: 0.5, event }).unwrap();
        let back = serde_json::from_str(&line).unwrap();
        (line, back)
    }

    #[test]
    fn a_line_begins_with_version_time_and_kind() {
        let (line, _) = round_trip(Event::Step(Box::new(StepRecord { step: 7, ..Default::default() })));
        assert!(line.starts_with(r#"{"v":2,"t":1,"s":0.5,"event":"step","step":7,"loss":0.0,"#), "{line}");
    }

    #[test]
    fn numbers_that_are_not_finite_survive() {
        for loss in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.1, 3.0] {
            let (line, back) = round_trip(Event::Step(Box::new(StepRecord { loss, ..Default::default() })));
            let Event::Step(step) = back.event else { panic!("{line}") };
            assert_eq!(step.loss.to_bits(), loss.to_bits(), "{line}");
            let val_loss = Some(f64::from(loss));
            let (line, back) = round_trip(Event::Finished(Finished { val_loss, ..Default::default() }));
            let Event::Finished(finished) = back.event else { panic!("{line}") };
            assert_eq!(finished.val_loss.map(f64::to_bits), val_loss.map(f64::to_bits), "{line}");
        }
        let (line, back) = round_trip(Event::Finished(Finished::default()));
        assert_eq!(back.event, Event::Finished(Finished::default()), "{line}");
    }

    #[test]
    fn nested_tables_round_trip() {
        let stats =
            GradStats { count: 9, min_abs: Some(6e-8), exponents: vec![(-24, 3), (2, 5)], ..Default::default() };
        let tensors = vec![TensorRecord { name: "wte.weight".into(), stats: stats.clone(), lost_updates: None }];
        let origin =
            FirstNonFinite { pass: Pass::Backward, layer: "h.0.attn".into(), samples: vec![1], ..Default::default() };
        for event in [
            Event::Step(Box::new(StepRecord { grads: stats, tensors, ..Default::default() })),
            Event::Finished(Finished { val_loss: Some(1.5), ..Default::default() }),
            Event::Overflow(Overflow { first_nonfinite: Some(origin), ..Default::default() }),
            Event::Paused { step: 3 },
        ] {
            assert_eq!(round_trip(event.clone()).1.event, event);
        }
    }

    #[test]
    fn fields_that_an_older_program_did_not_write_are_defaults() {
        let record: Record = serde_json::from_str(r#"{"v":2,"t":0,"s":0,"event":"step","step":3,"new":1}"#).unwrap();
        assert_eq!(record.event, Event::Step(Box::new(StepRecord { step: 3, ..Default::default() })));
    }
}
