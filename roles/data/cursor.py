"""Cursor: from a position in the run to a row of the data, shuffled anew in every pass, without keeping the order.

Owns the order of rows, of kinds and sources of rows where that is asked for, and the seeded split. Does not own rows
(`datasets.py`) or who advances (the coordinator counts positions). Positions grow through all passes, so neither the end of a
pass nor a step longer than the data is special.

    order = Order(num_rows=3, seed=7)          # position 0 1 2 | 3 4 5 | ...
    order.locate(4) -> Place(pass_number=1, row=...)

Invariant: within a pass every row comes exactly once, and `locate` is a pure function of (num_rows, seed, position): a
resumed run, another process and another machine see the same order. Nothing is stored but the position, since the
shuffle is computed: a Feistel network over the next power of four, walked until it lands inside the range (Black and
Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002). numpy does not promise its streams across versions.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

SHARE_OF = 10_000
"""In so many rows each source of a mixture has its share, to the row."""
_ROUNDS = 8
_MASK = (1 << 64) - 1


class Permutation:
    """A seeded permutation of range(size) in constant memory: `permutation(i)` for i in range(size)."""

    def __init__(self, size: int, *key: int | str) -> None:
        self.size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS)]

    def __call__(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise IndexError(f"index must be in range({self.size}), got {index}")
        half_bits, low_mask = self._half_bits, (1 << self._half_bits) - 1
        while True:
            left, right = index >> half_bits, index & low_mask
            for key in self._keys:
                left, right = right, left ^ (_mix(right ^ key) & low_mask)
            index = left << half_bits | right
            if index < self.size:
                return index


def _mix(x: int) -> int:
    """splitmix64's finalizer (Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _MASK
    return x ^ x >> 31


@dataclass(frozen=True, slots=True)
class Place:
    """What a position stands for: which pass over the data, counted from 0, and which row of it."""

    pass_number: int
    row: int


class Balance:
    """Rows of several kinds, so mixed that every stretch of a pass holds each kind in its share, to about one row.

    `kinds` of the rows, in their order; `shares` of the kinds, None: as they are among the rows. Where one kind has no more rows
    in a pass, the others fill its places in their shares; so each row comes once, and no step waits for a kind that ran dry."""

    def __init__(self, kinds: Sequence[str], shares: Mapping[str, float] | None = None) -> None:
        self.rows = {name: [at for at, kind in enumerate(kinds) if kind == name] for name in sorted(set(kinds))}
        names = list(self.rows)
        counts = [len(mine) for mine in self.rows.values()]
        every = [shares[name] for name in names] if shares is not None else counts
        # The i-th row of a kind lies where it is due: (i + 1/2) / share.
        due = [(np.arange(count) + 0.5) / share for count, share in zip(counts, every, strict=True)]
        order = np.argsort(np.concatenate(due), kind="stable")
        self._names = names
        self._kinds = np.repeat(np.arange(len(names), dtype=np.uint8), counts)[order]
        self._numbers = np.concatenate([np.arange(count) for count in counts])[order]

    def at(self, offset: int) -> tuple[str, int]:
        """(kind, which of its rows, counted from 0) at a place of a pass."""
        return self._names[self._kinds[offset]], int(self._numbers[offset])


class Mixture:
    """Sources that share the positions by their weights, each with passes of its own, so that every stretch holds each in its
    share, to about one row. `rows`: which rows are of a source, by its name."""

    def __init__(self, rows: Mapping[str, range], weights: Mapping[str, float]) -> None:
        exact = {name: weights[name] / sum(weights.values()) * SHARE_OF for name in rows}
        counts = {name: max(1, int(each)) for name, each in exact.items()}
        # Largest remainders: the shares of a stretch are whole rows.
        for name in sorted(exact, key=lambda name: (counts[name] - exact[name], name))[
            : max(0, SHARE_OF - sum(counts.values()))
        ]:
            counts[name] += 1
        self.rows, self._counts = rows, counts
        self._stretch = Balance([name for name in sorted(counts) for _ in range(counts[name])])
        self._size = sum(counts.values())

    def at(self, position: int) -> tuple[str, int]:
        """(source, how many rows of it come before) at a position of the run."""
        stretch, offset = divmod(position, self._size)
        name, number = self._stretch.at(offset)
        return name, stretch * self._counts[name] + number


@dataclass(frozen=True, slots=True)
class Order:
    """The order of all rows in all passes. `num_passes` None is endless."""

    num_rows: int
    seed: int
    shuffle: bool = True
    num_passes: int | None = None
    balance: Balance | None = None
    mixture: Mixture | None = None

    @property
    def num_positions(self) -> int | None:
        """Positions of the whole run, or None without end."""
        return None if self.num_passes is None else self.num_rows * self.num_passes

    def locate(self, position: int) -> Place:
        """The place of a position. IndexError past the last pass."""
        return self.row_of(*self.source_at(position))

    def source_at(self, position: int) -> tuple[str, int]:
        """(source, how many rows of it come before) at a position; without a mixture all are of source ""."""
        return ("", position) if self.mixture is None else self.mixture.at(position)

    def num_rows_of(self, source: str) -> int:
        """In one pass over a source."""
        return self.num_rows if self.mixture is None else len(self.mixture.rows[source])

    def row_of(self, source: str, number: int) -> Place:
        """The place of a source's row `number`, counted from 0 over all passes. IndexError past the last one."""
        end = self.num_positions
        if number < 0 or (end is not None and number >= end):
            raise IndexError(f"position must be in range({end}), got {number}")
        pass_number, offset = divmod(number, self.num_rows_of(source))
        if self.mixture is not None:
            mine = self.mixture.rows[source]
            return Place(pass_number, mine[self._shuffled(len(mine), offset, pass_number, source)])
        if self.balance is None:
            return Place(pass_number, self._shuffled(self.num_rows, offset, pass_number))
        kind, number = self.balance.at(offset)
        rows = self.balance.rows[kind]
        return Place(pass_number, rows[self._shuffled(len(rows), number, pass_number, kind)])

    def _shuffled(self, size: int, index: int, *key: int | str) -> int:
        if not self.shuffle:
            return index
        return _shuffle(size, "pass", self.seed, *key)(index)


@functools.lru_cache(maxsize=512)
def _shuffle(size: int, *key: int | str) -> Permutation:
    return Permutation(size, *key)


class Cursor(Iterator[Place]):
    """An order and where it stands. Ends like any iterator when the last pass is done."""

    def __init__(self, order: Order, position: int = 0) -> None:
        self.order = order
        self.position = position

    def __next__(self) -> Place:
        if self.position == self.order.num_positions:
            raise StopIteration
        place = self.order.locate(self.position)
        self.position += 1
        return place


def held_out_rows(num_rows: int, num_held_out: int, seed: int) -> tuple[int, ...]:
    """Rows kept from training: `num_held_out` of range(num_rows), drawn without replacement, in the order drawn."""
    draw = Permutation(num_rows, "held out", seed)
    return tuple(draw(i) for i in range(num_held_out))
