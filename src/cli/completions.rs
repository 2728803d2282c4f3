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

/// Completes the names of runs, which the definition of the commands does not have.
const BASH_RUNS: &str = r#"
_finetune_runs() {
    _finetune "$@"
    [[ $2 == -* || $3 == -* && $3 != --resume ]] || COMPREPLY+=($(cd checkpoints 2>/dev/null && compgen -d -- "$2"))
}
complete -F _finetune_runs -o bashdefault -o default finetune
"#;

/// Writes a shell's completion script to `out`.
pub(super) fn completions(mut command: Command, args: &CompletionsArgs, out: &mut dyn Write) -> Result<()> {
    // Write to memory first, because the generator panics on a write error.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "finetune", &mut script);
    if args.shell == Shell::Bash {
        script.extend(BASH_RUNS.as_bytes());
    }
    out.write_all(&script).map_err(Error::stdout)
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
