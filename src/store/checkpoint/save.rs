//! Writes the files of one checkpoint into a hidden directory.

use super::disk::Disk;
use super::manifest::{
    CONFIG, CheckpointKind, MANIFEST, MASTERS, MOMENTS, Manifest, OPTIMIZER, STATE, TOKENIZER, WEIGHTS,
};
use super::state::{MAX_BYTES, State};
use crate::digest::Digest;
use crate::engine::kernels::view;
use crate::engine::model::{ModelSpec, Parameters};
use crate::engine::optim::{BlockwiseQuantized, QuantizedMoments};
use crate::store::adapter::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_config, write_adapter};
use crate::store::aux_files::AuxFiles;
use crate::store::tensor_file::{write_header, write_tensors, write_values};
use crate::telemetry::{Activity, PhaseProgress};
use crate::{Error, Result};
use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

/// A kind of tensors that are sharded among processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StateTensor {
    /// Master weights.
    Masters,
    /// First moments in FP32.
    ExpAvg,
    /// Second moments in FP32.
    ExpAvgSq,
    /// The codes of first moments in 8 bits.
    ExpAvgCodes,
    /// The largest magnitudes of their blocks.
    ExpAvgAbsmax,
    /// The codes of second moments in 8 bits.
    ExpAvgSqCodes,
    /// The largest magnitudes of their blocks.
    ExpAvgSqAbsmax,
}

impl StateTensor {
    /// Codes and magnitudes of first and second moments.
    const QUANTIZED: [[Self; 2]; 2] =
        [[Self::ExpAvgCodes, Self::ExpAvgAbsmax], [Self::ExpAvgSqCodes, Self::ExpAvgSqAbsmax]];
}

/// Tensors that are sharded among processes.
pub trait ShardedTensors {
    /// Writes the values of tensor `index` of a kind, little-endian and in row-major order.
    fn write(&self, tensor: StateTensor, index: usize, out: &mut dyn Write, path: &Path) -> Result<()>;
}

/// The contents of a checkpoint.
#[derive(Clone, Copy)]
pub struct Contents<'a> {
    /// The figures of the run.
    pub state: &'a State,
    /// The model's shape.
    pub spec: &'a ModelSpec,
    /// The text of `tokenizer.json`.
    pub tokenizer: &'a [u8],
    /// The small files stored with the weights of the model that the run started from.
    pub aux_files: &'a AuxFiles,
    /// The weights in the compute dtype.
    pub weights: &'a Parameters,
    /// The master weights.
    pub masters: &'a Parameters,
    /// Adam's first moments, FP32.
    pub exp_avg: &'a Parameters,
    /// Adam's second moments, FP32.
    pub exp_avg_sq: &'a Parameters,
    /// Adam's moments in 8 bits, of the parameters that have no others.
    pub quantized: &'a [QuantizedMoments],
    /// The source of masters and moments, if they are sharded among several processes.
    pub sharded: Option<&'a dyn ShardedTensors>,
    /// Receives the number of bytes written.
    pub activity: &'a Activity,
}

