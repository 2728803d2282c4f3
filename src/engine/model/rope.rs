//! A model's rotary position embeddings: read from its configuration, and their frequencies.
//!
//! Configurations have two spellings: `rope_parameters`, flat or nested by layer type, and the older `rope_theta` with
//! `rope_scaling`, whose `type` is now `rope_type`. The formulas are transformers', in FP32 where it uses FP32,
//! because models were trained with frequencies rounded that way.

use super::family::ConfigReader;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::f64::consts::TAU;

/// Rotary position embeddings.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Rope {
    /// The base of the frequencies.
    #[serde(rename = "rope_theta")]
    pub theta: f64,
    /// How the frequencies are changed for longer texts.
    #[serde(flatten)]
    pub kind: RopeType,
}

/// The `rope_type` with its parameters, in transformers' names.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
pub enum RopeType {
    /// Frequencies as they are.
    Default,
    /// All frequencies divided by `factor`.
    Linear {
        /// From 1.
        factor: f64,
    },
    /// A larger base for sequences that are longer than `max_position_embeddings`.
    Dynamic {
        /// From 1.
        factor: f64,
        /// Sequences up to this length are not changed.
        #[serde(skip)]
        max_position_embeddings: usize,
    },
    /// Llama 3: low frequencies divided by `factor`, high ones kept, those between interpolated.
    Llama3 {
        /// From 1.
        factor: f64,
        /// Wavelengths above `original_max_position_embeddings` over this are divided.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_position_embeddings` over this are kept.
        high_freq_factor: f64,
        /// The context before it was extended.
        original_max_position_embeddings: usize,
    },
    /// LongRoPE (Ding et al., 2024): a divisor for each frequency, and others for longer sequences.
    LongRope {
        /// For sequences up to `original_max_position_embeddings`.
        short_factor: Vec<f64>,
        /// For longer sequences.
        long_factor: Vec<f64>,
        /// Multiplies cosines and sines.
        attention_factor: f64,
        /// The context before it was extended.
        original_max_position_embeddings: usize,
    },
    /// YaRN (Peng et al., 2023).
    Yarn {
        /// From 1.
        factor: f64,
        /// Multiplies cosines and sines.
        attention_factor: f64,
        /// Frequencies with more rotations in the original context are kept.
        beta_fast: f64,
        /// Frequencies with fewer rotations in the original context are divided by `factor`.
        beta_slow: f64,
        /// The context before it was extended.
        original_max_position_embeddings: usize,
        /// Whether the bounds between kept and divided frequencies are whole numbers.
        truncate: bool,
    },
}

/// The factor of rotated queries: `1 + beta · ln(1 + ⌊p / context⌋)` at position p.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryScale {
    /// The growth.
    pub beta: f64,
    /// Positions below this have a factor of 1.
    pub context: usize,
}

impl QueryScale {
    pub(super) fn at(self, position: usize) -> f64 {
        1.0 + self.beta * ((position / self.context) as f64).ln_1p()
    }
}

/// The key of the context before it was extended.
pub(super) const ORIGINAL: &str = "original_max_position_embeddings";
/// Keys of all types. Transformers also ignores keys that a type does not use.
const KNOWN_KEYS: [&str; 17] = [
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    ORIGINAL,
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "partial_rotary_factor",
    // Whether the model was trained with these frequencies.
    "finetuned",
    "short_factor",
    "long_factor",
];

/// The parameters of a `rope_type`.
struct ScalingReader<'a> {
    keys: ConfigReader<'a>,
    /// The `rope_type`.
    name: &'a str,
    max_position: usize,
    /// `original_max_position_embeddings`.
    original: usize,
}

