#!/usr/bin/env python3
"""Compares the latency of `finetune bench --latency` with onnxruntime's, in FP32 and in INT8 by its dynamic quantizer,
and with llama.cpp's.

    benches/compare_latency.py MODEL --seq-len 128 --threads 2 --passes 200 --rounds 3

MODEL is a folder, run or checkpoint that `finetune export` can write as ONNX. Each round starts every program again,
one after the other, so that other work on the machine affects all of them. The script prints the medians of p50, p95
and p99 over the rounds. A forward pass computes the logits of all positions of one sequence, llama.cpp's those of the
last position. A token is the next one, with the KV cache; llama.cpp reports the mean of the next eight.

Needs Python with numpy, onnx and onnxruntime (`.ci/python-env` installs them). With the package
xllamacpp, llama.cpp is measured too, with an exported GGUF file of each type in `--gguf`.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time

import numpy
import onnxruntime
from onnxruntime.quantization import QuantType, quantize_dynamic

try:
    import xllamacpp
except ImportError:
    xllamacpp = None

WARM_UP = 3


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, a run or a checkpoint")
    parser.add_argument("--finetune", default="target/release/finetune", help="our program")
    parser.add_argument("--dtypes", default="fp32,bf16,fp16", help="ours, separated by commas")
    parser.add_argument("--gguf", default="fp16,bf16,q8_0", help="types of llama.cpp's files, separated by commas")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--passes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def ours(options, folder, dtype):
    command = [options.finetune, "bench", "--latency", str(options.passes), "--model", folder, "--device", "cpu"]
    command += ["--seq-len", str(options.seq_len), "--threads", str(options.threads), "--dtype", dtype]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return report["forward_ms"], report["token_ms"]


def timed(run):
    clock = time.perf_counter()
    run()
    return (time.perf_counter() - clock) * 1e3


def percentiles(times):
    """Percentiles of times of which the first are for warming up."""
    times = sorted(times[WARM_UP:])
    within = lambda percent: times[max(-(-len(times) * percent // 100), 1) - 1]
    return {"p50": within(50), "p95": within(95), "p99": within(99)}


class Peer:
    """A graph in onnxruntime."""

    def __init__(self, path, options, vocabulary):
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads, settings.inter_op_num_threads = options.threads, 1
        self.session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
        self.options = options
        self.ids = numpy.random.default_rng(1).integers(0, vocabulary, (1, options.seq_len))
        self.cached = [one for one in self.session.get_inputs() if one.name.startswith("past")]

    def feed(self, new, past):
        feed = {"input_ids": self.ids[:, :new]}
        for one in self.cached:
            # Free axes are the batch, which is 1, and the tokens of the past.
            free = [axis for axis, size in enumerate(one.shape) if not isinstance(size, int)]
            shape = [size if isinstance(size, int) else 1 for size in one.shape]
            shape[free[-1]] = past
            feed[one.name] = numpy.zeros(shape, numpy.float32)
        return feed

    def measure(self):
        length, runs = self.options.seq_len, range(WARM_UP + self.options.passes)
        whole, token = self.feed(length, 0), self.feed(1, length - 1)
        once = lambda feed: timed(lambda: self.session.run(["logits"], feed))
        return tuple(percentiles([once(feed) for _ in runs]) for feed in (whole, token))

    def logits(self):
        return self.session.run(["logits"], self.feed(self.options.seq_len, 0))[0]


class LlamaCpp:
    """A GGUF file in llama.cpp."""

    TOKENS = 8

    def __init__(self, path, options, vocabulary):
        params = xllamacpp.CommonParams()
        params.model.path = path
        params.n_ctx = options.seq_len + self.TOKENS
        params.n_parallel = 1
        params.verbosity = 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
        self.server = xllamacpp.Server(params)
        self.options = options
        self.ids = numpy.random.default_rng(1).integers(0, vocabulary, options.seq_len).tolist()

    def measure(self):
        request = {"prompt": self.ids, "n_predict": self.TOKENS, "ignore_eos": True, "cache_prompt": False, "temperature": 0}
        runs = [self.server.handle_completions(request)["timings"] for _ in range(WARM_UP + self.options.passes)]
        return tuple(percentiles([run[key] for run in runs]) for key in ("prompt_ms", "predicted_per_token_ms"))


def main():
    options = arguments()
    with tempfile.TemporaryDirectory() as scratch:
        folder, graph, small = (os.path.join(scratch, name) for name in ("model", "model.onnx", "int8.onnx"))
        for target in ([folder], [graph, "--kv-cache"]):
            subprocess.run([options.finetune, "export", options.model, *target], check=True, capture_output=True)
        quantize_dynamic(graph, small, weight_type=QuantType.QInt8)
        with open(os.path.join(folder, "config.json")) as file:
            vocabulary = json.load(file)["vocab_size"]
        peers = {name: Peer(path, options, vocabulary) for name, path in (("FP32", graph), ("INT8", small))}
        contenders = {f"finetune {dtype}": lambda dtype=dtype: ours(options, folder, dtype) for dtype in options.dtypes.split(",")}
        contenders |= {f"onnxruntime {name}": peer.measure for name, peer in peers.items()}
        for name in options.gguf.split(",") if xllamacpp else ():
            path = os.path.join(scratch, f"{name}.gguf")
            subprocess.run([options.finetune, "export", options.model, path, "--dtype", name], check=True, capture_output=True)
            contenders[f"llama.cpp {name}"] = LlamaCpp(path, options, vocabulary).measure
        rounds = {name: [] for name in contenders}
        for _ in range(options.rounds):
            for name, measure in contenders.items():
                rounds[name].append(measure())
        exact, rounded = peers["FP32"].logits(), peers["INT8"].logits()
        print(f"{options.seq_len} tokens, {options.threads} threads, {options.rounds} rounds of {options.passes}, milliseconds\n")
        print(f"{'':<18}{'pass p50':>10}{'p95':>9}{'p99':>9}{'token p50':>12}{'p95':>9}{'p99':>9}")
        for name, found in rounds.items():
            row = [statistics.median(one[what][share] for one in found) for what in (0, 1) for share in ("p50", "p95", "p99")]
            print(f"{name:<18}" + "".join(f"{value:>{width}.3f}" for value, width in zip(row, (10, 9, 9, 12, 9, 9))))
        distance = numpy.linalg.norm(rounded - exact) / numpy.linalg.norm(exact)
        print(f"\nonnxruntime {onnxruntime.__version__}. INT8 logits are {100 * distance:.2f} % of their norm away from FP32's.")


main()
