"""Attention over a flat batch in one call of a kernel: flash_attention_2 by lengths, flex_attention by a block mask.

Owns what each kernel is told of which queries see which keys. It is made once for a micro-batch and lies on the device: no layer
makes a mask, takes an index from the host or waits for the device, and nothing is as large as tokens times tokens. Does not own
where tokens lie (`shared_prompts.py`), nor which kernel is taken and how it is proved (`attention.py`).

A flat batch is *runs* behind each other: tokens that follow one another, behind a prompt that lies elsewhere, or behind nothing.
A prompt and the answer next to it are one run.

    prompt aaa with answers AA and B, prompt c with C      flat  aaaAABcC      runs  aaaAA, B behind aaa, cC

In a layer with a window a query sees, of these keys, the last so many up to its own.

Shapes: N tokens, K keys, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
        part, heads, value D]. how: `scaling`, `dropout`, `window` (tokens that a query sees, its own included; None: all)."""


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
    causal: bool = True

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
        return Varlen(*ends, keys, self.most_queries, self.most_keys, self.causal)

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **how: Any
    ) -> torch.Tensor:
        from flash_attn import flash_attn_varlen_func  # an extra

        if self.keys is not None:
            key, value = key.index_select(0, self.keys), value.index_select(0, self.keys)
        window = how["window"]
        found: torch.Tensor = flash_attn_varlen_func(
            query, key, value, self.query_ends, self.key_ends, self.most_queries, self.most_keys,
            dropout_p=how["dropout"], softmax_scale=how["scaling"], causal=self.causal,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return found


@dataclass(frozen=True, slots=True)
class Documents:
    """All of a flat batch for flex_attention."""

    # int32 [4, N]: where the run of each query begins, where the prompt before it begins and ends, and the query's place in its
    # sequence.
    bounds: torch.Tensor
    some: torch.Tensor  # bool [blocks of queries, blocks of keys]: some queries see some keys
    every: torch.Tensor  # bool, the same shape: all queries see all keys
    mask: BlockMask
    _in_windows: dict[int, BlockMask] = field(default_factory=dict)
    """By the window, each made once for all layers."""

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Documents:
        """Of runs that lie behind each other."""
        starts, lengths, prompts, befores = np.array([(r.start, r.length, r.prompt, r.before) for r in runs]).T
        bounds = np.repeat(np.stack([starts, prompts, prompts + befores, befores - starts]), lengths, axis=1)
        bounds[3] += np.arange(bounds.shape[1])
        some, every = map(torch.from_numpy, _blocks(runs, bounds.shape[1]))
        return cls.made(torch.from_numpy(bounds.astype(np.int32)), some, every)

    @classmethod
    def whole(cls, ends: torch.Tensor, num_tokens: int) -> Documents:
        """Of which each token sees all of its own: as a prompt of which it is itself. ends: int32 [documents + 1], from 0. Where
        they lie, and without a look at them."""
        places = torch.arange(num_tokens, device=ends.device)
        of = torch.searchsorted(ends[1:], places, right=True)
        begins, stops = ends[of], ends[of + 1]
        heads = torch.arange(0, num_tokens, _BLOCK, device=ends.device)
        tails = (heads + _BLOCK - 1).clamp(max=num_tokens - 1)
        first, last = of[heads], of[tails]
        some = (first[:, None] <= last) & (first <= last[:, None])
        full = (first == last) & (heads + _BLOCK <= num_tokens)
        every = full[:, None] & full & (first[:, None] == first)
        return cls.made(torch.stack([begins, begins, stops, torch.zeros_like(begins)]), some, every)

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
        scaling, dropout, window = how["scaling"], how["dropout"], how["window"]
        mask = self.mask if window is None else self._in_window(window)
        found: torch.Tensor = ALL_ATTENTION_FUNCTIONS[FLEX](
            module, *heads_first, mask, scaling=scaling, dropout=dropout
        )[0]
        return found[0]

    def _in_window(self, window: int) -> BlockMask:
        """Without the blocks whose keys are all too far from all queries; told without a look at the device."""
        if window not in self._in_windows:
            places = self.bounds[3]
            missing = len(self.some) * _BLOCK - len(places)
            padded = torch.cat([places, places[-1:].expand(missing)]).view(-1, _BLOCK)
            first, last = padded.amin(1), padded.amax(1)
            some = self.some & (first[:, None] - last[None] < window)
            every = self.every & (last[:, None] - first[None] < window)
            self._in_windows[window] = _mask(self.bounds, some, every, window)
        return self._in_windows[window]


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


def _mask(bounds: torch.Tensor, some: torch.Tensor, every: torch.Tensor, window: int | None = None) -> BlockMask:
    """On the device where these lie."""
    begin, first, last, place = bounds

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        own = (key >= begin[query]) & (key <= query)
        return own | ((key >= first[query]) & (key < last[query]))

    def sees_near(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return sees(batch, head, query, key) & (place[query] - place[key] < window)

    length = bounds.shape[1]
    listed = (*_listed(some & ~every), *_listed(every))
    return BlockMask.from_kv_blocks(
        *listed, BLOCK_SIZE=_BLOCK, mask_mod=sees if window is None else sees_near, seq_lengths=(length, length)
    )


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of keys each block of queries has, int32 [1, 1, blocks], and which: these first, int32 [1, 1, blocks,
    blocks]."""
    counts = blocks.sum(-1, dtype=torch.int32)
    indices = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
    return counts[None, None], indices[None, None]
