//! The precision policy: the number format of each part of training, as one value with a text form that round-trips.

use super::FloatFormat;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use strum::{Display, EnumString};

/// A storage type of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Display, EnumString)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase", parse_err_ty = String, parse_err_fn = unknown_dtype)]
pub enum Dtype {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16.
    BF16,
}

impl Dtype {
    /// Bytes per element.
    pub const fn size_in_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
        }
    }

    /// The type's format, for limits and rounding.
    pub const fn format(self) -> FloatFormat {
        match self {
            Self::F32 => FloatFormat::FP32,
            Self::F16 => FloatFormat::FP16,
            Self::BF16 => FloatFormat::BF16,
        }
    }
}

fn unknown_dtype(text: &str) -> String {
    format!("`{text}` is not one of `f32`, `f16`, `bf16`")
}

/// The dtypes of a training run, written `p=f32,c=f16,g=f16,r=f32`; `fp16`, `bf16` and `fp32` name three of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PrecisionPolicy {
    /// Master weights: FP32, because small updates vanish in a narrower dtype; or `compute`, for weights without
    /// masters. Adam's moments are not of this type.
    pub params: Dtype,
    /// The working copy of the weights, activations and matrix products (which always accumulate in FP32).
    pub compute: Dtype,
    /// The type of weight gradients: `compute`, or FP32 to keep the product's accumulator.
    pub grads: Dtype,
    /// The residual stream: `compute`, or FP32 as under PyTorch's autocast.
    pub residual: Dtype,
}

impl PrecisionPolicy {
    /// Everything in FP32: the baseline.
    pub const FP32: Self = Self { params: Dtype::F32, compute: Dtype::F32, grads: Dtype::F32, residual: Dtype::F32 };
    /// FP16 products and gradients over FP32 masters (Micikevicius et al., 2018); needs loss scaling.
    pub const FP16: Self = Self { compute: Dtype::F16, grads: Dtype::F16, ..Self::FP32 };
    /// BF16 products and gradients over FP32 masters; has FP32's range, so no loss scaling.
    pub const BF16: Self = Self { compute: Dtype::BF16, grads: Dtype::BF16, ..Self::FP32 };

    /// The policy for a layer that computes in `compute`: its gradients have that dtype, or stay FP32.
    #[must_use]
    pub fn with_compute(self, compute: Dtype) -> Self {
        let grads = if self.grads == Dtype::F32 { Dtype::F32 } else { compute };
        Self { compute, grads, ..self }
    }

    /// Whether gradients pass through FP16, whose smallest value is 2^-24, so that the loss must be scaled.
    pub const fn needs_loss_scale(self) -> bool {
        matches!(self.compute, Dtype::F16) || matches!(self.grads, Dtype::F16)
    }

    /// Rejects invalid combinations; [`FromStr`] calls it.
    pub fn validate(self) -> Result<(), String> {
        let refuse =
            |field: &str, value: Dtype, allowed: &str| Err(format!("{field}: `{value}` is not allowed: {allowed}"));
        if self.params != Dtype::F32 && self.params != self.compute {
            return refuse("params", self.params, "master weights are `f32`, or have the type of compute");
        }
        for (field, value) in [("grads", self.grads), ("residual", self.residual)] {
            if value != self.compute && value != Dtype::F32 {
                return refuse(field, value, &format!("with compute `{}`, use that or `f32`", self.compute));
            }
        }
        Ok(())
    }
}

impl fmt::Display for PrecisionPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("p={},c={},g={},r={}", self.params, self.compute, self.grads, self.residual))
    }
}

impl From<PrecisionPolicy> for String {
    fn from(policy: PrecisionPolicy) -> Self {
        policy.to_string()
    }
}

impl TryFrom<String> for PrecisionPolicy {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl FromStr for PrecisionPolicy {
    type Err = String;

