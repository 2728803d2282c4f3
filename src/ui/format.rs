//! Formats numbers for display, in few columns.

use crate::precision::exact_log2;
use crate::telemetry::{Quantity, RunState};
pub(crate) use crate::telemetry::{bytes, bytes_of};
use crate::untrusted::is_unsafe_char;
use ratatui::text::Span;

/// A loss scale or factor: `2^15` if it is a power of two, else as [`short`] writes it.
pub(crate) fn scale(value: f32) -> String {
    exact_log2(value).map_or_else(|| short(f64::from(value)), |exponent| format!("2^{exponent}"))
}

/// About three significant digits: `0.83`, `41.2`, `6.0e-8`, `NaN`.
pub(crate) fn short(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        magnitude if !(0.001..10_000.0).contains(&magnitude) => format!("{value:.1e}"),
        magnitude if magnitude < 1.0 => format!("{value:.3}"),
        magnitude if magnitude < 100.0 => format!("{value:.2}"),
        _ => format!("{value:.0}"),
    }
}

/// A magnitude in the table of tensors: `6.0e-8`, always with an exponent; `-` if there is none.
pub(crate) fn magnitude(value: Option<f32>) -> String {
    value.map_or_else(|| "-".into(), |value| format!("{value:.1e}"))
}

/// A stored number in as many digits as it needs: `65504`, `5.9604645e-8`.
pub(crate) fn exact(value: f32) -> String {
    if value == 0.0 || (1e-3..1e7).contains(&value.abs()) { value.to_string() } else { format!("{value:e}") }
}

pub(crate) fn quantity(quantity: Quantity, value: f64) -> String {
    match quantity {
        Quantity::Rate => rate(value),
        Quantity::Number => short(value),
        Quantity::Count => count(value),
        Quantity::Bytes => bytes(value.max(0.0) as u64),
        Quantity::Log2 => format!("2^{value:.1}"),
        Quantity::Share => share(value),
    }
}

/// A loss: three decimals, `NaN` or `inf`.
pub(crate) fn loss(value: f64) -> String {
    decimals(value, 3)
}

/// A number with `count` decimals; a number that they round to 0 has no sign.
pub(crate) fn decimals(value: f64, count: usize) -> String {
    let text = format!("{value:.count$}");
    match text.strip_prefix('-') {
        Some(zero) if zero.bytes().all(|byte| byte == b'0' || byte == b'.') => zero.to_owned(),
        _ => text,
    }
}

/// A number in decimals without the zeros at their end.
pub(crate) fn trimmed(digits: &str) -> &str {
    if digits.contains('.') { digits.trim_end_matches('0').trim_end_matches('.') } else { digits }
}

/// The number of decimals, at least `least`, in which two labels with this difference are not equal.
pub(crate) fn decimals_for(difference: f64, least: usize) -> usize {
    // The logarithm of 0.001 may be a little below -3.
    (-difference.log10() - 1e-9).ceil().clamp(least as f64, 12.0) as usize
}

/// A learning rate: `4.1e-5`.
pub(crate) fn rate(value: f64) -> String {
    if value == 0.0 { "0".into() } else { format!("{value:.1e}") }
}

/// A count with a decimal prefix: `950`, `41.2k`, `1.3M`.
pub(crate) fn count(value: f64) -> String {
    match value {
        _ if value >= 999_950_000.0 => format!("{:.1}G", value / 1e9),
        _ if value >= 999_950.0 => format!("{:.1}M", value / 1e6),
        _ if value >= 1000.0 => format!("{:.1}k", value / 1e3),
        _ if value >= 10.0 || value.fract() == 0.0 => format!("{value:.0}"),
        _ => format!("{value:.1}"),
    }
}

/// The steps done and their total: `5/2000`, or `5` if the total is 0, which means unknown.
pub(crate) fn steps(done: u64, total: u64) -> String {
    if total == 0 { done.to_string() } else { format!("{done}/{total}") }
}

/// The letter of a compared run or setting.
pub(crate) fn letter(index: usize) -> char {
    char::from(b'A' + (index % 26) as u8)
}

