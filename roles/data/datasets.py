"""Data sets: rows of prompts, read one at a time.

Owns the columns that settings name, and the split into what is trained on and what is held out. Does not own where rows
lie (`sources.py`), how their media are written (`media_rows.py`), the order in which they are taken (`cursor.py`) or their
tokens (`prompts.py`, `media.py`).

    data = open_dataset(DataConfig(path="train.jsonl", prompt="question", label="answer"))
    len(data), data.row(0)  ->  7472, Row("train.jsonl:1", prompt="Natalia sold ...", label="... #### 72", metadata={})

Invariant: a data set's length and rows do not change while it is open; the two parts of a split share no row.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import math
import random
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

from rondo.models.media.refs import MediaRef
from rondo.roles.data.cursor import Balance, Mixture, Order, held_out_rows
from rondo.roles.data.fingerprints import Fingerprint, Fingerprints, digest_of
from rondo.roles.data.media_rows import with_media
from rondo.roles.data.messages import read_messages, read_tools
from rondo.roles.data.opening import named_columns, open_source
from rondo.roles.data.row_filters import Filtered, refuse_filtered
from rondo.roles.data.sources import RowError, Source, missing_column
from rondo.runtime.errors import ConfigError, Fatal
from rondo.runtime.reference import load_reference
from rondo.runtime.section import settings_at

if TYPE_CHECKING:
    from rondo.roles.config import DataConfig, JobConfig

__all__ = ["Dataset", "Row", "RowError", "Rows", "demonstrations", "open_dataset", "open_splits", "train_order"]

log = logging.getLogger(__name__)

_NUM_TRIED = 16
"""Rows that are read before a data set is refused for what is wrong with the first of them."""


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt. `name` tells users where it stands; `prompt` is text or a list of chat messages, in which image, audio and
    video parts are places for `media`, in their order; `tools` are shown by the chat template."""

    name: str
    prompt: str | list[dict[str, Any]]
    label: Any
    metadata: dict[str, Any]
    media: tuple[MediaRef, ...] = ()
    tools: Sequence[Any] = ()
    rejected: Any = None
    """Of a pair: the worse answer, where `label` is the better; text or a list of chat messages."""
    margin: float = 0.0
    """Of a pair: how far apart the rewards of its answers are to be."""
    source: str = ""
    """Of several sources: the one that it is of."""
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """All columns of the row as the source has them, by their names there."""

    def named(self, data: DataConfig) -> Mapping[str, Any]:
        """Return its columns, what its metadata hold, and its prompt and label as they were read, by name."""
        read = {data.prompt: self.prompt} | ({} if data.label is None else {data.label: self.label})
        return ChainMap(read, self.metadata, cast(Any, self.columns))


class Rows(Protocol):
    """Rows by index."""

    def __len__(self) -> int: ...
    def row(self, index: int) -> Row: ...


class Dataset:
    """The rows of a source that `indices` selects, with the columns that `config`, the settings at `name`, names."""

    def __init__(self, source: Source, config: DataConfig, indices: Sequence[int], name: str = "data") -> None:
        self._source = source
        self._config = config
        self._indices = indices
        self._name = name
        self._filter = None if config.filter is None else load_reference(config.filter, f"{name}.filter")
        self.left_out = source.left_out
        """Why rows are not among these: what a transform could not be given."""

    def __len__(self) -> int:
        return len(self._indices)

    def row(self, index: int) -> Row:
        """Row `index` of this data set. RowError when it lacks a named column or holds the wrong kind of value; Filtered, one of
        these, when a filter leaves it out."""

        at = self._indices[index]
        try:
            values, name = self._source.read(at), self._source.name_of(at)
            if self._filter is not None:
                refuse_filtered(self._filter, values, name)
            return row_of(values, self._config, name)
        except Filtered:
            raise
        except RowError as error:
            raise RowError(settings_at(self._name, str(error), "data")) from error
        except Exception as error:  # of rows that a user's code makes as they are read, any
            raise RowError(
                f"{self._source.name_of(at)}: row must be read without errors, got {type(error).__name__}: {error}. Correct or "
                "remove the row"
            ) from error

    def fingerprint(self) -> Fingerprint:
        """Of all rows of the source up to the end of this one's; meant for the whole, before it is split."""
        return Fingerprint(len(self), self._source.digest(len(self)))

    def split(self, num_held_out: int, seed: int) -> tuple[Dataset, Dataset]:
        """(kept, held out): disjoint, together everything, the same for the same seed; what is kept stays in order."""
        drawn = held_out_rows(len(self), num_held_out, seed)
        kept = Without(self._indices, sorted(drawn))
        held_out = [self._indices[i] for i in drawn]
        return self._with(kept), self._with(held_out)

    def first(self, num_rows: int) -> Dataset:
        """The first rows of this one."""
        return self._with(self._indices[:num_rows])

    def _with(self, indices: Sequence[int]) -> Dataset:
        return Dataset(self._source, self._config, indices, self._name)


