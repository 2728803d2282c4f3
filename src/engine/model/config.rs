//! The shape of a GPT-2: read from a Hugging Face `config.json`, named, counted, and written back.

use serde_json::{Map, Value, json};

use crate::{Error, Result};

/// Model types that [`Gpt2Config::from_json`] accepts.
const SUPPORTED: [&str; 1] = ["gpt2"];

/// No dimension of a model that fits this world's memories is larger; products of three stay within 64 bits.
const LARGEST: u64 = 1 << 20;

/// Dimensions and constants of a GPT-2 with a language-model head, under their names in `config.json`.
#[derive(Debug, Clone, PartialEq)]
pub struct Gpt2Config {
    /// V: rows of the token embedding.
    pub vocab_size: usize,
    /// C: the longest context, rows of the position embedding.
    pub n_positions: usize,
    /// D: the width of the residual stream.
    pub n_embd: usize,
    /// The number of blocks.
    pub n_layer: usize,
    /// Heads of attention in a block; divides `n_embd`.
    pub n_head: usize,
    /// The width inside the MLP, 4 D unless the file says otherwise.
    pub n_inner: usize,
    /// What layer norm adds to the variance.
    pub layer_norm_epsilon: f64,
    /// Standard deviation of freshly drawn weights.
    pub initializer_range: f64,
    /// Dropout after the embeddings.
    pub embd_pdrop: f64,
    /// Dropout on what attention and MLP add to the residual stream.
    pub resid_pdrop: f64,
    /// Dropout on the weights of attention.
    pub attn_pdrop: f64,
    /// Whether the head's matrix is the token embedding.
    pub tie_word_embeddings: bool,
    /// Starts a text.
    pub bos_token_id: Option<u32>,
    /// Ends a text.
    pub eos_token_id: Option<u32>,
}

impl Default for Gpt2Config {
    /// The smallest of `OpenAI`'s, which is also what transformers puts in for a missing key.
    fn default() -> Self {
        Self {
            vocab_size: 50257,
            n_positions: 1024,
            n_embd: 768,
            n_layer: 12,
            n_head: 12,
            n_inner: 4 * 768,
            layer_norm_epsilon: 1e-5,
            initializer_range: 0.02,
            embd_pdrop: 0.1,
            resid_pdrop: 0.1,
            attn_pdrop: 0.1,
            tie_word_embeddings: true,
            bos_token_id: Some(50256),
            eos_token_id: Some(50256),
        }
    }
}

