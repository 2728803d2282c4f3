//! The list of all flags, settings and texts about them, so that none changes unnoticed.

use finetune::cli::definition;
use finetune::train::Config;
use serde::Deserialize;
use std::collections::{BTreeSet, HashSet};
use std::fmt::Write as _;

/// The help of `command` and of its commands, with the flags that it hides. A flag that has the same help in an earlier
/// command is only named.
fn describe(command: &mut clap::Command, path: &str, seen: &mut HashSet<String>, text: &mut String) {
    let mut entries: Vec<(String, String)> = vec![(format!("\n# {path}"), String::new())];
    for line in command.render_long_help().to_string().lines().filter(|line| !line.trim().is_empty()) {
        match (line.strip_prefix("          "), entries.last_mut()) {
            (Some(help), Some((_, helps))) => helps.extend([" ", help.trim()]),
            _ => entries.push((line.to_owned(), String::new())),
        }
    }
    for arg in command.get_arguments().filter(|arg| arg.is_hide_set()) {
        entries.push((format!("hidden: {arg}"), format!(" {}", arg.get_help().unwrap_or_default())));
    }
    let is_seen =
        entries.into_iter().map(|(name, help)| (!help.is_empty() && !seen.insert(format!("{name}{help}")), name, help));
    for group in is_seen.collect::<Vec<_>>().chunk_by(|(a, ..), (b, ..)| *a && *b) {
        _ = if let [(false, name, help)] = group {
            writeln!(text, "{name}{help}")
        } else {
            let names: Vec<_> = group.iter().map(|(_, name, _)| name.trim()).collect();
            writeln!(text, "as above: {}", names.join("; "))
        };
    }
    for sub in command.get_subcommands_mut().filter(|sub| sub.get_name() != "help") {
        describe(sub, &format!("{path} {}", sub.get_name()), seen, text);
    }
}

#[test]
#[cfg_attr(feature = "mpi", ignore = "has a command more")]
fn flags() {
    let mut command = definition();
    let mut text = String::new();
    command.build();
    describe(&mut command, "finetune", &mut HashSet::new(), &mut text);
    insta::assert_snapshot!("flags", text);
}

/// The value of another configuration for `key`.
fn other_value(default: &Config, key: &str) -> Config {
    let values = r#"3 4 0.5 true false "random" "jsonl" "bf16" "candle" "block" "all" "always" "adamw8bit" "gradients" "dpo" "linear"
        "clean" "retry" "predictive" "layer" "head" "drop" "x" ["x"] [0.5,0.5]"#;
    let (section, name) = key.rsplit_once('.').unwrap_or(("", key));
    let mut others = values.split_whitespace().filter_map(|value| {
        let mut all = toml::Table::try_from(default).unwrap();
        let table = section
            .split('.')
            .filter(|section| !section.is_empty())
            .fold(&mut all, |table, section| table[section].as_table_mut().unwrap());
        table.extend(format!("{name} = {value}").parse::<toml::Table>().unwrap());
        Config::deserialize(all).ok()
    });
    others.find(|other| other != default).unwrap_or_else(|| panic!("no other value for `{key}`"))
}

/// The keys of a configuration in TOML, also those without a value, which are comments that end with `=`.
fn keys(explained: &str) -> BTreeSet<String> {
    let (mut keys, mut section) = (BTreeSet::new(), String::new());
    for line in explained.lines() {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            section = format!("{name}.");
        }
        let optional = line.strip_prefix("# ").and_then(|line| line.strip_suffix(" ="));
        let name = optional.or(line.split_once(" = ").map(|(name, _)| name));
        keys.extend(name.filter(|name| !name.contains([' ', '#'])).map(|name| format!("{section}{name}")));
    }
    keys
}

#[test]
fn settings() {
    let default = Config::default();
    let mut text = default.explained().unwrap();
    let may_change = |key: &String| default.check_resumable(&other_value(&default, key)).is_ok();
    let (free, fixed): (Vec<String>, Vec<String>) = keys(&text).into_iter().partition(may_change);
    _ = write!(text, "\nA resumed run may change {}.\nIt keeps {}.\n", free.join(", "), fixed.join(", "));
    insta::assert_snapshot!("settings", text);
}
