"""What the roles of one process share: the job's settings, the bus, and the policy weights they follow.

Owns opening them once a process, whichever role comes first. Owns no work. Imports no torch before weights are followed.

    job = await open_job(ctx)          # the same object for every role of this process
    async with follow(job, "actor_fwd", model.load) as follower: ...
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import orjson

from rondo.comm.bus.bus import POLL_S, Bus, Round
from rondo.comm.bus.member import Member
from rondo.models.config import ModelConfig
from rondo.roles.config import JobConfig
from rondo.roles.sampling.tools import with_tools
from rondo.roles.training.compute_turns import Turns
from rondo.roles.training.turn_order import TurnsFollowed, TurnsTold
from rondo.runtime.memory.segments import SegmentClient
from rondo.runtime.reference import relative_to
from rondo.runtime.section import with_references
from rondo.runtime.worker.context import WorkerContext

if TYPE_CHECKING:
    from rondo.comm.weights.slab import Ahead, WeightSlab
    from rondo.roles.engines.embedded.shared_weights import Lent

SLAB = "weights"
SCORING = ("actor_fwd", "reference", "teacher", "critic")
AHEAD_S = 2.0
"""A version that is being written, and of which nothing comes for so long, is waited for without reading ahead."""
Install = Callable[[int, Mapping[str, Any]], Awaitable[None]]
Turn = Callable[[Mapping[str, int]], AbstractAsyncContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Job:
    """The settings of the run, this process's bus, where the model's files are, and whose turn it is to compute."""

    config: JobConfig
    bus: Bus
    model_path: str
    device: str
    turns: Turns
    lent: asyncio.Future[Lent] | None = None
    """The trainer's tensors for the engine of this process, once the trainer has them; None where the engine has its own."""
    publishes: bool = True
    """Whether anybody reads published weights."""
    has_actor_fwd: bool = False
    """Whether a role of the run scores samples for pi_old."""
    takes_turns: bool = False
    """Whether this process generates and trains in turn: all samples of a step are of the version that it trains."""
    rests: bool = False
    """Whether its trainer gives its memory to what generates, in turn: it trains when a step has all its samples."""
    teacher_paths: Mapping[str, str] = field(default_factory=dict)
    """Teacher -> where its model's files are."""
    judge_paths: Mapping[str, str] = field(default_factory=dict)
    """"genrm", "scorer" -> where its model's files are, of those that the run serves."""
    scores_alone: bool = False
    """Whether the processes of this role group are the scorer's, and do nothing else."""


_opened: WeakKeyDictionary[SegmentClient, asyncio.Task[Job]] = WeakKeyDictionary()  # one client a process


async def open_job(ctx: WorkerContext) -> Job:
    """Settings and bus of this process; opened by the first role that asks, shared by all."""
    if ctx.segments not in _opened:
        _opened[ctx.segments] = asyncio.create_task(_open(ctx))
    return await _opened[ctx.segments]


async def _open(ctx: WorkerContext) -> Job:
    config, model_path, device = open_settings(ctx)
    config = await asyncio.to_thread(with_tools, config)
    member = Member(ctx.group, ctx.incarnation, ctx.rank, ctx.world_size, ctx.attempt)
    bus = Bus(member, ctx.coordinator, ctx.segments)
    await bus.open()
    roles = roles_of(ctx.run_dir)
    together = config.job == "rl" and {"actor", "rollout"} <= roles.get(ctx.role_group, set())
    lends = together and ctx.world_size == 1 and config.can_lend_weights  # of several ranks each has a shard
    takes_turns = together and config.max_staleness == 0
    has_actor_fwd = any("actor_fwd" in each for each in roles.values())
    others_read = (
        has_actor_fwd or config.teacher_follows or config.num_pinned > 0 or config.reference.refresh_every is not None
    )
    lent = asyncio.get_running_loop().create_future() if lends else None
    rests = takes_turns and config.trainer_rests(on_device=device != "cpu")
    scores = not roles.get(ctx.role_group, set()).isdisjoint(SCORING)
    order: TurnsTold | TurnsFollowed | None = None
    if scores and ctx.world_size > 1:
        store = await asyncio.to_thread(ctx.connect_store)
        order = TurnsFollowed(store, ctx.world_size - 1) if ctx.rank else TurnsTold(store)
    teachers = {} if config.distillation is None else config.distillation.named()
    return Job(
        config, bus, model_path, device, Turns(order), lent,
        publishes=others_read or not lends or config.adapts_engines, has_actor_fwd=has_actor_fwd, takes_turns=takes_turns,
        rests=rests, teacher_paths=_paths(ctx.run_dir, "teachers", {name: each.model for name, each in teachers.items()}),
        judge_paths=_paths(ctx.run_dir, "judges", {name: each.model for name, each in config.judges.items()}),
        scores_alone=roles.get(ctx.role_group) == {"scorer"},
    )  # fmt: skip