class MixedDataset(Dataset):
    """The rows of several data sets, one behind the other, each with what `given` puts into the metadata of its own."""

    def __init__(
        self,
        parts: Mapping[str, Dataset],
        config: DataConfig,
        given: Mapping[str, Mapping[str, Any]],
        indices: Sequence[int] | None = None,
    ) -> None:
        self._parts, self._config, self._given = parts, config, given
        self._firsts = [0, *itertools.accumulate(map(len, parts.values()))]
        self._indices = range(self._firsts[-1]) if indices is None else indices
        self.left_out = [why for part in parts.values() for why in part.left_out]

    def row(self, index: int) -> Row:
        name, part, at = self._part_of(index)
        row = part.row(at)
        prompt, system = row.prompt, self._config.sources[name].system
        if system is not None:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            told = [] if messages[0]["role"] == "system" else [{"role": "system", "content": system}]
            prompt = [*told, *messages]
        return replace(row, prompt=prompt, metadata={**row.metadata, **self._given.get(name, {})}, source=name)

    def _part_of(self, index: int) -> tuple[str, Dataset, int]:
        at = self._indices[index]
        number = bisect.bisect_right(self._firsts, at) - 1
        name = list(self._parts)[number]
        return name, self._parts[name], at - self._firsts[number]

    def fingerprint(self) -> Fingerprint:
        every = [part.fingerprint() for part in self._parts.values()]
        return Fingerprint(len(self), digest_of(lambda at: str(every[at]), range(len(every))))

    def rows_of(self) -> dict[str, range]:
        """Source -> which rows of these are of it. Rows that were held out are drawn: those are in no order of sources."""
        ends = [bisect.bisect_left(self._indices, first) for first in self._firsts]
        return {name: range(*ends[at : at + 2]) for at, name in enumerate(self._parts)}

    def _with(self, indices: Sequence[int]) -> Dataset:
        return MixedDataset(self._parts, self._config, self._given, indices)


class Without(Sequence[int]):
    """`items` without those at the sorted positions `left_out`; memory for those alone."""

    def __init__(self, items: Sequence[int], left_out: Sequence[int]) -> None:
        self._items = items
        # The j-th position left out hides itself from every kept index from left_out[j] - j on.
        self._shifts = [position - j for j, position in enumerate(left_out)]

    def __len__(self) -> int:
        return len(self._items) - len(self._shifts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"index must be in range({len(self)}), got {index}")
        return self._items[index + bisect.bisect_right(self._shifts, index)]


def row_of(values: Mapping[str, Any], config: DataConfig, name: str) -> Row:
    """The row of a source's values, by the columns that `config` names. RowError as `Dataset.row`."""
    for column, setting in named_columns(config).items():
        if column not in values:
            raise missing_column(name, column, list(values), setting)
    prompt = values[config.prompt]
    if not isinstance(prompt, str):
        prompt = read_messages(name, prompt, config)
    metadata = None if config.metadata is None else values[config.metadata]
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict):
        raise RowError(
            f"{name}: {config.metadata!r} must be an object or null, got {type(metadata).__name__}. "
            "Correct the row, or name another column in data.metadata"
        )
    label = None if config.label is None else values[config.label]
    rejected = None if config.rejected is None else values[config.rejected]
    if config.rejected is not None or _is_chat(label, config):
        label, rejected = (_read_answer(name, answer, prompt, config) for answer in (label, rejected))
    prompt, media = with_media(name, prompt, values, config)
    tools = () if config.tools is None else read_tools(name, values[config.tools], config)
    margin = 0.0 if config.margin is None else values[config.margin]
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 <= margin < math.inf:
        raise RowError(
            f"{name}: {config.margin!r} must be a number, at least 0, got {margin!r:.80}. Correct or remove the row"
        )
    return Row(name, prompt, label, metadata, media, tools, rejected, float(margin), columns=values)


