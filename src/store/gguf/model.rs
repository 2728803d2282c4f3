//! A model in a GGUF file: its shape, its parameters, and the auxiliary files derived from its metadata.

use super::{Gguf, GgufHeader, ROPE_FACTORS, RopeFactors, gguf_offset};
use crate::Result;
use crate::engine::kernels::quantized::QuantizedMatrix;
use crate::engine::kernels::view::read;
use crate::engine::model::{ModelSpec, ModuleOp, ParamSpec};
use crate::store::aux_files::{AuxFiles, CHAT_TEMPLATE, GENERATION_CONFIG, TOKENIZER_CONFIG};
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Value;
use candle_core::{Device, Tensor};
use serde_json::{Map, Value as Json, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// A GGUF file in which every parameter was found with the right shape.
#[derive(Debug)]
pub struct GgufModel {
    /// The file.
    pub gguf: Gguf,
    spec: ModelSpec,
}

impl GgufModel {
    /// Opens the file and checks it without reading the weights. Fails with [`Error::Model`](crate::Error::Model) with
    /// the file and the first problem: an error of [`Gguf::open`]; an unsupported architecture or key; a missing or
    /// extra tensor, or one of the wrong shape.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let gguf = Gguf::open(path.as_ref())?;
        let architecture = gguf.architecture()?;
        let prefix = format!("{architecture}.");
        let own = gguf.content.metadata.iter().filter_map(|(key, value)| Some((key.strip_prefix(&prefix)?, value)));
        let keys: Map<String, Json> = own.map(|(key, value)| (key.to_owned(), json_of(value))).collect();
        let shape = |name: &str| gguf.content.tensor_infos.get(name).map(|info| info.shape.dims().to_vec());
        let factors = ROPE_FACTORS.into_iter().filter(|name| shape(name).is_some());
        let rope_factors = factors
            .map(|name| Ok((name, gguf.tensor(name)?.flatten_all()?.to_vec1::<f32>()?)))
            .collect::<Result<RopeFactors>>()?;
        let bos = gguf.token_id("tokenizer.ggml.bos_token_id")?;
        let header = GgufHeader { architecture, keys, bos, eos: gguf.eos_ids()?, shape: &shape, rope_factors };
        let spec = ModelSpec::from_gguf(&header, &gguf.path.display().to_string())?;
        let mut model = Self { gguf, spec };
        model.check()?;
        model.spec.quantized = model.quantized();
        Ok(model)
    }

    /// The matrices in quantized blocks, by the parameter's name.
    fn quantized(&self) -> BTreeMap<String, GgmlDType> {
        let stored = self.spec.base_parameters().into_iter().filter(|entry| entry.shape.len() == 2);
        let in_blocks = |part: &ParamSpec| {
            let dtype = self.gguf.content.tensor_infos.get(&self.spec.gguf_name(part))?.ggml_dtype;
            (dtype.block_size() > 1 && part.layer.op != ModuleOp::Positions).then_some(dtype)
        };
        let stored = stored.filter_map(|entry| {
            let parts = self.spec.gguf_parts(&entry);
            // Rows of several matrices that alternate, and columns in another order, are dequantized.
            let types: Option<Vec<_>> = parts.iter().map(in_blocks).collect();
            let mixed = parts.len() > 1 && self.spec.activation.is_interleaved() || self.spec.reorders_columns(&entry);
            Some((entry.name, *types.filter(|_| !mixed)?.first()?))
        });
        stored.collect()
    }

    /// A matrix in the blocks that the file has, its rows in our order, on `device`.
    pub fn blocks(&self, entry: &ParamSpec, device: &Device) -> Result<QuantizedMatrix> {
        let parts = self.spec.gguf_parts(entry);
        let parts = parts.iter().map(|part| self.blocks_of(part, device)).collect::<Result<_>>()?;
        Ok(QuantizedMatrix::stack(parts)?)
    }

    fn blocks_of(&self, entry: &ParamSpec, device: &Device) -> Result<QuantizedMatrix> {
        let name = self.spec.gguf_name(entry);
        let first = gguf_offset(entry);
        let elements = entry.shape.iter().product::<usize>();
        let blocks = self.gguf.blocks(&name, first..first + elements)?;
        let dtype = self.gguf.info(&name)?.ggml_dtype;
        let rows = self.spec.gguf_rows(entry)?;
        let row = blocks.len() / rows.len();
        let ours: Vec<u8> = rows.iter().flat_map(|from| &blocks[*from as usize * row..][..row]).copied().collect();
        let columns = row / dtype.type_size() * dtype.block_size();
        Ok(QuantizedMatrix::new(dtype, ours, [rows.len(), columns], device)?)
    }

    fn check(&self) -> Result<()> {
        let Self { gguf, spec } = self;
        let tensors = gguf.content.tensor_infos.len();
        // Checked before anything is allocated per block.
        if spec.num_layers > tensors {
            return Err(
                gguf.error(format!("its metadata specifies {} blocks, but it has {tensors} tensors", spec.num_layers))
            );
        }
        let mut names = BTreeSet::from(ROPE_FACTORS.map(str::to_owned));
        for entry in spec.parameters().iter().flat_map(|entry| spec.gguf_parts(entry)) {
            let (name, expected) = (spec.gguf_name(&entry), spec.gguf_shape(&entry));
            let Some(info) = gguf.content.tensor_infos.get(&name) else {
                return Err(gguf.error(format!("tensor `{name}` of shape {expected:?} is missing")));
            };
            if info.shape.dims() != expected {
                let found = info.shape.dims();
                return Err(
                    gguf.error(format!("tensor `{name}`: shape {found:?}, but the metadata requires {expected:?}"))
                );
            }
            names.insert(name);
        }
        let extra = gguf.content.tensor_infos.keys().filter(|name| !names.contains(*name)).min();
        extra.map_or(Ok(()), |name| {
            Err(gguf.error(format!("tensor `{}` does not belong to this model", name.escape_debug())))
        })
    }

    /// The model's shape. The tensors determine `tied`.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Reads a parameter and dequantizes it; or some rows, starting at value `first`, if GGUF stores it in our order.
    pub fn read_part(&self, entry: &ParamSpec, first: usize, out: &mut [f32]) -> Result<()> {
        if let [gate, up] = &self.spec.gguf_parts(entry)[..] {
            if self.spec.activation.is_interleaved() {
                let mut halves = [(); 2].map(|()| vec![0.0; out.len() / 2]);
                self.read_tensor(gate, 0, &mut halves[0])?;
                self.read_tensor(up, 0, &mut halves[1])?;
                for (i, pair) in out.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                    *pair = [halves[0][i], halves[1][i]];
                }
                return Ok(());
            }
            let (first, second) = out.split_at_mut(out.len() / 2);
            self.read_tensor(gate, 0, first)?;
            return self.read_tensor(up, 0, second);
        }
        self.read_tensor(entry, first, out)
    }

    fn read_tensor(&self, entry: &ParamSpec, first: usize, out: &mut [f32]) -> Result<()> {
        let name = self.spec.gguf_name(entry);
        let whole = entry.shape.iter().product();
        let expert = matches!(entry.layer.op, ModuleOp::Expert(..));
        let first = gguf_offset(entry) + first;
        let range = first..first + out.len();
        let part = || self.gguf.part(&name, range.clone());
        let values = if out.len() < whole {
            out.copy_from_slice(part()?.as_slice()?);
            return Ok(());
        } else if expert {
            let shape = &self.spec.gguf_shape(entry)[1..];
            Tensor::from_slice(part()?.as_slice::<f32>()?, shape, &Device::Cpu)?
        } else {
            self.gguf.tensor(&name)?
        };
        out.copy_from_slice(read(&self.spec.from_gguf_layout(entry, &values)?)?.typed()?);
        Ok(())
    }

    /// The auxiliary files of a Hugging Face folder, derived from the metadata.
    pub fn aux_files(&self) -> Result<AuxFiles> {
        let Self { gguf, spec } = self;
        let token = |id: Option<u32>| -> Result<Json> {
            let tokens = gguf.list("tokenizer.ggml.tokens", "a list of strings", super::tokenizer::text)?;
            let text = id.zip(tokens).and_then(|(id, tokens)| tokens.get(id as usize).map(|text| (*text).to_owned()));
            Ok(text.into())
        };
        let eos = &spec.eos_token_ids;
        let tokenizer = json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": spec.max_position_embeddings,
            "clean_up_tokenization_spaces": false,
            "bos_token": token(spec.bos_token_id)?,
            "eos_token": token(eos.first().copied())?,
        });
        let mut aux_files = AuxFiles::default();
        aux_files.insert(TOKENIZER_CONFIG, format!("{tokenizer:#}\n"));
        if !eos.is_empty() {
            aux_files.insert(GENERATION_CONFIG, format!("{:#}\n", json!({"eos_token_id": eos})));
        }
        if let Some(template) = gguf.chat_template() {
            aux_files.insert(CHAT_TEMPLATE, template);
        }
        Ok(aux_files)
    }
}

/// A metadata value as JSON. FP32 numbers become the shortest decimal that rounds to them, which is the number in the
/// original configuration.
pub(super) fn json_of(value: &Value) -> Json {
    match value {
        Value::U8(x) => (*x).into(),
        Value::I8(x) => (*x).into(),
        Value::U16(x) => (*x).into(),
        Value::I16(x) => (*x).into(),
        Value::U32(x) => (*x).into(),
        Value::I32(x) => (*x).into(),
        Value::U64(x) => (*x).into(),
        Value::I64(x) => (*x).into(),
        Value::F32(x) => x.to_string().parse::<f64>().map_or(Json::Null, Json::from),
        Value::F64(x) => (*x).into(),
        Value::Bool(x) => (*x).into(),
        Value::String(x) => x.as_str().into(),
        Value::Array(values) => values.iter().map(json_of).collect(),
    }
}
