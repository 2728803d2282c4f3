//! The frozen base of adapters: read once, kept in the compute type or in a file's blocks, and known by a digest of its values.

use crate::digest::DigestWriter;
use crate::engine::kernels::survey::survey;
use crate::engine::kernels::view::read;
use crate::engine::model::{ModelSpec, Parameters, candle_dtype, set_output_norms};
use crate::precision::{Dtype, FloatFormat};
use crate::store::GgufModel;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use std::io::{Write as _, sink};
use std::sync::Arc;

/// Values hashed at a time.
const CHUNK: usize = 1 << 16;

/// Parameters over their base.
#[derive(Debug)]
pub struct OverBase {
    /// What is trained, in FP32, over the base in the compute type or in blocks. Adapters have their initial values.
    pub parameters: Parameters,
    /// SHA-256 of the base's values in FP32, in the order of their names: the same however they are stored.
    pub sha256: String,
}

/// The trained parameters of `spec`, drawn from `seed`, over its base, of which `read_one` reads one tensor at a time, in FP32. On a
/// CPU matrices stay in the blocks that `gguf` has. `origin` is the base's name, for messages.
///
/// # Errors
/// [`Error::Model`] naming a tensor that holds infinities or NaNs, or that `compute` cannot hold; or what `read_one` says.
pub fn over_base(
    spec: &ModelSpec,
    compute: Dtype,
    seed: u64,
    device: &Device,
    origin: &str,
    gguf: Option<&GgufModel>,
    mut read_one: impl FnMut(&Parameters) -> Result<()>,
) -> Result<OverBase> {
    let own = Parameters::zeros(&spec.parameters(), DType::F32, device)?;
    own.initialise(seed)?;
    let (frozen, dtype) = (spec.frozen_parameters(), candle_dtype(compute));
    let base = match gguf {
        Some(gguf) if device.is_cpu() => {
            let in_blocks = spec.in_blocks();
            let in_blocks = frozen.iter().filter(|entry| in_blocks.contains_key(&entry.name));
            let quantised = in_blocks.map(|entry| Ok((entry.name.clone(), gguf.blocks(entry)?)));
            Parameters::with_blocks(&frozen, dtype, quantised.collect::<Result<_>>()?)?
        }
        _ => Parameters::zeros(&frozen, dtype, device)?,
    };
    let mut digest = DigestWriter::new(sink());
    for entry in spec.base_parameters() {
        let one = Parameters::zeros(std::slice::from_ref(&entry), DType::F32, &Device::Cpu)?;
        read_one(&one)?;
        let wide = &one[0];
        check_tensor(&entry.name, wide, origin, compute)?;
        digest.write_all(entry.name.as_bytes()).map_err(Error::io("hash", origin))?;
        for values in read(wide)?.typed::<f32>()?.chunks(CHUNK) {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            digest.write_all(&bytes).map_err(Error::io("hash", origin))?;
        }
        let Some(tensor) = own.get(&entry.name).or_else(|| base.get(&entry.name)) else { continue };
        if tensor.elem_count() == 0 {
            continue;
        }
        tensor.slice_set(&wide.to_dtype(tensor.dtype())?.to_device(device)?, 0, 0)?;
    }
    let parameters = own.over(Some(Arc::new(base)));
    set_output_norms(spec, &parameters)?;
    Ok(OverBase { parameters, sha256: digest.finish().1.sha256 })
}

/// Rejects FP32 weights that are not finite or exceed the range of `dtype`, naming the tensor; `origin` is the model's name.
pub fn check_range(masters: &Parameters, origin: &str, dtype: Dtype) -> Result<()> {
    masters.iter().try_for_each(|(name, tensor)| check_tensor(name, tensor, origin, dtype))
}

fn check_tensor(name: &str, tensor: &Tensor, origin: &str, dtype: Dtype) -> Result<()> {
    let (stats, format) = (survey(tensor, FloatFormat::FP32, false)?.stats, dtype.format());
    if !stats.is_finite() {
        return Err(Error::model(origin, format!("`{name}` contains infinities or NaNs")));
    }
    if f64::from(stats.max_abs) > format.max() {
        let (largest, name_of) = (stats.max_abs, format.name);
        let message = format!("`{name}` reaches {largest}, beyond {name_of}'s largest value; use bf16 or fp32");
        return Err(Error::model(origin, message));
    }
    Ok(())
}
