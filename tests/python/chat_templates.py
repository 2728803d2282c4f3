"""Renders the conversations of a JSON file with transformers and prints a JSON result of each: the text and
the spans of characters inside generation blocks, or the template's refusal."""

import json
import sys

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

results = []
for case in json.load(open(sys.argv[1])):
    try:
        texts, spans = render_jinja_template(
            conversations=[case["messages"]],
            chat_template=case["template"],
            tools=case["tools"],
            add_generation_prompt=case["reply"],
            return_assistant_tokens_mask="{% generation %}" in case["template"],
            bos_token="<s>",
            eos_token="</s>",
        )
        results.append({"text": texts[0], "learned": spans[0] if spans else []})
    except jinja2.exceptions.TemplateError:
        results.append({"refused": True})
print(json.dumps(results))
