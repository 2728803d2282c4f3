//! Adapters in PEFT's format, with the tokenizer.

use crate::engine::model::{ModelSpec, Parameters, candle_dtype};
use crate::inference::trained::TrainedModel;
use crate::precision::Dtype;
use crate::store::adapter::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_config, write_adapter};
use crate::store::base::check_range;
use crate::{Error, Result};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// Fills `folder`.
pub(super) fn write(
    trained: &TrainedModel,
    (spec, adapters): (&ModelSpec, &Parameters),
    dtype: Dtype,
    folder: &Path,
) -> Result<()> {
    check_range(adapters, &trained.path.display().to_string(), dtype)?;
    let rounded = adapters.zeros_like(candle_dtype(dtype))?;
    for (from, to) in adapters.tensors().iter().zip(rounded.tensors()) {
        to.slice_set(&from.to_dtype(to.dtype())?, 0, 0)?;
    }
    let save = |name: &str, text: &[u8]| {
        let path = folder.join(name);
        std::fs::write(&path, text).map_err(Error::io("write", path))
    };
    save(ADAPTER_CONFIG, adapter_config(spec, trained.base().as_ref()).as_bytes())?;
    save("tokenizer.json", trained.tokenizer.json())?;
    let path = folder.join(ADAPTER_WEIGHTS);
    let mut file = BufWriter::new(File::create(&path).map_err(Error::io("create", &path))?);
    write_adapter(&mut file, &path, spec, &rounded)?;
    file.flush().map_err(Error::io("write", &path))
}
