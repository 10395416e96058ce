"""What cannot be told is counted and told, and decides nothing."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from rondo.runtime.records.telling import NOT_TOLD, TOLD_AGAIN, Untold, tell_every, telling


def test_a_failure_ends_its_body_alone_and_is_told_once_until_it_works_again(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    untold, heard, reached = Untold(lambda: now), list[tuple[str, dict[str, Any]]](), list[float]()
    untold.listener = lambda kind, data: heard.append((kind, data))
    # Between 2 and 4 it works for a moment, as the last bytes of a disk do.
    for now, fails in (
        (0.0, False),
        (2.0, True),
        (3.0, False),
        (4.0, True),
        (13.0, False),
        (15.0, False),
        (16.0, True),
    ):
        with telling("events.jsonl", untold):
            if fails:
                raise OSError(28, "No space left on device")
            reached.append(now)
    assert reached == [0.0, 3.0, 13.0, 15.0]
    why = "[Errno 28] No space left on device"
    assert heard == [
        (NOT_TOLD, {"what": "events.jsonl", "num": 1, "why": why}),
        (TOLD_AGAIN, {"what": "events.jsonl", "num": 2}),
        (NOT_TOLD, {"what": "events.jsonl", "num": 3, "why": why}),
    ]
    assert untold.counts() == {"events.jsonl": 3}
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.ERROR, logging.WARNING, logging.ERROR]


def test_a_listener_that_fails_itself_does_no_harm() -> None:
    def listener(kind: str, data: dict[str, Any]) -> None:
        raise RuntimeError("the loop is closed")

    untold = Untold()
    untold.listener = listener
    with telling("view", untold):
        raise ValueError("nothing to draw")
    assert untold.counts() == {"view": 1}


def test_a_cancellation_is_no_failure() -> None:
    untold = Untold()
    with pytest.raises(asyncio.CancelledError), telling("view", untold):
        raise asyncio.CancelledError
    assert untold.counts() == {}


async def test_a_side_task_goes_on_after_a_time_that_failed() -> None:
    times = 0

    async def refresh() -> None:
        nonlocal times
        times += 1
        if times == 5:
            task.cancel()
        elif times % 2:
            raise RuntimeError("nothing to draw")

    task = asyncio.create_task(tell_every("a side task", 0.0, refresh))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert times == 5
