"""Logits of exported ONNX graphs, by onnxruntime; `tests/cli/export.rs` runs it.

    python onnx_logits.py CASES

CASES is a JSON list of cases: a graph's file, and rows of token ids that are equally long; a graph with a KV cache gets
them in three pieces. Prints a JSON list with an object for each case: `logits`, all values in row-major order, `axes`,
the names of the input's axes, and `unused`, onnxruntime's warnings about initializers that no operation reads.
"""

import json
import os
import sys
import tempfile

import numpy
import onnxruntime

options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1


def of_case(model, rows):
    # onnxruntime writes warnings to the file descriptor.
    with tempfile.TemporaryFile() as said:
        stderr = os.dup(2)
        os.dup2(said.fileno(), 2)
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        os.dup2(stderr, 2)
        said.seek(0)
        unused = [line for line in said.read().decode().splitlines() if "initializer" in line]
    ids = numpy.array(rows, dtype=numpy.int64)
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
    return {"logits": logits.flatten().tolist(), "axes": session.get_inputs()[0].shape, "unused": unused}


with open(sys.argv[1]) as cases:
    print(json.dumps([of_case(*case) for case in json.load(cases)]))
