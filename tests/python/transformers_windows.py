"""Mean loss of model folders on windows of a text, by transformers; `tests/cli/evaluate.rs` runs it.

    python transformers_windows.py CASES

CASES is a JSON list of cases: a folder, a text, the length of windows, and a list of strides. A text is a JSON list of
token ids, or a .txt file for the folder's own tokenizer; every window begins with the token that this one puts in front
of a text, if it does. Prints a JSON list with a list for each case: for each stride an object of `loss` and `tokens`. A
window predicts the token after each of its own; what an earlier window has predicted is not counted again.
"""

import json
import sys

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM


def measured(model, ids, begin, seq_len, stride):
    total, counted, predicted = 0.0, 0, 1
    for start in range(0, len(ids) - 1, stride):
        end = min(start + seq_len, len(ids) - 1)
        inputs = ids[None, start:end].clone()
        inputs[0, : len(begin)] = torch.tensor(begin)
        with torch.no_grad():
            logits = model(inputs, attention_mask=torch.ones_like(inputs)).logits[0]
        new = predicted - start - 1
        losses = torch.nn.functional.cross_entropy(logits[new:], ids[start + 1 + new : end + 1], reduction="none")
        total, counted, predicted = total + losses.double().sum().item(), counted + end - start - new, end + 1
        if end == len(ids) - 1:
            break
    return {"loss": total / counted, "tokens": counted}


def of_case(folder, text, seq_len, strides):
    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    begin = []
    with open(text, encoding="utf-8", newline="") as file:
        if text.endswith(".txt"):
            tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
            ids, begin = torch.tensor(tokenizer.encode(file.read()).ids), tokenizer.encode("").ids
        else:
            ids = torch.tensor(json.load(file))
    return [measured(model, ids, begin, seq_len, stride) for stride in strides]


with open(sys.argv[1]) as cases:
    print(json.dumps([of_case(*case) for case in json.load(cases)]))
