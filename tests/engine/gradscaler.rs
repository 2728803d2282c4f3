//! The gradient scaler's state machine. PyTorch's rules (C) and golden vectors (G), numbered as in the project's list,
//! are in `tests/engine/amp` if an optimizer's steps show them. C19 (no host synchronization) concerns the engine on a
//! GPU.

use finetune::precision::{GradScaler, GradScalerConfig, OnOverflow, ScaleChange, ScalerMode, ScalerState, StateDict};
use proptest::prelude::*;

fn scaler(init_scale: f32, growth_interval: u32) -> GradScaler {
    GradScaler::new(GradScalerConfig { init_scale, growth_interval, ..GradScalerConfig::default() }).unwrap()
}

fn tracker(scaler: &GradScaler) -> u32 {
    scaler.state().growth_tracker
}

fn steps(scaler: &mut GradScaler, count: u32, finite: bool) {
    for _ in 0..count {
        scaler.update(finite);
    }
}

// Disabled

#[test]
fn c3_disabled_scales_nothing_and_keeps_nothing() {
    let mut scaler = GradScaler::disabled();
    assert_eq!((scaler.scale(), scaler.inverse()), (1.0, 1.0));
    for _ in 0..5000 {
        assert_eq!(scaler.update(true), ScaleChange::Held);
    }
    assert!(matches!(scaler.update(false), ScaleChange::AtMinScale { streak: 1, .. }));
    assert_eq!(scaler.state_dict(), None);
    let other = self::scaler(8.0, 1).state_dict();
    scaler.load_state_dict(other.as_ref()).unwrap();
    scaler.load_state_dict(None).unwrap();
    scaler.set_scale(4.0).unwrap();
    assert_eq!(scaler.scale(), 1.0);
}

// update

#[test]
fn c24_an_interval_lowered_below_the_tracker_still_grows() {
    let mut scaler = scaler(16.0, 10);
    steps(&mut scaler, 7, true);
    let lowered = StateDict { growth_interval: 5, ..scaler.state_dict().unwrap() };
    scaler.load_state_dict(Some(&lowered)).unwrap();
    assert_eq!(scaler.update(true), ScaleChange::Grew { from: 16.0, to: 32.0 });
}

// state

#[test]
fn c29_state_has_pytorchs_keys_and_overrides_the_options() {
    let mut scaler = scaler(16.0, 10);
    let json = serde_json::to_value(scaler.state_dict()).unwrap();
    let keys: Vec<_> = json.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(keys, ["_growth_tracker", "backoff_factor", "growth_factor", "growth_interval", "scale"]);
    let saved =
        StateDict { scale: 3.0, growth_factor: 4.0, backoff_factor: 0.25, growth_interval: 2, growth_tracker: 1 };
    scaler.load_state_dict(Some(&saved)).unwrap();
    assert_eq!(scaler.state_dict(), Some(saved));
    assert_eq!(scaler.update(true), ScaleChange::Grew { from: 3.0, to: 12.0 });
}

#[test]
fn c30_empty_or_senseless_states_are_errors_and_change_nothing() {
    let mut scaler = scaler(16.0, 10);
    let before = scaler.clone();
    assert!(scaler.load_state_dict(None).unwrap_err().to_string().contains("empty"));
    let good = scaler.state_dict().unwrap();
    for bad in [
        StateDict { scale: f32::INFINITY, ..good },
        StateDict { growth_factor: 1.0, ..good },
        StateDict { backoff_factor: 1.0, ..good },
        StateDict { growth_interval: 0, ..good },
    ] {
        assert!(scaler.load_state_dict(Some(&bad)).is_err(), "{bad:?}");
    }
    assert_eq!(scaler, before);
}

// Ours beyond PyTorch

#[test]
fn the_floor_holds_and_reports_until_patience_ends() {
    let config = GradScalerConfig {
        init_scale: 6.0,
        min_scale: 2.0,
        max_overflows_at_min_scale: 3,
        ..GradScalerConfig::default()
    };
    let mut scaler = GradScaler::new(config).unwrap();
    assert_eq!(scaler.update(false), ScaleChange::BackedOff { from: 6.0, to: 3.0 });
    assert_eq!(scaler.update(false), ScaleChange::BackedOff { from: 3.0, to: 2.0 });
    let floor = |streak| ScaleChange::AtMinScale { scale: 2.0, streak };
    assert_eq!([(); 2].map(|()| scaler.update(false)), [floor(1), floor(2)]);
    assert!(!scaler.is_stuck());
    scaler.update(true);
    assert_eq!([(); 3].map(|()| scaler.update(false)), [floor(1), floor(2), floor(3)]);
    assert!(scaler.is_stuck());
}

