//! The dependency order of the modules, and a few habits of the source tree, read from `src/**/*.rs`, and the habits in
//! `kernels/src/**/*.rs`, whose package the compiler keeps from using the other.
//!
//! A module may name only modules above it in [`ORDER`]. The reader is a scanner, not a parser: it removes
//! comments and string literals, then follows every path that begins with `crate` or `super`, including `use` trees.
//! The tests at the end check it against sources that break each rule.
#![allow(clippy::unwrap_used, reason = "a test stops at the first thing that is not as it should be")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The modules of the library, lowest first.
const ORDER: [&str; 23] = [
    "error",
    "untrusted",
    "settings",
    "precision",
    "protobuf",
    "telemetry",
    "random",
    "digest",
    "temporary",
    "engine",
    "amp",
    "data",
    "store",
    "inference",
    "train",
    "ui",
    "screen",
    "lab",
    "compare",
    "report",
    "doctor",
    "cli",
    "main",
];
/// Pairs of modules: the first must not use the second, regardless of their order.
const STRANGERS: [(&str, &str); 3] = [("screen", "train"), ("train", "screen"), ("compare", "lab")];
/// Modules that must not use candle.
const WITHOUT_CANDLE: [&str; 8] =
    ["error", "untrusted", "settings", "precision", "protobuf", "telemetry", "ui", "screen"];
/// Names the crate root re-exports from `error`.
const ROOT_NAMES: [&str; 2] = ["Error", "Result"];
/// Folders whose files import each other in one direction only.
const WITHOUT_CYCLES: [&str; 1] = ["data"];
/// Types that may have a second definition: types of `amp` and of the engine share PyTorch's names, and so do a layer and
/// its operation; an operation's arguments for CUDA have its name.
const DEFINED_TWICE: [&str; 9] = [
    "Activate",
    "AdamW",
    "AttentionBackward",
    "CrossEntropy",
    "GradScaler",
    "Linear",
    "NormBackward",
    "Rotate",
    "SumRows",
];
const MAX_MAIN_LINES: usize = 60;
const MAX_FILE_LINES: usize = 700;
const MAX_COLUMNS: usize = 120;

/// One source file: its path under `src/` and its text.
struct Source {
    path: PathBuf,
    text: String,
}

impl Source {
    /// The path of modules from the crate root, `["kernels", "matmul"]` for `kernels/matmul.rs`.
    fn module(&self) -> Vec<String> {
        let without_extension = self.path.with_extension("");
        let parts: Vec<String> = without_extension.iter().map(|part| part.to_str().unwrap().to_owned()).collect();
        if parts == ["lib"] { Vec::new() } else { parts }
    }
}

/// Checks every rule on every file; returns one line for each breach.
fn breaches(sources: &[Source]) -> Vec<String> {
    let each = sources.iter().flat_map(|source| [dependencies(source), habits(source)].concat());
    each.chain(WITHOUT_CYCLES.into_iter().filter_map(|folder| import_cycle(sources, folder))).collect()
}

/// The breaches of the dependency order in one file.
fn dependencies(source: &Source) -> Vec<String> {
    let module = source.module();
    let Some(top) = module.first() else { return Vec::new() };
    let Some(rank) = rank(top) else {
        return vec![format!("{}: `{top}` is not in the dependency order", source.path.display())];
    };
    let code = code_of(&source.text);
    let mut found = candle_use(source, &code);
    for used in used_modules(&code, &module) {
        let stranger = STRANGERS.contains(&(top.as_str(), used.as_str()));
        match self::rank(&used) {
            None if ROOT_NAMES.contains(&used.as_str()) => {}
            None => found.push(format!("{}: `crate::{used}` is no module of the order", source.path.display())),
            Some(other) if other > rank || stranger => {
                found.push(format!("{}: `{top}` must not use `{used}`", source.path.display()));
            }
            Some(_) => {}
        }
    }
    found
}

