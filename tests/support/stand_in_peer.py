#!/usr/bin/env python3
"""A stand-in for benches/torch_step.py that computes nothing: it takes the same flags and prints figures of the same form, made
up so that each mode is faster than the one before. `.ci/gpu --emulate` tries its choice of peers, its table and its budget with
it. No figure of it is a measurement, and each object says so."""

import argparse
import json

parser = argparse.ArgumentParser()
for flag in ("--model", "--dtype", "--device", "--impl"):
    parser.add_argument(flag)
for flag in ("--batch", "--seq", "--steps", "--warmup", "--threads"):
    parser.add_argument(flag, type=int)
parser.add_argument("--pad-vocab", action="store_true")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--compile-mode", default="default")
args = parser.parse_args()

mode = "reduce-overhead" if args.compile and args.compile_mode != "default" else "compile" if args.compile else args.impl
rate = {"hf": 100, "nano": 110, "compile": 150, "reduce-overhead": 160}[mode] + 5 * args.pad_vocab
figures = {"who": "stand-in", "torch": "none: a stand-in", "device": "none", "tokens_per_s": rate, "step_ms": 1.0}
print("what a program prints before its result")
print(json.dumps({**figures, "peak_rss_mib": 1.0, "peak_device_mib": 1000.0 + 10 * args.pad_vocab}))
