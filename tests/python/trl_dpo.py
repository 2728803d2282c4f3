"""Steps of TRL's `DPOTrainer`, and TRL's defaults; `tests/cli/preferences.rs` runs it.

    python trl_dpo.py MODEL PAIRS STEPS LR ADAPTER ADAPTER_LR

All pairs of the JSON Lines file PAIRS make one batch of each step, in FP32, with a constant learning rate and without
weight decay. First the whole model is trained, with the rate LR, then ADAPTER alone, a folder in PEFT's format. Prints
a JSON list with an object for both: `loss`, `chosen` and `rejected`, the loss and the rewards of each step; and one
with the defaults of each trainer.
"""

import json
import sys
import tempfile
from dataclasses import fields

from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, KTOConfig

folder, pairs, steps, full_lr, adapter_folder, adapter_lr = sys.argv[1:]
with open(pairs) as file:
    rows = [json.loads(line) for line in file]
end = "<|endoftext|>"
tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json", eos_token=end, pad_token=end)
names = {"loss": "loss", "chosen": "rewards/chosen", "rejected": "rewards/rejected"}
settings = {
    DPOConfig: ["beta", "label_smoothing"],
    KTOConfig: ["beta", "desirable_weight", "undesirable_weight"],
    GRPOConfig: ["beta", "epsilon", "max_completion_length", "num_generations", "num_iterations"],
}


def train(model, lr):
    with tempfile.TemporaryDirectory() as out:
        args = DPOConfig(
            output_dir=out, max_steps=int(steps), per_device_train_batch_size=len(rows), learning_rate=float(lr), lr_scheduler_type="constant",
            adam_beta2=0.95, weight_decay=0.0, max_grad_norm=1.0, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
            bf16=False, gradient_checkpointing=False, beta=0.1,
        )
        trainer = DPOTrainer(model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
        trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {short: [float(entry[name]) for entry in history] for short, name in names.items()}


full = train(AutoModelForCausalLM.from_pretrained(folder), full_lr)
adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapter_folder, is_trainable=True)
defaults = [{field.name: field.default for field in fields(config) if field.name in settings[config]} for config in settings]
print(json.dumps([full, train(adapted, adapter_lr), defaults]))
