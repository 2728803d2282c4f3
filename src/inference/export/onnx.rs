//! ONNX: `input_ids [batch, sequence]` in, `logits [batch, sequence, vocabulary]` out, both axes free.
//!
//! The graph (operator set 20) is small and goes into one file; the weights lie beside it in `.data`, which has no limit
//! of 2 GB. Weights of 16 bits are widened as they are read and everything is computed in FP32, so that the graph runs
//! wherever ONNX does. Field numbers are those of `onnx.proto`.

use super::protobuf::Message;
use crate::engine::model::{ModelSpec, Parameters};
use crate::store::tensor_file::write_values;
use crate::{Error, Result};
use candle_core::DType;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

const OPERATOR_SET: i64 = 20;
/// The version of the format that came with that operator set.
const IR_VERSION: i64 = 9;
/// Element types.
const FLOAT: i64 = 1;
const INT64: i64 = 7;
/// Weights begin at multiples of this, so that they can be memory-mapped.
const ALIGNMENT: u64 = 64;

/// Writes the graph to `path` and the weights to `path` with `.data` at its end.
pub(super) fn write(config: &ModelSpec, weights: &Parameters, path: &Path) -> Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let location = format!("{name}.data");
    let mut graph = Graph::default();
    write_weights(&mut graph, weights, &location, &path.with_file_name(&location))?;
    let logits = gpt2(&mut graph, config);
    let model = graph.model(&logits, config.vocab_size);
    std::fs::write(path, model.bytes()).map_err(Error::io("write", path))
}

