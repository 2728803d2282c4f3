//! Weights in the compute type. The frozen base of adapters, or frozen modules, may stay in a file's blocks, and is
//! known by a digest of its values.

use crate::digest::DigestWriter;
use crate::engine::kernels::summary::summarize;
use crate::engine::kernels::view::{self, read};
use crate::engine::model::{ModelSpec, ModuleOp, ParamSpec, Parameters, candle_dtype, init_dora_magnitude};
use crate::precision::{Dtype, FloatFormat, TensorStats};
use crate::store::WeightSource;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use std::io::{Write, sink};
use std::sync::Arc;

const HASH_CHUNK: usize = 1 << 16;
/// Values of a token table that are read at a time, rounded up to a multiple of four rows. The whole table of a large
/// vocabulary in FP32 would take more memory than the rest of a run over a frozen base. A multiple of four, which
/// random initialization requires.
const TABLE_CHUNK: usize = 1 << 20;

/// Trained parameters over their base.
#[derive(Debug)]
pub struct AdaptedModel {
    /// The trained parameters with their initial values, in FP32, over the base in the compute type or in blocks.
    pub parameters: Parameters,
    /// SHA-256 of the base's values in FP32, in the order of their names; independent of their storage.
    pub sha256: String,
}

impl WeightSource {
    /// Loads these weights as the frozen base of `spec`, and draws its trained parameters from `seed`. With
    /// `in_blocks`, the matrices of a GGUF file stay in their quantized blocks. `origin` is the base's name in error
    /// messages. Fails with [`Error::Model`] naming a tensor that holds infinities or NaNs, or that `compute` cannot
    /// hold.
    pub fn load_adapters(
        &self,
        spec: &ModelSpec,
        compute: Dtype,
        seed: u64,
        in_blocks: bool,
        device: &Device,
        origin: &str,
    ) -> Result<AdaptedModel> {
        let own = Parameters::random(&spec.parameters(), seed, device)?;
        let frozen = spec.frozen_parameters();
        let dtype = candle_dtype(compute);
        let base = match self.gguf().filter(|_| in_blocks) {
            Some(gguf) => {
                let in_blocks = spec.quantized_params();
                let in_blocks = frozen.iter().filter(|entry| in_blocks.contains_key(&entry.name));
                let quantized = in_blocks.map(|entry| Ok((entry.name.clone(), gguf.blocks(entry, device)?)));
                Parameters::with_quantized(&frozen, dtype, quantized.collect::<Result<_>>()?, device)?
            }
            None => Parameters::zeros(&frozen, dtype, device)?,
        };
        let base_parameters = spec.base_parameters();
        let buffer = chunk_buffer(&base_parameters)?;
        let mut digest = DigestWriter::new(sink());
        for entry in base_parameters {
            digest.write_all(entry.name.as_bytes()).map_err(Error::io("hash", origin))?;
            let tensor =
                own.get(&entry.name).or_else(|| base.get(&entry.name)).filter(|tensor| tensor.elem_count() > 0);
            let stats = self.read_chunks(&entry, &buffer, tensor, |wide| hash(wide, &mut digest, origin))?;
            check_stats(&entry.name, &stats, origin, compute)?;
        }
        let parameters = own.with_base(Some(Arc::new(base)));
        init_dora_magnitude(spec, &parameters)?;
        Ok(AdaptedModel { parameters, sha256: digest.finish().1.sha256 })
    }

    /// Loads these weights, the parameters of `spec`, in `dtype`, never all of them in FP32. `origin` and the errors
    /// are as in [`Self::load_adapters`].
    pub fn load(&self, spec: &ModelSpec, dtype: Dtype, device: &Device, origin: &str) -> Result<Parameters> {
        let entries = spec.parameters();
        let weights = Parameters::zeros(&entries, candle_dtype(dtype), device)?;
        let buffer = chunk_buffer(&entries)?;
        for entry in &entries {
            let stats = self.read_chunks(entry, &buffer, weights.get(&entry.name), |_| Ok(()))?;
            check_stats(&entry.name, &stats, origin, dtype)?;
        }
        Ok(weights)
    }

    /// Reads a parameter into `buffer`, chunk by chunk, and from there into `tensor`, in its type. Calls `visit` with
    /// each chunk.
    fn read_chunks(
        &self,
        entry: &ParamSpec,
        buffer: &Tensor,
        tensor: Option<&Tensor>,
        mut visit: impl FnMut(&Tensor) -> Result<()>,
    ) -> Result<TensorStats> {
        let tensor = tensor.map(Tensor::flatten_all).transpose()?;
        let elements = entry.shape.iter().product::<usize>();
        let mut stats = TensorStats::default();
        let chunk = chunk_elements(entry);
        for first in (0..elements).step_by(chunk) {
            let wide = buffer.narrow(0, 0, chunk.min(elements - first))?;
            view::write_f32(&wide, |out| self.read_part(entry, first, out))??;
            stats.merge(&summarize(&wide, FloatFormat::FP32, false)?.stats);
            visit(&wide)?;
            if let Some(tensor) = &tensor {
                copy_chunk(&wide, tensor, first)?;
            }
        }
        Ok(stats)
    }
}

/// Room for the largest chunk of any of these parameters. One buffer for all: memory that the system's allocator
/// retains from buffers of many sizes would stay resident during training.
fn chunk_buffer(entries: &[ParamSpec]) -> Result<Tensor> {
    Ok(view::zeros(&[entries.iter().map(chunk_elements).max().unwrap_or(1)], DType::F32, &Device::Cpu)?)
}

/// Adds FP32 values to a digest.
fn hash(wide: &Tensor, digest: &mut impl Write, origin: &str) -> Result<()> {
    for values in read(wide)?.typed::<f32>()?.chunks(HASH_CHUNK) {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        digest.write_all(&bytes).map_err(Error::io("hash", origin))?;
    }
    Ok(())
}

/// Rounds FP32 values on the CPU into elements of `tensor`, starting at `first`.
fn copy_chunk(wide: &Tensor, tensor: &Tensor, first: usize) -> candle_core::Result<()> {
    if tensor.device().is_cpu() {
        return view::copy(wide, &tensor.narrow(0, first, wide.elem_count())?);
    }
    tensor.slice_set(&wide.force_contiguous()?.to_dtype(tensor.dtype())?.to_device(tensor.device())?, 0, first)
}

/// Values of a parameter that are read at a time.
fn chunk_elements(entry: &ParamSpec) -> usize {
    let elements = entry.shape.iter().product::<usize>().max(1);
    match (entry.layer.op, &entry.shape[..]) {
        (ModuleOp::Embedding | ModuleOp::Head, [_, columns]) => TABLE_CHUNK.next_multiple_of(4 * columns).min(elements),
        _ => elements,
    }
}

/// Rejects FP32 weights that are not finite or exceed the range of `dtype`, naming the tensor; `origin` is the model's
/// name.
pub fn check_range(masters: &Parameters, origin: &str, dtype: Dtype) -> Result<()> {
    masters.iter().try_for_each(|(name, tensor)| {
        check_stats(name, &summarize(tensor, FloatFormat::FP32, false)?.stats, origin, dtype)
    })
}

fn check_stats(name: &str, stats: &TensorStats, origin: &str, dtype: Dtype) -> Result<()> {
    let format = dtype.format();
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
