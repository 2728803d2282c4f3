//! Exports a run to TensorBoard: scalars and histograms of the gradients, as an event file.
//!
//! An event file is a sequence of records (TFRecord: length, its checksum, data, their checksum), each a protobuf
//! message `Event` of TensorFlow's `event.proto` and `summary.proto`. `tests/cli/metrics_export.rs` reads them back
//! with TensorBoard itself.

use super::emitter::{Sink, wall_clock};
use super::{Event, GradStats, ObjectiveMetrics, Record, StepRecord};
use crate::protobuf::Message;
use crate::{Error, Result};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Writes a run's records as an event file.
#[derive(Debug)]
pub struct TensorBoard {
    path: PathBuf,
    file: File,
}

impl TensorBoard {
    /// Creates a new event file in `folder`, and the folder if needed. Each process of a run writes its own file;
    /// TensorBoard reads all files of a folder as one run.
    pub fn create(folder: &Path) -> Result<Self> {
        let t = wall_clock();
        std::fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
        // TensorBoard recognizes event files by this name and reads them in the order of their times.
        let name = |number: u32| folder.join(format!("events.out.tfevents.{:010}.finetune.{number}", t / 1000));
        let path = (0..u32::MAX).map(name).find(|path| !path.exists()).unwrap_or_else(|| name(u32::MAX));
        let file = File::create_new(&path).map_err(Error::io("create", &path))?;
        let mut board = Self { path, file };
        board.append(&event(t, 0).put(3, "brain.Event:2"))?;
        Ok(board)
    }

    /// The path of the event file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn append(&mut self, event: &Message) -> Result<()> {
        let event = event.bytes();
        let length = (event.len() as u64).to_le_bytes();
        let record =
            [&length, &masked_crc(&length).to_le_bytes()[..], event, &masked_crc(event).to_le_bytes()].concat();
        self.file.write_all(&record).map_err(Error::io("write", &self.path))
    }

    /// Appends an `Event` with a `Summary` of values.
    fn summary(&mut self, t: u64, step: u64, values: &[Message]) -> Result<()> {
        let summary = Message::default().each(values, |summary, value| summary.message(1, value));
        self.append(&event(t, step).message(5, &summary))
    }

    fn step(&mut self, t: u64, step: &StepRecord) -> Result<()> {
        let mut values = Vec::new();
        let mut scalar = |tag: &str, value: f64| values.push(self::scalar(tag, value));
        scalar("loss/train", f64::from(step.loss));
        scalar("loss_scale/log2", f64::from(step.loss_scale).log2());
        scalar("loss_scale/skipped_steps", step.skipped as f64);
        scalar("optimizer/lr", step.lr);
        scalar("optimizer/grad_norm", step.grad_norm);
        scalar("performance/tokens_per_s", step.tokens_per_s);
        scalar("performance/step_ms", step.time.step_ms);
        if let Some(rss) = step.rss_bytes {
            scalar("performance/resident_bytes", rss as f64);
        }
        for (name, value) in step.objective.iter().flat_map(ObjectiveMetrics::named) {
            scalar(name, value);
        }
        let grads = &step.grads;
        for (tag, part) in [("gradients/zero_share", grads.zero), ("gradients/subnormal_share", grads.subnormal)] {
            if let Some(share) = grads.share(part) {
                scalar(tag, share);
            }
        }
        if grads.count > 0 {
            scalar("gradients/not_finite", grads.not_finite() as f64);
        }
        if let Some(counts) = &step.lost_updates {
            if let Some(share) = counts.reach() {
                scalar("updates/reach_share", share);
            }
            if let Some(ulps) = counts.mean_ulps() {
                scalar("updates/mean_distance_ulps", ulps);
            }
        }
        if let Some(p1) = step.log2_grad_p1() {
            scalar("gradients/log2_p1_unscaled", p1);
        }
        if !grads.exponents.is_empty() {
            values.push(histogram("gradients/log2_abs_scaled", grads));
        }
        for tensor in step.tensors.iter().filter(|tensor| !tensor.stats.exponents.is_empty()) {
            let tag = format!("gradients_log2_abs_scaled/{}", tensor.name);
            values.push(histogram(&tag, &tensor.stats));
        }
        self.summary(t, step.step, &values)
    }
}

