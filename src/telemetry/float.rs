//! Floats in JSON, which cannot represent NaN and infinities: they are written as the strings `"NaN"`, `"inf"`,
//! `"-inf"`.
//!
//! Use with `#[serde(with = "float")]`, with `#[serde(with = "float::optional")]` for an `Option<f64>`, and with
//! `#[serde(with = "float::list")]` for a `Vec<f32>`.

use serde::de::{Deserialize, Deserializer, Error};
use serde::ser::{Serialize, Serializer};
use std::str::FromStr;

pub(crate) fn serialize<T: Copy + Into<f64> + Serialize, S: Serializer>(
    value: &T,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let wide: f64 = (*value).into();
    if wide.is_finite() { value.serialize(serializer) } else { serializer.collect_str(&wide) }
}

pub(super) fn deserialize<'de, T: Deserialize<'de> + FromStr, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    #[derive(serde::Deserialize)]
    #[serde(untagged)]
    enum Stored<T> {
        Number(T),
        Text(String),
    }
    let wrong = || D::Error::custom("expected a number, \"NaN\", \"inf\" or \"-inf\"");
    match Stored::deserialize(deserializer)? {
        Stored::Number(value) => Ok(value),
        Stored::Text(text) if ["NaN", "inf", "-inf"].contains(&text.as_str()) => text.parse().map_err(|_| wrong()),
        Stored::Text(_) => Err(wrong()),
    }
}

/// A number that may be missing: `null`.
pub(crate) mod optional {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    #[serde(transparent)]
    struct Float(#[serde(with = "super")] f64);

    #[expect(clippy::ref_option, reason = "serde passes a reference to the field")]
    pub(crate) fn serialize<S: Serializer>(value: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
        value.map(Float).serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
        Ok(Option::<Float>::deserialize(deserializer)?.map(|Float(value)| value))
    }
}

pub(crate) mod list {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    #[serde(transparent)]
    struct Float(#[serde(with = "super")] f32);

    pub(crate) fn serialize<S: Serializer>(values: &[f32], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(values.iter().copied().map(Float))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<f32>, D::Error> {
        Ok(Vec::<Float>::deserialize(deserializer)?.into_iter().map(|Float(value)| value).collect())
    }
}
