"""Joining the partitions of a bus: of its own (`host.py`) by its folder, from an event loop or from code that has none; of a run
as a role of it, where the config has `bus.partitions`.

Owns a member's way in and out. Does not own the partitions (`client.py`).

    async with join(folder, "scorer") as bus:
        async for batch in bus.partition("replay").stream("score", columns=["tokens"]): ...

    with SyncBus(folder, "trainer", rank=0, ranks=2) as bus:              # a thread of its own has the loop
        for columns in StreamingLoader(bus.partition("replay"), "train", ["tokens"]): ...

    async with of_run(ctx) as bus: ...

A name is one member, whatever process has it: who comes back under it goes on where it was. Names of readers that compete for
rows differ; processes of one name are its ranks (data-parallel, or peers that get the same rows). Invariant: whoever leaves,
or dies, holds no rows: what it has not acknowledged comes again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

import uvloop

from rondo.comm.bus.member import Member
from rondo.comm.partitions.client import Partitions
from rondo.comm.partitions.host import COORDINATOR, HANDOVER, HOST, token_of
from rondo.comm.partitions.sync import SyncPartition
from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.memory.segments import SegmentClient
from rondo.runtime.processes.process import stat
from rondo.runtime.waits import blocking
from rondo.runtime.worker.context import WorkerContext

_LEAVE_S = 10.0


@contextlib.asynccontextmanager
async def join(
    folder: Path | str, name: str, *, rank: int = 0, ranks: int = 1, deadline_s: float = 60.0
) -> AsyncIterator[Partitions]:
    """This process as rank `rank` of member `name`. Waits, up to the deadline, while older processes of the name live.

    Raises PeerGone where no bus is, DeadlineExceeded, ConfigError for a name or rank that breaks a rule.
    """
    path = Path(folder)
    token = token_of(path)
    own = stat(os.getpid())
    assert own is not None
    with contextlib.ExitStack() as opened:
        host = ActorRef(f"unix:{path}/{HOST}", token=token, peer="host")
        opened.callback(host.close)
        incarnation = await host.call(
            "join", name, rank, ranks, own.pid, own.start_time, secrets.token_hex(8), deadline_s=deadline_s, retry=True
        )
        try:
            segments = opened.enter_context(SegmentClient(path / HANDOVER, token))
            async with _speaking(Member(name, incarnation, rank, ranks, 0), path, token, segments) as bus:
                yield bus
        finally:
            with contextlib.suppress(ConnectionError, TimeoutError):  # a host that is gone keeps no members
                await host.call("leave", name, incarnation, rank, deadline_s=_LEAVE_S)


@contextlib.asynccontextmanager
async def of_run(ctx: WorkerContext) -> AsyncIterator[Partitions]:
    """The partitions of a role's run, as this process of its role group. They are there where the config has `bus.partitions`."""
    member = Member(ctx.group, ctx.incarnation, ctx.rank, ctx.world_size, ctx.attempt)
    async with _speaking(member, ctx.rt_dir, ctx.token, ctx.segments) as bus:
        yield bus


@contextlib.asynccontextmanager
async def _speaking(member: Member, folder: Path, token: str, segments: SegmentClient) -> AsyncIterator[Partitions]:
    with contextlib.closing(ActorRef(f"unix:{folder}/{COORDINATOR}", token=token, peer="partitions")) as coordinator:
        with contextlib.closing(Partitions(member, coordinator, segments)) as bus:
            yield bus
            await bus.flush()


class SyncBus:
    """`join` for threads. Its own thread runs the loop, so calls may come from any other; `close` it, or use it as a context."""

    def __init__(
        self, folder: Path | str, name: str, *, rank: int = 0, ranks: int = 1, deadline_s: float = 60.0
    ) -> None:
        self._parts: dict[str, SyncPartition] = {}
        self._joined: Future[Partitions] = Future()
        self._loop: asyncio.AbstractEventLoop
        self._left: asyncio.Event

        async def live() -> None:
            self._loop, self._left = asyncio.get_running_loop(), asyncio.Event()
            async with join(folder, name, rank=rank, ranks=ranks, deadline_s=deadline_s) as bus:
                self._joined.set_result(bus)
                await self._left.wait()

        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(live,), name=f"bus {name}", daemon=True)
        self._thread.start()
        with blocking("bus join", peer=str(folder), deadline_s=deadline_s):  # `join` keeps the deadline
            self._bus = self._joined.result()

    def partition(self, name: str, **settings: Any) -> SyncPartition:
        """The named set of rows, as `Partitions.partition` gives it."""
        if name not in self._parts:
            self._parts[name] = SyncPartition(self._bus.partition(name, **settings), self._loop)
        return self._parts[name]

    def close(self) -> None:
        """Leave: calls that wait raise Closed, acknowledgements are sent, the thread ends. Safe to call twice."""
        if self._thread.is_alive():
            for part in self._parts.values():
                part.cancel()
            self._loop.call_soon_threadsafe(self._left.set)
            self._thread.join()
            self._ended.result()

    def __enter__(self) -> SyncBus:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _run(self, live: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(live())
            self._ended.set_result(None)
        except Exception as error:  # noqa: BLE001  # it is raised where the bus was asked for, or closed
            (self._ended if self._joined.done() else self._joined).set_exception(error)
