"""Values: a user's data as JSON text and raw buffers, and back again exactly: the same contents in the same types.

Owns the types that travel, and the words for one that does not. Does not own frames (`pool_worker.py`) or the calls of actors
(`transport.py`), which carry our own data in plainer forms. Nothing is pickled: no type beside these is ever made.

    None bool int float str bytes bytearray list tuple set frozenset dict complex      ints of any size, NaN, keys of any kind
    Decimal Fraction UUID date time datetime timedelta timezone ZoneInfo
    scalars and arrays of numpy with numbers, texts, bytes or times in them

What JSON says exactly is JSON. The rest is {"$": [type, part, ...]}, of arrays and bytes with their contents in base64, or with
the number of a buffer beside the text.

    encode({"a": (1, 2)})   ->   Encoded(b'{"a":{"$":["tuple",[1,2]]}}', [])
"""

from __future__ import annotations

import base64
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from rondo.runtime.errors import ProtocolError

if TYPE_CHECKING:
    import numpy as np

Buffer = bytes | bytearray | memoryview

_MARK = "$"
_ARRAY_KINDS = frozenset("biufcSUMm")
_LEAST_INT, _MOST_INT = -(1 << 63), (1 << 64) - 1
_LONG = re.compile(rb"[0-9]{19}")
"""Digits of an integer that may not fit into 64 bits."""
_TRAVELS = (
    "None, bool, int, float, str, bytes, list, tuple, set, dict, Decimal, Fraction, UUID, dates and numpy's numbers"
)


class Encoded(NamedTuple):
    """JSON text, and the buffers that it refers to. They view the value's arrays, which nobody changes meanwhile."""

    text: bytes
    buffers: list[Buffer]


def encode(value: Any, what: str = "value") -> Encoded:
    """The value in the form in which it travels. TypeError for what holds another type, at which place; `what` names it."""
    buffers: list[Buffer] = []
    return Encoded(_text(value, what, buffers), buffers)


def decode(node: Any, buffers: Sequence[memoryview] = ()) -> Any:
    """The value of parsed JSON text and its buffers, which arrays view. ProtocolError when they do not fit."""
    try:
        return _made(node, buffers)
    except (ValueError, TypeError, IndexError, KeyError, ArithmeticError, RecursionError) as error:
        raise ProtocolError(f"a value must be one that travels, got {error}") from error


def as_json(value: Any, what: str = "value") -> orjson.Fragment:
    """The value as JSON text alone, for a file. TypeError as of `encode`."""
    return orjson.Fragment(_text(value, what, None))


def read_json(text: str | bytes) -> Any:
    """Return the value of a JSON text, integers of any size included, which orjson turns into floats. ValueError for a text that
    is not JSON."""
    data = text.encode() if isinstance(text, str) else text
    if not _LONG.search(data):
        return orjson.loads(data)
    try:
        value = json.loads(data.decode())
        _long_json(value, 0)  # refuses what json reads beyond JSON: NaN, and halves of surrogate pairs
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return value


def write_json(value: Any, option: int = 0) -> bytes:
    """Return the value as compact JSON, as orjson does with `option`; integers may have any size. TypeError for a value that has
    no JSON."""
    try:
        return orjson.dumps(value, option=option)
    except TypeError as error:
        if "64-bit" not in str(error):
            raise
        return _long_json(value, option)


def _long_json(value: Any, option: int) -> bytes:
    def of_orjson(part: Any) -> Any:
        return orjson.loads(orjson.dumps(part, option=option))

    try:
        return json.dumps(
            value, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=of_orjson,
            sort_keys=bool(option & orjson.OPT_SORT_KEYS),
        ).encode()  # fmt: skip
    except (ValueError, RecursionError) as error:
        raise TypeError(str(error)) from error


def array_bytes(array: np.ndarray) -> memoryview:
    """The contents of an array, in C order. TypeError for a dtype that is not plain."""
    import numpy as np

    if array.dtype.kind not in _ARRAY_KINDS:
        raise TypeError(
            f"an array that travels must have a plain dtype, got {array.dtype}. "
            "View bfloat16 as uint16, and send the fields of a structured array one by one"
        )
    if array.size == 0 or array.dtype.itemsize == 0:
        return memoryview(b"")
    return np.asarray(array, order="C").reshape(-1).view(np.uint8).data


def array_of(name: str, shape: Sequence[int], buffer: Buffer) -> np.ndarray:
    """An array of the dtype and shape that views `buffer`. ValueError when that does not hold exactly so much."""
    import numpy as np

    dtype, num_bytes = np.dtype(name), memoryview(buffer).nbytes
    fits = math.prod(shape) * dtype.itemsize == num_bytes and min(shape, default=0) >= 0
    if dtype.kind not in _ARRAY_KINDS or not fits:
        raise ValueError(f"dtype {name!r} with shape {shape} over {num_bytes} bytes")
    return np.ndarray(shape, dtype, buffer=buffer) if num_bytes else np.empty(shape, dtype)


def _text(value: Any, what: str, buffers: list[Buffer] | None) -> bytes:
    try:
        return orjson.dumps(_plain(value, buffers))
    except _Unfit as unfit:
        place, way = _place(value), unfit.way or "Convert it, or leave it out"
        raise TypeError(f"{what}{place} must be of a type that travels ({_TRAVELS}), got {unfit}. {way}") from None
    except (TypeError, RecursionError):
        raise TypeError(
            f"{what} must not be nested so deeply that it has no text, got one that is. Flatten it"
        ) from None


class _Unfit(Exception):
    """A type that does not travel, and what to do if that is known."""

    def __init__(self, kind: str, way: str = "") -> None:
        super().__init__(kind)
        self.way = way


