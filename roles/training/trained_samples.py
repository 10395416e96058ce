"""Every trained sample in full, as the loss saw it: a parquet file a step and rank, for people, `debug.train_only` and pandas.

Owns which samples are kept, the files, and reading them. Does not own what a column means (`TrainRow`, `objective.py`), nor the
words beside it, which rollout writes on the bus (`sampling/columns.py`). Imports neither torch nor, before it is used, pyarrow.

    runs/x/samples/trained/step_000012.0-of-2.parquet         rows_of_step(run, 12) -> [TrainedRow(group=96, sample=0, ...), ...]

    step round update group sample part reward finish        which row it was, and in which round of its rank
    tokens mask advantages rollout_log_probs policy_versions ...        by the names of `TrainRow`; null where it had none
    media_key media                                          media once a file, behind the first row that has that key
    response prompt label details error                      JSON texts; response is what the tokens behind the prompt say
    finish                                                   how it ended

Promise: what stands there is what the loss was given, to the bit. A file is whole or not there. Every row of a committed step
stands in exactly one, also where ranks were killed or the run resumed: a step's files lie there before it is committed, and of a
step that is trained again they are replaced. The exceptions are told: a disk that takes no more, or takes longer than `HOLD_S`
for a step, loses what it could not take and holds nothing up. The oldest steps go where `max_bytes` asks for it.
"""

from __future__ import annotations

import asyncio
import io
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from rondo.models.media.inputs import MediaInputs, with_turns
from rondo.roles.config.samples import SamplesConfig
from rondo.roles.shown import read, written
from rondo.roles.streams import WORDS
from rondo.runtime.errors import CorruptData
from rondo.runtime.records.record import write_whole
from rondo.runtime.records.telling import telling
from rondo.runtime.waits import waiting

if TYPE_CHECKING:
    from rondo.comm.bus.bus import Row
    from rondo.roles.training.objective import TrainRow

FOLDER = Path("samples") / "trained"
HOLD_S = 10.0
"""A commit waits so long at most for the files of its step."""
_NAME = re.compile(r"step_(\d{6,})\.(\d+)-of-(\d+)\.parquet")
_WHAT = "trained samples"
_FORMAT = b"1"
_PLACE = {"step": "int32", "round": "int32", "update": "int32", "group": "int64", "sample": "int32", "part": "int32"}
_ARRAYS = (
    "tokens", "mask", "advantages", "rollout_log_probs", "policy_versions", "old_log_probs", "ref_log_probs",
    "teacher_log_probs", "scored_version", "scored_log_probs", "compared_ids", "compared_log_probs", "routed_experts",
)  # fmt: skip
_TEXTS = ("response", "prompt", "label", "details", "error")


@dataclass(slots=True)
class TrainedRow:
    """A row as it was trained. `columns`: by the names of `TrainRow`, with `scored_version` int32 [1] and `scored_log_probs` for
    `scored`. `prompt`, `label` and `details` are as the reward function had them, or a text that was cut. `response`: the text of
    the tokens behind the prompt, special ones included."""

    step: int
    round: int
    update: int
    group: int
    sample: int
    part: int
    reward: float | None
    finish: str
    columns: Mapping[str, np.ndarray]
    media: MediaInputs | None = None
    response: Any = None
    prompt: Any = None
    label: Any = None
    details: Any = None
    error: Any = None
    rank: int = 0


