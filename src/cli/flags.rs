//! The flags that define a run. They become dotted keys, which [`Config`] interprets.

use crate::cli::run_lookup::RUNS_DIR;
use crate::digest::read_at_most;
use crate::settings::{Kind, Setting, in_digits, integer, number};
use crate::train::{Config, ConfigLayers, check_floats, settings_at};
use crate::{Error, Result};
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Maximum size of a configuration file.
const MAX_BYTES: u64 = 1 << 20;

/// The flags of a configuration. Flags override the configuration file, which overrides the defaults.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct ConfigArgs {
    /// A configuration file (TOML); see configs/
    #[arg(long, value_name = "FILE", help_heading = "Configuration")]
    config: Option<PathBuf>,
    #[command(flatten)]
    flags: Flags,
    /// Any other key of the configuration, e.g. `--set scaler.hysteresis=2`
    #[arg(long = "set", value_name = "KEY=VALUE", help_heading = "Configuration")]
    set: Vec<String>,
}

/// The flags that settings have, as keys with values.
#[derive(Clone, Debug, Default)]
struct Flags(BTreeMap<String, toml::Value>);

/// The settings that have a flag, in the order of the help.
fn flagged() -> Vec<(Setting, Arg)> {
    let values = |config: Result<Config>| config.and_then(|config| config.values()).unwrap_or_default();
    let usual = values(Ok(Config::default()));
    let tiny = values(Config::resolve(&ConfigLayers::default()));
    let flag = |setting: Setting| {
        let [usual, tiny] = [&usual, &tiny].map(|values| values.get(&setting.key).map_or_else(String::new, shown));
        let default = match (usual.as_str(), tiny.as_str()) {
            (usual, tiny) if usual == tiny || tiny.is_empty() => usual.to_owned(),
            ("", tiny) => format!("{tiny} for `tiny`"),
            (usual, tiny) => format!("{usual}; {tiny} for `tiny`"),
        };
        Some((setting.arg(&default)?, setting))
    };
    let mut flags: Vec<_> = Config::settings().into_iter().filter_map(flag).collect();
    flags.sort_by_key(|(_, setting)| setting.flag.as_ref().map(|(heading, position, _)| (*heading, *position)));
    flags.into_iter().map(|(arg, setting)| (setting, arg)).collect()
}

/// A default value in a flag's help; empty for switches and lists.
fn shown(value: &toml::Value) -> String {
    match value {
        toml::Value::Float(number) => in_digits(*number),
        toml::Value::Integer(number) => number.to_string(),
        toml::Value::String(text) if text.trim() == text => text.clone(),
        toml::Value::String(text) => format!("{text:?}"),
        _ => String::new(),
    }
}

impl Args for Flags {
    fn augment_args(command: Command) -> Command {
        command.args(flagged().into_iter().map(|(_, arg)| arg))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Flags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut flags = Self::default();
        flags.update_from_arg_matches(matches)?;
        Ok(flags)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        for (setting, arg) in flagged() {
            let id = arg.get_id().as_str();
            let value = match setting.kind {
                Kind::Switch => matches.get_flag(id).then_some(true.into()),
                Kind::Integer => matches.get_one::<i64>(id).copied().map(toml::Value::from),
                Kind::Float => matches.get_one::<f64>(id).copied().map(toml::Value::from),
                Kind::Text | Kind::Texts | Kind::Pair | Kind::Section => {
                    let mut values: Vec<_> =
                        matches.get_many(id).into_iter().flatten().cloned().map(toml::Value::String).collect();
                    if values.len() > 1 { Some(values.into()) } else { values.pop() }
                }
            };
            self.0.extend(value.map(|value| (setting.key, value)));
        }
        Ok(())
    }
}

impl ConfigArgs {
    /// The configuration from the flags and their file.
    pub(crate) fn resolve(&self) -> Result<Config> {
        let file = self.config.as_deref().map(read).transpose()?;
        Config::resolve(&ConfigLayers { file, overrides: self.overrides()? })
    }

    /// Rejects a configuration file for a resumed run, and invalid flags.
    pub(crate) fn check_resume(&self) -> Result<()> {
        if self.config.is_some() {
            let message = "a resumed run uses its own configuration; make changes with flags or --set";
            return Err(Error::config("--config", message));
        }
        self.overrides().map(drop)
    }

    /// The configuration of the run in `folder` with the flags applied, and the changes; an error if a change needs a
    /// new run.
    pub(crate) fn resolve_for_resume(&self, folder: &Path) -> Result<(Config, Vec<String>)> {
        let config = self.resolve_from_run(folder)?;
        let changes = config.check_resumable(&Self::default().resolve_from_run(folder)?)?;
        Ok((config, changes))
    }

    /// The configuration of the run in `folder` with the flags applied, for another run.
    pub(crate) fn resolve_from_run(&self, folder: &Path) -> Result<Config> {
        let (name, text) = read(&folder.join("config.toml"))?;
        self.resolve_from_text(&name, text)
    }