impl ScalingReader<'_> {
    fn required(&self, key: &str) -> Result<f64, String> {
        match self.keys.0.get(key) {
            Some(Value::Null) | None => Err(format!("`{key}` is missing; `rope_type` `{}` needs it", self.name)),
            Some(_) => self.keys.positive(key, 1.0),
        }
    }

    /// How much longer the context is than the original one.
    fn stretch(&self) -> f64 {
        self.max_position as f64 / self.original as f64
    }

    fn llama3(&self) -> Result<RopeType, String> {
        let [low_freq_factor, high_freq_factor] =
            [self.required("low_freq_factor")?, self.required("high_freq_factor")?];
        if high_freq_factor <= low_freq_factor {
            return Err(format!(
                "`high_freq_factor` is {high_freq_factor}; it must be above `low_freq_factor`, {low_freq_factor}"
            ));
        }
        Ok(RopeType::Llama3 {
            factor: self.required("factor")?,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings: self.original,
        })
    }

    fn yarn(&self) -> Result<RopeType, String> {
        let factor = self.keys.positive("factor", self.stretch())?;
        // As in transformers, 0 stands for a missing value.
        let or_default = |key: &str, default: f64| match self.keys.f64(key, default)? {
            0.0 => Ok(default),
            _ => self.keys.positive(key, default),
        };
        let (mscale, all_dim) = (self.keys.f64("mscale", 0.0)?, self.keys.f64("mscale_all_dim", 0.0)?);
        let magnitude = |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
        let suggested = match [mscale, all_dim] {
            [0.0, _] | [_, 0.0] => magnitude(1.0),
            _ => magnitude(mscale) / magnitude(all_dim),
        };
        Ok(RopeType::Yarn {
            factor,
            attention_factor: self.keys.positive("attention_factor", suggested)?,
            beta_fast: or_default("beta_fast", 32.0)?,
            beta_slow: or_default("beta_slow", 1.0)?,
            original_max_position_embeddings: self.original,
            truncate: self.keys.bool("truncate", true)?,
        })
    }

    fn longrope(&self) -> Result<RopeType, String> {
        let positive = |key: &str, factor: &Value| {
            let number = factor.as_f64().filter(|factor| *factor > 0.0);
            number.ok_or_else(|| format!("`{key}` has {factor}; it must have positive numbers"))
        };
        let factors = |key: &str| match self.keys.0.get(key).and_then(Value::as_array) {
            Some(list) => list.iter().map(|factor| positive(key, factor)).collect(),
            None => Err(format!("`{key}` must be a list of numbers; `rope_type` `{}` needs it", self.name)),
        };
        let suggested = longrope_attention_factor(self.keys.f64("factor", self.stretch())?, self.original);
        Ok(RopeType::LongRope {
            short_factor: factors("short_factor")?,
            long_factor: factors("long_factor")?,
            attention_factor: self.keys.positive("attention_factor", suggested)?,
            original_max_position_embeddings: self.original,
        })
    }
}

impl Rope {
    /// Frequencies as they are, of this base.
    pub(crate) const fn plain(theta: f64) -> Self {
        Self { theta, kind: RopeType::Default }
    }

