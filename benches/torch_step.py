#!/usr/bin/env python3
"""A training step in PyTorch, of GPT-2 written to be fast or of transformers' models: the peer that `compare_torch.py`
holds `finetune bench` against.

    benches/torch_step.py --model distilgpt2 --batch 32 --seq 32 --dtype bf16_amp --steps 5
    benches/torch_step.py --model smollm2-135m --batch 8 --seq 128 --dtype bf16_amp
    benches/torch_step.py --model smollm2-135m --batch 4 --seq 256 --dtype bf16_amp --lora 16
    benches/torch_step.py --device cuda --pad-vocab --compile --compile-mode reduce-overhead

Random weights, random tokens, no dropout, fused AdamW with its state in FP32, and the loss in FP32. Prints one JSON
object. The rate is the median of the steps that the gradient scaler did not skip. On a GPU, events on its stream time
the steps, so the host never waits for the device between steps.
"""

import argparse
import json
import os
import re
import resource
import statistics
import time

MODELS = {"tiny": (4, 128, 4, 257, 128), "distilgpt2": (6, 768, 12, 50257, 1024), "gpt2": (12, 768, 12, 50257, 1024)}
# Models of transformers: the name of its classes, and the configuration where it differs from `hugging_face`.
HUGGING_FACE = {
    "smollm2-135m": (
        "Llama",
        {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152},
    ),
    "llama3.2-1b": (
        "Llama",
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    ),
    "qwen2.5-0.5b": (
        "Qwen2",
        {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936},
    ),
    "qwen3-0.6b": (
        "Qwen3",
        {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    ),
    "gemma3-270m": (
        "Gemma3",
        {"hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "sliding_window": 512},
    ),
}  # fmt: skip
AUTOCAST = {"f32": None, "bf16_amp": "bfloat16", "f16_amp": "float16"}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", choices=[*MODELS, *HUGGING_FACE], default="distilgpt2")
parser.add_argument("--dtype", choices=AUTOCAST, default="f32")
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--seq", type=int, default=32)
parser.add_argument("--grad-accum", type=int, default=1, help="batches in a step")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--warmup", type=int, default=2)
parser.add_argument("--rounds", type=int, default=0, help="measure this often, each time after a line of standard input")
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--device", default="cpu", help="cpu or cuda")
parser.add_argument("--impl", choices=("nano", "hf"), default="nano", help="the model below, or transformers' own")
parser.add_argument("--lora", type=int, metavar="R", help="train PEFT's adapters of this rank at every linear layer, over a frozen base")
parser.add_argument("--frozen-dtype", choices=("f32", "bf16"), default="bf16", help="the type of the frozen base, with --lora")
parser.add_argument("--pad-vocab", action="store_true", help="fill the vocabulary up to a multiple of 64")
parser.add_argument("--compile", action="store_true", help="with torch.compile")
parser.add_argument("--compile-mode", choices=("default", "reduce-overhead", "max-autotune"), default="default")
args = parser.parse_args()
os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))

import torch  # noqa: E402  (reads the environment when it is loaded)
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

torch.set_num_threads(args.threads)
torch.manual_seed(0)
if args.model in HUGGING_FACE:
    FAMILY, SIZES = HUGGING_FACE[args.model]
    TOKENS = SIZES["vocab_size"]
else:
    LAYERS, WIDTH, HEADS, TOKENS, CONTEXT = MODELS[args.model]
VOCAB = (TOKENS + 63) // 64 * 64 if args.pad_vocab else TOKENS
ON_GPU = args.device != "cpu"
# A loss scale that seldom overflows.
SCALE = 2.0**14
if ON_GPU:
    # FP32 products may then use the tensor cores, as most users let them.
    torch.set_float32_matmul_precision("high")


class Layer(nn.Module):
    """Attention and MLP, each after a layer norm and added to the residual stream."""

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


def build():
    """The model on the device, and the mean loss as a function of ids and targets."""
    if args.model in HUGGING_FACE:
        return hugging_face()
    if args.impl == "nano":
        model = Model().to(args.device)
        return model, model
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "vocab_size": VOCAB, "n_positions": CONTEXT}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **rates, use_cache=False, attn_implementation="sdpa")).to(args.device).train()
    return model, lambda ids, _: model(input_ids=ids, labels=ids).loss