def _is_chat(value: Any, config: DataConfig) -> bool:
    """Whether a label is a list of chat messages, which an answer may be; that of a reward may be anything."""
    named = {"role", *(key for key, meant in config.message_keys.items() if meant == "role")}
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(m, Mapping) and named & m.keys() for m in value)
    )


def _read_answer(name: str, answer: Any, prompt: Any, config: DataConfig) -> Any:
    """An answer without the prompt in front of it, which a whole chat repeats, media and all."""
    if answer is None or isinstance(answer, str):
        return answer
    messages = read_messages(name, answer, config)
    begins = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if config.label is None and begins[-1]["role"] == "assistant":
        begins = begins[:-1]
    return messages[-1:] if messages[:-1] == begins else messages


def open_dataset(
    config: DataConfig,
    name: str = "data",
    fingerprints: Fingerprints | None = None,
    given: Mapping[str, Mapping[str, Any]] | None = None,
) -> Dataset:
    """All rows that `config` names, up to its `limit`; `held_out` is the business of `open_splits`. `given`: what the rows of a
    source have in their metadata beside their own.

    `fingerprints` are compared under `name`. Fatal for a source that is missing or empty, DataChanged for rows that are
    not those of the run. Reads rows until one can be used, so that a wrong column name (RowError) is found before a run starts.
    """
    fingerprints = fingerprints or Fingerprints()
    if config.sources:
        parts = {each: open_dataset(config.of(each), f"{name}.sources.{each}", fingerprints) for each in config.sources}
        mixed = MixedDataset(parts, config, given or {})
        fingerprints.compare(name, mixed.fingerprint())
        return mixed
    try:
        source = open_source(config)
    except (Fatal, RowError) as error:
        raise type(error)(settings_at(name, str(error), "data")) from error
    if len(source) == 0:
        raise Fatal(f"{name} must have rows, got none in {config.path or config.rows}. Check where they should be")
    limits = (len(source), config.limit, fingerprints.num_rows(name))
    data = Dataset(source, config, range(min(limit for limit in limits if limit is not None)), name)
    fingerprints.compare(name, data.fingerprint())
    if data.left_out:
        log.warning("%s: %d rows were left out, the first: %s", name, len(data.left_out), data.left_out[0])
    first: RowError | None = None
    for index in range(min(len(data), _NUM_TRIED)):
        try:
            data.row(index)
            return data
        except Filtered:
            return data
        except RowError as error:
            first = first or error
    assert first is not None
    raise first


def open_splits(job: JobConfig, fingerprints: Fingerprints | None = None) -> tuple[Dataset, dict[str, Dataset]]:
    """(what is trained on, what is evaluated on, by name). Fatal when either has too few rows, DataChanged when they are
    not those of the `fingerprints`."""
    keys = {"reward": job.reward.by, "teacher": job.distillation.source if job.distillation is not None else None}
    given = {
        name: {key: getattr(source, what) for what, key in keys.items() if key and getattr(source, what) is not None}
        for name, source in job.data.sources.items()
    }
    data = open_dataset(job.data, "data", fingerprints, given)
    if job.data.held_out >= len(data):
        raise Fatal(f"data.held_out must be less than the data's rows, {len(data)}, got {job.data.held_out}. Lower it")
    train, held_out = data.split(job.data.held_out, job.seed)
    return train, evaluation_sets(job, held_out, fingerprints)


def evaluation_sets(
    job: JobConfig, held_out: Dataset | None, fingerprints: Fingerprints | None = None
) -> dict[str, Dataset]:
    """What is evaluated on, by name: the first rows that are held out, or others."""
    if job.evaluation is None:
        return {}
    sets = {}
    for name, each in job.evaluation.named_sets().items():
        if each.data is None:
            assert held_out is not None  # the settings ask for rows that are
            sets[name] = held_out.first(each.num_prompts)
            continue
        section = f"evaluation.sets.{name}" if job.evaluation.sets else "evaluation"
        found = open_dataset(each.data, f"{section}.data", fingerprints)
        num = min(each.num_prompts, len(found))
        sets[name] = found.split(num, job.seed)[1] if each.data.shuffle else found.first(num)
    return sets


