"""An engine that outlives its server: one that left is started again, given the weights again, and only then asked again.

Owns which server is behind the engine now, and that what it serves is proved. Does not own the server (`server.py`), the asking
(`engine.py`), or where the weights come from: `newest` gives what was published last.

    starting --> up, unproved --> serving --> gone --> starting ...
                     ^ update_weights proves it

    engine = KeptEngine(server, connect, newest=newest_weights, deadline_s=600, tell=report)
    async with kept([engine]):                      # restarts while the body runs; a server that cannot be started raises here
        await engine.update_weights(version, tensors)
        await engine.generate(request)

Invariant: after the first weights a request reaches only a server that has proved the newest ones it was given.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rondo.roles.rollout.engine import Completion, EngineStats, Request
from rondo.roles.rollout.sglang.answers import STRANGE, version_of
from rondo.roles.rollout.sglang.client import SGLangClient
from rondo.roles.rollout.sglang.engine import Load, SGLangEngine, completion_of
from rondo.roles.rollout.sglang.server import Server
from rondo.roles.rollout.told import Told
from rondo.runtime.errors import Closed, PeerGone, RondoError, WorkerDied
from rondo.runtime.waits import wait_for

if TYPE_CHECKING:
    import torch

Weights = tuple[int, "Mapping[str, torch.Tensor]"]
Connect = Callable[[SGLangClient], Awaitable[SGLangEngine]]
Newest = Callable[[], AbstractAsyncContextManager[Weights | None]]
Tell = Callable[[str, Mapping[str, Any]], Awaitable[None]]

_MAX_IN_A_ROW = 3
"""Servers that leave before they have finished one request."""
_NOTICED_S = 3.0
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

    `newest` gives the newest weights while its body lasts, which a server that was started anew must have before it serves, or
    None when there are none any more; `tell` is told of every server that comes or goes. A request that a server takes with it is
    asked again of the next one when this engine is `alone`. Else `generate` raises PeerGone, so that another engine is asked, and
    a server that was started anew has no version until its dispatcher gives it the newest weights.
    """

    def __init__(
        self, server: Server, connect: Connect, *, newest: Newest, deadline_s: float, tell: Tell, alone: bool = True
    ) -> None:
        self.server = server
        self._connect = connect
        self._newest = newest
        self.start_deadline_s = deadline_s
        self._tell = tell
        self._alone = alone
        self._engine: SGLangEngine | None = None
        self._up = asyncio.Event()
        """There is an engine, whose server was there when it was last seen."""
        self._serving = asyncio.Event()
        """And it has proved what it was given."""
        self._updating = asyncio.Lock()
        self._version: int | None = None
        self._before: dict[str, int] = dict.fromkeys(_ADDED, 0)
        self._waiting: dict[str, asyncio.Future[None]] = {}
        """Requests that wait for a server; done when they are cancelled."""
        self._waking: asyncio.Task[None] | None = None
        self._closed: Exception | None = None

    # ---- the server -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """The first server; what it was started with is all that it was given."""
        await self._start()
        self._serving.set()

    async def keep(self) -> None:
        """Replaces servers that leave, for ever. Raises when one cannot be started, or when they leave again and again."""
        in_a_row = 0
        proving: asyncio.Task[None] | None = None
        try:
            while True:
                why = await self._until_gone(proving)
                since, done_before = time.monotonic(), self._before["num_completed"]
                await self._lose()
                in_a_row = 1 if self._before["num_completed"] > done_before else in_a_row + 1
                await self._tell("sglang_gone", {"server": self.server.name, "why": why})
                if in_a_row > _MAX_IN_A_ROW:
                    raise WorkerDied(
                        f"the SGLang server {self.server.name} must finish requests, got {in_a_row} ends in a row without one, "
                        f"the last: {why}. Read its log"
                    )
                in_a_row = await self._start_again(in_a_row)
                proving = asyncio.create_task(self._come_back(since), name=f"prove {self.server.name}")
        finally:
            if proving is not None:
                proving.cancel()

    async def _start_again(self, in_a_row: int) -> int:
        """The next server; one may die before it serves. How many have left in a row since then."""
        while True:
            try:
                await self._start()
                return in_a_row
            except (WorkerDied, PeerGone) as error:
                in_a_row += 1
                if in_a_row > _MAX_IN_A_ROW:
                    raise
                await self._tell("sglang_gone", {"server": self.server.name, "why": f"it did not start: {error}"})

    async def _until_gone(self, proving: asyncio.Task[None] | None) -> str:
        """Why the server left. Proving ends with it, which may be waiting for an update that waits for the next server."""
        leaving = asyncio.create_task(self.server.gone(), name=f"watch {self.server.name}")
        try:
            if proving is not None:
                await asyncio.wait([leaving, proving], return_when=asyncio.FIRST_COMPLETED)
                if proving.done():
                    proving.result()
                else:
                    proving.cancel()
                    await asyncio.wait([proving])
            return await leaving
        finally:
            leaving.cancel()

    async def _come_back(self, since: float) -> None:
        await self._prove()
        if self._serving.is_set():
            await self._tell("sglang_back", {"server": self.server.name, "after_s": time.monotonic() - since})

    async def _start(self) -> None:
        client = await self.server.start(self.start_deadline_s)
        try:
            self._engine = await self._connect(client)
        except BaseException:
            await client.__aexit__()
            raise
        await self._tell("sglang", {"server": self.server.name, **self._engine.capabilities.report()})
        self._up.set()

    async def _lose(self) -> None:
        """What is under way ends with PeerGone; what comes waits."""
        self._up.clear()
        self._serving.clear()
        if not self._alone:
            self._version = None
        engine, self._engine = self._engine, None
        if engine is not None:
            self._before = _sums(self._before, engine.stats())
            await engine.close(PeerGone(f"the SGLang server {self.server.name} must stay, got its end. Ask again"))

    async def _prove(self) -> None:
        """The newest weights, unless an update that was under way brings them."""
        async with self._updating:
            if self._version is not None and not self._serving.is_set():
                async with self._newest() as weights:
                    engine = self._engine
                    if weights is None or engine is None:
                        return
                    try:
                        await engine.update_weights(*weights)
                    except PeerGone:
                        return  # it is gone already: `keep` learns it next
                    self._version = weights[0]
            if self._up.is_set():
                self._serving.set()

    # ---- the engine -------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._version if self._version is not None else -1

    @property
    def engine(self) -> SGLangEngine | None:
        """The engine over the server that is there now."""
        return self._engine

    async def generate(self, request: Request) -> Completion:
        told = None if request.progress is None else Told(request.progress)
        while True:
            engine = self._engine
            if engine is None or not self._serving.is_set():
                self._raise_unless_alone()
                engine = await self._engine_unless_cancelled(request)
            if engine is None:
                return completion_of(request, "cancelled", request.prefix)
            if engine.asleep and (self._waking is None or self._waking.done()):
                self._waking = asyncio.create_task(self._wake(), name=f"wake {self.server.name}")
            try:
                return await engine.generate(request if told is None else told.attempt(request, engine.version))
            except PeerGone:
                if not self._alone:
                    raise
                if told is not None:
                    request = told.lost(request)
                await self._gone(engine)

    async def _engine_unless_cancelled(self, request: Request) -> SGLangEngine | None:
        """The next engine that serves; None when the request is cancelled before there is one."""
        self._raise_if_closed()
        self._waiting[request.id] = withdrawn = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(self._engine_when(self._serving))
        try:
            await asyncio.wait([serving, withdrawn], return_when=asyncio.FIRST_COMPLETED)
            return None if withdrawn.done() else serving.result()
        finally:
            serving.cancel()
            del self._waiting[request.id]

    def cancel(self, request_id: str) -> None:
        waiting = self._waiting.get(request_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)
        elif self._engine is not None:
            self._engine.cancel(request_id)

    async def update_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Also through the end of a server in the middle of it: then the next one gets them."""
        async with self._updating:
            while True:
                if not self._up.is_set():
                    self._raise_unless_alone()
                engine = await self._engine_when(self._up)
                try:
                    await engine.update_weights(version, tensors)
                except PeerGone:
                    if not self._alone:
                        raise
                    # It was seen gone here first: its process, or its address, tells `keep` so.
                    await self._gone(engine)
                    continue
                self._version = version
                if self._engine is engine:
                    self._serving.set()
                    return

    async def sleep(self) -> None:
        """Gives the server's memory back until the next weights or request, unless it has requests or is given weights."""
        if self._updating.locked():
            return
        async with self._updating:
            if self._engine is not None and self._serving.is_set():
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

    async def _gone(self, engine: SGLangEngine) -> None:
        """Until `keep` has seen it too; not for ever, since a connection can end without its server."""
        until = time.monotonic() + _NOTICED_S
        while self._engine is engine and time.monotonic() < until:
            self._raise_if_closed()
            await asyncio.sleep(0.05)

    async def _engine_when(self, event: asyncio.Event) -> SGLangEngine:
        while True:
            self._raise_if_closed()
            await wait_for(event.wait(), name="sglang server", peer=self.server.name, deadline_s=self.start_deadline_s)
            if self._engine is not None:
                return self._engine

    async def ready(self) -> bool:
        """Whether requests would be taken now; False from the end of a server until the next one is proved."""
        engine = self._engine
        return engine is not None and self._serving.is_set() and await engine.ready()

    async def load(self) -> Load:
        return await (await self._engine_when(self._serving)).load()

    async def proved_version(self) -> int | None:
        """What the server says that it serves; None for weights that it was not given here."""
        engine = await self._engine_when(self._serving)
        told = version_of((await engine.client.get("/model_info", deadline_s=_ASK_S))["weight_version"])
        return None if told == STRANGE else told

    def stats(self) -> EngineStats:
        """Counters go on through restarts."""
        if self._engine is None:
            return replace(EngineStats(self.version, *(0,) * 9), num_waiting=len(self._waiting), **self._before)
        now = self._engine.stats()
        return replace(now, version=self.version, **_sums(self._before, now))

    async def close(self) -> None:
        """Ends the engine and its server. Idempotent."""
        if self._closed is None:
            self._closed = Closed("the engine must be open, got a call after close. Start another engine")
        self._up.set()
        self._serving.set()  # who waits for a server wakes up, and learns it
        if self._waking is not None:
            self._waking.cancel()
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()
        await self.server.close()

    def _raise_unless_alone(self) -> None:
        self._raise_if_closed()
        if not self._alone:
            raise PeerGone(
                f"the SGLang server {self.server.name} must be there, got that it is started again. Ask another"
            )

    def _raise_if_closed(self) -> None:
        if self._closed is not None:
            raise self._closed


def _sums(before: Mapping[str, int], now: EngineStats) -> dict[str, int]:
    return {name: before[name] + getattr(now, name) for name in _ADDED}