impl Sink for TensorBoard {
    fn write(&mut self, record: &Record) -> Result<()> {
        match &record.event {
            Event::Started(started) => {
                let step = started.resumed_from.unwrap_or(0);
                // A session start makes TensorBoard drop earlier data of this step and later ones, also of an earlier
                // export.
                self.append(&event(record.t, step + 1).message(7, &Message::default().int(1, 1)))
            }
            Event::Step(step) => self.step(record.t, step),
            Event::Eval(eval) => {
                let mut values = vec![scalar("loss/validation", eval.loss)];
                values.extend(eval.perplexity().map(|perplexity| scalar("perplexity/validation", perplexity)));
                let metrics = eval.objective.iter().flat_map(ObjectiveMetrics::named);
                values.extend(metrics.map(|(name, value)| scalar(&format!("eval_{name}"), value)));
                self.summary(record.t, eval.step, &values)
            }
            Event::Fp32Probe(probe) => {
                let figures = [
                    ("probe/log2_min", probe.log2_min()),
                    ("probe/flushed_share", probe.flushed_share()),
                    ("probe/experts", probe.experts),
                ];
                let values = figures.into_iter().filter_map(|(tag, value)| Some(scalar(tag, value?)));
                self.summary(record.t, probe.step, &values.collect::<Vec<_>>())
            }
            _ => Ok(()),
        }
    }

    fn name(&self) -> &'static str {
        "TensorBoard"
    }
}

/// An `Event` at time `t`, in wall-clock milliseconds, and a step.
fn event(t: u64, step: u64) -> Message {
    Message::default().double(1, t as f64 / 1000.0).int(2, step as i64)
}

/// A `Summary.Value` of one number.
fn scalar(tag: &str, value: f64) -> Message {
    Message::default().put(1, tag).float(2, value as f32)
}

/// A `Summary.Value` of a histogram over log2 of the magnitudes, one bucket per binade, without zeros and values that
/// are not finite.
fn histogram(tag: &str, grads: &GradStats) -> Message {
    let binades = || grads.exponents.iter().map(|(exponent, count)| (f64::from(*exponent), *count as f64));
    let sum = |value: fn(f64) -> f64| binades().map(|(low, count)| value(low + 0.5) * count).sum::<f64>();
    let low = binades().next().map_or(0.0, |(low, _)| low);
    let high = binades().next_back().map_or(0.0, |(low, _)| low + 1.0);
    // Add empty binades in between, so that every bucket has width 1.
    let (mut limits, mut counts) = (Vec::new(), Vec::new());
    let mut next = low;
    for (binade, count) in binades() {
        while next < binade {
            next += 1.0;
            limits.push(next);
            counts.push(0.0);
        }
        next = binade + 1.0;
        limits.push(next);
        counts.push(count);
    }
    let histogram = Message::default()
        .double(1, low)
        .double(2, high)
        .double(3, sum(|_| 1.0))
        .double(4, sum(|middle| middle))
        .double(5, sum(|middle| middle * middle))
        .doubles(6, &limits)
        .doubles(7, &counts);
    Message::default().put(1, tag).message(5, &histogram)
}

/// The checksum of TFRecords: CRC-32C, rotated and offset so that it stays robust on data that contains checksums.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32 with Castagnoli's polynomial.
fn crc32c(bytes: &[u8]) -> u32 {
    const TABLE: [u32; 256] = {
        let mut table = [0u32; 256];
        let mut byte = 0;
        while byte < 256 {
            let mut value = byte as u32;
            let mut bit = 0;
            while bit < 8 {
                value = if value & 1 == 1 { value >> 1 ^ 0x82f6_3b78 } else { value >> 1 };
                bit += 1;
            }
            table[byte] = value;
            byte += 1;
        }
        table
    };
    !bytes.iter().fold(!0, |crc, byte| crc >> 8 ^ TABLE[usize::from(crc as u8 ^ byte)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_that_of_rfc_3720() {
        // RFC 3720, B.4, and the check value of the catalogue of CRCs.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }
}
