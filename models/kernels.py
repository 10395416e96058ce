"""Attention over a flat batch in one call of a kernel: flash_attention_2 by lengths, flex_attention by a block mask.

Owns what each kernel is told of which queries see which keys. It is made once for a micro-batch and lies on the device: no layer
makes a mask, takes an index from the host or waits for the device, and nothing is as large as tokens times tokens. Does not own
where tokens lie (`shared_prompts.py`), nor which kernel is taken and how it is proved (`attention.py`).

A flat batch is *runs* behind each other: tokens that follow one another, behind a prompt that lies elsewhere, or behind nothing.
A prompt and the answer next to it are one run.

    prompt aaa with answers AA and B, prompt c with C      flat  aaaAABcC      runs  aaaAA, B behind aaa, cC

Shapes: N tokens, K keys, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

FLASH, FLEX = "flash_attention_2", "flex_attention"
_BLOCK = 128
"""Queries, and keys, of which a block mask says one thing."""


class Part(Protocol):
    """What some neighbouring tokens of a flat batch see."""

    def to(self, device: torch.device | str) -> Part: ...

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **how: Any
    ) -> torch.Tensor:
        """query [N, heads, D], key [N, key heads, D] and value [N, key heads, value D] of the whole batch -> [tokens of the
        part, heads, value D]. how: `scaling`, `dropout`."""


@dataclass(frozen=True, slots=True)
class Run:
    """`length` tokens from `start` on, each of which sees those before it, and the `before` tokens from `prompt` on."""

    start: int
    length: int
    prompt: int = 0
    before: int = 0


@dataclass(frozen=True, slots=True)
class Varlen:
    """All of a flat batch for flash_attention_2. Its causal mask ends with the last query at the last key, so the queries of a
    run whose keys begin with a prompt see all of that."""

    query_ends: torch.Tensor  # int32 [runs + 1], from 0
    key_ends: torch.Tensor  # int32 [runs + 1], from 0
    keys: torch.Tensor | None  # int64 [K], token of each key; None: the queries
    most_queries: int
    most_keys: int

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Varlen:
        """Of runs that lie behind each other."""
        lengths, befores = (np.array([getattr(run, name) for run in runs]) for name in ("length", "before"))
        keys = None
        if befores.any():
            spans = [span for run in runs for span in ((run.prompt, run.before), (run.start, run.length))]
            keys = torch.from_numpy(np.concatenate([np.arange(start, start + length) for start, length in spans]))
        most = int(lengths.max()), int((lengths + befores).max())
        return cls(_ends(lengths), _ends(lengths + befores), keys, *most)

    def to(self, device: torch.device | str) -> Varlen:
        keys = None if self.keys is None else self.keys.to(device)
        ends = self.query_ends.to(device), self.key_ends.to(device)
        return Varlen(*ends, keys, self.most_queries, self.most_keys)

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **how: Any
    ) -> torch.Tensor:
        from flash_attn import flash_attn_varlen_func  # an extra

        if self.keys is not None:
            key, value = key.index_select(0, self.keys), value.index_select(0, self.keys)
        found: torch.Tensor = flash_attn_varlen_func(
            query, key, value, self.query_ends, self.key_ends, self.most_queries, self.most_keys,
            dropout_p=how["dropout"], softmax_scale=how["scaling"], causal=True,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return found


@dataclass(frozen=True, slots=True)
class Documents:
    """All of a flat batch for flex_attention."""

    bounds: torch.Tensor  # int32 [3, N]: where the run of each query begins, where the prompt before it begins and ends
    some: torch.Tensor  # bool [blocks of queries, blocks of keys]: some queries see some keys
    every: torch.Tensor  # bool, the same shape: all queries see all keys
    mask: BlockMask

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Documents:
        """Of runs that lie behind each other."""
        starts, lengths, prompts, befores = np.array([(r.start, r.length, r.prompt, r.before) for r in runs]).T
        bounds = np.repeat(np.stack([starts, prompts, prompts + befores]), lengths, axis=1).astype(np.int32)
        some, every = map(torch.from_numpy, _blocks(runs, bounds.shape[1]))
        return cls.made(torch.from_numpy(bounds), some, every)

    @classmethod
    def made(cls, bounds: torch.Tensor, some: torch.Tensor, every: torch.Tensor) -> Documents:
        """With the mask, where these lie."""
        return cls(bounds, some, every, _mask(bounds, some, every))

    def to(self, device: torch.device | str) -> Documents:
        return Documents.made(self.bounds.to(device), self.some.to(device), self.every.to(device))

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **how: Any
    ) -> torch.Tensor:
        heads_first = (x.transpose(0, 1)[None] for x in (query, key, value))
        found: torch.Tensor = ALL_ATTENTION_FUNCTIONS[FLEX](module, *heads_first, self.mask, **how)[0]
        return found[0]


KERNELS: dict[str, type[Varlen] | type[Documents]] = {FLASH: Varlen, FLEX: Documents}


def _ends(lengths: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def _blocks(runs: Sequence[Run], num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(blocks with something to see, blocks of which all is seen), both bool [blocks of queries, blocks of keys]."""
    begins = np.arange(0, num_tokens, _BLOCK)
    ends = begins + _BLOCK
    some, every = np.zeros((2, len(begins), len(begins)), bool)
    every[: num_tokens // _BLOCK] = True  # but where the last queries are missing
    for run in runs:
        prompt_end, end = run.prompt + run.before, run.start + run.length
        for row in range(run.start // _BLOCK, -(-end // _BLOCK)):
            first, last = max(run.start, row * _BLOCK), min(end, (row + 1) * _BLOCK) - 1
            some[row] |= (begins <= last) & (ends > run.start)
            if run.before:
                some[row] |= (begins < prompt_end) & (ends > run.prompt)
            in_prompt = (begins >= run.prompt) & (ends <= prompt_end)
            every[row] &= in_prompt | ((begins >= run.start) & (ends <= first + 1))
    return some, every


def _mask(bounds: torch.Tensor, some: torch.Tensor, every: torch.Tensor) -> BlockMask:
    """On the device where these lie."""
    begin, first, last = bounds

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        own = (key >= begin[query]) & (key <= query)
        return own | ((key >= first[query]) & (key < last[query]))

    length = bounds.shape[1]
    listed = (*_listed(some & ~every), *_listed(every))
    return BlockMask.from_kv_blocks(*listed, BLOCK_SIZE=_BLOCK, mask_mod=sees, seq_lengths=(length, length))


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of keys each block of queries has, int32 [1, 1, blocks], and which: these first, int32 [1, 1, blocks,
    blocks]."""
    counts = blocks.sum(-1, dtype=torch.int32)
    indices = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
    return counts[None, None], indices[None, None]
