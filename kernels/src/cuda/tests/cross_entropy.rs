//! Cross-entropy of logits that are no numbers.

use super::super::cross_entropy;
use super::*;

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn a_logit_that_is_no_number_shows_in_loss_and_gradient() {
    for bad in [f32::NAN, f32::INFINITY] {
        let gpu = Emulator::new(0);
        let (logits, losses) = (gpu.state(&[0.0, bad, 1.0], DType::F32), gpu.output(1, DType::F32));
        cross_entropy::rows(&gpu, [1, 3, 3], logits, gpu.words(&[0]), losses, Some(1.0), None).unwrap();
        assert!(gpu.read(losses)[0].is_nan() && gpu.read(logits).iter().any(|x| x.is_nan()), "{bad}");
    }
}
