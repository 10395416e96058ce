"""Rewards: scores prompt groups in killable processes, so that a reward function that fails harms only itself.

Owns the pool of workers, deadlines, replacement, and what becomes of an item that fails. Does not own the loop inside a
worker (`reward_worker.py`) or what a failed score means for its prompt group (the rollout role decides).

    async with RewardPool("rewards.py:exact", num_workers=2, deadline_s=10) as pool:
        results = await pool.score([RewardItem("1234", label="1234", prompt="s3142>"), ...])    # one result an item

Invariant: `score` returns one result an item, in order, whatever the function does; an item is charged only for what
happened while it was being scored. One that takes longer than `deadline_s` costs its worker (SIGKILL, with all
processes it started) and is marked `timed_out`; one that ends its worker is tried once more, since the worker may have
been somebody else's victim, and then carries the error. Items beside it are scored again by the replacement.

Everything of a prompt group travels as one frame: a group of 8 trivial rewards costs 0.2 ms of CPU, both sides
together.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import orjson

from rondo.roles.rollout.reward_worker import LENGTH, NOTE
from rondo.runtime.errors import Closed, ConfigError, DeadlineExceeded, WorkerDied
from rondo.runtime.process import exit_text
from rondo.runtime.waits import waiting

_MAX_FRAME_BYTES = 1 << 28
_MAX_IDLE_DEATHS = 3
"""A frame whose worker dies so often before it begins an item ends the pool: the machine, not an item, is at fault."""


@dataclass(frozen=True, slots=True)
class RewardItem:
    """One response to score. `label` and `metadata` come from the data set and reach the function by way of JSON."""

    response: str
    label: Any = None
    prompt: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A finite `score`, or None with the `error`: a traceback, or what happened to the worker."""

    score: float | None
    details: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class RewardStats:
    """Counts since the start; `num_waiting` are groups that wait for a worker now, `pids` the workers that live now."""

    num_scored: int
    num_errors: int
    num_timed_out: int
    num_restarts: int
    num_waiting: int
    pids: tuple[int, ...]


class RewardPool:
    """`num_workers` processes that run `function`. All methods belong to one event loop, on the main thread.

    The main thread matters: workers ask the kernel to die with the *thread* that started them.
    """

    def __init__(
        self, function: str, *, num_workers: int = 1, deadline_s: float = 10.0, load_deadline_s: float = 120.0
    ) -> None:
        self._function = function
        self._num_workers = num_workers
        self._deadline_s = deadline_s
        self._load_deadline_s = load_deadline_s
        self._queue: asyncio.Queue[_Group] = asyncio.Queue()
        self._unanswered: set[_Group] = set()
        self._keepers: list[asyncio.Task[None]] = []
        self._workers: set[_Worker] = set()
        self._failure: Exception | None = None
        self._num_scored = self._num_errors = self._num_timed_out = self._num_restarts = 0

    async def start(self) -> None:
        """Starts the workers. ConfigError when the function cannot be loaded, with the traceback of its module."""
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            try:
                async with asyncio.TaskGroup() as tasks:
                    starting = [tasks.create_task(self._start_worker()) for _ in range(self._num_workers)]
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None  # one function, one error: the others say the same
            undo.pop_all()
        for started in starting:
            keeper = asyncio.create_task(self._keep(started.result()), name="reward-worker")
            keeper.add_done_callback(self._keeper_done)
            self._keepers.append(keeper)

    async def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """One result an item, in order; never raises for what the function does.

        Raises Closed after `close`, and the pool's own error (ConfigError, WorkerDied) when workers cannot be had any
        more.
        """
        if self._failure is not None:
            raise self._failure
        if not self._keepers:
            raise Closed(
                "reward pool must be started to score, got a pool that is not. Use `async with RewardPool(...)`"
            )
        group = _Group([_encode(item) for item in items], asyncio.get_running_loop().create_future())
        self._unanswered.add(group)
        self._queue.put_nowait(group)
        try:
            # No deadline of its own: every item has one, and which items are ahead in the queue is not known here.
            async with waiting("reward", peer="reward workers", deadline_s=None):
                results = await group.answer
        finally:
            self._unanswered.discard(group)
        self._num_scored += sum(result.score is not None for result in results)
        self._num_timed_out += sum(result.timed_out for result in results)
        self._num_errors += sum(result.error is not None and not result.timed_out for result in results)
        return results

    def stats(self) -> RewardStats:
        return RewardStats(
            self._num_scored,
            self._num_errors,
            self._num_timed_out,
            self._num_restarts,
            self._queue.qsize(),
            tuple(worker.pid for worker in self._workers),
        )

    async def close(self) -> None:
        """Kills every worker and waits until none is left. Callers of `score` get Closed. May be called twice."""
        self._fail(Closed("reward pool must be open to score, got a closed one. Score before it closes"))
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for worker in list(self._workers):
            await self._stop_worker(worker)

    async def __aenter__(self) -> RewardPool:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _start_worker(self) -> _Worker:
        worker = _Worker(self._function)
        self._workers.add(worker)
        await worker.loaded(self._load_deadline_s)
        return worker

    async def _stop_worker(self, worker: _Worker) -> None:
        await worker.close()
        self._workers.discard(worker)

    async def _keep(self, worker: _Worker) -> None:
        """Feeds one worker after another, for as long as the pool lives."""
        while True:
            group = await self._queue.get()
            while not group.answer.done() and (todo := group.todo()):
                loss = await worker.score(group, todo, self._deadline_s)
                if loss is not None:
                    await self._stop_worker(worker)
                    group.charge(loss)
                    self._num_restarts += 1
                    worker = await self._start_worker()
            if not group.answer.done():  # a caller that was cancelled wants no answer
                group.answer.set_result([result for result in group.results if result is not None])

    def _keeper_done(self, keeper: asyncio.Task[None]) -> None:
        error = None if keeper.cancelled() else keeper.exception()
        if isinstance(error, Exception):
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """No score from now on: whoever waits, and whoever asks later, gets the first error."""
        self._failure = self._failure or error
        for group in self._unanswered:
            if not group.answer.done():
                group.answer.set_exception(self._failure)


