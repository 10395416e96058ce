"""The engines of one rollout process, and the weights that they get.

Owns which engine the settings ask for, opening and closing it, its flip to every new version, and the proof of that to the
coordinator. Does not own what is asked of an engine (`groups.py`, `evaluation.py`), nor how one gets on (`Engine`).

    replica = Replica(ctx, job); await replica.open(ends)
    async with replica.follow() as first: ...       # serves every new version; `first` is set once one is proved
    replica.engine                                  # of the run's samples
    replica.beside                                  # of evaluations beside the training; None before the first one is due
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rondo.comm.bus.bus import POLL_S
from rondo.comm.weights.slab import WeightSlab
from rondo.models.load import load_model, load_tokenizer, num_tokens
from rondo.models.lora import adapt
from rondo.roles.engines.adapters import prove_adapters
from rondo.roles.engines.dispatch.dispatcher import Dispatcher, MemberStats
from rondo.roles.engines.embedded.embedded import EmbeddedEngine, slot_engine
from rondo.roles.engines.embedded.shared_weights import Flip, Lent
from rondo.roles.engines.embedded.slots import SlotEngine
from rondo.roles.engines.embedded.time_share import Share
from rondo.roles.engines.engine import STALL_S, Engine
from rondo.roles.job import SLAB, Job, follow, following
from rondo.roles.training.determinism import settle
from rondo.roles.training.mismatch import Canary
from rondo.runtime.errors import Closed, ConfigError
from rondo.runtime.waits import waiting
from rondo.runtime.worker.context import WorkerContext

if TYPE_CHECKING:
    from rondo.roles.engines.sglang.attached import AttachedServers

ROLE = "rollout"
_LOOK_S = 0.05


class Replica:
    def __init__(self, ctx: WorkerContext, job: Job) -> None:
        self._ctx, self._job = ctx, job
        self._wake = asyncio.Event()  # the engine sleeps, and has requests
        self._installing = asyncio.Lock()
        self._lent: Lent | None = None  # the trainer's tensors, where the engine generates with them
        self._attached: AttachedServers | None = None
        self._adapts = False  # the engine was seen to compute with adapters
        self.beside: Engine | None = None

    async def open(self, ends: AsyncExitStack) -> None:
        """Until `close`; what `ends` with the process, a server, is ended with that."""
        self.engine = await self._open_engine(ends)
        evaluation = self._job.config.evaluation
        if self.evaluates and evaluation is not None and evaluation.every is not None:
            await self.open_beside()

    async def close(self) -> None:
        await self.engine.close()
        if self.beside is not None:
            await self.beside.close()

    async def _open_engine(self, ends: AsyncExitStack) -> Engine:
        if self._job.config.rollout.sglang is not None:
            return await self._open_servers(ends)
        evaluation = self._job.config.evaluation
        evaluates = evaluation is not None and (evaluation.at_start or evaluation.at_end)
        num_slots = self._job.config.rollout.num_slots
        lent = await self._job.lent if self._job.lent is not None else None
        self._lent = None if self._job.config.adapts_engines else lent
        slots = await self._ctx.compute(
            self._build,
            num_slots,
            evaluates=evaluates,
            lent=lent,
            sleeps=self._job.takes_turns,
            tells_experts=self._job.config.train.router_replay == "r3",
        )
        engine = EmbeddedEngine(slots, self._generation, wake=self._wake.set)
        if self._job.takes_turns:

            async def make_room() -> None:
                await self._idle()
                if not (engine.asleep or self._generates()):
                    with self._ctx.span("sleep", beside="memory"):
                        await self._ctx.compute(engine.sleep)

            self._job.turns.make_room = make_room
        return engine

    async def _open_servers(self, ends: AsyncExitStack) -> Engine:
        """SGLang servers, which load the model themselves; they are kept there, and ended with `ends`."""
        from rondo.roles.engines.sglang.attached import attachable
        from rondo.roles.engines.sglang.open import attached_engine, kept_engines, one_engine, releases_memory
        from rondo.roles.engines.sglang.restarts import kept

        settings = self._job.config.rollout.sglang
        assert settings is not None
        engines = kept_engines(self._ctx, self._job, newest=self.newest_weights)
        await ends.enter_async_context(kept(engines))
        if releases_memory(self._job):

            async def make_room() -> None:
                await self._idle()
                await asyncio.gather(*(engine.sleep() for engine in engines))

            self._job.turns.make_room = make_room
        engine = one_engine(engines, newest=self.newest_weights, update_deadline_s=settings.update_deadline_s)
        if settings.router is None and self._job.config.media is None:
            make = functools.partial(attached_engine, self._ctx, self._job, newest=self.newest_weights)
            record = self._ctx.rt_dir / f"{self._ctx.group}.{self._ctx.rank}.engines.json"
            self._attached = await ends.enter_async_context(attachable(engine, make, record, self._ctx.report))
        return engine

    @property
    def attached(self) -> AttachedServers:
        """Where servers are attached. ConfigError in a run that takes none."""
        if self._attached is None:
            raise ConfigError(
                "engines can be attached to a run that generates with servers, without a router and with text alone "
                "(rollout.sglang, rollout.sglang.router None, media None), got another one. Add replicas instead"
            )
        return self._attached

    @property
    def num_slots(self) -> int:
        """Sequences that all of its engines decode at once."""
        rollout = self._job.config.rollout
        attached = 0 if self._attached is None else len(self._attached.states())
        return rollout.num_slots_of_replica + rollout.num_slots * attached

    def engines(self) -> list[dict[str, Any]]:
        """Every engine of the run's samples, as JSON: its name, whether it was attached, its state, and what it does."""
        states = {} if self._attached is None else self._attached.states()
        if not isinstance(self.engine, Dispatcher):
            found = self.engine.stats()
            alone = MemberStats(
                f"{self._ctx.group}.{self._ctx.rank}", True, "", "closed", found.version,
                found.num_running + found.num_waiting, 0.0, found.num_completed, 0, True,
            )  # fmt: skip
            members: tuple[MemberStats, ...] = (alone,)
        else:
            members = self.engine.dispatch_stats().engines
        told = []
        for each in members:
            state = states.get(each.name, "active")
            state = "away" if state == "active" and not each.healthy else state
            told.append({**asdict(each), "attached": each.name in states, "state": state})
        coming = [
            {"name": name, "attached": True, "state": states[name]}
            for name in states.keys() - {m.name for m in members}
        ]
        return told + coming

    @asynccontextmanager
    async def newest_weights(self) -> AsyncIterator[tuple[int, Mapping[str, Any]]]:
        """What was published last, for a server that was started anew, while the body reads it. Closed when the run is over."""
        ctx, job, reader = self._ctx, self._job, f"{ROLE}.{self._ctx.rank}.restart"
        held = await job.bus.call("weights", reader, -1, deadline_s=POLL_S)
        if "slot" not in held:
            raise Closed("weights must be published to be given to a server, got none any more. The run is over")
        try:
            slab = WeightSlab(ctx.segments.segment(SLAB, 0), job.config.num_weight_slots)
            place = {"attempt": held["attempt"], "version": held["version"], "checksum": held["checksum"]}
            yield held["version"], await asyncio.to_thread(functools.partial(slab.read, held["slot"], **place))
        except Exception:  # where it is cancelled the process ends, and what it holds with it
            await job.bus.call("let_go", reader)
            raise
        await job.bus.call("let_go", reader)

    @property
    def evaluates(self) -> bool:
        """Whether evaluations beside the training are this process's, the first of the first replica: they come one after the
        other."""
        ctx, evaluation = self._ctx, self._job.config.evaluation
        return evaluation is not None and not ctx.rank and ctx.group == f"{ctx.role_group}-0"

    async def open_beside(self) -> Engine:
        """The engine of evaluations beside the training, with weights and a cache of its own."""
        evaluation = self._job.config.evaluation
        assert evaluation is not None
        if self.beside is None:
            with self._ctx.section("load", self._ctx.load_s):
                slots = await self._ctx.compute(self._build, evaluation.num_slots, evaluates=True)
            self.beside = EmbeddedEngine(slots, Share(self._generation, evaluation.share, self._generates).compute)
        return self.beside

    async def _generation(self, function: Callable[..., Any], *args: Any) -> Any:
        return await self._ctx.working("generate", function, *args)

    def _generates(self) -> bool:
        stats = self.engine.stats()
        return stats.num_running + stats.num_waiting > 0

    async def _idle(self) -> None:
        """Where the trainer needs the memory: until what the step could do without has ended too."""
        async with waiting("engine to end", peer="engine", deadline_s=STALL_S):
            # One that is asked to leave may never come to its end. Any engine has this count, and none an event of it.
            while self._job.rests and self._generates() and not self._ctx.stopping.is_set():  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_S)

    def _build(
        self,
        num_slots: int,
        *,
        evaluates: bool,
        lent: Lent | None = None,
        sleeps: bool = False,
        tells_experts: bool = False,
    ) -> SlotEngine:
        """On the compute thread. Long enough for the rollout's responses, and an evaluation's if it has some. Over a model of its
        own, or the trainer's tensors."""
        config, rollout, lora = self._job.config, self._job.config.rollout, self._job.config.train.lora
        settle(config)
        if lent is not None:
            model = lent.model
        else:
            path, dtype = self._job.model_path, config.model.dtype
            model = load_model(path, dtype=dtype, device=self._job.device, attn=config.model.attn)
            if lora is not None and config.adapts_engines:
                adapt(model, lora)
        sets = config.evaluation.named_sets().values() if evaluates and config.evaluation is not None else ()
        most = max(rollout.max_new_tokens, *(each.max_new_tokens or 0 for each in sets), 0)
        length = rollout.max_prompt_tokens + most
        return slot_engine(
            model,
            num_slots=num_slots,
            max_length=length,
            fixed_shapes=config.deterministic,
            num_tokens=num_tokens(load_tokenizer(self._job.model_path)),
            lent=None if config.adapts_engines else lent,
            shares=lent is not None,
            sleeps=sleeps,
            tells_experts=tells_experts,
        )

    def follow(self) -> AbstractAsyncContextManager[asyncio.Event]:
        """Serves every new version while the body runs; the event is set once the first one is proved."""
        if self._lent is None:
            return follow(self._ctx, self._job, ROLE, self._install)
        return following(functools.partial(self._flip, self._lent))

    async def _install(self, version: int, tensors: Mapping[str, Any]) -> None:
        async with self._installing:
            config, lora = self._job.config, self._job.config.train.lora
            proves = config.rollout.sglang is None  # a server is asked by itself, again whenever it is started anew
            if lora is not None and config.adapts_engines and proves and not self._adapts:
                canary, name = await asyncio.to_thread(Canary.read, self._ctx.run_dir), f"{ROLE}.{self._ctx.rank}"
                alike = config.computes_alike
                await prove_adapters(self.engine, version, tensors, canary, lora, name=name, alike=alike)
                self._adapts = True
            await self.engine.update_weights(version, tensors)

    async def waking(self) -> None:
        """Requests that come to an engine that sleeps, as when a group is given out again while its step is trained already,
        are generated under the weights that it had."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._lent is not None:
                async with self._installing:
                    version = self.engine.version
                    await self.engine.update_weights(version, Flip(version))
                continue
            with suppress(Closed):
                async with self._installing, self.newest_weights() as found:
                    if found[0] >= self.engine.version:
                        await self.engine.update_weights(*found)

    async def _flip(self, lent: Lent, first: asyncio.Event) -> None:
        """Each version is there when the trainer says so: its tensors are those that it committed."""
        version = -1
        while True:
            flip = await lent.newer_than(version)
            version = flip.version
            with self._ctx.span("load weights", beside="weights", version=version):
                await self._install(version, flip)
            await self._job.bus.call("proved", f"{ROLE}.{self._ctx.rank}", version)
            first.set()