def _paths(run_dir: Path, kind: str, models: Mapping[str, ModelConfig | None]) -> dict[str, str]:
    """Where the files of these models are, which were prepared as the run's "teachers" or "judges"."""
    named = {name: model for name, model in models.items() if model is not None}
    paths = orjson.loads((run_dir / "prepared.json").read_bytes())[kind] if named else {}
    return {name: paths[name] if model.recipe is None else str(run_dir / paths[name]) for name, model in named.items()}


def roles_of(run_dir: Path) -> dict[str, set[str]]:
    """The roles of every role group, by its name."""
    resolved = orjson.loads((run_dir / "config.resolved.json").read_bytes())
    return {group["name"]: set(group["roles"]) for group in resolved["role_groups"]}


def open_settings(ctx: WorkerContext) -> tuple[JobConfig, str, str]:
    """(settings, folder of the model, device of this process), from the run directory."""
    resolved = orjson.loads((ctx.run_dir / "config.resolved.json").read_bytes())
    prepared = orjson.loads((ctx.run_dir / "prepared.json").read_bytes())
    first = prepared["first_devices"].get(ctx.group)
    device = "cpu" if first is None else f"cuda:{first + ctx.local_rank}"
    config = with_references(
        JobConfig.from_resolved(resolved), lambda _, reference: relative_to(ctx.run_dir, reference)
    )
    ctx.set_pace(config.supervision)
    # What was built lies in the run directory, wherever that is by now.
    path = prepared["model_path"]
    return config, path if config.model.recipe is None else str(ctx.run_dir / path), device


async def timed(ctx: WorkerContext, rounds: AsyncGenerator[Round, None]) -> AsyncGenerator[Round, None]:
    """The same rounds; how long the role waits for each of them, and for which prompt groups, is in the timeline."""
    async with aclosing(rounds):
        while True:
            with ctx.span("wait for a round") as waiting:
                made = await anext(rounds, None)
                if made is not None:
                    waiting.tell(step=made.step, groups=groups_of(made))
            if made is None:
                return
            yield made


def groups_of(made: Round) -> list[int]:
    """The prompt groups of this rank's part of a round."""
    return list(dict.fromkeys(row.group for row in made.rows))


def follow(
    ctx: WorkerContext,
    job: Job,
    role: str,
    install: Install,
    turn: Turn = nullcontext,
    every: int = 1,
    since: int = -1,
) -> AbstractAsyncContextManager[asyncio.Event]:
    """Install every newly published version while the body runs; the event is set once the first one is proved. `every`: of so
    many one, the first that comes from each multiple on. `since`: the version that is installed already, which sets the event.

    `install` gets views into the slab, verified by checksum, and must have copied them when it returns. It runs inside of `turn`,
    which is told where they lie: "slot", "attempt", "version" and "checksum".
    """
    return following(functools.partial(_follow, ctx, job, role, install, turn, every, since))


@asynccontextmanager
async def following(follower: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> AsyncIterator[asyncio.Event]:
    """The follower, which sets the event, beside the body: one that fails ends that with its error."""
    first = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(follower(first))
        try:
            yield first
        finally:
            task.cancel()


async def _follow(
    ctx: WorkerContext,
    job: Job,
    role: str,
    install: Install,
    turn: Turn,
    every: int,
    since: int,
    first: asyncio.Event,
) -> None:
    from rondo.comm.weights.slab import WeightSlab  # needs torch, which a role without weights does without

    version, told, reader = since, -1, f"{role}.{ctx.rank}"
    if since >= 0:
        first.set()
    slab: WeightSlab | None = None
    ahead: Ahead | None = None
    while True:
        before_next = (version // every + 1) * every - 1
        held = await job.bus.call("weights", reader, before_next, told, deadline_s=POLL_S)
        if "end" in held:
            return
        if slab is None:
            slab = WeightSlab(ctx.segments.segment(SLAB, 0), job.config.num_weight_slots)
        place = {"attempt": held["attempt"], "version": held["version"]}
        if "coming" in held:
            told = held["version"]
            ahead = await asyncio.to_thread(
                functools.partial(slab.read_ahead, held["coming"], **place, patience_s=AHEAD_S)
            )
            continue
        tensors = await asyncio.to_thread(
            functools.partial(slab.read, held["slot"], **place, checksum=held["checksum"], ahead=ahead)
        )
        version = held["version"]
        async with turn(held):
            with ctx.span("load weights", beside="weights", version=version):
                await install(version, tensors)
        del tensors
        await job.bus.call("proved", reader, version)
        first.set()