@dataclass(frozen=True, slots=True)
class _Loss:
    """A worker that ended while it scored. `item` is its place in the frame, None before the first."""

    item: int | None
    timed_out: bool
    cause: str


class _Group:
    """Items that were handed in together, and what is known of each."""

    def __init__(self, encoded: list[bytes | RewardResult], answer: asyncio.Future[list[RewardResult]]) -> None:
        self.answer = answer
        self.results = [item if isinstance(item, RewardResult) else None for item in encoded]
        self.frames = [item if isinstance(item, bytes) else b"" for item in encoded]
        self._sent: list[int] = []
        self._deaths = [0] * len(encoded)
        self._idle_deaths = 0

    def todo(self) -> list[int]:
        """Items without a result; one that has cost a worker comes last, where it can cost nobody else."""
        self._sent = [i for i, result in enumerate(self.results) if result is None]
        self._sent.sort(key=self._deaths.__getitem__)
        return self._sent

    def charge(self, loss: _Loss) -> None:
        """Books a lost worker on the item that it was at."""
        if loss.item is None:
            self._idle_deaths += 1
            if self._idle_deaths == _MAX_IDLE_DEATHS:
                raise WorkerDied(
                    f"reward worker must live to score, got {_MAX_IDLE_DEATHS} deaths before the first item, "
                    f"the last {loss.cause}. Look at the machine's memory, or at what reward.function's module starts"
                )
            return
        item = self._sent[loss.item]
        self._deaths[item] += 1
        if loss.timed_out or self._deaths[item] == 2:
            self.results[item] = RewardResult(None, {}, loss.cause, loss.timed_out)


