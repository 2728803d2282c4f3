//! ONNX export: input `input_ids [batch, sequence]`, output `logits [batch, sequence, vocabulary]`, with dynamic batch
//! and sequence. With a KV cache, keys and values of earlier tokens are inputs too, and those of all tokens outputs,
//! under Optimum's names.
//!
//! The graph (operator set 20) is one small file; the weights are in a second file, `.data`, which avoids the limit of
//! 2 GB. 16-bit weights are widened and everything is computed in FP32, so the graph runs on every ONNX runtime. The
//! export walks the layers of the spec, as the decoder does.

mod graph;

use self::graph::{Attribute, BFLOAT16, Dim, FLOAT, FLOAT16, INT64, OnnxGraph, UINT8};
use crate::engine::kernels::{Activation, NormKind, WeightLayout};
use crate::engine::model::{
    EmbeddingScale, LinearRole, ModelSpec, ModuleId, ModuleOp, NormRole, ParamRole, Parameters, QkNorm, Recurrence,
    Rope,
};
use crate::store::tensor_file::write_values;
use crate::{Error, Result};
use candle_core::{DType, Tensor};
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Weights begin at multiples of this, so that they can be memory-mapped.
const ALIGNMENT: u64 = 64;

/// Options of a graph.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OnnxOptions {
    /// Keys and values of earlier tokens as inputs, of all tokens as outputs.
    pub kv_cache: bool,
    /// INT8 matrix products: weights with a scale per output, activations quantized dynamically.
    pub int8: bool,
}

/// Writes the graph to `path` and the weights to `path` with `.data` at its end.
pub(super) fn write(spec: &ModelSpec, weights: &Parameters, options: OnnxOptions, path: &Path) -> Result<()> {
    if spec.rope.as_ref().is_some_and(Rope::is_dynamic) {
        let message = "`dynamic` and `longrope` rotary embeddings depend on the length of the text, which an ONNX graph \
                       cannot express; export it as a folder";
        return Err(Error::model(spec.family.model_type, message));
    }
    if spec.experts.is_some() {
        return Err(Error::model(spec.family.model_type, "mixtures of experts have no ONNX graph; export a folder"));
    }
    match spec.recurrent.as_ref().map(|recurrent| recurrent.recurrence) {
        Some(Recurrence::ShortConv { .. }) if options.kv_cache => {
            let message = "graphs with short convolutions have no cache; leave out `--kv-cache`";
            return Err(Error::model(spec.family.model_type, message));
        }
        Some(Recurrence::GatedDelta { .. }) => {
            return Err(Error::model(spec.family.model_type, "gated delta rules have no ONNX graph; export a folder"));
        }
        _ => {}
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let data = ExternalData::create(path.with_file_name(format!("{name}.data")), format!("{name}.data"))?;
    let mut builder = GraphBuilder { spec, options, graph: OnnxGraph::default(), data, quantized: HashMap::new() };
    builder.weights(weights)?;
    builder.decoder();
    let GraphBuilder { graph, mut data, .. } = builder;
    data.file.flush().map_err(Error::io("write", &data.path))?;
    let model = graph.model(spec.family.model_type);
    std::fs::write(path, model.bytes()).map_err(Error::io("write", path))
}

/// The file of the weights.
struct ExternalData {
    path: PathBuf,
    /// Its name as the graph has it.
    location: String,
    file: BufWriter<File>,
    at: u64,
}

impl ExternalData {
    fn create(path: PathBuf, location: String) -> Result<Self> {
        let file = BufWriter::new(File::create(&path).map_err(Error::io("create", &path))?);
        Ok(Self { path, location, file, at: 0 })
    }

    /// Appends `length` bytes that `write` writes; returns offset and length.
    fn append(
        &mut self,
        length: u64,
        write: impl FnOnce(&mut BufWriter<File>, &Path) -> Result<()>,
    ) -> Result<[u64; 2]> {
        let padding = self.at.next_multiple_of(ALIGNMENT) - self.at;
        let zeros = &[0; ALIGNMENT as usize][..padding as usize];
        self.file.write_all(zeros).map_err(Error::io("write", &self.path))?;
        write(&mut self.file, &self.path)?;
        let offset = self.at + padding;
        self.at = offset + length;
        Ok([offset, length])
    }
}

fn element_type(dtype: DType) -> Result<i64> {
    match dtype {
        DType::F32 => Ok(FLOAT),
        DType::F16 => Ok(FLOAT16),
        DType::BF16 => Ok(BFLOAT16),
        other => Err(Error::model("ONNX", format!("weights of {} cannot be written", other.as_str()))),
    }
}

fn fp32_name(name: &str) -> String {
    format!("{name}.f32")
}

/// Positions and what depends only on them.
struct PositionInputs {
    /// `[T]`, whole numbers.
    ids: String,
    /// Attention masks `[T, S]` of layers without and with a window.
    masks: [String; 2],
    /// Cosines and sines `[T, head_dim / 2]` of layers without and with a window.
    rotations: [Option<[String; 2]>; 2],
    /// The first rotation times the factors of queries, if the model scales them by their position.
    query_rotation: Option<[String; 2]>,
}

struct GraphBuilder<'a> {
    spec: &'a ModelSpec,
    options: OnnxOptions,
    graph: OnnxGraph,
    data: ExternalData,
    /// Activations already quantized: values, scale and zero point.
    quantized: HashMap<String, [String; 3]>,
}

