"""The parity file: what every committed step was trained on, row by row, so that two runs can be compared to the bit.

Owns the file's form, writing and reading. Does not own the comparison (`launch/report/diff.py`), nor when a step is committed.
Written under `deterministic=True` alone, a file a rank in the run directory's `parity/`, a line a step:

    {"time": ..., "step": 3, "version": 4, "checksum": 1893, "rounds": [[[12, 0, 77, 1405], [12, 1, 912, 33]], ...]}
                                       (group, sample, checksum of its tokens, checksum of its other columns)

Invariant: a line is written before its step is committed, so none is missing; a step that ran again after a death or a resume
has a line for each time, and the last one counts. A prompt group's number is its position in the order of the data. Light.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rondo.runtime.records.record import JsonLines, read_lines

FOLDER = "parity"

RowSum = tuple[int, int, int, int]
"""(group, sample, checksum of its tokens, checksum of everything else that the loss sees of it)."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one rank trained in one step. `checksum` is that of this rank's part of the weights after it."""

    step: int
    version: int
    checksum: int
    rounds: tuple[tuple[RowSum, ...], ...]


def row_sum(group: int, sample: int, tokens: np.ndarray, columns: Iterable[np.ndarray | None]) -> RowSum:
    """The row's name and checksums. An absent column differs from an empty one."""
    rest = 0
    for column in columns:
        rest = zlib.crc32(b"-" if column is None else column.tobytes(), rest)
    return group, sample, zlib.crc32(tokens.tobytes()), rest


class ParityLog:
    """This rank's file."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        path = run_dir / FOLDER / f"rank_{rank}.jsonl"
        path.parent.mkdir(exist_ok=True)
        self._lines = JsonLines(path, what="parity")
        self._rounds: list[Sequence[RowSum]] = []

    def add(self, rows: Sequence[RowSum]) -> None:
        """The rows of one round in their order; none where this rank ran a dummy."""
        self._rounds.append(rows)

    def taken(self) -> Sequence[Sequence[RowSum]]:
        """What was added since the last time."""
        rounds, self._rounds = self._rounds, []
        return rounds

    def write(self, version: int, checksum: int, rounds: Sequence[Sequence[RowSum]]) -> None:
        self._lines.write({"step": version - 1, "version": version, "checksum": checksum, "rounds": rounds})


def read(run_dir: Path) -> dict[int, dict[int, Step]]:
    """rank -> step -> what was trained; empty where the run wrote none. A last line without its end is left out."""
    ranks: dict[int, dict[int, Step]] = {}
    for path in sorted((run_dir / FOLDER).glob("rank_*.jsonl")):
        steps = ranks.setdefault(int(path.stem.removeprefix("rank_")), {})
        for fields in read_lines(path.read_bytes().splitlines(keepends=True), path):
            rounds = tuple(tuple((g, s, t, c) for g, s, t, c in rows) for rows in fields["rounds"])
            steps[fields["step"]] = Step(fields["step"], fields["version"], fields["checksum"], rounds)
    return ranks
