"""Sources: rows as mappings, by index, wherever they lie: JSON, CSV, parquet and Arrow files, the hub, a function.

Owns reading. Does not own which source a setting names (`opening.py`) or which columns mean what (`datasets.py`).

Invariant: a source never changes its length, and `read(i)` always gives the same row, or a RowError where that row is no longer
there. Memory does not grow with the rows: JSON Lines and Arrow files stay on disk, and so does parquet beyond `_HELD_BYTES`, as
an Arrow file in the cache (`files.py`). A list in JSON, a table in CSV and smaller parquet lie in memory whole.
"""

from __future__ import annotations

import bisect
import bz2
import contextlib
import csv
import gzip
import itertools
import json
import lzma
import re
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import IO, Any, Protocol

from rondo.roles.data.files import File, derived
from rondo.roles.data.fingerprints import digest_of, sampled
from rondo.roles.data.lines import Lines
from rondo.runtime.errors import Fatal, RondoError, closest
from rondo.runtime.values import read_json

_HELD_BYTES = 1 << 28
"""Parquet of up to so many bytes, all files of a data set together, is held in memory."""
_BATCH_BYTES, _BATCH_ROWS = 1 << 25, 10_000
"""Bytes and rows of a batch in an Arrow file that is made of parquet."""
MOST_SAMPLED, MOST_MADE = 256, 4096
"""Rows that a digest looks at: of files, and of what is in memory."""
MOST_OPEN = 64
"""Files that stay open, so that their rows are there for as long as the process, whoever replaces or removes them."""
_NOT_PLAIN = re.compile(r"decimal|\[ns")
"""In the name of an Arrow type whose values are decimals, or times of pandas."""
INSTALL = "Install it: pip install 'rondo-rl[data]'"
MADE = ("gym:", "textarena:")
"""Beginnings of paths whose rows a package makes."""


class RowError(RondoError, ValueError):
    """One row cannot be used; the text names it. The other rows are unharmed."""


class Source(Protocol):
    """Rows as mappings, by index. `left_out`: why rows did not come as far as here."""

    left_out: Sequence[str] = ()

    def __len__(self) -> int: ...
    def read(self, index: int) -> Mapping[str, Any]: ...
    def name_of(self, index: int) -> str:
        """Return where the row stands, for users."""
        ...

    def digest(self, num_rows: int, num_sampled: int = MOST_SAMPLED) -> str:
        """Return a digest of the first rows and their order, by a sample of them."""
        ...


class JsonLines(Source):
    """A file with one JSON object a line; blank lines do not count. Keeps where lines begin (`lines.py`), not their text.

    name: what rows are named by; keep: whether the file stays open."""

    def __init__(self, path: Path, name: str, *, keep: bool = True) -> None:
        self._path, self._name = path, name
        self._file = File(path, keep=keep)
        self._lines = Lines(self._file, keep=keep)
        self._digest = self._digest_of_lines()

    def __len__(self) -> int:
        return len(self._lines)

    def digest(self, num_rows: int, num_sampled: int = MOST_SAMPLED) -> str:
        # Where lines end changes with most that is changed in them.
        lengths = (part.tobytes() for part in self._lines.lengths(num_rows))
        return digest_of(self._line, sampled(num_rows, num_sampled), lengths)

    def read(self, index: int) -> Mapping[str, Any]:
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
        return f"{self._name}:{self._lines.number_in_file(index)}"

    def _line(self, index: int) -> bytes:
        try:
            text, is_same = self._file.read(*self._lines.span(index))
            if is_same or self._still_has_its_rows():
                return text
            problem = "another text"
        except (OSError, ValueError) as error:
            problem = getattr(error, "strerror", None) or type(error).__name__
        raise RowError(
            f"{self.name_of(index)}: row must be read as when {self._path} was opened, got {problem}. "
            "Restore the file; a run reads its data until it ends"
        )

    def _still_has_its_rows(self) -> bool:
        """Whether the rows of a file that was written to are where they were, as when some were added behind them."""
        if self._digest_of_lines() != self._digest:
            return False
        self._file.accept()
        return True

    def _digest_of_lines(self) -> str:
        """Of some lines, the last among them, which moves with whatever is put in or taken out above it."""
        read, lines = self._file.read, self._lines
        return digest_of(lambda line: read(*lines.span(line))[0], sampled(len(lines), MOST_SAMPLED))


class Table(Source):
    """Rows of an Arrow table, decoded value by value. columns: those of the whole data set; None where this table lacks one."""

    def __init__(self, table: Any, name: str, columns: Sequence[str] = ()) -> None:
        self._num_rows, self._name = table.num_rows, name
        own = dict(zip(table.column_names, table.columns, strict=True))
        self._columns = {column: own.get(column) for column in columns or own}
        self.own_columns = list(own)

    def __len__(self) -> int:
        return int(self._num_rows)

    def digest(self, num_rows: int, num_sampled: int = MOST_SAMPLED) -> str:
        return digest_of(self.read, sampled(num_rows, num_sampled))

    def read(self, index: int) -> Mapping[str, Any]:
        return _TableRow(self._columns, index, self._name)

    def name_of(self, index: int) -> str:
        return f"{self._name} row {index}"


