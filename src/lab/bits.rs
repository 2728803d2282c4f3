//! One number in every format: its bits, what is stored, what is lost.

use serde::Serialize;

use super::number::{exact, parse_value, serialize, short};
use super::page::{Line, Page, Role};
use crate::Result;
use crate::precision::{FloatClass, FloatFormat};

/// A number and what each format makes of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Bits {
    /// What was asked.
    pub input: String,
    /// The number as f64, from which the formats round.
    #[serde(serialize_with = "serialize")]
    pub value: f64,
    /// Its decimal digits, all of them.
    pub exact: String,
    /// Widest format first.
    pub formats: Vec<Stored>,
}

/// A number in a format.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Stored {
    /// The format's name.
    pub format: &'static str,
    /// The pattern in hexadecimal: `0x3C00`.
    pub pattern: String,
    /// The sign bit.
    pub sign: String,
    /// The exponent field.
    pub exponent: String,
    /// The mantissa field.
    pub mantissa: String,
    /// What is stored.
    #[serde(serialize_with = "serialize")]
    pub value: f64,
    /// Its decimal digits, all of them.
    pub exact: String,
    /// What kind of number that is.
    pub class: FloatClass,
    /// Whether the number has left the format's range.
    pub fate: Fate,
    /// `|stored - value|`.
    #[serde(serialize_with = "serialize")]
    pub absolute_error: f64,
    /// `|stored - value| / |value|`.
    #[serde(serialize_with = "serialize")]
    pub relative_error: f64,
    /// The format's spacing there.
    #[serde(serialize_with = "serialize")]
    pub ulp: f64,
    /// The next smaller number of the format; NaN where there is none.
    #[serde(serialize_with = "serialize")]
    pub below: f64,
    /// The next larger number of the format; NaN where there is none.
    #[serde(serialize_with = "serialize")]
    pub above: f64,
}

/// Whether a number has left a format's range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fate {
    /// It is stored without error.
    Exact,
    /// It is stored as the nearest number.
    Rounded,
    /// It is finite, but stored as infinity or, in E4M3, NaN.
    Overflow,
    /// It is not zero, but stored as zero.
    Underflow,
}

impl Bits {
    /// Inputs worth a look: an irrational, a typical lost gradient, the edges of FP16, a lost update.
    pub const PRESETS: [&str; 7] = ["pi", "1e-8", "65504", "65520", "2^-24", "2^-25", "1 + 2^-11"];

    /// Reads `input` ([`parse_value`](super::parse_value)) and stores it in every format.
    pub fn of(input: &str) -> Result<Self> {
        let value = parse_value(input)?;
        let formats = FloatFormat::ALL.map(|format| Stored::new(value, format)).to_vec();
        Ok(Self { input: input.trim().to_owned(), value, exact: exact(value), formats })
    }

    /// The report as text, `width` columns wide.
    pub fn page(&self, width: usize) -> Page {
        let mut page = Page::new();
        digits(&mut page, Role::Title, &format!("{} = ", self.input), &self.exact, width);
        for stored in &self.formats {
            stored.render(&mut page, width);
        }
        page
    }
}

impl Stored {
    fn new(value: f64, format: FloatFormat) -> Self {
        let bits = format.encode(value);
        let stored = format.decode(bits);
        let field = |shift: u32, width: u32| {
            let field = (bits >> shift) & ((1 << width) - 1);
            format!("{field:0width$b}", width = width as usize)
        };
        let error = if stored == value { 0.0 } else { (stored - value).abs() };
        let neighbour = |bits: Option<u32>| bits.map_or(f64::NAN, |bits| format.decode(bits));
        Self {
            format: format.name,
            pattern: format!("0x{bits:0width$X}", width = format.bits() as usize / 4),
            sign: field(format.bits() - 1, 1),
            exponent: field(format.mantissa_bits, format.exponent_bits),
            mantissa: field(0, format.mantissa_bits),
            value: stored,
            exact: exact(stored),
            class: format.classify(bits),
            fate: Fate::of(value, stored),
            absolute_error: error,
            relative_error: if error == 0.0 { 0.0 } else { error / value.abs() },
            ulp: format.ulp(stored),
            below: neighbour(format.next_down(bits)),
            above: neighbour(format.next_up(bits)),
        }
    }

