//! What the person at the terminal sees while another thread trains.

use crate::screen::dashboard::{self, Exit, Output, Plain, Progress, Terminal, Theme};
use crate::telemetry::{Command, Record};
use clap::Args;
use std::io::{stderr, stdout};
use std::sync::mpsc::{Receiver, Sender};

/// How a run is shown. Without a flag: the dashboard where standard output is a terminal of 78×22 or more.
#[derive(Args, Clone, Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub(crate) struct ShowArgs {
    /// The whole screen, however small
    #[arg(long, conflicts_with_all = ["plain", "progress"])]
    pub(crate) dashboard: bool,
    /// One line of key=value pairs every `log_every` steps
    #[arg(long, conflicts_with = "progress")]
    pub(crate) plain: bool,
    /// A status line with a bar
    #[arg(long)]
    pub(crate) progress: bool,
    /// Draw with ASCII characters only
    #[arg(long)]
    pub(crate) ascii: bool,
}

impl ShowArgs {
    fn asked(&self) -> Option<Output> {
        match self {
            Self { dashboard: true, .. } => Some(Output::Dashboard),
            Self { plain: true, .. } => Some(Output::Plain),
            Self { progress: true, .. } => Some(Output::Progress),
            _ => None,
        }
    }
}

/// Shows records until training has dropped its end of the channel.
pub(crate) fn show(records: &Receiver<Record>, commands: &Sender<Command>, args: &ShowArgs, log_every: u64) {
    match Terminal::current().output(args.asked()) {
        Output::Dashboard => {
            let theme = Theme::from_env(args.ascii);
            if dashboard::follow(stdout(), records, commands, theme, log_every) == Exit::Aborted {
                std::process::exit(130);
            }
        }
        Output::Progress => {
            let mut progress = Progress::new(stderr());
            records.iter().try_for_each(|record| progress.show(&record)).ok();
        }
        Output::Plain => {
            let mut plain = Plain::new(stdout(), log_every);
            records.iter().try_for_each(|record| plain.show(&record)).ok();
        }
    }
    // A closed output is no reason to stop training: the log has everything.
    records.iter().for_each(drop);
}