class _TableRow(Mapping[str, Any]):
    """A row of a table. A value is decoded when it is looked up, so that nobody pays for media that are not used."""

    def __init__(self, columns: Mapping[str, Any], index: int, table: str) -> None:
        self._columns, self._index, self._table = columns, index, table

    def __getitem__(self, name: str) -> Any:
        if (column := self._columns[name]) is None:
            return None
        kind, scalar = str(column.type), column[self._index]
        try:
            value = scalar.as_py(maps_as_pydicts="strict") if "map<" in kind else scalar.as_py()
            return _plain(value) if _NOT_PLAIN.search(kind) else value
        except Exception as error:  # what a value that Python has no such object for leads to
            raise RowError(
                f"{self._table} row {self._index}: {name!r} must be a value of its type, {kind}, got {type(error).__name__}: "
                f"{error}. Correct or remove the row"
            ) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


class Joined(Source):
    """The rows of several sources, one behind the other."""

    def __init__(self, parts: Sequence[Source]) -> None:
        self._parts = parts
        self._firsts = [0, *itertools.accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self._firsts[-1]

    def digest(self, num_rows: int, num_sampled: int = MOST_SAMPLED) -> str:
        counts = [min(len(part), num_rows - first) for part, first in zip(self._parts, self._firsts, strict=False)]
        taken = [(part, count) for part, count in zip(self._parts, counts, strict=True) if count > 0]
        each = max(2, num_sampled // max(1, len(taken)))
        return digest_of(lambda at: taken[at][0].digest(taken[at][1], each), range(len(taken)))

    def read(self, index: int) -> Mapping[str, Any]:
        part, at = self._place_of(index)
        return part.read(at)

    def name_of(self, index: int) -> str:
        part, at = self._place_of(index)
        return part.name_of(at)

    def _place_of(self, index: int) -> tuple[Source, int]:
        number = bisect.bisect_right(self._firsts, index) - 1
        return self._parts[number], index - self._firsts[number]


class Listed(Source):
    """Rows that are a sequence already: a function's result, or a data set of the hub."""

    def __init__(self, rows: Sequence[Any], name: str, num_sampled: int) -> None:
        self._rows = rows
        self._name = name
        self._num_sampled = num_sampled

    def __len__(self) -> int:
        return len(self._rows)

    def digest(self, num_rows: int, num_sampled: int = MOST_SAMPLED) -> str:
        return digest_of(self._rows.__getitem__, sampled(num_rows, min(num_sampled, self._num_sampled)))

    def read(self, index: int) -> Mapping[str, Any]:
        values = self._rows[index]
        if not isinstance(values, Mapping):
            raise RowError(f"{self.name_of(index)}: row must be a dict, got {type(values).__name__}. Correct it")
        if None in values:  # of a table in CSV
            got = "fewer" if values[None] is None else "more"
            raise RowError(f"{self.name_of(index)}: row must have a value for each column, got {got}. Correct it")
        return values

    def name_of(self, index: int) -> str:
        return f"{self._name} row {index}"


def json_file(path: Path, name: str) -> Source:
    """Return the rows of a .json file: one list of objects, or one object a line. Fatal for anything else."""
    with path.open("rb") as file:
        start = next((text for line in file if (text := line.removeprefix(b"\xef\xbb\xbf").strip())), b"{}")
    try:
        if start.startswith(b"["):
            return Listed(_parsed(path.read_bytes()), name, MOST_MADE)
        _parsed(start)
    except (ValueError, RecursionError) as error:
        raise Fatal(
            f"data.path must name a .json file of a list of objects, or of one object a line, got {name} ({error}). Correct it, "
            "or read it with a function in data.rows"
        ) from error
    return JsonLines(path, name)


def csv_file(path: Path, name: str) -> Listed:
    """Return the rows of a .csv file, whose first line names columns of text. Fatal for one that cannot be read."""
    csv.field_size_limit(sys.maxsize)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            _refuse_same_names(name, reader.fieldnames or ())
            rows: list[dict[Any, Any]] = [row | ({None: None} if None in row.values() else {}) for row in reader]
            return Listed(rows, name, MOST_MADE)
    except (ValueError, csv.Error) as error:
        raise Fatal(f"data.path must name a readable .csv file, got {name} ({error}). Correct it") from error


def _refuse_same_names(file: str, columns: Sequence[str]) -> None:
    if twice := [column for column in columns if columns.count(column) > 1]:
        raise Fatal(f"data.path must name files with each column once, got {twice[0]!r} twice in {file}. Rename one")


def table_files(paths: Sequence[Path]) -> list[Table]:
    """Return the rows of parquet files, or of files in Arrow's formats. Fatal for one that cannot be read.

    Schemas may differ, since rows are decoded by themselves; where a file lacks a column of another, its rows have None."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise Fatal(f"data.path must be .jsonl without pyarrow, got {paths[0]}. {INSTALL}") from error

    def each(read: Callable[[Path], Any]) -> list[Any]:
        found = []
        for path in paths:
            try:
                found.append(read(path))
            except pyarrow.ArrowException as error:
                raise Fatal(
                    f"data.path must name whole {path.suffix} files, got {path}: {error}. Write it again"
                ) from error
        return found

    def read(path: Path) -> Any:
        with parquet.ParquetFile(path) as file:
            return file.read()

    if paths[0].suffix == ".arrow":
        tables = each(_mapped)
    elif sum(each(lambda path: _decoded_bytes(parquet.read_metadata(path)))) <= _HELD_BYTES:
        tables = each(read)
    else:
        tables = each(lambda path: _mapped(_derived(path, ".arrow", lambda out: _write_stream(path, out))))
    for table, path in zip(tables, paths, strict=True):
        _refuse_same_names(path.name, table.column_names)
    columns = list(dict.fromkeys(name for table in tables for name in table.column_names))
    return [Table(table, path.name, columns) for table, path in zip(tables, paths, strict=True)]


def unpacked(path: Path) -> Path:
    """Return the path of what a compressed file holds, which is unpacked into the cache when it is opened first."""

    def write(out: IO[bytes]) -> None:
        with PACKED[path.suffix](path) as packed:
            shutil.copyfileobj(packed, out, 1 << 20)

    try:
        return _derived(path, ".unpacked", write)
    except ImportError as error:
        raise Fatal(f"data.path must not end with {path.suffix} without pyarrow, got {path}. {INSTALL}") from error
    except (EOFError, ValueError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise Fatal(f"data.path must name a whole {path.suffix} file, got {path}: {error}. Write it again") from error


def _open_zst(path: Path) -> Any:
    import pyarrow

    return pyarrow.CompressedInputStream(str(path), "zstd")


PACKED: Mapping[str, Callable[[Path], Any]] = {
    ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zst,
}  # fmt: skip
"""Endings of compressed files, and what opens them."""


def _derived(path: Path, suffix: str, write: Callable[[IO[bytes]], None]) -> Path:
    """As `derived`; Fatal where it cannot be written."""
    try:
        return derived(File(path, keep=False), suffix, write)
    except gzip.BadGzipFile:
        raise
    except OSError as error:
        raise Fatal(
            f"data.path must have room for a copy of {path} in ~/.cache/rondo or $XDG_CACHE_HOME/rondo, got {error}. Make room, "
            "or set XDG_CACHE_HOME to a folder with room"
        ) from error


def _mapped(path: Path) -> Any:
    """The table in an Arrow file, stream or file format, whose values stay on disk."""
    import pyarrow

    source = pyarrow.memory_map(str(path))
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    return (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(source).read_all()


def _write_stream(path: Path, out: IO[bytes]) -> None:
    """Write the rows of a parquet file as an Arrow stream, in batches of bounded size."""
    import pyarrow
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file, pyarrow.ipc.new_stream(out, file.schema_arrow) as stream:
        num_rows = _BATCH_BYTES * file.metadata.num_rows // max(1, _decoded_bytes(file.metadata))
        for batch in file.iter_batches(max(1, min(num_rows, _BATCH_ROWS))):
            stream.write_batch(batch)


def _decoded_bytes(footer: Any) -> int:
    """What the rows of a parquet file take in memory, about."""
    return sum(footer.row_group(at).total_byte_size for at in range(footer.num_row_groups))


def _plain(value: Any) -> Any:
    """A value of Arrow without decimals and pandas' times, whose nanoseconds are dropped."""
    if isinstance(value, Decimal):
        return int(value) if value.same_quantum(Decimal(0)) else float(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if type(value).__module__.partition(".")[0] == "pandas":
        return value.to_pydatetime(warn=False) if hasattr(value, "to_pydatetime") else value.to_pytimedelta()
    return value


_USUAL_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "data.prompt": ("prompt", "problem", "question", "instruction", "query", "input", "messages", "conversations"),
    "data.label": ("answer", "label", "solution", "ground_truth", "target", "output", "response", "completion"),
    "data.rejected": ("rejected",),
}
"""Setting -> names that its column often has, the most usual first."""


def missing_column(row_name: str, column: str, available: Sequence[str], setting: str) -> RowError:
    """Return the error for a row (or file) without a column that a setting names. It suggests a column with a similar name, or
    one that often holds the same, and none that holds something else."""
    null = " A row without media holds null there." if setting == "data.media_columns" else ""
    alike = _USUAL_COLUMNS.get(setting, ())
    others = {name for kind, names in _USUAL_COLUMNS.items() if kind != setting for name in names} - {*alike}
    usual = next((name for name in alike if name in available), None)
    near = closest(column, [name for name in available if name not in others])
    near = usual or near if column in alike else near or usual
    hint = f"Did you mean {near!r}?" if near is not None else f"Name the right one in {setting}."
    return RowError(
        f"{row_name} must have the column {column!r} that {setting} names, "
        f"got {', '.join(map(repr, available)) or 'none'}. {hint}{null}"
    )


def _parsed(line: bytes) -> Any:
    """Return exactly what the text says, NaN included, which is no JSON."""
    with contextlib.suppress(ValueError):
        return read_json(line)
    return json.loads(line)
