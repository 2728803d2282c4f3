//! An ONNX graph under construction. Field numbers follow `onnx.proto`.

use crate::protobuf::Message;
use std::collections::HashSet;

const OPERATOR_SET: i64 = 20;
/// The version of the format that came with that operator set.
const IR_VERSION: i64 = 9;
/// Element types.
pub(super) const FLOAT: i64 = 1;
pub(super) const UINT8: i64 = 2;
pub(super) const INT64: i64 = 7;
pub(super) const FLOAT16: i64 = 10;
pub(super) const BFLOAT16: i64 = 16;

pub(super) enum Attribute<'a> {
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
pub(super) struct OnnxGraph {
    nodes: Vec<Message>,
    initializers: Vec<(String, Message)>,
    /// Names that operations read.
    read: HashSet<String>,
    inputs: Vec<Message>,
    outputs: Vec<Message>,
}

impl OnnxGraph {
    /// Appends an operation; returns the name of its result.
    pub(super) fn op(&mut self, kind: &str, inputs: &[&str], attributes: &[Attribute<'_>]) -> String {
        let name = format!("{kind}_{}", self.nodes.len());
        self.op_as(&name, kind, inputs, attributes);
        name
    }

    /// Appends an operation whose result has a given name.
    pub(super) fn op_as(&mut self, name: &str, kind: &str, inputs: &[&str], attributes: &[Attribute<'_>]) {
        self.node(kind, inputs, &[name], attributes);
    }

    fn node(&mut self, kind: &str, inputs: &[&str], outputs: &[&str], attributes: &[Attribute<'_>]) {
        self.read.extend(inputs.iter().map(|&input| input.to_owned()));
        let node = Message::default()
            .each(inputs, |message, input| message.put(1, input))
            .each(outputs, |message, output| message.put(2, output))
            .put(3, format!("node_{}", self.nodes.len()))
            .put(4, kind)
            .each(attributes, |message, attribute| message.message(5, &attribute.message()));
        self.nodes.push(node);
    }

    /// Appends an operation with several results; returns their names.
    pub(super) fn split<const N: usize>(
        &mut self,
        kind: &str,
        inputs: &[&str],
        attributes: &[Attribute<'_>],
    ) -> [String; N] {
        let at = self.nodes.len();
        let names: [String; N] = std::array::from_fn(|part| format!("{kind}_{at}_{part}"));
        self.node(kind, inputs, &names.each_ref().map(String::as_str), attributes);
        names
    }

    /// Splits the last axis of `x` into equal parts; returns their names.
    pub(super) fn equal_parts<const N: usize>(&mut self, x: &str) -> [String; N] {
        self.split("Split", &[x], &[Attribute::Int("axis", -1), Attribute::Int("num_outputs", N as i64)])
    }

    /// A constant of integers; returns its name.
    pub(super) fn int(&mut self, name: &str, dims: &[i64], values: &[i64]) -> String {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let dims = Message::default().each(dims, |message, &dim| message.int(1, dim));
        self.constant(name, dims.int(2, INT64).put(9, bytes));
        name.to_owned()
    }

    pub(super) fn float(&mut self, name: &str, value: f32) {
        self.constant(name, Message::default().int(2, FLOAT).put(9, value.to_le_bytes()));
    }

    pub(super) fn byte(&mut self, name: &str, value: u8) {
        self.constant(name, Message::default().int(2, UINT8).put(9, [value]));
    }

    /// A list of constant numbers; returns its name.
    pub(super) fn floats(&mut self, name: &str, values: &[f32]) -> String {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let dims = Message::default().int(1, values.len() as i64);
        self.constant(name, dims.int(2, FLOAT).put(9, bytes));
        name.to_owned()
    }

    /// A constant whose values are in the data file, at `offset`.
    pub(super) fn external(
        &mut self,
        name: &str,
        dims: &[usize],
        element: i64,
        location: &str,
        [offset, length]: [u64; 2],
    ) {
        let entry = |key: &str, value: String| Message::default().put(1, key).put(2, value);
        let stored = Message::default()
            .each(dims, |message, &dim| message.int(1, dim as i64))
            .int(2, element)
            .message(13, &entry("location", location.to_owned()))
            .message(13, &entry("offset", offset.to_string()))
            .message(13, &entry("length", length.to_string()))
            .int(14, 1);
        self.constant(name, stored);
    }

    fn constant(&mut self, name: &str, tensor: Message) {
        self.initializers.push((name.to_owned(), tensor.put(8, name)));
    }

    pub(super) fn input(&mut self, name: &str, element: i64, dims: &[Dim<'_>]) {
        self.inputs.push(value(name, element, dims));
    }

    pub(super) fn output(&mut self, name: &str, element: i64, dims: &[Dim<'_>]) {
        self.outputs.push(value(name, element, dims));
    }

    /// The finished model with the graph's name, without constants that its family does not need.
    pub(super) fn model(mut self, name: &str) -> Message {
        self.initializers.retain(|(name, _)| self.read.contains(name));
        let graph = Message::default()
            .each(&self.nodes, |message, node| message.message(1, node))
            .put(2, name)
            .each(&self.initializers, |message, (_, tensor)| message.message(5, tensor))
            .each(&self.inputs, |message, input| message.message(11, input))
            .each(&self.outputs, |message, output| message.message(12, output));
        Message::default()
            .int(1, IR_VERSION)
            .put(2, "finetune")
            .put(3, env!("CARGO_PKG_VERSION"))
            .message(7, &graph)
            .message(8, &Message::default().put(1, "").int(2, OPERATOR_SET))
    }
}

#[derive(Clone, Copy)]
pub(super) enum Dim<'a> {
    /// Free, by name.
    Dynamic(&'a str),
    /// Always this.
    Static(usize),
}

fn value(name: &str, element: i64, dims: &[Dim<'_>]) -> Message {
    let shape = Message::default().each(dims, |message, dim| {
        let dim = match *dim {
            Dim::Dynamic(name) => Message::default().put(2, name),
            Dim::Static(size) => Message::default().int(1, size as i64),
        };
        message.message(1, &dim)
    });
    let tensor = Message::default().int(1, element).message(2, &shape);
    Message::default().put(1, name).message(2, &Message::default().message(1, &tensor))
}
