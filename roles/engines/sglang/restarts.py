"""An engine that outlives its server: one that left, or is of no use, is started again, for ever.

Owns which server is behind the engine now. Does not own the server (`server.py`), the asking (`one_server.py`), or what becomes
of requests and weights meanwhile: a dispatcher in front asks another engine, or this one later, and gives weights to a server
that has none (`one_engine`).

    starting --> up --> gone, or silent --> a pause --> starting ...       without a version until update_weights has proved one

    engine = KeptEngine(server, connect, newest=newest_weights, deadline_s=600, silent_s=300, tell=report)
    async with kept([engine]):                      # raises where none starts; later ones are retried while the body runs
        await engine.update_weights(version, tensors)
        await engine.generate(request)

A server that runs may still be of no use (`silence.py`): it is ended then, with what it was asked and an update that it is given.

Invariant: what is asked while no server is there, or under a server that leaves, ends with PeerGone; no server's end is the end
of another one, or of whoever keeps them; and whose update failed is sent no other one before its scheduler has answered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rondo.roles.engines.dispatch.installing import Reload
from rondo.roles.engines.engine import Completion, EngineStats, Request
from rondo.roles.engines.faults import NotThere
from rondo.roles.engines.sglang.client import SGLangClient
from rondo.roles.engines.sglang.numbers import STRANGE, version_of
from rondo.roles.engines.sglang.one_server import Load, SGLangEngine
from rondo.roles.engines.sglang.server import Server, first_of
from rondo.roles.engines.sglang.silence import Silence
from rondo.runtime.errors import Closed, ConfigError, DeadlineExceeded, PeerGone, ProtocolError, RondoError
from rondo.runtime.processes.process import TICKS_PER_S, Stat
from rondo.runtime.waits import waiting

if TYPE_CHECKING:
    import torch

Connect = Callable[[SGLangClient], Awaitable[SGLangEngine]]
Tell = Callable[[str, Mapping[str, Any]], Awaitable[None]]

_ASK_S = 30.0
_FACE, _SCHEDULER = "/model_info", "/server_info"
"""Who speaks HTTP answers the first by itself; for the second it asks all of its schedulers."""
_WAITS = 0.01
"""Of a processor: what a server's processes use at most that all wait, with threads that look at clocks."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


@asynccontextmanager
async def kept(engines: Sequence[KeptEngine]) -> AsyncIterator[None]:
    """Starts their servers beside each other, keeps them there while the body runs, and ends them then. Raises what the first
    failed with where none starts, and ConfigError where one does not suit the settings."""
    try:
        async with asyncio.TaskGroup() as tasks:
            starting = [tasks.create_task(engine.begin(), name=f"start {engine.server.name}") for engine in engines]
        errors = [task.result() for task in starting]
        if None not in errors and errors[0] is not None:
            raise errors[0]
        async with asyncio.TaskGroup() as tasks:
            keeping = [tasks.create_task(engine.keep(), name=f"keep {engine.server.name}") for engine in engines]
            try:
                yield
            finally:
                for task in keeping:
                    task.cancel()
    finally:
        await asyncio.gather(*(engine.close() for engine in engines))


def pause_s(in_a_row: int) -> float:
    """Before a server is started again, after so many ends in a row without a request that it finished, this one included."""
    return 0.0 if in_a_row <= 1 else min(_FIRST_PAUSE_S * 2.0 ** min(in_a_row - 2, 16), _LONGEST_PAUSE_S)


