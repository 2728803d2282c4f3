//! Rotary embeddings against transformers' values, and rejected configurations.
use super::*;
use crate::engine::kernels::rope::CosSinCache;
use candle_core::Device;

/// `tests/golden/make_families.py` makes this file.
const REFERENCE: &str = include_str!("../../../../tests/golden/families/rope.json");

fn object(value: &Value) -> &Map<String, Value> {
    value.as_object().unwrap()
}

fn flat(config: &Value) -> Result<Rope, String> {
    Rope::flat(object(config), 1e4, 64)
}

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap() as f32).collect()
}

/// The same rotary embedding in the spelling before transformers 5.
fn older(config: &Value) -> Value {
    let mut scaling = config["rope_parameters"].clone();
    let name = object(&scaling)["rope_type"].clone();
    scaling.as_object_mut().unwrap().remove("rope_type");
    scaling["type"] = name;
    json!({"rope_theta": config["rope_theta"], "rope_scaling": scaling})
}

#[test]
fn frequencies_and_tables_are_those_of_transformers() {
    let cases: Vec<Value> = serde_json::from_str(REFERENCE).unwrap();
    assert_eq!(cases.len(), 8);
    for case in &cases {
        let context = case["config"]["max_position_embeddings"].as_u64().unwrap() as usize;
        let [size, positions] = ["head_dim", "positions"].map(|key| case[key].as_u64().unwrap() as usize);
        let rope = Rope::flat(object(&case["config"]), 1.5, context).unwrap();
        assert_eq!(Rope::flat(object(&older(&case["config"])), 1.5, context).unwrap(), rope);
        let what = &case["config"];
        assert_eq!(rope.attention_factor(), case["attention_factor"].as_f64().unwrap(), "{what}");
        let frequencies = rope.frequencies(size, positions);
        for (found, expected) in frequencies.iter().zip(numbers(&case["frequencies"])) {
            assert!((found / expected - 1.0).abs() < 2e-7, "{what}: {found:e}, not {expected:e}");
        }
        let table = CosSinCache::new(&frequencies, rope.attention_factor(), 0..positions, &Device::Cpu).unwrap();
        for (key, table) in [("cos", &table.cos), ("sin", &table.sin)] {
            let found = table.get(positions - 1).unwrap().to_vec1::<f32>().unwrap();
            let expected = numbers(&case[key]);
            assert_eq!(found.len(), expected.len());
            // A frequency may differ by its last bit, which position 299 makes 299 times as large.
            for (found, expected) in found.iter().zip(expected) {
                assert!((found - expected).abs() < 4e-5, "{what}: {key} {found}, not {expected}");
            }
        }
    }
}

#[test]
fn what_is_written_reads_back() {
    let cases: Vec<Value> = serde_json::from_str(REFERENCE).unwrap();
    for case in &cases {
        let rope = Rope::flat(object(&case["config"]), 1.5, 64).unwrap();
        assert_eq!(flat(&json!({"rope_parameters": rope.to_json()})).unwrap(), rope);
    }
}

#[test]
fn a_dynamic_base_grows_beyond_the_context_only() {
    let rope = flat(&json!({"rope_scaling": {"type": "dynamic", "factor": 4.0}})).unwrap();
    let tuned = json!({"rope_scaling": {"type": "dynamic", "factor": 4.0, "finetuned": true}});
    assert_eq!(flat(&tuned).unwrap(), rope);
    let plain = flat(&json!({})).unwrap();
    assert_eq!(rope.frequencies(16, 64), plain.frequencies(16, 64));
    assert!(rope.frequencies(16, 65)[7] < plain.frequencies(16, 65)[7]);
}

#[test]
fn layers_of_two_types_have_their_own() {
    let read =
        |config: Value| Rope::by_layer_type(object(&config), [("rope_theta", 1e6), ("rope_local_base_freq", 1e4)], 64);
    let plain = |theta| Rope { theta, kind: RopeType::Default };
    assert_eq!(read(json!({})).unwrap(), [plain(1e6), plain(1e4)]);
    let linear = Rope { theta: 2e6, kind: RopeType::Linear { factor: 8.0 } };
    let nested = json!({"rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3e4}}});
    let older = json!({"rope_theta": 2e6, "rope_local_base_freq": 3e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}});
    // As in transformers, the older spelling adds to full attention's.
    let both = json!({"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3e4}}});
    for config in [nested, older, both] {
        assert_eq!(read(config).unwrap(), [linear.clone(), plain(3e4)]);
    }
    let dynamic = json!({"rope_type": "dynamic", "factor": 2.0});
    assert!(read(json!({"rope_parameters": {"full_attention": dynamic}})).unwrap()[0].is_dynamic());
    let message = read(json!({"rope_parameters": {"sliding_attention": dynamic}})).unwrap_err();
    assert!(message.contains("`rope_parameters.sliding_attention`: layers with a window"), "{message}");
    let mut yarn = json!({"rope_type": "yarn", "factor": 2.0, "truncate": true});
    assert!(read(json!({"rope_parameters": {"full_attention": yarn}})).is_ok());
    yarn["truncate"] = false.into();
    for (config, key) in [
        (json!({"rope_scaling": yarn}), "`rope_scaling`"),
        (json!({"rope_parameters": {"full_attention": yarn}}), "`rope_parameters.full_attention`"),
    ] {
        let message = read(config).unwrap_err();
        assert!(message.contains(&format!("{key}: `truncate` is false")), "{message}");
    }
}
