//! Parses and formats numbers for the lab.

use crate::precision::FloatFormat;
use crate::settings::is_written_as_zero;
pub(super) use crate::telemetry::float::serialize;
use crate::ui::format::trimmed;

/// Parses `3.14`, `-1e-8`, `pi`, `e`, `inf`, `nan`, `2^-24`, `3*2^-24`, sums of such (`1 + 2^-11`), and patterns with
/// their format: `fp16:0x3c00`, `bf16:…`, `fp32:…`, `e4m3:…`, `e5m2:…`.
pub(crate) fn parse_value(text: &str) -> Result<f64, String> {
    let text = text.trim();
    if let Some((name, pattern)) = text.split_once(':') {
        return parse_pattern(name.trim(), pattern.trim());
    }
    if text.starts_with("0x") {
        return Err(unreadable(text, "a pattern needs its format, such as `fp16:0x3c00`"));
    }
    let sum = terms(text).iter().map(|term| parse_term(term)).sum::<Option<f64>>().ok_or_else(|| {
        unreadable(text, "write a number such as `1e-8`, `pi`, `2^-24`, `1 + 2^-11` or `fp16:0x3c00`")
    })?;
    let lower = text.to_ascii_lowercase();
    if !sum.is_finite() && !["inf", "∞", "nan"].iter().any(|name| lower.contains(name)) {
        return Err(unreadable(text, "a magnitude exceeds 1.79e308, the largest that the lab computes with"));
    }
    if terms(text).iter().any(|term| underflows(term)) {
        return Err(unreadable(text, "a magnitude is below 4.94e-324, the smallest that the lab computes with"));
    }
    Ok(sum)
}

fn unreadable(text: &str, advice: &str) -> String {
    format!("cannot read `{text}`; {advice}")
}

fn parse_pattern(name: &str, pattern: &str) -> Result<f64, String> {
    let format = parse_format(name)?;
    let width = format.bits() as usize / 4;
    let digits = pattern.strip_prefix("0x").unwrap_or(pattern);
    match u32::from_str_radix(digits, 16) {
        Ok(bits) if digits.len() == width && !digits.starts_with('+') => Ok(format.decode(bits)),
        _ => Err(unreadable(pattern, &format!("{} takes {width} hexadecimal digits", format.name))),
    }
}

/// The format called `name`: `fp16`, `f16`, `e4m3`, ….
pub(crate) fn parse_format(name: &str) -> Result<FloatFormat, String> {
    Ok(match name.to_ascii_lowercase().as_str() {
        "fp32" | "f32" => FloatFormat::FP32,
        "fp16" | "f16" => FloatFormat::FP16,
        "bf16" => FloatFormat::BF16,
        "e4m3" | "fp8" | "fp8_e4m3" => FloatFormat::E4M3,
        "e5m2" | "fp8_e5m2" => FloatFormat::E5M2,
        _ => return Err(format!("`{name}` is not one of `fp32`, `fp16`, `bf16`, `e4m3`, `e5m2`")),
    })
}

/// Splits a sum into its signed terms, but not at the sign of an exponent.
fn terms(text: &str) -> Vec<String> {
    let text: Vec<char> = text.chars().filter(|c| !c.is_whitespace()).collect();
    let mut terms = vec![String::new()];
    for (i, &c) in text.iter().enumerate() {
        let before = |n: usize| i.checked_sub(n).map(|i| text[i]);
        let in_exponent = match before(1) {
            None | Some('^' | '*' | '+' | '-') => true,
            // The `e` of `1e-8`, not the constant.
            Some('e' | 'E') => before(2).is_some_and(|c| c.is_ascii_digit() || c == '.'),
            _ => false,
        };
        match terms.last_mut() {
            Some(term) if in_exponent || !matches!(c, '+' | '-') => term.push(c),
            _ => terms.push(c.to_string()),
        }
    }
    terms
}

fn parse_term(term: &str) -> Option<f64> {
    let (sign, rest) = match term.strip_prefix('-') {
        Some(rest) => (-1.0, rest),
        None => (1.0, term.strip_prefix('+').unwrap_or(term)),
    };
    if rest.starts_with(['+', '-']) {
        return None;
    }
    let factors = rest.split('*').map(parse_factor);
    factors.product::<Option<f64>>().map(|value| sign * value)
}

/// Whether a term is zero although none of its factors is written as zero.
fn underflows(term: &str) -> bool {
    let is_zero = |factor: &str| parse_factor(factor) == Some(0.0) && is_written_as_zero(factor);
    parse_term(term) == Some(0.0) && !term.split('*').any(is_zero)
}

fn parse_factor(factor: &str) -> Option<f64> {
    match factor.to_ascii_lowercase().as_str() {
        "pi" | "π" => Some(std::f64::consts::PI),
        "e" => Some(std::f64::consts::E),
        "∞" => Some(f64::INFINITY),
        other => match other.split_once('^') {
            Some((base, exponent)) => {
                let base: f64 = base.parse().ok()?;
                let exponent: i32 = exponent.parse().ok()?;
                // `powi` computes 2^-1074 as the reciprocal of an infinity.
                Some(base.powf(f64::from(exponent)))
            }
            None => other.parse().ok(),
        },
    }
}

