//! GELU in its tanh form (Hendrycks and Gimpel, 2016), computed in FP32 for any storage type.

use crate::math;
use crate::rows::{Rows, for_each_part};
use crate::view::{read, write};
use candle_core::{Result, Tensor};

/// Elements a task converts at a time; two such rows stay in the L1 cache.
const WIDTH: usize = 1024;

/// `y = gelu(x)`, elementwise.
pub fn forward(x: &Tensor, y: &Tensor) -> Result<()> {
    let x = read(x)?;
    let x = x.view();
    write(y, |y| {
        let len = y.len();
        for_each_part(
            Rows { view: y, width: 1 },
            len,
            8 * WIDTH,
            #[inline(always)]
            |first, len, mut y| {
                let mut buffer = [0.0; WIDTH];
                for start in (0..len).step_by(WIDTH) {
                    let buffer = &mut buffer[..WIDTH.min(len - start)];
                    x.load(first + start, buffer);
                    math::gelu_slice(buffer);
                    y.view.store(start, buffer);
                }
            },
        );
    })
}

/// `dy *= gelu'(x)` and `y = gelu(x)`, elementwise. Afterwards `dy` is the gradient with respect to `x`.
pub fn backward(x: &Tensor, dy: &Tensor, y: &Tensor) -> Result<()> {
    let x = read(x)?;
    let x = x.view();
    write(dy, |dy| {
        write(y, |y| {
            let len = dy.len();
            for_each_part(
                (Rows { view: dy, width: 1 }, Rows { view: y, width: 1 }),
                len,
                8 * WIDTH,
                #[inline(always)]
                |first, len, (mut dy, mut y)| {
                    let (mut values, mut grads) = ([0.0; WIDTH], [0.0; WIDTH]);
                    for start in (0..len).step_by(WIDTH) {
                        let width = WIDTH.min(len - start);
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
        })
    })?
}
