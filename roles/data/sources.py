"""Sources: rows as dicts, by index, wherever they lie: JSONL, parquet, JSON, CSV, the Hugging Face hub, a function.

Owns reading. Does not own which source a setting names (`opening.py`) or which columns mean what (`datasets.py`).

Invariant: a source never changes its length, and `read(i)` always gives the same row, or a RowError where that row is no longer
there. Memory does not grow with the rows: of JSONL nothing is held but the index of a file where none can be written, of parquet
up to `_HELD_BYTES`, media not counted; the hub's library maps its own files. A list in JSON and a table in CSV lie in it whole.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rondo.roles.data.fingerprints import digest_of, sampled
from rondo.roles.data.lines import File, Lines
from rondo.runtime.errors import Fatal, RondoError
from rondo.runtime.section import nearest
from rondo.runtime.values import read_json

_HELD_BYTES = 1 << 28
"""Of parquet: what is held in memory, all of a data set or the groups of rows that were decoded last."""
_LATE_ROWS = 4
"""Rows whose media are in memory at once."""
MOST_SAMPLED, MOST_MADE = 256, 4096
"""Rows that a digest looks at: of files, and of what is in memory."""
_MOST_OPEN = 64
"""Files that stay open, so that their rows are there for as long as the process, whoever replaces or removes them."""
INSTALL = "Install it: pip install 'rondo-rl[data]'"
MADE = ("gym:", "textarena:")
"""Beginnings of paths whose rows a package makes."""


class RowError(RondoError, ValueError):
    """One row cannot be used; the text names it. The other rows are unharmed."""


class Source(Protocol):
    """Rows as dicts, by index. `name_of` tells users where a row stands; `left_out`: why rows did not come as far as here;
    `groups`: first rows of groups that are read at once, and the end, int64; None where each row is read alone."""

    left_out: Sequence[str] = ()
    groups: np.ndarray | None = None

    def __len__(self) -> int: ...
    def read(self, index: int, *, late: bool = True) -> Mapping[str, Any]:
        """`late`: with columns of media that are not in memory."""
        ...

    def name_of(self, index: int) -> str: ...
    def digest(self, num_rows: int) -> str:
        """Of the first rows and their order, by a sample of them."""
        ...


class JsonLines(Source):
    """Files with one JSON object a line; blank lines do not count. Keeps where lines begin (`lines.py`), not their text."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._files = [File(path, keep=number < _MOST_OPEN) for number, path in enumerate(paths)]
        self._lines = [Lines(file, keep=number < _MOST_OPEN) for number, file in enumerate(self._files)]
        self._first_rows = np.cumsum([0] + [len(lines) for lines in self._lines])
        self._digests = [self._digest_of(number) for number in range(len(paths))]

    def __len__(self) -> int:
        return int(self._first_rows[-1])

    def digest(self, num_rows: int) -> str:
        # Where lines end changes with most that is changed in them.
        lengths = (
            each.tobytes()
            for lines, first in zip(self._lines, self._first_rows.tolist(), strict=False)
            for each in lines.lengths(min(max(num_rows - first, 0), len(lines)))
        )
        return digest_of(self._line, sampled(num_rows, MOST_SAMPLED), lengths)

    def read(self, index: int, *, late: bool = True) -> Mapping[str, Any]:
        line = self._line(index)
        try:
            values = _parsed(line)
        except (ValueError, RecursionError) as error:
            raise RowError(
                f"{self.name_of(index)}: row must be JSON, got {line[:60]!r} ({error}). Correct it"
            ) from error
        if not isinstance(values, dict):
            raise RowError(f"{self.name_of(index)}: row must be a JSON object, got {type(values).__name__}. Correct it")
        return values

    def name_of(self, index: int) -> str:
        number, line = self._place_of(index)
        return f"{self._paths[number].name}:{self._lines[number].number_in_file(line)}"

    def _line(self, index: int) -> bytes:
        number, line = self._place_of(index)
        try:
            text, is_same = self._files[number].read(*self._lines[number].span(line))
            if is_same or self._still_has_its_rows(number):
                return text
            problem = "another text"
        except (OSError, ValueError) as error:
            problem = getattr(error, "strerror", None) or type(error).__name__
        raise RowError(
            f"{self.name_of(index)}: row must be read as when {self._paths[number]} was opened, got {problem}. "
            "Restore the file; a run reads its data until it ends"
        )

    def _still_has_its_rows(self, number: int) -> bool:
        """Of a file that was written to: whether its rows are where they were, as when some were added behind them."""
        if self._digest_of(number) != self._digests[number]:
            return False
        self._files[number].accept()
        return True

    def _digest_of(self, number: int) -> str:
        """Of some lines of one file, the last among them, which moves with whatever is put in or taken out above it."""
        file, lines = self._files[number], self._lines[number]
        places = sampled(len(lines), max(2, MOST_SAMPLED // len(self._paths)))
        return digest_of(lambda line: file.read(*lines.span(line))[0], places)

    def _place_of(self, index: int) -> tuple[int, int]:
        """(which file, which of its lines)."""
        number = int(np.searchsorted(self._first_rows, index, side="right")) - 1
        return number, index - int(self._first_rows[number])


class Parquet(Source):
    """Parquet files of one schema. Named columns of up to `_HELD_BYTES` are held in Arrow's form; larger ones stay in the files,
    and a row's group of rows is decoded for it, the newest of which are kept. Columns of media that hold bytes always stay."""

    def __init__(self, paths: Sequence[Path], columns: Mapping[str, str], media: Iterable[str] = ()) -> None:
        """`columns`: what to read, with the settings that name it; all columns when empty. RowError for a missing one."""
        try:
            import pyarrow.parquet
        except ImportError as error:
            raise Fatal(f"data.path must be .jsonl without pyarrow, got {paths[0]}. {INSTALL}") from error
        self._paths = paths
        self._files = [File(path, keep=number < _MOST_OPEN) for number, path in enumerate(paths)]
        self._late: list[str] = []
        sizes: list[np.ndarray] = []
        self._footers, num_bytes = hashlib.blake2b(digest_size=16), 0
        self._digests: list[str] = []  # of the footers up to this file's
        self._footer_of = functools.lru_cache(maxsize=_MOST_OPEN)(self._read_footer)
        schema = None
        for number, path in enumerate(paths):
            footer = self._footer_of(number)
            found = footer.schema.to_arrow_schema()
            for column, setting in columns.items():
                if column not in found.names:
                    raise missing_column(path.name, column, found.names, setting)
            if schema is None:
                schema = found
                self._late = [
                    name for name in dict.fromkeys(media) if name in found.names and _holds_bytes(found.field(name))
                ]
                self._held = [name for name in columns or found.names if name not in self._late]
            elif other := [
                each for each in self._held if each in found.names and found.field(each) != schema.field(each)
            ]:
                raise Fatal(
                    f"parquet files of data.path must have one schema, got {found.field(other[0])} in {path} and "
                    f"{schema.field(other[0])} in {paths[0]}. Convert them"
                )
            sizes.append(np.array([footer.row_group(at).num_rows for at in range(footer.num_row_groups)], np.int64))
            num_bytes += _decoded_bytes(footer, self._held)
            self._footers.update(b"%d:" % footer.num_rows + _footer_bytes(path))
            self._digests.append(self._footers.hexdigest())
        self._group_files = np.repeat(np.arange(len(paths)), [len(each) for each in sizes])
        self._first_groups = np.cumsum([0] + [len(each) for each in sizes])
        self._first_rows = np.concatenate([[0], np.cumsum(np.concatenate(sizes))])  # of every group, and the end
        self._name = paths[0].name if len(paths) == 1 else f"{paths[0].parent.name}/*.parquet"
        self._names = [] if schema is None else schema.names
        self._decoded: OrderedDict[tuple[int, str], Any] = OrderedDict()
        self._decoding = threading.Lock()
        self.groups = None if num_bytes <= _HELD_BYTES else self._first_rows
        """First rows of the groups that are decoded at once, and the end; None where all is in memory."""
        self._table = None
        if self.groups is None:
            tables = [pyarrow.parquet.read_table(file.current_path(), columns=self._held) for file in self._files]
            self._table = pyarrow.concat_tables(tables).combine_chunks()

    def __len__(self) -> int:
        return int(self._first_rows[-1])

    def digest(self, num_rows: int) -> str:
        """Of rows that stay in the files by the footers, which tell place, size and extremes of every column of every group."""
        if self._table is None:
            return self._digests[self._group_files[self._group_of(max(0, num_rows - 1))]]
        return digest_of(self._values, sampled(num_rows, MOST_SAMPLED))

    def read(self, index: int, *, late: bool = True) -> Mapping[str, Any]:
        values = self._values(index)
        read = values | self._read_late(index) if late and self._late else values
        if len(read) == len(self._names):
            return read
        return ParquetRow(read, self._names, lambda name: self._values(index, name)[name])

    def name_of(self, index: int) -> str:
        return f"{self._name} row {index}"

    def _values(self, index: int, other: str = "") -> dict[str, Any]:
        """The held columns of a row, or the one `other` column of it."""
        table, at = self._table, index
        if table is None or other:
            group = self._group_of(index)
            table, at = self._group(index, group, other), index - int(self._first_rows[group])
        return {name: table.column(name)[at].as_py() for name in table.column_names}

    def _group_of(self, index: int) -> int:
        return int(np.searchsorted(self._first_rows, index, side="right")) - 1

    def _group(self, index: int, group: int, other: str) -> Any:
        """The held columns of a group of rows, or the one `other` column, decoded; the newest stay, up to `_HELD_BYTES`."""
        key, columns = (group, other), [other] if other else self._held
        with self._decoding:
            if key not in self._decoded:
                with self._opened(index, group) as (file, local):
                    self._decoded[key] = file.read_row_group(local, columns=columns, use_threads=False)
                while len(self._decoded) > 1 and sum(each.nbytes for each in self._decoded.values()) > _HELD_BYTES:
                    self._decoded.popitem(last=False)
            self._decoded.move_to_end(key)
            return self._decoded[key]

    def _read_late(self, index: int) -> Mapping[str, Any]:
        """Decodes the row's group of rows up to it, a few at a time. Nothing in a parquet file says where a single value is."""
        group = self._group_of(index)
        left = index - int(self._first_rows[group])
        with self._opened(index, group) as (file, local):
            for batch in file.iter_batches(_LATE_ROWS, [local], columns=self._late, use_threads=False):
                if left < batch.num_rows:
                    return dict(batch.slice(left, 1).to_pylist()[0])
                left -= batch.num_rows
        raise RowError(
            f"{self.name_of(index)}: row must be read as when it was opened, got fewer rows. Restore its file"
        )

    @contextlib.contextmanager
    def _opened(self, index: int, group: int) -> Iterator[tuple[Any, int]]:
        """(the file of a group, which of its groups that is). RowError where it cannot be read, or is not as it was."""
        import pyarrow
        import pyarrow.parquet

        number = int(self._group_files[group])
        try:
            if not self._files[number].is_same():
                raise OSError(0, "another file")
            with pyarrow.parquet.ParquetFile(
                self._files[number].current_path(), metadata=self._footer_of(number), memory_map=True, pre_buffer=False
            ) as file:
                yield file, group - int(self._first_groups[number])
        except (OSError, pyarrow.ArrowException, IndexError) as error:
            why = getattr(error, "strerror", None) or error
            raise RowError(
                f"{self.name_of(index)}: row must be read as when {self._paths[number]} was opened, got {why}. "
                "Restore the file; a run reads its data until it ends"
            ) from error

    def _read_footer(self, number: int) -> Any:
        import pyarrow
        import pyarrow.parquet

        try:
            return pyarrow.parquet.read_metadata(self._files[number].current_path())
        except pyarrow.ArrowInvalid as error:
            raise Fatal(
                f"data.path must name whole parquet files, got {self._paths[number]}: {error}. Write it again"
            ) from error


class ParquetRow(Mapping[str, Any]):
    """A row of parquet files with all of its columns: those that are not among `values` are read when they are looked up."""

    def __init__(self, values: dict[str, Any], names: Sequence[str], read: Callable[[str], Any]) -> None:
        self._values, self._names, self._read = values, names, read

    def __getitem__(self, name: str) -> Any:
        if name not in self._values and name in self._names:
            self._values[name] = self._read(name)
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Listed(Source):
    """Rows that are a sequence already: a function's result, or a data set of the hub."""

    def __init__(self, rows: Sequence[Any], name: str, num_sampled: int) -> None:
        self._rows = rows
        self._name = name
        self._num_sampled = num_sampled

    def __len__(self) -> int:
        return len(self._rows)

    def digest(self, num_rows: int) -> str:
        return digest_of(self._rows.__getitem__, sampled(num_rows, self._num_sampled))

    def read(self, index: int, *, late: bool = True) -> Mapping[str, Any]:
        values = self._rows[index]
        if not isinstance(values, Mapping):
            raise RowError(f"{self.name_of(index)}: row must be a dict, got {type(values).__name__}. Correct it")
        return values

    def name_of(self, index: int) -> str:
        return f"{self._name} row {index}"


def whole_file(path: Path) -> Listed:
    """The rows of a .json file, which is a list of objects, or of a .csv file, whose first line names columns of text."""
    try:
        if path.suffix == ".json":
            rows = _parsed(path.read_bytes())
        else:
            with path.open(encoding="utf-8-sig", newline="") as file:
                rows = list(csv.DictReader(file))
    except (ValueError, RecursionError, csv.Error) as error:
        raise Fatal(f"data.path must name a readable {path.suffix} file, got {path} ({error}). Correct it") from error
    if not isinstance(rows, list):
        raise Fatal(
            f"data.path must name a .json file of a list of objects, got {type(rows).__name__} in {path}. Convert it"
        )
    return Listed(rows, path.name, MOST_MADE)


def missing_column(row_name: str, column: str, available: Sequence[str], setting: str) -> RowError:
    """The error for a row (or file) without a column that a setting names."""
    null = " A row without media holds null there." if setting == "data.media_columns" else ""
    return RowError(
        f"{row_name} must have the column {column!r} that {setting} names, "
        f"got {', '.join(map(repr, available)) or 'none'}. {nearest(column, list(available))}{null}"
    )


def _holds_bytes(field: Any) -> bool:
    """Whether an Arrow field, or a part of it, is binary."""
    import pyarrow.types

    kind = field.type
    if pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind):
        return True
    return any(_holds_bytes(kind.field(number)) for number in range(kind.num_fields))


def _decoded_bytes(footer: Any, columns: Sequence[str]) -> int:
    """What these columns take once they are decoded, about: dictionaries are not told."""
    groups = (footer.row_group(at) for at in range(footer.num_row_groups))
    chunks = (group.column(at) for group in groups for at in range(group.num_columns))
    return sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] in columns)


def _footer_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-8, os.SEEK_END)
        file.seek(-8 - int.from_bytes(file.read(4), "little"), os.SEEK_END)
        return file.read()


def _parsed(line: bytes) -> Any:
    """Return exactly what the text says, NaN included, which is no JSON."""
    with contextlib.suppress(ValueError):
        return read_json(line)
    return json.loads(line)