/// The breach of a module of [`WITHOUT_CANDLE`] that uses candle in its `code`.
fn candle_use(source: &Source, code: &str) -> Vec<String> {
    let module = source.module();
    let Some(top) = module.first().filter(|top| WITHOUT_CANDLE.contains(&top.as_str())) else { return Vec::new() };
    if !code.contains("candle_") {
        return Vec::new();
    }
    vec![format!("{}: `{top}` must not use candle", source.path.display())]
}

/// The breaches of rules about files.
fn habits(source: &Source) -> Vec<String> {
    let path = source.path.display();
    let lines = source.text.lines().count();
    let mut found = Vec::new();
    if !source.text.starts_with("//! ") {
        found.push(format!("{path}: does not open with a `//!` comment that gives its content and purpose"));
    }
    if source.path.ends_with("mod.rs") {
        found.push(format!("{path}: name it after its folder instead, `foo.rs` next to `foo/`"));
    }
    let limit = if source.path == Path::new("main.rs") { MAX_MAIN_LINES } else { MAX_FILE_LINES };
    if lines > limit {
        found.push(format!("{path}: {lines} lines, more than {limit}"));
    }
    // `rustfmt` leaves comments alone.
    let is_wide = |line: &str| line.trim_start().starts_with("//") && line.chars().count() > MAX_COLUMNS;
    if let Some(at) = source.text.lines().position(is_wide) {
        found.push(format!("{path}: line {} is a comment of more than {MAX_COLUMNS} columns", at + 1));
    }
    found
}

/// The breach of the files of `folder` that import each other, directly or through others. Tests may import any file.
fn import_cycle(sources: &[Source], folder: &str) -> Option<String> {
    let files = sources.iter().filter(|source| source.path.parent() == Some(Path::new(folder)));
    let mut imports: BTreeMap<String, Vec<String>> = files
        .map(|source| {
            let code = code_of(source.text.split("#[cfg(test)]").next().unwrap());
            let tokens = tokens(&code);
            let mut used = Vec::new();
            for at in (0..tokens.len()).filter(|at| tokens[*at] == "super" && (*at == 0 || tokens[at - 1] != "::")) {
                leaves(&tokens[at + 1..], &mut used);
            }
            (source.module().pop().unwrap(), used)
        })
        .collect();
    // Removes files that import none of the others, or that none of the others imports, until only cycles are left.
    loop {
        let names: BTreeSet<String> = imports.keys().cloned().collect();
        for used in imports.values_mut() {
            used.retain(|name| names.contains(name));
        }
        let imported: BTreeSet<String> = imports.values().flatten().cloned().collect();
        imports.retain(|name, used| !used.is_empty() && imported.contains(name));
        if imports.len() == names.len() {
            let list = names.into_iter().collect::<Vec<_>>().join(", ");
            return (!list.is_empty()).then(|| format!("{folder}: files import each other: {list}"));
        }
    }
}

fn rank(module: &str) -> Option<usize> {
    ORDER.iter().position(|name| *name == module)
}

/// The top-level modules that paths in `code` lead to, seen from `module`.
fn used_modules(code: &str, module: &[String]) -> Vec<String> {
    let mut used = Vec::new();
    let tokens = tokens(code);
    // How many inline `mod` blocks enclose the current token: each absorbs one `super`.
    let mut depth = 0_usize;
    let mut inline_modules = Vec::new();
    for (at, token) in tokens.iter().enumerate() {
        let before = at.checked_sub(1).map(|i| tokens[i]);
        match *token {
            "{" => {
                depth += 1;
                if at >= 2 && tokens[at - 2] == "mod" {
                    inline_modules.push(depth);
                }
            }
            "}" => {
                if inline_modules.last() == Some(&depth) {
                    inline_modules.pop();
                }
                depth = depth.saturating_sub(1);
            }
            // `finetune::` is how the binary names the library.
            "crate" | "finetune" if before != Some("::") => leaves(&tokens[at + 1..], &mut used),
            "super" if before != Some("::") => {
                let climbs = 1 + tokens[at + 1..].chunks(2).take_while(|pair| *pair == ["::", "super"]).count();
                // `super` from `foo::bar` is `foo`; from `foo` it is the root.
                if climbs >= module.len() + inline_modules.len() {
                    leaves(&tokens[at + 1 + 2 * (climbs - 1)..], &mut used);
                }
            }
            _ => {}
        }
    }
    used.sort();
    used.dedup();
    used
}

