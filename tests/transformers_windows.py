"""Mean loss of a model folder on windows of a text, by transformers; `tests/evaluate.rs` runs it.

    python transformers_windows.py FOLDER TOKENS SEQ_LEN STRIDE

TOKENS is a JSON list of token ids. Prints one JSON object with `loss` and `tokens`. A window predicts the token after each
of its own; what an earlier window has predicted is not counted again.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM

folder, tokens, seq_len, stride = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
with open(tokens) as file:
    ids = torch.tensor(json.load(file))

total, counted, predicted = 0.0, 0, 1
for start in range(0, len(ids) - 1, stride):
    end = min(start + seq_len, len(ids) - 1)
    inputs = ids[None, start:end]
    with torch.no_grad():
        logits = model(inputs, attention_mask=torch.ones_like(inputs)).logits[0]
    new = predicted - start - 1
    losses = torch.nn.functional.cross_entropy(logits[new:].double(), ids[start + 1 + new : end + 1], reduction="sum")
    total, counted, predicted = total + losses.item(), counted + end - start - new, end + 1
    if end == len(ids) - 1:
        break
print(json.dumps({"loss": total / counted, "tokens": counted}))