impl Gpt2Config {
    /// The names [`Gpt2Config::named`] knows.
    pub const NAMES: [&str; 6] = ["tiny", "distilgpt2", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"];

    /// The architecture that goes by `name`, with dropout off.
    ///
    /// `tiny` is ours: 0.8 million parameters over 256 bytes and one end-of-text token.
    pub fn named(name: &str) -> Option<Self> {
        let (n_layer, n_embd, n_head) = match name {
            "tiny" => (4, 128, 4),
            "distilgpt2" => (6, 768, 12),
            "gpt2" => (12, 768, 12),
            "gpt2-medium" => (24, 1024, 16),
            "gpt2-large" => (36, 1280, 20),
            "gpt2-xl" => (48, 1600, 25),
            _ => return None,
        };
        let shape = Self { n_layer, n_embd, n_head, n_inner: 4 * n_embd, ..Self::default() };
        let shape = Self { embd_pdrop: 0.0, resid_pdrop: 0.0, attn_pdrop: 0.0, ..shape };
        Some(if name == "tiny" {
            let end = Some(256);
            Self { vocab_size: 257, n_positions: 128, bos_token_id: end, eos_token_id: end, ..shape }
        } else {
            shape
        })
    }

    /// Reads the text of a `config.json`; `origin` is its path, for messages. Keys that change nothing here are passed
    /// over, as transformers does.
    ///
    /// # Errors
    /// [`Error::Model`] naming the key: another model type or activation, a variant of attention that the engine has not,
    /// a number that is not positive, heads that do not divide the width.
    pub fn from_json(text: &[u8], origin: &str) -> Result<Self> {
        let fail = |message: String| Error::model(origin, message);
        let json: Map<String, Value> =
            serde_json::from_slice(text).map_err(|error| fail(format!("not JSON: {error}")))?;
        Self::from_map(&Keys(&json)).map_err(fail)
    }

    fn from_map(keys: &Keys<'_>) -> Result<Self, String> {
        let model_type = keys.text("model_type", "")?;
        if !SUPPORTED.contains(&model_type) {
            return Err(format!("`model_type` is `{model_type}`; supported: `{}`", SUPPORTED.join("`, `")));
        }
        let activation = keys.text("activation_function", "gelu_new")?;
        if activation != "gelu_new" {
            return Err(format!(
                "`activation_function` is `{activation}`; the engine has `gelu_new` only (GELU, tanh form)"
            ));
        }
        for (key, supported) in [
            ("scale_attn_weights", true),
            ("scale_attn_by_inverse_layer_idx", false),
            ("reorder_and_upcast_attn", false),
            ("add_cross_attention", false),
        ] {
            if keys.flag(key, supported)? != supported {
                return Err(format!("`{key}` is {}; the engine supports {supported} only", !supported));
            }
        }
        let default = Self::default();
        let n_embd = keys.size("n_embd", default.n_embd)?;
        let config = Self {
            vocab_size: keys.size("vocab_size", default.vocab_size)?,
            n_positions: keys.size("n_positions", default.n_positions)?,
            n_embd,
            n_layer: keys.size("n_layer", default.n_layer)?,
            n_head: keys.size("n_head", default.n_head)?,
            n_inner: keys.size("n_inner", 4 * n_embd)?,
            layer_norm_epsilon: keys.number("layer_norm_epsilon", default.layer_norm_epsilon)?,
            initializer_range: keys.number("initializer_range", default.initializer_range)?,
            embd_pdrop: keys.number("embd_pdrop", default.embd_pdrop)?,
            resid_pdrop: keys.number("resid_pdrop", default.resid_pdrop)?,
            attn_pdrop: keys.number("attn_pdrop", default.attn_pdrop)?,
            tie_word_embeddings: keys.flag("tie_word_embeddings", default.tie_word_embeddings)?,
            bos_token_id: keys.token("bos_token_id", default.bos_token_id)?,
            eos_token_id: keys.token("eos_token_id", default.eos_token_id)?,
        };
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), String> {
        if !self.n_embd.is_multiple_of(self.n_head) {
            return Err(format!("`n_head` = {} does not divide `n_embd` = {}", self.n_head, self.n_embd));
        }
        for (key, value) in
            [("embd_pdrop", self.embd_pdrop), ("resid_pdrop", self.resid_pdrop), ("attn_pdrop", self.attn_pdrop)]
        {
            if !(0.0..1.0).contains(&value) {
                return Err(format!("`{key}` is {value}; a dropout probability lies in [0, 1)"));
            }
        }
        for (key, value) in
            [("layer_norm_epsilon", self.layer_norm_epsilon), ("initializer_range", self.initializer_range)]
        {
            if value.is_nan() || value <= 0.0 {
                return Err(format!("`{key}` is {value}; it must be positive"));
            }
        }
        Ok(())
    }

    /// A `config.json` that transformers' `from_pretrained` takes; `dtype` is that of the weights beside it, as torch
    /// names it (`float32`, `float16`, `bfloat16`).
    pub fn to_json(&self, dtype: &str) -> String {
        let json = json!({
            "activation_function": "gelu_new",
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": self.attn_pdrop,
            "bos_token_id": self.bos_token_id,
            // transformers 5 writes and reads `dtype`, older ones know `torch_dtype` only.
            "dtype": dtype,
            "embd_pdrop": self.embd_pdrop,
            "eos_token_id": self.eos_token_id,
            "initializer_range": self.initializer_range,
            "layer_norm_epsilon": self.layer_norm_epsilon,
            "model_type": "gpt2",
            "n_ctx": self.n_positions,
            "n_embd": self.n_embd,
            "n_head": self.n_head,
            "n_inner": self.n_inner,
            "n_layer": self.n_layer,
            "n_positions": self.n_positions,
            "resid_pdrop": self.resid_pdrop,
            "tie_word_embeddings": self.tie_word_embeddings,
            "torch_dtype": dtype,
            "vocab_size": self.vocab_size,
        });
        format!("{json:#}\n")
    }

    /// Every parameter with its shape, ordered by name as strings are (`h.10.…` before `h.2.…`). Names are those of
    /// Hugging Face without `transformer.`; `lm_head.weight` is there only where it is not tied.
    pub fn parameter_shapes(&self) -> Vec<(String, Vec<usize>)> {
        let Self { vocab_size, n_positions, n_embd: d, n_inner, .. } = *self;
        let mut shapes = vec![
            ("wte.weight".to_owned(), vec![vocab_size, d]),
            ("wpe.weight".to_owned(), vec![n_positions, d]),
            ("ln_f.weight".to_owned(), vec![d]),
            ("ln_f.bias".to_owned(), vec![d]),
        ];
        if !self.tie_word_embeddings {
            shapes.push(("lm_head.weight".to_owned(), vec![vocab_size, d]));
        }
        for layer in 0..self.n_layer {
            for norm in ["ln_1", "ln_2"] {
                shapes.push((format!("h.{layer}.{norm}.weight"), vec![d]));
                shapes.push((format!("h.{layer}.{norm}.bias"), vec![d]));
            }
            // Conv1D: the weight is [in, out].
            for (linear, rows, columns) in
                [("attn.c_attn", d, 3 * d), ("attn.c_proj", d, d), ("mlp.c_fc", d, n_inner), ("mlp.c_proj", n_inner, d)]
            {
                shapes.push((format!("h.{layer}.{linear}.weight"), vec![rows, columns]));
                shapes.push((format!("h.{layer}.{linear}.bias"), vec![columns]));
            }
        }
        shapes.sort();
        shapes
    }

    /// The number of parameters, a tied head counted once.
    pub fn parameter_count(&self) -> u64 {
        let Self { vocab_size, n_positions, n_embd, n_layer, n_inner, .. } = *self;
        let [v, c, d, layers, inner] = [vocab_size, n_positions, n_embd, n_layer, n_inner].map(|dim| dim as u64);
        let norm = 2 * d;
        let attention = (3 * d * d + 3 * d) + (d * d + d);
        let mlp = (d * inner + inner) + (inner * d + d);
        let embeddings = (v + c) * d + if self.tie_word_embeddings { 0 } else { v * d };
        embeddings + layers * (2 * norm + attention + mlp) + norm
    }
}

/// Reads keys of one type each; a key that is missing or `null` takes its default.
struct Keys<'a>(&'a Map<String, Value>);