class _Worker:
    """One process and the socket to it. One frame is under way at a time."""

    def __init__(self, function: str) -> None:
        ours, theirs = socket.socketpair()
        note = os.memfd_create("reward-note", os.MFD_CLOEXEC)
        os.truncate(note, NOTE.size)
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-u", "-m", "rondo.roles.rollout.reward_worker",
                    str(theirs.fileno()), str(note), str(os.getpid()), function,
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), note),
                process_group=0,  # killed as a whole, with what the function started; still in the session of this role
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self.pid = self._process.pid
        self._note = note
        self._socket = ours
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._exited = asyncio.Event()
        self._pidfd = os.pidfd_open(self.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_exit)
        self._request = 0
        self._begin_ns = 0
        self._deadline_ns = 0
        self._overdue: int | None = None
        self._alarm: asyncio.TimerHandle | None = None

    async def loaded(self, deadline_s: float) -> None:
        """Waits until the worker has loaded its function. ConfigError when it could not, or not in time."""
        self._socket.setblocking(False)
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)
        try:
            async with waiting("reward load", peer="reward worker", deadline_s=deadline_s):
                _, error = await self._receive()
        except DeadlineExceeded as late:
            raise ConfigError(
                f"reward.function must load within {deadline_s:g} s, got no end. "
                "Look at what its module does when imported"
            ) from late
        except (asyncio.IncompleteReadError, ConnectionError) as lost:
            await self._exited.wait()
            raise ConfigError(
                f"reward.function must load without ending its process, got {self._ending()}. "
                "Look at what its module does when imported"
            ) from lost
        if error is not None:
            raise ConfigError(f"reward.function must load, got an error. Correct it:\n{error}")

    async def score(self, group: _Group, todo: list[int], deadline_s: float) -> _Loss | None:
        """Scores the items `todo` of `group` and enters their results; or tells how the worker was lost."""
        assert self._writer is not None
        self._request += 1
        if self._writer.transport.is_closing():
            return await self._loss(deadline_s)
        body = b"[%d,[%b]]" % (self._request, b",".join([group.frames[i] for i in todo]))
        self._overdue = None
        self._begin_ns, self._deadline_ns = time.monotonic_ns(), int(deadline_s * 1e9)
        self._arm(deadline_s)
        try:
            self._writer.write(LENGTH.pack(len(body)) + body)
            await self._writer.drain()
            _, answers = await self._receive()
        except (asyncio.IncompleteReadError, ConnectionError):
            return await self._loss(deadline_s)
        finally:
            if self._alarm is not None:
                self._alarm.cancel()
        for i, (score, details, error) in zip(todo, answers, strict=True):
            group.results[i] = RewardResult(score, details, error)
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
        if self._writer is None:
            self._socket.close()
            return
        self._writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def _receive(self) -> Any:
        assert self._reader is not None
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        if length > _MAX_FRAME_BYTES:
            self._kill()  # the function wrote into our socket
            raise ConnectionError(f"frame of {length} bytes")
        return orjson.loads(await self._reader.readexactly(length))

    async def _loss(self, deadline_s: float) -> _Loss:
        self._kill()  # closing its socket without ending is a way of being lost, too
        await self._exited.wait()
        if self._overdue is not None:
            cause = f"reward must return within {deadline_s:g} s, got no end. Its worker was killed"
            return _Loss(None if self._overdue < 0 else self._overdue, self._overdue >= 0, cause)
        request, item, _ = self._read_note()
        cause = f"reward must return, got {self._ending()}"
        return _Loss(item if request == self._request else None, False, cause)

    def _arm(self, delay_s: float) -> None:
        self._alarm = asyncio.get_running_loop().call_later(delay_s, self._check_deadline)

    def _check_deadline(self) -> None:
        """Kills a worker whose present item is overdue; looks again when that could next be so."""
        request, item, begin_ns = self._read_note()
        if request != self._request:  # it has not begun: the frame itself counts
            item, begin_ns = -1, self._begin_ns
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
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._exited.set()
        if self._writer is not None:  # a process that the function left behind may hold the other end open
            self._writer.transport.abort()

    def _kill(self) -> None:
        if self._process.returncode is None:  # once it is collected, its number may belong to somebody else
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _ending(self) -> str:
        return f"its process {exit_text(self._process.wait())}"


def _encode(item: RewardItem) -> bytes | RewardResult:
    """The item as JSON, or the result that says why it cannot be."""
    values = [item.response, item.label, item.prompt, item.metadata]
    try:
        return orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    except TypeError as error:
        return RewardResult(
            None, {}, f"reward item must have JSON values, got {error}. Change the data set's label or metadata"
        )
