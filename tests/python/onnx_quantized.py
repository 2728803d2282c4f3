"""Quantizes an exported graph with onnxruntime's dynamic quantizer; `tests/cli/export.rs` runs it.

    python onnx_quantized.py MODEL IDS

Prints one JSON object: `products`, the matrix products by an initializer before quantizing; `quantized`, those in INT8
after; and `distance`, the error of the logits relative to their norm.
"""

import json
import os
import sys

import numpy
import onnx
import onnxruntime
from onnxruntime.quantization import QuantType, quantize_dynamic

source = sys.argv[1]
target = os.path.join(os.path.dirname(source), "int8.onnx")
graph = onnx.load(source, load_external_data=False).graph
weights = {initializer.name for initializer in graph.initializer}
products = sum(node.op_type == "MatMul" and node.input[1] in weights for node in graph.node)
quantize_dynamic(source, target, weight_type=QuantType.QInt8)
quantized = sum(node.op_type == "MatMulInteger" for node in onnx.load(target).graph.node)
with open(sys.argv[2]) as file:
    ids = numpy.array(json.load(file), dtype=numpy.int64)


def logits(path):
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(["logits"], {"input_ids": ids})[0]


exact, rounded = logits(source), logits(target)
distance = numpy.linalg.norm(rounded - exact) / numpy.linalg.norm(exact)
print(json.dumps({"products": products, "quantized": quantized, "distance": float(distance)}))