impl GraphBuilder<'_> {
    /// Streams the weights into their file and declares each of them, widened if it is not FP32. Linear weights are
    /// stored as `[in, out]`.
    fn weights(&mut self, weights: &Parameters) -> Result<()> {
        let spec = self.spec;
        for (entry, tensor) in weights.layout().iter().zip(weights.tensors()) {
            let product = matches!(entry.layer.op, ModuleOp::Linear(_)) && entry.role == ParamRole::Weight;
            let transposed = product && spec.weight_layout == WeightLayout::OutIn;
            let tensor = if transposed { tensor.t()?.contiguous()? } else { tensor.clone() };
            if product && self.options.int8 {
                self.int8(&entry.name, &tensor)?;
                continue;
            }
            let head =
                entry.layer.op == ModuleOp::Head || (spec.tie_word_embeddings && entry.layer.op == ModuleOp::Embedding);
            if head && self.options.int8 {
                self.int8(&self.spec.layer_name(ModuleId::global(ModuleOp::Head)), &tensor.t()?.contiguous()?)?;
                if entry.layer.op == ModuleOp::Head {
                    continue;
                }
            }
            let name = if tensor.dtype() == DType::F32 { fp32_name(&entry.name) } else { entry.name.clone() };
            self.store(&name, &tensor)?;
            // Operations read FP32 weights directly: onnxruntime's dynamic quantizer needs an initializer as operand of
            // a product.
            if tensor.dtype() != DType::F32 {
                self.graph.op_as(&fp32_name(&entry.name), "Cast", &[&entry.name], &[Attribute::Int("to", FLOAT)]);
            }
        }
        Ok(())
    }

    fn store(&mut self, name: &str, tensor: &Tensor) -> Result<()> {
        let bytes = (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64;
        let location = self.data.append(bytes, |file, path| write_values(file, path, tensor))?;
        self.graph.external(name, tensor.dims(), element_type(tensor.dtype())?, &self.data.location, location);
        Ok(())
    }

    /// Writes a weight `[in, out]` in 8 bits with a scale per column and a zero point of 128. Not signed: products of
    /// unsigned with signed bytes saturate at 16 bits on x86 CPUs without VNNI, where onnxruntime adds pairs of them by
    /// `vpmaddubsw`.
    fn int8(&mut self, name: &str, weight: &Tensor) -> Result<()> {
        let weight = weight.to_dtype(DType::F32)?;
        let columns = weight.dim(1)?;
        let values = weight.flatten_all()?.to_vec1::<f32>()?;
        let mut scales = vec![0.0_f32; columns];
        for row in values.chunks(columns) {
            scales.iter_mut().zip(row).for_each(|(scale, value)| *scale = scale.max(value.abs()));
        }
        for scale in &mut scales {
            *scale = if *scale > 0.0 { *scale / 127.0 } else { 1.0 };
        }
        let rounded = |(index, value): (usize, &f32)| ((value / scales[index % columns]).round() + 128.0) as u8;
        let bytes: Vec<u8> = values.iter().enumerate().map(rounded).collect();
        let location = self
            .data
            .append(bytes.len() as u64, |file, path| file.write_all(&bytes).map_err(Error::io("write", path)))?;
        self.graph.external(&format!("{name}.int8"), weight.dims(), UINT8, &self.data.location, location);
        self.graph.floats(&format!("{name}.scale"), &scales);
        Ok(())
    }

    /// The whole model.
    fn decoder(&mut self) {
        let spec = self.spec;
        self.graph.input("input_ids", INT64, &[Dim::Dynamic("batch"), Dim::Dynamic("sequence")]);
        let vocabulary = [Dim::Dynamic("batch"), Dim::Dynamic("sequence"), Dim::Static(spec.vocab_size)];
        self.graph.output("logits", FLOAT, &vocabulary);
        let positions = self.positions();
        self.shapes();

        let table = self.weight_of(ModuleId::global(ModuleOp::Embedding));
        let mut stream = self.graph.op("Gather", &[&table, "input_ids"], &[]);
        let scale = match spec.embedding_scale {
            EmbeddingScale::Factor(factor) => factor,
            EmbeddingScale::RootOfWidth => f64::from((spec.hidden_size as f32).sqrt()),
        };
        let scale = (scale / spec.residual_multiplier) as f32;
        if scale != 1.0 {
            self.graph.float("embedding_scale", scale);
            stream = self.graph.op("Mul", &[&stream, "embedding_scale"], &[]);
        }
        if spec.learned_positions {
            let table = self.weight_of(ModuleId::global(ModuleOp::Positions));
            let rows = self.graph.op("Gather", &[&table, &positions.ids], &[]);
            stream = self.graph.op("Add", &[&stream, &rows], &[]);
        }
        for block in 0..spec.num_layers {
            let normed = self.pre_norm(&stream, block, NormRole::Attention);
            let attended = match spec.recurrence(block) {
                Some(Recurrence::ShortConv { taps }) => self.short_conv(&normed, block, taps),
                _ => self.attention(&normed, block, &positions),
            };
            stream = self.residual_add(&stream, &attended, block, NormRole::PostAttention);
            let normed = self.pre_norm(&stream, block, NormRole::Mlp);
            let branch = self.mlp(&normed, block);
            stream = self.residual_add(&stream, &branch, block, NormRole::PostMlp);
        }
        let mut normed = self.norm(&stream, ModuleId::global(ModuleOp::Norm(NormRole::Final)));
        if spec.logits_scaling != 1.0 {
            self.graph.float("logits_scale", (1.0 / spec.logits_scaling) as f32);
            normed = self.graph.op("Mul", &[&normed, "logits_scale"], &[]);
        }
        let logits = if spec.logits_softcap.is_some() { "uncapped_logits" } else { "logits" };
        if self.options.int8 {
            let head = spec.layer_name(ModuleId::global(ModuleOp::Head));
            self.integer_matmul(&normed, &head, Some(logits));
        } else {
            let head = if spec.tie_word_embeddings { ModuleOp::Embedding } else { ModuleOp::Head };
            let head = self.weight_of(ModuleId::global(head));
            let head = self.graph.op("Transpose", &[&head], &[Attribute::Ints("perm", &[1, 0])]);
            self.graph.op_as(logits, "MatMul", &[&normed, &head], &[]);
        }
        if spec.logits_softcap.is_some() {
            soft_cap(&mut self.graph, logits, "logit_cap", "logits");
        }
    }

    /// The name of a layer's weight in FP32.
    fn weight_of(&self, layer: ModuleId) -> String {
        fp32_name(&format!("{}.weight", self.spec.layer_name(layer)))
    }

    /// Constants shared by all blocks. A 0 in a shape copies the input's dimension.
    fn shapes(&mut self) {
        let spec = self.spec;
        let [heads, kv_heads, head_dim] = [spec.heads, spec.kv_heads, spec.head_dim].map(|size| size as i64);
        if spec.fused_qkv {
            self.graph.int("qkv_widths", &[3], &spec.qkv_widths().map(|width| width as i64));
        }
        if spec.rotary_dim.is_some() {
            let rotated = spec.rotary_dim();
            self.graph.int("rotated_widths", &[2], &[rotated, spec.head_dim - rotated].map(|width| width as i64));
        }
        self.graph.int("by_query_head", &[4], &[0, 0, heads, head_dim]);
        self.graph.int("by_key_head", &[4], &[0, 0, kv_heads, head_dim]);
        self.graph.int("by_group", &[5], &[0, kv_heads, heads / kv_heads, -1, head_dim]);
        self.graph.int("ungrouped", &[4], &[0, heads, -1, head_dim]);
        self.graph.int("joined", &[3], &[0, 0, heads * head_dim]);
        self.graph.int("group_axis", &[1], &[2]);
        self.graph.int("last_axis", &[1], &[-1]);
        let scale = spec.attention_scale.unwrap_or_else(|| 1.0 / (spec.head_dim as f64).sqrt());
        self.graph.float("softmax_scale", scale as f32);
        for (name, cap) in [("score_cap", spec.attention_softcap), ("logit_cap", spec.logits_softcap)] {
            self.graph.float(name, cap.unwrap_or_default() as f32);
        }
        self.graph.float("masked", f32::MIN);
        self.graph.float("norm_epsilon", spec.stream_norm_eps() as f32);
        self.graph.float("unit", 1.0);
        self.graph.byte("weight_zero", 128);
    }

    fn positions(&mut self) -> PositionInputs {
        let spec = self.spec;
        let graph = &mut self.graph;
        let (zero, one) = (graph.int("zero", &[], &[0]), graph.int("one", &[], &[1]));
        let (first, second) = (graph.int("first_axis", &[1], &[0]), graph.int("second_axis", &[1], &[1]));
        let shape = graph.op("Shape", &["input_ids"], &[]);
        let length = graph.op("Gather", &[&shape, &one], &[]);
        let (past, total) = if self.options.kv_cache {
            let shape = graph.op("Shape", &["past_key_values.0.key"], &[]);
            let two = graph.int("two", &[], &[2]);
            let past = graph.op("Gather", &[&shape, &two], &[]);
            let total = graph.op("Add", &[&past, &length], &[]);
            (past, total)
        } else {
            (zero.clone(), length)
        };
        let ids = graph.op("Range", &[&past, &total, &one], &[]);
        let keys = graph.op("Range", &[&zero, &total, &one], &[]);
        let row = graph.op("Unsqueeze", &[&ids, &second], &[]);
        let column = graph.op("Unsqueeze", &[&keys, &first], &[]);
        let causal = graph.op("GreaterOrEqual", &[&row, &column], &[]);
        let mut masks = [causal.clone(), causal.clone()];
        if let Some(sliding) = &spec.sliding {
            let window = graph.int("window", &[], &[sliding.window as i64]);
            let end = graph.op("Add", &[&column, &window], &[]);
            let near = graph.op("Less", &[&row, &end], &[]);
            masks[1] = graph.op("And", &[&causal, &near], &[]);
        }
        let location = graph.op("Cast", &[&row], &[Attribute::Int("to", FLOAT)]);
        let ropes = [spec.rope.as_ref(), spec.sliding.as_ref().map(|sliding| &sliding.rope)];
        let mut rotation = |(index, rope): (usize, Option<&Rope>)| -> Option<[String; 2]> {
            let rope = rope.filter(|_| spec.rope.is_some())?;
            let frequencies = rope.frequencies(spec.rotary_dim(), spec.max_position_embeddings);
            let frequencies = graph.floats(&format!("frequencies_{index}"), &frequencies);
            let angles = graph.op("Mul", &[&location, &frequencies], &[]);
            let factor = rope.attention_factor() as f32;
            Some(["Cos", "Sin"].map(|kind| {
                let values = graph.op(kind, &[&angles], &[]);
                if factor == 1.0 {
                    return values;
                }
                let scale = format!("rotation_scale_{index}_{kind}");
                graph.float(&scale, factor);
                graph.op("Mul", &[&values, &scale], &[])
            }))
        };
        let [full, sliding] = ropes;
        let rotations = [rotation((0, full)), rotation((1, sliding))];
        let query_rotation = spec.query_scale.zip(rotations[0].as_ref()).map(|(scale, rotation)| {
            graph.float("query_context", scale.context as f32);
            graph.float("query_growth", scale.beta as f32);
            let turns = graph.op("Div", &[&location, "query_context"], &[]);
            let turns = graph.op("Floor", &[&turns], &[]);
            let turns = graph.op("Add", &[&turns, "unit"], &[]);
            let logarithm = graph.op("Log", &[&turns], &[]);
            let growth = graph.op("Mul", &[&logarithm, "query_growth"], &[]);
            let factor = graph.op("Add", &[&growth, "unit"], &[]);
            rotation.each_ref().map(|values| graph.op("Mul", &[values, &factor], &[]))
        });
        PositionInputs { ids, masks, rotations, query_rotation }
    }

    /// Adds a branch to the residual stream, after the family's norm if there is one.
    fn residual_add(&mut self, stream: &str, branch: &str, block: usize, role: NormRole) -> String {
        let normed = self.spec.post_norms.then(|| self.norm(branch, ModuleId::in_block(block, ModuleOp::Norm(role))));
        self.graph.op("Add", &[stream, normed.as_deref().unwrap_or(branch)], &[])
    }

    /// The input of attention or the MLP, normalized if the family does.
    fn pre_norm(&mut self, stream: &str, block: usize, role: NormRole) -> String {
        if !self.spec.pre_norms {
            return stream.to_owned();
        }
        self.norm(stream, ModuleId::in_block(block, ModuleOp::Norm(role)))
    }

    fn norm(&mut self, x: &str, layer: ModuleId) -> String {
        let name = self.spec.layer_name(layer);
        let (weight, bias) = (fp32_name(&format!("{name}.weight")), fp32_name(&format!("{name}.bias")));
        let graph = &mut self.graph;
        let NormKind::Rms { unit_offset } = self.spec.norm else {
            let epsilon = Attribute::Float("epsilon", self.spec.norm_eps as f32);
            return graph.op("LayerNormalization", &[x, &weight, &bias], &[Attribute::Int("axis", -1), epsilon]);
        };
        let squares = graph.op("Mul", &[x, x], &[]);
        let mean = graph.op("ReduceMean", &[&squares, "last_axis"], &[Attribute::Int("keepdims", 1)]);
        let mean = graph.op("Add", &[&mean, "norm_epsilon"], &[]);
        let root = graph.op("Sqrt", &[&mean], &[]);
        let normed = graph.op("Div", &[x, &root], &[]);
        let weight = if unit_offset { graph.op("Add", &[&weight, "unit"], &[]) } else { weight };
        graph.op("Mul", &[&normed, &weight], &[])
    }

    fn linear(&mut self, x: &str, block: usize, role: LinearRole) -> String {
        let name = self.spec.layer_name(ModuleId::in_block(block, ModuleOp::Linear(role)));
        let weight = format!("{name}.weight");
        let product = if self.options.int8 {
            self.integer_matmul(x, &weight, None)
        } else {
            self.graph.op("MatMul", &[x, &fp32_name(&weight)], &[])
        };
        let biases = self.spec.biases;
        let has_bias = match role {
            LinearRole::Qkv | LinearRole::Query | LinearRole::Key | LinearRole::Value => biases.qkv,
            LinearRole::Out => biases.out,
            LinearRole::GateUp | LinearRole::Gate | LinearRole::Up | LinearRole::Down => biases.mlp,
            _ => false,
        };
        if has_bias { self.graph.op("Add", &[&product, &fp32_name(&format!("{name}.bias"))], &[]) } else { product }
    }

    /// An INT8 product; activations are quantized per tensor.
    fn integer_matmul(&mut self, x: &str, name: &str, result: Option<&str>) -> String {
        if !self.quantized.contains_key(x) {
            let parts = self.graph.split("DynamicQuantizeLinear", &[x], &[]);
            self.quantized.insert(x.to_owned(), parts);
        }
        let [values, scale, zero] = self.quantized[x].clone();
        let graph = &mut self.graph;
        let sums = graph.op("MatMulInteger", &[&values, &format!("{name}.int8"), &zero, "weight_zero"], &[]);
        let sums = graph.op("Cast", &[&sums], &[Attribute::Int("to", FLOAT)]);
        let scales = graph.op("Mul", &[&scale, &format!("{name}.scale")], &[]);
        match result {
            Some(result) => {
                graph.op_as(result, "Mul", &[&sums, &scales], &[]);
                result.to_owned()
            }
            None => graph.op("Mul", &[&sums, &scales], &[]),
        }
    }

    fn attention(&mut self, x: &str, block: usize, positions: &PositionInputs) -> String {
        let spec = self.spec;
        let [q, k, v] = if spec.fused_qkv {
            let qkv = self.linear(x, block, LinearRole::Qkv);
            self.graph.split("Split", &[&qkv, "qkv_widths"], &[Attribute::Int("axis", -1)])
        } else {
            [LinearRole::Query, LinearRole::Key, LinearRole::Value].map(|role| self.linear(x, block, role))
        };
        let sliding = usize::from(spec.is_sliding(block));
        let rotation = positions.rotations[sliding].as_ref().filter(|_| spec.rope_of(block).is_some());
        let of_queries = rotation.map(|rotation| positions.query_rotation.as_ref().unwrap_or(rotation));
        let q = self.heads(&q, "by_query_head", block, Some(NormRole::Query), of_queries);
        let k = self.heads(&k, "by_key_head", block, Some(NormRole::Key), rotation);
        let v = self.heads(&v, "by_key_head", block, None, None);
        let (k, v) = (self.cached(k, block, "key"), self.cached(v, block, "value"));

        // Queries that share a key head get their own dimension, so that keys and values broadcast.
        let graph = &mut self.graph;
        let q = graph.op("Reshape", &[&q, "by_group"], &[]);
        let k = graph.op("Transpose", &[&k], &[Attribute::Ints("perm", &[0, 1, 3, 2])]);
        let (k, v) = (graph.op("Unsqueeze", &[&k, "group_axis"], &[]), graph.op("Unsqueeze", &[&v, "group_axis"], &[]));
        let scores = graph.op("MatMul", &[&q, &k], &[]);
        let mut scores = graph.op("Mul", &[&scores, "softmax_scale"], &[]);
        if spec.attention_softcap.is_some() {
            scores = soft_cap(graph, &scores, "score_cap", &format!("capped_scores_{block}"));
        }
        let scores = graph.op("Where", &[&positions.masks[sliding], &scores, "masked"], &[]);
        let weights = graph.op("Softmax", &[&scores], &[Attribute::Int("axis", -1)]);
        let heads = graph.op("MatMul", &[&weights, &v], &[]);
        let heads = graph.op("Reshape", &[&heads, "ungrouped"], &[]);
        let heads = graph.op("Transpose", &[&heads], &[Attribute::Ints("perm", &[0, 2, 1, 3])]);
        let joined = graph.op("Reshape", &[&heads, "joined"], &[]);
        self.linear(&joined, block, LinearRole::Out)
    }

    fn short_conv(&mut self, x: &str, block: usize, taps: usize) -> String {
        let weight = self.weight_of(ModuleId::in_block(block, ModuleOp::ShortConv));
        let input = self.linear(x, block, LinearRole::ConvIn);
        let graph = &mut self.graph;
        let [b, c, x] = graph.equal_parts(&input);
        let products = graph.op("Mul", &[&b, &x], &[]);
        let channels_first = [Attribute::Ints("perm", &[0, 2, 1])];
        let products = graph.op("Transpose", &[&products], &channels_first);
        // Only tokens before the current one are read.
        let (pads, width) = ([taps as i64 - 1, 0], self.spec.hidden_size as i64);
        let attributes = [Attribute::Int("group", width), Attribute::Ints("pads", &pads)];
        let sums = graph.op("Conv", &[&products, &weight], &attributes);
        let sums = graph.op("Transpose", &[&sums], &channels_first);
        let gated = graph.op("Mul", &[&c, &sums], &[]);
        self.linear(&gated, block, LinearRole::ConvOut)
    }

    /// Reshapes `[B, T, heads · head_dim]` to `[B, heads, T, head_dim]`; normalizes and rotates each head if the family
    /// does.
    fn heads(
        &mut self,
        x: &str,
        shape: &str,
        block: usize,
        norm: Option<NormRole>,
        rotation: Option<&[String; 2]>,
    ) -> String {
        let mut x = x.to_owned();
        let norm = norm.map(|role| ModuleId::in_block(block, ModuleOp::Norm(role))).zip(self.spec.qk_norm);
        if let Some((layer, QkNorm::Whole)) = norm {
            x = self.norm(&x, layer);
        }
        x = self.graph.op("Reshape", &[&x, shape], &[]);
        if let Some((layer, QkNorm::PerHead)) = norm {
            x = self.norm(&x, layer);
        }
        let graph = &mut self.graph;
        let x = graph.op("Transpose", &[&x], &[Attribute::Ints("perm", &[0, 2, 1, 3])]);
        let Some([cos, sin]) = rotation else { return x };
        let (x, rest) = if self.spec.rotary_dim.is_some() {
            let [rotated, rest] = graph.split("Split", &[&x, "rotated_widths"], &[Attribute::Int("axis", -1)]);
            (rotated, Some(rest))
        } else {
            (x, None)
        };
        let [a, b] = graph.equal_parts(&x);
        let mut product = |half: &str, factor: &str| graph.op("Mul", &[half, factor], &[]);
        let (ac, bs, bc, as_) = (product(&a, cos), product(&b, sin), product(&b, cos), product(&a, sin));
        let (low, high) = (graph.op("Sub", &[&ac, &bs], &[]), graph.op("Add", &[&bc, &as_], &[]));
        let parts: Vec<&str> = [&low, &high].into_iter().chain(&rest).map(String::as_str).collect();
        graph.op("Concat", &parts, &[Attribute::Int("axis", -1)])
    }

    /// Appends keys or values to the cache, if there is one.
    fn cached(&mut self, new: String, block: usize, what: &str) -> String {
        if !self.options.kv_cache {
            return new;
        }
        let (past, present) = (format!("past_key_values.{block}.{what}"), format!("present.{block}.{what}"));
        let dims = |length| {
            let (heads, size) = (Dim::Static(self.spec.kv_heads), Dim::Static(self.spec.head_dim));
            [Dim::Dynamic("batch"), heads, Dim::Dynamic(length), size]
        };
        self.graph.input(&past, FLOAT, &dims("past"));
        self.graph.output(&present, FLOAT, &dims("total"));
        self.graph.op_as(&present, "Concat", &[&past, &new], &[Attribute::Int("axis", 2)]);
        present
    }

    fn mlp(&mut self, x: &str, block: usize) -> String {
        let activation = self.spec.activation;
        let [inner, up] = if self.spec.fused_gate_up {
            let both = self.linear(x, block, LinearRole::GateUp);
            self.graph.equal_parts(&both).map(Some)
        } else if activation.is_gated() {
            [LinearRole::Gate, LinearRole::Up].map(|role| Some(self.linear(x, block, role)))
        } else {
            [Some(self.linear(x, block, LinearRole::Up)), None]
        };
        let inner = inner.unwrap_or_default();
        let mut active = match activation {
            Activation::Gelu | Activation::GeGlu => {
                self.graph.op("Gelu", &[&inner], &[Attribute::Text("approximate", "tanh")])
            }
            // Only mixtures, which are refused, have it clamped.
            Activation::SwiGlu | Activation::ClampedSwiGlu => {
                let sigmoid = self.graph.op("Sigmoid", &[&inner], &[]);
                self.graph.op("Mul", &[&inner, &sigmoid], &[])
            }
        };
        if let Some(up) = up {
            active = self.graph.op("Mul", &[&active, &up], &[]);
        }
        self.linear(&active, block, LinearRole::Down)
    }
}

/// `cap · tanh(x / cap)` under the name `result`.
fn soft_cap(graph: &mut OnnxGraph, x: &str, cap: &str, result: &str) -> String {
    let ratio = graph.op("Div", &[x, cap], &[]);
    let tanh = graph.op("Tanh", &[&ratio], &[]);
    graph.op_as(result, "Mul", &[&tanh, cap], &[]);
    result.to_owned()
}
