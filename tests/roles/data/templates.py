"""Chat templates in the manner of model families, and small tokenizers that have them.

Owns what is particular to each: where thoughts, tools and systems stand, and how a turn ends. None is a family's own text.
"""

from __future__ import annotations

import functools
from typing import Any

from rondo.models.tiny.tokenizer import build_tokenizer

_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
)
_CALLS = (
    "{% for call in m.tool_calls %}<tool_call>\n{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "\n</tool_call>{% endfor %}"
)
_BEGIN = "{% if add_generation_prompt %}<|im_start|>assistant\n"

QWEN25 = (
    _TOOLS
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + "{% if m.tool_calls %}"
    + _CALLS
    + "{% endif %}<|im_end|>\n{% endfor %}"
    + _BEGIN
    + "{% endif %}"
)
"""ChatML with tools, without thoughts."""

QWEN3 = (
    _TOOLS
    + "{% set ns = namespace(asked=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}"
    + "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    + "{% if m.role == 'assistant' %}{% set text = m.content %}{% set thought = m.reasoning_content or '' %}"
    + "{% if '</think>' in text %}{% set thought = text.split('</think>')[0].split('<think>')[-1] %}"
    + "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    + "{% if loop.index0 > ns.asked and (loop.last or thought) %}<think>\n{{ thought.strip() }}\n</think>\n\n{% endif %}"
    + "{{ text }}{% if m.tool_calls %}"
    + _CALLS
    + "{% endif %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    + _BEGIN
    + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Thoughts behind the last question alone; the assistant opens them."""

QWEN3_THINKING = QWEN3.replace("{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}", "<think>\n")
"""As that, and the generation prompt opens them."""

OPENED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n{% endif %}{{ m.content }}"
    "<|im_end|>\n{% endfor %}" + _BEGIN + "<think>\n{% endif %}"
)
"""Opens a thought for every answer, whatever the answer begins with."""

DROPPED = QWEN25.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
"""Shows calls, and never a thought."""

APART = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}" + _BEGIN + "{% endif %}"
)
"""Asks the assistant with another text than that in front of an answer."""

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}{{ {'name': call.name, 'parameters': call.arguments} | "
    "tojson }}{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
"""Shows no tools of a list, and of a turn with a call the call alone."""

MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Two roles, any other of which vanishes, and nothing in front of an answer."""

GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no systems') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{{ '\n' }}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + _BEGIN + "{% endif %}"
)
"""Says itself what the assistant writes."""

R1 = (
    "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% elif m.role == 'assistant' %}<|Assistant|>"
    "{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% elif m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
"""The generation prompt opens a thought, and the thought of no answer is written."""

PHI = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% else %}{{ eos_token }}{% endif %}"
)
"""Ends turns with one token and the whole with another."""

ENDLESS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
"""Ends turns with no control token."""

HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.tool_calls %} to={{ m.tool_calls[0].function.name }}<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}<|message|>{{ m.content }}"
    "{{ '<|return|>' if m.role == 'assistant' and loop.last else '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""Ends an answer, a call and every earlier message differently."""

_SPECIAL = {
    HARMONY: ("<|start|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"),
    LLAMA3: ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    MISTRAL: ("<s>", "</s>"),
    GEMMA: ("<bos>", "<start_of_turn>", "<end_of_turn>"),
    R1: ("<|User|>", "<|Assistant|>"),
    PHI: ("<|end|>",),
}


@functools.cache
def tokenizer_of(template: str) -> Any:
    """A tokenizer with a token for each byte, whose end of sequence is <|endoftext|>, which few of the templates write."""
    tokenizer, special = build_tokenizer(), _SPECIAL.get(template, ())
    tokenizer.add_tokens(list(special), special_tokens=True)
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    tokenizer.eos_token = "</s>" if template == MISTRAL else "<|endoftext|>"
    tokenizer.bos_token = special[0] if template in (LLAMA3, MISTRAL, GEMMA) else ""
    tokenizer.chat_template = template
    return tokenizer
