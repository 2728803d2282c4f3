//! `finetune --find-lr`: the loss at rising learning rates, and a rate to train with.

use crate::cli::reporter::Reporter;
use crate::telemetry::PhaseProgress;
use crate::train::{LrRangeTest, Trainer};
use crate::ui::format::{loss, short};
use crate::ui::{Axes, Line, Page, Role, extent};
use crate::{Error, Result};
use std::io::{IsTerminal, Write, stdout};

/// Size of the chart in characters.
const CHART: (u16, u16) = (78, 14);

pub(super) fn run(trainer: &mut Trainer, reporter: Reporter) -> Result<()> {
    reporter.activity.begin("trying learning rates");
    let test = trainer.find_lr(|step| {
        let progress = PhaseProgress::Items(step, LrRangeTest::STEPS);
        reporter.activity.advance("trying learning rates", progress);
    })?;
    drop(reporter);
    let text = page(&test).printed(false, stdout().is_terminal());
    stdout().write_all(text.as_bytes()).map_err(Error::stdout)
}

fn page(test: &LrRangeTest) -> Page {
    let mut page = Page::default();
    let ranges =
        (extent(test.points.iter().map(|(lr, _)| lr.log10())), extent(test.points.iter().map(|(_, loss)| *loss)));
    if let (Some(x), Some(y)) = ranges {
        page.title("loss by learning rate, smoothed");
        page.drawn(CHART, &[Role::Smooth, Role::Good, Role::Dim], |canvas| {
            let axes = Axes { x, y, x_label: &|x| short(10f64.powf(x)), y_label: &loss };
            axes.draw(canvas, |plot| {
                for pair in test.points.windows(2) {
                    plot.line((pair[0].0.log10(), pair[0].1), (pair[1].0.log10(), pair[1].1), Role::Smooth);
                }
                if let Some(lr) = test.suggestion() {
                    plot.rule(lr.log10(), Role::Good);
                }
            });
        });
    }
    if let (Some((lr, lowest)), Some(suggestion)) = (test.lowest(), test.suggestion()) {
        let text =
            format!("The loss is lowest, {}, at a rate of {}. Train with a tenth of it:", loss(lowest), short(lr));
        page.wrapped(Role::Text, &text, CHART.0.into());
        page.push(Line::new().with(Role::Good, format!("  --lr {suggestion:e}")));
    } else {
        let text = "The loss did not fall at any rate, so there is no suggestion. Use larger batches, which have less noise, \
                    or check the data with `finetune data show`.";
        page.wrapped(Role::Text, text, CHART.0.into());
    }
    page
}
