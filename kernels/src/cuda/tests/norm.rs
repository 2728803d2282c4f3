//! Layer norms of values that are no numbers.

use super::super::launch::Rows;
use super::super::norm as device;
use super::*;

const EPSILON: f32 = 1e-5;

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn no_number_spoils_its_row_of_a_layer_norm_and_no_other() {
    let (rows, width, dtype) = (3, 24, DType::F16);
    let mut x = vec![0.5; rows * width];
    x[width + 5] = f32::NAN;
    let gpu = Emulator::new(0);
    let (values, ones) = (gpu.input(&x, dtype), gpu.input(&vec![1.0; rows * width], dtype));
    let [y, dx] = [(); 2].map(|()| gpu.output(rows * width, dtype));
    let [weight, bias] = [1.0, 0.0].map(|value| gpu.input(&vec![value; width], dtype));
    let [mean, rstd] = [(); 2].map(|()| gpu.output(rows, DType::F32));
    let [dweight, dbias] = [(); 2].map(|()| gpu.output(width, dtype));
    let statistics = device::Statistics { mean: Some(mean), rstd };
    let [values, ones, y_rows, dx_rows] = [values, ones, y, dx].map(|buffer| Rows::whole(buffer, [rows, width]));
    device::forward(&gpu, width, values, (weight, Some(bias)), (EPSILON, 0.0), y_rows, statistics).unwrap();
    let gradients = Some((dweight, Some(dbias)));
    device::backward(&gpu, width, (ones, values, weight), (statistics, 0.0), (dx_rows, true), gradients).unwrap();
    for buffer in [y, dx] {
        let nans: Vec<bool> = gpu.read(buffer).iter().map(|x| x.is_nan()).collect();
        assert_eq!(nans, (0..rows * width).map(|i| i / width == 1).collect::<Vec<_>>());
    }
    assert!(gpu.read(dweight).iter().all(|x| x.is_nan()) && gpu.read(dbias).iter().all(|&x| x == 3.0));
}