/// The first names after `crate`: one for `crate::a::b`, several for `crate::{a::b, c}`.
fn leaves(after: &[&str], used: &mut Vec<String>) {
    let ["::", first, rest @ ..] = after else { return };
    if *first != "{" {
        used.push((*first).to_owned());
        return;
    }
    let mut depth = 1;
    let mut expects_name = true;
    for token in rest {
        match *token {
            "{" => depth += 1,
            "}" => depth -= 1,
            "," => expects_name = depth == 1,
            "self" => expects_name = false,
            name if expects_name => {
                used.push(name.to_owned());
                expects_name = false;
            }
            _ => {}
        }
        if depth == 0 {
            return;
        }
    }
}

/// The names that more than one file defines as a type, except those of [`DEFINED_TWICE`].
fn defined_twice<'a>(sources: impl IntoIterator<Item = &'a Source>) -> Vec<String> {
    let mut definitions = BTreeMap::<String, BTreeSet<&Path>>::new();
    for source in sources.into_iter().filter(|source| !source.path.ends_with("tests.rs")) {
        let code = code_of(source.text.split("#[cfg(test)]\nmod ").next().unwrap());
        for pair in tokens(&code).windows(2) {
            if matches!(pair[0], "struct" | "enum" | "trait" | "union") && pair[1] != "$" {
                definitions.entry(pair[1].to_owned()).or_default().insert(&source.path);
            }
        }
    }
    definitions.retain(|name, files| files.len() > 1 && !DEFINED_TWICE.contains(&name.as_str()));
    definitions.into_iter().map(|(name, files)| format!("`{name}` is defined in each of {files:?}")).collect()
}

/// Names, `::` and single other characters, in order.
fn tokens(code: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut rest = code.trim_start();
    while let Some(first) = rest.chars().next() {
        let is_name = |c: char| c.is_alphanumeric() || c == '_';
        let length = if rest.starts_with("::") {
            2
        } else if is_name(first) {
            rest.find(|c| !is_name(c)).unwrap_or(rest.len())
        } else {
            first.len_utf8()
        };
        found.push(&rest[..length]);
        rest = rest[length..].trim_start();
    }
    found
}

/// `text` without comments, string literals and character literals, each replaced by a space.
fn code_of(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let skipped = comment(rest).or_else(|| raw_string(rest, &code)).or_else(|| quoted(rest));
        let length = skipped.unwrap_or(first.len_utf8());
        code.push_str(if skipped.is_some() { " " } else { &rest[..length] });
        rest = &rest[length..];
    }
    code
}

/// The length of the comment that `rest` begins with. Block comments nest.
fn comment(rest: &str) -> Option<usize> {
    if rest.starts_with("//") {
        return Some(rest.find('\n').unwrap_or(rest.len()));
    }
    if !rest.starts_with("/*") {
        return None;
    }
    let (mut at, mut depth) = (2, 1);
    while depth > 0 && at < rest.len() {
        let step = match &rest.as_bytes()[at..] {
            [b'/', b'*', ..] => (2, 1),
            [b'*', b'/', ..] => (2, -1),
            _ => (1, 0),
        };
        at += step.0;
        depth += step.1;
    }
    Some(at)
}

