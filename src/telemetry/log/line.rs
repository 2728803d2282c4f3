//! Parses one line of the log, or only the part of it that a reader needs.

use crate::telemetry::event::{Event, Record, StepRecord, StepStatus};

/// Whether a line is a step's with the table of tensors, which is its last field. Other events have tables, too.
pub(super) fn has_table(line: &[u8]) -> bool {
    line.ends_with(b"]}") && step_head(line).is_some()
}

/// A step's line without the table of tensors; `None` for any other line.
pub(super) fn without_table(line: &[u8]) -> Option<String> {
    let (fields, _) = std::str::from_utf8(line).ok()?.split_once(",\"tensors\":[").filter(|_| has_table(line))?;
    Some(format!("{fields}}}"))
}

/// Whether a line may be a record of this kind, which is not a step.
pub(super) fn may_be(kind: &str, line: &[u8]) -> bool {
    // Other programs may write the fields in another order, so the kind may be anywhere.
    step_head(line).is_none() && std::str::from_utf8(line).is_ok_and(|line| line.contains(kind))
}

/// The number of a step from its line; `None` for any other line.
pub(super) fn step_of(line: &[u8]) -> Option<u64> {
    step_head(line)?.3.number("step")
}

/// Parses a line. Steps, which are nearly all of a log, are parsed without [`Event`], whose fields serde buffers.
pub(super) fn parse(line: &[u8]) -> Option<Record> {
    let step = || {
        let (v, t, s, _) = step_head(line)?;
        let step = serde_json::from_slice(line).ok()?;
        Some(Record { v, t, s, event: Event::Step(step) })
    };
    step().or_else(|| serde_json::from_slice(line).ok())
}

/// Version, times and the rest of a step's line as [`Event`] writes it; `None` for any other line.
fn step_head(line: &[u8]) -> Option<(u32, u64, f64, Fields<'_>)> {
    let line = &line[..line.len().min(512)];
    let mut fields = Fields(std::str::from_utf8(line).ok()?.strip_prefix('{')?);
    let v = fields.number("v")?;
    let t = fields.number("t")?;
    let s = fields.number::<f64>("s").filter(|s| s.is_finite())?;
    (fields.text("event")? == "\"step\"").then_some((v, t, s, fields))
}

/// Parses the leading fields of a step's line. `None` for any other line, which must be read in full.
pub(super) fn skim(line: &[u8]) -> Option<Record> {
    let (v, t, s, mut fields) = step_head(line)?;
    let step = StepRecord {
        step: fields.number("step")?,
        loss: fields.number("loss")?,
        loss_scale: fields.number("loss_scale")?,
        outcome: match fields.text("outcome")? {
            "\"applied\"" => StepStatus::Applied,
            "\"skipped\"" => StepStatus::Skipped,
            _ => return None,
        },
        grad_norm: fields.number("grad_norm")?,
        tokens: fields.number("tokens")?,
        tokens_per_s: fields.number("tokens_per_s")?,
        updates: fields.number("updates")?,
        skipped: fields.number("skipped")?,
        ..StepRecord::default()
    };
    Some(Record { v, t, s, event: Event::Step(Box::new(step)) })
}

/// The rest of a line, whose fields are parsed in the order they were written.
struct Fields<'a>(&'a str);

impl<'a> Fields<'a> {
    fn text(&mut self, key: &str) -> Option<&'a str> {
        let value = self.0.strip_prefix('"')?.strip_prefix(key)?.strip_prefix("\":")?;
        let (value, rest) = value.split_once(',')?;
        self.0 = rest;
        Some(value)
    }

    fn number<T: std::str::FromStr>(&mut self, key: &str) -> Option<T> {
        // "NaN" and "inf" are quoted in JSON; Rust parses them without quotes.
        self.text(key)?.trim_matches('"').parse().ok()
    }
}