/// Streams the weights into `path` and declares each as an initializer of the graph, widened where it is not FP32.
fn write_weights(graph: &mut Graph, weights: &Parameters, location: &str, path: &Path) -> Result<()> {
    let mut file = BufWriter::new(File::create(path).map_err(Error::io("create", path))?);
    let mut at = 0_u64;
    for (name, tensor) in weights.iter() {
        let padding = at.next_multiple_of(ALIGNMENT) - at;
        file.write_all(&[0; ALIGNMENT as usize][..padding as usize]).map_err(Error::io("write", path))?;
        at += padding;
        let bytes = (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64;
        let entry = |key: &str, value: String| Message::default().put(1, key).put(2, value);
        let stored = Message::default()
            .each(tensor.dims(), |message, &dim| message.int(1, dim as i64))
            .int(2, element_type(tensor.dtype())?)
            .put(8, if tensor.dtype() == DType::F32 { wide(name) } else { name.to_owned() })
            .message(13, &entry("location", location.to_owned()))
            .message(13, &entry("offset", at.to_string()))
            .message(13, &entry("length", bytes.to_string()))
            .int(14, 1);
        graph.initializers.push(stored);
        write_values(&mut file, path, tensor)?;
        at += bytes;
    }
    file.flush().map_err(Error::io("write", path))?;
    for (name, tensor) in weights.iter() {
        // FP32 weights are what the operations read: onnxruntime's dynamic quantiser takes a product whose operand is an
        // initializer, and none behind another node.
        if tensor.dtype() != DType::F32 {
            graph.op_as(&wide(name), "Cast", &[name], &[Attribute::Int("to", FLOAT)]);
        }
    }
    Ok(())
}

fn element_type(dtype: DType) -> Result<i64> {
    match dtype {
        DType::F32 => Ok(FLOAT),
        DType::F16 => Ok(10),
        DType::BF16 => Ok(16),
        other => Err(Error::model("ONNX", format!("weights of {} cannot be written", other.as_str()))),
    }
}

/// What a weight is called in FP32.
fn wide(name: &str) -> String {
    format!("{name}.f32")
}

/// The whole model; returns the name of the logits.
fn gpt2(graph: &mut Graph, config: &ModelSpec) -> String {
    let shape = graph.op("Shape", &["input_ids"], &[]);
    let (zero, one) = (graph.int("zero", &[], &[0]), graph.int("one", &[], &[1]));
    let length = graph.op("Gather", &[&shape, &one], &[]);
    let positions = graph.op("Range", &[&zero, &length, &one], &[]);
    let token = graph.op("Gather", &[&wide("wte.weight"), "input_ids"], &[]);
    let position = graph.op("Gather", &[&wide("wpe.weight"), &positions], &[]);
    let mut stream = graph.op("Add", &[&token, &position], &[]);

    let (first, second) = (graph.int("first_axis", &[1], &[0]), graph.int("second_axis", &[1], &[1]));
    let (row, column) =
        (graph.op("Unsqueeze", &[&positions, &second], &[]), graph.op("Unsqueeze", &[&positions, &first], &[]));
    let mask = graph.op("GreaterOrEqual", &[&row, &column], &[]);
    let head_size = config.head_dim;
    // A 0 in a shape copies the input's dimension.
    graph.int("by_head", &[4], &[0, 0, config.heads as i64, head_size as i64]);
    graph.int("joined", &[3], &[0, 0, config.width as i64]);
    graph.float("softmax_scale", 1.0 / (head_size as f32).sqrt());
    graph.float("masked", f32::MIN);

    for layer in 0..config.layers {
        let name = |part: &str| format!("h.{layer}.{part}");
        let normed = graph.layer_norm(&stream, &name("ln_1"), config);
        let attended = attention(graph, &normed, &name("attn"), &mask);
        stream = graph.op("Add", &[&stream, &attended], &[]);
        let normed = graph.layer_norm(&stream, &name("ln_2"), config);
        let inner = graph.linear(&normed, &name("mlp.c_fc"));
        let inner = graph.op("Gelu", &[&inner], &[Attribute::Text("approximate", "tanh")]);
        let branch = graph.linear(&inner, &name("mlp.c_proj"));
        stream = graph.op("Add", &[&stream, &branch], &[]);
    }
    let normed = graph.layer_norm(&stream, "ln_f", config);
    let head = wide(if config.tied { "wte.weight" } else { "lm_head.weight" });
    let head = graph.op("Transpose", &[&head], &[Attribute::Ints("perm", &[1, 0])]);
    graph.op_as("logits", "MatMul", &[&normed, &head], &[]);
    "logits".into()
}

fn attention(graph: &mut Graph, x: &str, name: &str, mask: &str) -> String {
    let qkv = graph.linear(x, &format!("{name}.c_attn"));
    let [q, k, v] = graph.split3(&qkv);
    let mut by_head = |part: &str, order: &[i64]| {
        let apart = graph.op("Reshape", &[part, "by_head"], &[]);
        graph.op("Transpose", &[&apart], &[Attribute::Ints("perm", order)])
    };
    let (q, k, v) = (by_head(&q, &[0, 2, 1, 3]), by_head(&k, &[0, 2, 3, 1]), by_head(&v, &[0, 2, 1, 3]));
    let scores = graph.op("MatMul", &[&q, &k], &[]);
    let scores = graph.op("Mul", &[&scores, "softmax_scale"], &[]);
    let scores = graph.op("Where", &[mask, &scores, "masked"], &[]);
    let weights = graph.op("Softmax", &[&scores], &[Attribute::Int("axis", -1)]);
    let heads = graph.op("MatMul", &[&weights, &v], &[]);
    let heads = graph.op("Transpose", &[&heads], &[Attribute::Ints("perm", &[0, 2, 1, 3])]);
    let joined = graph.op("Reshape", &[&heads, "joined"], &[]);
    graph.linear(&joined, &format!("{name}.c_proj"))
}

enum Attribute<'a> {
    Float(&'a str, f32),
    Int(&'a str, i64),
    Text(&'a str, &'a str),
    Ints(&'a str, &'a [i64]),
}

impl Attribute<'_> {
    fn message(&self) -> Message {
        let empty = Message::default();
        match *self {
            Self::Float(name, value) => empty.put(1, name).float(2, value).int(20, 1),
            Self::Int(name, value) => empty.put(1, name).int(3, value).int(20, 2),
            Self::Text(name, value) => empty.put(1, name).put(4, value).int(20, 3),
            Self::Ints(name, values) => {
                empty.put(1, name).each(values, |message, &value| message.int(8, value)).int(20, 7)
            }
        }
    }
}

/// A graph under construction: operations in the order in which they run, and constants.
#[derive(Default)]
struct Graph {
    nodes: Vec<Message>,
    initializers: Vec<Message>,
}

impl Graph {
    /// Appends an operation; returns the name of its result.
    fn op(&mut self, kind: &str, inputs: &[&str], attributes: &[Attribute<'_>]) -> String {
        let name = format!("{kind}_{}", self.nodes.len());
        self.op_as(&name, kind, inputs, attributes);
        name
    }

    /// Appends an operation whose result has a given name.
    fn op_as(&mut self, name: &str, kind: &str, inputs: &[&str], attributes: &[Attribute<'_>]) {
        self.node(kind, inputs, &[name], attributes);
    }

    fn node(&mut self, kind: &str, inputs: &[&str], outputs: &[&str], attributes: &[Attribute<'_>]) {
        let node = Message::default()
            .each(inputs, |message, input| message.put(1, input))
            .each(outputs, |message, output| message.put(2, output))
            .put(3, format!("node_{}", self.nodes.len()))
            .put(4, kind)
            .each(attributes, |message, attribute| message.message(5, &attribute.message()));
        self.nodes.push(node);
    }

    fn split3(&mut self, x: &str) -> [String; 3] {
        let names = ["q", "k", "v"].map(|part| format!("{part}_{}", self.nodes.len()));
        let attributes = [Attribute::Int("axis", -1), Attribute::Int("num_outputs", 3)];
        self.node("Split", &[x], &names.each_ref().map(String::as_str), &attributes);
        names
    }

    fn linear(&mut self, x: &str, name: &str) -> String {
        let product = self.op("MatMul", &[x, &wide(&format!("{name}.weight"))], &[]);
        self.op("Add", &[&product, &wide(&format!("{name}.bias"))], &[])
    }

    fn layer_norm(&mut self, x: &str, name: &str, config: &ModelSpec) -> String {
        let (weight, bias) = (wide(&format!("{name}.weight")), wide(&format!("{name}.bias")));
        let epsilon = config.norm_eps as f32;
        let attributes = [Attribute::Int("axis", -1), Attribute::Float("epsilon", epsilon)];
        self.op("LayerNormalization", &[x, &weight, &bias], &attributes)
    }

    /// A constant of integers; returns its name.
    fn int(&mut self, name: &str, dims: &[i64], values: &[i64]) -> String {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let dims = Message::default().each(dims, |message, &dim| message.int(1, dim));
        self.initializers.push(dims.int(2, INT64).put(8, name).put(9, bytes));
        name.to_owned()
    }

    /// A constant number.
    fn float(&mut self, name: &str, value: f32) {
        self.initializers.push(Message::default().int(2, FLOAT).put(8, name).put(9, value.to_le_bytes()));
    }

    /// The finished model.
    fn model(self, logits: &str, vocab: usize) -> Message {
        let free = |name: &str| Message::default().put(2, name);
        let value = |name: &str, element: i64, dims: &[Message]| {
            let shape = Message::default().each(dims, |message, dim| message.message(1, dim));
            let tensor = Message::default().int(1, element).message(2, &shape);
            Message::default().put(1, name).message(2, &Message::default().message(1, &tensor))
        };
        let input = value("input_ids", INT64, &[free("batch"), free("sequence")]);
        let vocab = Message::default().int(1, vocab as i64);
        let output = value(logits, FLOAT, &[free("batch"), free("sequence"), vocab]);
        let graph = Message::default()
            .each(&self.nodes, |message, node| message.message(1, node))
            .put(2, "gpt2")
            .each(&self.initializers, |message, tensor| message.message(5, tensor))
            .message(11, &input)
            .message(12, &output);
        Message::default()
            .int(1, IR_VERSION)
            .put(2, "finetune")
            .put(3, env!("CARGO_PKG_VERSION"))
            .message(7, &graph)
            .message(8, &Message::default().put(1, "").int(2, OPERATOR_SET))
    }
}
