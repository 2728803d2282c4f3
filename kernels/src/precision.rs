//! Number formats, and statistics of the numbers stored in them. Nothing here depends on tensors or devices.

mod exponent_histogram;
mod float_format;
mod tensor_stats;
mod update_counts;

pub use exponent_histogram::{ExponentHistogram, RangeShares};
pub use float_format::{FloatClass, FloatFormat};
pub use tensor_stats::{ExactFloat, TensorStats};
pub use update_counts::UpdateCounts;
