"""Values: what a user's row or reward holds arrives as it was, or is refused by its type and place."""

from __future__ import annotations

import math
import uuid
from collections import OrderedDict, namedtuple
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import orjson
import pytest

from rondo.runtime.errors import ProtocolError
from rondo.runtime.values import as_json, decode, encode, read_json, write_json

Point = namedtuple("Point", "x y")

VALUES: list[Any] = [
    None,
    True,
    0,
    -(1 << 63),
    (1 << 64) - 1,
    1 << 64,
    -(10**40),
    0.1,
    -0.0,
    5e-324,
    math.inf,
    -math.inf,
    math.nan,
    1 - 2j,
    complex(math.nan, math.inf),
    "text \u2028 \U0001f600",
    "half of a pair: \ud83d",
    b"",
    b"\x00\xff" * 1000,
    bytearray(b"ab"),
    [1, [2.5, None]],
    (1, (2,), [3]),
    (),
    {1, "1", (2, 3), frozenset({4})},
    frozenset(),
    {"a": {"b": [1]}},
    {1: "int", "1": "text", 1.5: "float", None: "none", (1, 2): "pair", b"k": 0},
    {"$": ["set", [1]]},
    {"$": 1, "other": {"$": "x"}},
    {"\ud83d": 1},
    Decimal("-0.10"),
    Decimal("NaN"),
    Decimal("1E+400"),
    Fraction(1, 3),
    uuid.UUID(int=7),
    date(2024, 2, 29),
    time(23, 59, 59, 999999, fold=1),
    time(1, tzinfo=UTC),
    datetime(2024, 10, 27, 2, 30, fold=1),
    datetime(2024, 10, 27, 2, 30, tzinfo=timezone(timedelta(hours=-3, minutes=-30), "here")),
    datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")),
    timedelta(days=-1, microseconds=1),
    np.float32(0.1),
    np.float64("nan"),
    np.int64(-1),
    np.uint8(255),
    np.bool_(True),
    np.complex64(1j),
    np.str_("ü"),
    np.bytes_(b"x"),
    np.datetime64("2024-02-29T12", "h"),
    np.arange(6, dtype=np.int16).reshape(2, 3).T,
    np.array(3.0),
    np.zeros((0, 2), np.float16),
    np.array(["a", "bc"]),
    {"deep": [({"x": np.ones(3)}, {1, 2})]},
]


def same(one: Any, other: Any) -> bool:
    """The same type and contents at every depth; NaN is itself, and 0.0 is not -0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(a, b) and same(one[a], other[b]) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, datetime | time):
        return (repr(one), one.fold) == (repr(other), other.fold)
    if isinstance(one, float | complex | Decimal):
        return repr(one) == repr(other)
    return bool(one == other)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_arrives_as_it_was(value: Any) -> None:
    text, buffers = encode({"value": value})
    found = decode(orjson.loads(text), [memoryview(bytearray(buffer)) for buffer in buffers])["value"]
    assert same(value, found), found
    assert same(value, decode(orjson.loads(orjson.dumps(as_json(value)))))


def test_what_json_says_exactly_is_json() -> None:
    value = {"question": "1+1", "steps": [1, 2.5, True, None], "more": {}}
    assert encode(value) == (orjson.dumps(value), [])


class Own:
    pass


class Text(str):
    __slots__ = ()


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"a": [1, Own()]}, "label['a'][1] must be of a type that travels (None, bool, "),
        (Own(), f"got {__name__}.Own. Convert it, or leave it out"),
        ({"a": {"b": Text("x")}}, "label['a']['b'] must be of a type that travels (None, bool, "),
        ((1, Point(1, 2)), f"got {__name__}.Point. "),
        (OrderedDict(a=1), "got collections.OrderedDict. "),
        ({Own: 1}, "got type. "),
        ([np.array([{}])], "label[0] must be"),
        (np.zeros(1, [("a", "i4")]), "got numpy's [('a', '<i4')]. Convert it with tolist()"),
        (nested(2000), "label must not be nested so deeply that it has no text, got one that is. Flatten it"),
        ((((loop := []), loop.append(loop)))[0], "label must not be nested so deeply"),
    ],
)
def test_another_type_is_refused_with_its_place(value: Any, error: str) -> None:
    for refuse in (encode, as_json):
        with pytest.raises(TypeError) as caught:
            refuse(value, "label")
        assert error in str(caught.value)


@pytest.mark.parametrize(
    "node",
    [
        {"$": ["os.system", "true"]},
        {"$": ["array", "|O", [1], 0]},
        {"$": ["array", "<f8", [2], 0]},
        {"$": ["bytes", 1]},
        {"$": ["decimal.Decimal", "x"]},
        {"$": 3},
        {"$": ["int"]},
    ],
)
def test_text_that_no_value_has_is_refused(node: Any) -> None:
    with pytest.raises(ProtocolError, match="a value must be one that travels"):
        decode([node], [memoryview(bytearray(8))])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((1 << 64) - 1, b"18446744073709551615"),
        ({"a": [1 << 64, -(10**9)], "b": "\u2028漢"}, '{"a":[18446744073709551616,-1000000000],"b":"\u2028漢"}'.encode()),
        ([10**400, None, 0.5, 1e300], b"[1" + b"0" * 400 + b",null,0.5,1e+300]"),
        ("9" * 30, b'"' + b"9" * 30 + b'"'),
    ],
)  # fmt: skip
def test_integers_of_any_size_are_exact_in_json(value: Any, text: bytes) -> None:
    assert write_json(value) == text and read_json(text) == value == read_json(text.decode())
    assert type(read_json(text)) is type(value)


def test_what_orjson_writes_beside_json_is_written_beside_a_long_integer_too() -> None:
    assert write_json({"b": np.arange(2), "a": 1 << 70}, orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_SORT_KEYS) == (
        b'{"a":1180591620717411303424,"b":[0,1]}'
    )
    for value in ([1 << 70, math.nan], [1 << 70, "\ud800"], [1 << 70, object()], object()):
        with pytest.raises(TypeError):
            write_json(value)


@pytest.mark.parametrize("beside", ["NaN", "1e400", '"\\ud800"', "1 2", "[" * 100_000, "1" * 5000])
def test_what_is_no_json_is_refused_beside_a_long_integer_too(beside: str) -> None:
    with pytest.raises(ValueError):  # each parser has its own words
        read_json(f"[{1 << 70}, {beside}]")
