"""Makes the reference values of preference tuning: `preferences.json` and `preferences.safetensors`.

    python make_preferences.py

Losses and derivatives: every objective on log-probabilities with ties, margins of 100 nats and several `beta`, in FP64
with autograd. The formulas are those of the papers, with TRL's names and defaults, and use PyTorch's `logsigmoid` and
nothing of this project.

Models: pairs of a prompt with a chosen and a rejected answer, padded into one batch, on random models of other cases.
The reference's log-probabilities are given numbers. The file has each objective's loss, the metrics, and the gradient
of every parameter; for DPO also ten steps of AdamW.
"""

import json
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from make_families import in_double
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
MODELS = ["narrow", "families/llama", "families/gemma3"]
KINDS = ["dpo", "ipo", "hinge", "robust", "orpo", "simpo"]
DEFAULTS = {"beta": 0.1, "label_smoothing": 0.0, "simpo_gamma": 0.5, "desirable_weight": 1.0, "undesirable_weight": 1.0}
STEPS, LR, BETAS, EPS, DECAY = 10, 1e-3, (0.9, 0.95), 1e-8, 0.01


def log1mexp(x):
    return torch.log(-torch.expm1(x))


def pair(kind, settings, logp, reference, lengths):
    """The loss of pairs. `logp`, `reference` and `lengths` are [pairs, 2], the chosen answer first."""
    beta, smoothing = settings["beta"], settings["label_smoothing"]
    if kind in ("ipo", "orpo", "simpo"):
        logp, reference = logp / lengths, reference / lengths
    ratio = (logp - reference)[:, 0] - (logp - reference)[:, 1]
    if kind == "dpo":
        return -F.logsigmoid(beta * ratio) * (1 - smoothing) - F.logsigmoid(-beta * ratio) * smoothing
    if kind == "robust":
        loss = -F.logsigmoid(beta * ratio) * (1 - smoothing) + F.logsigmoid(-beta * ratio) * smoothing
        return loss / (1 - 2 * smoothing)
    if kind == "hinge":
        return torch.relu(1 - beta * ratio)
    if kind == "ipo":
        return (ratio - 1 / (2 * beta)) ** 2
    if kind == "simpo":
        logits = logp[:, 0] - logp[:, 1] - settings["simpo_gamma"] / beta
        return -F.logsigmoid(beta * logits) * (1 - smoothing) - F.logsigmoid(-beta * logits) * smoothing
    odds = (logp[:, 0] - logp[:, 1]) - (log1mexp(logp[:, 0]) - log1mexp(logp[:, 1]))
    return -logp[:, 0] - beta * F.logsigmoid(odds)


def kto(settings, logp, reference, desirable, kl):
    ratio, beta = logp - reference, settings["beta"]
    good = settings["desirable_weight"] * (1 - torch.sigmoid(beta * (ratio - kl)))
    bad = settings["undesirable_weight"] * (1 - torch.sigmoid(beta * (kl - ratio)))
    return torch.where(desirable, good, bad)


def losses():
    """Losses and derivatives of pairs and of single answers."""
    points = [([-5.0, -5.0], [-5.0, -5.0], [3, 3]), ([-20.0, -30.0], [-22.0, -21.0], [7, 4]), ([-9.5, -3.25], [-1.0, -8.0], [2, 9]),
              ([-1.0, -101.0], [-1.0, -1.0], [5, 6]), ([-101.0, -1.0], [-1.0, -1.0], [6, 5]), ([-300.0, -310.5], [-305.0, -307.0], [80, 60])]
    found = []
    for kind in KINDS:
        for beta in (0.01, 0.1, 1.0, 2.0):
            for smoothing in (0.0, 0.2) if kind in ("dpo", "robust", "simpo") else (0.0,):
                settings = DEFAULTS | {"beta": beta, "label_smoothing": smoothing}
                for logp, reference, lengths in points:
                    reads = kind in ("dpo", "ipo", "hinge", "robust")
                    x = torch.tensor([logp], dtype=torch.float64, requires_grad=True)
                    given = torch.tensor([reference if reads else [0.0, 0.0]], dtype=torch.float64)
                    loss = pair(kind, settings, x, given, torch.tensor([lengths]))[0]
                    loss.backward()
                    found.append({"kind": kind, "beta": beta, "label_smoothing": smoothing, "logp": logp, "reference": given[0].tolist(),
                                  "lengths": lengths, "loss": loss.item(), "slopes": x.grad[0].tolist()})
    single = []
    for beta in (0.1, 1.0):
        settings = DEFAULTS | {"beta": beta, "desirable_weight": 1.5, "undesirable_weight": 0.75}
        for logp, reference, kl in [(-5.0, -5.0, 0.0), (-9.0, -4.0, 1.25), (-1.0, -101.0, 0.5), (-101.0, -1.0, 0.5)]:
            for desirable in (True, False):
                x = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
                loss = kto(settings, x, reference, torch.tensor(desirable), kl)
                loss.backward()
                single.append({"beta": beta, "desirable_weight": 1.5, "undesirable_weight": 0.75, "logp": logp, "reference": reference,
                               "desirable": desirable, "kl": kl, "loss": loss.item(), "slope": x.grad.item()})
    return found, single


