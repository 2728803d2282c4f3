"""Greedy tokens of model folders by transformers; `tests/cli/generate.rs` runs it.

    python transformers_generate.py CASES

CASES is a JSON object: for each folder a list of `[prompt, n]`, token ids and the number of tokens to generate. Prints
the same object with the new tokens of each. Every case has a fresh model, because rotary embeddings whose frequencies
depend on the length remember the longest sequence.
"""

import copy
import json
import sys

import torch
from transformers import AutoModelForCausalLM


def generated(model, prompt, n):
    model = copy.deepcopy(model)
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=n, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def texts(folder, cases):
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").float().eval()
    model.generation_config.eos_token_id = None
    return [generated(model, *case) for case in cases]


with open(sys.argv[1]) as file:
    print(json.dumps({folder: texts(folder, cases) for folder, cases in json.load(file).items()}))
