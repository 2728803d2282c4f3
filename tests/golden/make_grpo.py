"""Makes the reference values of GRPO: `grpo.json` and `grpo.safetensors`.

    python make_grpo.py

Two prompts with three completions each on random models of other cases, in FP64 with autograd. The log-probabilities of
the sampler and of training before the update are given numbers around the policy's, so that some ratios are clipped and
some completions left out. The reference is the model with all parameters multiplied by 0.9. The formulas are those of
the papers, with TRL's names and defaults. The file has each objective's loss and metrics, and the gradient of every
parameter.
"""

import json
import random
from pathlib import Path

import torch
from make_preferences import load, short
from safetensors.torch import save_file

HERE = Path(__file__).parent
MODELS = ["narrow", "families/llama", "families/gemma3"]
GROUP, LONGEST, REFERENCE = 3, 8, 0.9
SETTINGS = {
    "grpo": {"beta": 0.04, "epsilon": 0.2, "epsilon_high": 0.2, "cap": 5.0, "scale": True},
    "dr_grpo": {"beta": 0.0, "epsilon": 0.2, "epsilon_high": 0.2, "cap": 1.5, "scale": False},
    "dapo": {"beta": 0.1, "epsilon": 0.2, "epsilon_high": 0.28, "cap": 3.0, "scale": True},
}


def sample(vocab):
    """Prompts, each with completions of different lengths, and the rewards of these."""
    draw = random.Random(11)
    tokens = lambda count: [draw.randrange(vocab - 2) for _ in range(count)]
    prompts = [(tokens(3), [tokens(count) for count in (4, 1, 6)]), (tokens(1), [tokens(count) for count in (2, 5, 3)])]
    return prompts, [[1.0, 0.0, 0.25], [-2.0, 3.5, 0.0]]


def token_logps(model, rows):
    """The log-probabilities of the completions' tokens: one tensor per row."""
    found = []
    for prompt, answer in rows:
        whole = torch.tensor([prompt + answer])
        logp = torch.log_softmax(model(input_ids=whole[:, :-1]).logits[0], -1)
        found.append(logp[len(prompt) - 1 :].gather(-1, whole[0, len(prompt) :].unsqueeze(-1)).squeeze(-1))
    return found


def main():
    models, tensors = {}, {}
    for name in MODELS:
        model, reference = load(name), load(name)
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter *= REFERENCE
        prompts, rewards = sample(model.config.vocab_size)
        rows = [(prompt, answer) for prompt, answers in prompts for answer in answers]
        draw = random.Random(name)
        with torch.no_grad():
            policy, given = token_logps(model, rows), token_logps(reference, rows)
        near = lambda spread: [[logp + draw.uniform(-spread, spread) for logp in row.tolist()] for row in policy]
        old, sampled = near(0.5), near(0.3)
        found = {}
        for kind, s in SETTINGS.items():
            model.zero_grad()
            losses, kls, clipped = [], [], []
            for row, logp in enumerate(token_logps(model, rows)):
                of_group = torch.tensor(rewards[row // GROUP], dtype=torch.float64)
                advantage = of_group[row % GROUP] - of_group.mean()
                if s["scale"]:
                    advantage = advantage / (of_group.std() + 1e-4)
                before, sampler = torch.tensor(old[row], dtype=torch.float64), torch.tensor(sampled[row], dtype=torch.float64)
                ratio = torch.exp(logp - before)
                bounded = ratio.clamp(1 - s["epsilon"], 1 + s["epsilon_high"])
                of_sampling = torch.exp((before - sampler).sum())
                loss = -torch.min(ratio * advantage, bounded * advantage) * (of_sampling if of_sampling <= s["cap"] else 0.0)
                distance = given[row] - logp
                kl = ratio * (torch.exp(distance) - distance - 1)
                losses.append(loss + s["beta"] * kl if s["beta"] else loss)
                kls.append(kl.detach())
                clipped.append(((ratio < 1 - s["epsilon"]) & (advantage < 0)) | ((ratio > 1 + s["epsilon_high"]) & (advantage > 0)))
            if kind == "grpo":
                total = torch.stack([loss.mean() for loss in losses]).mean()
            else:
                count = len(rows) * LONGEST if kind == "dr_grpo" else sum(len(loss) for loss in losses)
                total = torch.cat(losses).sum() / count
            total.backward()
            found[kind] = {**s, "loss": total.item(), "kl": torch.cat(kls).mean().item(), "clip_ratio": torch.cat(clipped).double().mean().item()}
            for parameter, value in model.named_parameters():
                tensors[f"{name}/{kind}/{short(parameter)}"] = value.grad.float().contiguous()
        models[name] = {"prompts": prompts, "rewards": rewards, "old": old, "sampled": sampled, "objectives": found}
    (HERE / "grpo.json").write_text(json.dumps({"reference": REFERENCE, "longest": LONGEST, "models": models}) + "\n")
    save_file(tensors, HERE / "grpo.safetensors")


main()
