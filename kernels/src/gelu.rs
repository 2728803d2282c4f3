//! GELU in its tanh form (Hendrycks and Gimpel, 2016), computed in FP32 for any storage type.

use crate::math;
use crate::rows::{Rows, for_each_part};
use crate::view::{BLOCK, ViewMut, map_blocks, read, write};
use candle_core::{Result, Tensor};

/// `y = gelu(x)`, elementwise.
pub fn forward(x: &Tensor, y: &Tensor) -> Result<()> {
    map_blocks(
        x,
        y,
        8 * BLOCK,
        #[inline(always)]
        |_, values, _| {
            for value in values {
                *value = math::gelu(*value);
            }
        },
    )
}

/// `dy *= gelu'(x)` and `y = gelu(x)`, elementwise. Afterwards `dy` is the gradient with respect to `x`.
pub fn backward(x: &Tensor, dy: &Tensor, y: &Tensor) -> Result<()> {
    let x = read(x)?;
    let x = x.view();
    let differentiate = |dy: ViewMut<'_>, y: ViewMut<'_>| {
        for_each_part(
            (Rows { view: dy, width: 1 }, Rows { view: y, width: 1 }),
            x.len(),
            8 * BLOCK,
            #[inline(always)]
            |first, len, (mut dy, mut y)| {
                let (mut values, mut grads) = ([0.0; BLOCK], [0.0; BLOCK]);
                for start in (0..len).step_by(BLOCK) {
                    let width = BLOCK.min(len - start);
                    let (values, grads) = (&mut values[..width], &mut grads[..width]);
                    x.load(first + start, values);
                    dy.view.as_view().load(start, grads);
                    for (value, grad) in values.iter_mut().zip(grads.iter_mut()) {
                        let (gelu, slope) = math::gelu_with_derivative(*value);
                        *value = gelu;
                        *grad *= slope;
                    }
                    dy.view.store(start, grads);
                    y.view.store(start, values);
                }
            },
        );
    };
    write(dy, |dy| write(y, |y| differentiate(dy, y)))?
}
