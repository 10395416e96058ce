"""An engine that outlives its server: one that left is started again.

Owns which server is behind the engine now. Does not own the server (`server.py`), the asking (`engine.py`), or what becomes of
requests and weights meanwhile: a dispatcher in front asks another engine, or this one later, and gives weights to a server that
has none (`one_engine`).

    starting --> up --> gone --> starting ...       without a version until update_weights has proved one

    engine = KeptEngine(server, connect, newest=newest_weights, deadline_s=600, tell=report)
    async with kept([engine]):                      # restarts while the body runs; a server that cannot be started raises here
        await engine.update_weights(version, tensors)
        await engine.generate(request)

Invariant: what is asked while no server is there, or under a server that leaves, ends with PeerGone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rondo.roles.rollout.engine import Completion, EngineStats, Request
from rondo.roles.rollout.sglang.client import SGLangClient
from rondo.roles.rollout.sglang.engine import Load, SGLangEngine
from rondo.roles.rollout.sglang.numbers import STRANGE, version_of
from rondo.roles.rollout.sglang.server import Server
from rondo.runtime.errors import Closed, PeerGone, RondoError, WorkerDied

if TYPE_CHECKING:
    import torch

Weights = tuple[int, "Mapping[str, torch.Tensor]"]
Connect = Callable[[SGLangClient], Awaitable[SGLangEngine]]
Newest = Callable[[], AbstractAsyncContextManager[Weights | None]]
Tell = Callable[[str, Mapping[str, Any]], Awaitable[None]]

_MAX_IN_A_ROW = 3
"""Servers that leave before they have finished one request."""
_ASK_S = 30.0
_ADDED = (
    "num_completed", "num_cancelled", "tokens_generated", "decode_steps", "prefill_tokens", "shared_prompt_tokens",
    "num_interrupted",
)  # fmt: skip


@asynccontextmanager
async def kept(engines: Sequence[KeptEngine]) -> AsyncIterator[None]:
    """Starts their servers beside each other, keeps them there while the body runs, and ends them then."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for engine in engines:
                tasks.create_task(engine.start(), name=f"start {engine.server.name}")
        async with asyncio.TaskGroup() as tasks:
            keeping = [tasks.create_task(engine.keep(), name=f"keep {engine.server.name}") for engine in engines]
            try:
                yield
            finally:
                for task in keeping:
                    task.cancel()
    finally:
        await asyncio.gather(*(engine.close() for engine in engines))


