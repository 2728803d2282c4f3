"""Greedy tokens of a model folder by transformers; `tests/cli/generate.rs` runs it.

    python transformers_generate.py FOLDER CASES

CASES is a JSON list of `[prompt, n]`: token ids, and the number of tokens to generate. Prints a JSON list with the new tokens of
each. Every case has a fresh model, because rotary embeddings with a dynamic base remember the longest sequence.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM


def generated(prompt, n):
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).float().eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=n, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


with open(sys.argv[2]) as file:
    print(json.dumps([generated(*case) for case in json.load(file)]))