@dataclass
class TrainedSamples:
    """Writes those of one rank. Rows are copied as they are trained; a thread of its own encodes and writes them."""

    run: Path
    config: SamplesConfig
    rank: int
    world_size: int
    _rows: list[TrainedRow] = field(default_factory=list, init=False)
    _media: dict[str, MediaInputs] = field(default_factory=dict, init=False)
    _writing: asyncio.Future[None] | None = field(default=None, init=False)
    _files: deque[tuple[Path, int]] = field(default_factory=deque, init=False)

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "trained-samples")

    def begin(self, version: int) -> None:
        """Training goes on at `version`: files of later steps are of what is trained again, or was given up."""
        with telling(_WHAT):
            mine = [(path, name) for path, name in _files(self.run) if int(name[2]) % self.world_size == self.rank]
            own = sorted((int(name[1]), path) for path, name in mine)  # files of ranks that are no more are somebody's
            self._files = deque((path, path.stat().st_size) for step, path in own if step < version)
            for step, path in own:
                if step >= version:
                    path.unlink()

    def forget(self, step: int) -> None:
        """The rows of a step that was given up, and begins again."""
        self._rows = [row for row in self._rows if row.step != step]
        self._media = {}

    def add(self, step: int, round: int, update: int, named: Sequence[Row], rows: Sequence[TrainRow]) -> None:
        """Copies those of a round that are kept."""
        with telling(_WHAT):
            self._rows += self._made(step, round, update, named, rows)

    def _made(
        self, step: int, round: int, update: int, named: Sequence[Row], rows: Sequence[TrainRow]
    ) -> Iterator[TrainedRow]:
        for name, row in zip(named, rows, strict=True):
            if not (self.config.keeps(name.group) and self.config.keeps_reward(name.reward)):
                continue
            arrays: dict[str, Any] = {each: getattr(row, each) for each in _ARRAYS if not each.startswith("scored_")}
            if row.scored is not None:
                arrays |= {"scored_version": np.array([row.scored[0]], np.int32), "scored_log_probs": row.scored[1]}
            words = orjson.loads(name.array(WORDS).tobytes() or b"{}") if WORDS in name.columns else {}
            yield TrainedRow(
                step, round, update, name.group, name.sample, name.part, name.reward, name.finish,
                {each: array.copy() for each, array in arrays.items() if array is not None},
                None if row.media is None else self._copied(row.media), **words,
            )  # fmt: skip

    def _copied(self, media: MediaInputs) -> MediaInputs:
        """Once for all samples of a prompt group."""
        if media.key not in self._media:
            turns = tuple((at, MediaInputs(one.key, _arrays(one))) for at, one in media.turns)
            self._media[media.key] = MediaInputs(media.key, _arrays(media), turns)
        return self._media[media.key]

    async def write(self, step: int) -> None:
        """The file of a step, on its thread; before the commit of the step. Returns when it is there, or cannot be."""
        rows = [row for row in self._rows if row.step == step]
        self.forget(step)  # those of the next one may be here
        with telling(_WHAT):
            if self._writing is not None and not self._writing.done():
                raise OSError(f"the step before must be written by now, got none within {HOLD_S:g} s")
            loop = asyncio.get_running_loop()
            self._writing = loop.run_in_executor(self._thread, self._write, step, rows)
            async with waiting("trained samples", peer="disk", deadline_s=HOLD_S):
                await asyncio.shield(self._writing)

    def _write(self, step: int, rows: Sequence[TrainedRow]) -> None:
        if not rows:
            return
        folder = self.run / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"step_{step:06d}.{self.rank}-of-{self.world_size}.parquet"
        data = encoded(rows)
        total = len(data) + sum(size for _, size in self._files)
        while self._files and total > self.config.max_bytes // self.world_size:
            oldest, size = self._files.popleft()
            oldest.unlink(missing_ok=True)
            total -= size
        write_whole(path, data)
        self._files.append((path, len(data)))


def _arrays(media: MediaInputs) -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in media.arrays.items()}


def encoded(rows: Sequence[TrainedRow]) -> bytes:
    """A parquet file of them."""
    import pyarrow as pa
    from pyarrow import parquet

    columns: dict[str, Any] = {
        name: pa.array([getattr(row, name) for row in rows], kind) for name, kind in _PLACE.items()
    }
    columns["reward"] = pa.array([row.reward for row in rows], "float64")
    columns["finish"] = pa.array([row.finish for row in rows], "string")
    shapes = {}
    for name in _ARRAYS:
        arrays = [row.columns.get(name) for row in rows]
        given = [each for each in arrays if each is not None]
        if not given:
            continue
        full = [each for each in given if each.size] or given[:1]
        shapes[name] = [str(full[0].dtype), *full[0].shape[1:]]
        sizes = [0 if each is None else each.size for each in arrays]
        offsets = pa.array(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))
        values = pa.array(np.concatenate([each.ravel() for each in full]))
        absent = pa.array([each is None for each in arrays])
        columns[name] = pa.LargeListArray.from_arrays(offsets, values, mask=absent)
    keys = [None if row.media is None else row.media.key for row in rows]
    columns["media_key"] = pa.array(keys, "string")
    first = {key: at for at, key in reversed(list(enumerate(keys)))}
    blobs = [
        written(row.media.placed).tobytes() if row.media is not None and first[row.media.key] == at else None
        for at, row in enumerate(rows)
    ]
    columns["media"] = pa.array(blobs, "large_binary")
    for name in _TEXTS:
        texts = [None if (value := getattr(row, name)) is None else orjson.dumps(value).decode() for row in rows]
        columns[name] = pa.array(texts, "string")
    table = pa.table(columns).replace_schema_metadata({"rondo": _FORMAT, "shapes": orjson.dumps(shapes)})
    file = io.BytesIO()
    parquet.write_table(table, file, compression="zstd", row_group_size=1024)
    return file.getvalue()


