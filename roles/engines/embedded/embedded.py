"""The embedded engine: a slot engine behind the asyncio `Engine` protocol, computing on a thread that it does not own.

Owns the futures of its callers and the order of what reaches the slot engine. Does not own the thread: `compute` is a
coroutine function that runs a function on the process's one compute thread, for example `WorkerContext.compute`.

Invariant: the slot engine is touched inside a turn only, and at most one turn runs. A turn carries out what has arrived, in
order, before each decode step; so weights flip, and requests begin and end, between steps. Every `generate` ends: with its
completion, with the error that a step raised, or with Closed. Whoever asked for the progress of a request hears of it after
each turn; where nobody did, a turn costs what it costs without.

    generate, cancel, update_weights --> inbox --> turn on the compute thread (steps for about turn_s) --> futures
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Literal

import torch

from rondo.models.lora import adapted
from rondo.roles.engines.adapters import refuse_older
from rondo.roles.engines.embedded.hf_forward import HFForward, check_generation
from rondo.roles.engines.embedded.qwen3_forward import Qwen3Forward, is_plain_qwen3
from rondo.roles.engines.embedded.recorder import Recorder
from rondo.roles.engines.embedded.shared_weights import Lent
from rondo.roles.engines.embedded.sleeping import Sleeper
from rondo.roles.engines.embedded.slots import Failed, SlotEngine
from rondo.roles.engines.engine import STALL_S, Completion, EngineStats, Prefix, Request
from rondo.runtime.errors import Closed, ConfigError, DeadlineExceeded
from rondo.runtime.waits import PROCESS, waiting

Compute = Callable[..., Awaitable[Any]]
ForwardPath = Literal["auto", "fused", "hf"]


def slot_engine(
    model: Any,
    *,
    num_slots: int,
    max_length: int,
    forward: ForwardPath = "auto",
    max_prefill_tokens: int = 8192,
    fixed_shapes: bool = False,
    num_tokens: int | None = None,
    version: int = 0,
    lent: Lent | None = None,
    shares: bool = False,
    sleeps: bool = False,
    tells_experts: bool = False,
) -> SlotEngine:
    """A slot engine over a transformers causal LM, which it puts into evaluation mode and whose weights it may replace.

    `forward`: "auto" takes the fused path for plain Qwen3 and the Hugging Face path for the rest; "fused" and "hf" force
    one. Raises ConfigError if it cannot compute the model. `lent`: whose tensors the model's are, where its weights
    are somebody else's; `shares`: those beside its adapters are. `sleeps`: it can release its memory. `tells_experts`:
    completions have their routed experts, of a model that has some. The rest is as in `SlotEngine`.
    """
    if forward not in ("auto", "fused", "hf"):
        raise ConfigError(f"forward must be auto, fused or hf, got {forward!r}. Use auto.")
    fused = is_plain_qwen3(model)
    if forward == "fused" and not fused:
        raise ConfigError(
            f"forward='fused' must come with a plain dense Qwen3, got {type(model).__name__}. Use forward='auto'."
        )
    model.eval()
    make: type[Qwen3Forward] | type[HFForward] = Qwen3Forward if fused and forward != "hf" else HFForward
    if make is HFForward:
        check_generation(model)
    build = functools.partial(make, model, num_slots=num_slots, max_length=max_length, fixed_shapes=fixed_shapes)
    recorder = Recorder(model, num_slots=num_slots, max_length=max_length) if tells_experts else None
    if recorder is not None:  # the fused path is of a model without experts
        build = functools.partial(build, recorder=recorder)
    sleeper = Sleeper(build, model, lent, shares=shares) if sleeps or lent is not None else None
    return SlotEngine(
        sleeper or build(),
        sleep=sleeper.sleep if sleeper is not None and sleeps else None,
        num_slots=num_slots,
        max_length=max_length,
        max_prefill_tokens=max_prefill_tokens,
        fixed_shapes=fixed_shapes,
        num_tokens=num_tokens,
        version=version,
        experts=recorder.read if recorder is not None else None,
        loaded=functools.partial(refuse_older, model) if adapted(model) else None,
    )


_Told = tuple[Callable[[Prefix], None], Prefix]
_Outcome = tuple[asyncio.Future[Any], Any]
"""(whose, value or error): settled on the event loop after the turn."""
_Command = Callable[[], None]
"""What a turn carries out between two steps."""


class EmbeddedEngine:
    """`Engine` in this process. Made and used on one event loop; `compute(fn)` awaits `fn()` on the compute thread.

    A turn holds the compute thread for about `turn_s` seconds, at least one step, so that other work on it gets its share.
    While its weights are `held`, nothing is sampled: the next ones that are given end that.
    A request whose own numbers go wrong fails alone. When a step fails, every request here fails with that error and the cache is
    emptied; the engine goes on. When writing
    weights fails half-way, it fails what is here too and refuses requests until other weights are in.
    """

    def __init__(
        self,
        slots: SlotEngine,
        compute: Compute,
        *,
        turn_s: float = 0.02,
        clock: Callable[[], float] = time.monotonic,
        wake: Callable[[], None] | None = None,
    ) -> None:
        """wake: called on the event loop when requests are here and the engine sleeps; somebody loads weights then."""
        self._slots = slots
        self._compute = compute
        self._wake = wake
        self._turn_s = turn_s
        self._clock = clock
        self._inbox: deque[_Command] = deque()  # append and popleft are atomic
        self._ids: set[str] = set()
        self._pending: set[asyncio.Future[Any]] = set()
        self._turns: asyncio.Task[None] | None = None
        self._closed: Exception | None = None
        self._paused = False
        self._moved_at = PROCESS.clock()
        # The rest belongs to the turn.
        self._running: dict[str, asyncio.Future[Completion]] = {}
        self._outcomes: list[_Outcome] = []
        self._torn: Exception | None = None

    @property
    def version(self) -> int:
        return self._slots.version

    def _moved(self) -> float:
        """When it last began a turn. While it stands or sleeps it is not its steps that are waited for."""
        return PROCESS.clock() if self._stands or self._slots.asleep else self._moved_at

    def progress(self) -> Mapping[str, int]:
        """Those without a slot get one in their order: they come further with what runs."""
        waits = -1 - self._slots.stats().tokens_generated
        running = self._slots.progress()
        return {name: running.get(name, waits) for name in self._ids}

    def stats(self) -> EngineStats:
        return self._slots.stats()

    async def generate(self, request: Request) -> Completion:
        self._slots.check(request)
        if request.id in self._ids:
            raise ConfigError(
                f"the id of a request must be unique in its engine, got {request.id!r} twice. Rename one."
            )
        done = self._future()
        self._ids.add(request.id)
        try:
            self._send(lambda: self._begin(request, done))
            async with waiting("generate", peer="engine", deadline_s=STALL_S, moved=self._moved):
                return await done
        except (asyncio.CancelledError, DeadlineExceeded):
            self._send(lambda: self._drop(request.id, done), even_closed=True)
            raise
        finally:
            self._ids.discard(request.id)
            self._pending.discard(done)

    def cancel(self, request_id: str) -> None:
        if request_id in self._ids:
            self._send(lambda: self._end(request_id), even_closed=True)

    async def update_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        done, withdrawn = self._future(), False
        try:
            self._send(lambda: self._load(version, tensors, done, withdrawn))
            async with waiting("update weights", peer="engine", deadline_s=STALL_S, moved=self._moved):
                await asyncio.shield(done)
        except (asyncio.CancelledError, DeadlineExceeded):
            withdrawn = True
            with suppress(DeadlineExceeded):
                async with waiting("update withdrawn", peer="engine", deadline_s=STALL_S, moved=self._moved):
                    await asyncio.wait([done])  # the turn may be reading the tensors
            raise
        finally:
            self._pending.discard(done)

    async def pause(self) -> None:
        """Stops between two steps until `resume`: on return nothing is being sampled. Sequences keep slot and cache; requests and
        weights are taken meanwhile."""
        self._paused = True
        await self._compute(lambda: None)  # behind the turn that is under way

    @property
    def _stands(self) -> bool:
        return self._paused or self._slots.held

    def resume(self) -> None:
        """Goes on where `pause` stopped."""
        self._paused = False
        self._keep_turning()

    @property
    def asleep(self) -> bool:
        """Whether its memory is released, until the next weights."""
        return self._slots.asleep

    def sleep(self) -> None:
        """On the compute thread: releases the engine's memory until the next weights, unless it has work."""
        if not self._inbox:
            self._slots.sleep()

    async def close(self) -> None:
        self._closed = self._closed or Closed("the engine must be open, got a call after close. Start another engine")
        if self._turns is not None:
            await asyncio.wait([self._turns])
        self._fail_pending(self._closed)

    def _future(self) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        self._pending.add(future)
        return future

    def _send(self, command: _Command, even_closed: bool = False) -> None:
        """Hands a command to the running turn, or starts turning."""
        if self._closed is not None:
            if even_closed:
                return
            raise self._closed
        self._inbox.append(command)
        self._keep_turning()

    def _keep_turning(self) -> None:
        if self._turns is None or self._turns.done():
            self._turns = asyncio.create_task(self._turn_until_idle(), name="embedded engine")

    async def _turn_until_idle(self) -> None:
        try:
            while (self._inbox or (self._slots.has_work and not self._stands)) and self._closed is None:
                self._moved_at = PROCESS.clock()
                outcomes, told = await self._compute(self._turn)
                for progress, so_far in told:
                    asyncio.get_running_loop().call_soon(progress, so_far)  # apart, so that its errors end no turn
                for future, outcome in outcomes:
                    if not future.done():  # else its caller was cancelled
                        (future.set_exception if isinstance(outcome, Exception) else future.set_result)(outcome)
            if self._slots.asleep and self._slots.has_work and self._closed is None and self._wake is not None:
                self._wake()
        except BaseException as error:
            # The compute thread itself is gone or broken: nothing here can run any more.
            self._closed = Closed(f"the engine must have its compute thread, got {error!r}. Start another engine")
            self._closed.__cause__ = error
            self._fail_pending(self._closed)
            if not isinstance(error, Exception):
                raise

    def _fail_pending(self, error: Exception) -> None:
        for future in self._pending:
            if not future.done():
                future.set_exception(error)
        self._inbox.clear()

    def _turn(self) -> tuple[list[_Outcome], list[_Told]]:
        """On the compute thread: steps until `turn_s` is over, or nothing is left to do, or `pause` or `close`."""
        until = self._clock() + self._turn_s
        while self._closed is None:
            while self._inbox:
                self._inbox.popleft()()
            if not self._slots.has_work or self._stands:
                break
            try:
                ended = self._slots.step()
            except Exception as error:  # noqa: BLE001 - whatever it is, those who wait for it get it
                self._fail_running(error)
                break
            for each in ended:
                outcome = each.error if isinstance(each, Failed) else each
                self._outcomes.append((self._running.pop(each.request_id), outcome))
            if self._clock() >= until:
                break
        outcomes, self._outcomes = self._outcomes, []
        return outcomes, self._slots.so_far()

    def _begin(self, request: Request, done: asyncio.Future[Completion]) -> None:
        if self._torn is not None:
            self._outcomes.append((done, self._torn))
            return
        self._slots.add(request)
        self._running[request.id] = done

    def _end(self, request_id: str) -> None:
        if (completion := self._slots.cancel(request_id)) is not None:
            self._outcomes.append((self._running.pop(request_id), completion))

    def _drop(self, request_id: str, done: asyncio.Future[Completion]) -> None:
        """The caller of this `generate` is gone."""
        if self._running.get(request_id) is done:
            del self._running[request_id]
            self._slots.cancel(request_id)

    def _load(
        self, version: int, tensors: Mapping[str, torch.Tensor], done: asyncio.Future[None], withdrawn: bool
    ) -> None:
        error: Exception | None = None
        if not withdrawn:
            try:
                interrupted = self._slots.load_weights(version, tensors)
                self._outcomes += [(self._running.pop(each.request_id), each) for each in interrupted]
                self._torn = None
            except ConfigError as refused:  # before anything was written
                error = refused
            except Exception as torn:  # noqa: BLE001 - handed to everyone who waits, and kept
                error = self._torn = torn
                self._fail_running(torn)
        self._outcomes.append((done, error))

    def _fail_running(self, error: Exception) -> None:
        self._outcomes += [(done, error) for done in self._running.values()]
        self._running.clear()
        self._slots.clear()
