//! Settings, each defined once: key, type, default, comment, limits, flag, and whether a resumed run has to keep its
//! value.
//!
//! [`settings!`] turns a list of settings into a section of the configuration: a struct with defaults, read and written
//! by serde, and the [`Setting`]s that everything else is derived from (`config --explain`, flags, hints, checks).

use crate::{Error, Result};
use clap::{Arg, ArgAction};
use serde::{Deserialize, Serialize};
use std::any::TypeId;
use std::collections::BTreeSet;

/// A key of the configuration, or a section.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    /// The dotted key.
    pub(crate) key: String,
    /// The comment, by line.
    pub(crate) comment: &'static [&'static str],
    pub(crate) kind: Kind,
    /// Whether a resumed run has to keep its value.
    pub(crate) fixed: bool,
    /// Its flag, and its heading and position in the help; flags at one position are in the order of their keys.
    pub(crate) flag: Option<(Heading, u8, Arg)>,
    limits: Option<(f64, f64)>,
    inner: Vec<Self>,
}

/// The type of a setting's value, as a flag reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Integer,
    Float,
    /// A flag without a value.
    Switch,
    /// A list of texts.
    Texts,
    /// A list of two numbers.
    Pair,
    /// Any other value.
    Text,
    /// A table of settings.
    Section,
}

/// A heading of the flags in the help, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Heading {
    Text,
    Training,
    Machine,
    LossScale,
    Along,
}

impl Heading {
    const TITLES: [&str; 5] = ["Model and text", "Training", "Machine", "Loss scale", "Along the way"];
}

impl Kind {
    fn of<T: 'static>() -> Self {
        fn is<A: 'static, T: 'static>() -> bool {
            [TypeId::of::<A>(), TypeId::of::<Option<A>>()].contains(&TypeId::of::<T>())
        }
        match () {
            () if is::<usize, T>() || is::<u64, T>() || is::<u32, T>() => Self::Integer,
            () if is::<f64, T>() || is::<f32, T>() => Self::Float,
            () if is::<bool, T>() => Self::Switch,
            () if is::<Vec<String>, T>() => Self::Texts,
            () if is::<[f64; 2], T>() => Self::Pair,
            () => Self::Text,
        }
    }

    /// The problem of a value that is not of this type; `None` if it is, or if any text may be a value.
    pub(crate) fn mismatch(self, value: &toml::Value) -> Option<String> {
        let is = |problem: &str| Some(format!("`{}` is {problem}", shortened(value)));
        let in_list = |element: &toml::Value, expected: &str| {
            Some(format!("`{}` in the list is not {expected}", shortened(element)))
        };
        match (self, value) {
            (Self::Integer, value) => whole_number(value).err().and_then(|problem| is(&problem)),
            (Self::Float, value) if !is_number(value) => is(&format!("not {NUMBER}")),
            (Self::Switch, value) if !value.is_bool() => is("not `true` or `false`"),
            (Self::Texts, toml::Value::Array(texts)) => {
                texts.iter().find(|text| !text.is_str()).and_then(|other| in_list(other, QUOTED))
            }
            (Self::Texts, _) => is("not a list such as [\"q_proj\", \"v_proj\"]"),
            (Self::Pair, toml::Value::Array(numbers)) if numbers.len() == 2 => {
                numbers.iter().find(|number| !is_number(number)).and_then(|other| in_list(other, "a number"))
            }
            (Self::Pair, _) => is("not a list of two numbers such as [0.9, 0.95]"),
            _ => None,
        }
    }
}

fn is_number(value: &toml::Value) -> bool {
    value.is_float() || value.is_integer()
}

impl Setting {
    /// A setting of type `T` without limits and flag, which a resumed run may change.
    pub(crate) fn new<T: 'static>(key: &str, comment: &'static [&'static str]) -> Self {
        let key = key.to_owned();
        let kind = Kind::of::<T>();
        let limits = match TypeId::of::<T>() {
            integer if integer == TypeId::of::<u32>() => Some((0.0, f64::from(u32::MAX))),
            // A scale.
            float if float == TypeId::of::<f32>() => Some((1e-45, 3.4e38)),
            _ => None,
        };
        Self { key, comment, kind, fixed: false, flag: None, limits, inner: Vec::new() }
    }

    /// Makes a resumed run keep the value.
    pub(crate) fn fixed(self) -> Self {
        Self { fixed: true, ..self }
    }

    /// Limits numbers to `least..=greatest`.
    pub(crate) fn within(self, least: f64, greatest: f64) -> Self {
        Self { limits: Some((least, greatest)), ..self }
    }

