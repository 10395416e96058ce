"""A tokenizer without any download: one token for each byte, and the special tokens of the Qwen3 families.

Owns the vocabulary and the chat template of the tiny models. Invariant: any text round-trips, and its number of tokens is its
number of UTF-8 bytes, but for texts that are given as words.

    build_tokenizer()("s31>").input_ids   # 4 tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
MEDIA = (
    "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>",
)  # fmt: skip

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ (tool.function or tool).name }} {% endfor %}<tool_call>"
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% elif part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif part.type == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""That of the Qwen3 families, without thinking, and of tools with their names alone; content is text, or a list of parts."""

_NAMES = {
    "image_token": "<|image_pad|>", "audio_token": "<|audio_pad|>", "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>",
}  # fmt: skip


def build_tokenizer(*, chat_template: bool = True, omni: bool = False, words: Sequence[str] = ()) -> Any:
    """A `Qwen2Tokenizer` of 266 entries: 256 bytes, padding `<|endoftext|>`, end `<|im_end|>`, and 8 more.

    `omni` names the media tokens by their use, as the processor of Qwen3-Omni wants them. `words` are texts of any length that
    are one token each.
    """
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    vocabulary = {symbol: index for index, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary, merges=[], eos_token=END_OF_TURN, pad_token=END_OF_TEXT, unk_token=None,
        clean_up_tokenization_spaces=False, **({"extra_special_tokens": _NAMES} if omni else {}),
    )  # fmt: skip
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *MEDIA]})
    tokenizer.add_tokens(list(words))
    tokenizer.chat_template = CHAT_TEMPLATE if chat_template else None
    return tokenizer
