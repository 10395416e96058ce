"""Actors: a class with endpoints, living on the event loop of its process, called from others by reference (`ref.py`).

Owns the actor's side of calls: their order, the bounded mailbox, cancellation, and how results and errors leave. Does not own the
caller's side, bytes (`transport.py`) or who starts processes. Calls of one actor run as concurrent coroutines of one loop, begun
in the order in which they arrived; long computations belong on the compute thread.

    class Counter(Actor):
        @endpoint
        async def add(self, x: int) -> int: ...

    server = await serve(Counter(), "unix:/run/x/counter.sock", token=token, name="counter")

Invariants: a call that nobody waits for any more (cancelled, past its deadline, its caller gone) is cancelled here, once: what it
cleans up then is not cut off by a second reason, and takes at most `CLEANUP_S` (wait "cleanup"), or is cancelled again. At most
`mailbox` calls run at once; the next ones wait at the caller, in order. However full the mailbox is, cancellations are read, and
the questions are answered that every actor answers by itself: `rondo.ping`, `rondo.waits`, `rondo.stacks`.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import os
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from rondo.runtime.actors.transport import (
    CALL,
    CANCEL,
    ERROR,
    MAX_FRAME_BYTES,
    REPLY,
    WELCOME,
    FrameProtocol,
    Listener,
    listen,
    pack,
    unpack,
)
from rondo.runtime.errors import ProtocolError, describe
from rondo.runtime.waits import PROCESS, Wait

F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, Any]])
Endpoint = Callable[..., Coroutine[Any, Any, Any]]
CLEANUP_S = 30.0
"""An endpoint that was cancelled has so long for its `finally`."""

Arguments = tuple[list[Any], dict[str, Any]]


class Actor:
    """Base of everything that is called from other processes. A subclass marks its coroutines with `@endpoint`."""


def endpoint(function: F) -> F:
    """Marks a coroutine function of an actor as callable from outside.

    Arguments and results are JSON values, bytes and numpy arrays at any depth. The keywords `deadline_s` and `retry`
    belong to the caller's side and cannot be parameters.
    """
    is_coroutine: bool = inspect.iscoroutinefunction(function)
    if not is_coroutine or {"deadline_s", "retry"} & set(inspect.signature(function).parameters):
        raise TypeError(
            f"endpoint {function.__qualname__} must be `async def` without parameters named deadline_s or retry, "
            f"got {inspect.signature(function)}. Change its definition"
        )
    function.__rondo_endpoint__ = True  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True, slots=True)
class ServerStats:
    """A server at one moment. Queued calls have arrived and wait for room in the mailbox."""

    name: str
    address: str
    num_callers: int
    num_running: int
    num_queued: int
    num_calls: int
    num_errors: int


async def serve(
    actor: Actor,
    address: str,
    *,
    token: str,
    name: str,
    mailbox: int = 4096,
    max_frame_bytes: int = MAX_FRAME_BYTES,
) -> Server:
    """Serves an actor at "unix:/path" or "tcp:host:port" (port 0: the system chooses, see `Server.address`).

    Raises Refused when the address is taken. Only callers that show `token` get in.
    """
    if mailbox < 1:
        raise ValueError(f"mailbox must be at least 1, got {mailbox}. Leave it at its default")
    server = Server(actor, token, name, mailbox, max_frame_bytes)
    server._listener = await listen(address, lambda: _Caller(server))
    server.address = server._listener.address
    return server


class Server:
    """A served actor. Made by `serve`."""

    address: str
    _listener: Listener

    def __init__(self, actor: Actor, token: str, name: str, mailbox: int, max_frame_bytes: int) -> None:
        self.name = name
        self.token = token
        self.mailbox = mailbox
        self.max_frame_bytes = max_frame_bytes
        self._loop = asyncio.get_running_loop()
        self._endpoints = _endpoints(actor)
        self._callers: set[_Caller] = set()
        self._queue: OrderedDict[tuple[_Caller, int], tuple[Endpoint, Arguments]] = OrderedDict()
        self._num_running = 0
        self._num_calls = 0
        self._num_errors = 0
        self._ended: asyncio.Future[None] | None = None

    def offer(self, actor: Actor) -> None:
        """Answers the calls of this actor's endpoints too. Their names are not taken yet."""
        offered = _endpoints(actor)
        assert not offered.keys() & self._endpoints.keys(), f"endpoints twice: {sorted(offered)}"
        self._endpoints |= offered

    def look(self) -> None:
        """Listens anew, now and not at its next look, where somebody has removed the path of its socket."""
        self._listener.look()

    def close(self) -> asyncio.Future[None]:
        """Stops listening, cancels every call and hangs up, all at once. Await the result to see the last call end."""
        if self._ended is None:
            self._ended = self._loop.create_future()
            self._listener.close()
            for caller in list(self._callers):
                caller.hang_up()
            self._settle()
        return asyncio.shield(self._ended)

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        await self.close()

    def stats(self) -> ServerStats:
        counts = len(self._callers), self._num_running, len(self._queue), self._num_calls, self._num_errors
        return ServerStats(self.name, self.address, *counts)

    # For callers.

    def joined(self, caller: _Caller) -> None:
        if self._ended is not None:
            caller.hang_up()
        self._callers.add(caller)

    def left(self, caller: _Caller) -> None:
        self._callers.discard(caller)
        self._settle()

    def accept(self, caller: _Caller, call_id: int, name: str, arguments: Arguments) -> None:
        """Begins a call, or queues it while the mailbox is full."""
        self._num_calls += 1
        method = self._endpoints.get(name)
        if method is None:
            self._answer_itself(caller, call_id, name)
        elif call_id in caller.calls or len(caller.calls) >= self.mailbox:
            raise ProtocolError(
                f"a caller must number its calls and have at most {self.mailbox} on the way, "
                f"got call {call_id} as number {len(caller.calls) + 1}"
            )
        elif self._num_running < self.mailbox:
            self._begin(caller, call_id, method, arguments)
        else:
            caller.calls[call_id] = None
            self._queue[caller, call_id] = method, arguments

    def forget(self, caller: _Caller, call_id: int) -> None:
        """Takes a queued call back."""
        del caller.calls[call_id], self._queue[caller, call_id]

    def _begin(self, caller: _Caller, call_id: int, method: Endpoint, arguments: Arguments) -> None:
        self._num_running += 1
        # The caller's table owns the task until it ends; close() waits for all of them. A TaskGroup would add a
        # callback to each call and end with the first error.
        caller.calls[call_id] = self._loop.create_task(self._run(caller, call_id, method, arguments))

    async def _run(self, caller: _Caller, call_id: int, method: Endpoint, arguments: Arguments) -> None:
        call = _Call(caller, call_id)
        _ANSWERING.set(call.answer)
        try:
            call.answer(await method(*arguments[0], **arguments[1]))
        except asyncio.CancelledError as error:
            call.fail(error)
            raise
        except Exception as error:  # whatever an endpoint raises belongs to its caller
            self._num_errors += 1
            if call.answered:
                raise
            call.fail(error)
        finally:
            caller.ended(call_id)
            self._num_running -= 1
            while self._queue and self._num_running < self.mailbox:
                (next_caller, next_id), (next_method, next_arguments) = self._queue.popitem(last=False)
                self._begin(next_caller, next_id, next_method, next_arguments)
            if self._ended is not None:
                self._settle()

    def _settle(self) -> None:
        ended = self._ended
        if ended is not None and not ended.done() and not self._callers and not self._num_running:
            ended.set_result(None)

    def _answer_itself(self, caller: _Caller, call_id: int, name: str) -> None:
        if name == "rondo.ping":
            caller.reply(call_id, orjson.dumps({"name": self.name, "pid": os.getpid(), "waiter": PROCESS.waiter}))
        elif name == "rondo.waits":
            caller.reply(
                call_id,
                orjson.dumps({"waiter": PROCESS.waiter, "waits": PROCESS.pending(), "totals": PROCESS.totals()}),
            )
        elif name == "rondo.stacks":
            caller.reply(call_id, orjson.dumps(stacks()))
        else:
            self._num_errors += 1
            known = ", ".join(sorted(self._endpoints)) or "nothing"
            caller.fail(call_id, ValueError(f"endpoint of {self.name} must be one of {known}, got {name!r}"))