    /// Adds the flag `--name`.
    pub(crate) fn flag(self, name: &'static str, heading: Heading, position: u8, value_name: &'static str) -> Self {
        let arg = Arg::new(name).long(name).help_heading(Heading::TITLES[heading as usize]);
        let arg = if value_name.is_empty() { arg } else { arg.value_name(value_name) };
        Self { flag: Some((heading, position, arg)), ..self }
    }

    fn with(self, change: impl FnOnce(Arg) -> Arg) -> Self {
        Self { flag: self.flag.map(|(heading, position, arg)| (heading, position, change(arg))), ..self }
    }

    /// Gives the flag a short form.
    pub(crate) fn short(self, short: char) -> Self {
        self.with(|arg| arg.short(short))
    }

    /// Gives the flag a help that is not the key's comment.
    pub(crate) fn help(self, help: &'static str) -> Self {
        self.with(|arg| arg.help(help))
    }

    /// Makes the flag repeatable; several values are a list.
    pub(crate) fn repeated(self) -> Self {
        self.with(|arg| arg.action(ArgAction::Append))
    }

    /// Hides the flag in the help.
    pub(crate) fn hidden(self) -> Self {
        self.with(|arg| arg.hide(true))
    }

    /// Makes it a section with these settings.
    pub(crate) fn section(self, settings: fn() -> Vec<Self>) -> Self {
        let nested = |inner: Self| Self { key: format!("{}.{}", self.key, inner.key), ..inner };
        Self { kind: Kind::Section, inner: settings().into_iter().map(nested).collect(), ..self }
    }

    /// `settings`, each section followed by its own settings.
    pub(crate) fn flat(settings: Vec<Self>) -> Vec<Self> {
        let with_inner = |mut one: Self| {
            let inner = std::mem::take(&mut one.inner);
            std::iter::once(one).chain(inner)
        };
        settings.into_iter().flat_map(with_inner).collect()
    }

    /// The key within its section.
    pub(crate) fn name(&self) -> &str {
        self.key.rsplit('.').next().unwrap_or_default()
    }

    /// Rejects a value outside of the limits.
    pub(crate) fn check(&self, value: &toml::Value) -> Result<()> {
        let Some((least, greatest)) = self.limits else { return Ok(()) };
        let values = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        let mut numbers =
            values.iter().filter_map(|value| value.as_float().or(value.as_integer().map(|whole| whole as f64)));
        let Some(number) = numbers.find(|number| !(least..=greatest).contains(number)) else { return Ok(()) };
        let message = match self.kind {
            Kind::Integer if number < least => format!("must be at least {least}"),
            Kind::Integer => format!("{number} is more than the maximum of {greatest}"),
            _ => format!("`{}` is not between {} and {}", in_digits(number), in_digits(least), in_digits(greatest)),
        };
        Err(Error::config(&self.key, message))
    }

    /// The flag for clap, with `default` in its help unless that is empty or the help names another one.
    pub(crate) fn arg(&self, default: &str) -> Option<Arg> {
        let (_, _, arg) = self.flag.clone()?;
        let comment = || self.comment.concat().trim().trim_end_matches('.').to_owned();
        let mut help = arg.get_help().map_or_else(comment, ToString::to_string);
        if !default.is_empty() && !help.contains("[default: ") {
            help = format!("{help} [default: {default}]");
        }
        let arg = arg.help(help);
        Some(match self.kind {
            Kind::Switch => arg.action(ArgAction::SetTrue),
            Kind::Integer => arg.value_parser(integer),
            Kind::Float => arg.value_parser(number),
            Kind::Text | Kind::Texts | Kind::Pair | Kind::Section => arg,
        })
    }
}

const NUMBER: &str = "a number such as 0.5, 6e-8, 2^24 or 1/3";
const WHOLE_NUMBER: &str = "a whole number such as 600, 1e6 or 2^10";
/// A description of a text in a file.
pub(crate) const QUOTED: &str = "text in quotes";

/// `number` in few digits: `0.5`, `1e99`, `600`.
pub(crate) fn in_digits(number: f64) -> String {
    format!("{number:?}").trim_end_matches(".0").to_owned()
}

/// A number, also as a power or a fraction: `6e-8`, `2^24`, `1/3`.
pub(crate) fn number(text: &str) -> Result<f64, String> {
    let part = |part: &str| part.trim().parse::<f64>();
    let parsed = match (text.split_once('^'), text.split_once('/')) {
        (Some((base, exponent)), _) => part(base).and_then(|base| Ok(base.powf(part(exponent)?))),
        (None, Some((over, under))) => part(over).and_then(|over| Ok(over / part(under)?)),
        (None, None) => part(text),
    };
    match parsed {
        Ok(0.0) if !is_written_as_zero(text) => Err("too small: at least 4.94e-324, or 0".into()),
        parsed => parsed.map_err(|_| format!("not {NUMBER}")),
    }
}

