"""Makes the reference values in `masked.json` and `masked.safetensors`: loss and gradients of samples with prompts,
which are not in the loss.

    python make_masked.py

The models are those of other cases. The samples are padded into one batch, with an attention mask and labels of -100
for tokens outside the loss, and transformers computes the mean loss of the others in FP64. `masked.json` has the
samples, for each token whether it is in the loss, and the losses; `masked.safetensors` has the gradients as
`<case>/<parameter>`.
"""

import json
import random
from pathlib import Path

import torch
from make_families import in_double
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
MODELS = ["deep", "families/llama", "families/mistral", "families/qwen3", "families/gemma3", "families/lfm2",
          "families/qwen3_5"]
SEQ_LEN = 12
# The fourth is longer than a row and is cut; the fifth has no answer in front of the cut and teaches nothing.
LENGTHS = [5, 9, 3, 16, 20, 7, 2, 4, 13]


def samples(vocab):
    draw = random.Random(5)
    made = []
    for number, length in enumerate(LENGTHS):
        answer = 15 if number == 4 else draw.randint(1, max(1, min(length, SEQ_LEN) // 2))
        # A question, an answer and, in long samples, a question again.
        until = length if length < 9 or number == 4 else length - 2
        made.append([(draw.randrange(vocab - 2), answer <= at < until) for at in range(length)])
    return made


def main():
    found, gradients = {}, {}
    for name in MODELS:
        model = AutoModelForCausalLM.from_pretrained(HERE / name, attn_implementation="sdpa").double().eval()
        in_double(model)
        rows = samples(model.config.vocab_size)
        kept = [row[: SEQ_LEN + 1] for row in rows]
        width = max(map(len, kept))
        ids, labels, mask = (torch.full((len(kept), width), fill) for fill in (0, -100, 0))
        for row, sample in enumerate(kept):
            for column, (token, learned) in enumerate(sample):
                ids[row, column], mask[row, column] = token, 1
                # The first token has nothing in front of it.
                labels[row, column] = token if learned and column > 0 else -100
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        found[name] = {"samples": rows, "loss": loss.item(), "targets": int((labels != -100).sum())}
        for parameter, value in model.named_parameters():
            gradients[f"{name}/{parameter.removeprefix('transformer.').removeprefix('model.')}"] = value.grad.float().contiguous()
    (HERE / "masked.json").write_text(json.dumps({"seq_len": SEQ_LEN, "cases": found}) + "\n")
    save_file(gradients, HERE / "masked.safetensors")


main()