    /// The types that can be computed.
    pub const TYPES: [&'static str; 6] = ["default", "linear", "dynamic", "llama3", "yarn", "longrope"];

    /// The rotary embeddings of a configuration in which they are the same for all layers.
    pub(super) fn flat(config: &Map<String, Value>, theta: f64, max_position: usize) -> Result<Self, String> {
        let theta = base(&ConfigReader(config), "rope_theta", theta)?;
        Self::refuse_partial(config)?;
        match parameters(config)? {
            Some((key, found)) if found.values().any(Value::is_object) => {
                Err(format!("`{key}` differs by type of layer; this model's must be the same for all"))
            }
            Some((key, found)) => {
                // As in transformers, the value outside of the object has precedence.
                let mut found = found.clone();
                let outside = config.get(ORIGINAL).filter(|value| !value.is_null());
                found.extend(outside.map(|value| (ORIGINAL.to_owned(), value.clone())));
                Self::parse(&found, theta, max_position).map_err(|error| format!("`{key}`: {error}"))
            }
            None => Ok(Self::plain(theta)),
        }
    }

    /// The embeddings of full and of sliding attention, in a configuration like Gemma 3's; `theta` holds the keys of
    /// their bases with the defaults.
    pub(super) fn by_layer_type(
        config: &Map<String, Value>,
        theta: [(&str, f64); 2],
        max_position: usize,
    ) -> Result<[Self; 2], String> {
        let base = |(key, default)| base(&ConfigReader(config), key, default);
        let theta = [base(theta[0])?, base(theta[1])?];
        Self::refuse_partial(config)?;
        let (mut full, mut sliding) = (Map::new(), Map::new());
        for (name, value) in object(config, "rope_parameters")?.into_iter().flatten() {
            let found = match name.as_str() {
                "full_attention" => &mut full,
                "sliding_attention" => &mut sliding,
                _ => {
                    let message = "it must have `full_attention` and `sliding_attention`";
                    return Err(format!("`rope_parameters` has `{name}`; {message}"));
                }
            };
            match value {
                Value::Null => {}
                Value::Object(value) => found.clone_from(value),
                other => return Err(format!("`rope_parameters.{name}` is {other}; it must be an object")),
            }
        }
        let mut full_key = "rope_parameters.full_attention";
        let sliding_key = "rope_parameters.sliding_attention";
        // The older spelling extends full attention alone.
        if let Some(scaling) = object(config, "rope_scaling")? {
            full.extend(scaling.clone());
            full_key = "rope_scaling";
        }
        let parse = |key: &str, found: &Map<String, Value>, theta| match Self::parse(found, theta, max_position) {
            Ok(Self { kind: RopeType::Yarn { truncate: false, .. }, .. }) => {
                Err(format!("`{key}`: `truncate` is false, which transformers ignores for one type of layer"))
            }
            rope => rope.map_err(|error| format!("`{key}`: {error}")),
        };
        let full = parse(full_key, &full, theta[0])?;
        let sliding = parse(sliding_key, &sliding, theta[1])?;
        if sliding.is_dynamic() {
            let why = "layers with a window cannot have frequencies that depend on the length";
            return Err(format!("`{sliding_key}`: {why}"));
        }
        Ok([full, sliding])
    }

    fn refuse_partial(config: &Map<String, Value>) -> Result<(), String> {
        match ConfigReader(config).f64("partial_rotary_factor", 1.0)? {
            1.0 => Ok(()),
            other => Err(format!("`partial_rotary_factor` is {other}; only 1 is supported")),
        }
    }

    /// From the object that holds `rope_type` and its parameters.
    fn parse(parameters: &Map<String, Value>, theta: f64, max_position: usize) -> Result<Self, String> {
        let keys = ConfigReader(parameters);
        let name = keys.str("rope_type", keys.str("type", "default")?)?;
        if !Self::TYPES.contains(&name) {
            return Err(format!("`rope_type` is `{name}`; supported: `{}`", Self::TYPES.join("`, `")));
        }
        if let Some(key) = parameters.keys().find(|key| !KNOWN_KEYS.contains(&key.as_str())) {
            return Err(format!("`{key}` is not supported with `rope_type` `{name}`"));
        }
        Self::refuse_partial(parameters)?;
        let theta = base(&keys, "rope_theta", theta)?;
        let original = keys.positive_usize(ORIGINAL, max_position)?;
        let reader = ScalingReader { keys, name, max_position, original };
        let kind = match name {
            "linear" => RopeType::Linear { factor: reader.required("factor")? },
            "dynamic" => {
                RopeType::Dynamic { factor: reader.required("factor")?, max_position_embeddings: max_position }
            }
            "llama3" => reader.llama3()?,
            "yarn" => reader.yarn()?,
            "longrope" => reader.longrope()?,
            _ => RopeType::Default,
        };
        Ok(Self { theta, kind })
    }

    /// The value of `rope_parameters` in a `config.json`.
    pub(crate) fn to_json(&self) -> Value {
        json!(self)
    }

    /// The frequency of each pair of a head's elements, for sequences of up to `seq_len` tokens.
    pub fn frequencies(&self, head_size: usize, seq_len: usize) -> Vec<f32> {
        let half = head_size / 2;
        let theta = match self.kind {
            RopeType::Dynamic { factor, max_position_embeddings: max } if seq_len > max && head_size > 2 => {
                let stretched = factor * seq_len as f64 / max as f64 - (factor - 1.0);
                self.theta * stretched.powf(head_size as f64 / (head_size as f64 - 2.0))
            }
            _ => self.theta,
        };
        // PyTorch raises a whole number's FP32 to an FP32 exponent, and rounds each step.
        let wavelength = |i: usize| f64::from(theta as f32).powf(f64::from((2 * i) as f32 / head_size as f32)) as f32;
        let plain = (0..half).map(|i| 1.0 / wavelength(i));
        match &self.kind {
            RopeType::Default | RopeType::Dynamic { .. } => plain.collect(),
            RopeType::LongRope { short_factor, long_factor, original_max_position_embeddings: original, .. } => {
                let factors = if seq_len > *original { long_factor } else { short_factor };
                (0..half).zip(factors).map(|(i, factor)| 1.0 / (*factor as f32 * wavelength(i))).collect()
            }
            &RopeType::Linear { factor } => plain.map(|frequency| frequency / factor as f32).collect(),
            &RopeType::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
                let (factor, context) = (factor as f32, original_max_position_embeddings as f64);
                let (longest, shortest) = ((context / low_freq_factor) as f32, (context / high_freq_factor) as f32);
                let change = |frequency: f32| {
                    let wavelength = TAU as f32 / frequency;
                    if wavelength > longest {
                        return frequency / factor;
                    }
                    if wavelength < shortest {
                        return frequency;
                    }
                    let rotations = context as f32 / wavelength;
                    let smooth = (rotations - low_freq_factor as f32) / (high_freq_factor - low_freq_factor) as f32;
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                };
                plain.map(change).collect()
            }
            &RopeType::Yarn { factor, beta_fast, beta_slow, original_max_position_embeddings, truncate, .. } => {
                let size = head_size as f64;
                let bound = |rotations: f64| {
                    let turns = original_max_position_embeddings as f64 / (rotations * TAU);
                    size * turns.ln() / (2.0 * theta.ln())
                };
                let (mut low, mut high) = (bound(beta_fast), bound(beta_slow));
                if truncate {
                    low = low.floor();
                    high = high.ceil();
                }
                low = low.max(0.0);
                high = high.min(size - 1.0);
                if low == high {
                    high += 0.001;
                }
                let blend = |i: usize| {
                    let ramp = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
                    let kept = 1.0 - ramp;
                    let wavelength = wavelength(i);
                    1.0 / (factor as f32 * wavelength) * (1.0 - kept) + 1.0 / wavelength * kept
                };
                (0..half).map(blend).collect()
            }
        }
    }

