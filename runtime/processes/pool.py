"""Pool: runs a function on items in killable processes, so that a function that fails, hangs or crashes harms only itself.

Owns the workers, deadlines, replacement, and what becomes of an item that fails. Does not own the loop inside a worker
(`pool_worker.py`) or what a failed item means (whoever asked decides).

    pool = Pool("rewards:open_function", {"level": 2}, work="reward", source="reward.function", deadline_s=10, load_deadline_s=60)
    async with pool:
        outcomes = await pool.run([encode({"n": 7}), encode(array)])     # one outcome an item, in order

Invariant: `run` returns one outcome an item, in order, whatever the function does; an item is charged only for what happened
while it was being run. One that takes longer than `deadline_s` costs its worker (SIGKILL, with all processes it started) and
is marked `timed_out`; one that ends its worker is tried once more, since the worker may have been somebody else's victim, and
then carries the error. Items beside it are run again by the replacement.

An item is a value in the form in which it travels (`values.py`). Those that are handed in together travel as one frame. Arrays
are received straight into the memory that the outcome's arrays view: sent and received, each of their bytes is copied twice, both
times by the kernel. Bytes are copied once more, into their object.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import orjson

from rondo.runtime.errors import Closed, ConfigError, DeadlineExceeded, ProtocolError, WorkerDied
from rondo.runtime.processes.guard import module_command
from rondo.runtime.processes.pool_worker import NOTE, PREFIX, entries_of, frame_of
from rondo.runtime.processes.process import exit_text, when_over
from rondo.runtime.processes.subreaper import END
from rondo.runtime.values import Buffer, Encoded
from rondo.runtime.waits import PROCESS, waiting

_MAX_HEADER_BYTES = 1 << 28
_MAX_BUFFERS = 1 << 16
_ENTRY = 4
"""Value, error, kind, brief."""
_MAX_IDLE_DEATHS = 3
_SPARE_S = 60.0
"""A frame whose worker dies so often before it begins an item ends the pool: the machine, not an item, is at fault."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the function returned for an item; or the `error`: its text, a traceback, or what happened to the worker.

    `kind` names the type of an error that the function raised, None when the worker was lost; `brief` is the error in one line,
    with its place.
    """

    value: Any = None
    error: str | None = None
    kind: str | None = None
    timed_out: bool = False
    brief: str | None = None


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Items since the start, by their outcome; calls that wait for a worker now, calls that wait to be let in, and the
    subreapers of the workers that live now."""

    num_done: int
    num_errors: int
    num_timed_out: int
    num_restarts: int
    num_waiting: int
    num_at_door: int
    pids: tuple[int, ...]


