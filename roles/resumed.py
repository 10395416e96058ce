"""Samples that a checkpoint keeps: generated and scored, not yet trained. A resumed run does not make them again.

Owns copying them out of the rings, the file, and finding those of a lease. Does not own which groups are open (the index says),
nor their prompts' media and derived columns, which are cheap to make again.

    checkpoints/step_000050/samples.safetensors
        tokens            int32   all rows end to end, and so every base column
        tokens.lengths    int64   [rows]
        header            "format": "2"
                          "rows": [[group, position, sample, part, length, response, reward, oldest, newest, finish],
                           ...]

Invariant: what is given back is what was put, to the bit, for the same group at the same position of the data and with the same
prompt; so the bound on staleness, which held when it was put, holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
from safetensors import safe_open
from safetensors.numpy import save_file

from rondo.comm.bus.bus import Bus
from rondo.comm.bus.group import INFO, LIVE, REWARD, Group
from rondo.comm.ring.records import Column
from rondo.comm.ring.views import Views
from rondo.roles.streams import BASE_COLUMNS, ROLLOUT_COLUMNS, WORDS
from rondo.runtime.checkpoints import has, newest_complete, verify
from rondo.runtime.errors import CorruptData
from rondo.runtime.memory.segments import NoSuchSegment

FILE = "samples.safetensors"
_FORMAT, _ROWS, _LENGTHS = "format", "rows", ".lengths"


@dataclass(frozen=True, slots=True)
class KeptRow:
    """A part of a sample. A sample is kept with all of them."""

    group: int
    position: int
    sample: int
    part: int
    info: tuple[float | None, ...]
    """`INFO`, as `Bus.put_samples` takes it."""
    columns: Mapping[str, np.ndarray]


def copy_samples(bus: Bus, state: bytes) -> list[KeptRow]:
    """Copies of all finished samples of the open groups in the index `state` (JSON), which is as new as the rings or older: a
    group that was settled meanwhile, and let go of its records or its ring, is left out. On any thread."""
    kept: list[KeptRow] = []
    with bus.views() as views:
        for fields in orjson.loads(state)["groups"]:
            group = Group.load(fields)
            if group.state not in LIVE or not group.known:
                continue
            with suppress(CorruptData, NoSuchSegment):
                kept += _copies(views, group)
    return kept


def _copies(views: Views, group: Group) -> list[KeptRow]:
    found: dict[tuple[int, int], dict[str, np.ndarray]] = {}
    for names, part, first, count, (ring, pos, seq, row) in group.extents:
        base = [name for name in names if name in ROLLOUT_COLUMNS]
        if not base:
            continue
        record = views[ring].read(pos, seq)
        for name in base:
            for i, array in enumerate(record.arrays(name)[row : row + count]):
                found.setdefault((first + i, part), {})[name] = array.copy()
        if not record.valid():
            raise CorruptData(f"record {seq} at {pos} of {ring} must stay while it is copied, got another one there.")
    return [
        KeptRow(group.id, group.position, sample, part, group.info_of(sample, part), columns)
        for (sample, part), columns in sorted(found.items(), key=lambda each: each[0])
    ]


def write_samples(folder: Path, kept: Sequence[KeptRow]) -> None:
    """The file in `folder`; none where there are no samples."""
    if not kept:
        return
    tensors: dict[str, np.ndarray] = {}
    for name in kept[0].columns:
        arrays = [row.columns[name] for row in kept]
        tensors[name] = np.concatenate([array for array in arrays if len(array)] or arrays[:1])
        tensors[name + _LENGTHS] = np.array([len(array) for array in arrays], np.int64)
    rows = [[row.group, row.position, row.sample, row.part, *row.info] for row in kept]
    save_file(tensors, folder / FILE, metadata={_FORMAT: "2", _ROWS: orjson.dumps(rows).decode()})


class KeptSamples:
    """Those of one checkpoint, or none, by prompt group. Each is given out once."""

    def __init__(self, kept: Sequence[KeptRow] = ()) -> None:
        self._by_group: dict[int, list[KeptRow]] = {}
        for row in kept:
            self._by_group.setdefault(row.group, []).append(row)

    @classmethod
    def of_newest(cls, checkpoints: Path, names: Sequence[str] = BASE_COLUMNS) -> KeptSamples:
        """Read those of the newest checkpoint, once the file is compared with its digest. Raises CorruptData."""
        folder = newest_complete(checkpoints)
        if folder is None or not has(folder, FILE):
            return cls()
        verify(folder, (FILE,))
        return cls.read(folder, names)

    @classmethod
    def read(cls, folder: Path | None, names: Sequence[str] = BASE_COLUMNS) -> KeptSamples:
        """The samples of the checkpoint `folder`, with these columns. Empty where there is no checkpoint, or none in it."""
        if folder is None or not (folder / FILE).exists():
            return cls()
        with safe_open(folder / FILE, framework="numpy") as file:
            rows = orjson.loads(file.metadata()[_ROWS])
            there = [name for name in names if name != WORDS or name in file.keys()]  # noqa: SIM118  # it is no mapping
            ends = {name: np.cumsum(file.get_tensor(name + _LENGTHS))[:-1] for name in there}
            columns = {name: np.split(file.get_tensor(name), ends[name]) for name in there}
            columns |= {name: [np.zeros(0, np.uint8)] * len(rows) for name in names if name not in there}
        return cls(
            [
                KeptRow(
                    group,
                    position,
                    sample,
                    part,
                    (*info, info[REWARD])[: len(INFO)],
                    {name: columns[name][i] for name in names},
                )
                for i, (group, position, sample, part, *info) in enumerate(rows)
            ]
        )

    def __len__(self) -> int:
        """How many samples."""
        return sum(not row.part for rows in self._by_group.values() for row in rows)

    def take(self, group: int, position: int, prompt: np.ndarray) -> list[KeptRow]:
        """What is kept of a prompt group, part by part as it is put; nothing where it is another prompt by now. A sample is of
        this prompt where one of its rows begins with it: others may have contexts of their own."""
        kept = [row for row in self._by_group.pop(group, []) if row.position == position]
        same = {row.sample for row in kept if np.array_equal(row.columns["tokens"][: len(prompt)], prompt)}
        return sorted((row for row in kept if row.sample in same), key=lambda row: (row.part, row.sample))


def put_kept(bus: Bus, ring: str, group: int, epoch: int, kept: Sequence[KeptRow]) -> None:
    """Put some samples of a prompt group, with all their rows, again."""
    parts = Counter(row.sample for row in kept)
    columns = [
        Column(name, kept[0].columns[name].dtype.name, [row.columns[name] for row in kept]) for name in kept[0].columns
    ]
    bus.put_samples(ring, group, epoch, list(parts), columns, [row.info for row in kept], list(parts.values()))
