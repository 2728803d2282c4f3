#!/usr/bin/env python3
"""A training step of GPT-2 in PyTorch, written to be fast: the peer that `compare_torch.py` holds `finetune bench` against.

    benches/torch_step.py --model distilgpt2 --batch 32 --seq 32 --dtype bf16_amp --steps 5 [--device cuda] [--compile]

Random weights, random tokens, no dropout, fused AdamW with its state in FP32, and the loss in FP32. Prints one JSON object:
tokens a second by the median step, and the process's peak resident memory.
"""

import argparse
import json
import os
import resource
import statistics
import time

MODELS = {"tiny": (4, 128, 4, 257, 128), "distilgpt2": (6, 768, 12, 50257, 1024), "gpt2": (12, 768, 12, 50257, 1024)}
AUTOCAST = {"f32": None, "bf16_amp": "bfloat16", "f16_amp": "float16"}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", choices=MODELS, default="distilgpt2")
parser.add_argument("--dtype", choices=AUTOCAST, default="f32")
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--seq", type=int, default=32)
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--warmup", type=int, default=2)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--device", default="cpu", help="cpu or cuda")
parser.add_argument("--compile", action="store_true", help="with torch.compile")
args = parser.parse_args()
os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))

import torch  # noqa: E402  (reads the environment when it is loaded)
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

torch.set_num_threads(args.threads)
torch.manual_seed(0)
LAYERS, WIDTH, HEADS, VOCAB, CONTEXT = MODELS[args.model]


class Layer(nn.Module):
    """Attention and MLP, each behind a layer norm and around the residual stream."""

    def __init__(self):
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, seq, _ = x.shape
        heads = self.qkv(self.before_attention(x)).view(batch, seq, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, WIDTH))
        return x + self.down(functional.gelu(self.up(self.before_mlp(x)), approximate="tanh"))


class Model(nn.Module):
    """GPT-2 from token ids to the mean loss; the head shares the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def wait():
    """Until the device has nothing left to do."""
    if args.device != "cpu":
        torch.cuda.synchronize()


def main():
    model = Model().to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    scaler = torch.amp.GradScaler(args.device, enabled=args.dtype == "f16_amp")
    loss_of = torch.compile(model) if args.compile else model
    autocast = AUTOCAST[args.dtype]
    times = []
    for step in range(args.warmup + args.steps):
        ids = torch.randint(0, VOCAB, (args.batch, args.seq), device=args.device)
        wait()
        began = time.perf_counter()
        with torch.autocast(args.device, dtype=getattr(torch, autocast or "bfloat16"), enabled=autocast is not None):
            loss = loss_of(ids, ids.roll(-1, 1))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        wait()
        times.append(time.perf_counter() - began)
    seconds = statistics.median(times[args.warmup :])
    print(
        json.dumps(
            {
                "who": "torch",
                "torch": torch.__version__,
                "model": args.model,
                "dtype": args.dtype,
                "device": args.device,
                "compile": args.compile,
                "batch": args.batch,
                "seq": args.seq,
                "threads": args.threads,
                "tokens_per_s": round(args.batch * args.seq / seconds, 2),
                "step_ms": round(seconds * 1e3, 2),
                "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
            }
        )
    )


main()