def hugging_face():
    """A model of transformers with random weights, and the mean loss."""
    import transformers

    names = ("Gemma3TextConfig", "Gemma3ForCausalLM") if FAMILY == "Gemma3" else (f"{FAMILY}Config", f"{FAMILY}ForCausalLM")
    config, model = (getattr(transformers, name) for name in names)
    shape = {**SIZES, "vocab_size": VOCAB}
    config = config(**shape, tie_word_embeddings=True, use_cache=False, attn_implementation="sdpa")
    model = model(config).to(args.device).train()
    return model, lambda ids, _: model(input_ids=ids, labels=ids).loss


def adapted(model):
    """The model with PEFT's adapters in FP32, and the mean loss as a function of ids and targets."""
    from peft import LoraConfig, get_peft_model

    if args.dtype != "f32" and args.frozen_dtype == "bf16":
        # So that autocast does not convert the frozen weights in every step.
        model = model.to(torch.bfloat16)
    config = LoraConfig(r=args.lora, lora_alpha=2 * args.lora, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model, lambda ids, _: model(input_ids=ids, labels=ids).loss


def mark():
    """A point in time: an event on the GPU's stream, or seconds."""
    if not ON_GPU:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def main():
    model, loss_of = build()
    if args.lora:
        if args.model in MODELS and args.impl != "hf":
            parser.error("--lora is for transformers' models: name another, or add --impl hf")
        model, loss_of = adapted(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    scaler = torch.amp.GradScaler(args.device, init_scale=SCALE, enabled=args.dtype == "f16_amp")
    if args.compile:
        loss_of = torch.compile(loss_of, mode=args.compile_mode)
    autocast = AUTOCAST[args.dtype]

    def run(count):
        """The steps' times, and the loss scale after each."""
        steps, scales = [], []
        for _ in range(count):
            batches = torch.randint(0, TOKENS, (args.grad_accum, args.batch, args.seq), device=args.device)
            began = mark()
            for ids in batches:
                with torch.autocast(args.device, dtype=getattr(torch, autocast or "bfloat16"), enabled=autocast is not None):
                    loss = loss_of(ids, ids.roll(-1, 1))
                scaler.scale(loss / args.grad_accum).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            steps.append((began, mark()))
            # A copy on the device: to read the scale here would wait for the step.
            scales.append(scaler._scale.clone() if scaler.is_enabled() else SCALE)
        if ON_GPU:
            torch.cuda.synchronize()
        return steps, scales, float(loss.detach())

    scale = run(args.warmup)[1][-1] if args.warmup else SCALE
    for _ in range(max(1, args.rounds)):
        if args.rounds:
            if ON_GPU:
                torch.cuda.empty_cache()
            print("ready", flush=True)
            input()
        steps, scales, loss = run(args.steps)
        report(steps, [scale, *scales], loss)
        scale = scales[-1]


def report(steps, scales, loss):
    """Prints the figures of some steps; `scales` are the loss scales before each, and after the last."""
    # The scale falls after a skipped step, and too few steps are run for it to grow.
    applied = [after >= before for before, after in zip(scales, scales[1:])]
    times = [began.elapsed_time(ended) / 1e3 if ON_GPU else ended - began for (began, ended), whole in zip(steps, applied) if whole]
    if not times:
        raise SystemExit("the gradient scaler skipped every measured step; raise --warmup")
    seconds = statistics.median(times)
    figures = {
        "who": "torch",
        "torch": torch.__version__,
        "model": args.model,
        "impl": "hf" if args.model in HUGGING_FACE else args.impl,
        "dtype": args.dtype,
        "lora": args.lora,
        "device": torch.cuda.get_device_name() if ON_GPU else args.device,
        "compile": args.compile_mode if args.compile else None,
        "padded_vocab": args.pad_vocab,
        "batch": args.batch,
        "seq": args.seq,
        "grad_accum": args.grad_accum,
        "threads": args.threads,
        "tokens_per_s": round(args.grad_accum * args.batch * args.seq / seconds, 2),
        "step_ms": round(seconds * 1e3, 3),
        "skipped": args.steps - len(times),
        "loss_last": loss,
        "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "huge_pages_mib": int(re.search(r"AnonHugePages:\s+(\d+)", read("/proc/self/smaps_rollup"))[1]) // 1024,
        "tcmalloc": "/libtcmalloc" in read("/proc/self/maps"),
        "peak_device_mib": round(torch.cuda.max_memory_allocated() / 2**20, 1) if ON_GPU else None,
    }
    print(json.dumps(figures), flush=True)


main()