    /// Rejects a number of LongRoPE's factors that is not that of the pairs of a head's elements.
    pub(super) fn check_factors(&self, pairs: usize) -> Result<(), String> {
        let RopeType::LongRope { short_factor, long_factor, .. } = &self.kind else { return Ok(()) };
        for (key, factors) in [("short_factor", short_factor), ("long_factor", long_factor)] {
            if factors.len() != pairs {
                return Err(format!(
                    "`{key}` has {} numbers; the rotated part of a head has {pairs} pairs",
                    factors.len()
                ));
            }
        }
        Ok(())
    }

    /// Whether the frequencies depend on a sequence's length.
    pub fn is_dynamic(&self) -> bool {
        matches!(self.kind, RopeType::Dynamic { .. } | RopeType::LongRope { .. })
    }

    /// The length beyond which a sequence has other frequencies for all its tokens.
    pub(super) fn original_context(&self) -> Option<usize> {
        match self.kind {
            RopeType::LongRope { original_max_position_embeddings, .. } => Some(original_max_position_embeddings),
            _ => None,
        }
    }

    /// The length up to which a sequence has the frequencies of short ones, if longer ones have others.
    pub(super) fn short_context(&self) -> Option<usize> {
        match self.kind {
            RopeType::Dynamic { max_position_embeddings, .. } => Some(max_position_embeddings),
            _ => self.original_context(),
        }
    }

    /// The factor of cosines and sines.
    pub fn attention_factor(&self) -> f64 {
        match self.kind {
            RopeType::Yarn { attention_factor, .. } | RopeType::LongRope { attention_factor, .. } => attention_factor,
            _ => 1.0,
        }
    }
}

/// `LongRoPE`'s usual factor of cosines and sines for a context `stretch` times as long as the original one.
pub(super) fn longrope_attention_factor(stretch: f64, original: usize) -> f64 {
    if stretch <= 1.0 { 1.0 } else { (1.0 + stretch.ln() / (original as f64).ln()).sqrt() }
}

fn base(keys: &ConfigReader<'_>, key: &str, default: f64) -> Result<f64, String> {
    let theta = keys.f64(key, default)?;
    if theta.is_finite() && theta > 1.0 { Ok(theta) } else { Err(format!("`{key}` is {theta}; it must be above 1")) }
}

/// A key and its object.
pub(super) type Named<'a> = (&'static str, &'a Map<String, Value>);

/// The object with the parameters and its key, in either spelling; the older one wins, as in transformers.
pub(super) fn parameters(config: &Map<String, Value>) -> Result<Option<Named<'_>>, String> {
    for key in ["rope_scaling", "rope_parameters"] {
        if let Some(found) = object(config, key)? {
            return Ok(Some((key, found)));
        }
    }
    Ok(None)
}

/// The object of a key, if it is not empty.
fn object<'a>(config: &'a Map<String, Value>, key: &str) -> Result<Option<&'a Map<String, Value>>, String> {
    match config.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Object(found)) => Ok(Some(found).filter(|found| !found.is_empty())),
        Some(other) => Err(format!("`{key}` is {other}; it must be an object")),
    }
}

/// `config` with these rotary embeddings if it has none. As in transformers, empty `rope_parameters` count, and an
/// empty `rope_scaling` does not.
pub(super) fn with_default(config: &Map<String, Value>, default: Value) -> Result<Map<String, Value>, String> {
    let mut config = config.clone();
    if parameters(&config)?.is_none() && config.get("rope_parameters").is_none_or(Value::is_null) {
        config.insert("rope_parameters".into(), default);
    }
    Ok(config)
}

#[cfg(test)]
mod tests;