/// Whether `text`, a number, a power or a fraction, has no digit from 1 to 9 before its exponent or denominator.
pub(crate) fn is_written_as_zero(text: &str) -> bool {
    let digits = text.split(['e', 'E', '^', '/']).next().unwrap_or_default();
    !digits.contains(|c| ('1'..='9').contains(&c))
}

/// A whole number of at least 0, written like [`number`].
pub(crate) fn integer(text: &str) -> Result<i64, String> {
    let parsed = text.parse().or_else(|_| match number(text) {
        // The cast saturates.
        Ok(whole) if whole.fract() == 0.0 && whole <= MAX_EXACT => Ok(whole as i64),
        Ok(whole) if whole.fract() == 0.0 => Err("too large: at most 2^63 - 1, and from 2^53 only in digits".into()),
        _ => Err(format!("not {WHOLE_NUMBER}")),
    });
    parsed.and_then(|whole: i64| if whole < 0 { Err("below 0".into()) } else { Ok(whole) })
}

/// The whole number of at least 0 that a value of a file means.
pub(crate) fn whole_number(value: &toml::Value) -> Result<i64, String> {
    integer(&value.as_str().map_or_else(|| written(value), str::to_owned))
}

/// `value` as in a file.
fn written(value: &toml::Value) -> String {
    value.as_float().map_or_else(|| value.to_string(), in_digits)
}

/// `value` as in a file, without its end if it is long.
pub(crate) fn shortened(value: &toml::Value) -> String {
    let text = written(value);
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// The interval of something that a run repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "toml::Value", into = "toml::Value")]
pub enum Interval {
    /// A number of steps; 0 for never.
    Steps(u64),
    /// The end of each epoch.
    Epoch,
}

impl TryFrom<toml::Value> for Interval {
    type Error = String;

    fn try_from(value: toml::Value) -> Result<Self, String> {
        if value.as_str() == Some("epoch") {
            return Ok(Self::Epoch);
        }
        let steps = whole_number(&value).map_err(|_| "use a number of steps, or `epoch`")?;
        Ok(Self::Steps(steps.unsigned_abs()))
    }
}

impl From<Interval> for toml::Value {
    fn from(interval: Interval) -> Self {
        match interval {
            Interval::Steps(steps) => Self::Integer(steps as i64),
            Interval::Epoch => Self::String("epoch".into()),
        }
    }
}

/// Up to here every whole number is an `f64`.
const MAX_EXACT: f64 = 9_007_199_254_740_992.0;

/// Whether files leave a setting out: it has no value, or a variant that serde skips.
pub(crate) fn is_unset<T: Serialize>(value: &T) -> bool {
    // JSON has no NaN, and TOML no number from 2^63.
    !serde_json::to_value(value).is_ok_and(|value| !value.is_null()) && toml::Value::try_from(value).is_err()
}

/// The maximum of anything that is counted: products of three such numbers do not overflow.
pub(crate) const MAX_COUNT: f64 = 1_048_576.0;

/// The keys of a section whose values differ from the defaults.
pub(crate) fn changed_keys<T: Serialize + Default>(section: &T) -> BTreeSet<String> {
    let values = |section: &T| toml::Table::try_from(section).unwrap_or_default();
    let default = values(&T::default());
    values(section).into_iter().filter(|(key, value)| default.get(key) != Some(value)).map(|(key, _)| key).collect()
}

/// Defines a section. A setting is a comment and `key: type = default`, followed by methods of [`Setting`].
macro_rules! settings {
    ($(#[$attribute:meta])* pub struct $name:ident { $(
        $(#[doc = $comment:literal])+
        $key:ident: $type:ty = $default:expr $(, $property:ident($($argument:expr),*))*;
    )+ }) => {
        $(#[$attribute])*
        #[derive(serde::Serialize, serde::Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name {
            $($(#[doc = $comment])+ #[serde(skip_serializing_if = "crate::settings::is_unset")] pub $key: $type,)+
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($key: $default),+ }
            }
        }

        impl $name {
            pub(crate) fn settings() -> Vec<$crate::settings::Setting> {
                use $crate::settings::Setting;
                Setting::flat(vec![$(
                    Setting::new::<$type>(stringify!($key), &[$($comment),+])$(.$property($($argument),*))*
                ),+])
            }
        }
    };
}
pub(crate) use settings;
