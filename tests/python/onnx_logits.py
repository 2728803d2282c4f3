"""Logits of an exported ONNX graph, by onnxruntime; `tests/cli/export.rs` runs it.

    python onnx_logits.py MODEL IDS

IDS is a JSON list of rows of token ids, all equally long; a graph with a KV cache gets them in three pieces. Prints one JSON
object: `logits`, all values in row-major order, `axes`, the names of the input's axes, and `unused`, onnxruntime's warnings about
initializers that no operation reads.
"""

import json
import os
import sys
import tempfile

import numpy
import onnxruntime

# onnxruntime writes warnings to the file descriptor.
with tempfile.TemporaryFile() as said:
    stderr = os.dup(2)
    os.dup2(said.fileno(), 2)
    session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
    os.dup2(stderr, 2)
    said.seek(0)
    unused = [line for line in said.read().decode().splitlines() if "initializer" in line]
with open(sys.argv[2]) as file:
    ids = numpy.array(json.load(file), dtype=numpy.int64)
pasts = [tensor for tensor in session.get_inputs() if tensor.name.startswith("past_key_values.")]
if pasts:
    names = [tensor.name for tensor in session.get_outputs()]
    state = {past.name: numpy.zeros((len(ids), past.shape[1], 0, past.shape[3]), numpy.float32) for past in pasts}
    pieces = []
    for piece in numpy.split(ids, [ids.shape[1] - 2, ids.shape[1] - 1], axis=1):
        found = dict(zip(names, session.run(names, {"input_ids": piece, **state})))
        pieces.append(found["logits"])
        state = {past.name: found[past.name.replace("past_key_values", "present")] for past in pasts}
    logits = numpy.concatenate(pieces, axis=1)
else:
    [logits] = session.run(["logits"], {"input_ids": ids})
print(json.dumps({"logits": logits.flatten().tolist(), "axes": session.get_inputs()[0].shape, "unused": unused}))
