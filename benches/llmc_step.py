#!/usr/bin/env python3
"""A training step of GPT-2 by llm.c's CPU program, as a peer for `compare_torch.py`.

    LLMC=PATH benches/compare_torch.py --peer benches/llmc_step.py --plain-peer --model distilgpt2 --dtypes fp32 --shapes 4x64

PATH is a checkout of llm.c (github.com/karpathy/llm.c), whose `train_gpt2.c` is compiled with the flags of its
Makefile. It knows FP32 alone. Random weights, random tokens. Prints the JSON object that `torch_step.py` prints. Needs
a C compiler with OpenMP, and numpy.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile

import numpy

MODELS = {"tiny": (4, 128, 4, 257, 128), "distilgpt2": (6, 768, 12, 50257, 1024), "gpt2": (12, 768, 12, 50257, 1024)}
FLAGS = ["-Ofast", "-march=native", "-fno-finite-math-only", "-fopenmp", "-DOMP", "-w"]
STEPS = r"""
#define TESTING
#include "train_gpt2.c"

int main(int argc, char **argv) {
    int batch = atoi(argv[2]), seq = atoi(argv[3]), steps = atoi(argv[4]);
    GPT2 model;
    gpt2_build_from_checkpoint(&model, argv[1]);
    int *tokens = mallocCheck((batch * seq + 1) * sizeof(int));
    for (int step = 0; step < steps; step++) {
        for (int i = 0; i <= batch * seq; i++) tokens[i] = rand() % model.config.vocab_size;
        struct timespec start, end;
        clock_gettime(CLOCK_MONOTONIC, &start);
        gpt2_forward(&model, tokens, tokens + 1, batch, seq);
        gpt2_zero_grad(&model);
        gpt2_backward(&model);
        gpt2_update(&model, 1e-4f, 0.9f, 0.999f, 1e-8f, 0.0f, step + 1);
        clock_gettime(CLOCK_MONOTONIC, &end);
        fprintf(stderr, "%.9f\n", (end.tv_sec - start.tv_sec) + (end.tv_nsec - start.tv_nsec) / 1e9);
    }
}
"""

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", choices=MODELS, default="distilgpt2")
parser.add_argument("--dtype", choices=["f32"], default="f32")
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--seq", type=int, default=64)
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--warmup", type=int, default=2)
parser.add_argument("--threads", type=int, default=2)
args = parser.parse_args()


def write_weights(path):
    layers, width, heads, vocab, context = MODELS[args.model]
    padded = -(-vocab // 128) * 128
    header = numpy.zeros(256, numpy.int32)
    header[:8] = 20240326, 3, context, vocab, layers, heads, width, padded
    # The embeddings, twelve squares of matrices a layer, thirteen of vectors, and the last norm.
    parameters = (padded + context) * width + layers * (12 * width * width + 13 * width) + 2 * width
    weights = numpy.random.default_rng(0).standard_normal(parameters, numpy.float32) * 0.02
    with open(path, "wb") as file:
        file.write(header.tobytes())
        file.write(weights.tobytes())


with tempfile.TemporaryDirectory() as folder:
    weights, source, program = (os.path.join(folder, name) for name in ("weights.bin", "steps.c", "steps"))
    with open(source, "w", encoding="utf-8") as file:
        file.write(STEPS)
    subprocess.run(["cc", *FLAGS, f"-I{os.environ['LLMC']}", source, "-lm", "-o", program], check=True)
    write_weights(weights)
    command = [program, weights, str(args.batch), str(args.seq), str(args.warmup + args.steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    run = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    lines = run.stderr.read().splitlines()
    _, status, usage = os.wait4(run.pid, 0)
    if status:
        raise SystemExit("\n".join(lines))
    seconds = statistics.median(map(float, lines[args.warmup :]))
    figures = {
        "who": "llm.c",
        "model": args.model,
        "dtype": args.dtype,
        "batch": args.batch,
        "seq": args.seq,
        "threads": args.threads,
        "tokens_per_s": round(args.batch * args.seq / seconds, 2),
        "step_ms": round(seconds * 1e3, 3),
        "peak_rss_mib": round(usage.ru_maxrss / 1024, 1),
    }
    print(json.dumps(figures))
