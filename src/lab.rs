//! The number-format lab: shows the effects of a format on numbers, gradients, the loss scale and memory.
//!
//! Views, each a function from its parameters to a report. A report serializes (`--json`) and renders to a
//! `Page`, which is printed, or shown on the interactive `screen`; the `guide` has the explanations,
//! scenarios and keys. Reports can start from a real run's events (`RunData`).
//! All number formats and rounding are implemented in [`precision`](crate::precision).

mod bits;
mod blocks;
mod dtypes;
mod failures;
pub(crate) mod guide;
mod memory;
mod number;
mod ranges;
mod run_data;
mod scaler;
pub(crate) mod screen;
mod softmax;
mod sums;
mod ulp;
mod underflow;

pub(crate) use bits::Bits;
pub(crate) use blocks::{BlockScaling, Scheme, normal_tensor};
pub(crate) use dtypes::DtypeReport;
pub(crate) use failures::FailureDemo;
pub(crate) use memory::{MeasuredRun, MemoryPlan, model_named};
pub use memory::{MemoryCategory, MemoryItem, TrainSetup};
pub(crate) use number::{parse_format, parse_value};
pub(crate) use ranges::{Ranges, ValueRange};
pub(crate) use run_data::RunData;
#[cfg(test)]
pub(crate) use run_data::write_run;
pub(crate) use scaler::{GradientModel, GradientTrace, ScalerComparison, apply_setting};
pub(crate) use softmax::Softmax;
pub(crate) use sums::{SummationReport, Terms};
pub(crate) use ulp::UlpGrid;
pub(crate) use underflow::{UnderflowReport, log_normal};

#[cfg(test)]
mod tests {
    use crate::ui::{Line, Page};
    use std::fs;
    use std::path::Path;

    #[test]
    fn every_glyph_of_the_views_has_an_ascii_replacement() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/lab");
        let files = [folder.join("scaler"), folder.join("dtypes"), folder]
            .into_iter()
            .flat_map(|folder| fs::read_dir(folder).unwrap());
        for source in files.filter_map(|file| fs::read_to_string(file.unwrap().path()).ok()) {
            let code = source.split("mod tests").next().unwrap_or_default();
            for line in code.lines().filter(|line| !line.trim_start().starts_with("//")) {
                let mut page = Page::new();
                page.push(Line::new().plain(line.replace('?', "")));
                assert!(!page.ascii().text().contains('?'), "{line}");
            }
        }
    }
}