    fn render(&self, page: &mut Page, width: usize) {
        let (role, class) = self.class_text();
        page.push(
            Line::new()
                .with(Role::Title, format!("{:<9}", self.format))
                .with(Role::Sign, &*self.sign)
                .plain(" ")
                .with(Role::Exponent, &*self.exponent)
                .plain(" ")
                .with(Role::Mantissa, format!("{:<width$}", self.mantissa, width = 33 - self.exponent.len()))
                .plain(format!("{:<11}", self.pattern))
                .with(role, class),
        );
        digits(page, Role::Dim, "  stored  ", &self.exact, width);
        if !self.value.is_finite() {
            return;
        }
        let error = match self.fate {
            Fate::Exact => "no error".to_owned(),
            _ => format!("error {:.3e}, relative {:.3e}", self.absolute_error, self.relative_error),
        };
        page.push(Line::new().dim("  ").plain(error).dim("  ulp ").plain(short(self.ulp)));
        let (below, above) = (neighbour(self.below), neighbour(self.above));
        page.push(Line::new().dim("  between ").plain(below).dim(" and ").plain(above));
    }

    fn class_text(&self) -> (Role, &'static str) {
        match (self.fate, self.class) {
            (Fate::Underflow, _) => (Role::Bad, "○ zero by underflow"),
            (Fate::Overflow, FloatClass::Nan) => (Role::Bad, "✕ NaN by overflow"),
            (Fate::Overflow, _) => (Role::Bad, "✕ inf by overflow"),
            (_, FloatClass::Normal) => (Role::Good, "● normal"),
            (_, FloatClass::Subnormal) => (Role::Warn, "◐ subnormal"),
            (_, FloatClass::Zero) => (Role::Plain, "○ zero"),
            (_, FloatClass::Infinite) => (Role::Bad, "✕ inf"),
            (_, FloatClass::Nan) => (Role::Bad, "✕ NaN"),
        }
    }
}

impl Fate {
    /// What has become of `value`, stored as `stored`.
    pub fn of(value: f64, stored: f64) -> Self {
        if value == stored || value.is_nan() {
            Self::Exact
        } else if !stored.is_finite() {
            if value.is_finite() { Self::Overflow } else { Self::Exact }
        } else if stored == 0.0 {
            Self::Underflow
        } else {
            Self::Rounded
        }
    }
}

/// A neighbour with as many digits as tell it from the number itself.
fn neighbour(x: f64) -> String {
    let text = short(x);
    if !x.is_finite() || text.contains('^') || text.parse() == Ok(x) {
        text
    } else if (1e-3..1e7).contains(&x.abs()) {
        format!("{x:.9}")
    } else {
        format!("{x:.9e}")
    }
}

