#!/usr/bin/env python3
"""Runs `finetune bench` and a PyTorch step of the same shape in turn, and prints the ratio of their speeds.

    benches/compare_torch.py --python PATH/python3 --shapes 32x32,8x128 --dtypes fp32,bf16,fp16 --rounds 5
    benches/compare_torch.py --python PATH/python3 --model smollm2-135m --lora 16 --shapes 4x256 --dtypes fp32,bf16
    benches/compare_torch.py --python PATH/python3 --device cuda --model smollm2-135m --shapes 8x512 --dtypes bf16 --steps 20

With `--lora R` both train adapters of rank R at every linear layer, the peer PEFT's.

The peer is PyTorch at its best: with tcmalloc (Debian's libtcmalloc-minimal4) and transparent huge pages on a CPU,
scaled dot product attention, fused AdamW, and for each shape and type with the fastest of compiled or not, and padded
vocabulary or not, by the median of three trials each. `--peer-flags` replaces the trials; `--plain-peer` runs PyTorch
without any of this.

Autocast stores weight gradients in FP32, and our half-precision types in 16 bits. So these are also measured with
`g=f32`.

The peer is `torch_step.py` in this folder, or another script that takes
`--model --batch --seq --dtype --steps --warmup --threads` and prints one JSON object with `tokens_per_s` and
`peak_rss_mib`. Each round starts every program again, so that other work on the machine affects all of them; every
other round runs in the reverse order. The script prints medians, the smallest and largest ratio of a round, and the
number of skipped steps, which no rate includes.
"""

import argparse
import ctypes.util
import json
import os
import statistics
import subprocess
import sys

# The peer's type for ours. FP16 on a CPU is compared with FP32, because PyTorch's own FP16 falls back to a reference
# loop there.
PEER_DTYPE = {"fp32": "f32", "bf16": "bf16_amp", "fp16": "f32"}
PEER_DTYPE_ON_GPU = {**PEER_DTYPE, "fp16": "f16_amp"}
# Ours again, with gradients as wide as autocast's.
WIDE_GRADIENTS = {"bf16": "p=f32,c=bf16,g=f32,r=f32", "fp16": "p=f32,c=f16,g=f32,r=f32"}
COMPILED = [[], ["--compile"]]
COMPILED_ON_GPU = [*COMPILED, ["--compile", "--compile-mode", "reduce-overhead"]]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--finetune", default="target/release/finetune", help="our program")
    parser.add_argument("--peer", default=os.path.join(os.path.dirname(__file__), "torch_step.py"), help="the PyTorch script")
    parser.add_argument("--model", default="distilgpt2", help="the model, by a name that both know")
    parser.add_argument("--device", default="cpu", help="where both compute: cpu or cuda")
    parser.add_argument("--python", default=sys.executable, help="a Python with PyTorch")
    parser.add_argument("--library-path", default="", help="LD_LIBRARY_PATH of that Python")
    parser.add_argument("--plain-peer", action="store_true", help="no tcmalloc, no huge pages, no trials")
    parser.add_argument("--peer-flags", help="flags of the peer, such as `--compile`, instead of trials")
    parser.add_argument("--peer-dtype", default="", help="the peer's dtype, if not the usual one")
    parser.add_argument("--shapes", default="32x32", help="batch x sequence, separated by commas")
    parser.add_argument("--dtypes", default="fp32,bf16,fp16", help="ours, separated by commas")
    parser.add_argument("--lora", help="train adapters of this rank over a frozen base")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", help="append every report to this file, one object per line")
    return parser.parse_args()


