"""Makes the reference values under `lora/`: PEFT's adapters over the models of the other folders, with PyTorch's
results.

    python make_lora.py [case ...]

A case's folder contains

adapter_config.json, adapter_model.safetensors   the adapter before training, as PEFT saves it; B is not zero
reference.safetensors                            logits [B,T,V] f32, `grad.<name>`, `final.<name>` as in
                                                 `make_golden.py`, of what is trained; the base's batches
trajectory.json                                  `base`, the folder of the base; the rest as in `make_golden.py`

Names are the project's: PEFT's without `base_model.model.`, the adapter's name and the family's prefix.
"""

import json
import sys
from pathlib import Path

import make_golden
import peft
import torch
import transformers
from make_families import attention_of, in_double, softmax_in_double
from make_golden import ADAMW, SCALER, spreads
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent

CASES = {
    # Conv1D, the packed product, a head that is trained as it is.
    "gpt2": ("untied", {"target_modules": ["c_attn", "c_proj", "c_fc"], "modules_to_save": ["lm_head"]}),
    "gpt2-dora": ("untied", {"target_modules": ["c_attn", "mlp.c_proj"], "use_dora": True}),
    # A part of a packed product; norms that are trained as they are.
    "llama-rslora": ("families/llama", {"target_modules": ["q_proj", "v_proj", "up_proj"], "use_rslora": True,
                                        "modules_to_save": ["input_layernorm", "model.norm"]}),
    # Biases under DoRA.
    "llama-biases-dora": ("families/llama-biases", {"target_modules": "all-linear", "use_dora": True}),
    "qwen3": ("families/qwen3", {"target_modules": "all-linear", "modules_to_save": ["q_norm"]}),
    "qwen3-dora": ("families/qwen3", {"target_modules": ["k_proj", "v_proj", "o_proj", "gate_proj"], "use_dora": True,
                                      "use_rslora": True}),
    "gemma3": ("families/gemma3", {"target_modules": "all-linear"}),
    "gemma3-dora": ("families/gemma3", {"target_modules": "all-linear", "use_dora": True}),
    "smollm3": ("families/smollm3-window", {"target_modules": "all-linear"}),
    "olmo2": ("families/olmo2", {"target_modules": "all-linear"}),
    "granite-dora": ("families/granite", {"target_modules": "all-linear", "use_dora": True}),
    "phi3": ("families/phi3", {"target_modules": "all-linear"}),
    # Families whose other cases train all weights.
    "mistral": ("families/mistral", {"target_modules": ["q_proj", "k_proj", "o_proj", "down_proj"]}),
    "qwen2": ("families/qwen2", {"target_modules": "all-linear"}),
    "olmo3": ("families/olmo3", {"target_modules": "all-linear"}),
    "granite4": ("families/granite4", {"target_modules": "all-linear"}),
    "gemma2": ("families/gemma2", {"target_modules": "all-linear"}),
    "ministral3": ("families/ministral3", {"target_modules": "all-linear"}),
    # Frozen experts.
    "olmoe": ("families/olmoe", {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}),
    # Routers and experts, and one of the experts' parameters alone.
    "olmoe-experts": ("families/olmoe", {"target_modules": ["q_proj", "o_proj"], "target_parameters": [
        "experts.gate_up_proj", "experts.down_proj", "gate.weight"]}),
    "granitemoe": ("families/granitemoe", {"target_modules": ["v_proj"], "target_parameters": [
        "experts.down_proj", "router.weight"]}),
    "qwen3-moe": ("families/qwen3-moe", {"target_modules": [], "target_parameters": ["experts.gate_up_proj"],
                                         "use_rslora": True}),
    # Attention, routers and experts, with their biases and sinks frozen.
    "gpt-oss": ("families/gpt-oss", {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "target_parameters": [
        "experts.gate_up_proj", "experts.down_proj", "router.weight"]}),
    # Products around convolutions, and the convolutions as they are.
    "lfm2": ("families/lfm2", {"target_modules": "all-linear", "modules_to_save": ["conv.conv"]}),
    # All products around a gated delta rule, and its norm as it is.
    "qwen3_5": ("families/qwen3_5", {"target_modules": "all-linear", "modules_to_save": ["linear_attn.norm"]}),
}

