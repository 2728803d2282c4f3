"""Makes `balanced.safetensors` and `balanced.json`: the load-balancing loss of the mixtures under `families/` by
transformers.

    python make_balanced.py

Each case has two micro-batches of rows with padding at the end, which the attention mask leaves out. Its loss is the
mean cross-entropy over all targets, plus the mean of the micro-batches' auxiliary losses, times a large coefficient.
For each case `C`:

C.inputs, C.labels       [micro-batch, row, column]; -100 is no target
C.lengths                [micro-batch, row], columns without padding
C.grad.<name>            gradients in FP64, under the project's names

`balanced.json` has the coefficient, and each case's loss and auxiliary losses.
"""

import json
from pathlib import Path

import torch
import transformers
from make_families import attention_of, in_double, router_in_double, softmax_in_double
from make_golden import by_expert
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent
CASES = ["olmoe", "qwen3-moe", "granitemoe", "gpt-oss"]
COEFFICIENT = 0.5


def model_of(name):
    folder = HERE / "families" / name
    config = AutoConfig.from_pretrained(folder, output_router_logits=True, router_aux_loss_coef=COEFFICIENT)
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation=attention_of(config),
        experts_implementation="eager").double().train()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            in_double(module)
        if type(module).__name__.endswith("TopKRouter"):
            router_in_double(module)
    return model


def case(name, seed, tensors):
    torch.manual_seed(seed)
    model = model_of(name)
    vocabulary, columns = model.config.vocab_size, 11
    lengths = torch.tensor([[11, 4], [7, 9]])
    tokens = torch.randint(0, vocabulary, (2, 2, columns + 1))
    real = torch.arange(columns) < lengths[..., None]
    inputs = tokens[..., :-1] * real
    labels = tokens[..., 1:].masked_fill(~real, -100)
    labels[:, :, 1] = -100  # a prompt: in the auxiliary loss, but no target
    count, loss, auxiliary = (labels != -100).sum(), 0, []
    for ids, targets, mask in zip(inputs, labels, real):
        out = model(input_ids=ids, attention_mask=mask.long())
        auxiliary.append(out.aux_loss)
        loss = loss + torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), targets.flatten(), reduction="sum") / count
    loss = loss + COEFFICIENT * sum(auxiliary) / len(auxiliary)
    loss.backward()
    gradients = {key.removeprefix("model."): value.grad for key, value in model.named_parameters()}
    tensors |= {f"{name}.inputs": inputs, f"{name}.labels": labels, f"{name}.lengths": lengths}
    tensors |= {f"{name}.grad.{key}": value.float().contiguous() for key, value in by_expert(gradients).items()}
    return {"loss": loss.item(), "auxiliary": [value.item() for value in auxiliary]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    softmax_in_double()
    transformers.logging.set_verbosity_error()
    tensors = {}
    cases = {name: case(name, 400 + seed, tensors) for seed, name in enumerate(CASES)}
    save_file(tensors, HERE / "balanced.safetensors")
    about = {"torch": torch.__version__, "transformers": transformers.__version__, "coefficient": COEFFICIENT, "cases": cases}
    (HERE / "balanced.json").write_text(json.dumps(about, indent=1) + "\n")
    print(json.dumps(cases))
