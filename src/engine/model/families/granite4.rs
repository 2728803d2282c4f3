//! Granite 4 without experts and without state-space layers (IBM, 2025): Granite 3 with gate and up in one weight, and
//! with other names. Some models have no position embeddings.

use super::{granite, llama};
use crate::engine::model::family::{ConfigReader, Family, GgufFormat};
use crate::engine::model::spec::{LinearRole, ModelSpec, ModuleOp};
use serde_json::Value;

pub(super) static GRANITE4: Family = Family {
    model_type: "granitemoehybrid",
    class: "GraniteMoeHybridForCausalLM",
    aliases: &[("layers_block_type", "layer_types")],
    bias_keys: &["attention_bias"],
    read,
    write: |spec| {
        let mut json = granite::write(spec);
        json[INNER] = spec.intermediate_size.into();
        json[EXPERTS] = 0.into();
        json["num_experts_per_tok"] = 0.into();
        // transformers checks the sizes of the layers that this model lacks; this number of heads divides any width.
        json["mamba_n_heads"] = 1.into();
        json["layer_types"] = vec!["attention"; spec.num_layers].into();
        json[POSITIONS] = if spec.unrotated.is_empty() { "rope".into() } else { Value::Null };
        json
    },
    layer_name: |layer| {
        let name = match layer.op {
            ModuleOp::Linear(LinearRole::GateUp) => "shared_mlp.input_linear",
            ModuleOp::Linear(LinearRole::Down) => "shared_mlp.output_linear",
            _ => return llama::layer_name(layer),
        };
        llama::in_block(layer.block, name)
    },
    gguf: GgufFormat {
        // A file of such a model has the architecture, and the weights, of Granite 3, in which this key turns rotation
        // off.
        claims: |keys| keys.get(ROTATES) == Some(&Value::Bool(false)),
        splits_gate_up: true,
        read: |keys, json| {
            (granite::BASE.gguf.read)(keys, json);
            json.insert(EXPERTS.into(), 0.into());
            json.insert(INNER.into(), json["intermediate_size"].clone());
            json.insert("layer_types".into(), vec!["attention"].into());
        },
        write: |spec, keys| {
            keys.push((ROTATES, spec.unrotated.is_empty().into()));
            (granite::BASE.gguf.write)(spec, keys)
        },
        ..granite::BASE.gguf
    },
    ..granite::BASE
};

/// The key of the number of experts.
const EXPERTS: &str = "num_local_experts";
/// The key of the MLP's width.
const INNER: &str = "shared_intermediate_size";
/// The key of GGUF for whether queries and keys are rotated.
const ROTATES: &str = "rope.scaling.finetuned";
/// The key of the kind of position embeddings.
const POSITIONS: &str = "position_embedding_type";

fn read(keys: &ConfigReader<'_>) -> Result<ModelSpec, String> {
    let experts = keys.usize(EXPERTS, 8)?;
    if experts > 0 {
        return Err(format!("`{EXPERTS}` is {experts}; the engine has models without experts only"));
    }
    let Some(layers) = keys.0.get("layer_types").and_then(Value::as_array) else {
        return Err("`layer_types` is missing; its default is layers with a state space, which the engine lacks".into());
    };
    if let Some(other) = layers.iter().find(|kind| *kind != "attention" && *kind != "full_attention") {
        return Err(format!("`layer_types` has {other}; the engine has layers with attention only"));
    }
    let rotates = match keys.str(POSITIONS, "nope")? {
        "rope" => true,
        "nope" => false,
        other => return Err(format!("`{POSITIONS}` is `{other}`; supported: `rope`, `nope`, or null")),
    };
    let default = ModelSpec { family: &GRANITE4, fused_gate_up: true, ..llama::default() };
    let spec = granite::read(keys, default)?;
    let unrotated = if rotates { Vec::new() } else { vec![true; spec.num_layers] };
    Ok(ModelSpec { intermediate_size: keys.positive_usize(INNER, 1024)?, unrotated, ..spec })
}