class KeptEngine:
    """`Engine` over one server and its successors. `connect` makes the engine over an open client and owns what it needs.

    `newest` gives the newest weights while its body lasts, for a server that sleeps and is asked; `tell` is told of every server
    that comes or goes. `clock` and `sleep` are those of looks and pauses.
    """

    def __init__(
        self,
        server: Server,
        connect: Connect,
        *,
        newest: Reload,
        deadline_s: float,
        silent_s: float,
        tell: Tell,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.server = server
        self._connect = connect
        self._newest = newest
        self.start_deadline_s = deadline_s
        self._silent_s = silent_s
        self._tell = tell
        self._clock, self._sleep = clock, sleep
        self.engine: SGLangEngine | None = None
        """Over the server that is there now."""
        self._why = "it has not started yet"
        """While no server is there."""
        self._lost_at: float | None = None
        """When the last server left, until the next one has proved weights."""
        self._updating = asyncio.Lock()
        self._giving: asyncio.Task[object] | None = None
        self._failed: SGLangEngine | None = None
        """Its last update did."""
        self._before = EngineStats(STRANGE, *(0,) * 9)
        """What was counted over the servers that left."""
        self._waking: asyncio.Task[None] | None = None
        self._closed: Exception | None = None

    # ---- the server -------------------------------------------------------------------------------------------------

    async def begin(self) -> Exception | None:
        """The first server; what it failed with, where the next one may do better."""
        try:
            await self._start()
        except ConfigError:
            raise
        except (RondoError, OSError) as error:
            self._why = f"it did not start: {error}"
            return error
        return None

    async def _start(self) -> None:
        client = await self.server.start(self.start_deadline_s)
        try:
            engine = await self._connect(client)
        except (TypeError, LookupError, AttributeError) as error:  # what it says of itself is not what a server says
            await client.__aexit__()
            raise ProtocolError(
                f"the SGLang server {self.server.name} must tell what it is, got {type(error).__name__}: {error}"
            ) from error
        except BaseException:
            await client.__aexit__()
            raise
        engine.wake = self._wake
        self.engine = engine
        await self._tell("sglang", {"server": self.server.name, **asdict(engine.capabilities)})

    async def keep(self) -> None:
        """Replaces servers that leave or are of no use, with growing pauses, until the engine is closed."""
        in_a_row = 0
        while not self._is_closed():
            if self.engine is not None:
                self._why = await first_of([self.server.gone(), self._silent(self.engine)])
                if self._is_closed():  # it was ended here
                    return
                done_before = self._before.num_completed
                await self._lose()
                if self._before.num_completed > done_before:
                    in_a_row = 0
            in_a_row += 1
            pause = pause_s(in_a_row)
            told = {"server": self.server.name, "why": self._why, "in_a_row": in_a_row, "again_in_s": pause}
            await self._tell("sglang_gone", told)
            async with waiting("next sglang", peer=f"{self.server.name} ({self._why})", deadline_s=None):
                await self._sleep(pause)
            if self._is_closed():
                return
            try:
                await self._start()
            except (RondoError, OSError) as error:
                self._why = f"it did not start: {error}"

    async def _silent(self, engine: SGLangEngine) -> str:
        """Waits until the server is of no use, and says why."""
        silence, why = Silence(self._silent_s, self._clock()), ""
        while not why:
            await self._sleep(silence.pause_s)
            excused = self._is_excused(engine)
            workers = await asyncio.to_thread(self.server.workers)
            asked_at, before = self._clock(), engine.client.num_heard
            asked = [
                engine.client.get(path, deadline_s=silence.patience_s) for path in (_FACE, _SCHEDULER)[: 2 - excused]
            ]
            answered, *of_scheduler = await asyncio.gather(*map(_answers, asked))
            took_s, scheduled = self._clock() - asked_at, all(of_scheduler)
            computes = workers is None or (not scheduled and await self._computed(workers, took_s))
            stats = engine.stats()
            idle = scheduled and stats.num_running + stats.num_waiting == 0
            why = silence.looked(
                self._clock(), took_s=took_s, answered=answered, scheduled=scheduled, heard=engine.client.num_heard != before,
                made=stats.tokens_generated + stats.decode_steps, computes=computes,
                stopped=any(each.state == "T" for each in (workers or {}).values()),
                excused=excused or self._is_excused(engine) or idle,
            )  # fmt: skip
        return f"{why} after an update that failed" if self._has_failed(engine) else why

    def _is_excused(self, engine: SGLangEngine) -> bool:
        return (self._updating.locked() or engine.asleep) and not self._has_failed(engine)

    def _has_failed(self, engine: SGLangEngine) -> bool:
        """From an update's limit on, where it is cancelled: leaving it asks the server too, which may take minutes."""
        return self._failed is engine or (self._giving is not None and self._giving.cancelling() > 0)

    async def _computed(self, before: Mapping[int, Stat], seconds: float) -> bool:
        """Whether the server's processes have had more of a processor since then than who waits has."""
        after = await asyncio.to_thread(self.server.workers) or {}
        ticks = sum(
            max(0, each.cpu_ticks - (before[pid].cpu_ticks if pid in before else 0)) for pid, each in after.items()
        )
        return ticks > _WAITS * seconds * TICKS_PER_S

    async def _lose(self) -> None:
        """What is under way ends with PeerGone."""
        self._lost_at = self._clock()
        engine, self.engine = self.engine, None
        if engine is not None:
            self._before += engine.stats().ended()
            await engine.close(PeerGone(f"the SGLang server {self.server.name} must stay, got {self._why}. Ask again"))

    # ---- the engine -------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return STRANGE if self.engine is None else self.engine.version

    async def generate(self, request: Request) -> Completion:
        return await self._there().generate(request)

    def cancel(self, request_id: str) -> None:
        if self.engine is not None:
            self.engine.cancel(request_id)

    async def update_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        async with self._updating:
            engine = self._there()
            await self._give(engine, version, tensors)
            if self.engine is not engine:  # it left as soon as it had them: the next one has none
                raise self._absent()
            if self._lost_at is not None:
                after_s, self._lost_at = self._clock() - self._lost_at, None
                await self._tell("sglang_back", {"server": self.server.name, "after_s": after_s})

    async def _give(self, engine: SGLangEngine, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Holding `_updating`. A server that an update left stuck is sent no other: `_silent` ends it."""
        if self._failed is engine and not await _answers(engine.client.get(_SCHEDULER, deadline_s=self._silent_s)):
            raise NotThere(
                f"the scheduler of the SGLang server {self.server.name} must answer after an update that failed, got nothing. "
                "Ask another"
            )
        self._giving, self._failed = asyncio.current_task(), None
        try:
            await engine.update_weights(version, tensors)
        except BaseException:
            self._failed = engine
            raise
        finally:
            self._giving = None

    async def sleep(self) -> None:
        """Gives the server's memory back until the next weights or request, unless it has requests or is given weights."""
        if self._updating.locked():
            return
        async with self._updating:
            if self.engine is not None:
                with suppress(PeerGone):  # `keep` learns it next
                    await self.engine.sleep()

    async def _wake(self) -> None:
        """The newest weights once more, for all who ask while the server sleeps: those that it had are gone. Raises NotThere
        where that fails; it sleeps on, and who asks next tries again."""
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._give_newest(), name=f"wake {self.server.name}")
        waking = self._waking
        await asyncio.wait([waking])
        if waking.cancelled():
            raise self._closed or self._absent()
        if (error := waking.exception()) is not None:
            raise error

    async def _give_newest(self) -> None:
        async with self._updating:
            engine = self.engine
            if engine is None or not engine.asleep:
                return
            try:
                async with self._newest() as weights:
                    await self._give(engine, *weights)
            except Closed:
                raise
            except RondoError as error:
                raise NotThere(
                    f"the SGLang server {self.server.name} must wake with the newest weights, got {type(error).__name__}: {error}"
                ) from error

    async def ready(self) -> bool:
        """Whether requests would be taken now. Raises NotThere, with the reason, while no server is there."""
        return await self._there().ready()

    async def load(self) -> Load:
        return await self._there().load()

    async def proved_version(self) -> int | None:
        """What the server says that it serves; None for weights that it was not given here."""
        told = await self._there().client.get("/model_info", deadline_s=_ASK_S)
        version = version_of(told.get("weight_version")) if isinstance(told, dict) else STRANGE
        return None if version == STRANGE else version

    def progress(self) -> Mapping[str, int]:
        """Of none while no server is there."""
        return {} if self.engine is None else self.engine.progress()

    def stats(self) -> EngineStats:
        """Counters go on through restarts."""
        found = self._before if self.engine is None else self._before + self.engine.stats()
        return replace(found, version=self.version)

    async def close(self) -> None:
        """Ends the engine and its server. Idempotent."""
        if self._closed is None:
            self._closed = Closed("the engine must be open, got a call after close. Start another engine")
        if self._waking is not None:
            self._waking.cancel()
        engine, self.engine = self.engine, None
        if engine is not None:
            await engine.close()
        await self.server.close()

    def _is_closed(self) -> bool:
        return self._closed is not None

    def _there(self) -> SGLangEngine:
        if self._closed is not None:
            raise self._closed
        if self.engine is None:
            raise self._absent()
        return self.engine

    def _absent(self) -> NotThere:
        return NotThere(f"the SGLang server {self.server.name} must be there, got {self._why}. Ask another")


async def _answers(asking: Awaitable[object]) -> bool:
    """Whether it says anything at all, an error too."""
    try:
        await asking
    except (PeerGone, DeadlineExceeded):
        return False
    except RondoError:
        pass
    return True