class KeptEngine:
    """`Engine` over one server and its successors. `connect` makes the engine over an open client and owns what it needs.

    `newest` gives the newest weights while its body lasts, for a server that sleeps and is asked, or None when there are none any
    more; `tell` is told of every server that comes or goes.
    """

    def __init__(self, server: Server, connect: Connect, *, newest: Newest, deadline_s: float, tell: Tell) -> None:
        self.server = server
        self._connect = connect
        self._newest = newest
        self.start_deadline_s = deadline_s
        self._tell = tell
        self._engine: SGLangEngine | None = None
        self._lost_at: float | None = None
        """When the last server left, until the next one has proved weights."""
        self._updating = asyncio.Lock()
        self._version = STRANGE
        self._before: dict[str, int] = dict.fromkeys(_ADDED, 0)
        self._waking: asyncio.Task[None] | None = None
        self._closed: Exception | None = None

    # ---- the server -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """The first server."""
        client = await self.server.start(self.start_deadline_s)
        try:
            self._engine = await self._connect(client)
        except BaseException:
            await client.__aexit__()
            raise
        await self._tell("sglang", {"server": self.server.name, **self._engine.capabilities.report()})

    async def keep(self) -> None:
        """Replaces servers that leave, until it is closed. Raises when one cannot be started, or they leave again and again."""
        in_a_row = 0
        try:
            while True:
                why = await self.server.gone()
                if self._closed is not None:  # it was ended here
                    return
                done_before = self._before["num_completed"]
                await self._lose()
                in_a_row = 1 if self._before["num_completed"] > done_before else in_a_row + 1
                await self._tell("sglang_gone", {"server": self.server.name, "why": why})
                if in_a_row > _MAX_IN_A_ROW:
                    raise WorkerDied(
                        f"the SGLang server {self.server.name} must finish requests, got {in_a_row} ends in a row without one, "
                        f"the last: {why}. Read its log"
                    )
                in_a_row = await self._start_again(in_a_row)
        except RondoError:
            if self._closed is None:
                raise

    async def _start_again(self, in_a_row: int) -> int:
        """The next server; one may die before it serves. How many have left in a row since then."""
        while True:
            try:
                await self.start()
                return in_a_row
            except (WorkerDied, PeerGone) as error:
                in_a_row += 1
                if in_a_row > _MAX_IN_A_ROW or self._closed is not None:  # it was ended before it answered
                    raise
                await self._tell("sglang_gone", {"server": self.server.name, "why": f"it did not start: {error}"})

    async def _lose(self) -> None:
        """What is under way ends with PeerGone."""
        self._version = STRANGE
        self._lost_at = time.monotonic()
        engine, self._engine = self._engine, None
        if engine is not None:
            self._before = _sums(self._before, engine.stats())
            await engine.close(PeerGone(f"the SGLang server {self.server.name} must stay, got its end. Ask again"))

    # ---- the engine -------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._version

    @property
    def engine(self) -> SGLangEngine | None:
        """The engine over the server that is there now."""
        return self._engine

    async def generate(self, request: Request) -> Completion:
        engine = self._there()
        if engine.asleep and (self._waking is None or self._waking.done()):
            self._waking = asyncio.create_task(self._wake(), name=f"wake {self.server.name}")
        return await engine.generate(request)

    def cancel(self, request_id: str) -> None:
        if self._engine is not None:
            self._engine.cancel(request_id)

    async def update_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        async with self._updating:
            engine = self._there()
            await engine.update_weights(version, tensors)
            if self._engine is not engine:  # it left as soon as it had them: the next one has none
                raise self._absent()
            self._version = version
            if self._lost_at is not None:
                after_s, self._lost_at = time.monotonic() - self._lost_at, None
                await self._tell("sglang_back", {"server": self.server.name, "after_s": after_s})

    async def sleep(self) -> None:
        """Gives the server's memory back until the next weights or request, unless it has requests or is given weights."""
        if self._updating.locked():
            return
        async with self._updating:
            if self._engine is not None:
                with suppress(PeerGone):  # `keep` learns it next
                    await self._engine.sleep()

    async def _wake(self) -> None:
        """The newest weights once more, for who asks while it sleeps: those that it had are gone."""
        async with self._updating:
            engine = self._engine
            if engine is None or not engine.asleep:
                return
            try:
                async with self._newest() as weights:
                    if weights is None:
                        raise Closed("weights must be there to wake a server, got none any more. The run is over")
                    await engine.update_weights(*weights)
                    self._version = weights[0]
            except PeerGone:
                return  # `keep` learns it next
            except RondoError as error:  # who asked waits at the server, and is told
                await engine.close(error)

    async def ready(self) -> bool:
        """Whether requests would be taken now."""
        return self._engine is not None and await self._engine.ready()

    async def load(self) -> Load:
        return await self._there().load()

    async def proved_version(self) -> int | None:
        """What the server says that it serves; None for weights that it was not given here."""
        told = await self._there().client.get("/model_info", deadline_s=_ASK_S)
        version = version_of(told.get("weight_version")) if isinstance(told, dict) else STRANGE
        return None if version == STRANGE else version

    def progress(self) -> Mapping[str, int]:
        """Of none while no server is there."""
        return {} if self._engine is None else self._engine.progress()

    def stats(self) -> EngineStats:
        """Counters go on through restarts."""
        if self._engine is None:
            return replace(EngineStats(self.version, *(0,) * 9), **self._before)
        now = self._engine.stats()
        return replace(now, version=self.version, **_sums(self._before, now))

    async def close(self) -> None:
        """Ends the engine and its server. Idempotent."""
        if self._closed is None:
            self._closed = Closed("the engine must be open, got a call after close. Start another engine")
        if self._waking is not None:
            self._waking.cancel()
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()
        await self.server.close()

    def _there(self) -> SGLangEngine:
        if self._closed is not None:
            raise self._closed
        if self._engine is None:
            raise self._absent()
        return self._engine

    def _absent(self) -> PeerGone:
        return PeerGone(
            f"the SGLang server {self.server.name} must be there, got that it is started again. Ask another"
        )


def _sums(before: Mapping[str, int], now: EngineStats) -> dict[str, int]:
    return {name: before[name] + getattr(now, name) for name in _ADDED}
