"""Samples that a checkpoint keeps: generated and scored, not yet trained. A resumed run does not make them again.

Owns copying them out of the rings, the file, and finding those of a lease. Does not own which groups are open (the index says),
nor their media and derived columns, which are cheap to make again.

    checkpoints/step_000050/samples.safetensors
        tokens            int32   all samples end to end, and so every base column
        tokens.lengths    int64   [samples]
        header            "samples": [[group, position, sample, length, response, reward, oldest, newest], ...]

Invariant: what is given back is what was put, to the bit, for the same group at the same position of the data and with the same
prompt; so the bound on staleness, which held when it was put, holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from safetensors import safe_open
from safetensors.numpy import save_file

from rondo.comm.bus import Bus, Views
from rondo.comm.group import LIVE, Group
from rondo.comm.records import Column
from rondo.roles.streams import BASE_COLUMNS, ROLLOUT_COLUMNS
from rondo.runtime.errors import CorruptData
from rondo.runtime.segments import NoSuchSegment

FILE = "samples.safetensors"
_HEADER, _LENGTHS = "samples", ".lengths"


@dataclass(frozen=True, slots=True)
class KeptSample:
    group: int
    position: int
    sample: int
    info: tuple[float, ...]
    """As `Bus.put_samples` takes it: length, response tokens, reward, oldest and newest policy version."""
    columns: Mapping[str, np.ndarray]


def copy_samples(bus: Bus, state: Mapping[str, Any]) -> list[KeptSample]:
    """Copies of all finished samples of the open groups in the index `state`, which is as new as the rings or older: a group
    that was settled meanwhile, and let go of its records or its ring, is left out. On any thread."""
    kept: list[KeptSample] = []
    with bus.views() as views:
        for fields in state["groups"]:
            group = Group.load(fields)
            if group.state not in LIVE or not group.known:
                continue
            with suppress(CorruptData, NoSuchSegment):
                kept += _copies(views, group)
    return kept


def _copies(views: Views, group: Group) -> list[KeptSample]:
    found: dict[int, dict[str, np.ndarray]] = {sample: {} for sample in group.numbers()}
    for names, first, count, (ring, pos, seq, row) in group.parts:
        base = [name for name in names if name in ROLLOUT_COLUMNS]
        if not base:
            continue
        record = views[ring].read(pos, seq)
        for name in base:
            for i, array in enumerate(record.arrays(name)[row : row + count]):
                found[first + i][name] = array.copy()
        if not record.valid():
            raise CorruptData(f"record {seq} at {pos} of {ring} must stay while it is copied, got another one there.")
    return [
        KeptSample(group.id, group.position, sample, group.info_of(sample), columns)
        for sample, columns in found.items()
    ]


def write_samples(folder: Path, kept: Sequence[KeptSample]) -> None:
    """The file in `folder`; none where there are no samples."""
    if not kept:
        return
    tensors: dict[str, np.ndarray] = {}
    for name in kept[0].columns:
        arrays = [sample.columns[name] for sample in kept]
        tensors[name] = np.concatenate([array for array in arrays if len(array)] or arrays[:1])
        tensors[name + _LENGTHS] = np.array([len(array) for array in arrays], np.int64)
    header = [[sample.group, sample.position, sample.sample, *sample.info] for sample in kept]
    save_file(tensors, folder / FILE, metadata={_HEADER: orjson.dumps(header).decode()})


class KeptSamples:
    """Those of one checkpoint, or none, by prompt group. Each is given out once."""

    def __init__(self, kept: Sequence[KeptSample] = ()) -> None:
        self._by_group: dict[int, list[KeptSample]] = {}
        for sample in kept:
            self._by_group.setdefault(sample.group, []).append(sample)

    @classmethod
    def read(cls, folder: Path | None, names: Sequence[str] = BASE_COLUMNS) -> KeptSamples:
        """The samples of the checkpoint `folder`, with these columns. Empty where there is no checkpoint, or none in it."""
        if folder is None or not (folder / FILE).exists():
            return cls()
        with safe_open(folder / FILE, framework="numpy") as file:
            header = orjson.loads(file.metadata()[_HEADER])
            ends = {name: np.cumsum(file.get_tensor(name + _LENGTHS))[:-1] for name in names}
            columns = {name: np.split(file.get_tensor(name), ends[name]) for name in names}
        return cls(
            [
                KeptSample(group, position, sample, tuple(info), {name: columns[name][i] for name in names})
                for i, (group, position, sample, *info) in enumerate(header)
            ]
        )

    def __len__(self) -> int:
        return sum(map(len, self._by_group.values()))

    def take(self, group: int, position: int, prompt: np.ndarray) -> list[KeptSample]:
        """What is kept of a prompt group, by sample number; nothing where it is another prompt by now."""
        kept = self._by_group.pop(group, [])
        same = [
            sample
            for sample in kept
            if sample.position == position and np.array_equal(sample.columns["tokens"][: len(prompt)], prompt)
        ]
        return sorted(same, key=lambda sample: sample.sample)


def columns_of(samples: Sequence[KeptSample]) -> list[Column]:
    """The base columns of some samples, as they are put."""
    return [
        Column(name, samples[0].columns[name].dtype.name, [sample.columns[name] for sample in samples])
        for name in samples[0].columns
    ]
