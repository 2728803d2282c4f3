//! The number-format lab: shows the effects of a format on numbers, gradients, the loss scale and memory.
//!
//! Views, each a function from its parameters to a report. A report serialises (`--json`) and renders to a [`Page`], which is
//! printed, or shown on the interactive [`screen`]; the [`guide`] has what a newcomer reads and presses. Reports can start from a real run's events ([`RunFigures`]).
//! All arithmetic is that of [`precision`](crate::precision); nothing is computed twice.

mod bits;
mod blocks;
mod casts;
mod crises;
pub mod guide;
mod memory;
mod number;
mod page;
mod ranges;
mod run_figures;
mod scaler;
mod scaling;
pub mod screen;
mod softmax;
mod sums;
mod ulp;

pub use bits::{Bits, Fate, Stored};
pub use blocks::{Blocks, Quantised, Scheme, normal_tensor};
pub use casts::{Cast, Casts, Operation};
pub use crises::{Crises, Outcome};
pub use memory::{Group, Item, Measured, Memory, Plan, Recipe, Setup, model_named};
pub use number::{parse_format, parse_value};
pub use page::{Line, Page, Role, Span};
pub use ranges::{Extent, RangeRow, Ranges};
pub use run_figures::RunFigures;
#[cfg(test)]
pub(crate) use run_figures::write_run;
pub use scaler::{Attempt, Comparison, GradientModel, Mean, Overflows, Trajectory, Visit, apply_setting};
pub use scaling::{Scaling, ScalingRow, log_normal};
pub use softmax::{Softmax, SoftmaxRow};
pub use sums::{Algorithm, SumRow, Sums, Terms};
pub use ulp::{UlpGrid, UlpRow, Verdict};
