#!/usr/bin/env python3
"""Runs `finetune bench` and a PyTorch step of the same shape in turn, A B A B, and prints the ratio of their speeds.

    benches/compare_torch.py --python PATH/python3 --shapes 32x32,8x128 --dtypes fp32,bf16,fp16 --rounds 5

    benches/compare_torch.py --python PATH/python3 --model smollm2-135m --lora 16 --shapes 4x256 --dtypes fp32,bf16

With `--lora R` both train adapters of rank R at every linear layer, the peer PEFT's.

The peer is PyTorch at its best: with tcmalloc where it is installed, scaled dot product attention and fused AdamW, and for each
shape and type with or without `--compile`, whichever a trial shows to be faster. `--plain-peer` takes PyTorch as it comes.

The peer is `torch_step.py` beside this file, or another script that takes `--model --batch --seq --dtype --steps --warmup
--threads` and prints one JSON object with `tokens_per_s` and `peak_rss_mib`. Each round starts both programs afresh, so that whatever else the machine does falls on
both; the ratio of a round is of neighbours in time. Reported are medians with the smallest and largest round.
"""

import argparse
import ctypes.util
import json
import os
import statistics
import subprocess
import sys

# Our dtype, and the peer's that a user would otherwise take: FP16 on a CPU is held against the peer's FP32, because the
# peer's own FP16 falls back to a reference loop there.
PEER_DTYPE = {"fp32": "f32", "bf16": "bf16_amp", "fp16": "f32"}
PEER_DTYPE_ON_GPU = {**PEER_DTYPE, "fp16": "f16_amp"}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--finetune", default="target/release/finetune", help="our program")
    parser.add_argument("--peer", default=os.path.join(os.path.dirname(__file__), "torch_step.py"), help="the PyTorch script")
    parser.add_argument("--model", default="distilgpt2", help="the model, by a name that both know")
    parser.add_argument("--device", default="cpu", help="where both compute: cpu or cuda")
    parser.add_argument("--python", default=sys.executable, help="a Python with PyTorch")
    parser.add_argument("--library-path", default="", help="LD_LIBRARY_PATH of that Python")
    parser.add_argument("--plain-peer", action="store_true", help="no tcmalloc and no trial of `--compile`")
    parser.add_argument("--peer-flags", default="", help="more flags of the peer, such as `--compile`")
    parser.add_argument("--peer-dtype", default="", help="the peer's dtype, where not the usual one")
    parser.add_argument("--shapes", default="32x32", help="batch x sequence, separated by commas")
    parser.add_argument("--dtypes", default="fp32,bf16,fp16", help="ours, separated by commas")
    parser.add_argument("--lora", help="train adapters of this rank over a frozen base")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", help="append every report to this file, one object a line")
    return parser.parse_args()


def run(command, environment=None):
    """The JSON object that a command prints last."""
    result = subprocess.run(command, env={**os.environ, **(environment or {})}, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"`{' '.join(command)}` failed with {result.returncode}:\n{result.stderr[-2000:]}")
    return json.loads(result.stdout.strip().splitlines()[-1])


def ours(a, batch, seq, dtype):
    return run(
        [a.finetune, "bench", "--model", a.model, "--dtype", dtype, "--batch-size", batch, "--seq-len", seq]
        + ["--steps", str(a.steps), "--warmup", "2", "--threads", str(a.threads), "--device", a.device]
        + (["--lora", a.lora] if a.lora else [])
    )


def theirs(a, batch, seq, dtype, flags):
    environment = {"OMP_NUM_THREADS": str(a.threads)}
    if a.library_path:
        environment["LD_LIBRARY_PATH"] = a.library_path
    allocator = None if a.plain_peer else ctypes.util.find_library("tcmalloc_minimal")
    if allocator:
        environment["LD_PRELOAD"] = allocator
    return run(
        [a.python, a.peer, "--model", a.model, "--dtype", dtype, "--batch", batch, "--seq", seq]
        + ["--steps", str(a.steps), "--warmup", "2", "--threads", str(a.threads)]
        + (["--device", a.device] if a.device != "cpu" else [])
        + (["--lora", a.lora] if a.lora else [])
        + flags,
        environment,
    )


def best_flags(a, batch, seq, dtype):
    """The peer's flags, with `--compile` where a trial shows it to be faster."""
    flags = a.peer_flags.split()
    if a.plain_peer or "--compile" in flags:
        return flags
    rate = lambda flags: theirs(a, batch, seq, dtype, flags)["tokens_per_s"]
    return max(flags, [*flags, "--compile"], key=rate)


def compare(a, shape, dtype):
    batch, seq = shape.split("x")
    peer_dtype = a.peer_dtype or (PEER_DTYPE if a.device == "cpu" else PEER_DTYPE_ON_GPU)[dtype]
    flags = best_flags(a, batch, seq, peer_dtype)
    pairs = []
    for _ in range(a.rounds):
        pair = ours(a, batch, seq, dtype), theirs(a, batch, seq, peer_dtype, flags)
        pairs.append(pair)
        if a.json:
            with open(a.json, "a", encoding="utf-8") as log:
                log.writelines(json.dumps(report) + "\n" for report in pair)
    ratios = [own["tokens_per_s"] / peer["tokens_per_s"] for own, peer in pairs]
    median = lambda side, key: statistics.median(pair[side][key] for pair in pairs)
    share = "" if pairs[0][0]["share_of_peak"] is None else f"{100 * median(0, 'share_of_peak'):5.1f} %"
    memory = "peak_rss_mib" if a.device == "cpu" else "peak_device_mib"
    print(
        f"{shape:>7}  {dtype:5} {median(0, 'tokens_per_s'):8.0f}  {peer_dtype:9} {median(1, 'tokens_per_s'):8.0f}"
        f"{'c' if '--compile' in flags else ' '} "
        f"{statistics.median(ratios):5.2f}  ({min(ratios):.2f}–{max(ratios):.2f})  "
        f"{share:7}  "
        f"{median(0, memory):6.0f}  {median(1, memory):6.0f}",
        flush=True,
    )


def main():
    a = arguments()
    print("  shape  ours   tokens/s  peer      tokens/s  ratio  (spread)     of peak  MiB ours, peer     (c: compiled)")
    for dtype in a.dtypes.split(","):
        for shape in a.shapes.split(","):
            compare(a, shape, dtype)


if __name__ == "__main__":
    main()
