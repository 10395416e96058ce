"""Learning from rows that have their answers: which rows make a batch, how it is cut, and the steps of a backend over them.

Owns the order of rows, those that cannot be used, and the measure of rows that are held out. Does not own what is made of a row
and its loss (`sft.py`), steps and state (`backend.py`), nor where it runs: inside the actor before version 0 (`warm_up.py`), or
as a job of its own (`roles/supervised.py`).

    learning = Learning(backend, encode, train, held_out, config, source, seed=0)
    while (made := learning.step(step)) is not None: ...

Invariant: the loss of a step is a sum over its batch, divided once, so it is the same however the batch is cut into micro-batches
and ranks. Batches depend on data, seed and `position` alone. A row that a rank cannot use is left out by all, told once, and
counted; the next one of the order takes its place.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rondo.models.lora import learning
from rondo.roles.algorithms.sums import LossSums
from rondo.roles.config import DataConfig, SupervisedConfig
from rondo.roles.data.cursor import Cursor, Order
from rondo.roles.data.datasets import Row, RowError, Rows, order_of
from rondo.roles.data.prompts import TooLong
from rondo.roles.data.row_filters import Filtered
from rondo.roles.data.unusable import UnusableRows
from rondo.roles.training.backend import Backend, Use
from rondo.runtime.errors import Fatal

log = logging.getLogger(__name__)

_CACHED_BYTES = 1 << 30
_CACHED_ROW_BYTES = 256
"""What an encoded row takes beside its arrays, about."""


class Item(Protocol):
    """What is made of a row."""

    @property
    def cost(self) -> int:
        """Of `micro_batch_tokens`."""

    @property
    def num_bytes(self) -> int:
        """Of its arrays."""


_Agree = Callable[[Sequence[float]], Sequence[float]]
Encode = Callable[[Row], Item]
"""Raises RowError for a row that cannot be used."""


class Learning:
    """The steps of a job, or of a warm-up, over `data`. position: places of the order that were taken before."""

    def __init__(
        self,
        backend: Backend[Any],
        encode: Encode,
        data: Rows,
        held_out: Rows | None,
        config: SupervisedConfig,
        source: DataConfig,
        *,
        seed: int,
        position: int = 0,
    ) -> None:
        self._backend, self._config = backend, config
        self._places = Cursor(order_of(source, data, seed, config.epochs), position)
        setting = f"{config.place}.data.max_bad_rows" if config.data is not None else "data.max_bad_rows"
        bad = (config.place, setting, source.max_bad_rows)

        def encoded(rows: Rows) -> _Encoded:
            return _Encoded(lambda index: encode(rows.row(index)), bad, backend.sum_over_ranks)

        self._encoded, self._held_out = encoded(data), held_out
        self._measured = None if held_out is None else encoded(held_out)

    @property
    def position(self) -> int:
        """Where the next batch begins."""
        return self._places.position

    def step(self, step: int) -> dict[str, Any] | None:
        """What step `step` was: step, loss (in nats), lr, grad_norm, tokens (of answers), what its loss tells beside, skipped
        (rows so far that could not be used) and, if there are any, why of the first_skipped. None where the last pass is over
        (collective). Fatal where no row can be used, or the gradient is no longer finite."""
        backend = self._backend
        batch = self._encoded.batch(self._places, self._config.batch_size)
        if not batch:
            return None
        with learning(backend.model):
            rounds = self._rounds(batch)
            for number, rows in enumerate(rounds):
                backend.accumulate(step, rows, (), last=number == len(rounds) - 1)
            made = backend.update(step)
        backend.discard()
        if backend.is_lost(made):
            place = self._config.place
            raise Fatal(
                f"the gradient of {place} step {step} must be finite, got norm {made.grad_norm}. Lower {place}.lr"
            )
        figures = {"step": step, "loss": made.loss, "lr": backend.lr(step), "grad_norm": made.grad_norm}
        return figures | self._figures(made.total) | self._encoded.skipped()

    def run(self, num_steps: int, on_step: Callable[[dict[str, Any]], None], should_stop: Callable[[], bool]) -> bool:
        """All steps (collective), of which `on_step` is told; False when `should_stop`, which is asked before every one of them,
        said so on any rank."""
        for step in range(num_steps):
            # A rank that left alone would hang the others in their next collective.
            if self._backend.sum_over_ranks([float(should_stop())])[0]:
                return False
            if (made := self.step(step)) is None:
                break
            on_step(made)
        return True

    def evaluate(self) -> dict[str, float]:
        """What the rows that are held out say of the weights now, as `SupervisedConfig.figures` name it (collective)."""
        assert self._measured is not None and self._held_out is not None
        backend, num_rows = self._backend, len(self._held_out)
        items = self._measured.batch(Cursor(Order(num_rows, 0, shuffle=False, num_passes=1)), num_rows)
        total: LossSums | None = None
        with torch.no_grad():
            for rows in self._rounds(items):
                sums = backend.objective.sums(backend.model, rows, Use(0, 0, 0, ()))
                total = sums if total is None else total + sums
        assert total is not None
        total = total.reduced(dist.group.WORLD if backend.mesh.size > 1 else None)
        found = {"loss": float(total.loss) / backend.objective.denominator(total)} | self._figures(total)
        return {f"eval_{name}": found[name] for name in self._config.figures}

    def ahead(self) -> Iterator[list[Item]]:
        """Every row that will be trained on or measured, once at least, in batches."""
        size, held_out = self._config.batch_size, self._held_out
        every = [(self._encoded, Cursor(self._places.order), self._config.num_steps(self._places.order.num_rows))]
        if self._measured is not None and held_out is not None:
            order = Order(len(held_out), 0, shuffle=False, num_passes=1)
            every.append((self._measured, Cursor(order), len(held_out)))
        for encoded, places, most in every:
            for _ in range(most):
                if places.position >= places.order.num_rows or not (batch := encoded.batch(places, size)):
                    break
                yield batch

    def _rounds(self, items: Sequence[Item]) -> list[list[Item]]:
        """This rank's micro-batches."""
        mesh = self._backend.mesh
        rounds = cut([item.cost for item in items], self._config.micro_batch_tokens, mesh.size)
        return [[items[i] for i in micro_batches[mesh.rank]] for micro_batches in rounds]

    def _figures(self, total: LossSums) -> dict[str, Any]:
        divisor = self._backend.objective.denominator(total)
        beside = {
            name: float(value) / divisor for name, value in total.sums.items() if name not in ("tokens", "samples")
        }
        return {"tokens": int(total.sums["tokens"]), **beside}


