//! Translates rotary embeddings between GGUF and `config.json`: scaling keys, and tensors of divisors of the
//! frequencies.

use crate::engine::model::{ConfigReader, ModelSpec, Rope, RopeType};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// The tensors of divisors for rotary frequencies: one of the rope type `llama3`, and two of `longrope`, for long and
/// for short texts.
pub const ROPE_FACTORS: [&str; 3] = ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"];

/// Divisors for rotary frequencies, by the tensor's name.
pub type RopeFactors = BTreeMap<&'static str, Vec<f32>>;

/// The key of the context before it was extended.
pub(super) const ORIGINAL_CONTEXT: &str = "rope.scaling.original_context_length";

impl ModelSpec {
    /// Adds the rope scaling keys; returns divisors for each frequency if no key can express the type.
    pub(super) fn write_rope(&self, rope: &Rope, keys: &mut Vec<(&'static str, Value)>) -> Result<RopeFactors, String> {
        let kind = rope.to_json();
        let name = kind["rope_type"].as_str().unwrap_or_default().to_owned();
        let original = kind["original_max_position_embeddings"].clone();
        let refuse = |why: &str| Err(format!("llama.cpp has no rotary embeddings of the type `{name}`{why}"));
        let has_factors = matches!(rope.kind, RopeType::Llama3 { .. } | RopeType::LongRope { .. });
        if has_factors && self.family.gguf.frequency_factors != Some(name.as_str()) {
            return refuse(&format!(" in `{}`; export this model as a folder", self.family.gguf.architecture));
        }
        match &rope.kind {
            RopeType::Default => {}
            RopeType::Linear { factor } => {
                keys.extend([("rope.scaling.type", name.into()), ("rope.scaling.factor", json!(factor))]);
            }
            RopeType::Llama3 { .. } => {
                keys.push((ORIGINAL_CONTEXT, original));
                let frequencies = |rope: &Rope| rope.frequencies(self.head_dim, self.max_position_embeddings);
                let pairs = frequencies(&Rope::plain(rope.theta)).into_iter().zip(frequencies(rope));
                let factors = pairs.map(|(plain, scaled)| plain / scaled).collect();
                return Ok(RopeFactors::from([(ROPE_FACTORS[0], factors)]));
            }
            RopeType::Yarn { factor, attention_factor, beta_fast, beta_slow, truncate, .. } => {
                if *truncate != self.family.gguf.yarn_truncates {
                    return refuse(&format!(" with `truncate` = {truncate} for this family"));
                }
                let usual = 0.1 * factor.max(1.0).ln() + 1.0;
                if (attention_factor - usual).abs() > 1e-6 {
                    if !(self.family.gguf.yarn_log_multiplier && usual > 1.0) {
                        return refuse(&format!(" with an `attention_factor` of {attention_factor}"));
                    }
                    // llama.cpp divides the usual factor by one whose logarithm has this multiplier.
                    let multiplier = (usual / attention_factor - 1.0) / (usual - 1.0);
                    keys.push(("rope.scaling.yarn_log_multiplier", json!(multiplier)));
                }
                keys.extend([
                    ("rope.scaling.type", name.into()),
                    ("rope.scaling.factor", json!(factor)),
                    (ORIGINAL_CONTEXT, original),
                    ("rope.scaling.yarn_beta_fast", json!(beta_fast)),
                    ("rope.scaling.yarn_beta_slow", json!(beta_slow)),
                ]);
            }
            RopeType::Dynamic { .. } => return refuse(""),
            RopeType::LongRope { short_factor, long_factor, attention_factor, .. } => {
                keys.push((ORIGINAL_CONTEXT, original));
                keys.push(("rope.scaling.attn_factor", json!(attention_factor)));
                let factors = [long_factor, short_factor].map(|factors| factors.iter().map(|factor| *factor as f32));
                return Ok(ROPE_FACTORS[1..].iter().copied().zip(factors.map(Iterator::collect)).collect());
            }
        }
        Ok(RopeFactors::new())
    }
}

/// Translates the rope scaling keys to `rope_scaling`.
pub(super) fn scaling_from_keys(name: &str, keys: &mut Map<String, Value>) -> Result<Option<Value>, String> {
    keys.remove("rope.scaling.finetuned");
    let kind = keys.remove("rope.scaling.type");
    let older = keys.remove("rope.scale_linear");
    // As in llama.cpp, 0 stands for a missing factor, and `linear` for a missing type.
    let factor = keys.remove("rope.scaling.factor").or(older).filter(|factor| factor.as_f64() != Some(0.0));
    let kind = match kind.as_ref().map(|kind| kind.as_str()) {
        None if factor.is_some() => "linear",
        None | Some(Some("none")) => return Ok(None),
        Some(Some(kind @ ("linear" | "yarn"))) => kind,
        Some(_) => {
            let kind = kind.unwrap_or_default();
            return Err(format!("metadata `{name}.rope.scaling.type` is {kind}; supported: `none`, `linear`, `yarn`"));
        }
    };
    let mut scaling = Map::from_iter([("rope_type".to_owned(), kind.into())]);
    scaling.extend(factor.map(|factor| ("factor".to_owned(), factor)));
    if kind == "yarn" {
        for (theirs, ours) in [
            ("original_context_length", "original_max_position_embeddings"),
            ("yarn_beta_fast", "beta_fast"),
            ("yarn_beta_slow", "beta_slow"),
        ] {
            scaling.extend(keys.remove(&format!("rope.scaling.{theirs}")).map(|value| (ours.to_owned(), value)));
        }
    }
    Ok(Some(scaling.into()))
}

/// Translates divisors of frequencies to `rope_scaling`.
pub(super) fn scaling_from_factors(
    factors: &RopeFactors,
    json: &Map<String, Value>,
    keys: &mut Map<String, Value>,
) -> Result<Value, String> {
    let original = keys.remove(ORIGINAL_CONTEXT);
    match ROPE_FACTORS.map(|name| factors.get(name)) {
        [Some(factors), None, None] => llama3(factors, json, original.as_ref()),
        [None, Some(long), Some(short)] => Ok(json!({
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": short,
            "attention_factor": keys.remove("rope.scaling.attn_factor").unwrap_or_else(|| 1.0.into()),
            "original_max_position_embeddings": original.or_else(|| json.get("max_position_embeddings").cloned()),
        })),
        _ => {
            let found = factors.keys().copied().collect::<Vec<_>>().join("`, `");
            let [one, long, short] = ROPE_FACTORS;
            Err(format!("it has `{found}`; supported: `{one}` alone, or `{long}` with `{short}`"))
        }
    }
}

/// Recovers the `llama3` parameters from a file's divisors if both frequency factors are as in the published models.
/// Any divisors are equal to `longrope` with one list for all lengths.
fn llama3(factors: &[f32], json: &Map<String, Value>, original: Option<&Value>) -> Result<Value, String> {
    let factor = f64::from(factors.iter().copied().fold(1.0, f32::max)).round();
    let theta = ConfigReader(json).f64("rope_theta", 1e4)?;
    let head_dim = ConfigReader(json).positive_usize("head_dim", 1)?;
    let original = original.and_then(Value::as_u64).unwrap_or(8192);
    let kind = RopeType::Llama3 {
        factor,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: original.max(1) as usize,
    };
    let rope = Rope { theta, kind };
    let plain = Rope::plain(theta).frequencies(head_dim, 1);
    let expected = plain.iter().zip(rope.frequencies(head_dim, 1)).map(|(plain, scaled)| plain / scaled);
    let near = |(a, b): (f32, &f32)| (a - b).abs() <= 1e-4 * a.abs();
    if factors.len() != plain.len() || !factors.iter().all(|factor| *factor > 0.0) {
        return Err(format!("tensor `{}`: it must have {} positive numbers", ROPE_FACTORS[0], plain.len()));
    }
    if !expected.zip(factors).all(near) {
        return Ok(json!({
            "rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1,
        }));
    }
    let mut json = rope.to_json();
    if let Some(object) = json.as_object_mut() {
        object.remove("rope_theta");
    }
    Ok(json)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::gguf::{GgufHeader, GgufMetadata};

    #[test]
    fn a_factor_without_a_type_scales_linearly() {
        let read = |keys: Value| scaling_from_keys("llama", &mut keys.as_object().unwrap().clone()).unwrap();
        let linear = Some(json!({"rope_type": "linear", "factor": 4.0}));
        assert_eq!(read(json!({"rope.scaling.factor": 4.0})), linear);
        assert_eq!(read(json!({"rope.scale_linear": 4.0})), linear);
        assert_eq!(read(json!({"rope.scaling.factor": 0.0})), None);
        assert_eq!(read(json!({"rope.scaling.factor": 4.0, "rope.scaling.type": "none"})), None);
    }

    /// Rotary embeddings of a family, and those that come back from a file of it.
    fn rope_and_back(model_type: &str, rope: &Value) -> [Rope; 2] {
        let config = json!({"model_type": model_type, "rope_parameters": rope});
        let spec = ModelSpec::from_json(config.to_string().as_bytes(), "x").unwrap();
        let GgufMetadata { architecture, keys, rope_factors } = spec.to_gguf().unwrap();
        let keys = keys.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        let shape = |name: &str| (name == "token_embd.weight").then(|| vec![spec.vocab_size, spec.hidden_size]);
        let header = GgufHeader { architecture, keys, bos: None, eos: Vec::new(), shape: &shape, rope_factors };
        [spec.rope, ModelSpec::from_gguf(&header, "x").unwrap().rope].map(Option::unwrap)
    }

    /// Without the key, these families have embeddings of the type `yarn`.
    #[test]
    fn plain_rotary_embeddings_come_back() {
        for model_type in ["ministral3", "gpt_oss"] {
            let [rope, back] = rope_and_back(model_type, &json!({"rope_type": "default"}));
            assert_eq!(back, rope, "{model_type}");
        }
    }

    #[test]
    fn llama3_comes_back_whatever_its_factors() {
        let frequencies = |rope: &Rope| rope.frequencies(128, 1);
        for (factor, low, high, original) in [(8.0, 1.0, 4.0, 8192), (2.5, 1.0, 4.0, 64), (8.0, 0.5, 3.0, 1 << 16)] {
            let llama3 = json!({"rope_type": "llama3", "factor": factor, "low_freq_factor": low,
                "high_freq_factor": high, "original_max_position_embeddings": original});
            let [rope, back] = rope_and_back("llama", &llama3);
            let near = |(a, b): (f32, f32)| (a - b).abs() <= 1e-6 * a;
            assert!(frequencies(&rope).into_iter().zip(frequencies(&back)).all(near), "{llama3}");
            assert_eq!(back.attention_factor(), 1.0);
            assert_eq!(back == rope, factor == 8.0 && low == 1.0);
        }
    }
}