/// A duration as `hh:mm:ss`, preceded by days if there are any.
pub(crate) fn clock(seconds: f64) -> String {
    let whole = seconds.max(0.0).round() as u64;
    let days = whole / 86_400;
    let hours = whole / 3600 % 24;
    let minutes = whole / 60 % 60;
    let seconds = whole % 60;
    if days > 0 {
        format!("{days}d {hours:02}:{minutes:02}:{seconds:02}")
    } else {
        format!("{hours:02}:{minutes:02}:{seconds:02}")
    }
}

/// A short time: `96 ms`, `3.8 s`.
pub(crate) fn milliseconds(value: f64) -> String {
    if value < 1000.0 { format!("{} ms", count(value)) } else { format!("{:.1} s", value / 1000.0) }
}

/// How long ago: `41 s`, `12 min`, `3 h`.
pub(crate) fn ago(seconds: f64) -> String {
    match seconds.max(0.0) {
        seconds if seconds < 100.0 => format!("{seconds:.0} s"),
        seconds if seconds < 6000.0 => format!("{:.0} min", seconds / 60.0),
        seconds => format!("{:.0} h", seconds / 3600.0),
    }
}

/// A share of a whole in percent: `0.1%`; `0%` only for zero.
pub(crate) fn percent(part: u64, whole: u64) -> String {
    if part == 0 || whole == 0 {
        return "0%".into();
    }
    match part as f64 / whole as f64 * 100.0 {
        share if share < 0.01 => "<0.01%".into(),
        share if share < 1.0 => format!("{share:.2}%"),
        share => format!("{share:.1}%"),
    }
}

/// Like [`percent`], of a share.
pub(crate) fn share(value: f64) -> String {
    const PARTS: f64 = 1e12;
    if value.is_nan() {
        return "NaN".into();
    }
    percent((value * PARTS).ceil() as u64, PARTS as u64)
}

/// A sentence on the newest counts of lost updates; `None` if none was counted.
pub(crate) fn lost_updates(run: &RunState) -> Option<String> {
    let (step, counts) = run.lost_updates?;
    let policy = run.policy();
    let reach = share(counts.reach()?);
    let rest = if policy.params == policy.compute { "the rest is lost" } else { "the masters keep the rest" };
    let ulps = counts.mean_ulps()?;
    let weights = policy.compute.format().name;
    Some(format!("{reach} of step {step}'s updates reach the {weights} weights; {rest} ({ulps:.3} ULP apart)"))
}

/// The last part of a path or of a name on the Hub.
pub(crate) fn base_name(path: &str) -> &str {
    path.trim_end_matches('/').rsplit('/').next().unwrap_or(path)
}

/// The columns of a terminal that a text takes: an ideograph and most emoji take two.
pub(crate) fn columns(text: &str) -> usize {
    Span::raw(text).width()
}

/// A text, [`truncated`] or with blanks after it, to fill this number of columns.
pub(crate) fn padded(text: &str, width: usize) -> String {
    let text = truncated(text, width);
    format!("{text}{}", " ".repeat(width.saturating_sub(columns(&text))))
}

/// Makes a text [`printable`], and truncates it to this number of columns, with an ellipsis.
pub(crate) fn truncated(text: &str, width: usize) -> String {
    let text = printable(text);
    if columns(&text) <= width {
        return text;
    }
    let mut kept = String::new();
    for c in text.chars() {
        kept.push(c);
        if columns(&kept) >= width {
            kept.pop();
            break;
        }
    }
    kept + "…"
}

/// Replaces line breaks, tabs and other control characters, which would break the layout or control the terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars()
        .map(|c| match c {
            '\n' => '⏎',
            c if is_unsafe_char(c) => ' ',
            c => c,
        })
        .collect()
}