#[test]
fn patience_zero_is_endless() {
    let config = GradScalerConfig { init_scale: 1.0, max_overflows_at_min_scale: 0, ..GradScalerConfig::default() };
    let mut scaler = GradScaler::new(config).unwrap();
    steps(&mut scaler, 1000, false);
    assert!(!scaler.is_stuck());
}

fn with_hysteresis(consecutive_hysteresis: bool) -> GradScaler {
    let config = GradScalerConfig {
        init_scale: 16.0,
        growth_interval: 3,
        hysteresis: 2,
        consecutive_hysteresis,
        ..GradScalerConfig::default()
    };
    GradScaler::new(config).unwrap()
}

#[test]
fn hysteresis_reset_by_growth_counts_overflows_across_clean_steps() {
    let mut scaler = with_hysteresis(false);
    let scales = [false, true, false, false, true, true, true, false].map(|finite| {
        scaler.update(finite);
        scaler.scale()
    });
    assert_eq!(scales, [16.0, 16.0, 8.0, 4.0, 4.0, 4.0, 8.0, 8.0]);
}

#[test]
fn hysteresis_reset_by_clean_steps_backs_off_only_after_overflows_in_a_row() {
    let mut scaler = with_hysteresis(true);
    let scales = [false, true, false, true, false, false, false].map(|finite| {
        scaler.update(finite);
        scaler.scale()
    });
    assert_eq!(scales, [16.0, 16.0, 16.0, 16.0, 16.0, 8.0, 4.0]);
}

#[test]
fn configuration_reads_from_a_table_and_refuses_unknown_keys() {
    let config: GradScalerConfig =
        toml::from_str("init_scale = 1024\nconsecutive_hysteresis = true\non_overflow = \"retry\"").unwrap();
    let expected = GradScalerConfig {
        init_scale: 1024.0,
        consecutive_hysteresis: true,
        on_overflow: OnOverflow::Retry,
        ..GradScalerConfig::default()
    };
    assert_eq!(config, expected);
    assert!(toml::from_str::<GradScalerConfig>("growth_intervall = 3").is_err());
}

