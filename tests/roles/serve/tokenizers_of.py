"""Tiny tokenizers of every kind, built without any download, as families of models have them."""

from __future__ import annotations

import functools
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rondo.models.tiny.tokenizer import build_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyzEND.,!"


def byte_level() -> Any:
    """GPT-2, Llama-3, Qwen."""
    return build_tokenizer()


def byte_fallback(*, strips: bool = True) -> Any:
    """Llama-2 and Mistral, whose decoder leaves the first space out; Gemma's does not."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS, "hi", "▁o", "ok"]
    vocabulary = {name: token for token, name in enumerate(names)}
    made = Tokenizer(
        models.BPE(
            vocabulary, [("h", "i"), ("▁", "o"), ("o", "k")], unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    replace = normalizers.Replace(" ", "▁")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if strips else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    return _whole(made)


def word_piece() -> Any:
    """BERT: words of pieces, no bytes."""
    names = ["<unk>", "<s>", "</s>", *LETTERS, *(f"##{letter}" for letter in LETTERS), "hi", "##ok"]
    made = Tokenizer(models.WordPiece({name: token for token, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return _whole(made)


def unigram() -> Any:
    """T5, XLM-R: likely pieces, no bytes."""
    names = ["<unk>", "<s>", "</s>", "▁", *LETTERS, "▁hi", "ok", "😀"]
    made = Tokenizer(models.Unigram([(name, -float(place)) for place, name in enumerate(names)], unk_id=0))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    return _whole(made)


def ends_of_words() -> Any:
    """CLIP, GPT-1: what ends a word says so."""
    names = ["<unk>", "<s>", "</s>", *LETTERS, *(f"{letter}</w>" for letter in LETTERS)]
    made = Tokenizer(
        models.BPE({name: token for token, name in enumerate(names)}, [], unk_token="<unk>", end_of_word_suffix="</w>")
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.BPEDecoder("</w>")
    return _whole(made)


def _whole(made: Tokenizer) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


KINDS = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "byte fallback, spaces kept": functools.partial(byte_fallback, strips=False),
    "word piece": word_piece,
    "unigram": unigram,
    "ends of words": ends_of_words,
}


@functools.cache
def of_kind(kind: str) -> Any:
    return KINDS[kind]()