def run(command, environment=None):
    """The JSON object that a command prints last."""
    result = subprocess.run(command, env={**os.environ, **(environment or {})}, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"`{' '.join(command)}` failed with {result.returncode}:\n{result.stderr[-2000:]}")
    report = json.loads(result.stdout.strip().splitlines()[-1])
    if report["tokens_per_s"] is None:
        sys.exit(f"`{' '.join(command)}` applied no step")
    return report


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
    tuned = a.device == "cpu" and not a.plain_peer
    if tuned:
        # PyTorch's own switch: it aligns tensors of 2 MiB and more, and asks for huge pages, as our allocator does.
        environment |= {"LD_PRELOAD": ctypes.util.find_library("tcmalloc_minimal") or "", "THP_MEM_ALLOC_ENABLE": "1"}
    report = run(
        [a.python, a.peer, "--model", a.model, "--dtype", dtype, "--batch", batch, "--seq", seq]
        + ["--steps", str(a.steps), "--warmup", "2", "--threads", str(a.threads)]
        + (["--device", a.device] if a.device != "cpu" else [])
        + (["--lora", a.lora] if a.lora else [])
        + flags,
        environment,
    )
    if tuned and not report.get("tcmalloc"):
        sys.exit("the peer runs without tcmalloc: install libtcmalloc-minimal4, or give --plain-peer")
    return report


def best_flags(a, batch, seq, dtype):
    """The peer's fastest flags, by the median of three trials of each."""
    if a.plain_peer or a.peer_flags is not None:
        return (a.peer_flags or "").split()
    compiled = COMPILED if a.device == "cpu" else COMPILED_ON_GPU
    variants = [flags + padded for flags in compiled for padded in ([], ["--pad-vocab"])]
    trials = [[theirs(a, batch, seq, dtype, flags)["tokens_per_s"] for flags in variants] for _ in range(3)]
    return max(zip(map(statistics.median, zip(*trials)), variants))[1]


def compare(a, shape, dtype):
    batch, seq = shape.split("x")
    peer_dtype = a.peer_dtype or (PEER_DTYPE if a.device == "cpu" else PEER_DTYPE_ON_GPU)[dtype]
    flags = best_flags(a, batch, seq, peer_dtype)
    own = [dtype, WIDE_GRADIENTS[dtype]] if dtype in WIDE_GRADIENTS else [dtype]
    starts = [lambda policy=policy: ours(a, batch, seq, policy) for policy in own]
    starts.append(lambda: theirs(a, batch, seq, peer_dtype, flags))
    rounds = []
    for number in range(a.rounds):
        order = range(len(starts))[:: -1 if number % 2 else 1]
        reports = {side: starts[side]() for side in order}
        rounds.append(reports)
        if a.json:
            with open(a.json, "a", encoding="utf-8") as log:
                log.writelines(json.dumps(reports[side]) + "\n" for side in order)
    peer = len(own)
    median = lambda side, key: statistics.median(reports[side][key] for reports in rounds)
    skipped = lambda side: sum(reports[side].get("skipped", 0) for reports in rounds)
    memory = "peak_rss_mib" if a.device == "cpu" else "peak_device_mib"
    for side, policy in enumerate(own):
        ratios = [reports[side]["tokens_per_s"] / reports[peer]["tokens_per_s"] for reports in rounds]
        share = f"{100 * median(side, 'share_of_peak'):5.1f} %" if a.device == "cpu" else ""
        print(
            f"{shape:>7}  {dtype + (' g=f32' if side else ''):10} {median(side, 'tokens_per_s'):8.0f}  "
            f"{peer_dtype:9} {median(peer, 'tokens_per_s'):8.0f}  "
            f"{statistics.median(ratios):5.2f}  ({min(ratios):.2f}–{max(ratios):.2f})  {share:7}  "
            f"{median(side, memory):6.0f}  {median(peer, memory):6.0f}  {skipped(side):3} {skipped(peer):3}  {' '.join(flags)}",
            flush=True,
        )


def main():
    a = arguments()
    print("  shape  ours       tokens/s  peer      tokens/s  ratio  (spread)     of peak  MiB ours, peer  skipped  peer's flags")
    for dtype in a.dtypes.split(","):
        for shape in a.shapes.split(","):
            compare(a, shape, dtype)


if __name__ == "__main__":
    main()
