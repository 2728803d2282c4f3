//! `finetune completions` and `finetune man`: the command line for shells and packagers.

use crate::{Error, Result};
use clap::{Args, Command};
use clap_complete::Shell;
use std::io::Write;

#[derive(Args, Debug)]
pub(super) struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Completes the names of runs, which the definition of the commands does not have. The scripts end with it.
const BASH_RUNS: &str = r#"
_finetune_runs() {
    _finetune "$@"
    [[ $2 == -* || $3 == -* && $3 != --resume ]] || COMPREPLY+=($(cd checkpoints 2>/dev/null && compgen -d -- "$2"))
}
complete -F _finetune_runs -o bashdefault -o default finetune
"#;
const FISH_RUNS: &str = r"
function __fish_finetune_runs
    set -l folders checkpoints/*/
    string replace -r '^checkpoints/(.*)/$' '$1' -- $folders
end
complete -c finetune -n 'not __fish_finetune_needs_command' -a '(__fish_finetune_runs)'
complete -c finetune -n __fish_finetune_needs_command -l resume -r -a '(__fish_finetune_runs)'
";
/// Like the others, but follows the first line, and the arguments name it.
const ZSH_RUNS: &str = "
_finetune_runs() {
    local -a runs=(checkpoints/*(/N:t))
    _alternative 'runs:run:compadd -a runs' 'files:file:_files'
}
";

pub(super) fn completions(mut command: Command, args: &CompletionsArgs, out: &mut dyn Write) -> Result<()> {
    // Write to memory first, because the generator panics on a write error.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "finetune", &mut script);
    match args.shell {
        Shell::Bash => script.extend(BASH_RUNS.as_bytes()),
        Shell::Fish => script.extend(FISH_RUNS.as_bytes()),
        Shell::Zsh => script = with_zsh_runs(&String::from_utf8_lossy(&script)).into_bytes(),
        _ => {}
    }
    out.write_all(&script).map_err(Error::stdout)
}

/// Lets each argument that is not a flag's value, and `--resume`, complete runs.
fn with_zsh_runs(script: &str) -> String {
    let mut lines = script.lines();
    let first = lines.next().unwrap_or_default();
    let mut all = format!("{first}\n{ZSH_RUNS}");
    for line in lines {
        let mut line = line.to_owned();
        if ["':", "'*:", "'--resume="].iter().any(|start| line.starts_with(start)) {
            line = line.replace(":_files'", ":_finetune_runs'").replace(":_default'", ":_finetune_runs'");
        }
        all.extend([line.as_str(), "\n"]);
    }
    all
}

/// Writes one manual page of all commands to `out`.
pub(super) fn man(command: Command, out: &mut dyn Write) -> Result<()> {
    let mut command = command.name("finetune");
    command.build();
    clap_mangen::Man::new(command.clone()).render(out).and_then(|()| sections(&command, out)).map_err(Error::stdout)
}

/// Writes a section for each subcommand of `command` and of its subcommands.
fn sections(command: &Command, out: &mut dyn Write) -> std::io::Result<()> {
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set() && sub.get_name() != "help") {
        let man = clap_mangen::Man::new(sub.clone());
        writeln!(out, ".SH \"{}\"", sub.get_bin_name().unwrap_or_default().to_uppercase())?;
        man.render_description_section(out)?;
        man.render_synopsis_section(out)?;
        man.render_options_section(out)?;
        sections(sub, out)?;
    }
    Ok(())
}
