"""Both ends of a link for tests, and a proxy between them that damages what it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import os
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np

from rondo.comm.links.config import LinkConfig
from rondo.comm.links.mirror import Mirror
from rondo.comm.links.receiver import LinkReceiver
from rondo.comm.links.sender import LinkSender
from rondo.comm.ring.records import Column
from rondo.comm.ring.ring import RingTail, RingView, RingWriter, ring_bytes
from rondo.comm.ring.words import drain
from tests.comm.memory import MemorySegment

TOKEN = "a token of a run"
RING = "ring/rollout-0/0"
QUICK = LinkConfig(
    chunk_bytes=16 << 10, beat_s=0.05, silent_s=60.0, connect_s=60.0, longest_pause_s=0.05, reconnect_s=60.0
)
"""Beats often; nobody is gone but one whose connection ends."""
PATIENCE_S = 120.0


def column(group: int, num_bytes: int) -> Column:
    """What a group holds: checkable from its number alone."""
    return Column("x", "uint8", [np.random.default_rng(group).integers(0, 256, num_bytes, np.uint8)])


class Ends:
    """An origin and its mirror, memory only; whoever tests starts what moves bytes between them."""

    def __init__(
        self, capacity: int = 1 << 18, sizes: Callable[[int], int] = lambda group: 500 + 9_000 * (group % 5)
    ) -> None:
        self.origin, self.copy = MemorySegment(ring_bytes(capacity)), MemorySegment(ring_bytes(capacity))
        self.writer = RingWriter(self.origin, None, RING)
        self.sizes = sizes
        self.refs: list[tuple[int, int, int]] = []
        self.tail = RingTail(self.origin, RING)

    @property
    def end(self) -> int:
        return self.writer.head

    def put(self, count: int) -> None:
        for group in range(len(self.refs), len(self.refs) + count):
            ref = self.writer.put([(group, 0, 0, 1)], [column(group, self.sizes(group))], epoch=0, attempt=0)
            self.refs.append((ref.pos, ref.seq, ref.num_bytes))

    def fill(self, most: int) -> None:
        """Put as many groups as there is room for, `most` in all."""
        while len(self.refs) < most and self.writer.head - self.writer.tail < self.writer.capacity // 2:
            self.put(1)

    def sender(
        self, address: str, config: LinkConfig = QUICK, *, token: str = TOKEN, incarnation: int = 0
    ) -> LinkSender:
        return LinkSender(
            self.origin, RING, address, token=token, node="node-1", attempt=0, incarnation=incarnation, config=config
        )

    def receiver(self, config: LinkConfig = QUICK, fd: int | None = None) -> LinkReceiver:
        return LinkReceiver("node-1", TOKEN, lambda ring, capacity: Mirror(self.copy, fd, ring), config)


class Reader:
    """Reads a mirror as the other node does: every record once, compared whole with what its producer put."""

    def __init__(self, ends: Ends) -> None:
        self.ends, self.seen = ends, 0
        self.tail, self.view = RingTail(ends.copy, RING), RingView(ends.copy, RING)

    def check(self) -> None:
        for ref, descriptor in self.tail.poll():
            assert (ref.pos, ref.seq, ref.num_bytes) == self.ends.refs[self.seen]
            assert descriptor.spans == [[self.seen, 0, 0, 1]]
            found = self.view.read(ref.pos, ref.seq).column("x", 0)
            assert found.tobytes() == column(self.seen, self.ends.sizes(self.seen)).arrays[0].tobytes()
            self.seen += 1


async def cross(
    ends: Ends, sender: LinkSender, receiver: LinkReceiver, count: int, reader: Reader | None = None
) -> Reader:
    """Put groups until there are `count`, reading, releasing and checking on the other side, in many laps of the ring."""
    reader = reader or Reader(ends)
    while reader.seen < count:
        ends.fill(count)
        sender.wake()
        await sender.mirrored_upto(ends.end, deadline_s=PATIENCE_S)
        reader.check()
        receiver.release(RING, reader.tail.cursor)
        await sender.released_upto(ends.end, deadline_s=PATIENCE_S)
        ends.tail.poll()
        ends.tail.release(sender.released)
    assert reader.seen == count == len(ends.refs)
    return reader


async def rung(fd: int, until: Callable[[], bool], deadline_s: float = PATIENCE_S) -> None:
    """Wait for a mirror's doorbell until something holds."""
    event, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(fd, event.set)
    try:
        async with asyncio.timeout(deadline_s):
            while not until():
                await event.wait()
                event.clear()
                drain(fd)
    finally:
        loop.remove_reader(fd)


