"""Tokenizes the conversations of a JSON file with transformers, with the chat templates of published models (from TRL's
package) and with the training templates in the file. Prints the texts, and for each token whether it is the
assistant's.

    chat_tokens.py CASES TOKENIZER
"""

import importlib.util
import json
import re
import sys
from pathlib import Path

import jinja2
from transformers import PreTrainedTokenizerFast

cases = json.load(open(sys.argv[1]))
folder = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
published = {name: (folder / f"{name}.jinja").read_text() for name in cases["published"]}
# finetune has no clock, and this day for templates without one of their own.
undated = re.compile(r'strftime_now\("%Y-%m-%d"\)')


def dated(template):
    return template if "strftime_now is defined" in template else undated.sub('"2025-08-05"', template)


def tokens(template, case):
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=sys.argv[2], bos_token="<s>", eos_token="<|endoftext|>")
    tokenizer.chat_template = template
    marked = "{% generation %}" in template or "{%- generation %}" in template
    try:
        text = tokenizer.apply_chat_template(case["messages"], tools=case["tools"], tokenize=False)
        made = tokenizer.apply_chat_template(
            case["messages"], tools=case["tools"], return_dict=True, return_assistant_tokens_mask=marked
        )
    except (jinja2.exceptions.TemplateError, TypeError, KeyError) as error:
        return {"refused": str(error)}
    return {"text": text, "ids": made["input_ids"], "learned": made.get("assistant_masks")}


results = []
for case in cases["conversations"]:
    results.append(
        {
            "published": {name: tokens(dated(template), case) for name, template in published.items()},
            "training": {name: tokens(template, case) for name, template in cases["training"].items()},
        }
    )
print(json.dumps({"published": published, "results": results}))
