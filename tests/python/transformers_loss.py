"""Evaluates model folders with transformers; `tests/engine/transformers.rs` runs it.

    python transformers_loss.py BATCH FOLDER...

BATCH is a JSON file with `inputs` and `targets`, rows of token ids; a target of -100 is ignored. Prints one JSON array
with an object for each folder: `loss`, the mean cross-entropy in FP32; `dtypes` of the weights as stored; `text`, a
sentence after the folder's own tokenizer has encoded and decoded it. A folder that lacks a tensor or has one too many
is an error.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast


def examine(folder, inputs, targets):
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    for key, problem in report.items():
        if problem:
            sys.exit(f"{folder}: {key}: {problem}")
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
    with torch.no_grad():
        logits = model.float().eval()(inputs).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json")
    text = tokenizer.decode(tokenizer.encode("The cat, ünder 3 tables."))
    return {"loss": loss.item(), "dtypes": sorted(dtypes), "text": text}


with open(sys.argv[1]) as file:
    batch = {key: torch.tensor(rows) for key, rows in json.load(file).items()}
print(json.dumps([examine(folder, **batch) for folder in sys.argv[2:]]))