/// A long row of digits, broken to fit.
fn digits(page: &mut Page, role: Role, label: &str, digits: &str, width: usize) {
    let indent = label.chars().count();
    let mut label = label.to_owned();
    for part in digits.as_bytes().chunks(width.saturating_sub(indent).max(10)) {
        page.push(Line::new().with(role, label).plain(String::from_utf8_lossy(part)));
        label = " ".repeat(indent);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use half::{bf16, f16};
    use proptest::prelude::*;

    use super::*;

    fn stored(input: &str, format: &str) -> Stored {
        let bits = Bits::of(input).unwrap();
        bits.formats.into_iter().find(|stored| stored.format == format).unwrap()
    }

    /// The figures that every text on mixed precision quotes.
    #[test]
    fn presets_in_fp16() {
        let fp16 = |input| stored(input, "FP16");
        let pi = fp16("pi");
        assert_eq!(
            (pi.value, &*pi.pattern, &*pi.exponent, &*pi.mantissa),
            (3.140_625, "0x4248", "10000", "1001001000")
        );
        assert_eq!((pi.fate, pi.ulp), (Fate::Rounded, 2f64.powi(-9)));
        assert!((pi.absolute_error - 9.676_535_897_93e-4).abs() < 1e-12);
        assert_eq!(fp16("1e-8").fate, Fate::Underflow);
        assert_eq!((fp16("65504").fate, fp16("65504").ulp), (Fate::Exact, 32.0));
        assert_eq!((fp16("65520").fate, fp16("65519").value), (Fate::Overflow, 65504.0));
        assert_eq!((fp16("2^-24").class, fp16("2^-24").fate), (FloatClass::Subnormal, Fate::Exact));
        assert_eq!(fp16("2^-25").fate, Fate::Underflow);
        assert_eq!((fp16("1 + 2^-11").value, fp16("1 + 2^-11").above), (1.0, 1.0 + 2f64.powi(-10)));
    }

    #[test]
    fn presets_in_the_other_formats() {
        assert_eq!(stored("1e-8", "BF16").class, FloatClass::Normal);
        assert_eq!(stored("pi", "BF16").value, 3.140_625);
        assert_eq!((stored("pi", "FP8 E4M3").value, stored("pi", "FP8 E5M2").value), (3.25, 3.0));
        assert_eq!(
            (stored("65504", "FP8 E4M3").class, stored("65504", "FP8 E4M3").fate),
            (FloatClass::Nan, Fate::Overflow)
        );
        assert_eq!(stored("inf", "FP16").fate, Fate::Exact);
        assert_eq!(stored("nan", "FP32").fate, Fate::Exact);
    }

    #[test]
    fn pages() {
        for (name, input) in [("pi", "pi"), ("lost_gradient", "1e-8"), ("overflow", "65520"), ("nan", "nan")] {
            insta::assert_snapshot!(format!("bits_{name}"), Bits::of(input).unwrap().page(80).text());
        }
    }

    #[test]
    fn every_preset_fits_a_small_terminal() {
        for preset in Bits::PRESETS {
            let page = Bits::of(preset).unwrap().page(80);
            assert!(page.lines.len() <= 22, "{preset}: {} lines", page.lines.len());
            assert!(page.text().lines().all(|line| line.chars().count() <= 80), "{}", page.text());
        }
    }

    /// What the crates make of `x`, format by format. `float8` saturates where ours leaves the range: E4M3 beyond the
    /// midpoint between 448 and the pattern that stands for NaN, E5M2 from the midpoint between 57344 and 2^16 on.
    fn by_the_crates(x: f32) -> [f64; 5] {
        let e4m3 = if x.abs() > 464.0 { f64::NAN } else { float8::F8E4M3::from_f32(x).to_f64() };
        let infinite = f64::INFINITY.copysign(f64::from(x));
        let e5m2 = if x.abs() >= 61440.0 { infinite } else { float8::F8E5M2::from_f32(x).to_f64() };
        [f64::from(x), f16::from_f32(x).to_f64(), bf16::from_f32(x).to_f64(), e4m3, e5m2]
    }

    /// Patterns of FP32: any, which is mostly beyond the narrow formats; those of a format's numbers, subnormal ones, NaNs
    /// and infinities among them; of the ties between two; and of what lies one step beside.
    fn patterns() -> impl Strategy<Value = u32> {
        let near = (0..5usize, any::<u32>(), any::<bool>(), -1..=1i32).prop_map(|(format, bits, tie, beside)| {
            let format = FloatFormat::ALL[format];
            let bits = if format.bits() == 32 { bits } else { bits % (1 << format.bits()) };
            let number = format.decode(bits);
            let next = format.next_up(bits).map_or(number, |next| format.decode(next));
            let x = if tie { f64::midpoint(number, next) } else { number };
            (x as f32).to_bits().wrapping_add_signed(beside)
        });
        prop_oneof![1 => any::<u32>(), 4 => near]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn what_is_shown_is_what_the_crates_store(pattern in patterns()) {
            let bits = Bits::of(&format!("fp32:{pattern:08x}")).unwrap();
            for (stored, expected) in bits.formats.iter().zip(by_the_crates(f32::from_bits(pattern))) {
                let value = stored.value;
                prop_assert!(
                    value.to_bits() == expected.to_bits() || value.is_nan() && expected.is_nan(),
                    "{}: {value:e}, expected {expected:e}", stored.format
                );
            }
            for stored in &bits.formats {
                let joined = format!("{}{}{}", stored.sign, stored.exponent, stored.mantissa);
                let pattern = u32::from_str_radix(&stored.pattern[2..], 16).unwrap();
                prop_assert_eq!(u32::from_str_radix(&joined, 2).unwrap(), pattern);
            }
        }
    }
}