/// The length of the raw string, `r"…"` or `r#"…"#`, that `rest` begins with.
fn raw_string(rest: &str, before: &str) -> Option<usize> {
    if before.ends_with(|c: char| c.is_alphanumeric() || c == '_') && !before.ends_with('b') {
        return None;
    }
    let hashes = rest.strip_prefix('r')?.chars().take_while(|c| *c == '#').count();
    let body = rest[1 + hashes..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    Some(body.find(&end).map_or(rest.len(), |at| 2 + hashes + at + end.len()))
}

/// The length of the string or character literal that `rest` begins with; a lifetime is none.
fn quoted(rest: &str) -> Option<usize> {
    let quote = rest.chars().next().filter(|c| matches!(c, '"' | '\''))?;
    if quote == '\'' {
        let mut after = rest[1..].chars();
        let (first, second) = (after.next()?, after.next()?);
        if first != '\\' && second != '\'' {
            return None;
        }
    }
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return Some(at + c.len_utf8()),
            _ => {}
        }
    }
    Some(rest.len())
}

fn sources_under(folder: &Path, root: &Path, found: &mut Vec<Source>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources_under(&path, root, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            found.push(Source { path: path.strip_prefix(root).unwrap().to_owned(), text });
        }
    }
}

#[test]
fn the_source_tree_keeps_the_dependency_order_and_the_habits() {
    let [sources, kernels] = ["src", "kernels/src"].map(|folder| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
        let mut sources = Vec::new();
        sources_under(&root, &root, &mut sources);
        assert!(sources.len() > 2, "found only {} files under {folder}/", sources.len());
        sources
    });
    let of_kernels =
        kernels.iter().flat_map(|source| [candle_use(source, &code_of(&source.text)), habits(source)].concat());
    let found: Vec<String> =
        breaches(&sources).into_iter().chain(of_kernels).chain(defined_twice(sources.iter().chain(&kernels))).collect();
    assert!(found.is_empty(), "the architecture is broken:\n  {}", found.join("\n  "));
}

/// Returns the violations of the rules in one file that holds `body` below a proper opening.
fn judge(path: &str, body: &str) -> Vec<String> {
    breaches(&[Source { path: path.into(), text: format!("//! About.\n{body}\n") }])
}

#[test]
fn a_module_that_uses_one_below_it_is_found_in_every_spelling() {
    for body in [
        "use crate::train::Trainer;",
        "use crate::{precision::Dtype, train::Trainer};",
        "use crate::{error, precision::{Dtype, FloatFormat}, train};",
        "fn f() -> crate::train::Trainer {}",
        "pub(crate) use crate::train;",
        "use super::super::train::Trainer;",
        "use super::super::{error::Error, train::Trainer};",
        "mod tests { use super::super::super::train; }",
        "const NOT_A_STRING: char = '\"'; use crate::train; const S: &str = \"\";",
        "fn f<'a>(x: &'a str) { crate::train::run(x) }",
        "const R: &str = r#\"a \" b\"#; use crate::train;",
        "/* a /* nested */ comment */ use crate::train;",
    ] {
        let found = judge("engine/gelu.rs", body);
        assert_eq!(found, ["engine/gelu.rs: `engine` must not use `train`"], "in `{body}`");
    }
}

#[test]
fn higher_modules_comments_and_strings_are_no_breach() {
    for body in [
        "use crate::{Error, Result, error, precision::Dtype};",
        "use crate::engine::kernels::matmul;",
        "use super::matmul;",
        "mod tests { use super::super::matmul; }",
        "// use crate::train::Trainer;",
        "/// See [`crate::train::Trainer`].",
        "/* use crate::train; */",
        "const HELP: &str = \"crate::train \\\" crate::train\";",
        "const HELP: &str = r#\"crate::train \" crate::train\"#;",
        "macro_rules! m { () => { $crate::engine::kernels::gelu } }",
    ] {
        assert_eq!(judge("engine/kernels/gelu.rs", body), [""; 0], "in `{body}`");
    }
}

