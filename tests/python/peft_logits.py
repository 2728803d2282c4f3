"""The logits of an adapter over a model by PEFT, the adapter saved again, and a fresh adapter of PEFT's with its
logits.

    python peft_logits.py MODEL ADAPTER AGAIN IDS
"""

import json
import sys
import warnings

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
model, adapter, again, ids = sys.argv[1:]
ids = torch.tensor([[int(token) for token in ids.split(",")]])


def base():
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, experts_implementation="eager")


def logits(model):
    with torch.no_grad():
        return model.eval()(ids).logits[0].flatten().tolist()


ours = PeftModel.from_pretrained(base(), adapter)
ours.save_pretrained(again)
torch.manual_seed(3)
targets = ours.peft_config["default"]
patterns = {} if targets.target_parameters else {
    "rank_pattern": {"c_attn": 3, r"h\.0\..*": 1}, "alpha_pattern": {"mlp.c_proj": 7, r"transformer.h.[0-9].attn.c_attn": 5}}
config = LoraConfig(r=2, lora_alpha=4, **patterns, target_modules=targets.target_modules, target_parameters=targets.target_parameters,
                    use_rslora=True, use_dora=not targets.target_parameters, init_lora_weights=False, task_type="CAUSAL_LM")
fresh = get_peft_model(base(), config)
fresh.save_pretrained(again + "-fresh")
print(json.dumps({"logits": logits(ours), "fresh": logits(fresh)}))