def _plain(value: Any, buffers: list[Buffer] | None) -> Any:
    """What orjson writes without changing anything."""
    kind = type(value)
    if kind is str:
        return value if _is_whole(value) else _marked("str", value.encode("utf-8", "surrogatepass").hex())
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if _LEAST_INT <= value <= _MOST_INT else _marked("int", hex(value))
    if kind is float:
        return value if math.isfinite(value) else _marked("float", str(value))
    if kind is list:
        return [_plain(item, buffers) for item in value]
    if kind is dict:
        if _MARK not in value and all(type(key) is str and _is_whole(key) for key in value):
            return {key: _plain(item, buffers) for key, item in value.items()}
        return _marked("dict", [[_plain(key, buffers), _plain(item, buffers)] for key, item in value.items()])
    if kind in (tuple, set, frozenset):
        return _marked(kind.__name__, [_plain(item, buffers) for item in value])
    if kind in (bytes, bytearray):
        return _marked(kind.__name__, _beside(value, buffers))
    if kind is complex:
        return _marked("complex", _plain(value.real, buffers), _plain(value.imag, buffers))
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name in _PARTS and getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind:
        return _marked(name, *(_plain(part, buffers) for part in _PARTS[name](value)))
    return _of_numpy(value, kind, buffers)


def _of_numpy(value: Any, kind: type, buffers: list[Buffer] | None) -> Any:
    np = sys.modules.get("numpy")  # who has not loaded it has none of its values
    if np is not None and (kind is np.ndarray or issubclass(kind, np.generic)):
        if value.dtype.kind not in _ARRAY_KINDS:
            raise _Unfit(f"numpy's {value.dtype}", "Convert it with tolist()")
        data = array_bytes(np.asarray(value))
        if kind is np.ndarray:
            return _marked("array", value.dtype.str, list(value.shape), _beside(data, buffers))
        return _marked("numpy", value.dtype.str, bytes(data).hex())
    way = "Convert it with .tolist()" if hasattr(value, "tolist") else ""
    is_plain = kind.__module__ == "builtins" or kind.__module__.startswith(
        "_"
    )  # as of a config that is loaded by its path
    raise _Unfit(kind.__qualname__ if is_plain else f"{kind.__module__}.{kind.__qualname__}", way)


def _marked(*parts: Any) -> dict[str, Any]:
    return {_MARK: parts}


def _is_whole(text: str) -> bool:
    """Whether it is one that UTF-8 can write: no half of a surrogate pair stands alone in it."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _beside(data: Buffer, buffers: list[Buffer] | None) -> int | str:
    if buffers is None:
        return base64.b64encode(data).decode()
    buffers.append(data)
    return len(buffers) - 1


def _place(value: Any) -> str:
    """Where in a value the type is that does not travel: "['steps'][2]"."""
    if type(value) in (list, tuple):
        inside: Iterable[tuple[str, Any]] = ((f"[{index}]", item) for index, item in enumerate(value))
    elif type(value) is dict:
        inside = ((f"[{key!r}]", item) for key, item in value.items())
    else:
        return ""
    for place, item in inside:
        try:
            _plain(item, None)
        except _Unfit:
            return place + _place(item)
    return ""


def _with_zone(*names: str) -> Callable[[Any], list[Any]]:
    return lambda value: [*(getattr(value, name) for name in (*names, "tzinfo")), value.fold]


def _key(zone: Any) -> list[str]:
    if zone.key is None:
        raise _Unfit("a time zone without a name")
    return [zone.key]


_TIME = ("hour", "minute", "second", "microsecond")
_PARTS: dict[str, Callable[[Any], Iterable[Any]]] = {
    "decimal.Decimal": lambda value: [str(value)],
    "fractions.Fraction": lambda value: [value.numerator, value.denominator],
    "uuid.UUID": lambda value: [value.hex],
    "datetime.date": lambda value: [value.year, value.month, value.day],
    "datetime.time": _with_zone(*_TIME),
    "datetime.datetime": _with_zone("year", "month", "day", *_TIME),
    "datetime.timedelta": lambda value: [value.days, value.seconds, value.microseconds],
    "datetime.timezone": lambda value: value.__getinitargs__(),
    "zoneinfo.ZoneInfo": _key,
}
"""Types whose constructor takes these parts; what has a fold gets it by that name."""


def _made(node: Any, buffers: Sequence[memoryview]) -> Any:
    if type(node) is list:
        return [_made(item, buffers) for item in node]
    if type(node) is not dict:
        return node
    if _MARK not in node:
        return {key: _made(item, buffers) for key, item in node.items()}
    kind, *parts = node[_MARK]
    if kind in ("array", "bytes", "bytearray"):
        data = buffers[parts[-1]] if type(parts[-1]) is int else memoryview(bytearray(base64.b64decode(parts[-1])))
        if kind == "array":
            return array_of(parts[0], parts[1], data)
        return bytes(data) if kind == "bytes" else bytearray(data)
    if kind == "numpy":
        return array_of(parts[0], (), bytes.fromhex(parts[1]))[()]
    if kind == "dict":
        return {_made(key, buffers): _made(item, buffers) for key, item in parts[0]}
    if kind in _SIMPLE:
        return _SIMPLE[kind](*(_made(part, buffers) for part in parts))
    module, _, name = kind.rpartition(".")
    if kind not in _PARTS:
        raise KeyError(f"the type {kind}")
    made = getattr(import_module(module), name)
    whole = [_made(part, buffers) for part in parts]
    return made(*whole[:-1], fold=whole[-1]) if kind in ("datetime.time", "datetime.datetime") else made(*whole)


_SIMPLE: dict[str, Callable[..., Any]] = {
    "str": lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    "int": lambda text: int(text, 16),
    "float": float,
    "complex": complex,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