class _Encoded:
    """Rows as they are trained, the last ones used kept in memory. bad: what the rows are called, which setting says how many of
    them may be unusable, and that share; `agree` sums over ranks."""

    def __init__(self, encode_row: Callable[[int], Item], bad: tuple[str, str, float], agree: _Agree) -> None:
        self._encode_row, self._bad, self._agree = encode_row, bad, agree
        self._kept: OrderedDict[int, Item | None] = OrderedDict()
        self._num_bytes = 0
        self._skipped: set[int] = set()
        self._first_skipped = ""
        self._unusable = UnusableRows()

    def skipped(self) -> dict[str, Any]:
        """How many rows could not be used, and why the first could not."""
        told = {"first_skipped": self._first_skipped} if self._skipped else {}
        return {"skipped": len(self._skipped), **told}

    def batch(self, places: Cursor, size: int) -> list[Item]:
        """The next `size` that every rank can use; fewer where the last pass ends (collective). Fatal when none of all can, or
        when more of them are unusable than may be."""
        batch: list[Item] = []
        while len(batch) < size and (tried := [place.row for place in islice(places, size - len(batch))]):
            items = [self._one(row) for row in tried]
            # A file may be there for some ranks alone: one that went on by itself would hang the others.
            for row, item, missing in zip(tried, items, self._agree([float(it is None) for it in items]), strict=True):
                if item is not None and not missing:
                    batch.append(item)
                elif item is not None:
                    self._skip(
                        row,
                        "a row: it must be there for every process, got one that another could not use. See its log",
                    )
            if refusal := self._unusable.refusal(*self._bad, places.order.num_rows):
                raise Fatal(refusal)
            if len(self._skipped) == places.order.num_rows:
                raise Fatal(
                    f"{self._bad[0]} must have demonstrations that can be used, got none in {len(self._skipped)}; the first: "
                    f"{self._first_skipped}"
                )
        return batch

    def _skip(self, row: int, why: str, *, on_purpose: bool = False) -> None:
        if row not in self._skipped:
            log.warning("demonstration left out: %s", why)
            if not on_purpose:
                self._unusable.add(why)
        self._first_skipped = self._first_skipped or why
        self._skipped.add(row)

    def _one(self, row: int) -> Item | None:
        """None for one that cannot be used."""
        if row in self._kept:
            self._kept.move_to_end(row)
            return self._kept[row]
        try:
            item: Item | None = self._encode_row(row)
        except RowError as error:
            self._skip(row, str(error), on_purpose=isinstance(error, TooLong | Filtered))
            item = None
        self._kept[row] = item
        self._num_bytes += _num_bytes(item)
        while self._num_bytes > _CACHED_BYTES and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= _num_bytes(oldest)
        return item


def _num_bytes(item: Item | None) -> int:
    return _CACHED_ROW_BYTES + (item.num_bytes if item is not None else 0)


def cut(lengths: Sequence[int], max_tokens: int, num_ranks: int) -> list[list[list[int]]]:
    """Rounds of one micro-batch a rank, as indices into `lengths`, with at most `max_tokens` in each.

    Longest first, into the emptiest that fits, so that the ranks of a round finish together. Every rank has as many
    micro-batches, some of them perhaps empty: ranks that differ in their number would hang.
    """
    micro_batches: list[list[int]] = []
    used: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [b for b in range(len(used)) if used[b] + lengths[index] <= max_tokens]
        if len(used) < num_ranks or not fitting:
            micro_batches.append([])
            used.append(0)
            fitting = [len(used) - 1]
        chosen = min(fitting, key=used.__getitem__)
        micro_batches[chosen].append(index)
        used[chosen] += lengths[index]
    micro_batches += [[] for _ in range(-len(micro_batches) % num_ranks)]
    return [micro_batches[start : start + num_ranks] for start in range(0, len(micro_batches), num_ranks)]
