//! Phi-3 and Phi-4 mini (Abdin et al., 2024): Llama with queries, keys and values in one weight, gate and up in
//! another, and rotary embeddings of a part of each head with factors for two lengths.

use super::llama::{self, PARTIAL, head_dim, only_silu, with_partial_rope};
use crate::engine::model::family::{ConfigReader, Family, GgufFormat};
use crate::engine::model::rope::{ORIGINAL, RopeType, longrope_attention_factor};
use crate::engine::model::spec::{DropoutRates, LinearRole, ModelSpec, ModuleId, ModuleOp};
use serde_json::{Map, Value, json};

pub(super) static PHI3: Family = Family {
    model_type: "phi3",
    class: "Phi3ForCausalLM",
    bias_keys: &[],
    named: &[],
    read,
    write,
    layer_name,
    gguf: GgufFormat {
        architecture: "phi3",
        frequency_factors: Some("longrope"),
        read: |keys, json| {
            llama::read_partial_rope(keys, json);
            let original = json.get("rope_scaling").and_then(|rope| rope.get(ORIGINAL)).cloned();
            json.extend(original.map(|original| (ORIGINAL.to_owned(), original)));
            // llama.cpp writes 0 for a model without windows.
            json.retain(|key, value| key != "sliding_window" || value.as_u64() != Some(0));
        },
        write: |spec, keys| {
            // By this 0, llama.cpp distinguishes Phi-4 from files without the key.
            keys.extend(spec.sliding.is_none().then_some(("attention.sliding_window", 0.into())));
            Ok(())
        },
        ..llama::OTHER_GGUF
    },
    ..llama::BASE
};

/// The defaults of transformers for missing keys.
fn default() -> ModelSpec {
    ModelSpec {
        family: &PHI3,
        vocab_size: 32_064,
        max_position_embeddings: 4096,
        hidden_size: 3072,
        intermediate_size: 8192,
        norm_eps: 1e-5,
        fused_qkv: true,
        fused_gate_up: true,
        eos_token_ids: vec![32_000],
        ..llama::default()
    }
}

/// The configuration with `rope_parameters` as other families have it.
fn standard_rope(keys: &ConfigReader<'_>) -> Result<Map<String, Value>, String> {
    let mut config = keys.0.clone();
    let original = keys.positive_usize(ORIGINAL, 4096)?;
    for key in ["rope_scaling", "rope_parameters"] {
        let Some(Value::Object(rope)) = config.get_mut(key) else { continue };
        for key in ["rope_type", "type"] {
            // Older files have these names for it.
            if matches!(rope.get(key).and_then(Value::as_str), Some("su" | "yarn")) {
                rope.insert(key.into(), "longrope".into());
            }
        }
        // transformers takes the outer value, or its default, also if there is an inner one.
        rope.insert(ORIGINAL.into(), original.into());
    }
    Ok(config)
}

fn read(keys: &ConfigReader<'_>) -> Result<ModelSpec, String> {
    only_silu(keys)?;
    let spec = llama::read(keys, default(), None)?;
    let head_dim = head_dim(keys, &spec, None)?;
    let dropout = DropoutRates { residual: keys.dropout("resid_pdrop", 0.0)?, ..spec.dropout };
    let spec = with_partial_rope(standard_rope(keys)?, ModelSpec { head_dim, dropout, ..spec }, 1.0)?;
    if keys.0.get("sliding_window").is_none_or(Value::is_null) {
        return Ok(spec);
    }
    let every = vec![true; spec.num_layers];
    llama::with_windows(keys, spec, every)
}

fn write(spec: &ModelSpec) -> Value {
    let mut json = llama::write(spec);
    json["resid_pdrop"] = spec.dropout.residual.into();
    json["sliding_window"] = llama::window(spec);
    let original = json["rope_parameters"][ORIGINAL].clone();
    json[ORIGINAL] = if original.is_null() { json["max_position_embeddings"].clone() } else { original };
    json["rope_parameters"][PARTIAL] = json!(spec.rotary_dim() as f64 / spec.head_dim as f64);
    if let Some(RopeType::LongRope { short_factor, long_factor, attention_factor, original_max_position_embeddings }) =
        spec.rope.as_ref().map(|rope| &rope.kind)
    {
        let original = *original_max_position_embeddings;
        let stretch = spec.max_position_embeddings as f64 / original as f64;
        if *attention_factor == longrope_attention_factor(stretch, original) {
            // transformers before version 5 takes these keys only.
            json["rope_scaling"] =
                json!({"type": "longrope", "short_factor": short_factor, "long_factor": long_factor});
        }
    }
    json
}

fn layer_name(layer: ModuleId) -> String {
    let name = match layer.op {
        ModuleOp::Linear(LinearRole::Qkv) => "self_attn.qkv_proj",
        ModuleOp::Linear(LinearRole::GateUp) => "mlp.gate_up_proj",
        _ => return llama::layer_name(layer),
    };
    llama::in_block(layer.block, name)
}