impl<'a> Keys<'a> {
    fn get<T>(&self, key: &str, default: T, wanted: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<T, String> {
        match self.0.get(key) {
            None | Some(Value::Null) => Ok(default),
            Some(value) => read(value).ok_or_else(|| format!("`{key}` is {value}; it must be {wanted}")),
        }
    }

    fn size(&self, key: &str, default: usize) -> Result<usize, String> {
        let read = |value: &Value| value.as_u64().filter(|n| (1..=LARGEST).contains(n)).map(|n| n as usize);
        self.get(key, default, &format!("a whole number from 1 to {LARGEST}"), read)
    }

    fn number(&self, key: &str, default: f64) -> Result<f64, String> {
        self.get(key, default, "a number", Value::as_f64)
    }

    fn flag(&self, key: &str, default: bool) -> Result<bool, String> {
        self.get(key, default, "true or false", Value::as_bool)
    }

    fn text(&self, key: &str, default: &'a str) -> Result<&'a str, String> {
        self.get(key, default, "a string", Value::as_str)
    }

    /// `null` means that the model has no such token, so only a missing key takes the default.
    fn token(&self, key: &str, default: Option<u32>) -> Result<Option<u32>, String> {
        match self.0.get(key) {
            Some(Value::Null) => Ok(None),
            _ => self.get(key, default, "a token id", |value| Some(Some(u32::try_from(value.as_u64()?).ok()?))),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use proptest::prelude::*;

    use super::*;

    fn read(json: &Value) -> Result<Gpt2Config, String> {
        Gpt2Config::from_json(json.to_string().as_bytes(), "config.json").map_err(|error| error.to_string())
    }

    /// Parameter counts that transformers reports (`model.num_parameters()`).
    #[test]
    fn named_architectures_have_their_known_sizes() {
        for (name, count) in [
            ("distilgpt2", 81_912_576),
            ("gpt2", 124_439_808),
            ("gpt2-medium", 354_823_168),
            ("gpt2-large", 774_030_080),
            ("gpt2-xl", 1_557_611_200),
        ] {
            assert_eq!(Gpt2Config::named(name).unwrap().parameter_count(), count, "{name}");
        }
        assert_eq!(Gpt2Config::named("bert"), None);
    }

    #[test]
    fn counting_agrees_with_the_list_of_shapes() {
        for name in Gpt2Config::NAMES {
            for tie_word_embeddings in [true, false] {
                let config = Gpt2Config { tie_word_embeddings, ..Gpt2Config::named(name).unwrap() };
                let shapes = config.parameter_shapes();
                let sum: usize = shapes.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
                assert_eq!(sum as u64, config.parameter_count(), "{name}");
                assert!(
                    shapes.is_sorted() && shapes.len() == 12 * config.n_layer + 4 + usize::from(!tie_word_embeddings)
                );
            }
        }
    }

    #[test]
    fn what_is_written_reads_back() {
        for name in Gpt2Config::NAMES {
            let config = Gpt2Config { tie_word_embeddings: name == "tiny", ..Gpt2Config::named(name).unwrap() };
            assert_eq!(Gpt2Config::from_json(config.to_json("float16").as_bytes(), "x").unwrap(), config);
        }
    }

    #[test]
    fn missing_keys_take_the_defaults_of_transformers() {
        assert_eq!(read(&json!({"model_type": "gpt2"})).unwrap(), Gpt2Config::default());
        let narrow = read(&json!({"model_type": "gpt2", "n_embd": 24, "n_inner": null, "eos_token_id": null})).unwrap();
        assert_eq!((narrow.n_inner, narrow.eos_token_id, narrow.bos_token_id), (96, None, Some(50256)));
    }

    #[test]
    fn what_the_engine_has_not_is_refused_by_name() {
        for (key, value, expected) in [
            ("model_type", json!("llama"), "`model_type` is `llama`; supported: `gpt2`"),
            ("model_type", json!(7), "`model_type` is 7; it must be a string"),
            ("activation_function", json!("relu"), "`activation_function` is `relu`"),
            ("scale_attn_by_inverse_layer_idx", json!(true), "`scale_attn_by_inverse_layer_idx` is true"),
            ("reorder_and_upcast_attn", json!(true), "supports false only"),
            ("add_cross_attention", json!(true), "supports false only"),
            ("scale_attn_weights", json!(false), "supports true only"),
            ("n_head", json!(7), "`n_head` = 7 does not divide `n_embd` = 768"),
            ("n_head", json!(0), "`n_head` is 0; it must be a whole number from 1"),
            ("n_layer", json!(-1), "`n_layer` is -1"),
            ("n_embd", json!(1.5), "`n_embd` is 1.5"),
            ("vocab_size", json!(1_u64 << 40), "`vocab_size` is 1099511627776"),
            ("resid_pdrop", json!(1.0), "`resid_pdrop` is 1"),
            ("layer_norm_epsilon", json!(0), "`layer_norm_epsilon` is 0; it must be positive"),
            ("eos_token_id", json!([1, 2]), "`eos_token_id` is [1,2]; it must be a token id"),
        ] {
            let mut config = json!({"model_type": "gpt2"});
            config[key] = value;
            let message = read(&config).unwrap_err();
            assert!(message.starts_with("config.json: ") && message.contains(expected), "{message}");
        }
        assert!(read(&json!({})).unwrap_err().contains("`model_type` is ``; supported"));
        assert!(read(&json!([])).unwrap_err().contains("not JSON: invalid type: sequence"));
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Gpt2Config::from_json(&bytes, "x");
        }

        #[test]
        fn an_accepted_config_can_be_counted(dims in proptest::array::uniform6(-1_i64..=1 << 21)) {
            let [v, c, d, l, h, i] = dims;
            let json = json!({"model_type": "gpt2", "vocab_size": v, "n_positions": c, "n_embd": d, "n_layer": l,
                "n_head": h.clamp(0, 2), "n_inner": i});
            if let Ok(config) = read(&json) {
                prop_assert!(config.parameter_count() > 0 && config.n_embd % config.n_head == 0);
            }
        }
    }
}