# ---- reading ----------------------------------------------------------------------------------------------------------


def steps_of(run: Path) -> dict[int, list[Path]]:
    """Step -> its files, in the order of the ranks; the steps in order. Of a run that was never resumed with other ranks, or was,
    each row stands in one of them."""
    found: dict[int, list[tuple[int, Path]]] = {}
    for path, name in _files(run):
        found.setdefault(int(name[1]), []).append((int(name[2]), path))
    return {step: [path for _, path in sorted(found[step])] for step in sorted(found)}


def rows_of_step(
    run: Path, step: int, columns: Iterable[str] | None = None, group: int | None = None
) -> list[TrainedRow]:
    """The rows of a step as they were trained: of every rank those of its rounds, in their order. columns: only these of the
    arrays, and no media; group: only this one's. Nothing where none were kept; CorruptData for a file that is none of these."""
    return [row for path in steps_of(run).get(step, ()) for row in rows_of(path, columns, group)]


def rows_of(path: Path, columns: Iterable[str] | None = None, group: int | None = None) -> list[TrainedRow]:
    """Those of one file, as `rows_of_step`."""
    import pyarrow as pa
    from pyarrow import parquet

    name = _NAME.fullmatch(path.name)
    try:
        texts = [each for each in _TEXTS if each in parquet.read_schema(path).names]  # earlier files have no response
        asked = None if columns is None else [*_PLACE, "reward", "finish", *texts, *columns]
        chosen = None if group is None else [("group", "=", group)]
        table = parquet.read_table(path, columns=asked, partitioning=None, filters=chosen)
        shapes = orjson.loads(table.schema.metadata[b"shapes"])
    except (pa.ArrowInvalid, KeyError, TypeError, orjson.JSONDecodeError) as error:
        raise CorruptData(f"{path} must be a file of trained samples, got none: {error}. Remove it") from error
    given = {each: _split(table[each].combine_chunks(), shapes[each]) for each in _ARRAYS if each in table.column_names}
    plain = {each: table[each].to_pylist() for each in (*_PLACE, "reward", "finish", *texts)}
    media: dict[str, MediaInputs | None] = {}
    keys = table["media_key"].to_pylist() if columns is None else [None] * len(table)
    for at, key in enumerate(keys):
        if key is not None and key not in media:
            media[key] = _media(np.frombuffer(table["media"][at].as_py(), np.uint8))
    found = []
    for at, key in enumerate(keys):
        fields = {each: values[at] for each, values in plain.items()}
        fields |= {each: None if fields[each] is None else orjson.loads(fields[each]) for each in texts}
        fields["columns"] = {each: array for each, arrays in given.items() if (array := arrays[at]) is not None}
        fields["media"] = None if key is None else media[key]
        found.append(TrainedRow(**fields, rank=int(name[2]) if name is not None else 0))
    return found


def _split(column: Any, form: Sequence[Any]) -> list[np.ndarray | None]:
    dtype, *shape = form
    offsets, values = column.offsets.to_numpy(), column.values.to_numpy(zero_copy_only=False).astype(dtype, copy=False)
    return [
        (values[begin:end].reshape(-1, *shape) if end > begin else values[:0]) if valid else None
        for begin, end, valid in zip(offsets[:-1], offsets[1:], column.is_valid().to_pylist(), strict=True)
    ]


def _media(blob: np.ndarray) -> MediaInputs | None:
    placed = read(blob)
    prompt = placed[0][1] if placed and placed[0][0] == 0 else None
    return with_turns(prompt, placed if prompt is None else placed[1:])


def _files(run: Path) -> list[tuple[Path, re.Match[str]]]:
    try:
        return [(path, found) for path in (run / FOLDER).iterdir() if (found := _NAME.fullmatch(path.name))]
    except FileNotFoundError:
        return []
