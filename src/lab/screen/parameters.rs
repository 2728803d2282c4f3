//! A view's parameters, how keys change them, and the command line that has their values.

use crate::lab::parse_value;
use clap::builder::ArgExt;
use clap::{Arg, ArgAction, Command};

/// A parameter; an empty value omits its flag.
#[derive(Debug, Clone)]
pub(crate) struct Field {
    /// The flag's name without dashes, or the argument's.
    pub(crate) flag: &'static str,
    pub(crate) value: String,
    /// The initial value.
    pub(super) first: String,
    /// How the arrow keys change it.
    pub(super) control: Control,
    /// Whether its value was chosen: by a key, by typing, or by a scenario.
    pub(super) chosen: bool,
}

/// The look of an argument on the screen, attached to its definition for the command line.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Control {
    pub(super) adjust: Adjust,
    /// The initial value, if it is not the argument's default.
    start: Option<&'static str>,
    /// The least and the greatest value that keys reach.
    ends: (f64, f64),
    /// Whether a run has a value for it, which counts until another one is chosen.
    pub(super) from_run: bool,
    /// Whether it is shown only on demand.
    pub(super) rare: bool,
}

/// Several parameters for one argument: `key=value` pairs, or values of a flag that can be repeated.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Controls(pub &'static [(&'static str, Control)]);

impl ArgExt for Control {}
impl ArgExt for Controls {}

/// How the arrow keys change a value.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Adjust {
    /// Not at all: it must be typed.
    Typed,
    /// To the next or previous of these.
    Among(&'static [&'static str]),
    /// Doubles and halves, at least 1; an empty value starts at this.
    Double(u32),
    /// By 1, or 10 for coarse steps; an empty value starts at this.
    Count(i32),
    /// Doubles and halves, keeping the sign; fine steps change the second digit by 1.
    Scale,
    /// By this step, or ten times it for coarse steps.
    By(f64),
}

impl From<Adjust> for Control {
    fn from(adjust: Adjust) -> Self {
        Self::new(adjust)
    }
}

impl Control {
    /// A parameter that starts at the argument's default, without ends.
    pub(crate) const fn new(adjust: Adjust) -> Self {
        Self { adjust, start: None, ends: (f64::NEG_INFINITY, f64::INFINITY), from_run: false, rare: false }
    }

    #[must_use]
    pub(crate) const fn start(self, value: &'static str) -> Self {
        Self { start: Some(value), ..self }
    }

    /// Makes keys stop at these values.
    #[must_use]
    pub(crate) const fn within(self, least: f64, greatest: f64) -> Self {
        Self { ends: (least, greatest), ..self }
    }

    /// Shows the parameter only on demand.
    #[must_use]
    pub(crate) const fn rare(self) -> Self {
        Self { rare: true, ..self }
    }

    /// Starts at `value`, or at a run's.
    #[must_use]
    pub(crate) const fn start_from_run(self, value: &'static str) -> Self {
        Self { from_run: true, ..self.start(value) }
    }
}

impl Field {
    /// A parameter at its initial value.
    pub(crate) fn new(flag: &'static str, value: &str, control: impl Into<Control>) -> Self {
        let control = control.into();
        let first = control.start.unwrap_or(value).to_owned();
        Self { flag, value: first.clone(), first, control, chosen: false }
    }

    /// The parameters of an argument; none if it is not on the screen.
    pub(crate) fn of(arg: &'static Arg) -> Vec<Self> {
        let default = arg.get_default_values().first().and_then(|value| value.to_str()).unwrap_or_default();
        let one = arg.get::<Control>().map(|control| Self::new(name(arg), default, *control));
        let parts = arg.get::<Controls>().map_or(&[][..], |controls| controls.0);
        one.into_iter().chain(parts.iter().map(|(name, control)| Self::new(name, "", *control))).collect()
    }

    /// Changes the value; `other` selects the other step: fine for values, coarse for counts.
    pub(super) fn step(&mut self, up: bool, other: bool) {
        let Some(value) = self.control.adjust.step(&self.value, up, other) else { return };
        let (least, greatest) = self.control.ends;
        self.value = match parse_value(&value) {
            Ok(number) if !(least..=greatest).contains(&number) => format_number(number.clamp(least, greatest)),
            _ => value,
        };
        self.chosen = true;
    }
}

