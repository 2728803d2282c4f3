//! The list of model families, each in its own file.

mod exaone4;
mod gemma2;
mod gemma3;
mod gpt2;
mod gpt_oss;
mod granite;
mod granite4;
mod granitemoe;
mod keys;
pub(super) mod lfm2;
mod llama;
mod ministral3;
mod mistral;
mod names;
mod olmo2;
mod olmo3;
mod olmoe;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_5;
mod qwen3_moe;
mod smollm3;
mod windows;

use super::family::{ConfigReader, Family};
use super::spec::ModelSpec;
use serde_json::{Map, Value};

static FAMILIES: [&Family; 21] = [
    &gpt2::GPT2,
    &llama::LLAMA,
    &mistral::MISTRAL,
    &ministral3::MINISTRAL3,
    &qwen2::QWEN2,
    &qwen3::QWEN3,
    &gemma2::GEMMA2,
    &gemma3::GEMMA3,
    &smollm3::SMOLLM3,
    &olmo2::OLMO2,
    &olmo3::OLMO3,
    &exaone4::EXAONE4,
    &lfm2::LFM2,
    &qwen3_5::QWEN3_5,
    &phi3::PHI3,
    &granite::GRANITE,
    &granite4::GRANITE4,
    &qwen3_moe::QWEN3_MOE,
    &olmoe::OLMOE,
    &granitemoe::GRANITE_MOE,
    &gpt_oss::GPT_OSS,
];

/// The maximum number of parameters; their bytes in any number of copies stay within 64 bits.
const MAX_PARAMETERS: u64 = 1 << 48;

/// The spec that a `config.json` describes, or an error that names the key.
pub(super) fn read(keys: &ConfigReader<'_>) -> Result<ModelSpec, String> {
    let family = family_of(keys)?;
    let mut config = keys.0.clone();
    for (alias, key) in family.aliases {
        if let Some(value) = config.remove(*alias).filter(|value| !value.is_null()) {
            config.insert((*key).to_owned(), value);
        }
    }
    let keys = &ConfigReader(&config);
    let mut spec = (family.read)(keys)?;
    spec.pad_token_id = keys.0.get("pad_token_id").and_then(|id| u32::try_from(id.as_u64()?).ok());
    let count = spec.parameter_count();
    if count > MAX_PARAMETERS {
        return Err(format!("it describes {count} parameters, more than the maximum of {MAX_PARAMETERS}"));
    }
    let ropes = spec.rope.iter().chain(spec.sliding.iter().map(|sliding| &sliding.rope));
    ropes.into_iter().try_for_each(|rope| rope.check_factors(spec.rotary_dim() / 2))?;
    Ok(spec)
}

/// Known values of `model_type`, with the parts of these models that the engine lacks.
const LACKING: [(&str, &str); 3] = [
    ("gemma4_text", "shared keys and values and embeddings for each layer"),
    ("qwen3_5_moe_text", "experts that all tokens share"),
    ("qwen3_next", "experts that all tokens share"),
];

/// The family that a `config.json` names.
fn family_of(keys: &ConfigReader<'_>) -> Result<&'static Family, String> {
    let model_type = keys.str("model_type", "")?;
    FAMILIES.into_iter().find(|family| family.model_type == model_type).ok_or_else(|| {
        let known = FAMILIES.map(|family| family.model_type).join("`, `");
        let lacking = LACKING.into_iter().find(|(name, _)| *name == model_type);
        let why = lacking.map(|(_, parts)| format!(", and the engine lacks its {parts}")).unwrap_or_default();
        format!("`model_type` is `{model_type}`{why}; supported: `{known}`")
    })
}

/// The family of a GGUF file. Later entries of the list come first, because they are more specific.
pub(crate) fn of_gguf(architecture: &str, keys: &Map<String, Value>) -> Result<&'static Family, String> {
    let fits = |family: &&Family| family.gguf.architecture == architecture && (family.gguf.claims)(keys);
    FAMILIES.into_iter().rev().find(fits).ok_or_else(|| {
        let mut known = FAMILIES.map(|family| family.gguf.architecture).to_vec();
        known.dedup();
        let known = known.join("`, `");
        format!("`general.architecture` is `{}`; supported: `{known}`", architecture.escape_debug())
    })
}

impl ModelSpec {
    /// The names that [`ModelSpec::named`] accepts.
    pub fn names() -> Vec<&'static str> {
        FAMILIES.iter().flat_map(|family| family.named).map(|(name, _)| *name).collect()
    }

    /// The built-in architecture `name`, without dropout.
    pub fn named(name: &str) -> Option<Self> {
        let (_, spec) = FAMILIES.iter().flat_map(|family| family.named).find(|(known, _)| *known == name)?;
        Some(spec())
    }
}

#[cfg(test)]
mod tests;