    /// Parses one of the names, or all four fields in any order.
    fn from_str(text: &str) -> Result<Self, String> {
        const FIELDS: [(&str, &str); 4] = [("p", "params"), ("c", "compute"), ("g", "grads"), ("r", "residual")];
        // The names that PyTorch and Hugging Face use for the same types.
        match text {
            "fp32" | "f32" | "float32" | "float" => return Ok(Self::FP32),
            "fp16" | "f16" | "float16" | "half" => return Ok(Self::FP16),
            "bf16" | "bfloat16" => return Ok(Self::BF16),
            _ => {}
        }
        let malformed =
            |what: String| format!("{what}; write `fp16`, `bf16`, `fp32` or e.g. `p=f32,c=f16,g=f16,r=f32`");
        if text == "fp8" {
            let message = "FP8 is simulated, in blocks of a model in FP16 or BF16; use `--set precision.fp8.block=all`";
            return Err(message.into());
        }
        let mut dtypes = [None; 4];
        for part in text.split(',') {
            let (key, value) = part.split_once('=').ok_or_else(|| malformed(format!("cannot read `{text}`")))?;
            let index = FIELDS
                .iter()
                .position(|(short, _)| *short == key.trim())
                .ok_or_else(|| malformed(format!("`{}` is not a field of a policy", key.trim())))?;
            let (short, field) = FIELDS[index];
            let dtype = value.trim().parse::<Dtype>().map_err(|message| format!("{field}: {message}"))?;
            if dtypes[index].replace(dtype).is_some() {
                return Err(malformed(format!("`{short}` appears twice")));
            }
        }
        let field = |index: usize| {
            dtypes[index].ok_or_else(|| malformed(format!("`{}` ({}) is missing", FIELDS[index].0, FIELDS[index].1)))
        };
        let policy = Self { params: field(0)?, compute: field(1)?, grads: field(2)?, residual: field(3)? };
        policy.validate()?;
        Ok(policy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_also_have_the_names_of_other_programs() {
        for (name, policy) in [
            ("f16", PrecisionPolicy::FP16),
            ("half", PrecisionPolicy::FP16),
            ("float16", PrecisionPolicy::FP16),
            ("bfloat16", PrecisionPolicy::BF16),
            ("float32", PrecisionPolicy::FP32),
            ("f32", PrecisionPolicy::FP32),
        ] {
            assert_eq!(name.parse::<PrecisionPolicy>().unwrap(), policy, "{name}");
        }
    }

    #[test]
    fn every_allowed_policy_round_trips() {
        let dtypes = [Dtype::F32, Dtype::F16, Dtype::BF16];
        let mut allowed = 0;
        for number in 0..3_usize.pow(4) {
            let [params, compute, grads, residual] = [27, 9, 3, 1].map(|place| dtypes[number / place % 3]);
            let policy = PrecisionPolicy { params, compute, grads, residual };
            match policy.validate() {
                Ok(()) => {
                    allowed += 1;
                    assert_eq!(policy.to_string().parse::<PrecisionPolicy>().unwrap(), policy);
                }
                Err(_) => assert!(policy.to_string().parse::<PrecisionPolicy>().is_err()),
            }
        }
        // FP16 and BF16 over FP32 masters and without.
        assert_eq!(allowed, 1 + 4 * 4);
    }

    #[test]
    fn names_and_text_form() {
        assert_eq!("fp16".parse::<PrecisionPolicy>().unwrap().to_string(), "p=f32,c=f16,g=f16,r=f32");
        assert_eq!("bf16".parse::<PrecisionPolicy>().unwrap().to_string(), "p=f32,c=bf16,g=bf16,r=f32");
        assert_eq!("fp32".parse::<PrecisionPolicy>().unwrap().to_string(), "p=f32,c=f32,g=f32,r=f32");
        assert_eq!("r=f32, c=f16, g=f16, p=f32".parse::<PrecisionPolicy>().unwrap(), PrecisionPolicy::FP16);
        assert!(PrecisionPolicy::FP16.needs_loss_scale());
        assert!(!PrecisionPolicy::BF16.needs_loss_scale() && !PrecisionPolicy::FP32.needs_loss_scale());
    }

    #[test]
    fn serde_uses_the_text_form() {
        let json = serde_json::to_string(&PrecisionPolicy::FP16).unwrap();
        assert_eq!(json, r#""p=f32,c=f16,g=f16,r=f32""#);
        assert_eq!(serde_json::from_str::<PrecisionPolicy>(r#""fp16""#).unwrap(), PrecisionPolicy::FP16);
        assert_eq!(serde_json::to_string(&Dtype::BF16).unwrap(), r#""bf16""#);
    }
}
