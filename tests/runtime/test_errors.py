"""Errors are standard types too, and cross a wire as themselves."""

from __future__ import annotations

import asyncio
import json

import orjson
import pytest

from rondo.runtime.errors import (
    MAX_TEXT,
    TRAVELLERS,
    Closed,
    ConfigError,
    CorruptData,
    DeadlineExceeded,
    NotYet,
    OutOfSpace,
    PeerGone,
    ProtocolError,
    Refused,
    RemoteError,
    RondoError,
    WorkerDied,
    describe,
    restore,
)


def over_a_wire(error: BaseException, peer: str = "actor-0") -> Exception:
    """The error after one hop, through the bytes that travel."""
    try:
        raise error
    except BaseException as raised:  # noqa: BLE001
        return restore(orjson.loads(orjson.dumps(describe(raised))), peer)


@pytest.mark.parametrize(
    ("kind", "standard"),
    [
        (ConfigError, ValueError), (DeadlineExceeded, TimeoutError), (PeerGone, ConnectionError),
        (ProtocolError, ConnectionError), (Closed, RuntimeError), (Refused, RuntimeError), (RemoteError, RuntimeError),
        (CorruptData, ValueError), (OutOfSpace, MemoryError), (WorkerDied, RuntimeError),
    ],
)  # fmt: skip
def test_every_error_of_the_tree_is_a_standard_one_too(kind: type[Exception], standard: type[Exception]) -> None:
    assert issubclass(kind, RondoError)
    assert issubclass(kind, standard)


def test_a_cancellation_travels_without_a_traceback_which_takes_long_to_write() -> None:
    found = over_a_wire(asyncio.CancelledError())
    assert isinstance(found, RemoteError) and found.remote_traceback == ""


def test_a_deadline_names_the_wait_and_both_sides() -> None:
    error = DeadlineExceeded("call lease", "rollout-0.0", "coordinator", 2.5)
    assert str(error) == (
        "wait 'call lease' of 'rollout-0.0' for 'coordinator' must end within 2.5 s, got no end. "
        "Look at what 'coordinator' waits for, or raise the deadline"
    )
    assert (error.name, error.waiter, error.peer, error.deadline_s) == ("call lease", "rollout-0.0", "coordinator", 2.5)


@pytest.mark.parametrize(
    "kind", [kind for name, kind in TRAVELLERS.items() if name not in {"DeadlineExceeded", "RemoteError"}]
)
def test_what_travels_arrives_as_its_own_type_with_its_arguments(kind: type[Exception]) -> None:
    sent = kind("epoch must be 4, got 3")
    arrived = over_a_wire(sent)
    assert type(arrived) is kind
    assert (str(arrived), arrived.args) == (str(sent), sent.args)


def test_when_to_ask_again_travels() -> None:
    arrived = over_a_wire(NotYet("its journal must have room", 2.5))
    assert isinstance(arrived, NotYet) and arrived.after_s == 2.5


def test_a_deadline_travels_with_its_fields() -> None:
    arrived = over_a_wire(DeadlineExceeded("round", "actor-0.1", "coordinator", 60))
    assert isinstance(arrived, DeadlineExceeded)
    assert (arrived.name, arrived.waiter, arrived.peer, arrived.deadline_s) == ("round", "actor-0.1", "coordinator", 60)


def test_a_key_error_keeps_a_key_that_is_not_text() -> None:
    assert over_a_wire(KeyError(7)).args == (7,)


def test_a_subclass_arrives_as_its_nearest_type_of_the_tree() -> None:
    class LateEpoch(Refused):
        def __init__(self, got: int, want: int) -> None:
            super().__init__(f"epoch must be {want}, got {got}")

    arrived = over_a_wire(LateEpoch(3, 4))
    assert type(arrived) is Refused
    assert str(arrived) == "epoch must be 4, got 3"


@pytest.mark.parametrize(
    "error", [json.JSONDecodeError("bad", "x", 0), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no")]
)
def test_a_subclass_of_a_builtin_arrives_as_a_remote_error_that_names_it(error: Exception) -> None:
    arrived = over_a_wire(error)
    assert isinstance(arrived, RemoteError)
    assert arrived.type_name.endswith(type(error).__qualname__)
    assert str(error) in str(arrived)


def test_a_remote_error_keeps_its_first_name_over_two_hops() -> None:
    twice = over_a_wire(over_a_wire(ZeroDivisionError("division by zero"), "reference-0"), "actor-0")
    assert isinstance(twice, RemoteError)
    assert str(twice) == "ZeroDivisionError: division by zero"
    assert twice.remote_traceback is not None and "Remote traceback (reference-0)" in twice.remote_traceback


def test_the_other_sides_traceback_is_an_attribute_and_a_note() -> None:
    arrived = over_a_wire(ValueError("lr must be positive, got -1"))
    text = arrived.remote_traceback  # type: ignore[attr-defined]
    assert "in over_a_wire" in text and "ValueError: lr must be positive, got -1" in text
    assert arrived.__notes__ == [f"Remote traceback (actor-0):\n{text}"]


def test_causes_travel_in_the_traceback() -> None:
    error = Refused("outer")
    error.__cause__ = KeyError("inner")
    assert "KeyError: 'inner'" in (over_a_wire(error).remote_traceback or "")  # type: ignore[attr-defined]


def test_an_error_whose_text_fails_still_arrives() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    assert "its text failed with ZeroDivisionError" in str(over_a_wire(Broken()))


def test_a_lone_surrogate_in_a_message_still_arrives() -> None:
    assert str(over_a_wire(ValueError("file \ud800"))) == "file \\ud800"


def test_a_long_message_is_cut() -> None:
    text = str(over_a_wire(ValueError("x" * (3 * MAX_TEXT))))
    assert len(text) < MAX_TEXT + 100
    assert f"{2 * MAX_TEXT} characters cut" in text


def test_a_type_of_another_build_arrives_as_a_remote_error() -> None:
    arrived = restore({"type": "NewError", "args": ["what", 1], "traceback": "text"}, "coordinator")
    assert isinstance(arrived, RemoteError)
    assert arrived.type_name == "NewError"
    assert arrived.remote_traceback == "text"