class Pool:
    """`num_workers` processes that run one function. All methods belong to one event loop, on the main thread.

    The main thread matters: workers ask the kernel to die with the *thread* that started them.
    """

    def __init__(
        self,
        open_function: str,
        settings: Mapping[str, Any],
        *,
        work: str,
        source: str,
        num_workers: int = 1,
        deadline_s: float,
        load_deadline_s: float,
        max_waiting: int | None = None,
        max_bytes: int = 1 << 28,
    ) -> None:
        """`open_function` is a reference (`runtime/reference.py`) to a function that takes `settings`, JSON values, as keywords
        and returns the function to run. `work` and `source` are words for messages: "reward", "reward.function".

        At most `max_waiting` calls of `run` wait for a worker, beside those being worked on; further ones wait to be let in.
        None lets everybody in. `max_bytes` bounds the arrays and bytes that the function returns for one item.
        """
        self._command = (open_function, orjson.dumps(dict(settings)).decode())
        self._work = work
        self._source = source
        self._num_workers = num_workers
        self._deadline_s = deadline_s
        self._load_deadline_s = load_deadline_s
        self._max_bytes = max_bytes
        self._queue: asyncio.Queue[_Group] = asyncio.Queue()
        self._door = None if max_waiting is None else asyncio.Semaphore(num_workers + max_waiting)
        self._num_at_door = 0
        self._most_items = 0
        self._moved_at = PROCESS.clock()
        """When a worker last came to the end of a frame of items, done or lost."""
        self._unanswered: set[_Group] = set()
        self._feeders: list[asyncio.Task[None]] = []
        self._workers: set[_Worker] = set()
        self._failure: Exception | None = None
        self._num_done = self._num_errors = self._num_timed_out = self._num_restarts = 0

    async def start(self) -> None:
        """Starts the workers. ConfigError when the function cannot be loaded, with what its loading raised."""
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            try:
                async with asyncio.TaskGroup() as tasks:
                    starting = [tasks.create_task(self._start_worker()) for _ in range(self._num_workers)]
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None  # one function, one error: the others say the same
            undo.pop_all()
        for started in starting:
            feeder = asyncio.create_task(self._feed(started.result()), name=f"{self._work} worker")
            feeder.add_done_callback(self._feeder_done)
            self._feeders.append(feeder)

    async def run(self, items: Sequence[Encoded]) -> list[Outcome]:
        """One outcome an item, in order; never raises for what the function does.

        Raises Closed after `close`, and the pool's own error (ConfigError, WorkerDied) when workers cannot be had any
        more.
        """
        self._check_open()
        # Which items are ahead in the queue is not known here; but each has a deadline, so that workers get on.
        self._most_items = max(self._most_items, len(items))
        stall_s = self._most_items * self._deadline_s + self._load_deadline_s + _SPARE_S
        async with waiting(self._work, peer=f"{self._work} workers", deadline_s=stall_s, moved=lambda: self._moved_at):
            if self._door is None:
                outcomes = await self._answer(items)
            else:
                self._num_at_door += 1
                try:
                    await self._door.acquire()
                finally:
                    self._num_at_door -= 1
                try:
                    self._check_open()
                    outcomes = await self._answer(items)
                finally:
                    self._door.release()
        self._num_done += sum(outcome.error is None for outcome in outcomes)
        self._num_timed_out += sum(outcome.timed_out for outcome in outcomes)
        self._num_errors += sum(outcome.error is not None and not outcome.timed_out for outcome in outcomes)
        return outcomes

    def stats(self) -> PoolStats:
        return PoolStats(
            self._num_done,
            self._num_errors,
            self._num_timed_out,
            self._num_restarts,
            self._queue.qsize(),
            self._num_at_door,
            tuple(worker.pid for worker in self._workers),
        )

    async def close(self) -> None:
        """Kills every worker and waits until none is left. Callers of `run` get Closed. May be called twice."""
        self._fail(Closed(f"{self._work} pool must be open to work, got a closed one. Ask it before it closes"))
        for feeder in self._feeders:
            feeder.cancel()
        await asyncio.gather(*self._feeders, return_exceptions=True)
        for worker in list(self._workers):
            await self._stop_worker(worker)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if not self._feeders:
            raise Closed(f"{self._work} pool must be started to work, got a pool that is not. Use it with `async with`")

    async def _answer(self, items: Sequence[Encoded]) -> list[Outcome]:
        group = _Group(items, self._work, asyncio.get_running_loop().create_future())
        self._unanswered.add(group)
        self._queue.put_nowait(group)
        try:
            return await group.answer
        finally:
            self._unanswered.discard(group)

    async def _start_worker(self) -> _Worker:
        worker = _Worker(self._command, self._work, self._source, self._max_bytes)
        self._workers.add(worker)
        await worker.loaded(self._load_deadline_s)
        return worker

    async def _stop_worker(self, worker: _Worker) -> None:
        await worker.close()
        self._workers.discard(worker)

    async def _feed(self, worker: _Worker) -> None:
        """Feeds one worker after another, for as long as the pool lives."""
        while True:
            group = await self._queue.get()
            while not group.answer.done() and (todo := group.todo()):
                loss = await worker.run(group, todo, self._deadline_s)
                self._moved_at = PROCESS.clock()
                if loss is not None:
                    await self._stop_worker(worker)
                    group.charge(loss)
                    self._num_restarts += 1
                    worker = await self._start_worker()
            if not group.answer.done():  # a caller that was cancelled wants no answer
                group.answer.set_result([outcome for outcome in group.outcomes if outcome is not None])
            del group  # nor its memory, while this waits for the next

    def _feeder_done(self, feeder: asyncio.Task[None]) -> None:
        error = None if feeder.cancelled() else feeder.exception()
        if isinstance(error, Exception):
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """No outcome from now on: whoever waits, and whoever asks later, gets the first error."""
        self._failure = self._failure or error
        for group in self._unanswered:
            if not group.answer.done():
                group.answer.set_exception(self._failure)


@dataclass(frozen=True, slots=True)
class _Loss:
    """A worker that ended while it worked. `item` is its place in the frame, None before the first."""

    item: int | None
    timed_out: bool
    cause: str


