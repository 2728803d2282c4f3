//! Writes tensors one at a time, without a second copy of the model in memory.

use crate::{Error, Result};
use bytemuck::cast_slice;
use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use safetensors::Dtype;
use serde_json::{Map, json};
use std::io::{self, Write};
use std::path::Path;

// The values of a file are stored as they are in memory.
const _: () = assert!(cfg!(target_endian = "little"));

/// Writes `tensors` in order as one safetensors file to `out`; `path` is its name in error messages.
///
/// Values keep their dtype (F32, F16, BF16 or U8); a tensor on another device is copied just before it is written. The
/// metadata has `format: pt`, which transformers requires. Fails with [`Error::Io`] from `out`; [`Error::Model`] for an
/// unsupported dtype or a duplicate name.
pub fn write_tensors(out: &mut dyn Write, path: &Path, tensors: &[(String, Tensor)]) -> Result<()> {
    write_header(out, path, tensors.iter().map(|(name, tensor)| (name.clone(), tensor.dtype(), tensor.dims())))?;
    tensors.iter().try_for_each(|(_, tensor)| write_values(out, path, tensor))
}

/// Writes the header of a file with tensors of these names, dtypes and shapes, in this order.
pub fn write_header<'a>(
    out: &mut dyn Write,
    path: &Path,
    tensors: impl IntoIterator<Item = (String, DType, &'a [usize])>,
) -> Result<()> {
    let header = header(path, tensors)?;
    let start = [&(header.len() as u64).to_le_bytes(), header.as_slice()].concat();
    out.write_all(&start).map_err(Error::io("write", path))
}

/// Writes the values of an F32, F16 or BF16 tensor, little-endian and in row-major order, into `out`. An error names
/// `path`.
pub fn write_values(out: &mut dyn Write, path: &Path, tensor: &Tensor) -> Result<()> {
    let tensor = tensor.to_device(&Device::Cpu)?.contiguous()?;
    write_storage(out, &tensor)?.map_err(Error::io("write", path))
}

/// The JSON header, padded with spaces so that the values start at a multiple of 8.
fn header<'a>(path: &Path, tensors: impl IntoIterator<Item = (String, DType, &'a [usize])>) -> Result<Vec<u8>> {
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut at = 0;
    for (name, dtype, shape) in tensors {
        let fail = |message: String| Err(Error::model(path.display(), format!("tensor `{name}`: {message}")));
        let dtype = match dtype {
            DType::F32 => Dtype::F32,
            DType::F16 => Dtype::F16,
            DType::BF16 => Dtype::BF16,
            DType::U8 => Dtype::U8,
            other => return fail(format!("dtype {} cannot be saved, only f32, f16, bf16 and u8", other.as_str())),
        };
        let end = at + shape.iter().product::<usize>() * dtype.bitsize() / 8;
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [at, end]});
        if header.insert(name.clone(), entry).is_some() {
            return fail("the name is used twice".into());
        }
        at = end;
    }
    let mut json = serde_json::to_vec(&header).map_err(|error| Error::model(path.display(), error.to_string()))?;
    json.resize(json.len().next_multiple_of(8), b' ');
    Ok(json)
}

/// Writes the values of a contiguous CPU tensor. The outer error is candle's, the inner one is from `out`.
fn write_storage(out: &mut dyn Write, tensor: &Tensor) -> candle_core::Result<io::Result<()>> {
    let (storage, layout) = tensor.storage_and_layout();
    let range = layout.start_offset()..layout.start_offset() + layout.shape().elem_count();
    let bytes: &[u8] = match &*storage {
        Storage::Cpu(CpuStorage::F32(values)) => cast_slice(&values[range]),
        Storage::Cpu(CpuStorage::F16(values)) => cast_slice(&values[range]),
        Storage::Cpu(CpuStorage::BF16(values)) => cast_slice(&values[range]),
        Storage::Cpu(CpuStorage::U8(values)) => &values[range],
        _ => candle_core::bail!("a tensor left the CPU or changed its dtype while it was being saved"),
    };
    // In blocks, because each write reports its progress.
    Ok(bytes.chunks(1 << 16).try_for_each(|block| out.write_all(block)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tensor_file::TensorFile;

    fn round_trip(tensors: &[(String, Tensor)]) -> TensorFile {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        let mut bytes = Vec::new();
        write_tensors(&mut bytes, &path, tensors).unwrap();
        std::fs::write(&path, bytes).unwrap();
        TensorFile::open(path).unwrap()
    }

    #[test]
    fn every_bit_of_every_dtype_comes_back() {
        let device = Device::Cpu;
        let values: Vec<f32> = (0..70_000).map(|i| (i as f32 - 35_000.0) * 0.37).collect();
        let whole = Tensor::from_slice(&values, (70, 1000), &device).unwrap();
        let tensors = [DType::F16, DType::F32, DType::BF16].map(|dtype| {
            // A view that starts in the middle, to test the layout's offset.
            let part = whole.narrow(0, 3, 60).unwrap().to_dtype(dtype).unwrap();
            (format!("t.{}", dtype.as_str()), part.narrow(0, 1, 59).unwrap())
        });
        let file = round_trip(&tensors);
        assert_eq!(file.tensors().len(), 3);
        for (name, tensor) in &tensors {
            let view = file.require(name).unwrap();
            assert_eq!(view.shape, [59, 1000]);
            let expected = tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(view.to_f32().unwrap(), expected);
        }
    }

    #[test]
    fn a_transposed_tensor_is_written_in_row_major_order() {
        let tensor = Tensor::from_slice(&[1_f32, 2.0, 3.0, 4.0], (2, 2), &Device::Cpu).unwrap().t().unwrap();
        let file = round_trip(&[("x".into(), tensor)]);
        assert_eq!(file.require("x").unwrap().to_f32().unwrap(), [1.0, 3.0, 2.0, 4.0]);
    }

    #[test]
    fn the_safetensors_crate_reads_what_we_write() {
        let tensor = Tensor::from_slice(&[1_f32, -2.0], 2, &Device::Cpu).unwrap();
        let mut bytes = Vec::new();
        write_tensors(&mut bytes, Path::new("x"), &[("x".into(), tensor)]).unwrap();
        let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(theirs.tensor("x").unwrap().data(), [1_f32, -2.0].map(f32::to_le_bytes).as_flattened());
        let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
    }

    #[test]
    fn what_cannot_be_saved_is_named() {
        let fail = |tensors: &[(String, Tensor)]| write_tensors(&mut Vec::new(), Path::new("x"), tensors).unwrap_err();
        let ids = Tensor::from_slice(&[1_u32], 1, &Device::Cpu).unwrap();
        assert!(fail(&[("ids".into(), ids)]).to_string().contains("tensor `ids`: dtype u32"));
        let one = Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap();
        assert!(
            fail(&[("x".into(), one.clone()), ("x".into(), one)]).to_string().contains("`x`: the name is used twice")
        );
    }

    #[test]
    fn reading_says_which_tensor_does_not_fit() {
        let file = round_trip(&[("x".into(), Tensor::zeros((2, 3), DType::F16, &Device::Cpu).unwrap())]);
        let view = file.require("x").unwrap();
        let message = view.read_f32(&mut [0.0; 5]).unwrap_err().to_string();
        assert!(message.contains("tensor `x`: shape [2, 3] does not match the 5 requested values"), "{message}");
        assert!(file.require("y").unwrap_err().to_string().contains("tensor `y` is missing"));
    }
}