@contextlib.asynccontextmanager
async def running(sender: LinkSender) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(sender.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        sender.close()


class Proxy:
    """Forwards connections byte by byte. `faults` are tried on what flows to the receiver, each once, in order:
    (offset, kind) with the kinds reset, truncate, stall, flip and hold (nothing more on this connection until the others have
    carried `OVERTAKES` bytes); offsets count over all connections since the last fault."""

    OVERTAKES = 50_000

    def __init__(self, address: str, faults: list[tuple[int, str]]) -> None:
        _, self._host, port = address.split(":")
        self._port = int(port)
        self.faults = faults
        self._count = 0
        self._passed = 0
        self._held: list[tuple[int, asyncio.Event]] = []  # set when so much has passed
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"tcp:127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        writers = [writer]
        try:
            there_reader, there = await asyncio.open_connection(self._host, self._port)
            writers.append(there)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pipe(reader, there, True))
                group.create_task(self._pipe(there_reader, writer, False))
        except (OSError, ExceptionGroup, asyncio.CancelledError):
            pass
        finally:
            for end in writers:
                end.transport.abort()
            self._tasks.discard(task)

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, forth: bool) -> None:
        while data := bytearray(await reader.read(32 << 10)):
            if forth and self.faults:
                offset, kind = self.faults[0]
                at = offset - self._count
                self._count += len(data)
                if at < len(data):
                    self.faults.pop(0)
                    self._count = 0
                    if kind == "flip":
                        data[max(at, 0)] ^= 0x10
                    elif kind == "stall":
                        await asyncio.Event().wait()
                    elif kind == "hold":
                        self._held.append((self._passed + self.OVERTAKES, asyncio.Event()))
                        await self._held[-1][1].wait()
                    else:
                        writer.write(data[: max(at, 0)])
                        if kind == "truncate":
                            await writer.drain()
                            writer.write_eof()
                        raise ConnectionResetError
            writer.write(data)
            await writer.drain()
            self._passed += len(data) * forth
            for much, event in self._held:
                if self._passed >= much:
                    event.set()
        raise ConnectionResetError


# ---- in processes of their own --------------------------------------------------------------------------------------


def receive(
    copy_fd: int, port: int, host: str = "127.0.0.1", doorbell_fd: int | None = None, config: LinkConfig = QUICK
) -> None:
    """A receiver in this process until it is killed; prints its address."""

    async def main() -> None:
        copy = MemorySegment(fd=copy_fd)
        receiver = LinkReceiver("node-1", TOKEN, lambda ring, capacity: Mirror(copy, doorbell_fd, ring), config)
        await receiver.start(f"tcp:{host}:{port}")
        sys.stdout.write(receiver.address + "\n")
        sys.stdout.flush()
        await asyncio.Event().wait()

    asyncio.run(main())


def send(origin_fd: int, address: str, kind: type[LinkSender] = LinkSender, config: LinkConfig = QUICK) -> None:
    """A sender in this process until it is killed."""

    async def main() -> None:
        origin = MemorySegment(fd=origin_fd)
        await kind(origin, RING, address, token=TOKEN, node="node-1", attempt=0, config=config).run()

    asyncio.run(main())


def netns(name: str) -> None:
    """Enter a network namespace for good."""
    fd = os.open(f"/run/netns/{name}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(fd, 0x40000000):
        raise OSError(ctypes.get_errno(), f"setns into {name}")
    os.close(fd)


NOTICING = dataclasses.replace(QUICK, silent_s=3.0, connect_s=3.0)
"""A cable that is pulled shows by silence alone; a process that waits for a core on a busy machine is silent for less."""


def receive_in(namespace: str, copy_fd: int, doorbell_fd: int, host: str) -> None:
    """A receiver inside a network namespace."""
    netns(namespace)
    receive(copy_fd, 0, host, doorbell_fd, NOTICING)


def send_in(namespace: str, origin_fd: int, address: str) -> None:
    """A sender inside a network namespace; says "open" and "lost" as its connections come and go."""
    netns(namespace)
    send(origin_fd, address, _Telling, NOTICING)


class _Telling(LinkSender):
    async def _serve(self, session: Any) -> None:
        print("open", flush=True)
        try:
            await super()._serve(session)
        finally:
            print("lost", flush=True)
