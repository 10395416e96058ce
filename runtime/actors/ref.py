"""Calling actors: a reference to one that lives elsewhere.

Owns the caller's side of a call: its turn, deadline, cancellation, retries, and the connection under it. Does not own what is
called (`actor.py`), bytes (`transport.py`) or the list of waits (`waits.py`).

    ref = ActorRef("unix:/run/x/counter.sock", token=token, peer="counter")
    await ref.call("add", 1, deadline_s=5.0)

Invariants: every call ends, with a value, with the endpoint's own error, or with `DeadlineExceeded`, `PeerGone` or `Closed`. At
most as many of one caller are on the way as the actor's mailbox holds; the next ones wait here, in order.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from rondo.runtime.actors.transport import (
    CALL,
    CANCEL,
    ERROR,
    MAX_FRAME_BYTES,
    REFUSAL,
    REPLY,
    WELCOME,
    FrameProtocol,
    connect,
    pack,
    unpack,
)
from rondo.runtime.closing import Closing
from rondo.runtime.errors import Closed, PeerGone, ProtocolError, Refused, restore
from rondo.runtime.waits import PROCESS, Wait, waiting

Packed = tuple[bytes, list[memoryview]]

_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5
_INF = math.inf


@dataclass(frozen=True, slots=True)
class RefStats:
    """A reference at one moment. Calls on the way were sent and not answered; queued ones wait at this side."""

    peer: str
    connected: bool
    num_calls: int
    num_on_the_way: int
    num_queued: int
    num_connects: int


class ActorRef(Closing):
    """A reference to an actor elsewhere. Connects at the first call, and again after the peer came back.

    Belongs to one event loop. `close` it, or use it as a context manager.
    """

    def __init__(self, address: str, *, token: str, peer: str, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self.address = address
        self.peer = peer
        self._token = token
        self._max_frame_bytes = max_frame_bytes
        self._link: _Link | None = None
        self._turn = asyncio.Lock()
        self._num_queued = 0
        self._num_calls = 0
        self._num_connects = 0
        self._closed = False
        self._names: dict[str, str] = {}

    async def call(
        self, method: str, /, *arguments: Any, deadline_s: float | None = 60.0, retry: bool = False, **keywords: Any
    ) -> Any:
        """Calls an endpoint and gives its result.

        Raises the endpoint's own error; DeadlineExceeded after `deadline_s` seconds, connecting and queueing included;
        PeerGone when the peer is not there or leaves, after which the call may have run or not; Closed after `close`.
        With `retry` PeerGone is tried again until the deadline: only for endpoints that give the same answer twice.
        """
        self._num_calls += 1
        packed = pack((method, arguments, keywords))
        name = self._names.get(method) or self._names.setdefault(method, f"call {method}")
        left_s = deadline_s
        link = self._link
        if link is not None and ((link.free and not self._num_queued) or (link.open and method.startswith("rondo."))):
            wait = PROCESS.begin(name, self.peer, deadline_s)
            try:
                return await link.ask(packed, wait)
            except PeerGone as error:
                if not retry or error.remote_traceback is not None:
                    raise
            finally:
                PROCESS.end(wait)
            left_s = None if deadline_s is None else wait.due - PROCESS.clock()
        return await self._call_in_turn(packed, name, deadline_s, left_s, retry)

    async def _call_in_turn(
        self, packed: Packed, name: str, deadline_s: float | None, left_s: float | None, retry: bool
    ) -> Any:
        """The way of a call that finds no connection or no room, or that is repeated."""
        last: PeerGone | None = None
        pause_s = _FIRST_PAUSE_S
        try:
            async with waiting(name, peer=self.peer, deadline_s=left_s) as wait:
                wait.deadline_s = deadline_s  # what the caller asked for, in the list and in errors
                while True:
                    try:
                        return await (await self._send_in_turn(packed))
                    except PeerGone as error:
                        if not retry or error.remote_traceback is not None:
                            raise  # the actor's own peer is gone: that is its answer
                        last = error
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        except TimeoutError as error:
            if last is not None:
                error.add_note(f"Last attempt: {last}")
            raise

    async def _send_in_turn(self, packed: Packed) -> Coroutine[Any, Any, Any]:
        self._num_queued += 1
        try:
            async with self._turn:
                link = await self._ready()
                return link.ask(packed, None)
        finally:
            self._num_queued -= 1

    async def _ready(self) -> _Link:
        """A connection with room for one more call."""
        while True:
            if self._closed:
                raise Closed(f"the reference to {self.peer} must be open, got a call after close(). Make a new one")
            link = self._link
            if link is None or not link.open:
                link = self._link = await self._connect()
            if link.free:
                return link
            await link.freed()

    async def _connect(self) -> _Link:
        link = await connect(self.address, lambda: _Link(self.peer, self._token, self._max_frame_bytes))
        try:
            await link.welcomed
        except BaseException:
            link.close(None)
            raise
        self._num_connects += 1
        if self._closed:
            link.close(None)
        return link

    def close(self) -> None:
        """Hangs up. Calls on the way and later ones raise Closed; the actor cancels what was running."""
        self._closed = True
        if self._link is not None:
            self._link.close(Closed(f"the reference to {self.peer} must be open to answer, got closed"))
            self._link = None

    def stats(self) -> RefStats:
        link = self._link
        connected = link is not None and link.open
        num_on_the_way = link.num_on_the_way if link is not None else 0
        return RefStats(self.peer, connected, self._num_calls, num_on_the_way, self._num_queued, self._num_connects)


class _Link(FrameProtocol):
    """The caller's end of one connection. One timer serves the deadlines of all its calls."""

    def __init__(self, peer: str, token: str, max_frame_bytes: int) -> None:
        super().__init__(peer, max_frame_bytes)
        self._token = token
        self._loop = asyncio.get_running_loop()
        self.welcomed: asyncio.Future[None] = self._loop.create_future()
        self.num_on_the_way = 0
        self._window = 0
        self._last_id = 0
        self._pending: dict[int, tuple[asyncio.Future[Any], Wait | None]] = {}
        self._error: Exception | None = None
        self._free_waiters: list[asyncio.Future[None]] = []
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_due = _INF

    @property
    def free(self) -> bool:
        """Whether one more call may be sent now."""
        return self.num_on_the_way < self._window and not self.paused and self.open

    async def freed(self) -> None:
        """Waits until there may be room. Raises PeerGone when the connection ends first."""
        waiter = self._loop.create_future()
        self._free_waiters.append(waiter)
        await waiter

    def ask(self, packed: Packed, wait: Wait | None) -> Coroutine[Any, Any, Any]:
        """Sends a call at once; the result is awaited. `wait` carries a deadline for this connection to watch, if any."""
        self._last_id = call_id = self._last_id + 1
        self.send(CALL, call_id, *packed)
        self.num_on_the_way += 1
        future = self._loop.create_future()
        self._pending[call_id] = (future, wait)
        if wait is not None and wait.due < self._alarm_due:
            self._set_alarm(wait.due)
        return self._answer(call_id, future)

    async def _answer(self, call_id: int, future: asyncio.Future[Any]) -> Any:
        """Waits for the result of a call; a cancellation travels."""
        try:
            return await future
        except asyncio.CancelledError:
            self._abandon(call_id)
            raise

    def _abandon(self, call_id: int) -> None:
        """Cancels a call at the actor. Its room is free again when the actor has answered."""
        if self._pending.pop(call_id, None) is not None and self.open:
            self.send(CANCEL, call_id, b"")

    def close(self, error: Exception | None) -> None:
        self._error = self._error or error
        self.open = False
        self.transport.close()
        self._fail_all()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.say_hello(self._token, PROCESS.waiter)

    def frame_received(self, kind: int, call_id: int, header: memoryview, buffers: Sequence[memoryview]) -> None:
        if kind in (REPLY, ERROR):
            self.num_on_the_way -= 1
            if self._free_waiters:
                self.resumed()
            call = self._pending.get(call_id)
            if call is None or call[0].done():
                return  # cancelled meanwhile: nobody waits for it
            if kind == REPLY:
                call[0].set_result(unpack(header, buffers))
            else:
                call[0].set_exception(self._restored(header))
            del self._pending[call_id]  # only now: what cannot be read ends the connection, and with it this call
        elif kind == WELCOME:
            self._window, self.peer_max_frame_bytes = _welcome(unpack(header, ()))
            if not self.welcomed.done():
                self.welcomed.set_result(None)
        elif kind == REFUSAL:
            told = unpack(header, ())
            if not isinstance(told, list) or len(told) != 2:
                raise ProtocolError(f"a refusal must hold an error's name and text, got {len(header)} other bytes")
            name, text = told
            self.close((Refused if name == "Refused" else ProtocolError)(f"{self.peer} refused: {text}"))
        else:
            raise ProtocolError(f"an actor must send replies, got a frame of kind {kind}")

    def refuse(self, error: Exception) -> None:
        self.close(error)

    def lost(self, error: Exception | None) -> None:
        self._error = self._error or PeerGone(
            f"{self.peer} must stay until it has answered, got a closed connection{f' ({error})' if error else ''}. "
            "The call may have run: repeat it if that does no harm"
        )
        self._fail_all()

    def resumed(self) -> None:
        waiters, self._free_waiters = self._free_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _restored(self, header: memoryview) -> Exception:
        try:
            return restore(orjson.loads(header), self.peer)
        except (ValueError, TypeError, KeyError) as error:
            raise ProtocolError(f"an error must arrive as its description, got {error!r}") from error

    def _fail_all(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        futures: list[asyncio.Future[Any]] = [future for future, _ in self._pending.values()]
        futures += [self.welcomed, *self._free_waiters]
        self._pending.clear()
        self._free_waiters.clear()
        for future in futures:
            if not future.done():
                if self._error is None:
                    future.cancel()
                else:
                    future.set_exception(type(self._error)(*self._error.args))
                    future.exception()  # seen: nobody may be left to ask, and that is no news

    def _set_alarm(self, due: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_due = due
        self._alarm = None
        if due != _INF:
            self._alarm = self._loop.call_later(max(0.0, due - PROCESS.clock()), self._ring)

    def _ring(self) -> None:
        late = PROCESS.clock() + 1e-3  # the loop's clock counts whole milliseconds
        for call_id, (future, wait) in list(self._pending.items()):
            if wait is not None and wait.due <= late:
                self._abandon(call_id)
                if not future.done():
                    future.set_exception(PROCESS.exceeded(wait))
        self._set_alarm(min((wait.due for _, wait in self._pending.values() if wait is not None), default=_INF))


def _welcome(facts: Any) -> tuple[int, int]:
    """How many calls may be on the way, and the bytes that one may have."""
    window, most = (facts.get("window"), facts.get("max_frame_bytes")) if isinstance(facts, dict) else (None, None)
    if not (type(window) is int and window >= 1 and type(most) is int and most >= 0):
        raise ProtocolError(f"a welcome must hold a window and the bytes of a frame, got {window!r} and {most!r}")
    return window, most