def sample_pairs(vocab):
    """Prompts with two answers each, of different lengths."""
    draw = random.Random(7)
    tokens = lambda count: [draw.randrange(vocab - 2) for _ in range(count)]
    return [(tokens(prompt), tokens(chosen), tokens(rejected)) for prompt, chosen, rejected in [(3, 4, 2), (1, 2, 6), (4, 1, 1)]]


def padded(pairs):
    """Inputs and labels of rows: a pair is two rows."""
    rows = [(prompt, answer) for prompt, chosen, rejected in pairs for answer in (chosen, rejected)]
    width = max(len(prompt) + len(answer) for prompt, answer in rows) - 1
    inputs, labels = torch.zeros(len(rows), width, dtype=torch.long), torch.full((len(rows), width), -100)
    for row, (prompt, answer) in enumerate(rows):
        whole = torch.tensor(prompt + answer)
        inputs[row, : len(whole) - 1] = whole[:-1]
        labels[row, len(prompt) - 1 : len(whole) - 1] = whole[len(prompt) :]
    return inputs, labels


def sequence_logps(model, inputs, labels):
    known = labels != -100
    logp = torch.log_softmax(model(input_ids=inputs, attention_mask=torch.ones_like(inputs)).logits, -1)
    of_labels = logp.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (of_labels * known).sum(-1).view(-1, 2), known.sum(-1).view(-1, 2)


def load(name):
    model = AutoModelForCausalLM.from_pretrained(HERE / name, attn_implementation="sdpa").double().eval()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            in_double(module)
    return model


def short(parameter):
    return parameter.removeprefix("transformer.").removeprefix("model.")


def main():
    pairs, single = losses()
    models, tensors = {}, {}
    for name in MODELS:
        model = load(name)
        samples = sample_pairs(model.config.vocab_size)
        inputs, labels = padded(samples)
        draw = random.Random(name)
        base = sequence_logps(model, inputs, labels)[0].detach()
        reference = base + torch.tensor([[draw.uniform(-3, 3) for _ in range(2)] for _ in base], dtype=torch.float64)
        found = {}
        for kind in KINDS:
            settings = DEFAULTS | {"beta": 2.0 if kind == "simpo" else 0.1, "label_smoothing": 0.1 if kind == "robust" else 0.0}
            model.zero_grad()
            logp, lengths = sequence_logps(model, inputs, labels)
            given = reference if kind in ("dpo", "ipo", "hinge", "robust") else torch.zeros_like(reference)
            loss = pair(kind, settings, logp, given, lengths).mean()
            loss.backward()
            # The metrics of IPO are sums, as in TRL.
            scale = lengths if kind in ("orpo", "simpo") else torch.ones_like(lengths)
            logps = logp.detach() / scale
            rewards = settings["beta"] * (logp.detach() - given) / scale
            found[kind] = {"beta": settings["beta"], "label_smoothing": settings["label_smoothing"], "loss": loss.item(),
                           "logps": logps.mean(0).tolist(), "rewards": rewards.mean(0).tolist(),
                           "accuracy": (rewards[:, 0] > rewards[:, 1]).double().mean().item()}
            for parameter, value in model.named_parameters():
                tensors[f"{name}/{kind}/{short(parameter)}"] = value.grad.float().contiguous()
        # KTO: the same rows as single answers, good and bad in turn. Each prompt with the previous row's answer, as far
        # as it fits into the batch, gives the estimate of the divergence.
        model.zero_grad()
        rows = [(prompt, answer) for prompt, chosen, rejected in samples for answer in (chosen, rejected)]
        room = [inputs.shape[1] - len(prompt) + 1 for prompt, _ in rows]
        others = [(prompt, rows[row - 1][1][: room[row]]) for row, (prompt, _) in enumerate(rows)]
        others = [(a[0], a[1], b[1]) if a[0] == b[0] else None for a, b in zip(others[::2], others[1::2])]
        with torch.no_grad():
            policy = sequence_logps(model, *padded(others))[0].flatten()
        references = policy + torch.tensor([draw.uniform(-3, 1) for _ in policy], dtype=torch.float64)
        kl = (policy - references).mean().clamp(min=0)
        logp = sequence_logps(model, inputs, labels)[0].flatten()
        loss = kto(DEFAULTS, logp, reference.flatten(), torch.tensor([True, False]).repeat(len(samples)), kl).mean()
        loss.backward()
        for parameter, value in model.named_parameters():
            tensors[f"{name}/kto/{short(parameter)}"] = value.grad.float().contiguous()
        completions = {"loss": loss.item(), "kl": kl.item(), "references": references.tolist()}
        model = load(name)
        decayed = [p for p in model.parameters() if p.dim() >= 2]
        others = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
        trajectory = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            logp, lengths = sequence_logps(model, inputs, labels)
            loss = pair("dpo", DEFAULTS, logp, base, lengths).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            trajectory.append(loss.item())
        models[name] = {"pairs": samples, "reference": reference.flatten().tolist(), "objectives": found, "base": base.flatten().tolist(),
                        "dpo_steps": trajectory, "kto": completions}
    adamw = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "max_grad_norm": 1.0}
    (HERE / "preferences.json").write_text(json.dumps({"pairs": pairs, "single": single, "adamw": adamw, "models": models}) + "\n")
    save_file(tensors, HERE / "preferences.safetensors")


if __name__ == "__main__":
    main()
