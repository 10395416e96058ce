"""Opening: from the settings of a data set to the source of its rows.

Owns what a path means (files, globs, the hub, packages that make rows, a part of them), rows that functions make, and which
columns settings name. Does not own how a source reads (`sources.py`) or what columns mean (`datasets.py`).

    source = open_source(DataConfig(path="data/*.jsonl@[:1000]"))
    len(source), source.read(0), source.name_of(0)  ->  1000, {"question": ...}, "train.jsonl:1"
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from glob import glob, has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rondo.roles.data.fingerprints import digest_of, sampled
from rondo.roles.data.sources import (
    INSTALL,
    MADE,
    MOST_MADE,
    MOST_OPEN,
    MOST_SAMPLED,
    PACKED,
    Joined,
    JsonLines,
    Listed,
    RowError,
    Source,
    Table,
    csv_file,
    json_file,
    missing_column,
    table_files,
    unpacked,
)
from rondo.roles.data.unusable import UnusableRows
from rondo.runtime.errors import Fatal
from rondo.runtime.reference import load_reference

if TYPE_CHECKING:
    from rondo.roles.config import DataConfig

_KINDS = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
_MOST_DRAWN = 16
"""Rows of packages that a digest looks at: some take half a second to make."""


def open_source(config: DataConfig) -> Source:
    """The rows of `config.path` or `config.rows`, as `config.transform` leaves them. Fatal for what cannot be opened.

    A row that cannot be read does not reach the transform."""
    source = _open(config)
    if config.transform is None:
        return source
    left_out, unusable = list[str](), UnusableRows()

    def readable() -> Iterator[Mapping[str, Any]]:
        for index in range(len(source)):
            try:
                yield dict(source.read(index))
            except RowError as error:
                left_out.append(str(error))
                unusable.add(str(error))

    transform = load_reference(config.transform, "data.transform")
    listed = _listed(transform(readable()), config.transform, "data.transform")
    name = "data.path" if config.path is not None else "data.rows"
    if refusal := unusable.refusal(name, "data.max_bad_rows", config.max_bad_rows, len(source)):
        raise Fatal(refusal)
    listed.left_out = left_out
    return listed


def named_columns(config: DataConfig) -> dict[str, str]:
    """Columns that the settings name, with what names them."""
    names = ("prompt", "label", "rejected", "margin", "metadata", "tools", "use_audio_in_video")
    named: list[tuple[str | None, str]] = [(getattr(config, name), f"data.{name}") for name in names]
    named += [(column, "data.media_columns") for column in config.media_columns.values()]
    return {column: setting for column, setting in named if column is not None}


def _listed(rows: Any, reference: str, setting: str) -> Listed:
    if not isinstance(rows, Iterable) or isinstance(rows, str | Mapping):
        raise Fatal(f"{setting} must return rows, got {type(rows).__name__}. Return a list of dicts")
    return Listed(rows if isinstance(rows, Sequence) else list(rows), reference.rpartition(":")[2], MOST_MADE)


def _open(config: DataConfig) -> Source:
    if config.rows is not None:
        return _listed(load_reference(config.rows, "data.rows")(), config.rows, "data.rows")
    assert config.path is not None
    path, part = _cut(config.path)
    whole = _open_path(path, config)
    return whole if part is None else Sliced(whole, part)


def _cut(path: str) -> tuple[str, slice | None]:
    """(what lies in front of '@[a:b]', the rows that it names). Fatal for what looks like one and is none."""
    found = re.fullmatch(r"(.*)@\[(.*)\]", path)
    if found is None:
        return path, None
    ends = re.fullmatch(r"\s*(-?\d*)\s*:\s*(-?\d*)\s*", found[2])
    if ends is None or "-" in ends.groups():
        raise Fatal(f"data.path must end with rows as in '@[0:1000]', got {path!r}. Correct it")
    return found[1], slice(*(int(end) if end else None for end in ends.groups()))


def _open_path(path: str, config: DataConfig) -> Source:
    if path.startswith("gym:"):
        from rondo.roles.data.gym import GymRows

        return Listed(GymRows(path.removeprefix("gym:"), config.args), path, _MOST_DRAWN)
    if path.startswith("textarena:"):
        from rondo.roles.data.text_games import GameRows

        return Listed(GameRows(path.removeprefix("textarena:"), config.args), path, _MOST_DRAWN)
    if path.startswith("hub:"):
        return _open_hub(path)
    if (Path(path) / "dataset_dict.json").is_file():
        raise Fatal(
            f"data.path must name one split of what save_to_disk wrote, got {path}. Add its name, as in {path}/train"
        )
    if (Path(path) / "state.json").is_file():
        return Table(_datasets(path).load_from_disk(path).with_format("arrow")[:], Path(path).name)
    named = {} if config.transform is not None else named_columns(config)
    required = (config.prompt, config.label, config.rejected, config.margin)
    return _open_files(path, {column: setting for column, setting in named.items() if column in required})


def _open_files(path: str, needed: Mapping[str, str]) -> Source:
    """Open one file or several. needed: columns that each file of a table must have, with the settings that name them."""
    paths = _files(path)
    kinds = sorted({_kind(path) for path in paths})
    if len(kinds) > 1 or kinds[0] not in _KINDS:
        found = " and ".join(kind or "a name without such an ending" for kind in kinds)
        raise Fatal(
            f"data.path must name {', '.join(_KINDS[:-1])} or {_KINDS[-1]} files, one kind at a time, got {found} in {path}. "
            "Name them with a glob such as 'data/*.jsonl', convert them, or read them with a function in data.rows"
        )
    files = [(unpacked(path) if path.suffix in PACKED else path, path.name) for path in paths]
    parts: list[Any]
    if kinds[0] == ".jsonl":
        parts = [JsonLines(path, name, keep=number < MOST_OPEN) for number, (path, name) in enumerate(files)]
    elif kinds[0] in (".json", ".csv"):
        parts = [(json_file if kinds[0] == ".json" else csv_file)(path, name) for path, name in files]
    else:
        parts = table_files([path for path, _ in files])
        for part, (_, name) in zip(parts, files, strict=True):
            for column in needed:
                if column not in part.own_columns:
                    raise missing_column(name, column, part.own_columns, needed[column])
    return parts[0] if len(parts) == 1 else Joined(parts)


def _kind(path: Path) -> str:
    """The ending of a file's name, without that of its compression."""
    return (path.with_suffix("") if path.suffix in PACKED else path).suffix