#[test]
fn a_change_serializes_with_its_cause() {
    let json = serde_json::to_string(&ScaleChange::BackedOff { from: 4.0, to: 2.0 }).unwrap();
    assert_eq!(json, r#"{"kind":"backed_off","from":4.0,"to":2.0}"#);
}

#[test]
fn a_state_that_does_not_fit_its_configuration_is_refused() {
    let state = GradScaler::new(GradScalerConfig::default()).unwrap().state();
    let resume = |state| GradScaler::resume(GradScalerConfig::default(), state);
    assert!(resume(state).is_ok());
    assert!(resume(ScalerState { scale: f32::NAN, ..state }).is_err());
    assert!(resume(ScalerState { hysteresis_left: 0, ..state }).is_err());
    // The configuration's hysteresis is 1: one that was larger has been lowered since.
    assert_eq!(resume(ScalerState { hysteresis_left: 2, ..state }).unwrap().state().hysteresis_left, 1);
}

/// As in PyTorch, where the state of a disabled scaler is empty.
#[test]
fn a_scaler_that_is_enabled_later_has_no_scale_of_1() {
    let config = |enabled| GradScalerConfig { enabled, init_scale: 1024.0, ..GradScalerConfig::default() };
    let resume = |enabled, from: &GradScaler| GradScaler::resume(config(enabled), from.state()).unwrap();
    let mut off = GradScaler::new(config(false)).unwrap();
    off.update(true);
    assert_eq!((off.scale(), off.inverse(), resume(true, &off).scale()), (1.0, 1.0, 1024.0));
    let mut on = resume(true, &off);
    on.update(false);
    off = resume(false, &on);
    assert_eq!((off.scale(), resume(true, &off).scale()), (1.0, 512.0));
}

prop_compose! {
    fn any_config()(
        init in 0i32..=127, floor in 0i32..=20, growth_interval in 1u32..6, hysteresis in 1u32..4,
        consecutive_hysteresis in any::<bool>(), growth in 1i32..4, backoff in 1i32..4,
    ) -> GradScalerConfig {
        GradScalerConfig {
            init_scale: 2f32.powi(init),
            min_scale: 2f32.powi(floor.min(init)),
            growth_factor: 2f64.powi(growth),
            backoff_factor: 2f64.powi(-backoff),
            growth_interval,
            hysteresis,
            consecutive_hysteresis,
            ..GradScalerConfig::default()
        }
    }
}

proptest! {
    #[test]
    fn any_sequence_keeps_a_power_of_two_in_range_and_says_what_it_did(
        config in any_config(), verdicts in proptest::collection::vec(proptest::bool::weighted(0.7), 0..300),
    ) {
        let mut scaler = GradScaler::new(config).unwrap();
        for finite in verdicts {
            let before = scaler.scale();
            match scaler.update(finite) {
                ScaleChange::Held => prop_assert_eq!(scaler.scale(), before),
                ScaleChange::Grew { from, to } => {
                    prop_assert!(finite && from == before && to == scaler.scale() && to > from);
                }
                ScaleChange::Lowered { .. } => prop_assert!(false, "only a measured maximum lowers it"),
                ScaleChange::BackedOff { from, to } => {
                    prop_assert!(!finite && from == before && to == scaler.scale() && to < from);
                }
                ScaleChange::AtMinScale { scale, .. } => {
                    prop_assert!(!finite && scale == before && scale == config.min_scale && scale == scaler.scale());
                }
            }
            let scale = scaler.scale();
            prop_assert!(scale >= config.min_scale && scale.is_finite());
            prop_assert_eq!(scale.to_bits() << 9, 0, "{} is no power of two", scale);
            prop_assert!(tracker(&scaler) < config.growth_interval);
        }
    }

    #[test]
    fn a_resumed_scaler_goes_on_as_if_never_stopped(
        config in any_config(), verdicts in proptest::collection::vec(any::<bool>(), 0..100), cut in 0usize..100,
    ) {
        let mut whole = GradScaler::new(config).unwrap();
        let mut stopped = whole.clone();
        for (step, &finite) in verdicts.iter().enumerate() {
            if step == cut {
                let json = serde_json::to_string(&stopped.state()).unwrap();
                stopped = GradScaler::resume(config, serde_json::from_str(&json).unwrap()).unwrap();
            }
            prop_assert_eq!(whole.update(finite), stopped.update(finite));
        }
        prop_assert_eq!(whole, stopped);
    }

    #[test]
    fn the_state_dictionary_round_trips(
        config in any_config(), verdicts in proptest::collection::vec(any::<bool>(), 0..50),
    ) {
        let mut scaler = GradScaler::new(config).unwrap();
        for finite in verdicts {
            scaler.update(finite);
        }
        let json = serde_json::to_string(&scaler.state_dict()).unwrap();
        let saved: Option<StateDict> = serde_json::from_str(&json).unwrap();
        let mut fresh = GradScaler::new(GradScalerConfig::default()).unwrap();
        fresh.load_state_dict(saved.as_ref()).unwrap();
        prop_assert_eq!(fresh.state_dict(), scaler.state_dict());
    }
}

// The predictive rule

fn predictive(init_scale: f32, growth_interval: u32) -> GradScaler {
    let policy = ScalerMode::Predictive;
    GradScaler::new(GradScalerConfig { init_scale, growth_interval, mode: policy, ..GradScalerConfig::default() })
        .unwrap()
}

#[test]
fn the_first_measure_leaves_a_binade_above_it() {
    // 2^-3: at scale 2^18 it comes to 2^15, and what exceeds it by less than a binade stays below 65504.
    let mut scaler = predictive(65536.0, 100);
    assert!(scaler.needs_amax());
    let change = scaler.update_with_amax(true, 8192.0);
    assert_eq!(change, ScaleChange::Grew { from: 65536.0, to: 262_144.0 });
    assert!(!scaler.needs_amax());
    // A larger one lowers it, though nothing has overflowed.
    let change = scaler.update_with_amax(true, 60000.0);
    assert_eq!(change, ScaleChange::Lowered { from: 262_144.0, to: 131_072.0 });
    assert_eq!(scaler.state().growth_tracker, 0);
}

#[test]
fn a_lone_peak_is_remembered_and_slowly_forgotten() {
    let mut scaler = predictive(1024.0, 10);
    let level = |scaler: &mut GradScaler, log2: f32, steps: u32| {
        for _ in 0..steps {
            let scale = scaler.scale();
            assert!(!matches!(scaler.update_with_amax(true, 2f32.powf(log2) * scale), ScaleChange::BackedOff { .. }));
        }
        scaler.scale().log2()
    };
    assert_eq!(level(&mut scaler, 0.5, 300), 15.0, "65504 / 2^0.5 and no excess left");
    assert_eq!(level(&mut scaler, 4.5, 1), 11.0);
    // A binade in ten intervals of ten steps; the mean has risen a little with the peak, and falls again sooner.
    assert_eq!(level(&mut scaler, 0.5, 95), 12.0);
    assert_eq!(level(&mut scaler, 0.5, 100), 13.0);
}

#[test]
fn an_overflow_still_backs_off_and_what_it_was_decides_how_far() {
    let mut scaler = predictive(1024.0, 100);
    scaler.update_with_amax(true, 1024.0);
    let from = scaler.scale();
    assert_eq!(from, 32768.0);
    let mut guess = scaler.clone();
    assert_eq!(guess.update_with_amax(false, 65504.0), ScaleChange::BackedOff { from, to: 16384.0 });
    assert_eq!(guess.clone().set_amax(1.1), 16384.0, "small gradients do not take the back-off back");
    // It was 50: 2^10 brings it to 51200.
    assert_eq!(guess.set_amax(50.0), 1024.0);
    assert!(guess.update_with_amax(true, 1024.0) == ScaleChange::Held, "it is remembered");
    // Without any measurement, overflows halve it as before.
    let mut blind = predictive(1024.0, 100);
    assert_eq!(blind.update_with_amax(false, 0.0), ScaleChange::BackedOff { from: 1024.0, to: 512.0 });
    assert!(blind.needs_amax());
}

#[test]
fn what_is_measured_is_nothing_to_the_other_rule() {
    let mut scaler = scaler(1024.0, 100);
    assert!(!scaler.needs_amax());
    assert_eq!(scaler.set_amax(1.0), 1024.0);
    assert_eq!(scaler.update_with_amax(true, 60000.0), ScaleChange::Held);
    assert_eq!(scaler.state().headroom, None);
    let off = GradScalerConfig { enabled: false, mode: ScalerMode::Predictive, ..GradScalerConfig::default() };
    let mut off = GradScaler::new(off).unwrap();
    assert!(!off.needs_amax());
    assert_eq!((off.update_with_amax(true, 1.0), off.set_amax(1.0)), (ScaleChange::Held, 1.0));
}

#[test]
fn a_state_without_headroom_is_read_and_one_with_it_comes_back() {
    let old = r#"{"scale":8.0,"growth_tracker":1,"hysteresis_left":1,"min_scale_streak":0}"#;
    let state: ScalerState = serde_json::from_str(old).unwrap();
    assert_eq!(state.headroom, None);
    assert_eq!(serde_json::to_string(&state).unwrap(), old);
    let mut scaler = predictive(1024.0, 10);
    for i in 1..9u8 {
        scaler.update_with_amax(true, 1000.0 + 300.0 / f32::from(i));
    }
    let json = serde_json::to_string(&scaler.state()).unwrap();
    let resumed = GradScaler::resume(*scaler.config(), serde_json::from_str(&json).unwrap()).unwrap();
    assert_eq!(resumed, scaler);
}

#[test]
fn a_resumed_scaler_follows_settings_that_have_changed() {
    let mut scaler = predictive(1024.0, 10);
    scaler.update_with_amax(true, 60_000.0);
    let state = ScalerState { scale: 65536.0, ..scaler.state() };
    let resume = |config| GradScaler::resume(config, state).unwrap();
    let disabled = resume(GradScalerConfig { enabled: false, ..*scaler.config() });
    assert_eq!((disabled.scale(), disabled.inverse()), (1.0, 1.0));
    // The gradients of the predictive mode have allowed a scale far below this one.
    let mut dynamic = resume(GradScalerConfig { mode: ScalerMode::Dynamic, ..*scaler.config() });
    assert_eq!(dynamic.update(false), ScaleChange::BackedOff { from: 65536.0, to: 32768.0 });
    assert_eq!(resume(*scaler.config()).update(false), ScaleChange::BackedOff { from: 65536.0, to: 512.0 });
    let higher = 131_072.0;
    let raised = resume(GradScalerConfig { min_scale: higher, init_scale: higher, ..*scaler.config() });
    assert_eq!(raised.scale(), higher);
}

proptest! {
    /// For any gradients, the scale is a power of two between its floor and f32's maximum, and the last observed step
    /// would not overflow at the new scale.
    #[test]
    fn the_predicted_scale_is_a_power_of_two_with_room(
        steps in proptest::collection::vec((any::<bool>(), -40f32..40.0), 1..200), interval in 1u32..200,
    ) {
        let mut scaler = predictive(65536.0, interval);
        for (finite, log2) in steps {
            let before = scaler.scale();
            let largest = 2f32.powf(log2);
            let change = scaler.update_with_amax(finite, largest * before);
            if let ScaleChange::BackedOff { from, to } = change {
                prop_assert!(to <= from / 2.0);
            }
            let scale = scaler.scale();
            prop_assert!(scale >= 1.0 && scale.log2().fract() == 0.0, "{scale}");
            if finite && scale > 1.0 {
                prop_assert!(largest * scale <= 65504.0 * 1.001, "{largest} at {scale}");
            }
        }
    }
}