class _Demonstrated:
    """Rows of the run with answers of their own. Holds the answers; a row is read when it is asked for."""

    def __init__(self, data: Dataset, indices: Sequence[int], answers: Sequence[Any]) -> None:
        self._data = data
        self._indices = indices
        self._answers = answers

    def __len__(self) -> int:
        return len(self._answers)

    def row(self, index: int) -> Row:
        answer = self._answers[index]
        if isinstance(answer, RowError):
            raise answer
        return replace(self._data.row(self._indices[index]), label=answer)


def demonstrations(job: JobConfig, fingerprints: Fingerprints | None = None) -> tuple[Rows, Dataset | None]:
    """What a job or the warm-up learns from, and what is held out of it: its own rows, or as many of the training rows, in a
    seeded order, as it takes in all, each with an answer of its own. A row without an answer raises RowError when asked for."""
    own = job.shown
    assert own is not None
    if own.data is not None or own.rows is not None:
        source, name = job.demonstrated(), own.place if own.data is None else f"{own.place}.data"
        data = open_dataset(source, name, fingerprints)
        if source.held_out >= len(data):
            raise Fatal(f"{name}.held_out must be less than its rows, {len(data)}, got {source.held_out}. Lower it")
        return data.split(source.held_out, job.seed) if source.held_out else (data, None)
    assert job.sft is not None and job.sft.demonstrate is not None and job.sft.steps is not None
    function = load_reference(job.sft.demonstrate, "sft.demonstrate")
    train, _ = open_splits(job, fingerprints)
    draw, order = random.Random(job.seed), Order(len(train), job.seed)
    indices = [order.locate(place).row for place in range(job.sft.steps * job.sft.batch_size)]

    def answer(index: int) -> Any:
        try:
            row = train.row(index)
            return function(row.prompt, row.label, draw)
        except RowError as error:
            return error
        except Exception as error:  # noqa: BLE001  # the user's function, of a row that it did not expect
            return RowError(
                f"{row.name}: sft.demonstrate must answer every row, got {type(error).__name__}: {error}. Correct it"
            )

    return _Demonstrated(train, indices, [answer(index) for index in indices]), None


def train_order(job: JobConfig, rows: Rows) -> Order:
    """The order in which a job with rollouts takes its training rows."""
    return order_of(job.data, rows, job.seed, job.data.num_passes)


def order_of(config: DataConfig, rows: Rows, seed: int, num_passes: int | None) -> Order:
    """The order in which rows are taken, each of which is read once where it goes by their kinds."""
    balance = None
    if config.balance is not None:
        shares = None if config.balance == "natural" else {str(kind): share for kind, share in config.balance.items()}
        kinds = [_kind_of(rows, at, shares) for at in range(len(rows))]
        if missing := sorted(set(kinds) - set(shares or kinds)):
            raise ConfigError(
                f"data.balance must have a share for each kind of rows, got none for {', '.join(missing)}. Add it, or set "
                "data.balance to 'natural'"
            )
        balance = Balance(kinds, shares)
    mixture, weights = None, {name: source.weight for name, source in config.sources.items()}
    if any(weights.values()) and isinstance(rows, MixedDataset):  # answers of `sft.demonstrate` are drawn of all rows
        of = rows.rows_of()
        if empty := [name for name, each in of.items() if not each]:
            raise Fatal(
                f"data.sources.{empty[0]} must have rows to train on behind data.held_out {config.held_out}, got none. Lower "
                "data.held_out, or remove the source"
            )
        mixture = Mixture(of, {name: weight or 0.0 for name, weight in weights.items()})
    return Order(len(rows), seed, config.shuffle, num_passes, balance, mixture)


def _kind_of(rows: Rows, at: int, shares: Mapping[str, float] | None) -> str:
    """One of `KINDS`; of a row that cannot be used, which is told when its turn comes, any."""
    try:
        kinds = {ref.kind for ref in rows.row(at).media}
    except RowError:
        return next(iter(shares or ("text",)))
    return "mixed" if len(kinds) > 1 else next(iter(kinds), "text")
