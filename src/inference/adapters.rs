//! Adapters over their base: as a decoder, and merged.

use crate::engine::device::DeviceContext;
use crate::engine::kernels::view::{self, to_host};
use crate::engine::model::{Decoder, ModelSpec, Parameters, candle_dtype, merge_adapters};
use crate::precision::PrecisionPolicy;
use crate::{Error, Result};
use candle_core::{DType, Device};
use std::sync::Arc;

/// A decoder of `spec` with these FP32 adapters, rounded to the policy's compute type, over their base of that type, on
/// an open device.
pub(super) fn load_decoder(
    spec: &ModelSpec,
    adapters: &Parameters,
    policy: PrecisionPolicy,
    open: &DeviceContext,
) -> Result<(Decoder, Parameters)> {
    let on_device = |parameters: &Parameters| converted(parameters, candle_dtype(policy.compute), &open.device);
    let base = match adapters.base() {
        Some(base) if !open.device.is_cpu() => Some(Arc::new(on_device(base)?)),
        base => base.cloned(),
    };
    let weights = on_device(adapters)?.with_base(base);
    Ok((Decoder::new(spec, &weights, open.kernels.clone())?, weights))
}

/// `parameters` in `dtype` on a device.
pub(super) fn converted(parameters: &Parameters, dtype: DType, device: &Device) -> Result<Parameters> {
    let converted = Parameters::zeros(parameters.layout(), dtype, device)?;
    for (from, to) in parameters.tensors().iter().zip(converted.tensors()) {
        to.slice_set(&from.to_dtype(dtype)?.to_device(device)?, 0, 0)?;
    }
    Ok(converted)
}

/// The parameters of the base with the adapters added to them, in FP32.
pub(super) fn merge_into_base(spec: &ModelSpec, adapters: &Parameters) -> Result<(ModelSpec, Parameters)> {
    let plain = ModelSpec { lora: None, ..spec.clone() };
    let merged = Parameters::zeros(&plain.parameters(), DType::F32, &Device::Cpu)?;
    for (name, tensor) in merged.iter() {
        let from = adapters.get(name).or_else(|| adapters.base().and_then(|base| base.get(name)));
        let from = from.ok_or_else(|| Error::model(name, "is missing in both the base model and the adapters"))?;
        view::copy(&to_host(from)?, tensor)?;
    }
    merge_adapters(spec, adapters, &merged)?;
    Ok((plain, merged))
}
