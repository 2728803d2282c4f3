//! Adapters over the base that they were trained on: found, checked, loaded, and merged.

use crate::engine::device::OpenDevice;
use crate::engine::kernels::view::{self, host};
use crate::engine::model::{Decoder, ModelSpec, ParamSpec, Parameters, candle_dtype, merge};
use crate::precision::{Dtype, PrecisionPolicy};
use crate::store::GgufModel;
use crate::store::adapter::AdapterFolder;
use crate::store::base::{OverBase, check_range, over_base};
use crate::store::checkpoint::{Base, Checkpoint};
use crate::{Error, Result};
use candle_core::{DType, Device};
use std::path::Path;
use std::sync::Arc;

/// Where adapters are.
#[derive(Debug)]
pub(super) enum Adapters {
    /// A folder in PEFT's format.
    Folder(Box<AdapterFolder>),
    /// A full checkpoint, which has the FP32 masters.
    Checkpoint(Box<Checkpoint>),
}

impl Adapters {
    pub(super) fn path(&self) -> &Path {
        match self {
            Self::Folder(folder) => folder.path(),
            Self::Checkpoint(checkpoint) => checkpoint.path(),
        }
    }

    /// What is known of the base they were trained over.
    pub(super) fn base(&self) -> Option<Base> {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.state().base.clone(),
            Self::Folder(folder) => {
                let name = folder.base()?.to_owned();
                Some(Base { name, revision: folder.revision().map(ToOwned::to_owned), sha256: String::new() })
            }
        }
    }

    /// The seed of a base that was drawn.
    pub(super) fn seed(&self) -> Option<u64> {
        match self {
            Self::Checkpoint(checkpoint) => Some(checkpoint.state().seed),
            Self::Folder(_) => None,
        }
    }

    /// `base` with these adapters.
    pub(super) fn spec(&self, base: &ModelSpec) -> Result<ModelSpec> {
        match self {
            Self::Folder(folder) => folder.spec(base),
            Self::Checkpoint(checkpoint) => {
                let spec = ModelSpec { lora: checkpoint.config().lora.clone(), ..base.clone() };
                if spec.base_parameters() == (ModelSpec { lora: None, ..checkpoint.config().clone() }).base_parameters()
                {
                    return Ok(spec);
                }
                Err(Error::checkpoint(checkpoint.path(), "its adapters are of a base of another shape"))
            }
        }
    }

    fn read(&self, spec: &ModelSpec, into: &Parameters) -> Result<()> {
        match self {
            Self::Folder(folder) => folder.read_parameters(spec, into),
            Self::Checkpoint(checkpoint) => checkpoint.read_masters(into),
        }
    }

    /// The adapters in FP32 over their base in `compute`, on the CPU; matrices stay in the blocks that `gguf` has.
    ///
    /// # Errors
    /// [`Error::Model`] where the base is not the one of the checkpoint.
    pub(super) fn over(
        &self,
        base: &ModelSpec,
        compute: Dtype,
        origin: &str,
        gguf: Option<&GgufModel>,
        read_part: impl FnMut(&ParamSpec, usize, &mut [f32]) -> Result<()>,
    ) -> Result<(ModelSpec, Parameters)> {
        let spec = self.spec(base)?;
        let OverBase { parameters, sha256 } = over_base(&spec, compute, 0, &Device::Cpu, origin, gguf, read_part)?;
        if let Some(Base { name, sha256: wanted, .. }) = self.base().filter(|base| !base.sha256.is_empty())
            && wanted != sha256
        {
            let message = format!(
                "the adapters of `{}` were trained over another base: `{name}` with SHA-256 {}…, and this one has {}…",
                self.path().display(),
                &wanted[..12.min(wanted.len())],
                &sha256[..12.min(sha256.len())]
            );
            return Err(Error::model(origin, message));
        }
        self.read(&spec, &parameters)?;
        check_range(&parameters, &self.path().display().to_string(), compute)?;
        Ok((spec, parameters))
    }
}

/// A decoder of `spec` with these FP32 adapters, in the policy's compute type, over their base, which is in it, on an open device.
pub(super) fn load(
    spec: &ModelSpec,
    adapters: &Parameters,
    policy: PrecisionPolicy,
    open: &OpenDevice,
) -> Result<(Decoder, Parameters)> {
    let there = |parameters: &Parameters, entries| -> Result<Parameters> {
        let there = Parameters::zeros(entries, candle_dtype(policy.compute), &open.device)?;
        for (from, to) in parameters.tensors().iter().zip(there.tensors()) {
            to.slice_set(&from.to_dtype(to.dtype())?.to_device(&open.device)?, 0, 0)?;
        }
        Ok(there)
    };
    let base = match adapters.base() {
        Some(base) if !open.device.is_cpu() => Some(Arc::new(there(base, base.layout())?)),
        base => base.cloned(),
    };
    let weights = there(adapters, adapters.layout())?.over(base);
    Ok((Decoder::new(spec, &weights, open.kernels.clone())?, weights))
}

/// The parameters of the base with the adapters added to them, in FP32.
pub(super) fn merged(spec: &ModelSpec, adapters: &Parameters) -> Result<(ModelSpec, Parameters)> {
    let plain = ModelSpec { lora: None, ..spec.clone() };
    let merged = Parameters::zeros(&plain.parameters(), DType::F32, &Device::Cpu)?;
    for (name, tensor) in merged.iter() {
        let from = adapters.get(name).or_else(|| adapters.base().and_then(|base| base.get(name)));
        let from = from.ok_or_else(|| Error::model(name, "is in neither base nor adapters"))?;
        view::copy(&host(from)?, tensor)?;
    }
    merge(spec, adapters, &merged)?;
    Ok((plain, merged))
}