def _unheard(_: Any) -> None:
    """The answer of an endpoint that nobody called from outside."""


_ANSWERING: ContextVar[Callable[[Any], None]] = ContextVar("answering", default=_unheard)


def answering() -> Callable[[Any], None]:
    """For an endpoint that waits: sends its result from whatever callback finds it, turns of the loop before the endpoint itself
    goes on. The endpoint then returns the same, which is not sent again."""
    return _ANSWERING.get()


class _Call:
    """A call that runs. Its first answer counts, and ends it for its caller."""

    __slots__ = ("_caller", "_id", "answered")

    def __init__(self, caller: _Caller, call_id: int) -> None:
        self._caller, self._id, self.answered = caller, call_id, False

    def answer(self, value: Any) -> None:
        if not self.answered:
            self._caller.reply(self._id, *pack(value))
            self.answered = True
            self._caller.answered(self._id)

    def fail(self, error: BaseException) -> None:
        if not self.answered:
            self._caller.fail(self._id, error)


class _Caller(FrameProtocol):
    """The server's end of one connection. `calls` holds the task of every call begun and None for every queued one."""

    def __init__(self, server: Server) -> None:
        super().__init__("an unknown caller", server.max_frame_bytes)
        self._server = server
        self.calls: dict[int, asyncio.Task[None] | None] = {}
        self._answered: dict[int, asyncio.Task[None] | None] = {}  # they have their answer, and end in a moment
        self._ending: dict[asyncio.Task[None], tuple[Wait, asyncio.TimerHandle]] = {}  # cancelled, and not at their end

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.joined(self)
        self.expect_hello(self._server.token, self._welcome)

    def _welcome(self) -> None:
        server = self._server
        facts = {"name": server.name, "window": server.mailbox, "max_frame_bytes": server.max_frame_bytes}
        self.send(WELCOME, 0, orjson.dumps(facts))

    def frame_received(self, kind: int, call_id: int, header: memoryview, buffers: Sequence[memoryview]) -> None:
        if kind == CALL:
            message = unpack(header, buffers)
            if type(message) is not list or len(message) != 3 or list(map(type, message)) != [str, list, dict]:
                raise ProtocolError("a call must be a list of name, arguments and keywords, got something else")
            self._server.accept(self, call_id, message[0], (message[1], message[2]))
        elif kind == CANCEL:
            if call_id in self.calls:  # else it has ended meanwhile
                self._cancel(call_id)
        else:
            raise ProtocolError(f"a caller must send calls and cancellations, got a frame of kind {kind}")

    def reply(self, call_id: int, header: bytes, buffers: Sequence[memoryview] = ()) -> None:
        """ValueError when the reply is larger than the caller takes; nothing is sent then."""
        if self.open:
            self.send(REPLY, call_id, header, buffers)

    def fail(self, call_id: int, error: BaseException) -> None:
        if self.open:
            self.send(ERROR, call_id, orjson.dumps(describe(error)))

    def answered(self, call_id: int) -> None:
        """The caller may send another one in its place."""
        self._answered[call_id] = self.calls.pop(call_id)

    def ended(self, call_id: int) -> None:
        """Called by the call's own task, last of all."""
        self.calls.pop(call_id, None)
        self._answered.pop(call_id, None)
        ending = self._ending.pop(asyncio.current_task(), None)  # type: ignore[arg-type]
        if ending is not None:
            PROCESS.end(ending[0])
            ending[1].cancel()

    def hang_up(self) -> None:
        self.open = False
        self.transport.close()
        self._cancel_all()

    def lost(self, error: Exception | None) -> None:
        self._cancel_all()
        self._server.left(self)

    def _cancel_all(self) -> None:
        for call_id in list(self.calls):
            self._cancel(call_id)
        for task in self._answered.values():
            if task is not None:
                self._wind_up(task)

    def _cancel(self, call_id: int) -> None:
        task = self.calls[call_id]
        if task is None:
            self._server.forget(self, call_id)
            self.fail(call_id, asyncio.CancelledError())
        else:
            self._wind_up(task)

    def _wind_up(self, task: asyncio.Task[None]) -> None:
        if task in self._ending:
            return
        loop = asyncio.get_running_loop()
        # Behind the task's first step: a task cancelled before it never runs the `finally` that counts it out.
        loop.call_soon(task.cancel)
        wait = PROCESS.begin("cleanup", self.peer, CLEANUP_S)
        self._ending[task] = wait, loop.call_later(CLEANUP_S, self._insist, task)

    def _insist(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        again = asyncio.get_running_loop().call_later(CLEANUP_S, self._insist, task)
        self._ending[task] = self._ending[task][0], again


def _endpoints(actor: Actor) -> dict[str, Endpoint]:
    names = [name for name in dir(type(actor)) if hasattr(getattr(type(actor), name), "__rondo_endpoint__")]
    return {name: getattr(actor, name) for name in names}


def stacks() -> str:
    """The stacks of all threads of this process, then what each task of the running loop stands in, as text."""
    with os.fdopen(os.memfd_create("stacks"), "w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    return text + "".join(line for task in asyncio.all_tasks() for line in _task_lines(task))


def _task_lines(task: asyncio.Task[Any]) -> Iterator[str]:
    # Task.get_stack() knows only the outermost coroutine; what it awaits is one attribute further each time.
    yield f"\nTask {task.get_name()} (most recent call last):\n"
    step: Any = task.get_coro()
    while step is not None:
        frame = getattr(step, "cr_frame", None) or getattr(step, "gi_frame", None)
        if frame is not None:
            yield f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_qualname}\n'
        step = getattr(step, "cr_await", None) or getattr(step, "gi_yieldfrom", None)
