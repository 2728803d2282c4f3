"""Steps of TRL's `DPOTrainer`; `tests/cli/preferences.rs` runs it.

    python trl_dpo.py MODEL PAIRS STEPS LR [ADAPTER]

All pairs of the JSON Lines file PAIRS make one batch of each step, in FP32, with a constant learning rate and without weight decay.
With ADAPTER, a folder in PEFT's format, only the adapter is trained. Prints one JSON object: `loss`, `chosen` and `rejected`, the loss
and the rewards of each step.
"""

import json
import sys
import tempfile

from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

folder, pairs, steps, lr, *adapter = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder)
if adapter:
    model = PeftModel.from_pretrained(model, adapter[0], is_trainable=True)
with open(pairs) as file:
    rows = [json.loads(line) for line in file]
end = "<|endoftext|>"
tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json", eos_token=end, pad_token=end)
with tempfile.TemporaryDirectory() as out:
    args = DPOConfig(
        output_dir=out, max_steps=int(steps), per_device_train_batch_size=len(rows), learning_rate=float(lr), lr_scheduler_type="constant",
        adam_beta2=0.95, weight_decay=0.0, max_grad_norm=1.0, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
        bf16=False, gradient_checkpointing=False, beta=0.1,
    )
    trainer = DPOTrainer(model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
history = [entry for entry in trainer.state.log_history if "loss" in entry]
names = {"loss": "loss", "chosen": "rewards/chosen", "rejected": "rewards/rejected"}
print(json.dumps({short: [float(entry[name]) for entry in history] for short, name in names.items()}))
