"""A tokenizer without any download: one token for each byte, and the special tokens of the Qwen3 families.

Owns the vocabulary and the chat template of the tiny models. Invariant: any text round-trips, and its number of tokens is its
number of UTF-8 bytes.

    build_tokenizer()("s31>").input_ids   # 4 tokens
"""

from __future__ import annotations

from typing import Any

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
MEDIA = (
    "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>",
)  # fmt: skip

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer(*, chat_template: bool = True) -> Any:
    """A `Qwen2Tokenizer` of 266 entries: 256 bytes, padding `<|endoftext|>`, end `<|im_end|>`, and 8 more."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    vocabulary = {symbol: index for index, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary, merges=[], eos_token=END_OF_TURN, pad_token=END_OF_TEXT, unk_token=None,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *MEDIA]})
    tokenizer.chat_template = CHAT_TEMPLATE if chat_template else None
    return tokenizer