class Sliced:
    """Some rows of a source, in their order."""

    def __init__(self, source: Source, part: slice) -> None:
        self.left_out = source.left_out
        self._source, self._rows = source, range(len(source))[part]

    def __len__(self) -> int:
        return len(self._rows)

    def digest(self, num_rows: int, num_sampled: int = MOST_SAMPLED) -> str:
        return digest_of(lambda index: self._source.read(self._rows[index]), sampled(num_rows, num_sampled))

    def read(self, index: int) -> Mapping[str, Any]:
        return self._source.read(self._rows[index])

    def name_of(self, index: int) -> str:
        return self._source.name_of(self._rows[index])


def _open_hub(path: str) -> Source:
    name, _, split = path.removeprefix("hub:").rpartition("/")
    if not name or not split:
        raise Fatal(
            f"data.path must look like 'hub:name/split' or 'hub:name@subset/split', got {path!r}. Add the split"
        )
    name, _, subset = name.partition("@")
    library = _datasets(path)
    try:
        rows = library.load_dataset(name, subset or None, split=split)
    except ConnectionError as error:
        raise Fatal(
            f"data.path must name a data set that is reached from here, got {path!r} ({error}). Check the network, or "
            "download the data set and name its files"
        ) from error
    except (OSError, ValueError) as error:
        raise Fatal(
            f"data.path must name a data set of the Hugging Face Hub as in 'hub:name/split' or 'hub:name@subset/split', got "
            f"{path!r} ({' '.join(str(error).split())}). Correct it"
        ) from error
    return Table(rows.with_format("arrow")[:], path)  # media as they are stored, not decoded


def _datasets(path: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise Fatal(f"data.path must be a file without the datasets library, got {path!r}. {INSTALL}") from error
    return datasets


def folder_of(config: DataConfig) -> Path | None:
    """The folder of the data files, of a glob the part before it; None for rows that lie in none."""
    if config.path is None or config.path.startswith(("hub:", *MADE)):
        return None
    path = Path(_cut(config.path)[0])
    if path.is_file():
        return path.parent
    plain = itertools.takewhile(lambda part: not has_magic(part), path.parts)
    return path if path.is_dir() else Path(*plain)


def files_of(config: DataConfig) -> list[Path]:
    """The files that a folder or a glob stands for; none of another path."""
    path = _cut(config.path or "")[0]
    is_one = path.startswith(("hub:", *MADE)) or Path(path).is_file() or (Path(path) / "state.json").is_file()
    return [] if is_one or not path else _files(path)


def _files(path: str) -> list[Path]:
    if Path(path).is_file():
        return [Path(path)]
    if Path(path).is_dir():
        found = [
            file for file in Path(path).iterdir()
            if _kind(file) in (".jsonl", ".parquet") and not file.name.startswith(".") and file.is_file()
        ]  # fmt: skip
    else:
        # Path.glob takes no absolute patterns.
        found = [Path(name) for name in glob(path, recursive=True) if Path(name).is_file()]  # noqa: PTH207
    if not found:
        hub = f", or write 'hub:{path}/train' for a data set of the Hugging Face Hub" if path.count("/") == 1 else ""
        raise Fatal(f"data.path must name files that exist, got {path!r}. Check the path{hub}")
    return sorted(found)
