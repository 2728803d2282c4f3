//! Prints a configuration with an explanation of each key, from the comments of the structs that define the keys.

use super::Config;
use super::keys::{leaves, template};
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// The struct behind each section, and the source that holds it.
const SECTIONS: [(&str, &str, &str); 12] = [
    ("", "Config", include_str!("../config.rs")),
    ("fields", "Fields", include_str!("../../data/row.rs")),
    ("train", "TrainSection", include_str!("sections.rs")),
    ("lora", "LoraSection", include_str!("sections.rs")),
    ("optimizer", "OptimizerSection", include_str!("sections.rs")),
    ("schedule", "ScheduleSection", include_str!("sections.rs")),
    ("scaler", "GradScalerConfig", include_str!("../../precision/scaler_config.rs")),
    ("precision", "PrecisionConfig", include_str!("../../precision/fallback.rs")),
    ("precision.fp8", "Fp8Config", include_str!("../../precision/fp8.rs")),
    ("dropout", "DropoutSection", include_str!("sections.rs")),
    ("checkpoint", "CheckpointSection", include_str!("sections.rs")),
    ("telemetry", "TelemetrySection", include_str!("sections.rs")),
];

impl Config {
    /// [`Config::to_toml`] with a comment above each key. Keys without a value are there as comments.
    pub fn explained(&self) -> Result<String> {
        let table = toml::Table::try_from(self).map_err(|error| Error::config("configuration", error.to_string()))?;
        let values: BTreeMap<_, _> = leaves(&table).into_iter().collect();
        let comments = comments();
        let (mut text, mut section) = (String::new(), String::new());
        // The template has every key, in file order.
        for line in template().to_toml()?.lines() {
            if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
                name.clone_into(&mut section);
                _ = write!(text, "\n{line}\n");
            } else if let Some((key, _)) = line.split_once(" = ") {
                let path = if section.is_empty() { key.to_owned() } else { format!("{section}.{key}") };
                for comment in comments.get(&path).into_iter().flatten() {
                    _ = writeln!(text, "# {comment}");
                }
                _ = match values.get(&path) {
                    Some(value) => writeln!(text, "{key} = {value}"),
                    None => writeln!(text, "# {key} ="),
                };
            }
        }
        Ok(text)
    }
}

/// The comment of every key, by line.
fn comments() -> BTreeMap<String, Vec<String>> {
    let mut found = BTreeMap::new();
    for (section, name, source) in SECTIONS {
        let body = source.split_once(&format!("pub struct {name} {{")).map_or("", |(_, body)| body);
        let mut comment = Vec::new();
        for line in body.lines().map(str::trim).take_while(|line| *line != "}") {
            if let Some(text) = line.strip_prefix("///") {
                comment.push(text.trim().to_owned());
            } else if let Some((field, _)) = line.strip_prefix("pub ").and_then(|field| field.split_once(':')) {
                let path = if section.is_empty() { field.to_owned() } else { format!("{section}.{field}") };
                found.insert(path, std::mem::take(&mut comment));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
    use super::*;
    use crate::train::{Layers, known_keys};

    /// N4.
    #[test]
    fn every_key_is_explained_and_the_text_resolves_to_the_same_configuration() {
        let comments = comments();
        for key in known_keys() {
            assert!(comments.get(&key).is_some_and(|comment| !comment.is_empty()), "{key} is not explained");
        }
        let config = Config::resolve(&Layers::default()).unwrap();
        let text = config.explained().unwrap();
        let file = Some(("explained.toml".to_owned(), text));
        assert_eq!(Config::resolve(&Layers { file, ..Layers::default() }).unwrap(), config);
    }
}
