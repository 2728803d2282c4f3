//! One number in every format: its bits, the stored value and the error.

use super::number::{exact, parse_value, serialize, short};
use crate::precision::{FloatClass, FloatFormat};
use crate::ui::{Line, Page, Role};
use serde::Serialize;

/// A number in every format.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Bits {
    pub(crate) input: String,
    /// The number as f64, before rounding to the formats.
    #[serde(serialize_with = "serialize")]
    pub(crate) value: f64,
    /// All of its decimal digits.
    pub(crate) exact: String,
    /// Widest format first.
    pub(crate) formats: Vec<StoredNumber>,
    /// The format and bit (counted from the left) to mark.
    #[serde(skip)]
    pub(crate) cursor: Option<(FloatFormat, u32)>,
}

/// A number in a format.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct StoredNumber {
    pub(crate) format: &'static str,
    /// The pattern in hexadecimal: `0x3C00`.
    pub(crate) pattern: String,
    pub(crate) sign: String,
    pub(crate) exponent: String,
    pub(crate) mantissa: String,
    #[serde(serialize_with = "serialize")]
    pub(crate) value: f64,
    /// All of its decimal digits.
    pub(crate) exact: String,
    pub(crate) class: FloatClass,
    pub(crate) fate: RoundingResult,
    /// The value stored by a saturating conversion, as in PyTorch's cast to E4M3 and this program's FP8 simulation;
    /// `None` if it is the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) saturated: Option<f64>,
    /// `|stored - value|`.
    #[serde(serialize_with = "serialize")]
    pub(crate) absolute_error: f64,
    /// `|stored - value| / |value|`.
    #[serde(serialize_with = "serialize")]
    pub(crate) relative_error: f64,
    /// The format's spacing at the stored value.
    #[serde(serialize_with = "serialize")]
    pub(crate) ulp: f64,
    /// The next smaller number of the format; NaN if there is none.
    #[serde(serialize_with = "serialize")]
    pub(crate) below: f64,
    /// The next larger number of the format; NaN if there is none.
    #[serde(serialize_with = "serialize")]
    pub(crate) above: f64,
}

/// How a number was stored in a format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum RoundingResult {
    /// It is stored without error.
    Exact,
    /// It is stored as the nearest number.
    Rounded,
    /// It is stored as infinity or, in E4M3, NaN, but is another number.
    Overflow,
    /// It is not zero, but stored as zero.
    Underflow,
}

impl Bits {
    /// Example inputs: an irrational number, a typical lost gradient, the limits of FP16, a lost update.
    pub(crate) const PRESETS: [&str; 7] = ["pi", "1e-8", "65504", "65520", "2^-24", "2^-25", "1 + 2^-11"];

    /// Parses `input` with [`parse_value`](super::parse_value) and stores it in every format.
    pub(crate) fn parse(input: &str) -> Result<Self, String> {
        let value = parse_value(input)?;
        let formats = FloatFormat::ALL.map(|format| StoredNumber::new(value, format)).to_vec();
        Ok(Self { input: input.trim().to_owned(), value, exact: exact(value), formats, cursor: None })
    }

    pub(crate) fn page(&self, width: usize) -> Page {
        let mut page = Page::new();
        let label = format!("{} = ", self.input);
        let room = width.saturating_sub(label.chars().count()).max(24);
        page.push(Line::new().with(Role::Title, label).plain(cut(&self.exact, room)));
        for stored in &self.formats {
            let at = page.lines.len();
            stored.render(&mut page, width);
            if let Some((_, bit)) = self.cursor.filter(|(format, _)| format.name == stored.format) {
                // The fields are separated by spaces.
                let fields = [1, stored.exponent.len() as u32];
                let blanks = u32::from(bit >= fields[0]) + u32::from(bit >= fields[0] + fields[1]);
                let mark = " ".repeat((LABEL as u32 + bit + blanks) as usize) + "▲";
                page.lines.insert(
                    at + 1,
                    Line::new().with(Role::Title, mark).dim(format!("  bit {bit}: {}", stored.weight(bit))),
                );
            }
        }
        let legend = Line::new().with(Role::Sign, "s sign  ").with(Role::Exponent, "e exponent  ");
        page.push(legend.with(Role::Mantissa, "m mantissa   ").dim("±1.m × 2^(e − bias), subnormal ±0.m"));
        page
    }

