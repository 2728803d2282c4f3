"""What transformers makes of a model folder; `tests/transformers.rs` runs it.

    python transformers_loss.py FOLDER BATCH

BATCH is a JSON file with `inputs` and `targets`, rows of token ids; a target of -100 is ignored. Prints one JSON object:
`loss`, the mean cross-entropy in FP32; `dtype`, the weights' as stored; `text`, some bytes after the folder's own
tokenizer has encoded and decoded them. A folder that lacks a tensor, or has one too many, is an error.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

folder, batch = sys.argv[1:]
model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
for key, problem in report.items():
    if problem:
        sys.exit(f"{folder}: {key}: {problem}")
stored = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}

with open(batch) as file:
    batch = {key: torch.tensor(rows) for key, rows in json.load(file).items()}
with torch.no_grad():
    logits = model.float().eval()(batch["inputs"]).logits
loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=-100)

tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json")
text = tokenizer.decode(tokenizer.encode("The cat, ünder 3 tables."))
print(json.dumps({"loss": loss.item(), "dtype": sorted(stored), "text": text}))