class _Group:
    """Items that were handed in together, and what is known of each."""

    def __init__(self, items: Sequence[Encoded], work: str, answer: asyncio.Future[list[Outcome]]) -> None:
        self.answer = answer
        self.items = items
        self.outcomes: list[Outcome | None] = [None] * len(items)
        self._work = work
        self._sent: list[int] = []
        self._deaths = [0] * len(items)
        self._idle_deaths = 0

    def todo(self) -> list[int]:
        """Items without an outcome; one that has cost a worker comes last, where it can cost nobody else."""
        self._sent = [i for i, outcome in enumerate(self.outcomes) if outcome is None]
        self._sent.sort(key=self._deaths.__getitem__)
        return self._sent

    def charge(self, loss: _Loss) -> None:
        """Books a lost worker on the item that it was at."""
        if loss.item is None:
            self._idle_deaths += 1
            if self._idle_deaths == _MAX_IDLE_DEATHS:
                raise WorkerDied(
                    f"{self._work} worker must live to work, got {_MAX_IDLE_DEATHS} deaths before the first item, "
                    f"the last {loss.cause}. Look at the machine's memory, or at what the function's module starts"
                )
            return
        item = self._sent[loss.item]
        self._deaths[item] += 1
        if loss.timed_out or self._deaths[item] == 2:
            self.outcomes[item] = Outcome(error=loss.cause, timed_out=loss.timed_out, brief=loss.cause)


