//! The dotted keys of a configuration, and tables built from them.

use super::Config;
use crate::settings::{Kind, Setting};
use crate::{Error, Result};

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
        let closeness = |setting: &Setting| {
            strsim::jaro_winkler(&setting.key, &key).max(strsim::jaro_winkler(setting.name(), last))
        };
        let near = known.iter().filter(|setting| closeness(setting) > 0.8);
        let hint = match near.max_by(|a, b| closeness(a).total_cmp(&closeness(b))) {
            Some(nearest) => format!("; did you mean `{}`?", nearest.key),
            None => "; `finetune config --explain` prints all keys".into(),
        };
        return Err(Error::config(key, format!("unknown key{hint}")));
    }
    Ok(())
}

/// The table in which the dotted `key` has `value`.
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