# Where another seed would have PyTorch's own FP32 run end 1e-5 from its FP64 run, BF16 choose other experts, or half
# precision round gradients by more than 6e-3 and 5e-2; of `qwen3_5` PyTorch's own do with many seeds.
SEEDS = {"gpt2-dora": 261, "olmo3": 171, "gemma2": 276, "qwen3-moe": 301, "qwen3_5": 290}


class Case:
    """A base with its batches, and the adapter over it; every call of `model` gives the same one."""

    def __init__(self, base, keys, seed):
        self.base, self.keys, self.seed = HERE / base, keys, seed

    def model(self):
        attention = attention_of(AutoConfig.from_pretrained(self.base))
        model = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32, attn_implementation=attention,
                                                     experts_implementation="eager")
        torch.manual_seed(self.seed)
        config = LoraConfig(r=3, lora_alpha=5, lora_dropout=0.0, task_type="CAUSAL_LM", init_lora_weights=False,
                            **self.keys)
        model = get_peft_model(model, config)
        model.peft_config["default"].base_model_name_or_path = self.base.name
        in_double(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(0.1 * torch.randn_like(parameter))
                if "lora_magnitude" in name:  # a length that is the base's own would hide that it was left out
                    parameter *= 1 + 0.2 * torch.randn_like(parameter)
        return model

    def batches(self):
        reference = load_file(self.base / "reference.safetensors")
        return reference["inputs"], reference["targets"]


def project_name(name):
    name = name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
    name = name.replace(".lora_magnitude_vector.default.weight", ".lora_magnitude_vector").replace(".default", "")
    return name.removeprefix("transformer.").removeprefix("model.")


def named(model):
    return {project_name(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def make(name, case, folder):
    make_golden.named = named
    folder.mkdir(parents=True, exist_ok=True)
    case.model().save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    inputs, targets = case.batches()
    logits, grads = make_golden.first_gradients(case, torch.float64)
    logits32, grads32 = make_golden.first_gradients(case, torch.float32)
    final, _ = make_golden.train(case, torch.float64)
    final32, fp32 = make_golden.train(case, torch.float32)
    reference = {"logits": logits}
    reference |= {f"grad.{key}": value for key, value in grads.items()}
    reference |= {f"final.{key}": value for key, value in final.items()}
    save_file({key: value.float().contiguous().clone() for key, value in reference.items()},
              folder / "reference.safetensors")
    grad_spread, final_spread = spreads(grads32, grads), spreads(final32, final)
    trajectory = {
        "torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__,
        "base": case.base.relative_to(HERE).as_posix(), "adamw": ADAMW, "scaler": SCALER,
        "spread": {"logits": (logits32.double() - logits).abs().max().item(), "grad": grad_spread, "final": final_spread},
        "fp32": fp32, "fp16": []}
    (folder / "trajectory.json").write_text(json.dumps(trajectory, indent=1) + "\n")
    worst = [max((value, key) for key, value in spread.items()) for spread in (grad_spread, final_spread)]
    print(f"{name}: loss {fp32[0]['loss']:.4f} to {fp32[-1]['loss']:.4f}, norm {fp32[0]['norm']:.2f}, "
          f"logits {trajectory['spread']['logits']:.1e}, grad {worst[0]}, final {worst[1]}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    softmax_in_double()
    transformers.logging.set_verbosity_error()
    for seed, name in enumerate(CASES):
        if not sys.argv[1:] or name in sys.argv[1:]:
            base, keys = CASES[name]
            make(name, Case(base, dict(keys), SEEDS.get(name, 60 + seed)), HERE / "lora" / name)
