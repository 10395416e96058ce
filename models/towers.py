"""Attention of encoders over several pictures, films and sounds in one call of a kernel.

Owns the attention that a family's towers get in place of transformers' own, which asks the device for every length in each layer
and goes picture by picture: what a tower encodes at a time lies behind each other, and each token sees all of its own picture, or
of its own part of a sound. Does not own the kernels (`kernels.py`), nor which one is taken and how it is proved (`attention.py`).

    with listening(model) as calls: model(...)       # how its towers call their attention, picture by picture
    attend_with(model, FLEX)                         # once it is proved for them

Invariant: a token of one picture sees none of another, whichever way it goes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rondo.models.kernels import FLASH, FLEX, Documents, Part, Varlen
from rondo.models.shared_prefixes import Call
from rondo.models.units import towers_of

_NAMES = {FLASH: "rondo_flash_towers", FLEX: "rondo_flash_towers_through_flex"}
"""Among transformers' attentions: towers tell their lengths to one with "flash" in its name, once a pass."""
HALF = {torch.float16, torch.bfloat16}
"""What flash_attention_2 computes in. A model in float32 shares these settings where an engine is lent the trainer's tensors."""
_heard: ContextVar[set[Call] | None] = ContextVar("heard", default=None)
_parts = WeakTensorKeyDictionary()
"""By the ends that all layers of a pass are told: what FLEX is told of them."""


def attend_with(model: Any, name: str) -> None:
    """The towers of `model` attend with the kernel `name` from now on."""
    for tower in towers_of(model):
        tower.config._attn_implementation = _NAMES[name]


@contextmanager
def listening(model: Any) -> Iterator[set[Call]]:
    """How the towers of `model` call their attention while the body runs; afterwards they have the one that they had."""
    calls, had = set[Call](), [(tower.config, tower.config._attn_implementation) for tower in towers_of(model)]
    attend_with(model, FLEX)
    token = _heard.set(calls)
    try:
        yield calls
    finally:
        _heard.reset(token)
        for config, name in had:
            config._attn_implementation = name


def part_of(name: str, ends: torch.Tensor, most: int, num_tokens: int) -> Part:
    """What the kernel `name` is told of documents behind each other. ends: int32 [documents + 1], from 0; most: tokens of one.
    Made on the device where `ends` lies, without a look at it."""
    if name == FLASH:
        return Varlen(ends, ends, None, most, most, causal=False)
    return Documents.whole(ends, num_tokens)


def _attention(
    name: str,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    scaling: float,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query, key and value [1, heads, N, D] -> [1, N, heads, D]."""
    how = {"scaling": scaling, "dropout": dropout}
    heard = _heard.get()
    if heard is not None:
        heard.add(Call(query.shape[1], key.shape[1], query.shape[3], value.shape[3], scaling, causal=False))
    if heard is not None or (name == FLASH and query.dtype not in HALF):
        rows = zip(*(x.split(cu_seq_lens_q.diff().tolist(), dim=2) for x in (query, key, value)), strict=True)
        return torch.cat(
            [sdpa_attention_forward(module, *row, None, is_causal=False, **how)[0] for row in rows], 1
        ), None
    if cu_seq_lens_q not in _parts:
        _parts[cu_seq_lens_q] = part_of(name, cu_seq_lens_q.to(torch.int32, copy=True), max_length_q, query.shape[2])
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return _parts[cu_seq_lens_q].attend(module, q, k, v, **how, window=None)[None], None


for _kernel, _name in _NAMES.items():
    AttentionInterface.register(_name, functools.partial(_attention, _kernel))
