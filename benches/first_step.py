#!/usr/bin/env python3
"""Seconds from a program's start to the end of its first training step, ours and PyTorch's with transformers, in turn.

    benches/first_step.py --python PATH/python3 --finetune target/release/finetune --rounds 5

Both load the same local folder, a model of distilgpt2's shape in FP32 with a byte-level tokenizer that this script
trains, tokenize the same text, and take one FP32 step of AdamW. `random` starts with random weights instead: ours by
`--init random`, the peer's by `from_config`. Files are in the page cache; neither side has a cache of tokens.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

PEER = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
folder, text, batch, seq, threads, start = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]), sys.argv[6]
torch.set_num_threads(threads)
tokenizer = AutoTokenizer.from_pretrained(folder)
if start == "folder":
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
else:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
model.train()
ids = torch.tensor(tokenizer(open(text).read())["input_ids"])
ids = ids[: batch * seq].view(batch, seq)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
loss = model(input_ids=ids, labels=ids).loss
loss.backward()
optimizer.step()
print("step=1/", float(loss.detach()), flush=True)
"""

PREPARE = """
import random, sys
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
folder, text = sys.argv[1], sys.argv[2]
random.seed(0)
words = ["".join(random.choices("etaoinshrdlu", k=random.randint(2, 9))) for _ in range(5000)]
open(text, "w").write(" ".join(random.choices(words, k=160_000)))
tokenizer = ByteLevelBPETokenizer()
tokenizer.train([text], vocab_size=5000, special_tokens=["<|endoftext|>"], show_progress=False)
PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token="<|endoftext|>", model_max_length=10**9).save_pretrained(folder)
GPT2LMHeadModel(GPT2Config(n_layer=6)).save_pretrained(folder)
"""


def seconds_to_first_step(command, cwd, environment):
    """Until the line of the first step arrives."""
    began = time.perf_counter()
    process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step=1/"):
            seconds = time.perf_counter() - began
            process.kill()
            process.communicate()
            return seconds
    sys.exit(f"`{' '.join(command[:3])}` ended without a step: {process.stderr.read()[-2000:]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--finetune", default="target/release/finetune", help="our program")
    parser.add_argument("--python", default=sys.executable, help="a Python with PyTorch, transformers and tokenizers")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    a = parser.parse_args()
    environment = {**os.environ, "OMP_NUM_THREADS": str(a.threads), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with tempfile.TemporaryDirectory() as folder:
        model, text = os.path.join(folder, "model"), os.path.join(folder, "text.txt")
        os.mkdir(model)
        subprocess.run([a.python, "-c", PREPARE, model, text], check=True, env=environment, stdout=subprocess.DEVNULL)
        sizes = [str(n) for n in (a.batch, a.seq, a.threads)]
        for start in ("folder", "random"):
            ours = [os.path.abspath(a.finetune), "--model", model, "--data", text, "--dtype", "fp32", "--steps", "3", "--plain"]
            ours += ["--batch-size", sizes[0], "--seq-len", sizes[1], "--threads", sizes[2], "--device", "cpu"]
            ours += ["--init", "random"] if start == "random" else []
            peer = [a.python, "-c", PEER, model, text, *sizes, start]
            times = []
            for _ in range(a.rounds):
                fresh = tempfile.mkdtemp(dir=folder)
                times.append(tuple(seconds_to_first_step(command, fresh, environment) for command in (ours, peer)))
                shutil.rmtree(fresh)
            ratios = [own / peer for own, peer in times]
            own, peer = (statistics.median(pair[side] for pair in times) for side in (0, 1))
            print(f"{start:7} ours {own:5.2f} s  peer {peer:5.2f} s  ratio {statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})", flush=True)


main()
