//! GELU in its tanh form (Hendrycks and Gimpel, 2016), computed in FP32 for any storage type.

use crate::engine::kernels::math;
use crate::engine::kernels::rows::{Rows, for_each_part};
use crate::engine::kernels::view::{read, write};
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

/// `dy *= gelu'(x)`, elementwise and in place: afterwards `dy` is the gradient with respect to `x`.
pub fn backward(x: &Tensor, dy: &Tensor) -> Result<()> {
    let x = read(x)?;
    let x = x.view();
    write(dy, |dy| {
        let len = dy.len();
        for_each_part(
            Rows { view: dy, width: 1 },
            len,
            8 * WIDTH,
            #[inline(always)]
            |first, len, mut dy| {
                let (mut slope, mut grad) = ([0.0; WIDTH], [0.0; WIDTH]);
                for start in (0..len).step_by(WIDTH) {
                    let width = WIDTH.min(len - start);
                    let (slope, grad) = (&mut slope[..width], &mut grad[..width]);
                    x.load(first + start, slope);
                    math::gelu_derivative_slice(slope);
                    dy.view.as_view().load(start, grad);
                    for (grad, slope) in grad.iter_mut().zip(slope.iter()) {
                        *grad *= slope;
                    }
                    dy.view.store(start, grad);
                }
            },
        );
    })
}
