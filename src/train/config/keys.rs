//! The dotted keys of a configuration, and tables built from them.

use super::Config;
use crate::data::{Fields, Format};
use crate::engine::kernels::Choice;
use crate::{Error, Result};
use std::path::PathBuf;

/// A configuration with a value for every key.
pub(super) fn template() -> Config {
    let mut config = Config {
        revision: Some(String::new()),
        tokenizer: Some(PathBuf::new()),
        val: Some(String::new()),
        format: Some(Format::Text),
        chat_template: Some(String::new()),
        fields: Fields { text: Some(String::new()), prompt: Some(String::new()), completion: Some(String::new()) },
        threads: Some(1),
        kernels: Choice::Candle,
        ..Config::default()
    };
    (config.lora.r, config.lora.alpha) = (Some(1), Some(1.0));
    config.train.epochs = Some(1.0);
    config.train.steps = Some(1);
    config.schedule.warmup_steps = Some(1);
    config.checkpoint.run = Some(String::new());
    config.precision.fp8.layer = Some(0);
    config.precision.fp8.switch_variance = Some(0.0);
    config
}

/// All dotted keys of a configuration.
pub fn known_keys() -> Vec<String> {
    let table = toml::Table::try_from(template()).unwrap_or_default();
    leaves(&table).into_iter().map(|(key, _)| key).collect()
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

pub(super) fn check_keys(keys: impl IntoIterator<Item = String>, origin: &str) -> Result<()> {
    let known = known_keys();
    for key in keys {
        if known.contains(&key) {
            continue;
        }
        let last = |key: &str| key.rsplit('.').next().unwrap_or_default().to_owned();
        let closeness = |candidate: &String| {
            strsim::jaro_winkler(candidate, &key).max(strsim::jaro_winkler(&last(candidate), &last(&key)))
        };
        let nearest = known.iter().max_by(|a, b| closeness(a).total_cmp(&closeness(b)));
        let hint = nearest.map_or_else(String::new, |nearest| format!("; did you mean `{nearest}`?"));
        return Err(Error::config(key, format!("unknown key in {origin}{hint}")));
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