impl Adjust {
    /// The value after `value`; `None` if there is none. `other` selects the other step.
    fn step(self, value: &str, up: bool, other: bool) -> Option<String> {
        let steps = if other { 10 } else { 1 } * if up { 1 } else { -1 };
        match self {
            Self::Typed => None,
            Self::Among(values) => {
                let by = if up { 1 } else { values.len() - 1 };
                let at = values.iter().position(|one| *one == value);
                Some(values[at.map_or(0, |at| (at + by) % values.len())].to_owned())
            }
            Self::Double(first) => {
                let next = |value: u32| if up { value.saturating_mul(2) } else { (value / 2).max(1) };
                Some(value.parse().map_or(first, next).to_string())
            }
            Self::Count(first) => {
                Some(value.parse().map_or(first, |value: i32| value.saturating_add(steps)).to_string())
            }
            Self::Scale => {
                let value = parse_value(value).ok()?;
                if !other || value == 0.0 {
                    return Some(format_number(value * if up { 2.0 } else { 0.5 }));
                }
                let second_digit = 10f64.powf(value.abs().log10().floor() - 1.0);
                let sign = if up { 1.0 } else { -1.0 };
                Some(format_number(((value / second_digit).round() + sign) * second_digit))
            }
            Self::By(step) => {
                Some(format_number(parse_value(value).map_or(step, |value| value + f64::from(steps) * step)))
            }
        }
    }
}

/// A flag without dashes, or an argument's name.
pub(super) fn name(arg: &Arg) -> &str {
    arg.get_long().unwrap_or(arg.get_id().as_str())
}

/// The words that would be typed on the command line for the values of `view`'s parameters.
pub(crate) fn to_args(view: &Command, fields: &[(&str, &str)]) -> Vec<String> {
    let value = |name: &str| fields.iter().find(|(flag, _)| *flag == name).map(|(_, value)| *value);
    let mut typed = vec![view.get_name().to_owned()];
    for arg in view.get_arguments() {
        let repeated = matches!(arg.get_action(), ArgAction::Append);
        if let Some(Controls(parts)) = arg.get::<Controls>() {
            let parts = parts.iter().filter_map(|(name, _)| Some((name, value(name)?)));
            if repeated {
                typed.extend(parts.map(|(_, value)| format!("--{}={value}", name(arg))));
            } else {
                let pairs: Vec<_> = parts.map(|(name, value)| format!("{name}={value}")).collect();
                typed.push(format!("--{}={}", name(arg), pairs.join(",")));
            }
        } else if let Some(value) = value(name(arg)) {
            match arg.get_action() {
                ArgAction::SetTrue => typed.push(format!("--{}", name(arg))),
                _ if !arg.is_positional() => typed.push(format!("--{}={value}", name(arg))),
                _ if repeated => typed.extend(value.split(',').map(str::to_owned)),
                _ => typed.push(value.to_owned()),
            }
        }
    }
    typed
}

/// A value with at most twelve significant digits, so that decimal steps stay exact in decimal.
fn format_number(value: f64) -> String {
    let rounded = format!("{value:.11e}").parse().unwrap_or(value);
    if (1e-4..1e12).contains(&value.abs()) || value == 0.0 { format!("{rounded}") } else { format!("{rounded:e}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_have_two_sizes_and_stop_at_the_ends() {
        let count = Control::new(Adjust::Count(3)).within(0.0, 12.0);
        let among = Control::new(Adjust::Among(&["a", "b", "c"]));
        let [half, double, scale] = [Adjust::By(0.5), Adjust::Double(8), Adjust::Scale].map(Control::new);
        // The value, and the values after a step down, up, and the other step down, up.
        for (control, value, steps) in [
            (count, "5", ["4", "6", "0", "12"]),
            (count, "", ["3", "3", "3", "3"]),
            (among, "a", ["c", "b", "c", "b"]),
            (among, "x", ["a", "a", "a", "a"]),
            (half, "1", ["0.5", "1.5", "-4", "6"]),
            (half, "", ["0.5", "0.5", "0.5", "0.5"]),
            (double, "1", ["1", "2", "1", "2"]),
            (double, "", ["8", "8", "8", "8"]),
            (scale, "-0.5", ["-0.25", "-1", "-0.51", "-0.49"]),
            (scale, "65504", ["32752", "131008", "65000", "67000"]),
            (scale, "0", ["0", "0", "0", "0"]),
            (scale, "1e-8", ["5e-9", "2e-8", "9e-9", "1.1e-8"]),
            (scale, "?", ["?", "?", "?", "?"]),
        ] {
            let after = |(up, other)| {
                let mut field = Field::new("x", value, control);
                field.step(up, other);
                field.value
            };
            assert_eq!([(false, false), (true, false), (false, true), (true, true)].map(after), steps, "{value}");
        }
    }
}
