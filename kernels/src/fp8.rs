//! Simulates FP8 operands: rounds a tensor in place to a format narrower than its storage. It is for experiments, not
//! for speed.

use crate::precision::FloatFormat;
use crate::rows::{Rows, for_each_part};
use crate::view::{BLOCK, float_format, write};
use candle_core::{Result, Tensor};

/// Rounds each value to `format` under `scale`, then to the tensor's type.
pub fn round_through(tensor: &Tensor, format: FloatFormat, scale: f32) -> Result<()> {
    let top = float_format(tensor.dtype()).max() as f32;
    write(tensor, |out| {
        let len = out.len();
        for_each_part(Rows { view: out, width: 1 }, len, 16 * BLOCK, |_, len, mut out| {
            let mut values = [0.0; BLOCK];
            for start in (0..len).step_by(BLOCK) {
                let values = &mut values[..BLOCK.min(len - start)];
                out.view.as_view().load(start, values);
                for value in values.iter_mut() {
                    // Rounding must not turn a finite value into infinity.
                    if value.is_finite() {
                        *value = format.round_scaled(*value, scale).clamp(-top, top);
                    }
                }
                out.view.store(start, values);
            }
        });
    })
}
