//! Floats in JSON, which cannot represent NaN and infinities: they are written as the strings `"NaN"`, `"inf"`,
//! `"-inf"`.
//!
//! Use with `#[serde(with = "float")]`.

use serde::de::{Deserializer, Error, Unexpected, Visitor};
use serde::ser::Serializer;
use std::fmt;
use std::marker::PhantomData;

/// Implemented for `f32` and `f64`.
pub(crate) trait Float: Copy {
    fn to_f64(self) -> f64;
    fn from_f64(value: f64) -> Self;
    fn write<S: Serializer>(self, serializer: S) -> Result<S::Ok, S::Error>;
}

impl Float for f32 {
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
    fn from_f64(value: f64) -> Self {
        value as f32
    }
    fn write<S: Serializer>(self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f32(self)
    }
}

impl Float for f64 {
    fn to_f64(self) -> f64 {
        self
    }
    fn from_f64(value: f64) -> Self {
        value
    }
    fn write<S: Serializer>(self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(self)
    }
}

pub(crate) fn serialize<T: Float, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
    match value.to_f64() {
        wide if wide.is_nan() => serializer.serialize_str("NaN"),
        f64::INFINITY => serializer.serialize_str("inf"),
        f64::NEG_INFINITY => serializer.serialize_str("-inf"),
        _ => value.write(serializer),
    }
}

pub(super) fn deserialize<'de, T: Float, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    struct Number<T>(PhantomData<T>);

    impl<T: Float> Visitor<'_> for Number<T> {
        type Value = T;

        fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
            f.write_str("a number, \"NaN\", \"inf\" or \"-inf\"")
        }
        fn visit_f64<E: Error>(self, value: f64) -> Result<T, E> {
            Ok(T::from_f64(value))
        }
        fn visit_u64<E: Error>(self, value: u64) -> Result<T, E> {
            Ok(T::from_f64(value as f64))
        }
        fn visit_i64<E: Error>(self, value: i64) -> Result<T, E> {
            Ok(T::from_f64(value as f64))
        }
        fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
            match text {
                "NaN" => Ok(T::from_f64(f64::NAN)),
                "inf" => Ok(T::from_f64(f64::INFINITY)),
                "-inf" => Ok(T::from_f64(f64::NEG_INFINITY)),
                other => Err(E::invalid_value(Unexpected::Str(other), &self)),
            }
        }
    }

    deserializer.deserialize_any(Number(PhantomData))
}
