"""What a user hands in and gets back, as columns: nested names, and values of any kind.

Owns the two directions of that: names ({"a": {"b": x}} is column "a.b") and values (tensors, arrays, jagged lists, anything
that is JSON). Knows no rings and no partitions. torch is imported only where a tensor comes along.

    value of a column                              one row                        lies in the record as
    tensor or array [N, ...]                       value[i], shape [...]          its own dtype
    nested (jagged) tensor                         its i-th part                  its own dtype
    list or tuple of tensors or arrays             one each, any shape, also []   their common dtype
    list or tuple of anything else                 one JSON value each            uint8, named in `json`

Invariant: shapes, dtypes (bf16 and float8 too) and JSON values come back as they were put.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from rondo.comm.ring.records import STORAGE, Column

SEPARATOR = "."


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": x}} -> {"a.b": x}. Raises ValueError for a name that holds a dot, is empty, or is no text."""
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        if not isinstance(name, str) or not name or (SEPARATOR in name and (prefix or isinstance(value, Mapping))):
            raise ValueError(f"a column's name must be text without {SEPARATOR!r}, got {name!r}. Rename it.")
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}{SEPARATOR}")
        else:
            flat[prefix + name] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": x} -> {"a": {"b": x}}."""
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        *folders, name = path.split(SEPARATOR)
        at = nested
        for folder in folders:
            at = at.setdefault(folder, {})
        at[name] = value
    return nested


def columns_of(values: Mapping[str, Any]) -> tuple[list[Column], list[str], int]:
    """Columns for one record, the names of those that are JSON, and the number of rows.

    Raises ValueError where columns disagree about the number of rows, or a value has no place in a record.
    """
    columns: list[Column] = []
    json: list[str] = []
    for name, value in flatten(values).items():
        column = _column(name, value)
        if column is None:
            json.append(name)
            column = Column(name, "uint8", [_encoded(name, item) for item in value])
        columns.append(column)
    lengths = {len(column.arrays) for column in columns}
    if len(lengths) != 1 or not max(lengths):
        found = ", ".join(f"{column.name} {len(column.arrays)}" for column in columns) or "no columns"
        raise ValueError(f"the columns of a put must have equally many rows and at least one, got {found}.")
    return columns, json, lengths.pop()


def decoded(array: np.ndarray) -> Any:
    """The JSON value of one row."""
    return orjson.loads(array.data)


def _column(name: str, value: Any) -> Column | None:
    """A column of arrays, or None where the values are JSON."""
    if isinstance(value, np.ndarray) or _is_tensor(value):
        if not value.ndim:
            raise ValueError(
                f"column {name} must have its rows along the first axis, got a scalar. Put a list of them."
            )
        # Indexing a 1-d array gives scalars, which have no memory of their own; a 0-d view has.
        value = [value[i, ...] for i in range(len(value))] if isinstance(value, np.ndarray) else value.unbind()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ValueError(
            f"column {name} must be a tensor, an array or a list with one value a row, got {type(value).__name__}. "
            "Wrap a value that all rows share into a list."
        )
    if value and all(_is_tensor(item) for item in value):
        from rondo.comm.ring.tensors import as_array  # the bus imports no torch: who has tensors has it

        pairs = [as_array(tensor.detach().cpu().contiguous()) for tensor in value]
        dtypes = {dtype for _, dtype in pairs}
        if len(dtypes) > 1:
            raise ValueError(f"the tensors of column {name} must have one dtype, got {', '.join(sorted(dtypes))}.")
        return Column(name, dtypes.pop(), [array for array, _ in pairs])
    if value and all(isinstance(item, np.ndarray | np.generic) for item in value):
        arrays = [np.asarray(item) for item in value]
        dtype = arrays[0].dtype.name
        if dtype not in STORAGE:
            raise ValueError(f"column {name} must have one of the dtypes {', '.join(STORAGE)}, got {dtype}.")
        return Column(name, dtype, arrays)
    return None


def _is_tensor(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "unbind")


def _encoded(name: str, value: Any) -> np.ndarray:
    try:
        return np.frombuffer(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), np.uint8)
    except TypeError as error:
        raise ValueError(f"a value of column {name} must be a tensor, an array or JSON, got {error}.") from error
