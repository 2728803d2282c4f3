//! The dotted keys of a configuration, tables built from them, and errors about them.

use super::Config;
use crate::settings::{Kind, QUOTED, Setting, integer, number, shortened};
use crate::{Error, Result};
use toml::de::{DeTable, DeValue};

/// The most bytes of a TOML error that quotes its line.
const MAX_QUOTED: usize = 1000;

/// Every setting that has a value, in the order of the keys.
pub(super) fn known() -> Vec<Setting> {
    let mut settings = Config::settings();
    settings.retain(|setting| setting.kind != Kind::Section);
    settings.sort_by(|a, b| a.key.cmp(&b.key));
    settings
}

pub(super) fn leaves(table: &toml::Table) -> Vec<(String, &toml::Value)> {
    let mut out = Vec::new();
    for (key, value) in table {
        match value {
            toml::Value::Table(inner) => {
                out.extend(leaves(inner).into_iter().map(|(rest, value)| (format!("{key}.{rest}"), value)));
            }
            value => out.push((key.clone(), value)),
        }
    }
    out
}

/// The settings that `value` sets at `key`: every entry of a table, or `key` itself.
pub(crate) fn settings_at(key: &str, value: toml::Value) -> Vec<(String, toml::Value)> {
    match value.as_table().map(leaves) {
        Some(set) if !set.is_empty() => {
            set.into_iter().map(|(rest, value)| (format!("{key}.{rest}"), value.clone())).collect()
        }
        _ => vec![(key.to_owned(), value)],
    }
}

pub(super) fn value_at<'a>(table: &'a toml::Table, key: &str) -> Option<&'a toml::Value> {
    match key.split_once('.') {
        None => table.get(key),
        Some((head, rest)) => value_at(table.get(head)?.as_table()?, rest),
    }
}

/// The message of a syntax error in `text`. A number that is too large has the words of [`integer`].
pub(super) fn toml_message(text: &str, error: &toml::de::Error) -> String {
    let literal = error.span().and_then(|span| text.get(span)).unwrap_or_default().replace('_', "");
    let is_whole = literal.trim_start_matches(['+', '-']).bytes().all(|byte| byte.is_ascii_digit());
    let problem = integer(&literal).err().filter(|_| is_whole && !literal.is_empty());
    let reason = problem.map_or_else(|| error.message().to_owned(), |problem| format!("the number is {problem}"));
    let quoted = error.to_string().replace(error.message(), &reason);
    match quoted.lines().next() {
        Some(place) if quoted.len() > MAX_QUOTED => format!("{place}: {reason}"),
        _ => quoted.trim_end().to_owned(),
    }
}

/// Rejects a number in `text`, such as `1e-400`, that TOML reads as 0.
pub(crate) fn check_floats(text: &str) -> Result<(), String> {
    fn check(value: &DeValue<'_>) -> Result<(), String> {
        match value {
            DeValue::Float(float) => {
                number(float.as_str()).map(drop).map_err(|problem| format!("`{float}` is {problem}"))
            }
            DeValue::Array(values) => values.iter().try_for_each(|value| check(value.get_ref())),
            DeValue::Table(table) => table.values().try_for_each(|value| check(value.get_ref())),
            _ => Ok(()),
        }
    }
    DeTable::parse(text).map_or(Ok(()), |table| check(&DeValue::Table(table.into_inner())))
}

/// The error for a value in `table` that cannot be read; `path` is its place and `reason` the library's message.
pub(super) fn value_error(table: &toml::Table, path: &str, reason: &str) -> Error {
    // Report an element of a list as the list.
    let key = path.split('[').next().unwrap_or_default();
    let setting = known().into_iter().find(|setting| setting.key == key);
    let Some((setting, value)) = setting.zip(value_at(table, key)) else { return Error::config(key, reason) };
    if let Some(problem) = setting.kind.mismatch(value) {
        return Error::config(key, problem);
    }
    if let Err(beyond_limits) = setting.check(value) {
        return beyond_limits;
    }
    // The library's words are for programmers.
    let variants = reason.strip_prefix("unknown variant ").and_then(|rest| rest.split_once(", expected "));
    let problem = match variants {
        Some((_, known)) => format!("not {known}"),
        None if reason.starts_with("invalid type: ") => format!("not {QUOTED}"),
        None => format!("invalid: {reason}"),
    };
    Error::config(key, format!("`{}` is {problem}", shortened(value)))
}

pub(super) fn check_keys(keys: impl IntoIterator<Item = String>) -> Result<()> {
    let known = known();
    for key in keys {
        if known.iter().any(|setting| setting.key == key) {
            continue;
        }
        if let Some(inner) = known.iter().find(|setting| setting.key.starts_with(&format!("{key}."))) {
            return Err(Error::config(
                key,
                format!("is a section, not a value; set its keys, such as `{}`", inner.key),
            ));
        }
        let last = key.rsplit('.').next().unwrap_or_default();
        let nearest = |closeness: &dyn Fn(&Setting) -> f64, least| {
            let nearest = known.iter().max_by(|a, b| closeness(a).total_cmp(&closeness(b)));
            nearest.filter(|setting| closeness(setting) > least)
        };
        // Short texts are parts of many names, and keys of the same section are similar by their section alone.
        let is_part = |name: &str| last.len() > 3 && name.contains(last);
        let similarity = |name: &str| f64::from(is_part(name)) + strsim::jaro_winkler(name, last);
        let by_name = nearest(&|setting| similarity(setting.name()), 0.8);
        let hint = match by_name.or_else(|| nearest(&|setting| strsim::jaro_winkler(&setting.key, &key), 0.92)) {
            Some(nearest) => format!("; did you mean `{}`?", nearest.key),
            None => "; `finetune config --explain` prints all keys".into(),
        };
        return Err(Error::config(key, format!("unknown key{hint}")));
    }
    Ok(())
}

pub(super) fn nested(key: &str, value: toml::Value) -> toml::Table {
    let mut table = toml::Table::new();
    match key.split_once('.') {
        None => table.insert(key.to_owned(), value),
        Some((head, rest)) => table.insert(head.to_owned(), toml::Value::Table(nested(rest, value))),
    };
    table
}

pub(super) fn merge(base: &mut toml::Table, over: toml::Table) {
    for (key, value) in over {
        match (base.get_mut(&key), value) {
            (Some(toml::Value::Table(base)), toml::Value::Table(over)) => merge(base, over),
            (_, value) => {
                base.insert(key, value);
            }
        }
    }
}