    /// Like [`Self::resolve_from_run`], with the text of a run's configuration.
    pub(crate) fn resolve_from_text(&self, name: &str, text: String) -> Result<Config> {
        let file = Some((name.to_owned(), text));
        Config::resolve(&ConfigLayers { file, overrides: self.overrides()? })
    }

    /// The value of a key that was given by its flag or by `--set`.
    pub(crate) fn given(&self, key: &str) -> Option<toml::Value> {
        let overrides = self.overrides().unwrap_or_default();
        overrides.into_iter().rev().find(|(given, _)| given == key).map(|(_, value)| value)
    }

    /// The folder of all runs.
    pub(crate) fn runs(&self) -> PathBuf {
        let given = self.given("checkpoint.dir");
        given.as_ref().and_then(toml::Value::as_str).unwrap_or(RUNS_DIR).into()
    }

    pub(crate) fn steps(&self) -> Option<i64> {
        self.given("train.steps").and_then(|steps| steps.as_integer())
    }

    fn overrides(&self) -> Result<Vec<(String, toml::Value)>> {
        let mut out = Vec::new();
        for (key, value) in &self.flags.0 {
            match value.as_str() {
                Some(settings) if key == "lora" => out.extend(lora(settings)?),
                _ => out.push((key.clone(), value.clone())),
            }
        }
        let flags = out.len();
        for pair in &self.set {
            let Some((key, value)) = pair.split_once('=').filter(|(key, _)| !key.trim().is_empty()) else {
                return Err(Error::config("--set", format!("`{pair}` is not of the form key=value")));
            };
            // Anything that is not a TOML value is a string, so `--set data=a.txt` needs no quotes.
            let text = format!("v = {value}");
            check_floats(&text).map_err(|problem| Error::config(key.trim(), problem))?;
            let parsed = text.parse::<toml::Table>().ok().and_then(|mut table| table.remove("v"));
            let set = settings_at(key.trim(), parsed.unwrap_or_else(|| value.into()));
            if let Some((key, _)) = set.iter().find(|(key, _)| out[..flags].iter().any(|(flag, _)| flag == key)) {
                return Err(Error::config(key, "is set by its flag and by `--set`; set it only once"));
            }
            out.extend(set);
        }
        Ok(out)
    }
}

/// The keys that `--lora` sets.
pub(super) fn lora(settings: &str) -> Result<Vec<(String, toml::Value)>> {
    let wrong = |message: String| Err(Error::config("--lora", message));
    let mut out = Vec::new();
    for setting in settings.split(',').map(str::trim) {
        let (key, value) = setting.split_once('=').map_or((setting, None), |(key, value)| (key, Some(value)));
        let names = |value: &str| value.split('+').map(toml::Value::from).collect::<Vec<_>>();
        let (key, value) = match (key, value) {
            ("r" | "rank", Some(value)) => ("r", integer(value).map(toml::Value::from)),
            (rank, None) if integer(rank).is_ok() => ("r", integer(rank).map(toml::Value::from)),
            ("alpha" | "dropout", Some(value)) => (key, number(value).map(toml::Value::from)),
            ("target_modules" | "modules_to_save", Some(value)) => (key, Ok(names(value).into())),
            ("use_rslora" | "use_dora", None) => (key, Ok(true.into())),
            _ => {
                let known = "`16`, `r=16`, `alpha=32`, `target_modules=q_proj+v_proj`, `dropout=0.05`, `use_rslora`, \
                             `use_dora`, `modules_to_save=norm`";
                return wrong(format!("`{setting}` is not one of {known}"));
            }
        };
        let key = format!("lora.{key}");
        match value {
            Ok(_) if out.iter().any(|(set, _)| *set == key) => return wrong(format!("`{setting}` sets `{key}` again")),
            Ok(value) => out.push((key, value)),
            Err(problem) => return wrong(format!("the number in `{setting}` is {problem}")),
        }
    }
    Ok(out)
}

/// The name and text of a configuration file.
fn read(path: &Path) -> Result<(String, String)> {
    let origin = path.display().to_string();
    let text = String::from_utf8(read_at_most(path, MAX_BYTES)?);
    let text = text.map_err(|error| Error::config(format!("`{origin}`"), error.to_string()))?;
    Ok((origin, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_names_the_defaults_of_tiny_and_of_other_models() {
        let configs = [Config::default(), Config::resolve(&ConfigLayers::default()).unwrap()];
        let values = configs.map(|config| config.values().unwrap());
        for (setting, arg) in flagged().into_iter().filter(|(setting, _)| setting.key != "dtype") {
            let help = arg.get_help().unwrap().to_string();
            for value in values.iter().filter_map(|values| values.get(&setting.key)) {
                assert!(help.contains(&shown(value)), "--{}: {value} in `{help}`", arg.get_id());
            }
        }
    }
}
