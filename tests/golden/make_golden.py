#!/usr/bin/env python3
"""Reference values from PyTorch and transformers for `tests/engine/parity.rs`.

    python tests/golden/make_golden.py            # every case below, in this folder
    python tests/golden/make_golden.py narrow     # one of them

A case is a random GPT-2, twenty batches, and PyTorch's results. Parameter names are the project's: transformers' names
without the prefix `transformer.`. A case's folder contains

config.json, model.safetensors   the model before training, as transformers saves it
reference.safetensors            inputs, targets  [20,B,T] i64; a target of -100 is ignored
                                 logits           [B,T,V] f32 of batch 0
                                 grad.<name>      f32, of batch 0's mean loss over the targets not ignored
                                 final.<name>     f32, the parameters after twenty AdamW steps
trajectory.json                  settings of the optimizer and the scaler; `fp32` and `fp16`: loss, gradient norm before
                                 clipping, scale and whether the step was skipped, for each of the twenty steps;
                                 `spread`: how far PyTorch's own FP32 run is from its FP64 run

Logits, gradients and final parameters come from a run in FP64 and are rounded once, so that a difference from them is
the error of the program under test and not PyTorch's. `spread` is the error that an FP32 program may have.
The FP16 run is autocast with GradScaler; it starts at a scale that overflows, so that skipped steps are part of it.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

STEPS = 20
IGNORED = -100
ADAMW = {"lr": 4e-3, "betas": [0.9, 0.98], "eps": 1e-7, "weight_decay": 0.05, "max_grad_norm": 0.8}
SCALER = {"init_scale": 2.0**22, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 5}


@dataclass(frozen=True)
class Case:
    """One shape, chosen for what it can catch."""

    layers: int
    width: int
    heads: int
    vocab: int
    context: int
    batch: int
    seq: int
    seed: int
    tied: bool = True
    padded: bool = False
    spread: float = 0.08  # standard deviation of the weights: far from uniform attention, near enough to train

    def config(self):
        return GPT2Config(
            n_layer=self.layers, n_embd=self.width, n_head=self.heads, vocab_size=self.vocab, n_positions=self.context,
            initializer_range=self.spread, tie_word_embeddings=self.tied, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=self.vocab - 1, eos_token_id=self.vocab - 1)

    def model(self):
        """The initial model; every call gives the same one."""
        torch.manual_seed(self.seed)
        model = GPT2LMHeadModel(self.config())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:  # a bias of 0 or a gain of 1 would hide that it was left out
                    parameter += 0.1 * torch.randn_like(parameter)
        return model

    def batches(self):
        """Inputs and targets: a noisy walk over the vocabulary, so that there is something to learn."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        shape = (STEPS, self.batch, self.seq + 1)
        steps = torch.randint(1, 4, shape, generator=generator)
        steps[..., 0] = torch.randint(0, self.vocab, shape[:2], generator=generator)
        tokens = steps.cumsum(-1) % self.vocab
        inputs, targets = tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()
        if self.padded:  # rows of different lengths, one of them empty
            for row in range(self.batch):
                targets[:, row, self.seq - row * self.seq // (self.batch - 1):] = IGNORED
        return inputs, targets


CASES = {
    # Nothing is a multiple of a vector's or a tile's length: width 24, head 8, sequence 11, vocabulary 50.
    "narrow": Case(layers=1, width=24, heads=3, vocab=50, context=16, batch=3, seq=11, seed=11),
    # A sequence longer than any tile of the attention, and odd.
    "long": Case(layers=1, width=32, heads=2, vocab=48, context=160, batch=2, seq=131, seed=12),
    # One head of size 64, as GPT-2 has them.
    "head64": Case(layers=1, width=64, heads=1, vocab=80, context=32, batch=3, seq=24, seed=13),
    # A separate head and targets to ignore.
    "untied": Case(layers=2, width=32, heads=2, vocab=61, context=24, batch=4, seq=18, seed=14, tied=False, padded=True),
    # Three layers and a byte's vocabulary.
    "deep": Case(layers=3, width=32, heads=1, vocab=257, context=40, batch=4, seq=33, seed=15, spread=0.06),
}


def loss_of(model, inputs, targets):
    logits = model(inputs).logits
    if logits.dtype == torch.float16:
        logits = logits.float()
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED), logits


def named(model):
    return {name.removeprefix("transformer."): parameter for name, parameter in model.named_parameters()}


def first_gradients(case, dtype):
    model = case.model().to(dtype)
    inputs, targets = case.batches()
    loss, logits = loss_of(model, inputs[0], targets[0])
    loss.backward()
    return logits.detach(), by_expert({name: parameter.grad for name, parameter in named(model).items()})