    /// The pattern of `input` in `format` with one bit flipped, as valid input: `fp16:0x3c01`.
    pub(crate) fn flipped(input: &str, format: FloatFormat, bit: u32) -> Result<String, String> {
        let bits = format.encode(parse_value(input)?);
        Ok(pattern(format, bits ^ (1 << (format.bits() - 1 - bit.min(format.bits() - 1)))))
    }

    /// The number of `format` next to `input`, towards +inf or -inf.
    pub(crate) fn neighbor(input: &str, format: FloatFormat, up: bool) -> Result<String, String> {
        let bits = format.encode(parse_value(input)?);
        let next = if up { format.next_up(bits) } else { format.next_down(bits) };
        Ok(pattern(format, next.unwrap_or(bits)))
    }
}

/// Columns before a format's bits.
const LABEL: usize = 9;

/// A pattern in the syntax of [`parse_value`].
fn pattern(format: FloatFormat, bits: u32) -> String {
    let name = format.name.trim_start_matches("FP8 ").to_lowercase();
    format!("{name}:0x{bits:0width$x}", width = format.bits() as usize / 4)
}

impl StoredNumber {
    fn new(value: f64, format: FloatFormat) -> Self {
        let bits = format.encode(value);
        let stored = format.decode(bits);
        let field = |shift: u32, width: u32| {
            let field = (bits >> shift) & ((1 << width) - 1);
            format!("{field:0width$b}", width = width as usize)
        };
        let error = if stored == value { 0.0 } else { (stored - value).abs() };
        let saturated = format.decode(format.encode_saturating(value));
        let neighbor = |bits: Option<u32>| bits.map_or(f64::NAN, |bits| format.decode(bits));
        Self {
            format: format.name,
            pattern: format!("0x{bits:0width$X}", width = format.bits() as usize / 4),
            sign: field(format.bits() - 1, 1),
            exponent: field(format.mantissa_bits, format.exponent_bits),
            mantissa: field(0, format.mantissa_bits),
            value: stored,
            exact: exact(stored),
            class: format.classify(bits),
            fate: RoundingResult::of(value, stored),
            saturated: (saturated.is_finite() && !stored.is_finite()).then_some(saturated),
            absolute_error: error,
            relative_error: if error == 0.0 { 0.0 } else { error / value.abs() },
            ulp: format.ulp(stored),
            below: neighbor(format.next_down(bits)),
            above: neighbor(format.next_up(bits)),
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
        let mut line = Line::new().dim("  stored  ").plain(cut(&self.exact, width.saturating_sub(54).max(12)));
        if !self.value.is_finite() {
            if let Some(saturated) = self.saturated {
                line = line.dim("   saturating ").plain(short(saturated)).dim(match self.format {
                    "FP8 E4M3" => " (PyTorch's cast, our simulation)",
                    "FP8 E5M2" => " (our simulation; PyTorch: inf)",
                    _ => " (where a conversion clamps)",
                });
            }
            page.push(line);
            return;
        }
        let error = match self.fate {
            RoundingResult::Exact => "  no error".to_owned(),
            _ => format!("  error {:.3e} (rel {:.3e})", self.absolute_error, self.relative_error),
        };
        page.push(line.plain(error).dim("  ulp ").plain(short(self.ulp)));
        let (below, above) = (neighbor(self.below), neighbor(self.above));
        page.push(Line::new().dim("  between ").plain(below).dim(" and ").plain(above));
    }

    /// The meaning of a bit, counted from the left.
    fn weight(&self, bit: u32) -> String {
        let exponent = self.exponent.len() as u32;
        match bit {
            0 => "sign".to_owned(),
            _ if bit <= exponent => format!("exponent, × 2^{}", 1u64 << (exponent - bit)),
            _ => format!("mantissa, 2^-{} of the leading one", bit - exponent),
        }
    }

    fn class_text(&self) -> (Role, &'static str) {
        match (self.fate, self.class) {
            (RoundingResult::Underflow, _) => (Role::Bad, "○ zero by underflow"),
            (RoundingResult::Overflow, FloatClass::Nan) => (Role::Bad, "✕ NaN by overflow"),
            (RoundingResult::Overflow, _) => (Role::Bad, "✕ inf by overflow"),
            (_, FloatClass::Normal) => (Role::Good, "● normal"),
            (_, FloatClass::Subnormal) => (Role::Warn, "◐ subnormal"),
            (_, FloatClass::Zero) => (Role::Text, "○ zero"),
            (_, FloatClass::Infinite) => (Role::Bad, "✕ inf"),
            (_, FloatClass::Nan) => (Role::Bad, "✕ NaN"),
        }
    }
}

impl RoundingResult {
    pub(crate) fn of(value: f64, stored: f64) -> Self {
        if value == stored || value.is_nan() {
            Self::Exact
        } else if !stored.is_finite() {
            Self::Overflow
        } else if stored == 0.0 {
            Self::Underflow
        } else {
            Self::Rounded
        }
    }
}

/// A neighbor with enough digits to distinguish it from the number.
fn neighbor(x: f64) -> String {
    let text = short(x);
    if !x.is_finite() || text.contains('^') || text.parse() == Ok(x) {
        text
    } else if (1e-3..1e7).contains(&x.abs()) {
        format!("{x:.9}")
    } else {
        format!("{x:.9e}")
    }
}

/// Truncates `digits` to `room` columns; before an exponent, to at most 20 characters. `--json` contains all digits.
fn cut(digits: &str, room: usize) -> String {
    match digits.split_once('e') {
        _ if digits.len() <= room => digits.to_owned(),
        Some((mantissa, exponent)) => {
            format!("{mantissa:.0$}…e{exponent}", room.saturating_sub(exponent.len() + 2).min(20))
        }
        None => format!("{digits:.0$}…", room - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};
    use proptest::prelude::*;

    fn stored(input: &str, format: &str) -> StoredNumber {
        let bits = Bits::parse(input).unwrap();
        bits.formats.into_iter().find(|stored| stored.format == format).unwrap()
    }

    /// The figures commonly quoted about mixed precision.
    #[test]
    fn presets_in_fp16() {
        let fp16 = |input| stored(input, "FP16");
        let pi = fp16("pi");
        assert_eq!(
            (pi.value, &*pi.pattern, &*pi.exponent, &*pi.mantissa),
            (3.140_625, "0x4248", "10000", "1001001000")
        );
        assert_eq!((pi.fate, pi.ulp), (RoundingResult::Rounded, 2f64.powi(-9)));
        assert!((pi.absolute_error - 9.676_535_897_93e-4).abs() < 1e-12);
        assert_eq!(fp16("1e-8").fate, RoundingResult::Underflow);
        assert_eq!((fp16("65504").fate, fp16("65504").ulp), (RoundingResult::Exact, 32.0));
        assert_eq!((fp16("65520").fate, fp16("65519").value), (RoundingResult::Overflow, 65504.0));
        assert_eq!((fp16("2^-24").class, fp16("2^-24").fate), (FloatClass::Subnormal, RoundingResult::Exact));
        assert_eq!(fp16("2^-25").fate, RoundingResult::Underflow);
        assert_eq!((fp16("1 + 2^-11").value, fp16("1 + 2^-11").above), (1.0, 1.0 + 2f64.powi(-10)));
    }

    #[test]
    fn presets_in_the_other_formats() {
        assert_eq!(stored("1e-8", "BF16").class, FloatClass::Normal);
        assert_eq!(stored("pi", "BF16").value, 3.140_625);
        assert_eq!((stored("pi", "FP8 E4M3").value, stored("pi", "FP8 E5M2").value), (3.25, 3.0));
        assert_eq!(
            (stored("65504", "FP8 E4M3").class, stored("65504", "FP8 E4M3").fate),
            (FloatClass::Nan, RoundingResult::Overflow)
        );
        assert_eq!(stored("inf", "FP16").fate, RoundingResult::Exact);
        assert_eq!(stored("nan", "FP32").fate, RoundingResult::Exact);
        // E4M3 has no infinity.
        assert_eq!(stored("inf", "FP8 E4M3").fate, RoundingResult::Overflow);
    }

    #[test]
    fn bits_flip_and_numbers_have_neighbors() {
        assert_eq!(Bits::flipped("1", FloatFormat::FP16, 0).unwrap(), "fp16:0xbc00");
        assert_eq!(Bits::flipped("fp16:0x3c00", FloatFormat::FP16, 15).unwrap(), "fp16:0x3c01");
        assert_eq!(Bits::neighbor("448", FloatFormat::E4M3, true).unwrap(), "e4m3:0x7f");
        assert_eq!(Bits::neighbor("0", FloatFormat::E5M2, false).unwrap(), "e5m2:0x81");
        assert_eq!(Bits::neighbor("inf", FloatFormat::BF16, true).unwrap(), "bf16:0x7f80");
        let mut bits = Bits::parse("1").unwrap();
        bits.cursor = Some((FloatFormat::FP16, 3));
        let text = bits.page(80).text();
        let at = text.lines().position(|line| line.starts_with("FP16")).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[at].chars().nth(9 + 3 + 1), Some('1'), "{text}");
        assert!(lines[at + 1].starts_with(&format!("{}▲  bit 3: exponent, × 2^4", " ".repeat(13))), "{text}");
    }

    /// Regression: 1e-300 took thirteen lines.
    #[test]
    fn a_page_shows_a_handful_of_digits_and_json_all() {
        let bits = Bits::parse("1e-300").unwrap();
        let first = bits.page(80).text().lines().next().unwrap().to_owned();
        assert!(first.chars().count() <= 40, "{first}");
        assert!(bits.exact.len() > 600);
    }

    #[test]
    fn overflow_in_both_conventions() {
        let of = |input, format| stored(input, format).saturated;
        assert_eq!(
            [of("1000", "FP8 E4M3"), of("1e6", "FP8 E5M2"), of("100", "FP8 E4M3")],
            [Some(448.0), Some(57344.0), None]
        );
        assert_eq!(of("inf", "FP8 E4M3"), Some(448.0));
        assert_eq!(of("nan", "FP8 E4M3"), None);
    }

    #[test]
    fn pages() {
        for (name, input) in [("lost_gradient", "1e-8"), ("overflow", "65520"), ("nan", "nan")] {
            insta::assert_snapshot!(format!("bits_{name}"), Bits::parse(input).unwrap().page(80).text());
        }
    }

    #[test]
    fn every_preset_fits_a_small_terminal() {
        for preset in Bits::PRESETS {
            let page = Bits::parse(preset).unwrap().page(80);
            assert!(page.lines.len() <= 22, "{preset}: {} lines", page.lines.len());
            assert!(page.text().lines().all(|line| line.chars().count() <= 80), "{}", page.text());
        }
    }

    /// `x` rounded by other crates. `float8` saturates where ours overflows: E4M3 beyond the midpoint between 448 and
    /// the NaN pattern, E5M2 from the midpoint between 57344 and 2^16 on.
    fn by_the_crates(x: f32) -> [f64; 5] {
        let e4m3 = if x.abs() > 464.0 { f64::NAN } else { float8::F8E4M3::from_f32(x).to_f64() };
        let infinite = f64::INFINITY.copysign(f64::from(x));
        let e5m2 = if x.abs() >= 61440.0 { infinite } else { float8::F8E5M2::from_f32(x).to_f64() };
        [f64::from(x), f16::from_f32(x).to_f64(), bf16::from_f32(x).to_f64(), e4m3, e5m2]
    }

    /// Patterns of FP32: arbitrary ones, which mostly exceed the narrow formats; numbers of a format, including
    /// subnormals, NaNs and infinities; ties between two; and their neighbors.
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
        fn stored_values_match_other_crates(pattern in patterns()) {
            let bits = Bits::parse(&format!("fp32:{pattern:08x}")).unwrap();
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
