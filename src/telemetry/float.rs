//! Floats in JSON, which cannot represent NaN and infinities: they are written as the strings `"NaN"`, `"inf"`,
//! `"-inf"`.
//!
//! Use with `#[serde(with = "float")]`, with `#[serde(with = "float::optional")]` for an `Option<f64>`, and with
//! `#[serde(with = "float::list")]` for a `Vec<f32>`.

use serde::de::{Deserializer, Error, Unexpected, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use std::fmt::Formatter;

pub(crate) fn serialize<T: Copy + Into<f64> + Serialize, S: Serializer>(
    value: &T,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let wide: f64 = (*value).into();
    if wide.is_finite() { value.serialize(serializer) } else { serializer.collect_str(&wide) }
}

pub(super) fn deserialize<'de, T: FromF64, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    deserializer.deserialize_any(FloatVisitor).map(T::from_f64)
}

/// An FP32 or FP64 number.
pub(super) trait FromF64 {
    fn from_f64(value: f64) -> Self;
}

impl FromF64 for f32 {
    fn from_f64(value: f64) -> Self {
        value as f32
    }
}

impl FromF64 for f64 {
    fn from_f64(value: f64) -> Self {
        value
    }
}

/// Visits the value itself: an untagged enum would copy it first.
struct FloatVisitor;

impl Visitor<'_> for FloatVisitor {
    type Value = f64;

    fn expecting(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str("a number, \"NaN\", \"inf\" or \"-inf\"")
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<f64, E> {
        Ok(value)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<f64, E> {
        Ok(value as f64)
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<f64, E> {
        Ok(value as f64)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<f64, E> {
        match text {
            "NaN" => Ok(f64::NAN),
            "inf" => Ok(f64::INFINITY),
            "-inf" => Ok(f64::NEG_INFINITY),
            _ => Err(E::invalid_value(Unexpected::Str(text), &self)),
        }
    }
}

/// A number within another value.
#[derive(Serialize, Deserialize)]
#[serde(transparent, bound(serialize = "T: Copy + Into<f64> + Serialize", deserialize = "T: FromF64"))]
struct Float<T>(#[serde(with = "self")] T);

/// A number that may be missing: `null`.
pub(crate) mod optional {
    use super::Float;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[expect(clippy::ref_option, reason = "serde passes a reference to the field")]
    pub(crate) fn serialize<S: Serializer>(value: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
        value.map(Float).serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
        Ok(Option::<Float<f64>>::deserialize(deserializer)?.map(|Float(value)| value))
    }
}

pub(crate) mod list {
    use super::Float;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(values: &[f32], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(values.iter().copied().map(Float))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<f32>, D::Error> {
        Ok(Vec::<Float<f32>>::deserialize(deserializer)?.into_iter().map(|Float(value)| value).collect())
    }
}
