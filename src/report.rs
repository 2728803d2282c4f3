//! Reports a run as one HTML page.

mod charts;
mod tables;

use crate::Result;
use crate::compare::RunSummary;
use crate::telemetry::{RunState, Started};
use crate::ui::html::{self, escape};
use std::path::Path;

/// Buckets of a curve; a chart has about twice as many columns.
const CURVE: usize = 450;

/// Styles of this page, added to the shared ones of charts and tables.
const STYLE: &str = "
.band { fill: var(--c0); opacity: .3; stroke: none; } .smooth { stroke: var(--c3); fill: none; stroke-width: 1.8; }
.bar { fill: var(--c0); } .sub { fill: var(--c1); } .plain { stroke: var(--c0); fill: none;
  stroke-width: 1.6; }
.legend { color: var(--dim); margin: 0 0 1rem; } .legend span { margin-right: 1.2rem; white-space: nowrap; }
.legend svg { width: 1.6rem; height: .7rem; margin-right: .3rem; }
td.text, th.text { text-align: left; white-space: normal; } blockquote { border-left: 3px solid var(--line);
  margin: .5rem 0 1rem; padding: .1rem 1rem; white-space: normal; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; } dt { color: var(--dim); } dd { margin: 0; }
h2 { margin-top: 2.2rem; } details summary { cursor: pointer; }
";

/// Renders the page of the run in `log`. Fails if the log cannot be read or has no step yet.
pub(crate) fn page(log: &Path) -> Result<String> {
    let (state, unreadable) = RunState::new(CURVE).read(log)?;
    let run = RunSummary::of(log, state.clone(), unreadable)?;
    let parts = [
        format!("<p>{}</p>\n", escape(&summary(&run))),
        tables::figures(&run.figures),
        charts::all(&state),
        tables::overflows(&state),
        tables::precision(&state),
        tables::samples(&state),
        tables::settings(&run.settings()),
    ];
    let title = format!("Run {}", run.name);
    Ok(html::page(&title, &title, STYLE, &parts.concat()))
}

fn summary(run: &RunSummary) -> String {
    let Started { program, model, parameters, policy, device, data, total_steps, .. } = &run.started;
    format!(
        "{model}, {parameters} parameters, trained on {data} by {program} on {device} with {policy}: {} of {total_steps} \
         steps, {}.",
        run.figures.steps,
        run.end()
    )
}
