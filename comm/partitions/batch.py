"""Rows as a reader holds them: views of the rings, and the promise to say when they are done with.

Owns how columns of some rows are read, whatever records they lie in. Decides nothing: which rows these are came from the
coordinator (`places.py`).

    batch["tokens"]            one array a row, read-only views; JSON columns: one value a row
    batch.tensors("tokens")    the same as torch tensors, with their own dtype (bf16 too), no copy
    batch.nested()             {"a": {"b": [...]}}: columns by their path
    batch.ack()                done: no view is used any more

Invariant: views are good until the batch is acknowledged (or, of `get(copy=False)`, until the rows are cleared). `ack` and
`valid` look at the generations; a mismatch means that what was computed is to be thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rondo.comm.partitions.nested import decoded, unflatten
from rondo.comm.partitions.runs import count, expand
from rondo.comm.ring.ring import Record
from rondo.runtime.errors import CorruptData

Piece = Sequence[int]  # [record's place in the list, first row there, rows]


class Batch:
    """`rows` are runs of row ids; `keys`, `groups`, `versions`, `tokens` and `tags` have one value a row, or are None."""

    def __init__(
        self, answer: Mapping[str, Any], records: Sequence[Record], acknowledge: Callable[[], None] | None = None
    ) -> None:
        self.rows: list[list[int]] = answer["rows"]
        self.keys: list[str] | None = answer.get("keys")
        self.groups: list[int | str | None] | None = answer.get("groups")
        self.versions: list[int | None] | None = answer.get("versions")
        self.tokens: list[int] | None = answer.get("tokens")
        self.tags: list[dict[str, Any]] | None = answer.get("tags")
        self._pieces: dict[str, list[Piece]] = answer["columns"]
        self._records = records
        self._acknowledge = acknowledge
        self._copies: dict[str, list[np.ndarray]] | None = None

    def __len__(self) -> int:
        return count(self.rows)

    @property
    def ids(self) -> list[int]:
        return list(expand(self.rows))

    @property
    def columns(self) -> list[str]:
        return list(self._pieces)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __getitem__(self, name: str) -> list[Any]:
        arrays = self.arrays(name)
        return [decoded(array) for array in arrays] if self.is_json(name) else arrays

    def arrays(self, name: str) -> list[np.ndarray]:
        """One array a row, in its shape, with the numpy dtype that stores the column (`records.STORAGE`)."""
        if self._copies is not None:
            return self._copies[name]
        found: list[np.ndarray] = []
        for record, first, rows in self._pieces[name]:
            found += self._records[record].arrays(name)[first : first + rows]
        return found

    def dtype(self, name: str) -> str:
        """The column's own dtype, such as "bfloat16"."""
        return self._records[self._pieces[name][0][0]].dtype(name)

    def is_json(self, name: str) -> bool:
        pieces = self._pieces[name]
        return bool(pieces) and name in self._records[pieces[0][0]].descriptor.meta.get("json", ())

    def tensors(self, name: str) -> list[Any]:
        """One torch tensor a row over the same memory; not to be written to."""
        from rondo.comm.ring.tensors import as_tensor  # the bus imports no torch: who asks for tensors has it

        return [as_tensor(array, self.dtype(name)) for array in self.arrays(name)]

    def nested(self) -> dict[str, Any]:
        """Every column under its path, as `batch[name]` gives it."""
        return unflatten({name: self[name] for name in self._pieces})

    def valid(self) -> bool:
        """Whether the memory still holds these rows; always true of copies."""
        return self._copies is not None or all(record.valid() for record in self._records)

    def copied(self) -> Batch:
        """Keep the rows beyond the batch: every array becomes its own. Raises CorruptData when they are gone already."""
        copies = {name: [array.copy() for array in self.arrays(name)] for name in self._pieces}
        self._check()
        self._copies = copies
        return self

    def ack(self) -> None:
        """Done with these rows. It travels with the next request of the stream, at its end, or with `Partition.flush`.

        Raises CorruptData when memory was overwritten while it was read, which no rule of rondo lets happen.
        """
        if self._acknowledge is None:
            raise ValueError("only a batch of a stream must be acknowledged, got one of `get`. Drop it.")
        self._check()
        self._acknowledge()

    def _check(self) -> None:
        if not self.valid():
            raise CorruptData(
                "rows must stay in memory until they are acknowledged or copied, got other bytes there: they were cleared "
                "meanwhile. Throw away what was computed from them."
            )
