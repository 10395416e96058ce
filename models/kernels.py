"""Attention over a flat batch in one call of a kernel: flash_attention_2 by lengths, flex_attention by a block mask.

Owns what each kernel is told of which queries see which keys. It is made once for a micro-batch and lies on the device: no layer
makes a mask, takes an index from the host or waits for the device, and nothing is as large as tokens times tokens. Does not own
where tokens lie (`shared_prefixes.py`), nor which kernel is taken and how it is proved (`attention.py`).

A flat batch is *runs* behind each other: tokens that follow one another, behind some that lie elsewhere, or behind nothing. They
lie depth first: a prompt and the answer next to it are one run, and what is behind tokens lies right behind them.

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
    """`length` tokens from `start` on, each of which sees those before it, and those that the run is `behind`, as (first, how
    many), in their order."""

    start: int
    length: int
    behind: tuple[tuple[int, int], ...] = ()

    @property
    def before(self) -> int:
        return sum(length for _, length in self.behind)


@dataclass(frozen=True, slots=True)
class Varlen:
    """All of a flat batch for flash_attention_2. Its causal mask ends with the last query at the last key, so the queries of a
    run whose keys begin with what it is behind see all of that."""

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
            spans = [span for run in runs for span in (*run.behind, (run.start, run.length))]
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

    # int32 [3, N]: the first query that sees each key, the first one behind those that do, and the place of each token in its
    # sequence.
    bounds: torch.Tensor
    some: torch.Tensor  # bool [blocks of queries, blocks of keys]: some queries see some keys
    every: torch.Tensor  # bool, the same shape: all queries see all keys
    mask: BlockMask
    _in_windows: dict[int, BlockMask] = field(default_factory=dict)
    """By the window, each made once for all layers."""

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Documents:
        """Of runs that lie behind each other, depth first: who sees a token lies behind it without a gap."""
        bounds = np.tile(np.arange(runs[-1].start + runs[-1].length, dtype=np.int32), (3, 1))
        for run in runs:
            end = run.start + run.length
            for start, length in (*run.behind, (run.start, run.length)):
                bounds[1, start : start + length] = end
            bounds[2, run.start : end] += run.before - run.start
        return cls.made(torch.from_numpy(bounds))

    @classmethod
    def whole(cls, ends: torch.Tensor, num_tokens: int) -> Documents:
        """Of which each token sees all of its own. ends: int32 [documents + 1], from 0. Where they lie, and without a look at
        them."""
        places = torch.arange(num_tokens, device=ends.device)
        of = torch.searchsorted(ends[1:], places, right=True)
        return cls.made(torch.stack([ends[of], ends[of + 1], torch.zeros_like(ends[of])]))

    @classmethod
    def made(cls, bounds: torch.Tensor) -> Documents:
        """Where these lie, without a look at them."""
        some, every = _blocks(bounds)
        return cls(bounds, some, every, _mask(bounds, some, every))

    def to(self, device: torch.device | str) -> Documents:
        return Documents.made(self.bounds.to(device))

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
            places = self.bounds[2]
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


def _blocks(bounds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(blocks with something to see, blocks of which all is seen), both bool [blocks of queries, blocks of keys]."""
    num_tokens = bounds.shape[1]
    heads = torch.arange(0, num_tokens, _BLOCK, device=bounds.device)
    missing = len(heads) * _BLOCK - num_tokens
    begins, ends = (torch.cat([row, row[-1:].expand(missing)]).view(-1, _BLOCK) for row in bounds[:2])
    full = heads + _BLOCK <= num_tokens
    some = (begins.amin(1) < heads[:, None] + _BLOCK) & (ends.amax(1) > heads[:, None])
    every = (begins.amax(1) <= heads[:, None]) & (ends.amin(1) >= heads[:, None] + _BLOCK)
    return some, every & full & full[:, None]


def _mask(bounds: torch.Tensor, some: torch.Tensor, every: torch.Tensor, window: int | None = None) -> BlockMask:
    """On the device where these lie."""
    begin, end, place = bounds

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (begin[key] <= query) & (query < end[key])

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