/// Shortens a tensor's long name: by the words before the block's number and before an expert's, then in the middle,
/// because the end names the tensor.
pub(crate) fn shortened_name(name: &str, width: usize) -> String {
    let fits = |name: &str| name.chars().count() <= width;
    let name = name.split_once("layers.").filter(|_| !fits(name)).map_or(name, |(_, from_block)| from_block);
    let of_expert = || {
        let (block, tensor) = name.split_once(".experts.")?;
        Some(format!("{}.e{tensor}", block.split('.').next()?))
    };
    let shorter = Some(name).filter(|name| !fits(name)).and_then(|_| of_expert());
    let name = shorter.as_deref().unwrap_or(name);
    if fits(name) {
        return name.to_owned();
    }
    let length = name.chars().count();
    let kept = width.saturating_sub(1);
    let start = kept * 2 / 5;
    let end = kept - kept * 2 / 5;
    name.chars().take(start).chain(['…']).chain(name.chars().skip(length - end)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_infinities_and_nan_have_names() {
        assert_eq!([65536.0, 0.5, 1.0, 3.0].map(scale), ["2^16", "2^-1", "2^0", "3.00"]);
        assert_eq!([0.0, 0.83, 41.23, 6e-8, 123_456.0].map(short), ["0", "0.830", "41.23", "6.0e-8", "1.2e5"]);
        assert_eq!([f64::NAN, f64::INFINITY, f64::NEG_INFINITY].map(short), ["NaN", "inf", "-inf"]);
        assert_eq!([65504.0, 0.0, 2f32.powi(-24), f32::NAN].map(exact), ["65504", "0", "5.9604645e-8", "NaN"]);
        assert_eq!([3.5, 950.0, 41_200.0, 999_960.0].map(count), ["3.5", "950", "41.2k", "1.0M"]);
        assert_eq!([2.25, 96.4, 3800.0].map(milliseconds), ["2.2 ms", "96 ms", "3.8 s"]);
        assert_eq!([-0.0, -0.0004, -0.0006, 1.5].map(loss), ["0.000", "0.000", "-0.001", "1.500"]);
        assert_eq!([decimals(-0.00004, 4), decimals(-1.0, 0), decimals(f64::NAN, 4)], ["0.0000", "-1", "NaN"]);
        assert_eq!([12, 999_949, 999_950, 22_978_000_000].map(bytes), ["12 B", "999.9 kB", "1.0 MB", "23.0 GB"]);
        assert_eq!(bytes_of(512, 22_978_000), "0.0/23.0 MB");
        assert_eq!([1267.0, 90_061.0, -1.0].map(clock), ["00:21:07", "1d 01:01:01", "00:00:00"]);
        assert_eq!(
            [percent(5, 3712), percent(0, 9), percent(1, 1_000_000), percent(1, 2)],
            ["0.13%", "0%", "<0.01%", "50.0%"]
        );
        assert_eq!([1e-9, 0.0, f64::NAN].map(share), ["<0.01%", "0%", "NaN"]);
    }

    #[test]
    fn labels_have_the_decimals_of_their_difference() {
        let differences = [f64::INFINITY, 20.0, 0.25, 0.1, 0.05, 0.001, 2e-5, 0.0];
        assert_eq!(differences.map(|difference| decimals_for(difference, 1)), [1, 1, 1, 1, 2, 3, 5, 12]);
        assert_eq!(decimals_for(0.25, 2), 2);
    }

    #[test]
    fn generated_text_cannot_control_the_terminal() {
        assert_eq!(printable("a\n\u{1b}[2Jb\tc"), "a⏎ [2Jb c");
    }

    /// Regression: columns were counted as characters, so a wide name shifted the rest of its row.
    #[test]
    fn wide_characters_take_two_columns() {
        assert_eq!([columns("ab"), columns("名前"), columns("🎉é")], [2, 4, 3]);
        assert_eq!([padded("名", 4), padded("abc", 2)], ["名  ", "a…"]);
        let widths = [0, 1, 3, 4, 5, 7, 8];
        assert_eq!(
            widths.map(|width| truncated("名前ab名", width)),
            ["…", "…", "名…", "名…", "名前…", "名前ab…", "名前ab名"]
        );
    }

    #[test]
    fn a_shortened_name_keeps_its_block_and_its_end() {
        let name = "layers.11.self_attn.q_proj.weight";
        assert_eq!(shortened_name(name, 33), name);
        assert_eq!(shortened_name(&format!("model.{name}"), 38), "11.self_attn.q_proj.weight");
        assert_eq!(shortened_name(name, 30), "11.self_attn.q_proj.weight");
        assert_eq!(shortened_name(name, 24), "11.self_a….q_proj.weight");
        assert_eq!(shortened_name("layers.0.mlp.experts.17.down_proj.weight", 24), "0.e17.down_proj.weight");
        assert_eq!([shortened_name(name, 1), shortened_name(name, 0)], ["…", "…"]);
    }
}
