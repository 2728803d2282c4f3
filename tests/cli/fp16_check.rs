//! The verdict of `fp16-check` compared with actual training.

use crate::common::cli_fixture::CliFixture;
use crate::common::of_kind;
use finetune::data::{TokenSource, grammar};
use finetune::engine::device::DeviceContext;
use finetune::engine::kernels::view;
use finetune::engine::model::{Decoder, Parameters};
use finetune::inference::fp16_check::{Fp16Report, PrecisionAdvice, SampleSize, fp16_check};
use finetune::inference::trained::TrainedModel;
use finetune::precision::{Dtype, PrecisionUnit};
use finetune::telemetry::Event;
use serde_json::Value;

/// A folder with `model`: `tiny`, trained for some steps.
fn trained(steps: u32) -> CliFixture {
    let fixture = CliFixture::empty();
    fixture.said(&format!("--run r --steps {steps} --plain --set train.eval_batches=1"));
    fixture.said("export r model");
    fixture
}

fn check(masters: Parameters, model: &TrainedModel) -> Fp16Report {
    let tokens = TokenSource::from_ids(grammar::text(1, 20_000).bytes().map(u32::from).collect());
    let size = SampleSize { batches: 2, batch_size: 2, seq_len: 64 };
    let decoder = Decoder::new(&model.spec, &masters, DeviceContext::cpu().kernels).unwrap();
    fp16_check(&decoder, masters, tokens, size, |_, _| ()).unwrap()
}

/// Multiplies the elements of a parameter that `of` selects.
fn scale(masters: &Parameters, name: &str, factor: f32, of: impl Fn(usize) -> bool) {
    view::write_f32(masters.get(name).unwrap(), |values| {
        for (_, value) in values.iter_mut().enumerate().filter(|(i, _)| of(*i)) {
            *value *= factor;
        }
    })
    .unwrap();
}

#[test]
#[ignore = "more than a minute; .ci/run runs it"]
fn the_verdict_is_what_training_shows() {
    let fixture = trained(30);
    let model = TrainedModel::open(&fixture.path("model"), None).unwrap();

    // A model of its kind trains in FP16, and 200 steps of training skip next to none.
    let report = check(model.weights(Dtype::F32).unwrap(), &model);
    assert_eq!(report.advice, PrecisionAdvice::Fp16, "{report:?}");
    let scale_said = format!("scaler.init_scale={}", report.best_scale);
    let train = "--model model --data grammar --dtype fp16 --plain --steps 200 --run plain --set train.eval_batches=1";
    fixture.said(&format!("{train} --set {scale_said}"));
    let finished = of_kind!(fixture.events("plain"), Event::Finished).next().unwrap();
    assert!(finished.skipped <= 2, "{finished:?}");

    // A hidden unit whose activations leave the range, and what reads it makes up for it: the block and tensor are
    // named.
    let masters = model.weights(Dtype::F32).unwrap();
    let inner = model.spec.intermediate_size;
    let width = model.spec.hidden_size;
    let factor = 1e6;
    scale(&masters, "h.1.mlp.c_fc.weight", factor, |i| i % inner == 7);
    scale(&masters, "h.1.mlp.c_fc.bias", factor, |i| i == 7);
    scale(&masters, "h.1.mlp.c_proj.weight", 1.0 / factor, |i| i / width == 7);
    let report = check(masters, &model);
    let PrecisionAdvice::Fp16WithFallback { units } = &report.advice else { panic!("{report:?}") };
    assert_eq!(units, &[PrecisionUnit::Block(1)]);
    let block = report.units.iter().find(|unit| unit.unit == PrecisionUnit::Block(1)).unwrap();
    assert!(block.activation.tensor.starts_with("h.1.mlp.") && block.activation.max_abs > 65504.0, "{block:?}");

    // With a smaller factor it fits; its gradient determines the scale, which is high enough for the others.
    let masters = model.weights(Dtype::F32).unwrap();
    scale(&masters, "h.1.mlp.c_fc.weight", 4096.0, |i| i % inner == 7);
    scale(&masters, "h.1.mlp.c_fc.bias", 4096.0, |i| i == 7);
    scale(&masters, "h.1.mlp.c_proj.weight", 1.0 / 4096.0, |i| i / width == 7);
    let smaller = check(masters, &model);
    assert_eq!(smaller.advice, PrecisionAdvice::Fp16, "{smaller:?}");
    let block = smaller.units.iter().find(|unit| unit.unit == PrecisionUnit::Block(1)).unwrap();
    assert_eq!(block.gradient.tensor, "h.1.mlp.c_proj weight gradient");
    assert!(smaller.best_scale < report.best_scale / 4.0, "{} {}", smaller.best_scale, report.best_scale);

    // If every block is like that, only another dtype helps.
    let masters = model.weights(Dtype::F32).unwrap();
    for block in 0..model.spec.num_layers {
        scale(&masters, &format!("h.{block}.mlp.c_fc.weight"), factor, |i| i % inner == 7);
        scale(&masters, &format!("h.{block}.mlp.c_fc.bias"), factor, |i| i == 7);
    }
    let report = check(masters, &model);
    assert!(matches!(&report.advice, PrecisionAdvice::Bf16 { reason } if reason.contains("units")), "{report:?}");
}

#[test]
fn the_command_says_it_in_text_json_and_exit_code() {
    let fixture = trained(10);
    let line = "fp16-check model --data grammar --batches 1 -l 32";
    let text = fixture.said(line);
    assert!(text.contains("verdict: fp16 (") && text.contains("h.3"), "{text}");
    let text = fixture.said(&format!("{line} --json"));
    let report: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert_eq!((report["verdict"].as_str(), report["units"].as_array().unwrap().len()), (Some("fp16"), 5));
    let refused = "--batch-size: must be between 1 and 1048576";
    fixture.assert_refused(&format!("{line} --batch-size {}", u64::MAX), &[refused]);
}
