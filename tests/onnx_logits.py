"""Logits of an exported ONNX graph, by onnxruntime; `tests/export.rs` runs it.

    python onnx_logits.py MODEL IDS

IDS is a JSON list of rows of token ids, all equally long. Prints one JSON object: `logits`, all values in row-major order,
and `axes`, the names of the input's axes.
"""

import json
import sys

import numpy
import onnxruntime

session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
with open(sys.argv[2]) as file:
    ids = numpy.array(json.load(file), dtype=numpy.int64)
[logits] = session.run(["logits"], {"input_ids": ids})
print(json.dumps({"logits": logits.flatten().tolist(), "axes": session.get_inputs()[0].shape}))
