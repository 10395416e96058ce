"""Room on the disk: a saving that finds none waits under a name until there is some, on all ranks alike.

Owns the wait, when it is tried again and what is told of it. Does not own the saving (`models/checkpoint.py`), which raises
`NoRoom` on all ranks or on none and leaves nothing behind.

    waited_s = await when_there_is_room(ctx, attempt, version=4, section=section, deadline_s=None, newer=newer)
    waited_s = await save_last(ctx, config, 8, save)

Invariant: every rank makes the same attempts in the same order; an attempt is told whether a newer saving is due on this rank,
and answers on all ranks alike whether it was made or gave way to that one.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from pathlib import Path

from rondo.roles.config import JobConfig
from rondo.runtime.checkpoints import NoRoom
from rondo.runtime.errors import DeadlineExceeded, Fatal
from rondo.runtime.supervision.heartbeat import SAVE
from rondo.runtime.waits import happens, waiting
from rondo.runtime.worker.context import WorkerContext

NO_ROOM = "no_room"
"""The kind of the records that tell of the wait."""
LOOK_S = 5.0
"""From one attempt to the next, unless a newer saving is due before."""
_TELL_S = 60.0
"""How often it is told while it lasts."""


async def when_there_is_room(
    ctx: WorkerContext,
    attempt: Callable[[bool], Awaitable[bool]],
    *,
    version: int,
    section: Callable[[], AbstractContextManager[None]],
    deadline_s: float | None,
    newer: asyncio.Event,
    stop_s: float,
) -> float | None:
    """`attempt` until it finds room, each in a `section` of its own. How long that was waited for, None where it gave way, or
    found none within `stop_s` of a stop; DeadlineExceeded after `deadline_s`."""
    with section():
        try:
            return 0.0 if await attempt(False) else None
        except NoRoom as error:
            missing = error
    began = time.monotonic()
    told_at, gives_up_at = -_TELL_S, math.inf
    async with waiting("room on the disk", peer=_show(missing), deadline_s=deadline_s) as wait:
        while True:
            waited_s = time.monotonic() - began
            if ctx.rank == 0 and waited_s >= told_at + _TELL_S:
                told_at = waited_s
                sizes = {"needed_bytes": missing.needed_bytes, "free_bytes": missing.free_bytes, "waited_s": waited_s}
                await ctx.report(NO_ROOM, {"version": version, "path": str(missing.place), **sizes})
            with section():
                await happens(newer, LOOK_S)
                gives_way = newer.is_set() or time.monotonic() > gives_up_at
                if ctx.stopping.is_set():
                    gives_up_at = min(gives_up_at, time.monotonic() + stop_s)
                    wait.deadline_s = gives_up_at - began
                waited_s = time.monotonic() - began
                try:
                    if await attempt(gives_way):
                        return waited_s
                    if ctx.rank == 0 and ctx.stopping.is_set() and not newer.is_set():
                        cause = f"version {version} must find room on the disk within supervision.grace_s of a stop, {stop_s:g} s"
                        await ctx.report("unsaved", {"version": version, "cause": f"{cause}, got none. Make room"})
                    return None
                except NoRoom as error:
                    missing = error
                    wait.peer = _show(missing)


async def save_last(ctx: WorkerContext, config: JobConfig, version: int, save: Callable[[], None]) -> float | None:
    """`save` on the compute thread, at the end of a run; without room for longer than the settings allow, the run ends with that
    as its cause. A stop waits for its grace alone, and leaves without this version. How long room was waited for, None where
    there was none."""

    async def attempt(gives_way: bool) -> bool:
        if not gives_way:
            await ctx.compute(save)
        return not gives_way

    section = functools.partial(ctx.section, SAVE, config.supervision.save_s)
    try:
        return await when_there_is_room(
            ctx, attempt, version=version, section=section, deadline_s=config.train.wait_for_room_s, newer=asyncio.Event(),
            stop_s=config.supervision.grace_s,
        )  # fmt: skip
    except DeadlineExceeded as error:
        raise Fatal(str(error)) from error


async def saved(ctx: WorkerContext, version: int, folder: Path, num_samples: int, since: float, pause_s: float) -> None:
    """Tell of a whole checkpoint, begun at `since` (room that was waited for left out), for which training stood still for
    `pause_s`, and of the untrained samples in it."""
    if ctx.rank == 0:
        took = {"save_s": time.monotonic() - since, "pause_s": pause_s}
        figures = {"version": version, "path": str(folder), "num_samples": num_samples} | took
        await ctx.report("checkpoint", figures)


def _show(missing: NoRoom) -> str:
    return f"{missing.place}: {missing.needed_bytes} bytes needed, {missing.free_bytes} free"
