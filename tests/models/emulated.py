"""The kernels of GPUs written out for the CPU: what they give for what they are told, in any precision, backward too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rondo.models import attention, towers
from rondo.models.kernels import FLASH, FLEX

Sees = Callable[[int, int], torch.Tensor]
"""(queries, keys of a run) -> bool [queries, keys]."""


def from_the_end(queries: int, keys: int) -> torch.Tensor:
    """The causal mask of flash-attn since 2.1: the last query sees the last key."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def flash(sees: Sees = from_the_end) -> Callable[..., torch.Tensor]:
    """`flash_attn.flash_attn_varlen_func`."""

    def varlen(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, most_q: int, most_k: int, *,
        dropout_p: float, softmax_scale: float | None, causal: bool, deterministic: bool,
        window_size: tuple[int, int] = (-1, -1),
    ) -> torch.Tensor:  # fmt: skip
        lengths, sizes = cu_q.diff().tolist(), cu_k.diff().tolist()
        assert dropout_p == 0 and (max(lengths), max(sizes)) == (most_q, most_k)
        assert cu_q.dtype == cu_k.dtype == torch.int32 and (cu_q[-1], cu_k[-1]) == (len(q), len(k))
        parts = []
        for one_q, one_k, one_v in zip(q.split(lengths), k.split(sizes), v.split(sizes), strict=True):
            seen = sees(len(one_q), len(one_k)) if causal else torch.ones(len(one_q), len(one_k), dtype=torch.bool)
            if window_size != (-1, -1):
                left, right = window_size
                assert right == 0
                seen = seen & torch.ones_like(seen).triu(len(one_k) - len(one_q) - left)
            parts.append(_dense(one_q, one_k, one_v, seen, softmax_scale))
        return torch.cat(parts)

    return varlen


def visible(mask: BlockMask) -> torch.Tensor:
    """bool [queries, keys] of a block mask, as a kernel goes through it."""
    length = mask.seq_lengths[0]
    places = torch.arange(length)
    assert mask.mask_mod is not None
    fine = mask.mask_mod(0, 0, places[:, None], places[None])
    some = _spread(mask.kv_num_blocks, mask.kv_indices, length)
    return some & fine | _spread(mask.full_kv_num_blocks, mask.full_kv_indices, length)


def flex(see: Callable[[BlockMask], torch.Tensor] = visible) -> Callable[..., Any]:
    """transformers' "flex_attention"."""

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask, *, scaling: Any, dropout: float
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        assert dropout == 0
        return _dense(*(x[0].transpose(0, 1) for x in (query, key, value)), see(mask), scaling)[None], None

    return attend


def install(monkeypatch: pytest.MonkeyPatch, name: str, kernel: Callable[..., Any] | None = None) -> None:
    """From now on this machine has the kernel `name`."""
    if name == FLASH:
        module = ModuleType("flash_attn")
        module.flash_attn_varlen_func = kernel or flash()  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "flash_attn", module)
    elif name == FLEX:
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, FLEX, kernel or flex())
    monkeypatch.setattr(attention, "_lacks", lambda *_: "")
    monkeypatch.setattr(towers, "HALF", {torch.float32, torch.float16, torch.bfloat16})


def _spread(counts: torch.Tensor | None, indices: torch.Tensor | None, length: int, block: int = 128) -> torch.Tensor:
    """bool [length, length] where these blocks of keys are listed."""
    assert counts is not None and indices is not None
    found = torch.zeros(indices.shape[-2:], dtype=torch.bool)
    for row, (count, listed) in enumerate(zip(counts[0, 0].tolist(), indices[0, 0].tolist(), strict=True)):
        found[row, listed[:count]] = True
    return found.repeat_interleave(block, 0).repeat_interleave(block, 1)[:length, :length]


def _dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """[queries, heads, size], through a whole mask."""
    each = query.shape[1] // key.shape[1]
    rows = query, key.repeat_interleave(each, 1), value.repeat_interleave(each, 1)
    out = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in rows), attn_mask=mask, scale=scaling)
    return out.transpose(0, 1)