def train(case, dtype, fp16=False):
    """Twenty steps of PyTorch's recipe; the parameters afterwards and what happened at each step."""
    model = case.model().to(dtype)
    parameters = list(model.parameters())
    # The biases of all experts are one matrix.
    decayed = [p for name, p in model.named_parameters() if p.dim() >= 2 and not name.endswith("_bias")]
    others = [p for name, p in model.named_parameters() if p.dim() < 2 or name.endswith("_bias")]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": ADAMW["weight_decay"]}, {"params": others, "weight_decay": 0.0}],
        lr=ADAMW["lr"], betas=tuple(ADAMW["betas"]), eps=ADAMW["eps"])
    scaler = torch.amp.GradScaler("cpu", enabled=fp16, **SCALER)
    history = []
    for inputs, targets in zip(*case.batches()):
        with torch.autocast("cpu", dtype=torch.float16, enabled=fp16):
            loss, _ = loss_of(model, inputs, targets)
        scale = scaler.get_scale()
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(parameters, ADAMW["max_grad_norm"]).item()
        skipped = not torch.isfinite(torch.tensor(norm)).item()
        scaler.step(optimizer)
        scaler.update()
        history.append({"loss": loss.item(), "norm": None if skipped else norm, "scale": scale, "skipped": skipped})
    return by_expert({name: parameter.detach() for name, parameter in named(model).items()}), history


def relative(value, truth):
    return ((value.double() - truth).norm() / truth.norm().clamp_min(1e-300)).item()


def by_expert(tensors):
    """Stacked matrices of experts under the names of single ones, as finetune has them."""
    single = {}
    biased = any(name.endswith("experts.down_proj_bias") for name in tensors)
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".")
        if not prefix.endswith("experts"):
            single[name.replace("moe.router.weight", "moe.router.layer.weight")] = tensor
            continue
        for i, matrix in enumerate(tensor):
            if biased:
                kind = "bias" if last.endswith("_bias") else "weight"
                single[f"{prefix}.{last.removesuffix('_bias')}.{i}.{kind}"] = matrix
            elif "block_sparse_moe" in prefix:
                kind = "output" if last == "down_proj" else "input"
                single[f"{prefix.removesuffix('.experts')}.{kind}_linear.{i}.weight"] = matrix
            elif last == "down_proj":
                single[f"{prefix}.{i}.down_proj.weight"] = matrix
            else:
                gate, up = matrix.chunk(2)
                single |= {f"{prefix}.{i}.gate_proj.weight": gate, f"{prefix}.{i}.up_proj.weight": up}
    return single


def key_bias_apart(tensors):
    """The key third of `c_attn.bias` under a name of its own: softmax does not see it, its gradient is rounding noise."""
    apart = {}
    for name, tensor in tensors.items():
        if name.endswith("c_attn.bias"):
            query, key, value = tensor.chunk(3)
            apart[name] = torch.cat([query, value])
            apart[f"{name}[key]"] = key
        else:
            apart[name] = tensor
    return apart


def spreads(single, double):
    single, double = key_bias_apart(single), key_bias_apart(double)
    return {name: relative(single[name], double[name]) for name in double}


def make(name, case, folder):
    folder.mkdir(parents=True, exist_ok=True)
    model = case.model()
    model.config.to_json_file(folder / "config.json")
    # save_pretrained knows which tensors are tied; its generation_config.json is of no use here.
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)

    inputs, targets = case.batches()
    logits, grads = first_gradients(case, torch.float64)
    logits32, grads32 = first_gradients(case, torch.float32)
    final, _ = train(case, torch.float64)
    final32, fp32 = train(case, torch.float32)
    _, fp16 = train(case, torch.float32, fp16=True)

    reference = {"inputs": inputs, "targets": targets, "logits": logits}
    reference |= {f"grad.{key}": value for key, value in grads.items()}
    reference |= {f"final.{key}": value for key, value in final.items()}
    reference = {key: value.float() if value.is_floating_point() else value for key, value in reference.items()}
    save_file({key: value.contiguous().clone() for key, value in reference.items()}, folder / "reference.safetensors")

    grad_spread, final_spread = spreads(grads32, grads), spreads(final32, final)
    trajectory = {
        "torch": torch.__version__, "transformers": transformers.__version__, "adamw": ADAMW, "scaler": SCALER,
        "spread": {"logits": (logits32.double() - logits).abs().max().item(), "grad": grad_spread, "final": final_spread},
        "fp32": fp32, "fp16": fp16}
    (folder / "trajectory.json").write_text(json.dumps(trajectory, indent=1) + "\n")

    def worst(spread):
        return max((value, key) for key, value in spread.items() if not key.endswith("[key]"))

    seen = {key: grad[grad != 0] for key, grad in grads.items() if not key.endswith("c_attn.bias")}
    least = min(grad.abs().min().item() for grad in seen.values() if grad.numel() > 0)
    skipped = [step for step, row in enumerate(fp16) if row["skipped"]]
    print(f"{name}: loss {fp32[0]['loss']:.4f} to {fp32[-1]['loss']:.4f}, fp16 {fp16[-1]['loss']:.4f} skipped {skipped}, "
          f"norm {fp32[0]['norm']:.2f}, logits {trajectory['spread']['logits']:.1e}, "
          f"grad {worst(grad_spread)}, final {worst(final_spread)}, smallest gradient {least:.1e}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for name in sys.argv[1:] or CASES:
        make(name, CASES[name], Path(__file__).parent / name)