class _Worker:
    """One process, its subreaper (`pid`) and the socket to it. One frame is under way at a time."""

    def __init__(self, command: tuple[str, str], work: str, source: str, max_bytes: int) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        note = os.memfd_create("pool-note", os.MFD_CLOEXEC)
        os.truncate(note, NOTE.size)
        with theirs:
            self._process = subprocess.Popen(
                module_command(
                    "rondo.runtime.processes.pool_worker",
                    str(theirs.fileno()), str(note), str(os.getpid()), str(max_bytes), *command,
                ),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), note),
                process_group=0,  # what is sent to this role's group is not meant for it; still in the role's session
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
        self.pid = self._process.pid
        self._work = work
        self._source = source
        self._max_bytes = max_bytes
        self._note = note
        self._socket = ours
        self._exited = asyncio.Event()
        when_over(self.pid, self._on_exit)
        self._request = 0
        self._begin_ns = 0
        self._deadline_ns = 0
        self._num_items = 0
        self._answering = False
        self._overdue: int | None = None
        self._alarm: asyncio.TimerHandle | None = None

    async def loaded(self, deadline_s: float) -> None:
        """Waits until the worker has loaded its function. ConfigError when it could not, or not in time."""
        try:
            async with waiting(f"{self._work} load", peer=f"{self._work} worker", deadline_s=deadline_s):
                [(_, error, kind, brief)] = await self._receive(1)
        except DeadlineExceeded as late:
            raise ConfigError(
                f"{self._source} must load within {deadline_s:g} s, got no end. Look at what it does while it loads"
            ) from late
        except ConnectionError as lost:
            await self._exited.wait()
            raise ConfigError(
                f"{self._source} must load without ending its process, got {self._ending()}. "
                "Look at what it does while it loads"
            ) from lost
        if kind == "ConfigError":
            raise ConfigError(error)
        if error is not None:
            raise ConfigError(f"{self._source} must load without errors, got {brief}. Correct it")

    async def run(self, group: _Group, todo: list[int], deadline_s: float) -> _Loss | None:
        """Runs the items `todo` of `group` and enters their outcomes; or tells how the worker was lost."""
        self._request += 1
        head, buffers = frame_of(self._request, [(group.items[i],) for i in todo])
        self._overdue, self._answering, self._num_items = None, False, len(todo)
        self._begin_ns, self._deadline_ns = time.monotonic_ns(), int(deadline_s * 1e9)
        self._arm(deadline_s)
        try:
            await self._send(head, buffers)
            entries = await self._receive(len(todo))
        except ConnectionError:
            return await self._loss(deadline_s)
        finally:
            if self._alarm is not None:
                self._alarm.cancel()
        for i, (value, error, kind, brief) in zip(todo, entries, strict=True):
            group.outcomes[i] = Outcome(value, error, kind, brief=brief)
        return None

    async def close(self) -> None:
        """Kills the process with all that it started, and waits for its end. May be called twice."""
        if self._note < 0:
            return
        self._kill()
        await self._exited.wait()
        self._process.wait()  # it has ended: this only collects it
        os.close(self._note)
        self._note = -1
        self._socket.close()

    async def _send(self, head: bytes, buffers: Sequence[Buffer]) -> None:
        loop = asyncio.get_running_loop()
        for part in (head, *buffers):
            await loop.sock_sendall(self._socket, part)

    async def _receive(self, num_items: int) -> list[list[Any]]:
        """Return the entries of the next frame. ConnectionError when the worker is lost, or sends anything but the answer to the
        present request: from then on, nothing that it sends can be told apart from an answer."""
        num_header, num_buffers = PREFIX.unpack(await self._read(PREFIX.size))
        if num_header > _MAX_HEADER_BYTES or num_buffers > _MAX_BUFFERS:
            raise self._lost(f"a frame of {num_header} bytes and {num_buffers} buffers")
        sizes = struct.unpack(f"<{num_buffers}Q", await self._read(8 * num_buffers))
        if sum(sizes) > num_items * self._max_bytes:
            raise self._lost(f"buffers of {sum(sizes)} bytes")
        parts = [await self._read(size) for size in (num_header, *sizes)]
        try:
            request, entries = entries_of(parts[0], parts[1:])
            lengths = [len(entry) for entry in entries]
        except (ValueError, TypeError, ProtocolError) as error:
            raise self._lost(f"a frame that cannot be read ({error})") from error
        if request != self._request or lengths != [_ENTRY] * num_items:
            raise self._lost(f"a frame of {len(lengths)} answers to request {request}")
        return entries

    async def _read(self, num_bytes: int) -> memoryview:
        loop = asyncio.get_running_loop()
        whole = np.empty(num_bytes, np.uint8).data  # not a bytearray, which would be filled with zeros first
        view = whole
        while view.nbytes:
            received = await loop.sock_recv_into(self._socket, view)
            if received == 0:
                raise ConnectionResetError("closed")
            view = view[received:]
        return whole

    def _lost(self, why: str) -> ConnectionError:
        """The error for a worker whose function wrote into our socket: it can be of no more use."""
        self._kill()
        return ConnectionAbortedError(why)

    async def _loss(self, deadline_s: float) -> _Loss:
        self._kill()  # closing its socket without ending is a way of being lost, too
        await self._exited.wait()
        if self._overdue is not None:
            cause = f"{self._work} must return within {deadline_s:g} s, got no end. Its worker was killed"
            return _Loss(None if self._overdue < 0 else self._overdue, self._overdue >= 0, cause)
        request, item, _ = self._read_note()
        cause = f"{self._work} must return, got {self._ending()}"
        return _Loss(min(item, self._num_items - 1) if request == self._request else None, False, cause)

    def _arm(self, delay_s: float) -> None:
        self._alarm = asyncio.get_running_loop().call_later(delay_s, self._check_deadline)

    def _check_deadline(self) -> None:
        """Kills a worker whose present item is overdue; looks again when that could next be so."""
        request, item, begin_ns = self._read_note()
        if request != self._request:  # it has not begun: the frame itself counts
            item, begin_ns = -1, self._begin_ns
        elif item == self._num_items:
            # All have returned: the answer may wait for a loop that was busy, and no item is to be charged for that. It has the
            # whole deadline from when this is first seen.
            if not self._answering:
                self._answering, self._begin_ns = True, time.monotonic_ns()
            item, begin_ns = self._num_items - 1, self._begin_ns
        left_ns = begin_ns + self._deadline_ns - time.monotonic_ns()
        if left_ns > 0:
            self._arm(left_ns / 1e9)
            return
        self._overdue = item
        self._kill()

    def _read_note(self) -> tuple[int, int, int]:
        """(request, item, begin) that the worker noted last. A note caught half-written is read again."""
        while True:
            head, item, begin_ns, tail = NOTE.unpack(os.pread(self._note, NOTE.size, 0))
            if head == tail or self._exited.is_set():
                return head, item, begin_ns

    def _on_exit(self) -> None:
        self._exited.set()
        with contextlib.suppress(OSError):  # a process that the function left behind may hold the other end open
            self._socket.shutdown(socket.SHUT_RDWR)

    def _kill(self) -> None:
        if self._process.returncode is None:  # once it is collected, its number may belong to somebody else
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, END)
                os.kill(self.pid, signal.SIGCONT)

    def _ending(self) -> str:
        return f"its process {exit_text(self._process.wait())}"