#[test]
fn super_from_a_top_module_reaches_its_siblings() {
    assert_eq!(judge("precision.rs", "use super::train;"), ["precision.rs: `precision` must not use `train`"]);
    assert_eq!(judge("precision.rs", "mod tests { use super::train; }"), [""; 0]);
}

#[test]
fn training_and_dashboard_do_not_import_each_other() {
    assert_eq!(judge("screen.rs", "use crate::train;"), ["screen.rs: `screen` must not use `train`"]);
    assert_eq!(judge("train/step.rs", "use crate::screen::dashboard;").len(), 1);
    assert_eq!(judge("cli/run.rs", "use crate::{screen, train};"), [""; 0]);
}

#[test]
fn candle_stays_out_of_the_pure_modules() {
    for path in ["error.rs", "precision/scaler.rs", "telemetry.rs", "screen/view.rs"] {
        assert_eq!(judge(path, "use candle_core::Tensor;").len(), 1, "in `{path}`");
    }
    assert_eq!(judge("error.rs", "pub enum Error { Engine(candle_core::Error) }").len(), 1);
    assert_eq!(judge("engine.rs", "use candle_core::Tensor;"), [""; 0]);
}

#[test]
fn files_that_import_each_other_are_found() {
    let cycle = |files: &[(&str, &str)]| {
        let source = |(name, text): &(&str, &str)| Source { path: name.into(), text: (*text).to_owned() };
        import_cycle(&files.iter().map(source).collect::<Vec<_>>(), "data")
    };
    let (a, b) = (("data/a.rs", "use super::b::B;"), ("data/b.rs", "use super::{c::C, x};"));
    let found = cycle(&[a, b, ("data/c.rs", "fn f() { super::a::g() }"), ("data/d.rs", "use super::a;")]);
    assert_eq!(found.unwrap(), "data: files import each other: a, b, c");
    let c = ("data/c.rs", "// super::a\n#[cfg(test)]\nmod tests { use super::super::a; }");
    assert_eq!(cycle(&[a, b, c, ("store/c.rs", "use super::a;")]), None);
}

#[test]
fn a_type_has_one_definition() {
    let sources = ["pub struct Place;", "enum Place { A }", "struct Other; #[cfg(test)]\nmod tests { struct Place; }"];
    let sources = ["a.rs", "b.rs", "c.rs"].into_iter().zip(sources);
    let sources: Vec<_> = sources.map(|(path, text)| Source { path: path.into(), text: text.into() }).collect();
    assert_eq!(defined_twice(&sources), [r#"`Place` is defined in each of {"a.rs", "b.rs"}"#]);
    assert_eq!(defined_twice(&sources[1..]), [""; 0]);
}

#[test]
fn unknown_modules_long_files_wide_comments_and_silent_openings_are_found() {
    assert_eq!(judge("utils.rs", "")[0], "utils.rs: `utils` is not in the dependency order");
    assert_eq!(judge("train.rs", "use crate::utils::x;")[0], "train.rs: `crate::utils` is no module of the order");
    assert_eq!(judge("main.rs", &"\n".repeat(MAX_MAIN_LINES)).len(), 1);
    assert_eq!(judge("main.rs", "fn main() -> ExitCode { finetune::cli::run() }"), [""; 0]);
    assert_eq!(judge("train.rs", &"\n".repeat(MAX_FILE_LINES)).len(), 1);
    assert_eq!(judge("train/mod.rs", "").len(), 1);
    assert_eq!(judge("train.rs", &format!("//{}", "·".repeat(MAX_COLUMNS - 2))).len(), 0);
    assert_eq!(judge("train.rs", &format!("    //{}", "x".repeat(MAX_COLUMNS - 5))).len(), 1);
    let silent = Source { path: "train.rs".into(), text: "use std::fmt;\n".into() };
    assert_eq!(breaches(&[silent]).len(), 1);
}