/// Every decimal digit of a value; with an exponent if it would start with more than four zeros or end with many.
pub(super) fn exact(x: f64) -> String {
    if x == 0.0 || !x.is_finite() {
        return x.to_string();
    }
    // The smallest f32 has 149 decimals, the smallest f64 1074; none has more digits than decimals.
    let decimals = if f64::from(x as f32) == x { 149 } else { 1074 };
    if (1e-5..1e17).contains(&x.abs()) {
        return trimmed(&format!("{x:.decimals$}")).to_owned();
    }
    let digits = format!("{x:.decimals$e}");
    match digits.split_once('e') {
        Some((mantissa, exponent)) => format!("{}e{exponent}", trimmed(mantissa)),
        None => digits,
    }
}

/// `2^-24` for a power of two except small integers, else about four significant digits.
pub(super) fn short(x: f64) -> String {
    if x == 0.0 || !x.is_finite() {
        return x.to_string();
    }
    let exponent = x.abs().log2();
    if exponent.fract() == 0.0 && 2f64.powf(exponent) == x.abs() && !(0.0..=10.0).contains(&exponent) {
        return format!("{}2^{exponent}", if x < 0.0 { "-" } else { "" });
    }
    if (1e-3..1e7).contains(&x.abs()) {
        let decimals = (5 - x.abs().log10().floor() as i32).clamp(0, 8) as usize;
        trimmed(&format!("{x:.decimals$}")).to_owned()
    } else {
        format!("{x:.3e}")
    }
}

/// `|value / exact - 1|`; 0 for equal numbers, also for zeros.
pub(super) fn relative_error(value: f64, exact: f64) -> f64 {
    if value == exact { 0.0 } else { (value / exact - 1.0).abs() }
}

/// A share in percent with enough digits to distinguish it from 0 and 100.
pub(super) fn percent(share: f64) -> String {
    let percent = share * 100.0;
    match percent {
        0.0 => "0".into(),
        _ if percent < 0.01 => format!("{percent:.0e}"),
        _ if percent < 10.0 => format!("{percent:.2}"),
        _ if percent > 99.995 && percent < 100.0 => ">99.99".into(),
        100.0 => "100".into(),
        _ if percent > 99.9 => format!("{percent:.2}"),
        _ => format!("{percent:.1}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_parsed_in_every_notation() {
        for (text, value) in [
            ("3.5", 3.5),
            ("-1e-8", -1e-8),
            ("1E+4", 1e4),
            ("pi", std::f64::consts::PI),
            ("π", std::f64::consts::PI),
            ("-e", -std::f64::consts::E),
            ("2^-24", 2f64.powi(-24)),
            ("-2^-25", -(2f64.powi(-25))),
            ("2^-1074", 5e-324),
            ("0.0e5*2 - 0^3", 0.0),
            ("1 + 2^-11", 1.0 + 2f64.powi(-11)),
            ("1e-8+2^3", 8.0 + 1e-8),
            ("1-3*2^-12", 1.0 - 3.0 * 2f64.powi(-12)),
            ("e-1", std::f64::consts::E - 1.0),
            ("inf", f64::INFINITY),
            ("fp16:0x3c00", 1.0),
            ("bf16:c040", -3.0),
            ("e4m3:0x7e", 448.0),
            ("e5m2:0x7b", 57344.0),
            ("fp32:0x00000001", 2f64.powi(-149)),
        ] {
            assert_eq!(parse_value(text).unwrap(), value, "{text}");
        }
        assert!(parse_value("nan").unwrap().is_nan());
        assert!(parse_value("e4m3:0x7f").unwrap().is_nan());
    }

    #[test]
    fn decimals_are_exact() {
        assert_eq!(exact(0.1), "0.1000000000000000055511151231257827021181583404541015625");
        assert_eq!(exact(2f64.powi(-24)), "5.9604644775390625e-8");
        assert_eq!(exact(65504.0), "65504");
        assert_eq!(exact(-1e20), "-1e20");
        assert_eq!(exact(f64::NEG_INFINITY), "-inf");
        assert_eq!(exact(-0.0), "-0");
        for x in [1e-300, 5e-324, 1.5e300, 123_456.789] {
            assert_eq!(exact(x).parse::<f64>().unwrap(), x);
        }
    }

    #[test]
    fn short_forms() {
        for (x, text) in [
            (2f64.powi(-24), "2^-24"),
            (-(2f64.powi(15)), "-2^15"),
            (4.0, "4"),
            (65504.0, "65504"),
            (0.1, "0.1"),
            (1.0 / 3.0, "0.333333"),
            (1e-8, "1.000e-8"),
            (f64::NAN, "NaN"),
        ] {
            assert_eq!(short(x), text);
        }
        assert_eq!([0.0, 1e-7, 0.05, 0.5, 0.99999, 1.0].map(percent), ["0", "1e-5", "5.00", "50.0", ">99.99", "100"]);
    }
}
