//! The vector instructions the kernels use: detected once, or set by `FINETUNE_ISA` so that tests can cover every path.
//!
//! [`vectorize!`] compiles an ordinary Rust loop once for each instruction set and picks the copy at run time. No copy
//! fuses a multiplication with an addition on its own, so such loops give the same bits on every instruction set.

use std::sync::OnceLock;
use strum::{Display, EnumString, VariantArray};

#[cfg(target_arch = "x86_64")]
use super::amx;

/// The environment variable that pins the instruction set.
pub const ISA_VARIABLE: &str = "FINETUNE_ISA";

/// An instruction set the kernels are written for, from the narrowest to the widest; a processor's architecture has its
/// own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Display, EnumString, VariantArray)]
#[strum(serialize_all = "lowercase", parse_err_ty = String, parse_err_fn = unknown_isa)]
pub enum Isa {
    /// Loops as the compiler vectorizes them for its target.
    Portable,
    /// 256-bit vectors with FMA and FP16 conversions.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// 512-bit vectors.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// 512-bit vectors with BF16 dot products.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    /// The instructions of `Avx512Bf16`, and products of BF16 tiles.
    #[cfg(target_arch = "x86_64")]
    Amx,
    /// 128-bit vectors with FMA, which every aarch64 CPU has.
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// The instructions of `Neon`, and products of 2 × 4 by 4 × 2 BF16 matrices.
    #[cfg(target_arch = "aarch64")]
    NeonBf16,
}

impl Isa {
    /// All instruction sets of this architecture, the narrowest first.
    pub const ALL: &[Self] = Self::VARIANTS;

    /// The instruction set that `FINETUNE_ISA` names; an error if that is unknown or missing on this CPU. Programs call
    /// this once at their start to report a bad value.
    pub fn pinned() -> Result<Option<Self>, String> {
        let Some(pinned) = std::env::var_os(ISA_VARIABLE) else { return Ok(None) };
        let isa: Self = pinned.to_string_lossy().parse()?;
        if isa.is_supported() {
            Ok(Some(isa))
        } else {
            let lacks = match isa {
                #[cfg(target_arch = "x86_64")]
                Self::Amx => format!("`{isa}` cannot be used here: {}", amx::support()),
                _ => format!("this CPU lacks `{isa}`"),
            };
            Err(format!("{lacks}; its widest instruction set is `{}`", Self::widest()))
        }
    }

    /// The pinned instruction set, or the fastest of this CPU.
    #[inline]
    pub fn current() -> Self {
        static CURRENT: OnceLock<Isa> = OnceLock::new();
        *CURRENT.get_or_init(|| Self::pinned().ok().flatten().unwrap_or_else(Self::fastest))
    }

    /// The widest instruction set, without BF16 dot products if they are slow. Compared with FP32 multiply-adds they
    /// are 1.9 times as fast on AMD's Zen 5 but half as fast on Intel's Emerald Rapids, where widening is better.
    fn fastest() -> Self {
        match Self::widest() {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 if !has_fast_bf16_dots() => Self::Avx512,
            widest => widest,
        }
    }

    /// Whether this CPU can run it.
    pub fn is_supported(self) -> bool {
        self <= Self::widest()
    }

    /// The widest instruction set of this CPU that the system lets this process use.
    #[cfg(target_arch = "x86_64")]
    fn widest() -> Self {
        if !(is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")) {
            Self::Portable
        } else if !(is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl"))
        {
            Self::Avx2
        } else if !is_x86_feature_detected!("avx512bf16") {
            Self::Avx512
        } else if amx::support() != amx::AmxSupport::Available {
            Self::Avx512Bf16
        } else {
            Self::Amx
        }
    }

    /// The widest instruction set of this CPU.
    #[cfg(target_arch = "aarch64")]
    fn widest() -> Self {
        if std::arch::is_aarch64_feature_detected!("bf16") { Self::NeonBf16 } else { Self::Neon }
    }

    /// The widest instruction set of this CPU.
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    fn widest() -> Self {
        Self::Portable
    }
}

#[cfg(target_arch = "x86_64")]
fn has_fast_bf16_dots() -> bool {
    // The vendor's name is in these registers, in this order.
    let vendor = std::arch::x86_64::__cpuid(0);
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).as_flattened() == b"AuthenticAMD"
}

fn unknown_isa(text: &str) -> String {
    let known = Isa::ALL.iter().map(|isa| format!("`{isa}`")).collect::<Vec<_>>().join(", ");
    format!("unknown instruction set `{text}`; known are {known}")
}

/// Evaluates an expression compiled for the current instruction set.
///
/// Only inlined code benefits, so mark the functions that it calls `#[inline(always)]`, or keep them tiny.
#[macro_export]
macro_rules! vectorize {
    ($body:expr) => {
        $crate::isa::vectorize(
            #[inline(always)]
            || $body,
        )
    };
}
pub use crate::vectorize;

/// Runs `body`, which the macro [`vectorize!`] marks to be inlined.
#[inline]
pub fn vectorize<R>(body: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn avx2<R>(body: impl FnOnce() -> R) -> R {
            body()
        }
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
        fn avx512<R>(body: impl FnOnce() -> R) -> R {
            body()
        }
        match Isa::current() {
            Isa::Portable => body(),
            // SAFETY: `Isa::current` returns only instruction sets that this CPU has.
            Isa::Avx2 => unsafe { avx2(body) },
            // SAFETY: as above.
            Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => unsafe { avx512(body) },
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    body()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for isa in Isa::ALL {
            assert_eq!(isa.to_string().parse::<Isa>().unwrap(), *isa);
        }
    }

    #[test]
    fn an_unknown_name_is_an_error_that_lists_the_known_ones() {
        let message = "avx1024".parse::<Isa>().unwrap_err();
        let widest = Isa::ALL.last().unwrap().to_string();
        assert!(message.contains("`avx1024`") && message.contains(&format!("`{widest}`")), "{message}");
    }

    #[test]
    fn the_current_set_runs_here() {
        assert!(Isa::current().is_supported());
        assert!(Isa::Portable.is_supported());
        let data: Vec<f32> = (0..100).map(|i| i as f32).collect();
        assert_eq!(vectorize!(data.iter().map(|x| x * 2.0).sum::<f32>()), 9900.0);
    }
}