impl Contents<'_> {
    /// Writes and syncs every file of a checkpoint of `kind` into the new folder `directory`. The manifest comes last:
    /// a directory without one is not a checkpoint.
    pub(super) fn write(
        &self,
        disk: &Disk,
        directory: &Path,
        kind: CheckpointKind,
        save_index: u64,
    ) -> Result<Manifest> {
        disk.create_folder(directory)?;
        let mut files = BTreeMap::new();
        let mut done = 0;
        for name in kind.files(self.spec.lora.is_some()) {
            files.insert((*name).to_owned(), self.write_file(disk, &directory.join(name), name, kind, &mut done)?);
        }
        for (name, text) in self.aux_files.iter() {
            let path = directory.join(name);
            files.insert(name.to_owned(), disk.write_file(&path, |out| write_bytes(out, &path, text))?);
        }
        let manifest = Manifest {
            kind,
            step: self.state.step,
            save_index,
            validation_loss: self.state.validation_loss.filter(|loss| loss.is_finite()),
            files,
        };
        let path = directory.join(MANIFEST);
        let text = manifest.to_json().map_err(|error| Error::checkpoint(&path, error.to_string()))?;
        disk.write_file(&path, |out| write_bytes(out, &path, &text))?;
        disk.sync_folder(directory)?;
        Ok(manifest)
    }

    fn write_file(&self, disk: &Disk, path: &Path, name: &str, kind: CheckpointKind, done: &mut u64) -> Result<Digest> {
        let activity = self.activity;
        let total = self.tensor_bytes(kind);
        disk.write_file(path, |out| {
            let out = &mut Reporting { out, activity, done, total };
            match name {
                CONFIG => write_bytes(out, path, self.spec.to_json(self.torch_dtype()).as_bytes()),
                TOKENIZER => write_bytes(out, path, self.tokenizer),
                ADAPTER_CONFIG => {
                    write_bytes(out, path, adapter_config(self.spec, self.state.base.as_ref()).as_bytes())
                }
                ADAPTER_WEIGHTS => write_adapter(out, path, self.spec, self.weights),
                WEIGHTS => write_tensors(out, path, &self.spec.family.stored_tensors(self.weights())?),
                MASTERS => self.write_state(out, path, &[(StateTensor::Masters, "", self.masters)], &[]),
                OPTIMIZER => {
                    let wide = [
                        (StateTensor::ExpAvg, "exp_avg.", self.exp_avg),
                        (StateTensor::ExpAvgSq, "exp_avg_sq.", self.exp_avg_sq),
                    ];
                    self.write_state(out, path, &wide, self.quantized)
                }
                STATE => write_figures(out, path, self.state),
                other => unreachable!("`{other}` is not a file of a checkpoint"),
            }
        })
    }

    /// Writes a file of tensors under prefixed names, followed by moments in 8 bits.
    fn write_state(
        &self,
        out: &mut dyn Write,
        path: &Path,
        wide: &[(StateTensor, &str, &Parameters)],
        quantized: &[QuantizedMoments],
    ) -> Result<()> {
        let entries = wide.iter().flat_map(|(_, prefix, parameters)| {
            let tensors = parameters.layout().iter().zip(parameters.tensors());
            tensors.map(move |(it, tensor)| (format!("{prefix}{}", it.name), tensor.dtype(), it.shape.as_slice()))
        });
        let shape =
            |tensor: &QuantizedMoments| [tensor.elements, BlockwiseQuantized::blocks(&(0..tensor.elements)).len()];
        let shapes: Vec<[usize; 2]> = quantized.iter().map(shape).collect();
        let narrow = quantized.iter().zip(&shapes).flat_map(|(tensor, shape)| {
            MOMENTS.iter().flat_map(move |kind| {
                let name = format!("{kind}.{}", tensor.name);
                [(name.clone(), DType::U8, &shape[..1]), (format!("{name}.absmax"), DType::F32, &shape[1..])]
            })
        });
        write_header(out, path, entries.chain(narrow))?;
        for (kind, _, parameters) in wide {
            for (index, tensor) in parameters.tensors().iter().enumerate() {
                match self.sharded {
                    Some(sharded) => sharded.write(*kind, index, out, path)?,
                    None => write_values(out, path, tensor)?,
                }
            }
        }
        for (index, tensor) in quantized.iter().enumerate() {
            for (kinds, moment) in StateTensor::QUANTIZED.iter().zip(&tensor.moments) {
                if let Some(sharded) = self.sharded {
                    kinds.iter().try_for_each(|kind| sharded.write(*kind, index, out, path))?;
                    continue;
                }
                write_values(out, path, &moment.codes)?;
                write_values(out, path, &moment.absmax)?;
            }
        }
        Ok(())
    }

    /// The size of the tensors, which make up most of a checkpoint.
    fn tensor_bytes(&self, kind: CheckpointKind) -> u64 {
        let sizes = self.weights().into_iter().map(|(_, tensor)| view::bytes(tensor.dims(), tensor.dtype()));
        let weights: u64 = sizes.sum();
        match kind {
            CheckpointKind::Full => {
                weights + stored_bytes([self.masters, self.exp_avg, self.exp_avg_sq], self.quantized)
            }
            CheckpointKind::Weights => weights,
        }
    }

    /// The weights that the checkpoint contains: frozen modules too, but not the base of adapters.
    fn weights(&self) -> Vec<(&str, &Tensor)> {
        if self.spec.lora.is_some() { self.weights.iter().collect() } else { self.weights.with_frozen() }
    }

    /// The weights' dtype in torch's terms; for mixed weights the widest, which they are loaded in.
    fn torch_dtype(&self) -> &'static str {
        let all = |dtype| self.weights.tensors().iter().all(|tensor| tensor.dtype() == dtype);
        match () {
            () if all(DType::F16) => "float16",
            () if all(DType::BF16) => "bfloat16",
            () => "float32",
        }
    }
}

/// The bytes of these tensors and moments, the shards of other processes included.
pub fn stored_bytes<'a>(parameters: impl IntoIterator<Item = &'a Parameters>, quantized: &[QuantizedMoments]) -> u64 {
    let whole = |parameters: &Parameters| {
        let tensors = parameters.layout().iter().zip(parameters.tensors());
        tensors.map(|(entry, tensor)| view::bytes(&entry.shape, tensor.dtype())).sum::<u64>()
    };
    let quantized = quantized.iter().map(|tensor| 2 * BlockwiseQuantized::bytes(tensor.elements as u64));
    parameters.into_iter().map(whole).sum::<u64>() + quantized.sum::<u64>()
}

/// A writer that reports its progress.
struct Reporting<'a> {
    out: &'a mut dyn Write,
    activity: &'a Activity,
    done: &'a mut u64,
    total: u64,
}

impl Write for Reporting<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let written = self.out.write(bytes)?;
        *self.done += written as u64;
        self.activity.advance("saving", PhaseProgress::Bytes((*self.done).min(self.total), self.total));
        Ok(written)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.out.flush()
    }
}

fn write_bytes(out: &mut dyn Write, path: &Path, bytes: &[u8]) -> Result<()> {
    out.write_all(bytes).map_err(Error::io("write", path))
}

fn write_figures(out: &mut dyn Write, path: &Path, state: &State) -> Result<()> {
    let mut text = serde_json::to_vec_pretty(state).map_err(|error| Error::checkpoint(path, error.to_string()))?;
    text.push(b'\n');
    if text.len() as u64 > MAX_BYTES {
        let advice = "sample fewer or shorter completions, or use them for one step";
        let message = format!("it has {} bytes, more than the maximum of {MAX_BYTES}; {advice}", text.len());
        return Err(Error::checkpoint(path, message));
    }
    write_bytes(out, path, &text)
}
